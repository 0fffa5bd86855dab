"""How a pipeline stores a tree that contains trees like the parameters, as an optimizer's state.

Blocks of different shapes are stored as flat vectors, each the concatenation of some leaves. Most
optimizers are elementwise, except for norms over all leaves. They run on such a vector without
unpacking it, so that a vector that is sharded over other mesh axes remains sharded
(`on_whole_vectors`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TypeAlias

import jax
import jax.numpy as jnp

from ..core.compat import eval_equation
from ..core.errors import UnsupportedError
from ..core.tree import leaves_with_paths
from ..core.typing import Array, Keys, Path, PyTree
from ..ir.factors import CHEAP_ELEMENTWISE
from .layout import ParamLike, flatten, nest
from .owners import OwnedOperation, OwnedProgram, ValueId, as_array, sums_of
from .storage import RankRow, StageStorage

StoredKey: TypeAlias = tuple[int, int, Keys | None]
"""A stored leaf: the number of its tree among the arguments or results, its part, and its keys."""


@dataclasses.dataclass(frozen=True)
class LeafPlace:
    """The place of a leaf in the stored form of its tree.

    Args:
        path: the path of the leaf in the model's form.
        rank_row: the rank and row of its block; None for leaves outside the blocks.
        part: the number of the part of the tree that contains it.
        keys: the keys of the leaf within the part.
        stored_leaf: the keys of the stored leaf within the part; None if the leaf is in a vector.
        tree: the number of the tree among several.
    """

    path: Path
    rank_row: RankRow | None
    part: int
    keys: Keys
    stored_leaf: Keys | None
    tree: int = 0

    @property
    def stored_key(self) -> StoredKey:
        """The stored leaf that contains it."""
        return self.tree, self.part, self.stored_leaf


class TreeStorage:
    """Converts a tree between the model's form and the form in which a pipeline stores it.

    The moments of an optimizer are dicts like the parameters, whose leaves may have other shapes or
    be missing. Each such dict is stored by stages, like the parameters. All other leaves, such as
    step counts, are stored unchanged.

    Args:
        storage: the stored form of the parameters.
        shapes: the tree in the model's form, of `ShapeDtypeStruct`s.

    Attributes:
        storages: the storage of each part; None for a part that is not like the parameters.
        places: the place of every leaf, in the order of the leaves of the model's form.

    Raises:
        UnsupportedError: if leaves of one row have different shapes.
    """

    def __init__(self, storage: StageStorage, shapes: PyTree):
        self.shapes = shapes
        self._form = ParamLike(storage.shapes, shapes)
        self.storages: list[StageStorage | None] = [
            storage.like(part) if is_like else None for part, is_like in self._form.split(shapes)
        ]
        self.places: list[LeafPlace] = []
        leaves = iter(leaves_with_paths(shapes))
        first: dict[tuple[int, Keys], tuple[Path, jax.ShapeDtypeStruct]] = {}
        for part, of_part in enumerate(self.storages):
            for keys in self._form.keys[part]:
                path, leaf = next(leaves)
                if of_part is None or keys not in of_part.block_of:
                    self.places.append(LeafPlace(path, None, part, keys, keys))
                    continue
                rank_row = of_part.rank_rows[of_part.block_of[keys]]
                stored_leaf = of_part.stored_leaf_of.get(keys)
                self.places.append(LeafPlace(path, rank_row, part, keys, stored_leaf))
                if stored_leaf is None:
                    continue
                other_path, other = first.setdefault((part, stored_leaf), (path, leaf))
                if (leaf.shape, leaf.dtype) != (other.shape, other.dtype):
                    raise UnsupportedError(
                        f"the optimizer keeps {other_path!r} as {other.dtype}{list(other.shape)} "
                        f"and {path!r} as {leaf.dtype}{list(leaf.shape)}, but a pipeline stacks "
                        "them in one row. Use an optimizer whose state for equal blocks has equal "
                        "shapes",
                        code="unequal-state",
                    )

    @property
    def row_paths(self) -> frozenset[Path]:
        """The paths of the stored leaves whose dim 0 counts ranks."""
        is_row = {
            (part, keys): keys in storage.row_keys
            for part, storage in enumerate(self.storages)
            if storage is not None
            for keys in (*storage.rest, *storage.row_keys)
        }
        others = {(part, ()): False for part, s in enumerate(self.storages) if s is None}
        leaves = leaves_with_paths(self.of_stored_leaves(is_row | others))
        return frozenset(path for path, row in leaves if row)

    def from_model(self, tree: PyTree) -> PyTree:
        """Returns the stored form of a tree."""
        parts = zip(self._form.split(tree), self.storages, strict=True)
        return self._form.outer.unflatten(
            part if storage is None else storage.from_model(part) for (part, _), storage in parts
        )

    def to_model(self, stored: PyTree) -> PyTree:
        """Inverts `from_model` exactly."""
        parts = zip(self._form.outer.flatten_up_to(stored), self.storages, strict=True)
        return self._form.join(
            [part if storage is None else storage.to_model(part) for part, storage in parts]
        )

    def stored_leaves(self, stored: PyTree) -> dict[tuple[int, Keys], Array]:
        """Returns the stored leaves by part and keys."""
        parts = enumerate(self._form.outer.flatten_up_to(stored))
        return {(number, keys): x for number, part in parts for keys, x in flatten(part).items()}

    def of_stored_leaves(self, leaves: Mapping[tuple[int, Keys], PyTree]) -> PyTree:
        """Inverts `stored_leaves`."""
        flat: list[dict[Keys, PyTree]] = [{} for _ in self.storages]
        for (part, keys), leaf in leaves.items():
            flat[part][keys] = leaf
        return self._form.outer.unflatten(
            flat[number][()] if storage is None else nest(flat[number])
            for number, storage in enumerate(self.storages)
        )


FILL = "broadcast_in_dim"
SUM = "reduce_sum"

Vector: TypeAlias = tuple[int, int]
"""The number of a chunk, and of a vector in it."""

LeafOwner: TypeAlias = tuple[Vector, Keys]
"""The vector that contains a leaf, and the keys of the leaf in the model."""

Ends: TypeAlias = Sequence[LeafPlace]
"""The place of each input or output among the leaves of all trees."""


@dataclasses.dataclass(frozen=True, eq=False)
class VectorLayout:
    """The layout of leaves in vectors, which several trees have in common.

    Args:
        owners: the owner of each leaf, by its keys.
        sides: the stored forms of the arguments, and those of the results.
        sizes: the number of elements of each vector on a rank.
        lengths: for each vector, the number of its elements that are not padding, by rank.
    """

    owners: Mapping[Keys, LeafOwner]
    sides: Sequence[Sequence[TreeStorage]]
    sizes: Mapping[Vector, int]
    lengths: Mapping[Vector, tuple[int, ...]]

    @classmethod
    def of(
        cls, storage: StageStorage, sides: Sequence[Sequence[TreeStorage]]
    ) -> VectorLayout | None:
        """Returns the layout of the parameters, or None if a part of a tree has another layout.

        Args:
            storage: the storage of the parameters.
            sides: the stored forms of the arguments, and those of the results.
        """
        order = storage.vectors
        parts = [part for forms in sides for form in forms for part in form.storages if part]
        packing = storage.packing
        if packing is None or not all(part.vectors == order for part in parts):
            return None

        def size(keys):
            return sum(math.prod(storage.flat_shapes[k].shape) for k in keys)

        owners = {k: (v, k) for v, ranks in order.items() for keys in ranks for k in keys}
        lengths = {v: tuple(size(keys) for keys in ranks) for v, ranks in order.items()}
        sizes = {v: packing.packed[v[1]].shape[0] for v in order}
        return cls(owners, sides, sizes, lengths)

    def stored_key(self, place: LeafPlace, side: int) -> StoredKey:
        """Returns the stored leaf that contains a leaf of the arguments (side 0) or results (1)."""
        storage = self.sides[side][place.tree].storages[place.part]
        if place.rank_row is None or storage is None:
            return place.stored_key
        (chunk, number), _ = self.owners[place.keys]
        return place.tree, place.part, storage.row_names[chunk][number]

    def masked(self, vector: Vector, x: Array) -> Array:
        """Returns a stored vector with its padding, after the elements of leaves, set to zero."""
        lengths = self.lengths[vector]
        size = self.sizes[vector]
        if min(lengths) == size:
            return x
        is_own = jnp.arange(size)[None] < jnp.array(lengths)[:, None]
        return jnp.where(is_own, x, jnp.zeros_like(x))


Names: TypeAlias = Mapping[ValueId, Hashable]
"""The names of the values of a leaf, equal for all leaves with the same operations."""


def _operations_key(
    program: OwnedProgram,
    operations: Sequence[OwnedOperation],
    names: Names,
    shape: tuple[int, ...],
) -> Hashable:
    """Returns a key that leaves with the same operations share; None if one is not elementwise."""

    def kind_of(op: OwnedOperation) -> Hashable:
        name = op.equation.primitive.name
        shapes = [program.avals[atom].shape for atom in op.inputs]
        results = [program.avals[v].shape for v in op.outputs]
        if name == SUM and shapes == [shape] and results == [()]:
            return SUM, str(program.avals[op.outputs[0]].dtype)
        if name == FILL and shapes == [()] and results == [shape]:
            return FILL, str(program.avals[op.outputs[0]].dtype)
        if (
            name in CHEAP_ELEMENTWISE
            and results == [shape]
            and all(s in ((), shape) for s in shapes)
        ):
            return op.key
        return None

    def read(atom: ValueId) -> Hashable:
        """Returns a key of an operand: the name of a value of the leaf, or of a shared scalar."""
        if atom in names:
            is_leaf = program.avals[atom].shape == shape
            return ("of the leaf", names[atom]) if is_leaf else None
        if program.avals[atom].shape != () or program.owners[atom] is not None:
            return None
        return "known", program.value_numbers[atom]

    keys = [(op.level, kind_of(op), tuple(map(read, op.inputs))) for op in operations]
    if shape == () or any(kind is None or None in reads for _, kind, reads in keys):
        return None
    return tuple(keys), tuple(sorted(map(repr, names.values())))


Run: TypeAlias = Callable[[Mapping[StoredKey, Array]], dict[StoredKey, Array]]
"""The stored leaves of all arguments -> those of all results."""


def on_whole_vectors(
    program: OwnedProgram, sources: Ends, targets: Ends, layout: VectorLayout
) -> Run | None:
    """Returns a function that runs a program of leaves on vectors; None if it is not elementwise.

    Args:
        program: a program of the model's leaves; the owner of each leaf in a block is a
            `LeafOwner`.
        sources: the place of each input among the leaves of the arguments.
        targets: the place of each output among the leaves of the results.
        layout: the layout of the vectors.
    """
    leaves = _leaves(program, sources)
    if leaves is None:
        return None
    names = {atom: name for of_leaf in leaves.values() for atom, name in of_leaf.items()}
    if not _sums_all(program, names, targets, layout):
        return None
    # All leaves of a vector have the same operations, so the first leaf's run on the whole vector.
    first: dict[Vector, LeafOwner] = {}
    for owner in leaves:
        first.setdefault(owner[0], owner)
    leaders = {None, *first.values()}

    def run(stored: Mapping[StoredKey, Array]) -> dict[StoredKey, Array]:
        known: dict[ValueId, Array] = {**program.constants}
        for value, place in zip(program.inputs, sources, strict=True):
            if program.owners[value] in leaders:
                known[value] = stored[layout.stored_key(place, 0)]
        for op in program.operations:
            if op.owner in leaders:
                # In a sum over leaves the first leaf's term is already the sum of the whole vector.
                # The other leaves contribute zero.
                operands = [
                    known[a]
                    if program.owners[a] in leaders
                    else jnp.zeros((), program.avals[a].dtype)
                    for a in op.inputs
                ]
                results = _on_vector(program, op, operands, layout)
                known.update(zip(op.outputs, results, strict=True))
        outputs: dict[StoredKey, Array] = {}
        for atom, place in zip(program.outputs, targets, strict=True):
            owner = program.owners[atom]
            if owner in leaders:
                value = as_array(known[atom], program.avals[atom])
                leaf = _leaf_owner(owner)
                outputs[layout.stored_key(place, 1)] = (
                    layout.masked(leaf[0], value) if leaf else value
                )
        return outputs

    return run


def _leaves(program: OwnedProgram, sources: Ends) -> dict[LeafOwner, Names] | None:
    """Returns the values of each leaf; None if leaves of a vector have different operations."""
    leaves: dict[LeafOwner, dict[ValueId, Hashable]] = {}
    shapes: dict[LeafOwner, tuple[int, ...]] = {}
    for value, place in zip(program.inputs, sources, strict=True):
        owner = _leaf_owner(program.owners[value])
        shape = program.avals[value].shape
        if owner is not None:
            leaves.setdefault(owner, {})[value] = (place.tree, place.part)
            if shapes.setdefault(owner, shape) != shape:
                return None
    keys: dict[Vector, Hashable] = {}
    for owner, names in leaves.items():
        operations = program.by_owner.get(owner, ())
        for number, op in enumerate(operations):
            names.update({v: (number, i, "result") for i, v in enumerate(op.outputs)})
        key = _operations_key(program, operations, names, shapes[owner])
        if key is None or keys.setdefault(owner[0], key) != key:
            return None
    return {**leaves}


def _sums_all(program: OwnedProgram, names: Names, targets: Ends, layout: VectorLayout) -> bool:
    """Whether each scalar of a leaf is read only in sums over all leaves of its vector."""
    sums, partial = sums_of(program)
    for terms in sums.values():
        summed: dict[Hashable, list[Keys]] = {}
        for term in terms:
            if (owner := _leaf_owner(program.owners[term])) is not None:
                summed.setdefault((owner[0], names[term]), []).append(owner[1])
        for (vector, _), keys in summed.items():  # type: ignore[misc]
            in_vector = [k for k, owner in layout.owners.items() if owner[0] == vector]
            if sorted(keys, key=repr) != sorted(in_vector, key=repr):
                return False
    shared = program.by_owner.get(None, ())
    others = [op for op in shared if not {*op.outputs} & (sums.keys() | partial)]
    if any(program.owners[atom] is not None for op in others for atom in op.inputs):
        return False
    results: dict[Hashable, Hashable] = {}
    for atom, place, home in zip(program.outputs, targets, program.destinations, strict=True):
        if program.owners[atom] != home:
            return False
        owner = _leaf_owner(home)
        key = owner and (owner[0], place.tree, place.part)
        if owner and results.setdefault(key, names[atom]) != names[atom]:
            return False
    return True


def _on_vector(
    program: OwnedProgram, op: OwnedOperation, operands: Sequence[Array], layout: VectorLayout
) -> Sequence[Array]:
    """Runs a leaf's operation on its whole vector, of all ranks; runs shared ones unchanged."""
    owner = _leaf_owner(op.owner)
    name = op.equation.primitive.name
    if owner is None or name not in (FILL, SUM):
        return eval_equation(op.equation, operands)
    vector = owner[0]
    dtype = program.avals[op.outputs[0]].dtype
    if name == SUM:
        of_ranks = jnp.sum(layout.masked(vector, operands[0]), axis=1, dtype=dtype)
        return [jnp.sum(of_ranks, axis=0, dtype=dtype)]
    return [jnp.full((len(layout.lengths[vector]), layout.sizes[vector]), operands[0], dtype)]


def _leaf_owner(owner: Hashable) -> LeafOwner | None:
    return owner if isinstance(owner, tuple) else None
