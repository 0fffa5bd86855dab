"""`axon verify CONFIG [--steps N] [--here]`: is the config's strategy equal to one device?"""

from __future__ import annotations

import argparse

from rich.console import Console
from rich.table import Table

from axon_dist.app import tiny, verify
from axon_dist.app.verify import SPREAD
from axon_dist.config import load_config

from .verb import Verb, as_int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the config, its overrides and the number of steps."""
    parser.add_argument("config", metavar="CONFIG", help="a YAML file, see configs/")
    parser.add_argument("overrides", nargs="*", default=[], metavar="key.path=value")
    parser.add_argument("--steps", type=as_int, help="steps to compare (5; with --here 2)")
    parser.add_argument(
        "--here",
        action="store_true",
        help="on the devices that there are, not emulated ones, the model cut to a few layers",
    )


def run(arguments: argparse.Namespace) -> int:
    """Trains both and prints the differences; 1 when one is beyond the tolerance."""
    config = load_config(arguments.config, arguments.overrides)
    config = tiny(config) if arguments.here else config
    steps = (2 if arguments.here else 5) if arguments.steps is None else arguments.steps
    found = verify(config, steps)
    table = Table(title=f"{config.name}: {found.strategy} on {found.mesh} against one device")
    table.add_column("what")
    table.add_column("relative difference", justify="right")
    is_explained = any(row.rounding for row in (*found.metrics, *found.params))
    if is_explained:
        table.add_column("rounding moves one device by", justify="right")
    farthest = sorted(found.params, key=lambda row: row.relative, reverse=True)
    for row in (*found.metrics, *farthest[:8]):
        style = None if row.passes(found.tolerance) else "red"
        moved = [f"{row.rounding:.1e}"] if is_explained else []
        table.add_row(row.what, f"{row.relative:.1e}", *moved, style=style)
    console = Console()
    console.print(table)
    more = len(found.params) - min(len(found.params), 8)
    verdict = "equal" if found.passed else "NOT equal"
    explained = f", or {SPREAD:g} times what rounding moves one device by" if is_explained else ""
    console.print(
        f"{verdict} within {found.tolerance:.0e}{explained} (SGD, {steps} steps; "
        f"{more} more parameters are closer)"
    )
    return 0 if found.passed else 1


VERB = Verb(
    "verify",
    "Compare a config's strategy with one device.",
    add_arguments,
    run,
    examples=(
        "axon verify configs/fsdp8.yaml",
        "axon verify configs/fsdp8.yaml --here",
    ),
)
"""The row of the table of verbs."""
