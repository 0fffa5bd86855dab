"""A schedule as an SVG picture, for papers, READMEs and browsers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from .action import Phase
from .boxes import MEANINGS, Box, boxes, label, phases, title
from .simulate import Timeline
from .table import Schedule

_FILL = {
    Phase.E: ("#f5bdd0", "#e58aa9"),
    Phase.F: ("#9cc3f5", "#5e97e0"),
    Phase.V: ("#d3b5f0", "#b48ae0"),
    Phase.B: ("#a5dda0", "#5fb766"),
    Phase.I: ("#a8e3d9", "#55bcab"),
    Phase.W: ("#f7d08a", "#e5a83c"),
    Phase.G: ("#e0b0b0", "#c98484"),
}
_LEFT, _TOP, _ROW, _PAD = 78, 62, 30, 12
_LETTER = 7.2  # pixels of one letter at the size of the labels


def to_svg(schedule: Schedule, timeline: Timeline | None = None) -> str:
    """Draws a schedule as SVG text.

    Args:
        schedule: one action per rank and tick.
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
    drawn = [box for row in rows for box in row if box.end > box.start]
    letters = max(len(label(schedule, box.action)) for box in drawn)
    scale = (letters * _LETTER + 12) / min(box.end - box.start for box in drawn)
    end = max(box.end for box in drawn)
    heading = title(schedule, timeline)
    width = max(_LEFT + scale * end + _PAD, _LEFT + _LETTER * len(heading) + _PAD)
    bottom = _TOP + _ROW * schedule.num_devices
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {bottom + 30}" '
        f'width="{width:.0f}" height="{bottom + 30}" font-family="monospace" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="{_PAD}" y="20" font-size="14" font-weight="bold">{escape(heading)}</text>',
        *_legend(schedule, rows),
        *_lanes(schedule.num_devices, scale * end),
        f'<text x="{_PAD}" y="{bottom + 18}" fill="#555">{"time" if timeline else "tick"}</text>',
        *_axis(end, scale, bottom),
        *(part for device, row in enumerate(rows) for part in _row(schedule, device, row, scale)),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _legend(schedule: Schedule, rows: Sequence[Sequence[Box]]) -> Iterator[str]:
    x = _LEFT
    for phase in phases(rows):
        text = f"{phase} {MEANINGS[phase]}"
        yield f'<rect x="{x}" y="32" width="14" height="14" fill="{_FILL[phase][0]}"/>'
        yield f'<text x="{x + 19}" y="43">{text}</text>'
        x += round(19 + _LETTER * len(text) + 20)
    if schedule.chunks > 1:
        yield f'<text x="{x}" y="43" fill="#555">darker: every second chunk</text>'


def _lanes(num_devices: int, length: float) -> Iterator[str]:
    for device in range(num_devices):
        y = _TOP + device * _ROW
        yield (
            f'<rect x="{_LEFT}" y="{y + 1}" width="{length:.1f}" height="{_ROW - 2}" '
            'fill="#f1f1f1"/>'
        )
        yield f'<text x="{_PAD}" y="{y + _ROW / 2 + 4}">device {device}</text>'


def _axis(end: float, scale: float, bottom: int) -> Iterator[str]:
    step = next(k * 10**e for e in range(9) for k in (1, 2, 5) if k * 10**e * scale >= 40)
    for unit in range(0, int(end) + 1, step):
        x = _LEFT + unit * scale
        yield f'<path d="M{x:.1f} {bottom}v5" stroke="#888"/>'
        yield f'<text x="{x:.1f}" y="{bottom + 18}" text-anchor="middle" fill="#555">{unit}</text>'


def _row(schedule: Schedule, device: int, row: Sequence[Box], scale: float) -> Iterator[str]:
    y = _TOP + device * _ROW + 1
    for box in row:
        x, width = _LEFT + box.start * scale, (box.end - box.start) * scale
        fill = _FILL[box.action.phase][box.chunk % 2]
        yield (
            f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{_ROW - 2}" fill="{fill}" '
            f'stroke="white"><title>{box.action}</title></rect>'
        )
        yield (
            f'<text x="{x + width / 2:.1f}" y="{y + _ROW / 2 + 3}" text-anchor="middle" '
            f'pointer-events="none">{label(schedule, box.action)}</text>'
        )
