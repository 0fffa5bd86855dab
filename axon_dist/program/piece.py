"""Pieces of a traced program: the equations that some of its values need, and no others."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from ..core.compat import eval_equation
from ..core.typing import PyTree
from .walk import Known, made_by, variables


@dataclasses.dataclass(frozen=True, eq=False)
class Piece:
    """Some equations of a jaxpr, as a function from an environment to its outputs.

    Args:
        equations: in order.
        outputs: the variables or literals it computes.
        needs: the variables that must be known beforehand.
        pinned: the variables that every rank of a stage shall hold whole.
    """

    equations: tuple[Any, ...]
    outputs: tuple[Any, ...]
    needs: frozenset[Any]
    pinned: frozenset[Any] = frozenset()

    @property
    def made(self) -> set[Any]:
        """The variables that it computes."""
        return made_by(self.equations)

    def run(self, known: Mapping[Any, Any]) -> list[Any]:
        """Computes the outputs.

        Args:
            known: the value of every variable that the piece needs.

        Returns:
            The values of `outputs`.
        """
        values = Known((variable, known[variable]) for variable in self.needs)
        for equation in self.equations:
            made = equation.outvars
            results = eval_equation(equation, values.read(equation.invars))
            pairs = zip(made, results, strict=True)
            values.write(made, [whole(x) if v in self.pinned else x for v, x in pairs])
        return values.read(self.outputs)


def cut(
    jaxpr: Any,
    outputs: Sequence[Any],
    known: Iterable[Any] = (),
    pinned: frozenset[Any] = frozenset(),
) -> Piece:
    """The piece of a jaxpr that computes some values from others.

    Args:
        jaxpr: an open jaxpr.
        outputs: variables of it, or literals.
        known: variables that need not be computed; inputs of the jaxpr never are.
        pinned: variables of it that every rank of a stage shall hold whole.

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
    made = made_by(equations)
    read = variables(v for equation in equations for v in equation.invars) | variables(outputs)
    needs = frozenset(read - (made - known))
    return Piece(tuple(reversed(equations)), tuple(outputs), needs, pinned & made)


def whole(x: Any) -> Any:
    """Keeps the compiler from splitting a value over the axes that are left to it."""
    return _laid(x, lambda _: PartitionSpec())


def as_it_lies(tree: PyTree) -> PyTree:
    """The results of a branch, said to lie wherever the compiler likes.

    XLA compares what the results of the branches of a conditional say about their layout, and
    fails ("Inconsistent conditional sharding") where one says how it lies and another does not.
    """
    free = PartitionSpec.UNCONSTRAINED
    return jax.tree.map(lambda x: _laid(x, lambda ndim: PartitionSpec(*(free,) * ndim)), tree)


def _laid(x: Any, spec_of: Callable[[int], PartitionSpec]) -> Any:
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or set(mesh.manual_axes) >= set(mesh.axis_names):
        return x
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec_of(jnp.ndim(x))))
