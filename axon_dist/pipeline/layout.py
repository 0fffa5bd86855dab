"""Which blocks of a model make a stage, on which rank it is, and how its parameters are laid out.

A model may keep equal blocks in one module: the leaf `blocks/kernel` of shape [L, ...] is then L
leaves `blocks/0/kernel`, ... to a pipeline. Its storage, its stages and its optimizer work on the
model taken apart (`Stacks`); the model and the user's optimizer see the stacked leaves.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jax.tree_util import KeyPath

from ..core.errors import StrategyConflictError
from ..core.typing import Keys, Path, PyTree, Shape
from ..ir.rows import Stacked, whole
from ..sharding import Decision, HasShape, LargestDim, Merge, Policy, Replicate, Wrapped, axes_of


def flatten(tree: PyTree) -> dict[Keys, PyTree]:
    """The leaves of a tree by keys, names and positions, in the order of `jax.tree.leaves`."""
    kinds, leaves = ("key", "idx", "name"), {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        keys = (next(getattr(e, kind) for kind in kinds if hasattr(e, kind)) for e in path)
        leaves[tuple(keys)] = leaf
    return leaves


def nest(flat: dict[Keys, PyTree]) -> PyTree:
    """The inverse of `flatten` for nested dicts."""
    tree: PyTree = {}
    for keys, leaf in flat.items():
        node = tree
        for key in keys[:-1]:
            node = node.setdefault(key, {})
        node[keys[-1]] = leaf
    return tree


class ParamLike:
    """A tree of which some parts are like a model's parameters: all of it, or moments in a state.

    A part is a dict with the outermost keys of the parameters, and all leaves at or below these.

    Args:
        params: nested dict of the parameters, of any leaves.
        shapes: the tree.
    """

    def __init__(self, params: PyTree, shapes: PyTree):
        self._top, self._names = params.keys(), frozenset(flatten(params))
        parts, self.outer = jax.tree.flatten(shapes, is_leaf=self._is_like)
        self.keys: list[list[Keys]] = [list(flatten(part)) for part in parts]
        self._inner = [jax.tree.structure(part) for part in parts]
        self._like = [self._is_like(part) for part in parts]

    def split(self, tree: PyTree) -> list[tuple[PyTree, bool]]:
        """The parts, those like parameters as nested dicts; and whether each is."""
        parts = zip(self.outer.flatten_up_to(tree), self._like, self.keys, strict=True)
        return [
            (nest(dict(zip(keys, jax.tree.leaves(part), strict=True))) if like else part, like)
            for part, like, keys in parts
        ]

    def join(self, parts: Sequence[PyTree]) -> PyTree:
        """The inverse of `split`, of the parts alone."""
        joined = list(parts)
        for number, part in enumerate(parts):
            if self._like[number]:
                flat = flatten(part)
                leaves = (flat[keys] for keys in self.keys[number])
                joined[number] = self._inner[number].unflatten(leaves)
        return self.outer.unflatten(joined)

    def _is_like(self, tree: PyTree) -> bool:
        if not isinstance(tree, dict) or set(tree) != set(self._top):
            return False
        leaves = flatten(tree)
        return bool(leaves) and all(
            any(keys[:end] in self._names for end in range(1, len(keys) + 1)) for keys in leaves
        )


@dataclasses.dataclass(frozen=True)
class Stages:
    """Which blocks make a stage, and which rank has it.

    A block is stored on the rank that calls it, in the first stage that does. A block that several
    ranks call is replicated on all ranks, like the parameters outside the blocks.

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
        """The keys of all blocks, and of what they share."""
        return (*self.blocks, *self.shared)

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
        return range(*self.boundaries[stage : stage + 2])

    def chunk_of(self, stage: int) -> int:
        """The position of a stage among those of its rank."""
        return self.placement[:stage].count(self.placement[stage])

    def stages_of(self, chunk: int) -> tuple[int, ...]:
        """The stages that are the given chunk of their rank."""
        return tuple(s for s in range(self.num_stages) if self.chunk_of(s) == chunk)

    def stage_of(self, block: int) -> int:
        """The stage of a block."""
        return next(s for s in range(self.num_stages) if block in self.blocks_of(s))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StackedBuffer:
    """A buffer of a stack, of which each block has a row, as what each block has.

    Args:
        rows: one for each block.
    """

    rows: list[PyTree]


def has_split(buffers: PyTree) -> bool:
    """Whether some of these have been taken apart."""
    return any(
        isinstance(leaf, StackedBuffer) for leaf in jax.tree.leaves(buffers, is_leaf=_is_split)
    )


def buffers_together(apart: PyTree, stack: Callable[[list[PyTree]], PyTree] = jnp.stack) -> PyTree:
    """The inverse of `Stacks.split_buffers`."""

    def one(leaf):
        return stack(leaf.rows) if isinstance(leaf, StackedBuffer) else leaf

    return jax.tree.map(one, apart, is_leaf=_is_split)


def _is_split(leaf: object) -> bool:
    return isinstance(leaf, StackedBuffer)


@dataclasses.dataclass(frozen=True)
class Stacks:
    """Modules of a model whose leaves have a row for each of many blocks.

    Args:
        depths: the keys of every stacked module, and how many blocks it holds.

    Example:
        >>> stacks = Stacks(((("blocks",), 2),))
        >>> apart = stacks.apart({"blocks": {"kernel": jnp.ones((2, 3))}})
        >>> [leaf.shape for leaf in flatten(apart).values()], list(flatten(apart))
        ([(3,), (3,)], [('blocks', 0, 'kernel'), ('blocks', 1, 'kernel')])
        >>> stacks.together(apart)["blocks"]["kernel"].shape
        (2, 3)
    """

    depths: tuple[tuple[Keys, int], ...] = ()

    def of(self, keys: Keys) -> tuple[Keys, int]:
        """The stack that keys of the model are in, and its number of blocks; () and 0 for none."""
        within = (item for item in self.depths if keys[: len(item[0])] == item[0])
        return next(within, ((), 0))

    def apart(self, tree: PyTree, shapes: PyTree = None) -> PyTree:
        """A nested dict like the model's, with stacked leaves split into those of each block.

        Args:
            tree: leaves may be arrays, shapes or `Stacked`.
            shapes: likewise, those of the tree by default; a leaf in a stack that has no row for
                each block is every block's.
        """
        if not self.depths:
            return tree
        leaves: dict[Keys, PyTree] = {}
        likes = flatten(tree if shapes is None else shapes)
        for keys, leaf in flatten(tree).items():
            stack, depth = self.of(keys)
            if not depth:
                leaves[keys] = whole(leaf)
                continue
            rows = _rows(leaf, depth) if _is_stacked(likes[keys], depth) else [whole(leaf)] * depth
            rest = keys[len(stack) :]
            leaves.update(((*stack, row, *rest), value) for row, value in enumerate(rows))
        return nest(leaves)

    def together(
        self,
        apart: PyTree,
        stack: Callable[[list[PyTree]], PyTree] = jnp.stack,
        shapes: PyTree = None,
    ) -> PyTree:
        """The inverse of `apart`.

        Args:
            apart: a nested dict.
            stack: makes one leaf of those of all blocks.
            shapes: of the result; None where each leaf in a stack has a row for each block.
        """
        likes = None if shapes is None else flatten(shapes)
        grouped: dict[Keys, list[PyTree]] = {}
        for keys, leaf in flatten(apart).items():
            grouped.setdefault(self.in_model(keys), []).append(leaf)

        def one(keys: Keys, leaves: list[PyTree]) -> PyTree:
            _, depth = self.of(keys)
            stacked = depth and (likes is None or _is_stacked(likes[keys], depth))
            return stack(leaves) if stacked else leaves[0]

        return nest({keys: one(keys, leaves) for keys, leaves in grouped.items()})

    def split_buffers(self, buffers: PyTree) -> PyTree:
        """A model's buffers, with the numbers that each block of a stack has as `StackedBuffer`.

        What random streams have, such as keys and counts, stays as it is.
        """

        def one(path: KeyPath, leaf: PyTree) -> PyTree:
            _, depth = self.of(tuple(getattr(entry, "key", None) for entry in path))
            form = leaf.shape if isinstance(leaf, Stacked) else leaf
            is_float = jnp.issubdtype(form.dtype, jnp.floating)
            return (
                StackedBuffer(_rows(leaf, depth)) if is_float and _is_stacked(leaf, depth) else leaf
            )

        return jax.tree_util.tree_map_with_path(one, buffers)

    def in_model(self, keys: Keys) -> Keys:
        """The keys of the leaf or module of the model that holds that of a block."""
        stack, depth = self.of(keys)
        is_block = depth and len(keys) > len(stack) and isinstance(keys[len(stack)], int)
        return (*stack, *keys[len(stack) + 1 :]) if is_block else keys


def _is_stacked(leaf: PyTree, depth: int) -> bool:
    shape = (leaf.shape if isinstance(leaf, Stacked) else leaf).shape
    return depth > 0 and len(shape) > 0 and shape[0] == depth


def _rows(leaf: PyTree, depth: int) -> list[PyTree]:
    if isinstance(leaf, Stacked):
        return list(leaf.rows)
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return [jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype)] * depth
    return [leaf[row] for row in range(depth)]


@dataclasses.dataclass(frozen=True)
class OfBlocks(Wrapped):
    """Lays out a leaf of one block as another policy lays out the rows of the stack it is in.

    Args:
        policy: decides about a leaf as the model has it.
        stacks: the modules that hold many blocks.

    Raises:
        StrategyConflictError: when the policy splits the dim that counts blocks.
    """

    stacks: Stacks

    def decide(
        self, path: Path, shape: Shape, mesh: HasShape, taken: PartitionSpec = PartitionSpec()
    ) -> Decision:
        """Decides about one leaf of the model taken apart."""
        for keys, depth in self.stacks.depths:
            stack = "/".join(map(str, keys))
            if path.startswith(f"{stack}/"):
                leaf = f"{stack}/{path.removeprefix(f'{stack}/').partition('/')[2]}"
                beside = PartitionSpec(None, *taken)
                decision = self.policy.decide(leaf, (depth, *shape), mesh, beside)
                if axes := axes_of(decision.spec, 0):
                    raise StrategyConflictError(
                        f"{leaf} stacks {depth} blocks in dim 0, which {self.name!r} splits "
                        f"over {'×'.join(axes)}, and the pipeline over its stages; leave that dim "
                        "to the pipeline"
                    )
                return dataclasses.replace(decision, spec=PartitionSpec(*tuple(decision.spec)[1:]))
        return self.policy.decide(path, shape, mesh, taken)


@dataclasses.dataclass(frozen=True)
class Staged(Policy):
    """Lays dim 0 of every row over the pipeline axis, and its other dims as another policy says.

    What is in no block (embedding, final norm, head) is used at one end of the pipeline, but a
    program that is the same on all ranks reserves its memory on all of them. So it is split over
    the stages, and gathered for the step.

    Args:
        inner: decides about a leaf as the model has it.
        axis: the mesh axis of the pipeline.
        rows: the paths of all rows.
        min_elements: leaves outside the blocks with fewer elements stay whole.
        state_rows: the paths of the rows in the state of the optimizer, whatever their shapes.
        label: what the rows are of, in tables: stages of a `pipeline`, or experts.
        spreads: whether what is in no row is split over the axis, too.
    """

    inner: Policy
    axis: str
    rows: frozenset[Path]
    min_elements: int = 1024
    state_rows: frozenset[Path] = frozenset()
    label: str = "pipeline"
    spreads: bool = True

    @property
    def name(self) -> str:
        """The label, and the inner policy's name."""
        return self.label if self.inner == Replicate() else f"{self.label} + {self.inner.name}"

    @property
    def split_axes(self) -> tuple[str, ...]:
        """The axes of the inner policy."""
        return self.inner.split_axes

    @property
    def flexible_part(self) -> Policy:
        """What it decides about a state's leaves that are not like their parameters."""
        return dataclasses.replace(self, inner=self.inner.flexible_part, rows=self.state_rows)

    def decide(
        self, path: Path, shape: Shape, mesh: HasShape, taken: PartitionSpec = PartitionSpec()
    ) -> Decision:
        """Decides about one leaf of the stored tree."""
        if path in self.rows:
            row = self.inner.decide(path, shape[1:], mesh)
            return Decision(PartitionSpec(self.axis, *row.spec), self.name, "one row of blocks")
        if not self.spreads:
            return self.inner.decide(path, shape, mesh, taken)
        spread = LargestDim((self.axis,), self.min_elements, "pipeline")
        both = spread if self.inner == Replicate() else Merge((self.inner, spread))
        return both.decide(path, shape, mesh, taken)
