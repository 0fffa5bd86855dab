"""The files of a state's copy in host memory; each has the pieces of one process.

    step_00000012-<generation>-<process>.copy

Each is a safetensors file with a JSON header, the slices of each piece in its leaf, the pieces as
bytes, and a CRC-32 of each.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import jax
import numpy as np

from ..core.errors import MALFORMED
from ..core.typing import Path as LeafPath
from .layout import LeafSpec, leaf_specs, step_name
from .stores import open_tensors, write_tensors

Slices: TypeAlias = tuple[tuple[int, int], ...]
"""The slices of a piece in its leaf: (start, stop) along each dim."""

CopyId: TypeAlias = tuple[int, str, int]
"""Step, generation and number of a copy; all of its pieces are from the same moment."""

_HEADER, _PLACES, _CHECKSUMS = "header", "places", "checksums"


@dataclasses.dataclass(frozen=True, kw_only=True)
class CopyHeader:
    """The header of a file.

    Args:
        step: how many steps the state has taken.
        generation: an id of the start of the run that wrote it.
        copy_number: how many copies had been made since that start.
        process: the owner of the pieces; it, or a process of the next host, wrote the file.
        writers: all processes of the owner's host; each has such a file.
        leaves: the leaves of the whole state.
        meta: user data that was saved with it.
        unpadded: the model's shapes of padded leaves, by path.
    """

    step: int
    generation: str
    copy_number: int
    process: int
    writers: tuple[int, ...]
    leaves: Mapping[LeafPath, LeafSpec]
    meta: Mapping[str, Any]
    unpadded: Mapping[LeafPath, tuple[int, ...]] = dataclasses.field(default_factory=dict)

    @property
    def copy(self) -> CopyId:
        """The copy to which the file belongs."""
        return self.step, self.generation, self.copy_number

    def to_json(self) -> str:
        """Formats the header; `from_json` parses it."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> CopyHeader:
        """Parses the output of `to_json`."""
        fields = json.loads(text)
        if "turn" in fields:
            # The name in files of 0.2 and before, which a run that was updated may find in memory.
            fields["copy_number"] = fields.pop("turn")
        fields["leaves"] = leaf_specs(fields["leaves"])
        fields["writers"] = tuple(fields["writers"])
        fields["unpadded"] = {p: tuple(shape) for p, shape in fields.get("unpadded", {}).items()}
        return cls(**fields)


def slices_of(index: Sequence[slice], shape: Sequence[int]) -> Slices:
    """The place of a shard.

    Example:
        >>> slices_of((slice(None), slice(2, 4)), (3, 8))
        ((0, 3), (2, 4))
    """
    return tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))


def raw_bytes(values: jax.Array | np.ndarray) -> np.ndarray:
    """The bytes of an array on this host, row-major, [bytes] uint8."""
    return np.ascontiguousarray(np.asarray(values)).reshape(-1).view(np.uint8)


def write_copy(
    folder: Path,
    header: CopyHeader,
    rows: Sequence[tuple[LeafPath, Slices, np.dtype]],
    pieces: Iterable[jax.Array | np.ndarray],
) -> None:
    """Writes the pieces of one process atomically.

    Args:
        folder: a folder in the memory of the host.
        header: the header of the file.
        rows: path, place and dtype of each piece.
        pieces: their values; a generator computes each one when it is written.
    """
    name = f"{step_name(header.step)}-{header.generation}-{header.process}"
    texts = header.to_json(), json.dumps([[path, place] for path, place, _ in rows])
    blocks = [np.frombuffer(text.encode(), np.uint8) for text in texts]
    sizes = [size_of(place) * dtype.itemsize for _, place, dtype in rows]
    specs = {name: block for name, block in zip((_HEADER, _PLACES), blocks, strict=True)}
    specs |= {str(n): jax.ShapeDtypeStruct((size,), np.uint8) for n, size in enumerate(sizes)}
    specs |= {_CHECKSUMS: jax.ShapeDtypeStruct((len(rows),), np.uint32)}

    def values() -> Iterator[np.ndarray]:
        sums = []
        yield from blocks
        for data in pieces:
            raw = raw_bytes(data)
            sums.append(zlib.crc32(raw))
            yield raw
        yield np.array(sums, np.uint32)

    # Not durable: memory is lost in a power cut anyway.
    write_tensors(folder / f"{name}.copy", specs, values(), durable=False)


Part: TypeAlias = tuple[int, Sequence[int], Mapping[LeafPath, Sequence[Slices]]]
"""A file without its values: process and writers of its header, and its places by leaf."""


def is_whole(parts: Sequence[Part], leaves: Mapping[LeafPath, LeafSpec]) -> bool:
    """Whether every element of every leaf was written; the places of a leaf never overlap.

    The pieces of a host count only if all of its processes have finished.

    Args:
        parts: the parts of one copy, from all hosts.
        leaves: the leaves of the whole state.
    """
    finished = {process for process, _, _ in parts}
    done = [places for _, writers, places in parts if finished.issuperset(writers)]

    def written(leaf: LeafPath) -> int:
        return sum(map(size_of, {place for places in done for place in places.get(leaf, ())}))

    # Not equality: random keys have more words than their shape has elements.
    return all(written(leaf) >= math.prod(spec.shape) for leaf, spec in leaves.items())


class Pieces:
    """The pieces of a copy on this host.

    Args:
        headers: the headers of the files, by path.
    """

    def __init__(self, headers: Mapping[Path, CopyHeader]):
        self.damaged: set[LeafPath] = set()
        self.parts: list[Part] = []
        self._pieces: dict[tuple[LeafPath, Slices], tuple[np.ndarray, int | None]] = {}
        for path, header in headers.items():
            arrays = open_tensors(path)
            rows = zip(json.loads(bytes(arrays[_PLACES])), arrays[_CHECKSUMS], strict=True)
            places: dict[LeafPath, list[Slices]] = {}
            for number, ((leaf, place), crc) in enumerate(rows):
                slices = slices_from_json(place)
                self._pieces[leaf, slices] = arrays[str(number)], int(crc)
                places.setdefault(leaf, []).append(slices)
            self.parts.append((header.process, header.writers, places))

    def add(self, leaf: LeafPath, place: Slices, raw: np.ndarray) -> None:
        """Adds the bytes of a piece from another host."""
        self._pieces[leaf, place] = raw, None

    def raw(self, leaf: LeafPath, place: Slices) -> np.ndarray:
        """The bytes of a piece; records the leaf in `damaged` if the checksum is wrong."""
        raw, crc = self._pieces[leaf, place]
        if crc is not None and zlib.crc32(raw) != crc:
            self.damaged.add(leaf)
        self._pieces[leaf, place] = raw, None
        return raw

    def has(self, leaf: LeafPath, place: Slices) -> bool:
        """Whether this host has a piece."""
        return (leaf, place) in self._pieces

    def read(
        self, leaf: LeafPath, dtype: Any, place: Slices, written: Iterable[Slices]
    ) -> np.ndarray:
        """Assembles the values at a place from the pieces that overlap it.

        Args:
            leaf: the path of the leaf.
            dtype: the dtype of its elements.
            place: the slices to read.
            written: the places of all pieces of the leaf.
        """
        values = np.empty([stop - start for start, stop in place], dtype)
        for there in written:
            if (shared := overlap(place, there)) is not None:
                piece = self.raw(leaf, there).view(dtype)
                piece = piece.reshape([stop - start for start, stop in there])
                values[_within(shared, place)] = piece[_within(shared, there)]
        return values


def copies_in(folder: Path) -> dict[CopyId, tuple[CopyHeader, Pieces]]:
    """The pieces of each copy in a folder, newest first."""
    groups: dict[CopyId, dict[Path, CopyHeader]] = {}
    for header, path in headers_in(folder):
        groups.setdefault(header.copy, {})[path] = header
    ordered = sorted(groups.items(), reverse=True)
    return {copy: (next(iter(group.values())), Pieces(group)) for copy, group in ordered}


def size_of(place: Slices) -> int:
    """The number of elements of a place."""
    return math.prod(stop - start for start, stop in place)


def slices_from_json(pairs: Iterable[Sequence[int]]) -> Slices:
    """Converts a place from JSON."""
    return tuple((int(start), int(stop)) for start, stop in pairs)


def overlap(one: Slices, other: Slices) -> Slices | None:
    """The intersection of two places; None if it is empty."""
    shared = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))
    return shared if all(start < stop for start, stop in shared) else None


def _within(shared: Slices, place: Slices) -> tuple[slice, ...]:
    return tuple(
        slice(start - first, stop - first)
        for (start, stop), (first, _) in zip(shared, place, strict=True)
    )


def headers_in(folder: Path) -> Iterator[tuple[CopyHeader, Path]]:
    """Yields the headers of the finished files in a folder, with their paths."""
    for path in sorted(folder.glob("*.copy")):
        with contextlib.suppress(OSError, *MALFORMED):
            yield CopyHeader.from_json(bytes(open_tensors(path)[_HEADER]).decode()), path
