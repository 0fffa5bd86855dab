"""Slices of a traced program: exactly the equations that some of its values need."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import TypeAlias

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from ..core.compat import CALLS, REMATS, eval_equation, inner_programs
from ..core.typing import Array, PyTree
from ..core.weighted import PER_SAMPLE
from .factors import CHEAP_ELEMENTWISE, RESHAPES
from .layer_scan import has_units
from .units import is_unit
from .walk import (
    LOOPS,
    Atom,
    called,
    dtype_of,
    inners,
    made_by,
    opened,
    shape_of,
    struct_of,
    values_of,
    variables,
)
from .walk import equations as every_equation


@dataclasses.dataclass(frozen=True, eq=False)
class Piece:
    """Some equations of a jaxpr, as a function from an environment to its outputs.

    Args:
        equations: the equations, in order.
        outputs: the variables or literals it computes.
        needs: the variables whose values `run` requires.
        pinned: the variables that stay replicated over the automatic mesh axes.
    """

    equations: tuple[JaxprEqn, ...]
    outputs: tuple[Atom, ...]
    needs: frozenset[Var]
    pinned: frozenset[Var] = frozenset()

    @property
    def made(self) -> set[Var]:
        """The variables that its equations define."""
        return made_by(self.equations)

    def run(self, known: Mapping[Var, Array]) -> list[Array]:
        """Computes the outputs.

        Args:
            known: the value of every variable that the piece needs.

        Returns:
            The values of `outputs`.
        """
        values = {variable: known[variable] for variable in self.needs}
        for equation in self.equations:
            results = eval_equation(equation, values_of(values, equation.invars))
            pairs = zip(equation.outvars, results, strict=True)
            values.update({v: replicated(x) if v in self.pinned else x for v, x in pairs})
        return values_of(values, self.outputs)


def backward_slice(
    jaxpr: Jaxpr,
    outputs: Sequence[Atom],
    known: Iterable[Var] = (),
    pinned: frozenset[Var] = frozenset(),
) -> Piece:
    """Returns the backward slice of a jaxpr: the equations that compute the outputs.

    Args:
        jaxpr: an open jaxpr.
        outputs: variables of it, or literals.
        known: variables that need not be computed. Inputs of the jaxpr are always known.
        pinned: variables of it that stay replicated over the automatic mesh axes.

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


@dataclasses.dataclass(frozen=True, eq=False)
class Ending:
    """The last operations of a program, which compute scalars from scalars.

    Args:
        piece: computes the results from `sums`.
        sums: the scalars that these operations read, such as the sums over a batch.
        consts: values of the program that it reads.
    """

    piece: Piece
    sums: tuple[Var, ...]
    consts: Mapping[Var, Array]

    @classmethod
    def of(
        cls, program: ClosedJaxpr, values: Sequence[Array], ends: Sequence[int]
    ) -> tuple[Ending, list[Array], list[Array]]:
        """Runs a program, and separates the last operations of some of its results.

        Args:
            program: a closed jaxpr.
            values: its inputs.
            ends: the positions of the scalar results whose last operations are separated.

        Returns:
            The last operations, all results, and the sums that these operations read.
        """
        program = _scalars_written_out(program, values)
        jaxpr = program.jaxpr
        results = [jaxpr.outvars[number] for number in ends]
        consts = dict(zip(jaxpr.constvars, program.consts, strict=True))
        piece = backward_slice(
            jaxpr.replace(eqns=[e for e in jaxpr.eqns if _is_ending(e)]), results
        )
        read = [*(v for equation in piece.equations for v in equation.invars), *results]
        free = piece.needs - consts.keys()
        sums = dict.fromkeys(v for v in read if isinstance(v, Var) and v in free)
        ending = cls(piece, tuple(sums), {v: x for v, x in consts.items() if v in piece.needs})
        known = consts | dict(zip(jaxpr.invars, values, strict=True))
        outputs = backward_slice(jaxpr, [*jaxpr.outvars, *sums]).run(known)
        count = len(jaxpr.outvars)
        return ending, outputs[:count], outputs[count:]

    def __call__(self, sums: Sequence[Array]) -> list[Array]:
        """Runs the last operations again, on other sums.

        Args:
            sums: the values of `self.sums`, such as the sums over the whole batch.
        """
        pairs = zip(self.sums, sums, strict=True)
        operands = {v: jnp.asarray(x).astype(dtype_of(v)) for v, x in pairs}
        return [jnp.asarray(x) for x in self.piece.run({**self.consts, **operands})]


def _scalars_written_out(program: ClosedJaxpr, values: Sequence[Array]) -> ClosedJaxpr:
    """Inlines the calls that compute scalars from arrays.

    Args:
        program: a closed jaxpr.
        values: the inputs to trace it with.
    """

    def enters(equation: JaxprEqn) -> bool:
        is_plain = equation.primitive.name in CALLS and not is_unit(equation)
        is_plain = is_plain and equation.params.get("name") != PER_SAMPLE
        return is_plain and not _is_ending(equation) and any(map(_is_number, equation.outvars))

    return opened(program, values, enters)


def _is_number(atom: Atom) -> bool:
    kinds = (jnp.number, jnp.bool_)
    return shape_of(atom) == () and any(jnp.issubdtype(dtype_of(atom), kind) for kind in kinds)


_OF_SCALARS = CHEAP_ELEMENTWISE | CALLS | RESHAPES | {"copy_p", "custom_jvp_call"}
"""The operations of an `Ending`: on scalars, they give the same result on every device."""


def _is_ending(equation: JaxprEqn) -> bool:
    inside = (e for program in inner_programs(equation) for e in every_equation(program))
    names = {e.primitive.name for e in (equation, *inside)}
    return names <= _OF_SCALARS and all(map(_is_number, (*equation.invars, *equation.outvars)))


def replicated(x: Array) -> Array:
    """Replicates a value over the automatic mesh axes."""
    return _sharded(x, lambda _: PartitionSpec())


def unconstrained(tree: PyTree) -> PyTree:
    """Gives the results of a branch an unconstrained sharding.

    XLA compares the shardings of the branches' results. It fails with "Inconsistent conditional
    sharding" if the result of one branch has a sharding and that of another has none.
    """
    free = PartitionSpec.UNCONSTRAINED
    return jax.tree.map(lambda x: _sharded(x, lambda ndim: PartitionSpec(*(free,) * ndim)), tree)


def _sharded(x: Array, spec_of: Callable[[int], PartitionSpec]) -> Array:
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or set(mesh.manual_axes) >= set(mesh.axis_names):
        return x
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec_of(jnp.ndim(x))))


CASTS = frozenset({"convert_element_type"})
"""Operations that only change the dtype of a table."""

BOUNDS = jax.lax.GatherScatterMode
"""How a gather treats ids that are out of bounds of a table."""


@dataclasses.dataclass(frozen=True, eq=False)
class TableRows:
    """The rows that one equation of a program reads of a table: `table[ids]`.

    Args:
        equation: a gather, or a call of a program that is one.
        operands: the other operands of the equation.
        ids: (values of the operands) -> the ids: integers of any shape, possibly out of bounds.
        casts: the dtypes that the table or its rows are cast to, in order.
        mode: how the gather treats ids that are out of bounds.
        fill: the value of out-of-bounds rows if `mode` fills them; None for NaN.
    """

    equation: JaxprEqn
    operands: tuple[Atom, ...]
    ids: Callable[[Sequence[Array]], Array]
    casts: tuple[DTypeLike, ...]
    mode: jax.lax.GatherScatterMode
    fill: float | None

    @property
    def result(self) -> Var:
        """The variable that holds the rows."""
        return self.equation.outvars[0]


@dataclasses.dataclass(frozen=True, eq=False)
class Readers:
    """The equations that read an input of a program.

    Args:
        rows: the equations that look up rows of it by ids.
        others: the other equations that read it; None stands for the program's own outputs.
        forms: the variable of the input, and the variables that are casts of it.
    """

    rows: tuple[TableRows, ...]
    others: tuple[JaxprEqn | None, ...]
    forms: Collection[Var]


def readers_of(jaxpr: Jaxpr, table: Var) -> Readers:
    """Returns the equations that read a table `[N, D]`, in a program and the programs it calls.

    Args:
        jaxpr: an open jaxpr, with units as calls.
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
    forms: dict[Var, tuple[DTypeLike, ...]] = {table: ()}
    rows: list[TableRows] = []
    others: list[JaxprEqn | None] = []
    for equation in jaxpr.eqns:
        read = variables(equation.invars) & forms.keys()
        if not read:
            continue
        casts = forms[next(iter(read))]
        if equation.primitive.name in CASTS:
            forms[equation.outvars[0]] = (*casts, equation.params["new_dtype"])
        elif (lookup := _rows_of(equation, read)) is not None:
            rows.append(dataclasses.replace(lookup, casts=(*casts, *lookup.casts)))
        else:
            others.append(equation)
    if variables(jaxpr.outvars) & forms.keys():
        others.append(None)
    return Readers(tuple(rows), tuple(others), frozenset(forms))


def _rows_of(equation: JaxprEqn, read: set[Var]) -> TableRows | None:
    """Returns the lookup that an equation performs in a table or a cast of it, or None."""
    atoms = enumerate(equation.invars)
    places = [i for i, atom in atoms if not isinstance(atom, Literal) and atom in read]
    if len(places) != 1:
        return None
    others = tuple(atom for i, atom in enumerate(equation.invars) if i != places[0])
    if equation.primitive.name == "gather":
        if places != [0] or not _is_by_rows(equation):
            return None
        params = equation.params

        def first(operands):
            return operands[0][..., 0]

        return TableRows(equation, others, first, (), params["mode"], params["fill_value"])
    inner = called(equation)
    if inner is None or equation.primitive.name not in CALLS | REMATS or has_units(equation):
        return None
    jaxpr = inner.jaxpr
    # The inputs of a call are its last operands.
    place = places[0] - (len(equation.invars) - len(jaxpr.invars))
    readers = readers_of(jaxpr, jaxpr.invars[place])
    if len(readers.rows) != 1 or readers.others or jaxpr.outvars != [readers.rows[0].result]:
        return None
    (lookup,) = readers.rows
    piece = backward_slice(jaxpr, lookup.operands)
    inputs = [v for i, v in enumerate(jaxpr.invars) if i != place]
    if jaxpr.invars[place] in piece.needs:
        return None
    consts = dict(zip(jaxpr.constvars, inner.consts, strict=True))

    def ids(operands: Sequence[Array]) -> Array:
        known = dict(zip(inputs, operands[len(operands) - len(inputs) :], strict=True))
        return lookup.ids(piece.run(consts | known))

    return dataclasses.replace(lookup, equation=equation, operands=others, ids=ids)


def _is_by_rows(equation: JaxprEqn) -> bool:
    """Whether a gather takes whole rows of a matrix, one per id."""
    table, ids = map(struct_of, equation.invars)
    numbers = equation.params["dimension_numbers"]
    sizes = equation.params["slice_sizes"]
    return (
        table.ndim == 2
        and tuple(sizes) == (1, table.shape[1])
        and tuple(numbers.collapsed_slice_dims) == tuple(numbers.start_index_map) == (0,)
        and tuple(numbers.offset_dims) == (ids.ndim - 1,)
        and not numbers.operand_batching_dims
        and equation.params["mode"] in (BOUNDS.CLIP, BOUNDS.FILL_OR_DROP, BOUNDS.PROMISE_IN_BOUNDS)
    )


Names: TypeAlias = Sequence[str | None]
"""The names of inputs, or of operands; None for an operand that is not a named input."""


def _readers(
    jaxpr: Jaxpr, names: Names, passed: Collection[str] = CASTS
) -> Iterator[tuple[JaxprEqn | None, Names]]:
    """Yields the equations that read named inputs, with each operand's name; last the outputs."""
    known = {v: name for v, name in zip(jaxpr.invars, names, strict=False) if name}

    for equation in jaxpr.eqns:
        labels = [None if isinstance(v, Literal) else known.get(v) for v in equation.invars]
        if any(labels) and equation.primitive.name in passed:
            known[equation.outvars[0]] = labels[0] or ""
        elif any(labels):
            yield equation, labels
    yield None, [None if isinstance(v, Literal) else known.get(v) for v in jaxpr.outvars]


def read_outside_units(jaxpr: Jaxpr, names: Names) -> Iterator[str]:
    """Yields the named inputs that equations other than units read.

    Args:
        jaxpr: a program with marked units; its first inputs have names.
        names: the names of these inputs.

    Returns:
        The names, each as often as it is read. A cast does not count as a read.
    """
    for equation, labels in _readers(jaxpr, names):
        if equation is None or is_unit(equation):
            continue
        programs = inners(equation) if has_units(equation) else []
        for inner in programs:
            yield from read_outside_units(inner.program.jaxpr, inner.inputs(labels))
        if not programs:
            yield from {v: n for v, n in zip(equation.invars, labels, strict=True) if n}.values()


def read_once(jaxpr: Jaxpr, names: Names) -> frozenset[str]:
    """Returns the inputs that exactly one call of one unit reads, and nothing else.

    A scan over an input's rows reads each row once. An input that a loop passes to every iteration
    is not read once, and neither is one that a branch reads.

    Args:
        jaxpr: a program with marked units; its first inputs have names.
        names: the names of these inputs.

    Returns:
        The names.
    """
    return frozenset(name for name, count in _counts(jaxpr, names).items() if count == 1)


_MANY = 2
"""Any count of reads above one."""


def _counts(jaxpr: Jaxpr, names: Names) -> Counter[str]:
    counts: Counter[str] = Counter()
    for equation, labels in _readers(jaxpr, names):
        kind = "" if equation is None else equation.primitive.name
        if equation is None:
            counts.update({name: _MANY for name in labels if name})
        elif is_unit(equation):
            counts.update(filter(None, labels))
        elif kind == "scan" and has_units(equation):
            (loop,) = inners(equation)
            shared, carry, rows = loop.split_operands(labels)
            counts.update({name: _MANY for name in (*shared, *carry) if name})
            blank = [None] * len((*shared, *carry))
            counts.update(_counts(loop.program.jaxpr, [*blank, *rows]))
        elif kind in CALLS | REMATS and (programs := inners(equation)):
            counts.update(_counts(programs[0].program.jaxpr, programs[0].inputs(labels)))
        else:
            counts.update({name: _MANY for name in labels if name})
    return counts


PASSED = CASTS | RESHAPES | {"transpose"}
"""Operations whose result has the same values as their one operand."""

SLICES = frozenset({"dynamic_slice", "gather"})
"""Operations by which an iteration of a loop takes its row of a shared input."""


def read_in_loops(jaxpr: Jaxpr, names: Names, in_loop: bool = False) -> frozenset[str]:
    """Returns the inputs that a loop reads in every iteration, as a recurrent layer does weights.

    It leaves out operands of units that a loop calls, inputs that a loop only slices, and operands
    of functions with custom derivatives.

    Args:
        jaxpr: a program that may have marked units; its first inputs have names.
        names: the names of these inputs.
        in_loop: whether the program is itself the body of a loop.

    Returns:
        The names.
    """
    read: set[str] = set()
    for equation, labels in _readers(jaxpr, names, PASSED):
        if equation is None or (is_unit(equation) and in_loop):
            continue
        kind = equation.primitive.name
        if is_unit(equation) or kind in CALLS | REMATS | LOOPS | {"cond"}:
            for inner in inners(equation):
                # A carry that iterations change is no longer the input.
                shared = inner.inputs(labels)[: inner.num_shared]
                read |= read_in_loops(inner.program.jaxpr, shared, in_loop or kind in LOOPS)
        elif in_loop and kind not in SLICES:
            read.update(filter(None, labels))
    return frozenset(read)
