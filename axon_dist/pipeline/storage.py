"""Where the parameters of a pipelined model live: each block's on the rank of its stage alone."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Sequence
from functools import cached_property
from typing import TypeAlias

import jax
import jax.numpy as jnp

from ..core.tree import joined
from ..core.typing import Array, PyTree
from .layout import Keys, Stages, flatten, nest
from .tables import Packing

Cell: TypeAlias = tuple[int, int]
"""A rank and one of its rows."""


@dataclasses.dataclass(frozen=True, eq=False)
class ModelStorage(abc.ABC):
    """A form of a model's parameters in which every rank holds those of its stages alone.

    What is in no block stays as it is. What is in blocks lies in rows: arrays whose dim 0 counts
    ranks, and is to be split over the pipeline axis.

    Args:
        stages: blocks, stages and ranks.
        shapes: nested dict of `ShapeDtypeStruct`, the parameters of the model.
        frozen: the keys of those that are not trained, which a state keeps in a tree of their own.
    """

    stages: Stages
    shapes: PyTree
    frozen: frozenset[Keys] = frozenset()

    @abc.abstractmethod
    def to_rows(self, flat: dict[Keys, Array]) -> dict[Keys, Array]:
        """Makes the rows, by their keys in the stored tree, of the model's leaves."""

    @abc.abstractmethod
    def of_block(self, number: int, rows: dict[Keys, Array]) -> dict[Keys, Array]:
        """The leaves of a block, by their keys in the model, of the rows."""

    @abc.abstractmethod
    def rows_of_chunk(self, chunk: int) -> range:
        """The numbers of the rows in which a chunk lies."""

    @abc.abstractmethod
    def block_weights(self, stage: int, rows: Sequence[Sequence[PyTree]]) -> dict[Keys, Array]:
        """The leaves of the blocks of a stage, by their keys in the model.

        Args:
            stage: which.
            rows: the rows of its chunk, of one rank, without dim 0.
        """

    @property
    @abc.abstractmethod
    def row_names(self) -> list[list[Keys]]:
        """The keys of the stored leaves that are rows, row by row."""

    @cached_property
    def flat_shapes(self) -> dict[Keys, jax.ShapeDtypeStruct]:
        """The shape and dtype of every leaf."""
        return flatten(self.shapes)

    @cached_property
    def rest(self) -> tuple[Keys, ...]:
        """The keys of the leaves outside the blocks, in the order of the model's leaves."""
        return tuple(keys for keys in self.flat_shapes if self.block_of(keys) is None)

    @property
    def row_keys(self) -> tuple[Keys, ...]:
        """The keys of the stored leaves that are rows."""
        return tuple(keys for row in self.row_names for keys in row)

    @abc.abstractmethod
    def cell_of(self, number: int) -> Cell:
        """The rank and the row that hold a block."""

    @abc.abstractmethod
    def slot_of(self, number: int, keys: Keys) -> Keys | None:
        """The keys of the stored leaf whose entry of the rank is a block's leaf, if one is."""

    def like(self, shapes: PyTree) -> ModelStorage:
        """The same stages' storage of a tree with leaves of the model, of any shapes.

        Args:
            shapes: nested dict of `ShapeDtypeStruct`, at keys that begin with those of leaves of
                the model, which need not all be there.
        """
        return type(self)(self.stages, shapes)

    @cached_property
    def trained(self) -> ModelStorage:
        """The storage of what is trained alone."""
        return self.like(self._part(is_frozen=False)) if self.frozen else self

    @cached_property
    def untrained(self) -> ModelStorage:
        """The storage of what is frozen alone."""
        return self.like(self._part(is_frozen=True))

    def _part(self, is_frozen: bool) -> PyTree:
        flat = self.flat_shapes.items()
        return nest({keys: x for keys, x in flat if (keys in self.frozen) == is_frozen})

    def store(self, params: PyTree) -> tuple[PyTree, PyTree]:
        """The stored forms of what is trained and of what is frozen of a model's parameters."""
        flat = flatten(params)
        kept = nest({keys: flat.pop(keys) for keys in [*flat] if keys in self.frozen})
        return self.trained.from_model(nest(flat)), self.untrained.from_model(kept)

    def restore(self, params: PyTree, frozen: PyTree) -> PyTree:
        """The inverse of `store`, exactly."""
        return joined(self.trained.to_model(params), self.untrained.to_model(frozen))

    def both(self, stage: int, rows: Sequence[Sequence[PyTree]]) -> dict[Keys, Array]:
        """The leaves of the blocks of a stage, trained and frozen, by their keys in the model.

        Args:
            stage: which.
            rows: the rows of its chunk, of one rank, without dim 0; of each what is trained, and
                behind it what is frozen.
        """
        numbers = self.rows_of_chunk(self.stages.chunk_of(stage))
        ends = [len(self.trained.row_names[number]) for number in numbers]
        split = list(zip(rows, ends, strict=True))
        frozen = self.untrained.block_weights(stage, [row[end:] for row, end in split])
        return self.trained.block_weights(stage, [row[:end] for row, end in split]) | frozen

    def block_of(self, keys: Keys) -> int | None:
        """The block that a leaf of the model belongs to; None for what all ranks have."""
        if self.stages.is_shared(keys):
            return None
        beginnings = (keys[:end] for end in range(len(keys) + 1))
        found = (self._numbers.get(beginning) for beginning in beginnings)
        return min((number for number in found if number is not None), default=None)

    @cached_property
    def _numbers(self) -> dict[Keys, int]:
        """The number of the block at some keys."""
        return {block: number for number, block in enumerate(self.stages.blocks)}

    def from_model(self, params: PyTree) -> PyTree:
        """The stored form of a model's parameters.

        Args:
            params: the model's own nested dict.

        Returns:
            The stored tree: what is in no block as it was, and rows.
        """
        flat = flatten(params)
        return nest({keys: flat[keys] for keys in self.rest} | self.to_rows(flat))

    def to_model(self, stored: PyTree) -> PyTree:
        """The inverse of `from_model`, exactly."""
        flat = flatten(stored)
        params = {keys: flat[keys] for keys in self.rest}
        for number in range(len(self.stages.blocks)):
            params |= self.of_block(number, flat)
        return nest(params)

    def rows_of(self, stored: PyTree) -> list[list[PyTree]]:
        """The leaves of every row, None where the tree has none."""
        flat = flatten(stored)
        return [[flat.get(keys) for keys in row] for row in self.row_names]

    def rest_of(self, stored: PyTree) -> list[PyTree]:
        """The leaves outside the blocks, in the order of `rest`; None where the tree has none."""
        flat = flatten(stored)
        return [flat.get(keys) for keys in self.rest]

    def assemble(self, rows: Sequence[Sequence[PyTree]], rest: Sequence[PyTree]) -> PyTree:
        """The stored tree of trained rows and of the rest, None at the places of frozen ones."""
        flat = dict(zip(self.rest, rest, strict=True))
        for names, leaves in zip(self.trained.row_names, rows, strict=True):
            flat.update(zip(names, leaves, strict=True))
        return nest({keys: leaf for keys, leaf in flat.items() if leaf is not None})


@dataclasses.dataclass(frozen=True, eq=False)
class RowStorage(ModelStorage):
    """Parameters of equal blocks: row r stacks block r of every rank.

    Rows are separate arrays, so that no stage has to copy its weights out of a larger one. A row
    keeps the path of the block of that number, and stands for one such block on each rank; a rank
    with fewer blocks has zeros there.
    """

    @property
    def leaves(self) -> tuple[Keys, ...]:
        """The keys of the leaves within a block."""
        return self._leaves_of_block[0] if self.stages.blocks else ()

    @cached_property
    def _leaves_of_block(self) -> list[tuple[Keys, ...]]:
        found: list[list[Keys]] = [[] for _ in self.stages.blocks]
        for keys in self.flat_shapes:
            if (number := self.block_of(keys)) is not None:
                found[number].append(keys[len(self.stages.blocks[number]) :])
        return [tuple(leaves) for leaves in found]

    @cached_property
    def _leaves_of_row(self) -> dict[int, tuple[Keys, ...]]:
        """The leaves that any block of each row has; some have no state of the optimizer."""
        found: dict[int, dict[Keys, None]] = {}
        for number, leaves in enumerate(self._leaves_of_block):
            row = self.stages.homes[number][1]
            found.setdefault(row, {}).update(dict.fromkeys(leaves))
        return {row: tuple(found[row]) for row in sorted(found)}

    @property
    def row_names(self) -> list[list[Keys]]:
        """The keys of the stored leaves that are rows, row by row."""
        rows = sum(map(self.stages.num_rows, range(self.stages.num_chunks)))
        blocks = self.stages.blocks[:rows]
        return [
            [block + leaf for leaf in self._leaves_of_row.get(row, ())]
            for row, block in enumerate(blocks)
        ]

    def to_rows(self, flat: dict[Keys, Array]) -> dict[Keys, Array]:
        """Stacks block r of every rank."""
        return {
            self.stages.blocks[row] + leaf: self._stack(flat, row, leaf)
            for row, leaves in self._leaves_of_row.items()
            for leaf in leaves
        }

    def of_block(self, number: int, rows: dict[Keys, Array]) -> dict[Keys, Array]:
        """The block's part of its row."""
        device, row = self.stages.homes[number]
        block, name = self.stages.blocks[number], self.stages.blocks[row]
        leaves = self._leaves_of_block[number]
        return {block + leaf: rows[name + leaf][device] for leaf in leaves}

    def cell_of(self, number: int) -> Cell:
        """Its home."""
        return self.stages.homes[number]

    def slot_of(self, number: int, keys: Keys) -> Keys:
        """The same leaf of the block whose name the row has."""
        row = self.stages.homes[number][1]
        return self.stages.blocks[row] + keys[len(self.stages.blocks[number]) :]

    def rows_of_chunk(self, chunk: int) -> range:
        """One row per block of the chunk's longest stage."""
        first = self.stages.first_row(chunk)
        return range(first, first + self.stages.num_rows(chunk))

    def block_weights(self, stage: int, rows: Sequence[Sequence[PyTree]]) -> dict[Keys, Array]:
        """The rows are the blocks."""
        found: dict[Keys, Array] = {}
        for number, row in zip(self.stages.blocks_of(stage), rows, strict=False):
            leaves = self._leaves_of_row.get(self.stages.homes[number][1], ())
            pairs = zip(leaves, row, strict=True)
            own, block = self._leaves_of_block[number], self.stages.blocks[number]
            found.update((block + leaf, value) for leaf, value in pairs if leaf in own)
        return found

    def leaves_at(self, row: int, values: Sequence[Array], stage: Array) -> list[Array]:
        """The leaves of the block that a stage has in a row, in the order of `leaves`.

        Args:
            row: which.
            values: of it, of one rank; what is trained, and behind it what is frozen.
            stage: which, known when it runs.
        """
        if not self.frozen:
            return list(values)
        block = self.stages.blocks[row]
        names = self.trained.row_names[row], self.untrained.row_names[row]
        trained = dict(zip(names[0], values, strict=False))
        frozen = dict(zip(names[1], values[len(names[0]) :], strict=True))

        def one(leaf: Keys) -> Array:
            keys = block + leaf
            if keys not in trained or keys not in frozen:
                return (trained if keys in trained else frozen)[keys]
            blocks = [self.stages.blocks_at.get((rank, row)) for rank in self.stages.placement]
            here = [n is not None and self.stages.blocks[n] + leaf for n in blocks]
            is_frozen = jnp.asarray([keys in self.frozen for keys in here])
            return jnp.where(is_frozen[stage], frozen[keys], trained[keys])

        return [one(leaf) for leaf in self.leaves]

    def _stack(self, flat: dict[Keys, Array], row: int, leaf: Keys) -> Array:
        blocks = [self.stages.blocks_at.get((d, row)) for d in range(self.stages.num_devices)]
        held = [None if b is None else flat.get(self.stages.blocks[b] + leaf) for b in blocks]
        like = next(x for x in held if x is not None)
        return jnp.stack([jnp.zeros(like.shape, like.dtype) if x is None else x for x in held])


@dataclasses.dataclass(frozen=True, eq=False)
class FlatStorage(ModelStorage):
    """Parameters of blocks that differ: a row is all of a chunk, as one vector per dtype.

    The vectors are as long as the largest stage needs; smaller ones end in zeros.
    """

    @cached_property
    def packing(self) -> Packing:
        """How the leaves of each stage become vectors."""
        return Packing([[self.flat_shapes[keys] for keys in held] for held in self._by_stage])

    @property
    def row_names(self) -> list[list[Keys]]:
        """The keys of the stored leaves that are rows, row by row."""
        forms = [("vector", str(i)) for i in range(len(self.packing.packed))]
        chunks = range(self.stages.num_chunks)
        return [[("stages", f"chunk{chunk}", *form) for form in forms] for chunk in chunks]

    def to_rows(self, flat: dict[Keys, Array]) -> dict[Keys, Array]:
        """Packs the leaves of every stage."""
        rows: dict[Keys, Array] = {}
        for chunk, names in enumerate(self.row_names):
            packed = [self.packed(flat, chunk, d) for d in range(self.stages.num_devices)]
            for number, name in enumerate(names):
                rows[name] = jnp.stack([vectors[number] for vectors in packed])
        return rows

    def of_block(self, number: int, rows: dict[Keys, Array]) -> dict[Keys, Array]:
        """The block's part of its stage's vectors."""
        stage = self.stages.stage_of(number)
        names = self.row_names[self.stages.chunk_of(stage)]
        own = [rows[name][self.stages.placement[stage]] for name in names]
        leaves = self.block_weights(stage, [own]).items()
        return {keys: x for keys, x in leaves if self.block_of(keys) == number}

    def cell_of(self, number: int) -> Cell:
        """The rank and the chunk of its stage."""
        stage = self.stages.stage_of(number)
        return self.stages.placement[stage], self.stages.chunk_of(stage)

    def slot_of(self, number: int, keys: Keys) -> Keys | None:
        """None, unless stages are alike, and their leaves are stored as they are."""
        if not self.packing.is_uniform:
            return None
        stage = self.stages.stage_of(number)
        names = self.row_names[self.stages.chunk_of(stage)]
        return names[self._by_stage[stage].index(keys)]

    @cached_property
    def vectors(self) -> dict[tuple[int, int], list[tuple[Keys, ...]]]:
        """By chunk and number, what lies in a vector on each rank, in order; {} without vectors."""
        if self.packing.is_uniform:
            return {}
        found: dict[tuple[int, int], list[tuple[Keys, ...]]] = {}
        for chunk in range(self.stages.num_chunks):
            at = {self.stages.placement[s]: self._by_stage[s] for s in self.stages.stages_of(chunk)}
            for number, form in enumerate(self.packing.packed):
                held = [at.get(rank, ()) for rank in range(self.stages.num_devices)]
                alike = {k for k, x in self.flat_shapes.items() if x.dtype == form.dtype}
                found[chunk, number] = [tuple(k for k in keys if k in alike) for keys in held]
        return found

    def rows_of_chunk(self, chunk: int) -> range:
        """One row."""
        return range(chunk, chunk + 1)

    def block_weights(self, stage: int, rows: Sequence[Sequence[PyTree]]) -> dict[Keys, Array]:
        """Unpacks the vectors."""
        return dict(zip(self._by_stage[stage], self.packing.unpack(stage, rows[0]), strict=True))

    def packed(self, flat: dict[Keys, Array], chunk: int, device: int) -> list[Array]:
        """The vectors of a rank's chunk, zeros where it has none.

        Args:
            flat: leaves by their keys in the model.
            chunk: which of the rank's.
            device: a rank of the pipeline axis.
        """
        stages = self.stages.stages_of(chunk)
        here = [stage for stage in stages if self.stages.placement[stage] == device]
        if not here:
            return [jnp.zeros(form.shape, form.dtype) for form in self.packing.packed]
        return self.packing.pack([flat[keys] for keys in self._by_stage[here[0]]])

    @cached_property
    def _by_stage(self) -> list[tuple[Keys, ...]]:
        blocks = {keys: self.block_of(keys) for keys in self.flat_shapes}
        return [
            tuple(keys for keys, block in blocks.items() if block in self.stages.blocks_of(stage))
            for stage in range(self.stages.num_stages)
        ]


def storage_for(
    stages: Stages, shapes: PyTree, frozen: frozenset[Keys] = frozenset()
) -> ModelStorage:
    """The storage for the blocks of a model: rows of blocks where they are equal, else vectors."""
    flat = flatten(shapes)
    forms = [
        [
            (keys[len(block) :], leaf.shape, leaf.dtype)
            for keys, leaf in flat.items()
            if keys[: len(block)] == block and not stages.is_shared(keys)
        ]
        for block in stages.blocks
    ]
    kind = RowStorage if all(other == forms[0] for other in forms) else FlatStorage
    return kind(stages, shapes, frozen)
