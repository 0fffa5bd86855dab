"""Stages of equal blocks: found where the loss is such a chain, and equal to it."""

import jax
import jax.numpy as jnp
import pytest

from axon_dist.pipeline import UniformStages

from .chains import (
    BLOCKS,
    PLACED,
    WIDTH,
    assert_loss,
    buffers_of,
    chain_loss,
    layer,
    microbatch,
    params_of,
    run_stages,
    stored,
    traced,
    unit,
)

mixing = unit(lambda block, x, number, scale: (number, layer(block, x * scale) + number))


def mixed_loss(params, buffers, batch):
    """Blocks with an operand that all share and one of each block's own; one result unread."""
    x = batch["x"] @ params["embed"]
    scale = jnp.tanh(params["norm"])
    for number in range(len(BLOCKS)):
        own = jnp.sin(params["unused"][0] * (number + 1) * buffers["still"])
        _, x = mixing(params["blocks"][number], x, own, scale)
    return jnp.sum(x**2), jnp.sum(batch["weight"]), {"mean": jnp.mean(x)}, buffers


def carrying(block, x, flag, key):
    """Three values go from block to block: floats, a count, and a key."""
    key, own = jax.random.split(key)
    noise = jax.random.normal(own, x.shape)
    return layer(block, x) + 0.1 * noise, flag + jnp.sum(x > 0), key


def carried_loss(params, buffers, batch):
    x, count, key = batch["x"] @ params["embed"], jnp.sum(batch["weight"] > 2), jax.random.key(5)
    for number in range(len(BLOCKS)):
        x, count, key = carry(params["blocks"][number], x, count, key)
    return jnp.sum(x**2) + count, jnp.sum(batch["weight"]), {"count": 1.0 * count}, buffers


carry = unit(carrying)
LOSSES = {"chain": chain_loss, "mixed": mixed_loss, "carried": carried_loss}


# Every loss and every place once; the richest loss in two.
@pytest.mark.sample("chain-loop", "mixed-two_ranks", "mixed-v", "carried-v")
@pytest.mark.parametrize("placed", PLACED)
@pytest.mark.parametrize("name", LOSSES)
def test_stages_one_after_another_are_the_loss(name, placed):
    params, buffers, batch = params_of(), buffers_of(), microbatch(1)
    storage = stored(params, *PLACED[placed])
    trace, data = traced(LOSSES[name], params, buffers, batch)
    programs = UniformStages.find(trace, storage).programs()
    assert len(programs) == storage.stages.num_chunks
    loss = run_stages(programs, storage, params, data)
    assert_loss(loss, LOSSES[name], params, buffers, batch)


@pytest.mark.parametrize(
    ("name", "uses"),
    [
        ("chain", [("embed",), (), ("norm",)]),
        ("mixed", [("embed",), ("norm", "unused"), ()]),
    ],
)
def test_a_part_of_a_stage_uses_no_other_parameters(name, uses):
    params = params_of()
    storage = stored(params, *PLACED["v"])
    trace, _ = traced(LOSSES[name], params, buffers_of(), microbatch(0))
    for program in UniformStages.find(trace, storage).programs():
        found = [program.first_uses, program.middle_uses, program.last_uses]
        names = [tuple(storage.rest[i][0] for i in part) for part in found]
        assert names == uses


def with_tap(params, buffers, batch):
    x = batch["x"] @ params["embed"]
    outputs = [x := layer(params["blocks"][number], x) for number in range(len(BLOCKS))]
    return jnp.sum(outputs[1] * x), 1.0, {}, buffers


def with_change_between(params, buffers, batch):
    x = batch["x"] @ params["embed"]
    for number in range(len(BLOCKS)):
        x = layer(params["blocks"][number], x) * (2 if number == 2 else 1)
    return jnp.sum(x), 1.0, {}, buffers


def with_a_turned_block(params, buffers, batch):
    x, blocks = batch["x"] @ params["embed"], dict(params["blocks"])
    blocks[3] = blocks[3] | {"kernel": blocks[3]["kernel"].T}
    for number in range(len(BLOCKS)):
        x = layer(blocks[number], x)
    return jnp.sum(x), 1.0, {}, buffers


def with_a_borrowed_weight(params, buffers, batch):
    x = batch["x"] @ params["embed"]
    for number in range(len(BLOCKS)):
        x = layer(params["blocks"][number], x)
    return jnp.sum(x * params["blocks"][0]["bias"]), 1.0, {}, buffers


@pytest.mark.parametrize(
    "forward", [with_tap, with_change_between, with_a_turned_block, with_a_borrowed_weight]
)
def test_unequal_blocks_are_not_treated_as_a_chain(forward):
    params = params_of()
    trace, _ = traced(forward, params, buffers_of(), microbatch(0))
    assert UniformStages.find(trace, stored(params, *PLACED["v"])) is None


def test_blocks_of_different_sizes_are_not_uniform():
    params = params_of((WIDTH, WIDTH, WIDTH, WIDTH, 1))
    trace, _ = traced(chain_loss, params, buffers_of(), microbatch(0))
    assert UniformStages.find(trace, stored(params, *PLACED["two_ranks"])) is None
