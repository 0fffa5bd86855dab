"""Finds out whether a program works element by element, wherever its arrays are split.

A rank may then run it on its part of every array, as an optimizer does under
`deterministic="elastic"`. An operation on elements at the same place passes. A sum over the
elements does not, nor does anything that depends on an element's place, such as
`x * jnp.arange(len(x))`: on a part of the array, places count from its own start.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

from ..core.compat import CALLS
from .factors import ELEMENTWISE, KEEPS, RESHAPES
from .walk import inners, interpret, shape_of

_CALLS = CALLS | {"cond", "custom_jvp_call"}


class _Value(NamedTuple):
    """What is known of an array.

    Args:
        is_part: whether it is a part of an array that may be split: an input with dims, or
            computed from one element by element.
        made_by: for an array of unequal elements that comes from no split input, the operation that
            made it; "" for all others.
    """

    is_part: bool = False
    made_by: str = ""


_UNIFORM = _Value()
_PART = _Value(is_part=True)


class _Mixes(Exception):
    """Raised for an operation that mixes elements; its argument is the name."""


def mixing_in(program: ClosedJaxpr) -> str | None:
    """Returns an operation that depends on several elements of an input, or on their places.

    Args:
        program: its inputs with dims may be split along any of them.

    Returns:
        The name of the first such operation, or None.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> x = jnp.ones((4, 2))
        >>> print(mixing_in(jax.make_jaxpr(lambda x: 0.9 * x + jnp.sqrt(x))(x)))
        None
        >>> mixing_in(jax.make_jaxpr(lambda x: x - x.mean())(x))
        'reduce_sum'
        >>> mixing_in(jax.make_jaxpr(lambda x: x * jnp.arange(4.0)[:, None])(x))
        'iota'
    """
    inputs = [_PART if shape_of(v) else _UNIFORM for v in program.jaxpr.invars]
    try:
        _follow(program.jaxpr, program.consts, inputs)
    except _Mixes as found:
        return str(found)
    return None


def _follow(jaxpr: Jaxpr, consts: Sequence[object], inputs: Sequence[_Value]) -> list[_Value]:
    constants = [_Value(made_by="constant") if np.ndim(x) else _UNIFORM for x in consts]
    return interpret(jaxpr, constants, inputs, _run, lambda literal: _UNIFORM)


def _run(equation: JaxprEqn, operands: Sequence[_Value]) -> list[_Value]:
    """Returns what is known of the results of an equation."""
    name = equation.primitive.name
    count = len(equation.outvars)
    if name in ELEMENTWISE | KEEPS:
        return [_together(operands)] * count
    if name in _CALLS:
        return _called(equation, operands)
    if name in RESHAPES:
        value = operands[0]
        before, after = shape_of(equation.invars[0]), shape_of(equation.outvars[0])
        if not value.is_part and not value.made_by:
            return [_UNIFORM]
        if value.is_part and before == after:
            return [value]
    if any(value.is_part for value in operands):
        raise _Mixes(name)
    made_by = next((value.made_by for value in operands if value.made_by), name)
    # A scalar has the same value on all parts, however it was made.
    return [_Value(made_by=made_by) if shape_of(v) else _UNIFORM for v in equation.outvars]


def _together(operands: Sequence[_Value]) -> _Value:
    """Returns what is known of the result of an elementwise operation."""
    made_by = next((value.made_by for value in operands if value.made_by), "")
    if not any(value.is_part for value in operands):
        return _Value(made_by=made_by)
    if made_by:
        raise _Mixes(made_by)
    return _PART


def _called(equation: JaxprEqn, operands: Sequence[_Value]) -> list[_Value]:
    """Returns what is known of the results of a call, or of all branches of a conditional."""
    branches = [
        _follow(inner.program.jaxpr, inner.program.consts, inner.inputs(operands))
        for inner in inners(equation)
    ]
    return [_together(values) for values in zip(*branches, strict=True)]
