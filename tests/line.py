"""A model, a loss and data of one's own that compile at once, for runs whose model is no matter."""

import jax.numpy as jnp
import numpy as np
from flax import nnx

OWN = {
    "model": {"factory": "tests.line:Line"},
    "data": {"factory": "tests.line:numbers"},
    "loss": {"function": "tests.line:squares"},
}
"""Their keys in a config; they are found from the folder above."""


class Line(nnx.Module):
    """Numbers `[B, 4]` to one each."""

    def __init__(self, *, rngs):
        self.sum = nnx.Linear(4, 1, rngs=rngs)

    def __call__(self, x):
        return self.sum(x)[..., 0]


def squares(model, batch):
    """The mean square of what is wrong."""
    return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)


def numbers():
    """Rows for training and for validation."""
    x = np.random.default_rng(0).normal(size=(40, 4)).astype(np.float32)
    rows = [{"x": row, "y": float(row.sum())} for row in x]
    return rows[8:], rows[:8]
