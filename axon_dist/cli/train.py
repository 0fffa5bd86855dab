"""`axon train CONFIG [key.path=value ...] [--resume auto|PATH]`: the main job."""

from __future__ import annotations

import argparse
import os
import sys

from rich.console import Console

from axon_dist.app import train
from axon_dist.config import load_config
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
    done = train(config, LastingConsole(), arguments.resume)
    return INTERRUPTED if done.result.is_interrupted else 0


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
