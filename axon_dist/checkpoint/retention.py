"""Which checkpoints stay: the newest, the best, and every n-th; pure."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from ..core.errors import ConfigError
from ..core.told import WHOLE


@dataclasses.dataclass(frozen=True)
class Entry:
    """A finished checkpoint in a folder of them.

    Args:
        step: how many steps its state had taken.
        serial: how many were written before it; a run that went back has steps out of order.
        score: lower is better; None without one.
    """

    step: int
    serial: int
    score: float | None = None


@dataclasses.dataclass(frozen=True)
class Retention:
    """Which checkpoints stay when a new one is complete.

    Args:
        last: how many of the newest, at least 1.
        best: how many of those with the lowest scores.
        every: those whose step is a multiple of it, too; 0 for none.

    Raises:
        ConfigError: for a count out of range.

    Example:
        >>> entries = [Entry(step, serial=step) for step in (10, 20, 30, 40)]
        >>> [entry.step for entry in Retention(last=1, every=20).outdated(entries)]
        [10, 30]
    """

    last: int = 3
    best: int = 0
    every: int = 0

    def __post_init__(self) -> None:
        self.validate()

    def validate(self) -> None:
        """Raises `ConfigError` unless at least one checkpoint stays."""
        for name in ("last", "best", "every"):
            WHOLE.check("Retention", name, getattr(self, name))
        if self.last < 1 or self.best < 0 or self.every < 0:
            raise ConfigError(
                f"got last={self.last}, best={self.best} and every={self.every}; the first must "
                "be at least 1, the others at least 0"
            )

    def outdated(self, entries: Sequence[Entry]) -> list[Entry]:
        """The checkpoints to delete, oldest first."""
        by_age = sorted(entries, key=lambda entry: entry.serial)
        scored = [entry for entry in by_age if not math.isnan(_score(entry))]
        by_score = sorted(scored, key=lambda entry: (_score(entry), -entry.serial))
        kept = {*by_age[-self.last :], *by_score[: self.best]}
        if self.every:
            kept |= {entry for entry in by_age if entry.step % self.every == 0}
        return [entry for entry in by_age if entry not in kept]


def _score(entry: Entry) -> float:
    return math.nan if entry.score is None else entry.score
