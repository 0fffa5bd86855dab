"""A checkpoint in a bucket, where nothing is renamed: its marker is written last and removed first.

step_00000012/
    COMMITTED, manifest.json    as on a disk
    zarr/params/w/.zarray       of every leaf: dtype, shape, and how it is cut
    zarr/params/w/0.1           a piece of it, little-endian and row-major, as zarr 2 has it
    zarr/.3.json                while it is written: what process 3 wrote, with checksums

Every process writes the pieces that it owns, from copies in host memory, and reads the slices that
its shards need, through tensorstore.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import itertools
import json
import math
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np
import tensorstore as ts

from ..core.errors import CheckpointError, DamagedCheckpointError
from ..core.files import Address, Place
from ..core.typing import Array
from ..core.typing import Path as LeafPath
from ..core.words import first_few
from ..mesh import process_index
from .layout import MANIFEST, MARKER, ZARR, FileRecord, Manifest, is_main, marker_of

_PIECE = 2**26
"""Bytes above which a shard is cut, so that repeating a failed request costs little."""

_AHEAD = 16
"""Leaves that are being read while one is copied to its devices."""

_PATIENCE = 3600.0
"""Seconds for which process 0 waits for the pieces of the others."""


def clear(folder: Address) -> None:
    """Removes a checkpoint, whole or in part: the marker first, so that no half of it is read."""
    names = folder.names()
    folder.remove([name for name in names if name == MARKER])
    folder.remove([name for name in names if name != MARKER])


def begin(folder: Address, leaves: Mapping[LeafPath, Array]) -> Callable[[], None]:
    """Copies the pieces of this process to host memory; returns a function that writes them."""
    leaves = {path: leaf for path, leaf in leaves.items() if leaf.size}
    headers = {f"{ZARR}/{path}/.zarray": _header(leaf) for path, leaf in leaves.items()}
    is_writer = process_index() in writers(leaves)
    pieces = dict(itertools.chain.from_iterable(_pieces(path, x) for path, x in leaves.items()))

    def written(item: tuple[str, np.ndarray | bytes]) -> tuple[str, tuple[int, int]]:
        name, piece = item
        contents = piece if isinstance(piece, bytes) else piece.tobytes()
        (folder / name).write(contents)
        return name, (len(contents), zlib.crc32(contents))

    def write() -> None:
        mine = {**headers, **pieces} if is_main() else pieces
        with concurrent.futures.ThreadPoolExecutor(16) as pool:
            records = dict(pool.map(written, mine.items()))
        if is_writer:
            _record_of(folder, process_index()).write(json.dumps(records).encode())

    return write


def writers(leaves: Mapping[LeafPath, Array]) -> frozenset[int]:
    """The processes that write a part of a state: those of its devices, and the main one."""
    devices = {device for leaf in leaves.values() for device in leaf.sharding.device_set}
    return frozenset({0, *(device.process_index for device in devices)})


def commit(folder: Address, manifest: Manifest, processes: frozenset[int]) -> None:
    """Writes the manifest and the marker of a checkpoint as soon as every process has written.

    Args:
        folder: of the checkpoint.
        manifest: without files.
        processes: that write.

    Raises:
        CheckpointError: when a process does not write, or an object that it wrote is gone.
    """
    records = [_record_of(folder, process) for process in sorted(processes)]
    files = {}
    for record in records:
        files |= json.loads(_awaited(record))
    folder.remove([f"{ZARR}/{record.name}" for record in records])
    if lost := sorted(files.keys() - set(folder.names())):
        raise CheckpointError(
            f"could not save checkpoint {str(folder)!r}: {first_few(lost)} was removed while it "
            "was being saved; see to it that nothing else writes there"
        )
    named = {name: FileRecord(*files[name]) for name in sorted(files)}
    text = dataclasses.replace(manifest, files=named).to_json().encode()
    (folder / MANIFEST).write(text)
    (folder / MARKER).write(marker_of(text))


def restore(
    folder: Place, targets: Mapping[LeafPath, jax.ShapeDtypeStruct]
) -> dict[LeafPath, Array]:
    """Reads the slices that the shards of this process need; also from a copy on a disk."""
    reads = ((path, target, _reads(folder, path, target)) for path, target in targets.items())
    ahead, restored = list(itertools.islice(reads, _AHEAD)), {}
    while ahead:
        path, target, slices = ahead.pop(0)
        ahead += itertools.islice(reads, 1)
        values = {text: _done(folder, path, future) for text, future in slices.items()}
        restored[path] = jax.make_array_from_callback(
            target.shape, target.sharding, lambda index, values=values: values[str(index)]
        )
    return restored


def _reads(folder: Place, path: LeafPath, target: jax.ShapeDtypeStruct) -> dict[str, Any]:
    """The reads of a leaf that are in flight, by slice."""
    store = folder.spec if isinstance(folder, Address) else {"driver": "file"}
    inside = f"{folder.key if isinstance(folder, Address) else folder}/{ZARR}/{path}/"
    spec = {"driver": "zarr", "kvstore": {**store, "path": inside}}
    spec["fill_missing_data_reads"] = False
    leaf = ts.array(np.zeros(target.shape, target.dtype))
    if target.size:
        leaf = _done(folder, path, ts.open(spec, open=True, read=True))
    indices = target.sharding.addressable_devices_indices_map(target.shape).values()
    return {text: leaf[index].read() for text, index in {str(i): i for i in indices}.items()}


_NO_ANSWER = ("UNAVAILABLE", "ABORTED", "DEADLINE", "EXHAUSTED", "PERMISSION", "UNAUTH", "INTERNAL")


def _done(folder: Place, path: LeafPath, future: Any) -> Any:
    """The values read of a leaf; where damage is not certain, no older checkpoint is taken."""
    try:
        return future.result()
    except ValueError as error:
        if isinstance(folder, Address) and any(word in str(error) for word in _NO_ANSWER):
            raise folder.refused(error) from error
        reason = str(error).partition(" [")[0].splitlines()[0]
        raise DamagedCheckpointError(
            f"checkpoint {str(folder)!r}: leaf {path} cannot be read ({reason}); use another one"
        ) from error


def _header(leaf: Array) -> bytes:
    """The metadata of an array, as zarr has it."""
    dtype = np.dtype(leaf.dtype)
    ts.dtype(dtype)  # It raises for what cannot be read again.
    header = {"zarr_format": 2, "shape": leaf.shape, "chunks": _piece_shape(leaf), "order": "C"}
    header |= {"dtype": dtype.str if dtype.isbuiltin == 1 else dtype.name}
    return json.dumps(header | dict.fromkeys(("compressor", "fill_value", "filters"))).encode()


def _pieces(path: LeafPath, leaf: Array) -> Iterator[tuple[str, np.ndarray]]:
    """The pieces of a leaf that this process owns, by name."""
    shape = _piece_shape(leaf)
    for shard in leaf.addressable_shards:
        if shard.replica_id != 0:
            continue
        # A copy: on a CPU the array of numpy would share memory with one that is donated.
        values = np.array(shard.data)
        first = [index.start or 0 for index in shard.index]
        steps = [range(0, *pair) for pair in zip(values.shape, shape, strict=True)]
        for corner in itertools.product(*steps):
            place = [(a + b) // size for a, b, size in zip(first, corner, shape, strict=True)]
            cut = tuple(slice(a, a + size) for a, size in zip(corner, shape, strict=True))
            yield f"{ZARR}/{path}/{'.'.join(map(str, place)) or '0'}", values[cut]


def _piece_shape(leaf: Array) -> tuple[int, ...]:
    """The shape of a piece: a shard, or a part that divides it, so that one process writes it."""
    shape = list(leaf.sharding.shard_shape(leaf.shape))
    while math.prod(shape) * leaf.dtype.itemsize > _PIECE:
        dim = shape.index(max(shape))
        shape[dim] //= next(k for k in range(2, shape[dim] + 1) if shape[dim] % k == 0)
    return tuple(shape)


def _record_of(folder: Address, process: int) -> Address:
    return folder / ZARR / f".{process}.json"


def _awaited(record: Address) -> bytes:
    """The contents of an object that another process is going to write."""
    end, pause = time.monotonic() + _PATIENCE, 0.05
    while (contents := record.read()) is None:
        if time.monotonic() > end:
            raise CheckpointError(
                f"could not save a checkpoint: {str(record)!r} did not come in {_PATIENCE:g} s; "
                "see what the other processes say"
            )
        time.sleep(pause)
        pause = min(2 * pause, 5.0)
    return contents
