"""Which devices share fast links, and their order in a mesh with slow axes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ..core.errors import MeshError
from .spec import SLOW_AXES, MeshSpec


def by_links(spec: MeshSpec, devices: Sequence[Any]) -> list[list[Any]]:
    """Divides devices among the ranks of the slow axes, so that no other axis leaves a node.

    A node is what JAX calls a slice, the devices that reach each other without the network; where
    all are of one slice, the devices of a process.

    Args:
        spec: resolved axes; those of `SLOW_AXES` stand first.
        devices: as many.

    Returns:
        For every rank of the slow axes together its devices, those of a node side by side; all of
        them in one list where the mesh has no slow axis, or there is one node.

    Raises:
        MeshError: when a slow axis stands behind another, nodes are of unlike sizes, or the other
            axes cannot stay within them.

    Example:
        >>> from types import SimpleNamespace
        >>> spread = [SimpleNamespace(id=n, slice_index=n % 2, process_index=0) for n in range(4)]
        >>> [[d.id for d in part] for part in by_links(MeshSpec("nodes=2,fsdp=2"), spread)]
        [[0, 2], [1, 3]]
    """
    slow = [axis for axis in spec.names if axis in SLOW_AXES and spec[axis] > 1]
    if not slow:
        return [list(devices)]
    fast = [axis for axis in spec.names if axis not in SLOW_AXES]
    if list(spec.names[: len(spec.names) - len(fast)]) != [a for a in spec.names if a in SLOW_AXES]:
        raise MeshError(
            f"mesh {spec} has {slow[0]!r} behind another axis; axes over slow links come first, "
            f"so that the others lie within: {','.join(f'{a}={spec[a]}' for a in [*slow, *fast])}"
        )
    kind, nodes = _nodes(devices)
    if len(nodes) == 1:
        return [list(devices)]
    within, size = math.prod(spec[axis] for axis in fast), len(nodes[0])
    sizes = sorted({len(node) for node in nodes})
    fits = size % within == 0 or (kind == "process" and within % size == 0)
    if len(sizes) > 1 or not fits:
        axes = "×".join(f"{axis}={spec[axis]}" for axis in fast) or "1"
        raise MeshError(
            f"mesh {spec} keeps {axes} within a node, which is {within} devices, and there are "
            f"{len(nodes)} {_PLURAL[kind]} of {' or '.join(map(str, sizes))} devices; give "
            f"{' × '.join(slow)} the size {len(nodes)}, or a multiple of it, and the other axes "
            "what a node has"
        )
    ordered = [device for node in nodes for device in node]
    return [ordered[start : start + within] for start in range(0, len(ordered), within)]


_PLURAL = {"slice": "slices", "process": "processes"}


def _nodes(devices: Sequence[Any]) -> tuple[str, list[list[Any]]]:
    """What a node is here, and the devices of each, in the order of their first ones."""
    slices = [getattr(device, "slice_index", None) for device in devices]
    kind, keys = "slice", slices
    if len(set(slices)) < 2:
        kind, keys = "process", [device.process_index for device in devices]
    found: dict[Any, list[Any]] = {}
    for key, device in zip(keys, devices, strict=True):
        found.setdefault(key, []).append(device)
    return kind, list(found.values())
