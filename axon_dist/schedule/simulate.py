"""Simulates a table: computes when every action starts and ends, and how much time is idle."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from ..core.arguments import FLAG, is_number
from ..core.errors import ConfigError, NamedChoice, ScheduleError
from .action import TOGETHER, Action, Phase, receiver
from .memory import STASH_ENDS, peak_live
from .table import PlacedAction, Schedule, earliest_starts


class Payload(NamedChoice):
    """The value that a transfer carries."""

    ACTIVATION = "activation"
    """A stage's output, to the next stage."""
    GRADIENT = "gradient"
    """The gradient of a stage's input, to the previous stage."""


class Transfer(NamedTuple):
    """One value sent from one device to another at the end of a tick.

    `stage` and `microbatch` name the receiver's value: the input of `stage`, or the gradient of
    its output.
    """

    tick: int
    payload: Payload
    stage: int
    microbatch: int
    source: int
    target: int


def transfers(schedule: Schedule) -> tuple[Transfer, ...]:
    """Lists all transfers between devices, in the order of ticks.

    A forward of stage `k` sends its output to stage `k + 1`; a backward (`B` or `I`) sends the
    gradient of its input to stage `k - 1`. Neighbouring stages on one device send nothing. The
    collectives within an `E`, `V` or `G`, which devices run together, are not listed.

    Args:
        schedule: a valid table.

    Returns:
        The transfers, sorted by tick; each value can be used on its target from the next tick on.

    Example:
        >>> from axon_dist.schedule import gpipe
        >>> [(t.tick, str(t.payload), t.source, t.target) for t in transfers(gpipe(2, 1))]
        [(0, 'activation', 0, 1), (2, 'gradient', 1, 0)]
    """
    sent = (_sent(placed, schedule.placement) for placed in schedule.placed())
    return tuple(sorted(transfer for transfer in sent if transfer is not None))


def _sent(placed: PlacedAction, placement: tuple[int, ...]) -> Transfer | None:
    to = receiver(placed.action, len(placement))
    if to is None or placement[to.stage] == placed.device:
        return None
    payload = Payload.ACTIVATION if to.phase is Phase.F else Payload.GRADIENT
    target = placement[to.stage]
    return Transfer(placed.tick, payload, to.stage, to.microbatch, placed.device, target)


Span = tuple[float, float]
"""Start and end of an action, in the unit of the costs."""

_Times = dict[tuple[int, Phase], float]
_Walk = tuple[tuple[tuple[tuple[Action, Span], ...], ...], float]

_MOST_TIME = 1e100


@dataclass(frozen=True)
class Costs:
    """Times of one microbatch on one device, over all layers of the device.

    With `V` chunks on a device, an action of one chunk takes `1/V` of the time.

    Args:
        f: a forward pass. The unit of time is arbitrary, because only ratios matter.
        i: the input gradient.
        w: the weight gradient.
        b: a whole backward; None means `i + w`.
        v: one rank's part of a split vocabulary, forward and backward, for any number of chunks.
        transfer: from the end of an action until another device can use its result.
        stage_weights: relative cost of each stage; 1 is an equal share. Empty if all are equal.
        e: one rank's part of looking up a microbatch in a split embedding, and of adding its
            gradients. Apart from the transfers, it is negligible compared to matrix products.

    Raises:
        ScheduleError: a time or weight that is negative or not finite, a forward that takes no
            time, or weights that are all zero.

    Example:
        >>> Costs(f=1, i=1.2, w=0.8).of(Phase.B)
        2.0
    """

    f: float = 1.0
    i: float = 1.0
    w: float = 1.0
    b: float | None = None
    v: float = 1.0
    transfer: float = 0.0
    stage_weights: tuple[float, ...] = ()
    e: float = 0.0

    def __post_init__(self) -> None:
        for name in ("f", "i", "w", "b", "v", "e", "transfer"):
            value: Any = getattr(self, name)
            if name == "b" and self.b is None:
                continue
            if not is_number(value) or value < 0:
                raise ScheduleError(
                    f"got the cost {name}={value!r:.60}. A time must be a finite number of at "
                    "least 0."
                )
            if float(value) > _MOST_TIME:
                raise ScheduleError(
                    f"got the cost {name}={value}. Times add up, and only their ratios matter: "
                    f"make them at most {_MOST_TIME:g}."
                )
        if self.f == 0:
            raise ScheduleError("got the cost f=0. A forward must take time; use f=1 as the unit.")
        weights = self.stage_weights
        if not isinstance(weights, tuple | list):
            raise ScheduleError(
                f"got stage_weights={weights!r:.60}, a {type(weights).__name__}. Give a tuple of "
                "numbers, one for each stage."
            )
        if weights and not (all(is_number(x) and x >= 0 for x in weights) and any(weights)):
            raise ScheduleError(
                f"got stage_weights={weights!s:.200}. Each must be a finite number of at least 0, "
                "and one of them more; 1 is an equal share."
            )

    def of(self, phase: Phase) -> float:
        """Returns the time of a phase over all layers of a device."""
        if phase is Phase.B:
            return self.i + self.w if self.b is None else self.b
        if phase in (Phase.E, Phase.G):
            return self.e
        return {Phase.F: self.f, Phase.V: self.v, Phase.I: self.i, Phase.W: self.w}[phase]


@dataclass(frozen=True)
class Timeline:
    """The times of all actions of a schedule, and its cost.

    Args:
        spans: per device, each action with its start and end, in the order of execution.
        makespan: time from the start of the step to the end of the last device.
        peak_live: per device, the largest number of stage inputs between `F` and `B` (or `I`).
        peak_stashed: the same between `F` and `B` (or `W`), which is longer in a split backward.
        lockstep: whether devices were kept in lockstep.
    """

    spans: tuple[tuple[tuple[Action, Span], ...], ...]
    makespan: float
    peak_live: tuple[int, ...]
    peak_stashed: tuple[int, ...]
    lockstep: bool = False

    @cached_property
    def work(self) -> tuple[float, ...]:
        """The time that each device computes."""
        return tuple(sum(end - start for _, (start, end) in row) for row in self.spans)

    @property
    def bubble_fraction(self) -> float:
        """The idle share of all devices' time, from the start to the end of the step.

        This is the right measure for a jitted step, where all devices wait for the last one.
        """
        available = len(self.spans) * self.makespan
        return (available - sum(self.work)) / available

    @property
    def span_bubble(self) -> float:
        """The bubble as the zero-bubble papers count it, on the device with the longest span.

        A device's span goes from its first action to the end of its last.
        """
        lengths = [row[-1][1][1] - row[0][1][0] if row else 0.0 for row in self.spans]
        longest, work = max(zip(lengths, self.work, strict=True))
        return (longest - work) / longest

    def span(self, action: Action) -> Span:
        """Returns the start and end of one action.

        Raises:
            ConfigError: the schedule does not have the action.
        """
        if action not in self._span_of:
            raise ConfigError(f"the schedule has no action {action}; give one that it has")
        return self._span_of[action]

    @cached_property
    def _span_of(self) -> dict[Action, Span]:
        return dict(entry for row in self.spans for entry in row)


def simulate(schedule: Schedule, costs: Costs | None = None, lockstep: bool = False) -> Timeline:
    """Computes when a schedule's actions run.

    By default devices run ahead independently, like separate programs; the table determines only
    the order of each device. With `lockstep` a tick lasts as long as its slowest device's cell, as
    in one scan over the ticks.

    Args:
        schedule: a valid table.
        costs: times per microbatch and device; by default a backward takes twice a forward.
        lockstep: whether to keep devices in lockstep, tick by tick. The transfers of a tick then
            add `costs.transfer` once.

    Returns:
        The timeline.

    Raises:
        ScheduleError: the table's order deadlocks, or `stage_weights` has the wrong length.

    Example:
        >>> from axon_dist.schedule import eager_1f1b, one_f_one_b
        >>> simulate(one_f_one_b(4, 8)).makespan
        33.0
        >>> simulate(one_f_one_b(4, 8), lockstep=True).makespan
        40.0
        >>> simulate(eager_1f1b(4, 8), lockstep=True).makespan
        33.0
    """
    Schedule.check(schedule)
    FLAG.check("simulate", "lockstep", lockstep)
    costs = costs_of(costs)
    walk = _walk_ticks if lockstep else _walk_freely
    spans, makespan = walk(schedule, times_of(schedule, costs), costs.transfer)
    return Timeline(spans, makespan, peak_live(schedule), peak_live(schedule, STASH_ENDS), lockstep)


def costs_of(costs: Costs | None) -> Costs:
    """Returns the costs, those by default for None.

    Raises:
        ScheduleError: for anything else.
    """
    costs = Costs() if costs is None else costs
    if not isinstance(costs, Costs):
        raise ScheduleError(
            f"got the costs {costs!r:.60}. Give Costs, such as Costs(f=1, i=1, w=1)."
        )
    return costs


def times_of(schedule: Schedule, costs: Costs) -> _Times:
    """Returns the time of each stage's phases.

    Args:
        schedule: a table, for its stages and devices.
        costs: times per microbatch and device.

    Returns:
        Times by stage and phase.

    Raises:
        ScheduleError: `stage_weights` has the wrong length.
    """
    weights = costs.stage_weights or (1.0,) * schedule.num_stages
    if len(weights) != schedule.num_stages:
        raise ScheduleError(
            f"got {len(weights)} stage_weights for the {schedule.num_stages} stages of "
            f"{schedule.name!r}. Give one weight per stage of the whole model, or none."
        )

    def share(phase, weight):
        return 1.0 if phase in TOGETHER else weight / schedule.chunks

    return {
        (stage, phase): costs.of(phase) * share(phase, weight)
        for stage, weight in enumerate(weights)
        for phase in Phase
    }


def _walk_freely(schedule: Schedule, times: _Times, transfer: float) -> _Walk:
    order = [[(action,) for action in schedule.order(d)] for d in range(schedule.num_devices)]
    starts = earliest_starts(
        schedule.name, order, schedule.num_stages, lambda cell: times[cell[0][:2]], transfer
    )
    rows = [
        [(cell[0], (start, start + times[cell[0][:2]])) for cell, start in zip(*row, strict=True)]
        for row in zip(order, starts, strict=True)
    ]
    return tuple(map(tuple, rows)), max(row[-1][1][1] for row in rows if row)


def _walk_ticks(schedule: Schedule, times: _Times, transfer: float) -> _Walk:
    sending = {sent.tick for sent in transfers(schedule)}
    sending |= {done.tick for done in schedule.placed() if done.action.phase in TOGETHER}
    rows: list[list[tuple[Action, Span]]] = [[] for _ in schedule.rows]
    clock = 0.0
    for tick in range(schedule.num_ticks):
        ends = [clock]
        for row, cell in zip(rows, schedule.tick(tick), strict=True):
            start = clock
            for action in cell:
                end = start + times[action[:2]]
                row.append((action, (start, end)))
                start = end
            ends.append(start)
        clock = max(ends) + (transfer if tick in sending else 0.0)
    return tuple(map(tuple, rows)), clock
