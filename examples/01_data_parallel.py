"""Data parallelism: wrap a model, build one step, and get the numbers of one device.

python examples/01_data_parallel.py
"""

import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from axon_dist import DDP, World, build_train_step


class Classifier(nnx.Module):
    """Any NNX module: it knows nothing of devices."""

    def __init__(self, rngs: nnx.Rngs):
        self.hidden = nnx.Linear(8, 64, rngs=rngs)
        self.norm = nnx.BatchNorm(64, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)
        self.out = nnx.Linear(64, 2, rngs=rngs)

    def __call__(self, x):
        return self.out(self.dropout(nnx.relu(self.norm(self.hidden(x)))))


def loss_fn(model, batch):
    """The loss of a single-device program: a mean over samples, and a metric."""
    logits = model(batch["x"])
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()
    return loss, {"accuracy": jnp.mean(jnp.argmax(logits, -1) == batch["y"])}


def batch_of(step: int) -> dict:
    """Points inside and outside a sphere."""
    x = np.random.default_rng(step).normal(size=(256, 8)).astype(np.float32)
    return {"x": x, "y": (np.square(x).sum(1) > 8).astype(np.int32)}


def train(num_devices: int, num_steps: int = 60) -> list[float]:
    """Trains on some devices and returns the losses."""
    world = World.emulate(num_devices)
    model = Classifier(nnx.Rngs(0, dropout=1))
    ddp = DDP(model, world.group("dp"))
    step = build_train_step(model, optax.adam(3e-3), loss_fn, ddp, world, accumulate=2)
    state, losses = step.init(), []
    for number in range(num_steps):
        state, metrics = step(state, batch_of(number))
        losses.append(float(metrics["loss"]))
    accuracy = float(step.evaluate(state, batch_of(10_000))["accuracy"])
    print(
        f"{num_devices} device(s): loss {losses[0]:.6f} -> {losses[-1]:.6f}, "
        f"held-out accuracy {accuracy:.1%}"
    )
    return losses


if __name__ == "__main__":
    World.emulate(8)
    many, one = train(8), train(1)
    print(f"largest difference between 8 devices and 1: {max(np.abs(np.subtract(many, one))):.1e}")
