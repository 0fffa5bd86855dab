"""Cuts a program that makes many arrays into slices; equal slices share one compiled program.

The initialization of a model draws hundreds of arrays, and most of them run the same operations on
the same shapes with another key. Within one program, XLA would compile each of them separately.
Here each array has its own program, a slice of the whole that takes keys as arguments. So arrays of
one shape and initializer share one compiled program.

Only keys and integers are passed as arguments, because they are exact on any device. Every
floating-point number stays a constant of the slice that reads it: the compiler folds constants, and
might round differently if they were arguments.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Var

from ..core.compat import CALLS, eval_equation, eval_jaxpr, inner_programs
from ..core.tree import is_key
from ..core.typing import Array, Shape
from .host_keys import ON_HOST, Key, Value
from .walk import (
    Atom,
    Literal,
    dtype_of,
    equations,
    opened,
    same_program,
    shape_of,
    struct_of,
    variables,
)

SMALL = 1024
"""The largest array, in elements, that several slices may each compute again."""

DRAWN = frozenset({"random_bits", "random_gamma"})
"""Primitives that draw numbers; only the slices run them."""


class Constant(NamedTuple):
    """An array that repeats one number.

    Args:
        value: the number.
        shape: the shape of the array.
        dtype: the dtype of the array.
    """

    value: Any
    shape: Shape
    dtype: Any


@dataclasses.dataclass(frozen=True, eq=False)
class ProgramSlice:
    """The slice of a program that some of its results need.

    Args:
        program: a closed jaxpr; its inputs are `operands`.
        operands: the variables of the whole program that it takes as arguments.
        results: the positions of its results among those of the whole program.
    """

    program: ClosedJaxpr
    operands: tuple[Var, ...]
    results: tuple[int, ...]

    @property
    def signature(self) -> Hashable:
        """A hashable value that equal slices share; slices with the same value may still differ."""
        jaxpr = self.program.jaxpr
        avals = [(shape_of(v), str(dtype_of(v))) for v in (*jaxpr.invars, *jaxpr.outvars)]
        return *avals, *(equation.primitive.name for equation in jaxpr.eqns)

    @property
    def shape(self) -> Shape:
        """The shape of its first result."""
        return shape_of(self.program.jaxpr.outvars[0])

    @property
    def is_operand(self) -> bool:
        """Whether its only result is its only operand, unchanged."""
        jaxpr = self.program.jaxpr
        return len(jaxpr.invars) == 1 and [*jaxpr.outvars] == [*jaxpr.invars]

    @property
    def constant(self) -> Constant | None:
        """The result of a slice that only repeats one number; None for any other slice."""
        jaxpr = self.program.jaxpr
        result = jaxpr.outvars[0]
        atom = result
        if len(jaxpr.eqns) == 1 and jaxpr.eqns[0].primitive.name == "broadcast_in_dim":
            atom = jaxpr.eqns[0].invars[0]
        if len(jaxpr.outvars) != 1 or not isinstance(atom, Literal) or shape_of(atom):
            return None
        if getattr(result.aval, "weak_type", False):
            return None
        return Constant(atom.val, shape_of(result), dtype_of(result))

    def is_like(self, other: ProgramSlice) -> bool:
        """Whether both compute the same from their operands."""
        return same_program(self.program, other.program)


@dataclasses.dataclass(frozen=True, eq=False)
class SlicedProgram:
    """A program cut into slices.

    Args:
        whole: the program, with its calls of several results inlined.
        first: the equations that the host computes before the slices run.
        slices: the slices; each result of the program comes from one of them.
    """

    whole: ClosedJaxpr
    first: tuple[JaxprEqn, ...]
    slices: tuple[ProgramSlice, ...]

    @classmethod
    def of(cls, closed: ClosedJaxpr) -> SlicedProgram | None:
        """Cuts a program into the smallest slices that share no large value.

        Args:
            closed: a program.

        Returns:
            The slices; None if the program has side effects.

        Example:
            >>> import jax.numpy as jnp
            >>> def two():
            ...     keys = jax.random.split(jax.random.key(0))
            ...     return [jax.random.normal(key, (64, 64)) for key in keys]
            >>> one, other = SlicedProgram.of(jax.make_jaxpr(two)()).slices
            >>> one.is_like(other)
            True
        """
        if closed.effects:
            return None
        if any(map(_is_inlined, closed.jaxpr.eqns)):
            inputs = [struct_of(v) for v in closed.jaxpr.invars]
            closed = opened(closed, inputs, _is_inlined)
        first = _known_before(closed)
        return cls(closed, tuple(first), tuple(_cut(closed, first)))

    @property
    def inputs(self) -> list[Var]:
        """The variables of the inputs of the whole program."""
        return list(self.whole.jaxpr.invars)

    def values(self) -> dict[Var, Value]:
        """Computes the arguments of the slices on the host."""
        return _computed(self.whole, self.first)


def _is_inlined(equation: JaxprEqn) -> bool:
    """Whether an equation is a call whose results may belong to several slices."""
    return equation.primitive.name in CALLS and len(equation.outvars) > 1


def _is_exact(atom: Atom) -> bool:
    """Whether a value is at most `SMALL` keys or integers, which are exact on every device."""
    aval = atom.aval
    dtype = dtype_of(atom)
    if dtype is None or math.prod(shape_of(atom)) > SMALL or getattr(aval, "weak_type", False):
        return False
    return is_key(aval) or np.dtype(dtype).kind in "iub"


def _known_before(closed: ClosedJaxpr) -> list[JaxprEqn]:
    """Returns the equations on keys and integers that depend on no input."""
    jaxpr = closed.jaxpr
    known: set[Var] = {v for v in jaxpr.constvars if _is_exact(v) and not is_key(v.aval)}
    found = []
    for equation in jaxpr.eqns:
        inside = list(equations(jaxpr.replace(eqns=[equation])))
        is_exact = (
            variables(equation.invars) <= known
            and all(e.primitive.name not in DRAWN for e in inside)
            and all(_is_exact(v) for e in inside for v in e.outvars)
            and _is_hashable(equation.params)
        )
        if is_exact:
            found.append(equation)
            known.update(equation.outvars)
    return found


def _is_hashable(params: Mapping[str, Any]) -> bool:
    try:
        hash(tuple(params.items()))
    except TypeError:
        return False
    return True


def _cut(closed: ClosedJaxpr, first: Iterable[JaxprEqn]) -> list[ProgramSlice]:
    """Cuts a program into slices; their operands are its inputs and the results of `first`."""
    jaxpr = closed.jaxpr
    arguments = {*jaxpr.invars, *(v for equation in first for v in equation.outvars)}
    maker = {
        v: number
        for number, equation in enumerate(jaxpr.eqns)
        for v in equation.outvars
        if v not in arguments
    }
    slices = [_slice(jaxpr, maker, atom) for atom in jaxpr.outvars]
    consts = dict(zip(jaxpr.constvars, closed.consts, strict=True))
    groups = _grouped(slices, {n for n in {*maker.values()} if _is_large(jaxpr.eqns[n])})
    made = []
    for results in groups:
        numbers = sorted(set().union(*(slices[n] for n in results)))
        outvars = [jaxpr.outvars[n] for n in results]
        eqns = [jaxpr.eqns[n] for n in numbers]
        read = dict.fromkeys(
            atom
            for atom in (*(v for e in eqns for v in e.invars), *outvars)
            if not isinstance(atom, Literal) and atom not in maker
        )
        operands = tuple(v for v in read if v in arguments)
        constvars = [v for v in read if v not in arguments]
        program = jaxpr.replace(
            constvars=constvars, invars=list(operands), outvars=outvars, eqns=eqns
        )
        closed_part = ClosedJaxpr(program, [consts[v] for v in constvars])
        made.append(ProgramSlice(closed_part, operands, tuple(results)))
    return made


def _slice(jaxpr: Jaxpr, maker: Mapping[Var, int], result: Atom) -> set[int]:
    """Returns the positions of the equations that a result needs."""
    waiting = [v for v in variables([result]) if v in maker]
    found: set[int] = set()
    while waiting:
        number = maker[waiting.pop()]
        if number not in found:
            found.add(number)
            waiting += [v for v in variables(jaxpr.eqns[number].invars) if v in maker]
    return found


def _is_large(equation: JaxprEqn) -> bool:
    """Whether an equation has a large array, so that only one slice should compute it."""
    atoms = (*equation.invars, *equation.outvars)
    inside = (v for e in _inside(equation) for v in e.outvars)
    return any(math.prod(shape_of(atom)) > SMALL for atom in (*atoms, *inside))


def _inside(equation: JaxprEqn) -> list[JaxprEqn]:
    return [e for program in inner_programs(equation) for e in equations(program)]


def _grouped(slices: Sequence[set[int]], large: set[int]) -> list[list[int]]:
    """Groups the results that need the same large equation; each group becomes one slice."""
    owner: dict[int, int] = {}
    group = list(range(len(slices)))

    def find(result: int) -> int:
        while group[result] != result:
            result = group[result]
        return result

    for result, numbers in enumerate(slices):
        for number in numbers & large:
            one, other = sorted((find(owner.setdefault(number, result)), find(result)))
            group[other] = one
    groups: dict[int, list[int]] = {}
    for result in range(len(slices)):
        groups.setdefault(find(result), []).append(result)
    return list(groups.values())


def _computed(closed: ClosedJaxpr, first: Sequence[JaxprEqn]) -> dict[Var, Value]:
    known: dict[Var, Value] = {
        v: np.asarray(x)
        for v, x in zip(closed.jaxpr.constvars, closed.consts, strict=True)
        if _is_exact(v) and not is_key(v.aval)
    }
    compiled: dict[Hashable, _Derived] = {}
    for equation in first:
        name = equation.primitive.name
        params = equation.params
        operands = [
            np.asarray(v.val, dtype_of(v)) if isinstance(v, Literal) else known[v]
            for v in equation.invars
        ]
        on_host = ON_HOST.get(name)
        result = None if on_host is None else on_host(params, operands)
        if result is not None:
            known[equation.outvars[0]] = result
            continue
        avals = [(shape_of(v), str(dtype_of(v))) for v in equation.invars]
        run = compiled.setdefault((name, *params.items(), *avals), _Derived(equation))
        known.update(zip(equation.outvars, run(operands), strict=True))
    return known


class _Derived:
    """One equation on keys and integers, compiled for arguments in host memory."""

    def __init__(self, equation: JaxprEqn):
        self._equation = equation
        self._result_impls: list[Hashable] = []
        self._operand_impls: list[Hashable] = []
        self._run = jax.jit(self._traced)

    def _traced(self, *data: Array) -> list[Array]:
        operands = [wrapped(x, impl) for x, impl in zip(data, self._operand_impls, strict=True)]
        results = eval_equation(self._equation, operands)
        self._result_impls = [jax.random.key_impl(x) if is_key(x) else None for x in results]
        return [jax.random.key_data(x) if is_key(x) else x for x in results]

    def __call__(self, operands: Sequence[Value]) -> list[Value]:
        self._operand_impls = [x.impl if isinstance(x, Key) else None for x in operands]
        data = [x.data if isinstance(x, Key) else x for x in operands]
        results = [np.asarray(x) for x in self._run(*data)]
        pairs = zip(results, self._result_impls, strict=True)
        return [x if impl is None else Key(x, impl) for x, impl in pairs]


def wrapped(data: Array, impl: Hashable | None) -> Array:
    """Wraps key data into typed keys; if `impl` is None, returns the array unchanged."""
    return data if impl is None else jax.random.wrap_key_data(data, impl=impl)  # type: ignore[arg-type]


def run_slice(
    program_slice: ProgramSlice, impls: Sequence[Hashable | None], values: Sequence[Array]
) -> list[Array]:
    """Runs a slice, within a `jit`.

    Args:
        program_slice: the slice.
        impls: for each operand, the generator if its value is the data of keys, else None.
        values: the values of the operands.
    """
    operands = [wrapped(x, impl) for x, impl in zip(values, impls, strict=True)]
    return eval_jaxpr(program_slice.program, operands)
