"""ZeRO as a table, and the bytes on the devices that the table promises."""

import functools

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import PartitionSpec as P

from axon_dist import ZeROOptimizer, build_train_step
from axon_dist.core.errors import ConfigError, GroupError, StrategyConflictError
from axon_dist.inspect import bytes_per_device, carried_bytes
from axon_dist.parallel import ZERO, Reduction, ZeROStage, estimate, fsdp, zero
from axon_dist.sharding import LargestDim, Replicate

from . import tower


def test_the_stages_are_rows_of_one_table():
    rows = {int(stage): (row.params, row.grads, row.opt_state) for stage, row in ZERO.items()}
    assert rows == {
        0: (False, False, False),
        1: (False, False, True),
        2: (False, True, True),
        3: (True, True, True),
    }
    for stage, row in ZERO.items():
        made = zero(stage, min_elements=5)
        split = LargestDim(("dp",), 5, f"zero{int(stage)}")
        pairs = ((made.params, row.params), (made.opt_state, row.opt_state))
        assert all(policy == (split if is_split else Replicate()) for policy, is_split in pairs)
        assert made.batch_axes == ("dp",)
        assert made.holds_whole_gradients(2) is not row.grads
        assert made.holds_whole_gradients(1) is not row.opt_state


def test_split_gradients_are_reduced_every_microbatch_by_default():
    does = [zero(stage).reduces_per for stage in range(4)]
    assert does == ["step", "step", "microbatch", "microbatch"]
    for stage in range(4):
        assert zero(stage, reduction=Reduction(per="step")).reduces_per == "step"


def test_impossible_stages_and_axes():
    with pytest.raises(ConfigError, match=r"unknown ZeRO stage 4; it must be .* from 0 to 3"):
        zero(4)
    with pytest.raises(ConfigError, match=r"must be one or more of the batch axes \('dp',\)"):
        zero(1, ("dp",), shard_axes=("tp",))
    with pytest.raises(ConfigError, match="got no axes; name at least one"):
        zero(1, ("dp",), shard_axes=())


def test_buckets_of_split_gradients_are_refused(world):
    strategy = zero(1, reduction=Reduction(bucket_capacity=100))
    with pytest.raises(StrategyConflictError, match=r"'zero1' .*bucket_capacity=100.*use ddp"):
        build_train_step(tower.make(), optax.sgd(0.1), tower.loss_fn, strategy, world)


def test_overlapped_reductions_of_split_gradients_are_refused(world):
    build = functools.partial(build_train_step, tower.make(), optax.sgd(0.1), tower.loss_fn)
    overlapped = fsdp("dp", reduction=Reduction(sync="overlapped"))
    with pytest.raises(StrategyConflictError, match=r"leave sync=OVERLAPPED out, or") as raised:
        build(overlapped, world)
    assert raised.value.code == "buckets-and-shards"
    sized = fsdp("dp", reduction=Reduction(sync="overlapped", bucket_capacity=9))
    with pytest.raises(StrategyConflictError, match=r"leave bucket_capacity=9 with sync=OVERLAPP"):
        build(sized, world)
    build(fsdp("dp", reduction=Reduction()), world)


def test_the_optimizer_wrapper_is_the_transformation_and_a_strategy(world):
    adam = optax.adam(1e-2)
    wrapped = ZeROOptimizer(adam, stage=ZeROStage.STAGE2, group=world.group("dp"), min_elements=7)
    assert wrapped.strategy == zero(2, ("dp",), min_elements=7)
    params = {"w": jnp.arange(3.0)}
    state = wrapped.init(params)
    updates, _ = wrapped.update({"w": jnp.ones(3)}, state, params)
    expected, _ = adam.update({"w": jnp.ones(3)}, adam.init(params), params)
    assert (updates["w"] == expected["w"]).all()
    with pytest.raises(GroupError, match=r"ZeROOptimizer got the .*world\.group"):
        ZeROOptimizer(adam, stage=1, group=world.new_group([0, 1]))


def built(strategy, world):
    """A step on the tower and its first state."""
    step = build_train_step(tower.make()(), optax.adam(1e-2), tower.loss_fn, strategy, world)
    return step, step.init()


def share(tree) -> float:
    """The share of a tree on the fullest device, without counts and other scalars."""
    leaves = [leaf for leaf in jax.tree.leaves(tree) if leaf.ndim]
    return bytes_per_device(leaves) / sum(leaf.nbytes for leaf in leaves)


@pytest.mark.sample("3")
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_measured_shares_of_eight_devices(world, stage):
    step, state = built(zero(stage, min_elements=8), world)
    grads, _ = step.gradients(state, tower.batch())
    row = ZERO[ZeROStage(stage)]
    expected = lambda is_split: pytest.approx(1 / 8 if is_split else 1.0, rel=0.02)
    assert share(state.params) == expected(row.params)
    assert share(grads) == expected(row.opt_state)
    assert share(state.opt_state) == expected(row.opt_state)
    table = state.params["table"]["embedding"].addressable_shards[0].data
    assert table.size == (64 * 32 // 8 if row.params else 64 * 32)


@pytest.mark.full
@pytest.mark.sample("2")
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_gradients_held_between_microbatches_are_as_estimated(world, stage):
    strategy, sgd = zero(stage, min_elements=8), optax.sgd(0.1)
    # The last microbatch may be outside of the loop, and one iteration needs no loop.
    step = build_train_step(tower.make(), sgd, tower.loss_fn, strategy, world, accumulate=4)
    held = carried_bytes(step.lower(tower.batch(samples=32)).compile())
    expected = estimate(strategy, step.model_spec.params, world.mesh, sgd, accumulate=4)
    assert held == pytest.approx(expected.grad_memory_bytes, rel=0.03)


def test_small_leaves_stay_whole_and_are_reported(world):
    step, state = built(zero(3), world)
    whole = {row.path for row in step.claims.params.replicated}
    assert "norm/scale" in whole
    assert "table/embedding" not in whole
    assert state.params["norm"]["scale"].sharding.spec == P()
    small = sum(row.bytes for row in step.claims.params.replicated)
    total = step.claims.params.bytes
    assert bytes_per_device(state.params) == small + (total - small) // 8


@pytest.mark.full
def test_hybrid_splits_within_the_last_axis(make_world):
    world = make_world("dp=2,fsdp=4")
    strategy = fsdp("hybrid_shard", ("dp", "fsdp"), min_elements=8)
    step, state = built(strategy, world)
    grads, _ = step.gradients(state, tower.batch())
    for tree in (state.params, grads, state.opt_state):
        assert share(tree) == pytest.approx(1 / 4, rel=0.02)


@pytest.mark.full
def test_moments_stay_split_and_parameters_whole_from_step_to_step(world):
    step, state = built(zero(1, min_elements=8), world)
    for number in range(2):
        state, _ = step(state, tower.batch(number))
    assert share(state.opt_state) == pytest.approx(1 / 8, rel=0.02)
    assert share(state.params) == 1.0
