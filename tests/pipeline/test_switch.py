"""Stages that differ: whatever a model does between its blocks, together they are the loss."""

import jax
import jax.numpy as jnp
import pytest

from axon_dist.core.errors import UnsupportedError
from axon_dist.pipeline import SwitchStages

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


def busy_loss(params, buffers, batch):
    """Skips across stages, a count and a key on the way, and changes between the blocks."""
    x, taps, key = batch["x"] @ params["embed"], [], jax.random.key(1)
    for number in range(len(BLOCKS)):
        x = layer(params["blocks"][number], x)
        if number == 1:
            key, own = jax.random.split(jax.random.fold_in(key, jnp.sum(x > 0)))
            x = x * jax.random.normal(own, x.shape)
        if number % 2:
            x = x + jnp.tanh(params["norm"])
        taps.append((x, jnp.sum(x > 0)))
    noise = jax.random.normal(key, x.shape)
    x = x + 0.1 * taps[0][0] * taps[2][1] + noise
    count = taps[1][1] + taps[3][1]
    return jnp.sum(x**2), jnp.sum(batch["weight"]), {"count": 1.0 * count}, buffers


def narrowing_loss(params, buffers, batch):
    """The value between blocks changes its shape."""
    x = batch["x"] @ params["embed"]
    for number in range(len(BLOCKS)):
        block = params["blocks"][number]
        x = layer_of(block, x if x.shape[-1] == WIDTH else jnp.tile(x, (1, 4))[:, :WIDTH])
    return jnp.sum(x**2), jnp.sum(batch["weight"]), {"mean": jnp.mean(x)}, buffers


@unit
def layer_of(block, x):
    return jnp.tanh(x @ block["kernel"] + block["bias"])


LOSSES = {
    "chain": (chain_loss, (WIDTH,) * 5),
    "busy": (busy_loss, (WIDTH,) * 5),
    "narrowing": (narrowing_loss, (WIDTH, 3, 1, WIDTH, 2)),
}


@pytest.mark.sample(
    "chain-two_ranks",
    "busy-v",
    "narrowing-loop",
)
@pytest.mark.parametrize("placed", PLACED)
@pytest.mark.parametrize("name", LOSSES)
def test_stages_one_after_another_are_the_loss(name, placed):
    forward, widths = LOSSES[name]
    params, buffers, batch = params_of(widths), buffers_of(), microbatch(1)
    storage = stored(params, *PLACED[placed])
    trace, data = traced(forward, params, buffers, batch)
    programs = SwitchStages(trace, storage).programs()
    assert [program.stages for program in programs] == [(s,) for s in range(len(programs))]
    loss = run_stages(programs, storage, params, data)
    assert_loss(loss, forward, params, buffers, batch)


def test_a_stage_uses_the_parameters_of_its_own_equations_alone():
    params = params_of()
    storage = stored(params, *PLACED["v"])
    trace, _ = traced(busy_loss, params, buffers_of(), microbatch(0))
    programs = SwitchStages(trace, storage).programs()
    names = [tuple(storage.rest[i][0] for i in p.middle_uses) for p in programs]
    # Stage 0 has block 0, which the embedding feeds; blocks 1 and 3 have the norm behind them.
    assert names == [("embed",), ("norm",), ("norm",), ()]
    assert {program.last_uses for program in programs} == {()}


def test_a_wire_is_no_longer_than_the_longest_stage_needs():
    params = params_of()
    storage = stored(params, *PLACED["two_ranks"])
    trace, data = traced(chain_loss, params, buffers_of(), microbatch(0))
    first = SwitchStages(trace, storage).programs()[0].first({}, data)
    assert [x.size for x in first.floats] == [3 * WIDTH]
    assert first.others == []


def backwards(params, buffers, batch):
    x = batch["x"] @ params["embed"]
    for number in reversed(range(len(BLOCKS))):
        x = layer(params["blocks"][number], x)
    return jnp.sum(x), 1.0, {}, buffers


def borrowed_by_a_stage(params, buffers, batch):
    x = batch["x"] @ params["embed"]
    for number in range(len(BLOCKS)):
        x = layer(params["blocks"][number], x)
        x = x * params["blocks"][4]["bias"] if number == 0 else x
    return jnp.sum(x), 1.0, {"mean": jnp.mean(x)}, buffers


def borrowed_by_the_loss(params, buffers, batch):
    total, weight, metrics, buffers = chain_loss(params, buffers, batch)
    return total + jnp.sum(params["blocks"][1]["bias"]), weight, metrics, buffers


@pytest.mark.parametrize(
    ("forward", "message"),
    [
        (backwards, r"calls 'blocks/3', a block of stage 2, after blocks of stage 3"),
        (borrowed_by_a_stage, r"stage 0 reads a parameter of 'blocks/4', which only stage 3 has"),
        (borrowed_by_the_loss, r"the loss reads a parameter of 'blocks/1', which only stage 0 has"),
    ],
)
def test_stages_that_reach_for_each_others_parameters_raise(forward, message):
    params = params_of()
    trace, _ = traced(forward, params, buffers_of(), microbatch(0))
    with pytest.raises(UnsupportedError, match=message):
        SwitchStages(trace, stored(params, *PLACED["loop"])).programs()


def test_a_stage_may_read_what_another_stage_of_its_rank_has():
    params, buffers, batch = params_of(), buffers_of(), microbatch(1)
    storage = stored(params, *PLACED["v"])
    trace, data = traced(borrowed_by_a_stage, params, buffers, batch)
    programs = SwitchStages(trace, storage).programs()
    assert list(programs[0].rows) == [row for chunk in (0, 1) for row in storage.chunk_rows[chunk]]
    loss = run_stages(programs, storage, params, data)
    assert_loss(loss, borrowed_by_a_stage, params, buffers, batch)
