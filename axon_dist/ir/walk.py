"""Functions with which all modules of `ir` read a jaxpr.

A jaxpr is a list of equations over *atoms*: variables, or literals that hold their value. Some
equations run inner programs (calls, loops, branches). Every analysis needs the same few functions:
they read the values of atoms, list inner programs, find dependencies, and interpret a program with
a different rule for its equations.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
import pathlib
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

from ..core.compat import (
    CALLS,
    REMATS,
    called,
    dce_jaxpr,
    eval_equation,
    eval_jaxpr,
    inner_programs,
    scan_counts,
)
from ..core.typing import Array, Leaf, Shape

Atom: TypeAlias = Var | Literal
"""An operand of an equation."""

OPENED = CALLS | REMATS | {"custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr"}
"""Primitives that call a program, including functions with custom derivatives."""

LOOPS = frozenset({"scan", "while"})
"""Primitives that run a program several times."""

Aval: TypeAlias = Any
"""JAX's abstract value: the shape, dtype, sharding and so on of an array."""

Params: TypeAlias = dict[str, Any]
"""The parameters of an equation."""

T = TypeVar("T")

Run: TypeAlias = Callable[[JaxprEqn, Sequence[T]], Sequence[T]]
"""(equation, values of its operands) -> values of its results; values may be abstract."""


@dataclasses.dataclass(frozen=True, eq=False)
class Inner:
    """A program that an equation runs, once or in every iteration of a loop.

    Args:
        program: the inner program.
        operands: for each input, the position of the operand that it equals, or whose rows it
            gets one by one.
        num_shared: how many of the first inputs are the same in every iteration.
        num_carried: how many of the next inputs are carried from the previous iteration. The first
            outputs of the program, and the first results of the loop, are this carry. The other
            inputs and outputs are rows of arrays.
        times: how often it runs; 1 also for a branch, which may not run; None if this is decided at
            run time.
    """

    program: ClosedJaxpr
    operands: tuple[int, ...]
    num_shared: int
    num_carried: int = 0
    times: int | None = 1

    @property
    def form(self) -> tuple[tuple[int, ...], int, int]:
        """The positions of its operands, the number of shared and the number of carried inputs."""
        return self.operands, self.num_shared, self.num_carried

    def inputs(self, values: Sequence[T]) -> list[T]:
        """Returns the value of each input, from the values of the equation's operands."""
        return [values[number] for number in self.operands]

    def split_operands(self, values: Sequence[T]) -> tuple[list[T], list[T], list[T]]:
        """Splits the operands' values into those shared, carried, and read row by row."""
        inputs = self.inputs(values)
        first_row = self.num_shared + self.num_carried
        carry = inputs[self.num_shared : first_row]
        return inputs[: self.num_shared], carry, inputs[first_row:]

    def outputs(self, values: Sequence[T]) -> tuple[list[T], list[T]]:
        """Splits the outputs into those carried and those stacked row by row."""
        return list(values[: self.num_carried]), list(values[self.num_carried :])

    def settled(
        self, carry: list[T], run: Callable[[list[T]], list[T]], join: Callable[[T, T], T]
    ) -> tuple[list[T], list[T]] | None:
        """Finds the fixed point of a loop's carry, which another iteration leaves unchanged.

        Args:
            carry: the abstract values of the initial carry.
            run: (values of the carry) -> values of the outputs of an iteration.
            join: (two values) -> the value that covers both.

        Returns:
            The values of the carry, and of the other outputs of an iteration; None if no fixed
            point is reached.
        """
        for _ in range(_MAX_ITERATIONS):
            outputs = run(carry)
            joined = [join(a, b) for a, b in zip(carry, outputs, strict=False)]
            if joined == carry:
                return carry, outputs[self.num_carried :]
            carry = joined
        return None


_MAX_ITERATIONS = 9


def values_of(
    known: Mapping[Var, T],
    atoms: Iterable[Atom],
    literal: Callable[[Literal], T] = operator.attrgetter("val"),
) -> list[T]:
    """Returns the values of atoms; the value of a literal is its constant by default."""
    return [literal(atom) if isinstance(atom, Literal) else known[atom] for atom in atoms]


def variables(atoms: Iterable[Atom]) -> set[Var]:
    """Returns the atoms that are variables, without literals."""
    return {atom for atom in atoms if not isinstance(atom, Literal)}


def shape_of(atom: Atom) -> Shape:
    """Returns the shape of an atom; () for a token."""
    return tuple(getattr(atom.aval, "shape", ()))


def dtype_of(atom: Atom) -> Any:
    """Returns the dtype of an atom, including that of a random key; None if it has no dtype."""
    return getattr(atom.aval, "dtype", None)


def struct_of(atom: Atom) -> jax.ShapeDtypeStruct:
    """Returns the shape and dtype of an atom, to trace a function with."""
    return jax.ShapeDtypeStruct(shape_of(atom), dtype_of(atom))


def made_by(equations: Iterable[JaxprEqn]) -> set[Var]:
    """Returns the variables that equations define."""
    return {variable for equation in equations for variable in equation.outvars}


def _is_call(equation: JaxprEqn) -> bool:
    return equation.primitive.name in OPENED


def opened(
    closed: ClosedJaxpr, values: Sequence[Leaf], enters: Callable[[JaxprEqn], bool] = _is_call
) -> ClosedJaxpr:
    """Inlines the calls of a program, so that each operation is an equation.

    Args:
        closed: a closed jaxpr that will not be differentiated afterwards.
        values: the inputs to trace it with, arrays or shapes.
        enters: which calls to inline; by default all of `OPENED`.

    Returns:
        A closed jaxpr.

    Example:
        >>> program = jax.make_jaxpr(jax.jit(lambda x: 2 * x))(1.0)
        >>> [equation.primitive.name for equation in opened(program, [1.0]).eqns]
        ['mul']
    """

    def run(*values: Array) -> list[Array]:
        return interpret(closed.jaxpr, closed.consts, values, eval_equation, enters=enters)

    return jax.make_jaxpr(run)(*values)


def inners(equation: JaxprEqn) -> list[Inner]:
    """Returns the programs that a call, loop or conditional runs, with the operands of each.

    A `while` has two: the test and the body. Kernels have none, nor does any other primitive
    whose parameters do not show how its program runs.

    Example:
        >>> run = lambda x, ys: jax.lax.scan(lambda x, y: (x * y, x), x, ys)
        >>> (body,) = inners(jax.make_jaxpr(run)(1.0, jnp.ones(3)).jaxpr.eqns[0])
        >>> body.split_operands(["x", "ys"]), body.times
        (([], ['x'], ['ys']), 3)
    """
    name = equation.primitive.name
    params = equation.params
    count = len(equation.invars)
    if name == "scan":
        consts, carry = scan_counts(equation)
        return [Inner(params["jaxpr"], (*range(count),), consts, carry, params["length"])]
    if name == "while":
        tests = params["cond_nconsts"]
        consts = params["body_nconsts"]
        carry = range(tests + consts, count)
        test = (*range(tests), *carry)
        body = (*range(tests, tests + consts), *carry)
        return [
            Inner(params["cond_jaxpr"], test, tests, len(carry), None),
            Inner(params["body_jaxpr"], body, consts, len(carry), None),
        ]
    if name == "cond":
        positions = tuple(range(1, count))
        return [Inner(branch, positions, len(positions)) for branch in params["branches"]]
    program = called(equation)
    if program is None:
        return []
    # The first operands of a function with a custom derivative may belong to the derivative only.
    positions = tuple(range(count - len(program.jaxpr.invars), count))
    return [Inner(program, positions, len(positions))]


def without_tracers(closed: ClosedJaxpr) -> tuple[ClosedJaxpr, list[Array]]:
    """Turns the tracers that a program closes over into inputs; returns it and these tracers."""
    pairs = list(zip(closed.jaxpr.constvars, closed.consts, strict=True))
    read = [(v, x) for v, x in pairs if isinstance(x, Tracer)]
    consts = {v: x for v, x in pairs if not isinstance(x, Tracer)}
    invars = [*closed.jaxpr.invars, *(v for v, _ in read)]
    jaxpr = closed.jaxpr.replace(constvars=[*consts], invars=invars)
    return ClosedJaxpr(jaxpr, [*consts.values()]), [x for _, x in read]


def equations(jaxpr: Jaxpr) -> Iterator[JaxprEqn]:
    """Yields all equations of a jaxpr, each followed by those of its inner programs.

    Example:
        >>> program = jax.make_jaxpr(lambda x: jax.jit(jax.numpy.sin)(x) + 1)(1.0)
        >>> [equation.primitive.name for equation in equations(program.jaxpr)]
        ['jit', 'sin', 'add']
    """
    for equation in jaxpr.eqns:
        yield equation
        for inner in inner_programs(equation):
            yield from equations(inner)


def in_branches(jaxpr: Jaxpr) -> set[JaxprEqn]:
    """Returns the equations that run in a branch of a conditional, at any depth."""
    choices = [e for e in equations(jaxpr) if e.primitive.name == "cond"]
    return {e for one in choices for branch in inner_programs(one) for e in equations(branch)}


def interpret(
    jaxpr: Jaxpr,
    consts: Sequence[T],
    values: Sequence[T],
    run: Run[T],
    literal: Callable[[Literal], T] = operator.attrgetter("val"),
    enters: Callable[[JaxprEqn], bool] = lambda _: False,
) -> list[T]:
    """Interprets a jaxpr, calling `run` for each equation.

    Values may be arrays, which computes the program, or abstract values, which analyses it.

    Args:
        jaxpr: an open jaxpr.
        consts: the values of its constants.
        values: the values of its inputs.
        run: computes the values of an equation's results from those of its operands.
        literal: returns the value of a literal; its constant by default.
        enters: whether to interpret the program of a call instead of calling `run`.

    Returns:
        The values of its outputs.

    Example:
        >>> program = jax.make_jaxpr(lambda x, y: (x * 2.0, y))(1.0, 1.0)
        >>> tainted = lambda equation, operands: [any(operands)] * len(equation.outvars)
        >>> interpret(program.jaxpr, (), [True, False], tainted, lambda _: False)
        [True, False]
    """
    known: dict[Var, T] = dict(zip(jaxpr.constvars, consts, strict=True))
    known.update(zip(jaxpr.invars, values, strict=True))
    for equation in jaxpr.eqns:
        operands = values_of(known, equation.invars, literal)
        inner = called(equation) if enters(equation) else None
        if inner is None:
            results = run(equation, operands)
        else:
            inputs = operands[len(operands) - len(inner.jaxpr.invars) :]
            results = interpret(inner.jaxpr, inner.consts, inputs, run, literal, enters)
        known.update(zip(equation.outvars, results, strict=True))
    return values_of(known, jaxpr.outvars, literal)


def depends_on(
    jaxpr: Jaxpr, sources: Iterable[Var], stop: int | None = None, start: int = 0
) -> set[Var]:
    """Returns the variables that depend on any of the sources, and the sources themselves.

    Args:
        jaxpr: an open jaxpr.
        sources: variables of it.
        stop: look only at equations before this position.
        start: look only at equations from this position on.
    """
    dependent = set(sources)
    for equation in jaxpr.eqns[start:stop]:
        if not dependent.isdisjoint(variables(equation.invars)):
            dependent.update(equation.outvars)
    return dependent


def needed_for(jaxpr: Jaxpr, positions: Iterable[int]) -> tuple[Jaxpr, list[int]]:
    """Returns the part of a jaxpr that some of its outputs need; prunes calls and loops too.

    Args:
        jaxpr: an open jaxpr.
        positions: the positions of the outputs.

    Returns:
        The smaller jaxpr, and the positions of the inputs that it still has.
    """
    wanted = set(positions)
    part, used = dce_jaxpr(jaxpr, [number in wanted for number in range(len(jaxpr.outvars))])
    return part, [number for number, is_used in enumerate(used) if is_used]


def sources_of(jaxpr: Jaxpr) -> list[set[int]]:
    """Returns, for every output of a jaxpr, the positions of the inputs that it depends on."""
    return [set(needed_for(jaxpr, [number])[1]) for number in range(len(jaxpr.outvars))]


def inputs_with_gradient(
    program: ClosedJaxpr, output: int, count: int, axes: Sequence[tuple[str, int]] = ()
) -> list[int]:
    """Returns the inputs with respect to which an output has a gradient that is not always zero.

    Args:
        program: a traced function.
        output: the position of the output, a number.
        count: how many of the first inputs to look at; these are floating-point.
        axes: the names and sizes of the axes over which the program sums.

    Returns:
        Their positions. Inputs that only comparisons, counts or `stop_gradient` read are left out.

    Example:
        >>> import jax.numpy as jnp
        >>> run = lambda x, y, z: jnp.sum(x > 0) + y * jax.lax.stop_gradient(z)
        >>> inputs_with_gradient(jax.make_jaxpr(run)(1.0, 2.0, 3.0), 0, 3)
        [1]
    """
    if not any(number < count for number in needed_for(program.jaxpr, [output])[1]):
        return []
    values = [struct_of(variable) for variable in program.jaxpr.invars]
    first = values[:count]

    def moved(tangents: list[Array], first: list[Array], others: list[Array]) -> Array:
        def run(*first: Array) -> Array:
            return jnp.asarray(eval_jaxpr(program, [*first, *others])[output], jnp.float32)

        return jax.jvp(run, first, tangents)[1]

    traced = jax.make_jaxpr(moved, axis_env=axes)(first, first, values[count:])
    _, read = needed_for(traced.jaxpr, [0])
    return [number for number in read if number < count]


def same_program(one: Jaxpr | ClosedJaxpr, other: Jaxpr | ClosedJaxpr) -> bool:
    """Whether two programs are equal up to variable names; compares constants too.

    Example:
        >>> trace = lambda f: jax.make_jaxpr(f)(1.0).jaxpr
        >>> same_program(trace(lambda x: x * 2), trace(lambda y: y * 2))
        True
        >>> same_program(trace(lambda x: x * 2), trace(lambda x: x * 3))
        False
    """
    if one is other:
        return True
    consts, others = (getattr(program, "consts", ()) for program in (one, other))
    if len(consts) != len(others) or not all(map(same_value, consts, others)):
        return False
    first, second = (getattr(program, "jaxpr", program) for program in (one, other))
    names: dict[Atom, Atom] = {}

    def correspond(left: Sequence[Atom], right: Sequence[Atom]) -> bool:
        """Whether atoms are equal literals, or variables that correspond in the two programs."""
        return len(left) == len(right) and all(
            a.aval == b.aval
            and (
                isinstance(b, Literal) and same_value(a.val, b.val)
                if isinstance(a, Literal)
                else names.setdefault(a, b) is b
            )
            for a, b in zip(left, right, strict=True)
        )

    return (
        len(first.eqns) == len(second.eqns)
        and correspond(first.constvars, second.constvars)
        and correspond(first.invars, second.invars)
        and all(
            a.primitive is b.primitive
            and same(a.params, b.params)
            and correspond(a.invars, b.invars)
            and correspond(a.outvars, b.outvars)
            for a, b in zip(first.eqns, second.eqns, strict=True)
        )
        and correspond(first.outvars, second.outvars)
    )


def same_value(one: object, other: object) -> bool:
    """Whether two constants have the same bits."""
    if one is other:
        return True
    try:
        left = np.asarray(one)
        right = np.asarray(other)
    except TypeError:  # Typed random keys and tracers have no NumPy value.
        return False
    has_same_form = left.shape == right.shape and left.dtype == right.dtype
    return has_same_form and left.tobytes() == right.tobytes()


def same(one: Any, other: Any, known: set[tuple[int, int]] | None = None) -> bool:
    """Whether the parameters of two equations are equal: values, programs, and closures.

    Each trace creates the functions of a custom derivative again. Two functions are the same if
    they have the same code and close over the same values. Values that cannot be compared count as
    different.

    Args:
        one: a value, such as the parameters of an equation.
        other: another value.
        known: the pairs of objects under comparison; it ends cycles of references.
    """
    known = set() if known is None else known
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, (ClosedJaxpr, Jaxpr)):
        return same_program(one, other)
    if isinstance(one, (tuple, list)):
        return len(one) == len(other) and all(
            same(*pair, known) for pair in zip(one, other, strict=True)
        )
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(same(one[k], other[k], known) for k in one)
    if isinstance(one, (np.ndarray, jax.Array)):
        return same_value(one, other)
    try:
        # -0.0 == 0.0, so floats are also compared by sign.
        if bool(one == other):
            return not isinstance(one, float) or math.copysign(1, one) == math.copysign(1, other)
    except (TypeError, ValueError):
        return False
    parts = _parts(one), _parts(other)
    pair = id(one), id(other)
    if None in parts or pair in known:
        return None not in parts
    known.add(pair)
    return same(*parts, known)


# Cells of JAX's own closures that do not affect the result: cached results, and the trace in which
# the closure was created.
_CELLS_OF_JAX = frozenset({"cells", "sentinel", "self", "out_store"})
_WRAPPED = ("f", "transforms", "params", "in_type")
_FROM_JAX = str(pathlib.Path(jax.__file__).parent)


def _parts(value: Any) -> tuple[object, ...] | None:
    """Returns what identifies a function: its code and its closure; None for other values."""
    if isinstance(value, types.FunctionType):
        code = value.__code__
        skipped = _CELLS_OF_JAX if code.co_filename.startswith(_FROM_JAX) else frozenset[str]()
        cells = zip(code.co_freevars, value.__closure__ or (), strict=True)
        closed = {name: _content(cell) for name, cell in cells if name not in skipped}
        return code, closed, value.__defaults__, value.__kwdefaults__
    if isinstance(value, types.MethodType):
        return value.__func__, value.__self__
    if isinstance(value, functools.partial):
        return value.func, value.args, value.keywords
    # A function that JAX has wrapped, or JAX's wrapper of an argument.
    for names in (_WRAPPED, ("val",)):
        if type(value).__module__.startswith("jax") and hasattr(value, names[0]):
            return tuple(getattr(value, name, None) for name in names)
    return None


def _content(cell: types.CellType) -> object:
    """Returns the content of a closure's cell; a sentinel if the cell is empty."""
    try:
        return cell.cell_contents
    except ValueError:
        return _content
