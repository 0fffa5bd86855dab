"""Searches the best table for given costs and memory, for devices in lockstep.

A tick lasts as long as its slowest cell. So a table is fast if all cells of a tick take equally
long, whatever its critical path is.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from math import inf

from ..core.arguments import REAL
from ..core.errors import ScheduleError
from ..core.renamed import renamed_arguments
from .action import Action, Cell, Phase, check_sizes, dependencies
from .memory import STASH_ENDS, peak_live
from .registry import SCHEDULES, build_schedule
from .simulate import Costs, costs_of, simulate, times_of
from .table import Schedule

Times = Mapping[tuple[int, Phase], float]
"""The time of each stage's phases."""

_Entry = tuple[tuple[int, ...], Action]
"""An action after its priority; the lowest is the most urgent."""

_CLOSE = 1 + 1e-9  # tolerance, because sums of the same times depend on their order
_ORDER = {phase: number for number, phase in enumerate(Phase)}


@dataclass(frozen=True)
class FillRule:
    """How `greedy` fills the cells of a tick.

    Args:
        placement: the device of each stage.
        splits: whether backwards are split into `I` and `W`.
        span: the length that a cell is filled to. A cell may be longer if it has only one action;
            the other cells are then filled to that length.
        forward_first: whether forwards precede backwards if only one of them fits.
        group: the number of microbatches that pass a chunk before the next chunk starts.
        most: the largest number of chunks that a device may keep for their backward.
    """

    placement: tuple[int, ...]
    splits: bool
    span: float
    forward_first: bool
    group: int
    most: int


def greedy(
    name: str, num_microbatches: int, rule: FillRule, times: Times, limit: float
) -> Schedule | None:
    """Builds a table tick by tick: every device takes the most urgent ready action that fits.

    A cell has each phase at most once, in the order F, B or I, W, so that the executor's program
    has one branch per phase. Weight gradients fill the remaining time.

    Args:
        name: the name of the schedule.
        num_microbatches: microbatches per step.
        rule: how cells are filled.
        times: the time of each stage's phases.
        limit: the search gives up if the table takes at least this time in lockstep.

    Returns:
        The table; None if it takes `limit` or longer, or the memory limit stops it.
    """
    state = _Devices.start(num_microbatches, rule, times)
    columns: list[list[Cell]] = []
    clock = 0.0
    todo = _work(num_microbatches, rule, times)
    while state.remaining:
        cells = state.tick()
        lengths = [_length(cell, times) for cell in cells]
        clock += max(lengths)
        todo = [work - length for work, length in zip(todo, lengths, strict=True)]
        # A lower bound: the device with the most remaining work does not idle again.
        if clock + max(todo) >= limit or not any(cells):
            return None
        columns.append(cells)
    rows = tuple(zip(*columns, strict=True))
    return Schedule(name, num_microbatches, rule.placement, rows)


def _work(num_microbatches: int, rule: FillRule, times: Times) -> list[float]:
    """Returns the time that each device computes in a step."""
    phases = (Phase.F, Phase.I, Phase.W) if rule.splits else (Phase.F, Phase.B)
    work = [0.0] * (1 + max(rule.placement))
    for stage, device in enumerate(rule.placement):
        work[device] += num_microbatches * sum(times[stage, phase] for phase in phases)
    return work


@dataclass
class _Devices:
    """The actions that each device has ready, by phase, as heaps with the most urgent first."""

    rule: FillRule
    times: Times
    ready: list[dict[Phase, list[_Entry]]]
    chunk: list[int]
    chunks: list[int]
    stash: list[int]
    remaining: int
    arriving: list[Action] = field(default_factory=list)

    @classmethod
    def start(cls, num_microbatches: int, rule: FillRule, times: Times) -> _Devices:
        """Returns the initial state, with every microbatch ready for the first stage."""
        placement = rule.placement
        devices = 1 + max(placement)
        state = cls(
            rule,
            times,
            ready=[{phase: [] for phase in Phase} for _ in range(devices)],
            chunk=[placement[:stage].count(home) for stage, home in enumerate(placement)],
            chunks=[placement.count(device) for device in range(devices)],
            stash=[0] * devices,
            remaining=len(placement) * num_microbatches * (3 if rule.splits else 2),
        )
        for m in range(num_microbatches):
            state._push(Action(0, Phase.F, m))
        return state

    def tick(self) -> list[Cell]:
        """Fills the cells of one tick, first to the rule's span, then to the longest cell."""
        stashed = [*self.stash]
        cells: list[list[Action]] = [[] for _ in self.ready]
        for span in (self.rule.span, None):
            longest = max(_length(cell, self.times) for cell in cells) if span is None else span
            for device, cell in enumerate(cells):
                self._fill(device, cell, longest, stashed[device])
        self.remaining -= sum(map(len, cells))
        for action in self.arriving:
            self._push(action)
        self.arriving.clear()
        return [tuple(sorted(cell, key=lambda action: _ORDER[action.phase])) for cell in cells]

    def _fill(self, device: int, cell: list[Action], span: float, stashed: int) -> None:
        backward = Phase.I if self.rule.splits else Phase.B
        first = [Phase.F, backward] if self.rule.forward_first else [backward, Phase.F]
        # Backwards are tried again, because the forward just placed may have made one ready.
        for phase in [*first, backward, Phase.W]:
            queue = self.ready[device][phase]
            if not queue or any(action.phase is phase for action in cell):
                continue
            entry = self._most_urgent(device, phase, stashed)
            if entry is None or (cell and _length((*cell, entry[1]), self.times) > span * _CLOSE):
                continue
            if entry is queue[0]:
                heapq.heappop(queue)
            else:
                queue.remove(entry)
                heapq.heapify(queue)
            cell.append(entry[1])
            self._done(entry[1], device)

    def _most_urgent(self, device: int, phase: Phase, stashed: int) -> _Entry | None:
        queue = self.ready[device][phase]
        if phase is not Phase.F or self._fits_memory(device, queue[0][1].stage, stashed):
            return queue[0]
        # If memory does not suffice for an early chunk, it may suffice for a later one.
        allowed = [entry for entry in queue if self._fits_memory(device, entry[1].stage, stashed)]
        return min(allowed, default=None)

    def _fits_memory(self, device: int, stage: int, stashed: int) -> bool:
        # Reserve a slot for each later chunk. A device full of inputs of the first chunk could
        # otherwise never free any.
        return stashed + self.chunks[device] - self.chunk[stage] <= self.rule.most

    def _done(self, action: Action, device: int) -> None:
        """Adds the actions that become ready: of the same stage now, of others after the tick."""
        stage, phase, m = action
        last = stage + 1 == len(self.rule.placement)
        backward = Phase.I if self.rule.splits else Phase.B
        self.stash[device] += (phase is Phase.F) - (phase in (Phase.B, Phase.W))
        if phase is Phase.F:
            if last:
                self._push(Action(stage, backward, m))
            else:
                self.arriving.append(Action(stage + 1, Phase.F, m))
        elif phase is not Phase.W:
            if phase is Phase.I:
                self._push(Action(stage, Phase.W, m))
            if stage:
                self.arriving.append(Action(stage - 1, phase, m))

    def _push(self, action: Action) -> None:
        device = self.rule.placement[action.stage]
        chunk = self.chunk[action.stage]
        group = action.microbatch // self.rule.group
        order = chunk if action.phase is Phase.F else -chunk
        key = (group, order, action.microbatch)
        heapq.heappush(self.ready[device][action.phase], (key, action))


def retimed(schedule: Schedule, times: Times, span: float) -> Schedule:
    """Puts each device's actions, in their order, into cells of about equal length.

    Args:
        schedule: a valid table. Its memory does not change, because it depends only on the order.
        times: the time of each stage's phases.
        span: the length that a cell is filled to, as in `FillRule`.

    Returns:
        A table with the same order on every device.
    """
    orders = [deque(schedule.order(device)) for device in range(schedule.num_devices)]
    places = schedule.where
    done: set[Action] = set()
    columns: list[list[Cell]] = []
    while any(orders):
        cells: list[list[Action]] = [[] for _ in orders]
        for length in (span, None):
            longest = max(_length(cell, times) for cell in cells) if length is None else length
            for order, cell in zip(orders, cells, strict=True):
                while order and _fits(order[0], cell, times, longest):
                    needed = dependencies(order[0], schedule.num_stages, places)
                    if not all(a in done or a in cell for a in needed):
                        break
                    cell.append(order.popleft())
        done.update(action for cell in cells for action in cell)
        columns.append([tuple(cell) for cell in cells])
    rows = tuple(zip(*columns, strict=True))
    return Schedule(schedule.name, schedule.num_microbatches, schedule.placement, rows)


def _length(cell: Sequence[Action], times: Times) -> float:
    return sum(times[action[:2]] for action in cell)


def _fits(action: Action, cell: Sequence[Action], times: Times, span: float) -> bool:
    if not cell:
        return True
    later = _ORDER[action.phase] > _ORDER[cell[-1].phase]
    return later and _length((*cell, action), times) <= span * _CLOSE


NAME = "searched"
"""The name of tables that are not built by a named schedule."""


@dataclass(frozen=True)
class SearchResult:
    """A table and what it costs.

    Args:
        schedule: the table.
        makespan: time of the step with devices in lockstep.
        memory: the largest number of microbatches, over all layers of a device, that a device
            keeps for their backward.
    """

    schedule: Schedule
    makespan: float
    memory: float


@renamed_arguments(num_stages="num_devices")
def search(
    num_devices: int,
    num_microbatches: int,
    costs: Costs | None = None,
    memory: float = inf,
    chunks: int = 2,
) -> SearchResult:
    """Finds a table at least as fast in lockstep as the named schedules within memory and chunks.

    Candidates are all named schedules, unchanged and with their cells filled evenly, and tables
    built tick by tick under many rules. A faster table may still exist.

    Args:
        num_devices: the ranks of the axis `pp`.
        num_microbatches: microbatches per step.
        costs: times per microbatch and device. Its `stage_weights` may be finer than the stages:
            one weight per piece of the model, with equally many pieces in each stage.
        memory: the largest number of microbatches, counted over all layers of a device, that a
            device may keep for their backward, from `F` to `B` or `W`.
        chunks: the largest number of stages per device.

    Returns:
        The fastest candidate. Among equally fast ones, it is the one that needs the least memory,
        then the fewest stages.

    Raises:
        ScheduleError: a number below 1, less memory than any schedule needs, or weights that no
            number of stages divides.

    Example:
        >>> best = search(4, 8, Costs(f=1, i=1, w=1), memory=4)
        >>> best.makespan, best.memory
        (25.5, 4.0)
    """
    check_sizes(num_devices=num_devices, num_microbatches=num_microbatches, chunks=chunks)
    if not REAL.holds(memory) or not memory > 0:
        raise ScheduleError(
            f"got memory={memory!r:.60}. Give a number of microbatches above 0; inf is no limit."
        )
    costs = costs_of(costs)
    _check_weights(costs, num_devices, chunks)
    best: SearchResult | None = None
    least = inf
    for result in _named(num_devices, num_microbatches, costs, chunks):
        least = min(least, result.memory)
        if result.memory <= memory:
            best = _better(best, result)
    for result in _built(num_devices, num_microbatches, costs, memory, chunks, best):
        best = _better(best, result)
    if best is None:
        raise ScheduleError(
            f"got memory={memory:g} for {num_devices} devices and {num_microbatches} microbatches. "
            f"Every named schedule keeps at least {least:g} microbatches on its fullest device; "
            "give at least that."
        )
    return best


def _check_weights(costs: Costs, num_devices: int, chunks: int) -> None:
    counts = [num_devices * count for count in range(1, chunks + 1)]
    if all(for_stages(costs, count) is None for count in counts):
        raise ScheduleError(
            f"got {len(costs.stage_weights)} weights for {num_devices} devices with up to {chunks} "
            f"stages each. Give one for each of {' or '.join(map(str, counts))} stages, or a "
            "multiple of that."
        )


def candidates(num_devices: int, num_microbatches: int, chunks: int) -> Iterator[Schedule]:
    """Yields all named schedules that these sizes allow, with up to `chunks` stages per device."""
    for name, row in SCHEDULES.items():
        counts = range(1, chunks + 1) if row.any_chunks else [None]
        for count in counts:
            if count is None and row.chunks > chunks:
                continue
            try:
                yield build_schedule(name, num_devices, num_microbatches, count)
            except ScheduleError:
                continue


def _measured(schedule: Schedule, costs: Costs) -> SearchResult:
    memory = max(peak_live(schedule, STASH_ENDS)) / schedule.chunks
    return SearchResult(schedule, simulate(schedule, costs, lockstep=True).makespan, memory)


def _better(best: SearchResult | None, other: SearchResult) -> SearchResult:
    # Rounded, because sums of the same times in another order may differ in the last digit.
    def key(result):
        return (round(result.makespan, 9), result.memory, result.schedule.num_stages)

    return other if best is None or key(other) < key(best) else best


def _named(
    num_devices: int, num_microbatches: int, costs: Costs, chunks: int
) -> Iterator[SearchResult]:
    for schedule in candidates(num_devices, num_microbatches, chunks):
        stage_costs = for_stages(costs, schedule.num_stages)
        if stage_costs is None:
            continue
        yield _measured(schedule, stage_costs)
        times = times_of(schedule, stage_costs)
        for span in _spans(times, schedule.splits_backward):
            yield _measured(replace(retimed(schedule, times, span), name=NAME), stage_costs)


def _built(
    num_devices: int,
    num_microbatches: int,
    costs: Costs,
    memory: float,
    chunks: int,
    best: SearchResult | None,
) -> Iterator[SearchResult]:
    limit = inf if best is None else best.makespan
    for placement in _placements(num_devices, chunks):
        stage_costs = for_stages(costs, len(placement))
        if stage_costs is None:
            continue
        shape = Schedule(NAME, num_microbatches, placement, ((),) * num_devices)
        times = times_of(shape, stage_costs)
        count = shape.chunks
        most = count * num_microbatches if memory == inf else int(memory * count)
        if most < count:
            continue
        for rule in _rules(placement, times, num_microbatches, most):
            # Keep equally fast tables too, because `_better` prefers the one with less memory.
            table = greedy(NAME, num_microbatches, rule, times, limit * (1 + 1e-9))
            if table is not None:
                result = _measured(table, stage_costs)
                limit = min(limit, result.makespan)
                yield result


def _rules(
    placement: tuple[int, ...], times: Times, num_microbatches: int, most: int
) -> Iterator[FillRule]:
    devices = 1 + max(placement)
    groups = {1} if len(placement) == devices else {1, devices, num_microbatches}
    for splits in (False, True):
        for span in _spans(times, splits):
            for forward_first in (False, True):
                for group in sorted(groups):
                    yield FillRule(placement, splits, span, forward_first, group, most)


def _spans(times: Times, splits: bool) -> list[float]:
    """Returns cell lengths to try: zero, and those of every set of phases at the slowest stage."""
    phases = (Phase.F, Phase.I, Phase.W) if splits else (Phase.F, Phase.B)
    stages = {stage for stage, _ in times}
    sums = {
        max(sum(times[stage, phase] for phase in subset) for stage in stages)
        for size in range(len(phases) + 1)
        for subset in combinations(phases, size)
    }
    return sorted(sums)


def _placements(num_devices: int, chunks: int) -> Iterator[tuple[int, ...]]:
    """Yields loops over the devices, and the V."""
    ranks = (*range(num_devices),)
    for count in range(1, chunks + 1):
        yield ranks * count
    if chunks > 1:
        yield (*ranks, *reversed(ranks))


def for_stages(costs: Costs, num_stages: int) -> Costs | None:
    """Merges the weights of pieces of a model into weights of its stages.

    Args:
        costs: costs with one `stage_weights` entry per piece, or none.
        num_stages: stages of the whole model.

    Returns:
        The costs with a weight for each stage; None if the weights do not divide evenly.

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
    return replace(costs, stage_weights=tuple(sum(parts) / size for parts in stages))
