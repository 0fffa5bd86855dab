"""One of two processes, of which the second is given something else."""

import os
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from axon_dist import DDP, Trainer, World, build_train_step, ddp
from axon_dist.checkpoint import CheckpointManager, save_checkpoint
from axon_dist.core.errors import ConfigError
from axon_dist.mesh import agreement
from axon_dist.train import LoopOptions
from axon_dist.train.app import train
from axon_dist.train.config import load_config


def linear(seed):
    return nnx.Linear(2, 2, rngs=nnx.Rngs(seed))


def loss_fn(model, batch):
    return jnp.mean(model(batch["x"]) ** 2)


def train_in(folder, *overrides):
    base = [
        "devices.emulate=2",
        "train.steps=2",
        "optimizer.schedule.warmup_steps=1",
        f"data.files=[{folder}/0/*.txt]",
        f"run_dir={folder}/run",
        "model.num_layers=1",
    ]
    path = os.path.join(os.path.dirname(__file__), "../../configs/quickstart.yaml")
    train(load_config(path, [*base, *overrides]))


def save_in_own_folders(folder):
    """Each process goes to a folder of its own, so that a relative path names another one there."""
    agreement._SEEN_SECONDS = 1.0
    whole = NamedSharding(World.emulate(2).mesh, PartitionSpec())
    own = os.path.join(folder, os.environ["RANK"])
    os.makedirs(own, exist_ok=True)
    os.chdir(own)
    state = {"w": jax.jit(lambda: jnp.ones(2), out_shardings=whole)()}
    save_checkpoint(f"{folder}/shared/step", state)
    for save in (
        lambda: save_checkpoint("own/step", state),
        lambda: CheckpointManager("own").save(1, state),
        lambda: train_in(folder, "run_dir=own"),
        lambda: train_in(folder, f"run_dir={folder}/run", "checkpoint.dir=own"),
    ):
        try:
            save()
        except ConfigError as error:
            print(error.code, error, flush=True)


def main(kind, *arguments):
    other = int(os.environ["RANK"])
    if kind == "folders":
        save_in_own_folders(*arguments)
        return
    if kind == "config":
        option, folder = arguments
        train_in(folder, *([option] if other else []))
        return
    world = World.emulate(2)
    if kind == "sync":
        model = linear(other)
        kernel = DDP(model, world.group("dp")).sync_parameters()["kernel"]
        expected = linear(0).kernel[...]
        assert np.array_equal(kernel.addressable_shards[0].data, expected)
        assert np.array_equal(model.kernel[...].addressable_shards[0].data, expected)
        print("kernel is that of process 0", flush=True)
        return
    model = linear(other) if kind == "module" else linear(0)
    if kind == "factory":
        model = lambda: linear(other)
    rate = 0.1 + (0.1 * other if kind == "rate" else 0)
    step = build_train_step(model, optax.sgd(rate), loss_fn, ddp(), world)
    batch = {"x": np.ones((1, 2), np.float32)}
    steps = 2 + (other if kind == "options" else 0)
    Trainer(step=step, batches=[batch] * 4, options=LoopOptions(num_steps=steps)).fit()


if __name__ == "__main__":
    main(*sys.argv[1:])
