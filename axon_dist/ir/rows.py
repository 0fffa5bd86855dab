"""Runs a program on stacked layers row by row, one row for each layer.

A model may store the weights of equal layers in one array, one row per layer, and loop over it. A
pipeline assigns layers to ranks, and represents such an array as its rows (`Stacked`): a loop over
it becomes a chain of calls, an elementwise operation becomes one operation per row, and a sum over
the array becomes a sum of the rows' sums. Other operations read the array itself.

Most operations of an optimizer are elementwise. One that is not, such as the orthogonalisation of a
momentum, is one operation here (`matrixwise`) that is batched over arrays: a caller may stack
arrays of equal shape, and run it for all of them at once.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Hashable, Sequence
from types import MappingProxyType
from typing import TypeAlias

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Primitive, Var

from ..core.compat import CALLS, REMATS, eval_equation, inner_programs, new_operation
from ..core.typing import Array, Function, PyTree
from .factors import ELEMENTWISE, KEEPS, MOVES, Role, factors
from .layer_scan import has_units
from .units import is_unit
from .walk import (
    Params,
    called,
    equations,
    inners,
    interpret,
    opened,
    shape_of,
    struct_of,
    values_of,
    variables,
)


class Stacked:
    """An array of shape [L, ...], represented by its L rows.

    Args:
        rows: arrays of the same shape and dtype.
        array: all of them, where there is a shorter way than to stack the rows.
    """

    def __init__(self, rows: Sequence[Array], array: Array | None = None):
        self.rows: tuple[Array, ...] = tuple(rows)
        self._array = array

    @property
    def whole(self) -> Array:
        """The array."""
        return jnp.stack(list(map(jnp.asarray, self.rows))) if self._array is None else self._array

    @property
    def shape(self) -> jax.ShapeDtypeStruct:
        """The shape and dtype of the array."""
        row = jnp.asarray(self.rows[0])
        return jax.ShapeDtypeStruct((len(self.rows), *row.shape), row.dtype)


RowValue: TypeAlias = Array | Stacked
"""A value of a program: an array, or its rows."""


def by_rows(function: Function) -> Function:
    """Makes a function some of whose arguments and results may be `Stacked`.

    Args:
        function: traced once more, with whole arrays.

    Returns:
        A function of the same arguments with the same results. Checkpoints and jitted functions
        around units within a loop over layers are gone.

    Example:
        >>> total = by_rows(lambda x: jnp.sum(2 * x))
        >>> program = jax.make_jaxpr(lambda a, b: total(Stacked([a, b])))(1.0, 1.0)
        >>> [equation.primitive.name for equation in program.eqns]
        ['mul', 'mul', 'add']
    """

    def run(*args: PyTree) -> PyTree:
        values, structure = jax.tree.flatten(args)
        shapes = [value.shape if isinstance(value, Stacked) else value for value in values]
        trace = jax.make_jaxpr(lambda *xs: function(*structure.unflatten(xs)), return_shape=True)
        closed, results = trace(*shapes)
        outputs = interpret(closed.jaxpr, closed.consts, values, _run)
        return jax.tree.unflatten(jax.tree.structure(results), outputs)

    return run


def whole(value: RowValue) -> Array:
    """The array itself, stacked where it is represented by rows."""
    return value.whole if isinstance(value, Stacked) else value


def _run(equation: JaxprEqn, operands: Sequence[RowValue]) -> Sequence[RowValue]:
    has_rows = any(isinstance(x, Stacked) for x in operands)
    calls_units = not is_unit(equation) and has_units(equation)
    if has_rows or calls_units:
        name = equation.primitive.name
        inner = called(equation) if name in CALLS | REMATS and not is_unit(equation) else None
        if inner is not None:
            return interpret(inner.jaxpr, inner.consts, operands, _run)
        if name == "scan" and calls_units:
            return _scan(equation, operands)
        rule = _elementwise if name in ELEMENTWISE else _cond if name == "cond" else _by_row
        by_row = rule(equation, operands) if has_rows else None
        if by_row is not None:
            return by_row
    results = eval_equation(equation, [whole(x) for x in operands])
    if equation.primitive.name != "broadcast_in_dim" or len(equation.invars) > 1:
        return results
    shape, dims = equation.params["shape"], equation.params["broadcast_dimensions"]
    if not shape or 0 in dims or shape[0] == 1:
        return results
    # All rows are equal, and a broadcast of a smaller array.
    row = jax.lax.broadcast_in_dim(whole(operands[0]), shape[1:], [dim - 1 for dim in dims])
    return [Stacked([row] * shape[0], results[0])]


def _scan(equation: JaxprEqn, operands: Sequence[RowValue]) -> list[RowValue]:
    """A loop over layers, unrolled into its iterations."""
    (loop,), closed = inners(equation), equation.params["jaxpr"]
    consts, carry, stacked = loop.parts(operands)
    order = range(equation.params["length"])
    columns = [_rows_of(x, len(order)) for x in stacked]
    made: dict[int, list[Array]] = {}
    for number in reversed(order) if equation.params["reverse"] else order:
        values = [*consts, *carry, *(column[number] for column in columns)]
        carry, rows = loop.outputs(interpret(closed.jaxpr, closed.consts, values, _run))
        made[number] = [whole(x) for x in rows]
    return [*carry, *(Stacked([made[number][i] for number in order]) for i in range(len(made[0])))]


def _rows_of(value: RowValue, length: int) -> Sequence[Array]:
    if isinstance(value, Stacked):
        return value.rows
    return [jax.lax.index_in_dim(value, i, keepdims=False) for i in range(length)]


def _elementwise(equation: JaxprEqn, operands: Sequence[RowValue]) -> list[RowValue]:
    length = _length(operands)
    columns = [_column(x, length) for x in operands]
    made = [eval_equation(equation, row) for row in zip(*columns, strict=True)]
    return [Stacked(results) for results in zip(*made, strict=True)]


def _column(value: RowValue, length: int) -> Sequence[Array]:
    """The operands of each row; a scalar is the same for all rows, as is a dim of size one."""
    if isinstance(value, Stacked) or (jnp.ndim(value) > 0 and value.shape[0] == length):
        return _rows_of(value, length)
    return [value if jnp.ndim(value) == 0 else _rows_of(value, 1)[0]] * length


def _by_row(equation: JaxprEqn, operands: Sequence[RowValue]) -> list[RowValue] | None:
    """An operation that keeps the rows apart, or one that reduces each row and then all of them."""
    stacked, *more = operands
    known = factors(equation)
    if known is None or not isinstance(stacked, Stacked) or equation.primitive.name not in BY_ROW:
        return None
    row = equation.replace(params=_of_a_row(equation.params))
    # No dim may be left to reduce within a row.
    is_done = row.params.get("axes") == ()

    def run(x):
        return x if is_done else eval_equation(row, [x, *map(whole, more)])[0]

    if equation.primitive.name in MONOIDS:
        made = [run(x) for x in stacked.rows]
        both = MONOIDS[equation.primitive.name]
        is_kept = known.role(0, 0) is Role.PASSES
        return [Stacked(made) if is_kept else functools.reduce(both, made)]
    shape = shape_of(equation.outvars[0])
    is_kept = (
        shape[:1] == (len(stacked.rows),)
        and known.results[0][0] == known.operands[0][0]
        # A dim of size 1 is no factor of a reshape.
        and known.role(0, 0) in (Role.PASSES, None)
    )
    return [Stacked([run(x) for x in stacked.rows])] if is_kept else None


def _of_a_row(params: Params) -> Params:
    """The parameters of the same operation on arrays without dim 0."""
    row_params = dict(params)
    for name in NUMBERS_OF_DIMS & row_params.keys():
        if row_params[name] is not None:
            row_params[name] = tuple(dim - 1 for dim in row_params[name] if dim)
    for name in SIZES & row_params.keys():
        row_params[name] = row_params[name][1:]
    if "lead" in row_params:
        row_params["lead"] -= 1
    return row_params


def _cond(equation: JaxprEqn, operands: Sequence[RowValue]) -> list[RowValue] | None:
    """Runs all branches and selects row by row; a branch would need all rows on one rank."""
    which, *values = operands
    if equation.effects or has_units(equation) or isinstance(which, Stacked):
        return None
    branches = equation.params["branches"]
    outputs = [interpret(b.jaxpr, b.consts, values, _run) for b in branches]
    return [_select(which, cases) for cases in zip(*outputs, strict=True)]


def _select(which: Array, cases: Sequence[RowValue]) -> RowValue:
    if all(case is cases[0] for case in cases):
        return cases[0]
    if not any(isinstance(case, Stacked) for case in cases):
        return select_case(which, [whole(case) for case in cases])
    length, number = _length(cases), _case_number(which, len(cases))
    columns = zip(*(_rows_of(case, length) for case in cases), strict=True)
    return Stacked([jax.lax.select_n(number, *row) for row in columns])


def select_case(which: Array, cases: Sequence[Array]) -> Array:
    """The result of the branch with an index, or a boolean, where all have been computed."""
    return jax.lax.select_n(_case_number(which, len(cases)), *cases)


def _case_number(which: Array, count: int) -> Array:
    is_number = which.dtype != bool
    return jnp.clip(which, 0, count - 1).astype(jnp.int32) if is_number else which


def _length(values: Sequence[RowValue]) -> int:
    return next(len(x.rows) for x in values if isinstance(x, Stacked))


NUMBERS_OF_DIMS = frozenset({"axes", "broadcast_dimensions", "dimensions", "permutation"})
SIZES = frozenset({"shape", "new_sizes"})
"""The parameters that say dims by their numbers, and the sizes of all dims."""

MONOIDS: MappingProxyType[str, Callable[[Array, Array], Array]] = MappingProxyType(
    {
        "reduce_sum": jax.lax.add,
        "reduce_max": jax.lax.max,
        "reduce_min": jax.lax.min,
        "reduce_and": jax.lax.bitwise_and,
        "reduce_or": jax.lax.bitwise_or,
    }
)
"""Reductions of all rows that are reductions of what each row is reduced to."""

BY_ROW = MONOIDS.keys() | frozenset(
    {"broadcast_in_dim", "reshape", "squeeze", "expand_dims", "transpose", "matrixwise"}
)
"""What runs row by row, beside elementwise operations; all else gets the whole array."""


MATRIXWISE = "matrixwise"
"""The operation that has arrays whole, by its name."""

Origin: TypeAlias = tuple[int, tuple[int, ...]]
"""The input of a program that an operand is computed from element by element, and the order in
which it has the input's dims."""


@dataclasses.dataclass(frozen=True)
class RowCall:
    """One operation on whole arrays, within a program.

    Args:
        function: what is done to each array; hashable, equal where it is the same.
        lead: how many leading dims of the operand count arrays.
        origin: where the operand comes from; None where it is not known.
        x: the arrays.
        more: what each call of the function is given beside its array.
    """

    function: Callable[..., Array]
    lead: int
    origin: Origin | None
    x: Array
    more: tuple[Array, ...]


RunCalls: TypeAlias = Callable[[Sequence[RowCall]], Sequence[Array]]
"""Calls that do not wait for each other -> their results."""


def matrixwise(function: Callable[..., Array], x: Array, *more: Array, lead: int = 0) -> Array:
    """Applies a function to arrays that it needs whole, as one operation of the program.

    Args:
        function: (array, *more) -> an array like it; a hashable value.
        x: the arrays, counted by its leading dims.
        more: small arrays, the same for all.
        lead: how many leading dims count arrays.

    Returns:
        The results, like `x`.

    Example:
        >>> normalized = lambda x: x / jnp.linalg.norm(x)
        >>> matrixwise(normalized, jnp.full((3, 2, 2), 5.0), lead=1)[0].tolist()
        [[0.5, 0.5], [0.5, 0.5]]
    """
    return _operation().bind(x, *more, function=function, lead=lead)[0]


def hidden_in(closed: ClosedJaxpr) -> str | None:
    """The operation, such as a branch, that runs such operations where they cannot be found."""
    shapes = [struct_of(v) for v in closed.jaxpr.invars]
    for equation in opened(closed, shapes).jaxpr.eqns:
        programs = inner_programs(equation)
        inside = {inner.primitive.name for program in programs for inner in equations(program)}
        if MATRIXWISE in inside and equation.primitive.name != MATRIXWISE:
            return equation.primitive.name
    return None


_BY_ELEMENT = ELEMENTWISE | MOVES | KEEPS | CALLS | {"cond", "custom_jvp_call"}


def mixing_in(closed: ClosedJaxpr) -> str | None:
    """The operation, such as a sum, of which a result depends on several elements of an array."""
    names = (equation.primitive.name for equation in equations(closed.jaxpr))
    return next((name for name in names if name not in _BY_ELEMENT), None)


def run_with_calls(closed: ClosedJaxpr, values: Sequence[Array], run: RunCalls) -> list[Array]:
    """Runs a program, and its operations on whole arrays as soon and as many at once as can be.

    Args:
        closed: a closed jaxpr.
        values: its inputs.
        run: runs calls, all together.

    Returns:
        Its outputs.
    """
    program = opened(closed, values)
    jaxpr = program.jaxpr
    origins = _origins(jaxpr)
    known: dict[Var, Array] = dict(zip(jaxpr.constvars, program.consts, strict=True))
    known.update(zip(jaxpr.invars, values, strict=True))
    waiting = list(jaxpr.eqns)
    while waiting:
        ready, later = [], []
        for equation in waiting:
            if not variables(equation.invars) <= known.keys():
                later.append(equation)
            elif equation.primitive.name == MATRIXWISE:
                ready.append(equation)
            else:
                results = eval_equation(equation, values_of(known, equation.invars))
                known.update(zip(equation.outvars, results, strict=True))
        calls = [_call(equation, origins, values_of(known, equation.invars)) for equation in ready]
        for equation, result in zip(ready, run(calls) if calls else (), strict=True):
            known[equation.outvars[0]] = result
        waiting = later
    return values_of(known, jaxpr.outvars)


def input_shapes(program: ClosedJaxpr) -> list[jax.ShapeDtypeStruct]:
    """The shapes and dtypes of what a program is given."""
    return [struct_of(variable) for variable in program.jaxpr.invars]


def _call(equation: JaxprEqn, origins: dict[Var, Origin], operands: list[Array]) -> RowCall:
    function, lead = equation.params["function"], equation.params["lead"]
    operand = equation.invars[0]
    origin = None if isinstance(operand, Literal) else origins.get(operand)
    return RowCall(function, lead, origin, operands[0], tuple(operands[1:]))


def _origins(jaxpr: Jaxpr) -> dict[Var, Origin]:
    """Where variables come from, as far as that is a chain of operations that keep the shape.

    A wrong guess would cost an exchange between devices, and change no number.
    """
    origins: dict[Var, Origin] = {
        v: (number, tuple(range(len(shape_of(v))))) for number, v in enumerate(jaxpr.invars)
    }
    for equation in jaxpr.eqns:
        sources = [a for a in equation.invars if not isinstance(a, Literal) and a in origins]
        for made in equation.outvars:
            if equation.primitive.name == "transpose" and sources:
                number, dims = origins[sources[0]]
                origins[made] = number, tuple(dims[dim] for dim in equation.params["permutation"])
                continue
            shape = shape_of(made)
            alike = next((a for a in sources if shape_of(a) == shape and shape), None)
            if alike is not None:
                origins[made] = origins[alike]
    return origins


def _run_calls(x: Array, *more: Array, function: Callable[..., Array], lead: int) -> tuple[Array]:
    for _ in range(lead):
        function = jax.vmap(function, in_axes=(0, *(None for _ in more)))
    return (function(x, *more),)


def _batched(
    arrays: Sequence[Array], dims: Sequence[int], function: Hashable, lead: int
) -> tuple[Sequence[Array], Sequence[int]]:
    (x, *more), (dim, *others) = arrays, dims
    if any(isinstance(other, int) for other in others):
        run = functools.partial(_run_calls, function=function, lead=lead)  # type: ignore[arg-type]
        axes = [at if isinstance(at, int) else None for at in dims]
        return jax.vmap(run, in_axes=axes)(x, *more), [0]
    x = jnp.moveaxis(x, dim, 0)
    return _operation().bind(x, *more, function=function, lead=lead + 1), [0]


@functools.cache
def _operation() -> Primitive:
    return new_operation(MATRIXWISE, _run_calls, _batched)
