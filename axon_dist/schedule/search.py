"""The best table for given costs and memory, when devices are kept in step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import combinations
from math import inf

from ..core.errors import ScheduleError
from .action import Phase, check_sizes
from .in_step import Rule, Times, greedy, retimed
from .memory import STASH_ENDS, peak_live
from .registry import SCHEDULES, build_schedule
from .simulate import Costs, simulate, times_of
from .table import Schedule

NAME = "searched"
"""What tables are called that no builder made."""


@dataclass(frozen=True)
class Found:
    """A table and what it costs.

    Args:
        schedule: the table.
        makespan: time of the step with devices in step.
        memory: microbatches, over all layers of a device, that the fullest one keeps for their
            backward.
    """

    schedule: Schedule
    makespan: float
    memory: float


def search(
    num_stages: int,
    num_microbatches: int,
    costs: Costs | None = None,
    memory: float = inf,
    chunks: int = 2,
) -> Found:
    """Finds the fastest table in step that memory allows; no named schedule is faster.

    Candidates are all named schedules, as they are and with their cells filled evenly, and tables
    that are built tick by tick under many rules. That is no proof that nothing faster exists.

    Args:
        num_stages: length of the pipeline: the number of devices.
        num_microbatches: microbatches per step.
        costs: times per microbatch and device. Its `stage_weights` may be finer than the stages:
            as many weights as pieces of the model, each stage taking equally many.
        memory: the most microbatches, counted over all layers of a device, that it may keep for
            their backward: from `F` to `B` or `W`.
        chunks: the most stages per device.

    Returns:
        The best; among equals the one that keeps and sends least.

    Raises:
        ScheduleError: a number below 1, memory that no schedule is content with, or weights that no
            number of stages divides.

    Example:
        >>> best = search(4, 8, Costs(f=1, i=1, w=1), memory=4)
        >>> best.makespan, best.memory
        (25.5, 4.0)
    """
    check_sizes(num_stages=num_stages, num_microbatches=num_microbatches, chunks=chunks)
    if isinstance(memory, bool) or not isinstance(memory, (int, float)) or not memory > 0:
        raise ScheduleError(
            f"got memory={memory!r:.60}. Give a number of microbatches above 0; inf is no limit."
        )
    costs = Costs() if costs is None else costs
    _check_weights(costs, num_stages, chunks)
    best: Found | None = None
    least = inf
    for found in _named(num_stages, num_microbatches, costs, chunks):
        least = min(least, found.memory)
        if found.memory <= memory:
            best = _better(best, found)
    for found in _built(num_stages, num_microbatches, costs, memory, chunks, best):
        best = _better(best, found)
    if best is None:
        raise ScheduleError(
            f"got memory={memory:g} for {num_stages} stages and {num_microbatches} microbatches. "
            f"No named schedule keeps fewer than {least:g} microbatches on each device; give at "
            "least that."
        )
    return best


def _check_weights(costs: Costs, num_stages: int, chunks: int) -> None:
    counts = [num_stages * count for count in range(1, chunks + 1)]
    if all(for_stages(costs, count) is None for count in counts):
        raise ScheduleError(
            f"got {len(costs.stage_weights)} weights for {num_stages} devices with up to {chunks} "
            f"stages each. Give one for each of {' or '.join(map(str, counts))} stages, or a "
            "multiple of that."
        )


def candidates(num_stages: int, num_microbatches: int, chunks: int) -> Iterator[Schedule]:
    """All named schedules that these sizes allow, with up to so many stages per device."""
    for name, row in SCHEDULES.items():
        counts = range(1, chunks + 1) if row.any_chunks else [None]
        for count in counts:
            if count is None and row.chunks > chunks:
                continue
            try:
                yield build_schedule(name, num_stages, num_microbatches, count)
            except ScheduleError:
                continue


def _measured(schedule: Schedule, costs: Costs) -> Found:
    memory = max(peak_live(schedule, STASH_ENDS)) / schedule.chunks
    return Found(schedule, simulate(schedule, costs, lockstep=True).makespan, memory)


def _better(best: Found | None, other: Found) -> Found:
    # Sums of the same times in another order may differ in their last digit.
    key = lambda found: (round(found.makespan, 9), found.memory, found.schedule.num_stages)
    return other if best is None or key(other) < key(best) else best


def _named(num_stages: int, num_microbatches: int, costs: Costs, chunks: int) -> Iterator[Found]:
    for schedule in candidates(num_stages, num_microbatches, chunks):
        own = for_stages(costs, schedule.num_stages)
        if own is None:
            continue
        yield _measured(schedule, own)
        times = times_of(schedule, own)
        for span in _spans(times, schedule.splits_backward):
            yield _measured(replace(retimed(schedule, times, span), name=NAME), own)


def _built(
    num_stages: int,
    num_microbatches: int,
    costs: Costs,
    memory: float,
    chunks: int,
    best: Found | None,
) -> Iterator[Found]:
    limit = inf if best is None else best.makespan
    for placement in _placements(num_stages, chunks):
        own = for_stages(costs, len(placement))
        if own is None:
            continue
        shape = Schedule(NAME, num_microbatches, placement, ((),) * num_stages)
        times, count = times_of(shape, own), shape.chunks
        most = count * num_microbatches if memory == inf else int(memory * count)
        if most < count:
            continue
        for rule in _rules(placement, times, num_microbatches, most):
            # A tie is kept for `_better` to decide: the other may keep less.
            made = greedy(NAME, num_microbatches, rule, times, limit * (1 + 1e-9))
            if made is not None:
                found = _measured(made, own)
                limit = min(limit, found.makespan)
                yield found


def _rules(
    placement: tuple[int, ...], times: Times, num_microbatches: int, most: int
) -> Iterator[Rule]:
    devices = 1 + max(placement)
    groups = {1} if len(placement) == devices else {1, devices, num_microbatches}
    for splits in (False, True):
        for span in _spans(times, splits):
            for forward_first in (False, True):
                for group in sorted(groups):
                    yield Rule(placement, splits, span, forward_first, group, most)


def _spans(times: Times, splits: bool) -> list[float]:
    """Lengths of cells worth trying: of every choice of phases at the slowest stage; and none."""
    phases = (Phase.F, Phase.I, Phase.W) if splits else (Phase.F, Phase.B)
    stages = {stage for stage, _ in times}
    sums = {
        max(sum(times[stage, phase] for phase in chosen) for stage in stages)
        for size in range(len(phases) + 1)
        for chosen in combinations(phases, size)
    }
    return sorted(sums)


def _placements(num_stages: int, chunks: int) -> Iterator[tuple[int, ...]]:
    """Loops over the devices, and the V."""
    ranks = (*range(num_stages),)
    for count in range(1, chunks + 1):
        yield ranks * count
    if chunks > 1:
        yield (*ranks, *reversed(ranks))


def for_stages(costs: Costs, num_stages: int) -> Costs | None:
    """Merges the weights of pieces of a model into those of its stages.

    Args:
        costs: with as many `stage_weights` as pieces, or none.
        num_stages: stages through the whole model.

    Returns:
        The costs with a weight for each stage; None where the weights do not divide.

    Example:
        >>> for_stages(Costs(stage_weights=(1, 1, 1, 3)), 2).stage_weights
        (1.0, 2.0)
    """
    weights = costs.stage_weights
    if not weights:
        return costs
    size, rest = divmod(len(weights), num_stages)
    if rest:
        return None
    stages = (weights[size * stage : size * (stage + 1)] for stage in range(num_stages))
    return replace(costs, stage_weights=tuple(sum(own) / size for own in stages))
