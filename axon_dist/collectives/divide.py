"""What happens to a dim that does not divide by the size of a group: an error, or padding."""

from __future__ import annotations

import jax.numpy as jnp

from ..core.errors import DivisibilityError
from ..core.typing import Array, Shape
from ..mesh import ProcessGroup


def check_divisible(
    shape: Shape, dim: int, group: ProcessGroup, what: str, remedy: str = "pad the array first"
) -> None:
    """Raises `DivisibilityError` unless the size of the group divides a dim."""
    size, parts = shape[dim], group.size
    if size % parts:
        raise DivisibilityError(
            f"{what} cuts dim {dim} of an array of shape {shape} into {parts} slices, one per rank "
            f"of the group {group}, but {size} is not a multiple of {parts}; {remedy}, "
            f"to {size + -size % parts}"
        )


def pad_dim(x: Array, dim: int, parts: int) -> Array:
    """Appends zeros to a dim until its size is a multiple of `parts`.

    Example:
        >>> pad_dim(jnp.ones((5, 2)), 0, 4).shape
        (8, 2)
    """
    widths = [(0, 0)] * x.ndim
    widths[dim] = (0, -x.shape[dim] % parts)
    return jnp.pad(x, widths)
