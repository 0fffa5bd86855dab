"""Who am I, how many are we, and waiting for everybody."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import Mesh, PartitionSpec

from ..core.errors import GroupError
from ..core.told import told
from ..core.typing import Array
from ..mesh import GROUP, ProcessGroup, process_index
from .place import is_inside, position


@told(group=GROUP)
def rank(group: ProcessGroup) -> Array:
    """Returns this rank's place within its group.

    Args:
        group: the ranks among which to count.

    Returns:
        Inside `shard_map` an int32 scalar, 0..size-1, row-major over the axes of the group; outside
        the rank-stacked array of them, shape `(world_size,)`. -1 for ranks outside a group by
        ranks.

    Example:
        >>> from axon_dist.mesh import World
        >>> rank(World.emulate(4, "dp=2,tp=2").group("dp"))
        Array([0, 0, 1, 1], dtype=int32)
    """
    if is_inside(group):
        return position(group)
    places = np.full(group.world_size, -1, np.int32)
    for ranks in group.partition():
        places[list(ranks)] = np.arange(group.size)
    return jnp.asarray(places)


@told(group=GROUP)
def world_size(group: ProcessGroup) -> int:
    """Returns how many ranks take part in a collective of the group, as a Python number."""
    return group.size


def is_main_process() -> bool:
    """Tells whether this is process 0, the one that prints and writes files.

    It asks about processes, of which each may own many ranks: `rank(group) == 0` asks about one.

    Example:
        >>> is_main_process()
        True
    """
    return process_index() == 0


@told(group=GROUP)
def barrier(group: ProcessGroup) -> None:
    """Waits until every device of the group's mesh, and so every process, has come here.

    Every process that owns devices of the mesh must call it. Work that was started before may
    still run where nothing orders it; to wait for an array, block on the array.

    Args:
        group: any group of the mesh; a group over some axes still waits for all of them.

    Raises:
        GroupError: inside `shard_map` or `jit`. A compiled program orders its work by the data it
            hands on, so there is nothing that a barrier could hold back.

    Example:
        >>> from axon_dist.mesh import World
        >>> barrier(World.emulate(4).default_group)
    """
    met = None if is_inside(group) else _meeting(group.mesh)()
    if met is None or isinstance(met, Tracer):
        raise GroupError(
            f"barrier was called for the group {group} inside a compiled function, where order "
            "follows the data and nobody waits; call it outside of jit and shard_map, or make the "
            "later value depend on the earlier one with jax.lax.optimization_barrier"
        )
    jax.effects_barrier()
    met.block_until_ready()


@functools.lru_cache(maxsize=32)
def _meeting(mesh: Mesh) -> Callable[[], Array]:
    """A sum over all devices: it can finish nowhere before all of them have come to it."""

    def add():
        return jax.lax.psum(jax.lax.axis_index(mesh.axis_names), mesh.axis_names)

    return jax.jit(jax.shard_map(add, mesh=mesh, in_specs=(), out_specs=PartitionSpec()))
