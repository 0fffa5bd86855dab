"""Fewer processes than planned: the same global batch, and no more of it at a time per device."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st

from axon_dist import Shared, Weighted
from axon_dist.inspect import coupling
from axon_dist.mesh import World
from axon_dist.parallel import ddp
from axon_dist.train import build_train_step
from axon_dist.train.app.runs import for_fewer, microbatches_for_fewer
from axon_dist.train.app.steps import build_step, build_world
from axon_dist.train.config import RunConfig

CONFIG = {
    "devices": {"emulate": 4},
    "model": {"width": 8, "num_layers": 1, "num_heads": 2, "ffn_width": 8, "max_length": 16},
    "data": {"max_bytes": 10**5, "sequence_length": 8},
    "train": {"global_batch": 24},
}


@given(st.integers(1, 6), st.integers(1, 8), st.integers(1, 8), st.integers(1, 8))
def test_the_batch_is_kept_and_no_device_holds_more(rows, accumulate, planned, ranks):
    ranks = min(ranks, planned)
    batch = rows * accumulate * planned * ranks
    count = microbatches_for_fewer(batch, accumulate, planned, ranks)
    assert count >= accumulate
    assert batch % (count * ranks) == 0
    most = batch // (accumulate * planned)
    assert batch // (count * ranks) <= most
    fewer = range(accumulate, count)
    assert all(batch % (c * ranks) or batch // (c * ranks) > most for c in fewer)


@pytest.mark.parametrize(
    ("changes", "accumulate"),
    [
        ({}, 2),
        ({"mesh": {"dp": -1, "fsdp": 2}, "parallel": "hybrid_shard"}, 2),
        ({"mesh": {"dp": 4}}, 1),
        ({"mesh": {"dp": 2, "tp": -1}, "parallel": ["ddp", "tensor"]}, 1),
    ],
)
def test_microbatches_follow_the_batch_axes_that_shrink(changes, accumulate):
    config = RunConfig.from_dict(CONFIG | {"mesh": {"dp": -1}} | changes)
    world = build_world(config)
    step = build_step(config, world, optax.identity(), trains=False)
    real = dataclasses.replace(config, devices=dataclasses.replace(config.devices, emulate=None))
    smaller = for_fewer(real, world, step, planned=8, present=4)
    assert smaller.train == dataclasses.replace(config.train, accumulate=accumulate)
    assert for_fewer(real, world, step, planned=4, present=4) == real


class Normed(nnx.Module):
    def __init__(self, rngs, norm):
        self.linear = nnx.Linear(4, 4, rngs=rngs)
        self.norm = norm(4, rngs=rngs)

    def __call__(self, x):
        return self.norm(self.linear(x))


@pytest.mark.parametrize(
    ("norm", "loss", "words"),
    [
        (nnx.LayerNorm, lambda y: jnp.mean(y**2), ""),
        (nnx.LayerNorm, lambda y: jnp.mean(jnp.sort(y[:, 0])[:2]), "sort"),
        (nnx.BatchNorm, lambda y: jnp.mean(y**2), "norm/mean"),
    ],
)
def test_operations_that_couple_samples_are_named(norm, loss, words):
    world, shape = World.emulate(4), jax.ShapeDtypeStruct((24, 4), jnp.float32)
    model = Normed(nnx.Rngs(0), norm)
    loss_fn = lambda model, batch: loss(model(batch["x"]))
    step = build_train_step(model, optax.sgd(0.1), loss_fn, ddp(), world)
    found = coupling(step, {"x": shape})
    assert words.lower() in found.lower()
    assert bool(found) == bool(words)


class Masked(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(4, 4, rngs=rngs)
        self.mask = nnx.Variable(jnp.ones(4))

    def __call__(self, x):
        return self.linear(x) * self.mask[...]


def test_buffers_that_no_sample_changes_couple_nothing():
    loss_fn = lambda model, batch: jnp.mean((model(batch["x"]) * batch["table"]) ** 2)
    step = build_train_step(Masked(nnx.Rngs(0)), optax.sgd(0.1), loss_fn, ddp(), World.emulate(4))
    batch = {"x": np.ones((24, 4), np.float32), "table": Shared(np.ones(4, np.float32))}
    assert coupling(step, batch) == ""


def test_a_weight_of_parameters_couples_parts_and_is_told_as_that():
    def loss_fn(model, batch):
        squares = jnp.sum(model(batch["x"]) ** 2)
        return Weighted(squares, jnp.sum(jax.nn.sigmoid(model.linear.kernel[...])))

    step = build_train_step(Masked(nnx.Rngs(0)), optax.sgd(0.1), loss_fn, ddp(), World.emulate(1))
    batch = {"x": np.ones((24, 4), np.float32)}
    step(step.init(), batch)
    assert "the weight of the loss depends on the parameter" in coupling(step, batch)
