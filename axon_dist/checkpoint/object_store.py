"""Checkpoints in a bucket, which cannot rename: one is valid as soon as its marker is written.

step_00000012/
    COMMITTED, manifest.json    as on a disk
    zarr/params/w/.zarray       for every leaf: dtype, shape, and chunk shape
    zarr/params/w/0.1           a chunk of it, little-endian and row-major, as in zarr 2
    zarr/.3.json                during a save: the list of objects by process 3, with checksums
    manifest.2.json, zarr.2/    instead of manifest and values, after a save replaced these

A save that replaces a checkpoint writes its manifest and values under the names in `SLOTS` that the
old one does not use. The marker is one object, which a store replaces atomically. It holds the
checksum of the valid manifest. So the old checkpoint can be read until the marker is replaced; then
its objects are removed.

Every process writes the pieces that it owns, from copies in host memory, and reads the slices that
its shards need, through tensorstore.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
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

from ..core.errors import CheckpointError, DamagedCheckpointError, StoreError
from ..core.files import Address, Place
from ..core.typing import Array
from ..core.typing import Path as LeafPath
from ..core.words import first_few
from ..mesh import process_index
from .layout import MARKER, SLOTS, FileRecord, Manifest, is_main, marker_of

_PIECE = 2**26
"""Larger shards are cut into pieces of at most this many bytes, so that retries cost little."""

_AHEAD = 16
"""How many leaves are read ahead while one is copied to its devices."""

_PATIENCE = 3600.0
"""Seconds that process 0 waits for the pieces of the others."""


def clear(folder: Address) -> None:
    """Removes a checkpoint, or a part of one; the marker first, so no partial one is ever read."""
    names = folder.names()
    folder.remove([name for name in names if name == MARKER])
    folder.remove([name for name in names if name != MARKER])


def slot_of(folder: Address, marker: bytes) -> tuple[int, bytes] | None:
    """Finds the manifest that a marker belongs to.

    Args:
        folder: the folder of the checkpoint.
        marker: the contents of its marker.

    Returns:
        The index of the slot and its manifest; None if the marker matches no manifest, for example
        because one of them was changed.
    """
    for number, (manifest, _) in enumerate(SLOTS):
        text = (folder / manifest).read()
        if text is not None and marker_of(text) == marker:
            return number, text
    return None


def prepare(folder: Address) -> int:
    """Removes leftovers of killed saves, and everything if there is no valid checkpoint.

    Returns:
        The slot to write to; a valid checkpoint stays in the other one.
    """
    found = _found(folder)
    if found is None:
        clear(folder)
        return 0
    remove_slot(folder, 1 - found)
    return 1 - found


def tidy(folder: Address) -> None:
    """Removes leftovers of a killed save from the other slot of a valid checkpoint."""
    found = _found(folder)
    if found is not None:
        remove_slot(folder, 1 - found)


def remove_slot(folder: Address, slot: int) -> None:
    """Removes the manifest and the values in a slot of a checkpoint."""
    names = folder.names()
    folder.remove([name for name in names if name.split("/")[0] in SLOTS[slot]])


def _found(folder: Address) -> int | None:
    """The slot of the valid checkpoint in a folder, or None."""
    marker = (folder / MARKER).read()
    found = None if marker is None else slot_of(folder, marker)
    return None if found is None else found[0]


def begin(folder: Address, slot: int, leaves: Mapping[LeafPath, Array]) -> Callable[[], None]:
    """Copies the pieces of this process to host memory.

    Args:
        folder: the folder of the checkpoint.
        slot: the index in `SLOTS`.
        leaves: the arrays.

    Returns:
        A function that writes the pieces.
    """
    _, inside = SLOTS[slot]
    leaves = {path: leaf for path, leaf in leaves.items() if leaf.size}
    headers = {f"{inside}/{path}/.zarray": _header(leaf) for path, leaf in leaves.items()}
    is_writer = process_index() in writers(leaves)
    cut = (_pieces(inside, path, leaf) for path, leaf in leaves.items())
    pieces = dict(itertools.chain.from_iterable(cut))

    def written(item: tuple[str, np.ndarray | bytes]) -> tuple[str, tuple[int, int]]:
        name, piece = item
        contents = piece if isinstance(piece, bytes) else piece.tobytes()
        (folder / name).write(contents)
        return name, (len(contents), zlib.crc32(contents))

    def write() -> None:
        objects = {**headers, **pieces} if is_main() else pieces
        with concurrent.futures.ThreadPoolExecutor(16) as pool:
            records = dict(pool.map(written, objects.items()))
        if is_writer:
            _record_of(folder / inside, process_index()).write(json.dumps(records).encode())

    return write


def writers(leaves: Mapping[LeafPath, Array]) -> frozenset[int]:
    """The processes that write a part of a state: those with its devices, and the main one."""
    devices = {device for leaf in leaves.values() for device in leaf.sharding.device_set}
    return frozenset({0, *(device.process_index for device in devices)})


def commit(folder: Address, slot: int, manifest: Manifest, processes: frozenset[int]) -> None:
    """Writes the manifest and the marker of a checkpoint once every process has written.

    Then it removes the replaced checkpoint. If the store refuses that, the objects stay until the
    next save, and nothing reads them.

    Args:
        folder: the folder of the checkpoint.
        slot: the index in `SLOTS`.
        manifest: the manifest, still without files.
        processes: the processes that write.

    Raises:
        CheckpointError: if a process does not write, or an object that it wrote is gone.
    """
    manifest_name, inside = SLOTS[slot]
    records = [_record_of(folder / inside, process) for process in sorted(processes)]
    files = {}
    for record in records:
        files |= json.loads(_awaited(record))
    folder.remove([f"{inside}/{record.name}" for record in records])
    if lost := sorted(files.keys() - set(folder.names())):
        raise CheckpointError(
            f"could not save checkpoint {str(folder)!r}: {first_few(lost)} was removed while it "
            "was being saved; make sure that nothing else writes there"
        )
    named = {name: FileRecord(*files[name]) for name in sorted(files)}
    text = dataclasses.replace(manifest, files=named).to_json().encode()
    (folder / manifest_name).write(text)
    (folder / MARKER).write(marker_of(text))
    with contextlib.suppress(StoreError):
        remove_slot(folder, 1 - slot)


def is_from_bucket(manifest: Manifest) -> bool:
    """Whether a checkpoint has the layout of `begin`; also true of its copy on a disk."""
    folders = {inside for _, inside in SLOTS}
    return any(name.split("/")[0] in folders for name in manifest.files)


def restore(
    folder: Place, manifest: Manifest, targets: Mapping[LeafPath, jax.ShapeDtypeStruct]
) -> dict[LeafPath, Array]:
    """Reads the slices for the shards of this process; also from a copy on a disk."""
    inside = next(iter(manifest.files)).split("/")[0]
    reads = (
        (path, target, _reads(folder, inside, path, target)) for path, target in targets.items()
    )
    ahead = list(itertools.islice(reads, _AHEAD))
    restored = {}
    while ahead:
        path, target, slices = ahead.pop(0)
        ahead += itertools.islice(reads, 1)
        values = {text: _done(folder, path, future) for text, future in slices.items()}
        restored[path] = jax.make_array_from_callback(
            target.shape, target.sharding, lambda index, values=values: values[str(index)]
        )
    return restored


def _reads(
    folder: Place, inside: str, path: LeafPath, target: jax.ShapeDtypeStruct
) -> dict[str, Any]:
    """Starts the reads of a leaf; returns their futures by slice."""
    store = folder.spec if isinstance(folder, Address) else {"driver": "file"}
    root = folder.key if isinstance(folder, Address) else folder
    spec = {
        "driver": "zarr",
        "kvstore": {**store, "path": f"{root}/{inside}/{path}/"},
        "fill_missing_data_reads": False,
    }
    leaf = ts.array(np.zeros(target.shape, target.dtype))
    if target.size:
        leaf = _done(folder, path, ts.open(spec, open=True, read=True))
    indices = target.sharding.addressable_devices_indices_map(target.shape).values()
    return {text: leaf[index].read() for text, index in {str(i): i for i in indices}.items()}


_NO_ANSWER = ("UNAVAILABLE", "ABORTED", "DEADLINE", "EXHAUSTED", "PERMISSION", "UNAUTH", "INTERNAL")


def _done(folder: Place, path: LeafPath, future: Any) -> Any:
    """Waits for a read of a leaf.

    Errors that may be temporary are not reported as damage, so that no older checkpoint is used.
    """
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
    """The zarr metadata of an array."""
    dtype = np.dtype(leaf.dtype)
    header = {"zarr_format": 2, "shape": leaf.shape, "chunks": _piece_shape(leaf), "order": "C"}
    header |= {"dtype": dtype.str if dtype.isbuiltin == 1 else dtype.name}
    return json.dumps(header | dict.fromkeys(("compressor", "fill_value", "filters"))).encode()


def _pieces(inside: str, path: LeafPath, leaf: Array) -> Iterator[tuple[str, np.ndarray]]:
    """Yields the pieces of a leaf that this process owns, with their names."""
    shape = _piece_shape(leaf)
    for shard in leaf.addressable_shards:
        if shard.replica_id != 0:
            continue
        # Copies: on CPU the numpy array would share memory with an array that may be donated.
        values = np.array(shard.data)
        first = [index.start or 0 for index in shard.index]
        steps = [range(0, *pair) for pair in zip(values.shape, shape, strict=True)]
        for corner in itertools.product(*steps):
            place = [(a + b) // size for a, b, size in zip(first, corner, shape, strict=True)]
            cut = tuple(slice(a, a + size) for a, size in zip(corner, shape, strict=True))
            yield f"{inside}/{path}/{'.'.join(map(str, place)) or '0'}", values[cut]


def _piece_shape(leaf: Array) -> tuple[int, ...]:
    """The shape of a piece: a shard or an even part of it, so each piece has one writer."""
    shape = list(leaf.sharding.shard_shape(leaf.shape))
    while math.prod(shape) * leaf.dtype.itemsize > _PIECE:
        dim = shape.index(max(shape))
        shape[dim] //= next(k for k in range(2, shape[dim] + 1) if shape[dim] % k == 0)
    return tuple(shape)


def _record_of(values: Address, process: int) -> Address:
    return values / f".{process}.json"


def _awaited(record: Address) -> bytes:
    """Waits for an object that another process writes, and returns its contents."""
    end = time.monotonic() + _PATIENCE
    pause = 0.05
    while (contents := record.read()) is None:
        if time.monotonic() > end:
            raise CheckpointError(
                f"could not save a checkpoint: {str(record)!r} was not written within "
                f"{_PATIENCE:g} s; see the output of the other processes"
            )
        time.sleep(pause)
        pause = min(2 * pause, 5.0)
    return contents
