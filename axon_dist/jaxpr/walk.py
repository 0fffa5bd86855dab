"""The few ways in which everything here reads a jaxpr.

A jaxpr is a list of equations over *atoms*: variables, or literals that hold their value. Some
equations run programs of their own (calls, loops, branches). Whoever reads one needs the same few
things: the values of atoms, the programs within, what depends on what, and to run it with one
equation done in another way. They stand here once.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from ..core.compat import (
    CALLS,
    REMATS,
    called_program,
    dce_jaxpr,
    eval_equation,
    eval_jaxpr,
    inner_programs,
)

Run: TypeAlias = Callable[[Any, Sequence[Any]], Sequence[Any]]
"""(equation, what is known of its operands) -> what is known of its results."""

OPENED = CALLS | REMATS | {"custom_jvp_call", "custom_vjp_call"}
"""Calls that `opened` writes out."""

LOOPS = frozenset({"scan", "while"})
"""Equations that run a program more often than once."""


class Known(dict):
    """What is known of the variables of a jaxpr; a literal is known by itself.

    Example:
        >>> import jax
        >>> jaxpr = jax.make_jaxpr(lambda x: x * 2.0)(1.0).jaxpr
        >>> known = Known(zip(jaxpr.invars, [5.0]))
        >>> [float(value) for value in known.read(jaxpr.eqns[0].invars)]
        [5.0, 2.0]
    """

    def read(self, atoms: Iterable[Any]) -> list[Any]:
        """What is known of atoms."""
        return [atom.val if isinstance(atom, Literal) else self[atom] for atom in atoms]

    def write(self, variables: Sequence[Any], values: Sequence[Any]) -> None:
        """Notes what variables are."""
        self.update(zip(variables, values, strict=True))


def variables(atoms: Iterable[Any]) -> set[Any]:
    """The atoms that are variables, not literals."""
    return {atom for atom in atoms if not isinstance(atom, Literal)}


def made_by(equations: Iterable[Any]) -> set[Any]:
    """The variables that equations make."""
    return {variable for equation in equations for variable in equation.outvars}


def called(equation: Any) -> ClosedJaxpr | None:
    """The program that an equation runs once, as `jit`, `checkpoint` and `custom_vjp` do.

    Its inputs are the last operands of the equation. Loops and branches are no calls.
    """
    return None if equation.primitive.name in LOOPS else called_program(equation)


def opened(closed: Any, values: Sequence[Any]) -> ClosedJaxpr:
    """The same program with its calls written out, so that each operation is an equation.

    Args:
        closed: a closed jaxpr that will not be differentiated any more.
        values: what it is traced with, arrays or shapes.

    Returns:
        A closed jaxpr.

    Example:
        >>> program = jax.make_jaxpr(jax.jit(lambda x: 2 * x))(1.0)
        >>> [equation.primitive.name for equation in opened(program, [1.0]).eqns]
        ['mul']
    """
    return jax.make_jaxpr(lambda *xs: interpret(closed.jaxpr, closed.consts, xs, _open))(*values)


def is_kept_apart(equation: Any) -> bool:
    """Whether what is recomputed is kept apart from the first computation by a barrier."""
    prevents = equation.params.get("prevent_cse", False)
    return any(prevents) if isinstance(prevents, tuple) else bool(prevents)


def equations(jaxpr: Any) -> Iterator[Any]:
    """All equations of a jaxpr, each followed by those of the programs that it runs.

    Example:
        >>> import jax
        >>> program = jax.make_jaxpr(lambda x: jax.jit(jax.numpy.sin)(x) + 1)(1.0)
        >>> [equation.primitive.name for equation in equations(program.jaxpr)]
        ['jit', 'sin', 'add']
    """
    for equation in jaxpr.eqns:
        yield equation
        for inner in inner_programs(equation):
            yield from equations(inner)


def in_branches(jaxpr: Any, inside: bool = False) -> Iterator[Any]:
    """The equations of a jaxpr that run in a branch of a conditional, at any depth.

    Args:
        jaxpr: an open jaxpr.
        inside: whether it is a branch itself.
    """
    for equation in jaxpr.eqns:
        if inside:
            yield equation
        for inner in inner_programs(equation):
            yield from in_branches(inner, inside or equation.primitive.name == "cond")


def interpret(
    jaxpr: Any,
    consts: Sequence[Any],
    values: Sequence[Any],
    run: Run,
    literal: Callable[[Any], Any] | None = None,
) -> list[Any]:
    """Goes through a jaxpr, each equation as `run` does it.

    Values may be arrays, and the program is computed; or anything else that follows its flow.

    Args:
        jaxpr: an open jaxpr.
        consts: what is known of its constants.
        values: what is known of its inputs.
        run: what an equation does.
        literal: what is known of a literal; its value where this is left out.

    Returns:
        What is known of its outputs.

    Example:
        >>> import jax
        >>> program = jax.make_jaxpr(lambda x, y: (x * 2.0, y))(1.0, 1.0)
        >>> tainted = lambda equation, operands: [any(operands)] * len(equation.outvars)
        >>> interpret(program.jaxpr, (), [True, False], tainted, lambda _: False)
        [True, False]
    """
    known = Known(zip(jaxpr.constvars, consts, strict=True))
    known.write(jaxpr.invars, values)

    def read(atoms: Sequence[Any]) -> list[Any]:
        if literal is None:
            return known.read(atoms)
        return [literal(atom) if isinstance(atom, Literal) else known[atom] for atom in atoms]

    for equation in jaxpr.eqns:
        known.write(equation.outvars, run(equation, read(equation.invars)))
    return read(jaxpr.outvars)


def depends_on(
    jaxpr: Any, sources: Iterable[Any], stop: int | None = None, start: int = 0
) -> set[Any]:
    """The variables that depend on any of the sources, these included.

    Args:
        jaxpr: an open jaxpr.
        sources: variables of it.
        stop: only equations before this one are looked at.
        start: only equations from this one on are looked at.

    Returns:
        The variables.
    """
    tainted = set(sources)
    for equation in jaxpr.eqns[start:stop]:
        if not tainted.isdisjoint(variables(equation.invars)):
            tainted.update(equation.outvars)
    return tainted


def needed_for(jaxpr: Any, positions: Iterable[int]) -> tuple[Any, list[int]]:
    """The part of a jaxpr that some of its outputs need, inside calls and loops too.

    Args:
        jaxpr: an open jaxpr.
        positions: of the outputs.

    Returns:
        The smaller jaxpr, and the positions of the inputs that it still has.
    """
    wanted = set(positions)
    part, used = dce_jaxpr(jaxpr, [number in wanted for number in range(len(jaxpr.outvars))])
    return part, [number for number, is_used in enumerate(used) if is_used]


def sources_of(jaxpr: Any) -> list[set[int]]:
    """For every output of a jaxpr, the positions of the inputs that it depends on."""
    return [set(needed_for(jaxpr, [number])[1]) for number in range(len(jaxpr.outvars))]


def moves_with(program: ClosedJaxpr, output: int, count: int) -> list[int]:
    """With which inputs an output of a program moves: those whose gradient is not zero everywhere.

    Args:
        program: a traced function.
        output: the position of the output, a number.
        count: how many of the first inputs are asked about; floating-point.

    Returns:
        Their positions; without those that only comparisons, counts or `stop_gradient` read.

    Example:
        >>> import jax.numpy as jnp
        >>> run = lambda x, y, z: jnp.sum(x > 0) + y * jax.lax.stop_gradient(z)
        >>> moves_with(jax.make_jaxpr(run)(1.0, 2.0, 3.0), 0, 3)
        [1]
    """
    if sources_of(program.jaxpr)[output].isdisjoint(range(count)):
        return []
    avals: list[Any] = [variable.aval for variable in program.jaxpr.invars]
    values = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in avals]
    own, others = values[:count], values[count:]

    def moved(tangents: list[Any], own: list[Any], others: list[Any]) -> Any:
        run = lambda *own: eval_jaxpr(program, [*own, *others])[output].astype(jnp.float32)
        return jax.jvp(run, own, tangents)[1]

    sources = sources_of(jax.make_jaxpr(moved)(own, own, others).jaxpr)[0]
    return sorted(sources & set(range(count)))


def _open(equation: Any, operands: Sequence[Any]) -> Sequence[Any]:
    """Runs an equation; calls are run equation by equation."""
    inner = called(equation) if equation.primitive.name in OPENED else None
    if inner is None:
        return eval_equation(equation, operands)
    return interpret(inner.jaxpr, inner.consts, operands, _open)


# fmt: off
EACH = frozenset((
    "abs", "acos", "acosh", "add", "and", "asin", "asinh", "atan", "atan2", "atanh", "cbrt", "ceil",
    "clamp", "clz", "complex", "convert_element_type", "copy", "cos", "cosh", "digamma", "div",
    "eq", "erf", "erf_inv", "erfc", "exp", "exp2", "expm1", "floor", "ge", "gt", "imag",
    "integer_pow", "is_finite", "le", "lgamma", "log", "log1p", "log2", "logistic", "lt", "max",
    "min", "mul", "ne", "neg", "nextafter", "not", "one_minus_square", "or", "population_count",
    "pow", "real", "reduce_precision", "rem", "round", "rsqrt", "select_n", "shift_left",
    "shift_right_arithmetic", "shift_right_logical", "sign", "sin", "sinh", "sqrt", "square",
    "stop_gradient", "sub", "tan", "tanh", "xor",
))
# fmt: on
"""Operations whose every element depends on the elements at the same place, and parameters alone.

A name that is missing costs speed, and nothing else."""

COMPARES = frozenset(("eq", "ge", "gt", "is_finite", "le", "lt", "ne"))
"""Those of `EACH` whose results are a byte per element, and their operands' dtype is another."""

# fmt: off
MOVES = frozenset((
    "broadcast_in_dim", "concatenate", "expand_dims", "iota", "pad", "reshape", "rev", "slice",
    "split", "squeeze", "transpose",
))
# fmt: on
"""Operations that put numbers elsewhere, and compute nothing."""


def same_params(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether the parameters of two equations are equal, the programs in them too.

    What cannot be compared, such as functions made anew, counts as different.
    """
    return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)


def hashable_params(params: Mapping[str, Any]) -> Hashable | None:
    """Parameters of an equation as a key that only equal ones have; None where there is none."""
    found = tuple(sorted(params.items()))
    try:
        hash(found)
    except TypeError:
        return None
    return found


def same_program(one: Any, other: Any) -> bool:
    """Whether two open jaxprs are equal but for the names of their variables.

    Example:
        >>> import jax
        >>> trace = lambda f: jax.make_jaxpr(f)(1.0).jaxpr
        >>> same_program(trace(lambda x: x * 2), trace(lambda y: y * 2))
        True
        >>> same_program(trace(lambda x: x * 2), trace(lambda x: x * 3))
        False
    """
    if one is other:
        return True
    if len(one.eqns) != len(other.eqns):
        return False
    names: dict[Any, Any] = {}

    def defines(mine: Any, theirs: Any) -> bool:
        names.update(zip(mine, theirs, strict=False))
        return [v.aval for v in mine] == [v.aval for v in theirs]

    def reads(mine: Any, theirs: Any) -> bool:
        pairs = list(zip(mine, theirs, strict=False))
        return len(mine) == len(theirs) and all(_same_atom(names, a, b) for a, b in pairs)

    known = defines(one.constvars, other.constvars) and defines(one.invars, other.invars)
    return (
        known
        and all(
            a.primitive is b.primitive
            and same_params(a.params, b.params)
            and reads(a.invars, b.invars)
            and defines(a.outvars, b.outvars)
            for a, b in zip(one.eqns, other.eqns, strict=True)
        )
        and reads(one.outvars, other.outvars)
    )


def _same_atom(names: dict[Any, Any], one: Any, other: Any) -> bool:
    if isinstance(one, Literal) or isinstance(other, Literal):
        both = isinstance(one, Literal) and isinstance(other, Literal)
        return both and one.aval == other.aval and same_value(one.val, other.val)
    return names.get(one) is other


def same_value(one: Any, other: Any) -> bool:
    """Whether two constants have the same bits."""
    if one is other:
        return True
    try:
        one, other = np.asarray(one), np.asarray(other)
    except TypeError:  # typed random keys
        return False
    same = one.shape == other.shape and one.dtype == other.dtype
    return same and one.tobytes() == other.tobytes()


def _same(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, ClosedJaxpr):
        consts = list(zip(one.consts, other.consts, strict=False))
        return (
            len(one.consts) == len(other.consts)
            and all(same_value(a, b) for a, b in consts)
            and same_program(one.jaxpr, other.jaxpr)
        )
    if isinstance(one, Jaxpr):
        return same_program(one, other)
    if isinstance(one, (tuple, list)):
        return len(one) == len(other) and all(map(_same, one, other))
    try:
        return bool(one == other)
    except (TypeError, ValueError):
        return False
