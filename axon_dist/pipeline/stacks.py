"""Models that keep equal blocks in one module, as a pipeline sees them: every block a module.

The leaf `blocks/kernel` of shape [L, ...] is then L leaves `blocks/0/kernel`, ... Nothing else of a
pipeline knows about stacks: its storage, its stages and its optimizer work on the model taken
apart, and what the model itself and the user's optimizer see is put together again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec

from ..core.errors import StrategyConflictError
from ..core.typing import Path, PyTree, Shape
from ..program.rows import Stacked, by_rows, whole
from ..sharding import Decision, HasShape, Policy, axes_of
from .layout import Keys, flatten, is_like, keys_of, nest


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Apart:
    """A buffer of a stack, of which each block has a row, as what each block has.

    Args:
        rows: one for each block.
    """

    rows: list[Any]


def has_apart(buffers: PyTree) -> bool:
    """Whether some of these have been taken apart."""
    return any(isinstance(leaf, Apart) for leaf in jax.tree.leaves(buffers, is_leaf=_is_apart))


def buffers_together(apart: PyTree, stack: Callable[[list[Any]], Any] = jnp.stack) -> PyTree:
    """The inverse of `Stacks.buffers_apart`."""
    one = lambda leaf: stack(leaf.rows) if isinstance(leaf, Apart) else leaf
    return jax.tree.map(one, apart, is_leaf=_is_apart)


def _is_apart(leaf: Any) -> bool:
    return isinstance(leaf, Apart)


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

    def depth_of(self, keys: Keys) -> int:
        """How many blocks the stack holds that keys of the model are in; 0 for none."""
        return self._of(keys)[1]

    def apart(self, params: PyTree) -> PyTree:
        """A model's nested dict, with the leaves of each block by themselves."""
        return self.apart_like(params, params)

    def apart_like(self, tree: PyTree, shapes: PyTree) -> PyTree:
        """A nested dict like the model's, with what it has for each block by itself.

        Args:
            tree: leaves may be arrays, shapes or `Stacked`.
            shapes: likewise; a leaf in a stack that has no row for each block is every block's.
        """
        found: dict[Keys, Any] = {}
        likes = flatten(shapes)
        for keys, leaf in flatten(tree).items():
            stack, depth = self._of(keys)
            rows = _rows(leaf, depth) if _is_stacked(likes[keys], depth) else [whole(leaf)] * depth
            rest = keys[len(stack) :]
            found.update(((*stack, row, *rest), value) for row, value in enumerate(rows))
            found.update({} if depth else {keys: whole(leaf)})
        return nest(found)

    def together(self, apart: PyTree, stack: Callable[[list[Any]], Any] = jnp.stack) -> PyTree:
        """The inverse of `apart`, of arrays."""
        return self.together_like(apart, None, stack)

    def together_like(
        self, apart: PyTree, shapes: PyTree, stack: Callable[[list[Any]], Any]
    ) -> PyTree:
        """The inverse of `apart_like`.

        Args:
            apart: a nested dict.
            shapes: of the result; None where each leaf in a stack has a row for each block.
            stack: makes one leaf of those of all blocks.
        """
        likes = None if shapes is None else flatten(shapes)
        found: dict[Keys, list[Any]] = {}
        for keys, leaf in flatten(apart).items():
            found.setdefault(self.in_model(keys), []).append(leaf)

        def one(keys: Keys, leaves: list[Any]) -> Any:
            depth = self.depth_of(keys)
            stacked = depth and (likes is None or _is_stacked(likes[keys], depth))
            return stack(leaves) if stacked else leaves[0]

        return nest({keys: one(keys, leaves) for keys, leaves in found.items()})

    def buffers_apart(self, buffers: PyTree) -> PyTree:
        """A model's buffers, with the numbers that each block of a stack has as `Apart`.

        What random streams have, such as keys and counts, stays as it is.
        """

        def one(path: Any, leaf: Any) -> Any:
            depth = self.depth_of(tuple(getattr(entry, "key", None) for entry in path))
            form = leaf.shape if isinstance(leaf, Stacked) else leaf
            is_float = jnp.issubdtype(form.dtype, jnp.floating)
            return Apart(_rows(leaf, depth)) if is_float and _is_stacked(leaf, depth) else leaf

        return jax.tree_util.tree_map_with_path(one, buffers)

    def in_model(self, keys: Keys) -> Keys:
        """The keys of the leaf or module of the model that holds that of a block."""
        stack, depth = self._of(keys)
        is_block = depth and len(keys) > len(stack) and isinstance(keys[len(stack)], int)
        return (*stack, *keys[len(stack) + 1 :]) if is_block else keys

    def _of(self, keys: Keys) -> tuple[Keys, int]:
        within = (item for item in self.depths if keys[: len(item[0])] == item[0])
        return next(within, ((), 0))


def _is_stacked(leaf: Any, depth: int) -> bool:
    shape = (leaf.shape if isinstance(leaf, Stacked) else leaf).shape
    return depth > 0 and len(shape) > 0 and shape[0] == depth


def _rows(leaf: Any, depth: int) -> list[Any]:
    if isinstance(leaf, Stacked):
        return list(leaf.rows)
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return [jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype)] * depth
    return [leaf[row] for row in range(depth)]


@dataclasses.dataclass(frozen=True)
class OfBlocks(Policy):
    """Lays out a leaf of one block as another policy lays out the rows of the stack it is in.

    Args:
        inner: decides about a leaf as the model has it.
        stacks: the modules that hold many blocks.

    Raises:
        StrategyConflictError: when the inner policy splits the dim that counts blocks.
    """

    inner: Policy
    stacks: Stacks

    @property
    def name(self) -> str:
        """The inner policy's."""
        return self.inner.name

    @property
    def split_axes(self) -> tuple[str, ...]:
        """Those of the inner policy."""
        return self.inner.split_axes

    @property
    def flexible(self) -> bool:
        """That of the inner policy."""
        return self.inner.flexible

    @property
    def flexible_part(self) -> Policy:
        """That of the inner policy, about blocks."""
        return OfBlocks(self.inner.flexible_part, self.stacks)

    def decide(
        self, path: Path, shape: Shape, mesh: HasShape, taken: PartitionSpec = PartitionSpec()
    ) -> Decision:
        """Decides about one leaf of the model taken apart."""
        for keys, depth in self.stacks.depths:
            stack = "/".join(map(str, keys))
            if path.startswith(f"{stack}/"):
                leaf = f"{stack}/{path.removeprefix(f'{stack}/').partition('/')[2]}"
                beside = PartitionSpec(None, *taken)
                found = self.inner.decide(leaf, (depth, *shape), mesh, beside)
                if axes := axes_of(found.spec, 0):
                    raise StrategyConflictError(
                        f"{leaf} stacks {depth} blocks in dim 0, which {self.inner.name!r} splits "
                        f"over {'×'.join(axes)}, and the pipeline over its stages; leave that dim "
                        "to the pipeline"
                    )
                return dataclasses.replace(found, spec=PartitionSpec(*tuple(found.spec)[1:]))
        return self.inner.decide(path, shape, mesh, taken)


class _Form:
    """A tree whose parts like the model's parameters can be taken apart."""

    def __init__(self, stacks: Stacks, params: PyTree, shapes: PyTree):
        self._stacks = stacks
        names, self._top = frozenset(flatten(params)), tuple(params)
        like = lambda tree: is_like(tree, params.keys(), names)
        parts, self._outer = jax.tree.flatten(shapes, is_leaf=like)
        self._is_like = [like(part) for part in parts]
        self._inner = [jax.tree.structure(part) for part in parts]
        self._shapes = [
            nest(keys_of(part)) if is_part else part
            for part, is_part in zip(parts, self._is_like, strict=True)
        ]
        self._keys = [list(keys_of(part)) for part in parts]

    def apart(self, tree: PyTree) -> PyTree:
        """The tree with what it has for each block by itself."""
        parts = self._outer.flatten_up_to(tree)
        # What a mask has emptied stays an empty dict, by which the part is still known.
        nothing: dict[Any, Any] = {key: {} for key in self._top}
        return self._outer.unflatten(
            nothing | self._stacks.apart_like(nest(keys_of(part)), shapes)
            if is_part
            else whole(part)
            for part, shapes, is_part in zip(parts, self._shapes, self._is_like, strict=True)
        )

    def together(self, apart: PyTree, stack: Callable[[list[Any]], Any] = jnp.stack) -> PyTree:
        """The inverse of `apart`."""
        parts = self._outer.flatten_up_to(apart)
        return self._outer.unflatten(
            self._part(number, part, stack) if self._is_like[number] else part
            for number, part in enumerate(parts)
        )

    def _part(self, number: int, part: PyTree, stack: Callable[[list[Any]], Any]) -> PyTree:
        flat = flatten(self._stacks.together_like(part, self._shapes[number], stack))
        return self._inner[number].unflatten(flat[keys] for keys in self._keys[number])


class UnstackedOptimizer:
    """An optimizer of a model, as one of the model taken apart into its blocks.

    It is traced on the model as it is, so that a norm of a stacked leaf is one number, and computed
    row by row.

    Args:
        optimizer: of the model.
        stacks: the modules of the model that hold many blocks.
        params: shapes of the model's parameters.
    """

    def __init__(
        self, optimizer: optax.GradientTransformationExtraArgs, stacks: Stacks, params: PyTree
    ):
        self._optimizer = optimizer
        self._params = _Form(stacks, params, params)
        self._state = _Form(stacks, params, jax.eval_shape(optimizer.init, params))

    def init(self, params: PyTree) -> PyTree:
        """The first state."""
        return self._state.apart(
            by_rows(self._optimizer.init)(self._params.together(params, Stacked))
        )

    def update(self, updates: PyTree, state: PyTree, params: PyTree, **extra: Any) -> Any:
        """The updates and the next state."""
        form = self._params
        run = by_rows(lambda u, s, p, extra: self._optimizer.update(u, s, p, **extra))
        updates, state = run(
            form.together(updates, Stacked),
            self._state.together(state, Stacked),
            form.together(params, Stacked),
            extra,
        )
        return form.apart(updates), self._state.apart(state)

    def state_together(self, state: PyTree) -> PyTree:
        """The state as the optimizer has it for the model."""
        return self._state.together(state)

    def state_apart(self, state: PyTree) -> PyTree:
        """The inverse of `state_together`, exactly."""
        return self._state.apart(state)
