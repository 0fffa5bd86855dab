"""Matrices that an optimizer needs whole: one operation of its program, found and run together.

Most of an optimizer works element by element, wherever elements lie. What does not, such as the
orthogonalisation of a momentum, is one operation here that holds for each of many arrays; whoever
runs the program may bring arrays of the same shape together, and run it for all of them at once.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Hashable, Sequence
from typing import TypeAlias

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Primitive, Var

from ..core.compat import eval_equation, new_operation
from ..core.typing import Array
from .walk import equations, opened

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


def _run(x: Array, *more: Array, function: Callable[..., Array], lead: int) -> tuple[Array]:
    for _ in range(lead):
        function = jax.vmap(function, in_axes=(0, *(None for _ in more)))
    return (function(x, *more),)


def _batched(
    arrays: Sequence[Array], dims: Sequence[int], function: Hashable, lead: int
) -> tuple[Sequence[Array], Sequence[int]]:
    (x, *more), (dim, *others) = arrays, dims
    if any(isinstance(other, int) for other in others):
        run = functools.partial(_run, function=function, lead=lead)  # type: ignore[arg-type]
        axes = [at if isinstance(at, int) else None for at in dims]
        return jax.vmap(run, in_axes=axes)(x, *more), [0]
    x = jnp.moveaxis(x, dim, 0)
    return _operation().bind(x, *more, function=function, lead=lead + 1), [0]


@functools.cache
def _operation() -> Primitive:
    return new_operation(NAME, _run, _batched)
