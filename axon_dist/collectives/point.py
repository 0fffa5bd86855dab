"""Point to point: every rank sends to at most one other and receives from at most one."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Collection, Mapping, Sequence

import jax
import numpy as np

from ..core.errors import GroupError
from ..core.reduction import varying
from ..core.told import WHOLE, ArgumentKind, is_whole, told
from ..core.typing import Array, PyTree
from ..mesh import GROUP, ProcessGroup
from .place import each_leaf, keep_outside, pad_dim, position

PAIRS = ArgumentKind(
    "pairs of ranks, as in [(0, 1), (1, 2)]",
    lambda perm: (
        not isinstance(perm, (str, Mapping))
        and isinstance(perm, Collection)
        and all(isinstance(p, Sequence) and len(p) == 2 and all(map(is_whole, p)) for p in perm)
    ),
    GroupError,
)
"""What `send_recv` is told."""


@told(group=GROUP, perm=PAIRS)
def send_recv(x: PyTree, group: ProcessGroup, perm: Sequence[tuple[int, int]]) -> PyTree:
    """Sends values along pairs (source, destination); who is sent nothing gets zeros.

    Args:
        x: a pytree of arrays: this rank's inside `shard_map`, rank-stacked ones outside.
        group: the ranks that take part.
        perm: pairs of ranks counted within the group; each rank sends and receives at most once.

    Returns:
        A pytree like `x`. Ranks outside a group by ranks keep their value.

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


@told(group=GROUP, offset=WHOLE)
def shift(x: PyTree, group: ProcessGroup, offset: int = 1, wrap: bool = True) -> PyTree:
    """Sends every value `offset` ranks further: rank r gets that of rank r - offset.

    Args:
        x: a pytree of arrays: this rank's inside `shard_map`, rank-stacked ones outside.
        group: the ranks that take part, in the order of the line or ring.
        offset: how far; negative numbers send towards rank 0.
        wrap: True closes the ring; False leaves a line, into whose open end zeros move.

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
    """Adds up over the group by passing slices around a ring, as libraries do underneath.

    Every rank cuts its value into N slices. In N - 1 steps each slice goes once around the ring
    and every rank adds its own to it; rank r then holds the sum of slice r + 1. In another N - 1
    steps the finished slices go around. Every rank sends 2 (N - 1) / N of the value, which is the
    least possible. It equals `all_reduce_sum` up to the order of the additions, and is here to be
    read; XLA's own all-reduce knows the wires.

    Args:
        x: a pytree of arrays: this rank's inside `shard_map`, rank-stacked ones outside.
        group: the ranks that take part, N of them.

    Returns:
        A pytree like `x`; under `check_vma=True` typed varying.

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
    sent = jax.lax.ppermute(varying(x, group.axes), group.axes, pairs)
    return keep_outside(sent, x, group)


def _ring(x: Array, group: ProcessGroup) -> Array:
    size, here = group.size, position(group)
    onwards = tuple((src, (src + 1) % size) for src in range(size))
    slices = pad_dim(varying(x, group.axes).ravel(), 0, size).reshape(size, -1)
    for step in range(size - 1):
        arrived = _send(slices[(here - step) % size], group, onwards)
        slices = slices.at[(here - step - 1) % size].add(arrived)
    for step in range(size - 1):
        arrived = _send(slices[(here + 1 - step) % size], group, onwards)
        slices = slices.at[(here - step) % size].set(arrived)
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
    """Keeps messages between ranks until they are received, first in, first out.

    Messages with one source, destination and tag arrive in the order in which they were sent;
    different tags do not mix. It runs on the host alone, with no devices and no threads: the
    meaning of point-to-point messages, to compare a program of `send_recv` with.

    Args:
        num_ranks: how many ranks there are.

    Raises:
        GroupError: for no ranks.

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
        """Leaves a copy of `value` for rank `dst`.

        Raises:
            GroupError: for a rank that does not exist or a negative tag.
        """
        self._queues[self._address(src, dst, tag)].append(np.array(value))

    def recv(self, src: int, dst: int, tag: int = 0, *, size: int | None = None) -> np.ndarray:
        """Takes the oldest message from `src` to `dst` with this tag.

        Args:
            src: the rank that sent it.
            dst: the rank that receives it.
            tag: its tag.
            size: how many elements it must have; None takes any number.

        Returns:
            The array that was sent.

        Raises:
            GroupError: when nothing was sent, or the size differs; the message then stays.
        """
        queue = self._queues[self._address(src, dst, tag)]
        if not queue:
            raise GroupError(
                f"rank {dst} has no message from rank {src} with tag {tag}; send it first"
            )
        if size is not None and queue[0].size != size:
            raise GroupError(
                f"the message from rank {src} to rank {dst} with tag {tag} has {queue[0].size} "
                f"elements and {size} were expected; it stays in the box, receive it with "
                f"size={queue[0].size}"
            )
        return queue.popleft()

    def __len__(self) -> int:
        """How many messages wait, over all ranks and tags."""
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
