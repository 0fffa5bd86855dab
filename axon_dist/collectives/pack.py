"""Joining the small gradients of a bucket, so that a reduction has few operands."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from ..core.typing import Array

SMALL = 2**16
"""Elements below which copying a gradient is cheaper than one more operand of a reduction.

An operand costs eight emulated devices about 0.1 ms; from 256 kB on the two copies cost more.
"""


def pack(leaves: Sequence[Array]) -> list[Array]:
    """Joins the small arrays of a bucket into one flat array, behind the large ones as they are.

    Nothing is joined where mesh axes are left to the compiler, which would have to gather what it
    has sharded along them.

    Args:
        leaves: arrays of one dtype.

    Returns:
        The operands of one reduction.

    Example:
        >>> [x.shape for x in pack([jnp.ones(3), jnp.ones((500, 500)), jnp.ones((2, 2))])]
        [(500, 500), (7,)]
    """
    large, small = _split(leaves)
    joined = [jnp.concatenate([leaves[index].ravel() for index in small])] if small else []
    return [leaves[index] for index in large] + joined


def unpack(operands: Sequence[Array], leaves: Sequence[Array]) -> list[Array]:
    """Undoes `pack`: cuts operands like `pack(leaves)` into arrays shaped like the leaves."""
    large, small = _split(leaves)
    parts = dict(zip(large, operands, strict=False))
    ends = np.cumsum([leaves[index].size for index in small])
    for index, end in zip(small, ends, strict=True):
        leaf = leaves[index]
        parts[index] = operands[-1][end - leaf.size : end].reshape(leaf.shape)
    return [parts[index] for index in range(len(leaves))]


def _split(leaves: Sequence[Array]) -> tuple[list[int], list[int]]:
    """The indices of the arrays that stay alone, and of those that are joined, at least two."""
    everything = range(len(leaves))
    small = [index for index in everything if leaves[index].size < SMALL]
    mesh = jax.sharding.get_abstract_mesh()
    if len(small) < 2 or len(mesh.manual_axes) < len(mesh.axis_names):
        return list(everything), []
    return [index for index in everything if leaves[index].size >= SMALL], small
