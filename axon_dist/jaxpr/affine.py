"""Where several values of a program meet in one, affinely: a sum that others may compute a part of.

Of `y = c + sum_e L_e(v_e)` with linear L_e, each of many ranks can compute the terms of its own
values, and the sum of what they have is y. The values here are results of equations, such as the
calls of the experts of a mixture; L_e is whatever the program does to them, with gates that it has
computed elsewhere, until one array is left of them all.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax.numpy as jnp
from jax.extend.core import Literal

from ..core.compat import eval_equation
from ..core.errors import UnsupportedError
from .walk import CALLS, Known, called, interpret, variables

BILINEAR = frozenset({"mul", "dot_general"})
"""Linear in each of two operands."""

ALL, CASES = "all", "cases"
"""Linear in all operands together; in all but the first."""

LINEAR: MappingProxyType[str, Any] = MappingProxyType(
    {"add": ALL, "add_any": ALL, "sub": ALL, "concatenate": ALL, "stack": ALL, "select_n": CASES}
    | {"pad": ALL, "dynamic_update_slice": (0, 1), "scatter-add": (0, 2)}
    | dict.fromkeys(("div", "gather", "dynamic_slice"), (0,))
    | dict.fromkeys(("neg", "copy", "copy_p", "convert_element_type", "reduce_precision"), (0,))
    | dict.fromkeys(("reshape", "transpose", "squeeze", "expand_dims", "slice", "rev"), (0,))
    | dict.fromkeys(("broadcast_in_dim", "reduce_sum", "cumsum", "name"), (0,))
    | dict.fromkeys(("sharding_constraint",), (0,))
)
"""By primitive, the operands in which it is linear together; it may depend on the others anyhow."""

REARRANGES = frozenset(
    {"broadcast_in_dim", "reshape", "squeeze", "expand_dims", "slice", "transpose"}
    | {"convert_element_type"}
)
"""Primitives whose result is made of the values of their operand, which may be fewer."""


@dataclasses.dataclass(frozen=True, eq=False)
class Meeting:
    """Equations between values and the one array that is left of them.

    Args:
        calls: the positions of the equations that make the values, one each.
        between: the positions of the equations, in order, which are affine in the values.
        result: the variable that is left.
        sources: the variables that the equations read beside the values.
        before: the positions of the equations that make, of the sources, what they read.
    """

    calls: tuple[int, ...]
    between: tuple[int, ...]
    result: Any
    sources: tuple[Any, ...]
    before: tuple[int, ...]

    def constant(self, jaxpr: Any, known: Mapping[Any, Any]) -> Any:
        """The part of the result that no value moves; None where it is zero.

        Args:
            jaxpr: the program.
            known: the values of its variables, as far as they do not depend on the calls.
        """
        return self._part(jaxpr, Known(known), [None] * len(self.calls), constants=True)

    def linear(self, jaxpr: Any, sources: Sequence[Any], values: Sequence[Any]) -> Any:
        """The part of the result that is linear in the values.

        Args:
            jaxpr: the program.
            sources: the values of `sources`.
            values: what the calls give, in their order.
        """
        known = Known(zip(self.sources, sources, strict=True))
        for index in self.before:
            equation = jaxpr.eqns[index]
            known.write(equation.outvars, eval_equation(equation, known.read(equation.invars)))
        return self._part(jaxpr, known, values, constants=False)

    def _part(self, jaxpr: Any, known: Known, values: Sequence[Any], constants: bool) -> Any:
        for index, value in zip(self.calls, values, strict=True):
            known.write(jaxpr.eqns[index].outvars, [Moved(value)])
        for index in self.between:
            equation = jaxpr.eqns[index]
            # What is only added is no source of the linear part.
            literal = lambda v: v.val if isinstance(v, Literal) else known.get(v)
            operands = [literal(v) for v in equation.invars]
            known.write(equation.outvars, _part_of(equation, operands, constants=constants))
        return known[self.result].part


@dataclasses.dataclass(frozen=True, eq=False)
class Moved:
    """What depends on the values, as a part of it.

    Args:
        part: the constant or the linear part; None where it is zero.
    """

    part: Any


def find_meeting(jaxpr: Any, calls: Sequence[int]) -> Meeting:
    """Finds where the results of some equations meet in one array, no larger than each of them.

    Args:
        jaxpr: an open jaxpr.
        calls: the positions of the equations, in order, with one result each.

    Returns:
        The first such place.

    Raises:
        UnsupportedError: saying, after "whose", what the program does to them instead.

    Example:
        >>> import jax
        >>> run = lambda x, g: g[0] * jnp.sin(x) + g[1] * jnp.cos(x) + x
        >>> jaxpr = jax.make_jaxpr(run)(jnp.ones(3), jnp.ones(2)).jaxpr
        >>> calls = [n for n, e in enumerate(jaxpr.eqns) if e.primitive.name in ("sin", "cos")]
        >>> meeting = find_meeting(jaxpr, calls)
        >>> [jaxpr.eqns[index].primitive.name for index in meeting.between]
        ['mul', 'mul', 'add']
    """
    values = [jaxpr.eqns[index].outvars[0] for index in calls]
    size, last, wanted = math.prod(values[0].aval.shape), _last_reads(jaxpr), set(calls)
    moved: dict[Any, None] = {}
    between: list[int] = []
    for index in range(calls[0], len(jaxpr.eqns)):
        equation = jaxpr.eqns[index]
        reads = variables(equation.invars) & moved.keys()
        if index in wanted:
            if reads:
                raise UnsupportedError("calls read what others of them give")
            wanted.discard(index)
            moved[equation.outvars[0]] = None
        elif reads:
            _check(equation, reads)
            between.append(index)
            moved.update(dict.fromkeys(equation.outvars))
        left = [v for v in moved if last.get(v, -1) > index]
        if not wanted and len(left) == 1 and math.prod(left[0].aval.shape) <= size:
            break
    else:
        raise UnsupportedError("results do not meet in one array")
    if left[0] in values:
        raise UnsupportedError("results are not all read")
    # What is made behind the last of them is none of their sources.
    made = {jaxpr.eqns[n].outvars[0]: n for n in range(between[-1]) if jaxpr.eqns[n].outvars}
    read: dict[Any, None] = {}
    for index in between:
        read.update(dict.fromkeys(_read(jaxpr.eqns[index], moved)))
    sources, before = _fewest(jaxpr, read, made)
    return Meeting(tuple(calls), tuple(between), left[0], sources, before)


def _last_reads(jaxpr: Any) -> dict[Any, int]:
    """The position of the last equation that reads each variable; beyond all for an output."""
    last = {v: n for n, equation in enumerate(jaxpr.eqns) for v in variables(equation.invars)}
    return last | dict.fromkeys(variables(jaxpr.outvars), len(jaxpr.eqns))


def _read(equation: Any, moved: Mapping[Any, Any]) -> list[Any]:
    """What the part of an equation that is linear in what moves reads beside it."""
    added = () if equation.primitive.name in BILINEAR | CALLS else _together(equation)
    atoms = (v for n, v in enumerate(equation.invars) if n not in added)
    return [v for v in atoms if not isinstance(v, Literal) and v not in moved]


def _fewest(
    jaxpr: Any, read: Iterable[Any], made: Mapping[Any, int]
) -> tuple[tuple[Any, ...], tuple[int, ...]]:
    """The smallest arrays that some variables can be made of by rearranging, and how."""
    ways = {variable: _way(jaxpr, variable, made) for variable in read}
    shared: dict[Any, int] = {}
    for variable, way in ways.items():
        for _, source in way[-1:]:
            shared[source] = shared.get(source, 0) + _size(variable)
    sources: dict[Any, None] = {}
    before: set[int] = set()
    for variable, way in ways.items():
        # Slices of one array, such as the gates of all experts, come as that array.
        steps = way if way and _size(way[-1][1]) <= shared[way[-1][1]] else []
        sizes = [_size(variable), *(_size(source) for _, source in way)]
        steps = steps or way[: sizes.index(min(sizes))]
        sources[steps[-1][1] if steps else variable] = None
        before.update(index for index, _ in steps)
    return tuple(sources), tuple(sorted(before))


def _way(jaxpr: Any, variable: Any, made: Mapping[Any, int]) -> list[tuple[int, Any]]:
    """The equations that rearrange values into a variable, last first, each with what it reads."""
    way: list[tuple[int, Any]] = []
    while (index := made.get(variable)) is not None:
        equation = jaxpr.eqns[index]
        operands = variables(equation.invars)
        if equation.primitive.name not in REARRANGES or len(operands) != 1:
            break
        (variable,) = operands
        way.append((index, variable))
    return way


def _size(variable: Any) -> int:
    return math.prod(variable.aval.shape)


def _together(equation: Any) -> tuple[int, ...]:
    """The operands in which an equation is linear together; none where it is linear in none."""
    found, count = LINEAR.get(equation.primitive.name, ()), len(equation.invars)
    if found in (ALL, CASES):
        return tuple(range(0 if found is ALL else 1, count))
    return found


def _check(equation: Any, moved: Iterable[Any]) -> None:
    """Raises unless an equation is linear in the variables that move, and gives one array."""
    name = equation.primitive.name
    where = [n for n, v in enumerate(equation.invars) if not isinstance(v, Literal) and v in moved]
    floats = all(jnp.issubdtype(v.aval.dtype, jnp.inexact) for v in equation.outvars)
    if (inner := called(equation)) is not None and name in CALLS:
        within = {inner.jaxpr.invars[n] for n in where}
        for one in inner.jaxpr.eqns:
            if reads := variables(one.invars) & within:
                _check(one, reads)
                within.update(one.outvars)
        return
    is_linear = len(where) == 1 if name in BILINEAR else set(where) <= set(_together(equation))
    if not is_linear or not floats:
        raise UnsupportedError(f"results go through {name!r}, which is not linear in them")


def _part_of(equation: Any, operands: Sequence[Any], constants: bool) -> Sequence[Any]:
    """The part of the results of an equation; `constants` says which part."""
    moved = [n for n, x in enumerate(operands) if isinstance(x, Moved)]
    if not moved:
        return eval_equation(equation, operands)
    name, inner = equation.primitive.name, called(equation)
    if inner is not None and name in CALLS:
        run = functools.partial(_part_of, constants=constants)
        return interpret(inner.jaxpr, inner.consts, operands, run)
    together = moved if name in BILINEAR else _together(equation)
    own = lambda x: x.part if isinstance(x, Moved) else x if constants else None
    found = [own(x) if n in together else x for n, x in enumerate(operands)]
    if all(found[n] is None for n in together):
        return [Moved(None)]
    zeros = lambda v: jnp.zeros(v.aval.shape, v.aval.dtype)
    values = [zeros(v) if x is None else x for v, x in zip(equation.invars, found, strict=True)]
    # A layout was asked for the whole of it, on all devices.
    is_layout = name == "sharding_constraint"
    return [Moved(values[0] if is_layout else eval_equation(equation, values)[0])]
