"""The one list scheduler: what each device does in which order -> when everything happens.

Builders differ only in the order; `order_to_table` turns any order into the table of earliest
ticks, and `simulate` runs the same code with durations instead of ticks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from ..core.errors import ScheduleError
from .action import Action, Cell, dependencies
from .table import Schedule, render_grid

Order = Sequence[Sequence[Cell]]
"""Per device, its cells in the order of execution. A cell's actions share a tick."""


def order_to_table(
    name: str,
    order: Sequence[Sequence[Action | Cell]],
    placement: Sequence[int],
    num_microbatches: int,
) -> Schedule:
    """Places every action of an order at its earliest tick.

    A cell waits for the device's previous cell, and for everything its actions need: made on
    another device, that is usable one tick after the tick that makes it.

    Args:
        name: what the schedule is called.
        order: per device, its actions in the order of execution. Actions that shall share a tick
            are given as one tuple.
        placement: the device of each stage.
        num_microbatches: microbatches per step.

    Returns:
        The shortest table with this order.

    Raises:
        ScheduleError: the order deadlocks; the message says what each device waits for.

    Example:
        >>> order = [[Action.parse("0F0"), Action.parse("0B0")]]
        >>> print(order_to_table("tiny", order, placement=[0], num_microbatches=1))
        tiny: 1 stages on 1 devices, 1 microbatches, 2 ticks
        tick        0    1
        device 0  0F0  0B0
    """
    cells = [[(c,) if isinstance(c, Action) else c for c in device] for device in order]
    starts = earliest_starts(name, cells, len(placement), lambda cell: 1)
    rows = _rows(cells, [[int(start) for start in device] for device in starts])
    return Schedule(name, num_microbatches, tuple(placement), tuple(map(tuple, rows)))


def earliest_starts(
    name: str,
    order: Order,
    num_stages: int,
    duration: Callable[[Cell], float],
    transfer: float = 0,
) -> list[list[float]]:
    """Runs an order with every device as early as it can, and returns when each cell starts.

    Args:
        name: what the schedule is called, for the message.
        order: per device, its cells in the order of execution.
        num_stages: stages through the whole model.
        duration: the time a cell takes.
        transfer: the time until a result reaches another device.

    Returns:
        The start of each cell, in the shape of `order`.

    Raises:
        ScheduleError: the order deadlocks.
    """
    home = {action: d for d, cells in enumerate(order) for cell in cells for action in cell}
    ends: dict[Action, float] = {}
    starts: list[list[float]] = [[] for _ in order]
    clock = [0.0] * len(order)
    waiting: dict[Action, list[int]] = {}
    ready = deque(range(len(order)))
    while ready:
        device = ready.popleft()
        while (done := len(starts[device])) < len(order[device]):
            cell = order[device][done]
            needed = _needed(cell, num_stages, home)
            missing = next((action for action in needed if action not in ends), None)
            if missing is not None:
                waiting.setdefault(missing, []).append(device)
                break
            arrivals = [ends[a] + (transfer if home[a] != device else 0) for a in needed]
            start = max([clock[device], *arrivals])
            clock[device] = start + duration(cell)
            starts[device].append(start)
            for action in cell:
                ends[action] = clock[device]
                ready.extend(waiting.pop(action, ()))
    if waiting:
        raise ScheduleError(_deadlock(name, order, starts, waiting, home))
    return starts


def _needed(cell: Cell, num_stages: int, home: dict[Action, int]) -> list[Action]:
    """What a cell needs from outside; an action may use what stands left of it in its cell."""
    return [
        needed
        for position, action in enumerate(cell)
        for needed in dependencies(action, num_stages, home)
        if needed not in cell[:position]
    ]


def _rows(order: Order, ticks: Sequence[Sequence[int]]) -> list[list[Cell]]:
    num_ticks = 1 + max((device[-1] for device in ticks if device), default=-1)
    rows: list[list[Cell]] = [[()] * num_ticks for _ in order]
    for row, cells, places in zip(rows, order, ticks, strict=True):
        for cell, tick in zip(cells, places, strict=False):
            row[tick] = cell
    return rows


def _deadlock(
    name: str,
    order: Order,
    starts: Sequence[Sequence[float]],
    waiting: dict[Action, list[int]],
    home: dict[Action, int],
) -> str:
    """Says what each stuck device waits for, over the grid of what could run."""
    stuck = {device: action for action, devices in waiting.items() for device in devices}
    lines, rows, marks = [], [], []
    for device, cells in enumerate(order):
        done = len(starts[device])
        # The devices' progress, not their times: a simulation's times are no columns of a grid.
        rows.append([*cells[: done + 1]])
        if device in stuck:
            missing = stuck[device]
            where = f"of device {home[missing]}" if missing in home else "which no device has"
            head = "+".join(map(str, cells[done]))
            lines.append(f"  device {device} waits at {head} for {missing}, {where}")
            marks.append((device, done))
    return (
        f"schedule {name!r} deadlocks: these devices wait for each other for ever.\n"
        + "\n".join(lines)
        + "\nEvery action must come after all it needs: F(k) after F(k-1), B(k) after F(k) and "
        "B(k+1), W after I. Move the action that is waited for to before the one that waits "
        "(cells in the order of execution, up to where each device stops):\n"
        + render_grid(rows, marks)
    )
