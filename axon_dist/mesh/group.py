"""`ProcessGroup`: the ranks that take part in a collective."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from ..core.errors import GroupError, did_you_mean
from ..core.told import is_whole
from ..core.typing import Array


@dataclasses.dataclass(frozen=True)
class ProcessGroup:
    """Ranks that reduce, gather and send among each other: mesh axes, or a list of ranks.

    A group by axes is one of several parallel groups at once: on a mesh `dp=2,tp=2` the group
    over `tp` is `[0, 1]` and `[2, 3]`, and a collective acts within each. A group by a list of
    ranks is that one group; the ranks outside it keep their values.

    Args:
        mesh: the devices, with named axes.
        axes: the mesh axes the group spans, in mesh order. A group by ranks spans all of them.
        members: the global ranks of a group by rank list, or None for a group by axes.

    Raises:
        GroupError: for unknown axes; for an empty list of ranks, a rank twice, or out of range.

    Example:
        >>> from axon_dist.mesh import World
        >>> world = World.emulate(8, "dp=2,pp=2,tp=2")
        >>> world.group("tp").partition()
        ((0, 1), (2, 3), (4, 5), (6, 7))
        >>> world.new_group([0, 2]).contains(1)
        False
    """

    mesh: Mesh
    axes: tuple[str, ...]
    members: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        self.validate()

    def validate(self) -> None:
        """Raises `GroupError` unless the axes exist and the ranks are distinct and in range."""
        if not isinstance(self.mesh, (Mesh, AbstractMesh)) or not isinstance(self.axes, tuple):
            raise GroupError(
                f"got mesh={self.mesh!r:.60} and axes={self.axes!r:.60} for a group; take groups "
                'from their world: world.group("dp")'
            )
        for axis in self.axes:
            if axis not in self.mesh.axis_names:
                raise GroupError(
                    f"the mesh has no axis {axis!r}.{did_you_mean(axis, self.mesh.axis_names)}"
                )
        if not self.axes:
            raise GroupError(f"a group needs at least one axis of {self.mesh.axis_names}; got none")
        if len(set(self.axes)) < len(self.axes):
            raise GroupError(f"axes {self.axes} name an axis twice; a group spans each axis once")
        if self.members is not None:
            _check_members(self.members, self.mesh.size)
            if self.axes != self.mesh.axis_names:
                raise GroupError(
                    f"a group by ranks spans all axes {self.mesh.axis_names} of the mesh, and got "
                    f"{self.axes}; make it with World.new_group(ranks)"
                )

    @property
    def size(self) -> int:
        """How many ranks take part in one collective."""
        if self.members is not None:
            return len(self.members)
        return math.prod(self.mesh.shape[axis] for axis in self.axes)

    @property
    def world_size(self) -> int:
        """How many ranks the whole mesh has, members or not."""
        return self.mesh.size

    @property
    def ranks(self) -> tuple[int, ...]:
        """The global ranks of the group; of a group by axes, those of the group of rank 0."""
        return self.partition()[0]

    def partition(self) -> tuple[tuple[int, ...], ...]:
        """The complete set of parallel groups, each as its global ranks in group order."""
        if self.members is not None:
            return (self.members,)
        grid = np.arange(self.mesh.size).reshape(self.mesh.devices.shape)
        names = list(self.mesh.axis_names)
        kept = [names.index(axis) for axis in self.axes]
        rest = [dim for dim in range(len(names)) if dim not in kept]
        rows = grid.transpose(rest + kept).reshape(-1, self.size)
        return tuple(tuple(int(rank) for rank in row) for row in rows)

    def contains(self, rank: int) -> bool:
        """Tells whether a global rank takes part; in a group by axes every rank does."""
        return self._group_with(rank) is not None

    def group_of(self, rank: int) -> tuple[int, ...]:
        """The global ranks that a rank talks to, itself included."""
        if (group := self._group_with(rank)) is not None:
            return group
        raise GroupError(
            f"rank {rank} is not in the group {self.ranks}; ask `contains` first"
            if 0 <= rank < self.world_size
            else f"rank {rank} is not in a world of {self.world_size}; it must lie in "
            f"0..{self.world_size - 1}"
        )

    def _group_with(self, rank: int) -> tuple[int, ...] | None:
        if not is_whole(rank):
            raise GroupError(f"got rank {rank!r:.60}, a {type(rank).__name__}; give a whole number")
        return next((group for group in self.partition() if rank in group), None)

    def spmd(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Runs a per-rank function on rank-stacked arrays.

        Row r of every argument is what rank r sees, and row r of every result is what rank r
        returned. Inside, every mesh axis is manual, so the collectives of this library act on the
        value of the rank. It is the deterministic test mode: the whole world in one array.

        Args:
            function: maps arrays of one rank to a pytree of arrays of one rank.

        Returns:
            The same function of arrays with a leading dim of size `world_size`.

        Example:
            >>> import jax.numpy as jnp
            >>> from axon_dist.mesh import World
            >>> world = World.emulate(4)
            >>> world.default_group.spmd(lambda x: 2 * x)(jnp.arange(4.0))
            Array([0., 2., 4., 6.], dtype=float32)
        """
        spec = PartitionSpec(self.mesh.axis_names)

        def body(*stacked: Any) -> Array:
            rows = jax.tree.map(lambda x: x[0], stacked)
            return jax.tree.map(lambda y: jax.numpy.asarray(y)[None], function(*rows))

        mapped = jax.shard_map(body, mesh=self.mesh, in_specs=spec, out_specs=spec, check_vma=False)

        def run(*stacked: Any) -> Array:
            _check_stacked(stacked, self.world_size)
            return mapped(*jax.tree.map(jax.numpy.asarray, stacked))

        return jax.jit(run)

    def __str__(self) -> str:
        if self.members is not None:
            return f"ranks {list(self.members)} of {self.world_size}"
        return "×".join(f"{axis}={self.mesh.shape[axis]}" for axis in self.axes)


def _check_members(members: tuple[int, ...], world_size: int) -> None:
    if not isinstance(members, (tuple, list)) or not all(map(is_whole, members)):
        raise GroupError(
            f"got the ranks {members!r:.80}; give whole numbers, as in world.new_group([0, 2])"
        )
    if not members:
        raise GroupError("got an empty list of ranks; a group needs at least one")
    if len(set(members)) < len(members):
        raise GroupError(f"ranks {list(members)} name a rank twice; each rank joins a group once")
    wrong = [rank for rank in members if not 0 <= rank < world_size]
    if wrong:
        raise GroupError(
            f"ranks {wrong} do not exist in a world of {world_size}; ranks are 0..{world_size - 1}"
        )


def _check_stacked(args: Any, world_size: int) -> None:
    for leaf in jax.tree.leaves(args):
        shape = np.shape(leaf)
        if not shape or shape[0] != world_size:
            raise GroupError(
                f"got an array of shape {shape} outside shard_map; there it must be rank-stacked: "
                f"dim 0 = world size {world_size}, row r the value of rank r"
            )
