"""A limit on the steps in flight, for emulated devices share one small thread pool."""

from __future__ import annotations

import collections
from typing import Any

import jax


class InFlightLimit:
    """Waits for an old step once too many are under way.

    Every emulated device of every step in flight parks a thread while it waits for the others;
    when the pool is full of waiting devices, none can arrive and XLA ends the process. Real
    devices have queues of their own and need no limit.

    Args:
        limit: the most steps in flight; 0 sets no limit.
    """

    def __init__(self, limit: int):
        self.limit = limit
        self._running: collections.deque[Any] = collections.deque()

    def add(self, result: Any) -> None:
        """Notes a step by one of its results, and waits for the oldest beyond the limit."""
        if not self.limit:
            return
        self._running.append(result)
        if len(self._running) > self.limit:
            jax.block_until_ready(self._running.popleft())
