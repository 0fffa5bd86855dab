"""Checks a table before anything runs it.

The executor can run every table that passes, if the model and its loss fit it: buffers may need the
forwards in order, and `V` needs a loss that ends in `linear_cross_entropy`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from ..core.arguments import FLOAT
from ..core.errors import ScheduleError
from .action import MOST_ACTIONS, TOGETHER, Action, Cell, Phase, dependencies, is_list
from .memory import STASH_ENDS
from .simulate import Costs, simulate
from .table import PlacedAction, Schedule, earliest_starts, render_grid


def validate(schedule: Schedule, max_live: int | Sequence[int] | None = None) -> None:
    """Raises unless a table is a complete, executable pipeline step.

    These rules must hold:

    - Every stage runs every microbatch's `F` once, and either its `B`, or its `I` and `W`, once.
    - Either no device runs `V`, or all devices run it together; the same for `E` and `G`.
    - Every action is on its stage's device.
    - Every result that an action needs is from an earlier action of the device, or from another
      device in an earlier tick.

    Args:
        schedule: the table.
        max_live: the largest number of stage inputs, one per chunk and microbatch, that a device
            may keep for their backward (from `F` to `B` or `W`), for all devices or for each; None
            sets no limit.

    Raises:
        ScheduleError: the table breaks a rule; the message shows the grid with the cell marked.

    Example:
        >>> from axon_dist.schedule import zero_bubble_v
        >>> validate(zero_bubble_v(4, 8), max_live=8)
        >>> validate(Schedule.from_csv("0F0,0F1,0B1,0B0"), max_live=1)
        Traceback (most recent call last):
        axon_dist.core.errors.ScheduleError: in schedule 'custom', 0F1 (device 0, tick 1) is ...
    """
    Schedule.check(schedule)
    _check_names(schedule)
    _check_complete(schedule)
    if used := [phase for phase in TOGETHER if any(a.phase is phase for a in schedule.where)]:
        _check_vocabulary(schedule, used)
    _check_order(schedule)
    if max_live is not None:
        _check_memory(schedule, max_live)


def _fail(schedule: Schedule, message: str, *cells: PlacedAction) -> ScheduleError:
    grid = render_grid(schedule.rows, [(placed.device, placed.tick) for placed in cells])
    return ScheduleError(f"in schedule {schedule.name!r}, {message}\n{grid}")


def _at(placed: PlacedAction) -> str:
    return f"{placed.action} (device {placed.device}, tick {placed.tick})"


def _check_names(schedule: Schedule) -> None:
    """Checks that every action exists in the step, and is in the table only once."""
    seen: dict[Action, PlacedAction] = {}
    for placed in schedule.placed():
        stage, _, microbatch = placed.action
        if not (0 <= stage < schedule.num_stages and 0 <= microbatch < schedule.num_microbatches):
            raise _fail(
                schedule,
                f"{_at(placed)} names a stage or microbatch that does not exist. Stages run from 0 "
                f"to {schedule.num_stages - 1}, microbatches from 0 to "
                f"{schedule.num_microbatches - 1}.",
                placed,
            )
        first = seen.setdefault(placed.action, placed)
        if first is not placed:
            raise _fail(
                schedule,
                f"{placed.action} is scheduled twice: on device {first.device} in tick "
                f"{first.tick}, and on device {placed.device} in tick {placed.tick}. Every action "
                "runs exactly once; remove one of them.",
                first,
                placed,
            )


def _check_complete(schedule: Schedule) -> None:
    places = schedule.where
    for stage in range(schedule.num_stages):
        for microbatch in range(schedule.num_microbatches):
            phases = (phase for phase in Phase if phase not in TOGETHER)
            f, b, i, w = (Action(stage, phase, microbatch) for phase in phases)
            present = [action for action in (f, b, i, w) if action in places]
            if present not in ([f, b], [f, i, w]):
                raise _fail(
                    schedule,
                    f"stage {stage}, microbatch {microbatch} {_wrong(present, f, b, i, w)}. Every "
                    "microbatch passes every stage once: F, and then either B or both I and W.",
                    *(places[action] for action in present),
                )


def _wrong(present: Sequence[Action], f: Action, b: Action, i: Action, w: Action) -> str:
    """Returns a text that says what is wrong with the actions of one stage and microbatch."""
    if f not in present:
        return f"has no {f}"
    if b in present and (i in present or w in present):
        return f"has a whole backward {b} and a split one ({i if i in present else w}) too"
    if i in present or w in present:
        found, missing = (i, w) if i in present else (w, i)
        return f"has {found} but no {missing}"
    return f"has no backward: neither {b} nor {i} and {w}"


def _check_vocabulary(schedule: Schedule, used: Sequence[Phase]) -> None:
    """Checks that all devices run an `E`, `V` or `G` in one tick, in the same order in cells."""
    if used not in ([Phase.V], list(TOGETHER)):
        raise ScheduleError(
            f"schedule {schedule.name!r} has {' and '.join(used)}. A table must split either the "
            "head alone, V, or head and embedding, E, V and G. Add the missing actions, as "
            "with_vocabulary does to a table without any.",
            code="vocabulary-phases",
        )
    stages = [schedule.stages_of(device) for device in range(schedule.num_devices)]
    if not all(stages):
        raise _fail(
            schedule,
            f"device {stages.index(())} has no stage, but all devices must run {used[0]}. Leave "
            f"{used[0]} out, or place a stage on every device.",
        )
    for phase in used:
        for microbatch in range(schedule.num_microbatches):
            _check_together(schedule, {Action(home[0], phase, microbatch) for home in stages})
    order = list(Phase)

    # Actions that all devices run together must be in the order of their microbatches too.
    def place(action):
        microbatch = action.microbatch if action.phase in TOGETHER else 0
        return (order.index(action.phase), microbatch)

    for device, row in enumerate(schedule.rows):
        for tick, cell in enumerate(row):
            if list(cell) != sorted(cell, key=place):
                raise _fail(
                    schedule,
                    f"device {device} runs {'+'.join(map(str, cell))} in tick {tick}. In a table "
                    f"with {used[0]} the actions of a cell must be in the order "
                    f"{', '.join(order)}, so that all devices reach it together.",
                    PlacedAction(cell[0], device, tick, 0),
                )


def _check_together(schedule: Schedule, wanted: set[Action]) -> None:
    """Checks one microbatch's actions of one phase: one on each device, in one tick."""
    _, phase, microbatch = next(iter(wanted))
    present = {action for action in schedule.where if action[1:] == (phase, microbatch)}
    parts = sorted((schedule.where[action] for action in present), key=lambda part: part.device)
    if present != wanted:

        def names(actions):
            return ", ".join(map(str, sorted(actions))) or f"no {phase}"

        raise _fail(
            schedule,
            f"microbatch {microbatch} has {names(present)}, but all devices must run {phase}, each "
            f"named after its first stage. It needs {names(wanted)}.",
            *parts,
        )
    ticks = sorted({part.tick for part in parts})
    if len(ticks) != 1:
        raise _fail(
            schedule,
            f"the {phase} of microbatch {microbatch} are in the ticks {ticks}. The devices wait "
            "for each other in it: put them in one tick.",
            *parts,
        )


def _check_order(schedule: Schedule) -> None:
    """Checks that every action is on its stage's device, after all actions that it needs."""
    places = schedule.where
    pairs = []
    for placed in schedule.placed():
        home = schedule.placement[placed.action.stage]
        if home != placed.device:
            raise _fail(
                schedule,
                f"{_at(placed)} is on the wrong device: stage {placed.action.stage} is on device "
                f"{home}. Move the action, or change the placement.",
                placed,
            )
        needed = dependencies(placed.action, schedule.num_stages, places)
        pairs += [(placed, places[action]) for action in needed]
    pairs.sort(key=lambda pair: pair[0].tick)
    for user, made in pairs:
        before = (user.tick, user.position) < (made.tick, made.position)
        if user.device == made.device and before:
            raise _fail(
                schedule,
                f"{_at(user)} runs before {_at(made)}, whose result it needs. On each device F "
                "comes before B or I, and I before W; within a tick the order is left to right.",
                user,
                made,
            )
    # Raises where devices wait for each other forever.
    order = [[(action,) for action in schedule.order(d)] for d in range(schedule.num_devices)]
    earliest_starts(schedule.name, order, schedule.num_stages, lambda cell: 1)
    for user, made in pairs:
        if user.device != made.device and user.tick <= made.tick:
            raise _fail(
                schedule,
                f"{_at(user)} needs {_at(made)}, whose result arrives for tick {made.tick + 1}: "
                "results of another device arrive one tick later. Delay the action, or let "
                "order_to_table place the same order at its earliest ticks.",
                user,
                made,
            )


def _check_memory(schedule: Schedule, max_live: int | Sequence[int]) -> None:
    limits: Any = [max_live] * schedule.num_devices if FLOAT.holds(max_live) else max_live
    if not is_list(limits, (schedule.num_devices,), FLOAT.holds):
        what = (
            f"{len(limits)} limits in"
            if is_list(limits, range(MOST_ACTIONS), FLOAT.holds)
            else f"{limits!r:.80} for"
        )
        raise ScheduleError(
            f"got {what} max_live for {schedule.num_devices} devices. Give one number for all, or "
            "one for each."
        )
    live = [0] * schedule.num_devices
    for placed in schedule.placed():
        live[placed.device] += placed.action.phase is Phase.F
        live[placed.device] -= placed.action.phase in STASH_ENDS
        if live[placed.device] > limits[placed.device]:
            raise _fail(
                schedule,
                f"{_at(placed)} is one stage input too many: device {placed.device} would keep "
                f"{live[placed.device]} for their backward, and max_live allows "
                f"{limits[placed.device]}. Run a backward (and its W) first, or raise max_live.",
                placed,
            )


_TRIED = 4
"""The number of delays of the backwards to compare, from the least possible one up."""


def with_vocabulary(schedule: Schedule, costs: Costs | None = None) -> Schedule:
    """Splits embedding and head over all devices, by vocabulary.

    In the tick after the last stage's forward of a microbatch, all devices run its `V` together,
    each for its part of the vocabulary. So the head no longer makes the last stage the slowest.
    Backwards are delayed, usually by two or three ticks; the fastest of four delays is taken. Each
    device then keeps at most one more stage input per tick of delay. In the tick before the first
    stage's forward, all devices look the microbatch up together, `E`. In the tick after its
    backward, each adds the gradients of its part of the embedding, `G`. So the table is one tick
    longer at its start, where everything else waits, and one at its end.

    Args:
        schedule: a valid table. If it has `E`, `V` and `G`, it is returned unchanged. If it has
            only `V`, only `E` and `G` are added.
        costs: times per microbatch and device, by which the fastest of several delays is chosen.

    Returns:
        The table.

    Raises:
        ScheduleError: a device without a stage, or cells in another order than that of `Phase`.

    Example:
        >>> from axon_dist.schedule import eager_1f1b
        >>> print(with_vocabulary(eager_1f1b(2, 2)))
        eager_1f1b: 2 stages on 2 devices, 2 microbatches, 8 ticks
        tick         0        1    2        3        4    5        6    7
        device 0   0E0  0E1+0F0  0F1      0V0      0V1  0B0  0B1+0G0  0G1
        device 1   1E0      1E1  1F0  1F1+1V0  1V1+1B0  1B1      1G0  1G1

    Source: Yeung et al., Balancing Pipeline Parallelism with Vocabulary Parallelism,
    arXiv:2411.05288.
    """
    if schedule.splits_embedding:
        return schedule
    if schedule.splits_vocabulary:
        table = _delayed(schedule, 0)
        validate(table)
        return table
    last = schedule.num_stages - 1
    places = schedule.where
    ends = [places[Action(last, Phase.F, m)].tick for m in range(schedule.num_microbatches)]
    least = max(0, *(end + 2 - _back(schedule, last, m) for m, end in enumerate(ends)))
    tables = [_delayed(schedule, least + more) for more in range(_TRIED)]
    shortest = min(tables, key=lambda table: simulate(table, costs, lockstep=True).makespan)
    validate(shortest)
    return shortest


def _delayed(schedule: Schedule, delay: int) -> Schedule:
    """Returns the table one tick later, its backwards `delay` more, with `E`, `V` and `G` added."""
    last = schedule.num_stages - 1
    places = schedule.where
    # In the new table a forward is one tick later, and a backward `delay + 1` ticks.
    ticks = {
        Phase.E: lambda m: places[Action(0, Phase.F, m)].tick,
        Phase.G: lambda m: _back(schedule, 0, m) + delay + 2,
        Phase.V: lambda m: places[Action(last, Phase.F, m)].tick + 2,
    }
    if schedule.splits_vocabulary:
        del ticks[Phase.V]
    microbatches = {
        phase: {tick_of(m): m for m in range(schedule.num_microbatches)}
        for phase, tick_of in ticks.items()
    }
    length = schedule.num_ticks + delay + 2

    def at(device: int, tick: int) -> Cell:
        return schedule.rows[device][tick] if 0 <= tick < schedule.num_ticks else ()

    def cell(device: int, tick: int) -> Cell:
        home = schedule.stages_of(device)[:1]
        expected = {
            phase: [Action(stage, phase, microbatches[phase][tick]) for stage in home]
            for phase in microbatches
            if tick in microbatches[phase]
        }

        def added(phase):
            return expected.get(phase, [])

        forwards = [action for action in at(device, tick - 1) if action.phase is Phase.F]
        others = [a for a in at(device, tick - 1 - delay) if a.phase is not Phase.F]
        return (*added(Phase.E), *forwards, *added(Phase.V), *others, *added(Phase.G))

    rows = tuple(
        tuple(cell(device, tick) for tick in range(length))
        for device in range(schedule.num_devices)
    )
    return dataclasses.replace(schedule, rows=rows)


def _back(schedule: Schedule, stage: int, microbatch: int) -> int:
    """Returns the tick in which a stage computes the gradient of its input."""
    actions = (Action(stage, phase, microbatch) for phase in (Phase.I, Phase.B))
    return next(schedule.where[action].tick for action in actions if action in schedule.where)
