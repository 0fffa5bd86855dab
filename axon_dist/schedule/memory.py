"""How many activations a schedule keeps alive, from the order of each device's actions alone."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from .action import Action, Phase, check_sizes
from .table import Schedule

IN_FLIGHT_ENDS = (Phase.B, Phase.I)
"""A microbatch is in flight on a stage from its `F` to its `B` or `I`."""

STASH_ENDS = (Phase.B, Phase.W)
"""What a stage keeps for its backward is needed from `F` to the end of the backward."""


def peak_live(schedule: Schedule, ends: Collection[Phase] = IN_FLIGHT_ENDS) -> tuple[int, ...]:
    """Counts, per device, the most stage inputs alive at one time.

    A device with `V` chunks counts chunks: divide by `V` for microbatches over all its layers.

    Args:
        schedule: a valid table.
        ends: the phases that end a life. `IN_FLIGHT_ENDS` gives the papers' number, `STASH_ENDS`
            the number of slots a stash needs; they differ only where the backward is split.

    Returns:
        One count per device.

    Example:
        >>> from axon_dist.schedule import zero_bubble_h1
        >>> peak_live(zero_bubble_h1(4, 8)), peak_live(zero_bubble_h1(4, 8), STASH_ENDS)
        ((4, 3, 2, 1), (4, 4, 4, 4))
    """
    Schedule.check(schedule, "its peaks")
    return tuple(_peak(schedule.order(d), ends) for d in range(schedule.num_devices))


def _peak(order: Iterable[Action], ends: Collection[Phase]) -> int:
    live = peak = 0
    for action in order:
        live += (action.phase is Phase.F) - (action.phase in ends)
        peak = max(peak, live)
    return peak


@dataclass(frozen=True)
class PipelineMemoryStats:
    """Peak activations of a pipeline, in stage inputs of one microbatch.

    Args:
        per_stage: the peak of each stage through the whole model.
        per_device: the peak of each device; with one chunk the same numbers.

    Example:
        >>> PipelineMemoryStats.one_f_one_b_peak_activations(num_stages=4, num_microbatches=8)
        PipelineMemoryStats(per_stage=(4, 3, 2, 1), per_device=(4, 3, 2, 1))
    """

    per_stage: tuple[int, ...]
    per_device: tuple[int, ...]

    @property
    def worst(self) -> int:
        """The peak of the device that needs the most: what must fit."""
        return max(self.per_device)

    @property
    def total(self) -> int:
        """The sum over all devices."""
        return sum(self.per_device)

    @classmethod
    def of(cls, schedule: Schedule) -> PipelineMemoryStats:
        """Counts them in a table.

        Args:
            schedule: a valid table.

        Returns:
            The microbatches in flight (`F` to `B` or `I`) on each stage and device.
        """
        per_device = peak_live(schedule)
        per_stage = (
            _peak((a for a in schedule.order(home) if a.stage == stage), IN_FLIGHT_ENDS)
            for stage, home in enumerate(schedule.placement)
        )
        return cls(tuple(per_stage), per_device)

    @classmethod
    def gpipe_peak_activations(cls, num_stages: int, num_microbatches: int) -> PipelineMemoryStats:
        """GPipe's peaks in closed form: every stage keeps all `M`, `S * M` in total.

        Args:
            num_stages: stages `S`.
            num_microbatches: microbatches `M`.

        Returns:
            The peaks.

        Raises:
            ScheduleError: a number below 1.

        Example:
            >>> stats = PipelineMemoryStats.gpipe_peak_activations(4, 8)
            >>> stats.worst, stats.total
            (8, 32)
        """
        return cls._closed_form(num_stages, num_microbatches, lambda stage: num_microbatches)

    @classmethod
    def one_f_one_b_peak_activations(
        cls, num_stages: int, num_microbatches: int
    ) -> PipelineMemoryStats:
        """1F1B's peaks in closed form: stage `s` keeps `min(S-s, M)`.

        Takes, returns and raises what `gpipe_peak_activations` does.

        Example:
            >>> stats = PipelineMemoryStats.one_f_one_b_peak_activations(4, 8)
            >>> stats.worst, stats.total
            (4, 10)
        """
        limit = lambda stage: num_stages - stage
        return cls._closed_form(num_stages, num_microbatches, limit)

    @classmethod
    def _closed_form(
        cls, num_stages: int, num_microbatches: int, limit: Callable[[int], int]
    ) -> PipelineMemoryStats:
        check_sizes(num_stages=num_stages, num_microbatches=num_microbatches)
        peaks = tuple(min(limit(stage), num_microbatches) for stage in range(num_stages))
        return cls(peaks, peaks)
