"""Bytes on the wire of the compiled step, read from the program of emulated devices.

XLA:CPU has no reduce-scatter in global view: it spells one as an all-reduce and a slice. What it
gathers, and how often, is the same as elsewhere.
"""

import functools

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

from axon_dist import Reduction, World, build_train_step, ddp, fsdp, zero
from axon_dist.inspect import collectives, expect_collectives
from axon_dist.models import MLP

SIZES = (64, 128, 64)
BYTES = 4 * (64 * 128 + 128 + 128 * 64 + 64)
BATCH = {
    "x": jax.ShapeDtypeStruct((64, 64), jnp.float32),
    "y": jax.ShapeDtypeStruct((64, 64), jnp.float32),
}
RING = 7 / 8


def loss_fn(model, batch):
    return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)


STRATEGIES = {
    "ddp": ddp(),
    "zero1": zero(1, min_elements=8),
    "zero2": zero(2, min_elements=8),
    "zero2 per step": zero(2, min_elements=8, reduction=Reduction(per="step")),
    "zero3": zero(3, min_elements=8),
    "zero3 per step": fsdp(axes=("dp",), min_elements=8, reduction=Reduction(per="step")),
}


@functools.cache
def ledger(name, accumulate=1, **options):
    world = World.emulate(8)
    step = build_train_step(
        lambda: MLP(SIZES, rngs=nnx.Rngs(0)),
        optax.adam(1e-2),
        loss_fn,
        STRATEGIES[name],
        world,
        accumulate=accumulate,
        **options,
    )
    return collectives(step.lower(BATCH).compile(), world.mesh)


def reduced(name, accumulate=1):
    found = ledger(name, accumulate)
    return found.total_wire_bytes("all-reduce") / 2 + found.total_wire_bytes("reduce-scatter")


def gathered(name, accumulate=1):
    return ledger(name, accumulate).total_wire_bytes("all-gather")


# What `zero3 per step` reduces for many microbatches is asserted below.
@pytest.mark.sample("zero1")
@pytest.mark.parametrize("name", ["ddp", "zero1", "zero2 per step", "zero3 per step"])
def test_accumulation_multiplies_no_gradient_traffic(name):
    """Reduced once, however many microbatches: (N-1)/N of the gradient in a reduce-scatter."""
    assert reduced(name, 8) == pytest.approx(RING * BYTES, rel=0.01)
    assert reduced(name, 1) == pytest.approx(RING * BYTES, rel=0.01)


@pytest.mark.parametrize("name", [pytest.param("zero2", marks=pytest.mark.full), "zero3"])
def test_reducing_every_microbatch_is_an_option_with_its_price(name):
    assert reduced(name, 4) == pytest.approx(4 * RING * BYTES, rel=0.01)


def test_held_back_reductions_are_true_reduce_scatters():
    """Where the reduction is spelled by hand, owners get their shard and nothing else moves."""
    for name in ("zero1", "zero3 per step"):
        found = ledger(name, 8)
        assert found.total_wire_bytes("reduce-scatter") == pytest.approx(RING * BYTES, rel=0.01)
        assert found.total_wire_bytes("all-reduce") < 100


@pytest.mark.parametrize(
    ("name", "accumulate", "passes"),
    [("ddp", 1, 0), ("zero1", 1, 1), ("zero1", 8, 1), ("zero2", 1, 1), ("zero3 per step", 8, 1)],
)
def test_parameters_are_gathered(name, accumulate, passes):
    assert gathered(name, accumulate) == pytest.approx(passes * RING * BYTES, rel=0.01)


def test_a_clipped_norm_costs_scalars():
    plain, clipped = (ledger("zero1", 1, **o) for o in ({}, {"clip_norm": 1.0}))
    assert clipped.total_wire_bytes() - plain.total_wire_bytes() < 200


def test_data_parallelism_reduces_and_does_nothing_else():
    world = World.emulate(8)
    step = build_train_step(
        lambda: MLP(SIZES, rngs=nnx.Rngs(0)), optax.sgd(0.1), loss_fn, ddp(), world
    )
    expect_collectives(step.lower(BATCH).compile(), world.mesh, all_reduce=range(1, 6), axis="dp")
