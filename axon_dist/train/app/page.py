"""`report_page` draws runs as one self-contained HTML page."""

from __future__ import annotations

import dataclasses
import re
import string
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from pathlib import Path

from axon_dist.core.errors import ConfigError
from axon_dist.core.words import byte_size, duration
from axon_dist.inspect import Waterfall
from axon_dist.schedule import Schedule, simulate, to_svg, validate

from .run_records import (
    COLORS,
    END,
    START,
    Curve,
    Recorded,
    Runs,
    bars,
    compared,
    lines,
    read_recorded,
)

TEMPLATE = Path(__file__).with_name("page.html")
"""The part of a page that is the same for all runs."""

MOST_DEVICES = 256
"""The largest number of devices for which a mesh is drawn."""


@dataclasses.dataclass(frozen=True)
class Part:
    """One section of a page.

    Args:
        key: the HTML anchor.
        title: the heading.
        draw: returns HTML for the runs, or None if there is nothing to show.
        missing: the text to show if `draw` returns None.
    """

    key: str
    title: str
    draw: Callable[[Runs], str | None]
    missing: str


def report_page(run: str | Path, compare: str | Path | Sequence[str | Path] = ()) -> str:
    """Draws the records of a run as one HTML page; needs no device and no network.

    All text from the run is escaped. The page lists missing and broken records.

    Args:
        run: the folder of a run, finished or not.
        compare: folders of other runs. Their curves are drawn in the same plots, and a table shows
            how their figures and configs differ.

    Returns:
        The page, which loads no other files.

    Raises:
        ConfigError: when a folder does not exist, or has no records of a run.
    """
    others = (compare,) if isinstance(compare, (str, Path)) else compare
    runs = _with_distinct_names([read_recorded(one) for one in (run, *others)])
    drawn = {part: _drawn(part, runs) for part in PARTS}
    sections = [_section(part, html) for part, html in drawn.items() if html is not None]
    absent = [part for part, html in drawn.items() if html is None]
    sections += [_section(_ABSENT, _list(f"{p.title}: {p.missing}" for p in absent))]
    links = "".join(
        f'<a href="#{part.key}">{part.title}</a>' for part in PARTS if part not in absent
    )
    notes = [f"{one.name}: {note}" for one in runs for note in one.notes]
    page = string.Template(TEMPLATE.read_text(encoding="utf-8")).substitute(
        title=escape(" and ".join(one.name for one in runs)),
        head=_head(runs),
        notes=_list(notes, "notes"),
        links=links,
        body="\n".join(sections if absent else sections[:-1]),
    )
    # Control characters in a run's records could affect a terminal that prints the page.
    return _CONTROL.sub("\N{REPLACEMENT CHARACTER}", page)


_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def _list(lines: Iterable[str], kind: str = "missing") -> str:
    items = "".join(f"<li>{escape(line)}</li>" for line in lines)
    return f'<ul class="{kind}">{items}</ul>' if items else ""


def _drawn(part: Part, runs: Runs) -> str | None:
    try:
        return part.draw(runs)
    except Exception as error:  # a damaged record may have any content
        return _say(f"this cannot be drawn: {type(error).__name__}: {error}")


def _section(part: Part, html: str) -> str:
    return f'<section id="{part.key}"><h2>{escape(part.title)}</h2>{html}</section>'


def _say(text: str) -> str:
    return f'<p class="missing">{escape(text)}</p>'


def _head(runs: Runs) -> str:
    """Draws the name of a run and its figures, or the names of several runs."""
    folders = "<br>".join(escape(str(one.folder)) for one in runs)
    title = escape(" and ".join(one.name for one in runs))
    figures = "".join(
        f"<div><dt>{escape(label)}</dt><dd>{escape(value)}</dd></div>"
        for label, value in _figures(runs[0]).items()
    )
    shown = f'<dl class="figures">{figures}</dl>' if len(runs) == 1 else ""
    return f"<h1>{title}</h1><p>{folders}</p>{shown}"


def _figures(run: Recorded) -> Mapping[str, str]:
    try:
        return run.figures()
    except Exception as error:  # a damaged record may have any content
        return {"figures": f"unknown ({type(error).__name__})"}


def _side_by_side(runs: Runs) -> str | None:
    """Draws the figures of several runs, and the config keys in which they differ."""
    if len(runs) == 1:
        return None
    names = [one.name for one in runs]
    figures = compared([_figures(one) for one in runs])
    settings = compared([one.settings() for one in runs], differing=True)
    shown, differing = (
        _table([[label, *row] for label, row in rows.items()], ["", *names])
        for rows in (figures, settings)
    )
    return shown + _under("Configs: the keys that differ", differing or _say("None."))


def _with_distinct_names(runs: list[Recorded]) -> Runs:
    """Adds the folder, or `compared`, to the names of runs that have the same name."""
    named: list[Recorded] = []
    for number, run in enumerate(runs):
        others = [one for n, one in enumerate(runs) if n != number and one.name == run.name]
        mark = run.folder.resolve().name
        if others and any(one.folder.resolve().name != mark for one in others):
            run = dataclasses.replace(run, called=f"{run.name} ({mark})")
        elif others and number:
            run = dataclasses.replace(
                run, called=f"{run.name} (compared{number if number > 1 else ''})"
            )
        named.append(run)
    return tuple(named)


def _plot(runs: Runs, names: Mapping[str, str], unit: str = "") -> str | None:
    """Plots metrics of every run; `names` maps each metric to its label."""
    curves: dict[str, Curve] = {
        f"{label}, {one.name}" if len(runs) > 1 else label: one.curve(metric)
        for one in runs
        for metric, label in names.items()
    }
    marks = runs[0].resumes if len(runs) == 1 else ()
    curves = {label: curve for label, curve in curves.items() if curve}
    return lines(curves, unit, marks) if curves else None


def _loss(runs: Runs) -> str | None:
    names = {"train/loss": "training", "validation/loss": "validation"}
    names |= {
        metric: metric.removeprefix("validation/").removesuffix("/loss")
        for metric in runs[0].metrics("validation/")
        if metric.endswith("/loss") and metric not in names
    }
    return _plot(runs, names, str(runs[0].summary.get("unit") or "loss"))


def _validation(runs: Runs) -> str | None:
    metrics = [n for n in runs[0].metrics("validation/") if not n.endswith("/loss")]
    drawn = ""
    for metric in metrics:
        short = metric.removeprefix("validation/")
        names = {f"train/{short}": f"training {short}", metric: f"validation {short}"}
        drawn += _under(short, _plot(runs, names, short))
    return drawn or None


def _norms(runs: Runs) -> str | None:
    """Plots the norm of the gradient, and the norms by layer if a run has recorded them."""
    drawn = _plot(runs, {"train/grad_norm": "gradient norm"}, "norm before clipping") or ""
    for kind, what in {"grad": "gradients", "param": "weights", "update": "updates"}.items():
        prefix = f"train/{kind}_norm/"
        names = {n: n.removeprefix(prefix) for n in runs[0].metrics(prefix)}
        drawn += _under(f"{what} by layer", _plot(runs, names, "norm"))
    return drawn or None


def _throughput(runs: Runs) -> str | None:
    drawn = ""
    for metric in [n for n in runs[0].metrics("time/") if n.endswith("_per_second")]:
        item = metric.removeprefix("time/").removesuffix("_per_second")
        drawn += _plot(runs, {metric: f"{item}/s"}, f"{item}/s") or ""
    shares = {
        "time/model_flops_utilization": "model FLOP utilization",
        "time/goodput": "goodput",
        "time/data_share": "waiting for data",
        "time/host_share": "host",
    }
    plot = _plot(runs, shares, "share")
    return drawn + _under("shares of the time", plot and f"{plot}<p>{_SHARES}</p>") or None


_SHARES = (
    "goodput: the share of the time since the start that was spent in steps that were kept. "
    "waiting for data: the share of the time since the last record that was spent waiting for "
    "batches. host: the share spent in Python between the steps, waiting for neither batches nor "
    "devices."
)


def _step_time(runs: Runs) -> str | None:
    names = {"time/step_seconds": "mean", "time/slowest_step_seconds": "slowest"}
    plot = _plot(runs, names, "seconds")
    rows = []
    for one in runs:
        percentiles = one.summary.get("step_percentiles") or {}
        cells = [duration(float(percentiles[p])) if p in percentiles else "" for p in _PERCENTILES]
        if any(cells):
            rows.append([one.name, *cells])
    if plot is None and not rows:
        return None
    return (plot or "") + _table(rows, ["", *_PERCENTILES.values()])


_PERCENTILES = {"50": "half within", "90": "90%", "99": "99%", "100": "all"}


def _under(heading: str, html: str | None) -> str:
    return f"<h3>{escape(heading)}</h3>{html}" if html else ""


def _of_each(draw: Callable[[Recorded], str | None]) -> Callable[[Runs], str | None]:
    """Turns a function that draws one run into one that draws each of several under its name."""

    def draw_all(runs: Runs) -> str | None:
        return "".join(_under(one.name, draw(one)) for one in runs) or None

    return draw_all


@_of_each
def _time(one: Recorded) -> str | None:
    seconds = {str(k): float(v) for k, v in (one.summary.get("seconds") or {}).items()}
    if not seconds:
        return None
    # The last restart includes the start of this leg, which is already counted under START.
    seconds["restart"] = max(one.restart_seconds - seconds.get(START, 0.0), 0.0)
    seconds = {_KINDS.get(kind, kind): x for kind, x in seconds.items() if x > 0}
    words = {kind: duration(x) for kind, x in seconds.items()}
    since = one.summary.get("first_step")
    leg = f"<p>since step {escape(str(since))}; restarts of the whole run</p>" if since else ""
    return f"{bars(seconds, words)}{leg}"


_KINDS = {
    START: "start: imports, data, building",
    END: "end: curves, last writes",
    "initialize": "initialization",
    "compile": "compile, with the first step",
    "data": "waiting for data",
    "step": "training steps",
    "lost": "steps undone by rollbacks",
}


@_of_each
def _waterfall(one: Recorded) -> str | None:
    if not one.waterfall:
        return None
    try:
        found = Waterfall.from_dict(one.waterfall)
    except ConfigError as error:
        return _say(f"waterfall.json is broken: {error}")
    rows = found.rows()
    words = {label: duration(seconds) for label, _, seconds, _, _ in rows}
    drawn = bars({label: seconds for label, _, seconds, _, _ in rows}, words)
    shown = [
        [label, f"{percent:.1f}", lines, advice]
        for label, percent, _, lines, advice in rows
        if lines
    ]
    head = ["lost to", "% of the step", "lines", "how to reduce it"]
    summary = "".join(f"<p>{escape(line)}</p>" for line in found.summary())
    return f"{summary}{drawn}{_table(shown, head)}"


@_of_each
def _memory(one: Recorded) -> str | None:
    sizes = {str(k): float(v) for k, v in (one.program.get("memory") or {}).items()}
    if not sizes:
        return None
    words = {name: byte_size(size) for name, size in sizes.items()}
    chip = one.program.get("chip")
    capacity = one.program.get("chip_bytes")
    of = f" of {byte_size(float(capacity))} of a {chip}" if chip and capacity else ""
    total = f"{byte_size(sum(sizes.values()))} per device at the peak of a step{of}"
    return f"<p>{escape(total)}</p>{bars(sizes, words)}"


@_of_each
def _collectives(one: Recorded) -> str | None:
    if "collectives" not in one.program:
        return None
    by_axis = {str(k): float(v) for k, v in one.program["wire_bytes_by_axis"].items()}
    if not by_axis:
        return "<p>The step sends nothing.</p>"
    sent = {axis: f"{byte_size(size)} sent" for axis, size in by_axis.items()}
    columns = {
        "kind": "kind",
        "axis": "axis",
        "dtypes": "dtype",
        "count": "count",
        "wire_bytes": "bytes each",
        **({} if one.program.get("is_cpu") else {"exposure": "exposure"}),
        "source": "source",
    }
    words = {"dtypes": ", ".join, "wire_bytes": lambda size: byte_size(float(size))}
    rows = [
        [words.get(name, str)(row[name]) for name in columns]
        for row in one.program["collectives"][:60]
    ]
    return f"{bars(by_axis, sent)}{_table(rows, list(columns.values()))}"


@_of_each
def _timeline(one: Recorded) -> str | None:
    schedule = one.program.get("schedule")
    if not schedule:
        return None
    table = Schedule.from_csv(schedule["csv"], str(schedule["name"]))
    validate(table)
    picture = to_svg(table, simulate(table)).replace(' xmlns="http://www.w3.org/2000/svg"', "")
    return f'<div class="paper">{picture}</div>'


def _parameters(runs: Runs) -> str | None:
    leaves = runs[0].program.get("leaves")
    if not leaves:
        return None
    head = ["parameter", "shape", "dtype", "bytes per device", "split", "why"]
    rows = [
        [
            *(leaf["path"], " x ".join(map(str, leaf["shape"])), leaf["dtype"]),
            byte_size(float(leaf["bytes_per_device"])),
            *(leaf["spec"], leaf["why"]),
        ]
        for leaf in leaves
    ]
    search = '<input id="find" placeholder="find a parameter" aria-label="find a parameter">'
    return f'{search}<div id="leaves">{_table(rows, head)}</div>'


def _mesh(runs: Runs) -> str | None:
    shape = runs[0].program.get("mesh")
    devices = runs[0].program.get("devices")
    if not shape or not devices:
        return None
    axes = ", ".join(f"{axis}={size}" for axis, size in shape.items())
    caption = f"<p>{escape(axes)}; the last axis runs along a row</p>"
    if len(devices) > MOST_DEVICES:
        return caption + _say(f"{len(devices)} devices are too many to draw")
    columns = int(list(shape.values())[-1])
    cells = "".join(
        f'<div class="b{int(d["process"]) % COLORS}" title="device {escape(str(d["id"]))}, process '
        f'{escape(str(d["process"]))}">{escape(str(d["rank"]))}</div>'
        for d in devices
    )
    tracks = f"grid-template-columns:repeat({columns},minmax(2em,3em))"
    grid = f'<div class="mesh" style="{tracks}">{cells}</div>'
    processes = len({d["process"] for d in devices})
    owners = f"one color for each of {processes} processes" if processes > 1 else "of one process"
    return f"{caption}{grid}<p>ranks, {owners}</p>"


def _versions(runs: Runs) -> str | None:
    names = ("jax", "jaxlib", "flax", "backend", "platform_version", "device_kind", "processes")
    rows = [
        [name, *(str(one.summary.get(name, "?")) for one in runs)]
        for name in names
        if any(name in one.summary for one in runs)
    ]
    return _table(rows, ["", *(one.name for one in runs)]) if rows else None


def _config(runs: Runs) -> str | None:
    shown = [
        f"<details open><summary>{escape(one.name)}</summary><pre>{escape(one.config)}</pre>"
        "</details>"
        for one in runs
        if one.config
    ]
    return "".join(shown) or None


def _table(rows: Sequence[Sequence[object]], head: Sequence[str] = ()) -> str:
    if not rows:
        return ""
    top = "".join(f"<th>{escape(name)}</th>" for name in head)
    body = "".join(
        f"<tr>{''.join(f'<td>{escape(str(cell))}</td>' for cell in row)}</tr>" for row in rows
    )
    return f'<div class="wide"><table><tr>{top}</tr>{body}</table></div>'


_NOT_MEASURED = "Not measured: metrics.jsonl has no record of it."
_NO_SUMMARY = "Unknown: not in summary.json, which axon train writes at the end."
_NO_PROGRAM = "Unknown: not in program.json, which axon train writes after the first step."
_ABSENT = Part("absent", "Not recorded", lambda runs: None, "")
PARTS: tuple[Part, ...] = (
    Part("runs", "Side by side", _side_by_side, "One run; add others with --compare."),
    Part("loss", "Loss", _loss, _NOT_MEASURED),
    Part("validation", "Validation metrics", _validation, "Only the loss was validated."),
    Part("norms", "Gradient norm", _norms, _NOT_MEASURED),
    Part(
        "rate",
        "Learning rate",
        lambda runs: _plot(runs, {"optimizer/learning_rate": "learning rate"}, "learning rate"),
        "Unknown: the optimizer does not report it, or nothing was recorded.",
    ),
    Part("throughput", "Throughput", _throughput, _NOT_MEASURED),
    Part("steps", "Step time", _step_time, _NOT_MEASURED),
    Part("time", "Where the time went", _time, _NO_SUMMARY),
    Part(
        "waterfall",
        "From the peak to the step",
        _waterfall,
        "No step was profiled: run axon profile RUN, which writes it into the folder of the run.",
    ),
    Part("memory", "Memory per device", _memory, _NO_PROGRAM),
    Part("collectives", "Collectives", _collectives, _NO_PROGRAM),
    Part("schedule", "Schedule", _timeline, "There is no pipeline, so there is no schedule."),
    Part("mesh", "Mesh", _mesh, _NO_PROGRAM),
    Part("parameters", "How every parameter is split", _parameters, _NO_PROGRAM),
    Part("versions", "Versions", _versions, _NO_SUMMARY),
    Part("config", "Config", _config, "Unknown: config.yaml is missing."),
)
"""All sections of a page, in order."""
