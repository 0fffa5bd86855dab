"""The storage of a pipelined model's parameters: each rank has those of its stages alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

import jax
import jax.numpy as jnp

from ..core.tree import combine
from ..core.typing import Array, Keys, PyTree
from .layout import Stages, flatten, nest
from .tables import Packing

Cell: TypeAlias = tuple[int, int]
"""A rank and one of its rows."""


class ModelStorage:
    """A form of a model's parameters in which every rank has those of its stages alone.

    Parameters outside the blocks stay as they are. Those of blocks are stored in rows: lists of
    arrays whose dim 0 counts ranks and is sharded over the pipeline axis.

    Where blocks are equal, row r stacks block r of every rank. Rows are separate arrays, so that no
    stage has to copy its weights out of a larger one. A row keeps the path of the block of that
    number, and stands for one such block on each rank; a rank with fewer blocks has zeros there.

    Where blocks differ, a row is all of a chunk: the leaves of a stage as they are where stages are
    alike, else one vector per dtype, as long as the largest stage needs; smaller ones end in zeros.

    Args:
        stages: blocks, stages and ranks.
        shapes: nested dict of `ShapeDtypeStruct`, the parameters of the model.
        frozen: the keys of those that are not trained, which a state keeps in a tree of their own.
        by_blocks: whether rows are of blocks; None takes them where blocks are equal.

    Attributes:
        flat_shapes: the shape and dtype of every leaf, by keys.
        block_of: the block of every leaf that is in one; all ranks have the others.
        rest: the keys of these others, in the order of the model's leaves.
        chunk_rows: the numbers of the rows that contain each chunk.
        cells: the rank and the row of each block.
        by_stage: the keys of the leaves of each stage.
        packing: how these become vectors; None where rows are of blocks.
        row_names: the keys of the stored leaves that are rows, row by row.
        row_keys: all of them.
        slots: for each leaf in a block, the stored leaf that has it as the rank's entry; leaves in
            vectors have none.
        vectors: by chunk and number, the leaves in a vector on each rank, in order.
        leaves: the keys of the leaves within a block; of blocks that differ, within the first.
        trained: the storage of what is trained alone.
        untrained: the storage of what is frozen alone; None where nothing is.
    """

    def __init__(
        self,
        stages: Stages,
        shapes: PyTree,
        frozen: frozenset[Keys] = frozenset(),
        by_blocks: bool | None = None,
    ):
        self.stages: Stages = stages
        self.shapes: PyTree = shapes
        self.frozen: frozenset[Keys] = frozen
        self.flat_shapes: dict[Keys, jax.ShapeDtypeStruct] = flatten(shapes)
        numbers = {block: number for number, block in enumerate(stages.blocks)}
        self.block_of: dict[Keys, int] = {}
        leaves: list[list[Keys]] = [[] for _ in stages.blocks]
        for keys in self.flat_shapes:
            beginnings = [keys[:end] for end in range(len(keys) + 1)]
            around = [numbers[beginning] for beginning in beginnings if beginning in numbers]
            if around and not any(beginning in stages.shared for beginning in beginnings):
                self.block_of[keys] = min(around)
                leaves[min(around)].append(keys)
        self.rest: tuple[Keys, ...] = tuple(k for k in self.flat_shapes if k not in self.block_of)
        if by_blocks is None:
            forms = [
                [
                    (keys[len(block) :], self.flat_shapes[keys].shape, self.flat_shapes[keys].dtype)
                    for keys in of_block
                ]
                for block, of_block in zip(stages.blocks, leaves, strict=True)
            ]
            by_blocks = all(form == forms[0] for form in forms)
        self.by_blocks: bool = by_blocks
        self.leaves: list[Keys] = [
            keys[len(block) :]
            for block, of_block in zip(stages.blocks[:1], leaves, strict=False)
            for keys in of_block
        ]
        self.packing: Packing | None = None
        self.slots: dict[Keys, Keys] = {}
        self.vectors: dict[tuple[int, int], list[tuple[Keys, ...]]] = {}
        if by_blocks:
            self._lay_blocks(leaves)
        else:
            self._lay_chunks()
        self.row_keys: tuple[Keys, ...] = tuple(keys for row in self.row_names for keys in row)
        self.trained: ModelStorage = self
        self.untrained: ModelStorage | None = None
        if frozen:
            flat = self.flat_shapes.items()
            self.trained = self.like(nest({keys: x for keys, x in flat if keys not in frozen}))
            self.untrained = self.like(nest({keys: x for keys, x in flat if keys in frozen}))

    def _lay_blocks(self, leaves: Sequence[Sequence[Keys]]) -> None:
        """A row for each block of a chunk's longest stage."""
        stages, first = self.stages, 0
        self.chunk_rows: list[range] = []
        for chunk in range(stages.num_chunks):
            size = max(len(stages.blocks_of(stage)) for stage in stages.stages_of(chunk))
            self.chunk_rows.append(range(first, first + size))
            first += size
        self.cells: list[Cell] = []
        self.by_stage: list[list[Keys]] = []
        # Some blocks have no leaf where others have one, in the state of an optimizer.
        rows: list[dict[Keys, None]] = [{} for _ in range(first)]
        for stage, rank in enumerate(stages.placement):
            blocks, numbers = stages.blocks_of(stage), self.chunk_rows[stages.chunk_of(stage)]
            self.by_stage.append([keys for block in blocks for keys in leaves[block]])
            for block, row in zip(blocks, numbers, strict=False):
                self.cells.append((rank, row))
                inner = [keys[len(stages.blocks[block]) :] for keys in leaves[block]]
                slots = [stages.blocks[row] + keys for keys in inner]
                rows[row].update(dict.fromkeys(slots))
                self.slots.update(zip(leaves[block], slots, strict=True))
        self.row_names: list[list[Keys]] = [list(row) for row in rows]

    def _lay_chunks(self) -> None:
        """A row for each chunk."""
        stages, chunks = self.stages, range(self.stages.num_chunks)
        self.chunk_rows = [range(chunk, chunk + 1) for chunk in chunks]
        at = [stages.stage_of(block) for block in range(len(stages.blocks))]
        self.cells = [(stages.placement[stage], stages.chunk_of(stage)) for stage in at]
        self.by_stage = [[] for _ in stages.placement]
        for keys, block in self.block_of.items():
            self.by_stage[at[block]].append(keys)
        packing = Packing([[self.flat_shapes[k] for k in of_stage] for of_stage in self.by_stage])
        forms = [("vector", str(number)) for number in range(len(packing.packed))]
        self.row_names = [
            [("stages", f"chunk{chunk}", *form) for form in forms] for chunk in chunks
        ]
        self.packing = packing
        if packing.is_uniform:
            for stage, leaves in enumerate(self.by_stage):
                self.slots.update(zip(leaves, self.row_names[stages.chunk_of(stage)], strict=True))
            return
        for chunk in chunks:
            on_rank = {stages.placement[s]: self.by_stage[s] for s in stages.stages_of(chunk)}
            for number, form in enumerate(packing.packed):
                alike = {k for k, x in self.flat_shapes.items() if x.dtype == form.dtype}
                ranks = [on_rank.get(rank, ()) for rank in range(stages.num_devices)]
                self.vectors[chunk, number] = [
                    tuple(keys for keys in leaves if keys in alike) for leaves in ranks
                ]

    def like(self, shapes: PyTree) -> ModelStorage:
        """The same stages' storage of a tree with leaves of the model, of any shapes.

        Args:
            shapes: nested dict of `ShapeDtypeStruct`, at keys that begin with those of leaves of
                the model, which need not all be there.
        """
        return ModelStorage(self.stages, shapes, by_blocks=self.by_blocks)

    def from_model(self, params: PyTree) -> PyTree:
        """The stored form of a model's parameters.

        Args:
            params: the model's own nested dict.

        Returns:
            The stored tree: what is in no block as it was, and rows.
        """
        flat, ranks = flatten(params), range(self.stages.num_devices)
        stored = {keys: flat[keys] for keys in self.rest}
        if self.packing is not None:
            for chunk, names in enumerate(self.row_names):
                packed = [self.packed(flat, chunk, rank) for rank in ranks]
                for number, name in enumerate(names):
                    stored[name] = jnp.stack([vectors[number] for vectors in packed])
            return nest(stored)
        entries: dict[Keys, dict[int, Array]] = {name: {} for name in self.row_keys}
        for keys, slot in self.slots.items():
            entries[slot][self.cells[self.block_of[keys]][0]] = flat[keys]
        for name, by_rank in entries.items():
            like = next(iter(by_rank.values()))
            empty = [r for r in ranks if r not in by_rank]
            by_rank |= {r: jnp.zeros(like.shape, like.dtype) for r in empty}
            stored[name] = jnp.stack([by_rank[r] for r in ranks])
        return nest(stored)

    def to_model(self, stored: PyTree) -> PyTree:
        """The inverse of `from_model`, exactly."""
        flat = flatten(stored)
        params = {keys: flat[keys] for keys in self.rest}
        if self.packing is None:
            for keys, slot in self.slots.items():
                params[keys] = flat[slot][self.cells[self.block_of[keys]][0]]
            return nest(params)
        for stage, rank in enumerate(self.stages.placement):
            names = self.row_names[self.stages.chunk_of(stage)]
            params |= self.block_weights(stage, [[flat[name][rank] for name in names]])
        return nest(params)

    def store(self, params: PyTree) -> tuple[PyTree, PyTree]:
        """The stored forms of what is trained and of what is frozen of a model's parameters."""
        if self.untrained is None:
            return self.from_model(params), {}
        flat = flatten(params)
        frozen = nest({keys: flat.pop(keys) for keys in [*flat] if keys in self.frozen})
        return self.trained.from_model(nest(flat)), self.untrained.from_model(frozen)

    def restore(self, params: PyTree, frozen: PyTree) -> PyTree:
        """The inverse of `store`, exactly."""
        if self.untrained is None:
            return self.to_model(params)
        return combine(self.trained.to_model(params), self.untrained.to_model(frozen))

    def packed(self, flat: Mapping[Keys, Array], chunk: int, rank: int) -> list[Array]:
        """What a rank has of a chunk in rows of chunks, zeros where it has none.

        Args:
            flat: leaves by their keys in the model.
            chunk: which of the rank's.
            rank: of the pipeline axis.
        """
        assert self.packing is not None
        for stage in self.stages.stages_of(chunk):
            if self.stages.placement[stage] == rank:
                return self.packing.pack([flat[keys] for keys in self.by_stage[stage]])
        return [jnp.zeros(form.shape, form.dtype) for form in self.packing.packed]

    def block_weights(self, stage: int, rows: Sequence[Sequence[PyTree]]) -> dict[Keys, Array]:
        """The leaves of the blocks of a stage, by their keys in the model.

        Args:
            stage: which.
            rows: the rows of its chunk, of one rank, without dim 0; of each what is trained, and
                behind it what is frozen.
        """
        numbers = self.chunk_rows[self.stages.chunk_of(stage)]
        if self.untrained is not None:
            ends = [len(self.trained.row_names[number]) for number in numbers]
            split = list(zip(rows, ends, strict=True))
            frozen = self.untrained.block_weights(stage, [row[end:] for row, end in split])
            return self.trained.block_weights(stage, [row[:end] for row, end in split]) | frozen
        if self.packing is not None:
            leaves = self.packing.unpack(stage, rows[0])
            return dict(zip(self.by_stage[stage], leaves, strict=True))
        named: dict[Keys, Array] = {}
        for number, row in zip(numbers, rows, strict=True):
            named.update(zip(self.row_names[number], row, strict=True))
        return {keys: named[self.slots[keys]] for keys in self.by_stage[stage]}

    def leaves_at(self, row: int, values: Sequence[Array], stage: Array) -> list[Array]:
        """The leaves of the block that a stage has in a row of blocks, in the order of `leaves`.

        Args:
            row: which.
            values: of it, of one rank; what is trained, and behind it what is frozen.
            stage: which, known when it runs.
        """
        if self.untrained is None:
            return list(values)
        names = self.trained.row_names[row], self.untrained.row_names[row]
        trained = dict(zip(names[0], values, strict=False))
        frozen = dict(zip(names[1], values[len(names[0]) :], strict=True))
        cells = {cell: self.stages.blocks[number] for number, cell in enumerate(self.cells)}
        here = [cells.get((rank, row)) for rank in self.stages.placement]
        leaves = []
        for leaf in self.leaves:
            keys = self.stages.blocks[row] + leaf
            if keys not in trained or keys not in frozen:
                leaves.append((trained if keys in trained else frozen)[keys])
                continue
            is_frozen = [block is not None and block + leaf in self.frozen for block in here]
            leaves.append(jnp.where(jnp.asarray(is_frozen)[stage], frozen[keys], trained[keys]))
        return leaves

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
