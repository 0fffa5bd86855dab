"""`HostCopies`: keeps the newest state of a run in host memory, where it outlives its processes.

When a process is killed, the memory of its devices is lost. A folder in host memory, such as
`/dev/shm`, stays, so the run can continue from there on any number of processes, without reading
from a disk. The folder is lost with its host. So each host also keeps the pieces that only the
previous host has. A run then survives the loss of a host, or of several hosts if no two of them are
consecutive.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import json
import secrets
import socket
import zlib
from collections.abc import Callable, Hashable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import jax
import numpy as np
from jax import lax
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from ..core.errors import CheckpointError, ConfigError, DamagedCheckpointError
from ..core.files import remove_abandoned
from ..core.typing import Array, PyTree
from ..core.typing import Path as LeafPath
from ..core.words import first_few
from ..mesh import process_index
from ..sharding.padding import paddings_in
from .copy_files import (
    CopyHeader,
    CopyId,
    Part,
    Pieces,
    Slices,
    copies_in,
    headers_in,
    is_whole,
    overlap,
    raw_bytes,
    size_of,
    slices_from_json,
    slices_of,
    write_copy,
)
from .layout import (
    LeafSpec,
    as_array,
    broadcast_json,
    described,
    differences,
    from_stored,
    in_form_of,
    named_leaves,
    spec_of,
    stored_target,
    to_stored,
)

Rows: TypeAlias = list[tuple[LeafPath, Slices, np.dtype]]


@dataclasses.dataclass(frozen=True)
class HostRing:
    """The hosts of a run in process order; each one backs up the previous one.

    Args:
        hosts: for each process, the number of its host.
    """

    hosts: tuple[int, ...]

    def peers(self, process: int) -> tuple[int, ...]:
        """The processes of the same host."""
        return tuple(p for p, host in enumerate(self.hosts) if host == self.hosts[process])

    def before(self, process: int) -> int:
        """The process with the same position on the previous host."""
        order = list(dict.fromkeys(self.hosts))
        host = order[order.index(self.hosts[process]) - 1]
        return self.peers(self.hosts.index(host))[self.peers(process).index(process)]

    def spread(self, leaves: Mapping[LeafPath, Any]) -> dict[LeafPath, Any]:
        """The leaves of which a host has shards that the next host lacks.

        Args:
            leaves: arrays, or their shapes with shardings.

        Raises:
            ConfigError: if the hosts have different numbers of processes or devices, so that a
                device has no counterpart to send to.
        """
        spread = {path: leaf for path, leaf in leaves.items() if self._is_spread(leaf)}
        for path, leaf in spread.items():
            sizes = collections.Counter(device.process_index for device in leaf.sharding.device_set)
            each = [[sizes[p] for p in self.peers(p)] for p in map(self.hosts.index, {*self.hosts})]
            if len({*map(len, each)}) > 1 or len({size for row in each for size in row}) > 1:
                raise ConfigError(
                    f"the processes of the hosts have {' and '.join(map(str, sorted(each)))} "
                    f"devices, and {path} is split over hosts: each host's shards are copied to "
                    "the next one, device by device. Start the same number of processes and "
                    "devices on each host, or leave checkpoint.memory_every at 0"
                )
        return spread

    def local_pieces(self, leaves: Mapping[LeafPath, Array]) -> tuple[Rows, Iterator[jax.Array]]:
        """The pieces of its own host that this process writes."""
        rows: Rows = []
        pieces: list[jax.Array] = []
        for path, leaf in leaves.items():
            shards = {shard.device.id: shard.data for shard in leaf.addressable_shards}
            for place, device in self._written_by(process_index(), leaf).items():
                rows.append((path, place, np.dtype(leaf.dtype)))
                pieces.append(shards[device])
        return rows, iter(pieces)

    def pieces_before(self, leaves: Mapping[LeafPath, Array]) -> tuple[Rows, Iterator[jax.Array]]:
        """The pieces of the previous host that this process writes.

        Every process must exhaust the iterator, because each leaf is sent over the mesh.

        Args:
            leaves: the leaves from `spread`; each is sent when the iterator reaches it.
        """
        me = process_index()
        wanted = {}
        for path, leaf in leaves.items():
            local = _first_devices(leaf.sharding, leaf.shape, self.hosts)[self.hosts[me]]
            previous = self._written_by(self.before(me), leaf)
            wanted[path] = {
                place: device for place, device in previous.items() if place not in local
            }
        places = [(path, place) for path, some in wanted.items() for place in some]

        def pieces() -> Iterator[jax.Array]:
            for path, leaf in leaves.items():
                got = self._sent(leaf)
                yield from (got[device] for device in wanted[path].values())

        return [(path, place, np.dtype(leaves[path].dtype)) for path, place in places], pieces()

    def _sent(self, leaf: Array) -> dict[int, jax.Array]:
        """Sends a leaf around the ring; returns the previous process's shards by device id."""
        devices = sorted(leaf.sharding.device_set, key=lambda x: (x.process_index, x.id))
        each = len(devices) // len(self.hosts)
        sources = [self.before(n // each) * each + n % each for n in range(len(devices))]
        send, split = _sender(tuple(devices), tuple(sources))
        # As bytes in device memory: not every backend can send every dtype or memory kind.
        rows = [jax.device_put(raw_bytes(x.data)[None], x.device) for x in leaf.addressable_shards]
        shape = (len(devices), *rows[0].shape[1:])
        got = send(jax.make_array_from_single_device_arrays(shape, split, rows))
        shards = got.addressable_shards
        return {devices[sources[shard.index[0].start or 0]].id: shard.data for shard in shards}

    def _is_spread(self, leaf: Any) -> bool:
        if leaf.sharding.is_fully_addressable:
            # A local array, which differs between processes.
            return False
        places = _first_devices(leaf.sharding, leaf.shape, self.hosts)
        order = list(dict.fromkeys(self.hosts))
        return any(places[order[n - 1]].keys() - places[order[n]].keys() for n in range(len(order)))

    def _written_by(self, process: int, leaf: Array) -> dict[Slices, int]:
        """The pieces that a process writes for its host, with the id of a device that has each."""
        places = _first_devices(leaf.sharding, leaf.shape, self.hosts)[self.hosts[process]]
        return {place: device for place, (owner, device) in places.items() if owner == process}


@functools.lru_cache(maxsize=1024)
def _first_devices(
    sharding: Sharding, shape: tuple[int, ...], hosts: tuple[int, ...]
) -> dict[int, dict[Slices, tuple[int, int]]]:
    """For each host, the shards of an array with the first process and device that has each."""
    firsts: dict[int, dict[Slices, tuple[int, int]]] = {host: {} for host in hosts}
    for device, index in sharding.devices_indices_map(shape).items():
        process = int(device.process_index)
        places = firsts[hosts[process]]
        place = slices_of(index, shape)
        places[place] = min((process, int(device.id)), places.get(place, (process, int(device.id))))
    return firsts


@functools.lru_cache(maxsize=4)
def _sender(
    devices: tuple[Hashable, ...], sources: tuple[int, ...]
) -> tuple[Callable[[jax.Array], jax.Array], NamedSharding]:
    """A program that sends each device the row of its source, and the sharding of the rows."""
    mesh = Mesh(np.array(devices), ("device",))
    rows = PartitionSpec("device")
    pairs = [(source, n) for n, source in enumerate(sources)]
    send = jax.shard_map(
        lambda x: lax.ppermute(x, "device", pairs), mesh=mesh, in_specs=rows, out_specs=rows
    )
    return jax.jit(send), NamedSharding(mesh, rows)


@dataclasses.dataclass(frozen=True)
class HostCopy:
    """A restored copy.

    Args:
        step: how many steps the state has taken.
        state: the state.
        meta: user data that was saved with it.
    """

    step: int
    state: PyTree
    meta: Mapping[str, Any]


class HostCopies:
    """Copies of the newest state of a run in the memory of its hosts.

    Each distinct shard is written once per host, by the first process there that has it. So a host
    has the shards of its devices; these are the whole state under `ddp`, or if every host has a
    replica. If a leaf is split over hosts, each host also gets, over the mesh, the shards of the
    previous host in the order of processes; the last host precedes the first. The state survives
    the loss of any process, and of any host whose next host stays. A new host gets its shards from
    the others.

    Args:
        folder: a folder in the memory of this host; the same for all of its processes.
        tell: called with a sentence if a copy could not be made; the run continues.

    Example:
        >>> import jax.numpy as jnp, tempfile
        >>> copies = HostCopies(Path(tempfile.mkdtemp()))
        >>> copies.save(3, {"w": jnp.arange(4.0)}, {"seen": 12})
        >>> found = HostCopies(copies.folder).newest({"w": jnp.zeros(4)})
        >>> found.step, found.state["w"].tolist(), found.meta
        (3, [0.0, 1.0, 2.0, 3.0], {'seen': 12})
    """

    def __init__(self, folder: Path, tell: Callable[[str], None] = lambda text: None):
        self.folder = folder
        self.tell = tell
        # Leftovers of killed processes. No process is writing: the `_gathered` below waits for all.
        remove_abandoned(folder, 0.0)
        location = f"{socket.gethostname()} {folder.resolve()}"
        self._ring = HostRing(tuple(_gathered(zlib.crc32(location.encode()) >> 1)))
        # After a loss steps are repeated, and files of different starts must not be mixed.
        self._generation: str = broadcast_json(secrets.token_hex(8))
        self._copy_number = 0

    def check(self, target: PyTree) -> None:
        """Raises `ConfigError` if the run could not survive the loss of a host.

        Args:
            target: see `load_checkpoint`.
        """
        leaves = described(target)
        self._ring.spread({path: stored_target(leaf) for path, leaf in leaves.items()})

    def save(self, step: int, state: PyTree, meta: Mapping[str, Any]) -> None:
        """Copies the state of a step; its arrays may be donated when this returns.

        Every process calls this between the same steps. A copy is valid when all processes have
        written their pieces. Until then the previous copy is, so for a moment there are two.

        Args:
            step: how many steps the state has taken.
            state: a pytree of arrays and random keys.
            meta: user data that JSON can represent.
        """
        leaves = {path: as_array(path, leaf) for path, leaf in named_leaves(state).items()}
        stored = {path: to_stored(leaf) for path, leaf in leaves.items()}
        me = process_index()
        ring = self._ring
        self._copy_number += 1
        header = CopyHeader(
            step=step,
            generation=self._generation,
            copy_number=self._copy_number,
            process=me,
            writers=ring.peers(me),
            leaves={path: spec_of(leaf) for path, leaf in leaves.items()},
            meta=dict(meta),
            unpadded=paddings_in(state),
        )
        reason = self._write(header, *ring.local_pieces(stored))
        spread = ring.spread(stored)
        if spread:
            previous = ring.before(me)
            backup = dataclasses.replace(header, process=previous, writers=ring.peers(previous))
            reason = self._write(backup, *ring.pieces_before(spread)) or reason
        # A copy replaces the previous one only if all processes have written it.
        if failed := [p for p, has_failed in enumerate(_gathered(bool(reason))) if has_failed]:
            local = {me, ring.before(me)} if spread else {me}
            self._remove(lambda stale: stale.process in local and stale.copy == header.copy)
            self.tell(
                f"no copy of step {step}: processes {failed} could not write theirs"
                f"{f' to {str(self.folder)!r}: {reason}' if reason else ''}; the previous copy "
                "stays. Free memory there, or copy less often"
            )
            return
        self._remove(lambda stale: stale.copy != header.copy)

    def newest(self, target: PyTree) -> HostCopy | None:
        """Restores the newest copy that is complete over all hosts; every process calls this.

        Args:
            target: see `load_checkpoint`.

        Returns:
            The copy, on the mesh of the target. None if the hosts have no complete copy, or its
            leaves are padded for another number of devices; only checkpoints have no padding.

        Raises:
            CheckpointError: if the copy belongs to another model or optimizer.
            DamagedCheckpointError: on all processes, if a piece is corrupted.
        """
        here = copies_in(self.folder)
        me = process_index()
        newest = _newest_complete(here, is_teller=self._ring.peers(me)[0] == me)
        if newest is None:
            return None
        header, holders = newest
        local = here.get(header.copy, (None, Pieces({})))[1]
        targets = described(target)
        wanted = {path: spec_of(leaf) for path, leaf in targets.items()}
        unpadded = paddings_in(target)
        unlike = differences(
            _without_padding(header.leaves, header.unpadded), _without_padding(wanted, unpadded)
        )
        if not unlike and header.leaves != wanted:
            self.tell(
                f"the copy of step {header.step} in the memory of the hosts is padded for another "
                "number of devices; going back to a checkpoint"
            )
            return None
        if unlike:
            raise CheckpointError(
                f"the copy of step {header.step} in the memory of the hosts does not fit: "
                f"{first_few(unlike, between='; ')}; restart the run with the model of the copy"
            )
        stored = {path: stored_target(leaf) for path, leaf in targets.items()}
        _fetch(local, stored, holders)

        def read(path: LeafPath, leaf: jax.ShapeDtypeStruct) -> Array:
            def take(index):
                place = slices_of(index, leaf.shape)
                return local.read(path, leaf.dtype, place, holders.get(path, ()))

            return jax.make_array_from_callback(leaf.shape, leaf.sharding, take)

        values = {path: read(path, leaf) for path, leaf in stored.items()}
        damaged = _gathered(bool(local.damaged))
        if any(damaged):
            raise DamagedCheckpointError(
                f"the copy of step {header.step} in the memory of the hosts of the processes "
                f"{[p for p, is_bad in enumerate(damaged) if is_bad]} was changed after it was "
                "written; "
                "going back to a checkpoint"
            )
        leaves = [from_stored(values[path], leaf) for path, leaf in targets.items()]
        state = in_form_of(target, leaves)
        return HostCopy(header.step, state, dict(header.meta))

    def forget(self) -> None:
        """Deletes all copies, for example when a run goes back to an earlier state."""
        self._remove(lambda header: True)

    def _write(self, header: CopyHeader, rows: Rows, pieces: Iterator[jax.Array]) -> str:
        """Writes a file; returns the reason if it fails, else ""."""
        try:
            write_copy(self.folder, header, rows, pieces)
        except OSError as error:
            return error.strerror or str(error)
        finally:
            # The iterator sends over the mesh, so the others would wait for this process.
            collections.deque(pieces, maxlen=0)
        return ""

    def _remove(self, is_outdated: Callable[[CopyHeader], bool]) -> None:
        for header, path in headers_in(self.folder):
            # Another process of this host may have removed it already.
            if is_outdated(header):
                with contextlib.suppress(OSError):
                    path.unlink()


def _without_padding(
    leaves: Mapping[LeafPath, LeafSpec], unpadded: Mapping[LeafPath, tuple[int, ...]]
) -> dict[LeafPath, LeafSpec]:
    return {
        path: dataclasses.replace(leaf, shape=tuple(unpadded.get(path, leaf.shape)))
        for path, leaf in leaves.items()
    }


def _gathered(number: int) -> list[int]:
    """All-gathers a number; returns the numbers by process."""
    return [int(x) for x in np.ravel(multihost_utils.process_allgather(np.int32(number)))]


def _from_all(value: object) -> list[Any]:
    """All-gathers a JSON value; returns the values by process."""
    text = np.frombuffer(json.dumps(value).encode(), np.uint8)
    sizes = _gathered(text.size)
    padded = np.zeros(max(sizes), np.uint8)
    padded[: text.size] = text
    rows = np.reshape(multihost_utils.process_allgather(padded), (len(sizes), -1))
    return [json.loads(bytes(row[:size])) for row, size in zip(rows, sizes, strict=True)]


Holders: TypeAlias = Mapping[LeafPath, Mapping[Slices, int]]
"""For each place of each leaf, the first process whose host has the piece."""


def _newest_complete(
    here: Mapping[CopyId, tuple[CopyHeader, Pieces]], is_teller: bool
) -> tuple[CopyHeader, Holders] | None:
    """The newest copy that is complete over all hosts, and the holders of its pieces.

    Args:
        here: the copies in the folder of this host.
        is_teller: whether this process reports for its host.
    """
    tables = _from_all([[c, pieces.parts] for c, (_, pieces) in here.items()] if is_teller else [])
    for copy in sorted({tuple(copy) for rows in tables for copy, _ in rows}, reverse=True):
        parts: dict[int, list[Part]] = {
            teller: [
                (
                    process,
                    writers,
                    {leaf: [*map(slices_from_json, p)] for leaf, p in places.items()},
                )
                for process, writers, places in listed
            ]
            for teller, rows in enumerate(tables)
            for other, listed in rows
            if tuple(other) == copy
        }
        header_text = here[copy][0].to_json() if copy in here else None
        header = CopyHeader.from_json(broadcast_json(header_text, min(parts)))
        if is_whole([part for listed in parts.values() for part in listed], header.leaves):
            holders: dict[LeafPath, dict[Slices, int]] = {}
            for teller, listed in parts.items():
                for _, _, places in listed:
                    for leaf, place in ((x, p) for x, some in places.items() for p in some):
                        holders.setdefault(leaf, {}).setdefault(place, teller)
            return header, holders
    return None


def _missing(
    local: Pieces, leaves: Mapping[LeafPath, jax.ShapeDtypeStruct], holders: Holders
) -> set[tuple[LeafPath, Slices]]:
    """The pieces that this process needs and its host lacks."""
    missing: set[tuple[LeafPath, Slices]] = set()
    for path, leaf in leaves.items():
        indices = leaf.sharding.addressable_devices_indices_map(leaf.shape).values()
        places = {slices_of(index, leaf.shape) for index in indices if index is not None}
        for there in holders.get(path, ()):
            # Not by truth value: the overlap of a scalar is the empty tuple.
            is_needed = any(overlap(place, there) is not None for place in places)
            if is_needed and not local.has(path, there):
                missing.add((path, there))
    return missing


def _fetch(
    local: Pieces, leaves: Mapping[LeafPath, jax.ShapeDtypeStruct], holders: Holders
) -> None:
    """Fetches the pieces that this process needs and its host lacks from other hosts.

    Args:
        local: the pieces of this host; fetched ones are added.
        leaves: the stored leaves, with their target shardings.
        holders: the holders of all pieces.
    """
    missing = _missing(local, leaves, holders)
    requests = _from_all(sorted(missing))
    for path, place in sorted(
        {(path, slices_from_json(p)) for rows in requests for path, p in rows}
    ):
        is_source = process_index() == holders[path][place]
        size = size_of(place) * np.dtype(leaves[path].dtype).itemsize
        raw = local.raw(path, place) if is_source else np.zeros(size, np.uint8)
        sent = np.asarray(multihost_utils.broadcast_one_to_all(raw, is_source=is_source))
        if (path, place) in missing:
            local.add(path, place, sent)
