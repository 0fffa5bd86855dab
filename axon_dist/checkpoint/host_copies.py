"""`HostCopies`: the newest state of a run in the memory of its hosts, which outlives its processes.

A process that is killed takes its devices' memory with it. What it has written to a folder of the
host's memory, such as `/dev/shm`, stays, so that the run goes on from there, on as many processes
as there are then, and reads nothing from a disk.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import math
import os
import secrets
import socket
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import jax
import numpy as np
from jax.experimental import multihost_utils

from ..core.errors import CheckpointError, DamagedCheckpointError
from ..core.typing import Array, PyTree
from ..core.typing import Path as LeafPath
from ..core.words import first_few
from ..mesh import process_index
from .layout import (
    UNFINISHED,
    LeafSpec,
    as_array,
    described,
    differences,
    from_main,
    from_stored,
    named_leaves,
    spec_of,
    step_name,
    stored_target,
    to_stored,
)
from .stores import open_tensors, write_tensors

Slices: TypeAlias = tuple[tuple[int, int], ...]
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


def place_of(index: Sequence[slice], shape: Sequence[int]) -> Slices:
    """The place of a shard.

    Example:
        >>> place_of((slice(None), slice(2, 4)), (3, 8))
        ((0, 3), (2, 4))
    """
    return tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))


def write_copy(
    folder: Path,
    header: CopyHeader,
    pieces: Sequence[tuple[LeafPath, Slices, np.dtype, jax.Array]],
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
        self._files, self._checked = files, set[tuple[LeafPath, Slices]]()

    @functools.cached_property
    def _by_leaf(self) -> dict[LeafPath, list[tuple[Slices, np.ndarray, int]]]:
        pieces: dict[LeafPath, list[tuple[Slices, np.ndarray, int]]] = {}
        for path in self._files:
            arrays = open_tensors(path)
            rows = zip(json.loads(bytes(arrays[_PLACES])), arrays[_CHECKSUMS], strict=True)
            for number, ((leaf, place), crc) in enumerate(rows):
                whole = tuple((int(start), int(stop)) for start, stop in place)
                pieces.setdefault(leaf, []).append((whole, arrays[str(number)], int(crc)))
        return pieces

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

    def read(self, leaf: LeafPath, dtype: Any, place: Slices) -> np.ndarray:
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
    for header, path in _headers(folder):
        groups.setdefault(header.copy, {})[header.process] = path, header
    for _, group in sorted(groups.items(), reverse=True):
        header = next(iter(group.values()))[1]
        pieces = Pieces([path for path, _ in group.values()], header)
        if sorted(group) == sorted(header.writers) and pieces.is_whole:
            yield pieces


def _size(place: Slices) -> int:
    return math.prod(stop - start for start, stop in place)


def _within(meet: Sequence[tuple[int, int]], place: Slices) -> tuple[slice, ...]:
    return tuple(
        slice(start - first, stop - first)
        for (start, stop), (first, _) in zip(meet, place, strict=True)
    )


@dataclasses.dataclass(frozen=True)
class HostCopy:
    """What a run goes on from.

    Args:
        step: how many steps the state has taken.
        state: the state.
        meta: what was kept with it.
    """

    step: int
    state: PyTree
    meta: Mapping[str, Any]


class HostCopies:
    """The newest state that the processes of a run have left in the memory of their hosts.

    Each distinct shard is written once a host, by the first process there that holds it. So a host
    has what its devices have: a whole state under `ddp`, and where every host holds a replica. The
    state outlives any process, and a host that is replaced gets it from another that has it whole.

    Args:
        folder: in the memory of this host; the same for all of its processes.
        tell: takes a sentence when a copy could not be made; the run goes on.

    Example:
        >>> import jax.numpy as jnp, tempfile
        >>> copies = HostCopies(Path(tempfile.mkdtemp()))
        >>> copies.save(3, {"w": jnp.arange(4.0)}, {"seen": 12})
        >>> found = HostCopies(copies.folder).newest({"w": jnp.zeros(4)})
        >>> found.step, found.state["w"].tolist(), found.meta
        (3, [0.0, 1.0, 2.0, 3.0], {'seen': 12})
    """

    def __init__(self, folder: Path, tell: Callable[[str], None] = lambda text: None):
        self.folder, self.tell = folder, tell
        where = f"{socket.gethostname()} {folder.resolve()}"
        self._hosts = _gathered(zlib.crc32(where.encode()) >> 1)
        # Steps are counted again after a loss: what was written before must not be mixed with that.
        self._generation: str = from_main(secrets.token_hex(8))
        self._turn = 0

    def save(self, step: int, state: PyTree, meta: Mapping[str, Any]) -> None:
        """Copies the state of a step; its arrays may be donated when this returns.

        Every process calls this between the same steps. A copy counts when all have written their
        pieces; until then the one before it does, so that for a moment there are two.

        Args:
            step: how many steps the state has taken.
            state: a pytree of arrays and random keys.
            meta: what JSON holds.
        """
        leaves = {path: as_array(path, leaf) for path, leaf in named_leaves(state).items()}
        me, self._turn = process_index(), self._turn + 1
        header = CopyHeader(
            step=step,
            generation=self._generation,
            turn=self._turn,
            process=me,
            writers=tuple(p for p, host in enumerate(self._hosts) if host == self._hosts[me]),
            leaves={path: spec_of(leaf) for path, leaf in leaves.items()},
            meta=dict(meta),
        )
        stored = {path: to_stored(leaf) for path, leaf in leaves.items()}
        reason = ""
        try:
            write_copy(self.folder, header, self._own_pieces(stored))
        except OSError as error:
            reason = error.strerror or str(error)
        # Only a copy that all have written takes the place of the one before it.
        if failed := [p for p, has_failed in enumerate(_gathered(bool(reason))) if has_failed]:
            self._remove(lambda found: found.process == me and found.copy == header.copy)
            self.tell(
                f"no copy of step {step}: processes {failed} could not write theirs"
                f"{f' to {str(self.folder)!r}: {reason}' if reason else ''}; the one before it "
                "stays. Make room there, or copy less often"
            )
            return
        self._remove(lambda found: found.copy != header.copy)

    def newest(self, target: PyTree) -> HostCopy | None:
        """Restores the newest copy that some host has whole; every process calls this.

        Args:
            target: as for `load_checkpoint`.

        Returns:
            What was found, on the mesh of the target; None where no host has a whole copy.

        Raises:
            CheckpointError: when the copy belongs to another model or optimizer.
            DamagedCheckpointError: on all processes, when a piece is not what was written.
        """
        local = next(iter(complete_copies(self.folder)), None)
        best = _gathered(-1 if local is None else local.header.step)
        if max(best) < 0:
            return None
        step = max(best)
        source = best.index(step)
        if local is not None and local.header.step != step:
            local = None
        targets = {path: described(path, leaf) for path, leaf in named_leaves(target).items()}
        if local is not None:
            wanted = {path: spec_of(leaf) for path, leaf in targets.items()}
            if unlike := differences(local.header.leaves, wanted):
                raise CheckpointError(
                    f"the copy of step {step} in the memory of this host does not fit: "
                    f"{first_few(unlike, between='; ')}; start the run anew, with the model it "
                    "was made from"
                )
        stored = {
            path: _read(local, path, stored_target(leaf), None if min(best) == step else source)
            for path, leaf in targets.items()
        }
        _check_whole(local, step)
        leaves = [from_stored(stored[path], leaf) for path, leaf in targets.items()]
        state = jax.tree.unflatten(jax.tree.structure(target), leaves)
        meta = from_main(None if local is None else dict(local.header.meta), source)
        return HostCopy(step, state, meta)

    def forget(self) -> None:
        """Throws all copies away, as a run does that goes back to an earlier state."""
        self._remove(lambda header: True)

    def _own_pieces(
        self, stored: Mapping[LeafPath, Array]
    ) -> list[tuple[LeafPath, Slices, np.dtype, jax.Array]]:
        me = process_index()
        shards = []
        for path, leaf in stored.items():
            owners: dict[Slices, int] = {}
            for device, index in leaf.sharding.devices_indices_map(leaf.shape).items():
                place, process = place_of(index, leaf.shape), int(device.process_index)
                if self._hosts[process] == self._hosts[me]:
                    owners[place] = min(process, owners.get(place, process))
            mine = {place_of(shard.index, leaf.shape): shard for shard in leaf.addressable_shards}
            for place, shard in mine.items():
                if owners[place] == me:
                    shards.append((path, place, np.dtype(leaf.dtype), shard.data))
        return shards

    def _remove(self, is_outdated: Callable[[CopyHeader], bool]) -> None:
        for header, path in _headers(self.folder):
            # Another process of this host may have removed it, too.
            if is_outdated(header):
                with contextlib.suppress(OSError):
                    path.unlink()


def _headers(folder: Path) -> Iterator[tuple[CopyHeader, Path]]:
    for path in sorted(folder.glob("*.copy")):
        with contextlib.suppress(CheckpointError):
            yield CopyHeader.read(path), path


def _gathered(number: int) -> list[int]:
    """A number of every process, by process."""
    return [int(x) for x in np.ravel(multihost_utils.process_allgather(np.int32(number)))]


def _read(
    local: Pieces | None, path: LeafPath, leaf: jax.ShapeDtypeStruct, source: int | None
) -> Array:
    """A leaf from the memory of the hosts.

    Args:
        local: what this host has.
        path: of the leaf.
        leaf: what is stored of it, and where it is to lie.
        source: the process that hands it to all, where some host has none; None where every
            process takes what its shards need from its own host.
    """

    def here(place: Slices) -> np.ndarray:
        assert local is not None
        return local.read(path, leaf.dtype, place)

    if source is None:

        def take(index):
            return here(place_of(index, leaf.shape))

        return jax.make_array_from_callback(leaf.shape, leaf.sharding, take)
    is_source = process_index() == source
    whole = tuple((0, size) for size in leaf.shape)
    values = here(whole) if is_source else np.zeros(leaf.shape, leaf.dtype)
    sent = np.asarray(multihost_utils.broadcast_one_to_all(values, is_source=is_source))
    sent = sent.astype(leaf.dtype)
    return jax.make_array_from_callback(leaf.shape, leaf.sharding, lambda index: sent[index])


def _check_whole(local: Pieces | None, step: int) -> None:
    """Raises on all processes where one has read a piece that is not what was written."""
    damaged = _gathered(local is not None and bool(local.damaged))
    if any(damaged):
        raise DamagedCheckpointError(
            f"the copy of step {step} in the memory of the hosts of the processes "
            f"{[p for p, is_bad in enumerate(damaged) if is_bad]} is not what was written; going "
            "back to a checkpoint"
        )
