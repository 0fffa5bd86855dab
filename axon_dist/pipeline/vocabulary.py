"""Embeddings and losses whose tables are split over the ranks of a pipeline."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Literal

from ..core.errors import DivisibilityError, UnsupportedError
from ..core.reduction import all_sum
from ..core.typing import Array, Keys
from ..ir.pieces import BOUNDS, Piece, Readers, TableRows, readers_of
from ..ir.rewrite import Rewriting
from ..ir.walk import depends_on, made_by, struct_of, variables
from ..nn import own_rows
from ..ops.linear_loss import LINEAR_CROSS_ENTROPY, Operands, differentiable, evaluate
from .loss_trace import LossTrace
from .stage import MicrobatchData, Rest, StageProgram
from .tables import LaneEntry, State, from_rank, get, put


@dataclasses.dataclass(frozen=True, eq=False)
class Lookup:
    """A lookup in a table whose rows are split over the ranks, in the order of the ranks.

    Args:
        table: the number of the table among the parameters outside the blocks.
        rows: the lookup in the jaxpr of the loss.
        trace: the jaxpr of the loss, blocks as calls.
        piece: the part of the jaxpr that computes the ids.
    """

    table: int
    rows: TableRows
    trace: LossTrace
    piece: Piece

    @property
    def shape(self) -> jax.ShapeDtypeStruct:
        """The shape of the rows of a microbatch."""
        return struct_of(self.rows.result)

    def read(self, part: Array, data: MicrobatchData, axis: str) -> Array:
        """Returns the rows of a microbatch on every rank of the axis.

        Args:
            part: this rank's part of the table.
            data: the data of the microbatch.
            axis: the mesh axis that the table is split over.
        """
        ids = self._ids(part, data, axis)
        local = own_rows(lambda at: self._cast(part[at]), ids, len(part), axis)
        rows = all_sum(local, axis)
        if self.rows.mode is not BOUNDS.FILL_OR_DROP:
            return rows
        is_there = (ids >= 0) & (ids < len(part) * jax.lax.axis_size(axis))
        fill = jnp.nan if self.rows.fill is None else self.rows.fill
        return jnp.where(is_there[..., None], rows, jnp.asarray(fill, rows.dtype))

    def added(self, total: Array, gradient: Array, data: MicrobatchData, axis: str) -> Array:
        """Adds the gradient of a microbatch to the gradients of this rank's part of the table.

        Args:
            total: the sum so far, like the part.
            gradient: the gradient of the rows.
            data: the data of the microbatch.
            axis: the mesh axis that the table is split over.
        """
        local = self._ids(total, data, axis) - jax.lax.axis_index(axis) * len(total)
        # A negative index would count from the end, so rows of other ranks get an index out of
        # bounds, which `mode="drop"` ignores.
        place = jnp.where((local >= 0) & (local < len(total)), local, len(total))
        return total.at[place].add(gradient.astype(total.dtype), mode="drop")

    def _cast(self, rows: Array) -> Array:
        for dtype in self.rows.casts:
            rows = rows.astype(dtype)
        return rows

    def _ids(self, part: Array, data: MicrobatchData, axis: str) -> Array:
        known = self.trace.known(data, (), {})
        ids = self.rows.ids(self.piece.run(known)).astype(jnp.int32)
        if self.rows.mode is BOUNDS.FILL_OR_DROP:
            return ids
        return jnp.clip(ids, 0, len(part) * jax.lax.axis_size(axis) - 1)


@dataclasses.dataclass(frozen=True, eq=False)
class Embedding:
    """All lookups of a pipeline, as actions that every rank runs.

    Args:
        lookups: the lookups in tables that are split over the ranks.
        axis: the mesh axis of the pipeline.
        home: the rank of the first stage.
        data: (index of a microbatch) -> its `MicrobatchData`.
    """

    lookups: Sequence[Lookup]
    axis: str
    home: int
    data: Callable[[Array], MicrobatchData]

    def look_up(self, entry: LaneEntry, state: State, parts: Rest) -> State:
        """Looks up the rows of a microbatch and stores them in their slot.

        Args:
            entry: contains the microbatch and the slot.
            state: the state before the action.
            parts: the parameters outside the blocks, by number.
        """

        def looked_up(slots: list[Array]) -> list[Array]:
            data = self.data(entry["microbatch"])
            rows = [each.read(parts[each.table], data, self.axis) for each in self.lookups]
            return put(slots, entry["lookups"], rows)

        if not self.lookups:
            return state
        # All ranks take this branch in the same ticks, so its collectives do not hang.
        lookups = jax.lax.cond(entry["active"], looked_up, lambda same: same, state.lookups)
        return state._replace(lookups=lookups)

    def scatter(self, entry: LaneEntry, state: State) -> State:
        """Adds the gradients of the rows looked up for a microbatch; each rank adds its own rows.

        Args:
            entry: contains the microbatch, and the slot of the gradients on the first stage's rank.
            state: the state before the action.
        """
        is_home = jax.lax.axis_index(self.axis) == self.home
        # Frozen tables have no sum of gradients.
        trained = {each.table for each in self.lookups} & state.sums.rest.keys()

        def run(sums: dict[int, Array]) -> dict[int, Array]:
            data = self.data(entry["microbatch"])
            gradients = from_rank(get(state.scatters, entry["scatters"]), is_home, self.axis)
            for each, gradient in zip(self.lookups, gradients, strict=True):
                if each.table in sums:
                    total = each.added(sums[each.table], gradient, data, self.axis)
                    sums = {**sums, each.table: total}
            return sums

        if not trained:
            return state
        totals = {table: state.sums.rest[table] for table in sorted(trained)}
        added = jax.lax.cond(entry["active"], run, lambda same: same, totals)
        return state._replace(sums=state.sums._replace(rest={**state.sums.rest, **added}))


OR_LEAVE_IT_OUT = "or leave split_vocabulary out"
_BY_TOKENS = {1: 1, 4: 0}
"""The operands of the loss with a vocabulary dim, kernel and bias: operand number -> dim."""


def partition_by_tokens(
    trace: LossTrace, rest: Sequence[Keys], axis: str, size: int, embedding: bool = True
) -> dict[Keys, int]:
    """Returns the parameters to split over the ranks by vocabulary, and the dims to split.

    Args:
        trace: the jaxpr of the loss, blocks as calls.
        rest: the keys of the parameters outside the blocks.
        axis: the mesh axis of the pipeline.
        size: the number of ranks of the axis.
        embedding: whether to split embedding tables too: those that the loss looks tokens up in,
            with a row for each token of the head. Otherwise they stay whole.

    Returns:
        The vocabulary dim of the head's kernel, of its bias if there is one, and of the tables, by
        keys.

    Raises:
        UnsupportedError: if the loss has no linear head, or something else reads the parameters of
            the head or of an embedding.
        DivisibilityError: if the vocabulary does not divide over the ranks.
    """
    loss = _linear_head(trace, axis)
    named = {trace.params[keys]: keys for keys in rest}
    dims: dict[Keys, int] = {}
    for position, dim in _BY_TOKENS.items():
        if position >= len(loss.invars):
            continue
        operand = _OperandPath.to(trace.jaxpr, loss, loss.invars[position], dim)
        what = "kernel" if position == 1 else "bias"
        if operand is None or operand.source not in named:
            raise UnsupportedError(
                f"split_vocabulary splits the head over {axis!r}, but its {what} is not a "
                "parameter outside the blocks, at most cast or transposed. Give the model its "
                f"own head, such as a Transformer's tied_head=False; {OR_LEAVE_IT_OUT}",
                code="head-not-a-parameter",
            )
        path = "/".join(map(str, named[operand.source]))
        reads = readings_of(trace, operand.source)
        if operand.dim != 0:
            # The rows are not tokens, so lookups of rows count as other reads.
            rows = (each.equation for each in reads.rows)
            reads = Readers((), (*reads.others, *rows), reads.forms)
        if reads.rows and not embedding:
            raise UnsupportedError(
                f"split_vocabulary splits the head over {axis!r}, but its {what} {path!r} is the "
                "embedding too, which this schedule does not split: it has V, but not E and G. "
                "Give split_vocabulary=True, which adds them, or give the model its own head, such "
                "as a Transformer's tied_head=False",
                code="tied-head",
            )
        if other := operand.other_reader(trace.jaxpr, reads):
            raise UnsupportedError(
                f"split_vocabulary splits the head over {axis!r}, and its {what} {path!r} is also "
                f"read by {other}; only linear_cross_entropy may read it, cast or transposed, and, "
                "if it is also the embedding, lookups by ids that depend on the batch alone. "
                "Give the model its own head, such as a Transformer's tied_head=False; "
                f"{OR_LEAVE_IT_OUT}"
            )
        count = operand.source.aval.shape[operand.dim]
        if count % size:
            raise DivisibilityError(
                f"the head {path!r} has {count} tokens, and split_vocabulary splits them over the "
                f"{size} ranks of {axis!r}; make them a multiple, such as "
                f"{-(-count // size) * size}, {OR_LEAVE_IT_OUT}"
            )
        dims[named[operand.source]] = operand.dim
    count = struct_of(loss.invars[1]).shape[1]
    tables = [keys for keys in rest if keys not in dims and embedding]
    return dims | {keys: 0 for keys in tables if _is_embedding(trace, keys, count, axis)}


def _linear_head(trace: LossTrace, axis: str) -> Any:
    """Returns the only call of `linear_cross_entropy` in a loss.

    Raises:
        UnsupportedError: if there is no call, or several.
    """
    losses = [e for e in trace.jaxpr.eqns if e.primitive.name == LINEAR_CROSS_ENTROPY]
    if len(losses) != 1:
        raise UnsupportedError(
            f"split_vocabulary splits the linear head of a loss over {axis!r}, but this loss has "
            f"{len(losses)} visible calls of linear_cross_entropy; it must have one. Let it end in "
            "axon_dist.linear_cross_entropy(hidden, kernel, labels), as next_token_loss does for a "
            "model that has before_head, such as a Transformer with "
            f'logits="chunked"; {OR_LEAVE_IT_OUT}',
            code="no-linear-head",
        )
    return losses[0]


def readings_of(trace: LossTrace, table: Any) -> Readers:
    """Returns the readers of a parameter.

    Lookups whose ids depend on parameters or blocks count as other reads, because their ids are not
    known before the first stage.
    """
    readers = readers_of(trace.jaxpr, table)
    made = made_by(trace.jaxpr.eqns[call] for call in trace.calls)
    dependent = [trace.buffers[i] for i in trace.dependent_buffers]
    late = depends_on(trace.jaxpr, [*trace.params.values(), *made, *dependent])

    def is_early(rows):
        return late.isdisjoint(variables(rows.operands))

    others = (rows.equation for rows in readers.rows if not is_early(rows))
    return Readers(tuple(filter(is_early, readers.rows)), (*readers.others, *others), readers.forms)


def _is_embedding(trace: LossTrace, keys: Keys, count: int, axis: str) -> bool:
    """Whether the loss looks up tokens in a parameter with as many rows as the head has tokens."""
    variable = trace.params[keys]
    shape = struct_of(variable).shape
    if len(shape) != 2 or shape[0] != count:
        return False
    reads = readings_of(trace, variable)
    if reads.rows and reads.others:
        path = "/".join(map(str, keys))
        raise UnsupportedError(
            f"split_vocabulary splits the embedding {path!r} over {axis!r}, and it is also read by "
            f"{_name(reads.others[0])}; only lookups by ids that depend on the batch alone may "
            "read it, as those of an nnx.Embed do. Give the other reader its own; "
            f"{OR_LEAVE_IT_OUT}"
        )
    return bool(reads.rows)


@dataclasses.dataclass(frozen=True, eq=False)
class _OperandPath:
    """How a parameter becomes an operand of the loss: cast or transposed, step by step.

    Args:
        source: the variable of the parameter.
        dim: the dim of the source that becomes the vocabulary dim.
        steps: each variable on the path and the equation that reads it, the last first.
    """

    source: Any
    dim: int
    steps: tuple[tuple[Any, Any], ...]

    @classmethod
    def to(cls, jaxpr: Any, loss: Any, atom: Any, dim: int) -> _OperandPath | None:
        """Returns the path to an operand, or None if it is not a cast or transposed parameter."""
        made = {v: equation for equation in jaxpr.eqns for v in equation.outvars}
        reader = loss
        steps = []
        while not isinstance(atom, Literal):
            steps.append((atom, reader))
            reader = made.get(atom)
            if reader is None:
                return cls(atom, dim, tuple(steps))
            if reader.primitive.name == "transpose":
                dim = reader.params["permutation"][dim]
            elif reader.primitive.name != "convert_element_type":
                return None
            (atom,) = reader.invars
        return None

    def other_reader(self, jaxpr: Any, reads: Readers) -> str:
        """Returns the name of another reader of the parameter or of a value on the path, or "".

        Args:
            jaxpr: the jaxpr of the loss.
            reads: the readers of the parameter.
        """
        steps = {id(reader) for _, reader in self.steps}
        others = [each for each in reads.others if id(each) not in steps]
        for atom, _ in self.steps:
            if atom in reads.forms:
                continue
            others += [e for e in jaxpr.eqns if atom in variables(e.invars) and id(e) not in steps]
            others += [None] if atom in variables(jaxpr.outvars) else []
        return _name(others[0]) if others else ""


def _name(equation: Any) -> str:
    """Returns the name of a reader in messages; None means that the loss returns the parameter."""
    return "the results of the loss" if equation is None else repr(equation.primitive.name)


def with_partitioned_loss(program: StageProgram, axis: str) -> StageProgram:
    """Returns the program with a `last` that computes the loss from the split head."""

    def of_all(equation: Any, operands: Sequence[Array]) -> list[Array]:
        how = equation.params["how"]

        def run(values, wants):
            return evaluate(how, Operands(*values), wants, axis)

        return list(differentiable(run)(*operands))

    rewriting = Rewriting({LINEAR_CROSS_ENTROPY: of_all})
    last = functools.wraps(program.last)(rewriting.of(program.last))
    return dataclasses.replace(program, last=last)


def lookups_in(trace: LossTrace, tables: Mapping[int, Keys]) -> list[Lookup]:
    """Returns the lookups of a loss in tables that are split over the ranks.

    Args:
        trace: the jaxpr of the loss of one microbatch on one rank, blocks as calls.
        tables: the keys of the tables, by their numbers.
    """
    return [
        Lookup(number, rows, trace, trace.cut(rows.operands))
        for number, keys in tables.items()
        for rows in readings_of(trace, trace.params[keys]).rows
    ]
