"""The last operations of a program that act on scalars, apart from what makes the scalars."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import jax.numpy as jnp
from jax.core import Tracer
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal
from jax.typing import DTypeLike

from ..core.compat import CALLS, eval_equation, inner_programs
from ..core.typing import Array
from ..core.weighted import PER_SAMPLE
from .factors import EACH
from .units import UNIT_NAME
from .walk import called, dtype_of, equations, interpret, shape_of


@dataclasses.dataclass(frozen=True, eq=False)
class Term:
    """A value of a program that is run.

    Args:
        value: what it is.
        equation: which made it, of scalars; None where it was made otherwise.
        operands: of the equation.
        index: which of its results it is.
    """

    value: Any
    equation: JaxprEqn | None = None
    operands: tuple[Term, ...] = ()
    index: int = 0


Operation: TypeAlias = tuple[JaxprEqn | None, Any, int]
"""(equation, the numbers of its operands, which result), or (None, a constant, 0)."""


@dataclasses.dataclass(frozen=True, eq=False)
class Ending:
    """The last operations of a program: scalars of scalars.

    Args:
        operations: in order; those before an operation are its operands by number, and the sums
            that the program begins with by the complements of theirs.
        results: the numbers of the results.
        dtypes: of the sums.
    """

    operations: tuple[Operation, ...]
    results: tuple[int, ...]
    dtypes: tuple[DTypeLike, ...]

    @classmethod
    def of(cls, results: Sequence[Term]) -> tuple[Ending, list[Term]]:
        """The last operations that lead to results, and the sums that they begin with."""
        numbers: dict[int, int] = {}
        sums: list[Term] = []
        operations: list[Operation] = []
        for term in _in_order(results):
            if term.equation is None and isinstance(term.value, Tracer):
                numbers[id(term)] = ~len(sums)
                sums.append(term)
                continue
            given = term.value
            if term.equation is not None:
                given = [numbers[id(operand)] for operand in term.operands]
            numbers[id(term)] = len(operations)
            operations.append((term.equation, given, term.index))
        found = tuple(numbers[id(term)] for term in results)
        return cls(tuple(operations), found, tuple(jnp.result_type(s.value) for s in sums)), sums

    def __call__(self, sums: Sequence[Array]) -> list[Array]:
        """Runs them.

        Args:
            sums: those of the whole batch.
        """
        given = [jnp.asarray(x).astype(t) for x, t in zip(sums, self.dtypes, strict=True)]
        values: list[Any] = []

        def read(number: int) -> Any:
            return given[~number] if number < 0 else values[number]

        for equation, operands, index in self.operations:
            if equation is None:
                values.append(operands)
            else:
                values.append(eval_equation(equation, [read(n) for n in operands])[index])
        return [jnp.asarray(read(number)) for number in self.results]


def _in_order(results: Sequence[Term]) -> Iterator[Term]:
    """All terms that lead to some, each behind those that it is made of."""
    known: set[int] = set()
    waiting = [*reversed(results)]
    while waiting:
        term = waiting[-1]
        missing = [operand for operand in term.operands if id(operand) not in known]
        if missing and id(term) not in known:
            waiting += reversed(missing)
            continue
        waiting.pop()
        if id(term) not in known:
            known.add(id(term))
            yield term


def _is_number(atom: Any) -> bool:
    kinds = (jnp.number, jnp.bool_)
    return shape_of(atom) == () and any(jnp.issubdtype(dtype_of(atom), kind) for kind in kinds)


_OF_SCALARS = EACH | CALLS | {
    "broadcast_in_dim", "copy_p", "custom_jvp_call", "reshape", "select_n", "squeeze",
    "stop_gradient",
}  # fmt: skip
"""What may stand in an ending: it computes of scalars whatever device it runs on."""


def _is_ending(equation: JaxprEqn) -> bool:
    atoms = (*equation.invars, *equation.outvars)
    inside = (e for program in inner_programs(equation) for e in equations(program))
    names = {e.primitive.name for e in (equation, *inside)}
    return names <= _OF_SCALARS and all(map(_is_number, atoms))


def _run(equation: JaxprEqn, operands: Sequence[Term]) -> list[Term]:
    """Runs an equation; a call that gives scalars of arrays is run equation by equation."""
    is_scalar = _is_ending(equation)
    if not is_scalar and any(map(_is_number, equation.outvars)) and _is_plain_call(equation):
        program: Any = called(equation)
        return run_terms(program, operands)
    results = eval_equation(equation, [operand.value for operand in operands])
    if not is_scalar:
        return [Term(result) for result in results]
    return [Term(result, equation, tuple(operands), i) for i, result in enumerate(results)]


def _is_plain_call(equation: JaxprEqn) -> bool:
    name = equation.params.get("name")
    return equation.primitive.name in CALLS and name not in (UNIT_NAME, PER_SAMPLE)


def run_terms(program: ClosedJaxpr, operands: Sequence[Term]) -> list[Term]:
    """Runs a program on terms; its last scalar operations stay terms of what they act on."""

    def literal(atom: Literal) -> Term:
        return Term(atom.val)

    consts = [Term(value) for value in program.consts]
    return interpret(program.jaxpr, consts, operands, _run, literal)
