"""Collectives that move values and reduce nothing: broadcast, gather, scatter, all-to-all."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ..core.reduction import gathered, varying
from ..core.typing import Array, PyTree
from ..mesh import ProcessGroup
from .place import (
    all_sum,
    check_dim,
    check_divisible,
    check_root,
    each_leaf,
    keep_outside,
    pad_dim,
    position,
    sum_scatter,
)
from .reduce import check_mean, counted, sum_leaf


def broadcast(x: PyTree, group: ProcessGroup) -> PyTree:
    """Gives every rank of the group the value of its first rank; see `broadcast_from`."""
    return broadcast_from(x, group, src=0)


def broadcast_from(x: PyTree, group: ProcessGroup, *, src: int) -> PyTree:
    """Gives every rank of the group the value of rank `src`.

    It is the sum of `x` on `src` and zeros elsewhere, chosen and not multiplied, so that a NaN on
    another rank goes nowhere. One all-reduce; XLA has no broadcast on CPU.

    Args:
        x: a pytree of arrays: this rank's inside `shard_map`, rank-stacked ones outside.
        group: the ranks that take part.
        src: the rank that sends, counted within the group.

    Returns:
        A pytree like `x`; under `check_vma=True` typed invariant over the axes of the group.

    Raises:
        GroupError: when `src` is not a rank of the group.

    Example:
        >>> import jax.numpy as jnp
        >>> from axon_dist.mesh import World
        >>> world = World.emulate(4)
        >>> broadcast_from(jnp.array([1.0, 2.0, 3.0, 4.0]), world.default_group, src=2)
        Array([3., 3., 3., 3.], dtype=float32)
    """
    check_root(src, "src", group)
    return each_leaf(_broadcast, x, group, src=src)


def all_gather(x: PyTree, group: ProcessGroup, tiled: bool = False, *, dim: int = 0) -> PyTree:
    """Gives every rank of the group the values of all, in group order.

    A group by a list of ranks gathers from the whole mesh and selects, so it needs memory for
    `world_size` values; ranks outside it get zeros, for their own value has another shape.

    Args:
        x: a pytree of arrays: this rank's inside `shard_map`, rank-stacked ones outside.
        group: the ranks that take part, N of them.
        tiled: stacks the values in a new dim when False, concatenates them along `dim` when True.
        dim: the new dim, or the one to concatenate along, of one rank's array.

    Returns:
        A pytree like `x` whose leaves of shape `(d0, d1, ...)` became `(N, d0, d1, ...)`, or
        `(N * d0, d1, ...)` when tiled.

    Raises:
        ConfigError: when an array lacks the dim.

    Example:
        >>> import jax.numpy as jnp
        >>> from axon_dist.mesh import World
        >>> x = jnp.arange(8.0).reshape(4, 2)
        >>> all_gather(x, World.emulate(4).default_group, tiled=True)[1]
        Array([0., 1., 2., 3., 4., 5., 6., 7.], dtype=float32)
    """
    return each_leaf(_all_gather, x, group, tiled=tiled, dim=dim)


def gather_tensor(x: PyTree, group: ProcessGroup, dst: int = 0) -> PyTree:
    """Gives rank `dst` the stack of all values, and every other rank zeros.

    One program on many ranks has one shape per value, so the others cannot get nothing; they pay
    for an all-gather, too.

    Args:
        x: a pytree of arrays: this rank's inside `shard_map`, rank-stacked ones outside.
        group: the ranks that take part, N of them.
        dst: the rank that receives, counted within the group.

    Returns:
        A pytree like `x` whose leaves have a new leading dim of size N.

    Raises:
        GroupError: when `dst` is not a rank of the group.

    Example:
        >>> import jax.numpy as jnp
        >>> from axon_dist.mesh import World
        >>> gather_tensor(jnp.array([5, 6]), World.emulate(2).default_group, dst=1)
        Array([[0, 0],
               [5, 6]], dtype=int32)
    """
    check_root(dst, "dst", group)
    return each_leaf(_gather, x, group, dst=dst)


def scatter_tensor(x: PyTree, group: ProcessGroup, src: int = 0, *, dim: int = 0) -> PyTree:
    """Cuts the value of rank `src` into equal slices and gives slice r to rank r.

    Args:
        x: a pytree of arrays, of the same shape on every rank: this rank's inside `shard_map`,
            rank-stacked ones outside. Only the values on `src` count.
        group: the ranks that take part, N of them.
        src: the rank that sends, counted within the group.
        dim: the dim to cut, of one rank's array.

    Returns:
        A pytree like `x` whose leaves are N times smaller along `dim`; zeros on ranks outside a
        group by ranks.

    Raises:
        GroupError: when `src` is not a rank of the group.
        DivisibilityError: when N does not divide the size of the dim.

    Example:
        >>> import jax.numpy as jnp
        >>> from axon_dist.mesh import World
        >>> x = jnp.stack([jnp.arange(4), jnp.zeros(4, int)])
        >>> scatter_tensor(x, World.emulate(2).default_group)
        Array([[0, 1],
               [2, 3]], dtype=int32)
    """
    check_root(src, "src", group)
    return each_leaf(_scatter, x, group, src=src, dim=dim)


def all_to_all(x: PyTree, group: ProcessGroup, split_dim: int, concat_dim: int) -> PyTree:
    """Sends slice j of every rank to rank j, which joins what it gets in the order of the senders.

    It moves a sharding from one dim to another: with the sequence sharded over N ranks,
    `all_to_all(x, group, split_dim=heads, concat_dim=sequence)` has the heads sharded instead, and
    the same with the dims exchanged undoes it. A group by a list of ranks gathers from the whole
    mesh and selects.

    Args:
        x: a pytree of arrays: this rank's inside `shard_map`, rank-stacked ones outside.
        group: the ranks that take part, N of them.
        split_dim: the dim that is cut into N slices.
        concat_dim: the dim along which the slices received are joined.

    Returns:
        A pytree like `x` whose leaves are N times smaller along `split_dim` and N times larger
        along `concat_dim`.

    Raises:
        DivisibilityError: when N does not divide the size of `split_dim`.

    Example:
        >>> import jax.numpy as jnp
        >>> from axon_dist.mesh import World
        >>> x = jnp.arange(8).reshape(2, 2, 2)
        >>> all_to_all(x, World.emulate(2).default_group, split_dim=1, concat_dim=0)[0].ravel()
        Array([0, 2, 4, 6], dtype=int32)

    Source: Jacobs et al., DeepSpeed Ulysses, arXiv:2309.14509, for its use on sequences.
    """
    return each_leaf(_all_to_all, x, group, split_dim=split_dim, concat_dim=concat_dim)


def own_slice(x: Array, group: ProcessGroup, dim: int) -> Array:
    """This rank's slice of a value that all ranks of the group hold whole."""
    size = x.shape[dim] // group.size
    return jax.lax.dynamic_slice_in_dim(x, position(group) * size, size, dim)


def _broadcast(x: Array, group: ProcessGroup, src: int) -> Array:
    sent = jnp.where(position(group) == src, x, jnp.zeros_like(x))
    return keep_outside(all_sum(sent, group).astype(x.dtype), x, group)


def _all_gather(x: Array, group: ProcessGroup, tiled: bool, dim: int) -> Array:
    dim = check_dim(dim, x.ndim if tiled else x.ndim + 1, x.shape)
    if group.members is None:
        return gathered(x, group.axes, dim, tiled)
    rows = _member_rows(x, group)
    joined = jnp.concatenate(rows, dim) if tiled else jnp.stack(rows, dim)
    return keep_outside(joined, x, group)


def _gather(x: Array, group: ProcessGroup, dst: int) -> Array:
    rows = _all_gather(x, group, tiled=False, dim=0)
    return jnp.where(position(group) == dst, rows, jnp.zeros_like(rows))


def _scatter(x: Array, group: ProcessGroup, src: int, dim: int) -> Array:
    dim = check_dim(dim, x.ndim, x.shape)
    check_divisible(x.shape, dim, group, "scatter_tensor")
    if group.members is not None:
        return keep_outside(own_slice(_broadcast(x, group, src), group, dim), x, group)
    sent = jnp.where(position(group) == src, x, jnp.zeros_like(x))
    number = sent.astype(jnp.int8) if x.dtype == jnp.bool_ else sent
    return sum_scatter(number, group, dim).astype(x.dtype)


def _all_to_all(x: Array, group: ProcessGroup, split_dim: int, concat_dim: int) -> Array:
    split_dim = check_dim(split_dim, x.ndim, x.shape)
    concat_dim = check_dim(concat_dim, x.ndim, x.shape)
    check_divisible(x.shape, split_dim, group, "all_to_all")
    if group.members is None:
        return jax.lax.all_to_all(
            varying(x, group.axes), group.axes, split_dim, concat_dim, tiled=True
        )
    slices = [own_slice(row, group, split_dim) for row in _member_rows(x, group)]
    return keep_outside(jnp.concatenate(slices, concat_dim), x, group)


def _member_rows(x: Array, group: ProcessGroup) -> list[Array]:
    rows = gathered(x, group.axes, 0, tiled=False)
    return [rows[rank] for rank in group.members or ()]


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
