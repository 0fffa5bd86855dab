"""`axon data check CONFIG [key.path=value ...]`: samples, and how fast they come."""

from __future__ import annotations

import argparse

from rich.console import Console

from axon_dist.app import DataCheck, check_data
from axon_dist.config import load_config

from .verb import Verb, as_int, as_number


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares what to do, the config and its overrides."""
    parser.add_argument("action", choices=["check"], help="check: load some, and time them")
    parser.add_argument("config", metavar="CONFIG", help="a YAML file, see configs/")
    parser.add_argument("overrides", nargs="*", default=[], metavar="key.path=value")
    parser.add_argument("--samples", type=as_int, default=3, help="how many to show (3)")
    parser.add_argument("--seconds", type=as_number, default=2.0, help="for how long to load (2)")
    parser.add_argument("--no-step", action="store_true", help="do not compile and time the step")


def run(arguments: argparse.Namespace) -> int:
    """Prints what was found; 1 when the data come more slowly than the step takes them."""
    config = load_config(arguments.config, arguments.overrides)
    found = check_data(config, arguments.samples, arguments.seconds, not arguments.no_step)
    console = Console()
    for line in lines(found):
        console.print(line, soft_wrap=True, highlight=False, markup=False)
    return 1 if found.keeps_up is False else 0


def lines(found: DataCheck) -> list[str]:
    """What was found, in words."""
    said = [f"data: {found.description}"]
    for number, sample in enumerate(found.samples, start=1):
        said += [f"--- sample {number}", sample]
    said += ["---", f"loading: {found.samples_per_second:.4g} samples/s by one thread"]
    if found.needed_per_second is not None:
        ratio = found.samples_per_second / found.needed_per_second
        verdict = "enough" if found.keeps_up else "TOO SLOW: steps will wait for data"
        said.append(
            f"the step takes {found.needed_per_second:.4g} samples/s on these devices: {verdict} "
            f"({ratio:.2g} times as fast)"
        )
    if found.padding is not None:
        said.append(f"padding: {100 * found.padding:.1f} % of the tokens")
    if found.learned is not None:
        said.append(f"targets: {100 * found.learned:.1f} % of the tokens")
    return said


VERB = Verb(
    "data",
    "Show a config's data, and whether they come fast enough.",
    add_arguments,
    run,
    examples=(
        "axon data check configs/quickstart.yaml",
        "axon data check configs/quickstart.yaml --no-step --samples 1",
    ),
)
"""The row of the table of verbs."""
