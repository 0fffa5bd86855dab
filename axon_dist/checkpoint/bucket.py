"""A checkpoint in a bucket, where nothing is renamed: it counts as soon as its marker is written.

step_00000012/
    COMMITTED, manifest.json    as on a disk
    zarr/params/w/.zarray       of every leaf: dtype, shape, and how it is cut
    zarr/params/w/0.1           a piece of it, little-endian and row-major, as zarr 2 has it
    zarr/.3.json                while it is written: what process 3 wrote, with checksums
    manifest.2.json, zarr.2/    in place of the manifest and the values, where a save replaced these

A save that replaces a checkpoint writes its manifest and its values under the names of `SLOTS` that
the older one does not have. The marker is one object, which a store replaces whole or not at all,
and holds the checksum of the manifest that counts. So the older checkpoint can be read until the
marker is that of the newer one; then its objects are removed.

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


def slot_of(folder: Address, marker: bytes) -> tuple[int, bytes] | None:
    """The manifest that a marker belongs to.

    Args:
        folder: of the checkpoint.
        marker: the contents of its marker.

    Returns:
        The number of the slot and the manifest in it; None where the marker fits to none, as when
        one of them was changed.
    """
    for number, (manifest, _) in enumerate(SLOTS):
        text = (folder / manifest).read()
        if text is not None and marker_of(text) == marker:
            return number, text
    return None


def prepare(folder: Address) -> int:
    """Removes what killed saves left at the address, and everything if no checkpoint is there.

    Returns:
        The slot that a save writes to; a checkpoint that can be read stays in the other one.
    """
    found = _found(folder)
    if found is None:
        clear(folder)
        return 0
    remove_slot(folder, 1 - found)
    return 1 - found


def tidy(folder: Address) -> None:
    """Removes what a killed save, of this checkpoint or in its place, has left there."""
    found = _found(folder)
    if found is not None:
        remove_slot(folder, 1 - found)


def remove_slot(folder: Address, slot: int) -> None:
    """Removes the manifest and the values in a slot of a checkpoint."""
    names = folder.names()
    folder.remove([name for name in names if name.split("/")[0] in SLOTS[slot]])


def _found(folder: Address) -> int | None:
    """The slot of the checkpoint in a folder; None where none can be read."""
    marker = (folder / MARKER).read()
    found = None if marker is None else slot_of(folder, marker)
    return None if found is None else found[0]


def begin(folder: Address, slot: int, leaves: Mapping[LeafPath, Array]) -> Callable[[], None]:
    """Copies the pieces of this process to host memory.

    Args:
        folder: of the checkpoint.
        slot: the number of the names in `SLOTS`.
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
        mine = {**headers, **pieces} if is_main() else pieces
        with concurrent.futures.ThreadPoolExecutor(16) as pool:
            records = dict(pool.map(written, mine.items()))
        if is_writer:
            _record_of(folder / inside, process_index()).write(json.dumps(records).encode())

    return write


def writers(leaves: Mapping[LeafPath, Array]) -> frozenset[int]:
    """The processes that write a part of a state: those of its devices, and the main one."""
    devices = {device for leaf in leaves.values() for device in leaf.sharding.device_set}
    return frozenset({0, *(device.process_index for device in devices)})


def commit(folder: Address, slot: int, manifest: Manifest, processes: frozenset[int]) -> None:
    """Writes the manifest and the marker of a checkpoint as soon as every process has written.

    Then it removes the checkpoint that it replaces. If the store refuses that, the objects stay
    until the next save, and nothing reads them.

    Args:
        folder: of the checkpoint.
        slot: the number of the names in `SLOTS`.
        manifest: without files.
        processes: that write.

    Raises:
        CheckpointError: when a process does not write, or an object that it wrote is gone.
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
            "was being saved; see to it that nothing else writes there"
        )
    named = {name: FileRecord(*files[name]) for name in sorted(files)}
    text = dataclasses.replace(manifest, files=named).to_json().encode()
    (folder / manifest_name).write(text)
    (folder / MARKER).write(marker_of(text))
    with contextlib.suppress(StoreError):
        remove_slot(folder, 1 - slot)


def is_from_bucket(manifest: Manifest) -> bool:
    """Whether a checkpoint has its values as `begin` writes them, also in a copy on a disk."""
    folders = {inside for _, inside in SLOTS}
    return any(name.split("/")[0] in folders for name in manifest.files)


def restore(
    folder: Place, manifest: Manifest, targets: Mapping[LeafPath, jax.ShapeDtypeStruct]
) -> dict[LeafPath, Array]:
    """Reads the slices that the shards of this process need; also from a copy on a disk."""
    inside = next(iter(manifest.files)).split("/")[0]
    reads = (
        (path, target, _reads(folder, inside, path, target)) for path, target in targets.items()
    )
    ahead, restored = list(itertools.islice(reads, _AHEAD)), {}
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
    """The reads of a leaf that are in flight, by slice."""
    store = folder.spec if isinstance(folder, Address) else {"driver": "file"}
    root = folder.key if isinstance(folder, Address) else folder
    spec = {"driver": "zarr", "kvstore": {**store, "path": f"{root}/{inside}/{path}/"}}
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


def _pieces(inside: str, path: LeafPath, leaf: Array) -> Iterator[tuple[str, np.ndarray]]:
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
            yield f"{inside}/{path}/{'.'.join(map(str, place)) or '0'}", values[cut]


def _piece_shape(leaf: Array) -> tuple[int, ...]:
    """The shape of a piece: a shard, or a part that divides it, so that one process writes it."""
    shape = list(leaf.sharding.shard_shape(leaf.shape))
    while math.prod(shape) * leaf.dtype.itemsize > _PIECE:
        dim = shape.index(max(shape))
        shape[dim] //= next(k for k in range(2, shape[dim] + 1) if shape[dim] % k == 0)
    return tuple(shape)


def _record_of(values: Address, process: int) -> Address:
    return values / f".{process}.json"


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
