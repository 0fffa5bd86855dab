"""The grid of a table as text: one line per device, one column per tick."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from .action import Cell

_LABEL = len("device 10")
_MARGIN = 6  # ticks shown on each side of a marked cell


def cell_text(cell: Cell) -> str:
    """Writes a cell as in the CSV form: actions joined by `+`, nothing when idle."""
    return "+".join(map(str, cell))


def render_grid(rows: Sequence[Sequence[Cell]], marks: Collection[tuple[int, int]] = ()) -> str:
    """Draws a table, with some cells marked.

    Args:
        rows: the cells of each device, tick by tick; rows may differ in length.
        marks: (device, tick) of the cells to point at, shown as `[2B0]`. A grid with marks is cut
            to the ticks around them.

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
    body = [[_entry(rows, device, tick, marks) for tick in ticks] for device in range(len(rows))]
    widths = [max(map(len, column)) for column in zip(header, *body, strict=True)]
    marked = {device for device, _ in marks}
    lines = [_line("tick", header, widths)]
    for device, entries in enumerate(body):
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
    return f"[{text}]" if (device, tick) in marks else text
