"""A traced program with some of its equations computed in another way, wherever they stand.

What the compiler gets wrong, or must not do, is an operation and not a layer: it may stand in
anybody's model, within loops, branches, calls and rematerialised parts. Rewriting therefore works
on the jaxpr, before it is differentiated.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import jax
from jax.extend.core import ClosedJaxpr

from ..core.compat import eval_equation, in_place_of, inner_programs
from .walk import Run, interpret

Replace: TypeAlias = Callable[[Any, Sequence[Any]], Sequence[Any] | None]
"""(equation, operands) -> its results, or None where it may stay as it is."""

OPENED = frozenset(
    {"jit", "pjit", "closed_call", "core_call", "remat", "remat2", "checkpoint"}
    | {"scan", "while", "cond"}
)
"""What runs inner programs and says all about them in its parameters."""


@dataclasses.dataclass(frozen=True, eq=False)
class Rewriting:
    """Which equations are computed in another way.

    Args:
        replace: by the name of a primitive.
        hidden: called with an equation that runs such a primitive where it cannot be reached, as
            functions with derivatives of their own do; raises, or lets it be.
    """

    replace: Mapping[str, Replace]
    hidden: Callable[[Any], None]

    def of(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Makes a function whose program is rewritten; traced once more here.

        Args:
            function: of arrays; Python numbers among its results stay what they are.

        Returns:
            A function of the same arguments with the same results.
        """

        def rewritten(*args: Any) -> Any:
            numbers: list[Any] = []

            def traced(*args: Any) -> Any:
                results = function(*args)
                is_number = lambda leaf: isinstance(leaf, (bool, int, float))
                numbers[:] = [x if is_number(x) else None for x in jax.tree.leaves(results)]
                return results

            closed, shapes = jax.make_jaxpr(traced, return_shape=True)(*args)
            run = _Run(self, {})
            results = run.program(closed.jaxpr, closed.consts, jax.tree.leaves(args))
            kept = [r if n is None else n for r, n in zip(results, numbers, strict=True)]
            return jax.tree.unflatten(jax.tree.structure(shapes), kept)

        return rewritten

    def beside(self, other: Rewriting | None) -> Rewriting:
        """Both at once, so that the program is traced once more only once."""
        if other is None:
            return self

        def hidden(equation: Any) -> None:
            for one in (self, other):
                if any(one.concerns(inner) for inner in inner_programs(equation)):
                    one.hidden(equation)

        return Rewriting({**self.replace, **other.replace}, hidden)

    def run(self, jaxpr: Any, consts: Sequence[Any], values: Sequence[Any], one: Run) -> list[Any]:
        """Runs one program, each equation as `one` does it."""
        return interpret(jaxpr, consts, values, one)

    def replaces(self, equation: Any) -> bool:
        """Whether an equation may be replaced."""
        return equation.primitive.name in self.replace

    def concerns(self, jaxpr: Any) -> bool:
        """Whether a program holds an equation that may be replaced, at any depth."""
        return any(
            self.replaces(equation)
            or any(self.concerns(inner) for inner in inner_programs(equation))
            for equation in jaxpr.eqns
        )


@dataclasses.dataclass(frozen=True, eq=False)
class _Run:
    """One pass over one program.

    Args:
        rewriting: what is replaced.
        done: inner programs by identity, each with its new form: equal calls stay equal.
    """

    rewriting: Rewriting
    done: dict[int, tuple[Any, Any]]

    def program(self, jaxpr: Any, consts: Sequence[Any], values: Sequence[Any]) -> list[Any]:
        return self.rewriting.run(jaxpr, consts, values, self.equation)

    def equation(self, equation: Any, operands: Sequence[Any]) -> Sequence[Any]:
        name = equation.primitive.name
        if name in self.rewriting.replace:
            with in_place_of(equation):
                results = self.rewriting.replace[name](equation, operands)
            if results is not None:
                return results
        elif any(self.rewriting.concerns(inner) for inner in inner_programs(equation)):
            if name in OPENED:
                equation = equation.replace(params=self._opened(equation.params))
            else:
                self.rewriting.hidden(equation)
        return eval_equation(equation, operands)

    def _opened(self, params: Mapping[str, Any]) -> dict[str, Any]:
        new = dict(params)
        for name, value in params.items():
            if isinstance(value, (tuple, list)):
                new[name] = type(value)(map(self._inner, value)) if value else value
            else:
                new[name] = self._inner(value)
        return new

    def _inner(self, value: Any) -> Any:
        jaxpr = getattr(value, "jaxpr", value)
        if not hasattr(jaxpr, "eqns") or not self.rewriting.concerns(jaxpr):
            return value
        if id(value) not in self.done:
            consts = value.consts if isinstance(value, ClosedJaxpr) else ()
            shapes = [
                jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype, weak_type=v.aval.weak_type)
                if hasattr(v.aval, "weak_type")
                else v.aval
                for v in jaxpr.invars
            ]
            closed = jax.make_jaxpr(lambda *xs: self.program(jaxpr, consts, xs))(*shapes)
            # The old one is held beside the new, for an id is of one object while that lives.
            is_open = not isinstance(value, ClosedJaxpr)
            self.done[id(value)] = value, closed.jaxpr if is_open else closed
        return self.done[id(value)][1]
