"""`TimeSheet`: where the seconds of a run go."""

from __future__ import annotations

import collections
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

INITIALIZE, COMPILE, DATA, DEVICES = "initialize", "compile", "data", "devices"
VALIDATE, SAVE, STEP, LOST, OTHER = "validation", "save", "step", "lost", "other"


class TimeSheet:
    """Adds up seconds by what they were spent on.

    Args:
        clock: tells the seconds; a test may put its own.

    Example:
        >>> ticks = iter([0.0, 1.0, 4.0, 10.0])
        >>> sheet = TimeSheet(lambda: next(ticks))
        >>> with sheet.on(SAVE):
        ...     pass
        >>> sheet[SAVE], sheet.elapsed
        (3.0, 10.0)
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter):
        self._clock = clock
        self._start = clock()
        self._seconds: dict[str, float] = collections.defaultdict(float)

    def __getitem__(self, kind: str) -> float:
        return self._seconds[kind]

    @property
    def elapsed(self) -> float:
        """Seconds since the sheet was begun."""
        return self._clock() - self._start

    @contextmanager
    def on(self, kind: str) -> Iterator[None]:
        """Counts what happens in the context as of a kind."""
        start = self._clock()
        try:
            yield
        finally:
            self.add(kind, self._clock() - start)

    def add(self, kind: str, seconds: float) -> None:
        """Counts seconds measured elsewhere."""
        self._seconds[kind] += seconds

    def by_kind(self, train_seconds: float) -> dict[str, float]:
        """Every second since the beginning, each in one kind.

        Args:
            train_seconds: from step to step, all told; what is not data or lost in it is `step`.
        """
        named = (INITIALIZE, COMPILE, DATA, VALIDATE, SAVE, LOST)
        found = {kind: self[kind] for kind in named}
        found[STEP] = max(train_seconds - self[DATA] - self[LOST], 0.0)
        return {**found, OTHER: max(self.elapsed - sum(found.values()), 0.0)}
