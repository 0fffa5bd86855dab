"""V-shaped building blocks: one microbatch's pattern, repeated, fixes the memory of a schedule.

Device `d` of `P` holds the stages `d` and `2P-1-d`. Going down the V, up, and back the same way,
every hop between neighbours takes a fixed number of ticks; the next microbatch follows 6 ticks
later, for a device has 6 tasks per microbatch. What is in flight on a device is then the block's
lifespan over 6, however many microbatches there are.

Source: Qi et al., Pipeline Parallelism with Controllable Memory, arXiv:2405.15362.
"""

from __future__ import annotations

from collections import deque
from itertools import product
from typing import NamedTuple

from .action import Action, Cell, Phase, check_sizes
from .dependency import dependencies
from .table import Schedule

_PERIOD = 6  # F, I and W of two stages


class Hops(NamedTuple):
    """Ticks from one device to the next, on each of the four ways through the V.

    Args:
        down: of forwards, from the first device to the last.
        up: of forwards, back to the first device.
        back_down: of input gradients, from the first device to the last.
        back_up: of input gradients, back to the first device.
    """

    down: int
    up: int
    back_down: int
    back_up: int


def v_schedule(
    name: str, num_devices: int, num_microbatches: int, hops: Hops, most: int
) -> Schedule:
    """Builds the schedule of a block: forwards and input gradients in the order in which repeated
    blocks have them, each as early as memory allows, weight gradients where a device would wait.

    Args:
        name: what the schedule is called.
        num_devices: devices `P`, with two stages each.
        num_microbatches: microbatches `M`.
        hops: the slopes of the block.
        most: chunks that a device may keep from `F` to `W`.

    Returns:
        The table, of `2P` stages.

    Raises:
        ScheduleError: a number below 1.
    """
    check_sizes(num_devices=num_devices, num_microbatches=num_microbatches)
    moments = _block(num_devices, hops)
    orders = [_order(d, moments[d], num_devices, num_microbatches) for d in range(num_devices)]
    placement = (*range(num_devices), *reversed(range(num_devices)))
    return Schedule(name, num_microbatches, placement, _fill(orders, len(placement), most))


class _Moments(NamedTuple):
    """When a device works for the first microbatch: forwards and input gradients, both stages."""

    f0: int
    f1: int
    i1: int
    i0: int


def _block(num_devices: int, hops: Hops) -> list[_Moments]:
    """The shortest block in which no device does two tasks in one tick of the period."""
    waits = sorted(product(range(_PERIOD), repeat=3), key=lambda waits: (sum(waits), waits))
    blocks = (_with_waits(num_devices, hops, *turns) for turns in waits)
    apart = lambda moments: len({tick % _PERIOD for tick in moments}) == len(moments)
    return next(block for block in blocks if all(map(apart, block)))


def _with_waits(
    num_devices: int, hops: Hops, at_bottom: int, at_top: int, at_turn: int
) -> list[_Moments]:
    """The block that waits so many ticks where the way turns."""
    last = num_devices - 1
    f1 = last * hops.down + 1 + at_bottom  # the last device's
    i1 = f1 + last * hops.up + 1 + at_top  # the first device's
    i0 = i1 + last * hops.back_down + 1 + at_turn  # the last device's
    return [
        _Moments(
            d * hops.down,
            f1 + (last - d) * hops.up,
            i1 + d * hops.back_down,
            i0 + (last - d) * hops.back_up,
        )
        for d in range(num_devices)
    ]


def _order(device: int, moments: _Moments, num_devices: int, num_microbatches: int) -> list[Action]:
    stages = (device, 2 * num_devices - 1 - device)
    tasks = [(stages[0], Phase.F), (stages[1], Phase.F), (stages[1], Phase.I), (stages[0], Phase.I)]
    timed = (
        (moment + _PERIOD * m, Action(stage, phase, m))
        for moment, (stage, phase) in zip(moments, tasks, strict=True)
        for m in range(num_microbatches)
    )
    return [action for _, action in sorted(timed)]


def _fill(orders: list[list[Action]], num_stages: int, most: int) -> tuple[tuple[Cell, ...], ...]:
    """Runs orders without weight gradients tick by tick, and puts these where they fit."""
    scheduled = {action for order in orders for action in order}
    waiting = [deque(order) for order in orders]
    weights: list[deque[Action]] = [deque() for _ in orders]
    kept, done = [0] * len(orders), set()
    rows: list[list[Cell]] = [[] for _ in orders]
    while any(waiting) or any(weights):
        made: list[Action] = []
        for device, row in enumerate(rows):
            todo = waiting[device]
            full = bool(todo) and todo[0].phase is Phase.F and kept[device] == most
            ready = (
                todo and not full and done.issuperset(dependencies(todo[0], num_stages, scheduled))
            )
            if ready:
                action = todo.popleft()
                kept[device] += action.phase is Phase.F
                if action.phase is Phase.I:
                    weights[device].append(action._replace(phase=Phase.W))
                row.append((action,))
                made.append(action)
            elif weights[device]:
                row.append((weights[device].popleft(),))
                kept[device] -= 1
            else:
                row.append(())
        done.update(made)
    return tuple(map(tuple, rows))
