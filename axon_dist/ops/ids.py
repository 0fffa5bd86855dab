"""Ids of tokens and classes."""

from __future__ import annotations

import jax.numpy as jnp
from jax.typing import ArrayLike

from ..core.typing import Array


def wide_ids(ids: ArrayLike) -> Array:
    """Converts integers of less than 32 bits to int32, and returns others as they are.

    In uint8, class 259 would wrap to 3, and a count of 256 classes to 0.

    Example:
        >>> wide_ids(jnp.array([3], "uint8")).dtype, wide_ids(jnp.array([3], "uint32")).dtype
        (dtype('int32'), dtype('uint32'))
    """
    ids = jnp.asarray(ids)
    return ids.astype(jnp.int32) if ids.dtype.itemsize < 4 else ids
