"""Finds data files and splits them into training and validation."""

from __future__ import annotations

import dataclasses
import fnmatch
import glob
import hashlib
import os
import sysconfig
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from axon_dist.core.errors import ConfigError, reworded
from axon_dist.core.files import Address, all_fetched, as_place, host_memory, kind_at
from axon_dist.core.words import byte_size

from .samples import random_of

_NOT_PROSE = frozenset(
    {"test", "tests", "idlelib", "turtledemo", "lib2to3", "encodings", "pydoc_data", "ensurepip"}
    | {"site-packages", "dist-packages", "__pycache__"}
)
"""Folders of the standard library to skip: tests, third-party code and generated tables."""


@dataclasses.dataclass(frozen=True, order=True)
class TextFile:
    """A file, or a byte range of it, and the name by which it is split.

    Args:
        name: path relative to the folder of the pattern that found it, with forward slashes, so
            that it is the same on every machine.
        path: the path on this machine.
        start: the first byte of the range.
        stop: the first byte after the range; None for the end of the file.
        address: where the file is a copy of an object in a bucket, the address of the object.

    Example:
        >>> TextFile("a.txt", Path("texts/a.txt"), start=10, stop=30).size
        20
    """

    name: str
    path: Path
    start: int = 0
    stop: int | None = None
    address: Address | None = dataclasses.field(default=None, compare=False, repr=False)

    @property
    def size(self) -> int:
        """The number of bytes in the range."""
        return (self.path.stat().st_size if self.stop is None else self.stop) - self.start

    def read(self) -> bytes:
        """Reads the bytes in the range."""
        rewording = reworded(f"{self.path} cannot be read", "take it out of data.files")
        with rewording, self.path.open("rb") as file:
            file.seek(self.start)
            return file.read(self.size)


def find_files(patterns: Sequence[str], kind: str = "a file") -> tuple[TextFile, ...]:
    """Finds the files that match any of the patterns, each once, sorted by name.

    Args:
        patterns: paths or globs; `**` crosses folders and `~` is the home folder. Matches at
            `gs://` or `s3://` are copied to this machine, once per version.
        kind: the kind of match: `a file`, or `a folder` on this machine.

    Returns:
        At least one file.

    Raises:
        ConfigError: a pattern matches no file.
        StoreError: a bucket cannot be read.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> for name in ("b.txt", "a.txt"):
        ...     _ = (folder / name).write_text("text")
        >>> [file.name for file in find_files([f"{folder}/*.txt"])]
        ['a.txt', 'b.txt']
    """
    files: dict[Path, TextFile] = {}
    for pattern in patterns:
        # Of several links to a file the first name counts, whatever the order of the folder.
        for file in sorted(_match(pattern, kind)):
            files.setdefault(file.path.resolve(), file)
    return tuple(sorted(files.values()))


def standard_library_files() -> tuple[TextFile, ...]:
    """Lists the sources of Python's standard library: real text that every machine has.

    Raises:
        ConfigError: this Python came without its sources.
    """
    root = Path(sysconfig.get_path("stdlib"))
    relative = (path.relative_to(root) for path in root.rglob("*.py"))
    prose = sorted(path for path in relative if _NOT_PROSE.isdisjoint(path.parts))
    if not prose:
        raise ConfigError(f"no Python sources in {root}: name your files in data.files.")
    return tuple(TextFile(path.as_posix(), root / path) for path in prose)


def split_files(
    files: Iterable[TextFile], fraction: float
) -> tuple[tuple[TextFile, ...], tuple[TextFile, ...]]:
    """Splits files into training and validation by a hash of their names.

    A file is for validation if the first eight bytes of the SHA-256 of its name, read as a number
    in [0, 1), are below `fraction`. So the result for a file depends neither on the order, nor on
    the machine, nor on the other files. Only if this leaves one side empty, files of the same name
    are also named by their folders, as many as make these names unique among all files.

    Args:
        files: the files to split.
        fraction: the expected share of files for validation, in (0, 1).

    Returns:
        The files for training and the files for validation, in the given order.

    Example:
        >>> files = [TextFile(f"{i}.txt", Path(f"{i}.txt")) for i in range(100)]
        >>> [len(side) for side in split_files(files, 0.1)]
        [89, 11]
    """
    files = tuple(files)
    train, validation = _split_by([file.name for file in files], files, fraction)
    if not train or not validation:
        # Files that were listed one by one may all have one name. Only then are they split by
        # longer names, so that every split that has been made before stays as it is.
        return _split_by(_longer_names(files), files, fraction)
    return train, validation


def _split_by(
    names: Sequence[str], files: Sequence[TextFile], fraction: float
) -> tuple[tuple[TextFile, ...], tuple[TextFile, ...]]:
    sides: tuple[list[TextFile], list[TextFile]] = ([], [])
    for name, file in zip(names, files, strict=True):
        sides[_hash_fraction(name) < fraction].append(file)
    return tuple(sides[0]), tuple(sides[1])


def _longer_names(files: Sequence[TextFile]) -> list[str]:
    """Returns unique names: those that occur more than once get parent folders.

    Example:
        >>> _longer_names([TextFile("a", Path(f"/texts/{n}/a")) for n in (1, 2)])
        ['1/a', '2/a']
    """
    names = [file.name for file in files]
    count = Counter(names)
    repeated = [number for number, name in enumerate(names) if count[name] > 1]
    paths = [_parts_of(files[number]) for number in repeated]
    for length in range(2, max(map(len, paths), default=1) + 1):
        longer = ["/".join(parts[-length:]) for parts in paths]
        if len(set(longer)) == len(longer):
            for number, name in zip(repeated, longer, strict=True):
                names[number] = name
            break
    return names


def _parts_of(file: TextFile) -> tuple[str, ...]:
    """Returns the folders of a file and its name; those of an object are the same everywhere."""
    # The path of a copy has a hash of the version of the object.
    if file.address is None:
        return file.path.parts
    return (file.address.bucket, *file.address.key.split("/"))


FEW = 10
"""If one side would get fewer files than this, split by bytes: a share of so few files may be far
from that share of the bytes."""

_LINE = 2**16
"""The search distance in bytes for a line end; longer lines may be cut in the middle."""


def split_bytes(
    files: Sequence[TextFile], fraction: float
) -> tuple[tuple[TextFile, ...], tuple[TextFile, ...]]:
    """Splits files into training and validation so that validation has a share of their bytes.

    Files go to validation in the order of their hashes, as in `split_files`, until the share is
    reached. The file that crosses the share is put on one side as a whole if validation then has
    between half and one and a half times its share. Otherwise the file is cut at a line end, and
    the part after the cut goes to validation.

    Args:
        files: the files to split.
        fraction: the share of the bytes for validation, in (0, 1).

    Returns:
        The files, or parts of them, for training and for validation, in the given order.

    Example:
        >>> files = [TextFile(name, Path(name), stop=100) for name in "abcdefghij"]
        >>> [file.name for file in split_bytes(files, 0.2)[1]]
        ['d', 'j']
    """
    wanted = fraction * sum(file.size for file in files)
    validation = []
    reached = 0
    for file in sorted(files, key=lambda file: _hash_fraction(file.name)):
        if reached + file.size > wanted:
            break
        validation.append(file)
        reached += file.size
    else:
        return (), tuple(files)
    border = [reached, reached + file.size]
    nearest = min(border, key=lambda size: abs(size - wanted))
    cut = None
    if abs(nearest - wanted) > wanted / 2:
        cut = _cut(file, file.size - round(wanted - reached))
        validation.append(dataclasses.replace(file, start=cut, stop=file.start + file.size))
    elif nearest == border[1]:
        validation.append(file)
    rest = [
        dataclasses.replace(one, stop=cut) if one == file and cut is not None else one
        for one in files
        if one not in validation
    ]
    order = [one.name for one in files]
    validation.sort(key=lambda one: order.index(one.name))
    return tuple(one for one in rest if one.size), tuple(one for one in validation if one.size)


def _cut(file: TextFile, size: int) -> int:
    """Returns the offset at which to cut a file.

    Cuts after the last line break within `size` bytes, or between two characters if there is none.
    """
    limit = file.start + size
    begin = max(file.start, limit - _LINE)
    before = dataclasses.replace(file, start=begin, stop=limit).read()
    if b"\n" in before:
        return begin + before.rindex(b"\n") + 1
    # In UTF-8, a byte 10xxxxxx continues a character.
    rest = dataclasses.replace(file, start=limit, stop=file.start + file.size).read()[:4]
    return limit + len(rest) - len(rest.lstrip(bytes(range(0x80, 0xC0))))


HELD_OUT_FRACTION = 0.1
"""The default of `data.validation_fraction`."""


def held_out_fraction(fraction: float | None, validation_files: Sequence[str] = ()) -> float:
    """Returns the share of the data for validation.

    Args:
        fraction: the value of `data.validation_fraction`; None for a tenth.
        validation_files: the value of `data.validation_files`.

    Raises:
        ConfigError: when the fraction is not in (0, 1), or both are given.

    Example:
        >>> held_out_fraction(None)
        0.1
    """
    if fraction is None:
        return HELD_OUT_FRACTION
    if not 0.0 < fraction < 1.0:
        raise ConfigError(
            f"data.validation_fraction={fraction} must be between 0 and 1, for example 0.1.",
            code="validation-fraction-range",
        )
    if validation_files:
        raise ConfigError(
            f"data.validation_fraction={fraction} and data.validation_files={validation_files} "
            "both define the validation data: leave one of them out.",
            code="two-validation-sets",
        )
    return fraction


def held_out_mask(count: int, fraction: float, what: str = "images") -> np.ndarray:
    """Draws a mask that selects a share of `count` items, the same mask every time.

    Raises:
        ConfigError: when the mask selects none or all of them.
    """
    num_validation = round(count * fraction)
    if num_validation in (0, count):
        empty = "training" if num_validation else "validation"
        raise ConfigError(
            f"data.validation_fraction={fraction} of {count} {what} leaves none for {empty}: give "
            f"more {what}, or change the fraction."
        )
    return random_of(2, 0).permutation(count) < num_validation


def check_disjoint(train: Sequence[TextFile], validation: Sequence[TextFile]) -> None:
    """Checks that no file is on both sides.

    Raises:
        ConfigError: when a file is on both sides; the message names one.
    """
    held = {_identity(file.path) for file in validation}
    shared = [file.path for file in train if _identity(file.path) in held]
    if shared:
        raise ConfigError(
            f"{len(shared)} files are in data.files and in data.validation_files, for example "
            f"{min(shared)}: validation data must not be trained on; remove the files from one.",
            code="files-in-both-sets",
        )


def _identity(path: Path) -> object:
    """Returns what all links to a file share, symbolic ones and hard ones."""
    try:
        status = path.stat()
    except OSError:
        return path.resolve()
    return status.st_dev, status.st_ino


def small_training_share_note(train: float, validation: float, what: str) -> str:
    """Returns a note for users if training has less than 80% of the data, else "".

    Args:
        train: the amount of training data.
        validation: the amount of validation data.
        what: the unit of both amounts.

    Example:
        >>> small_training_share_note(10, 205, "bytes")
        '; note that only 5% of the bytes are for training'
        >>> small_training_share_note(90, 10, "bytes")
        ''
    """
    share = train / (train + validation)
    few = f"; note that only {100 * share:.0f}% of the {what} are for training"
    return few if share < _MOST else ""


_MOST = 0.8


def _hash_fraction(name: str) -> float:
    """Maps a name to a hash in [0, 1)."""
    digest = hashlib.sha256(name.encode(errors="surrogateescape")).digest()
    return int.from_bytes(digest[:8], "big") / 2**64


def _match(pattern: str, wanted: str) -> list[TextFile]:
    expanded = as_place(pattern, "data.files", any_name=True)
    if isinstance(expanded, Address):
        return _match_objects(expanded, pattern)
    # A file may have a name that reads as a glob, such as "a[1].txt".
    if glob.has_magic(str(expanded)) and kind_at(expanded) == wanted:
        return [_readable(TextFile(expanded.name, expanded))]
    # The folder before the first wildcard, or the folder of a plain path.
    base = next(
        (p for p in reversed(expanded.parents) if glob.has_magic(expanded.parts[len(p.parts)])),
        expanded.parent,
    )
    if base == Path("/") and "**" in expanded.parts:
        raise ConfigError(
            f"data.files: {pattern!r} would search the whole machine: name a folder, as in "
            "'/data/texts/**/*.txt'.",
            code="glob-of-whole-machine",
        )
    paths = [Path(path) for path in glob.glob(str(expanded), recursive=True)]
    matches = [
        TextFile(path.relative_to(base).as_posix(), path)
        for path in paths
        if kind_at(path) == wanted
    ]
    if not matches:
        kinds = {kind for path in paths if (kind := kind_at(path)) is not None}
        there = f" but {', '.join(sorted(kinds))}" if kinds else ""
        raise ConfigError(
            f"data.files: {pattern!r} matches no {wanted[2:]}{there} (looked from {Path.cwd()}): "
            "correct the path"
            + "; a folder needs a glob such as 'folder/**/*.txt'."
            * (wanted == "a file")
        )
    return [*map(_readable, matches)]


def _readable(file: TextFile) -> TextFile:
    if not os.access(file.path, os.R_OK):
        raise ConfigError(
            f"data.files: {file.path} may not be read by this user: change its permissions, or "
            "take it out."
        )
    return file


def _match_objects(pattern: Address, text: str) -> list[TextFile]:
    """Returns local copies of the objects that match a glob."""
    parts = pattern.key.split("/")
    fixed = next((n for n, part in enumerate(parts) if glob.has_magic(part)), len(parts) - 1)
    base = dataclasses.replace(pattern, key="/".join(parts[:fixed]))
    names = [name for name in base.names() if _matches(name.split("/"), parts[fixed:])]
    if not names:
        raise ConfigError(
            f"data.files: {text!r} matches no object (looked in {base}): correct the address; a "
            "folder needs a glob such as 'gs://bucket/folder/**/*.txt'."
        )
    addresses = [base / name for name in names]
    rows = zip(names, all_fetched(addresses), addresses, strict=True)
    return [TextFile(name, path, address=address) for name, path, address in rows]


def _matches(name: Sequence[str], pattern: Sequence[str]) -> bool:
    """Whether the parts of a name match those of a glob; `**` matches any number of parts."""
    if pattern and pattern[0] == "**":
        return _matches(name, pattern[1:]) or (bool(name) and _matches(name[1:], pattern))
    if not pattern or not name:
        return not pattern and not name
    return fnmatch.fnmatchcase(name[0], pattern[0]) and _matches(name[1:], pattern[1:])


def check_fits(files: Iterable[TextFile], factor: int = 1) -> None:
    """Checks that files fit into memory as a whole.

    Args:
        files: the files to read.
        factor: bytes of memory per byte of a file.

    Raises:
        ConfigError: when they need more memory than this host has.
    """
    size = factor * sum(file.size for file in files)
    memory = host_memory()
    if size > memory:
        raise ConfigError(
            f"data.files: the files need {byte_size(size)} in memory, and this host has "
            f"{byte_size(memory)}: give fewer, or convert them to files of tokens, which stay on "
            "disk (data.kind=tokens).",
            code="files-exceed-memory",
        )
