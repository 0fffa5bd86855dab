"""A small model with everything that sharding meets: a table, equal blocks, a norm and a head."""

import jax.numpy as jnp
import numpy as np
from flax import nnx

WIDTH = 32


class Block(nnx.Module):
    """Two layers and a residual connection."""

    def __init__(self, rngs: nnx.Rngs, dtype):
        self.up = nnx.Linear(WIDTH, 2 * WIDTH, param_dtype=dtype, rngs=rngs)
        self.down = nnx.Linear(2 * WIDTH, WIDTH, param_dtype=dtype, rngs=rngs)

    def __call__(self, x):
        return x + self.down(jnp.tanh(self.up(x)))


class Tower(nnx.Module):
    """Token table, blocks in a Python loop, norm, head."""

    def __init__(self, rngs: nnx.Rngs, num_blocks: int = 2, dtype=jnp.float32):
        self.table = nnx.Embed(64, WIDTH, param_dtype=dtype, rngs=rngs)
        self.blocks = nnx.List([Block(rngs, dtype) for _ in range(num_blocks)])
        self.norm = nnx.RMSNorm(WIDTH, param_dtype=dtype, rngs=rngs)
        self.head = nnx.Linear(WIDTH, 64, use_bias=False, param_dtype=dtype, rngs=rngs)

    def __call__(self, tokens):
        x = self.table(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def make(num_blocks: int = 2, dtype=jnp.float32):
    """A factory of towers, whose arrays are created with their sharding."""
    return lambda: Tower(nnx.Rngs(0), num_blocks, dtype)


def loss_fn(model, batch):
    """Mean square of the logits' distance from the one-hot labels."""
    logits = model(batch["tokens"])
    return jnp.mean((logits - jnp.eye(64)[batch["labels"]]) ** 2)


def batch(step: int = 0, samples: int = 16) -> dict:
    """Random tokens and labels."""
    rng = np.random.default_rng(step)
    draw = lambda: rng.integers(0, 64, size=(samples, 4)).astype(np.int32)
    return {"tokens": draw(), "labels": draw()}
