"""`Recorded`: what a run wrote into its folder, read without a device, and its curves as SVG."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any, TypeAlias

from axon_dist.core.errors import ConfigError
from axon_dist.core.files import as_path, host_memory, read_bytes

from .directory import RunDirectory

Curve: TypeAlias = Sequence[tuple[float, float]]
"""Pairs of step and value, finite ones alone."""


@dataclasses.dataclass(frozen=True)
class Recorded:
    """What is known of a run.

    Args:
        folder: where it lies.
        rows: of `metrics.jsonl`.
        summary: of `summary.json`; empty where it cannot be read.
        program: of `program.json`; empty where it cannot be read.
        config: the text of `config.yaml`.
        notes: a sentence for everything that is missing or broken.
        called: what it is called beside another run of its name; empty for that name.
    """

    folder: Path
    rows: tuple[Mapping[str, Any], ...]
    summary: Mapping[str, Any]
    program: Mapping[str, Any]
    config: str
    notes: tuple[str, ...]
    called: str = ""

    @property
    def name(self) -> str:
        """What the run is called."""
        return self.called or str(self.summary.get("name") or self.folder.name)

    def curve(self, metric: str) -> Curve:
        """The values of a metric over the steps."""
        wanted = ("step", metric)
        rows = (row for row in self.rows if all(_is_finite(row.get(name)) for name in wanted))
        return [(float(row["step"]), float(row[metric])) for row in rows]

    def metrics(self, prefix: str) -> list[str]:
        """The names of all metrics that begin so, in the order in which they came."""
        return list(dict.fromkeys(n for row in self.rows for n in row if n.startswith(prefix)))

    @property
    def num_not_finite(self) -> int:
        """How many numbers of the metrics are infinite or none."""
        words = {"nan", "inf", "-inf"}
        return sum(isinstance(x, str) and x in words for row in self.rows for x in row.values())


def read_recorded(folder: str | Path) -> Recorded:
    """Reads the folder of a run.

    Args:
        folder: that `axon train` wrote to, even if it has not ended or was damaged.

    Raises:
        ConfigError: when there is no such folder, or nothing of a run in it.
    """
    directory = RunDirectory(as_path(folder, "the run"))
    if not directory.path.is_dir():
        raise ConfigError(
            f"there is no folder {str(folder)!r}; name one that axon train wrote, such as "
            "runs/quickstart-20260101-120000"
        )
    notes: list[str] = []
    rows = tuple(_rows(directory.metrics, notes))
    found = Recorded(
        folder=directory.path,
        rows=rows,
        summary=_object(directory.summary, "the run has not ended, or was killed", notes),
        program=_object(directory.program, "the run never got past its first step", notes),
        config=_text(directory.config, "nobody knows what the run was made from", notes),
        notes=tuple(notes),
    )
    if not (found.rows or found.summary or found.program or found.config):
        raise ConfigError(f"{str(folder)!r} holds nothing of a run: {'; '.join(notes)}")
    return found


def _text(path: Path, otherwise: str, notes: list[str]) -> str:
    try:
        return read_bytes(path, path.name, most=host_memory() // 8).decode(errors="replace")
    except ConfigError as error:
        reason = str(error).removeprefix(f"cannot read {path.name}: ").partition(";")[0]
        notes.append(f"{path.name} cannot be read ({reason}): {otherwise}")
        return ""


def _object(path: Path, otherwise: str, notes: list[str]) -> Mapping[str, Any]:
    text = _text(path, otherwise, notes)
    if not text:
        return {}
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        notes.append(f"{path.name} is broken: it is no JSON object")
        return {}
    return found


def _rows(path: Path, notes: list[str]) -> list[Mapping[str, Any]]:
    lines = _text(path, "nothing was measured yet", notes).splitlines()
    found: list[Mapping[str, Any]] = []
    for line in lines:
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(row, dict) and _is_finite(row.get("step")):
            found.append(row)
    if len(found) < len(lines):
        notes.append(f"{path.name}: {len(lines) - len(found)} of {len(lines)} lines are broken")
    return found


def _is_finite(value: Any) -> bool:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    try:
        return is_number and math.isfinite(value)
    except OverflowError:
        return False


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

    def across(x):
        return _LEFT + (x - left) / ((right - left) or 1) * (_WIDTH - _LEFT - 16)

    def up(y):
        return _HEIGHT - _BOTTOM - (y - low) / (high - low) * (_HEIGHT - _BOTTOM - _TOP)

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
