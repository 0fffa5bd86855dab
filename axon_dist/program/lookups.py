"""Where a program reads the rows of a table by ids, and where it reads the table otherwise."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax

from ..core.compat import CALLS, REMATS
from ..core.typing import Array
from .layer_scan import has_units
from .piece import cut
from .walk import called, variables

CASTS = frozenset({"convert_element_type"})
"""Operations that give a table in another dtype, and nothing else."""

BOUNDS = jax.lax.GatherScatterMode
"""What is made of ids that a table has no row for."""


@dataclasses.dataclass(frozen=True, eq=False)
class Rows:
    """The rows that one equation of a program reads of a table: `table[ids]`.

    Args:
        equation: a gather, or a call of a program that is one.
        operands: what the equation reads beside the table.
        ids: the values of the operands -> the ids, integers of any shape, in the table or not.
        casts: the dtypes that the table, or its rows, are cast to, in order.
        mode: what is made of ids that the table has no row for.
        fill: what these rows are filled with, where they are filled; None is not a number.
    """

    equation: Any
    operands: tuple[Any, ...]
    ids: Callable[[Sequence[Array]], Array]
    casts: tuple[Any, ...]
    mode: Any
    fill: Any

    @property
    def result(self) -> Any:
        """The variable of the rows."""
        return self.equation.outvars[0]


@dataclasses.dataclass(frozen=True, eq=False)
class Readers:
    """What reads an input of a program.

    Args:
        rows: what reads rows of it by ids.
        others: the other equations that read it; None for the program's own outputs.
        forms: its variable, and those that are casts of it.
    """

    rows: tuple[Rows, ...]
    others: tuple[Any, ...]
    forms: Collection[Any]


def readers_of(jaxpr: Any, table: Any) -> Readers:
    """What reads a table `[N, D]`, in a program and the calls that it makes.

    Args:
        jaxpr: open, its units as calls.
        table: a variable of it.

    Returns:
        The readers, in the order of the program.

    Example:
        >>> import jax.numpy as jnp
        >>> shapes = jnp.zeros((8, 4)), jnp.zeros((2, 3), int)
        >>> jaxpr = jax.make_jaxpr(lambda table, ids: jnp.take(table, ids, axis=0))(*shapes).jaxpr
        >>> [rows.result.aval.shape for rows in readers_of(jaxpr, jaxpr.invars[0]).rows]
        [(2, 3, 4)]
    """
    forms: dict[Any, tuple[Any, ...]] = {table: ()}
    rows: list[Rows] = []
    others: list[Any] = []
    for equation in jaxpr.eqns:
        read = variables(equation.invars) & forms.keys()
        if not read:
            continue
        casts = forms[next(iter(read))]
        if equation.primitive.name in CASTS:
            forms[equation.outvars[0]] = (*casts, equation.params["new_dtype"])
        elif (found := _rows_of(equation, read)) is not None:
            rows.append(dataclasses.replace(found, casts=(*casts, *found.casts)))
        else:
            others.append(equation)
    if variables(jaxpr.outvars) & forms.keys():
        others.append(None)
    return Readers(tuple(rows), tuple(others), frozenset(forms))


def _rows_of(equation: Any, read: set[Any]) -> Rows | None:
    """The rows that an equation reads of a table with some forms; None where it does otherwise."""
    places = [i for i, atom in enumerate(equation.invars) if atom in read]
    if len(places) != 1:
        return None
    others = tuple(atom for i, atom in enumerate(equation.invars) if i != places[0])
    if equation.primitive.name == "gather":
        if places != [0] or not _is_by_rows(equation):
            return None
        params = equation.params
        first = lambda operands: operands[0][..., 0]
        return Rows(equation, others, first, (), params["mode"], params["fill_value"])
    inner = called(equation)
    if inner is None or equation.primitive.name not in CALLS | REMATS or has_units(equation):
        return None
    jaxpr = inner.jaxpr
    # The inputs of a call are its last operands.
    place = places[0] - (len(equation.invars) - len(jaxpr.invars))
    readers = readers_of(jaxpr, jaxpr.invars[place])
    if len(readers.rows) != 1 or readers.others or jaxpr.outvars != [readers.rows[0].result]:
        return None
    (found,) = readers.rows
    piece = cut(jaxpr, found.operands)
    given = [v for i, v in enumerate(jaxpr.invars) if i != place]
    if jaxpr.invars[place] in piece.needs:
        return None
    consts = dict(zip(jaxpr.constvars, inner.consts, strict=True))

    def ids(operands: Sequence[Array]) -> Array:
        known = dict(zip(given, operands[len(operands) - len(given) :], strict=True))
        return found.ids(piece.run(consts | known))

    return dataclasses.replace(found, equation=equation, operands=others, ids=ids)


def _is_by_rows(equation: Any) -> bool:
    """Whether a gather takes whole rows of a matrix, an id each."""
    table, ids = (atom.aval for atom in equation.invars)
    numbers, sizes = equation.params["dimension_numbers"], equation.params["slice_sizes"]
    return (
        table.ndim == 2
        and tuple(sizes) == (1, table.shape[1])
        and tuple(numbers.collapsed_slice_dims) == tuple(numbers.start_index_map) == (0,)
        and tuple(numbers.offset_dims) == (ids.ndim - 1,)
        and not numbers.operand_batching_dims
        and equation.params["mode"] in (BOUNDS.CLIP, BOUNDS.FILL_OR_DROP, BOUNDS.PROMISE_IN_BOUNDS)
    )
