"""Tables for devices that are kept in step: cells of even length, so that no tick waits long.

A tick lasts as long as its slowest cell. So a table is fast where all cells of a tick take
equally long, whatever the critical path through them is.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from .action import Action, Cell, Phase
from .dependency import dependencies
from .table import Schedule

Times = Mapping[tuple[int, Phase], float]
"""The time of each stage's phases."""

_Entry = tuple[tuple[int, ...], Action]
"""An action behind its urgency, the least first."""

_CLOSE = 1 + 1e-9  # sums of the same times in another order are the same length
_ORDER = {phase: number for number, phase in enumerate(Phase)}


@dataclass(frozen=True)
class Rule:
    """How `greedy` fills the cells of a tick.

    Args:
        placement: the device of each stage.
        splits: whether backwards are split into `I` and `W`.
        span: the length that a cell is filled to. A cell whose only action is longer is allowed,
            and the others are then filled to that length.
        forward_first: whether forwards come before backwards where both do not fit.
        group: microbatches that pass a chunk before the next chunk's turn.
        most: chunks that a device may keep for their backward.
    """

    placement: tuple[int, ...]
    splits: bool
    span: float
    forward_first: bool
    group: int
    most: int


def greedy(
    name: str, num_microbatches: int, rule: Rule, times: Times, limit: float
) -> Schedule | None:
    """Builds a table tick by tick: every device takes what is ready, fits, and is most urgent.

    A cell has each phase at most once, in the order F, B or I, W: the executor's program then has
    one branch per phase. Weight gradients fill what is left.

    Args:
        name: what the schedule is called.
        num_microbatches: microbatches per step.
        rule: what is preferred.
        times: the time of each stage's phases.
        limit: time in step from which on the table is of no interest.

    Returns:
        The table; None when it takes `limit` or longer, or memory stops it.
    """
    state = _Devices.start(num_microbatches, rule, times)
    columns: list[list[Cell]] = []
    clock, todo = 0.0, _work(num_microbatches, rule, times)
    while state.left:
        cells = state.tick()
        lengths = [state.length(cell) for cell in cells]
        clock += max(lengths)
        todo = [work - length for work, length in zip(todo, lengths, strict=True)]
        # What the fullest device still has to do, it does at best without another wait.
        if clock + max(todo) >= limit or not any(cells):
            return None
        columns.append(cells)
    rows = tuple(zip(*columns, strict=True))
    return Schedule(name, num_microbatches, rule.placement, rows)


def _work(num_microbatches: int, rule: Rule, times: Times) -> list[float]:
    """The time that each device computes in a step."""
    phases = (Phase.F, Phase.I, Phase.W) if rule.splits else (Phase.F, Phase.B)
    work = [0.0] * (1 + max(rule.placement))
    for stage, device in enumerate(rule.placement):
        work[device] += num_microbatches * sum(times[stage, phase] for phase in phases)
    return work


@dataclass
class _Devices:
    """What every device has ready, by phase; heaps, the most urgent first."""

    rule: Rule
    times: Times
    ready: list[dict[Phase, list[_Entry]]]
    chunk: list[int]
    chunks: list[int]
    kept: list[int]
    left: int
    arriving: list[Action] = field(default_factory=list)

    @classmethod
    def start(cls, num_microbatches: int, rule: Rule, times: Times) -> _Devices:
        """No action done, and every microbatch before the first stage."""
        placement = rule.placement
        devices = 1 + max(placement)
        made = cls(
            rule,
            times,
            ready=[{phase: [] for phase in Phase} for _ in range(devices)],
            chunk=[placement[:stage].count(home) for stage, home in enumerate(placement)],
            chunks=[placement.count(device) for device in range(devices)],
            kept=[0] * devices,
            left=len(placement) * num_microbatches * (3 if rule.splits else 2),
        )
        for m in range(num_microbatches):
            made._push(Action(0, Phase.F, m))
        return made

    def length(self, cell: Cell) -> float:
        """The time of a cell."""
        return sum(self.times[action[:2]] for action in cell)

    def tick(self) -> list[Cell]:
        """Fills one tick: to the rule's span first, then to the longest cell."""
        kept = [*self.kept]
        cells: list[list[Action]] = [[] for _ in self.ready]
        for span in (self.rule.span, None):
            longest = max(map(self.length, map(tuple, cells))) if span is None else span
            for device, cell in enumerate(cells):
                self._fill(device, cell, longest, kept[device])
        self.left -= sum(map(len, cells))
        for action in self.arriving:
            self._push(action)
        self.arriving.clear()
        return [tuple(sorted(cell, key=lambda action: _ORDER[action.phase])) for cell in cells]

    def _fill(self, device: int, cell: list[Action], span: float, kept: int) -> None:
        backward = Phase.I if self.rule.splits else Phase.B
        first = [Phase.F, backward] if self.rule.forward_first else [backward, Phase.F]
        # A backward may follow on the forward that has just been taken: so it is asked again.
        for phase in [*first, backward, Phase.W]:
            queue = self.ready[device][phase]
            if not queue or any(action.phase is phase for action in cell):
                continue
            entry = self._most_urgent(device, phase, kept)
            if entry is None or (cell and self.length((*cell, entry[1])) > span * _CLOSE):
                continue
            if entry is queue[0]:
                heapq.heappop(queue)
            else:
                queue.remove(entry)
                heapq.heapify(queue)
            cell.append(entry[1])
            self._done(entry[1], device)

    def _most_urgent(self, device: int, phase: Phase, kept: int) -> _Entry | None:
        queue = self.ready[device][phase]
        if phase is not Phase.F or self._has_room(device, queue[0][1].stage, kept):
            return queue[0]
        # Where an early chunk has no room, a later one may.
        roomy = [entry for entry in queue if self._has_room(device, entry[1].stage, kept)]
        return min(roomy, default=None)

    def _has_room(self, device: int, stage: int, kept: int) -> bool:
        # A slot is left for each later chunk: else a device full of the first could never free any.
        return kept + self.chunks[device] - self.chunk[stage] <= self.rule.most

    def _done(self, action: Action, device: int) -> None:
        """Notes what an action makes possible: here at once where another phase, else later."""
        stage, phase, m = action
        last = stage + 1 == len(self.rule.placement)
        backward = Phase.I if self.rule.splits else Phase.B
        self.kept[device] += (phase is Phase.F) - (phase in (Phase.B, Phase.W))
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
        device, chunk = self.rule.placement[action.stage], self.chunk[action.stage]
        group = action.microbatch // self.rule.group
        order = chunk if action.phase is Phase.F else -chunk
        key = (group, order, action.microbatch)
        heapq.heappush(self.ready[device][action.phase], (key, action))


def retimed(schedule: Schedule, times: Times, span: float) -> Schedule:
    """Puts each device's actions, in their order, into cells of about one length.

    Args:
        schedule: a valid table; what it keeps depends on the order alone, and stays.
        times: the time of each stage's phases.
        span: the length that a cell is filled to, as in `Rule`.

    Returns:
        A table with the same order on every device.
    """
    orders = [deque(schedule.order(device)) for device in range(schedule.num_devices)]
    where, done = schedule.where, set[Action]()
    columns: list[list[Cell]] = []
    while any(orders):
        cells: list[list[Action]] = [[] for _ in orders]
        for length in (span, None):
            longest = max(_length(cell, times) for cell in cells) if length is None else length
            for order, cell in zip(orders, cells, strict=True):
                while order and _fits(order[0], cell, times, longest):
                    needed = dependencies(order[0], schedule.num_stages, where)
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
