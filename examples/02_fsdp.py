"""FSDP: what each stage of ZeRO holds and sends, read from the compiled steps, and how it trains.

python examples/02_fsdp.py
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from rich.console import Console
from rich.table import Table

from axon_dist import FSDP, World, build_train_step
from axon_dist.inspect import bytes_per_device, carried_bytes, collectives
from axon_dist.parallel import Reduction, ddp, fsdp, zero

world = World.emulate(8, "dp=8")
x = np.random.default_rng(0).normal(size=(64, 256)).astype(np.float32)
batch = {"x": x, "y": np.sin(x)}
WIDTH, DEPTH, MICROBATCHES = 256, 6, 4


class Block(nnx.Module):
    """The unit that is gathered, used and freed together."""

    def __init__(self, rngs):
        self.linear = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        return x + jnp.tanh(self.linear(x))


class Net(nnx.Module):
    """Equal blocks, one after another."""

    def __init__(self, rngs):
        self.blocks = nnx.List([Block(rngs) for _ in range(DEPTH)])

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def loss_fn(model, batch):
    return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)


# Collectives written out, so that emulated devices too run the reduce-scatters of a GPU.
once, each = (Reduction(per=per, manual=True) for per in ("step", "microbatch"))
STRATEGIES = {
    "ddp": ddp("dp"),
    "zero1": zero(1, min_elements=8, reduction=once),
    "zero2": zero(2, min_elements=8, reduction=each),
    "fsdp": fsdp(axes="dp", min_elements=8, reduction=each),
}


def built(strategy, accumulate=1):
    """A step, nothing compiled yet."""
    model, adam = Net(nnx.Rngs(0)), optax.adam(1e-3)
    return build_train_step(model, adam, loss_fn, strategy, world, accumulate=accumulate)


def picture() -> str:
    """A row per strategy: bytes of a device as bars, one block for each eighth of P float32.

    The gradients are the sums that a step of four microbatches carries from one to the next.
    """
    count = DEPTH * (WIDTH * WIDTH + WIDTH)
    bar = lambda size: "█" * round(8 * size / (4 * count))
    lines = [
        f"{'':14}parameters   gradients   optimizer state     sent per step",
    ]
    for name, strategy in STRATEGIES.items():
        step = built(strategy)
        compiled = step.lower(batch).compile()
        place = lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s)
        state = jax.tree.map(place, step.abstract_state, compiled.output_shardings[0])
        wire = collectives(compiled, world.mesh).total_wire_bytes()
        accumulating = built(strategy, MICROBATCHES).lower(batch).compile()
        lines.append(
            f"{name:14}{bar(bytes_per_device(state.params)):13}"
            f"{bar(carried_bytes(accumulating)):12}"
            f"{bar(bytes_per_device(state.opt_state)):20}"
            f"{wire / (4 * count * 7 / 8):.3g} · 7/8 · P"
        )
    return "\n".join(lines)


def table() -> Table:
    """Trains three steps under each name of the wrapper: the losses are the same."""
    rows = Table("sharding strategy", "savings", "loss after 3 steps")
    for choice in ("no_shard", "shard_grad_op", "full_shard"):
        model = FSDP(Net(nnx.Rngs(0)), world.group("dp"), choice)
        step = built(model.strategy)
        state = step.init()
        for _ in range(3):
            state, metrics = step(state, batch)
        savings = f"{model.memory_estimate().memory_savings:.1%}"
        rows.add_row(choice, savings, f"{float(metrics['loss']):.6f}")
    return rows


if __name__ == "__main__":
    print(picture())
    Console().print(table())
