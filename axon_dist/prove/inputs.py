"""Inputs to try a function with: given arrays, random draws, and edge cases of masks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

MOST_INTEGERS = 8
"""Integers are drawn below this where only their shape is known."""


def is_array(leaf: Any) -> bool:
    """Whether a leaf of the arguments is traced; Python numbers and all others are static."""
    return isinstance(leaf, (np.ndarray, np.generic, jax.Array, jax.ShapeDtypeStruct))


def draws_of(leaves: Sequence[Any], count: int) -> list[list[Any]]:
    """Returns the inputs to try, each a list of arrays.

    Arrays are used as they are; shapes are drawn `count` times. If an input holds only zeros and
    ones, as a mask does, one more draw makes it empty on its first rows, so that ranks have
    different counts.

    Args:
        leaves: arrays, or shapes to draw.
        count: how often shapes are drawn.
    """
    is_drawn = any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves)
    found = []
    for number in range(count if is_drawn else 1):
        rng = np.random.default_rng([0, number])
        found.append([_drawn(leaf, rng) for leaf in leaves])
    masks = [number for number, leaf in enumerate(found[0]) if _is_mask(leaf)]
    if masks:
        edge = list(found[-1])
        for number in masks:
            edge[number] = _uneven(edge[number])
        found.append(edge)
    return found


def _drawn(leaf: Any, rng: np.random.Generator) -> Any:
    if not isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf
    if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        seeds = rng.integers(0, 2**31, leaf.shape)
        keys = jax.vmap(jax.random.key)(np.ravel(seeds))
        return keys.reshape(leaf.shape)
    if leaf.dtype == bool:
        return rng.random(leaf.shape) < 0.6
    if np.issubdtype(leaf.dtype, np.integer):
        return rng.integers(0, MOST_INTEGERS, leaf.shape).astype(leaf.dtype)
    values = rng.normal(size=leaf.shape)
    if np.issubdtype(leaf.dtype, np.complexfloating):
        values = values + 1j * rng.normal(size=leaf.shape)
    return values.astype(leaf.dtype)


def _is_mask(leaf: Any) -> bool:
    """Whether an array of at least four rows holds only 0 and 1, one per sample or token."""
    if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return False
    if not 1 <= np.ndim(leaf) <= 2 or np.shape(leaf)[0] < 4:
        return False
    values = np.asarray(leaf)
    if values.dtype == bool:
        return True
    is_number = values.dtype.kind in "iuf"
    return is_number and bool(np.isin(values, (0, 1)).all()) and bool((values == 1).any())


def _uneven(leaf: Any) -> np.ndarray:
    """Returns the mask with its first quarter of rows empty and its last quarter full."""
    values = np.array(leaf)
    rows = values.shape[0]
    quarter = max(1, rows // 4)
    values[:quarter] = 0
    values[-quarter:] = 1
    return values
