"""The sum, maximum and scatter that every collective is made of, safe on every platform."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from ..core.typing import Array
from ..mesh import ProcessGroup
from .place import varying


def all_sum(x: Array, group: ProcessGroup) -> Array:
    """Adds up over the axes of the group; bfloat16 and int8 stay what they are."""
    return _widened(x, group, lambda v: jax.lax.psum(v, group.axes))


def all_max(x: Array, group: ProcessGroup) -> Array:
    """Takes the maximum over the axes of the group; NaNs are lost on CPU."""
    return _widened(x, group, lambda v: jax.lax.pmax(v, group.axes))


def all_min(x: Array, group: ProcessGroup) -> Array:
    """Takes the minimum over the axes of the group; NaNs are lost on CPU."""
    return _widened(x, group, lambda v: jax.lax.pmin(v, group.axes))


def sum_scatter(x: Array, group: ProcessGroup, dim: int) -> Array:
    """Adds up over the axes of the group and keeps this rank's equal slice of `dim`."""
    scatter = lambda v: jax.lax.psum_scatter(v, group.axes, scatter_dimension=dim, tiled=True)
    return _widened(x, group, scatter)


def _widened(x: Array, group: ProcessGroup, collective: Callable[[Array], Array]) -> Array:
    """Goes through float32 where XLA:CPU would abort the process.

    A bfloat16 reduction over the manual axis of a partly automatic `shard_map` dies there in the
    pass AllReducePromotion ("Invalid binary instruction opcode copy"). The cast comes before the
    change of type, whose transpose is a reduction too.
    """
    mesh = jax.sharding.get_abstract_mesh()
    on_cpu = group.mesh.devices.flat[0].platform == "cpu"
    partly = len(mesh.manual_axes) < len(mesh.axis_names)
    if x.dtype == jnp.bfloat16 and on_cpu and partly:
        return collective(varying(x.astype(jnp.float32), group.axes)).astype(jnp.bfloat16)
    return collective(varying(x, group.axes))
