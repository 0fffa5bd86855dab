"""Constant propagation: finds the results of a program that are constant if some inputs are zero.

The analysis knows an array only if all its elements are the same number; any other array is
unknown. A product with zeros is zero for every finite value of the other factor. So setting the
weights of samples to zero shows which results ignore samples of weight 0.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn

from ..core.compat import eval_equation
from .factors import CHEAP_ELEMENTWISE, KEEPS, MOVES, SCATTER_ADDS
from .walk import LOOPS, dtype_of, inners, interpret, shape_of


@dataclasses.dataclass(frozen=True)
class UniformValue:
    """The known facts about the elements of an array.

    Args:
        value: the number that every element equals; None if unknown.
        is_finite: whether all elements are finite if the inputs of the program are.
    """

    value: float | None = None
    is_finite: bool = True

    @property
    def is_zero(self) -> bool:
        """Whether all elements are zero."""
        return self.value == 0


UNKNOWN = UniformValue()
ZERO = UniformValue(0.0)
MAYBE_INFINITE = UniformValue(None, is_finite=False)

# fmt: off
_MOVES = (MOVES | KEEPS | {
    "all_gather", "pbroadcast", "reduce_and", "reduce_max", "reduce_min", "reduce_or",
    "dynamic_slice", "gather", "stop_gradient", "copy", "name", "cummax", "cummin",
    "reduce_precision",
}) - {"iota"}
_PRODUCTS = frozenset(("dot_general", "conv_general_dilated", "ragged_dot", "ragged_dot_general"))
_SUMS = frozenset(("cumsum", "psum", "psum_invariant"))
# fmt: on


def uniform_values(
    jaxpr: Jaxpr, consts: Sequence[Any], inputs: Sequence[UniformValue]
) -> list[UniformValue]:
    """Derives what is known about the outputs of a program.

    Args:
        jaxpr: an open jaxpr.
        consts: values of its constants.
        inputs: what is known about its inputs.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> run = lambda w, x: (jnp.sum(w * x), jnp.sum((w + 1) * x), jnp.sum(x / w * w))
        >>> program = jax.make_jaxpr(run)(jnp.ones(3), jnp.ones(3))
        >>> results = uniform_values(program.jaxpr, program.consts, [ZERO, UNKNOWN])
        >>> [result.is_zero for result in results]
        [True, False, False]
    """

    known = [_of_array(value) for value in consts]
    return interpret(jaxpr, known, inputs, _run, lambda atom: _of_array(atom.val))


def _of_array(value: Any) -> UniformValue:
    if not isinstance(value, (int, float, bool, np.ndarray, np.generic)):
        shape = getattr(value, "shape", None)
        if shape is None or math.prod(shape) > 4096:
            return UNKNOWN
    try:
        array = np.asarray(value)
    except Exception:  # Random keys and tracers have no NumPy value.
        return UNKNOWN
    if array.dtype.kind not in "biuf" or not array.size:
        return UNKNOWN
    first = array.flat[0]
    if not (array == first).all():
        return UNKNOWN
    # An infinite constant, such as one of a mask, counts as finite: no weight of 0 caused it.
    return UniformValue(float(first))


def _run(equation: JaxprEqn, operands: Sequence[UniformValue]) -> list[UniformValue]:
    name = equation.primitive.name
    programs = inners(equation)
    if name == "scan":
        return _scan(equation, operands)
    if programs and name not in LOOPS:
        each = [
            uniform_values(i.program.jaxpr, i.program.consts, i.inputs(operands)) for i in programs
        ]
        if len(each[0]) == len(equation.outvars):
            return [_join(values) for values in zip(*each, strict=True)]
    if len(operands) == len(equation.outvars) > 1 and name in KEEPS:
        return [*operands]
    return [_of_operation(name, equation, operands)] * len(equation.outvars)


def _scan(equation: JaxprEqn, operands: Sequence[UniformValue]) -> list[UniformValue]:
    (inner,) = inners(equation)
    shared, carry, rows = inner.split_operands(operands)

    def iteration(carry: list[UniformValue]) -> list[UniformValue]:
        return uniform_values(inner.program.jaxpr, inner.program.consts, [*shared, *carry, *rows])

    settled = inner.settled(carry, iteration, lambda a, b: _join([a, b]))
    if settled is None:
        return [MAYBE_INFINITE] * len(equation.outvars)
    return [*settled[0], *settled[1]]


def _join(values: Sequence[UniformValue]) -> UniformValue:
    if all(value == values[0] for value in values):
        return values[0]
    return UniformValue(None, all(value.is_finite for value in values))


def _of_operation(name: str, equation: JaxprEqn, operands: Sequence[UniformValue]) -> UniformValue:
    rule = _RULES.get(name, _computed if name in CHEAP_ELEMENTWISE else None)
    return _unknown(operands) if rule is None else rule(equation, operands)


def _unknown(operands: Sequence[UniformValue]) -> UniformValue:
    return UniformValue(None, all(value.is_finite for value in operands))


def _select(equation: JaxprEqn, operands: Sequence[UniformValue]) -> UniformValue:
    which, *cases = operands
    return cases[int(which.value)] if which.value is not None else _join(cases)


def _product(equation: JaxprEqn, operands: Sequence[UniformValue]) -> UniformValue:
    if any(value.is_zero for value in operands):
        return ZERO if _unknown(operands).is_finite else MAYBE_INFINITE
    is_each = equation.primitive.name == "mul"
    return _computed(equation, operands) if is_each else _unknown(operands)


def _logical(equation: JaxprEqn, operands: Sequence[UniformValue]) -> UniformValue:
    absorbing = float(equation.primitive.name == "or")
    if dtype_of(equation.invars[0]) == jnp.bool_ and absorbing in {v.value for v in operands}:
        return UniformValue(absorbing)
    return _computed(equation, operands)


def _quotient(equation: JaxprEqn, operands: Sequence[UniformValue]) -> UniformValue:
    numerator, divisor = operands
    if divisor.is_zero:
        # A scalar 0 / 0 is a weighted mean without weights; nothing uses it when all weights are 0.
        is_total = numerator.is_zero and not shape_of(equation.outvars[0])
        return ZERO if is_total else MAYBE_INFINITE
    if numerator.is_zero:
        return ZERO if _unknown(operands).is_finite else MAYBE_INFINITE
    return _computed(equation, operands)


def _sum(equation: JaxprEqn, operands: Sequence[UniformValue]) -> UniformValue:
    if operands[0].value is None:
        return operands[0]
    summed = math.prod(shape_of(equation.invars[0]))
    count = summed / max(math.prod(shape_of(equation.outvars[0])), 1)
    return dataclasses.replace(operands[0], value=operands[0].value * count)


def _sum_of_zeros(equation: JaxprEqn, operands: Sequence[UniformValue]) -> UniformValue:
    return ZERO if all(value.is_zero for value in operands) else _unknown(operands)


_RULES: dict[str, Callable[[JaxprEqn, Sequence[UniformValue]], UniformValue]] = {
    **dict.fromkeys(_MOVES, lambda _, operands: operands[0]),
    **dict.fromkeys(_PRODUCTS, _product),
    **dict.fromkeys(_SUMS, _sum_of_zeros),
    "concatenate": lambda _, operands: _join(operands),
    **dict.fromkeys(("pad", "dynamic_update_slice"), lambda _, operands: _join(operands[:2])),
    **dict.fromkeys(("and", "or"), _logical),
    "mul": _product,
    "div": _quotient,
    "select_n": _select,
    "reduce_sum": _sum,
    **dict.fromkeys(
        SCATTER_ADDS,
        lambda _, operands: operands[0] if operands[2].is_zero else _unknown(operands),
    ),
}


def _computed(equation: JaxprEqn, operands: Sequence[UniformValue]) -> UniformValue:
    """Evaluates an elementwise operation on the one number that each operand equals."""
    if any(value.value is None for value in operands):
        return _unknown(operands)
    values = [
        np.asarray(value.value).astype(dtype_of(atom))
        for value, atom in zip(operands, equation.invars, strict=True)
    ]
    try:
        (result,) = eval_equation(equation, values)
        known = _of_array(np.asarray(result).astype(np.float64))
    except Exception:  # The operation may need a shape or dtype that a scalar cannot have.
        return _unknown(operands)
    if known.value is None:
        return MAYBE_INFINITE  # The result is NaN: it does not equal itself.
    overflows = np.isinf(known.value) and not any(np.isinf(value.value or 0) for value in operands)
    return dataclasses.replace(known, is_finite=_unknown(operands).is_finite and not overflows)
