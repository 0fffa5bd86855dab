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
from .factors import ELEMENTWISE, Role, factors
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
        array: the array itself, if it exists already; otherwise the rows are stacked when needed.
    """

    def __init__(self, rows: Sequence[Array], array: Array | None = None):
        self.rows: tuple[Array, ...] = tuple(rows)
        self._array = array

    @property
    def whole(self) -> Array:
        """The array."""
        return jnp.stack(list(map(jnp.asarray, self.rows))) if self._array is None else self._array

    @property
    def struct(self) -> jax.ShapeDtypeStruct:
        """The shape and dtype of the array."""
        row = jnp.asarray(self.rows[0])
        return jax.ShapeDtypeStruct((len(self.rows), *row.shape), row.dtype)


RowValue: TypeAlias = Array | Stacked
"""A value of a program: an array or its rows."""


def by_rows(function: Function) -> Function:
    """Makes a function some of whose arguments and results may be `Stacked`.

    Args:
        function: traced again, with whole arrays.

    Returns:
        A function with the same arguments and results. Calls and checkpoints that contain units, or
        that get a `Stacked`, are inlined in it, and loops around units are unrolled.

    Example:
        >>> total = by_rows(lambda x: jnp.sum(2 * x))
        >>> program = jax.make_jaxpr(lambda a, b: total(Stacked([a, b])))(1.0, 1.0)
        >>> [equation.primitive.name for equation in program.eqns]
        ['mul', 'mul', 'add']
    """

    def run(*args: PyTree) -> PyTree:
        values, structure = jax.tree.flatten(args)
        structs = [value.struct if isinstance(value, Stacked) else value for value in values]
        trace = jax.make_jaxpr(lambda *xs: function(*structure.unflatten(xs)), return_shape=True)
        closed, results = trace(*structs)
        outputs = interpret(closed.jaxpr, closed.consts, values, _run)
        return jax.tree.unflatten(jax.tree.structure(results), outputs)

    return run


def whole(value: RowValue) -> Array:
    """Returns the array itself; stacks the rows of a `Stacked`."""
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
    shape = equation.params["shape"]
    dims = equation.params["broadcast_dimensions"]
    if not shape or 0 in dims or shape[0] == 1:
        return results
    # All rows are equal: each is a broadcast of the same smaller array.
    row = jax.lax.broadcast_in_dim(whole(operands[0]), shape[1:], [dim - 1 for dim in dims])
    return [Stacked([row] * shape[0], results[0])]


def _scan(equation: JaxprEqn, operands: Sequence[RowValue]) -> list[RowValue]:
    """Unrolls a loop over layers into its iterations."""
    (loop,) = inners(equation)
    closed = equation.params["jaxpr"]
    consts, carry, stacked = loop.split_operands(operands)
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
    """Returns an operand's value for each row; a scalar, or a first dim of size 1, is repeated."""
    if isinstance(value, Stacked) or (jnp.ndim(value) > 0 and value.shape[0] == length):
        return _rows_of(value, length)
    return [value if jnp.ndim(value) == 0 else _rows_of(value, 1)[0]] * length


def _by_row(equation: JaxprEqn, operands: Sequence[RowValue]) -> list[RowValue] | None:
    """Runs an operation per row, or reduces each row and then all rows; None if it is neither."""
    stacked, *more = operands
    known = factors(equation)
    if known is None or not isinstance(stacked, Stacked) or equation.primitive.name not in BY_ROW:
        return None
    row = equation.replace(params=_of_a_row(equation.params))
    # A reduction over dim 0 only has no dim to reduce within a row.
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
        # In a reshape, a dim of size 1 has no factor, hence no role.
        and known.role(0, 0) in (Role.PASSES, None)
    )
    return [Stacked([run(x) for x in stacked.rows])] if is_kept else None


def _of_a_row(params: Params) -> Params:
    """Returns the parameters of the same operation on arrays without dim 0."""
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
    """Runs all branches and selects row by row; a real branch would need all rows on one rank."""
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
    length = _length(cases)
    number = _case_number(which, len(cases))
    columns = zip(*(_rows_of(case, length) for case in cases), strict=True)
    return Stacked([jax.lax.select_n(number, *row) for row in columns])


def select_case(which: Array, cases: Sequence[Array]) -> Array:
    """Selects the result of one branch, by an index or a boolean, after all have been computed."""
    return jax.lax.select_n(_case_number(which, len(cases)), *cases)


def _case_number(which: Array, count: int) -> Array:
    is_number = which.dtype != bool
    return jnp.clip(which, 0, count - 1).astype(jnp.int32) if is_number else which


def _length(values: Sequence[RowValue]) -> int:
    return next(len(x.rows) for x in values if isinstance(x, Stacked))


NUMBERS_OF_DIMS = frozenset({"axes", "broadcast_dimensions", "dimensions", "permutation"})
SIZES = frozenset({"shape", "new_sizes"})
"""The parameters that list dims by number, and those that list the sizes of all dims."""

MONOIDS: MappingProxyType[str, Callable[[Array, Array], Array]] = MappingProxyType(
    {
        "reduce_sum": jax.lax.add,
        "reduce_max": jax.lax.max,
        "reduce_min": jax.lax.min,
        "reduce_and": jax.lax.bitwise_and,
        "reduce_or": jax.lax.bitwise_or,
    }
)
"""Reductions of an array that equal the reduction of its rows' reductions, with their monoid."""

BY_ROW = MONOIDS.keys() | frozenset(
    {"broadcast_in_dim", "reshape", "squeeze", "expand_dims", "transpose", "matrixwise"}
)
"""Operations that run row by row, in addition to elementwise ones; others get the whole array."""


MATRIXWISE = "matrixwise"
"""The name of the primitive that applies a function to whole arrays."""

Origin: TypeAlias = tuple[int, tuple[int, ...]]
"""The input of a program from which an operand is computed element by element, and the order of
the input's dims in the operand."""


@dataclasses.dataclass(frozen=True)
class RowCall:
    """One `matrixwise` operation within a program.

    Args:
        function: the function of each array; hashable, and equal for equal functions.
        lead: how many leading dims of the operand count arrays.
        origin: the input that the operand comes from; None if unknown.
        x: the arrays.
        more: further arguments of each call of the function.
    """

    function: Callable[..., Array]
    lead: int
    origin: Origin | None
    x: Array
    more: tuple[Array, ...]


RunCalls: TypeAlias = Callable[[Sequence[RowCall]], Sequence[Array]]
"""(calls that do not depend on each other) -> their results."""


def matrixwise(function: Callable[..., Array], x: Array, *more: Array, lead: int = 0) -> Array:
    """Applies a function that needs whole arrays, as one operation of the program.

    Args:
        function: (array, *more) -> an array of the same shape; a hashable value.
        x: the arrays, stacked along its leading dims.
        more: small arrays, the same for all calls.
        lead: how many leading dims of `x` count arrays.

    Returns:
        The results, like `x`.

    Example:
        >>> normalized = lambda x: x / jnp.linalg.norm(x)
        >>> matrixwise(normalized, jnp.full((3, 2, 2), 5.0), lead=1)[0].tolist()
        [[0.5, 0.5], [0.5, 0.5]]
    """
    return _operation().bind(x, *more, function=function, lead=lead)[0]


def hidden_in(closed: ClosedJaxpr) -> str | None:
    """Returns the operation, such as a branch, that hides a `matrixwise` operation; or None."""
    shapes = [struct_of(v) for v in closed.jaxpr.invars]
    for equation in opened(closed, shapes).jaxpr.eqns:
        programs = inner_programs(equation)
        inside = {inner.primitive.name for program in programs for inner in equations(program)}
        if MATRIXWISE in inside and equation.primitive.name != MATRIXWISE:
            return equation.primitive.name
    return None


def run_with_calls(closed: ClosedJaxpr, values: Sequence[Array], run: RunCalls) -> list[Array]:
    """Runs a program, with its `matrixwise` operations batched: as early and as many as possible.

    Args:
        closed: a closed jaxpr.
        values: its inputs.
        run: runs a batch of calls together.

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
        ready = []
        later = []
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
    """Returns the shapes and dtypes of a program's inputs."""
    return [struct_of(variable) for variable in program.jaxpr.invars]


def _call(equation: JaxprEqn, origins: dict[Var, Origin], operands: list[Array]) -> RowCall:
    function = equation.params["function"]
    lead = equation.params["lead"]
    operand = equation.invars[0]
    origin = None if isinstance(operand, Literal) else origins.get(operand)
    return RowCall(function, lead, origin, operands[0], tuple(operands[1:]))


def _origins(jaxpr: Jaxpr) -> dict[Var, Origin]:
    """Traces variables back to inputs through chains of operations that keep the shape.

    A wrong guess costs a transfer between devices, but changes no result.
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
            source = next((a for a in sources if shape_of(a) == shape and shape), None)
            if source is not None:
                origins[made] = origins[source]
    return origins


def _run_calls(x: Array, *more: Array, function: Callable[..., Array], lead: int) -> tuple[Array]:
    for _ in range(lead):
        function = jax.vmap(function, in_axes=(0, *(None for _ in more)))
    return (function(x, *more),)


def _batched(
    arrays: Sequence[Array], dims: Sequence[int], function: Hashable, lead: int
) -> tuple[Sequence[Array], Sequence[int]]:
    x, *more = arrays
    dim, *others = dims
    if any(isinstance(other, int) for other in others):
        run = functools.partial(_run_calls, function=function, lead=lead)  # type: ignore[arg-type]
        axes = [at if isinstance(at, int) else None for at in dims]
        return jax.vmap(run, in_axes=axes)(x, *more), [0]
    x = jnp.moveaxis(x, dim, 0)
    return _operation().bind(x, *more, function=function, lead=lead + 1), [0]


@functools.cache
def _operation() -> Primitive:
    return new_operation(MATRIXWISE, _run_calls, _batched)
