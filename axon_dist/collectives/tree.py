"""Sums over ranks along a balanced binary tree, whose bits do not depend on the layout.

With a power of two of ranks, stage s adds the sums of ranks that differ in bit s alone:

    ((x0 + x1) + (x2 + x3)) + ((x4 + x5) + (x6 + x7))

Each half of a pair keeps half of the elements (recursive halving), so that every element is added
up on one rank, and a rank sends (N - 1) / N of its value, as in a ring.

Source: Rabenseifner, Optimization of Collective Reduction Operations, ICCS 2004.
"""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from ..core.typing import Array


def tree_sum(x: Array, axes: tuple[str, ...], split: Mapping[str, int]) -> Array:
    """Sums over mesh axes along a tree over the ranks, inside `shard_map`.

    Args:
        x: this rank's addend, whole.
        axes: the axes to sum over, outer to inner; each has a power of two of ranks.
        split: the dim of the sum that an axis splits, the outer axis first where it is one dim;
            axes that it does not name keep copies.

    Returns:
        This rank's shard of the sum.

    Example:
        >>> mesh = jax.make_mesh((4,), ("dp",), axis_types=(jax.sharding.AxisType.Auto,))
        >>> P = jax.sharding.PartitionSpec
        >>> over = jax.shard_map(
        ...     lambda x: tree_sum(x, ("dp",), {}), mesh=mesh, in_specs=P("dp"), out_specs=P(),
        ...     check_vma=False,
        ... )
        >>> over(jnp.arange(8.0))
        Array([12., 16.], dtype=float32)
    """
    shape: list[int] = []
    at: dict[str, int] = {}
    for dim, size in enumerate(x.shape):
        for axis in (axis for axis, found in split.items() if found == dim):
            at[axis] = len(shape)
            shape.append(jax.lax.axis_size(axis))
            size //= shape[-1]
        shape.append(size)
    x = x.reshape(shape)
    for axis in reversed(axes):
        x = _halved(x, axis, at[axis]) if axis in at else _copied(x, axis)
    return x.reshape([size for dim, size in enumerate(x.shape) if dim not in at.values()])


def _halved(x: Array, axis: str, dim: int) -> Array:
    """The sum over one axis; of `dim`, which is as long as the axis, this rank's element."""
    size, rank = jax.lax.axis_size(axis), jax.lax.axis_index(axis)
    stages, shape = size.bit_length() - 1, x.shape
    x = x.reshape(*shape[:dim], *[2] * stages, *shape[dim + 1 :])
    for stage in range(stages):
        bit, place = (rank >> stage) & 1, dim + stages - 1 - stage
        kept, sent = (jax.lax.dynamic_index_in_dim(x, b, place) for b in (bit, 1 - bit))
        partners = [(source, source ^ 1 << stage) for source in range(size)]
        x = kept + jax.lax.ppermute(sent, axis, partners)
    return x.reshape(*shape[:dim], 1, *shape[dim + 1 :])


def _copied(x: Array, axis: str) -> Array:
    """The sum over one axis, whole on every rank."""
    size = jax.lax.axis_size(axis)
    rows = jnp.pad(x.ravel(), (0, -x.size % size)).reshape(size, -1)
    whole = jax.lax.all_gather(_halved(rows, axis, 0), axis, axis=0, tiled=True)
    return whole.ravel()[: x.size].reshape(x.shape)
