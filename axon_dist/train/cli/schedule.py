"""`axon schedule NAME --stages S --microbatches M` draws and measures a pipeline schedule."""

from __future__ import annotations

import argparse
import math
import os
import shutil
import sys
from collections.abc import Iterator, Sequence

from rich.console import Console

from axon_dist.core.errors import ConfigError, ScheduleError
from axon_dist.core.files import as_path, kind_at, read_text
from axon_dist.schedule import (
    Costs,
    PipelineSchedule,
    Schedule,
    ScheduleSummary,
    Unavailable,
    build_schedule,
    compare,
    draw,
    for_stages,
    search,
    simulate,
    split_advice,
    summarize,
    to_svg,
    validate,
    with_vocabulary,
)

from .values import notice, write_output

_DEFAULT = PipelineSchedule.EAGER_1F1B
_MOST_SEARCHED = 4096
"""The maximum number of forwards of a schedule table if many tables are tried."""


_LONGEST = 60
"""The maximum number of lines of a printed picture of a searched schedule."""


def run(arguments: argparse.Namespace) -> int:
    """Draws one schedule, or compares all."""
    if arguments.svg is not None and arguments.svg == arguments.csv:
        raise ConfigError(
            f"got --svg and --csv {arguments.csv}, the same file for both; name two files"
        )
    if arguments.memory is not None and not arguments.search:
        raise ConfigError(
            f"got --memory {arguments.memory:g} without --search; a named schedule defines its own "
            "memory: add --search, or leave --memory out",
            code="memory-without-search",
        )
    _check_alone(arguments)
    costs = _costs(arguments)
    # In a pipe, do not wrap lines; on a terminal, or with COLUMNS set, wrap between words.
    is_unlimited = not sys.stdout.isatty() and "COLUMNS" not in os.environ
    console = Console(highlight=False, soft_wrap=is_unlimited)
    if arguments.compare:
        _compare(arguments, costs, console)
        return 0
    schedule = _searched(arguments, costs) if arguments.search else _valid(arguments, console)
    costs = for_stages(costs, schedule.num_stages) or costs
    timeline = simulate(schedule, costs, lockstep=not arguments.ahead)
    width = max(shutil.get_terminal_size().columns, 40)
    picture = draw(schedule, timeline, color=console.is_terminal, width=width)
    if arguments.search and len(picture.splitlines()) > _LONGEST:
        lines = len(picture.splitlines())
        console.print(f"{schedule.name}: the picture has {lines} lines; --svg FILE draws it")
    else:
        sys.stdout.write(picture + "\n")
    console.print(_measures(summarize(schedule, costs)))
    # The advice ignores the memory limit of a search.
    if not arguments.search:
        for line in split_advice(schedule, costs):
            console.print(line)
    if arguments.svg is not None:
        write_output("--svg", arguments.svg, to_svg(schedule, timeline))
    if arguments.csv is not None:
        write_output("--csv", arguments.csv, schedule.to_csv())
        notice(f"the table is in {arguments.csv}; a pipeline accepts this file as its schedule")
    return 0


def _valid(arguments: argparse.Namespace, console: Console) -> Schedule:
    """Builds and validates the schedule of the arguments; prints the grid of an invalid one."""
    try:
        schedule = _schedule(arguments)
        validate(schedule)
        if arguments.vocabulary is not None:
            return with_vocabulary(schedule, _costs(arguments))
        return schedule
    except ScheduleError as error:
        sentence, _, grid = str(error).partition("\n")
        if grid:
            console.print(grid, markup=False)
        raise ScheduleError(sentence) from error


def _costs(arguments: argparse.Namespace) -> Costs:
    if len(arguments.costs) not in (3, 4):
        raise ConfigError(
            f"got --costs {' '.join(f'{cost:g}' for cost in arguments.costs)}; it takes three "
            "times, F I W, or four, F I W B, such as --costs 1 1.2 0.8"
        )
    part = {} if arguments.vocabulary is None else {"v": arguments.vocabulary}
    return Costs(*arguments.costs, **part, stage_weights=tuple(arguments.weights))


def _searched(arguments: argparse.Namespace, costs: Costs) -> Schedule:
    limits = {"memory": arguments.memory, "chunks": arguments.chunks}
    options = {name: limit for name, limit in limits.items() if limit is not None}
    schedule = search(*_sizes(arguments), costs, **options).schedule
    validate(schedule)
    return schedule


def _schedule(arguments: argparse.Namespace) -> Schedule:
    name = _DEFAULT if arguments.name is None else arguments.name
    if not name.endswith(".csv"):
        return build_schedule(name, *_sizes(arguments), arguments.chunks)
    path = as_path(name, "the schedule")
    if kind_at(path) is None:
        raise ConfigError(f"there is no file {str(path)!r}; write one with --csv FILE")
    table = Schedule.from_csv(read_text(path, f"the table {str(path)!r}"), path.stem)
    for option, asked, size in (
        ("--stages", arguments.stages, table.num_devices),
        ("--microbatches", arguments.microbatches, table.num_microbatches),
        ("--chunks", arguments.chunks, table.chunks),
    ):
        if asked not in (None, size):
            raise ConfigError(
                f"got {option} {asked}, but the table {arguments.name!r} has {size}; leave "
                f"{option} out, because a table defines its own sizes",
                code="table-sets-sizes",
            )
    return table


def _sizes(arguments: argparse.Namespace) -> tuple[int, int]:
    if arguments.stages is None or arguments.microbatches is None:
        raise ConfigError(
            f"got --stages {arguments.stages} and --microbatches {arguments.microbatches}; a "
            "schedule needs both, such as --stages 4 --microbatches 8"
        )
    sizes = arguments.stages, arguments.microbatches
    takes_all = "--search" if arguments.search else "--compare" if arguments.compare else ""
    if takes_all and math.prod(sizes) > _MOST_SEARCHED:
        raise ConfigError(
            f"got --stages {sizes[0]} and --microbatches {sizes[1]} with {takes_all}, which makes "
            f"many tables; lower their product to {_MOST_SEARCHED}: more microbatches rarely "
            "change the order of the schedules",
            code="too-many-tables",
        )
    return sizes


def _measures(row: ScheduleSummary) -> str:
    return (
        f"bubble {row.bubble:.1%}, in lockstep {row.lockstep_bubble:.1%}; "
        f"makespan {row.makespan:g}, in lockstep {row.lockstep_makespan:g}, which is "
        f"{row.lockstep_slowdown:.3f} times the busiest rank's work; "
        f"at most {row.peak_live:g} microbatches in flight, {row.num_inputs} stage inputs kept; "
        f"{row.num_transfers} transfers"
    )


def _compare(arguments: argparse.Namespace, costs: Costs, console: Console) -> None:
    chunks = {} if arguments.chunks is None else {"chunks": arguments.chunks}
    rows = compare(*_sizes(arguments), costs=costs, **chunks)
    width = math.inf if console.soft_wrap else console.width
    titles = ["schedule", "chunks", "ticks", "bubble", "in step", "executed", "in flight"]
    titles += ["inputs", "held", "sent"]
    for line in _folded([titles, *map(_cells, rows)], width):
        console.print(line)
    for row in rows:
        if isinstance(row, Unavailable):
            console.print(f"{row.name}: {row.reason}", markup=False)


def _folded(rows: Sequence[Sequence[str]], width: float) -> Iterator[str]:
    """Yields the lines of a table; columns that do not fit follow below, with the first column
    repeated."""
    first, *sizes = [max(map(len, column)) for column in zip(*rows, strict=True)]
    gap = 2 if first + sum(sizes) + 2 * len(sizes) <= width else 1
    begin = 0
    used = first
    for end, size in enumerate([*sizes, math.inf]):
        used += gap + size
        if used > width or end == len(sizes):
            band = range(begin, end)
            for name, *cells in rows:
                yield name.ljust(first) + "".join(cells[n].rjust(gap + sizes[n]) for n in band)
            begin = end
            used = first + gap + size


_ALONE = {
    "--compare": (
        "compares all schedules and writes no file",
        ("name", "search", "ahead", "vocabulary", "svg", "csv"),
    ),
    "--search": ("tries all schedules, none of them with V", ("name", "vocabulary")),
}
"""Options that concern all schedules: a description, and the single-schedule options that each
excludes."""


def _check_alone(arguments: argparse.Namespace) -> None:
    for option, (does, others) in _ALONE.items():
        typed = ((name, getattr(arguments, name)) for name in others)
        conflicts = [_typed(*one) for one in typed if one[1] is not None and one[1] is not False]
        if getattr(arguments, option.removeprefix("--")) and conflicts:
            words = " and ".join(conflicts)
            raise ConfigError(
                f"got {words} with {option}, which {does}; leave out {words}, or {option}"
            )


def _typed(name: str, value: object) -> str:
    """Formats an option as it was typed."""
    shown = f"{value:g}" if isinstance(value, float) else str(value)
    return shown if name == "name" else f"--{name} {shown}".removesuffix(" True")


def _cells(row: ScheduleSummary | Unavailable) -> list[str]:
    if isinstance(row, Unavailable):
        return [row.name, *["-"] * 9]
    shares = [f"{share:.1%}" for share in (row.bubble, row.lockstep_bubble)]
    shares.append(f"{row.lockstep_slowdown:.3f}")
    counts = [f"{row.peak_live:g}", row.num_inputs, row.num_held, row.num_transfers]
    return [row.name, *map(str, [row.chunks, row.num_ticks, *shares, *counts])]
