"""The schedule itself: a table of devices and ticks."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from ..core.errors import ScheduleError
from .action import Action, Cell, Phase
from .csv_text import infer_placement, read_rows, write_rows
from .grid import render_grid


class Placed(NamedTuple):
    """An action and where the table has it: device, tick, and position within the cell."""

    action: Action
    device: int
    tick: int
    position: int


@dataclass(frozen=True)
class Schedule:
    """A pipeline schedule: what every device does in every tick.

    The reading: in each tick every device does the actions of its cell, left to right; after the
    tick everything produced for another device is sent. A result is thus usable on the same device
    by any later action, and on another device from the next tick on. A table is only a claim until
    `validate` has accepted it.

    Args:
        name: what the schedule is called.
        num_microbatches: microbatches per step.
        placement: the device of each stage, `placement[stage]`; stages count through the model.
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
        """Raises `ScheduleError` for what is no `Schedule`."""
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

        Stages, microbatches and placement are read off the actions. The table is not validated.

        Args:
            text: one line per device, one cell per tick, with stages counted through the model;
                several actions in a tick are joined by `+`, and an idle tick is an empty cell.
            name: what to call the schedule.

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
        """Writes the table: one line per device, one cell per tick, such as `2F0+2B0`."""
        return write_rows(self.rows)

    @property
    def num_stages(self) -> int:
        """Stages through the whole model: devices times chunks."""
        return len(self.placement)

    @property
    def num_devices(self) -> int:
        """Devices along the pipeline, one row each."""
        return len(self.rows)

    def in_order(self, stage: int, phases: Collection[Phase]) -> bool:
        """Whether a stage takes its microbatches in their order, in actions of some phases.

        Example:
            >>> from axon_dist.schedule import gpipe
            >>> gpipe(2, 4).in_order(1, [Phase.B])
            True
        """
        row = self.rows[self.placement[stage]]
        own = [a for cell in row for a in cell if a.stage == stage and a.phase in phases]
        return own == sorted(own, key=lambda action: action.microbatch)

    @property
    def num_ticks(self) -> int:
        """Length of the table."""
        return len(self.rows[0])

    @property
    def chunks(self) -> int:
        """Stages that one device holds (the most, should they differ)."""
        return max(self.placement.count(device) for device in range(self.num_devices))

    @property
    def splits_backward(self) -> bool:
        """Whether any backward is split into `I` and `W`."""
        return any(placed.action.phase is Phase.I for placed in self.placed())

    @cached_property
    def splits_vocabulary(self) -> bool:
        """Whether head and loss are actions of their own, `V`, of all devices."""
        return any(placed.action.phase is Phase.V for placed in self.placed())

    @cached_property
    def splits_embedding(self) -> bool:
        """Whether looking microbatches up is an action of its own, `E`, of all devices."""
        return any(placed.action.phase is Phase.E for placed in self.placed())

    def stages_of(self, device: int) -> tuple[int, ...]:
        """The stages that a device holds, in the order of the model."""
        return tuple(stage for stage, home in enumerate(self.placement) if home == device)

    def tick(self, tick: int) -> tuple[Cell, ...]:
        """The cell of every device in one tick."""
        return tuple(row[tick] for row in self.rows)

    def order(self, device: int) -> tuple[Action, ...]:
        """A device's actions in the order in which it does them, without the idle ticks."""
        return tuple(action for cell in self.rows[device] for action in cell)

    def placed(self) -> Iterator[Placed]:
        """All actions with their places, device by device, in the order of execution."""
        for device, row in enumerate(self.rows):
            for tick, cell in enumerate(row):
                for position, action in enumerate(cell):
                    yield Placed(action, device, tick, position)

    @cached_property
    def where(self) -> dict[Action, Placed]:
        """The place of each action (the last one, in an invalid table that repeats it)."""
        return {placed.action: placed for placed in self.placed()}
