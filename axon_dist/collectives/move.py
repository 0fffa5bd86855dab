"""Collectives that move values: broadcast, gather, scatter, all-to-all, point-to-point."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Collection, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from ..core.checks import WHOLE, ArgumentKind, checked, is_whole
from ..core.errors import GroupError
from ..core.reduction import all_gather_dim, all_sum, sum_scatter, varying
from ..core.typing import Array, PyTree
from ..mesh import GROUP, ProcessGroup
from .place import (
    check_dim,
    check_divisible,
    check_root,
    each_leaf,
    keep_outside,
    pad_dim,
    position,
)
from .reduce import check_mean, counted, sum_leaf


def broadcast(x: PyTree, group: ProcessGroup) -> PyTree:
    """Gives every rank of the group the value of its first rank; see `broadcast_from`.

    Args:
        x: a pytree of arrays: this rank's inside `shard_map`, rank-stacked ones outside.
        group: the ranks that take part.

    Returns:
        A pytree like `x`.
    """
    return broadcast_from(x, group, src=0)


def broadcast_from(x: PyTree, group: ProcessGroup, *, src: int) -> PyTree:
    """Gives every rank of the group the value of rank `src`.

    It is one all-reduce of `x` on `src` and zeros elsewhere, because XLA:CPU has no broadcast. The
    zeros are selected, not multiplied, so NaNs on other ranks do not matter.

    Args:
        x: a pytree of arrays: this rank's inside `shard_map`, rank-stacked ones outside.
        group: the ranks that take part.
        src: the rank that sends, counted within the group.

    Returns:
        A pytree like `x`; under `check_vma=True` its type is invariant over the axes of the group.

    Raises:
        GroupError: if `src` is not a rank of the group.

    Example:
        >>> import jax.numpy as jnp
        >>> from axon_dist.mesh import World
        >>> world = World.emulate(4)
        >>> broadcast_from(jnp.array([1.0, 2.0, 3.0, 4.0]), world.default_group, src=2)
        Array([3., 3., 3., 3.], dtype=float32)
    """
    check_root(src, "src", group)
    return each_leaf(_broadcast, x, group, src=src)


@checked(group=GROUP)
def all_gather(x: PyTree, group: ProcessGroup, tiled: bool = False, *, dim: int = 0) -> PyTree:
    """Gives every rank of the group the values of all, in group order.

    A group by a list of ranks gathers from the whole mesh and selects, so it needs memory for
    `world_size` values. Ranks outside it get zeros, because their own value has another shape.

    Args:
        x: a pytree of arrays: this rank's inside `shard_map`, rank-stacked ones outside.
        group: the ranks that take part, N of them.
        tiled: False stacks the values in a new dim; True concatenates them along `dim`.
        dim: the position of the new dim, or with `tiled` the dim to concatenate along; counted
            without the rank-stacked dim.

    Returns:
        A pytree like `x`; leaves of shape `(d0, d1, ...)` become `(N, d0, d1, ...)`, or
        `(N * d0, d1, ...)` when tiled.

    Raises:
        ConfigError: if an array lacks the dim.

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

    In an SPMD program the result has the same shape on every rank, so the others get zeros.

    Args:
        x: a pytree of arrays: this rank's inside `shard_map`, rank-stacked ones outside.
        group: the ranks that take part, N of them.
        dst: the rank that receives, counted within the group.

    Returns:
        A pytree like `x` whose leaves have a new leading dim of size N.

    Raises:
        GroupError: if `dst` is not a rank of the group.

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
        A pytree like `x` whose leaves are N times smaller along `dim`; ranks that are not members
        of a `World.new_group` get zeros.

    Raises:
        GroupError: if `src` is not a rank of the group.
        DivisibilityError: if N does not divide the size of the dim.

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
    """Sends slice j of every rank to rank j, which concatenates the slices in sender order.

    It moves a sharding from one dim to another: if the sequence is sharded over N ranks,
    `all_to_all(x, group, split_dim=heads, concat_dim=sequence)` shards the heads instead, and the
    same call with the dims swapped is the inverse. A group by a list of ranks gathers from the
    whole mesh and selects.

    Args:
        x: a pytree of arrays: this rank's inside `shard_map`, rank-stacked ones outside.
        group: the ranks that take part, N of them.
        split_dim: the dim to cut into N slices.
        concat_dim: the dim along which to concatenate the received slices.

    Returns:
        A pytree like `x` whose leaves are N times smaller along `split_dim` and N times larger
        along `concat_dim`.

    Raises:
        DivisibilityError: if N does not divide the size of `split_dim`.

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
    """Returns this rank's slice of a value that is replicated over the group."""
    size = x.shape[dim] // group.size
    return jax.lax.dynamic_slice_in_dim(x, position(group) * size, size, dim)


def _broadcast(x: Array, group: ProcessGroup, src: int) -> Array:
    sent = jnp.where(position(group) == src, x, jnp.zeros_like(x))
    return keep_outside(all_sum(sent, group.axes).astype(x.dtype), x, group)


def _all_gather(x: Array, group: ProcessGroup, tiled: bool, dim: int) -> Array:
    dim = check_dim(dim, x.ndim if tiled else x.ndim + 1, x.shape)
    if group.members is None:
        return all_gather_dim(x, group.axes, dim, tiled)
    values = _member_values(x, group)
    gathered = jnp.concatenate(values, dim) if tiled else jnp.stack(values, dim)
    return keep_outside(gathered, x, group)


def _gather(x: Array, group: ProcessGroup, dst: int) -> Array:
    stacked = _all_gather(x, group, tiled=False, dim=0)
    return jnp.where(position(group) == dst, stacked, jnp.zeros_like(stacked))


def _scatter(x: Array, group: ProcessGroup, src: int, dim: int) -> Array:
    dim = check_dim(dim, x.ndim, x.shape)
    check_divisible(x.shape, dim, group, "scatter_tensor")
    if group.members is not None:
        return keep_outside(own_slice(_broadcast(x, group, src), group, dim), x, group)
    sent = jnp.where(position(group) == src, x, jnp.zeros_like(x))
    number = sent.astype(jnp.int8) if x.dtype == jnp.bool_ else sent
    return sum_scatter(number, group.axes, dim).astype(x.dtype)


def _all_to_all(x: Array, group: ProcessGroup, split_dim: int, concat_dim: int) -> Array:
    split_dim = check_dim(split_dim, x.ndim, x.shape)
    concat_dim = check_dim(concat_dim, x.ndim, x.shape)
    check_divisible(x.shape, split_dim, group, "all_to_all")
    if group.members is None:
        return jax.lax.all_to_all(
            varying(x, group.axes), group.axes, split_dim, concat_dim, tiled=True
        )
    slices = [own_slice(value, group, split_dim) for value in _member_values(x, group)]
    return keep_outside(jnp.concatenate(slices, concat_dim), x, group)


def _member_values(x: Array, group: ProcessGroup) -> list[Array]:
    """Gathers the values of all ranks of the mesh; returns those of the group's members."""
    stacked = all_gather_dim(x, group.axes, 0, tiled=False)
    return [stacked[rank] for rank in group.members or ()]


@checked(group=GROUP)
def reduce_scatter_sum(
    x: PyTree, group: ProcessGroup, pad: bool = False, *, dim: int = 0
) -> PyTree:
    """Sums the values of all ranks and gives slice r of the sum to rank r.

    It costs half of an all-reduce; an all-gather of the slices would be the other half. A group by
    a list of ranks costs a whole all-reduce.

    Args:
        x: a pytree of arrays: this rank's inside `shard_map`, rank-stacked ones outside.
        group: the ranks that take part, N of them.
        pad: appends zeros to the dim until N divides its size.
        dim: the dim to cut, of one rank's array.

    Returns:
        A pytree like `x` whose leaves are N times smaller along `dim`, rounded up; ranks that are
        not members of a `World.new_group` get zeros.

    Raises:
        DivisibilityError: if N does not divide the size of the dim, without `pad`.

    Example:
        >>> import jax.numpy as jnp
        >>> from axon_dist.mesh import World
        >>> x = jnp.array([[1, 2, 3, 4], [10, 20, 30, 40]])
        >>> reduce_scatter_sum(x, World.emulate(2).default_group)
        Array([[11, 22],
               [33, 44]], dtype=int32)
    """
    return each_leaf(_sum, x, group, pad=pad, dim=dim)


@checked(group=GROUP)
def reduce_scatter_mean(
    x: PyTree, group: ProcessGroup, pad: bool = False, *, dim: int = 0
) -> PyTree:
    """Gives slice r of the mean over the group to rank r; see `reduce_scatter_sum`.

    Args:
        x: as in `reduce_scatter_sum`.
        group: as in `reduce_scatter_sum`.
        pad: as in `reduce_scatter_sum`.
        dim: as in `reduce_scatter_sum`.

    Returns:
        A pytree as from `reduce_scatter_sum`.

    Raises:
        DTypeError: for integers and booleans.
        DivisibilityError: if the group does not divide the dim, without `pad`.
    """
    return each_leaf(_mean, x, group, pad=pad, dim=dim)


def _sum(x: Array, group: ProcessGroup, pad: bool, dim: int) -> Array:
    dim = check_dim(dim, x.ndim, x.shape)
    if pad:
        x = pad_dim(x, dim, group.size)
    check_divisible(x.shape, dim, group, "reduce_scatter", "pass pad=True to append zeros")
    x = counted(x)
    if group.members is None:
        return sum_scatter(x, group.axes, dim)
    return keep_outside(own_slice(sum_leaf(x, group), group, dim), x, group)


def _mean(x: Array, group: ProcessGroup, pad: bool, dim: int) -> Array:
    check_mean(x)
    return _sum(x, group, pad, dim) / group.size


PAIRS = ArgumentKind(
    "pairs of ranks, as in [(0, 1), (1, 2)]",
    lambda perm: (
        not isinstance(perm, (str, Mapping))
        and isinstance(perm, Collection)
        and all(isinstance(p, Sequence) and len(p) == 2 and all(map(is_whole, p)) for p in perm)
    ),
    GroupError,
)
"""The argument `perm` of `send_recv`."""


@checked(group=GROUP, perm=PAIRS)
def send_recv(x: PyTree, group: ProcessGroup, perm: Sequence[tuple[int, int]]) -> PyTree:
    """Sends values along pairs (source, destination); ranks that receive nothing get zeros.

    Args:
        x: a pytree of arrays: this rank's inside `shard_map`, rank-stacked ones outside.
        group: the ranks that take part.
        perm: pairs of ranks counted within the group; each rank sends and receives at most once.

    Returns:
        A pytree like `x`. Ranks that are not members of a `World.new_group` keep their value.

    Raises:
        GroupError: for a rank outside the group, or one that sends or receives twice.

    Example:
        >>> import jax.numpy as jnp
        >>> from axon_dist.mesh import World
        >>> send_recv(jnp.array([1, 2, 3]), World.emulate(3).default_group, [(0, 1), (1, 2)])
        Array([0, 1, 2], dtype=int32)
    """
    pairs = tuple((int(src), int(dst)) for src, dst in perm)
    _check_pairs(pairs, group)
    return each_leaf(_send, x, group, pairs=pairs)


@checked(group=GROUP, offset=WHOLE)
def shift(x: PyTree, group: ProcessGroup, offset: int = 1, wrap: bool = True) -> PyTree:
    """Sends every value to the rank `offset` further: rank r gets the value of rank r - offset.

    Args:
        x: a pytree of arrays: this rank's inside `shard_map`, rank-stacked ones outside.
        group: the ranks that take part, in the order of the line or ring.
        offset: how far; negative numbers send towards rank 0.
        wrap: True for a ring; False for a line, where ranks without a source get zeros.

    Returns:
        A pytree like `x`.

    Example:
        >>> import jax.numpy as jnp
        >>> from axon_dist.mesh import World
        >>> group = World.emulate(4).default_group
        >>> shift(jnp.array([1, 2, 3, 4]), group, 1, wrap=True)
        Array([4, 1, 2, 3], dtype=int32)
        >>> shift(jnp.array([1, 2, 3, 4]), group, -1, wrap=False)
        Array([2, 3, 4, 0], dtype=int32)
    """
    size = group.size
    moves = ((src, src + offset) for src in range(size))
    pairs = tuple((src, dst % size) for src, dst in moves if wrap or 0 <= dst < size)
    return each_leaf(_send, x, group, pairs=pairs)


def ring_all_reduce(x: PyTree, group: ProcessGroup) -> PyTree:
    """Sums over the group by passing slices around a ring, as communication libraries do.

    Every rank cuts its value into N slices. In N - 1 steps each slice goes once around the ring
    and every rank adds its own slice; rank r then has the sum of slice r + 1. In another N - 1
    steps the summed slices go around. Every rank sends 2 (N - 1) / N of the value, which is
    optimal. It equals `all_reduce_sum` up to the order of additions. It shows the algorithm; XLA's
    all-reduce is faster, because it knows the network.

    Args:
        x: a pytree of arrays: this rank's inside `shard_map`, rank-stacked ones outside.
        group: the ranks that take part, N of them.

    Returns:
        A pytree like `x`, but with int32 for booleans, as in `all_reduce_sum`; under
        `check_vma=True` its type is varying.

    Example:
        >>> import jax.numpy as jnp
        >>> from axon_dist.mesh import World
        >>> ring_all_reduce(jnp.array([1.0, 2.0, 3.0, 4.0]), World.emulate(4).default_group)
        Array([10., 10., 10., 10.], dtype=float32)

    Source: Patarasuk and Yuan, Bandwidth optimal all-reduce algorithms, JPDC 69(2), 2009.
    """
    return each_leaf(_ring, x, group)


def _send(x: Array, group: ProcessGroup, pairs: tuple[tuple[int, int], ...]) -> Array:
    if group.members is not None:
        pairs = tuple((group.members[src], group.members[dst]) for src, dst in pairs)
    # `ppermute` takes axes only in the order of the mesh in context, and counts ranks in it.
    mesh = jax.sharding.get_abstract_mesh()
    axes = tuple(axis for axis in mesh.axis_names if axis in group.axes)
    if axes != group.axes:
        pairs = tuple((_over(axes, src, group), _over(axes, dst, group)) for src, dst in pairs)
    sent = jax.lax.ppermute(varying(x, axes), axes, pairs)
    return keep_outside(sent, x, group)


def _over(axes: tuple[str, ...], rank: int, group: ProcessGroup) -> int:
    """A rank within a group, counted row-major over the group's axes in another order."""
    sizes = group.mesh.shape
    places = np.unravel_index(rank, [sizes[axis] for axis in group.axes])
    place_of = dict(zip(group.axes, places, strict=True))
    order = [place_of[axis] for axis in axes]
    return int(np.ravel_multi_index(order, [sizes[axis] for axis in axes]))


def _ring(x: Array, group: ProcessGroup) -> Array:
    x = x.astype(jnp.int32) if x.dtype == jnp.bool_ else x
    size = group.size
    rank = position(group)
    to_next = tuple((src, (src + 1) % size) for src in range(size))
    slices = pad_dim(varying(x, group.axes).ravel(), 0, size).reshape(size, -1)
    for step in range(size - 1):
        arrived = _send(slices[(rank - step) % size], group, to_next)
        slices = slices.at[(rank - step - 1) % size].add(arrived)
    for step in range(size - 1):
        arrived = _send(slices[(rank + 1 - step) % size], group, to_next)
        slices = slices.at[(rank - step) % size].set(arrived)
    return keep_outside(slices.ravel()[: x.size].reshape(x.shape), x, group)


def _check_pairs(pairs: tuple[tuple[int, int], ...], group: ProcessGroup) -> None:
    for name, ranks in (("sends", [p[0] for p in pairs]), ("receives", [p[1] for p in pairs])):
        wrong = [rank for rank in ranks if not 0 <= rank < group.size]
        if wrong:
            raise GroupError(
                f"perm {list(pairs)} names ranks {wrong}, but the group {group} has "
                f"{group.size}; ranks are counted within the group, 0..{group.size - 1}"
            )
        twice = sorted({rank for rank in ranks if ranks.count(rank) > 1})
        if twice:
            raise GroupError(
                f"in perm {list(pairs)} rank {twice[0]} {name} twice; each rank sends at most once "
                "and receives at most once, so use several calls, or broadcast"
            )


class Mailbox:
    """Point-to-point messages on the host, as a reference for `send_recv` programs.

    Messages with the same source, destination and tag arrive in the order in which they were sent;
    different tags do not mix. It uses no devices and no threads.

    Args:
        num_ranks: the number of ranks.

    Raises:
        GroupError: if `num_ranks` is below 1.

    Example:
        >>> mailbox = Mailbox(2)
        >>> mailbox.send([1, 2, 3], src=0, dst=1, tag=5)
        >>> mailbox.recv(src=0, dst=1, tag=5)
        array([1, 2, 3])
    """

    def __init__(self, num_ranks: int):
        if num_ranks < 1:
            raise GroupError(f"got a mailbox for {num_ranks} ranks; it needs at least one")
        self.num_ranks = num_ranks
        self._queues: dict[tuple[int, int, int], deque[np.ndarray]] = defaultdict(deque)

    def send(self, value: object, src: int, dst: int, tag: int = 0) -> None:
        """Sends a copy of `value` to rank `dst`.

        Raises:
            GroupError: for a rank that does not exist or a negative tag.
        """
        self._queues[self._address(src, dst, tag)].append(np.array(value))

    def recv(self, src: int, dst: int, tag: int = 0, *, size: int | None = None) -> np.ndarray:
        """Receives the oldest message from `src` to `dst` with this tag.

        Args:
            src: the rank that sent it.
            dst: the rank that receives it.
            tag: its tag.
            size: how many elements it must have; None for any number.

        Returns:
            The array that was sent.

        Raises:
            GroupError: if nothing was sent, or the size differs; the message then stays.
        """
        queue = self._queues[self._address(src, dst, tag)]
        if not queue:
            raise GroupError(
                f"rank {dst} has no message from rank {src} with tag {tag}; send it first"
            )
        if size is not None and queue[0].size != size:
            raise GroupError(
                f"the message from rank {src} to rank {dst} with tag {tag} has {queue[0].size} "
                f"elements, but size={size} was expected; it stays in the mailbox: receive it with "
                f"size={queue[0].size}"
            )
        return queue.popleft()

    def __len__(self) -> int:
        """The number of pending messages, over all ranks and tags."""
        return sum(len(queue) for queue in self._queues.values())

    def _address(self, src: int, dst: int, tag: int) -> tuple[int, int, int]:
        for name, rank in (("src", src), ("dst", dst)):
            if not 0 <= rank < self.num_ranks:
                raise GroupError(
                    f"{name}={rank} is not a rank of {self.num_ranks}; ranks are "
                    f"0..{self.num_ranks - 1}"
                )
        if tag < 0:
            raise GroupError(f"got tag {tag}; tags are numbers from 0")
        return src, dst, tag
