"""How values reach the disk: the interface of a store, and the one on Orbax."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp

from ..core.typing import Array
from ..core.typing import Path as LeafPath
from .layout import ARRAYS

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
        checkpointer = ocp.StandardCheckpointer()
        if stored:
            checkpointer.save((folder / ARRAYS).absolute(), stored)
        return checkpointer.close

    def restore(self, folder: Path, targets: Targets) -> dict[LeafPath, Array]:
        """Reads the slices that the shards of this process need."""
        stored = {path: target for path, target in targets.items() if target.size}
        found = self._read((folder / ARRAYS).absolute(), stored) if stored else {}
        return {
            path: found[path] if path in found else _empty(target)
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
