"""`axon train CONFIG [key.path=value ...] [--resume auto|PATH]`: the main job."""

from __future__ import annotations

import argparse
import os
import sys

from rich.console import Console

from axon_dist.app import dry_run, train
from axon_dist.collectives import is_main_process
from axon_dist.config import RunConfig, load_config
from axon_dist.core.errors import ConfigError
from axon_dist.launch import INTERRUPTED

from .verb import Verb


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the config and its overrides."""
    parser.add_argument("config", metavar="CONFIG", help="a YAML file, see configs/")
    parser.add_argument(
        "overrides",
        nargs="*",
        default=[],
        metavar="key.path=value",
        help="replaces a value of the config, as in train.steps=100; read as YAML",
    )
    parser.add_argument(
        "--resume",
        metavar="auto|PATH",
        help="goes on: auto from the newest good checkpoint of this run, if it has one; PATH from "
        "a checkpoint, or from the newest good one of another run",
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="compiles, says what would be trained and written, and does neither",
    )


class LastingConsole(Console):
    """A console that falls silent when nobody reads it any more, as after `| head`.

    Rich would end the program, and with it a run of days.
    """

    def on_broken_pipe(self) -> None:
        """Goes on without the screen, which the interpreter must not find broken at exit either."""
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def run(arguments: argparse.Namespace) -> int:
    """Trains, and tells about it on the standard output."""
    config = load_config(arguments.config, arguments.overrides)
    if arguments.dry_run:
        return _dry_run(config, arguments.resume)
    done = train(config, LastingConsole(), arguments.resume)
    return INTERRUPTED if done.result.is_interrupted else 0


def _dry_run(config: RunConfig, resume: str | None) -> int:
    if resume is not None:
        raise ConfigError(
            f"got --resume {resume} beside --dry-run, which trains nothing; leave one of them out"
        )
    lines = dry_run(config).lines()
    if is_main_process():
        LastingConsole(soft_wrap=True, highlight=False, markup=False).print("\n".join(lines))
    return 0


VERB = Verb(
    "train",
    "Train the model that a config describes.",
    add_arguments,
    run,
    examples=(
        "axon train configs/quickstart.yaml",
        "axon train configs/quickstart.yaml train.steps=500 parallel=full_shard",
        "axon train configs/quickstart.yaml --resume auto",
        "axon train configs/quickstart.yaml --dry-run",
    ),
)
