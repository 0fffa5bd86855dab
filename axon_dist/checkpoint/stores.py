"""How values are stored in files: by Orbax, or as safetensors; a new way is a row of `STORES`.

    8 bytes      N, the length of the header, little-endian
    N bytes      {"name": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}, ...}
    the rest     the values, row-major, without gaps

The writer here takes one array after the other; the library's wants all of them at once. Source:
https://github.com/huggingface/safetensors#format
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
from .layout import ARRAYS, StateDictType, as_array, is_main, named_leaves, on_main, to_stored

_METADATA = "__metadata__"
_ALIGNMENT = 8
_MOST_HEADER = 100_000_000
"""Bytes of a header, as the format has it."""
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
    """The order in which `write_tensors` takes the arrays: wide elements first.

    Each array then starts at a multiple of its element size.

    Args:
        leaves: by name, anything with a dtype.

    Raises:
        UnsupportedError: for a dtype that the format has no name for.
    """
    for name, leaf in leaves.items():
        if np.dtype(leaf.dtype) not in _NAMES:
            raise UnsupportedError(
                f"{name} is {leaf.dtype}, for which safetensors has no name; its names are "
                f"{', '.join(_DTYPES)}. Convert it, or save the state as StateDictType.SHARDED"
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
    """Writes arrays one after the other.

    Args:
        path: where the safetensors file goes; it appears under its name when it is complete.
        specs: dtype and shape by name, in the order of `plan_order`.
        arrays: the values, in the same order; made when they are written, if this is a generator.
        metadata: texts to put into the header.
        durable: whether the disk has the file when this returns.
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
    """Maps the arrays of a file into memory; only what is touched is read.

    Returns:
        Read-only arrays by name.

    Raises:
        CheckpointError: when it is no safetensors file.

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
    """The place of an array in a file.

    Args:
        path: the file.
        dtype: of its elements.
        shape: of the array.
        start: the byte of the file at which its values begin.
    """

    path: Path
    dtype: np.dtype
    shape: tuple[int, ...]
    start: int

    @property
    def size(self) -> int:
        """In bytes."""
        return self.dtype.itemsize * math.prod(self.shape)

    def open(self) -> np.ndarray:
        """Maps it into memory, read-only; its pages are released with the last view."""
        if not self.size:
            return np.zeros(self.shape, self.dtype)
        raw = np.memmap(self.path, np.uint8, "r", self.start, self.size)
        return np.asarray(raw).view(self.dtype).reshape(self.shape)


def list_tensors(path: Path) -> dict[str, TensorEntry]:
    """Reads the header of a file alone.

    Returns:
        The place of each array, by name.

    Raises:
        CheckpointError: when it is no safetensors file, or was cut off.
    """
    kinds = (OSError, struct.error, *MALFORMED)
    what = f"cannot read {str(path)!r} as safetensors"
    with reworded(what, "name another file", CheckpointError, kinds):
        if (kind := kind_at(path)) not in (None, "a file"):
            raise ValueError(f"it is {kind} and no file")
        # Something else may have the name by now, and must not block the open either.
        with open(open_regular(path, links=True), "rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            size = os.fstat(file.fileno()).st_size
            if length > min(size - 8, _MOST_HEADER):
                raise ValueError(f"its header would have {length} bytes")
            text = file.read(length).decode()
        header = json.loads(text, object_pairs_hook=_with_names_once)
        metadata = header.pop(_METADATA, None) or {}
        if odd := [name for name, value in metadata.items() if not isinstance(value, str)]:
            raise ValueError(f"its {_METADATA} has {odd[0]!r:.80}, which is no text")
        entries = {name: _entry(path, 8 + length, **row) for name, row in header.items()}
        _check_filled(entries, 8 + length, size)
        return entries


def _entry(
    path: Path, first: int, dtype: str, shape: list[int], data_offsets: list[int]
) -> TensorEntry:
    begin, end = data_offsets
    if not isinstance(shape, list) or any(type(n) is not int for n in (*shape, begin, end)):
        raise ValueError(f"shape {shape!r:.80} and bytes {data_offsets!r:.80} are no whole numbers")
    if dtype not in _DTYPES:
        raise ValueError(f"its dtype {dtype!r:.80} is none of {', '.join(_DTYPES)}")
    entry = TensorEntry(path, np.dtype(_DTYPES[dtype]), tuple(shape), first + begin)
    # Raises for a shape that no array has, of whatever size.
    np.broadcast_to(np.zeros((), entry.dtype), [max(n, 0) for n in shape])
    if min([begin, *shape], default=0) < 0 or end - begin != entry.size:
        raise ValueError(f"{dtype} of shape {shape} cannot lie at bytes {begin} to {end}")
    return entry


def _with_names_once(pairs: list[tuple[str, Any]]) -> JsonDict:
    """A section of JSON; of two entries of a name it would have the last, so this refuses them."""
    section = dict(pairs)
    if len(section) < len(pairs):
        [(twice, _)] = collections.Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"it has {twice!r:.80} twice")
    return section


def _check_filled(entries: Mapping[str, TensorEntry], start: int, size: int) -> None:
    """Raises unless the arrays are consecutive and fill the file, as the format demands."""
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
"""Arrays by path; no random keys among them."""

Targets = Mapping[LeafPath, jax.ShapeDtypeStruct]
"""What to restore, each with its sharding."""
_LEAST_SLICE = 2**20
"""Bytes from which each replica writes a slice; below, compiling the slices takes longer."""


class OrbaxStore:
    """Every process writes the shards it owns, and reads those it needs.

    Orbax refuses arrays without elements; there is nothing in them to store.
    """

    def begin(self, folder: Path, leaves: Leaves, save: str) -> Callable[[], None]:
        """Copies the shards of this process to host memory."""
        stored = {path: leaf for path, leaf in leaves.items() if leaf.size}
        stop_leaks_of_saves()
        end_failed_saves()
        # Orbax logs what it also raises, with pages of its code for every thread.
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
        """Reads the slices that the shards of this process need."""
        stop_leaks_of_saves()
        stored = {path: target for path, target in targets.items() if target.size}
        restored = self._read((folder / ARRAYS).absolute(), stored) if stored else {}
        return {
            path: restored[path] if path in restored else _empty(target)
            for path, target in targets.items()
        }

    def _read(self, folder: Path, stored: Targets) -> dict[LeafPath, Array]:
        # What StandardCheckpointer does, which insists on all leaves of the folder.
        what = ocp.args.PyTreeRestore(
            item=stored,
            restore_args=ocp.checkpoint_utils.construct_restore_args(stored),
            partial_restore=True,
        )
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
            return checkpointer.restore(folder, args=what)


class _Barriers:
    """The barriers of the processes of a save; none waits for a process that has failed.

    At barriers of Orbax the others wait 20 minutes for a process whose disk is full.

    Args:
        save: its name, another one for every save.
    """

    def __init__(self, save: str):
        self._prefix, self._passed, self._is_open = f"axon/save/{save}/", 0, True

    def __call__(self, *, key: str, timeout_ms: int) -> None:
        """Returns when all processes have come; raises the error of one that failed."""
        self._is_open = False
        store = SharedStore()
        store.wait(f"{self._prefix}{self._passed}", timeout_ms / 1000)
        if failed := store.items(f"{self._prefix}failed/"):
            process, reason = min(failed.items())
            raise OSError(f"process {process} could not write: {reason}")
        self._passed, self._is_open = self._passed + 1, True

    @contextlib.contextmanager
    def failing(self) -> Iterator[None]:
        """Sends the error of this process to the others, at their next barrier."""
        try:
            yield
        except Exception as error:
            if self._is_open:
                # A single process has no store and no other to signal.
                with contextlib.suppress(Exception):
                    SharedStore().set(f"{self._prefix}failed/{process_id()}", str(error))
                    self(key="", timeout_ms=_PATIENCE_MS)
            raise


_PATIENCE_MS = 1_200_000
"""For which Orbax waits, too."""


def _is_news(record: logging.LogRecord) -> bool:
    trace = record.exc_info[2] if record.exc_info else None
    files = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(trace)]
    return not any("orbax" in name for name in files)


def _empty(target: jax.ShapeDtypeStruct) -> Array:
    return jax.jit(lambda: jnp.zeros(target.shape, target.dtype), out_shardings=target.sharding)()


_FILE = "state.safetensors"


class FullStore:
    """Process 0 holds all values in host memory, and writes them; every process may read them."""

    def begin(self, folder: Path, leaves: Leaves, save: str) -> Callable[[], None]:
        """Gathers leaf by leaf; only process 0 keeps the values.

        Raises:
            UnsupportedError: for a dtype that the file format has no name for.
        """
        specs = {path: leaves[path] for path in plan_order(leaves)}
        values = list(gather(specs.values()))

        def write() -> None:
            if is_main():
                (folder / ARRAYS).mkdir()
                # Sealing waits for the disk.
                write_tensors(folder / ARRAYS / _FILE, specs, values, durable=False)

        return write

    def restore(self, folder: Path, targets: Targets) -> dict[LeafPath, Array]:
        """Reads the slices that the shards of this process need."""
        stored = open_tensors(folder / ARRAYS / _FILE)

        def place(path: LeafPath, target: jax.ShapeDtypeStruct) -> Array:
            values = stored[path]

            def take(index):
                return np.array(values[index])

            return jax.make_array_from_callback(target.shape, target.sharding, take)

        return {path: place(path, target) for path, target in targets.items()}


def gather(leaves: Iterable[Array]) -> Iterator[np.ndarray]:
    """Yields the global values of each array on process 0, and nothing on the others.

    Every process has to go through it, for an array that is split over processes is gathered by
    all of them.
    """
    for leaf in leaves:
        is_here = leaf.is_fully_addressable or leaf.is_fully_replicated
        # A copy: on a CPU the array of numpy would share memory with one that is donated.
        values = np.array(leaf if is_here else multihost_utils.process_allgather(leaf, tiled=True))
        if is_main():
            yield values


STORES: MappingProxyType[StateDictType, OrbaxStore | FullStore] = MappingProxyType(
    {StateDictType.FULL: FullStore(), StateDictType.SHARDED: OrbaxStore()}
)
"""Which store writes and reads each type of checkpoint."""


@in_own_context
def export_safetensors(
    path: str | Path, state: PyTree, *, metadata: Mapping[str, str] | None = None
) -> None:
    """Writes the whole values of a state into one safetensors file; every process calls this.

    Process 0 writes, one leaf in its memory at a time. Names are the paths of the leaves, such as
    `params/head/kernel`; random keys are their words.

    Args:
        path: the file; it appears under its name when it is complete.
        state: a pytree of arrays, such as `state` or `state.params`.
        metadata: texts for the header of the file.

    Raises:
        CheckpointError: when two leaves have the same path.
        UnsupportedError: for a dtype that the format has no name for.

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
    stored = {name: to_stored(array) for name, array in arrays.items()}
    ordered = {name: stored[name] for name in plan_order(stored)}
    write_gathered(file, ordered, gather(ordered.values()), metadata)


def write_gathered(
    path: Path,
    specs: Mapping[str, Any],
    values: Iterator[np.ndarray],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Writes arrays that process 0 alone gets; every process calls this.

    Args:
        path: of the file, which appears under its name when it is complete.
        specs: as `write_tensors` takes them.
        values: what `gather` yields of them; every process goes through all.
        metadata: texts for the header.

    Raises:
        CheckpointError: on every process when it cannot be written.
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
            f"cannot write {str(path)!r}: {error.strerror}; make room there, or name another file"
        ) from error
