"""A state into a folder that is either complete or not there, and from it onto any mesh."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import errno
import os
import secrets
import shutil
import threading
from collections.abc import Callable, Collection, Mapping
from typing import Any, Protocol, TypeVar, runtime_checkable

import jax
from jax.sharding import NamedSharding

from ..core.checks import TEXTS
from ..core.errors import (
    AxonDistError,
    CheckpointError,
    ConfigError,
    DamagedCheckpointError,
    StoreError,
)
from ..core.files import Address, Place, as_place, make_folder, snapshot
from ..core.own_context import in_own_context
from ..core.typing import Array, Leaf, PyTree, Shape
from ..core.typing import Path as LeafPath
from ..core.words import byte_size, first_few
from ..sharding.padding import EvenShards, paddings_in
from . import bucket
from .layout import (
    Manifest,
    StateDictType,
    as_array,
    check_meta,
    described,
    differences,
    from_stored,
    installed_versions,
    is_main,
    mesh_shape,
    named_leaves,
    on_main,
    saved_names,
    spec_of,
    staging_of,
    stored_target,
    target_of,
    to_stored,
)
from .seal import (
    check_files,
    check_replaceable,
    found_at,
    leaf_checksums,
    publish,
    read_manifest,
    seal,
    stray_in,
)
from .stores import STORES

_T = TypeVar("_T")


@in_own_context
def save_checkpoint(
    path: str | Place,
    state: PyTree,
    *,
    type: StateDictType | str = StateDictType.SHARDED,
    meta: Mapping[str, Any] | None = None,
) -> None:
    """Writes a state, and returns when it is safe on disk; every process calls this.

    The folder appears under its name only when everything in it is complete, so that a save that
    is killed leaves the checkpoint that was there before. What is written does not depend on the
    mesh: it restores onto any other one, bit for bit. The leaves of a `TrainState` that are padded,
    because devices do not divide a dim, are written without their padding.

    In a bucket, where nothing can be renamed, a checkpoint counts when its marker is there, which
    is written last. One that is replaced can be read until then, and is removed after.

    Args:
        path: the folder of the checkpoint, also at `gs://` or `s3://`. An empty folder or an
            earlier checkpoint, damaged or not, is replaced; anything else stays, and is an error.
        state: a pytree of arrays, random keys and numbers.
        type: who writes: every process its shards (`"sharded"`), or process 0 everything
            (`"full"`).
        meta: what JSON holds, to be found in `read_manifest(path).meta`.

    Raises:
        ConfigError: for another type.
        CheckpointError: when the state has no leaves, one that is no array, or two that cannot be
            told apart; when JSON does not hold the meta; when something else than a checkpoint
            is at the path, or the disk refuses. What was there stays.
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
        as_place(path, "the checkpoint", CheckpointError), state, type, {} if meta is None else meta
    ).wait()


class PendingSave:
    """A checkpoint that is being written.

    Making one copies the state to host memory and then writes in a thread; afterwards the
    arrays of the state may be donated.

    Args:
        folder: of the checkpoint.
        state: a pytree of arrays.
        type: who writes.
        meta: what JSON holds.
        score: lower is better; None without one.
        serial: how many checkpoints came before it.
        then: run by process 0 once the checkpoint has its name.
    """

    def __init__(
        self,
        folder: Place,
        state: PyTree,
        type: StateDictType | str,
        meta: Mapping[str, Any],
        *,
        score: float | None = None,
        serial: int = 0,
        then: Callable[[], None] = lambda: None,
    ):
        self.folder: Place = folder
        self._written = concurrent.futures.Future()
        type = StateDictType(type)
        check_type(folder, type)
        arrays = {path: as_array(path, leaf) for path, leaf in named_leaves(state).items()}
        if not arrays:
            raise CheckpointError(
                f"the state, a {state.__class__.__name__}, has no leaves; give a pytree of at "
                "least one array, random key or number"
            )
        mesh = mesh_shape(arrays.values())
        for path, shape in paddings_in(state).items():
            arrays[path] = even_shards(path, shape, arrays[path]).of(arrays[path])
        size = sum(array.nbytes for array in arrays.values())
        name = on_main(lambda: self._claim_name(meta, size))
        stored = {path: to_stored(array) for path, array in arrays.items()}
        manifest = Manifest(
            type=type,
            leaves={path: spec_of(array) for path, array in arrays.items()},
            checksums={},
            mesh=mesh,
            versions=installed_versions(),
            meta=dict(meta),
            score=score,
            serial=serial,
        )
        checksums = leaf_checksums(stored)
        write = self._run(
            lambda: (
                bucket.begin(folder, int(name), stored)
                if isinstance(folder, Address)
                else STORES[type].begin(staging_of(folder), stored, name)
            )
        )

        def complete() -> None:
            write()
            if is_main():
                sums = {path: int(x) for path, x in jax.device_get(checksums).items()}
                whole = dataclasses.replace(manifest, checksums=sums)
                if isinstance(folder, Address):
                    bucket.commit(folder, int(name), whole, bucket.writers(checksums))
                else:
                    seal(staging_of(folder), whole)
                    publish(folder)
                then()

        threading.Thread(target=self._finish, args=(complete,), name="checkpoint").start()

    def wait(self) -> None:
        """Returns when the checkpoint is complete, on every process at once.

        Raises:
            CheckpointError: saying what prevented it from being written.
        """
        self.join()
        on_main(self._written.result)

    def join(self) -> None:
        """Returns when this process has done its part, failed or not."""
        concurrent.futures.wait([self._written])

    def _finish(self, complete: Callable[[], None]) -> None:
        try:
            self._run(complete)
            self._written.set_result(None)
        except BaseException as error:  # whoever waits must hear of it, whatever it is
            self._written.set_exception(error)

    def _claim_name(self, meta: Any, size: int) -> str:
        """Prepares a place for a save; returns a name for it, or the number of its slot."""
        check_meta(meta)
        self._run(lambda: check_replaceable(self.folder))

        def clear() -> str:
            if isinstance(self.folder, Address):
                return str(bucket.prepare(self.folder))
            staging = staging_of(self.folder)
            shutil.rmtree(staging, ignore_errors=True)
            make_folder(staging.parent)
            staging.mkdir()
            # Refused before the first byte: the stores would fail in every thread that writes.
            if (free := shutil.disk_usage(staging).free) < size:
                raise OSError(f"the disk has {byte_size(free)} left for its {byte_size(size)}")
            return secrets.token_hex(8)

        return self._run(clear)

    def _run(self, action: Callable[[], _T]) -> _T:
        """Does a part of saving; whatever the disk or the store raise becomes one kind of error."""
        try:
            return action()
        except Exception as error:
            if isinstance(error, AxonDistError) and not isinstance(error, StoreError):
                raise
            if is_main() and not isinstance(self.folder, Address):
                shutil.rmtree(staging_of(self.folder), ignore_errors=True)
            full = os.strerror(errno.ENOSPC)
            # TensorStore reports it in a line for each of its layers.
            reason = [full] if full in str(error) else str(error).strip().splitlines()
            reason = reason or [repr(error)]
            raise CheckpointError(
                f"could not save checkpoint {str(self.folder)!r}: {reason[0]}; what was saved "
                "before stays. Make room there, or name another folder"
            ) from error


@runtime_checkable
class HasState(Protocol):
    """An object with the shapes and shardings of its state, such as a `TrainStep`."""

    @property
    def abstract_state(self) -> PyTree:
        """Shapes and dtypes of the state."""
        ...

    @property
    def state_shardings(self) -> PyTree:
        """Its folder."""
        ...


@in_own_context
def load_checkpoint(
    path: str | Place, target: PyTree | HasState, *, parts: str | Collection[str] | None = None
) -> PyTree:
    """Restores a state, bit for bit, onto the mesh and the layout that the target names.

    Neither the mesh, nor the strategy, nor the number of processes has to be the one that the
    state was saved on. Nothing is cast, cut, or left out: the leaves of checkpoint and target have
    to be the same, or with `parts` those of some parts of it. Every file is checked before it is
    read, and every value after.

    Args:
        path: the folder of the checkpoint, also at `gs://` or `s3://`.
        target: a tree like the state, of `ShapeDtypeStruct`s with shardings or of arrays, whose
            values are not looked at; or a `TrainStep`, for the state that it trains. Of a state
            with padded leaves give the `TrainState` or the step: a part of it alone, such as its
            `params`, does not say which are padded.
        parts: the fields of the state to restore, the others not being read. A name, such as
            `"params"`: the target is that field alone, such as `target.params`. Several: it is a
            dict of them.

    Returns:
        The state, with the structure of the target.

    Raises:
        CheckpointError: when there is no checkpoint, or it belongs to another model or optimizer;
            the message names the leaf.
        DamagedCheckpointError: when it is unfinished, or is no longer what was written; the
            message names the file.

    Example:
        >>> import jax.numpy as jnp, tempfile
        >>> from axon_dist.checkpoint import save_checkpoint
        >>> path = tempfile.mkdtemp() + "/start"
        >>> save_checkpoint(path, {"w": jnp.ones(3)})
        >>> load_checkpoint(path, {"w": jnp.ones(4)})
        Traceback (most recent call last):
        axon_dist.core.errors.CheckpointError: checkpoint ... does not fit: w is float32[3] in the
        checkpoint and float32[4] here; restore it into the model, optimizer and precision that it
        was saved from
        >>> load_checkpoint(path, jnp.zeros(3), parts="w").tolist()
        [1.0, 1.0, 1.0]
    """
    if isinstance(parts, str):
        fields = target if isinstance(target, HasState) else {parts: target}
        return load_checkpoint(path, fields, parts=(parts,))[parts]
    if parts is not None:
        TEXTS.check("load_checkpoint", "parts", parts)
    if isinstance(target, HasState):
        target = target_of(target.abstract_state, target.state_shardings)
        shapes = paddings_in(target)
        if parts is not None:
            target = {name: getattr(target, name) for name in parts}
    else:
        shapes = paddings_in(target)
    folder = as_place(path, "the checkpoint", CheckpointError)
    targets = {path: described(path, leaf) for path, leaf in named_leaves(target).items()}
    evenly: dict[LeafPath, EvenShards] = {}
    for leaf_path in targets.keys() & shapes.keys():
        padded, shape = targets[leaf_path], shapes[leaf_path]
        evenly[leaf_path] = even = even_shards(leaf_path, shape, padded)
        targets[leaf_path] = jax.ShapeDtypeStruct(shape, padded.dtype, sharding=even.target)
    on_main(lambda: check_files(folder, read_manifest(folder)))
    manifest = read_manifest(folder)
    names = saved_names(manifest.leaves, targets)
    saved = {names[path]: leaf for path, leaf in targets.items()}
    _check_leaves(folder, manifest, saved, parts)
    stored = _read(folder, manifest, saved)
    _check_values(folder, manifest, stored)
    restored = {path: from_stored(stored[names[path]], leaf) for path, leaf in targets.items()}
    restored |= {path: even.stored(restored[path]) for path, even in evenly.items()}
    return jax.tree.unflatten(jax.tree.structure(target), list(restored.values()))


def even_shards(path: LeafPath, shape: Shape, leaf: Leaf) -> EvenShards:
    """How a padded leaf of a state becomes one in the shape of the model.

    Raises:
        CheckpointError: when it is not on a mesh, as the leaves of a step's states are.
    """
    place = leaf.sharding
    if not isinstance(place, NamedSharding):
        raise CheckpointError(
            f"leaf {path} of the state is padded to {tuple(leaf.shape)} from {tuple(shape)}, and "
            f"has the sharding {place}; give the state where the step left it, on its mesh"
        )
    return EvenShards(shape, place)


def _check_leaves(
    folder: Place,
    manifest: Manifest,
    targets: dict[LeafPath, jax.ShapeDtypeStruct],
    parts: Collection[str] | None,
) -> None:
    wanted = {path: spec_of(target) for path, target in targets.items()}

    def is_selected(path):
        return parts is None or path.split("/")[0] in parts or path in wanted

    saved = {path: spec for path, spec in manifest.leaves.items() if is_selected(path)}
    unlike = differences(saved, wanted)
    if unlike:
        raise CheckpointError(
            f"checkpoint {str(folder)!r} does not fit: {first_few(unlike, between='; ')}; restore "
            "it into the model, optimizer and precision that it was saved from"
        )


def _read(
    folder: Place, manifest: Manifest, targets: dict[LeafPath, jax.ShapeDtypeStruct]
) -> dict[LeafPath, Array]:
    stored = {path: stored_target(target) for path, target in targets.items()}
    try:
        if bucket.is_from_bucket(manifest):
            return bucket.restore(folder, manifest, stored)
        there = folder
        if isinstance(there, Address):
            # It was written on a disk and copied to the bucket; so it is copied back.
            there = snapshot(there, lambda name: name in manifest.files)
        else:
            there = found_at(there)
        return STORES[manifest.type].restore(there, stored)
    except (StoreError, DamagedCheckpointError):
        raise
    except Exception as error:
        stray = stray_in(folder, manifest)
        if stray is not None:
            raise DamagedCheckpointError(
                f"checkpoint {str(folder)!r}: cannot be read, and holds {stray}, which was not "
                "there when it was written; remove that, or use another one"
            ) from error
        reason = str(error).strip().splitlines() or [repr(error)]
        raise CheckpointError(
            f"cannot read the values of checkpoint {str(folder)!r}, whose files are as they were "
            f"written: {reason[0]}; install the versions of its manifest: {manifest.versions}"
        ) from error


def check_type(folder: Place, type: StateDictType) -> None:
    """Raises `ConfigError` where a checkpoint of a type cannot be written to a place."""
    if isinstance(folder, Address) and type is StateDictType.FULL:
        raise ConfigError(
            f"checkpoint.type: got full, one file that process 0 writes, and {str(folder)!r} is in "
            "a bucket, to which every process writes its shards; take sharded, or a folder"
        )


def _check_values(folder: Place, manifest: Manifest, stored: dict[LeafPath, Array]) -> None:
    sums = jax.device_get(leaf_checksums(stored))
    for path, value in sums.items():
        if int(value) != manifest.checksums[path]:
            raise DamagedCheckpointError(
                f"checkpoint {str(folder)!r}: leaf {path} came back with the checksum "
                f"{int(value):08x}, {manifest.checksums[path]:08x} was saved; use another one"
            )
