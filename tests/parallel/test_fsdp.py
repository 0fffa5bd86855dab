"""FSDP: PyTorch's words over the ZeRO table, and wrappers that lose no update."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from axon_dist import FSDP, CPUOffload, MixedPrecision, ShardingStrategy, build_train_step, fsdp
from axon_dist.core.errors import AxonDistWarning, ConfigError, GroupError
from axon_dist.nn import ActivationCheckpointing
from axon_dist.parallel import TransformerAutoWrapPolicy, zero
from axon_dist.sharding import Replicate
from tests.drawn import drawn

from . import tower


def test_full_shard_is_the_default_and_every_name_a_stage(world):
    model = FSDP(nnx.Linear(10, 5, rngs=nnx.Rngs(0)), world.group("dp"))
    assert model.sharding_strategy is ShardingStrategy.FULL_SHARD
    kept = FSDP(model.module, world.group("dp"), ShardingStrategy.SHARD_GRAD_OP)
    assert kept.sharding_strategy is ShardingStrategy.SHARD_GRAD_OP
    layout = lambda s: (s.params.split_axes, s.reduces_per, s.opt_state.split_axes)
    stages = {"no_shard": 0, "shard_grad_op": 2, "full_shard": 3}
    for name, stage in stages.items():
        assert layout(fsdp(name, ("dp",))) == layout(zero(stage, ("dp",)))
    assert fsdp("no_shard").params == Replicate()
    assert layout(fsdp("hybrid_shard", ("dp", "fsdp"))) == (("fsdp",), "microbatch", ("fsdp",))


def test_axes_come_first_and_the_old_order_gives_the_same_strategy():
    hybrid = fsdp(("dp", "fsdp"), "hybrid_shard")
    assert hybrid == fsdp("hybrid_shard", ("dp", "fsdp"))
    assert hybrid == fsdp(sharding_strategy="hybrid_shard", axes=("dp", "fsdp"))
    assert fsdp("dp") == fsdp("full_shard", "dp") == fsdp(axes=("dp",))
    assert fsdp("shard_grad_op", axes=("dp",)) == zero(2, "dp")
    assert fsdp(axes="dp", cpu_offload="full") == zero(3, "dp", cpu_offload="full", name="fsdp")


def test_options_reach_the_strategy():
    made = fsdp(
        cpu_offload="full",
        mixed_precision="bf16",
        activation_checkpointing=ActivationCheckpointing(2),
        auto_wrap_policy=TransformerAutoWrapPolicy("Block"),
    )
    assert made.offload is CPUOffload.FULL
    assert made.precision == MixedPrecision.bf16()
    assert made.remat == ActivationCheckpointing(2)
    assert made.wrap == TransformerAutoWrapPolicy("Block")
    assert fsdp(mixed_precision=True).precision.reduce_dtype == jnp.float32


def test_refusals(world):
    with pytest.raises(
        ConfigError,
        match=r"ShardingStrategy got 'full', and has no such member\. Did you mean 'full_shard'",
    ):
        fsdp(sharding_strategy="full")
    with pytest.raises(ConfigError, match=r"hybrid_shard got the axes \('fsdp',\); it needs one"):
        fsdp("hybrid_shard", "fsdp")
    with pytest.raises(GroupError, match=r"FSDP got the .*world\.group"):
        FSDP(nnx.Linear(2, 2, rngs=nnx.Rngs(0)), world.new_group([0, 1]))


def test_a_wrapper_calls_trains_and_evaluates_its_module(world):
    module = nnx.Sequential(nnx.Linear(4, 2, rngs=nnx.Rngs(0)), nnx.Dropout(0.5, rngs=nnx.Rngs(1)))
    model = FSDP(module, world.group("dp"))
    assert model.eval().is_training is False
    np.testing.assert_array_equal(model(jnp.ones((1, 4))), module.layers[0](jnp.ones((1, 4))))
    assert model.train().is_training
    assert module.layers[1].deterministic is False


def test_a_function_that_makes_the_module_is_enough_for_shapes(world):
    made = FSDP(tower.make(), world.group("dp"))
    real = FSDP(drawn(tower.make()), world.group("dp"))
    assert made.memory_estimate() == real.memory_estimate()
    with pytest.raises(ConfigError, match=r"a forward pass needs a module.*TrainStep\.merge"):
        made(jnp.ones((1, 4), jnp.int32))


@pytest.mark.parametrize("name", ["no_shard", "shard_grad_op", "full_shard"])
def test_gather_and_reshard_are_exact_inverses(world, name):
    model = FSDP(tower.make()(), world.group("dp"), name, min_elements=8)
    params = model.parameters()
    shards = model.reshard_parameters(params)
    whole = model.gather_parameters(shards)
    again = model.reshard_parameters(whole)
    for a, b, c, d in zip(*map(jax.tree.leaves, (params, shards, whole, again)), strict=True):
        np.testing.assert_array_equal(a, c)
        np.testing.assert_array_equal(b, d)
        assert b.sharding == d.sharding
        assert c.sharding.is_fully_replicated


@pytest.mark.full
def test_an_update_survives_gathering_and_resharding(world):
    """Steps, with a round trip between them, end where plain data parallelism ends."""
    model = FSDP(tower.make(), world.group("dp"), min_elements=8)
    step = build_train_step(model.module, optax.sgd(0.1), tower.loss_fn, model, world)
    state, one_device = step.init(), tower.make()()
    graphdef, params, rest = nnx.split(one_device, nnx.Param, ...)
    for number in range(2):
        state, _ = step(state, tower.batch(number))
        back = model.reshard_parameters(model.gather_parameters(state.params))
        state = type(state)(state.step, back, state.opt_state, state.buffers)
        loss = lambda p, n=number: tower.loss_fn(nnx.merge(graphdef, p, rest), tower.batch(n))
        params = jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss)(params))
    expected = jax.tree.leaves(nnx.to_pure_dict(params))
    for got, want in zip(jax.tree.leaves(state.params), expected, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["no_shard", "full_shard"])
def test_clipping_counts_every_element_once(make_world, name):
    """[3, 4] has norm 5 whether two ranks share it or four hold copies of it."""
    world = make_world("dp=2" if name == "full_shard" else "dp=4")
    model = FSDP(nnx.Linear(2, 2, rngs=nnx.Rngs(0)), world.group("dp"), name, min_elements=1)
    grads = model.reshard_parameters({"w": jnp.array([3.0, 4.0])})
    clipped, norm = model.clip_grad_norm(grads, 1.0)
    assert float(norm) == pytest.approx(5.0)
    np.testing.assert_allclose(clipped["w"], [0.5999999, 0.7999998], atol=1e-6)
    assert clipped["w"].sharding == grads["w"].sharding
    kept, norm = model.clip_grad_norm(grads, 10.0)
    assert float(norm) == pytest.approx(5.0)
    np.testing.assert_array_equal(kept["w"], [3.0, 4.0])
    padded, norm = model.clip_grad_norm({"w": jnp.array([3.0, 4.0, 0.0, 0.0])}, 1.0)
    assert float(norm) == pytest.approx(5.0)
    np.testing.assert_allclose(padded["w"], [0.6, 0.8, 0, 0], atol=1e-6)


def test_rank_stacked_gradients_are_clipped_by_the_norm_of_each_rank(make_world):
    world = make_world("dp=4")
    model = FSDP(nnx.Linear(2, 1, use_bias=False, rngs=nnx.Rngs(0)), world.group("dp"))
    clipped, norm = model.clip_grad_norm(
        model.sync_gradients({"kernel": jnp.array([[[3.0], [4.0]]] * 4)}), 1.0
    )
    np.testing.assert_allclose(norm, [5.0] * 4)
    np.testing.assert_allclose(clipped["kernel"][:, :, 0], [[0.6, 0.8]] * 4, rtol=1e-6)
    own = {"kernel": jnp.arange(8.0).reshape(4, 2, 1)}
    np.testing.assert_allclose(
        model.clip_grad_norm(own, 1.0)[1], np.linalg.norm(own["kernel"][..., 0], axis=1), rtol=1e-6
    )


def test_the_norm_of_a_part_of_the_gradients_is_refused(make_world):
    world = make_world("dp=4")
    model = FSDP(nnx.Linear(2, 2, rngs=nnx.Rngs(0)), world.group("dp"))
    clip = world.group("dp").spmd(lambda g: model.clip_grad_norm({"w": g}, 1.0)[1])
    with pytest.raises(GroupError, match=r"inside a shard_map over \('dp',\).*clip_by_global_norm"):
        clip(jnp.ones((4, 1)))


def test_a_dim_that_does_not_divide_is_not_split_and_said_so(make_world):
    """The arrays keep the module's shapes; a step stores them padded."""
    world = make_world("fsdp=4")
    layer = nnx.Linear(101, 99, use_bias=False, rngs=nnx.Rngs(0))
    model = FSDP(layer, world.group("fsdp"))
    with pytest.warns(AxonDistWarning, match=r"kernel \(101, 99\).*of the 4 ranks than fsdp"):
        kernel = model.reshard_parameters(model.parameters())["kernel"]
    assert kernel.shape == (101, 99)
    loss_fn = lambda model, batch: jnp.mean(model(batch["x"]) ** 2)
    stored = build_train_step(layer, optax.sgd(0.1), loss_fn, model, world).init().params
    again = model.reshard_parameters(model.gather_parameters(stored))["kernel"]
    assert again.addressable_shards[0].data.shape == (101, 25)
    np.testing.assert_array_equal(again[:, :99], kernel)


def test_without_parameters_nothing_is_saved_and_nothing_measured(make_world):
    model = FSDP(nnx.Dropout(0.5), make_world("dp=4").group("dp"))
    assert model.memory_estimate().memory_savings == 0.0
    with pytest.raises(ConfigError, match=r"no arrays to measure.*take the estimate"):
        model.memory_stats({}, {}, {})


def test_gradients_are_averaged_over_both_axes_of_hybrid_sharding(make_world):
    world = make_world("dp=2,fsdp=4")
    model = FSDP(nnx.Linear(1, 1, rngs=nnx.Rngs(0)), world.group("dp", "fsdp"), "hybrid_shard")
    np.testing.assert_allclose(model.sync_gradients(jnp.arange(1.0, 9.0)), [4.5] * 8)


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_estimates_of_a_layer_of_5050_parameters(make_world, num_ranks):
    """The kernel is split, the bias of 50 lies whole: 4 bytes a parameter, 4 times with Adam."""
    world = make_world(f"dp={num_ranks}")
    model = FSDP(nnx.Linear(100, 50, rngs=nnx.Rngs(0)), world.group("dp"))
    rows = model.compare_strategies()
    assert [row.strategy for row in rows] == ["no_shard", "zero2", "fsdp"]
    whole, part = 16 * 5050, 16 * (5000 // num_ranks + 50)
    # Of shard_grad_op the parameters are whole; gradients and both moments are split.
    assert [row.total_memory_bytes for row in rows] == [whole, whole // 4 + part * 3 // 4, part]
    assert {row.total_params for row in rows} == {5050}
    assert [row.memory_savings for row in rows] == pytest.approx(
        [1 - row.total_memory_bytes / whole for row in rows]
    )
    assert model.memory_estimate() == rows[2]


@pytest.mark.parametrize("shape", ["dp=4", "dp=2,fsdp=4"])
def test_the_estimate_is_what_the_arrays_take(make_world, shape):
    world = make_world(shape)
    rngs = nnx.Rngs(0)
    layers = nnx.Sequential(nnx.Linear(100, 64, rngs=rngs), nnx.Linear(64, 50, rngs=rngs))
    model = FSDP(layers, world.group(*world.mesh.axis_names))
    arrays = model.reshard_parameters(model.parameters())
    moments = jax.tree.map(jnp.zeros_like, (arrays, arrays))
    assert model.memory_stats(arrays, arrays, moments).total_memory_bytes == (
        model.memory_estimate(optax.adam(1e-3), accumulate=1).total_memory_bytes
    )


def test_one_rank_saves_nothing(make_world):
    model = FSDP(nnx.Linear(100, 50, rngs=nnx.Rngs(0)), make_world("dp=1").group("dp"))
    assert model.memory_estimate().memory_savings == 0.0
    kernel = model.reshard_parameters(model.parameters())["kernel"]
    assert kernel.addressable_shards[0].data.shape == (100, 50)


@pytest.mark.full
def test_rank_stacked_gradients_in_a_state_are_clipped_by_the_norm_of_each_rank(make_world):
    """`nnx.grad` returns an `nnx.State`, whose tree is not that of a dict."""
    world = make_world("dp=4")
    layer = drawn(lambda: nnx.Sequential(nnx.Linear(2, 1, rngs=nnx.Rngs(0))))
    model = FSDP(layer, world.group("dp"))
    one = nnx.jit(nnx.grad(lambda layer: jnp.sum(layer(jnp.ones((1, 2))) ** 2)))(layer)
    assert isinstance(one, nnx.State)
    # Every rank has other gradients, which are not averaged here.
    stack = lambda x: jnp.asarray(np.stack([np.asarray(x) * rank for rank in range(1, 5)]))
    stacked = jax.tree.map(stack, one)
    clipped, norms = model.clip_grad_norm(stacked, 1e-3)
    norm = np.sqrt(sum(np.sum(np.asarray(x) ** 2) for x in jax.tree.leaves(one)))
    np.testing.assert_allclose(norms, norm * np.arange(1.0, 5.0), rtol=1e-5)
    assert jax.tree.structure(clipped) == jax.tree.structure(one)
    own = jax.jit(jax.vmap(optax.tree.norm))(clipped)
    np.testing.assert_allclose(own, [1e-3] * 4, rtol=1e-4)
    assert model.clip_grad_norm(model.sync_gradients(stacked), 1.0)[1].shape == (4,)
    assert model.clip_grad_norm(one, 1.0)[1].shape == ()


def test_a_function_model_is_traced_once_for_clipping(make_world):
    calls = []

    def make():
        calls.append(1)
        return nnx.Linear(2, 1, use_bias=False, rngs=nnx.Rngs(0))

    model = FSDP(make, make_world("dp=4").group("dp"))
    model.clip_grad_norm({"kernel": jnp.ones((4, 2, 1))}, 1.0)
    traced = len(calls)
    assert model.clip_grad_norm({"kernel": jnp.ones((4, 2, 1))}, 1.0)[1].shape == (4,)
    assert len(calls) == traced
