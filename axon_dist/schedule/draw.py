"""Draws a schedule as text or SVG: a row per device, time to the right."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from html import escape
from itertools import groupby
from math import ceil
from typing import NamedTuple

from ..core.arguments import FLAG
from ..core.errors import ScheduleError
from .action import Action, Phase, is_index
from .simulate import Timeline
from .table import Schedule


class Look(NamedTuple):
    """How a phase is drawn. Each color has two shades, the second for odd chunks."""

    meaning: str
    ansi: tuple[int, int]
    fill: tuple[str, str]


# ANSI 256-color backgrounds and SVG colors.
LOOKS = {
    Phase.E: Look("embedding", (217, 211), ("#f5bdd0", "#e58aa9")),
    Phase.F: Look("forward", (117, 75), ("#9cc3f5", "#5e97e0")),
    Phase.V: Look("vocabulary", (183, 141), ("#d3b5f0", "#b48ae0")),
    Phase.B: Look("backward", (120, 77), ("#a5dda0", "#5fb766")),
    Phase.I: Look("input gradient", (158, 79), ("#a8e3d9", "#55bcab")),
    Phase.W: Look("weight gradient", (222, 214), ("#f7d08a", "#e5a83c")),
    Phase.G: Look("gradient of the embedding", (181, 174), ("#e0b0b0", "#c98484")),
}


class Box(NamedTuple):
    """An action drawn from `start` to `end`; `chunk` is its stage's position on the device."""

    start: float
    end: float
    action: Action
    chunk: int


def boxes(schedule: Schedule, timeline: Timeline | None) -> tuple[tuple[Box, ...], ...]:
    """Lays out every device's actions.

    Args:
        schedule: the table.
        timeline: its simulation, for a time axis; None draws ticks of equal width, which the
            actions of a cell share evenly.

    Returns:
        The boxes of each device, from left to right. An action that takes no time has no box.
    """
    if timeline is not None and not isinstance(timeline, Timeline):
        raise ScheduleError(
            f"got {timeline!r:.60}, a {type(timeline).__name__}, for a timeline; give "
            "simulate(schedule), or None for ticks"
        )
    ticks = (
        [
            (action, (tick + number / len(cell), tick + (number + 1) / len(cell)))
            for tick, cell in enumerate(row)
            for number, action in enumerate(cell)
        ]
        for row in schedule.rows
    )
    chunk_of = {
        stage: chunk
        for device in range(schedule.num_devices)
        for chunk, stage in enumerate(schedule.stages_of(device))
    }
    return tuple(
        tuple(
            Box(*span, action, chunk_of[action.stage]) for action, span in row if span[1] > span[0]
        )
        for row in (ticks if timeline is None else timeline.spans)
    )


def label(schedule: Schedule, action: Action) -> str:
    """Returns the label of an action: phase and microbatch, and the stage if a row has several."""
    return str(action) if schedule.chunks > 1 else f"{action.phase}{action.microbatch}"


def phases(rows: Sequence[Sequence[Box]]) -> list[Phase]:
    """Returns the phases that occur in boxes, in the order of `Phase`."""
    used = {box.action.phase for row in rows for box in row}
    return [phase for phase in Phase if phase in used]


def title(schedule: Schedule, timeline: Timeline | None) -> str:
    """Returns the title: one line with the sizes of the schedule, and its bubble."""
    sizes = f"{schedule.name}: {schedule.num_stages} stages on {schedule.num_devices} devices"
    sizes += f", {schedule.num_microbatches} microbatches"
    if timeline is None:
        return f"{sizes}, {schedule.num_ticks} ticks"
    bubble = f"bubble {timeline.bubble_fraction:.1%}"
    reading = "in lockstep: makespan" if timeline.lockstep else "makespan"
    return f"{sizes}, {reading} {timeline.makespan:g}, {bubble}"


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
        schedule: the table.
        timeline: its simulation, to draw time to scale; None draws the ticks of the table.
        color: uses ANSI colours: forward blue, vocabulary violet, backward green, input gradient
            mint, weight gradient orange, embedding and its gradient pink; odd chunks are darker.
        width: columns of the terminal, at least 40; longer rows continue below. None does not wrap.

    Returns:
        The lines: a title, the rows, and a legend.

    Raises:
        ScheduleError: a width below 40, or times that letters cannot show to one scale.
        ConfigError: a `color` other than True and False.

    Example:
        >>> from axon_dist.schedule import one_f_one_b, simulate
        >>> table = one_f_one_b(2, 2)
        >>> print(draw(table, simulate(table)))
        1f1b: 2 stages on 2 devices, 2 microbatches, makespan 9, bubble 33.3%
                 0  1  2  3  4  5  6  7  8
        device 0 |F0|F1|     |B0   |  |B1   |
        device 1    |F0|B0   |F1|B1   |
        F forward   B backward
    """
    Schedule.check(schedule, "a drawing")
    FLAG.check("draw", "color", color)
    if width is not None and (not is_index(width) or width < 40):
        raise ScheduleError(
            f"got width={width!r:.80}. A drawing needs a whole number of at least 40 columns."
        )
    rows = boxes(schedule, timeline)
    scale, end = _scale(schedule, rows), max(box.end for row in rows for box in row)
    length = 1 + round(scale * end)
    names = ["", *(f"device {device}" for device in range(schedule.num_devices))]
    lines = [_ruler(length, scale), *(_row(schedule, row, scale, length) for row in rows)]
    margin = max(map(len, names)) + 1
    # Rows are wrapped at a number of the ruler, so that neither numbers nor labels are cut.
    unit = _ruler_step(length, scale) * scale
    step = length if width is None else max((width - margin) // unit, 1) * unit
    heading = title(schedule, timeline)
    text = [heading] if width is None else textwrap.wrap(heading, width)
    for first in range(0, length, step):
        for name, line in zip(names, lines, strict=True):
            text.append(name.ljust(margin) + _text(line[first : first + step], color))
    legend = (
        _text([(letter, _style(phase, 0)) for letter in f"{phase} {LOOKS[phase].meaning}"], color)
        for phase in phases(rows)
    )
    return "\n".join([*text, "   ".join(legend)])


def _scale(schedule: Schedule, rows: Sequence[Sequence[Box]]) -> int:
    """Returns columns per unit of time; the narrowest box must fit its label and an edge."""
    drawn = [box for row in rows for box in row]
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
    """Returns the number of units from one number of the ruler to the next."""
    return _step(scale, len(str(length // scale)) + 1)


def _step(scale: float, width: float) -> int:
    """Returns the least round number of units that is at least this wide."""
    return next(k * 10**e for e in range(9) for k in (1, 2, 5) if k * 10**e * scale >= width)


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
    return f"\x1b[30;48;5;{LOOKS[phase].ansi[chunk % 2]}m"


def _text(columns: Sequence[_Column], color: bool) -> str:
    runs = (
        ("".join(letter for letter, _ in run), style)
        for style, run in groupby(columns, key=lambda column: column[1])
    )
    line = "".join(f"{style}{text}\x1b[0m" if style and color else text for text, style in runs)
    return line.rstrip()


_LEFT, _TOP, _ROW, _PAD = 78, 62, 30, 12
_LETTER = 7.2  # the width of one letter of a label, in pixels


def to_svg(schedule: Schedule, timeline: Timeline | None = None) -> str:
    """Draws a schedule as SVG text.

    Args:
        schedule: the table.
        timeline: its simulation, to draw time to scale; None draws the ticks of the table.

    Returns:
        A complete SVG document: a row per device, time to the right; odd chunks are darker, and
        every box has its action as a tooltip.

    Example:
        >>> from axon_dist.schedule import one_f_one_b
        >>> to_svg(one_f_one_b(4, 8)).count("<rect") > 64
        True
    """
    Schedule.check(schedule, "a picture")
    rows = boxes(schedule, timeline)
    drawn = [box for row in rows for box in row]
    letters = max(len(label(schedule, box.action)) for box in drawn)
    scale = (letters * _LETTER + 12) / min(box.end - box.start for box in drawn)
    end = max(box.end for box in drawn)
    heading = title(schedule, timeline)
    width = max(_LEFT + scale * end + _PAD, _LEFT + _LETTER * len(heading) + _PAD)
    bottom = _TOP + _ROW * schedule.num_devices
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {bottom + 30}" '
        f'width="{width:.0f}" height="{bottom + 30}" font-family="monospace" font-size="12" '
        'fill="currentColor">',
        f'<text x="{_PAD}" y="20" font-size="14" font-weight="bold">{escape(heading)}</text>',
        *_legend(schedule, rows),
        *_lanes(schedule.num_devices, scale * end),
        f'<text x="{_PAD}" y="{bottom + 18}">{"time" if timeline else "tick"}</text>',
        *_axis(end, scale, bottom),
        *(
            part
            for device, row in enumerate(rows)
            for part in _svg_row(schedule, device, row, scale)
        ),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _legend(schedule: Schedule, rows: Sequence[Sequence[Box]]) -> Iterator[str]:
    x = _LEFT
    for phase in phases(rows):
        text = f"{phase} {LOOKS[phase].meaning}"
        yield f'<rect x="{x}" y="32" width="14" height="14" fill="{LOOKS[phase].fill[0]}"/>'
        yield f'<text x="{x + 19}" y="43">{text}</text>'
        x += round(19 + _LETTER * len(text) + 20)
    if schedule.chunks > 1:
        yield f'<text x="{x}" y="43">darker: every second chunk</text>'


def _lanes(num_devices: int, length: float) -> Iterator[str]:
    for device in range(num_devices):
        y = _TOP + device * _ROW
        yield (
            f'<rect x="{_LEFT}" y="{y + 1}" width="{length:.1f}" height="{_ROW - 2}" '
            'fill="#888" fill-opacity="0.15"/>'
        )
        yield f'<text x="{_PAD}" y="{y + _ROW / 2 + 4}">device {device}</text>'


def _axis(end: float, scale: float, bottom: int) -> Iterator[str]:
    for unit in range(0, int(end) + 1, _step(scale, 40)):
        x = _LEFT + unit * scale
        yield f'<path d="M{x:.1f} {bottom}v5" stroke="#888"/>'
        yield f'<text x="{x:.1f}" y="{bottom + 18}" text-anchor="middle">{unit}</text>'


def _svg_row(schedule: Schedule, device: int, row: Sequence[Box], scale: float) -> Iterator[str]:
    y = _TOP + device * _ROW + 1
    for box in row:
        x, width = _LEFT + box.start * scale, (box.end - box.start) * scale
        fill = LOOKS[box.action.phase].fill[box.chunk % 2]
        yield (
            f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{_ROW - 2}" fill="{fill}" '
            f'stroke="white"><title>{box.action}</title></rect>'
        )
        yield (
            f'<text x="{x + width / 2:.1f}" y="{y + _ROW / 2 + 3}" text-anchor="middle" '
            f'fill="#222" pointer-events="none">{label(schedule, box.action)}</text>'
        )
