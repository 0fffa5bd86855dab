"""Which files the text comes from, and on which side of the split each of them falls."""

from __future__ import annotations

import dataclasses
import glob
import hashlib
import sysconfig
from collections.abc import Iterable, Sequence
from pathlib import Path

from axon_dist.core.errors import ConfigError

_NOT_PROSE = frozenset(
    {"test", "tests", "idlelib", "turtledemo", "lib2to3", "encodings", "pydoc_data", "ensurepip"}
    | {"site-packages", "dist-packages", "__pycache__"}
)
"""Folders of the standard library left out: tests, other people's code, and generated tables."""


@dataclasses.dataclass(frozen=True, order=True)
class TextFile:
    """A file and the name that decides its side of the split.

    Args:
        name: path relative to the folder of the pattern that found it, with forward slashes, so
            that it is the same on every machine.
        path: where the file is here.
    """

    name: str
    path: Path


def find_files(patterns: Sequence[str]) -> tuple[TextFile, ...]:
    """Finds the files that match any of the patterns, each once, sorted by name.

    Args:
        patterns: paths or globs; `**` crosses folders and `~` is the home folder.

    Returns:
        At least one file.

    Raises:
        ConfigError: a pattern matches no file.
    """
    found: dict[Path, TextFile] = {}
    for pattern in patterns:
        for file in _match(pattern):
            found.setdefault(file.path.resolve(), file)
    return tuple(sorted(found.values()))


def standard_library_files() -> tuple[TextFile, ...]:
    """Lists the sources of Python's own standard library, real text that every machine has.

    Raises:
        ConfigError: this Python came without its sources.
    """
    root = Path(sysconfig.get_path("stdlib"))
    relative = (path.relative_to(root) for path in root.rglob("*.py"))
    kept = sorted(path for path in relative if _NOT_PROSE.isdisjoint(path.parts))
    if not kept:
        raise ConfigError(f"no Python sources in {root}: name files of your own in data.files.")
    return tuple(TextFile(path.as_posix(), root / path) for path in kept)


def split_files(
    files: Iterable[TextFile], fraction: float
) -> tuple[tuple[TextFile, ...], tuple[TextFile, ...]]:
    """Splits files into training and validation by a hash of their names.

    A file falls on the validation side when the first eight bytes of the SHA-256 of its name, read
    as a number in [0, 1), lie below `fraction`. So its side depends on nothing else: not on order,
    machine, or which other files there are.

    Args:
        files: what to split.
        fraction: the expected share of files for validation, in (0, 1).

    Returns:
        The files for training and the files for validation, in the given order.

    Example:
        >>> files = [TextFile(f"{i}.txt", Path(f"{i}.txt")) for i in range(100)]
        >>> [len(side) for side in split_files(files, 0.1)]
        [89, 11]
    """
    sides: tuple[list[TextFile], list[TextFile]] = ([], [])
    for file in files:
        sides[_place(file.name) < fraction].append(file)
    return tuple(sides[0]), tuple(sides[1])


def _place(name: str) -> float:
    digest = hashlib.sha256(name.encode()).digest()
    return int.from_bytes(digest[:8], "big") / 2**64


def _match(pattern: str) -> list[TextFile]:
    expanded = Path(pattern).expanduser()
    base = _fixed_folder(expanded)
    paths = [Path(path) for path in glob.glob(str(expanded), recursive=True)]
    matches = [
        TextFile(path.relative_to(base).as_posix(), path) for path in paths if path.is_file()
    ]
    if not matches:
        raise ConfigError(
            f"data.files: {pattern!r} matches no file (looked from {Path.cwd()}): correct "
            "the path; a folder needs a glob such as 'folder/**/*.txt'."
        )
    return matches


def _fixed_folder(pattern: Path) -> Path:
    """The folder in front of the first wildcard, or the folder of a plain path."""
    for parent in reversed(pattern.parents):
        child = pattern.parts[len(parent.parts)]
        if glob.has_magic(child):
            return parent
    return pattern.parent
