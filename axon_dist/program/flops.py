"""The operations of a product on one device."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from .placement import Splits
from .tape import ATTENTION


def flops_of(
    equation: Any, splits: Sequence[Splits], result: Splits, axes: Mapping[str, int]
) -> float:
    """Multiplications and additions of one device; none where nothing is multiplied.

    Args:
        equation: of a traced program over global arrays.
        splits: where each operand lies.
        result: where the result lies.
        axes: the sizes of the mesh axes.
    """
    name = equation.primitive.name
    shapes: list[tuple[int, ...]] = [getattr(a.aval, "shape", ()) for a in equation.invars]
    ways = lambda names: math.prod(axes[axis] for axis in names)
    local = lambda shape, where: math.prod(
        -(-n // ways(a)) for n, a in zip(shape, where, strict=True)
    )
    out = equation.outvars[0].aval.shape
    if name == "dot_general":
        dims = equation.params["dimension_numbers"][0]
        summed = math.prod(shapes[0][dim] for dim in dims[0])
        over = [splits[0][a] | splits[1][b] for a, b in zip(*dims, strict=True)]
        shared = ways(frozenset().union(*over) - frozenset().union(*result))
        return 2.0 * local(out, result) * summed / shared
    if name == "conv_general_dilated":
        numbers = equation.params["dimension_numbers"]
        summed = math.prod(shapes[1][dim] for dim in numbers.rhs_spec[1:])
        shared = ways(splits[0][numbers.lhs_spec[1]])
        return 2.0 * local(out, result) * summed / shared
    if name.startswith(ATTENTION):
        return (4.0 if "fwd" in name else 10.0) * local(shapes[0], splits[0]) * shapes[1][1]
    return 0.0
