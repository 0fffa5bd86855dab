"""The store of `StateDictType.FULL`: the whole state, gathered by process 0, in one file."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import jax
import numpy as np
from jax.experimental import multihost_utils

from ..core.typing import Array
from ..core.typing import Path as LeafPath
from .agree import is_main
from .layout import ARRAYS
from .store import Leaves, Targets
from .tensorfile import open_tensors, plan_order, write_tensors

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
            take = lambda index: np.array(values[index])
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
