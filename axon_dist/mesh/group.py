"""`ProcessGroup`: the ranks that take part in a collective; and parsers of XLA's replica groups.

XLA writes the groups of a collective in four notations; all become tuples of device positions:

* `{{0,1},{2,3}}`, a list of groups, and `{}` for one group of all devices;
* `[4,2]<=[2,2,2]T(0,2,1)`, an iota that is reshaped, transposed and cut into rows;
* `mesh['a'=4,'b'=2] {'a'}`, the axes that a group spans, of a mesh of XLA (not the user's);
* the same with `device_ids=([2,4]T(1,0))` for a mesh in another order, or with a sub-axis
  `'b':(2)2`, the part of size 2 of axis b after a part of size 2.

Positions count along `mesh.devices.flat`.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Iterable
from types import MappingProxyType
from typing import Any, NoReturn, TypeAlias

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from ..core.checks import FUNCTION, is_whole
from ..core.errors import GroupError, NoAttributeError, did_you_mean
from ..core.own_context import own_context
from ..core.typing import Array
from ..core.words import ranges

_ELSEWHERE: MappingProxyType[str, str] = MappingProxyType(
    {
        "mock": "emulated devices are a world's: World.emulate(8).default_group",
        "rank": "one program runs on all ranks, so a rank is known only inside it: call "
        "axon_dist.rank(group) in group.spmd(function) or shard_map",
    }
)
"""Attributes that groups have in other libraries, and the replacement in this one."""


class _Group(type):
    """Raises helpful errors for attributes that groups have in other libraries."""

    def __getattr__(cls, name: str) -> NoReturn:
        _raise_no_attribute(cls, name)


def _raise_no_attribute(cls: type, name: str) -> NoReturn:
    public = [known for known in dir(cls) if not known.startswith("_")]
    hint = _ELSEWHERE.get(name) or did_you_mean(name, public).strip()
    raise NoAttributeError(f"a ProcessGroup has no {name!r}; {hint}")


@dataclasses.dataclass(frozen=True)
class ProcessGroup(metaclass=_Group):
    """Ranks that communicate in a collective: those along mesh axes, or a list of ranks.

    A group by axes is one of several parallel groups at once: on a mesh `dp=2,tp=2` the group
    over `tp` is `[0, 1]` and `[2, 3]`, and a collective acts within each. A group by a list of
    ranks is that one group; the ranks outside it keep their values.

    Args:
        mesh: the devices, with named axes.
        axes: the mesh axes the group spans; its ranks are counted row-major in this order, which
            need not be the mesh's. A group by ranks spans all axes of the mesh.
        members: the global ranks of a group by rank list, or None for a group by axes.

    Raises:
        GroupError: for unknown axes, and for ranks that do not exist, are repeated or out of range.

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

    def __getattr__(self, name: str) -> NoReturn:
        _raise_no_attribute(type(self), name)

    def validate(self) -> None:
        """Raises `GroupError` unless the axes exist and the ranks are distinct and in range."""
        if not isinstance(self.mesh, (Mesh, AbstractMesh)) or not isinstance(self.axes, tuple):
            raise GroupError(
                f"got mesh={self.mesh!r:.60} and axes={self.axes!r:.60} for a group; take groups "
                'from their world: world.group("dp")'
            )
        for axis in self.axes:
            if not isinstance(axis, str) or axis not in self.mesh.axis_names:
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
        """The number of ranks in one collective."""
        if self.members is not None:
            return len(self.members)
        return math.prod(self.mesh.shape[axis] for axis in self.axes)

    @property
    def world_size(self) -> int:
        """The number of ranks of the whole mesh, members or not."""
        return self.mesh.size

    @property
    def ranks(self) -> tuple[int, ...]:
        """The global ranks of the group; for a group by axes, of the one that contains rank 0."""
        return self.partition()[0]

    def partition(self) -> tuple[tuple[int, ...], ...]:
        """All parallel groups, each as its global ranks in group order."""
        if self.members is not None:
            return (self.members,)
        grid = np.arange(self.mesh.size).reshape(self.mesh.devices.shape)
        names = list(self.mesh.axis_names)
        dims = [names.index(axis) for axis in self.axes]
        rest = [dim for dim in range(len(names)) if dim not in dims]
        rows = grid.transpose(rest + dims).reshape(-1, self.size)
        return _rows(rows)

    def contains(self, rank: int) -> bool:
        """Whether a global rank is a member; in a group by axes every rank is."""
        return self._group_with(rank) is not None

    def group_of(self, rank: int) -> tuple[int, ...]:
        """The global ranks that a rank communicates with, including itself."""
        if (group := self._group_with(rank)) is not None:
            return group
        raise GroupError(
            f"rank {rank} is not in the group {self.ranks}; ask `contains` first"
            if 0 <= rank < self.world_size
            else f"rank {rank} is not in a world of {self.world_size}; it must be in "
            f"0..{self.world_size - 1}"
        )

    def _group_with(self, rank: int) -> tuple[int, ...] | None:
        if not is_whole(rank):
            raise GroupError(f"got rank {rank!r:.60}, a {type(rank).__name__}; give a whole number")
        return next((group for group in self.partition() if rank in group), None)

    def spmd(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Maps a per-rank function over rank-stacked arrays.

        Rank r gets row r of every argument, and its results are row r of every result. Inside,
        every mesh axis is manual, so the collectives of this library act on the rank's value. It
        suits deterministic tests: one array holds the values of the whole world.

        Args:
            function: maps arrays of one rank to a pytree of arrays of one rank.

        Returns:
            The function on arrays with a leading dim of size `world_size`.

        Example:
            >>> import jax.numpy as jnp
            >>> from axon_dist.mesh import World
            >>> world = World.emulate(4)
            >>> world.default_group.spmd(lambda x: 2 * x)(jnp.arange(4.0))
            Array([0., 2., 4., 6.], dtype=float32)
        """
        FUNCTION.check("spmd", "function", function)
        spec = PartitionSpec(self.mesh.axis_names)

        def body(*stacked: Any) -> Array:
            rows = jax.tree.map(lambda x: x[0], stacked)
            return jax.tree.map(lambda y: jax.numpy.asarray(y)[None], function(*rows))

        mapped = jax.shard_map(body, mesh=self.mesh, in_specs=spec, out_specs=spec, check_vma=False)

        def run(*stacked: Any) -> Array:
            _check_stacked(stacked, self.world_size)
            return mapped(*jax.tree.map(jax.numpy.asarray, stacked))

        return RankStacked(jax.jit(run), self.mesh)

    def __str__(self) -> str:
        if self.members is not None:
            return f"ranks {list(self.members)} of {self.world_size}"
        return "×".join(f"{axis}={self.mesh.shape[axis]}" for axis in self.axes)


class RankStacked:
    """A jitted function of rank-stacked arrays, called in the library's own mesh context.

    Args:
        jitted: a result of `jax.jit`; its other attributes are available here too.
        mesh: the mesh on which it runs.
    """

    def __init__(self, jitted: Any, mesh: Mesh):
        self._jitted = jitted
        self._mesh = mesh
        functools.update_wrapper(self, jitted)

    def __call__(self, *stacked: Any) -> Any:
        """Calls the function."""
        _check_devices(stacked, self._mesh)
        with own_context():
            return self._jitted(*stacked)

    def lower(self, *stacked: Any) -> jax.stages.Lowered:
        """Lowers the function for arrays or shapes."""
        with own_context():
            return self._jitted.lower(*stacked)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_jitted"], name)


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


def _check_devices(args: Any, mesh: Mesh | AbstractMesh) -> None:
    if isinstance(mesh, AbstractMesh):
        return
    for leaf in jax.tree.leaves(args):
        if not isinstance(leaf, jax.Array) or isinstance(leaf, Tracer) or not leaf.committed:
            continue
        if leaf.sharding.device_set != set(mesh.devices.flat):
            here, there = (
                sorted(device.id for device in devices)
                for devices in (mesh.devices.flat, leaf.sharding.device_set)
            )
            raise GroupError(
                f"got an array of shape {leaf.shape} that is on the devices {ranges(there)}, and "
                f"the mesh of the group has the devices {ranges(here)}; move it there first: "
                "jax.device_put(x, NamedSharding(group.mesh, PartitionSpec()))",
                code="array-on-other-devices",
            )


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
        attributes: the text after the operands of the instruction.
        num_devices: how many devices run the program; `{}` means all of them.

    Returns:
        The groups; one group of all devices if the instruction names none.

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
    """Reads the source-target pairs of a collective-permute.

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
        The axes whose groups are exactly these; `()` if no device sends to another; None if no set
        of axes matches, or without a mesh.
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
    """Splits an axis into the given parts, (size before it, size), and the parts between them."""
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
