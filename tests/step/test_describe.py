"""The printed form of a step, a strategy and a world: one screen that is true."""

import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from axon_dist import World, build_train_step, fsdp, pipelined

BATCH = {"x": np.ones((8, 64), np.float32)}


class Net(nnx.Module):
    def __init__(self):
        self.blocks = nnx.List([nnx.Linear(64, 64, rngs=nnx.Rngs(n)) for n in range(2)])

    def __call__(self, x):
        for block in self.blocks:
            x = jnp.tanh(block(x))
        return x


def loss_fn(model, batch):
    return jnp.mean(model(batch["x"]) ** 2)


def test_a_step_says_what_is_split_and_what_stays_whole():
    world = World.emulate(4, "fsdp=4")
    strategy = fsdp(min_elements=1024)
    step = build_train_step(Net, optax.sgd(0.1), loss_fn, strategy, world, batch=BATCH)
    text = str(step)
    assert "fsdp on mesh fsdp=4 of 4 emulated devices" in text
    assert "batch: split over fsdp=4, 1 microbatch" in text
    kernels, biases = 2 * 64 * 64 * 4, 2 * 64 * 4
    assert f"{kernels / 1000:.3g}kB; whole: 2 arrays of {biases}B (blocks/0/bias 256B" in text
    assert f"{(kernels / 4 + biases) / 1000:.3g}kB on each device" in text
    assert "view: global view" in text
    assert len(text.splitlines()) <= 24
    assert repr(step) == "TrainStep(fsdp on mesh fsdp=4 of 4 emulated devices)"


def test_a_pipeline_names_its_table():
    world = World.emulate(2, "pp=2")
    step = build_train_step(
        Net, optax.sgd(0.1), loss_fn, pipelined(2, 2, classes=("Linear",)), world
    )
    assert "view: pipeline by the table" in str(step)
    assert "2 microbatches" in str(step)


def test_a_strategy_and_a_world_print_in_a_few_lines():
    text = str(fsdp(min_elements=1024))
    assert text.startswith("Strategy fsdp\n")
    assert "min_elements=1024" in text
    assert len(text.splitlines()) <= 16
    text = str(World.emulate(4, "dp=2,tp=2"))
    assert text.startswith("World: mesh dp=2 × tp=2, 4 emulated devices")
