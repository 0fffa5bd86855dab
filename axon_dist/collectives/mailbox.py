"""`Mailbox`: point-to-point messages between ranks on the host, as MPI orders them."""

from __future__ import annotations

from collections import defaultdict, deque
from typing import Any

import numpy as np

from ..core.errors import GroupError


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

    def send(self, value: Any, src: int, dst: int, tag: int = 0) -> None:
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
