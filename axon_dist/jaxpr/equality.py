"""Whether two programs are the same: equal but for the names of their variables."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, Var

from .walk import Atom, JaxprLike


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


def same_program(one: JaxprLike, other: JaxprLike) -> bool:
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
    names: dict[Var, Var] = {}

    def defines(mine: Sequence[Var], theirs: Sequence[Var]) -> bool:
        names.update(zip(mine, theirs, strict=False))
        return [v.aval for v in mine] == [v.aval for v in theirs]

    def reads(mine: Sequence[Atom], theirs: Sequence[Atom]) -> bool:
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


def _same_atom(names: dict[Var, Var], one: Atom, other: Atom) -> bool:
    if isinstance(one, Literal) and isinstance(other, Literal):
        return one.aval == other.aval and same_value(one.val, other.val)
    return not isinstance(one, Literal) and names.get(one) is other


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
