"""The schedule, a table of devices and ticks, and its construction from an order of actions.

Builders differ only in the order. `order_to_table` turns any order into the table of earliest
ticks, and `simulate` runs the same code with durations instead of ticks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from ..core.errors import ScheduleError
from .action import MOST_ACTIONS, Action, Cell, Phase, check_sizes, dependencies, is_index, is_list
from .stages import Boundaries, partition

_LABEL = len("device 10")
_MARGIN = 6  # ticks shown on each side of a marked cell
_MOST_ROWS = 64  # devices shown in a grid with marks
_LONGEST = 40  # letters shown of a cell in a grid with marks


def cell_text(cell: Cell) -> str:
    """Returns a cell in the CSV form: actions joined by `+`, nothing if idle."""
    return "+".join(map(str, cell))


def render_grid(rows: Sequence[Sequence[Cell]], marks: Collection[tuple[int, int]] = ()) -> str:
    """Draws a table, with some cells marked.

    Args:
        rows: the cells of each device, tick by tick; rows may differ in length.
        marks: (device, tick) of the cells to point out, shown as `[2B0]`. A grid with marks shows
            only the ticks around them.

    Returns:
        The lines, without a newline at the end.

    Example:
        >>> from axon_dist.schedule import Action
        >>> row = ((Action.parse("0F0"),), (), (Action.parse("0B0"),))
        >>> print(render_grid([row], marks=[(0, 2)]))
        tick        0    1      2
        device 0  0F0    .  [0B0]  <-- here
    """
    ticks = _window(max(map(len, rows), default=0), marks)
    header = [str(tick) for tick in ticks]
    marked = {device for device, _ in marks}
    # With very many devices, show only the marked ones.
    shown = sorted(marked) if marks and len(rows) > _MOST_ROWS else range(len(rows))
    body = [[_entry(rows, device, tick, marks) for tick in ticks] for device in shown]
    widths = [max(map(len, column)) for column in zip(header, *body, strict=True)]
    lines = [_line("tick", header, widths)]
    for device, entries in zip(shown, body, strict=True):
        pointer = "  <-- here" if device in marked else ""
        lines.append(_line(f"device {device}", entries, widths) + pointer)
    return "\n".join(lines)


def _line(label: str, entries: Sequence[str], widths: Sequence[int]) -> str:
    cells = (entry.rjust(width) for entry, width in zip(entries, widths, strict=True))
    return "  ".join([label.ljust(_LABEL), *cells])


def _window(num_ticks: int, marks: Collection[tuple[int, int]]) -> range:
    if not marks:
        return range(num_ticks)
    first = min(tick for _, tick in marks) - _MARGIN
    last = max(tick for _, tick in marks) + _MARGIN
    return range(max(first, 0), min(last + 1, num_ticks))


def _entry(
    rows: Sequence[Sequence[Cell]], device: int, tick: int, marks: Collection[tuple[int, int]]
) -> str:
    cell = rows[device][tick] if tick < len(rows[device]) else ()
    text = cell_text(cell) or "."
    text = f"{text[:_LONGEST]}..." if marks and len(text) > _LONGEST else text
    return f"[{text}]" if (device, tick) in marks else text


def write_rows(rows: Sequence[Sequence[Cell]]) -> str:
    """Returns the cells of a table as CSV text.

    Args:
        rows: `rows[device][tick]`.

    Returns:
        CSV text, one line per device.

    Example:
        >>> write_rows([[(Action.parse("0F0"),), (), (Action.parse("0B0"),)]])
        '0F0,,0B0\\n'
    """
    return "".join(",".join(map(cell_text, row)) + "\n" for row in rows)


def read_rows(text: str) -> tuple[tuple[Cell, ...], ...]:
    """Reads the cells of a table from CSV text.

    Short lines are filled with idle ticks, because spreadsheets drop empty cells at the end.

    Args:
        text: CSV text as returned by `write_rows`. Blanks around actions and blank lines are
            ignored. A device that does nothing is a line of commas.

    Returns:
        `rows[device][tick]`, of equal lengths.

    Raises:
        ScheduleError: no action, or a cell that is not made of actions.

    Example:
        >>> read_rows("0F0+0B0,")
        (((Action(stage=0, phase=<Phase.F: 'F'>, microbatch=0),
           Action(stage=0, phase=<Phase.B: 'B'>, microbatch=0)), ()),)
    """
    if not isinstance(text, str):
        raise ScheduleError(
            f"got {text!r:.60}, a {type(text).__name__}, for a table. Give its text, such as "
            "0F0,0F1,,0B0,0B1."
        )
    lines = [line.split(",") for line in text.splitlines() if line.strip()]
    if not any(entry.strip() for line in lines for entry in line):
        raise ScheduleError(
            "got a schedule without any action. Write one line per device and one cell per tick, "
            "such as 0F0,0F1,,0B0,0B1."
        )
    num_ticks = max(map(len, lines))
    return tuple(
        tuple(_read_cell(entry, device, tick) for tick, entry in enumerate(line))
        + ((),) * (num_ticks - len(line))
        for device, line in enumerate(lines)
    )


def _read_cell(entry: str, device: int, tick: int) -> Cell:
    if not entry.strip():
        return ()
    try:
        return tuple(Action.parse(text) for text in entry.split("+"))
    except ScheduleError as error:
        raise ScheduleError(f"row {device + 1}, cell {tick + 1} of the CSV: {error}") from error


def infer_placement(rows: Sequence[Sequence[Cell]]) -> tuple[int, ...]:
    """Finds the device of each stage, from the rows of its actions.

    Args:
        rows: `rows[device][tick]`.

    Returns:
        The device of each stage.

    Raises:
        ScheduleError: a stage has actions on several devices, or on none.
    """
    first_ticks: dict[int, dict[int, int]] = {}  # stage -> device -> first tick
    for device, row in enumerate(rows):
        for tick, cell in enumerate(row):
            for action in cell:
                first_ticks.setdefault(action.stage, {}).setdefault(device, tick)
    for stage in range(1 + max(first_ticks)):
        homes = first_ticks.get(stage, {})
        if len(homes) != 1:
            devices = f"devices {sorted(homes)}" if homes else "no device"
            raise ScheduleError(
                f"stage {stage} of 0..{max(first_ticks)} runs on {devices}. A stage must live on "
                "exactly one device; number the stages of the whole model without gaps."
                + (f"\n{render_grid(rows, list(homes.items()))}" if homes else "")
            )
    return tuple(next(iter(first_ticks[stage])) for stage in range(1 + max(first_ticks)))


class PlacedAction(NamedTuple):
    """An action and its place in the table: device, tick, and position within the cell."""

    action: Action
    device: int
    tick: int
    position: int


@dataclass(frozen=True)
class Schedule:
    """A pipeline schedule: the actions of every device in every tick.

    In each tick every device runs the actions of its cell, left to right. After the tick, all
    results for other devices are sent. So later actions of the same device can use a result at
    once, and other devices can use it from the next tick on. A table may be invalid until
    `validate` has accepted it.

    Args:
        name: the name of the schedule.
        num_microbatches: microbatches per step.
        placement: `placement[stage]` is the device of a stage, by its number in the model.
        rows: `rows[device][tick]` is a cell; all rows have the same length.

    Raises:
        ScheduleError: no stage, no microbatch, rows of unequal length, or a stage placed on a
            device that has no row.

    Example:
        >>> from axon_dist.schedule import gpipe
        >>> print(gpipe(2, 2))
        gpipe: 2 stages on 2 devices, 2 microbatches, 6 ticks
        tick        0    1    2    3    4    5
        device 0  0F0  0F1    .    .  0B0  0B1
        device 1    .  1F0  1F1  1B0  1B1    .
    """

    name: str
    num_microbatches: int
    placement: tuple[int, ...]
    rows: tuple[tuple[Cell, ...], ...]

    def __post_init__(self) -> None:
        if self.num_stages < 1 or self.num_microbatches < 1:
            raise ScheduleError(
                f"schedule {self.name!r} has {self.num_stages} stages and {self.num_microbatches} "
                "microbatches. It needs at least one of each: place every stage, and count the "
                "microbatches of a step."
            )
        lengths = sorted({len(row) for row in self.rows})
        if len(lengths) != 1:
            raise ScheduleError(
                f"schedule {self.name!r} has rows of {lengths} ticks. Every device must have one "
                "row, all of the same length: fill the shorter ones with empty cells."
            )
        for stage, device in enumerate(self.placement):
            if not 0 <= device < self.num_devices:
                raise ScheduleError(
                    f"schedule {self.name!r} places stage {stage} on device {device}, but has "
                    f"{self.num_devices} rows. Place it on a device in 0..{self.num_devices - 1}."
                )

    @staticmethod
    def check(value: object, what: str = "a schedule") -> None:
        """Raises `ScheduleError` unless the value is a `Schedule`."""
        if not isinstance(value, Schedule):
            raise ScheduleError(
                f"got {value!r:.60}, a {type(value).__name__}, for {what}. Give a Schedule, such "
                'as build_schedule("1f1b", 4, 8).'
            )

    def __str__(self) -> str:
        title = (
            f"{self.name}: {self.num_stages} stages on {self.num_devices} devices, "
            f"{self.num_microbatches} microbatches, {self.num_ticks} ticks"
        )
        return f"{title}\n{render_grid(self.rows)}"

    @classmethod
    def from_csv(cls, text: str, name: str = "custom") -> Schedule:
        """Reads a table that was written by `to_csv`, by hand or by another program.

        Stages, microbatches and placement are inferred from the actions. The table is not
        validated.

        Args:
            text: one line per device, one cell per tick, with stages counted through the model;
                several actions in a tick are joined by `+`, and an idle tick is an empty cell.
            name: the name of the schedule.

        Returns:
            The table.

        Raises:
            ScheduleError: a cell that is not made of actions, or a stage on several devices.

        Example:
            >>> Schedule.from_csv("0F0,,,0B0\\n,1F0,1B0,").placement
            (0, 1)
        """
        rows = read_rows(text)
        num_microbatches = 1 + max(a.microbatch for row in rows for cell in row for a in cell)
        return cls(name, num_microbatches, infer_placement(rows), rows)

    def to_csv(self) -> str:
        """Returns the table as CSV: one line per device, one cell per tick, such as `2F0+2B0`."""
        return write_rows(self.rows)

    @property
    def num_stages(self) -> int:
        """The number of stages of the whole model."""
        return len(self.placement)

    @property
    def num_devices(self) -> int:
        """The number of devices along the pipeline; each has one row."""
        return len(self.rows)

    def in_order(self, stage: int, phases: Collection[Phase]) -> bool:
        """Whether a stage runs actions of the given phases in the order of the microbatches.

        Example:
            >>> from axon_dist.schedule import gpipe
            >>> gpipe(2, 4).in_order(1, [Phase.B])
            True
        """
        row = self.rows[self.placement[stage]]
        actions = [a for cell in row for a in cell if a.stage == stage and a.phase in phases]
        return actions == sorted(actions, key=lambda action: action.microbatch)

    @property
    def num_ticks(self) -> int:
        """The length of the table."""
        return len(self.rows[0])

    @property
    def chunks(self) -> int:
        """The number of stages on one device (the largest, if devices differ)."""
        return max(self.placement.count(device) for device in range(self.num_devices))

    @property
    def splits_backward(self) -> bool:
        """Whether any backward is split into `I` and `W`."""
        return any(placed.action.phase is Phase.I for placed in self.placed())

    @cached_property
    def splits_vocabulary(self) -> bool:
        """Whether head and loss are split over all devices, as actions `V`."""
        return any(placed.action.phase is Phase.V for placed in self.placed())

    @cached_property
    def splits_embedding(self) -> bool:
        """Whether the embedding is split over all devices, as actions `E` and `G`."""
        return any(placed.action.phase is Phase.E for placed in self.placed())

    def stages_of(self, device: int) -> tuple[int, ...]:
        """Returns the stages of a device, in the order of the model."""
        return tuple(stage for stage, home in enumerate(self.placement) if home == device)

    def partition(
        self,
        num_layers: int,
        costs: Sequence[float] | None = None,
        boundaries: Sequence[int] | None = None,
    ) -> Boundaries:
        """Divides a chain of layers into the stages, like the function `partition`."""
        return partition(num_layers, self.num_stages, costs, boundaries)

    def tick(self, tick: int) -> tuple[Cell, ...]:
        """Returns the cell of every device in one tick."""
        return tuple(row[tick] for row in self.rows)

    def order(self, device: int) -> tuple[Action, ...]:
        """Returns a device's actions in the order of execution."""
        return tuple(action for cell in self.rows[device] for action in cell)

    def placed(self) -> Iterator[PlacedAction]:
        """Yields all actions with their places, device by device, in the order of execution."""
        for device, row in enumerate(self.rows):
            for tick, cell in enumerate(row):
                for position, action in enumerate(cell):
                    yield PlacedAction(action, device, tick, position)

    @cached_property
    def where(self) -> dict[Action, PlacedAction]:
        """The place of each action (the last one, if an invalid table repeats it)."""
        return {placed.action: placed for placed in self.placed()}


Order = Sequence[Sequence[Cell]]
"""Per device, its cells in the order of execution. A cell's actions share a tick."""


def order_to_table(
    name: str,
    order: Sequence[Sequence[Action | Cell]],
    placement: Sequence[int],
    num_microbatches: int,
) -> Schedule:
    """Places every action of an order at its earliest tick.

    A cell waits for the device's previous cell, and for the results that its actions need. A result
    of another device can be used from the next tick on.

    Args:
        name: the name of the schedule.
        order: per device, its actions in the order of execution. Actions that share a tick are
            grouped in a tuple.
        placement: the device of each stage.
        num_microbatches: microbatches per step.

    Returns:
        The shortest table with this order.

    Raises:
        ScheduleError: the order deadlocks, and the message names the action that each device waits
            for; or an argument is of another kind.

    Example:
        >>> order = [[Action.parse("0F0"), Action.parse("0B0")]]
        >>> print(order_to_table("tiny", order, placement=[0], num_microbatches=1))
        tiny: 1 stages on 1 devices, 1 microbatches, 2 ticks
        tick        0    1
        device 0  0F0  0B0
    """
    check_sizes(num_microbatches=num_microbatches)
    if not is_list(placement, range(1, MOST_ACTIONS + 1), is_index):
        raise ScheduleError(
            f"got placement={placement!r:.80}. Give the device of each stage, such as [0, 1]."
        )
    lengths = range(1, MOST_ACTIONS + 1)
    if not is_list(order, lengths, lambda row: is_list(row, range(2**31), _is_cell)):
        raise ScheduleError(
            f"got order={order!r:.80}. Give a list for each device of its actions, such as "
            '[[Action.parse("0F0"), Action.parse("0B0")]].'
        )
    cells = [
        [(cell,) if isinstance(cell, Action) else cell for cell in of_device] for of_device in order
    ]
    starts = earliest_starts(name, cells, len(placement), lambda cell: 1)
    num_ticks = 1 + max((int(of_device[-1]) for of_device in starts if of_device), default=-1)
    rows: list[list[Cell]] = [[()] * num_ticks for _ in cells]
    for row, of_device, ticks in zip(rows, cells, starts, strict=True):
        for cell, tick in zip(of_device, ticks, strict=False):
            row[int(tick)] = cell
    return Schedule(name, num_microbatches, tuple(placement), tuple(map(tuple, rows)))


def _is_cell(value: object) -> bool:
    """Whether a value is an action, or a tuple of those that share a tick."""
    return isinstance(value, Action) or (
        isinstance(value, tuple) and all(isinstance(item, Action) for item in value)
    )


def earliest_starts(
    name: str,
    order: Order,
    num_stages: int,
    duration: Callable[[Cell], float],
    transfer: float = 0,
) -> list[list[float]]:
    """Runs every cell of an order as early as possible, and returns its start.

    Args:
        name: the name of the schedule, for the message.
        order: per device, its cells in the order of execution.
        num_stages: stages of the whole model.
        duration: returns the time that a cell takes.
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
            # An action may use results of the actions before it in its cell.
            needed = [
                needed
                for position, action in enumerate(cell)
                for needed in dependencies(action, num_stages, home)
                if needed not in cell[:position]
            ]
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
        raise ScheduleError(_deadlock(name, order, starts, waiting, home), code="deadlock")
    return starts


def _deadlock(
    name: str,
    order: Order,
    starts: Sequence[Sequence[float]],
    waiting: dict[Action, list[int]],
    home: dict[Action, int],
) -> str:
    """Returns a message with the action each stuck device waits for, and a grid of the progress."""
    stuck = {device: action for action, devices in waiting.items() for device in devices}
    lines = []
    rows = []
    marks = []
    for device, cells in enumerate(order):
        done = len(starts[device])
        # Columns show each device's progress, not times, because a simulation has no ticks.
        rows.append([*cells[: done + 1]])
        if device in stuck:
            missing = stuck[device]
            owner = f"of device {home[missing]}" if missing in home else "which no device has"
            head = "+".join(map(str, cells[done]))
            lines.append(f"  device {device} waits at {head} for {missing}, {owner}")
            marks.append((device, done))
    return (
        f"schedule {name!r} deadlocks: these devices wait for each other forever.\n"
        + "\n".join(lines)
        + "\nEvery action must follow all actions it needs: F(k) after F(k-1), B(k) after F(k) and "
        "B(k+1), W after I. Move the action that is waited for before the one that waits "
        "(cells are in the order of execution, up to where each device stops):\n"
        + render_grid(rows, marks)
    )
