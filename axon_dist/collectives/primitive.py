"""The sum, maximum and scatter that every collective is made of, over the axes of a group."""

from __future__ import annotations

from ..core import reduction
from ..core.typing import Array
from ..mesh import ProcessGroup


def all_sum(x: Array, group: ProcessGroup) -> Array:
    """Adds up over the axes of the group; bfloat16 and int8 stay what they are."""
    return reduction.all_sum(x, group.axes)


def all_max(x: Array, group: ProcessGroup) -> Array:
    """Takes the maximum over the axes of the group; NaNs are lost on CPU."""
    return reduction.all_max(x, group.axes)


def all_min(x: Array, group: ProcessGroup) -> Array:
    """Takes the minimum over the axes of the group; NaNs are lost on CPU."""
    return reduction.all_min(x, group.axes)


def sum_scatter(x: Array, group: ProcessGroup, dim: int) -> Array:
    """Adds up over the axes of the group and keeps this rank's equal slice of `dim`."""
    return reduction.sum_scatter(x, group.axes, dim)
