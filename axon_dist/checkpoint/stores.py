"""The table of stores; a new way to keep values is a row here."""

from __future__ import annotations

import collections
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils

from ..core.compat import stop_leaks_of_saves
from ..core.typing import Array, PyTree
from ..core.typing import Path as LeafPath
from .layout import ARRAYS, StateDictType, as_array, is_main, named_leaves, on_main, to_stored
from .tensorfile import open_tensors, plan_order, write_tensors

Leaves = Mapping[LeafPath, Array]
"""Arrays by path; no random keys among them."""

Targets = Mapping[LeafPath, jax.ShapeDtypeStruct]
"""What to restore, each with its sharding."""


class Store(Protocol):
    """Writes arrays into a folder, and reads them back onto any mesh."""

    def begin(self, folder: Path, leaves: Leaves) -> Callable[[], None]:
        """Takes the values off the devices; every process calls this.

        Args:
            folder: exists, and is empty.
            leaves: may be donated as soon as this returns.

        Returns:
            Writes them, and returns when they are written; may run in a thread.
        """
        ...

    def restore(self, folder: Path, targets: Targets) -> dict[LeafPath, Array]:
        """Reads every target's value onto its sharding, and no other; every process calls this."""
        ...


class OrbaxStore:
    """Every process writes the shards it owns, and reads those it needs.

    Orbax refuses arrays without elements; there is nothing in them to store.
    """

    def begin(self, folder: Path, leaves: Leaves) -> Callable[[], None]:
        """Copies the shards of this process to host memory."""
        stored = {path: leaf for path, leaf in leaves.items() if leaf.size}
        stop_leaks_of_saves()
        checkpointer = ocp.StandardCheckpointer()
        if stored:
            checkpointer.save((folder / ARRAYS).absolute(), stored)
        return checkpointer.close

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


def _empty(target: jax.ShapeDtypeStruct) -> Array:
    return jax.jit(lambda: jnp.zeros(target.shape, target.dtype), out_shardings=target.sharding)()


_FILE = "state.safetensors"


class FullStore:
    """Process 0 holds all values in host memory, and writes them; every process may read them."""

    def begin(self, folder: Path, leaves: Leaves) -> Callable[[], None]:
        """Gathers leaf by leaf; only process 0 keeps the values.

        Raises:
            UnsupportedError: for a dtype that the file format has no name for.
        """
        specs = {path: leaves[path] for path in plan_order(leaves)}
        values = list(gather(specs.values()))

        def write() -> None:
            if is_main():
                (folder / ARRAYS).mkdir()
                write_tensors(folder / ARRAYS / _FILE, specs, values)

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
        # A copy, for on a CPU the array of numpy would share memory with one that gets donated.
        values = np.array(leaf if is_here else multihost_utils.process_allgather(leaf, tiled=True))
        if is_main():
            yield values


STORES: MappingProxyType[StateDictType, Store] = MappingProxyType(
    {StateDictType.FULL: FullStore(), StateDictType.SHARDED: OrbaxStore()}
)
"""Which store writes and reads each type of checkpoint."""


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
    arrays = {name: as_array(name, leaf) for name, leaf in named_leaves(state).items()}
    stored = {name: to_stored(array) for name, array in arrays.items()}
    ordered = {name: stored[name] for name in plan_order(stored)}
    values = gather(ordered.values())
    unfinished = Path(f"{path}.tmp")
    if is_main():
        write_tensors(unfinished, ordered, values, metadata)
        os.replace(unfinished, path)
    collections.deque(values, maxlen=0)
    on_main(lambda: None)
