"""The token cache: files next to the data, each written by one process and read by all.

One process tokenizes a part of the data. The file appears under its name once it is complete:

    8 bytes      "axontok2"
    4 x 8 bytes  N documents, T tokens of W bytes, and whether there is a mask of learned tokens
    N x 8 bytes  the end of each document, in tokens
    T bytes      the mask of learned tokens, if there is one
    T x W bytes  the tokens
    B x 4 bytes  the CRC-32 of each 64 KiB block of the three sections above
    4 bytes      the CRC-32 of the first 40 bytes and of these checksums

The file name is a digest of the source and the options. Opening a file checks some of its blocks,
or all blocks of a small file; a damaged file is made again. The other blocks are checked when they
are first read.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import errno
import fcntl
import hashlib
import json
import os
import secrets
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

import numpy as np

from ..core.errors import ConfigError, reworded
from ..core.files import (
    LOCKED,
    NO_FILE,
    NO_LOCKS,
    TEMPORARY,
    as_path,
    json_section,
    open_regular,
    read_bytes,
    remove_abandoned,
    replacing,
)
from .files import TextFile

Document = tuple[np.ndarray, np.ndarray | None]
"""Tokens `[n]`, and which of them are learned; None for all."""

Span = tuple[int, int, int, int]
"""A part of a file: start, end, its number of documents, and the number in all earlier parts."""

_FOLDER = ".axon_tokens"
_MAGIC = b"axontok2"
_HEAD = 40
_BLOCK = 2**16
_SAMPLE = 2**12
"""The number of blocks, over all parts together, that are checked when the parts are opened."""
_WAIT = 0.05
_SETTLED = 2 * 10**9
"""Unchanged timestamps prove that a file is unchanged only if they are older than this, in ns.

A later change within the resolution of timestamps could otherwise be missed.
"""


@dataclasses.dataclass(frozen=True, eq=False)
class FileNumbers:
    """An array in a file, read on demand.

    The file is not memory-mapped: if a mapped file shrinks, SIGBUS kills the process.

    Args:
        path: the file.
        dtype: the dtype of the array.
        start: the byte offset of the array.
        length: the number of elements.
        inode: the inode of the file, to notice when another file replaces it.
        sums: the checksums of the file, if it has any.
    """

    path: Path
    dtype: np.dtype
    start: int
    length: int
    inode: int
    sums: BlockSums | None = None

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: np.ndarray) -> np.ndarray:
        """Copies some elements; consecutive ones are read at once."""
        flat = index.ravel()
        ends = np.append(np.flatnonzero(np.diff(flat) != 1) + 1, len(flat)).tolist()
        numbers = np.empty(len(flat), self.dtype)
        begin = 0
        for end in ends if len(flat) else ():
            numbers[begin:end] = self.read(int(flat[begin]), int(flat[end - 1]) + 1)
            begin = end
        return numbers.reshape(index.shape)

    def read(self, first: int, stop: int) -> np.ndarray:
        """Copies the elements from `first` up to, but not including, `stop`.

        Raises:
            ConfigError: when the file has shrunk, was replaced, or is damaged.
        """
        width = self.dtype.itemsize
        size = (stop - first) * width
        advice = "do not move or remove files while they are read"
        rewording = reworded(f"{self.path} cannot be read any more", advice)
        with rewording, open(open_regular(self.path, links=True), "rb", buffering=0) as file:
            is_same = os.fstat(file.fileno()).st_ino == self.inode
            data = os.pread(file.fileno(), size, self.start + first * width)
            if self.sums is not None and is_same:
                offset = self.start + first * width
                self.sums.check(file.fileno(), offset, offset + size)
        if len(data) < size or not is_same:
            what = "has shrunk" if is_same else "was replaced by another file"
            raise ConfigError(
                f"{self.path} {what} while it was read; write new data under another name, and "
                "start again",
                code="file-changed-while-read",
            )
        return np.frombuffer(data, self.dtype)


@dataclasses.dataclass(frozen=True, eq=False)
class BlockSums:
    """The checksums of the blocks of a file; each block is checked once, when it is first read.

    Args:
        path: the file.
        sums: the CRC-32 of each block.
        size: the total bytes of the blocks, which begin after the header.
        checked: whether each block was checked and is undamaged.
    """

    path: Path
    sums: np.ndarray
    size: int
    checked: np.ndarray

    def check(self, descriptor: int, start: int, stop: int) -> None:
        """Checks the blocks that contain a range of bytes.

        Raises:
            ConfigError: when a block is damaged.
        """
        blocks = range((start - _HEAD) // _BLOCK, -(-(stop - _HEAD) // _BLOCK))
        for block in (number for number in blocks if not self.checked[number]):
            if not self.is_good(descriptor, block):
                raise ConfigError(
                    f"{self.path}: the {_BLOCK} bytes from {_HEAD + block * _BLOCK} on are "
                    "damaged; remove the file, which is then made again, and check the disk",
                    code="damaged-token-cache",
                )

    def is_good(self, descriptor: int, block: int) -> bool:
        """Whether a block matches its checksum."""
        first = block * _BLOCK
        data = os.pread(descriptor, min(_BLOCK, self.size - first), _HEAD + first)
        self.checked[block] = zlib.crc32(data) == self.sums[block]
        return bool(self.checked[block])


class TokenStore:
    """The tokens of documents.

    Args:
        paths: the complete files of the parts.
    """

    def __init__(self, paths: Sequence[Path]):
        self._parts = [_Part.open(path, _sample_of(paths)) for path in paths]
        self._firsts = np.cumsum([0, *(len(part.ends) for part in self._parts)])

    def __len__(self) -> int:
        return int(self._firsts[-1])

    @property
    def lengths(self) -> np.ndarray:
        """The number of tokens of each document, int64 `[N]`."""
        return np.concatenate([np.diff(part.ends, prepend=0) for part in self._parts])

    @property
    def tokens(self) -> list[FileNumbers]:
        """The tokens of each part."""
        return [part.tokens for part in self._parts]

    def take(self, number: int, most: int | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Returns the tokens of a document and which of them are learned; at most `most` tokens."""
        which = int(np.searchsorted(self._firsts, number, side="right")) - 1
        part = self._parts[which]
        row = number - int(self._firsts[which])
        start = int(part.ends[row - 1]) if row else 0
        stop = int(part.ends[row])
        if most is not None:
            stop = min(stop, start + most)
        tokens = part.tokens.read(start, stop)
        if part.learned is None:
            return tokens, np.ones(len(tokens), bool)
        return tokens, part.learned.read(start, stop).astype(bool)


@dataclasses.dataclass(frozen=True, eq=False)
class _Part:
    ends: np.ndarray
    tokens: FileNumbers
    learned: FileNumbers | None

    @staticmethod
    def open(path: Path, most: int = _SAMPLE) -> _Part:
        """Reads the ends of documents, and checks some blocks of the file.

        Args:
            path: the file.
            most: the number of blocks to check.

        Raises:
            ValueError: when the file is incomplete or damaged.
        """
        with open(open_regular(path), "rb") as file:
            head = file.read(_HEAD)
            count, total, width, has_mask = np.frombuffer(head[8:], "<i8").tolist()
            status = os.fstat(file.fileno())
            if head[:8] != _MAGIC or not 0 <= 8 * count <= status.st_size or width not in (1, 2, 4):
                raise ValueError(f"{path} holds no tokens")
            if not 0 <= total <= status.st_size:
                raise ValueError(f"{path} holds no tokens")
            body = _HEAD + 8 * count
            stop = body + total * (width + bool(has_mask))
            sums = _read_sums(file, path, head, stop, status.st_size)
            _check_some(sums, file.fileno(), body, most)
            file.seek(_HEAD)
            ends = np.frombuffer(file.read(8 * count), "<i8")
        last = int(ends[-1]) if count else 0
        if last != total or (np.diff(ends, prepend=0) < 0).any():
            raise ValueError(f"{path} is not complete")

        def numbers(dtype: str, start: int) -> FileNumbers:
            return FileNumbers(path, np.dtype(dtype), start, total, status.st_ino, sums)

        tokens = numbers(f"<u{width}", body + (total if has_mask else 0))
        return _Part(ends, tokens, numbers("i1", body) if has_mask else None)

    @staticmethod
    def write(path: Path, documents: Iterator[Document]) -> None:
        """Writes a part; the file appears under its name once it is complete."""
        rows = list(documents)
        width = max((row[0].dtype.itemsize for row in rows), default=1)
        ends = np.cumsum([len(row[0]) for row in rows], dtype="<i8")
        has_mask = any(row[1] is not None for row in rows)
        total = int(ends[-1]) if len(ends) else 0
        head = _MAGIC + np.array([len(rows), total, width, has_mask], "<i8").tobytes()

        def pieces() -> Iterator[bytes]:
            yield ends.tobytes()
            for ids, learned in rows if has_mask else ():
                is_learned = np.ones(len(ids), bool) if learned is None else learned
                yield is_learned.astype(np.int8).tobytes()
            for ids, _ in rows:
                yield ids.astype(f"<u{width}").tobytes()

        with _written(path) as file:
            file.write(head)
            sums = np.array([*_write_blocks(file, pieces())], "<u4").tobytes()
            file.write(sums + zlib.crc32(head + sums).to_bytes(4, "little"))


def _write_blocks(file: BinaryIO, pieces: Iterator[bytes]) -> Iterator[int]:
    """Writes bytes; yields the CRC-32 of each block."""
    waiting = bytearray()
    for piece in pieces:
        file.write(piece)
        waiting += piece
        while len(waiting) >= _BLOCK:
            yield zlib.crc32(memoryview(waiting)[:_BLOCK])
            del waiting[:_BLOCK]
    if waiting:
        yield zlib.crc32(waiting)


def _read_sums(file: BinaryIO, path: Path, head: bytes, stop: int, size: int) -> BlockSums:
    """Reads the checksums of a file, which follow its blocks at offset `stop`."""
    count = -(-(stop - _HEAD) // _BLOCK)
    if size != stop + 4 * count + 4:
        raise ValueError(f"{path} is not complete")
    file.seek(stop)
    sums = file.read(4 * count)
    own = file.read(4)
    if zlib.crc32(head + sums) != int.from_bytes(own, "little"):
        raise ValueError(f"the checksums of {path} are damaged")
    return BlockSums(path, np.frombuffer(sums, "<u4"), stop - _HEAD, np.zeros(count, bool))


def _check_some(sums: BlockSums, descriptor: int, body: int, most: int) -> None:
    """Checks the blocks with the ends of documents, and some evenly spaced others.

    Args:
        sums: the checksums.
        descriptor: the open file.
        body: the byte offset after the ends of documents.
        most: the number of evenly spaced blocks.

    Raises:
        ValueError: when a block is damaged.
    """
    count = len(sums.sums)
    of_ends = range(-(-(body - _HEAD) // _BLOCK))
    some = np.linspace(0, count - 1, min(count, most)).astype(int).tolist() if count else []
    for block in sorted({*of_ends, *some}):
        if not sums.is_good(descriptor, block):
            raise ValueError(f"{sums.path} is damaged")


def _sample_of(paths: Sequence[Path]) -> int:
    """Returns the number of blocks to check when a part is opened."""
    return max(2, _SAMPLE // max(1, len(paths)))


@dataclasses.dataclass(frozen=True)
class Indexed:
    """A file, the digest of its contents, its stamp at that time, and the parts to read it in."""

    path: Path
    digest: str
    stamp: list[int]
    spans: list[Span]


Scan = Callable[[Path, Callable[[bytes], None]], list[Span]]
"""Reads a file, passes all of its bytes to a digest, and returns its parts."""


class TokenCache:
    """The folder of the token cache.

    Args:
        files: the data files.
        wanted: the folder; None for the default, next to the first file.
    """

    def __init__(self, files: Sequence[TextFile], wanted: str | None = None):
        default = files[0].path.parent / _FOLDER
        self.path: Path = default if wanted is None else as_path(wanted, "data.cache")
        self.note: str = ""
        self._temporary: tempfile.TemporaryDirectory[str] | None = None
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.path):
                pass
            remove_abandoned(self.path)
        except OSError as error:
            if wanted is not None:
                raise ConfigError(
                    f"data.cache: tokens cannot be cached in {str(self.path)!r}: {error.strerror}; "
                    "name a writable folder",
                    code="cache-not-writable",
                ) from error
            self._temporary = tempfile.TemporaryDirectory(prefix="axon_tokens_")
            self.note = (
                f"; every start tokenizes again, because {self.path} is not writable: "
                "name a folder in data.cache"
            )
            self.path = Path(self._temporary.name)

    def index(self, files: Sequence[TextFile], scan: Scan, kind: str) -> list[Indexed]:
        """Indexes files; reads only those that are new or have changed since the last time.

        Args:
            files: the data files.
            scan: indexes a new or changed file.
            kind: identifies `scan`; each kind has its own index.
        """
        names = "\n".join([kind, *(str(file.path) for file in files)])
        index_path = self.path / f"{digest_of(names.encode())}.json"
        known = _read_index(index_path)
        indexed = []
        changed = False
        for file in files:
            stamp = stamp_of(file.path)
            row = known.get(str(file.path))
            if row is None or row[0] != stamp or row[1] - max(stamp[1:3]) < _SETTLED:
                now = time.time_ns()
                changed = True
                digest = hashlib.blake2b(digest_size=16)
                spans = scan(file.path, digest.update)
                _check_stamp(file.path, stamp)
                row = (stamp, now, digest.hexdigest(), spans)
                known[str(file.path)] = row
            spans = [(a, b, c, d) for a, b, c, d in row[3]]
            indexed.append(Indexed(file.path, row[2], row[0], spans))
        if changed:
            text = json.dumps(known)
            with _written(index_path) as file:
                file.write(f"{text}\n{zlib.crc32(text.encode()):08x}\n".encode())
        return indexed

    def tokens(
        self,
        files: Sequence[Indexed],
        how: Sequence[object],
        make: Callable[[Path, Span], Iterator[Document]],
    ) -> TokenStore:
        """Makes the missing parts; processes that run at the same time share the work.

        Args:
            files: the data files.
            how: everything that tokens depend on besides the data.
            make: yields the documents of a part of a file.
        """
        spans = [(file, span) for file in files for span in file.spans if span[2]]
        parts = [(file.digest, span[:2], [*how]) for file, span in spans]
        names = [digest_of(repr(part).encode()) for part in parts]
        paths = [self.path / f"{name}.tokens" for name in names]
        most = _sample_of(paths)
        todo = [number for number, path in enumerate(paths) if not _is_complete(path, most)]

        def documents(file: Indexed, span: Span) -> Iterator[Document]:
            yield from make(file.path, span)
            # Before the tokens are stored under the digest of the file as it was.
            _check_stamp(file.path, file.stamp)

        # Each process begins with a different part, so that processes rarely compete for one.
        first = os.getpid() % max(1, len(todo))
        todo = todo[first:] + todo[:first]
        while todo:
            rest = []
            for number in todo:
                path = paths[number]
                file, span = spans[number]
                with _claimed(path.with_suffix(".lock")) as claim:
                    if claim is _Claim.OF_ANOTHER:
                        rest.append(number)
                    elif _is_complete(path, most):
                        continue
                    elif claim is _Claim.OURS:
                        _Part.write(path, documents(file, span))
                    else:
                        self._note_no_locks()
                        _write_unless_complete(path, most, documents(file, span))
            if len(rest) == len(todo):
                time.sleep(_WAIT)
            todo = [number for number in rest if not _is_complete(paths[number], most)]
        return TokenStore(paths)

    def _note_no_locks(self) -> None:
        text = (
            f"; the file system of {self.path} has no locks, so processes may tokenize the same "
            "part twice: name a folder of another one in data.cache"
        )
        if text not in self.note:
            self.note += text

    def cached(self, name: str, make: Callable[[], list[np.ndarray]]) -> list[np.ndarray]:
        """Returns arrays from the cache, or computes and stores them.

        Args:
            name: a digest of everything that the arrays depend on.
            make: computes the arrays.
        """
        path = self.path / f"{name}.npz"
        # numpy checks the checksums and raises a dozen kinds of errors. An unreadable file is made
        # again.
        with (
            contextlib.suppress(Exception),
            open(open_regular(path), "rb") as file,
            np.load(file, allow_pickle=False) as arrays,
        ):
            return [arrays[key] for key in sorted(arrays.files)]
        arrays = make()
        with _written(path) as file:
            np.savez(file, *arrays)
        return arrays


def digest_of(*texts: bytes) -> str:
    """Returns a digest of 32 hexadecimal digits."""
    digest = hashlib.blake2b(digest_size=16)
    for text in texts:
        digest.update(len(text).to_bytes(8) + text)
    return digest.hexdigest()


class _Claim(enum.Enum):
    OURS = "this process has the lock"
    OF_ANOTHER = "another process has the lock"
    NO_LOCKS = "the file system has no locks"


@contextlib.contextmanager
def _claimed(path: Path) -> Iterator[_Claim]:
    """Tries to lock a file during the `with` block; yields whether this process has the lock.

    Raises:
        ConfigError: when the lock fails for another reason.
    """
    advice = "remove it, or name another folder"
    with reworded(f"data.cache: {str(path)!r} cannot be locked", advice):
        try:
            descriptor = open_regular(path, os.O_RDWR | os.O_CREAT)
        except OSError as error:
            if error.errno not in NO_FILE:
                raise
            # The path is a link or a pipe; remove it, not its target.
            path.unlink(missing_ok=True)
            descriptor = open_regular(path, os.O_RDWR | os.O_CREAT)
    with open(descriptor, "rb") as file:
        claim = _lock(file, path)
        yield claim
        if claim is not _Claim.OF_ANOTHER:
            with contextlib.suppress(OSError):
                path.unlink()


def _lock(file: BinaryIO, path: Path) -> _Claim:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        # On NFS, a lock file that another host has just removed is stale. The next try makes it
        # again.
        if error.errno in LOCKED or error.errno == errno.ESTALE:
            return _Claim.OF_ANOTHER
        if error.errno in NO_LOCKS:
            return _Claim.NO_LOCKS
        raise ConfigError(
            f"data.cache: {str(path)!r} cannot be locked: {error.strerror}; name another folder",
            code="cannot-lock",
        ) from error
    return _Claim.OURS


def _write_unless_complete(path: Path, most: int, documents: Iterator[Document]) -> None:
    """Writes a part without a lock; keeps a complete file that another process has put there.

    That process may be reading its file already, and a file that is replaced is an error for its
    reader.
    """
    own = path.with_name(f".{secrets.token_hex(8)}{TEMPORARY}")
    _Part.write(own, documents)
    try:
        # A link never replaces a file, so of two processes that come here at once only one wins.
        os.link(own, path)
    except OSError:
        # There is a file, perhaps a damaged one, or the file system has no hard links either.
        if not _is_complete(path, most):
            advice = "remove what is at this path, or name another folder"
            with reworded(f"data.cache: {str(path)!r} cannot be written", advice):
                os.replace(own, path)
    finally:
        own.unlink(missing_ok=True)


def _is_complete(path: Path, most: int) -> bool:
    try:
        _Part.open(path, most)
    except (OSError, ValueError):
        return False
    return True


def stamp_of(path: Path) -> list[int]:
    """Returns the numbers that change if a file is written to or replaced."""
    status = path.stat()
    return [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]


def _check_stamp(path: Path, stamp: list[int]) -> None:
    """Raises `ConfigError` if a file has changed since its stamp was read."""
    if stamp_of(path) != stamp:
        raise ConfigError(
            f"{path} changed while it was read; start again when it is complete",
            code="file-changed-while-read",
        )


_Row: TypeAlias = tuple[list[int], int, str, Sequence[Sequence[int]]]
"""A file in an index: its stamp, when it was read, its digest and its parts."""


def _read_index(path: Path) -> dict[str, _Row]:
    try:
        contents = read_bytes(path, "the index", most=_MOST_INDEX, links=False)
        text, _, own = contents.rstrip(b"\n").rpartition(b"\n")
        if own != f"{zlib.crc32(text):08x}".encode():
            return {}
        known = json_section(text) or {}
        rows = {
            str(name): ([*map(int, a)], int(b), str(c), d) for name, (a, b, c, d) in known.items()
        }
        is_whole = all(
            len(row[0]) == 4
            and all(len(span) == 4 and {*map(type, span)} == {int} for span in row[3])
            for row in rows.values()
        )
        return rows if is_whole else {}
    except (ValueError, TypeError, AttributeError, RuntimeError, OverflowError):
        # A ConfigError is a ValueError.
        return {}


_MOST_INDEX = 2**30


@contextlib.contextmanager
def _written(path: Path) -> Iterator[Any]:
    """Opens a file to write; it appears under its name once it is complete."""
    advice = "free disk space, remove what is at this path, or name another folder"
    rewording = reworded(f"data.cache: {str(path)!r} cannot be written", advice)
    # Not synced to disk: a file damaged by a power cut fails its checksums and is made again.
    with rewording, replacing(path, durable=False) as file:
        yield file
