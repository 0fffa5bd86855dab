"""`axon config [SECTION] [--full]`: every key of a config, its type, default and meaning."""

from __future__ import annotations

import argparse
import sys

from axon_dist.config import describe, to_markdown, to_text

from .verb import Verb


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares which keys, and in which form."""
    parser.add_argument(
        "section",
        nargs="?",
        metavar="SECTION",
        help="a section or key, such as train, optimizer.schedule or parallel.ddp; the top keys by "
        "default",
    )
    parser.add_argument("--full", action="store_true", help="with all the sections within it")
    parser.add_argument("--markdown", action="store_true", help="as tables of Markdown")


def run(arguments: argparse.Namespace) -> int:
    """Prints."""
    found = describe(arguments.section, parts=arguments.full)
    text = to_markdown(found) if arguments.markdown else to_text(found) + "\n"
    sys.stdout.write(text)
    return 0


VERB = Verb(
    "config",
    "List the keys of a config: type, default and meaning.",
    add_arguments,
    run,
    examples=("axon config", "axon config train", "axon config --full optimizer"),
)
