"""The files that processes leave in the memory of a host: pieces of a state."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import math
import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import jax
import numpy as np

from ..core.errors import CheckpointError
from ..core.typing import Path as LeafPath
from .layout import UNFINISHED, LeafSpec, step_name
from .tensorfile import open_tensors, write_tensors

Place: TypeAlias = tuple[tuple[int, int], ...]
"""Where a piece lies in its leaf: the first index along each dim, and the one after the last."""

_HEADER, _PLACES, _CHECKSUMS = "header", "places", "checksums"


@dataclasses.dataclass(frozen=True, kw_only=True)
class CopyHeader:
    """What a file says of itself.

    Args:
        step: how many steps the state has taken.
        generation: which start of the run wrote it.
        turn: how many copies that start had made by then.
        process: which process wrote the file.
        writers: all processes of the host, each of which wrote one.
        leaves: of the whole state.
        meta: what was kept with it.
    """

    step: int
    generation: str
    turn: int
    process: int
    writers: tuple[int, ...]
    leaves: Mapping[LeafPath, LeafSpec]
    meta: Mapping[str, Any]

    @property
    def meta_text(self) -> str:
        """What was kept with the state, as JSON."""
        return json.dumps(self.meta)

    @classmethod
    def read_meta(cls, text: str) -> Mapping[str, Any]:
        """The inverse of `meta_text`."""
        return json.loads(text)

    @property
    def copy(self) -> tuple[int, str, int]:
        """Which copy the file is a part of; its pieces all come from the same moment."""
        return self.step, self.generation, self.turn

    def to_json(self) -> str:
        """Writes it; `read` reads it back."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def read(cls, path: Path) -> CopyHeader:
        """Reads that of a file.

        Raises:
            CheckpointError: when it is none.
        """
        try:
            fields = json.loads(bytes(open_tensors(path)[_HEADER]))
            leaves = {
                name: LeafSpec(spec["dtype"], tuple(spec["shape"]))
                for name, spec in fields.pop("leaves").items()
            }
            return cls(leaves=leaves, **{**fields, "writers": tuple(fields["writers"])})
        except (KeyError, TypeError, ValueError, OSError) as error:
            raise CheckpointError(f"{str(path)!r} is no copy of a state: {error}") from error


def place_of(index: Sequence[slice], shape: Sequence[int]) -> Place:
    """The place of a shard.

    Example:
        >>> place_of((slice(None), slice(2, 4)), (3, 8))
        ((0, 3), (2, 4))
    """
    return tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))


def write_copy(
    folder: Path,
    header: CopyHeader,
    pieces: Sequence[tuple[LeafPath, Place, np.dtype, jax.Array]],
) -> None:
    """Writes the pieces of one process; the file appears under its name when all of it is there.

    Args:
        folder: in the memory of the host.
        header: what the file says of itself.
        pieces: path, place, dtype and values.
    """
    name = f"{step_name(header.step)}-{header.generation}-{header.process}"
    unfinished = folder / f"{name}{UNFINISHED}"
    texts = header.to_json(), json.dumps([[path, place] for path, place, _, _ in pieces])
    blocks = [np.frombuffer(text.encode(), np.uint8) for text in texts]
    sizes = [_size(place) * dtype.itemsize for _, place, dtype, _ in pieces]
    specs = {name: block for name, block in zip((_HEADER, _PLACES), blocks, strict=True)}
    specs |= {str(n): jax.ShapeDtypeStruct((size,), np.uint8) for n, size in enumerate(sizes)}
    specs |= {_CHECKSUMS: jax.ShapeDtypeStruct((len(pieces),), np.uint32)}

    def values() -> Iterator[np.ndarray]:
        sums = []
        yield from blocks
        for _, _, _, data in pieces:
            raw = np.ascontiguousarray(np.asarray(data)).reshape(-1).view(np.uint8)
            sums.append(zlib.crc32(raw))
            yield raw
        yield np.array(sums, np.uint32)

    try:
        write_tensors(unfinished, specs, values())
        os.replace(unfinished, folder / f"{name}.copy")
    except OSError:
        with contextlib.suppress(OSError):
            unfinished.unlink()
        raise


class Pieces:
    """The pieces of a copy that lie on this host, which together are the whole state.

    Args:
        files: of all processes of the host that wrote it.
        header: of one of them.
    """

    def __init__(self, files: Sequence[Path], header: CopyHeader):
        self.header: CopyHeader = header
        self.damaged: set[LeafPath] = set()
        self._files, self._checked = files, set[tuple[LeafPath, Place]]()

    @functools.cached_property
    def _by_leaf(self) -> dict[LeafPath, list[tuple[Place, np.ndarray, int]]]:
        found: dict[LeafPath, list[tuple[Place, np.ndarray, int]]] = {}
        for path in self._files:
            arrays = open_tensors(path)
            rows = zip(json.loads(bytes(arrays[_PLACES])), arrays[_CHECKSUMS], strict=True)
            for number, ((leaf, place), crc) in enumerate(rows):
                whole = tuple((int(start), int(stop)) for start, stop in place)
                found.setdefault(leaf, []).append((whole, arrays[str(number)], int(crc)))
        return found

    @property
    def is_whole(self) -> bool:
        """Whether every element of every leaf is in some piece; no two pieces overlap."""
        has = {leaf: sum(_size(p) for p, _, _ in rows) for leaf, rows in self._by_leaf.items()}
        wanted = self.header.leaves.items()
        return all(
            # The words of a random key are more than its shape says.
            has.get(leaf, 0) >= math.prod(spec.shape)
            for leaf, spec in wanted
        )

    def read(self, leaf: LeafPath, dtype: Any, place: Place) -> np.ndarray:
        """The values at a place, put together from the pieces that meet it; remembers damage."""
        values = np.empty([stop - start for start, stop in place], dtype)
        for there, raw, crc in self._by_leaf.get(leaf, []):
            meet = [(max(a, c), min(b, d)) for (a, b), (c, d) in zip(place, there, strict=True)]
            if any(start >= stop for start, stop in meet):
                continue
            if (leaf, there) not in self._checked and zlib.crc32(raw) != crc:
                self.damaged.add(leaf)
            self._checked.add((leaf, there))
            piece = raw.view(dtype).reshape([stop - start for start, stop in there])
            values[_within(meet, place)] = piece[_within(meet, there)]
        return values


def complete_copies(folder: Path) -> Iterator[Pieces]:
    """The copies in a folder that all of their writers have finished and that are whole, newest
    first."""
    groups: dict[tuple, dict[int, tuple[Path, CopyHeader]]] = {}
    for path in folder.glob("*.copy"):
        with contextlib.suppress(CheckpointError):
            header = CopyHeader.read(path)
            groups.setdefault(header.copy, {})[header.process] = path, header
    for _, group in sorted(groups.items(), reverse=True):
        header = next(iter(group.values()))[1]
        pieces = Pieces([path for path, _ in group.values()], header)
        if sorted(group) == sorted(header.writers) and pieces.is_whole:
            yield pieces


def _size(place: Place) -> int:
    return math.prod(stop - start for start, stop in place)


def _within(meet: Sequence[tuple[int, int]], place: Place) -> tuple[slice, ...]:
    return tuple(
        slice(start - first, stop - first)
        for (start, stop), (first, _) in zip(meet, place, strict=True)
    )
