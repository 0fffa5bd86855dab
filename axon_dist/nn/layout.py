"""How activations are sharded: which mesh axes split samples, positions and features."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import TypeAlias, TypeVar

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ..core.errors import DivisibilityError
from ..core.typing import Array, PyTree

Axes: TypeAlias = tuple[str, ...]
"""Mesh axes that split one dim together."""

Result = TypeVar("Result")

FREE = PartitionSpec.UNCONSTRAINED
"""Leaves the sharding of a dim to the compiler."""


@dataclasses.dataclass(frozen=True)
class Layout:
    """The sharding of activations that all layers of a step share.

    Args:
        mesh: the mesh over all devices.
        batch: the axes that split dim 0, the samples.
        sequence: the axes that split dim 1, the positions, in every layer.
        heads: the axes that split the heads of attention.
        vocabulary: the axis that splits the classes of a head, if they divide evenly.
        may_ring: whether ranks may pass values around a ring; pipeline stages may not.
    """

    mesh: Mesh
    batch: Axes = ()
    sequence: Axes = ()
    heads: Axes = ()
    vocabulary: Axes = ()
    may_ring: bool = True

    def constrain(self, x: Array, features: Axes = (), dim: int = -1, sequence: Axes = ()) -> Array:
        """Constrains the sharding of activations `[samples, (positions,) ..., features]`.

        Args:
            x: one array of activations, at least two dims.
            features: the axes that split the features.
            dim: the dim of the features, from the end.
            sequence: further axes that split the positions, if there are positions.

        Returns:
            The same values.

        Raises:
            DivisibilityError: when positions or features do not divide evenly.
        """
        return constrain(x, self.mesh, self.spec(x.shape, features, dim, sequence))

    def spec(
        self, shape: tuple[int, ...], features: Axes = (), dim: int = -1, sequence: Axes = ()
    ) -> PartitionSpec:
        """Returns the spec of activations of a shape; arguments as for `constrain`."""
        entries: list = [None] * len(shape)
        if len(shape) > 1:
            fits = shape[0] % self.size(self.batch) == 0
            entries[0] = (self.batch or None) if fits else FREE
        if len(shape) > 2 and dim + len(shape) != 1:
            entries[1] = self._claim(shape, 1, (*self.sequence, *sequence), "positions")
        entries[dim] = self._claim(shape, dim, features, "features")
        return PartitionSpec(*entries)

    def mapped(
        self,
        function: Callable[..., Result],
        in_specs: PyTree,
        out_specs: PyTree,
        check_vma: bool = True,
    ) -> Callable[..., Result]:
        """Applies `shard_map` over all axes that are not manual yet; does nothing if all are.

        Args:
            function: runs on one rank; may name every axis of the mesh.
            in_specs: a tuple of specs, on the whole mesh.
            out_specs: the specs of the results, on the whole mesh.
            check_vma: whether JAX tracks which values vary over which axes, if it can; not needed
                for functions that are never differentiated.

        Returns:
            The mapped function; it takes arrays in the view of the caller.
        """
        manual = manual_axes()
        if set(manual) >= set(self.mesh.axis_names):
            return function
        mesh = jax.sharding.get_abstract_mesh() if manual else self.mesh

        def without_manual(spec):
            return without(PartitionSpec(*(None if e is FREE else e for e in spec)), manual)

        return jax.shard_map(
            function,
            mesh=mesh,
            axis_names=frozenset(mesh.axis_names) - frozenset(manual),
            in_specs=jax.tree.map(without_manual, in_specs),
            out_specs=jax.tree.map(without_manual, out_specs),
            check_vma=check_vma and not manual,
        )

    def _claim(self, shape: tuple[int, ...], dim: int, axes: Axes, what: str) -> Axes | None:
        size = self.size(axes)
        if shape[dim] % size:
            names = "×".join(axes)
            raise DivisibilityError(
                f"{shape[dim]} {what} of activations of shape {shape} do not divide over {names}="
                f"{size}; make them a multiple of {size}, or {names} smaller"
            )
        return axes or None

    def size(self, axes: Axes) -> int:
        """Returns the number of shards into which these axes split a dim, in the caller's view.

        Inside a `shard_map`, manual axes do not count: a rank's array is already split over them.
        """
        manual = manual_axes()
        return math.prod(self.mesh.shape[axis] for axis in axes if axis not in manual)


def constrain(x: Array, mesh: Mesh, spec: PartitionSpec) -> Array:
    """`with_sharding_constraint` that works inside `shard_map` too, where it drops manual axes.

    Args:
        x: any array, inside or outside `shard_map`.
        mesh: the mesh; inside `shard_map` the abstract mesh in context is used.
        spec: the mesh axes of each of its dims.

    Returns:
        The same values.
    """
    manual = manual_axes()
    if set(manual) >= set(mesh.axis_names):
        return x
    current_mesh = jax.sharding.get_abstract_mesh() if manual else mesh
    return jax.lax.with_sharding_constraint(x, NamedSharding(current_mesh, without(spec, manual)))


def manual_axes() -> Axes:
    """Returns the mesh axes that a surrounding `shard_map` has made manual."""
    return tuple(jax.sharding.get_abstract_mesh().manual_axes)


def without(spec: PartitionSpec, axes: Axes) -> PartitionSpec:
    """Returns the spec without some axes.

    Example:
        >>> without(PartitionSpec(("dp", "fsdp"), None, "tp"), ("dp",))
        P('fsdp', None, 'tp')
    """

    def remaining(entry: str | Axes | None) -> str | Axes | None:
        if entry is None or entry is FREE:
            return entry
        names = (entry,) if isinstance(entry, str) else entry
        others = tuple(name for name in names if name not in axes)
        return others[0] if len(others) == 1 else (others or None)

    return PartitionSpec(*map(remaining, spec))
