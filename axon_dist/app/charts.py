"""Curves and bars as SVG, drawn with the colors of the page that they stand on."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

Curve = Sequence[tuple[float, float]]
"""Pairs of x and y."""

_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP = 640, 240, 88, 34, 16
_MOST_POINTS = 400


def lines(curves: Mapping[str, Curve], unit: str = "") -> str:
    """Draws curves over the steps.

    Args:
        curves: by name; one without a point is left out.
        unit: of the values.

    Returns:
        An SVG picture; every point tells its numbers when it is pointed at.
    """
    drawn = {name: _thinned(curve) for name, curve in curves.items() if curve}
    xs = [x for curve in drawn.values() for x, _ in curve]
    ys = [y for curve in drawn.values() for _, y in curve]
    left, right, low, high = min(xs), max(xs), min(ys), max(ys)
    pad = (high - low) * 0.06 or abs(high) * 0.05 or 1.0
    low, high = low - pad, high + pad
    across = lambda x: _LEFT + (x - left) / ((right - left) or 1) * (_WIDTH - _LEFT - 16)
    up = lambda y: _HEIGHT - _BOTTOM - (y - low) / (high - low) * (_HEIGHT - _BOTTOM - _TOP)
    parts = [f'<svg class="plot" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img">']
    for y in _ticks(low, high):
        parts.append(f'<path class="grid" d="M{_LEFT} {up(y):.1f}H{_WIDTH - 16}"/>')
        parts.append(f'<text x="{_LEFT - 8}" y="{up(y) + 4:.1f}" class="end">{y:,.10g}</text>')
    for x in _ticks(left, right, least=1):
        parts.append(f'<text x="{across(x):.1f}" y="{_HEIGHT - 8}" class="mid">{x:.6g}</text>')
    for number, (name, curve) in enumerate(drawn.items()):
        # A single point makes no line.
        alone = " alone" if len(curve) == 1 else ""
        points = " ".join(f"{across(x):.1f},{up(y):.1f}" for x, y in curve)
        parts.append(f'<polyline class="c{number % 8}" points="{points}"/>')
        for x, y in curve:
            told = escape(f"{name}, step {x:g}: {y:.6g} {unit}".strip())
            parts.append(
                f'<circle class="d{number % 8}{alone}" cx="{across(x):.1f}" cy="{up(y):.1f}" r="5">'
                f"<title>{told}</title></circle>"
            )
    return "".join([*parts, "</svg>", _legend(list(drawn), unit)])


def bars(parts: Mapping[str, float], words: Mapping[str, str]) -> str:
    """Draws the parts of a whole as one bar, and lists them.

    Args:
        parts: sizes by name.
        words: the sizes as people read them.
    """
    whole = sum(parts.values()) or 1
    cells, rows = [], []
    for number, (name, size) in enumerate(parts.items()):
        told = escape(f"{name}: {words[name]}")
        share = 100 * size / whole
        cells.append(f'<i class="b{number % 8}" style="width:{share:.3f}%" title="{told}"></i>')
        rows.append(
            f'<tr><td><b class="b{number % 8}"></b>{escape(name)}</td>'
            f"<td>{escape(words[name])}</td><td>{share:.1f} %</td></tr>"
        )
    return f'<div class="bar">{"".join(cells)}</div><table>{"".join(rows)}</table>'


def _legend(names: Sequence[str], unit: str) -> str:
    items = [
        f'<span><b class="b{number % 8}"></b>{escape(name)}</span>'
        for number, name in enumerate(names)
    ]
    return (
        f'<p class="legend">{"".join(items)}{f"<span>in {escape(unit)}</span>" if unit else ""}</p>'
    )


def _thinned(curve: Curve) -> Curve:
    """At most so many points, the last one among them."""
    every = math.ceil(len(curve) / _MOST_POINTS)
    return [*curve[:-1:every], curve[-1]] if every > 1 else curve


def _ticks(low: float, high: float, least: float = 0) -> list[float]:
    """Round numbers from `low` to `high`, at least so far apart."""
    span = high - low
    if span <= 0:
        return [low]
    raw = span / 4
    power = 10 ** math.floor(math.log10(raw))
    step = max(next(k * power for k in (1, 2, 5, 10) if k * power >= raw), least)
    first = math.ceil(low / step)
    return [k * step for k in range(first, math.floor(high / step) + 1)]
