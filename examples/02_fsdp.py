"""FSDP: the same program at every stage of ZeRO, with the bytes that each device really holds.

python examples/02_fsdp.py
"""

import numpy as np
import optax
from flax import nnx
from rich.console import Console
from rich.table import Table

from axon_dist import FSDP, World, build_train_step
from axon_dist.models import MLP, classification_loss
from axon_dist.parallel import format_bytes

world = World.emulate(8, "dp=2,fsdp=4")
x = np.random.default_rng(0).normal(size=(64, 128)).astype(np.float32)
batch = {"x": x, "y": (x.sum(1) > 0).astype(np.int32)}


def main() -> None:
    """Trains three steps under each sharding strategy and prints one table."""
    table = Table(title=f"one model on {world.spec}")
    columns = ("strategy", "parameters", "gradients", "optimizer", "savings", "loss after 3 steps")
    for column in columns:
        table.add_column(column)
    for strategy in ("no_shard", "shard_grad_op", "full_shard", "hybrid_shard"):
        model = MLP((128, 512, 512, 2), rngs=nnx.Rngs(0))
        fsdp = FSDP(model, world.group("dp", "fsdp"), strategy)
        step = build_train_step(model, optax.adam(1e-3), classification_loss, fsdp, world)
        state = step.init()
        for _ in range(3):
            state, metrics = step(state, batch)
        grads, _ = step.gradients(state, batch)
        stats = fsdp.memory_stats(state.params, grads, state.opt_state)
        table.add_row(
            strategy,
            format_bytes(stats.param_memory_bytes),
            format_bytes(stats.grad_memory_bytes),
            format_bytes(stats.optim_memory_bytes),
            f"{stats.memory_savings:.1%}",
            f"{float(metrics['loss']):.6f}",
        )
    Console().print(table)


if __name__ == "__main__":
    main()
