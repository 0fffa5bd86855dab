"""Rows: a program about stacked layers, computed layer by layer.

A model may keep the weights of equal layers in one array, a row for each, and loop over it. Who has
to tell the layers apart, as a pipeline does that gives each to one rank, sees such an array as its
rows: a loop over it becomes the chain of calls that it is, an operation on its elements becomes one
for each row, and a sum over all of it a sum of sums. What else reads it gets it whole.

Most of an optimizer works element by element, wherever elements lie. What does not, such as the
orthogonalisation of a momentum, is one operation here that holds for each of many arrays; whoever
runs the program may bring arrays of the same shape together, and run it for all of them at once.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Hashable, Sequence
from functools import cached_property
from types import MappingProxyType
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Primitive, Var

from ..core.compat import CALLS, REMATS, eval_equation, new_operation, scan_counts
from ..core.typing import Array
from .layer_scan import has_units, is_unit
from .sample_rules import ELEMENTWISE
from .walk import called, equations, interpret, opened

NAME = "matrixwise"

Origin: TypeAlias = tuple[int, tuple[int, ...]]
"""The input of a program that an operand is computed from element by element, and the order in
which it has the input's dims."""


@dataclasses.dataclass(frozen=True)
class Call:
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


RunCalls: TypeAlias = Callable[[Sequence[Call]], Sequence[Array]]
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


def is_matrixwise(equation: JaxprEqn) -> bool:
    """Whether an equation is such an operation."""
    return equation.primitive.name == NAME


def has_matrices(closed: ClosedJaxpr) -> bool:
    """Whether a program has such operations, in branches and loops too."""
    return any(is_matrixwise(equation) for equation in equations(closed.jaxpr))


def hidden_in(closed: ClosedJaxpr) -> str | None:
    """The operation, such as a branch, that runs such operations where they cannot be found."""
    shapes = [shape_of(v) for v in closed.jaxpr.invars]
    for equation in opened(closed, shapes).jaxpr.eqns:
        inside = [inner for inner in _inside(equation) if is_matrixwise(inner)]
        if inside and not is_matrixwise(equation):
            return equation.primitive.name
    return None


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
    read = lambda atoms: [a.val if isinstance(a, Literal) else known[a] for a in atoms]
    waiting = list(jaxpr.eqns)
    while waiting:
        ready, later = [], []
        for equation in waiting:
            if not all(isinstance(a, Literal) or a in known for a in equation.invars):
                later.append(equation)
            elif is_matrixwise(equation):
                ready.append(equation)
            else:
                results = eval_equation(equation, read(equation.invars))
                known.update(zip(equation.outvars, results, strict=True))
        calls = [_call(equation, origins, read(equation.invars)) for equation in ready]
        for equation, result in zip(ready, run(calls) if calls else (), strict=True):
            known[equation.outvars[0]] = result
        waiting = later
    return read(jaxpr.outvars)


def shape_of(atom: Var | Literal) -> jax.ShapeDtypeStruct:
    """The shape and dtype of an atom of a program."""
    return jax.ShapeDtypeStruct(atom.aval.shape, atom.aval.dtype)  # type: ignore[attr-defined]


def input_shapes(program: ClosedJaxpr) -> list[jax.ShapeDtypeStruct]:
    """The shapes and dtypes of what a program is given."""
    return [shape_of(variable) for variable in program.jaxpr.invars]


def _call(equation: JaxprEqn, origins: dict[Var, Origin], operands: list[Array]) -> Call:
    function, lead = equation.params["function"], equation.params["lead"]
    operand = equation.invars[0]
    origin = None if isinstance(operand, Literal) else origins.get(operand)
    return Call(function, lead, origin, operands[0], tuple(operands[1:]))


def _origins(jaxpr: Jaxpr) -> dict[Var, Origin]:
    """Where variables come from, as far as that is a chain of operations that keep the shape.

    A wrong guess would cost an exchange between devices, and change no number.
    """
    found: dict[Var, Origin] = {
        v: (number, tuple(range(len(shape_of(v).shape)))) for number, v in enumerate(jaxpr.invars)
    }
    for equation in jaxpr.eqns:
        sources = [a for a in equation.invars if not isinstance(a, Literal) and a in found]
        for made in equation.outvars:
            if equation.primitive.name == "transpose" and sources:
                number, dims = found[sources[0]]
                order = equation.params["permutation"]
                found[made] = number, tuple(dims[dim] for dim in order)
                continue
            shape = shape_of(made).shape
            alike = [a for a in sources if shape_of(a).shape == shape and shape]
            if alike:
                found[made] = found[alike[0]]
    return found


def _inside(equation: JaxprEqn) -> list[JaxprEqn]:
    return [*equations(_Single([equation]))][1:]


@dataclasses.dataclass(frozen=True)
class _Single:
    eqns: list[JaxprEqn]


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
    return new_operation(NAME, _run_calls, _batched)


class Stacked:
    """An array of shape [L, ...], known as its L rows.

    Args:
        rows: arrays of the same shape and dtype.
        whole: makes the array, where there is a shorter way than to stack the rows.
    """

    def __init__(self, rows: Sequence[Any]):
        self.rows: tuple[Any, ...] = tuple(rows)

    @property
    def whole(self) -> Any:
        """The array."""
        return jnp.stack([jnp.asarray(row) for row in self.rows])

    @property
    def shape(self) -> jax.ShapeDtypeStruct:
        """The shape and dtype of the array."""
        row = jnp.asarray(self.rows[0])
        return jax.ShapeDtypeStruct((len(self.rows), *row.shape), row.dtype)


class _Repeated(Stacked):
    """An array of which all rows are the same."""

    def __init__(self, array: Any, row: Callable[[], Any]):
        self._array, self._row = array, row

    @property
    def whole(self) -> Any:
        return self._array

    @cached_property
    def rows(self) -> tuple[Any, ...]:  # type: ignore[override]
        return (self._row(),) * self._array.shape[0]


Run: TypeAlias = Callable[[Any, Sequence[Any]], Sequence[Any] | None]


def by_rows(function: Callable[..., Any]) -> Callable[..., Any]:
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

    def run(*args: Any) -> Any:
        values, structure = jax.tree.flatten(args)
        shapes = [value.shape if isinstance(value, Stacked) else value for value in values]
        trace = jax.make_jaxpr(lambda *xs: function(*structure.unflatten(xs)), return_shape=True)
        closed, results = trace(*shapes)
        found = interpret(closed.jaxpr, closed.consts, values, _run)
        return jax.tree.unflatten(jax.tree.structure(results), found)

    return run


def whole(value: Any) -> Any:
    """The array itself, where it is known as rows."""
    return value.whole if isinstance(value, Stacked) else value


def _run(equation: Any, operands: Sequence[Any]) -> Sequence[Any]:
    has_rows = any(isinstance(x, Stacked) for x in operands)
    calls_units = not is_unit(equation) and has_units(equation)
    if has_rows or calls_units:
        name = equation.primitive.name
        inner = called(equation) if name in CALLS | REMATS and not is_unit(equation) else None
        if inner is not None:
            return interpret(inner.jaxpr, inner.consts, operands, _run)
        if name == "scan" and calls_units:
            return _scan(equation, operands)
        rule = _elementwise if name in ELEMENTWISE else _RULES.get(name)
        found = rule(equation, operands) if has_rows and rule is not None else None
        if found is not None:
            return found
    results = eval_equation(equation, [whole(x) for x in operands])
    return [_repeated(equation, operands[0], results[0])] if _repeats(equation) else results


def _scan(equation: Any, operands: Sequence[Any]) -> list[Any]:
    """A loop over layers, each iteration by itself."""
    params, closed = equation.params, equation.params["jaxpr"]
    num_consts, num_carry = scan_counts(equation)
    consts, carry = list(operands[:num_consts]), list(operands[num_consts:][:num_carry])
    columns = [_rows_of(x, params["length"]) for x in operands[num_consts + num_carry :]]
    order = range(params["length"])
    made: dict[int, list[Any]] = {}
    for number in reversed(order) if params["reverse"] else order:
        values = [*consts, *carry, *(column[number] for column in columns)]
        results = interpret(closed.jaxpr, closed.consts, values, _run)
        carry, made[number] = results[:num_carry], [whole(x) for x in results[num_carry:]]
    return [*carry, *(Stacked([made[number][i] for number in order]) for i in range(len(made[0])))]


def _rows_of(value: Any, length: int) -> Sequence[Any]:
    if isinstance(value, Stacked):
        return value.rows
    return [jax.lax.index_in_dim(value, i, keepdims=False) for i in range(length)]


def _repeats(equation: Any) -> bool:
    """Whether all rows of what is made are the same, and made of something smaller."""
    if equation.primitive.name != "broadcast_in_dim" or len(equation.invars) > 1:
        return False
    shape, dims = equation.params["shape"], equation.params["broadcast_dimensions"]
    return len(shape) > 0 and 0 not in dims and shape[0] > 1


def _repeated(equation: Any, operand: Any, made: Any) -> Stacked:
    shape, dims = equation.params["shape"], equation.params["broadcast_dimensions"]
    within = [dim - 1 for dim in dims]
    return _Repeated(made, lambda: jax.lax.broadcast_in_dim(whole(operand), shape[1:], within))


def _elementwise(equation: Any, operands: Sequence[Any]) -> list[Any]:
    length = _length(operands)
    columns = [_column(x, length) for x in operands]
    made = [eval_equation(equation, row) for row in zip(*columns, strict=True)]
    return [Stacked(results) for results in zip(*made, strict=True)]


def _column(value: Any, length: int) -> Sequence[Any]:
    """What each row is computed with: a number is the same for all, as is a dim of size one."""
    if isinstance(value, Stacked) or (jnp.ndim(value) > 0 and value.shape[0] == length):
        return _rows_of(value, length)
    return [value if jnp.ndim(value) == 0 else _rows_of(value, 1)[0]] * length


def _reduce(
    equation: Any, operands: Sequence[Any], both: Callable[[Any, Any], Any], reduce: Any
) -> list[Any]:
    axes = equation.params["axes"]
    within = tuple(axis - 1 for axis in axes if axis)
    made = [reduce(row, within) if within else row for row in operands[0].rows]
    return [functools.reduce(both, made) if 0 in axes else Stacked(made)]


def _broadcast(equation: Any, operands: Sequence[Any]) -> list[Any] | None:
    shape, dims = equation.params["shape"], equation.params["broadcast_dimensions"]
    if len(operands) > 1 or dims[0] != 0 or shape[0] != len(operands[0].rows):
        return None
    spread = lambda row: jax.lax.broadcast_in_dim(row, shape[1:], [dim - 1 for dim in dims[1:]])
    return [Stacked([spread(row) for row in operands[0].rows])]


def _reshape(equation: Any, operands: Sequence[Any]) -> list[Any] | None:
    shape, dims = equation.outvars[0].aval.shape, equation.params.get("dimensions")
    # The first dim stays the first where its size does: what follows has the same elements then.
    if not shape or shape[0] != len(operands[0].rows) or (dims and 0 in dims):
        return None
    return [Stacked([jax.lax.reshape(row, shape[1:]) for row in operands[0].rows])]


def _transpose(equation: Any, operands: Sequence[Any]) -> list[Any] | None:
    order = equation.params["permutation"]
    if order[0] != 0:
        return None
    within = [dim - 1 for dim in order[1:]]
    return [Stacked([jax.lax.transpose(row, within) for row in operands[0].rows])]


def _cond(equation: Any, operands: Sequence[Any]) -> list[Any] | None:
    """Takes all branches and selects, row by row; a branch would need all rows in one place."""
    which, *values = operands
    if equation.effects or has_units(equation) or isinstance(which, Stacked):
        return None
    branches = equation.params["branches"]
    found = [interpret(b.jaxpr, b.consts, values, _run) for b in branches]
    return [_select(which, cases) for cases in zip(*found, strict=True)]


def _select(which: Any, cases: Sequence[Any]) -> Any:
    if all(case is cases[0] for case in cases):
        return cases[0]
    if which.dtype != bool:
        which = jnp.clip(which, 0, len(cases) - 1).astype(jnp.int32)
    if not any(isinstance(case, Stacked) for case in cases):
        return jax.lax.select_n(which, *cases)
    length = _length(cases)
    columns = zip(*(_rows_of(case, length) for case in cases), strict=True)
    return Stacked([jax.lax.select_n(which, *row) for row in columns])


def _length(values: Sequence[Any]) -> int:
    return next(len(x.rows) for x in values if isinstance(x, Stacked))


def _matrixwise(equation: Any, operands: Sequence[Any]) -> list[Any] | None:
    stacked, *more = operands
    function, lead = equation.params["function"], equation.params["lead"]
    if lead == 0 or not isinstance(stacked, Stacked):
        return None
    return [Stacked([matrixwise(function, row, *more, lead=lead - 1) for row in stacked.rows])]


_REDUCTIONS: MappingProxyType[str, tuple[Any, Any]] = MappingProxyType(
    {
        "reduce_sum": (jax.lax.add, lambda x, axes: jax.lax.reduce_sum(x, axes)),
        "reduce_max": (jax.lax.max, lambda x, axes: jax.lax.reduce_max(x, axes)),
        "reduce_min": (jax.lax.min, lambda x, axes: jax.lax.reduce_min(x, axes)),
        "reduce_and": (jax.lax.bitwise_and, lambda x, axes: jax.lax.reduce_and(x, axes)),
        "reduce_or": (jax.lax.bitwise_or, lambda x, axes: jax.lax.reduce_or(x, axes)),
    }
)

_RULES: MappingProxyType[str, Run] = MappingProxyType(
    {
        **{
            name: functools.partial(_reduce, both=both, reduce=reduce)
            for name, (both, reduce) in _REDUCTIONS.items()
        },
        "broadcast_in_dim": _broadcast,
        "reshape": _reshape,
        "squeeze": _reshape,
        "expand_dims": _reshape,
        "transpose": _transpose,
        "cond": _cond,
        "matrixwise": _matrixwise,
    }
)
