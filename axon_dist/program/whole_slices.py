"""Slices of values that are whole along the dims they cut, for code that few devices run.

What the compiler makes of a slice of a dim that it has split is a permutation between devices, and
a permutation in a branch that other stages do not take waits for them forever. Told that the dim is
whole there, it gathers instead, which the ranks of one stage do among themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from ..core.compat import eval_equation
from ..core.typing import Array
from .rewrite import Rewriting

SHIFTS = frozenset(
    {"slice", "dynamic_slice", "dynamic_update_slice", "pad", "concatenate", "split", "rev"}
)
"""The primitives that move elements along a dim."""


def whole_slices() -> Rewriting:
    """The rewriting that keeps dims whole where they are cut, padded or joined."""
    return Rewriting(dict.fromkeys(SHIFTS, _shift), lambda equation: None)


def _shift(equation: Any, operands: Sequence[Array]) -> list[Array] | None:
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or set(mesh.manual_axes) >= set(mesh.axis_names):
        return None
    dims = _moved(equation)
    if not dims:
        return None

    def pinned(x: Array) -> Array:
        if x.ndim <= max(dims):
            return x
        free = PartitionSpec.UNCONSTRAINED
        spec = PartitionSpec(*(None if dim in dims else free for dim in range(x.ndim)))
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))

    return [pinned(x) for x in eval_equation(equation, [pinned(x) for x in operands])]


def _moved(equation: Any) -> set[int]:
    """The dims along which elements move."""
    if equation.primitive.name == "rev":
        return set(equation.params["dimensions"])
    shapes = [v.aval.shape for v in (*equation.invars, *equation.outvars)]
    first = shapes[0]
    return {
        dim
        for dim, size in enumerate(first)
        if any(len(shape) == len(first) and shape[dim] != size for shape in shapes)
    }
