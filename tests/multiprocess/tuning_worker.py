"""One of several processes that fine-tune together: rank, number of processes, port, folder."""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from axon_dist import Shared, build_train_step, fsdp, lora, save_checkpoint
from axon_dist.mesh import World
from axon_dist.weights import load_weights, save_weights

WIDTH, SAMPLES, STEPS = 32, 8, 3


class Net(nnx.Module):
    def __init__(self, seed):
        rngs = nnx.Rngs(seed)
        self.blocks = nnx.List([nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(2)])
        self.head = nnx.Linear(WIDTH, 4, rngs=rngs)

    def __call__(self, x):
        for block in self.blocks:
            x = x + jnp.tanh(block(x))
        return self.head(x)


def loss_fn(model, batch):
    each = (model(batch["x"]) - batch["y"]) ** 2
    return jnp.mean(each * batch["weights"])


def batches():
    random = np.random.default_rng(0)
    draw = lambda *shape: random.normal(size=shape).astype(np.float32)
    weights = np.arange(1, 5, dtype=np.float32)
    for _ in range(STEPS):
        yield {"x": draw(SAMPLES, WIDTH), "y": draw(SAMPLES, 4)}, {"weights": Shared(weights)}


def write_weights(folder):
    save_weights(Net(5), folder / "base.safetensors")


def tune(world, folder, frozen_dtype, rank=0, count=1):
    """The losses of some steps, and the last state, from weights of a file."""
    step = build_train_step(
        lambda: lora(Net(0), 2, rngs=nnx.Rngs(1)), optax.adam(0.01), loss_fn,
        fsdp(min_elements=8), world, trainable=("head/bias", nnx.LoRAParam),
        frozen_dtype=frozen_dtype, ema=0.5,
    )  # fmt: skip
    state = load_weights(step, folder / "base.safetensors", cast=True, keep=r".*/lora_[ab]")
    losses, rows = [], SAMPLES // count
    for batch, shared in batches():
        own = {name: x[rank * rows :][:rows] for name, x in batch.items()}
        state, metrics = step(state, {**own, **shared})
        losses.append(float(metrics["loss"]))
    losses.append(float(step.evaluate(state, {**own, **shared}, ema=True)["loss"]))
    return losses, state


def main(rank, num_processes, port, folder):
    jax.config.update("jax_num_cpu_devices", 4 // num_processes)
    jax.distributed.initialize(f"localhost:{port}", num_processes, rank)
    world = World.init("fsdp=-1")
    for dtype in ("bfloat16", "int8"):
        losses, state = tune(world, folder, dtype, rank, num_processes)
        save_checkpoint(folder / f"{num_processes} {dtype}", state)
        print("losses", dtype, *losses, flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], Path(sys.argv[4]))
