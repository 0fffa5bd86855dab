"""Small losses of the shape that pipelines cut: something, blocks one after another, a loss."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from axon_dist.ir.units import UNIT_NAME
from axon_dist.pipeline import MicrobatchData, Stages, StageStorage, trace_loss

WIDTH, SAMPLES = 4, 3
BLOCKS = tuple(("blocks", i) for i in range(5))
PLACED = {
    "two_ranks": ((0, 1), (0, 2, 5)),
    "v": ((0, 1, 1, 0), (0, 1, 2, 4, 5)),
    "loop": ((0, 1, 0, 1), (0, 2, 3, 4, 5)),
}
"""Ranks of stages and boundaries of blocks; stages have unequal numbers of blocks."""


def unit(function):
    """Makes a function a unit, as marked modules are."""

    def call(*args):
        return function(*args)

    call.__name__ = UNIT_NAME
    return jax.jit(call)


@unit
def layer(block, x):
    """A block: weights and a bias."""
    return x + jnp.tanh(x @ block["kernel"] + block["bias"])


def params_of(widths=(WIDTH,) * 5):
    """Parameters before, in and behind the blocks."""
    rng = np.random.default_rng(0)
    array = lambda *shape: jnp.asarray(np.float32(rng.normal(size=shape)))
    blocks = {i: {"kernel": array(WIDTH, w), "bias": array(w)} for i, w in enumerate(widths)}
    return {"blocks": blocks, "embed": array(2, WIDTH), "norm": array(WIDTH), "unused": array(2)}


def buffers_of():
    """A count that microbatches advance, and one that they leave alone."""
    return {"count": jnp.int32(3), "still": jnp.float32(0.25)}


def microbatch(number):
    """Inputs and weights of a few samples; `number` may be any integer."""
    rng = np.random.default_rng(10 + number)
    x, weight = rng.normal(size=(SAMPLES, 2)), rng.integers(1, 5, size=SAMPLES)
    return {"x": jnp.asarray(np.float32(x)), "weight": jnp.asarray(np.float32(weight))}


def chain_loss(params, buffers, batch):
    """A chain of equal blocks; a weighted loss, two metrics, and a count that goes up."""
    x = batch["x"] @ params["embed"]
    for number in range(len(params["blocks"])):
        x = layer(params["blocks"][number], x)
    x = x * params["norm"] * (1 + 0.1 * buffers["count"]) + buffers["still"]
    weight = jnp.sum(batch["weight"])
    total = jnp.sum(jnp.mean(x**2, axis=-1) * batch["weight"])
    metrics = {"zeal": jnp.mean(x), "awe": jnp.max(x)}
    return total, weight, metrics, buffers | {"count": buffers["count"] + 2}


def traced(forward, params, buffers, batch):
    """The trace of a loss, and what the executor would know of the microbatch."""
    trace = trace_loss(forward, params, buffers, batch)
    return trace, MicrobatchData(jax.tree.leaves(buffers), jax.tree.leaves(batch))


def stored(params, placement, boundaries):
    """Parameters in the form in which a pipeline holds them."""
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)
    stages = Stages(BLOCKS, boundaries, placement, max(placement) + 1)
    return StageStorage(stages, shapes)


def run_stages(programs, storage, params, data):
    """Runs the programs of all stages one after another, each with what it says it uses alone."""
    stages = storage.stages

    def run(params, data):
        held = storage.from_model(params)
        rest = storage.rest_of(held)
        pick = lambda uses: {i: rest[i] for i in uses}
        (owner,) = [p for p in programs if 0 in p.stages]
        wire = owner.first(pick(owner.first_uses), data)
        for stage, device in enumerate(stages.placement):
            (owner,) = [p for p in programs if stage in p.stages]
            assert owner.chunk == stages.chunk_of(stage)
            rows = storage.rows_of(held)
            weights = [[leaf[device] for leaf in rows[row]] for row in owner.rows]
            wire = owner.middle(weights, pick(owner.middle_uses), data, jnp.int32(stage), wire)
        return owner.last(pick(owner.last_uses), data, wire)

    return jax.jit(run)(params, data)


def assert_loss(loss, forward, params, buffers, batch):
    """The loss of the stages is that of the function, its metrics in the order of their names."""
    total, weight, metrics, _ = jax.jit(forward)(params, buffers, batch)
    np.testing.assert_allclose(loss.total, total, rtol=2e-6)
    np.testing.assert_allclose(loss.weight, weight)
    want = [metrics[name] for name in sorted(metrics)]
    np.testing.assert_allclose(loss.metrics, want, rtol=1e-5, atol=1e-6)
