"""The loss scale of half precision: no strategy overflows where one device does not."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from axon_dist import build_train_step, compose, ddp, fsdp, pipelined

WIDTH = 16


class Block(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        return x + jnp.tanh(self.linear(x))


class Net(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.blocks = nnx.List([Block(rngs) for _ in range(2)])
        self.head = nnx.Linear(WIDTH, 8, rngs=rngs)

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def loss_fn(model, batch):
    return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)


RANDOM = np.random.default_rng(0)
BATCH = {
    "x": RANDOM.normal(size=(16, WIDTH)).astype(np.float32),
    "y": RANDOM.normal(size=(16, 8)).astype(np.float32),
}


def taken(strategy, world, **options):
    """The first scale, and the parameters, after a step."""
    step = build_train_step(
        Net, optax.sgd(0.1), loss_fn, strategy, world, precision="fp16", **options
    )
    state, metrics = step(step.init(), BATCH)
    params = nnx.state(step.merge(state), nnx.Param)
    return float(metrics["loss_scale"]), [np.asarray(x) for x in jax.tree.leaves(params)]


ROWS = {
    "fsdp": ("fsdp=8", lambda: fsdp(min_elements=8), {}),
    "ddp": ("dp=8", ddp, {}),
    "accumulated": ("dp=1", ddp, {"accumulate": 16}),
    "pipeline": ("pp=2,dp=2", lambda: compose(pipelined(2, 4), ddp()), {}),
}


FULL = ("ddp", "accumulated")
CELLS = [pytest.param(n, marks=[pytest.mark.full] if n in FULL else []) for n in ROWS]


@pytest.mark.full
@pytest.mark.sample("fsdp")
@pytest.mark.parametrize("name", CELLS)
def test_the_first_scale_holds_wherever_it_holds_on_one_device(name, make_world):
    axes, strategy, options = ROWS[name]
    want = taken(ddp(), make_world("dp=1"))
    assert want[0] == 65536
    scale, params = taken(strategy(), make_world(axes), **options)
    assert scale == 65536
    for got, wanted in zip(params, want[1], strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-2, atol=2e-3)
