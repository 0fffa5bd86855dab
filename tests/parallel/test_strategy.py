"""Strategies are values: they validate, compose, and say who conflicts."""

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from axon_dist import DDP, CPUOffload, GradSyncStrategy, MixedPrecision
from axon_dist.core.errors import ConfigError, MeshError, StrategyConflictError, check_all
from axon_dist.mesh import MeshSpec, World
from axon_dist.nn import ActivationCheckpointing
from axon_dist.parallel import (
    STRATEGY_RULES,
    Reduction,
    Strategy,
    as_strategy,
    compose,
    context_parallel,
    ddp,
    fsdp,
    overlay,
    pipelined,
    zero,
)
from axon_dist.sharding import ByRule, LargestDim, Merge, Replicate


class Placed(NamedTuple):
    """The object that the rules check."""

    strategy: Strategy
    world: World


TP = Strategy("tp", params=ByRule(((r"w", P(None, "tp")),), "tp"))


def test_reductions_are_normalised_values():
    assert Reduction(sync="overlapped").sync is GradSyncStrategy.OVERLAPPED
    assert Reduction(dtype="bfloat16") == Reduction(dtype=jnp.bfloat16)


def test_overlapped_reductions_have_a_size():
    overlapped = Reduction(sync="overlapped")
    assert overlapped.capacity == ddp(sync="overlapped").reduction.bucket_capacity == 25_000_000
    assert Reduction(sync="overlapped", bucket_capacity=9).capacity == 9
    assert Reduction().capacity is None
    # The size is no setting that another part of a strategy could contradict.
    assert dataclasses.replace(overlapped, sync="synchronous") == Reduction()
    sized = compose(ddp("dp", bucket_capacity=9), Strategy("x", reduction=overlapped))
    assert sized.reduction == Reduction(sync="overlapped", bucket_capacity=9)


def test_a_reduction_of_a_step_synchronizes():
    with pytest.raises(StrategyConflictError, match=r"replicas would diverge.*accumulate=K"):
        Reduction(sync="no_sync")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"per": "batch"}, "reduction per 'batch' is unknown.*Valid: microbatch, step"),
        ({"sync": "overlaped"}, "Did you mean 'overlapped'"),
        ({"bucket_capacity": 0}, "bucket capacity is 0 elements; it must be at least 1"),
        ({"dtype": "int8"}, "reduce dtype is 'int8'; it must be a floating-point"),
    ],
)
def test_impossible_reductions(options, message):
    with pytest.raises(ConfigError, match=message):
        Reduction(**options)


@pytest.mark.parametrize(
    ("options", "microbatches", "local"),
    [
        ({}, 1, False),
        ({}, 4, True),
        ({"per": "microbatch"}, 4, False),
        ({"bucket_capacity": 10}, 1, True),
        ({"sync": "overlapped"}, 1, True),
        ({"dtype": "float32"}, 1, False),
        ({"dtype": "bfloat16"}, 1, True),
        ({"sync_buffers": False}, 1, True),
    ],
)
def test_settings_that_need_a_manual_region_get_one(options, microbatches, local):
    assert Reduction(**options).is_local(microbatches, jnp.dtype("float32")) is local


def test_compose_adds_axes_and_overlays_policies():
    both = compose(zero(3, ("fsdp",), min_elements=1), TP)
    assert both.name == "zero3 + tp"
    assert both.batch_axes == ("fsdp",)
    assert both.params("w", (8, 64), MeshSpec(fsdp=4, tp=2)) == P("fsdp", "tp")
    assert (both.reduction, both.reduces_per) == (Reduction(), "microbatch")
    assert compose(TP).params == TP.params


def test_composing_in_steps_is_composing_at_once():
    mesh = MeshSpec(fsdp=2, tp=2)
    first = Strategy("first", params=ByRule(((r"w", P("tp")),), "first"))
    at_once = compose(fsdp(min_elements=1), Strategy("other"), first)
    in_steps = compose(compose(fsdp(min_elements=1), TP), first)
    assert at_once.params("w", (4, 8), mesh) == P("tp", "fsdp")
    # `first` claims dim 0 and `TP` dim 1 of the same axis, whatever fsdp would like.
    with pytest.raises(StrategyConflictError):
        in_steps.params("w", (4, 8), mesh)
    assert in_steps.params == compose(fsdp(min_elements=1), TP, first).params
    assert compose(compose(fsdp(min_elements=1), Strategy("a")), first).params == at_once.params


def test_compose_keeps_that_weights_are_gathered_once():
    assert compose(Strategy("a", gathers_once=True), TP).gathers_once
    assert not compose(Strategy("a"), TP).gathers_once


def test_compose_takes_wrappers_and_keeps_what_one_part_says(world):

    wrapper = DDP(nnx.Linear(2, 2, rngs=nnx.Rngs(0)), world.group("dp"))
    remat, bf16 = ActivationCheckpointing(2), MixedPrecision.bf16()
    both = compose(wrapper, Strategy("x", remat=remat, precision=bf16))
    assert (both.remat, both.precision, both.offload) == (remat, bf16, CPUOffload.NONE)
    assert as_strategy(wrapper) == ddp()


def test_compose_of_nothing_and_of_conflicts():
    with pytest.raises(ConfigError, match=r"compose\(\) got no strategy; give it at least one"):
        compose()
    with pytest.raises(StrategyConflictError, match=r"axis 'dp' by 'ddp' and by 'zero1'; give"):
        compose(ddp(), zero(1))
    first, second = (Strategy(n, remat=ActivationCheckpointing(k)) for n, k in (("a", 1), ("b", 2)))
    with pytest.raises(StrategyConflictError, match=r"remat is .*=1.* in 'a' and .* in 'b'"):
        compose(first, second)
    assert compose(first, first).remat == ActivationCheckpointing(1)


def test_an_overlay_has_a_say_in_every_layout():
    rule = ByRule(((r"w", P("tp")),), "rule")
    made = overlay(zero(1, min_elements=1), rule)
    assert made.params == rule
    assert made.opt_state == Merge((rule, LargestDim(("dp",), 1, "zero1")))
    assert overlay(ddp(), Replicate()).params == Replicate()


def test_one_axis_may_be_given_as_a_string():
    assert ddp("data") == ddp(("data",))
    assert fsdp(axes="x") == fsdp(axes=("x",))
    assert zero(1, "x", shard_axes="x") == zero(1, ("x",))


def test_values_that_are_not_strategies_raise():
    with pytest.raises(ConfigError, match=r"got 'ddp' for a strategy; give one such as ddp\(\)"):
        compose("ddp", ddp())
    with pytest.raises(ConfigError, match=r"unknown ZeRO stage '1'; it must be a number from 0 to"):
        zero("1")


def test_a_conflict_names_only_what_differs():
    with pytest.raises(StrategyConflictError) as caught:
        compose(ddp(per="step"), fsdp(reduction=Reduction(per="microbatch")))
    assert "is per='step' in 'ddp' and per='microbatch' in 'fsdp'; set" in str(caught.value)
    with pytest.raises(StrategyConflictError) as caught:
        compose(pipelined(2, 4), pipelined(2, 8))
    assert "schedule='eager_1f1b' of 2 stages and 4 microbatches in 'pipeline'" in str(caught.value)


def test_axes_that_the_mesh_lacks(world):
    with pytest.raises(
        MeshError, match=r"'ddp' splits the batch over axis 'fsdp', which mesh dp=8 lacks.*dp"
    ):
        check_all(STRATEGY_RULES, Placed(ddp(("fsdp",)), world))


def test_stages_send_nothing_around_a_ring(make_world):
    world, stages = make_world("pp=2,cp=2"), pipelined(2, 4)
    whole = compose(stages, context_parallel("ulysses"))
    with pytest.raises(StrategyConflictError, match=r"ring of axis 'cp'.*parallel\('ulysses'\)"):
        check_all(STRATEGY_RULES, Placed(compose(stages, context_parallel()), world))
    check_all(STRATEGY_RULES, Placed(whole, world))


def test_stages_recompute_block_by_block(make_world):
    remat = Strategy("remat", remat=ActivationCheckpointing("sqrt"))
    both = compose(pipelined(2, 4), remat)
    with pytest.raises(StrategyConflictError, match=r"pipeline.*interval 'sqrt'; leave .* at 1"):
        check_all(STRATEGY_RULES, Placed(both, make_world("pp=2")))
