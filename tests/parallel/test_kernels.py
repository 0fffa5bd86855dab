"""A kernel that the compiler cannot split sees the samples and heads of its rank alone."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec

from axon_dist import World
from axon_dist.core.errors import UnsupportedError
from axon_dist.mesh import abstract_world
from axon_dist.nn import Layout
from axon_dist.parallel.kernels import map_kernels

WORLD = World.emulate(8, "dp=2,tp=4")


class Attention(nnx.Module):
    """Attention in one of the forms, which notes the shapes that it sees."""

    def __init__(self, form):
        self.form, self.seen, self.forms = form, nnx.static([]), nnx.static([])

    def attend(self, query, key, value):
        """Mixes positions within each sample and head."""
        self.seen.append((query.shape, key.shape))
        self.forms.append(self.form)
        repeated = (jnp.repeat(x, query.shape[2] // x.shape[2], axis=2) for x in (key, value))
        key, value = repeated
        scores = jax.nn.softmax(jnp.einsum("bthk,bshk->bhts", query, key))
        return jnp.einsum("bhts,bshk->bthk", scores, value)


def arrays(kv_heads):
    draw = lambda heads: np.random.default_rng(heads).normal(size=(4, 3, heads, 2))
    return tuple(draw(heads).astype(np.float32) for heads in (8, kv_heads, kv_heads))


@functools.cache
def expected(kv_heads):
    """The result without a mesh, whatever the form."""
    return jax.jit(Attention("").attend)(*arrays(kv_heads))


def run(form, kv_heads, inside=(), heads=("tp",)):
    """Compares the result on the mesh with that without one; returns the shapes seen."""
    module = Attention(form)
    map_kernels(module, Layout(WORLD.mesh, ("dp",), heads=heads))
    function = lambda *qkv: module.attend(*qkv)
    if inside:
        spec = PartitionSpec(inside)
        function = jax.shard_map(
            function, mesh=WORLD.mesh, axis_names=frozenset(inside), in_specs=spec, out_specs=spec,
            check_vma=False,
        )  # fmt: skip
    with jax.set_mesh(WORLD.mesh):
        got = jax.jit(function)(*arrays(kv_heads))
    np.testing.assert_allclose(got, expected(kv_heads), rtol=1e-5, atol=1e-6)
    return module.seen[-1]


@pytest.mark.sample(
    "flash-2-inside1-query1-key1",
    "flash-4-inside2-query2-key2",
    "auto-4-inside3-query3-key3",
    "auto-4-inside4-query4-key4",
    "einsum-4-inside6-query6-key6",
)
@pytest.mark.parametrize(
    ("form", "kv_heads", "inside", "query", "key"),
    [
        ("flash", 4, (), (2, 3, 2, 2), (2, 3, 1, 2)),
        # Two heads of keys do not divide over four ranks: heads stay whole.
        ("flash", 2, (), (2, 3, 8, 2), (2, 3, 2, 2)),
        ("flash", 4, ("dp",), (2, 3, 2, 2), (2, 3, 1, 2)),
        # A fused kernel splits itself, but for a region where an axis is manual already.
        ("auto", 4, (), (4, 3, 8, 2), (4, 3, 4, 2)),
        ("auto", 4, ("dp",), (2, 3, 2, 2), (2, 3, 1, 2)),
        ("einsum", 4, (), (4, 3, 8, 2), (4, 3, 4, 2)),
        ("einsum", 4, ("dp",), (2, 3, 8, 2), (2, 3, 4, 2)),
    ],
)
def test_what_a_kernel_sees(form, kv_heads, inside, query, key):
    assert run(form, kv_heads, inside) == (query, key)


def test_heads_are_split_over_the_axes_of_the_layout_alone():
    """They are those of tensor parallelism, which need not be `tp`; an idle axis splits nothing."""
    assert run("flash", 4, heads=()) == ((2, 3, 8, 2), (2, 3, 4, 2))
    world = World.emulate(4, "ep=4")
    module = Attention("flash")
    map_kernels(module, Layout(world.mesh, heads=("ep",)))
    with jax.set_mesh(world.mesh):
        jax.jit(lambda *qkv: module.attend(*qkv))(*arrays(4))
    assert module.seen[-1] == ((4, 3, 2, 2), (4, 3, 1, 2))


def test_cudnn_is_refused_for_devices_that_are_no_gpus():
    with pytest.raises(UnsupportedError, match="'cudnn' on devices of platform 'cpu'"):
        map_kernels(Attention("cudnn"), Layout(WORLD.mesh, ("dp",)))


@pytest.mark.parametrize(
    ("capability", "form"), [("8.0", "einsum"), ("9.0", "auto"), ("gfx942", "auto")]
)
def test_large_heads_are_fused_where_the_chip_of_the_mesh_can(capability, form):
    """The mesh is asked, whatever this process runs on."""
    world = abstract_world("dp=1", 1, "gpu", capability)
    module = Attention("auto")
    map_kernels(module, Layout(world.mesh, ("dp",)))
    heads = jax.ShapeDtypeStruct((2, 8, 2, 256), jnp.bfloat16)
    jax.eval_shape(module.attend, heads, heads, heads)
    assert (module.form, module.forms) == ("auto", [form])


class Packed(nnx.Module):
    """Attention in which a position sees its own segment, as one kernel."""

    form = "flash"

    def attend(self, query, key, value, segments=None):
        """Mixes positions of one segment."""
        scores = jnp.einsum("bthk,bshk->bhts", query, key)
        if segments is not None:
            same = segments[:, None, :, None] == segments[:, None, None, :]
            scores = jnp.where(same, scores, -1e9)
        return jnp.einsum("bhts,bshk->bthk", jax.nn.softmax(scores), value)


def test_segments_are_those_of_the_samples_of_a_rank():
    module, plain, qkv = Packed(), Packed(), arrays(8)
    map_kernels(module, Layout(WORLD.mesh, ("dp",)))
    segments = jnp.array([[1, 1, 2], [1, 2, 2], [1, 1, 1], [1, 2, 3]])
    with jax.set_mesh(WORLD.mesh):
        got = jax.jit(lambda *x: module.attend(*x[:3], segments=x[3]))(*qkv, segments)
    want = jax.jit(plain.attend)(*qkv, segments)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
