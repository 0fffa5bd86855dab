"""Parses the values of options, and writes output files."""

from __future__ import annotations

import argparse
import os
import re
import shutil
import sys
import textwrap
from pathlib import Path
from typing import Any, TextIO

from ...core.arguments import NUMBER, spelled_number
from ...core.errors import ConfigError, reworded
from ...core.files import as_path, json_section, kind_at, replace_text
from ...core.words import printable


def as_int(text: str) -> int:
    """Parses a whole number with the digits 0 to 9."""
    if re.fullmatch(r"[-+]?[0-9]{1,18}", text) is None:
        raise argparse.ArgumentTypeError(f"{text!r:.80} is not a whole number")
    return int(text)


def as_number(text: str) -> float:
    """Parses a finite number, such as 0.5 or 1e-3."""
    number = spelled_number(text)
    if number is None or not NUMBER.holds(number):
        raise argparse.ArgumentTypeError(f"{text!r:.80} is not a number, or is too large")
    return number


def as_json_object(text: str) -> dict[str, Any]:
    """Parses a JSON object, such as {"enable_thinking": false}."""
    found = json_section(text)
    if found is None:
        raise argparse.ArgumentTypeError(
            f"{text!r:.80} is not a JSON object; write one such as '{{\"enable_thinking\": false}}'"
        )
    return found


def as_file(text: str) -> Path:
    """Parses the path of a file, which need not exist."""
    try:
        return as_path(text, "the path")
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def check_output(option: str, path: str | Path | None) -> None:
    """Checks that the file of an option can be made or replaced, without changing anything.

    Args:
        option: the option as typed, such as `--json`, for the beginning of messages.
        path: the file; None if the option is not given.

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
        raise ConfigError(f"{option} {path}: this is {kind}, not a file; name another one")
    if _is_foreign_link(file):
        raise ConfigError(
            f"{option} {path}: this is a link, which is not followed; name its target, or another "
            "file",
            code="is-a-link",
        )
    is_device = kind_at(file) == "a device"
    if not os.access(file if is_device else folder, os.W_OK):
        raise ConfigError(f"{option} {path}: this cannot be written; name another file")


def fitted(text: str, file: TextIO, indent: int | None = None) -> str:
    """Wraps a text between words if `file` is a terminal; continuation lines keep the indent."""
    if not file.isatty():
        return text
    width = shutil.get_terminal_size().columns
    wrapper = textwrap.TextWrapper(width, break_long_words=False, break_on_hyphens=False)
    lines: list[str] = []
    for line in text.split("\n"):
        begin = len(line) - len(line.lstrip()) if indent is None else indent
        wrapper.subsequent_indent = " " * begin
        lines += wrapper.wrap(line) or [""]
    return "\n".join(lines)


def notice(text: str) -> None:
    """Prints a note about a result to standard error."""
    print(fitted(f"axon: {printable(text)}", sys.stderr), file=sys.stderr, flush=True)


def write_output(option: str, path: Path, text: str) -> None:
    """Writes the file of an option.

    Raises:
        ConfigError: when the file cannot be written.
    """
    with reworded(f"{option} {path}: cannot be written", "name another file"):
        if kind_at(path) == "a device" or str(path).startswith(_STREAMS):
            with open(path, "w", encoding="utf-8") as file:
                file.write(text)
        else:
            replace_text(path, text)


_STREAMS = ("/dev/stdout", "/dev/stderr", "/dev/fd/")
"""Links of the operating system to the streams of this process, which may be followed."""


def _is_foreign_link(path: Path) -> bool:
    return path.is_symlink() and not str(path).startswith(_STREAMS)
