"""Pieces of a traced program: the equations that some of its values need, and no others."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jax.extend.core import Literal

from ...core.compat import eval_equation


@dataclasses.dataclass(frozen=True, eq=False)
class Piece:
    """Some equations of a jaxpr, as a function from an environment to its outputs.

    Args:
        equations: in order.
        outputs: the variables or literals it computes.
        needs: the variables that must be known beforehand.
    """

    equations: tuple[Any, ...]
    outputs: tuple[Any, ...]
    needs: frozenset[Any]

    def run(self, known: Mapping[Any, Any]) -> list[Any]:
        """Computes the outputs.

        Args:
            known: the value of every variable that the piece needs.

        Returns:
            The values of `outputs`.
        """
        values = {variable: known[variable] for variable in self.needs}
        read = lambda v: v.val if isinstance(v, Literal) else values[v]
        for equation in self.equations:
            results = eval_equation(equation, [read(v) for v in equation.invars])
            values.update(zip(equation.outvars, results, strict=True))
        return [read(v) for v in self.outputs]


def cut(jaxpr: Any, outputs: Sequence[Any], known: Iterable[Any] = ()) -> Piece:
    """The piece of a jaxpr that computes some values from others.

    Args:
        jaxpr: an open jaxpr.
        outputs: variables of it, or literals.
        known: variables that need not be computed; inputs of the jaxpr never are.

    Returns:
        The piece.
    """
    known = set(known)
    wanted = variables(outputs) - known
    equations = []
    for equation in reversed(jaxpr.eqns):
        if wanted.isdisjoint(equation.outvars):
            continue
        equations.append(equation)
        wanted |= variables(equation.invars) - known
    made = {v for equation in equations for v in equation.outvars}
    read = variables(v for equation in equations for v in equation.invars) | variables(outputs)
    return Piece(tuple(reversed(equations)), tuple(outputs), frozenset(read - (made - known)))


def variables(atoms: Iterable[Any]) -> set[Any]:
    """The atoms that are variables, not literals."""
    return {atom for atom in atoms if not isinstance(atom, Literal)}


def depends_on(jaxpr: Any, sources: Iterable[Any]) -> set[Any]:
    """All variables of a jaxpr that depend on any of the sources, these included."""
    tainted = set(sources)
    for equation in jaxpr.eqns:
        if not tainted.isdisjoint(variables(equation.invars)):
            tainted.update(equation.outvars)
    return tainted
