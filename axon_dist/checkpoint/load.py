"""`load_checkpoint`: a state from a folder onto any mesh, every value checked."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import jax

from ..core.errors import CheckpointError, DamagedCheckpointError
from ..core.files import as_path
from ..core.told import TEXTS
from ..core.typing import Array, PyTree
from ..core.typing import Path as LeafPath
from .layout import (
    described,
    differences,
    from_stored,
    named_leaves,
    on_main,
    shortened,
    stored_target,
)
from .manifest import Manifest, spec_of
from .seal import check_files, leaf_checksums, read_manifest, stray_in
from .stores import STORES


def load_checkpoint(
    path: str | Path, target: PyTree, *, parts: str | Collection[str] | None = None
) -> PyTree:
    """Restores a state, bit for bit, onto the mesh and the layout that the target names.

    Neither the mesh, nor the strategy, nor the number of processes has to be the one that the
    state was saved on. Nothing is cast, cut, or left out: the leaves of checkpoint and target have
    to be the same, or with `parts` those of some parts of it. Every file is checked before it is
    read, and every value after.

    Args:
        path: the folder of the checkpoint.
        target: a tree like the state, of `ShapeDtypeStruct`s with shardings or of arrays, whose
            values are not looked at. `target_of(step.abstract_state, step.state_shardings)`
            makes that of a training step.
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
        return load_checkpoint(path, {parts: target}, parts=(parts,))[parts]
    if parts is not None:
        TEXTS.check("load_checkpoint", "parts", parts)
    folder = as_path(path, "the checkpoint", CheckpointError)
    targets = {path: described(path, leaf) for path, leaf in named_leaves(target).items()}
    on_main(lambda: check_files(folder, read_manifest(folder)))
    manifest = read_manifest(folder)
    _check_leaves(folder, manifest, targets, parts)
    stored = _read(folder, manifest, targets)
    _check_values(folder, manifest, stored)
    leaves = [from_stored(stored[path], leaf) for path, leaf in targets.items()]
    return jax.tree.unflatten(jax.tree.structure(target), leaves)


def _check_leaves(
    folder: Path,
    manifest: Manifest,
    targets: dict[LeafPath, jax.ShapeDtypeStruct],
    parts: Collection[str] | None,
) -> None:
    wanted = {path: spec_of(target) for path, target in targets.items()}

    def is_asked(path):
        return parts is None or path.split("/")[0] in parts

    saved = {path: spec for path, spec in manifest.leaves.items() if is_asked(path)}
    unlike = differences(saved, wanted)
    if unlike:
        raise CheckpointError(
            f"checkpoint {str(folder)!r} does not fit: {shortened(unlike)}; restore it into the "
            "model, optimizer and precision that it was saved from"
        )


def _read(
    folder: Path, manifest: Manifest, targets: dict[LeafPath, jax.ShapeDtypeStruct]
) -> dict[LeafPath, Array]:
    stored = {path: stored_target(target) for path, target in targets.items()}
    try:
        return STORES[manifest.type].restore(folder, stored)
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


def _check_values(folder: Path, manifest: Manifest, stored: dict[LeafPath, Array]) -> None:
    sums = jax.device_get(leaf_checksums(stored))
    for path, value in sums.items():
        if int(value) != manifest.checksums[path]:
            raise DamagedCheckpointError(
                f"checkpoint {str(folder)!r}: leaf {path} came back with the checksum "
                f"{int(value):08x}, {manifest.checksums[path]:08x} was saved; use another one"
            )
