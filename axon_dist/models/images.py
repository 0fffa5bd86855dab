"""What the models of images begin with: pixels as numbers around zero."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from axon_dist.core.typing import Array


def pixels(images: Array, dtype: Any) -> Array:
    """Maps bytes to [-1, 1]; floats are taken as they are.

    Bytes cross from host to device as bytes, a quarter of what floats would be.

    Args:
        images: `[B, H, W, C]`, unsigned bytes or floats.
        dtype: what the first layer computes in.

    Returns:
        `[B, H, W, C]` of the dtype.

    Example:
        >>> pixels(jnp.array([0, 255], jnp.uint8), jnp.float32).tolist()
        [-1.0, 1.0]
    """
    if jnp.issubdtype(images.dtype, jnp.integer):
        images = images.astype(jnp.float32) / 127.5 - 1.0
    return images.astype(dtype)
