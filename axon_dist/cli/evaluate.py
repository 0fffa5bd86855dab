"""`axon eval RUN [key.path=value ...]`: how good the model of a run is."""

from __future__ import annotations

import argparse
import json

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from axon_dist.app import Evaluation, evaluate
from axon_dist.collectives import is_main_process

from .verb import Verb, add_run, as_file, as_int, check_output, write_output


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the run, what to measure on and where."""
    add_run(parser)
    parser.add_argument(
        "--data",
        action="append",
        default=[],
        metavar="FILES",
        help="a path or glob to measure on in place of the run's validation data; may be repeated",
    )
    parser.add_argument(
        "--batches", type=as_int, metavar="N", help="N batches alone; all of the data by default"
    )
    parser.add_argument("--json", type=as_file, metavar="FILE", help="write the numbers there too")


def run(arguments: argparse.Namespace) -> int:
    """Measures and prints."""
    check_output("--json", arguments.json)
    tell = lambda text: Console().print(text, soft_wrap=True, highlight=False, markup=False)
    found = evaluate(
        arguments.folder,
        step=arguments.step,
        overrides=arguments.overrides,
        files=arguments.data,
        num_batches=arguments.batches,
        one_device=arguments.one_device,
        tell=tell,
    )
    if not is_main_process():
        return 0
    tell(f"{found.checkpoint}: {found.strategy} on mesh {found.mesh}")
    Console().print(_table(found))
    if arguments.json is not None:
        write_output("--json", arguments.json, json.dumps(found.to_dict(), indent=2) + "\n")
    return 0


def _table(found: Evaluation) -> Table:
    table = Table(box=SIMPLE_HEAD, show_header=False)
    table.add_column(style="dim")
    table.add_column(style="bold")
    table.add_row("samples", str(found.num_samples))
    for name, value in found.metrics.items():
        unit = f" {found.unit}" if name == "loss" else ""
        table.add_row(name.replace("_", " "), f"{value:.4f}{unit}")
    return table


VERB = Verb(
    "eval",
    "Measure the model of a run on its validation data.",
    add_arguments,
    run,
    examples=(
        "axon eval runs/quickstart-20260101-120000",
        "axon eval runs/a --step best --batches 16 --json found.json",
        "axon eval runs/a mesh=tp=4 parallel=tensor",
    ),
)
