"""Stages of equal blocks: found where the loss is such a chain, and equal to it."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from axon_dist import World, build_train_step, ddp, pipelined
from axon_dist.pipeline import UniformStages
from tests.drawn import drawn

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


def adding(block, x, penalty, depth, scale):
    x = layer(block, x * scale) * depth
    return x, penalty + jnp.mean(x**2)


def scalar_loss(params, buffers, batch):
    """Scalars that are literals of the program: the first carry, one of all, one of each block."""
    x, penalty = batch["x"] @ params["embed"], jnp.float32(0)
    for number in range(len(BLOCKS)):
        depth = jnp.float32(1 / (number + 1))
        x, penalty = add(params["blocks"][number], x, penalty, depth, jnp.float32(0.5))
    return jnp.sum(x**2) + penalty, jnp.sum(batch["weight"]), {"penalty": penalty}, buffers


carry = unit(carrying)
add = unit(adding)
LOSSES = {
    "chain": chain_loss,
    "mixed": mixed_loss,
    "carried": carried_loss,
    "scalars": scalar_loss,
}


# Every loss and every place once; the richest loss in two.
@pytest.mark.sample("chain-loop", "mixed-two_ranks", "mixed-v", "carried-v", "scalars-v")
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


class Scaled(nnx.Module):
    """A block that takes a penalty from the one before, and two scalars."""

    def __init__(self, rngs):
        self.linear = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x, penalty, depth, scale):
        y = jnp.tanh(self.linear(x))
        return x + depth * scale * y, penalty + jnp.mean(y**2)


class Scalars(nnx.Module):
    """A model that makes the scalars of its blocks with JAX, between two other layers."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.first = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.blocks = nnx.List([Scaled(rngs) for _ in range(4)])
        self.last = nnx.LayerNorm(WIDTH, rngs=rngs)

    def __call__(self, x):
        x, penalty = self.first(x), jnp.float32(0)
        for number, block in enumerate(self.blocks):
            depth = jnp.float32(1 / (number + 1))
            x, penalty = block(x, penalty, depth, jnp.float32(0.5))
        return self.last(x), penalty


def trained_scalars(strategy, world):
    """Metrics and weights of one step."""
    rng = np.random.default_rng(0)
    batch = {name: np.float32(rng.normal(size=(8, WIDTH))) for name in "xy"}

    def loss_fn(model, batch):
        y, penalty = model(batch["x"])
        return jnp.mean((y - batch["y"]) ** 2) + 0.1 * penalty, {"penalty": penalty}

    model = drawn(Scalars)
    step = build_train_step(model, optax.sgd(0.1), loss_fn, strategy, world, batch=batch)
    state, metrics = step(step.init(), batch)
    return jax.device_get((metrics, step.weights(state)))


@pytest.fixture(scope="module")
def scalars_alone():
    """The same on one device."""
    return trained_scalars(ddp(), World.emulate(1))


@pytest.mark.full
@pytest.mark.parametrize("schedule", ["eager_1f1b", "interleaved_1f1b"])
def test_a_model_with_jax_scalars_trains_as_on_one_device(schedule, scalars_alone):
    world = World.emulate(2, "pp=2")
    metrics, weights = trained_scalars(pipelined(2, 2, schedule), world)
    wanted, expected = scalars_alone
    for name in ("loss", "penalty"):
        np.testing.assert_allclose(metrics[name], wanted[name], rtol=1e-5)
    for path, value in expected.items():
        np.testing.assert_allclose(weights[path], value, rtol=1e-4, atol=1e-6, err_msg=path)
