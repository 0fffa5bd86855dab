"""A schedule in the terminal: a row per device, time to the right."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from math import ceil

from ..core.errors import ScheduleError
from .action import Phase
from .boxes import MEANINGS, Box, boxes, label, phases, title
from .simulate import Timeline
from .table import Schedule

# ANSI 256-colour backgrounds: two shades each, for even and odd chunks.
_BACKGROUND = {
    Phase.E: (217, 211),
    Phase.F: (117, 75),
    Phase.V: (183, 141),
    Phase.B: (120, 77),
    Phase.I: (158, 79),
    Phase.W: (222, 214),
    Phase.G: (181, 174),
}
_Column = tuple[str, str]  # a letter and its ANSI style
_BLANK: _Column = (" ", "")
_MOST_COLUMNS = 1_000_000


def draw(
    schedule: Schedule,
    timeline: Timeline | None = None,
    color: bool = False,
    width: int | None = None,
) -> str:
    """Draws a schedule as text.

    Args:
        schedule: one action per rank and tick.
        timeline: its simulation, to draw time to scale; None draws the ticks of the table.
        color: uses ANSI colours: forward blue, vocabulary violet, backward green, input gradient
            mint, weight gradient orange, embedding and its gradient pink; odd chunks are darker.
        width: columns of the terminal, at least 40; longer rows continue below. None does not wrap.

    Returns:
        The lines: a title, the rows, and what the letters mean.

    Raises:
        ScheduleError: a width below 40, or times that letters cannot show to one scale.

    Example:
        >>> from axon_dist.schedule import one_f_one_b, simulate
        >>> table = one_f_one_b(2, 2)
        >>> print(draw(table, simulate(table)))
        1f1b: 2 stages on 2 devices, 2 microbatches, makespan 9, bubble 33.3 %
                 0  1  2  3  4  5  6  7  8
        device 0 |F0|F1|     |B0   |  |B1   |
        device 1    |F0|B0   |F1|B1   |
        F forward   B backward
    """
    Schedule.check(schedule, "a drawing")
    if width is not None and width < 40:
        raise ScheduleError(f"got width={width}. A drawing needs at least 40 columns.")
    rows = boxes(schedule, timeline)
    scale, end = _scale(schedule, rows), max(box.end for row in rows for box in row)
    length = 1 + round(scale * end)
    names = ["", *(f"device {device}" for device in range(schedule.num_devices))]
    lines = [_ruler(length, scale), *(_row(schedule, row, scale, length) for row in rows)]
    margin = max(map(len, names)) + 1
    # A row breaks where the ruler has a number, so that neither numbers nor labels are cut.
    unit = _ruler_step(length, scale) * scale
    step = length if width is None else max((width - margin) // unit, 1) * unit
    text = [title(schedule, timeline)]
    for first in range(0, length, step):
        for name, line in zip(names, lines, strict=True):
            text.append(name.ljust(margin) + _text(line[first : first + step], color))
    legend = (
        _text([(letter, _style(phase, 0)) for letter in f"{phase} {MEANINGS[phase]}"], color)
        for phase in phases(rows)
    )
    return "\n".join([*text, "   ".join(legend)])


def _scale(schedule: Schedule, rows: Sequence[Sequence[Box]]) -> int:
    """Columns per unit of time, so that the narrowest box has room for its label and an edge."""
    drawn = [box for row in rows for box in row if box.end > box.start]
    letters = 1 + max(len(label(schedule, box.action)) for box in drawn)
    shortest, end = min(box.end - box.start for box in drawn), max(box.end for box in drawn)
    if not end * max(letters / shortest, 1) < _MOST_COLUMNS:
        raise ScheduleError(
            f"an action takes {shortest:.3g} and the whole schedule {end:.3g}, too far apart, or "
            f"too many units, for a drawing of at most {_MOST_COLUMNS:.0e} columns. Only ratios "
            "matter: make the shortest time about 1, and the others less than 1000."
        )
    return ceil(letters / shortest)


def _ruler_step(length: int, scale: int) -> int:
    """Units from one number of the ruler to the next."""
    room = len(str(length // scale)) + 1
    return next(k * 10**e for e in range(9) for k in (1, 2, 5) if k * 10**e * scale >= room)


def _ruler(length: int, scale: int) -> list[_Column]:
    columns = [_BLANK] * length
    for unit in range(0, length // scale, _ruler_step(length, scale)):
        first, text = unit * scale, str(unit)
        columns[first : first + len(text)] = [(letter, "") for letter in text]
    return columns


def _row(schedule: Schedule, row: Sequence[Box], scale: int, length: int) -> list[_Column]:
    columns = [_BLANK] * length
    for box in row:
        first, end = round(box.start * scale), round(box.end * scale)
        text = ("|" + label(schedule, box.action)).ljust(end - first)[: end - first]
        style = _style(box.action.phase, box.chunk)
        columns[first:end] = [(letter, style) for letter in text]
        columns[end] = ("|", "")
    return columns


def _style(phase: Phase, chunk: int) -> str:
    return f"\x1b[30;48;5;{_BACKGROUND[phase][chunk % 2]}m"


def _text(columns: Sequence[_Column], color: bool) -> str:
    runs = (
        ("".join(letter for letter, _ in run), style)
        for style, run in groupby(columns, key=lambda column: column[1])
    )
    line = "".join(f"{style}{text}\x1b[0m" if style and color else text for text, style in runs)
    return line.rstrip()
