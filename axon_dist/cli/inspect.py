"""`axon inspect CONFIG [--target MACHINE]`: what the step of a config costs."""

from __future__ import annotations

import argparse
import json

from rich.console import Console

from axon_dist.app import examine
from axon_dist.config import load_config

from .verb import Verb, as_file, check_output, write_output


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the config, its overrides and the target."""
    parser.add_argument("config", metavar="CONFIG", help="a YAML file, see configs/")
    parser.add_argument("overrides", nargs="*", default=[], metavar="key.path=value")
    parser.add_argument("--target", help="compile for this machine, such as h100:8 or v5p:2x2x2")
    parser.add_argument("--json", type=as_file, metavar="FILE", help="write the report there too")


def run(arguments: argparse.Namespace) -> int:
    """Compiles and prints."""
    check_output("--json", arguments.json)
    config = load_config(arguments.config, arguments.overrides)
    found = examine(config, arguments.target)
    # A file or a pipe has no edge that a source would have to be folded at.
    console = Console()
    console = console if console.is_terminal else Console(width=max(console.width, 140))
    where = found.target.name if found.target else "this machine"
    console.print(f"{config.name}: {found.strategy} on {found.mesh}, compiled for {where}")
    console.print(found.parameters)
    if found.attention is not None:
        console.print(found.attention, highlight=False)
    console.print(found.report)
    for line in found.meeting_lines():
        console.print(line, highlight=False)
    if arguments.json is not None:
        write_output("--json", arguments.json, json.dumps(found.to_dict(), indent=2))
    return 0


VERB = Verb(
    "inspect",
    "Show memory, collectives and FLOPs of a config's step.",
    add_arguments,
    run,
    examples=(
        "axon inspect configs/fsdp8.yaml",
        "axon inspect configs/fsdp8.yaml --target h100:8 --json report.json",
    ),
)
