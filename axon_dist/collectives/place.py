"""Runs collectives inside or outside `shard_map`; also ranks, argument checks and the barrier."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import Mesh, PartitionSpec

from ..core.checks import WHOLE, checked, is_whole
from ..core.errors import ConfigError, DivisibilityError, DTypeError, GroupError
from ..core.own_context import in_own_context
from ..core.tree import check_32_bits, is_key, leaves_with_paths, problem_of
from ..core.typing import Array, PyTree, Shape
from ..mesh import GROUP, ProcessGroup, process_index


def is_inside(group: ProcessGroup) -> bool:
    """Whether the code being traced runs once per rank of the group.

    Args:
        group: the ranks of the collective.

    Returns:
        True inside a `shard_map` whose manual axes include all of the group's, False outside of
        any `shard_map`.

    Raises:
        GroupError: if only some of the group's axes are manual, or their sizes differ.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if not mesh.manual_axes:
        return False
    automatic = [axis for axis in group.axes if axis not in mesh.manual_axes]
    if automatic:
        raise GroupError(
            f"a collective over the group {group} was called inside a shard_map over "
            f"{tuple(mesh.manual_axes)}, where {automatic} are not manual; name every axis of the "
            "group in shard_map(axis_names=...), or use a group over the manual axes"
        )
    mapped_sizes = {axis: mesh.shape[axis] for axis in group.axes}
    group_sizes = {axis: group.mesh.shape[axis] for axis in group.axes}
    if mapped_sizes != group_sizes:
        raise GroupError(
            f"the group {group} belongs to a mesh with axes {group_sizes}, and this shard_map runs "
            f"over {mapped_sizes}; take the group from the world whose mesh the shard_map uses"
        )
    return True


@in_own_context
def each_leaf(leaf: Callable[..., Array], x: PyTree, group: ProcessGroup, **static: Any) -> PyTree:
    """Applies a per-rank function to every leaf, inside `shard_map` or on rank-stacked arrays.

    Args:
        leaf: `leaf(array, group, **static)`; a module-level function, so that the compiled
            program for rank-stacked arrays is found in the cache.
        x: a pytree of this rank's arrays; outside `shard_map`, of rank-stacked ones.
        group: the ranks of the collective.
        **static: hashable settings of the collective.

    Returns:
        A pytree like `x`.
    """
    GROUP.check("a collective", "group", group)
    check_arrays(x)
    if is_inside(group):
        return jax.tree.map(lambda value: leaf(jnp.asarray(value), group, **static), x)
    return _stacked(leaf, group, tuple(static.items()))(x)


def check_arrays(x: PyTree) -> None:
    """Raises unless every leaf is an array or a number that JAX supports.

    Raises:
        DTypeError: for anything else, and for integers that do not fit in JAX's 32 bits.
    """
    if x is None:
        raise DTypeError("a collective got None; give an array, or a pytree of arrays")
    for path, leaf in leaves_with_paths(x):
        named = f"a collective got {path!r}, which" if path else "a collective got an array, which"
        if (problem := problem_of(leaf)) is not None:
            raise DTypeError(f"{named} {problem}")
        if is_key(leaf):
            raise DTypeError(f"{named} holds random keys; give jax.random.key_data(keys)")
        if isinstance(leaf, jax.Array):
            continue
        kind = np.asarray(leaf).dtype.kind if isinstance(leaf, _NUMERIC) else "O"
        # Dtypes of ml_dtypes, such as bfloat16, have kind V.
        if kind not in "biufcV":
            raise DTypeError(
                f"a collective got {leaf!r:.60}, a {type(leaf).__name__}; give arrays of numbers"
            )
        check_32_bits("a collective", leaf)


_NUMERIC = (np.ndarray, np.generic, bool, int, float, complex)


@functools.lru_cache(maxsize=256)
def _stacked(
    leaf: Callable[..., Array], group: ProcessGroup, static: tuple[tuple[str, Any], ...]
) -> Callable[[PyTree], PyTree]:
    return group.spmd(lambda x: jax.tree.map(lambda v: leaf(v, group, **dict(static)), x))


def has_varying_types(axis: str) -> bool:
    """Whether the `shard_map` being traced has `check_vma=True`."""
    return axis in jax.typeof(jax.lax.axis_index(axis)).mat.varying


def position(group: ProcessGroup) -> Array:
    """This rank's position in its group, int32 from 0; -1 for ranks outside a `World.new_group`."""
    index = jax.lax.axis_index(group.axes)
    if group.members is None:
        return index
    table = np.full(group.world_size, -1, np.int32)
    table[list(group.members)] = np.arange(group.size)
    return jnp.asarray(table)[index]


def members_or(x: Array, neutral: Any, group: ProcessGroup) -> Array:
    """Replaces the values of ranks outside the group by the neutral element of the reduction."""
    if group.members is None:
        return x
    return jnp.where(position(group) >= 0, x, jnp.asarray(neutral, x.dtype))


def keep_outside(result: Array, x: Array, group: ProcessGroup) -> Array:
    """Replaces the result on ranks outside the group by `x`, or by zeros if the shapes differ."""
    if group.members is None:
        return result
    unchanged = x.astype(result.dtype) if x.shape == result.shape else jnp.zeros_like(result)
    return jnp.where(position(group) >= 0, result, unchanged)


def check_root(root: int, name: str, group: ProcessGroup) -> None:
    """Raises `GroupError` unless a root is a rank within the group."""
    GROUP.check("a collective", "group", group)
    if not is_whole(root) or not 0 <= root < group.size:
        raise GroupError(
            f"{name}={root!r} is not a rank of the group {group}, which has {group.size}; ranks "
            f"are counted within the group, 0..{group.size - 1}"
        )


def check_dim(dim: int, num_dims: int, shape: tuple[int, ...]) -> int:
    """Returns a dim counted from the front; raises `ConfigError` if it is out of range."""
    WHOLE.check("a collective", "dim", dim)
    if not -num_dims <= dim < num_dims:
        raise ConfigError(
            f"got dim {dim} for an array of shape {shape}; dims here are 0..{num_dims - 1}"
            if num_dims
            else f"got dim {dim} for a scalar, which has no dims; give it one with x[None]"
        )
    return dim % num_dims


def check_divisible(
    shape: Shape, dim: int, group: ProcessGroup, what: str, remedy: str = "pad the array first"
) -> None:
    """Raises `DivisibilityError` unless the size of the group divides a dim."""
    size = shape[dim]
    parts = group.size
    if size % parts:
        raise DivisibilityError(
            f"{what} cuts dim {dim} of an array of shape {shape} into {parts} slices, one per rank "
            f"of the group {group}, but {size} is not a multiple of {parts}; {remedy}, "
            f"to {size + -size % parts}"
        )


def pad_dim(x: Array, dim: int, parts: int) -> Array:
    """Appends zeros to a dim until its size is a multiple of `parts`.

    Example:
        >>> pad_dim(jnp.ones((5, 2)), 0, 4).shape
        (8, 2)
    """
    widths = [(0, 0)] * x.ndim
    widths[dim] = (0, -x.shape[dim] % parts)
    return jnp.pad(x, widths)


@checked(group=GROUP)
def rank(group: ProcessGroup) -> Array:
    """Returns this rank's position within its group.

    Args:
        group: the ranks among which to count.

    Returns:
        Inside `shard_map` an int32 scalar, 0..size-1, row-major over the axes of the group.
        Outside, the rank-stacked array of these, shape `(world_size,)`. -1 for ranks that
        are not members of a `World.new_group`.

    Example:
        >>> from axon_dist.mesh import World
        >>> rank(World.emulate(4, "dp=2,tp=2").group("dp"))
        Array([0, 0, 1, 1], dtype=int32)
    """
    if is_inside(group):
        return position(group)
    positions = np.full(group.world_size, -1, np.int32)
    for ranks in group.partition():
        positions[list(ranks)] = np.arange(group.size)
    return jnp.asarray(positions)


@checked(group=GROUP)
def world_size(group: ProcessGroup) -> int:
    """Returns the number of ranks in one collective of the group.

    Args:
        group: the ranks to count.

    Returns:
        A Python int, the same on every rank.
    """
    return group.size


def is_main_process() -> bool:
    """Whether this is process 0, which prints and writes files.

    A process may own many ranks; use `rank(group) == 0` to ask about a rank.

    Returns:
        True on process 0; False on the others.

    Example:
        >>> is_main_process()
        True
    """
    return process_index() == 0


@in_own_context
@checked(group=GROUP)
def barrier(group: ProcessGroup) -> None:
    """Waits until every device of the group's mesh, and so every process, has reached it.

    Every process that owns devices of the mesh must call it. Work that was started earlier may
    still be running; to wait for an array, block on the array.

    Args:
        group: any group of the mesh; a group over some axes still waits for all of them.

    Raises:
        GroupError: inside `shard_map` or `jit`, where a barrier has no effect: a compiled program
            is ordered only by its data dependences.

    Example:
        >>> from axon_dist.mesh import World
        >>> barrier(World.emulate(4).default_group)
    """
    total = None if is_inside(group) else _sum_over(group.mesh)()
    if total is None or isinstance(total, Tracer):
        raise GroupError(
            f"barrier was called for the group {group} inside a compiled function, where it has no "
            "effect; call it outside of jit and shard_map, or make the later value depend on the "
            "earlier one with jax.lax.optimization_barrier"
        )
    jax.effects_barrier()
    total.block_until_ready()


@functools.lru_cache(maxsize=32)
def _sum_over(mesh: Mesh) -> Callable[[], Array]:
    """A sum over all devices, which finishes on no device before all have started it."""

    def add():
        return jax.lax.psum(jax.lax.axis_index(mesh.axis_names), mesh.axis_names)

    return jax.jit(jax.shard_map(add, mesh=mesh, in_specs=(), out_specs=PartitionSpec()))
