"""In what order a program calls blocks, and where they lie for it."""

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from axon_dist.pipeline import Calls, Stages, StageStorage
from axon_dist.pipeline.switch import levels_of, stages_by_calls
from axon_dist.schedule import build_schedule, partition

from .chains import unit

BLOCKS = tuple(("blocks", number) for number in range(4))


@unit
def call(weight, x):
    return x * weight


def calls_of(function, num_blocks: int = 4) -> tuple[Calls, jax.extend.core.Jaxpr]:
    """The calls of a function (weights, x) -> number."""
    weights = [jnp.float32(1)] * num_blocks
    jaxpr = jax.make_jaxpr(function)(weights, jnp.float32(1)).jaxpr
    found = [i for i, equation in enumerate(jaxpr.eqns) if equation.params.get("jaxpr")]
    block_of = {variable: number for number, variable in enumerate(jaxpr.invars[:num_blocks])}
    return Calls.of(jaxpr, found, block_of), jaxpr


def through(weights, x, order):
    for number in order:
        x = call(weights[number], x) + 1
    return x


@given(st.lists(st.integers(0, 3), min_size=1, max_size=9))
def test_a_chain_is_as_deep_as_it_is_long(order):
    calls, _ = calls_of(lambda weights, x: through(weights, x, order))
    assert [set(owners) for owners in calls.owners] == [{number} for number in order]
    assert calls.depths == tuple(range(len(order)))
    assert calls.fits(range(4)) == (order == sorted(order))


@given(st.lists(st.integers(0, 3), max_size=4), st.lists(st.integers(0, 3), max_size=4))
def test_two_towers_are_as_deep_as_the_deeper(one, other):
    run = lambda weights, x: through(weights, x, one) + through(weights, 2 * x, other)
    calls, _ = calls_of(run)
    assert sorted(calls.depths) == sorted([*range(len(one)), *range(len(other))])
    assert calls.fits(range(4)) == (one == sorted(one) and other == sorted(other))


def test_a_value_is_made_in_the_first_stage_that_can():
    calls, jaxpr = calls_of(lambda weights, x: through(weights, x, [0, 1, 2, 3]))
    assert calls.late([0, 0, 1, 1]) is None
    assert calls.late([0, 1, 0, 1]) == (2, 1)
    positions = [i for i, equation in enumerate(jaxpr.eqns) if equation.params.get("jaxpr")]
    levels = levels_of(jaxpr, dict(zip(positions, [0, 0, 1, 1], strict=True)))
    assert list(levels.values()) == [0, 0, 0, 0, 1, 1, 1, 1]


ROUNDS = {
    "there and back": [0, 1, 2, 3, 3, 2, 1, 0],
    "two rounds": [0, 1, 2, 3, 0, 1, 2, 3],
}


@pytest.mark.parametrize(
    ("order", "schedule", "own", "shared"),
    [
        ("there and back", "zero_bubble_v", (0, 1, 2, 3), ()),
        ("there and back", "interleaved_1f1b", (), (0, 1, 2, 3)),
        ("two rounds", "interleaved_1f1b", (0, 1, 2, 3), ()),
        ("two rounds", "zero_bubble_v", (), (0, 1, 2, 3)),
    ],
)
def test_a_block_lies_on_the_rank_that_calls_it(order, schedule, own, shared):
    calls, _ = calls_of(lambda weights, x: through(weights, x, ROUNDS[order]))
    table = build_schedule(schedule, 2, 4)
    stages = stages_by_calls(table, BLOCKS, calls, partition(8, 4))
    assert stages.blocks == tuple(BLOCKS[number] for number in own)
    assert stages.shared == tuple(BLOCKS[number] for number in shared)
    # Each block lies with the first stage that calls it.
    assert stages.boundaries == ((0, 2, 4, 4, 4) if own else (0, 0, 0, 0, 0))
    assert [stages.stage_at(depth) for depth in range(8)] == [0, 0, 1, 1, 2, 2, 3, 3]


@pytest.mark.parametrize("shared", [(), BLOCKS[:1], BLOCKS, (("blocks", 1, "bias"),)])
def test_replicated_values_are_stored_once(shared):
    kept = tuple(block for block in BLOCKS if block not in shared)
    boundaries = (0, len(kept) // 2, len(kept))
    stages = Stages(kept, boundaries, (0, 1), 2, shared=shared)
    leaf = lambda number: {"bias": jnp.full(2, number), "kernel": jnp.full((2, 2), number)}
    params = {"blocks": {number: leaf(number) for number in range(4)}, "norm": jnp.ones(2)}
    storage = StageStorage(stages, jax.eval_shape(lambda: params))
    stored = storage.from_model(params)
    for keys in shared:
        found, want = stored, params
        for key in keys:
            found, want = found[key], want[key]
        assert jax.tree.all(jax.tree.map(jnp.array_equal, found, want))
    back = storage.to_model(stored)
    assert jax.tree.all(jax.tree.map(jnp.array_equal, back, params))
