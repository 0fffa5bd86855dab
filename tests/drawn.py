"""Models whose weights numpy draws, for tests that ask what becomes of weights and not of draws."""

import jax
import numpy as np
from flax import nnx


def drawn(make, seed=0):
    """The model that a factory makes, with other weights; no program is compiled for the draws.

    Its biases are not zero and its norms are not one, so that none can replace another.
    """
    model, rng = nnx.eval_shape(make), np.random.default_rng(seed)
    draw = lambda x: jax.device_put(rng.normal(0.0, 0.2, x.shape).astype(x.dtype))
    nnx.update(model, jax.tree.map(draw, nnx.state(model, nnx.Param)))
    if nnx.state(model, nnx.Not(nnx.Param)):
        nnx.update(model, nnx.jit(lambda: nnx.state(make(), nnx.Not(nnx.Param)))())
    return model
