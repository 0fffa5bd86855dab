"""Where the inputs of a program are read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jax.extend.core import Literal

from ..core.compat import inner_programs, scan_counts
from .layer_scan import has_units, is_unit
from .walk import CALLS, LOOPS, REMATS, called


def read_outside_units(
    jaxpr: Any, names: Sequence[str], is_unit: Callable[[Any], bool] = is_unit
) -> Iterator[str]:
    """The inputs that are computed with elsewhere than in the units they are handed to.

    Args:
        jaxpr: whose first inputs have names; units in it are marked.
        names: of these inputs.
        is_unit: whether an equation is the call of a unit.

    Returns:
        The names, each as often as it is read; a change of dtype reads nothing.
    """
    return _read(jaxpr, dict(zip(jaxpr.invars, names, strict=False)), is_unit)


def _read(jaxpr: Any, names: dict[Any, str], is_unit: Callable[[Any], bool]) -> Iterator[str]:
    for equation in jaxpr.eqns:
        read = {v: names[v] for v in equation.invars if not isinstance(v, Literal) and v in names}
        if not read or is_unit(equation):
            continue
        if equation.primitive.name == "convert_element_type":
            names[equation.outvars[0]] = next(iter(read.values()))
        elif has_units(equation, is_unit):
            for inner in inner_programs(equation):
                # Branches have an index before their operands.
                outer = equation.invars[len(equation.invars) - len(inner.invars) :]
                pairs = zip(inner.invars, outer, strict=True)
                named = [
                    (new, read[old])
                    for new, old in pairs
                    if not isinstance(old, Literal) and old in read
                ]
                yield from _read(inner, dict(named), is_unit)
        else:
            yield from read.values()


def read_once(jaxpr: Any, names: Sequence[str]) -> frozenset[str]:
    """The inputs that are handed to one call of one unit, and to nothing else.

    What stands in a loop over its rows is handed to one call each. What a loop hands to every
    iteration, and what only a branch reads, is not read once.

    Args:
        jaxpr: whose first inputs have names; units in it are marked.
        names: of these inputs.

    Returns:
        The names.
    """
    counts: Counter[str] = Counter()
    _count(jaxpr, dict(zip(jaxpr.invars, names, strict=False)), counts)
    return frozenset(name for name, count in counts.items() if count == 1)


_MANY = 2


def _count(jaxpr: Any, names: dict[Any, str], counts: Counter[str]) -> None:
    named = lambda atom: None if isinstance(atom, Literal) else names.get(atom)
    counts.update({name: _MANY for atom in jaxpr.outvars if (name := named(atom))})
    for equation in jaxpr.eqns:
        given = [named(atom) for atom in equation.invars]
        if not any(given):
            continue
        kind, inner = equation.primitive.name, called(equation)
        if kind == "convert_element_type":
            names[equation.outvars[0]] = given[0] or ""
        elif is_unit(equation):
            counts.update(filter(None, given))
        elif kind == "scan" and has_units(equation):
            body, kept = equation.params["jaxpr"].jaxpr, sum(scan_counts(equation))
            counts.update({name: _MANY for name in given[:kept] if name})
            _count(body, _rows(body.invars[kept:], given[kept:]), counts)
        elif inner is not None and kind in CALLS | REMATS:
            # The inputs of a call are its last operands.
            _count(
                inner.jaxpr, _rows(inner.jaxpr.invars, given[-len(inner.jaxpr.invars) :]), counts
            )
        else:
            counts.update({name: _MANY for name in given if name})


def _rows(variables: Sequence[Any], given: Sequence[str | None]) -> dict[Any, str]:
    return {v: name for v, name in zip(variables, given, strict=True) if name}


PASSED = frozenset(
    {"convert_element_type", "transpose", "reshape", "squeeze", "expand_dims", "broadcast_in_dim"}
)
"""Operations whose result is the same values as their one operand."""

SLICES = frozenset({"dynamic_slice", "gather"})
"""Operations with which a loop takes a row of what all turns are handed."""


def read_in_loops(jaxpr: Any, names: Sequence[str]) -> frozenset[str]:
    """The inputs that a loop reads in every turn, as a recurrent layer reads its weights.

    What is handed to units that are called in a loop, and what a loop takes rows of, is not among
    them; nor is what functions with derivatives of their own read.

    Args:
        jaxpr: whose first inputs have names; units in it may be marked.
        names: of these inputs.

    Returns:
        The names.
    """
    found: set[str] = set()
    _in_loops(jaxpr, dict(zip(jaxpr.invars, names, strict=False)), False, found)
    return frozenset(found)


def _in_loops(jaxpr: Any, names: dict[Any, str], is_loop: bool, found: set[str]) -> None:
    for equation in jaxpr.eqns:
        given = [None if isinstance(v, Literal) else names.get(v) for v in equation.invars]
        if not any(given):
            continue
        kind, inner = equation.primitive.name, called(equation)
        if kind in PASSED:
            names[equation.outvars[0]] = given[0] or ""
        elif kind in LOOPS:
            for body, kept in _bodies(equation, given):
                _in_loops(body, _rows(body.invars[: len(kept)], kept), True, found)
        elif is_unit(equation) and is_loop:
            continue
        elif inner is not None and (kind in CALLS | REMATS or is_unit(equation)):
            rows = _rows(inner.jaxpr.invars, given[-len(inner.jaxpr.invars) :])
            _in_loops(inner.jaxpr, rows, is_loop, found)
        elif kind == "cond":
            for branch in inner_programs(equation):
                _in_loops(branch, _rows(branch.invars, given[1:]), is_loop, found)
        elif is_loop and kind not in SLICES:
            found.update(filter(None, given))


def _bodies(equation: Any, given: Sequence[str | None]) -> list[tuple[Any, Sequence[str | None]]]:
    """The programs that a loop runs in every turn, and what each gets that no turn changes."""
    params = equation.params
    if equation.primitive.name == "scan":
        return [(params["jaxpr"].jaxpr, given[: scan_counts(equation)[0]])]
    first = params["cond_nconsts"]
    kept = given[first : first + params["body_nconsts"]]
    return [(params["cond_jaxpr"].jaxpr, given[:first]), (params["body_jaxpr"].jaxpr, kept)]
