"""Means over many batches: totals and weights of metrics, fetched some batches late."""

from __future__ import annotations

import collections
from collections.abc import Iterable, Iterator, Mapping
from typing import TypeVar

import jax
import numpy as np

from axon_dist.core.weighted import Weighted

LAG = 2
"""So many results stay on the devices, so that neither they nor the host wait for each other."""

_T = TypeVar("_T")


class MetricSums:
    """Totals and weights of metrics, in float64.

    Example:
        >>> sums = MetricSums()
        >>> sums.add({"loss": Weighted(6.0, 2.0)})
        >>> sums.add({"loss": Weighted(2.0, 2.0)}, copies=2)
        >>> sums.means
        {'loss': 2.3333333333333335}
    """

    def __init__(self) -> None:
        self._sums: dict[str, np.ndarray] = {}

    def add(self, metrics: Mapping[str, Weighted], copies: int = 1) -> None:
        """Takes what `evaluate_sums` returns for a batch, and waits for it.

        Args:
            metrics: totals and weights.
            copies: how often each sample stands in the batch.
        """
        for name, part in jax.device_get(dict(metrics)).items():
            both = np.array([part.total, part.weight], np.float64) / copies
            self._sums[name] = self._sums.get(name, np.zeros(2)) + both

    @property
    def means(self) -> dict[str, float]:
        """`sum(totals) / sum(weights)` of every metric; 0 where nothing weighs."""
        return {n: float(total / w) if w else 0.0 for n, (total, w) in self._sums.items()}


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
