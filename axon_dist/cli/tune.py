"""`axon tune CONFIG`: the step under several compiler options and remat policies, side by side."""

from __future__ import annotations

import argparse
import json

from rich.console import Console

from axon_dist.app import tune
from axon_dist.config import load_config

from .verb import Verb, as_file, as_int, check_output, write_output


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the config, its overrides and how long to measure."""
    parser.add_argument("config", metavar="CONFIG", help="a YAML file, see configs/")
    parser.add_argument("overrides", nargs="*", default=[], metavar="key.path=value")
    parser.add_argument("--rounds", type=as_int, default=5, help="turns of each variant (5)")
    parser.add_argument("--calls", type=as_int, default=4, help="steps of a turn (4)")
    parser.add_argument("--json", type=as_file, metavar="FILE", help="write the figures there too")


def run(arguments: argparse.Namespace) -> int:
    """Measures and prints."""
    check_output("--json", arguments.json)
    config = load_config(arguments.config, arguments.overrides)
    found = tune(config, arguments.rounds, arguments.calls)
    Console().print(found)
    if arguments.json is not None:
        write_output("--json", arguments.json, json.dumps(found.to_dict(), indent=1))
    return 0


VERB = Verb(
    "tune",
    "Measure a config's step under several compiler options.",
    add_arguments,
    run,
    examples=(
        "axon tune configs/quickstart.yaml --rounds 3",
        "axon tune configs/fsdp8.yaml train.global_batch=16 --json tuned.json",
    ),
)
"""The row of the table of verbs."""
