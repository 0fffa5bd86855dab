"""Clipping by the global norm, the one place where it is done."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax

from ..core.typing import Array, PyTree

_EPSILON = 1e-6
"""What PyTorch's `clip_grad_norm_` adds to the norm."""


def clip_by_global_norm(grads: PyTree, max_norm: float | None) -> tuple[PyTree, Array]:
    """Scales gradients by `min(1, max_norm / (norm + 1e-6))`.

    In global view every element counts once, however it is laid out. The norm is added up in at
    least float32.

    Args:
        grads: arrays of any floating dtypes, in global view, split or whole.
        max_norm: the largest norm; None leaves the gradients as they are.

    Returns:
        The clipped gradients in their dtypes, laid out as before, and the norm before clipping.

    Example:
        >>> grads, norm = clip_by_global_norm({"w": jnp.array([3.0, 4.0])}, 1.0)
        >>> float(norm), [round(float(x), 3) for x in grads["w"]]
        (5.0, [0.6, 0.8])
    """
    # Squares of bfloat16 must not be added up in bfloat16.
    wide = lambda g: g.astype(jnp.promote_types(g.dtype, jnp.float32))
    norm = optax.tree.norm(jax.tree.map(wide, grads))
    if max_norm is None:
        return grads, norm
    factor = jnp.where(norm > max_norm, max_norm / (norm + _EPSILON), 1.0)
    return jax.tree.map(lambda g: g * factor.astype(g.dtype), grads), norm
