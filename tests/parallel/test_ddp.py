"""DDP: what the wrapper accepts, the papers' numbers, and the bytes on the wire."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from axon_dist import DDP, GradSyncStrategy, Weighted, build_train_step
from axon_dist.core.errors import ConfigError, GroupError, StrategyConflictError
from axon_dist.inspect import collectives, expect_bytes
from axon_dist.models import MLP
from axon_dist.parallel import ddp


def test_options_reach_the_reduction():
    reduction = ddp(sync="overlapped", bucket_capacity=7, reduce_dtype="bfloat16").reduction
    assert reduction.sync is GradSyncStrategy.OVERLAPPED
    assert (reduction.bucket_capacity, reduction.dtype) == (7, jnp.bfloat16)
    assert ddp(sync=GradSyncStrategy.OVERLAPPED).reduction.bucket_capacity == 25_000_000
    assert ddp().reduction.bucket_capacity is None


@pytest.mark.parametrize("sync", ["no_sync", GradSyncStrategy.NO_SYNC])
def test_no_sync_is_not_for_a_step(world, sync):
    with pytest.raises(StrategyConflictError, match=r"replicas would diverge.*accumulate=K"):
        ddp(sync=sync)
    wrapper = DDP(nnx.Linear(2, 2, rngs=nnx.Rngs(0)), world.group("dp"), sync=sync)
    with pytest.raises(StrategyConflictError, match=r"NO_SYNC"):
        _ = wrapper.strategy
    grads = jnp.arange(8.0)
    assert wrapper.sync_gradients(grads) is grads


def test_unknown_sync_names_the_nearest():
    with pytest.raises(ConfigError, match=r"Did you mean 'overlapped'"):
        ddp(sync="overlaped")


def test_a_group_by_ranks_is_refused(world):
    with pytest.raises(GroupError, match=r"DDP got the .*needs a group by mesh axes.*world\.group"):
        DDP(nnx.Linear(2, 2, rngs=nnx.Rngs(0)), world.new_group([0, 1]))


def test_a_wrapper_calls_trains_and_evaluates_its_module(world):
    model = nnx.Sequential(nnx.Linear(2, 3, rngs=nnx.Rngs(0)), nnx.Dropout(0.5, rngs=nnx.Rngs(1)))
    wrapped = DDP(model, world.group("dp"))
    x = jnp.ones((4, 2))
    assert wrapped.eval().is_training is False
    np.testing.assert_array_equal(wrapped(x), model.layers[0](x))
    np.testing.assert_array_equal(wrapped.forward(x), wrapped(x))
    assert wrapped.train().is_training
    assert model.layers[1].deterministic is False
    assert wrapped.parameters()["layers"][0]["kernel"].shape == (2, 3)


def test_parameters_become_those_of_rank_zero(make_world):
    world = make_world("dp=2")
    wrapped = DDP(MLP((3, 4, 2), rngs=nnx.Rngs(0)), world.group("dp"))
    ranks = [nnx.state(MLP((3, 4, 2), rngs=nnx.Rngs(seed)), nnx.Param) for seed in (0, 1)]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *map(nnx.to_pure_dict, ranks))
    synced = wrapped.sync_parameters(stacked)
    for leaf, own in zip(jax.tree.leaves(synced), jax.tree.leaves(stacked), strict=True):
        np.testing.assert_array_equal(leaf, np.stack([own[0], own[0]]))
    placed = jax.tree.leaves(wrapped.sync_parameters())
    assert all(leaf.sharding.is_fully_replicated and len(leaf.devices()) == 2 for leaf in placed)


def test_gradients_are_averaged(make_world):
    world = make_world("dp=4")
    wrapped = DDP(nnx.Linear(1, 1, rngs=nnx.Rngs(0)), world.group("dp"))
    np.testing.assert_allclose(wrapped.sync_gradients(jnp.arange(1.0, 5.0)), [2.5] * 4)


class Scalar(nnx.Module):
    """y = w x with w = 1."""

    def __init__(self):
        self.w = nnx.Param(jnp.ones(()))

    def __call__(self, x):
        return self.w * x


def test_one_weight_two_ranks(make_world):
    """Ranks with [1, 2] and [3, 4]: gradients 5 and 25, their mean 15, w = 0.85."""
    loss = lambda model, batch: jnp.mean(model(batch["x"]) ** 2)
    world = make_world("dp=2")
    step = build_train_step(Scalar(), optax.sgd(0.01), loss, ddp(), world)
    batch = {"x": np.array([1.0, 2.0, 3.0, 4.0], np.float32)}
    grads, _ = step.gradients(step.init(), batch)
    state, _ = step(step.init(), batch)
    assert float(grads["w"]) == pytest.approx(15.0)
    assert float(state.params["w"]) == pytest.approx(0.85)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_uneven_ranks_are_weighted_by_their_samples(make_world, accumulate):
    """[1, 2, 3] and [4] with two rows of padding: 15, not the mean of means 20.667."""

    def loss(model, batch):
        return Weighted(jnp.sum(batch["real"] * model(batch["x"]) ** 2), jnp.sum(batch["real"]))

    world = make_world("dp=2")
    strategy = ddp(bucket_capacity=10)
    step = build_train_step(Scalar(), optax.sgd(0.01), loss, strategy, world, accumulate=accumulate)
    batch = {"x": [1, 2, 3, 0, 4, 9, 9, 9], "real": [1, 1, 1, 0, 1, 0, 0, 0]}
    batch = {name: np.array(values, np.float32) for name, values in batch.items()}
    grads, metrics = step.gradients(step.init(), batch)
    assert float(grads["w"]) == pytest.approx(15.0)
    assert float(metrics["loss"]) == pytest.approx(7.5)


def square_error(model, batch):
    return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)


SIZES = (16, 64, 32)
GRADIENT_BYTES = 4 * (16 * 64 + 64 + 64 * 32 + 32)
BATCH = {
    "x": jax.ShapeDtypeStruct((64, 16), jnp.float32),
    "y": jax.ShapeDtypeStruct((64, 32), jnp.float32),
}


def compiled(world, accumulate, **options):
    step = build_train_step(
        lambda: MLP(SIZES, rngs=nnx.Rngs(0)),
        optax.sgd(0.1),
        square_error,
        ddp(**options),
        world,
        accumulate=accumulate,
    )
    return step.lower(BATCH).compile()


@pytest.mark.sample("8-1", "4-2")
@pytest.mark.parametrize(
    ("num_ranks", "accumulate"), [(8, 1), (8, 2), (8, 4), (8, 8), (4, 2), (2, 1)]
)
def test_wire_bytes_do_not_depend_on_accumulation(make_world, num_ranks, accumulate):
    world = make_world(f"dp={num_ranks}")
    wire = 2 * (num_ranks - 1) / num_ranks * GRADIENT_BYTES
    program = compiled(world, accumulate)
    expect_bytes(program, world.mesh, bytes=wire, tolerance=0.01)
    assert collectives(program, world.mesh).by_kind().keys() == {"all-reduce"}


@pytest.mark.sample("500-buckets0-4", "2100-buckets1-1")
@pytest.mark.parametrize("accumulate", [1, 4])
@pytest.mark.parametrize(
    ("capacity", "buckets"), [(500, [2048, 1024, 64, 32]), (2100, [2080, 1088]), (10_000, [3168])]
)
def test_capacity_sets_the_number_of_reductions(world, capacity, buckets, accumulate):
    program = compiled(world, accumulate, bucket_capacity=capacity)
    expect_bytes(program, world.mesh, bytes=2 * 7 / 8 * GRADIENT_BYTES, tolerance=0.01)
    rows = collectives(program, world.mesh).rows
    elements = sorted((row.wire_bytes / (4 * 2 * 7 / 8) for row in rows), reverse=True)
    # The scalar loss and its weight travel with one of them or on their own.
    found = [size for size in elements if size > 4]
    assert found == pytest.approx(sorted(buckets, reverse=True), abs=4)


def test_per_microbatch_moves_every_microbatch(world):
    """Reducing each microbatch is an option, and costs K times the bytes."""
    program = compiled(world, 4, per="microbatch", bucket_capacity=10_000)
    wire = 4 * 2 * 7 / 8 * GRADIENT_BYTES
    expect_bytes(program, world.mesh, bytes=wire, tolerance=0.01)


def test_the_reduce_dtype_is_that_of_the_wire(world):
    text = compiled(world, 1, reduce_dtype="float16").as_text()
    reductions = [line for line in text.splitlines() if " all-reduce(" in line]
    assert any("f16[" in line for line in reductions)


def test_a_function_that_makes_the_module_is_taken_as_fsdp_takes_it(world):
    wrapped = DDP(lambda: nnx.Linear(2, 3, rngs=nnx.Rngs(0)), world.group("dp"))
    assert wrapped.strategy.name == "ddp"
    assert wrapped.parameters()["kernel"].shape == (2, 3)
    with pytest.raises(ConfigError, match=r"sync_parameters.* needs a module, and got a function"):
        wrapped.sync_parameters()


def test_a_wrapped_factory_may_have_its_rngs_bound(world):
    make = functools.partial(nnx.Linear, 2, 3, rngs=nnx.Rngs(0))
    assert DDP(make, world.group("dp")).parameters()["kernel"].shape == (2, 3)
