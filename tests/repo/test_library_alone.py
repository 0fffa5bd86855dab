"""The library without the packages that only the command `axon` and `axon_dist.data` need."""

import subprocess
import sys

PROGRAM = """
import importlib, pkgutil, sys

# Flax needs rich and PyYAML itself, and Orbax protobuf.
BLOCKED = ("array_record", "cloudpickle", "grain", "ruamel", "axon_dist.train")


class Blocked:
    def find_spec(self, name, path=None, target=None):
        if any(name == blocked or name.startswith(blocked + ".") for blocked in BLOCKED):
            raise ImportError(f"{name} is blocked")


sys.meta_path.insert(0, Blocked())
import axon_dist
import jax.numpy as jnp
import optax
from flax import nnx

OLD_NAMES = ("app", "cli", "config", "loop")
for module in pkgutil.iter_modules(axon_dist.__path__):
    if module.name not in ("data", "train", *OLD_NAMES):
        importlib.import_module(f"axon_dist.{module.name}")

world = axon_dist.World.emulate(4, "fsdp=4")
step = axon_dist.build_train_step(
    lambda: nnx.Linear(8, 8, rngs=nnx.Rngs(0)),
    optax.sgd(0.1),
    lambda model, batch: (model(batch) ** 2).mean(),
    axon_dist.fsdp(),
    world,
)
state, metrics = step(step.init(), jnp.ones((8, 8)))
axon_dist.save_checkpoint(sys.argv[1], state)
axon_dist.load_checkpoint(sys.argv[1], step)
"""


def test_the_library_needs_nothing_of_the_command(tmp_path):
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "checkpoint")]
    subprocess.run(command, check=True, timeout=120)
