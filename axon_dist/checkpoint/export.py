"""`export_safetensors`: a state, or a part of it, for programs that do not know this library."""

from __future__ import annotations

import collections
import os
from collections.abc import Mapping
from pathlib import Path

from ..core.typing import PyTree
from .agree import is_main, on_main
from .full import gather
from .leaves import as_array, named_leaves, to_stored
from .tensorfile import plan_order, write_tensors


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
