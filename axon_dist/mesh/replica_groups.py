"""Which devices talk to each other, and along which mesh axes.

XLA writes the groups of a collective in four notations; all become tuples of device positions:

* `{{0,1},{2,3}}`, a list of groups, and `{}` for one group of all devices;
* `[4,2]<=[2,2,2]T(0,2,1)`, an iota that is reshaped, transposed and cut into rows;
* `mesh['a'=4,'b'=2] {'a'}`, the axes of a mesh (those of XLA, not of the user) that are joined;
* the same with `device_ids=([2,4]T(1,0))` for a mesh in another order, or with a sub-axis
  `'b':(2)2`, which is the part of size 2 of axis b behind a part of size 2.

Positions count along `mesh.devices.flat`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from typing import TypeAlias

import jax
import numpy as np

Groups: TypeAlias = tuple[tuple[int, ...], ...]
"""Groups of device positions, each in the order in which the collective counts them."""

_LISTS = re.compile(r"replica_groups=(\{\{.*?\}\}|\{\})")
_IOTA = re.compile(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_MESH = re.compile(r"replica_groups=@?mesh\[(.*?)\](?:, device_ids=\((.*?\)?)\))? \{(.*?)\}")
_DEVICE_IDS = re.compile(r"\[([\d,]+)\](?:T\(([\d,]+)\))?$")
_MESH_AXIS = re.compile(r"'([^']+)'=(\d+)")
_AXIS_REF = re.compile(r"'([^']+)'(?::\((\d+)\)(\d+))?")
_PAIRS = re.compile(r'source_target_pairs="?\{(.*?\})\}')
_GROUP = re.compile(r"\{([\d,\s]*)\}")


def replica_groups(attributes: str, num_devices: int) -> Groups:
    """Reads the groups of a collective.

    Args:
        attributes: the text behind the operands of the instruction.
        num_devices: how many devices run the program, which `{}` stands for.

    Returns:
        The groups; one of all devices where the instruction names none.

    Example:
        >>> replica_groups("replica_groups=[2,2]<=[2,2]T(1,0), dimensions={0}", 4)
        ((0, 2), (1, 3))
        >>> replica_groups("replica_groups=mesh['a'=2,'b'=2] {'b'}", 4)
        ((0, 1), (2, 3))
    """
    everyone = (tuple(range(num_devices)),)
    if match := _LISTS.search(attributes):
        listed = tuple(_ints(group) for group in _GROUP.findall(match.group(1)[1:-1]))
        return listed or everyone
    if match := _IOTA.search(attributes):
        rows, dims, order = (_ints(part or "") for part in match.groups())
        return _rows(_iota(dims, order).reshape(rows))
    if match := _MESH.search(attributes):
        return _mesh_groups(*match.groups())
    return everyone


def source_target_pairs(attributes: str) -> Groups:
    """Reads who sends to whom in a collective-permute.

    Example:
        >>> source_target_pairs("channel_id=1, source_target_pairs={{0,1},{1,0}}")
        ((0, 1), (1, 0))
    """
    match = _PAIRS.search(attributes)
    return tuple(_ints(pair) for pair in _GROUP.findall(match.group(1))) if match else ()


def spanned_axes(groups: Groups, mesh: jax.sharding.Mesh | None) -> tuple[str, ...] | None:
    """Names the mesh axes that the groups of a collective span.

    Args:
        groups: device positions, as `replica_groups` reads them.
        mesh: the mesh that the program was compiled for.

    Returns:
        The axes whose joint groups are exactly these; `()` where no device talks to another; None
        where no set of axes matches, or without a mesh.
    """
    if mesh is None:
        return None
    axes = _varying_axes(groups, mesh)
    expected = math.prod(mesh.shape[axis] for axis in axes)
    regular = all(len(set(group)) == expected for group in groups)
    return axes if regular and sum(map(len, groups)) == mesh.size else None


def permuted_axes(pairs: Groups, mesh: jax.sharding.Mesh | None) -> tuple[str, ...] | None:
    """Names the mesh axes along which a collective-permute moves data."""
    return None if mesh is None else _varying_axes(pairs, mesh)


def _varying_axes(groups: Iterable[tuple[int, ...]], mesh: jax.sharding.Mesh) -> tuple[str, ...]:
    varies = np.zeros(len(mesh.axis_names), bool)
    for group in groups:
        coordinates = np.stack(np.unravel_index(np.array(group, int), mesh.devices.shape))
        varies |= (coordinates != coordinates[:, :1]).any(axis=1)
    return tuple(name for name, moved in zip(mesh.axis_names, varies, strict=True) if moved)


def _mesh_groups(axes: str, device_ids: str | None, joined: str) -> Groups:
    sizes = {name: int(size) for name, size in _MESH_AXIS.findall(axes)}
    parts = [(name, int(pre or 1), int(size or 0)) for name, pre, size in _AXIS_REF.findall(joined)]
    dims: list[int] = []
    dim_of: dict[tuple[str, int], int] = {}
    for name, full in sizes.items():
        cuts = sorted((before, size or full) for axis, before, size in parts if axis == name)
        for before, size in _cut(full, cuts):
            dim_of[name, before] = len(dims)
            dims.append(size)
    last = [dim_of[name, before] for name, before, _ in parts]
    rest = [dim for dim in range(len(dims)) if dim not in last]
    group_size = math.prod(dims[dim] for dim in last)
    devices = _device_order(device_ids, math.prod(dims)).reshape(dims)
    return _rows(devices.transpose(rest + last).reshape(-1, group_size))


def _cut(full: int, cuts: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Splits an axis into the parts named, as (size before it, size), and those between them."""
    parts, edge = [], 1
    for before, size in cuts:
        if before > edge:
            parts.append((edge, before // edge))
        parts.append((before, size))
        edge = before * size
    return [*parts, (edge, full // edge)] if edge < full or not parts else parts


def _device_order(device_ids: str | None, num_devices: int) -> np.ndarray:
    if device_ids is None:
        return np.arange(num_devices)
    if match := _DEVICE_IDS.match(device_ids):
        return _iota(_ints(match.group(1)), _ints(match.group(2) or ""))
    return np.array(_ints(device_ids))


def _iota(dims: tuple[int, ...], order: tuple[int, ...]) -> np.ndarray:
    iota = np.arange(math.prod(dims)).reshape(dims)
    return iota.transpose(order or range(len(dims)))


def _rows(array: np.ndarray) -> Groups:
    return tuple(tuple(int(device) for device in row) for row in array)


def _ints(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(",") if number.strip())
