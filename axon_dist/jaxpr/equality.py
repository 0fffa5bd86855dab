"""Whether two programs are the same: equal but for the names of their variables."""

from __future__ import annotations

import dataclasses
import functools
import math
import pathlib
import types
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.core import Tracer
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
    return _Pairs().same(one, other)


@dataclasses.dataclass(frozen=True)
class _Pairs:
    """Compares what equations hold: values, programs, and functions that are made anew.

    A rule of differentiation is a function that each trace makes again: two are the same where they
    have the same code and what they close over is the same.

    Args:
        known: pairs of objects that are being compared, which may refer to each other.
    """

    known: set[tuple[int, int]] = dataclasses.field(default_factory=set)

    def same(self, one: Any, other: Any) -> bool:
        """Whether two values are the same; what cannot be compared is different."""
        if one is other:
            return True
        if type(one) is not type(other):
            return False
        if isinstance(one, (ClosedJaxpr, Jaxpr)):
            return _same_programs(one, other)
        if isinstance(one, (tuple, list)):
            return len(one) == len(other) and all(map(self.same, one, other))
        if isinstance(one, Mapping):
            return one.keys() == other.keys() and all(self.same(one[k], other[k]) for k in one)
        if isinstance(one, (np.ndarray, jax.Array)):
            return not isinstance(one, Tracer) and same_value(one, other)
        try:
            if bool(one == other):
                return not isinstance(one, float) or math.copysign(1, one) == math.copysign(
                    1, other
                )
        except (TypeError, ValueError):
            return False
        return self._same_parts(one, other)

    def _same_parts(self, one: Any, other: Any) -> bool:
        parts = _parts(one), _parts(other)
        if None in parts:
            return False
        if (pair := (id(one), id(other))) in self.known:
            return True
        self.known.add(pair)
        return self.same(*parts)


def _same_programs(one: Any, other: Any) -> bool:
    if isinstance(one, Jaxpr):
        return same_program(one, other)
    return (
        len(one.consts) == len(other.consts)
        and all(map(same_value, one.consts, other.consts))
        and same_program(one.jaxpr, other.jaxpr)
    )


# What JAX's functions close over that says nothing of what they do: results that they have kept,
# and the trace that they were made in.
_KEPT = frozenset({"cells", "sentinel", "self", "out_store"})
_WRAPPED = ("f", "transforms", "params", "in_type")
_FROM_JAX = str(pathlib.Path(jax.__file__).parent)


def _parts(value: Any) -> Any:
    """What decides what a function does: its code and what it closes over; None of other values."""
    if isinstance(value, types.FunctionType):
        code = value.__code__
        kept = _KEPT if code.co_filename.startswith(_FROM_JAX) else frozenset[str]()
        cells = zip(code.co_freevars, value.__closure__ or (), strict=True)
        closed = {name: _content(cell) for name, cell in cells if name not in kept}
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


def _content(cell: types.CellType) -> Any:
    """What a function closes over; a name that has no value yet has itself."""
    try:
        return cell.cell_contents
    except ValueError:
        return _content
