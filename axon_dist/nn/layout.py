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
"""The compiler decides."""


@dataclasses.dataclass(frozen=True)
class Layout:
    """How the activations of a step are sharded, as far as every layer agrees.

    Args:
        mesh: names and sizes of its axes, over all devices.
        batch: the axes that split dim 0, the samples.
        sequence: the axes that split dim 1, the positions, in every layer.
        heads: the axes that split the heads of attention.
        vocabulary: the axis that splits the classes of a head, where they divide.
        may_ring: whether ranks may pass values around a ring; stages of a pipeline may not.
    """

    mesh: Mesh
    batch: Axes = ()
    sequence: Axes = ()
    heads: Axes = ()
    vocabulary: Axes = ()
    may_ring: bool = True

    def constrain(self, x: Array, features: Axes = (), dim: int = -1, sequence: Axes = ()) -> Array:
        """Pins the layout of activations `[samples, (positions,) ..., features]`.

        Args:
            x: one array of activations, two dims at least.
            features: the axes that split the features.
            dim: the dim of the features, from the end.
            sequence: further axes that split the positions, where there are positions.

        Returns:
            The same values.

        Raises:
            DivisibilityError: when positions or features do not divide.
        """
        return constrain(x, self.mesh, self.spec(x.shape, features, dim, sequence))

    def spec(
        self, shape: tuple[int, ...], features: Axes = (), dim: int = -1, sequence: Axes = ()
    ) -> PartitionSpec:
        """The spec of activations of a shape; arguments as in `constrain`."""
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
        """`shard_map` of a function over every axis that is not manual yet, if there is one.

        Args:
            function: runs on one rank; may name every axis of the mesh.
            in_specs: a tuple of specs, on the whole mesh.
            out_specs: the specs of the results, on the whole mesh.
            check_vma: whether JAX types what varies over which axes, where it can; what is never
                differentiated needs no types.

        Returns:
            The mapped function, on arrays as they are where it is called.
        """
        manual = manual_axes()
        if set(manual) >= set(self.mesh.axis_names):
            return function
        mesh = jax.sharding.get_abstract_mesh() if manual else self.mesh

        def left(spec):
            return without(PartitionSpec(*(None if e is FREE else e for e in spec)), manual)

        return jax.shard_map(
            function,
            mesh=mesh,
            axis_names=frozenset(mesh.axis_names) - frozenset(manual),
            in_specs=jax.tree.map(left, in_specs),
            out_specs=jax.tree.map(left, out_specs),
            check_vma=check_vma and not manual,
        )

    def _claim(self, shape: tuple[int, ...], dim: int, axes: Axes, what: str) -> Axes | None:
        size = self.size(axes)
        if shape[dim] % size:
            names = "×".join(axes)
            raise DivisibilityError(
                f"{shape[dim]} {what} of activations of shape {shape} are split over {names}="
                f"{size} and do not divide; make them a multiple of {size}, or {names} smaller"
            )
        return axes or None

    def size(self, axes: Axes) -> int:
        """Into how many parts some axes split a dim together, where the caller is.

        Inside a `shard_map` a rank's array is split over the manual axes already.
        """
        manual = manual_axes()
        return math.prod(self.mesh.shape[axis] for axis in axes if axis not in manual)


def constrain(x: Array, mesh: Mesh, spec: PartitionSpec) -> Array:
    """`with_sharding_constraint` that holds inside `shard_map` too: manual axes are left out.

    Args:
        x: any array, within or outside `shard_map`.
        mesh: the mesh; inside `shard_map` the one in context is used.
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
    """The mesh axes that a `shard_map` around the caller has made manual."""
    return tuple(jax.sharding.get_abstract_mesh().manual_axes)


def without(spec: PartitionSpec, axes: Axes) -> PartitionSpec:
    """The spec with some axes left out.

    Example:
        >>> without(PartitionSpec(("dp", "fsdp"), None, "tp"), ("dp",))
        P('fsdp', None, 'tp')
    """

    def left(entry: str | Axes | None) -> str | Axes | None:
        if entry is None or entry is FREE:
            return entry
        names = (entry,) if isinstance(entry, str) else entry
        others = tuple(name for name in names if name not in axes)
        return others[0] if len(others) == 1 else (others or None)

    return PartitionSpec(*map(left, spec))
