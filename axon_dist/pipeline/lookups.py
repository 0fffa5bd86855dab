"""Lookups in tables of which every rank of a pipeline has its part: what each rank does of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from ..core.reduction import all_sum
from ..core.typing import Array
from ..nn import own_rows
from ..program.lookups import BOUNDS, Rows
from .loss_trace import LossTrace
from .stage import Data, Rest
from .state import State, from_rank, get, put
from .tables import Tick


@dataclasses.dataclass(frozen=True, eq=False)
class Lookup:
    """Rows of a table of which every rank has an equal part, in the order of the ranks.

    Args:
        table: its number among the parameters outside the blocks.
        rows: what the loss reads of it.
        ids: (what is known of a microbatch) -> the ids.
    """

    table: int
    rows: Rows
    ids: Callable[[Data], Array]

    @property
    def shape(self) -> jax.ShapeDtypeStruct:
        """Of the rows of a microbatch."""
        aval = self.rows.result.aval
        return jax.ShapeDtypeStruct(aval.shape, aval.dtype)

    def found(self, part: Array, data: Data, axis: str) -> Array:
        """The rows of a microbatch, on every rank of the axis.

        Args:
            part: this rank's part of the table.
            data: of the microbatch.
            axis: the mesh axis whose ranks have a part each.
        """
        ids = self._ids(part, data, axis)
        own = own_rows(lambda at: self._cast(part[at]), ids, len(part), axis)
        rows = all_sum(own, axis)
        if self.rows.mode is not BOUNDS.FILL_OR_DROP:
            return rows
        is_there = (ids >= 0) & (ids < len(part) * jax.lax.axis_size(axis))
        fill = jnp.nan if self.rows.fill is None else self.rows.fill
        return jnp.where(is_there[..., None], rows, jnp.asarray(fill, rows.dtype))

    def added(self, total: Array, gradient: Array, data: Data, axis: str) -> Array:
        """The sum of the gradients of this rank's part, and that of a microbatch more.

        Args:
            total: like the part.
            gradient: of the rows.
            data: of the microbatch.
            axis: the mesh axis whose ranks have a part each.
        """
        own = self._ids(total, data, axis) - jax.lax.axis_index(axis) * len(total)
        # A negative place would count from the end: what is no row of this rank lies behind it.
        place = jnp.where((own >= 0) & (own < len(total)), own, len(total))
        return total.at[place].add(gradient.astype(total.dtype), mode="drop")

    def _cast(self, rows: Array) -> Array:
        for dtype in self.rows.casts:
            rows = rows.astype(dtype)
        return rows

    def _ids(self, part: Array, data: Data, axis: str) -> Array:
        ids = self.ids(data).astype(jnp.int32)
        if self.rows.mode is BOUNDS.FILL_OR_DROP:
            return ids
        return jnp.clip(ids, 0, len(part) * jax.lax.axis_size(axis) - 1)


def lookup_of(trace: LossTrace, table: int, rows: Rows) -> Lookup:
    """A lookup in the loss.

    Args:
        trace: the jaxpr of the loss, blocks as calls.
        table: the number of the table among the parameters outside the blocks.
        rows: what is read of it.
    """
    piece = trace.cut(rows.operands)
    ids = lambda data: rows.ids(piece.run(trace.known({}, data.buffers, data.batch)))
    return Lookup(table, rows, ids)


@dataclasses.dataclass(frozen=True, eq=False)
class Embedding:
    """All lookups of a pipeline, as actions of all ranks.

    Args:
        lookups: each in a table of which every rank has a part.
        axis: the mesh axis of the pipeline.
        home: the rank that has the first stage.
        data: (index of a microbatch) -> what is known of it.
    """

    lookups: Sequence[Lookup]
    axis: str
    home: int
    data: Callable[[Array], Data]

    @property
    def shapes(self) -> list[jax.ShapeDtypeStruct]:
        """Of what is looked up for a microbatch."""
        return [each.shape for each in self.lookups]

    def look_up(self, tick: Tick, state: State, parts: Rest) -> State:
        """Keeps what is looked up for a microbatch.

        Args:
            tick: which microbatch, and the slot.
            state: as it is.
            parts: the parameters outside the blocks.
        """

        def found(buffers: list[Array]) -> list[Array]:
            data = self.data(tick["microbatch"])
            rows = [each.found(parts[each.table], data, self.axis) for each in self.lookups]
            return put(buffers, tick["lookups"], rows)

        if not self.lookups:
            return state
        # All ranks take this branch in the same ticks: sums within it wait for nobody.
        lookups = jax.lax.cond(tick["active"], found, lambda same: same, state.lookups)
        return state._replace(lookups=lookups)

    def scatter(self, tick: Tick, state: State) -> State:
        """Adds the gradients of what was looked up for a microbatch, each rank those of its rows.

        Args:
            tick: which microbatch, and the slot of the gradients on the rank of the first stage.
            state: as it is.
        """
        is_home = jax.lax.axis_index(self.axis) == self.home
        # There is no sum for what is frozen.
        trained = {each.table for each in self.lookups} & state.sums.rest.keys()

        def run(sums: dict[int, Array]) -> dict[int, Array]:
            data = self.data(tick["microbatch"])
            gradients = from_rank(get(state.scatters, tick["scatters"]), is_home, self.axis)
            for each, gradient in zip(self.lookups, gradients, strict=True):
                if each.table in sums:
                    total = each.added(sums[each.table], gradient, data, self.axis)
                    sums = {**sums, each.table: total}
            return sums

        if not trained:
            return state
        own = {table: state.sums.rest[table] for table in sorted(trained)}
        added = jax.lax.cond(tick["active"], run, lambda same: same, own)
        return state._replace(sums=state.sums._replace(rest={**state.sums.rest, **added}))
