"""Saves a state atomically into a folder, and restores it onto any mesh."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import errno
import os
import secrets
import shutil
import threading
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, Protocol, TypeAlias, TypeVar, runtime_checkable

import jax
import jax.numpy as jnp

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
from ..core.tree import leaves_with_paths, map_with_path
from ..core.typing import Array, PyTree, Shape
from ..core.typing import Path as LeafPath
from ..core.words import byte_size, first_few
from ..mesh import check_shared
from ..sharding.padding import EvenShards, paddings_in
from . import object_store
from .layout import (
    LeafSpec,
    Manifest,
    StateDictType,
    as_array,
    check_meta,
    described,
    differences,
    even_shards,
    from_stored,
    in_form_of,
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
    without_padding,
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
from .stores import STORES, check_dtypes

_T = TypeVar("_T")


@in_own_context
def save_checkpoint(
    path: str | Place,
    state: PyTree,
    *,
    type: StateDictType | str = StateDictType.SHARDED,
    meta: Mapping[str, Any] | None = None,
) -> None:
    """Saves a state, and returns when it is safe on disk; every process calls this.

    The folder gets its name only when it is complete, so a killed save leaves the previous
    checkpoint. The contents do not depend on the mesh and restore bit for bit onto any other.
    Leaves of a `TrainState` that are padded, because the devices do not divide a dim, are written
    without padding.

    Object stores (`gs://`, `s3://`) cannot rename: there a checkpoint is valid once its marker
    file, written last, exists. Until then the replaced one stays readable; afterwards it is
    removed.

    Args:
        path: the folder of the checkpoint, also at `gs://` or `s3://`. An empty folder or an
            earlier checkpoint, damaged or not, is replaced; anything else is an error.
        state: a pytree of arrays, random keys and numbers.
        type: `"sharded"`: every process writes its shards; `"full"`: process 0 writes everything.
        meta: user data that JSON can represent; returned by `read_manifest(path).meta`.

    Raises:
        ConfigError: for an unknown `type`, `"full"` at `gs://` or `s3://`, or a folder that another
            process does not see.
        CheckpointError: if the state has no leaves, a leaf that is not an array, or two leaves with
            one path; if `meta` cannot be written as JSON; if the path has something other than a
            checkpoint; or if the disk fails. Nothing at the path is changed then.
        UnsupportedError: if this type of checkpoint cannot store a dtype.

    Example:
        >>> import jax, jax.numpy as jnp, tempfile
        >>> from axon_dist.checkpoint import load_checkpoint
        >>> state = {"w": jnp.arange(3.0), "key": jax.random.key(0)}
        >>> path = tempfile.mkdtemp() + "/start"
        >>> save_checkpoint(path, state)
        >>> load_checkpoint(path, state)["w"].tolist()
        [0.0, 1.0, 2.0]
    """
    folder = as_place(path, "the checkpoint", CheckpointError)
    if isinstance(folder, Path):
        check_seen(folder.parent, type, "the folder of the checkpoint")
    PendingSave(folder, state, type, {} if meta is None else meta).wait()


def check_seen(folder: Place, type: StateDictType | str, name: str) -> None:
    """Checks that all processes see a folder if all will write there.

    Args:
        folder: the folder in which a checkpoint will be.
        type: how values are written.
        name: names the folder, for the beginning of messages.

    Raises:
        ConfigError: when a process does not see it.
    """
    # Checkpoints of the other type are written by process 0 alone.
    if isinstance(folder, Path) and StateDictType(type) is StateDictType.SHARDED:
        check_shared(folder, name)


class PendingSave:
    """A checkpoint that is being written.

    The constructor copies the state to host memory and starts a thread that writes; afterwards the
    arrays of the state may be donated.

    Args:
        folder: the folder of the checkpoint.
        state: a pytree of arrays.
        type: how values are written.
        meta: user data that JSON can represent.
        score: lower is better; None without one.
        serial: how many checkpoints were written before it.
        then: called by process 0 once the checkpoint has its name.
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
        arrays = without_padding(state, arrays)
        stored = {path: to_stored(array) for path, array in arrays.items()}
        check_dtypes(type, stored)
        size = sum(array.nbytes for array in arrays.values())
        name = on_main(lambda: self._prepare_folder(meta, size))
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
                object_store.begin(folder, int(name), stored)
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
                    object_store.commit(folder, int(name), whole, object_store.writers(checksums))
                else:
                    seal(staging_of(folder), whole)
                    publish(folder)
                then()

        threading.Thread(target=self._finish, args=(complete,), name="checkpoint").start()

    def wait(self) -> None:
        """Waits until the checkpoint is complete; every process must call it.

        Raises:
            CheckpointError: with the reason why it could not be written.
        """
        self.join()
        on_main(self._written.result)

    def join(self) -> BaseException | None:
        """Waits until this process has done its part; returns its error if that failed."""
        concurrent.futures.wait([self._written])
        return self._written.exception()

    def _finish(self, complete: Callable[[], None]) -> None:
        try:
            self._run(complete)
            self._written.set_result(None)
        except BaseException as error:  # Any error must reach the waiting thread.
            self._written.set_exception(error)

    def _prepare_folder(self, meta: Any, size: int) -> str:
        """Prepares the folder; returns a unique name of the save, or the slot in a bucket."""
        check_meta(meta)
        self._run(lambda: check_replaceable(self.folder))

        def clear() -> str:
            if isinstance(self.folder, Address):
                return str(object_store.prepare(self.folder))
            staging = staging_of(self.folder)
            shutil.rmtree(staging, ignore_errors=True)
            make_folder(staging.parent)
            staging.mkdir()
            # Checked before writing, because the stores would fail in every writing thread.
            if (free := shutil.disk_usage(staging).free) < size:
                raise OSError(
                    f"the checkpoint needs {byte_size(size)} and the disk has "
                    f"{byte_size(free)} free"
                )
            return secrets.token_hex(8)

        return self._run(clear)

    def _run(self, action: Callable[[], _T]) -> _T:
        """Runs a part of a save; turns errors of the disk or the store into `CheckpointError`."""
        try:
            return action()
        except Exception as error:
            if isinstance(error, AxonDistError) and not isinstance(error, StoreError):
                raise
            if is_main() and not isinstance(self.folder, Address):
                shutil.rmtree(staging_of(self.folder), ignore_errors=True)
            full = os.strerror(errno.ENOSPC)
            # TensorStore reports a full disk with a line for each of its layers.
            reason = [full] if full in str(error) else str(error).strip().splitlines()
            reason = reason or [repr(error)]
            raise CheckpointError(
                f"could not save checkpoint {str(self.folder)!r}: {reason[0]}; earlier checkpoints "
                "stay. Free space there, or name another folder"
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
        """The shardings of the state."""
        ...


@in_own_context
def load_checkpoint(
    path: str | Place, target: PyTree | HasState, *, parts: str | Collection[str] | None = None
) -> PyTree:
    """Restores a state bit for bit onto the mesh and shardings of a target.

    The mesh, strategy and number of processes may differ from those of the save. Nothing is cast,
    cut or skipped: checkpoint and target must have the same leaves, or with `parts` the same leaves
    in these parts. Every file is verified before it is read, and every value afterwards.

    Args:
        path: the folder of the checkpoint, also at `gs://` or `s3://`.
        target: a tree like the state, of `ShapeDtypeStruct`s with shardings, or of arrays and
            numbers, whose values are ignored; or a `TrainStep`, for its state. Numbers come back
            as numbers of their types, with the 32 bits that JAX keeps of them. Numpy arrays have no
            sharding, and come back replicated over the mesh of the other leaves. Without a mesh
            they come back on the default device, or are refused in a run of several processes. If
            leaves are padded, give the whole `TrainState` or the step: a part of it, such as
            `params`, does not know which leaves are padded.
        parts: the fields of the state to restore; others are not read. With one name, such as
            `"params"`, the target is that field, such as `target.params`. With several, the
            target is a dict of them. For a `TrainStep`, `"params"` are found also where the
            checkpoint has them elsewhere. Of a checkpoint with replicas (DiLoCo), a step without
            replicas takes the outer parameters, rounded to its dtypes. A step with replicas copies
            ordinary parameters to each replica. A parameter that is trained in only one of the two
            is looked up in `params` and `frozen`.

    Returns:
        The state, with the structure of the target.

    Raises:
        CheckpointError: if there is no checkpoint, or it belongs to another model or optimizer;
            the message names the leaf.
        DamagedCheckpointError: if it is unfinished or corrupted; the message names the file.

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
            fields = {name: _part_of(target, name) for name in parts}
            if "params" in fields:
                return _load_with_params(path, target, fields, shapes, parts)
            target = fields
    else:
        shapes = paddings_in(target)
    return _load(path, target, shapes, parts)


@dataclasses.dataclass(frozen=True)
class Refit:
    """How the leaves of a state may differ from those of a checkpoint.

    Args:
        names: paths in the checkpoint, by path in the state, of leaves that moved.
        absent: the paths of the leaves of the state that the checkpoint does not have.
        dropped: the paths of the leaves of the checkpoint that are not read.
        advice: what to do if they differ otherwise.
    """

    names: Mapping[LeafPath, LeafPath] = dataclasses.field(default_factory=dict)
    absent: frozenset[LeafPath] = frozenset()
    dropped: frozenset[LeafPath] = frozenset()
    advice: str = "restore it into the model, optimizer and precision that it was saved from"


FindRefit: TypeAlias = Callable[[Manifest, Collection[LeafPath]], Refit]
"""(the manifest of a checkpoint, the paths of the leaves of a state) -> how they may differ."""


@in_own_context
def load_refitted(path: str | Place, target: PyTree, find: FindRefit) -> PyTree:
    """Restores a state with parts that the checkpoint does not have, or without parts that it has.

    Otherwise as `load_checkpoint`: the rest must be as it was saved, and every file is verified.

    Args:
        path: the folder of the checkpoint.
        target: a tree like the state, of `ShapeDtypeStruct`s with shardings.
        find: says how the state may differ.

    Returns:
        The state, with the leaves of the target itself where the checkpoint has none.

    Raises:
        CheckpointError: if they differ otherwise.
    """
    return _load(path, target, paddings_in(target), None, find)


def _load(
    path: str | Place,
    target: PyTree,
    shapes: Mapping[LeafPath, Shape],
    parts: Collection[str] | None,
    find: FindRefit = lambda manifest, wanted: Refit(),
) -> PyTree:
    """Restores the leaves of a target, of which those in `shapes` are padded."""
    folder = as_place(path, "the checkpoint", CheckpointError)
    targets = described(target)
    evenly: dict[LeafPath, EvenShards] = {}
    for leaf_path in targets.keys() & shapes.keys():
        padded, shape = targets[leaf_path], shapes[leaf_path]
        evenly[leaf_path] = even = even_shards(leaf_path, shape, padded)
        targets[leaf_path] = jax.ShapeDtypeStruct(shape, padded.dtype, sharding=even.target)
    on_main(lambda: check_files(folder, read_manifest(folder)))
    manifest = read_manifest(folder)
    refit = find(manifest, targets)
    targets = {path: leaf for path, leaf in targets.items() if path not in refit.absent}
    names = {**saved_names(manifest.leaves, targets), **refit.names}
    saved = {names[path]: leaf for path, leaf in targets.items()}
    _check_leaves(folder, manifest, saved, parts, refit)
    stored = _read(folder, manifest, saved)
    _check_values(folder, manifest, stored)
    restored = {path: from_stored(stored[names[path]], leaf) for path, leaf in targets.items()}
    restored |= {path: x.stored(restored[path]) for path, x in evenly.items() if path in restored}
    leaves = named_leaves(target)
    values: list[Any] = [restored.get(path, leaf) for path, leaf in leaves.items()]
    return in_form_of(target, values)


def _load_with_params(
    path: str | Place,
    state: Any,
    fields: dict[str, PyTree],
    shapes: Mapping[LeafPath, Shape],
    parts: Collection[str],
) -> PyTree:
    """Restores fields of a state, among them the parameters, wherever the checkpoint has them.

    Args:
        path: the folder of the checkpoint.
        state: the whole state, of shapes with shardings.
        fields: the fields to restore.
        shapes: the shapes in the model of the padded leaves of the state.
        parts: the names of the fields.
    """
    saved = read_manifest(as_place(path, "the checkpoint", CheckpointError)).leaves
    params = fields["params"]
    outer = getattr(state, "outer", None)
    has_outer = any(name.startswith("outer/") for name in saved)
    source = "params/"
    wanted = params
    if has_outer and outer is None:
        source = "outer/"
        wanted = map_with_path(lambda name, x: _as_saved(x, saved.get(f"outer/{name}")), params)
    elif outer is not None and not has_outer:
        # The outer parameters have the shapes without the dim that counts replicas.
        wanted = jax.tree.map(lambda o, p: _with_dtype(o, p.dtype), outer, params)
        own = {name: x for name, x in shapes.items() if not name.startswith("params/")}
        shared = {name: x for name, x in shapes.items() if name.startswith("outer/")}
        shapes = own | {f"params/{k.removeprefix('outer/')}": x for k, x in shared.items()}
    frozen = {name for name, _ in leaves_with_paths(getattr(state, "frozen", {}))}

    def find(manifest: Manifest, paths: Collection[LeafPath]) -> Refit:
        names: dict[LeafPath, LeafPath] = {}
        sources = {"params": (source, "frozen/"), "frozen": ("frozen/", source)}
        for full in paths:
            field, _, name = full.partition("/")
            if field in sources:
                own, other = (start + name for start in sources[field])
                names[full] = other if own not in saved and other in saved else own
        others = [name for name in manifest.leaves if name.startswith("params/")]
        unread = [x for x in others if source == "outer/" or x.removeprefix("params/") in frozen]
        return Refit(names, dropped=frozenset(unread))

    loaded = _load(path, {**fields, "params": wanted}, shapes, parts, find)

    def in_form_of_step(tree: PyTree) -> PyTree:
        return jax.tree.map(lambda x, p: jnp.broadcast_to(x.astype(p.dtype), p.shape), tree, params)

    if wanted is not params:
        places = jax.tree.map(lambda p: p.sharding, params)
        loaded["params"] = jax.jit(in_form_of_step, out_shardings=places)(loaded["params"])
    return loaded


def _as_saved(leaf: jax.ShapeDtypeStruct, spec: LeafSpec | None) -> jax.ShapeDtypeStruct:
    """A leaf with the dtype that it has in the checkpoint, if that is at least as wide as here."""
    dtype = jnp.dtype(leaf.dtype if spec is None else spec.dtype)
    return _with_dtype(leaf, dtype if jnp.promote_types(dtype, leaf.dtype) == dtype else leaf.dtype)


def _with_dtype(leaf: jax.ShapeDtypeStruct, dtype: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, dtype, sharding=leaf.sharding)


def _part_of(state: PyTree, name: str) -> PyTree:
    """The field of a state.

    Raises:
        CheckpointError: if it has no such field.
    """
    named = dataclasses.fields(state) if dataclasses.is_dataclass(state) else ()
    fields = [field.name for field in named if not field.metadata.get("static")]
    if fields and name not in fields:
        raise CheckpointError(
            f"parts: got {name!r:.80}; the parts of a {type(state).__name__} are "
            f"{', '.join(fields)}"
        )
    return getattr(state, name)


def _check_leaves(
    folder: Place,
    manifest: Manifest,
    targets: dict[LeafPath, jax.ShapeDtypeStruct],
    parts: Collection[str] | None,
    refit: Refit,
) -> None:
    wanted = {path: spec_of(target) for path, target in targets.items()}

    def is_selected(path):
        if path in refit.dropped and path not in wanted:
            return False
        return parts is None or path.split("/")[0] in parts or path in wanted

    saved = {path: spec for path, spec in manifest.leaves.items() if is_selected(path)}
    unlike = differences(saved, wanted)
    if unlike:
        raise CheckpointError(
            f"checkpoint {str(folder)!r} does not fit: {first_few(unlike, between='; ')}; "
            f"{refit.advice}"
        )


def _read(
    folder: Place, manifest: Manifest, targets: dict[LeafPath, jax.ShapeDtypeStruct]
) -> dict[LeafPath, Array]:
    stored = {path: stored_target(target) for path, target in targets.items()}
    try:
        if object_store.is_from_bucket(manifest):
            return object_store.restore(folder, manifest, stored)
        there = folder
        if isinstance(there, Address):
            # The checkpoint was written on a disk and then copied to the bucket: copy it back.
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
                f"checkpoint {str(folder)!r}: cannot be read, and holds {stray}, which was added "
                "after it was written; remove it, or use another checkpoint"
            ) from error
        lines = str(error).strip().splitlines() or [repr(error)]
        reason = lines[0].rstrip(".")
        raise CheckpointError(
            f"cannot read checkpoint {str(folder)!r}: {reason}. Its files are intact; install "
            f"the versions that wrote it: {manifest.versions}",
            code="checkpoint-unreadable",
        ) from error


def check_type(folder: Place, type: StateDictType) -> None:
    """Raises `ConfigError` if a checkpoint of this type cannot be written to this folder."""
    if isinstance(folder, Address) and type is StateDictType.FULL:
        raise ConfigError(
            f"checkpoint.type: full is not supported at {str(folder)!r}: at gs:// and s3:// every "
            "process writes its own shards. Use sharded, or a folder on disk",
            code="full-in-object-store",
        )


def _check_values(folder: Place, manifest: Manifest, stored: dict[LeafPath, Array]) -> None:
    sums = jax.device_get(leaf_checksums(stored))
    for path, value in sums.items():
        if int(value) != manifest.checksums[path]:
            raise DamagedCheckpointError(
                f"checkpoint {str(folder)!r}: leaf {path} has checksum {int(value):08x} but was "
                f"saved with {manifest.checksums[path]:08x}; use another checkpoint",
                code="checkpoint-checksum",
            )
