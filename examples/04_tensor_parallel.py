"""Tensor parallelism of a model that was written for one device: the plan is read off the model.

On GPUs and TPUs sequence parallelism sends as many bytes as tensor parallelism alone; the compiler
for CPUs writes each reduce-scatter as a whole sum, so that here it sends more.

python examples/04_tensor_parallel.py
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from rich.console import Console
from rich.table import Table

from axon_dist import World, build_train_step, compose, ddp
from axon_dist.inspect import collectives
from axon_dist.models import next_token_loss
from axon_dist.parallel import suggest_plan, tensor_parallel

world = World.emulate(8, "dp=2,tp=4")
tokens = np.random.default_rng(0).integers(0, 64, size=(16, 33)).astype(np.int32)
console = Console()


class Block(nnx.Module):
    """A block as many write it: one kernel for queries, keys and values."""

    def __init__(self, rngs: nnx.Rngs):
        self.ln_1, self.ln_2 = nnx.LayerNorm(64, rngs=rngs), nnx.LayerNorm(64, rngs=rngs)
        self.c_attn = nnx.Linear(64, 192, rngs=rngs)
        self.c_proj = nnx.Linear(64, 64, rngs=rngs)
        self.expand = nnx.Linear(64, 256, rngs=rngs)
        self.contract = nnx.Linear(256, 64, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        qkv = jnp.split(self.c_attn(self.ln_1(x)), 3, axis=-1)
        query, key, value = (part.reshape(*x.shape[:2], 8, 8) for part in qkv)
        mixed = jax.nn.dot_product_attention(query, key, value, is_causal=True)
        x = x + self.c_proj(mixed.reshape(x.shape))
        return x + self.contract(nnx.gelu(self.expand(self.ln_2(x))))


class Model(nnx.Module):
    """Knows of no mesh."""

    def __init__(self, rngs: nnx.Rngs):
        self.wte = nnx.Embed(64, 64, rngs=rngs)
        self.h = nnx.List(Block(rngs) for _ in range(2))
        self.ln_f = nnx.LayerNorm(64, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.wte(tokens)
        for block in self.h:
            x = block(x)
        return self.wte.attend(self.ln_f(x))


def main() -> None:
    """Prints the plan, then trains under it, with and without sequence parallelism."""
    plan = suggest_plan(lambda: Model(nnx.Rngs(0)))
    console.print(plan.table())
    table = Table(title=f"the same model on {world.spec}")
    for column in ("strategy", "loss after 5 steps", "MB sent over tp per step"):
        table.add_column(column)
    for name, strategy in (
        ("data alone", ddp()),
        ("tensor", compose(ddp(), tensor_parallel(plan))),
        ("tensor + sequence", compose(ddp(), tensor_parallel(plan, sequence=True))),
    ):
        model = Model(nnx.Rngs(0))
        step = build_train_step(model, optax.adam(1e-3), next_token_loss, strategy, world)
        state = step.init()
        for _ in range(5):
            state, metrics = step(state, {"tokens": tokens})
        ledger = collectives(step.lower({"tokens": tokens}).compile(), world.mesh)
        sent = ledger.total_wire_bytes(axis="tp") / 1e6
        table.add_row(name, f"{float(metrics['loss']):.6f}", f"{sent:.2f}")
    console.print(table)


if __name__ == "__main__":
    main()
