"""Tables as CSV text: a row per device, a cell per tick, `2F0+1B3` for two actions in one."""

from __future__ import annotations

from collections.abc import Sequence

from ..core.errors import ScheduleError
from .action import Action, Cell
from .grid import cell_text, render_grid


def write_rows(rows: Sequence[Sequence[Cell]]) -> str:
    """Writes the cells of a table.

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
    """Reads cells; short lines are filled with idle ticks at the end, as spreadsheets drop them.

    Args:
        text: what `write_rows` writes. Blanks around actions and blank lines are dropped; a device
            that does nothing is a line of commas.

    Returns:
        `rows[device][tick]`, of equal lengths.

    Raises:
        ScheduleError: no line at all, or a cell that is not made of actions.

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
    """Finds the device of each stage from where its actions stand.

    Args:
        rows: `rows[device][tick]`.

    Returns:
        The device of each stage.

    Raises:
        ScheduleError: a stage stands on several devices or on none.
    """
    found: dict[int, dict[int, int]] = {}  # stage -> device -> first tick
    for device, row in enumerate(rows):
        for tick, cell in enumerate(row):
            for action in cell:
                found.setdefault(action.stage, {}).setdefault(device, tick)
    for stage in range(1 + max(found)):
        homes = found.get(stage, {})
        if len(homes) != 1:
            devices = f"devices {sorted(homes)}" if homes else "no device"
            raise ScheduleError(
                f"stage {stage} of 0..{max(found)} runs on {devices}. A stage must live on exactly "
                "one device; number the stages through the whole model, without gaps.\n"
                + render_grid(rows, list(homes.items()))
            )
    return tuple(next(iter(found[stage])) for stage in range(1 + max(found)))
