"""`report_page`: a run as one page that needs nothing but a browser."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from axon_dist.core.words import byte_size, clock_time, duration, plural
from axon_dist.schedule import Schedule, simulate, to_svg, validate

from .recorded import Recorded, bars, lines, read_recorded

MOST_DEVICES = 256
"""The largest mesh that is drawn device by device."""


@dataclasses.dataclass(frozen=True)
class Part:
    """One row of the table of what a page shows.

    Args:
        key: its anchor.
        title: its heading.
        draw: from the run, and the one it is compared with if any, to HTML; None where there is
            nothing to show.
        missing: what is said then.
    """

    key: str
    title: str
    draw: Callable[[Recorded, Recorded | None], str | None]
    missing: str


def report_page(run: str | Path, compare: str | Path | None = None) -> str:
    """Draws what a run recorded as one HTML page; no device and no network is needed.

    Everything that comes from the run is escaped; what is missing or broken is said in the page.

    Args:
        run: the folder of a run, ended or not.
        compare: the folder of another one, whose curves are drawn beside it.

    Returns:
        The page: it asks for nothing outside itself.

    Raises:
        ConfigError: when a folder is not there, or holds nothing of a run.
    """
    found = read_recorded(run)
    other = None if compare is None else read_recorded(compare)
    if other is not None and other.name == found.name:
        found, other = _told_apart(found, other)
    sections = [_section(part, found, other) for part in PARTS]
    links = "".join(f'<a href="#{part.key}">{part.title}</a>' for part in PARTS)
    runs = [found, *([] if other is None else [other])]
    notes = [f"{one.name}: {note}" for one in runs for note in _notes(one)]
    told = "".join(f"<li>{escape(note)}</li>" for note in notes)
    return _PAGE.format(
        title=escape(" and ".join(one.name for one in runs)),
        style=_STYLE,
        script=_SCRIPT,
        head=_head(found),
        notes=f'<ul class="notes">{told}</ul>' if told else "",
        links=links,
        body="\n".join(sections),
    )


def _notes(run: Recorded) -> list[str]:
    bad = run.num_not_finite
    finite = (
        [f"{plural(bad, 'number')} of the metrics not finite, left out of curves"] if bad else []
    )
    return [*run.notes, *finite]


def _section(part: Part, run: Recorded, other: Recorded | None) -> str:
    try:
        drawn = part.draw(run, other)
    except Exception as error:  # a damaged record may hold anything
        drawn = _say(f"this cannot be drawn: {type(error).__name__}: {error}")
    return (
        f'<section id="{part.key}"><h2>{escape(part.title)}</h2>'
        f"{_say(part.missing) if drawn is None else drawn}</section>"
    )


def _say(text: str) -> str:
    return f'<p class="missing">{escape(text)}</p>'


def _head(run: Recorded) -> str:
    known = run.summary
    facts = [
        f"{known.get('ended', 'not ended')} after {known.get('steps', '?')} steps",
        f"{known.get('strategy') or run.program.get('strategy', '?')} on {known.get('mesh', '?')}",
        f"{known.get('devices', '?')} x {known.get('device_kind', '?')}",
        str(run.folder),
    ]
    return f"<h1>{escape(run.name)}</h1><p>{escape('  ·  '.join(facts))}</p>"


def _told_apart(run: Recorded, other: Recorded) -> tuple[Recorded, Recorded]:
    """Two runs of one name, called by their folders, or by which is compared where those agree."""
    marks = (run.folder.resolve().name, other.folder.resolve().name)
    if marks[0] == marks[1]:
        return run, dataclasses.replace(other, called=f"{other.name} (compared)")
    pairs = zip((run, other), marks, strict=True)
    run, other = (dataclasses.replace(one, called=f"{one.name} ({mark})") for one, mark in pairs)
    return run, other


def _curves(run: Recorded, other: Recorded | None, names: Mapping[str, str]) -> dict[str, Any]:
    """The curves of some metrics, by what they are called; those of the other run beside them."""
    found = {label: run.curve(metric) for metric, label in names.items()}
    if other is not None:
        mine = {f"{label}, {run.name}": curve for label, curve in found.items()}
        theirs = {f"{label}, {other.name}": other.curve(metric) for metric, label in names.items()}
        found = {**mine, **theirs}
    return {label: curve for label, curve in found.items() if curve}


def _of(names: Mapping[str, str], unit: str = "") -> Callable[..., str | None]:
    def draw(run: Recorded, other: Recorded | None) -> str | None:
        curves = _curves(run, other, names)
        return lines(curves, unit) if curves else None

    return draw


def _loss(run: Recorded, other: Recorded | None) -> str | None:
    unit = str(run.summary.get("unit", ""))
    curves = _curves(run, other, {"train/loss": "training", "validation/loss": "validation"})
    return lines(curves, unit) if curves else None


def _validation(run: Recorded, other: Recorded | None) -> str | None:
    metrics = [name for name in run.metrics("validation/") if name != "validation/loss"]
    drawn = []
    for metric in metrics:
        short = metric.removeprefix("validation/")
        names = {f"train/{short}": f"training {short}", metric: f"validation {short}"}
        if curves := _curves(run, other, names):
            drawn.append(f"<h3>{escape(short)}</h3>{lines(curves)}")
    return "".join(drawn) or None


def _throughput(run: Recorded, other: Recorded | None) -> str | None:
    names = [n for n in run.metrics("time/") if n.endswith("_per_second")]
    drawn = []
    for metric in names:
        item = metric.removeprefix("time/").removesuffix("_per_second")
        drawn.append(lines(_curves(run, other, {metric: f"{item}/s"})))
    shares = {
        "time/model_flops_utilization": "model FLOP utilization",
        "time/goodput": "goodput",
        "time/data_share": "waiting for data",
        "time/host_share": "host",
    }
    if curves := _curves(run, other, shares):
        drawn.append(f"<h3>shares of the time</h3>{lines(curves)}")
    return "".join(drawn) or None


def _step_time(run: Recorded, other: Recorded | None) -> str | None:
    names = {"time/step_seconds": "mean", "time/slowest_step_seconds": "slowest"}
    curves = _curves(run, other, names)
    rows = []
    for one in (run, *(() if other is None else (other,))):
        found = one.summary.get("step_percentiles") or {}
        said = {"50": "half of the steps", "90": "90 %", "99": "99 %", "100": "all"}
        cells = [f"{said[p]} within {duration(float(found[p]))}" for p in said if p in found]
        rows += [[one.name, *cells]] if cells else []
    if not curves and not rows:
        return None
    return (lines(curves, "s") if curves else "") + _table(rows)


def _time(run: Recorded, other: Recorded | None) -> str | None:
    drawn = []
    for one in (run, *(() if other is None else (other,))):
        seconds = {str(k): float(v) for k, v in (one.summary.get("seconds") or {}).items()}
        if not seconds:
            continue
        if restart := _restart_seconds(one):
            seconds["restart"] = restart
        seconds = {_KINDS.get(kind, kind): x for kind, x in seconds.items() if x > 0}
        words = {kind: clock_time(x) if x >= 60 else duration(x) for kind, x in seconds.items()}
        since = one.summary.get("first_step")
        leg = f"<p>since step {escape(str(since))}; restarts of the whole run</p>" if since else ""
        drawn.append(f"<h3>{escape(one.name)}</h3>{bars(seconds, words)}{leg}")
    return "".join(drawn) or None


_KINDS = {
    "initialize": "initialization",
    "compile": "compile, with the first step",
    "data": "waiting for data",
    "step": "training steps",
    "lost": "steps undone by rollbacks",
}


def _restart_seconds(run: Recorded) -> float:
    """From the last record that a leg of the run kept to the beginning of the next leg."""
    total = 0.0
    rows = [row for row in run.rows if "time/unix" in row and "time/elapsed_seconds" in row]
    for before, after in itertools.pairwise(rows):
        if float(after["time/elapsed_seconds"]) < float(before["time/elapsed_seconds"]):
            began = float(after["time/unix"]) - float(after["time/elapsed_seconds"])
            total += max(began - float(before["time/unix"]), 0.0)
    return total


def _memory(run: Recorded, other: Recorded | None) -> str | None:
    drawn = []
    for one in (run, *(() if other is None else (other,))):
        sizes = {str(k): float(v) for k, v in (one.program.get("memory") or {}).items()}
        if not sizes:
            continue
        words = {name: byte_size(size) for name, size in sizes.items()}
        chip, capacity = one.program.get("chip"), one.program.get("chip_bytes")
        of = f" of {byte_size(float(capacity))} of a {chip}" if chip and capacity else ""
        said = f"{byte_size(sum(sizes.values()))} per device at the peak of a step{of}"
        drawn.append(f"<h3>{escape(one.name)}</h3><p>{escape(said)}</p>{bars(sizes, words)}")
    return "".join(drawn) or None


def _collectives(run: Recorded, other: Recorded | None) -> str | None:
    drawn = []
    for one in (run, *(() if other is None else (other,))):
        if "collectives" not in one.program:
            continue
        by_axis = {str(k): float(v) for k, v in one.program["wire_bytes_by_axis"].items()}
        if not by_axis:
            drawn.append(f"<h3>{escape(one.name)}</h3><p>The step sends nothing.</p>")
            continue
        words = {axis: f"{byte_size(size)} sent" for axis, size in by_axis.items()}
        hidden = [] if one.program.get("is_cpu") else ["exposure"]
        head = ["kind", "axis", "dtype", "count", "bytes each", *hidden, "source"]
        rows = [
            [
                *(row["kind"], row["axis"], ", ".join(row["dtypes"]), row["count"]),
                byte_size(float(row["wire_bytes"])),
                *([row["exposure"]] if hidden else []),
                row["source"],
            ]
            for row in one.program["collectives"][:60]
        ]
        drawn.append(f"<h3>{escape(one.name)}</h3>{bars(by_axis, words)}{_table(rows, head)}")
    return "".join(drawn) or None


def _timeline(run: Recorded, other: Recorded | None) -> str | None:
    drawn = []
    for one in (run, *(() if other is None else (other,))):
        if found := one.program.get("schedule"):
            table = Schedule.from_csv(found["csv"], str(found["name"]))
            validate(table)
            picture = to_svg(table, simulate(table))
            picture = picture.replace(' xmlns="http://www.w3.org/2000/svg"', "")
            drawn.append(f'<h3>{escape(one.name)}</h3><div class="paper">{picture}</div>')
    return "".join(drawn) or None


def _parameters(run: Recorded, other: Recorded | None) -> str | None:
    leaves = run.program.get("leaves")
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


def _mesh(run: Recorded, other: Recorded | None) -> str | None:
    shape, devices = run.program.get("mesh"), run.program.get("devices")
    if not shape or not devices:
        return None
    axes = ", ".join(f"{axis}={size}" for axis, size in shape.items())
    said = f"<p>{escape(axes)}; the last axis runs along a row</p>"
    if len(devices) > MOST_DEVICES:
        return said + _say(f"{len(devices)} devices are too many to draw")
    columns = int(list(shape.values())[-1])
    cells = "".join(
        f'<div class="b{int(d["process"]) % 8}" title="device {escape(str(d["id"]))}, process '
        f'{escape(str(d["process"]))}">{escape(str(d["rank"]))}</div>'
        for d in devices
    )
    tracks = f"grid-template-columns:repeat({columns},minmax(2em,3em))"
    grid = f'<div class="mesh" style="{tracks}">{cells}</div>'
    processes = len({d["process"] for d in devices})
    owners = f"a color for each of {processes} processes" if processes > 1 else "of one process"
    return f"{said}{grid}<p>ranks, {owners}</p>"


def _versions(run: Recorded, other: Recorded | None) -> str | None:
    names = ("jax", "jaxlib", "flax", "backend", "platform_version", "device_kind", "processes")
    runs = (run, *(() if other is None else (other,)))
    rows = [
        [name, *(str(one.summary.get(name, "?")) for one in runs)]
        for name in names
        if any(name in one.summary for one in runs)
    ]
    return _table(rows, ["", *(one.name for one in runs)]) if rows else None


def _config(run: Recorded, other: Recorded | None) -> str | None:
    runs = (run, *(() if other is None else (other,)))
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


_NOT_MEASURED = "Nothing was measured: metrics.jsonl has no record of it."
_NO_PROGRAM = "Unknown: program.json, which axon train writes after the first step, does not say."
PARTS: tuple[Part, ...] = (
    Part("loss", "Loss", _loss, _NOT_MEASURED),
    Part("validation", "Validation metrics", _validation, "No metric but the loss was validated."),
    Part(
        "rate",
        "Learning rate",
        _of({"optimizer/learning_rate": "learning rate"}),
        "Unknown: the optimizer does not say, or nothing was recorded.",
    ),
    Part("throughput", "Throughput", _throughput, _NOT_MEASURED),
    Part("steps", "Step time", _step_time, _NOT_MEASURED),
    Part("time", "Where the time went", _time, "Unknown: summary.json, of the end, does not say."),
    Part("memory", "Memory per device", _memory, _NO_PROGRAM),
    Part("collectives", "Collectives", _collectives, _NO_PROGRAM),
    Part("schedule", "Schedule", _timeline, "There is no pipeline, so there is no schedule."),
    Part("mesh", "Mesh", _mesh, _NO_PROGRAM),
    Part("parameters", "Where every parameter lies", _parameters, _NO_PROGRAM),
    Part("versions", "Versions", _versions, "Unknown: summary.json, of the end, does not say."),
    Part("config", "Config", _config, "Unknown: config.yaml is missing."),
)
"""Everything that a page shows, in its order."""

_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; \
style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:">
<link rel="icon" href="data:,">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<header>{head}</header>
{notes}
<nav>{links}</nav>
<main>
{body}
</main>
<script>{script}</script>
</body>
</html>
"""

_STYLE = """
:root{color-scheme:light dark;--paper:#fff;--ink:#1d2530;--soft:#5a6675;--line:#d9dee5;
--0:#2f6fbb;--1:#c1440e;--2:#3c8d40;--3:#8a5fc0;--4:#a97a00;--5:#00838f;--6:#b0417f;--7:#6b7280}
@media(prefers-color-scheme:dark){:root{--paper:#14181e;--ink:#e4e9ef;--soft:#9aa7b5;--line:#323b46;
--0:#79b0f2;--1:#ff8f5e;--2:#7fce83;--3:#c3a3f0;--4:#e3b94d;--5:#4fc3cf;--6:#ee8fc0;--7:#a3abb8}}
*{box-sizing:border-box}
body{margin:0 auto;padding:1rem;max-width:60rem;background:var(--paper);color:var(--ink);
font:16px/1.5 system-ui,sans-serif}
h1,h2,h3{line-height:1.2;margin:1.2em 0 .4em}h1{margin-top:0}h3{font-size:1em}
header p,.legend,.missing,th{color:var(--soft)}header p{overflow-wrap:anywhere}
nav{display:flex;flex-wrap:wrap;gap:.2rem 1rem}nav a{color:var(--0)}
section{border-top:1px solid var(--line);margin-top:1.5rem}
svg{display:block;width:100%;height:auto}
svg text{fill:var(--soft);font-size:12px}.end{text-anchor:end}.mid{text-anchor:middle}
.grid{stroke:var(--line);fill:none}polyline{fill:none;stroke-width:2}
.c0{stroke:var(--0)}.c1{stroke:var(--1)}.c2{stroke:var(--2)}.c3{stroke:var(--3)}
.c4{stroke:var(--4)}.c5{stroke:var(--5)}.c6{stroke:var(--6)}.c7{stroke:var(--7)}
.b0{background:var(--0)}.b1{background:var(--1)}.b2{background:var(--2)}.b3{background:var(--3)}
.b4{background:var(--4)}.b5{background:var(--5)}.b6{background:var(--6)}.b7{background:var(--7)}
circle{opacity:0}circle:hover,.alone{opacity:1}
@media(max-width:40rem){.plot text{font-size:21px}}
.d0{fill:var(--0)}.d1{fill:var(--1)}.d2{fill:var(--2)}.d3{fill:var(--3)}.d4{fill:var(--4)}
.d5{fill:var(--5)}.d6{fill:var(--6)}.d7{fill:var(--7)}
.legend{display:flex;flex-wrap:wrap;gap:.2rem 1.2rem;margin:.2rem 0;font-size:.9em}
.legend b,td b{display:inline-block;width:.8em;height:.8em;margin-right:.4em;border-radius:2px}
.bar{display:flex;height:1.6rem;border-radius:4px;overflow:hidden;margin:.5rem 0}
.wide,.paper{overflow-x:auto}.paper{background:#fff;border-radius:4px}
.paper svg{width:auto;max-width:none}.paper svg text{fill:#333}
table{border-collapse:collapse;font-size:.9em}
td,th{padding:.2rem .8rem .2rem 0;text-align:left;vertical-align:top}
td+td,th{white-space:nowrap}
pre{overflow-x:auto;font-size:.85em}.notes{color:var(--1)}
.mesh{display:grid;gap:4px;overflow-x:auto}
.mesh div{height:2.2em;border-radius:4px;color:var(--paper);display:grid;place-items:center}
input{font:inherit;width:100%;max-width:24rem;padding:.3rem .6rem;background:var(--paper);
color:var(--ink);border:1px solid var(--line);border-radius:4px}
"""

_SCRIPT = """
const find = document.getElementById("find");
if (find) find.addEventListener("input", () => {
  for (const row of document.querySelectorAll("#leaves tr"))
    row.hidden = !row.querySelector("th") && !row.textContent.includes(find.value);
});
"""
