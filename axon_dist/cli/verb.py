"""`Verb`: a word after `axon`; and the check of files that all of them write."""

from __future__ import annotations

import argparse
import dataclasses
import math
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path

from axon_dist.core.errors import ConfigError
from axon_dist.core.files import as_path, kind_at


@dataclasses.dataclass(frozen=True)
class Verb:
    """One row of the table of verbs.

    Args:
        name: what is typed after `axon`.
        help: a sentence for `axon --help`.
        add_arguments: declares the arguments.
        run: does it; returns the exit code.
        examples: commands for `axon NAME --help`.
    """

    name: str
    help: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]
    examples: tuple[str, ...]


def as_int(text: str) -> int:
    """Reads a whole number of an option, in the digits 0 to 9."""
    if re.fullmatch(r"[-+]?[0-9]{1,18}", text) is None:
        raise argparse.ArgumentTypeError(f"{text!r:.80} is not a whole number")
    return int(text)


def as_number(text: str) -> float:
    """Reads a finite number of an option, as in 0.5 or 1e-3."""
    found = re.fullmatch(r"[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?", text)
    if found is None or not math.isfinite(float(text)):
        raise argparse.ArgumentTypeError(f"{text!r:.80} is not a number, or too large for one")
    return float(text)


def as_file(text: str) -> Path:
    """Reads the path of a file, which need not exist."""
    try:
        return as_path(text, "the path")
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def add_run(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments of a verb that takes up what a run has learned."""
    parser.add_argument("folder", metavar="RUN", help="the folder of a run")
    parser.add_argument(
        "overrides",
        nargs="*",
        default=[],
        metavar="key.path=value",
        help="changes of its config, as in mesh=dp=4; any mesh and strategy will do",
    )
    add_step(parser)
    parser.add_argument("--one-device", action="store_true", help="on one device, not on its mesh")


def add_step(parser: argparse.ArgumentParser) -> None:
    """Declares which checkpoint of a run is meant."""
    parser.add_argument(
        "--step",
        type=lambda text: text if text == "best" else as_int(text),
        metavar="N|best",
        help="the checkpoint of that step, or of the lowest validation loss; the newest by default",
    )


def check_output(option: str, path: str | Path | None) -> None:
    """Checks that the file of an option can be made or replaced; touches nothing.

    Args:
        option: as it is written, such as `--json`; it opens the message.
        path: the file; None, where the option is not given, is fine.

    Raises:
        ConfigError: when the folder is missing, the file is a folder, or either cannot be written.

    Example:
        >>> check_output("--json", "no/such/folder/report.json")
        Traceback (most recent call last):
        axon_dist.core.errors.ConfigError: --json no/such/folder/report.json: there is no folder
        'no/such/folder'; make it first, or name another file
    """
    if path is None:
        return
    file = as_path(path, option)
    folder = file.parent
    if not folder.is_dir():
        raise ConfigError(
            f"{option} {path}: there is no folder {str(folder)!r}; make it first, or name another "
            "file"
        )
    if file.is_dir():
        raise ConfigError(f"{option} {path}: this is a folder; name a file in it")
    if (kind := kind_at(file)) not in (None, "a file", "a device"):
        raise ConfigError(f"{option} {path}: this is {kind} and no file; name another one")
    if not os.access(file if file.exists() else folder, os.W_OK):
        raise ConfigError(f"{option} {path}: this cannot be written; name another file")


def notice(text: str) -> None:
    """Says something of a result that is not the result, on the standard error."""
    print(f"axon: {text}", file=sys.stderr, flush=True)


def write_output(option: str, path: Path, text: str) -> None:
    """Writes the file of an option.

    Raises:
        ConfigError: when the disk refuses.
    """
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"{option} {path}: cannot be written: {error.strerror}; name another file"
        ) from error
