"""The functions by which all modules of this room read a jaxpr.

A jaxpr is a list of equations over *atoms*: variables, or literals that hold their value. Some
equations run programs of their own (calls, loops, branches). Whoever reads one needs the same few
things: the values of atoms, the programs within, what depends on what, and to run it with one
equation done in another way. They stand here once.
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
"""What an equation reads."""

OPENED = CALLS | REMATS | {"custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr"}
"""Primitives that call a program, also those with custom derivatives."""

LOOPS = frozenset({"scan", "while"})
"""Primitives that run a program several times."""


Aval: TypeAlias = Any
"""An abstract value of JAX: of an array its shape, dtype, sharding and more."""

Params: TypeAlias = dict[str, Any]
"""The parameters of an equation."""

T = TypeVar("T")

Run: TypeAlias = Callable[[JaxprEqn, Sequence[T]], Sequence[T]]
"""(equation, values of its operands) -> values of its results; values may be abstract."""


@dataclasses.dataclass(frozen=True, eq=False)
class Inner:
    """A program that an equation runs, once or in every iteration of a loop.

    Args:
        program: what runs.
        operands: for each input the number of the operand that it is, or whose rows it is.
        num_shared: how many of the inputs are the same in every run.
        num_carried: how many of the next a run gets from the one before. A loop carries its first
            results and outputs likewise; other inputs and outputs are rows of arrays.
        times: how often it runs; None where the program decides.
    """

    program: ClosedJaxpr
    operands: tuple[int, ...]
    num_shared: int
    num_carried: int = 0
    times: int | None = 1

    @property
    def form(self) -> tuple[tuple[int, ...], int, int]:
        """The positions of its operands, and how many of them are shared and carried."""
        return self.operands, self.num_shared, self.num_carried

    def inputs(self, values: Sequence[T]) -> list[T]:
        """The value of each input, from the values of the equation's operands."""
        return [values[number] for number in self.operands]

    def parts(self, values: Sequence[T]) -> tuple[list[T], list[T], list[T]]:
        """The values of the equation's operands that are shared, carried, and read row by row."""
        inputs, rows = self.inputs(values), self.num_shared + self.num_carried
        return inputs[: self.num_shared], inputs[self.num_shared : rows], inputs[rows:]

    def outputs(self, values: Sequence[T]) -> tuple[list[T], list[T]]:
        """The outputs that are carried, and those that are stacked row by row."""
        return list(values[: self.num_carried]), list(values[self.num_carried :])

    def settled(
        self, carry: list[T], run: Callable[[list[T]], list[T]], join: Callable[[T, T], T]
    ) -> tuple[list[T], list[T]] | None:
        """The fixed point of a loop's carry: the values that another iteration leaves unchanged.

        Args:
            carry: the abstract values of the first carry.
            run: (values of the carry) -> values of the outputs of an iteration.
            join: (two values) -> the value that holds for both.

        Returns:
            The values of the carry, and of the other outputs of an iteration; None where no fixed
            point is reached.
        """
        for _ in range(_TURNS):
            outputs = run(carry)
            joined = [join(a, b) for a, b in zip(carry, outputs, strict=False)]
            if joined == carry:
                return carry, outputs[self.num_carried :]
            carry = joined
        return None


_TURNS = 9


def values_of(
    known: Mapping[Var, T],
    atoms: Iterable[Atom],
    literal: Callable[[Literal], T] = operator.attrgetter("val"),
) -> list[T]:
    """The values of atoms; that of a literal is its constant."""
    return [literal(atom) if isinstance(atom, Literal) else known[atom] for atom in atoms]


def variables(atoms: Iterable[Atom]) -> set[Var]:
    """The atoms that are variables, not literals."""
    return {atom for atom in atoms if not isinstance(atom, Literal)}


def shape_of(atom: Atom) -> Shape:
    """The shape of an atom; that of a token is ()."""
    return tuple(getattr(atom.aval, "shape", ()))


def dtype_of(atom: Atom) -> Any:
    """The dtype of an atom, also of a random key; None for an atom without one."""
    return getattr(atom.aval, "dtype", None)


def struct_of(atom: Atom) -> jax.ShapeDtypeStruct:
    """The shape and dtype of an atom, to trace a function with."""
    return jax.ShapeDtypeStruct(shape_of(atom), dtype_of(atom))


def made_by(equations: Iterable[JaxprEqn]) -> set[Var]:
    """The variables that equations define."""
    return {variable for equation in equations for variable in equation.outvars}


def _is_call(equation: JaxprEqn) -> bool:
    return equation.primitive.name in OPENED


def opened(
    closed: ClosedJaxpr, values: Sequence[Leaf], enters: Callable[[JaxprEqn], bool] = _is_call
) -> ClosedJaxpr:
    """The same program with its calls inlined, so that each operation is an equation.

    Args:
        closed: a closed jaxpr that will not be differentiated any more.
        values: what it is traced with, arrays or shapes.
        enters: which calls; all that can be.

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
    """The programs that a call, loop or conditional runs, with the operands that each gets.

    Of a `while` these are the test and the body. Kernels, and whatever says nothing about how its
    program is run, have none.

    Example:
        >>> run = lambda x, ys: jax.lax.scan(lambda x, y: (x * y, x), x, ys)
        >>> (body,) = inners(jax.make_jaxpr(run)(1.0, jnp.ones(3)).jaxpr.eqns[0])
        >>> body.parts(["x", "ys"]), body.times
        (([], ['x'], ['ys']), 3)
    """
    name, params, count = equation.primitive.name, equation.params, len(equation.invars)
    if name == "scan":
        consts, carry = scan_counts(equation)
        return [Inner(params["jaxpr"], (*range(count),), consts, carry, params["length"])]
    if name == "while":
        tests, consts = params["cond_nconsts"], params["body_nconsts"]
        carry = range(tests + consts, count)
        test, body = (*range(tests), *carry), (*range(tests, tests + consts), *carry)
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
    # The first operands of a function with a custom derivative may be read by that alone.
    positions = tuple(range(count - len(program.jaxpr.invars), count))
    return [Inner(program, positions, len(positions))]


def without_tracers(closed: ClosedJaxpr) -> tuple[ClosedJaxpr, list[Array]]:
    """The program with the outer trace's values that it closes over as inputs, and these values."""
    pairs = list(zip(closed.jaxpr.constvars, closed.consts, strict=True))
    read = [(v, x) for v, x in pairs if isinstance(x, Tracer)]
    consts = {v: x for v, x in pairs if not isinstance(x, Tracer)}
    invars = [*closed.jaxpr.invars, *(v for v, _ in read)]
    jaxpr = closed.jaxpr.replace(constvars=[*consts], invars=invars)
    return ClosedJaxpr(jaxpr, [*consts.values()]), [x for _, x in read]


def equations(jaxpr: Jaxpr) -> Iterator[JaxprEqn]:
    """All equations of a jaxpr, each followed by those of the programs that it runs.

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
    """The equations of a jaxpr that run in a branch of a conditional, at any depth."""
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
    """Interprets a jaxpr, with `run` for each equation.

    Values may be arrays, so that the program is computed, or abstract values that follow its flow.

    Args:
        jaxpr: an open jaxpr.
        consts: the values of its constants.
        values: the values of its inputs.
        run: computes the values of an equation's results from those of its operands.
        literal: the value of a literal; its constant by default.
        enters: whether the program of a call is interpreted too, in place of the call.

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
    """The variables that depend on any of the sources, these included.

    Args:
        jaxpr: an open jaxpr.
        sources: variables of it.
        stop: only equations before this one are looked at.
        start: only equations from this one on are looked at.
    """
    tainted = set(sources)
    for equation in jaxpr.eqns[start:stop]:
        if not tainted.isdisjoint(variables(equation.invars)):
            tainted.update(equation.outvars)
    return tainted


def needed_for(jaxpr: Jaxpr, positions: Iterable[int]) -> tuple[Jaxpr, list[int]]:
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


def sources_of(jaxpr: Jaxpr) -> list[set[int]]:
    """For every output of a jaxpr, the positions of the inputs that it depends on."""
    return [set(needed_for(jaxpr, [number])[1]) for number in range(len(jaxpr.outvars))]


def moves_with(program: ClosedJaxpr, output: int, count: int) -> list[int]:
    """The inputs that an output of a program depends on with a gradient that is not always zero.

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
    if not any(number < count for number in needed_for(program.jaxpr, [output])[1]):
        return []
    values = [struct_of(variable) for variable in program.jaxpr.invars]
    first = values[:count]

    def moved(tangents: list[Array], first: list[Array], others: list[Array]) -> Array:
        def run(*first: Array) -> Array:
            return jnp.asarray(eval_jaxpr(program, [*first, *others])[output], jnp.float32)

        return jax.jvp(run, first, tangents)[1]

    _, read = needed_for(jax.make_jaxpr(moved)(first, first, values[count:]).jaxpr, [0])
    return [number for number in read if number < count]


def same_program(one: Jaxpr | ClosedJaxpr, other: Jaxpr | ClosedJaxpr) -> bool:
    """Whether two programs are equal but for the names of their variables, constants included.

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
    if len(consts) != len(others) or not all(map(_same_value, consts, others)):
        return False
    mine, theirs = (getattr(program, "jaxpr", program) for program in (one, other))
    names: dict[Atom, Atom] = {}

    def alike(left: Sequence[Atom], right: Sequence[Atom]) -> bool:
        """Whether atoms are equal literals, or variables that correspond in the two programs."""
        return len(left) == len(right) and all(
            a.aval == b.aval
            and (
                isinstance(b, Literal) and _same_value(a.val, b.val)
                if isinstance(a, Literal)
                else names.setdefault(a, b) is b
            )
            for a, b in zip(left, right, strict=True)
        )

    return (
        len(mine.eqns) == len(theirs.eqns)
        and alike(mine.constvars, theirs.constvars)
        and alike(mine.invars, theirs.invars)
        and all(
            a.primitive is b.primitive
            and same(a.params, b.params)
            and alike(a.invars, b.invars)
            and alike(a.outvars, b.outvars)
            for a, b in zip(mine.eqns, theirs.eqns, strict=True)
        )
        and alike(mine.outvars, theirs.outvars)
    )


def _same_value(one: object, other: object) -> bool:
    """Whether two constants have the same bits."""
    if one is other:
        return True
    try:
        left, right = np.asarray(one), np.asarray(other)
    except TypeError:  # Typed random keys, and values of a trace.
        return False
    alike = left.shape == right.shape and left.dtype == right.dtype
    return alike and left.tobytes() == right.tobytes()


def same(one: Any, other: Any, known: set[tuple[int, int]] | None = None) -> bool:
    """Whether the parameters of two equations are equal: values, programs, and closures.

    A rule of differentiation is a function that each trace makes again: two are the same where they
    have the same code and what they close over is the same. What cannot be compared is different.

    Args:
        one: a value, such as the parameters of an equation.
        other: another.
        known: pairs of objects that are being compared, which may refer to each other.
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
        return _same_value(one, other)
    try:
        if bool(one == other):
            return not isinstance(one, float) or math.copysign(1, one) == math.copysign(1, other)
    except (TypeError, ValueError):
        return False
    parts, pair = (_parts(one), _parts(other)), (id(one), id(other))
    if None in parts or pair in known:
        return None not in parts
    known.add(pair)
    return same(*parts, known)


# The cells of JAX's own closures that do not change what these compute: cached results, and the
# trace in which they were created.
_CELLS_OF_JAX = frozenset({"cells", "sentinel", "self", "out_store"})
_WRAPPED = ("f", "transforms", "params", "in_type")
_FROM_JAX = str(pathlib.Path(jax.__file__).parent)


def _parts(value: Any) -> tuple[object, ...] | None:
    """The code and the closure of a function, by which it is compared; None for other values."""
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
    # A function that JAX has wrapped, or an argument that it has.
    for names in (_WRAPPED, ("val",)):
        if type(value).__module__.startswith("jax") and hasattr(value, names[0]):
            return tuple(getattr(value, name, None) for name in names)
    return None


def _content(cell: types.CellType) -> object:
    """The content of a closure's cell; a sentinel where the cell is empty."""
    try:
        return cell.cell_contents
    except ValueError:
        return _content
