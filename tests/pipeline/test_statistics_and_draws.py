"""A block with statistics and random draws trains in a pipeline as in microbatches."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from axon_dist import World, build_train_step, ddp, pipelined
from tests.drawn import drawn

X = np.random.default_rng(0).normal(size=(8, 8)).astype(np.float32)
BATCH = {"x": X, "y": np.sin(X)}


class Block(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.linear = nnx.Linear(8, 8, rngs=rngs)
        self.dropout = nnx.Dropout(0.3, rngs=rngs)

    def __call__(self, x):
        return x + self.dropout(nnx.silu(self.linear(self.norm(x))))


class Net(nnx.Module):
    def __init__(self, rngs):
        self.blocks = nnx.List([Block(rngs) for _ in range(2)])

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return x


@functools.cache
def model():
    model = drawn(lambda: Net(nnx.Rngs(0, dropout=1)))
    model.train()
    return model


def trained(strategy, world, **options):
    def loss_fn(model, batch):
        return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)

    sgd = optax.sgd(0.1)
    step = build_train_step(model(), sgd, loss_fn, strategy, world, batch=BATCH, **options)
    state = step.init()
    for _ in range(2):
        state, metrics = step(state, BATCH)
    return float(metrics["loss"]), jax.device_get(step.weights(state))


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:BatchNorm at")
def test_batch_norm_and_dropout_in_one_block():
    world = World.emulate(2, "pp=2")
    loss, weights = trained(pipelined(2, 2), world)
    wanted, expected = trained(ddp(), World.emulate(1), accumulate=2)
    assert loss == pytest.approx(wanted, rel=1e-6)
    for path, value in expected.items():
        np.testing.assert_allclose(weights[path], value, rtol=1e-5, atol=1e-6, err_msg=path)
