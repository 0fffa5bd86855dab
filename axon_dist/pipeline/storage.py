"""How a pipeline stores the parameters of a model: each rank has only those of its stages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

from ..core.tree import combine
from ..core.typing import Array, Keys, PyTree, Shape
from .layout import Stages, flatten, nest
from .tables import Packing

RankRow: TypeAlias = tuple[int, int]
"""A rank and one of its rows."""


class StageStorage:
    """How each rank of a pipeline stores the parameters of its stages, and no others.

    Parameters outside the blocks are stored unchanged. Those of blocks are stored in rows: lists of
    arrays whose dim 0 counts ranks and is sharded over the pipeline axis.

    If all blocks have equal leaves, row r stacks block r of every rank. Rows are separate arrays,
    so that no stage has to copy its weights out of a larger one. A row has the path of the model's
    block r; a rank with fewer blocks has zeros there.

    If blocks differ, a row is a whole chunk. It consists of the leaves of a stage if all stages
    have equal leaves. Otherwise it is one vector per dtype, long enough for the largest stage;
    smaller stages are padded with zeros.

    Args:
        stages: blocks, stages and ranks.
        shapes: nested dict of `ShapeDtypeStruct`, the parameters of the model.
        frozen: the keys of the parameters that are not trained, which a state keeps in a separate
            tree.
        by_blocks: whether each row holds blocks rather than chunks; None: if blocks are equal.

    Attributes:
        flat_shapes: the shape and dtype of every leaf, by keys.
        block_of: the block of every leaf that is in a block; other leaves are on all ranks.
        rest: the keys of the leaves outside the blocks, in the order of the model's leaves.
        chunk_rows: the numbers of the rows that contain each chunk.
        rank_rows: the rank and the row of each block.
        by_stage: the keys of the leaves of each stage.
        packing: how the leaves of a stage become stored leaves: vectors, if stages differ; None if
            rows hold blocks.
        row_names: the keys of the stored leaves of each row.
        row_keys: the keys of the stored leaves of all rows.
        stored_leaf_of: for each leaf in a block, the stored leaf that contains it; leaves in
            vectors have none.
        vectors: the leaves in each vector on each rank, in order, by chunk and vector number.
        leaves: the keys of the leaves within a block; if blocks differ, within the first.
        trained: the storage of the trained parameters alone.
        untrained: the storage of the frozen parameters alone; None if none are frozen.
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
            prefixes = [keys[:end] for end in range(len(keys) + 1)]
            parents = [numbers[prefix] for prefix in prefixes if prefix in numbers]
            if parents and not any(prefix in stages.shared for prefix in prefixes):
                self.block_of[keys] = min(parents)
                leaves[min(parents)].append(keys)
        self.rest: tuple[Keys, ...] = tuple(k for k in self.flat_shapes if k not in self.block_of)
        if by_blocks is None:
            by_blocks = self._has_equal_blocks(leaves)
        self.by_blocks: bool = by_blocks
        self.leaves: list[Keys] = []
        if stages.blocks:
            self.leaves = [keys[len(stages.blocks[0]) :] for keys in leaves[0]]
        self.packing: Packing | None = None
        self.stored_leaf_of: dict[Keys, Keys] = {}
        self.vectors: dict[tuple[int, int], list[tuple[Keys, ...]]] = {}
        if by_blocks:
            self._lay_blocks(leaves)
        else:
            self._lay_chunks()
        self.row_keys: tuple[Keys, ...] = tuple(keys for row in self.row_names for keys in row)
        self.trained: StageStorage = self
        self.untrained: StageStorage | None = None
        if frozen:
            flat = self.flat_shapes.items()
            self.trained = self.like(nest({keys: x for keys, x in flat if keys not in frozen}))
            self.untrained = self.like(nest({keys: x for keys, x in flat if keys in frozen}))

    def _has_equal_blocks(self, leaves: Sequence[Sequence[Keys]]) -> bool:
        """Whether all blocks have leaves of the same keys, shapes and dtypes."""

        def form_of(block: Keys, keys: Keys) -> tuple[Keys, Shape, Any]:
            leaf = self.flat_shapes[keys]
            return keys[len(block) :], leaf.shape, leaf.dtype

        pairs = zip(self.stages.blocks, leaves, strict=True)
        forms = [[form_of(block, keys) for keys in of_block] for block, of_block in pairs]
        return all(form == forms[0] for form in forms)

    def _lay_blocks(self, leaves: Sequence[Sequence[Keys]]) -> None:
        """Creates a row for each block of a chunk's longest stage."""
        stages = self.stages
        first = 0
        self.chunk_rows: list[range] = []
        for chunk in range(stages.num_chunks):
            size = max(len(stages.blocks_of(stage)) for stage in stages.stages_of(chunk))
            self.chunk_rows.append(range(first, first + size))
            first += size
        self.rank_rows: list[RankRow] = []
        self.by_stage: list[list[Keys]] = []
        # In an optimizer's state, some blocks may lack a leaf that others have.
        rows: list[dict[Keys, None]] = [{} for _ in range(first)]
        for stage, rank in enumerate(stages.placement):
            blocks = stages.blocks_of(stage)
            numbers = self.chunk_rows[stages.chunk_of(stage)]
            self.by_stage.append([keys for block in blocks for keys in leaves[block]])
            for block, row in zip(blocks, numbers, strict=False):
                self.rank_rows.append((rank, row))
                inner = [keys[len(stages.blocks[block]) :] for keys in leaves[block]]
                stored = [stages.blocks[row] + keys for keys in inner]
                rows[row].update(dict.fromkeys(stored))
                self.stored_leaf_of.update(zip(leaves[block], stored, strict=True))
        self.row_names: list[list[Keys]] = [list(row) for row in rows]

    def _lay_chunks(self) -> None:
        """Creates a row for each chunk."""
        stages = self.stages
        chunks = range(stages.num_chunks)
        self.chunk_rows = [range(chunk, chunk + 1) for chunk in chunks]
        stage_of = [stages.stage_of(block) for block in range(len(stages.blocks))]
        self.rank_rows = [(stages.placement[stage], stages.chunk_of(stage)) for stage in stage_of]
        self.by_stage = [[] for _ in stages.placement]
        for keys, block in self.block_of.items():
            self.by_stage[stage_of[block]].append(keys)
        packing = Packing([[self.flat_shapes[k] for k in of_stage] for of_stage in self.by_stage])
        forms = [("vector", str(number)) for number in range(len(packing.packed))]
        self.row_names = [
            [("stages", f"chunk{chunk}", *form) for form in forms] for chunk in chunks
        ]
        self.packing = packing
        if packing.is_uniform:
            for stage, leaves in enumerate(self.by_stage):
                self.stored_leaf_of.update(
                    zip(leaves, self.row_names[stages.chunk_of(stage)], strict=True)
                )
            return
        for chunk in chunks:
            on_rank = {stages.placement[s]: self.by_stage[s] for s in stages.stages_of(chunk)}
            for number, form in enumerate(packing.packed):
                same_dtype = {k for k, x in self.flat_shapes.items() if x.dtype == form.dtype}
                ranks = [on_rank.get(rank, ()) for rank in range(stages.num_devices)]
                self.vectors[chunk, number] = [
                    tuple(keys for keys in leaves if keys in same_dtype) for leaves in ranks
                ]

    def like(self, shapes: PyTree) -> StageStorage:
        """Returns the storage, in the same stages, of a tree like the parameters.

        Args:
            shapes: nested dict of `ShapeDtypeStruct` of any shapes. Its keys begin with those of
                leaves of the model; some leaves may be missing.
        """
        return StageStorage(self.stages, shapes, by_blocks=self.by_blocks)

    def from_model(self, params: PyTree) -> PyTree:
        """Returns the stored form of a model's parameters.

        Args:
            params: the model's own nested dict.

        Returns:
            The stored tree: the leaves outside the blocks, and the rows.
        """
        flat = flatten(params)
        ranks = range(self.stages.num_devices)
        stored = {keys: flat[keys] for keys in self.rest}
        if self.packing is not None:
            for chunk, names in enumerate(self.row_names):
                packed = [self.packed(flat, chunk, rank) for rank in ranks]
                for number, name in enumerate(names):
                    stored[name] = jnp.stack([vectors[number] for vectors in packed])
            return nest(stored)
        entries: dict[Keys, dict[int, Array]] = {name: {} for name in self.row_keys}
        for keys, stored_leaf in self.stored_leaf_of.items():
            entries[stored_leaf][self.rank_rows[self.block_of[keys]][0]] = flat[keys]
        for name, by_rank in entries.items():
            like = next(iter(by_rank.values()))
            empty = [r for r in ranks if r not in by_rank]
            by_rank |= {r: jnp.zeros(like.shape, like.dtype) for r in empty}
            stored[name] = jnp.stack([by_rank[r] for r in ranks])
        return nest(stored)

    def to_model(self, stored: PyTree) -> PyTree:
        """Inverts `from_model` exactly."""
        flat = flatten(stored)
        params = {keys: flat[keys] for keys in self.rest}
        if self.packing is None:
            for keys, stored_leaf in self.stored_leaf_of.items():
                params[keys] = flat[stored_leaf][self.rank_rows[self.block_of[keys]][0]]
            return nest(params)
        for stage, rank in enumerate(self.stages.placement):
            names = self.row_names[self.stages.chunk_of(stage)]
            params |= self.block_weights(stage, [[flat[name][rank] for name in names]])
        return nest(params)

    def store(self, params: PyTree) -> tuple[PyTree, PyTree]:
        """Returns the stored forms of the trained and of the frozen parameters."""
        if self.untrained is None:
            return self.from_model(params), {}
        flat = flatten(params)
        frozen = nest({keys: flat.pop(keys) for keys in [*flat] if keys in self.frozen})
        return self.trained.from_model(nest(flat)), self.untrained.from_model(frozen)

    def restore(self, params: PyTree, frozen: PyTree) -> PyTree:
        """Inverts `store` exactly."""
        if self.untrained is None:
            return self.to_model(params)
        return combine(self.trained.to_model(params), self.untrained.to_model(frozen))

    def packed(self, flat: Mapping[Keys, Array], chunk: int, rank: int) -> list[Array]:
        """Returns the packed vectors of a rank's chunk; zeros if the rank has no such chunk.

        Args:
            flat: leaves by their keys in the model.
            chunk: the number of the rank's chunk.
            rank: the rank along the pipeline axis.
        """
        assert self.packing is not None
        for stage in self.stages.stages_of(chunk):
            if self.stages.placement[stage] == rank:
                return self.packing.pack([flat[keys] for keys in self.by_stage[stage]])
        return [jnp.zeros(form.shape, form.dtype) for form in self.packing.packed]

    def block_weights(self, stage: int, rows: Sequence[Sequence[PyTree]]) -> dict[Keys, Array]:
        """Returns the leaves of the blocks of a stage, by their keys in the model.

        Args:
            stage: the number of the stage.
            rows: the rows of its chunk on one rank, without dim 0; in each row the trained leaves,
                then the frozen ones.
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
        return {keys: named[self.stored_leaf_of[keys]] for keys in self.by_stage[stage]}

    def leaves_at(self, row: int, values: Sequence[Array], stage: Array) -> list[Array]:
        """Returns the leaves of the block that a stage has in a row, in the order of `leaves`.

        Args:
            row: the number of the row.
            values: the leaves of the row on one rank: the trained ones, then the frozen ones.
            stage: the number of the stage, a traced value.
        """
        if self.untrained is None:
            return list(values)
        trained_names = self.trained.row_names[row]
        frozen_names = self.untrained.row_names[row]
        trained = dict(zip(trained_names, values, strict=False))
        frozen = dict(zip(frozen_names, values[len(trained_names) :], strict=True))
        block_at = {
            rank_row: self.stages.blocks[number] for number, rank_row in enumerate(self.rank_rows)
        }
        blocks = [block_at.get((rank, row)) for rank in self.stages.placement]
        leaves = []
        for leaf in self.leaves:
            keys = self.stages.blocks[row] + leaf
            if keys not in trained or keys not in frozen:
                leaves.append((trained if keys in trained else frozen)[keys])
                continue
            # The leaf is frozen in some blocks of this row and trained in others.
            is_frozen = [block is not None and block + leaf in self.frozen for block in blocks]
            leaves.append(jnp.where(jnp.asarray(is_frozen)[stage], frozen[keys], trained[keys]))
        return leaves

    def rows_of(self, stored: PyTree) -> list[list[PyTree]]:
        """Returns the leaves of every row; None for leaves that the tree lacks."""
        flat = flatten(stored)
        return [[flat.get(keys) for keys in row] for row in self.row_names]

    def rest_of(self, stored: PyTree) -> list[PyTree]:
        """Returns the leaves outside the blocks, in the order of `rest`; None for missing ones."""
        flat = flatten(stored)
        return [flat.get(keys) for keys in self.rest]

    def assemble(self, rows: Sequence[Sequence[PyTree]], rest: Sequence[PyTree]) -> PyTree:
        """Returns the stored tree of the trained rows and the rest, without None leaves."""
        flat = dict(zip(self.rest, rest, strict=True))
        for names, leaves in zip(self.trained.row_names, rows, strict=True):
            flat.update(zip(names, leaves, strict=True))
        return nest({keys: leaf for keys, leaf in flat.items() if leaf is not None})
