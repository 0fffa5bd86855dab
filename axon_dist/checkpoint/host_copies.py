"""`HostCopies`: the newest state of a run in the memory of its hosts, which outlives its processes.

The memory of a process's devices is lost when it is killed. A folder in the memory of the host,
such as `/dev/shm`, stays, so that the run goes on from there, on as many processes as there are
then, and reads nothing from a disk. The folder is lost with its host. So each host also keeps what
only the host before it has, and a run survives the loss of a host, or of several of which no two
are consecutive.
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
    as_place,
    copies_in,
    headers_in,
    is_whole,
    overlap,
    place_of,
    raw_bytes,
    size_of,
    write_copy,
)
from .layout import (
    LeafSpec,
    as_array,
    described,
    differences,
    from_main,
    from_stored,
    named_leaves,
    spec_of,
    stored_target,
    to_stored,
)

Rows: TypeAlias = list[tuple[LeafPath, Slices, np.dtype]]


@dataclasses.dataclass(frozen=True)
class HostRing:
    """The hosts of a run in the order of their processes; each keeps what the one before it has.

    Args:
        hosts: of every process, the number of its host.
    """

    hosts: tuple[int, ...]

    def peers(self, process: int) -> tuple[int, ...]:
        """The processes of the same host."""
        return tuple(p for p, host in enumerate(self.hosts) if host == self.hosts[process])

    def before(self, process: int) -> int:
        """The process in the same place of the host before."""
        order = list(dict.fromkeys(self.hosts))
        host = order[order.index(self.hosts[process]) - 1]
        return self.peers(self.hosts.index(host))[self.peers(process).index(process)]

    def spread(self, leaves: Mapping[LeafPath, Any]) -> dict[LeafPath, Any]:
        """The leaves of which a host has shards that the next host lacks.

        Args:
            leaves: arrays, or their shapes with shardings.

        Raises:
            ConfigError: when the hosts are not alike, so that one device has no other to send to.
        """
        spread = {path: leaf for path, leaf in leaves.items() if self._is_spread(leaf)}
        for path, leaf in spread.items():
            sizes = collections.Counter(device.process_index for device in leaf.sharding.device_set)
            each = [[sizes[p] for p in self.peers(p)] for p in map(self.hosts.index, {*self.hosts})]
            if len({*map(len, each)}) > 1 or len({size for row in each for size in row}) > 1:
                raise ConfigError(
                    f"the processes of the hosts have {' and '.join(map(str, sorted(each)))} "
                    f"devices, and {path} is split over hosts: what a host has of it is copied to "
                    "the next one, device by device. Start as many processes on each host, with as "
                    "many devices, or leave checkpoint.memory_every at 0"
                )
        return spread

    def local_pieces(self, leaves: Mapping[LeafPath, Array]) -> tuple[Rows, Iterator[jax.Array]]:
        """The pieces of its devices that this process writes."""
        rows: Rows = []
        pieces: list[jax.Array] = []
        for path, leaf in leaves.items():
            shards = {shard.device.id: shard.data for shard in leaf.addressable_shards}
            for place, device in self._written_by(process_index(), leaf).items():
                rows.append((path, place, np.dtype(leaf.dtype)))
                pieces.append(shards[device])
        return rows, iter(pieces)

    def pieces_before(self, leaves: Mapping[LeafPath, Array]) -> tuple[Rows, Iterator[jax.Array]]:
        """The pieces that this process writes for the one before it; every process yields all.

        Args:
            leaves: those that are spread; each is sent when its turn comes.
        """
        me = process_index()
        wanted = {}
        for path, leaf in leaves.items():
            here = _first_devices(leaf.sharding, leaf.shape, self.hosts)[self.hosts[me]]
            theirs = self._written_by(self.before(me), leaf)
            wanted[path] = {place: device for place, device in theirs.items() if place not in here}
        places = [(path, place) for path, some in wanted.items() for place in some]

        def pieces() -> Iterator[jax.Array]:
            for path, leaf in leaves.items():
                got = self._sent(leaf)
                yield from (got[device] for device in wanted[path].values())

        return [(path, place, np.dtype(leaves[path].dtype)) for path, place in places], pieces()

    def _sent(self, leaf: Array) -> dict[int, jax.Array]:
        """The shards of a leaf on the devices of the process before, as bytes, by device number."""
        devices = sorted(leaf.sharding.device_set, key=lambda x: (x.process_index, x.id))
        each = len(devices) // len(self.hosts)
        sources = [self.before(n // each) * each + n % each for n in range(len(devices))]
        send, split = _sender(tuple(devices), tuple(sources))
        # As bytes, for not every backend sends every dtype, nor from every kind of memory.
        rows = [jax.device_put(raw_bytes(x.data)[None], x.device) for x in leaf.addressable_shards]
        shape = (len(devices), *rows[0].shape[1:])
        got = send(jax.make_array_from_single_device_arrays(shape, split, rows))
        shards = got.addressable_shards
        return {devices[sources[shard.index[0].start or 0]].id: shard.data for shard in shards}

    def _is_spread(self, leaf: Any) -> bool:
        if leaf.sharding.is_fully_addressable:
            # Every process has another one.
            return False
        places = _first_devices(leaf.sharding, leaf.shape, self.hosts)
        order = list(dict.fromkeys(self.hosts))
        return any(places[order[n - 1]].keys() - places[order[n]].keys() for n in range(len(order)))

    def _written_by(self, process: int, leaf: Array) -> dict[Slices, int]:
        """The pieces of a host that a process of it writes, with the number of a device of it."""
        places = _first_devices(leaf.sharding, leaf.shape, self.hosts)[self.hosts[process]]
        return {place: device for place, (owner, device) in places.items() if owner == process}


@functools.lru_cache(maxsize=1024)
def _first_devices(
    sharding: Sharding, shape: tuple[int, ...], hosts: tuple[int, ...]
) -> dict[int, dict[Slices, tuple[int, int]]]:
    """The shards of an array on each host, and the first process and device there that has it."""
    firsts: dict[int, dict[Slices, tuple[int, int]]] = {host: {} for host in hosts}
    for device, index in sharding.devices_indices_map(shape).items():
        process = int(device.process_index)
        places, place = firsts[hosts[process]], place_of(index, shape)
        places[place] = min((process, int(device.id)), places.get(place, (process, int(device.id))))
    return firsts


@functools.lru_cache(maxsize=4)
def _sender(
    devices: tuple[Hashable, ...], sources: tuple[int, ...]
) -> tuple[Callable[[jax.Array], jax.Array], NamedSharding]:
    """A program that gives each device the row of another, and how rows are split."""
    mesh, rows = Mesh(np.array(devices), ("device",)), PartitionSpec("device")
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
        meta: what was saved with it.
    """

    step: int
    state: PyTree
    meta: Mapping[str, Any]


class HostCopies:
    """The newest state that the processes of a run have left in the memory of their hosts.

    Each distinct shard is written once a host, by the first process there that holds it. So a host
    has the shards of its devices: the whole state under `ddp`, and where every host has a replica.
    Of leaves that are split over hosts each also gets, over the mesh, the shards of the host before
    it, in the order of the processes, the last being before the first. The state survives the loss
    of any process, and of any host whose next one stays; a new host gets its shards from the
    others.

    Args:
        folder: in the memory of this host; the same for all of its processes.
        tell: called with a sentence when a copy could not be made; the run goes on.

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
        # Of processes that were killed while they wrote; none writes before all have come here.
        remove_abandoned(folder, 0.0)
        location = f"{socket.gethostname()} {folder.resolve()}"
        self._ring = HostRing(tuple(_gathered(zlib.crc32(location.encode()) >> 1)))
        # Steps are counted again after a loss: files of before must not be mixed with later ones.
        self._generation: str = from_main(secrets.token_hex(8))
        self._turn = 0

    def check(self, target: PyTree) -> None:
        """Raises `ConfigError` where a run could not survive the loss of a host.

        Args:
            target: as for `load_checkpoint`.
        """
        leaves = {path: described(path, leaf) for path, leaf in named_leaves(target).items()}
        self._ring.spread({path: stored_target(leaf) for path, leaf in leaves.items()})

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
        stored = {path: to_stored(leaf) for path, leaf in leaves.items()}
        me, ring, self._turn = process_index(), self._ring, self._turn + 1
        header = CopyHeader(
            step=step,
            generation=self._generation,
            turn=self._turn,
            process=me,
            writers=ring.peers(me),
            leaves={path: spec_of(leaf) for path, leaf in leaves.items()},
            meta=dict(meta),
            unpadded=paddings_in(state),
        )
        reason = self._write(header, *ring.local_pieces(stored))
        spread = ring.spread(stored)
        if spread:
            other = ring.before(me)
            theirs = dataclasses.replace(header, process=other, writers=ring.peers(other))
            reason = self._write(theirs, *ring.pieces_before(spread)) or reason
        # Only a copy that all have written takes the place of the one before it.
        if failed := [p for p, has_failed in enumerate(_gathered(bool(reason))) if has_failed]:
            local = {me, ring.before(me)} if spread else {me}
            self._remove(lambda stale: stale.process in local and stale.copy == header.copy)
            self.tell(
                f"no copy of step {step}: processes {failed} could not write theirs"
                f"{f' to {str(self.folder)!r}: {reason}' if reason else ''}; the one before it "
                "stays. Make room there, or copy less often"
            )
            return
        self._remove(lambda stale: stale.copy != header.copy)

    def newest(self, target: PyTree) -> HostCopy | None:
        """Restores the newest copy that is complete over all hosts; every process calls this.

        Args:
            target: as for `load_checkpoint`.

        Returns:
            The copy, on the mesh of the target; None where the hosts have no complete one, or
            where its leaves are padded for another number of devices: only a checkpoint has them
            without padding.

        Raises:
            CheckpointError: when the copy belongs to another model or optimizer.
            DamagedCheckpointError: on all processes, when a piece is not what was written.
        """
        here = copies_in(self.folder)
        me = process_index()
        newest = _newest_complete(here, is_teller=self._ring.peers(me)[0] == me)
        if newest is None:
            return None
        header, holders = newest
        local = here.get(header.copy, (None, Pieces({})))[1]
        targets = {path: described(path, leaf) for path, leaf in named_leaves(target).items()}
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
                f"{first_few(unlike, between='; ')}; start the run anew, with the model it "
                "was made from"
            )
        stored = {path: stored_target(leaf) for path, leaf in targets.items()}
        _fetch(local, stored, holders)

        def read(path: LeafPath, leaf: jax.ShapeDtypeStruct) -> Array:
            def take(index):
                place = place_of(index, leaf.shape)
                return local.read(path, leaf.dtype, place, holders.get(path, ()))

            return jax.make_array_from_callback(leaf.shape, leaf.sharding, take)

        values = {path: read(path, leaf) for path, leaf in stored.items()}
        damaged = _gathered(bool(local.damaged))
        if any(damaged):
            raise DamagedCheckpointError(
                f"the copy of step {header.step} in the memory of the hosts of the processes "
                f"{[p for p, is_bad in enumerate(damaged) if is_bad]} is not what was written; "
                "going back to a checkpoint"
            )
        leaves = [from_stored(values[path], leaf) for path, leaf in targets.items()]
        state = jax.tree.unflatten(jax.tree.structure(target), leaves)
        return HostCopy(header.step, state, dict(header.meta))

    def forget(self) -> None:
        """Deletes all copies, as when a run goes back to an earlier state."""
        self._remove(lambda header: True)

    def _write(self, header: CopyHeader, rows: Rows, pieces: Iterator[jax.Array]) -> str:
        """Writes a file; returns why it could not."""
        try:
            write_copy(self.folder, header, rows, pieces)
        except OSError as error:
            return error.strerror or str(error)
        finally:
            # The others wait for what this process sends.
            collections.deque(pieces, maxlen=0)
        return ""

    def _remove(self, is_outdated: Callable[[CopyHeader], bool]) -> None:
        for header, path in headers_in(self.folder):
            # Another process of this host may have removed it, too.
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
    """A number of every process, by process."""
    return [int(x) for x in np.ravel(multihost_utils.process_allgather(np.int32(number)))]


def _from_all(value: object) -> list[Any]:
    """A value that JSON holds, of every process."""
    text = np.frombuffer(json.dumps(value).encode(), np.uint8)
    sizes = _gathered(text.size)
    padded = np.zeros(max(sizes), np.uint8)
    padded[: text.size] = text
    rows = np.reshape(multihost_utils.process_allgather(padded), (len(sizes), -1))
    return [json.loads(bytes(row[:size])) for row, size in zip(rows, sizes, strict=True)]


Holders: TypeAlias = Mapping[LeafPath, Mapping[Slices, int]]
"""For each place of each leaf the first process whose host has the piece."""


def _newest_complete(
    here: Mapping[CopyId, tuple[CopyHeader, Pieces]], is_teller: bool
) -> tuple[CopyHeader, Holders] | None:
    """The newest copy that is complete over the folders of all hosts, and who has which piece.

    Args:
        here: what the folder of this host has.
        is_teller: whether this process reports for its host.
    """
    tables = _from_all([[c, pieces.parts] for c, (_, pieces) in here.items()] if is_teller else [])
    for copy in sorted({tuple(copy) for rows in tables for copy, _ in rows}, reverse=True):
        parts: dict[int, list[Part]] = {
            teller: [
                (process, writers, {leaf: [*map(as_place, p)] for leaf, p in places.items()})
                for process, writers, places in listed
            ]
            for teller, rows in enumerate(tables)
            for other, listed in rows
            if tuple(other) == copy
        }
        header_text = here[copy][0].to_json() if copy in here else None
        header = CopyHeader.from_json(from_main(header_text, min(parts)))
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
        places = {place_of(index, leaf.shape) for index in indices if index is not None}
        for there in holders.get(path, ()):
            # A scalar has one place, which is the empty tuple.
            is_needed = any(overlap(place, there) is not None for place in places)
            if is_needed and not local.has(path, there):
                missing.add((path, there))
    return missing


def _fetch(
    local: Pieces, leaves: Mapping[LeafPath, jax.ShapeDtypeStruct], holders: Holders
) -> None:
    """Gets what this process needs and its host lacks from hosts that have it.

    Args:
        local: what this host has; gets the rest.
        leaves: what is stored of each, with the sharding that it is to get.
        holders: who has which piece.
    """
    missing = _missing(local, leaves, holders)
    requests = _from_all(sorted(missing))
    for path, place in sorted({(path, as_place(p)) for rows in requests for path, p in rows}):
        is_source = process_index() == holders[path][place]
        size = size_of(place) * np.dtype(leaves[path].dtype).itemsize
        raw = local.raw(path, place) if is_source else np.zeros(size, np.uint8)
        sent = np.asarray(multihost_utils.broadcast_one_to_all(raw, is_source=is_source))
        if (path, place) in missing:
            local.add(path, place, sent)
