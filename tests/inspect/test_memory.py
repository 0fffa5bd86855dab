import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from axon_dist.core.errors import UnsupportedError
from axon_dist.inspect import bytes_per_device, device_bytes, leaf_bytes, leaf_table, memory


@pytest.fixture(scope="module")
def mesh():
    return jax.make_mesh((8,), ("fsdp",), axis_types=(AxisType.Auto,))


def put(mesh, shape, *spec, kind=None):
    sharding = NamedSharding(mesh, P(*spec), memory_kind=kind)
    return jax.device_put(jnp.zeros(shape), sharding)


def test_a_compiled_step_is_measured_per_device(mesh):
    x = put(mesh, (800, 10), "fsdp")
    step = jax.jit(lambda x: x + 1, donate_argnums=0, out_shardings=x.sharding)
    report = memory(step.lower(x).compile())
    assert (report.arguments, report.outputs, report.aliased) == (4000, 4000, 4000)
    assert report.peak == 4000 + report.temporaries


def test_the_peak_counts_temporaries_on_cpu_too():
    def body(x):
        return jax.lax.sort(x * 2)[::-1] @ jax.lax.sort(x)

    compiled = jax.jit(body).lower(jnp.ones(100_000)).compile()
    report = memory(compiled)
    assert report.temporaries >= 400_000
    assert report.peak >= report.arguments + report.temporaries


def test_a_backend_that_does_not_tell_is_an_error():
    class Silent:
        def memory_analysis(self):
            return None

    with pytest.raises(UnsupportedError, match=r"no memory_analysis.*compile for a target"):
        memory(Silent())


def test_shards_are_measured_on_every_device(mesh):
    tree = {"w": put(mesh, (16, 4), "fsdp"), "b": put(mesh, (4,))}
    measured = device_bytes(tree)
    assert set(measured) == set(jax.devices()[:8])
    assert set(measured.values()) == {16 * 4 * 4 // 8 + 16}
    assert bytes_per_device(tree) == 48


def test_an_array_on_one_device_makes_that_device_the_largest(mesh):
    tree = [put(mesh, (16, 4), "fsdp"), jax.device_put(jnp.zeros(100), jax.devices()[3])]
    assert bytes_per_device(tree) == 32 + 400
    assert device_bytes(tree)[jax.devices()[3]] == 432


def test_abstract_trees_are_computed(mesh):
    tree = {"w": put(mesh, (16, 4), "fsdp"), "b": put(mesh, (4,))}
    abstract = jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding), tree
    )
    assert bytes_per_device(abstract) == bytes_per_device(tree)


def test_host_memory_is_counted_separately(mesh):
    tree = {"w": put(mesh, (16, 4), "fsdp", kind="pinned_host"), "b": put(mesh, (8,), "fsdp")}
    assert bytes_per_device(tree) == 4
    assert bytes_per_device(tree, where="host") == 32
    assert [(row.path, row.where) for row in leaf_bytes(tree)] == [("b", "device"), ("w", "host")]


def test_leaves_are_listed(mesh):
    rows = leaf_bytes({"layer": {"kernel": put(mesh, (4, 16), None, "fsdp"), "bias": jnp.ones(3)}})
    bias, kernel = rows
    assert (kernel.path, kernel.shape, kernel.bytes, kernel.shard_bytes) == (
        "layer/kernel",
        (4, 16),
        256,
        32,
    )
    assert "fsdp" in kernel.spec
    assert bias.spec == "SingleDeviceSharding"
    assert leaf_table({"w": put(mesh, (8,), "fsdp")}).row_count == 1
