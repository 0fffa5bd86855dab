"""Column and row layers, and their feed-forward: both views against the dense product."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from axon_dist.core.errors import ConfigError, DivisibilityError, GroupError
from axon_dist.inspect import collectives
from axon_dist.nn import ColumnParallelLinear, ParallelMLP, RowParallelLinear, constrain
from axon_dist.parallel import ByPlan, plan_of
from axon_dist.sharding import specs

ALL_REDUCES = ("psum", "psum2", "psum_invariant", "all_reduce")


def dense(layer, x):
    """The layer as one product in NumPy."""
    y = np.asarray(x) @ np.asarray(layer.kernel[...])
    return y if layer.bias is None else y + np.asarray(layer.bias[...])


def per_rank(layer, group, out_specs):
    """Runs the layer inside `shard_map`: every rank has its own shards and the whole input."""
    graphdef, state = nnx.split(layer)
    layouts = specs(ByPlan(plan_of(layer), group.axes[0]), nnx.to_pure_dict(state), group.mesh)

    def call(arrays, x):
        return nnx.merge(graphdef, arrays)(x)

    mapped = jax.shard_map(call, mesh=group.mesh, in_specs=(layouts, P()), out_specs=out_specs)
    return lambda x: jax.jit(mapped)(nnx.to_pure_dict(nnx.state(layer)), x)


def test_each_rank_computes_its_columns(make_world):
    group = make_world("tp=2").group("tp")
    layer = ColumnParallelLinear(2, 4, use_bias=False, group=group, rngs=nnx.Rngs(0))
    kernel = np.array([[1, 2, 3, 4], [5, 6, 7, 8]], np.float32)
    layer.kernel[...] = jax.device_put(kernel, layer.kernel[...].sharding)
    x = np.ones((1, 2), np.float32)
    by_rank = per_rank(layer, group, P("tp"))(x)
    np.testing.assert_array_equal(by_rank, [[6, 8], [10, 12]])
    layer.gather_output = True
    gathered = per_rank(layer, group, P("tp"))(x)
    np.testing.assert_array_equal(gathered, [[6, 8, 10, 12]] * 2)
    np.testing.assert_array_equal(jax.jit(layer)(x), [[6, 8, 10, 12]])


@pytest.mark.sample("4")
@pytest.mark.parametrize("size", [1, 2, 4])
def test_weights_do_not_depend_on_the_number_of_ranks(make_world, size):
    group = make_world(f"tp={size}").group("tp")
    for kind in (ColumnParallelLinear, RowParallelLinear):
        layer = kind(8, 12, group=group, rngs=nnx.Rngs(3))
        plain = nnx.Linear(8, 12, rngs=nnx.Rngs(3))
        np.testing.assert_array_equal(layer.kernel[...], plain.kernel[...])


def test_each_rank_holds_its_share(world, make_world):
    group = make_world("tp=8").group("tp")
    layer = nnx.eval_shape(lambda: ColumnParallelLinear(4096, 16384, group=group, rngs=nnx.Rngs(0)))
    layouts = ByPlan(plan_of(layer), "tp")
    share = lambda name, shape: jax.sharding.NamedSharding(
        group.mesh, layouts(name, shape, group.mesh)
    ).shard_shape(shape)
    assert share("kernel", layer.kernel.shape) == (4096, 2048)
    assert share("bias", layer.bias.shape) == (2048,)
    small = ColumnParallelLinear(64, 128, group=group, rngs=nnx.Rngs(0))
    assert small.kernel[...].addressable_shards[0].data.shape == (64, 16)


@pytest.mark.sample("()-1", "(2, 3, 5)-4")
@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("lead", [(2,), (), (2, 3, 5)], ids=str)
def test_both_views_equal_the_dense_product(make_world, size, lead):
    group = make_world(f"tp={size}").group("tp")
    x = np.random.default_rng(0).normal(size=(*lead, 8)).astype(np.float32)
    column = ColumnParallelLinear(8, 4, gather_output=True, group=group, rngs=nnx.Rngs(0))
    row = RowParallelLinear(8, 4, input_is_parallel=False, group=group, rngs=nnx.Rngs(0))
    for layer in (column, row):
        layer.bias[...] = layer.bias[...] + jnp.arange(4.0)
        want = dense(layer, x)
        np.testing.assert_allclose(jax.jit(layer)(x), want, rtol=1e-5, atol=1e-6)
        stacked = per_rank(layer, group, P("tp"))(x.reshape(1, -1, 8))
        for rank in np.split(np.asarray(stacked), size):
            np.testing.assert_allclose(rank[0], want.reshape(-1, 4), rtol=1e-5, atol=1e-6)


def test_row_keeps_its_output_on_every_rank_and_adds_the_bias_once(make_world):
    group = make_world("tp=4").group("tp")
    layer = RowParallelLinear(8, 4, group=group, rngs=nnx.Rngs(0))
    layer.bias[...] = layer.bias[...] + 1.0
    y = jax.jit(layer)(jnp.zeros((2, 8)))
    np.testing.assert_array_equal(y, np.ones((2, 4)))
    assert {shard.data.shape for shard in y.addressable_shards} == {(2, 4)}


@pytest.mark.sample("2-True-(8, 12, 8)")
@pytest.mark.parametrize("sizes", [(4, 8, 3), (8, 12, 8)], ids=str)
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("size", [2, 4])
def test_mlp_and_its_gradients_equal_one_device(make_world, sizes, gated, size):
    group = make_world(f"tp={size}").group("tp")
    make = lambda group: ParallelMLP(*sizes, gated=gated, group=group, rngs=nnx.Rngs(1))
    x = np.random.default_rng(1).normal(size=(2, sizes[0])).astype(np.float32)

    def gradients(group):
        graphdef, params = nnx.split(make(group), nnx.Param)
        loss = lambda params, x: jnp.sum(jnp.sin(nnx.merge(graphdef, params)(x)))
        value, (grads, of_x) = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(params, x)
        return value, jax.tree.leaves((grads, of_x))

    value, grads = gradients(group)
    want_value, want = gradients(None)
    assert float(value) == pytest.approx(float(want_value), rel=1e-5)
    for got, expected in zip(grads, want, strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)


def test_mlp_has_one_sum_per_direction(make_world):
    world = make_world("tp=4")
    layer = ParallelMLP(16, 32, group=world.group("tp"), rngs=nnx.Rngs(0))
    graphdef, params = nnx.split(layer)
    x = constrain(jnp.ones((2, 16)), world.mesh, P())
    forward = jax.jit(lambda p, x: nnx.merge(graphdef, p)(x))
    ledger = collectives(forward.lower(params, x).compile(), world.mesh)
    assert [(row.kind, row.axis) for row in ledger] == [("all-reduce", "tp")]
    loss = lambda p, x: jnp.sum(nnx.merge(graphdef, p)(x) ** 2)
    backward = jax.jit(jax.grad(loss, argnums=(0, 1)))
    ledger = collectives(backward.lower(params, x).compile(), world.mesh)
    assert [row.kind for row in ledger] == ["all-reduce"] * 2


def test_one_sum_per_row_layer_inside_shard_map(make_world):
    group = make_world("tp=4").group("tp")
    layer = ParallelMLP(16, 32, group=group, rngs=nnx.Rngs(0))
    jaxpr = str(jax.make_jaxpr(per_rank(layer, group, P()))(jnp.ones((2, 16))))
    assert sum(jaxpr.count(f" {name}[") for name in ALL_REDUCES) == 1


def test_without_a_group_the_layers_are_plain():
    assert ColumnParallelLinear(8, 4, rngs=nnx.Rngs(0))(jnp.ones((2, 8))).shape == (2, 4)
    assert RowParallelLinear(8, 4, rngs=nnx.Rngs(0))(jnp.ones((2, 8))).shape == (2, 4)


def test_errors_name_sizes_and_remedies(make_world):
    world = make_world("dp=2,tp=4")
    with pytest.raises(DivisibilityError, match=r"out_features=10 .* tp=4; .*\[1, 2, 5, 10\]"):
        ColumnParallelLinear(8, 10, group=world.group("tp"), rngs=nnx.Rngs(0))
    with pytest.raises(DivisibilityError, match=r"in_features=10 .* tp=4; .*multiple of 4"):
        RowParallelLinear(10, 8, group=world.group("tp"), rngs=nnx.Rngs(0))
    with pytest.raises(GroupError, match=r"needs a group by one mesh axis, such as world.group"):
        ColumnParallelLinear(8, 8, group=world.group("dp", "tp"), rngs=nnx.Rngs(0))


@pytest.mark.parametrize("kind", [ColumnParallelLinear, RowParallelLinear])
def test_a_weight_beyond_all_addresses_is_refused_where_xla_would_abort(kind):
    with pytest.raises(
        ConfigError, match=r"\(1000000000, 1000000000\) in float32 has 4.0e\+18 byt"
    ):
        kind(10**9, 10**9, rngs=nnx.Rngs(0))
