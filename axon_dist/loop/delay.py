"""`delayed`: reads results late, so that the devices have work while the host waits."""

from __future__ import annotations

import collections
from collections.abc import Iterable, Iterator
from typing import TypeVar

_T = TypeVar("_T")


def delayed(items: Iterable[_T], lag: int) -> Iterator[_T]:
    """Yields the items in order, each only after `lag` more have been made.

    Args:
        items: what to yield; arrays that are still being computed, for instance.
        lag: how many to make ahead.

    Example:
        >>> list(delayed([1, 2, 3], lag=2))
        [1, 2, 3]
    """
    waiting: collections.deque[_T] = collections.deque()
    for item in items:
        waiting.append(item)
        if len(waiting) > lag:
            yield waiting.popleft()
    yield from waiting
