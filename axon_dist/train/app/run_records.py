"""`Recorded`: the records in the folder of a run, read without a device; draws curves as SVG."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any, TypeAlias

from axon_dist.core.errors import ConfigError
from axon_dist.core.files import Place, json_section, kind_at, open_regular, read_bytes
from axon_dist.core.typing import JsonDict
from axon_dist.core.words import byte_size, clock_time, plural, si

from ...core.plain_yaml import sections_of
from .directory import flat, open_directory, without_repeated

START, END = "start", "end"
"""Keys of the summary for the seconds before and after the training loop."""

Curve: TypeAlias = Sequence[tuple[float, float]]
"""Pairs of step and finite value."""


@dataclasses.dataclass(frozen=True)
class Recorded:
    """The records of a run.

    Args:
        folder: its path or address.
        rows: the rows of `metrics.jsonl`, without those of steps that a rollback undid.
        summary: the contents of `summary.json`; empty if it cannot be read.
        program: the contents of `program.json`; empty if it cannot be read.
        config: the text of `config.yaml`.
        notes: a sentence for each record that is missing or broken.
        waterfall: the contents of `waterfall.json`; empty if missing or unreadable.
        called: a name that distinguishes it from another run of the same name; empty if it is not
            needed.
    """

    folder: Place
    rows: tuple[JsonDict, ...]
    summary: JsonDict
    program: JsonDict
    config: str
    notes: tuple[str, ...]
    waterfall: JsonDict = dataclasses.field(default_factory=dict)
    called: str = ""

    @property
    def name(self) -> str:
        """The name of the run on the page."""
        return self.called or str(self.summary.get("name") or self.folder.name)

    def curve(self, metric: str) -> Curve:
        """Returns the values of a metric over the steps."""
        wanted = ("step", metric)
        rows = (row for row in self.rows if all(_is_finite(row.get(name)) for name in wanted))
        return [(float(row["step"]), float(row[metric])) for row in rows]

    def metrics(self, prefix: str) -> list[str]:
        """Returns the names of all metrics with a prefix, in order of appearance."""
        return [name for name in self._names if name.startswith(prefix)]

    @functools.cached_property
    def _names(self) -> dict[str, None]:
        return dict.fromkeys(name for row in self.rows for name in row)

    def last(self, metric: str) -> float | None:
        """Returns the last value of a metric."""
        curve = self.curve(metric)
        return curve[-1][1] if curve else None

    @property
    def resumes(self) -> tuple[float, ...]:
        """The steps after which the run was resumed."""
        return tuple(float(before["step"]) for before, _ in self._legs)

    @property
    def restart_seconds(self) -> float:
        """The seconds between the last kept record of each leg and the start of the next leg."""
        return sum(
            max(float(after["time/unix"]) - after["time/elapsed_seconds"] - before["time/unix"], 0)
            for before, after in self._legs
        )

    @functools.cached_property
    def _legs(self) -> list[tuple[JsonDict, JsonDict]]:
        """Pairs of the last record of a leg and the first record of the next leg."""
        clock = ("time/unix", "time/elapsed_seconds")
        rows = [row for row in self.rows if all(_is_finite(row.get(name)) for name in clock)]
        return [pair for pair in itertools.pairwise(rows) if _is_resumed(*pair)]

    def figures(self) -> dict[str, str]:
        """Returns the main figures as text; leaves out unknown ones."""
        known = self.summary
        unit = f" {known['unit']}" if known.get("unit") else ""
        losses = self.curve("validation/loss") or self.curve("train/loss")
        what = "validation loss" if self.curve("validation/loss") else "training loss"
        best = min(losses, key=lambda point: point[1], default=None)
        rates = [n for n in self.metrics("time/") if n.endswith("_per_second")]
        item = rates[0].removeprefix("time/").removesuffix("_per_second") if rates else "items"
        speed = known.get("items_per_second") or (self.last(rates[0]) if rates else None)
        mfu = self.last("time/model_flops_utilization")
        norm = self.last("train/grad_norm")
        seconds = sum(float(before["time/elapsed_seconds"]) for before, _ in self._legs)
        spent = sum(map(float, (known.get("seconds") or {}).values()))
        seconds += spent or self.last("time/elapsed_seconds") or 0.0
        leaves = self.program.get("leaves") or []
        count = known.get("parameters") or sum(math.prod(leaf["shape"]) for leaf in leaves)
        mesh = known.get("mesh") or ",".join(
            f"{axis}={size}" for axis, size in (self.program.get("mesh") or {}).items()
        )
        devices = known.get("devices") or len(self.program.get("devices") or [])
        step = self.rows[-1]["step"] if self.rows else 0
        texts = {
            f"best {what}": best and f"{best[1]:.4f}{unit}, step {best[0]:g}",
            f"final {what}": losses and f"{losses[-1][1]:.4f}{unit}",
            "gradient norm": norm is not None and f"{norm:.3g}",
            "speed": speed and f"{si(float(speed))} {item}/s",
            "model FLOP utilization": mfu is not None and f"{mfu:.1%}",
            "time": seconds > 0 and clock_time(seconds),
            "parameters": count and si(float(count), "B"),
            "devices": devices and f"{devices} {known.get('device_kind', '')}".strip(),
            "strategy": str(known.get("strategy") or self.program.get("strategy") or ""),
            "mesh": str(mesh),
            "ended": f"{known.get('ended', 'not ended')}, step {known.get('steps', step)}",
            "resumed": self.resumes and plural(len(self.resumes), "time"),
        }
        return {label: value for label, value in texts.items() if isinstance(value, str) and value}

    def settings(self) -> dict[str, str]:
        """Returns the values of the config by dotted key; empty if it cannot be read."""
        try:
            config = sections_of(self.config, "the config")
        except ConfigError:
            return {}
        return {key: str(value) for key, value in flat(config).items()}


def _is_resumed(before: JsonDict, after: JsonDict) -> bool:
    """Whether the second of two successive records is of a later leg than the first."""
    elapsed = before["time/elapsed_seconds"]
    starts = [float(row["time/unix"]) - row["time/elapsed_seconds"] for row in (before, after)]
    # Within a leg the start is the same, except that the clock of the host may be set right. A
    # later leg starts after the record before it, so its start is later by `elapsed` or more.
    return after["time/elapsed_seconds"] < elapsed or starts[1] - starts[0] > elapsed / 2


Runs: TypeAlias = tuple[Recorded, ...]
"""The runs of a page, at least one."""


def compared(
    runs: Sequence[Mapping[str, str]], differing: bool = False
) -> dict[str, tuple[str, ...]]:
    """Tabulates the values of several runs by label, with a column for each run.

    Args:
        runs: for each run, values by label.
        differing: leave out labels with the same value in all runs.

    Example:
        >>> compared([{"a": "1", "b": "2"}, {"a": "1"}], differing=True)
        {'b': ('2', '')}
    """
    labels = dict.fromkeys(label for run in runs for label in run)
    rows = {label: tuple(run.get(label, "") for run in runs) for label in labels}
    return {label: row for label, row in rows.items() if not differing or len(set(row)) > 1}


def read_recorded(folder: str | Path) -> Recorded:
    """Reads the folder of a run.

    Args:
        folder: the folder of a run, even if the run has not ended or its files are damaged.

    Raises:
        ConfigError: when the folder does not exist, or has no records of a run.
    """
    directory = open_directory(folder)
    if not directory.path.is_dir():
        raise ConfigError(
            f"there is no folder {str(folder)!r}; name one that axon train wrote, such as "
            "runs/quickstart-20260101-120000"
        )
    notes: list[str] = []
    rows = tuple(_rows(directory.metrics, notes))
    words = (x for row in rows for x in row.values() if isinstance(x, str))
    if bad := sum(x in ("nan", "inf", "-inf") for x in words):
        notes.append(f"{plural(bad, 'number')} of the metrics not finite, omitted from curves")
    waterfall: JsonDict = {}
    if kind_at(directory.waterfall) is not None:
        waterfall = _object(directory.waterfall, "the time of a step is not broken down", notes)
    recorded = Recorded(
        folder=directory.place,
        rows=rows,
        summary=_object(directory.summary, "the run has not ended, or was killed", notes),
        program=_object(directory.program, "the run never got past its first step", notes),
        config=_text(directory.config, "the config of the run is unknown", notes),
        notes=tuple(notes),
        waterfall=waterfall,
    )
    if not (recorded.rows or recorded.summary or recorded.program or recorded.config):
        raise ConfigError(
            f"{str(folder)!r} has no records of a run: {'; '.join(notes)}", code="no-records-of-run"
        )
    return recorded


_MOST_READ, _BLOCK = 2**24, 2**18
"""The maximum bytes read from a record, and the block size in which a larger record is sampled.
Reading more would be slow, and parsing takes several times as much memory."""


def _text(path: Path, otherwise: str, notes: list[str]) -> str:
    try:
        return read_bytes(path, path.name, most=_MOST_READ, links=False).decode(errors="replace")
    except ConfigError as error:
        reason = str(error).removeprefix(f"cannot read {path.name}: ").partition(";")[0]
        notes.append(f"{path.name} cannot be read ({reason}): {otherwise}")
        return ""


def _object(path: Path, otherwise: str, notes: list[str]) -> JsonDict:
    text = _text(path, otherwise, notes)
    if not text:
        return {}
    if (data := json_section(text)) is None:
        notes.append(f"{path.name} is broken: it is not a JSON object")
    return data or {}


def _rows(path: Path, notes: list[str]) -> list[JsonDict]:
    lines = _lines(path, notes)
    rows = [row for row in map(json_section, lines) if row and _is_finite(row.get("step"))]
    if len(rows) < len(lines):
        notes.append(f"{path.name}: {len(lines) - len(rows)} of {len(lines)} lines are broken")
    return [row for _, row in without_repeated((row, row) for row in rows)]


def _lines(path: Path, notes: list[str]) -> list[str]:
    """Reads the lines of a file; from a large one, evenly spaced blocks that include both ends."""
    is_file = kind_at(path) == "a file" and not path.is_symlink()
    size = path.stat().st_size if is_file else 0
    if size <= _MOST_READ:
        return _text(path, "nothing was measured yet", notes).splitlines()
    notes.append(
        f"{path.name} has {byte_size(size)}, of which {byte_size(_MOST_READ)} are read at even "
        "distances: curves are right, but best values and sums of times cover only these lines"
    )
    lines: list[bytes] = []
    gaps = _MOST_READ // _BLOCK - 1
    with open(open_regular(path), "rb") as file:
        for number in range(gaps + 1):
            start = file.seek((size - _BLOCK) * number // gaps)
            # The first and the last piece of a block may be partial lines.
            lines += file.read(_BLOCK).split(b"\n")[bool(start) : -1]
    return [line.decode(errors="replace") for line in lines]


def _is_finite(value: Any) -> bool:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    try:
        return is_number and math.isfinite(value)
    except OverflowError:
        return False


_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP = 640, 260, 88, 50, 24
COLORS = 9
"""The number of colors in `page.html`, one for each part of the time of a run."""

_MOST_POINTS = 400


def lines(curves: Mapping[str, Curve], unit: str = "", marks: Sequence[float] = ()) -> str:
    """Draws curves over the steps.

    Args:
        curves: the curves by name; empty ones are left out.
        unit: the unit of the values, shown as the label of the vertical axis.
        marks: steps at which a run was resumed.

    Returns:
        An SVG picture; every point has a tooltip with its numbers.
    """
    drawn = {name: _thinned(curve) for name, curve in curves.items() if curve}
    xs = [x for curve in drawn.values() for x, _ in curve]
    ys = [y for curve in drawn.values() for _, y in curve]
    left = min(xs)
    right = max(xs)
    low = min(ys)
    high = max(ys)
    pad = (high - low) * 0.06 or abs(high) * 0.05 or 1.0
    low = low - pad
    high = high + pad

    def across(x):
        return _LEFT + (x - left) / ((right - left) or 1) * (_WIDTH - _LEFT - 16)

    def up(y):
        return _HEIGHT - _BOTTOM - (y - low) / (high - low) * (_HEIGHT - _BOTTOM - _TOP)

    parts = [f'<svg class="plot" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img">']
    for y in _ticks(low, high):
        parts.append(f'<path class="grid" d="M{_LEFT} {up(y):.1f}H{_WIDTH - 16}"/>')
        parts.append(f'<text x="{_LEFT - 8}" y="{up(y) + 4:.1f}" class="end">{y:,.10g}</text>')
    for x in _ticks(left, right, least=1):
        parts.append(f'<text x="{across(x):.1f}" y="{_HEIGHT - 26}" class="mid">{x:.6g}</text>')
    parts.append(f'<text x="{_WIDTH - 16}" y="{_HEIGHT - 2}" class="end">step</text>')
    parts.append(f'<text x="4" y="12">{escape(unit)}</text>')
    for x in (mark for mark in marks if left <= mark <= right):
        parts.append(
            f'<path class="mark" d="M{across(x):.1f} {_TOP}V{_HEIGHT - _BOTTOM}">'
            f"<title>resumed after step {x:g}</title></path>"
        )
    for number, (name, curve) in enumerate(drawn.items()):
        # A single point draws no line, so mark it.
        alone = " alone" if len(curve) == 1 else ""
        points = " ".join(f"{across(x):.1f},{up(y):.1f}" for x, y in curve)
        parts.append(f'<polyline class="c{number % COLORS}" points="{points}"/>')
        for x, y in curve:
            tooltip = escape(f"{name}, step {x:g}: {y:.6g} {unit}".strip())
            parts.append(
                f'<circle class="d{number % COLORS}{alone}" cx="{across(x):.1f}" '
                f'cy="{up(y):.1f}" r="5">'
                f"<title>{tooltip}</title></circle>"
            )
    return "".join([*parts, "</svg>", _legend(drawn, "dashed: resumed" if marks else "")])


def bars(parts: Mapping[str, float], words: Mapping[str, str]) -> str:
    """Draws the parts of a whole as one bar, and lists them.

    Args:
        parts: sizes by name.
        words: the sizes as text.
    """
    total = sum(parts.values()) or 1
    cells = []
    rows = []
    for number, (name, size) in enumerate(parts.items()):
        tooltip = escape(f"{name}: {words[name]}")
        share = 100 * size / total
        color = f"b{number % COLORS}"
        cells.append(f'<i class="{color}" style="width:{share:.3f}%" title="{tooltip}"></i>')
        rows.append(
            f'<tr><td><b class="{color}"></b>{escape(name)}</td>'
            f"<td>{escape(words[name])}</td><td>{share:.1f}%</td></tr>"
        )
    return f'<div class="bar">{"".join(cells)}</div><table>{"".join(rows)}</table>'


def _legend(names: Iterable[str], note: str) -> str:
    items = [
        f'<span><b class="b{number % COLORS}"></b>{escape(name)}</span>'
        for number, name in enumerate(names)
    ]
    return f'<p class="legend">{"".join(items)}<span>{note}</span></p>'


def _thinned(curve: Curve) -> Curve:
    """Thins a curve to about `_MOST_POINTS` points; keeps the last one."""
    stride = math.ceil(len(curve) / _MOST_POINTS)
    return [*curve[:-1:stride], curve[-1]] if stride > 1 else curve


def _ticks(low: float, high: float, least: float = 0) -> list[float]:
    """Returns three or more round numbers from `low` to `high`, fewer if `least` lies between them.

    Example:
        >>> _ticks(2010, 2930), _ticks(0, 400), _ticks(1, 2, least=1)
        ([2200, 2400, 2600, 2800], [0, 200, 400], [1, 2])
    """
    span = high - low
    if span <= 0:
        return [low]
    power = 10 ** math.floor(math.log10(span / 4))
    ticks: list[float] = []
    for factor in (10, 5, 2, 1):
        step = max(factor * power, least)
        ticks = [k * step for k in range(math.ceil(low / step), math.floor(high / step) + 1)]
        if len(ticks) >= 3:
            break
    return ticks
