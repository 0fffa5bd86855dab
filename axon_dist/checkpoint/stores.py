"""Stores values in files by Orbax or as safetensors; a new store is a row of `STORES`.

    8 bytes      N, the length of the header, little-endian
    N bytes      {"name": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}, ...}
    the rest     the values, row-major, without gaps

The safetensors writer here takes one array at a time, while the official library needs all of them
at once. Source: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import json
import logging
import math
import os
import struct
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts
from jax.experimental import multihost_utils

from ..core.compat import (
    SharedStore,
    array_metadata_store,
    end_failed_saves,
    process_id,
    stop_leaks_of_saves,
)
from ..core.errors import MALFORMED, CheckpointError, UnsupportedError, reworded
from ..core.files import as_path, kind_at, open_regular, remove_abandoned, replacing
from ..core.own_context import in_own_context
from ..core.typing import Array, JsonDict, PyTree
from ..core.typing import Path as LeafPath
from .layout import (
    ARRAYS,
    StateDictType,
    as_array,
    is_main,
    named_leaves,
    on_main,
    to_stored,
    without_padding,
)

_METADATA = "__metadata__"
_ALIGNMENT = 8
_MOST_HEADER = 100_000_000
"""The largest header that the format allows, in bytes."""
_DTYPES: dict[str, Any] = {
    "BOOL": np.bool_,
    "U8": np.uint8,
    "I8": np.int8,
    "U16": np.uint16,
    "I16": np.int16,
    "F16": np.float16,
    "BF16": jnp.bfloat16,
    "U32": np.uint32,
    "I32": np.int32,
    "F32": np.float32,
    "U64": np.uint64,
    "I64": np.int64,
    "F64": np.float64,
    "F8_E4M3": jnp.float8_e4m3fn,
    "F8_E5M2": jnp.float8_e5m2,
}
_NAMES = {np.dtype(dtype): name for name, dtype in _DTYPES.items()}


def plan_order(leaves: Mapping[str, Any]) -> list[str]:
    """The order of arrays for `write_tensors`: wide elements first.

    Each array then starts at a multiple of its element size.

    Args:
        leaves: anything with a dtype, by name.

    Raises:
        UnsupportedError: for a dtype that safetensors does not support.
    """
    for name, leaf in leaves.items():
        if np.dtype(leaf.dtype) not in _NAMES:
            raise UnsupportedError(
                f"{name} is {leaf.dtype}, for which safetensors has no name; its names are "
                f"{', '.join(_DTYPES)}. Convert it; a checkpoint of a state can keep most other "
                "dtypes, saved as StateDictType.SHARDED"
            )
    return sorted(leaves, key=lambda name: -np.dtype(leaves[name].dtype).itemsize)


def write_tensors(
    path: Path,
    specs: Mapping[str, Any],
    arrays: Iterable[np.ndarray],
    metadata: Mapping[str, str] | None = None,
    *,
    durable: bool = True,
) -> None:
    """Writes a safetensors file atomically, one array at a time.

    Args:
        path: the path of the file.
        specs: dtype and shape by name, in the order of `plan_order`.
        arrays: the values, in the same order; a generator computes each when it is written.
        metadata: strings for the header.
        durable: whether to sync the file to disk.
    """
    header: JsonDict = {_METADATA: dict(metadata)} if metadata else {}
    offset = 0
    for name, spec in specs.items():
        dtype = np.dtype(spec.dtype)
        end = offset + dtype.itemsize * int(np.prod(spec.shape, dtype=np.int64))
        header[name] = {
            "dtype": _NAMES[dtype],
            "shape": list(spec.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    with replacing(path, durable=durable) as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for array in arrays:
            file.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)


def open_tensors(path: Path) -> dict[str, np.ndarray]:
    """Memory-maps the arrays of a safetensors file; only accessed pages are read.

    Returns:
        Read-only arrays by name.

    Raises:
        CheckpointError: if it is not a safetensors file.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp(), "w.safetensors")
        >>> write_tensors(path, {"w": np.ones(2)}, [np.ones(2)])
        >>> open_tensors(path)["w"].tolist()
        [1.0, 1.0]
    """
    return {name: entry.open() for name, entry in list_tensors(path).items()}


@dataclasses.dataclass(frozen=True)
class TensorEntry:
    """The position of an array in a file.

    Args:
        path: the file.
        dtype: the dtype of its elements.
        shape: the shape of the array.
        start: the offset of its values in the file, in bytes.
    """

    path: Path
    dtype: np.dtype
    shape: tuple[int, ...]
    start: int

    @property
    def size(self) -> int:
        """Its size in bytes."""
        return self.dtype.itemsize * math.prod(self.shape)

    def open(self) -> np.ndarray:
        """Memory-maps it, read-only; its pages are released with the last view."""
        if not self.size:
            return np.zeros(self.shape, self.dtype)
        raw = np.memmap(self.path, np.uint8, "r", self.start, self.size)
        return np.asarray(raw).view(self.dtype).reshape(self.shape)


def list_tensors(path: Path) -> dict[str, TensorEntry]:
    """Reads only the header of a safetensors file.

    Returns:
        The position of each array, by name.

    Raises:
        CheckpointError: if it is not a safetensors file, or was truncated.
    """
    kinds = (OSError, struct.error, *MALFORMED)
    what = f"cannot read {str(path)!r} as safetensors"
    with reworded(what, "name another file", CheckpointError, kinds):
        if (kind := kind_at(path)) not in (None, "a file"):
            raise ValueError(f"it is {kind}, not a file")
        # The file may have been replaced since, for example by a pipe, which must not block.
        with open(open_regular(path, links=True), "rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            size = os.fstat(file.fileno()).st_size
            if length > min(size - 8, _MOST_HEADER):
                raise ValueError(f"its header would have {length} bytes")
            text = file.read(length).decode()
        header = json.loads(text, object_pairs_hook=_with_names_once)
        metadata = header.pop(_METADATA, None) or {}
        if odd := [name for name, value in metadata.items() if not isinstance(value, str)]:
            raise ValueError(f"its {_METADATA} has {odd[0]!r:.80}, which is not a string")
        entries = {name: _entry(path, 8 + length, **row) for name, row in header.items()}
        _check_filled(entries, 8 + length, size)
        return entries


def _entry(
    path: Path, first: int, dtype: str, shape: list[int], data_offsets: list[int]
) -> TensorEntry:
    begin, end = data_offsets
    if not isinstance(shape, list) or any(type(n) is not int for n in (*shape, begin, end)):
        raise ValueError(
            f"shape {shape!r:.80} and bytes {data_offsets!r:.80} are not whole numbers"
        )
    if dtype not in _DTYPES:
        raise ValueError(f"its dtype {dtype!r:.80} is not one of {', '.join(_DTYPES)}")
    entry = TensorEntry(path, np.dtype(_DTYPES[dtype]), tuple(shape), first + begin)
    # Raises for a shape that no numpy array can have.
    np.broadcast_to(np.zeros((), entry.dtype), [max(n, 0) for n in shape])
    if min([begin, *shape], default=0) < 0 or end - begin != entry.size:
        raise ValueError(f"{dtype} of shape {shape} does not fit bytes {begin} to {end}")
    return entry


def _with_names_once(pairs: list[tuple[str, Any]]) -> JsonDict:
    """Builds a JSON object; refuses repeated names, of which `json` would keep the last."""
    section = dict(pairs)
    if len(section) < len(pairs):
        [(twice, _)] = collections.Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"it has {twice!r:.80} twice")
    return section


def _check_filled(entries: Mapping[str, TensorEntry], start: int, size: int) -> None:
    """Raises unless the arrays are consecutive and fill the file, as the format requires."""
    end = start
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].size)):
        if entry.start != end:
            what = "overlaps the one before it" if entry.start < end else "has a hole before it"
            raise ValueError(f"{name!r:.80} begins at byte {entry.start} and {what}, to byte {end}")
        end += entry.size
    if end != size:
        what = "was cut off" if end > size else "has more in it"
        raise ValueError(f"its arrays end at byte {end} of a file of {size}, which {what}")


Leaves = Mapping[LeafPath, Array]
"""Arrays by path, without random keys."""

Targets = Mapping[LeafPath, jax.ShapeDtypeStruct]
"""The leaves to restore, with shardings."""
_LEAST_SLICE = 2**20
"""Arrays of at least this many bytes are written in slices, one by each replica.

For smaller ones, compiling the slices would take longer.
"""


class OrbaxStore:
    """Every process writes the shards it owns, and reads those it needs.

    Empty arrays are not stored, because Orbax refuses them.
    """

    def begin(self, folder: Path, leaves: Leaves, save: str) -> Callable[[], None]:
        """Copies the shards of this process to host memory."""
        stored = {path: leaf for path, leaf in leaves.items() if leaf.size}
        stop_leaks_of_saves()
        end_failed_saves()
        # Orbax also logs the errors that it raises, with a long traceback for every thread.
        logging.getLogger("absl").addFilter(_is_news)
        barriers = _Barriers(save)
        options = ocp.AsyncOptions(barrier_sync_fn=barriers)
        handler = ocp.type_handlers.ArrayHandler(
            array_metadata_store=array_metadata_store(),
            min_slice_bytes_for_replica_parallel=_LEAST_SLICE,
        )
        kinds = ocp.type_handlers.create_type_handler_registry((jax.Array, handler))
        writer = ocp.PyTreeCheckpointHandler(type_handler_registry=kinds)
        checkpointer = ocp.AsyncCheckpointer(writer, async_options=options)
        if stored:
            with barriers.failing():
                what = ocp.args.PyTreeSave(stored)
                checkpointer.save((folder / ARRAYS).absolute(), args=what)

        def write() -> None:
            with barriers.failing():
                checkpointer.close()

        return write

    def restore(self, folder: Path, targets: Targets) -> dict[LeafPath, Array]:
        """Reads the slices for the shards of this process."""
        stop_leaks_of_saves()
        stored = {path: target for path, target in targets.items() if target.size}
        restored = self._read((folder / ARRAYS).absolute(), stored) if stored else {}
        return {
            path: restored[path] if path in restored else _empty(target)
            for path, target in targets.items()
        }

    def _read(self, folder: Path, stored: Targets) -> dict[LeafPath, Array]:
        # Like StandardCheckpointer, but that one requires all leaves of the folder.
        what = ocp.args.PyTreeRestore(
            item=stored,
            restore_args=ocp.checkpoint_utils.construct_restore_args(stored),
            partial_restore=True,
        )
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
            return checkpointer.restore(folder, args=what)


class _Barriers:
    """The barriers of a save; no process waits there for one that has failed.

    At Orbax's own barriers the others would wait 20 minutes for a process whose disk is full.

    Args:
        save: a unique name of the save.
    """

    def __init__(self, save: str):
        self._prefix = f"axon/save/{save}/"
        self._passed = 0
        self._is_open = True

    def __call__(self, *, key: str, timeout_ms: int) -> None:
        """Returns when all processes have arrived; raises the error of one that failed."""
        self._is_open = False
        store = SharedStore()
        store.wait(f"{self._prefix}{self._passed}", timeout_ms / 1000)
        if failed := store.items(f"{self._prefix}failed/"):
            process, reason = min(failed.items())
            raise OSError(f"process {process} could not write: {reason}")
        self._passed += 1
        self._is_open = True

    @contextlib.contextmanager
    def failing(self) -> Iterator[None]:
        """Raises errors of the body also on the other processes, at their next barrier."""
        try:
            yield
        except Exception as error:
            if self._is_open:
                # A single process has no store and nobody to signal.
                with contextlib.suppress(Exception):
                    SharedStore().set(f"{self._prefix}failed/{process_id()}", str(error))
                    self(key="", timeout_ms=_PATIENCE_MS)
            raise


_PATIENCE_MS = 1_200_000
"""The timeout of a barrier, as in Orbax."""


def _is_news(record: logging.LogRecord) -> bool:
    trace = record.exc_info[2] if record.exc_info else None
    # The name of a file would not do: a user's folder may be called so, too.
    names = [str(frame.f_globals.get("__name__")) for frame, _ in traceback.walk_tb(trace)]
    return not any(name.partition(".")[0] == "orbax" for name in names)


def _empty(target: jax.ShapeDtypeStruct) -> Array:
    return jax.jit(lambda: jnp.zeros(target.shape, target.dtype), out_shardings=target.sharding)()


_FILE = "state.safetensors"


class FullStore:
    """Process 0 gathers all values in host memory and writes them; every process can read them."""

    def begin(self, folder: Path, leaves: Leaves, save: str) -> Callable[[], None]:
        """Gathers leaf by leaf; only process 0 keeps the values.

        Raises:
            UnsupportedError: for a dtype that safetensors does not support.
        """
        specs = {path: leaves[path] for path in plan_order(leaves)}
        values = list(gather(specs.values()))

        def write() -> None:
            if is_main():
                (folder / ARRAYS).mkdir()
                # Not durable here: sealing syncs all files.
                write_tensors(folder / ARRAYS / _FILE, specs, values, durable=False)

        return write

    def restore(self, folder: Path, targets: Targets) -> dict[LeafPath, Array]:
        """Reads the slices for the shards of this process."""
        stored = open_tensors(folder / ARRAYS / _FILE)

        def place(path: LeafPath, target: jax.ShapeDtypeStruct) -> Array:
            values = stored[path]

            def take(index):
                return np.array(values[index])

            return jax.make_array_from_callback(target.shape, target.sharding, take)

        return {path: place(path, target) for path, target in targets.items()}


def gather(leaves: Iterable[Array]) -> Iterator[np.ndarray]:
    """Yields the global values of each array on process 0, and nothing on the others.

    Every process must exhaust it, because arrays that are split over processes are gathered by all
    of them.
    """
    for leaf in leaves:
        is_here = leaf.is_fully_addressable or leaf.is_fully_replicated
        # Copies: on CPU the numpy array would share memory with an array that may be donated.
        values = np.array(leaf if is_here else multihost_utils.process_allgather(leaf, tiled=True))
        if is_main():
            yield values


STORES: MappingProxyType[StateDictType, OrbaxStore | FullStore] = MappingProxyType(
    {StateDictType.FULL: FullStore(), StateDictType.SHARDED: OrbaxStore()}
)
"""The store of each type of checkpoint."""


def check_dtypes(type: StateDictType, leaves: Mapping[str, Any]) -> None:
    """Checks that a type of checkpoint can store the dtypes of arrays.

    Args:
        type: the type of the checkpoint.
        leaves: anything with a dtype, by path.

    Raises:
        UnsupportedError: if it cannot; the message names the leaf.
    """
    if type is StateDictType.FULL:
        plan_order(leaves)
        return
    for path, leaf in leaves.items():
        try:
            ts.dtype(str(np.dtype(leaf.dtype)))
        except ValueError as error:
            raise UnsupportedError(
                f"leaf {path} of the state is {leaf.dtype}, which tensorstore cannot write; "
                "convert it to another dtype, such as the next wider one"
            ) from error


@in_own_context
def export_safetensors(
    path: str | Path, state: PyTree, *, metadata: Mapping[str, str] | None = None
) -> None:
    """Writes a state to one safetensors file, atomically; every process calls this.

    Process 0 writes, with one leaf in its memory at a time. Names are the paths of the leaves, such
    as `params/head/kernel`; random keys are stored as their key data.

    Args:
        path: the path of the file.
        state: a pytree of arrays, such as `state`. Leaves that a `TrainState` pads are written in
            the model's shapes. A part of it, such as `state.params`, does not know which of its
            leaves are padded; give `step.weights(state)` for the parameters alone.
        metadata: strings for the header of the file.

    Raises:
        CheckpointError: if two leaves have the same path, or a padded leaf is not on a mesh.
        UnsupportedError: for a dtype that safetensors does not support.

    Example:
        >>> import jax.numpy as jnp, tempfile
        >>> from axon_dist.checkpoint import open_tensors
        >>> path = Path(tempfile.mkdtemp(), "model.safetensors")
        >>> export_safetensors(path, {"head": {"kernel": jnp.ones((2, 3))}})
        >>> open_tensors(path)["head/kernel"].shape
        (2, 3)
    """
    file = as_path(path, "the file of tensors", CheckpointError)
    arrays = {name: as_array(name, leaf) for name, leaf in named_leaves(state).items()}
    arrays = without_padding(state, arrays)
    stored = {name: to_stored(array) for name, array in arrays.items()}
    ordered = {name: stored[name] for name in plan_order(stored)}
    write_gathered(file, ordered, gather(ordered.values()), metadata)


def write_gathered(
    path: Path,
    specs: Mapping[str, Any],
    values: Iterator[np.ndarray],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Writes the arrays of `gather` to a safetensors file; every process calls this.

    Args:
        path: the path of the file, which is written atomically.
        specs: see `write_tensors`.
        values: the result of `gather`; every process exhausts it.
        metadata: strings for the header.

    Raises:
        CheckpointError: on every process, if the file cannot be written.
    """
    error: OSError | None = None
    if is_main():
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            remove_abandoned(path.parent)
            write_tensors(path, specs, values, metadata)
        except OSError as caught:
            error = caught
    collections.deque(values, maxlen=0)
    on_main(lambda: _check_written(path, error))


def _check_written(path: Path, error: OSError | None) -> None:
    if error is not None:
        raise CheckpointError(
            f"cannot write {str(path)!r}: {error.strerror}; free space there, or name another file"
        ) from error
