"""Which blocks of a model make a stage, and on which rank of the pipeline it is."""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Collection
from functools import cached_property
from itertools import accumulate
from typing import Any, Self, TypeAlias

import jax

from ..core.typing import PyTree
from ..schedule import Schedule, stage_ranges
from .calls import Calls

Keys: TypeAlias = tuple[Any, ...]
"""The keys of nested dicts on the way to a leaf or a module."""


def flatten(tree: PyTree) -> dict[Keys, Any]:
    """Nested dicts as one dict by keys, in the order of `jax.tree.leaves`."""
    paths = jax.tree_util.tree_leaves_with_path(tree)
    return {tuple(entry.key for entry in path): leaf for path, leaf in paths}


def keys_of(tree: PyTree) -> dict[Keys, Any]:
    """The leaves of any tree by keys, names and positions, in the order of `jax.tree.leaves`."""
    name = lambda entry: next(
        getattr(entry, kind) for kind in ("key", "idx", "name") if hasattr(entry, kind)
    )
    paths = jax.tree_util.tree_leaves_with_path(tree)
    return {tuple(map(name, path)): leaf for path, leaf in paths}


def is_like(tree: Any, top: Collection[Any], names: Collection[Keys]) -> bool:
    """Whether a tree is a dict like the parameters of a model, with all leaves at or below these.

    Args:
        tree: any.
        top: the outermost keys of the parameters.
        names: the keys of all parameters.
    """
    if not isinstance(tree, dict) or set(tree) != set(top):
        return False
    found = keys_of(tree)
    return bool(found) and all(
        any(keys[:end] in names for end in range(1, len(keys) + 1)) for keys in found
    )


def nest(flat: dict[Keys, Any]) -> PyTree:
    """The inverse of `flatten`."""
    tree: dict[Any, Any] = {}
    for keys, leaf in flat.items():
        node = tree
        for key in keys[:-1]:
            node = node.setdefault(key, {})
        node[keys[-1]] = leaf
    return tree


@dataclasses.dataclass(frozen=True)
class Stages:
    """Which blocks make a stage, and which rank has it.

    A block lies on the rank that calls it, with the first of the stages that do. What several ranks
    call lies on all of them, as what is outside the blocks does.

    Args:
        blocks: the keys of every block that one rank has, in the order of the stages.
        boundaries: stage `s` has blocks `boundaries[s]` to `boundaries[s + 1]`, maybe none.
        placement: the rank of each stage.
        num_devices: ranks along the pipeline; some may have no stage.
        shared: the keys of blocks, and of what is within blocks, that all ranks have.
        depths: stage `s` runs the calls of depths `depths[s]` to `depths[s + 1]`; None where each
            block is called in its own stage alone.

    Example:
        >>> stages = Stages((("layers", 0), ("layers", 1), ("layers", 2)), (0, 2, 3), (0, 1), 2)
        >>> stages.num_rows(0), stages.home(2)
        (2, (1, 0))
    """

    blocks: tuple[Keys, ...]
    boundaries: tuple[int, ...]
    placement: tuple[int, ...]
    num_devices: int
    shared: tuple[Keys, ...] = ()
    depths: tuple[int, ...] | None = None

    @classmethod
    def of(cls, schedule: Schedule, blocks: tuple[Keys, ...], boundaries: tuple[int, ...]) -> Self:
        """The stages of a schedule."""
        return cls(blocks, boundaries, schedule.placement, schedule.num_devices)

    @classmethod
    def by_calls(
        cls, schedule: Schedule, blocks: tuple[Keys, ...], calls: Calls, depths: tuple[int, ...]
    ) -> Stages:
        """The stages of a schedule that runs blocks where a loss calls them.

        Args:
            schedule: says where stages lie.
            blocks: the keys of every block, in the order of the model.
            calls: of the blocks.
            depths: the first depth of each stage, and the number of depths.

        Returns:
            The stages.
        """
        used = [set[int]() for _ in blocks]
        for owners, depth in zip(calls.owners, calls.depths, strict=True):
            for number in owners:
                used[number].add(bisect.bisect_right(depths, depth) - 1)
        ranks = [{schedule.placement[stage] for stage in stages} for stages in used]
        own = [number for number, found in enumerate(ranks) if len(found) == 1]
        own.sort(key=lambda number: min(used[number]))
        counts = [sum(min(used[n]) == stage for n in own) for stage in range(len(depths) - 1)]
        return dataclasses.replace(
            cls.of(schedule, tuple(blocks[n] for n in own), (0, *accumulate(counts))),
            shared=tuple(block for n, block in enumerate(blocks) if n not in own),
            depths=depths,
        )

    @property
    def called(self) -> tuple[Keys, ...]:
        """The keys of all blocks, and of what they share."""
        return (*self.blocks, *self.shared)

    def is_shared(self, keys: Keys) -> bool:
        """Whether all ranks have a leaf of the model that may be in a block."""
        return any(keys[: len(each)] == each for each in self.shared)

    def stage_at(self, depth: int) -> int:
        """The stage that runs the calls of a depth."""
        assert self.depths is not None
        return min(bisect.bisect_right(self.depths, depth), self.num_stages) - 1

    @property
    def num_stages(self) -> int:
        """Stages through the whole model."""
        return len(self.placement)

    @property
    def num_chunks(self) -> int:
        """Stages that one rank holds, at most."""
        return max(self.placement.count(device) for device in range(self.num_devices))

    def blocks_of(self, stage: int) -> range:
        """The blocks of a stage."""
        return stage_ranges(self.boundaries)[stage]

    def chunk_of(self, stage: int) -> int:
        """The position of a stage among those of its rank."""
        return self.placement[:stage].count(self.placement[stage])

    def stages_of(self, chunk: int) -> tuple[int, ...]:
        """The stages that are the given chunk of their rank."""
        return tuple(s for s in range(self.num_stages) if self.chunk_of(s) == chunk)

    def num_rows(self, chunk: int) -> int:
        """Rows that every rank has for a chunk: as many as its longest stage has blocks."""
        return max(len(self.blocks_of(stage)) for stage in self.stages_of(chunk))

    def first_row(self, chunk: int) -> int:
        """The first row of a chunk."""
        return sum(self.num_rows(before) for before in range(chunk))

    def stage_of(self, block: int) -> int:
        """The stage of a block."""
        return next(s for s in range(self.num_stages) if block in self.blocks_of(s))

    def home(self, block: int) -> tuple[int, int]:
        """The rank and the row of a block."""
        return self._homes[block]

    def block_at(self, device: int, row: int) -> int | None:
        """The block of a rank in a row, or None where the rank has fewer blocks."""
        return self._blocks_at.get((device, row))

    @cached_property
    def _homes(self) -> tuple[tuple[int, int], ...]:
        """The rank and the row of every block."""
        found = []
        for stage, blocks in enumerate(stage_ranges(self.boundaries)):
            first = self.first_row(self.chunk_of(stage)) if blocks else 0
            found += [(self.placement[stage], first + number) for number in range(len(blocks))]
        return tuple(found)

    @cached_property
    def _blocks_at(self) -> dict[tuple[int, int], int]:
        """The block at a rank and a row."""
        return {home: block for block, home in enumerate(self._homes)}
