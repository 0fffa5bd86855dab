"""Reduce-scatter: every rank gets its slice of the sum or the mean."""

from __future__ import annotations

from ..core.typing import Array, PyTree
from ..mesh import ProcessGroup
from .divide import check_divisible, pad_dim
from .move import own_slice
from .place import check_dim, each_leaf, keep_outside
from .primitive import sum_scatter
from .reduce import check_mean, counted, sum_leaf


def reduce_scatter_sum(
    x: PyTree, group: ProcessGroup, pad: bool = False, *, dim: int = 0
) -> PyTree:
    """Adds the values of all ranks up and gives slice r of the sum to rank r.

    An all-gather of the slices would give the all-reduce: the two cost half each. A group by a
    list of ranks costs a whole all-reduce.

    Args:
        x: a pytree of arrays: this rank's inside `shard_map`, rank-stacked ones outside.
        group: the ranks that take part, N of them.
        pad: appends zeros to the dim until N divides its size. The true values are the first
            `x.shape[dim]` of the slices put together again.
        dim: the dim to cut, of one rank's array.

    Returns:
        A pytree like `x` whose leaves are N times smaller along `dim`, rounded up; zeros on ranks
        outside a group by ranks.

    Raises:
        DivisibilityError: when N does not divide the size of the dim, without `pad`.

    Example:
        >>> import jax.numpy as jnp
        >>> from axon_dist.mesh import World
        >>> x = jnp.array([[1, 2, 3, 4], [10, 20, 30, 40]])
        >>> reduce_scatter_sum(x, World.emulate(2).default_group)
        Array([[11, 22],
               [33, 44]], dtype=int32)
    """
    return each_leaf(_sum, x, group, pad=pad, dim=dim)


def reduce_scatter_mean(
    x: PyTree, group: ProcessGroup, pad: bool = False, *, dim: int = 0
) -> PyTree:
    """Gives slice r of the mean over the group to rank r; see `reduce_scatter_sum`.

    Raises:
        DTypeError: for integers and booleans.
        DivisibilityError: when the group does not divide the dim, without `pad`.
    """
    return each_leaf(_mean, x, group, pad=pad, dim=dim)


def _sum(x: Array, group: ProcessGroup, pad: bool, dim: int) -> Array:
    dim = check_dim(dim, x.ndim, x.shape)
    if pad:
        x = pad_dim(x, dim, group.size)
    check_divisible(x.shape, dim, group, "reduce_scatter", "pass pad=True to append zeros")
    x = counted(x)
    if group.members is None:
        return sum_scatter(x, group, dim)
    return keep_outside(own_slice(sum_leaf(x, group), group, dim), x, group)


def _mean(x: Array, group: ProcessGroup, pad: bool, dim: int) -> Array:
    check_mean(x)
    return _sum(x, group, pad, dim) / group.size
