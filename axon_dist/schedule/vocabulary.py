"""Head and loss as actions of their own: every device does its part of the vocabulary."""

from __future__ import annotations

import dataclasses

from .action import Action, Cell, Phase
from .simulate import Costs, simulate
from .table import Schedule
from .validate import validate

_TRIED = 4
"""Delays of the backwards that are compared: the least, and those that a period of ticks has."""


def with_vocabulary(schedule: Schedule, costs: Costs | None = None) -> Schedule:
    """Takes head and loss from the last stage, and gives each device a part of the vocabulary.

    In the tick behind the last stage's forward of a microbatch all devices do its `V` together,
    each for its part of the tokens: the head no longer makes the last stage the slowest. Backwards
    start later by as many ticks as that takes, one or two, and every stage keeps as many inputs
    more. Forwards stay where they are.

    Args:
        schedule: a valid table; one with `V` already is returned as it is.
        costs: by which the shortest in step of several delays is taken.

    Returns:
        The table.

    Raises:
        ScheduleError: a device without a stage, or cells in another order than F, V, B, I, W.

    Example:
        >>> from axon_dist.schedule import eager_1f1b
        >>> print(with_vocabulary(eager_1f1b(2, 2)))
        eager_1f1b: 2 stages on 2 devices, 2 microbatches, 6 ticks
        tick        0    1        2        3    4    5
        device 0  0F0  0F1      0V0      0V1  0B0  0B1
        device 1    .  1F0  1F1+1V0  1V1+1B0  1B1    .

    Source: Yeung et al., Balancing Pipeline Parallelism with Vocabulary Parallelism,
    arXiv:2411.05288.
    """
    if schedule.splits_vocabulary:
        return schedule
    last, where = schedule.num_stages - 1, schedule.where
    ends = {m: where[Action(last, Phase.F, m)].tick for m in range(schedule.num_microbatches)}
    starts = {
        placed.action.microbatch: placed.tick
        for placed in where.values()
        if placed.action.stage == last and placed.action.phase in (Phase.B, Phase.I)
    }
    least = max(0, *(ends[m] + 2 - starts[m] for m in ends))
    tables = [_delayed(schedule, ends, least + more) for more in range(_TRIED)]
    shortest = min(tables, key=lambda table: simulate(table, costs, lockstep=True).makespan)
    validate(shortest)
    return shortest


def _delayed(schedule: Schedule, ends: dict[int, int], delay: int) -> Schedule:
    """The table with backwards so many ticks later, and `V` behind the last forwards."""
    length = schedule.num_ticks + delay
    done = {end + 1: microbatch for microbatch, end in ends.items()}

    def cell(device: int, tick: int) -> Cell:
        row = schedule.rows[device]
        now = row[tick] if tick < schedule.num_ticks else ()
        late = row[tick - delay] if tick >= delay else ()
        homes = schedule.stages_of(device)[:1] if tick in done else ()
        parts = [Action(stage, Phase.V, done[tick]) for stage in homes]
        forwards = [action for action in now if action.phase is Phase.F]
        return (*forwards, *parts, *(action for action in late if action.phase is not Phase.F))

    rows = tuple(
        tuple(cell(device, tick) for tick in range(length))
        for device in range(schedule.num_devices)
    )
    return dataclasses.replace(schedule, rows=rows)
