"""Closed forms for planning: how many microbatches hide the bubble of 1F1B and GPipe."""

from __future__ import annotations

from fractions import Fraction
from math import ceil

from ..core.errors import ScheduleError
from .action import check_sizes


def efficiency(num_microbatches: int, num_stages: int) -> float:
    """The share of time that devices work under 1F1B or GPipe: `M / (M+S-1)`.

    Args:
        num_microbatches: microbatches `M`.
        num_stages: stages `S`.

    Returns:
        A fraction in (0, 1]; one minus the bubble.

    Raises:
        ScheduleError: a number below 1.

    Example:
        >>> round(efficiency(8, 4), 4)
        0.7273
    """
    check_sizes(num_microbatches=num_microbatches, num_stages=num_stages)
    return num_microbatches / (num_microbatches + num_stages - 1)


def min_microbatches(num_stages: int, target: float) -> int:
    """The fewest microbatches with which 1F1B or GPipe reaches an efficiency.

    Args:
        num_stages: stages `S`.
        target: the efficiency wanted, in (0, 1).

    Returns:
        The least `M` with `M / (M+S-1) >= target`.

    Raises:
        ScheduleError: a number of stages below 1, or a target that no `M` reaches.

    Example:
        >>> min_microbatches(4, 0.9)
        27
    """
    check_sizes(num_stages=num_stages)
    if not 0 < target < 1:
        raise ScheduleError(
            f"got an efficiency target of {target!r}. It must lie between 0 and 1, both excluded: "
            "a pipeline of several stages always has a bubble; try 0.9."
        )
    exact = Fraction(str(target))  # what was typed: 0.9 is nine tenths here, unlike the float
    return max(1, ceil(exact * (num_stages - 1) / (1 - exact)))


def pipeline_advice(num_microbatches: int, num_stages: int) -> tuple[str, ...]:
    """What is worth knowing about a choice of microbatches, as sentences to show or to ignore.

    Args:
        num_microbatches: microbatches `M`.
        num_stages: stages `S`.

    Returns:
        Sentences; empty from `M = 4S` on, where at least 80 % of the time is work.

    Raises:
        ScheduleError: a number below 1.

    Example:
        >>> pipeline_advice(8, 4)
        ('8 microbatches keep 4 stages busy 73 % of the time; 16 would give 84 %.',)
    """
    now = efficiency(num_microbatches, num_stages)
    enough = 4 * num_stages
    if num_stages == 1 or num_microbatches >= enough:
        return ()
    then = efficiency(enough, num_stages)
    advice = [
        f"{num_microbatches} microbatches keep {num_stages} stages busy {now:.0%} of the time; "
        f"{enough} would give {then:.0%}."
    ]
    if num_microbatches < num_stages:
        advice.append(
            f"With fewer microbatches than stages, at least "
            f"{num_stages - num_microbatches} devices are idle in every tick."
        )
    return tuple(line.replace("%", " %") for line in advice)
