"""A tree of the form of a model's state, such as an optimizer's, as a pipeline stores it."""

from __future__ import annotations

import dataclasses
from functools import cached_property

import jax

from ..core.errors import UnsupportedError
from ..core.tree import path_str
from ..core.typing import Array, Path, PyTree
from .layout import Keys, ParamLike, keys_of, nest
from .storage import Cell, ModelStorage


@dataclasses.dataclass(frozen=True)
class LeafPlace:
    """Where a leaf of a tree lies in its stored form.

    Args:
        path: of the leaf in the model's form.
        cell: the rank and row that its block has; None for what is in no block.
        part: which part of the tree it lies in.
        keys: of the leaf within the part.
        slot: the keys of the stored leaf within the part; None where it is in a vector.
    """

    path: Path
    cell: Cell | None
    part: int
    keys: Keys
    slot: Keys | None


class StoredForm:
    """A tree whose parts that look like the model's parameters are stored as these are.

    The moments of an optimizer are dicts like the parameters, with leaves that may have other
    shapes, or be missing. Each such dict is stored by stages; all else, such as counts, stays.

    Args:
        storage: the stored form of the parameters.
        shapes: the tree in the model's form, of `ShapeDtypeStruct`s.

    Raises:
        UnsupportedError: when leaves of one row have different shapes.
    """

    def __init__(self, storage: ModelStorage, shapes: PyTree):
        self.shapes = shapes
        self._form = ParamLike(storage.shapes, shapes)
        self.storages: list[ModelStorage | None] = [
            storage.like(part) if is_like else None for part, is_like in self._form.split(shapes)
        ]
        self._check_rows()

    @cached_property
    def places(self) -> tuple[LeafPlace, ...]:
        """The place of every leaf, in the order of the leaves of the model's form."""
        paths = [path_str(path) for path, _ in jax.tree_util.tree_leaves_with_path(self.shapes)]
        leaves = [
            (part, keys, storage)
            for part, storage in enumerate(self.storages)
            for keys in self._form.keys[part]
        ]
        return tuple(
            _place(path, part, keys, storage)
            for path, (part, keys, storage) in zip(paths, leaves, strict=True)
        )

    @cached_property
    def row_paths(self) -> frozenset[Path]:
        """The paths of the stored leaves whose dim 0 counts ranks."""
        rows = [set() if s is None else set(s.row_keys) for s in self.storages]
        named = jax.tree_util.tree_leaves_with_path(
            self._form.outer.unflatten(self._named()), is_leaf=lambda x: isinstance(x, _Name)
        )
        return frozenset(path_str(path) for path, name in named if name.keys in rows[name.part])

    def from_model(self, tree: PyTree) -> PyTree:
        """The stored form of a tree."""
        parts = zip(self._form.split(tree), self.storages, strict=True)
        return self._form.outer.unflatten(
            part if storage is None else storage.from_model(part) for (part, _), storage in parts
        )

    def to_model(self, stored: PyTree) -> PyTree:
        """The inverse of `from_model`, exactly."""
        parts = zip(self._form.outer.flatten_up_to(stored), self.storages, strict=True)
        return self._form.join(
            [part if storage is None else storage.to_model(part) for part, storage in parts]
        )

    def slots(self, stored: PyTree) -> dict[tuple[int, Keys], Array]:
        """The stored leaves by part and keys."""
        parts = enumerate(self._form.outer.flatten_up_to(stored))
        return {(number, keys): x for number, part in parts for keys, x in keys_of(part).items()}

    def of_slots(self, slots: dict[tuple[int, Keys], Array]) -> PyTree:
        """The inverse of `slots`."""
        flat: list[dict[Keys, Array]] = [{} for _ in self.storages]
        for (part, keys), leaf in slots.items():
            flat[part][keys] = leaf
        return self._form.outer.unflatten(
            flat[number][()] if storage is None else nest(flat[number])
            for number, storage in enumerate(self.storages)
        )

    def _named(self) -> list[PyTree]:
        return [
            _Name(part, ())
            if storage is None
            else nest({k: _Name(part, k) for k in (*storage.rest, *storage.row_keys)})
            for part, storage in enumerate(self.storages)
        ]

    def _check_rows(self) -> None:
        first: dict[tuple[int, Keys], tuple[Path, jax.ShapeDtypeStruct]] = {}
        for place, leaf in zip(self.places, jax.tree.leaves(self.shapes), strict=True):
            if place.cell is None or place.slot is None:
                continue
            path, other = first.setdefault((place.part, place.slot), (place.path, leaf))
            if (leaf.shape, leaf.dtype) != (other.shape, other.dtype):
                raise UnsupportedError(
                    f"the optimizer keeps {path!r} as {other.dtype}{list(other.shape)} and "
                    f"{place.path!r} as {leaf.dtype}{list(leaf.shape)}, and a pipeline stacks them "
                    "in one row. Use an optimizer whose state for equal blocks has equal shapes"
                )


@dataclasses.dataclass(frozen=True)
class _Name:
    part: int
    keys: Keys


def _place(path: Path, part: int, keys: Keys, storage: ModelStorage | None) -> LeafPlace:
    number = None if storage is None else storage.block_of(keys)
    if storage is None or number is None:
        return LeafPlace(path, None, part, keys, keys)
    return LeafPlace(path, storage.cell_of(number), part, keys, storage.slot_of(number, keys))
