"""`save_checkpoint`: a state into a folder that is either complete or not there."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import shutil
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import jax

from ..core.errors import AxonDistError, CheckpointError
from ..core.files import as_path
from ..core.typing import Array, PyTree
from ..core.typing import Path as LeafPath
from .layout import as_array, is_main, named_leaves, on_main, staging_of, to_stored
from .manifest import Manifest, StateDictType, check_meta, installed_versions, mesh_shape, spec_of
from .seal import check_replaceable, leaf_checksums, publish, seal
from .stores import STORES

_T = TypeVar("_T")


def save_checkpoint(
    path: str | Path,
    state: PyTree,
    *,
    type: StateDictType | str = StateDictType.SHARDED,
    meta: Mapping[str, Any] | None = None,
) -> None:
    """Writes a state, and returns when it is safe on disk; every process calls this.

    The folder appears under its name only when everything in it is complete, so that a save that
    is killed leaves the checkpoint that was there before. What is written does not depend on the
    mesh: it restores onto any other one, bit for bit.

    Args:
        path: the folder of the checkpoint. An empty folder or an earlier checkpoint, damaged or
            not, is replaced; anything else stays, and is an error.
        state: a pytree of arrays, random keys and numbers.
        type: who writes: every process its shards (`"sharded"`), or process 0 everything
            (`"full"`).
        meta: what JSON holds, to be found in `read_manifest(path).meta`.

    Raises:
        ConfigError: for another type.
        CheckpointError: when the state has no leaves, one that is no array, or two that cannot be
            told apart; when JSON does not hold the meta; when something else than a checkpoint
            lies at the path, or the disk refuses. What was there stays.
        UnsupportedError: when a full checkpoint has no name for a dtype.

    Example:
        >>> import jax, jax.numpy as jnp, tempfile
        >>> from axon_dist.checkpoint import load_checkpoint
        >>> state = {"w": jnp.arange(3.0), "key": jax.random.key(0)}
        >>> path = tempfile.mkdtemp() + "/start"
        >>> save_checkpoint(path, state)
        >>> load_checkpoint(path, state)["w"].tolist()
        [0.0, 1.0, 2.0]
    """
    PendingSave(
        as_path(path, "the checkpoint", CheckpointError), state, type, {} if meta is None else meta
    ).wait()


class PendingSave:
    """A checkpoint on its way to the disk.

    Making one copies the state to host memory and goes on writing in a thread; afterwards the
    arrays of the state may be donated.

    Args:
        folder: of the checkpoint.
        state: a pytree of arrays.
        type: who writes.
        meta: what JSON holds.
        score: lower is better; None without one.
        serial: how many checkpoints came before it.
        then: done by process 0 once the checkpoint has its name.
    """

    def __init__(
        self,
        folder: Path,
        state: PyTree,
        type: StateDictType | str,
        meta: Mapping[str, Any],
        *,
        score: float | None = None,
        serial: int = 0,
        then: Callable[[], None] = lambda: None,
    ):
        self.folder: Path = folder
        self._written = concurrent.futures.Future()
        type = StateDictType(type)
        arrays = _arrays_of(state)
        on_main(lambda: self._make_way(meta))
        stored = {path: to_stored(array) for path, array in arrays.items()}
        manifest = Manifest(
            type=type,
            leaves={path: spec_of(array) for path, array in arrays.items()},
            checksums={},
            mesh=mesh_shape(arrays.values()),
            versions=installed_versions(),
            meta=dict(meta),
            score=score,
            serial=serial,
        )
        checksums = leaf_checksums(stored)
        write = self._run(lambda: STORES[type].begin(staging_of(folder), stored))

        def complete():
            return self._complete(write, manifest, checksums, then)

        threading.Thread(target=self._finish, args=(complete,), name="checkpoint").start()

    def wait(self) -> None:
        """Returns when the checkpoint is complete, on every process at once.

        Raises:
            CheckpointError: saying what kept it from being written.
        """
        error = self._written.exception()
        on_main(lambda: _raise(error))

    def join(self) -> None:
        """Returns when this process has done its part, whatever came of it."""
        concurrent.futures.wait([self._written])

    def _finish(self, complete: Callable[[], None]) -> None:
        try:
            self._run(complete)
            self._written.set_result(None)
        except AxonDistError as error:
            self._written.set_exception(error)

    def _complete(
        self,
        write: Callable[[], None],
        manifest: Manifest,
        checksums: Mapping[LeafPath, Array],
        then: Callable[[], None],
    ) -> None:
        write()
        if is_main():
            sums = {path: int(value) for path, value in jax.device_get(dict(checksums)).items()}
            seal(staging_of(self.folder), dataclasses.replace(manifest, checksums=sums))
            publish(self.folder)
            then()

    def _make_way(self, meta: Any) -> None:
        check_meta(meta)
        check_replaceable(self.folder)
        staging = staging_of(self.folder)

        def clear() -> None:
            shutil.rmtree(staging, ignore_errors=True)
            staging.mkdir(parents=True)

        self._run(clear)

    def _run(self, action: Callable[[], _T]) -> _T:
        """Does a part of saving; whatever the disk or the store raise becomes one kind of error."""
        try:
            return action()
        except AxonDistError:
            raise
        except Exception as error:
            if is_main():
                shutil.rmtree(staging_of(self.folder), ignore_errors=True)
            reason = str(error).strip().splitlines() or [repr(error)]
            raise CheckpointError(
                f"could not save checkpoint {str(self.folder)!r}: {reason[0]}; what was saved "
                "before stays. Make room there, or name another folder"
            ) from error


def _arrays_of(state: PyTree) -> dict[LeafPath, Array]:
    arrays = {path: as_array(path, leaf) for path, leaf in named_leaves(state).items()}
    if not arrays:
        raise CheckpointError(
            f"the state, a {type(state).__name__}, has no leaves; give a pytree of at least one "
            "array, random key or number"
        )
    return arrays


def _raise(error: BaseException | None) -> None:
    if error is not None:
        raise error
