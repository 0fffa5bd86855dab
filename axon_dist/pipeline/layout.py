"""Assigns the blocks of a model to stages and ranks, and lays out their parameters.

A model may keep equal blocks in one module. A pipeline then treats the leaf `blocks/kernel` of
shape [L, ...] as L leaves `blocks/0/kernel`, ... The pipeline's storage, stages and optimizer work
on these unstacked leaves (`Stacks`); the model and the user's optimizer see the stacked leaves.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jax.tree_util import KeyPath

from ..core.errors import StrategyConflictError
from ..core.tree import path_str
from ..core.typing import Keys, Path, PyTree, Shape
from ..ir.rows import Stacked, whole
from ..sharding import Decision, HasShape, LargestDim, Merge, Policy, Replicate, Wrapped, axes_of


def flatten(tree: PyTree) -> dict[Keys, PyTree]:
    """Returns the leaves by their keys, in the order of `jax.tree.leaves`.

    Keys are dict keys, attribute names and positions in sequences.
    """

    def key_of(entry: Any) -> Any:
        kinds = ("key", "idx", "name")
        return next(getattr(entry, kind) for kind in kinds if hasattr(entry, kind))

    leaves = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        leaves[tuple(map(key_of, path))] = leaf
    return leaves


def nest(flat: dict[Keys, PyTree]) -> PyTree:
    """Inverts `flatten` for nested dicts."""
    tree: PyTree = {}
    for keys, leaf in flat.items():
        node = tree
        for key in keys[:-1]:
            node = node.setdefault(key, {})
        node[keys[-1]] = leaf
    return tree


class ParamLike:
    """A tree with parts that are like a model's parameters, such as the moments of an optimizer.

    A part is like the parameters if it is a dict with their outermost keys, and all its leaves are
    at or below the keys of parameters.

    Args:
        params: nested dict of the parameters, of any leaves.
        shapes: the tree.
    """

    def __init__(self, params: PyTree, shapes: PyTree):
        self._top = params.keys()
        self._names = frozenset(flatten(params))
        parts, self.outer = jax.tree.flatten(shapes, is_leaf=self._is_like)
        self.keys: list[list[Keys]] = [list(flatten(part)) for part in parts]
        self._inner = [jax.tree.structure(part) for part in parts]
        self._like = [self._is_like(part) for part in parts]

    def split(self, tree: PyTree) -> list[tuple[PyTree, bool]]:
        """Returns each part and whether it is like the parameters; those parts are nested dicts."""
        parts = zip(self.outer.flatten_up_to(tree), self._like, self.keys, strict=True)
        return [
            (nest(dict(zip(keys, jax.tree.leaves(part), strict=True))) if like else part, like)
            for part, like, keys in parts
        ]

    def join(self, parts: Sequence[PyTree]) -> PyTree:
        """Inverts `split`; takes the parts alone."""
        subtrees = list(parts)
        for number, part in enumerate(parts):
            if self._like[number]:
                flat = flatten(part)
                leaves = (flat[keys] for keys in self.keys[number])
                subtrees[number] = self._inner[number].unflatten(leaves)
        return self.outer.unflatten(subtrees)

    def _is_like(self, tree: PyTree) -> bool:
        if not isinstance(tree, dict) or set(tree) != set(self._top):
            return False
        leaves = flatten(tree)
        return bool(leaves) and all(
            any(keys[:end] in self._names for end in range(1, len(keys) + 1)) for keys in leaves
        )


@dataclasses.dataclass(frozen=True)
class Stages:
    """Assigns blocks to stages, and stages to ranks.

    A block is stored on the rank that calls it, in the first stage that calls it. A block that
    several ranks call is replicated on all ranks, like the parameters outside the blocks.

    Args:
        blocks: the keys of every block that is stored on one rank, in the order of the stages.
        boundaries: stage `s` has blocks `boundaries[s]` to `boundaries[s + 1]`, possibly none.
        placement: the rank of each stage.
        num_devices: the number of ranks along the pipeline; some may have no stage.
        shared: the keys of blocks, and of modules within blocks, that are replicated on all ranks.
        depths: stage `s` runs the calls of depths `depths[s]` to `depths[s + 1]`; None if each
            block is called only in its own stage.

    Example:
        >>> stages = Stages((("layers", 0), ("layers", 1), ("layers", 2)), (0, 2, 3), (0, 1), 2)
        >>> stages.blocks_of(0), stages.stage_of(2)
        (range(0, 2), 1)
    """

    blocks: tuple[Keys, ...]
    boundaries: tuple[int, ...]
    placement: tuple[int, ...]
    num_devices: int
    shared: tuple[Keys, ...] = ()
    depths: tuple[int, ...] | None = None

    @property
    def called(self) -> tuple[Keys, ...]:
        """The keys of all blocks and of the modules that they share."""
        return (*self.blocks, *self.shared)

    def stage_at(self, depth: int) -> int:
        """Returns the stage that runs the calls of a depth."""
        assert self.depths is not None
        return min(bisect.bisect_right(self.depths, depth), self.num_stages) - 1

    @property
    def num_stages(self) -> int:
        """The number of stages of the whole model."""
        return len(self.placement)

    @property
    def num_chunks(self) -> int:
        """The largest number of stages on one rank."""
        return max(self.placement.count(device) for device in range(self.num_devices))

    def blocks_of(self, stage: int) -> range:
        """Returns the numbers of the blocks of a stage."""
        return range(*self.boundaries[stage : stage + 2])

    def chunk_of(self, stage: int) -> int:
        """Returns the position of a stage among the stages of its rank."""
        return self.placement[:stage].count(self.placement[stage])

    def stages_of(self, chunk: int) -> tuple[int, ...]:
        """Returns the stages that are the given chunk of their rank."""
        return tuple(s for s in range(self.num_stages) if self.chunk_of(s) == chunk)

    def stage_of(self, block: int) -> int:
        """Returns the stage of a block."""
        return next(s for s in range(self.num_stages) if block in self.blocks_of(s))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StackedBuffer:
    """A buffer of a stacked module, split into one row per block.

    Args:
        rows: one for each block.
    """

    rows: list[PyTree]


def has_split(buffers: PyTree) -> bool:
    """Whether any buffer has been split by `Stacks.split_buffers`."""
    return any(
        isinstance(leaf, StackedBuffer) for leaf in jax.tree.leaves(buffers, is_leaf=_is_split)
    )


def buffers_together(split: PyTree, stack: Callable[[list[PyTree]], PyTree] = jnp.stack) -> PyTree:
    """Inverts `Stacks.split_buffers`."""

    def restack(leaf):
        return stack(leaf.rows) if isinstance(leaf, StackedBuffer) else leaf

    return jax.tree.map(restack, split, is_leaf=_is_split)


def buffer_paths(buffers: PyTree) -> list[Path]:
    """Returns the path in the model of each leaf of a tree of buffers, split or not.

    Every row of a split buffer has the path of the buffer.

    Example:
        >>> buffer_paths({"a": StackedBuffer([1.0, 2.0]), "b": 3.0})
        ['a', 'a', 'b']
    """
    leaves = jax.tree_util.tree_leaves_with_path(buffers, is_leaf=_is_split)
    counted = ((path_str(path), len(jax.tree.leaves(leaf))) for path, leaf in leaves)
    return [path for path, count in counted for _ in range(count)]


def _is_split(leaf: object) -> bool:
    return isinstance(leaf, StackedBuffer)


@dataclasses.dataclass(frozen=True)
class Stacks:
    """The stacked modules of a model, whose leaves have one row per block.

    Args:
        counts: the keys of every stacked module, and its number of blocks.

    Example:
        >>> stacks = Stacks(((("blocks",), 2),))
        >>> split = stacks.unstack({"blocks": {"kernel": jnp.ones((2, 3))}})
        >>> [leaf.shape for leaf in flatten(split).values()], list(flatten(split))
        ([(3,), (3,)], [('blocks', 0, 'kernel'), ('blocks', 1, 'kernel')])
        >>> stacks.restack(split)["blocks"]["kernel"].shape
        (2, 3)
    """

    counts: tuple[tuple[Keys, int], ...] = ()

    def of(self, keys: Keys) -> tuple[Keys, int]:
        """Returns the stack that contains the keys and its number of blocks, or () and 0."""
        within = (item for item in self.counts if keys[: len(item[0])] == item[0])
        return next(within, ((), 0))

    def unstack(self, tree: PyTree, shapes: PyTree = None) -> PyTree:
        """Returns a nested dict like the model's, with stacked leaves split into one per block.

        Args:
            tree: leaves may be arrays, shapes or `Stacked`.
            shapes: a tree of the same structure whose shapes tell which leaves are stacked; `tree`
                by default. A leaf in a stack without a row per block is repeated for every block.
        """
        if not self.counts:
            return tree
        leaves: dict[Keys, PyTree] = {}
        flat_shapes = flatten(tree if shapes is None else shapes)
        for keys, leaf in flatten(tree).items():
            stack, count = self.of(keys)
            if not count:
                leaves[keys] = whole(leaf)
                continue
            if _is_stacked(flat_shapes[keys], count):
                rows = _rows(leaf, count)
            else:
                rows = [whole(leaf)] * count
            rest = keys[len(stack) :]
            for row, value in enumerate(rows):
                leaves[*stack, row, *rest] = value
        return nest(leaves)

    def restack(
        self,
        split: PyTree,
        stack: Callable[[list[PyTree]], PyTree] = jnp.stack,
        shapes: PyTree = None,
    ) -> PyTree:
        """Inverts `unstack`.

        Args:
            split: a nested dict.
            stack: combines the leaves of all blocks into one.
            shapes: the shapes of the result; None if each leaf in a stack has a row per block.
        """
        flat_shapes = None if shapes is None else flatten(shapes)
        grouped: dict[Keys, list[PyTree]] = {}
        for keys, leaf in flatten(split).items():
            grouped.setdefault(self.in_model(keys), []).append(leaf)

        def merge(keys: Keys, leaves: list[PyTree]) -> PyTree:
            _, count = self.of(keys)
            is_stacked = count and (flat_shapes is None or _is_stacked(flat_shapes[keys], count))
            return stack(leaves) if is_stacked else leaves[0]

        return nest({keys: merge(keys, leaves) for keys, leaves in grouped.items()})

    def split_buffers(self, buffers: PyTree) -> PyTree:
        """Splits the stacked float buffers of a model into one row per block (`StackedBuffer`).

        The state of random streams, such as keys and counts, is returned unchanged.
        """

        def split(path: KeyPath, leaf: PyTree) -> PyTree:
            _, count = self.of(tuple(getattr(entry, "key", None) for entry in path))
            form = leaf.struct if isinstance(leaf, Stacked) else leaf
            is_float = jnp.issubdtype(form.dtype, jnp.floating)
            if is_float and _is_stacked(leaf, count):
                return StackedBuffer(_rows(leaf, count))
            return leaf

        return jax.tree_util.tree_map_with_path(split, buffers)

    def in_model(self, keys: Keys) -> Keys:
        """Returns the keys of the model's leaf or module that contains the one of a block."""
        stack, count = self.of(keys)
        is_block = count and len(keys) > len(stack) and isinstance(keys[len(stack)], int)
        return (*stack, *keys[len(stack) + 1 :]) if is_block else keys


def _is_stacked(leaf: PyTree, count: int) -> bool:
    shape = (leaf.struct if isinstance(leaf, Stacked) else leaf).shape
    return count > 0 and len(shape) > 0 and shape[0] == count


def _rows(leaf: PyTree, count: int) -> list[PyTree]:
    if isinstance(leaf, Stacked):
        return list(leaf.rows)
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return [jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype)] * count
    return [leaf[row] for row in range(count)]


@dataclasses.dataclass(frozen=True)
class OfBlocks(Wrapped):
    """Lays out a leaf of one block as another policy lays out the rows of its stack.

    Args:
        policy: decides about a leaf of the model.
        stacks: the stacked modules.

    Raises:
        StrategyConflictError: if the policy splits the dim that counts blocks.
    """

    stacks: Stacks

    def decide(
        self, path: Path, shape: Shape, mesh: HasShape, taken: PartitionSpec = PartitionSpec()
    ) -> Decision:
        """Decides about one unstacked leaf."""
        for keys, count in self.stacks.counts:
            stack = "/".join(map(str, keys))
            if path.startswith(f"{stack}/"):
                leaf = f"{stack}/{path.removeprefix(f'{stack}/').partition('/')[2]}"
                stacked_taken = PartitionSpec(None, *taken)
                decision = self.policy.decide(leaf, (count, *shape), mesh, stacked_taken)
                if axes := axes_of(decision.spec, 0):
                    raise StrategyConflictError(
                        f"{leaf} stacks {count} blocks in dim 0, which {self.name!r} splits "
                        f"over {'×'.join(axes)}, and the pipeline over its stages; leave that dim "
                        "to the pipeline"
                    )
                return dataclasses.replace(decision, spec=PartitionSpec(*tuple(decision.spec)[1:]))
        return self.policy.decide(path, shape, mesh, taken)


@dataclasses.dataclass(frozen=True)
class ByStages(Policy):
    """Shards dim 0 of every row over the pipeline axis, and its other dims by another policy.

    Parameters outside the blocks (embedding, final norm, head) are used at one end of the pipeline.
    But all ranks run the same program, which reserves memory for them on all ranks. So they are
    split over the stages, and gathered for the step.

    Args:
        inner: decides about a leaf of the model.
        axis: the mesh axis of the pipeline.
        rows: the paths of all rows.
        min_elements: leaves outside the blocks with fewer elements are replicated.
        state_rows: the paths of the rows in the optimizer's state, of any shapes.
    """

    inner: Policy
    axis: str
    rows: frozenset[Path]
    min_elements: int = 1024
    state_rows: frozenset[Path] = frozenset()
    label = "pipeline"

    @property
    def name(self) -> str:
        """The label and the inner policy's name."""
        return self.label if self.inner == Replicate() else f"{self.label} + {self.inner.name}"

    @property
    def split_axes(self) -> tuple[str, ...]:
        """The axes of the inner policy."""
        return self.inner.split_axes

    @property
    def flexible_part(self) -> Policy:
        """The policy for the state's leaves that are not like their parameters."""
        return dataclasses.replace(self, inner=self.inner.flexible_part, rows=self.state_rows)

    def decide(
        self, path: Path, shape: Shape, mesh: HasShape, taken: PartitionSpec = PartitionSpec()
    ) -> Decision:
        """Decides about one leaf of the stored tree."""
        if path in self.rows:
            row = self.inner.decide(path, shape[1:], mesh)
            return Decision(PartitionSpec(self.axis, *row.spec), self.name, "one row of blocks")
        spread = LargestDim((self.axis,), self.min_elements, "pipeline")
        policy = spread if self.inner == Replicate() else Merge((self.inner, spread))
        return policy.decide(path, shape, mesh, taken)
