"""Which process brings which rows of a global batch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from jax.sharding import Mesh

from ..core.errors import MeshError


def batch_shares(mesh: Mesh, axes: Sequence[str]) -> dict[int, int]:
    """Numbers the parts of a batch that processes bring, by their first row.

    Args:
        mesh: devices of one or several processes.
        axes: the mesh axes that split the rows.

    Returns:
        The part of each process; processes with the same rows have the same one.

    Raises:
        MeshError: when the rows of two processes overlap in part.
    """
    process_of = np.vectorize(lambda device: device.process_index, otypes=[int])(mesh.devices)
    rows = _rows_of_devices(mesh, axes)
    owned = {int(p): tuple(np.unique(rows[process_of == p])) for p in np.unique(process_of)}
    parts = sorted(set(owned.values()))
    if len({len(part) for part in parts}) > 1 or sum(map(len, parts)) != rows.max() + 1:
        listed = {process: [int(row) for row in part] for process, part in owned.items()}
        raise MeshError(
            f"along the batch axes {', '.join(axes)} the processes own the ranks {listed}; two of "
            "them must own the same ranks or none in common, and all equally many: reorder the "
            "mesh axes, or change their sizes"
        )
    return {process: parts.index(part) for process, part in owned.items()}


def check_axes(mesh: Mesh, axes: Sequence[str]) -> None:
    """Raises `MeshError` unless axes are a list of axes of a mesh."""
    is_list = isinstance(axes, Iterable) and not isinstance(axes, (str, Mapping))
    odd = [axis for axis in axes if axis not in mesh.axis_names] if is_list else [axes]
    if odd:
        raise MeshError(
            f"got {odd[0]!r:.80} for batch axes; give a list of axes of the mesh, such as "
            f"{list(mesh.axis_names)}"
        )


def _rows_of_devices(mesh: Mesh, axes: Sequence[str]) -> np.ndarray[Any, Any]:
    """The position of every device along the batch axes, the first axis being the slowest."""
    rows = np.zeros(mesh.devices.shape, int)
    for axis in axes:
        position = mesh.axis_names.index(axis)
        rows = rows * mesh.shape[axis] + np.indices(mesh.devices.shape)[position]
    return rows
