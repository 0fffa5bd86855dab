"""Long sequences split over devices: the memory of a step falls with every rank of the ring.

python examples/05_long_context.py
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from rich.console import Console
from rich.table import Table

from axon_dist import World, build_train_step
from axon_dist.inspect import collectives
from axon_dist.models import Transformer, TransformerConfig, next_token_loss
from axon_dist.parallel import context_parallel, format_bytes

LENGTH = 2048
config = TransformerConfig.preset("tiny", num_kv_heads=4, max_length=LENGTH)
World.emulate(8)
tokens = np.random.default_rng(0).integers(0, 256, size=(1, LENGTH + 1)).astype(np.int32)


def main() -> None:
    """Takes one step on 1, 4 and 8 devices, by ring and by all-to-all."""
    table = Table(title=f"one sequence of {LENGTH} tokens")
    for column in ("ranks", "attention", "loss", "activations per device", "MB sent per step"):
        table.add_column(column)
    for size, mode in ((1, "ring"), (4, "ring"), (8, "ring"), (4, "ulysses")):
        world = World.emulate(size, f"cp={size}")
        model = Transformer(config, rngs=nnx.Rngs(0))
        strategy = context_parallel(mode)
        step = build_train_step(model, optax.adam(1e-3), next_token_loss, strategy, world)
        compiled = step.lower({"tokens": jax.ShapeDtypeStruct(tokens.shape, jnp.int32)}).compile()
        memory = compiled.memory_analysis()
        used = format_bytes(memory.temp_size_in_bytes) if memory else "unknown"
        _, metrics = step(step.init(), {"tokens": tokens})
        sent = collectives(compiled, world.mesh).total_wire_bytes() / 1e6
        table.add_row(str(size), mode, f"{float(metrics['loss']):.6f}", used, f"{sent:.2f}")
    Console().print(table)


if __name__ == "__main__":
    main()
