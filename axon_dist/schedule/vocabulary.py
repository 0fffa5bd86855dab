"""Embedding and head as actions of their own: every device does its part of the vocabulary."""

from __future__ import annotations

import dataclasses

from .action import Action, Cell, Phase
from .simulate import Costs, simulate
from .table import Schedule
from .validate import validate

_TRIED = 4
"""Delays of the backwards that are compared: the least, and those that a period of ticks has."""


def with_vocabulary(schedule: Schedule, costs: Costs | None = None) -> Schedule:
    """Takes embedding and head from the end stages, and gives each device a part of the vocabulary.

    In the tick behind the last stage's forward of a microbatch all devices do its `V` together,
    each for its part of the tokens: the head no longer makes the last stage the slowest. Backwards
    start later by as many ticks as that takes, one or two, and every stage keeps as many inputs
    more. In the tick ahead of the first stage's forward they look the microbatch up together, `E`,
    and in the tick behind its backward each adds the gradients of its part of the embedding, `G`:
    one tick in front, in which everything else waits, and one behind.

    Args:
        schedule: a valid table; one that has all three is returned as it is, and one that has `V`
            alone keeps it.
        costs: by which the shortest in step of several delays is taken.

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
        both = _delayed(schedule, 0)
        validate(both)
        return both
    last, where = schedule.num_stages - 1, schedule.where
    ends = [where[Action(last, Phase.F, m)].tick for m in range(schedule.num_microbatches)]
    least = max(0, *(end + 2 - _back(schedule, last, m) for m, end in enumerate(ends)))
    tables = [_delayed(schedule, least + more) for more in range(_TRIED)]
    shortest = min(tables, key=lambda table: simulate(table, costs, lockstep=True).makespan)
    validate(shortest)
    return shortest


def _delayed(schedule: Schedule, delay: int) -> Schedule:
    """The table one tick later, backwards by so many more, with the actions of all between them."""
    last, where = schedule.num_stages - 1, schedule.where
    # A tick later than the stage's action in this table there is its place in the new one.
    ticks = {
        Phase.E: lambda m: where[Action(0, Phase.F, m)].tick,
        Phase.G: lambda m: _back(schedule, 0, m) + delay + 2,
    }
    if not schedule.splits_vocabulary:
        ticks[Phase.V] = lambda m: where[Action(last, Phase.F, m)].tick + 2
    found = {
        phase: {tick_of(m): m for m in range(schedule.num_microbatches)}
        for phase, tick_of in ticks.items()
    }
    length = schedule.num_ticks + delay + 2

    def at(device: int, tick: int) -> Cell:
        return schedule.rows[device][tick] if 0 <= tick < schedule.num_ticks else ()

    def cell(device: int, tick: int) -> Cell:
        home = schedule.stages_of(device)[:1]
        own = {
            phase: [Action(stage, phase, found[phase][tick]) for stage in home]
            for phase in found
            if tick in found[phase]
        }
        of_all = lambda phase: own.get(phase, [])
        forwards = [action for action in at(device, tick - 1) if action.phase is Phase.F]
        late = [a for a in at(device, tick - 1 - delay) if a.phase is not Phase.F]
        return (*of_all(Phase.E), *forwards, *of_all(Phase.V), *late, *of_all(Phase.G))

    rows = tuple(
        tuple(cell(device, tick) for tick in range(length))
        for device in range(schedule.num_devices)
    )
    return dataclasses.replace(schedule, rows=rows)


def _back(schedule: Schedule, stage: int, microbatch: int) -> int:
    """The tick in which a stage makes the gradient of its input."""
    actions = (Action(stage, phase, microbatch) for phase in (Phase.I, Phase.B))
    return next(schedule.where[action].tick for action in actions if action in schedule.where)
