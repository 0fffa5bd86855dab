"""A tree of the form of a model's state, such as an optimizer's, as a pipeline stores it.

Most optimizers work element by element, but for norms over everything. Leaves that lie one behind
the other in a vector need not be unpacked for these, however differently they are shaped, and a
vector that other mesh axes split stays split (`on_whole_vectors`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray
from jax.typing import DTypeLike

from ..core.errors import UnsupportedError
from ..core.tree import path_str
from ..core.typing import Array, Path, PyTree
from ..jaxpr.factors import EACH
from ..jaxpr.owners import Atom, ConstantOperand, Equation, OwnedOperation, OwnedProgram, sums_of
from .layout import Keys, ParamLike, flatten, nest
from .storage import Cell, FlatStorage, ModelStorage

Slot: TypeAlias = tuple[int, int, Keys | None]
"""A stored leaf: which tree of the arguments or results, which part of it, and its keys."""


@dataclasses.dataclass(frozen=True)
class LeafPlace:
    """Where a leaf of a tree lies in its stored form.

    Args:
        path: of the leaf in the model's form.
        cell: the rank and row that its block has; None for what is in no block.
        part: which part of the tree it lies in.
        keys: of the leaf within the part.
        slot: the keys of the stored leaf within the part; None where it is in a vector.
        tree: the number of the tree among several.
    """

    path: Path
    cell: Cell | None
    part: int
    keys: Keys
    slot: Keys | None
    tree: int = 0

    @property
    def stored(self) -> Slot:
        """The stored leaf that it lies in."""
        return self.tree, self.part, self.slot


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
        return {(number, keys): x for number, part in parts for keys, x in flatten(part).items()}

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


FILL, SUM = "broadcast_in_dim", "reduce_sum"

Vector: TypeAlias = tuple[int, int]
"""A chunk, and which of its vectors."""

LeafOwner: TypeAlias = tuple[Vector, int, Keys]
"""The vector in which a leaf lies, the rank that has it, and its keys in the model."""

Ends: TypeAlias = Sequence[LeafPlace]
"""For each input or output its place among the leaves of all trees."""


class ProgramDraft:
    """A program on its way to another one, which keeps its values and has further ones.

    Args:
        program: the old one.
        owners: of its values in the new one.
    """

    def __init__(self, program: OwnedProgram, owners: Iterable[Cell | None]):
        self.owners: list[Cell | None] = list(owners)
        self.avals, self.levels = list(program.avals), list(program.levels)

    def new(self, aval: ShapedArray, owner: Cell, level: int) -> int:
        """A further value."""
        self.avals.append(aval)
        self.owners.append(owner)
        self.levels.append(level)
        return len(self.avals) - 1

    def finish(
        self,
        operations: Iterable[OwnedOperation],
        sources: Sequence[tuple[int, LeafPlace]],
        targets: Sequence[tuple[Atom, LeafPlace]],
    ) -> tuple[OwnedProgram, Ends, Ends]:
        """The new program, its sources and its targets."""
        program = OwnedProgram(
            tuple(operations),
            tuple(value for value, _ in sources),
            tuple(atom for atom, _ in targets),
            tuple(place.cell for _, place in targets),
            tuple(self.owners),
            tuple(self.avals),
            tuple(self.levels),
        )
        return program, [place for _, place in sources], [place for _, place in targets]


@dataclasses.dataclass(frozen=True, eq=False)
class VectorLayout:
    """How the leaves of several trees lie in vectors, where all trees lie alike.

    Args:
        owners: the owner of a leaf, by its keys.
        slots: by vector, side (0 for arguments, 1 for results), tree and part, the keys of the
            stored vector.
        rows: the number of the row of each vector.
        sizes: how many elements each vector has on a rank.
        lengths: how many of them are elements of leaves, by rank.
    """

    owners: Mapping[Keys, LeafOwner]
    slots: Mapping[tuple[Vector, int, int, int], Keys]
    rows: Mapping[Vector, int]
    sizes: Mapping[Vector, int]
    lengths: Mapping[Vector, tuple[int, ...]]

    @classmethod
    def of(cls, storage: FlatStorage, sides: Sequence[Sequence[StoredForm]]) -> VectorLayout | None:
        """The layout of the parameters, if every part of all trees has it.

        Args:
            storage: of the parameters.
            sides: the stored forms of the arguments, and those of the results.
        """
        order, owners, slots = storage.vectors, {}, {}
        for vector, ranks in order.items():
            owners.update({k: (vector, rank, k) for rank, keys in enumerate(ranks) for k in keys})
        for side, forms in enumerate(sides):
            parts = [
                (tree, *p) for tree, form in enumerate(forms) for p in enumerate(form.storages)
            ]
            for tree, part, other in parts:
                if other is None:
                    continue
                if not isinstance(other, FlatStorage) or other.vectors != order:
                    return None
                for chunk, number in order:
                    slots[(chunk, number), side, tree, part] = other.row_names[chunk][number]

        def size(keys):
            return sum(math.prod(storage.flat_shapes[k].shape) for k in keys)

        lengths = {v: tuple(size(keys) for keys in ranks) for v, ranks in order.items()}
        sizes = {v: storage.packing.packed[v[1]].shape[0] for v in order}
        return cls(owners, slots, {v: row for row, v in enumerate(order)}, sizes, lengths)

    def is_padded(self, vector: Vector) -> bool:
        """Whether some rank has fewer elements than the vector has room for."""
        return min(self.lengths[vector]) < self.sizes[vector]


@dataclasses.dataclass(frozen=True, eq=False)
class Leaf:
    """What a program does to one leaf.

    Args:
        shape: of the leaf.
        operations: that are the leaf's, in order.
        names: of the leaf's values, alike for all leaves that are treated alike.
    """

    shape: tuple[int, ...]
    operations: tuple[OwnedOperation, ...]
    names: Mapping[Atom, Hashable]

    def key(self, program: OwnedProgram) -> Hashable:
        """What leaves that are treated alike have in common; None where one is not elementwise."""
        if self.shape == ():
            return None
        keys: list[Hashable] = []
        for op in self.operations:
            kind = self._kind(program, op)
            reads = tuple(self._read(program, atom) for atom in op.inputs)
            if kind is None or None in reads:
                return None
            keys.append((op.level, kind, reads))
        return tuple(keys), tuple(sorted(map(repr, self.names.values())))

    def _kind(self, program: OwnedProgram, op: OwnedOperation) -> Hashable:
        name = op.name
        shapes = [program.aval_of(atom).shape for atom in op.inputs]
        results = [program.avals[v].shape for v in op.outputs]
        if name == SUM and shapes == [self.shape] and results == [()]:
            return SUM, str(program.avals[op.outputs[0]].dtype)
        if name == FILL and shapes == [()] and results == [self.shape]:
            return FILL, str(program.avals[op.outputs[0]].dtype)
        if name in EACH and results == [self.shape] and all(s in ((), self.shape) for s in shapes):
            return op.key
        return None

    def _read(self, program: OwnedProgram, atom: Atom) -> Hashable:
        """A key of an operand: the name of a value of the leaf, or a number that all ranks know."""
        if atom in self.names:
            is_leaf = program.aval_of(atom).shape == self.shape
            return ("of the leaf", self.names[atom]) if is_leaf else None
        if program.aval_of(atom).shape != () or program.owner_of(atom) is not None:
            return None
        return "known", program.spelled(atom)


def on_whole_vectors(
    program: OwnedProgram, sources: Ends, targets: Ends, layout: VectorLayout
) -> tuple[OwnedProgram, Ends, Ends] | None:
    """A program of leaves as one of vectors, or None where it does not work element by element.

    Args:
        program: of the model's leaves; the owner of each leaf in a block is a `LeafOwner`.
        sources: for each input, its place among the leaves of the arguments.
        targets: for each output, its place among those of the results.
        layout: of the vectors.

    Returns:
        The program, whose owners are cells (a rank and the row of a vector), its sources and its
        targets.
    """
    leaves = _leaves(program, sources)
    if leaves is None or not _sums_all(program, leaves, targets, layout):
        return None
    first: dict[tuple[Vector, int], LeafOwner] = {}
    for owner in leaves:
        first.setdefault(owner[:2], owner)
    rewriting = _Rewriting(program, {owner: leaves[owner] for owner in first.values()}, layout)
    return rewriting.run(sources, targets)


def _leaves(program: OwnedProgram, sources: Ends) -> dict[LeafOwner, Leaf] | None:
    """What the program does to each leaf, if it treats all leaves of a vector alike."""
    names: dict[LeafOwner, dict[Atom, Hashable]] = {}
    shapes: dict[LeafOwner, tuple[int, ...]] = {}
    for value, place in zip(program.inputs, sources, strict=True):
        owner, shape = _leaf_owner(program.owners[value]), program.avals[value].shape
        if owner is not None:
            names.setdefault(owner, {})[value] = (place.tree, place.part)
            if shapes.setdefault(owner, shape) != shape:
                return None
    leaves: dict[LeafOwner, Leaf] = {}
    keys: dict[Vector, Hashable] = {}
    for owner, named in names.items():
        operations = program.of(owner)
        for number, op in enumerate(operations):
            named.update({v: (number, i, "result") for i, v in enumerate(op.outputs)})
        leaves[owner] = Leaf(shapes[owner], operations, named)
        key = leaves[owner].key(program)
        if key is None or keys.setdefault(owner[0], key) != key:
            return None
    return leaves


def _sums_all(
    program: OwnedProgram, leaves: Mapping[LeafOwner, Leaf], targets: Ends, layout: VectorLayout
) -> bool:
    """Whether vectors suffice: numbers of leaves are read in sums over all leaves of a vector."""
    sums, partial = sums_of(program)
    names = {atom: name for leaf in leaves.values() for atom, name in leaf.names.items()}
    for terms in sums.values():
        found: dict[Hashable, list[Keys]] = {}
        for term in terms:
            if (owner := _leaf_owner(program.owner_of(term))) is not None:
                found.setdefault((owner[0], names[term]), []).append(owner[2])
        for (vector, _), keys in found.items():  # type: ignore[misc]
            whole = [k for k, owner in layout.owners.items() if owner[0] == vector]
            if sorted(keys, key=repr) != sorted(whole, key=repr):
                return False
    shared = [op for op in program.of(None) if not {*op.outputs} & (sums.keys() | partial)]
    if any(program.owner_of(atom) is not None for op in shared for atom in op.inputs):
        return False
    results: dict[Hashable, Hashable] = {}
    for atom, place, home in zip(program.outputs, targets, program.homes, strict=True):
        if program.owner_of(atom) != home:
            return False
        owner = _leaf_owner(home)
        if owner is None:
            continue
        key = owner[0], place.tree, place.part
        if results.setdefault(key, names[atom]) != names[atom]:
            return False
    return True


class _Rewriting:
    """Rewrites a program of leaves that are treated alike: one leaf stands for a rank's vector."""

    def __init__(
        self, program: OwnedProgram, leaves: Mapping[LeafOwner, Leaf], layout: VectorLayout
    ):
        self._program, self._leaves, self._layout = program, leaves, layout
        self._cells: dict[LeafOwner, Cell] = {o: (o[1], layout.rows[o[0]]) for o in leaves}
        owners = map(_leaf_owner, program.owners)
        self._draft = ProgramDraft(program, (o and self._cells.get(o) for o in owners))
        self._functions: dict[tuple[Vector, str, str], Equation] = {}
        for owner, leaf in leaves.items():
            for value in leaf.names:
                if isinstance(value, int) and program.avals[value].shape == leaf.shape:
                    size = (layout.sizes[owner[0]],)
                    self._draft.avals[value] = program.avals[value].update(shape=size)

    def run(self, sources: Ends, targets: Ends) -> tuple[OwnedProgram, Ends, Ends]:
        """The program of vectors, its sources and its targets."""
        operations = [op for old in self._program.operations for op in self._rewritten(old)]
        given = [
            (value, self._place(place, 0))
            for value, place in zip(self._program.inputs, sources, strict=True)
            if self._stays(value)
        ]
        ends: list[tuple[Atom, LeafPlace]] = []
        for atom, place in zip(self._program.outputs, targets, strict=True):
            if self._stays(atom):
                if (owner := _leaf_owner(self._program.owner_of(atom))) is not None:
                    operations += (masked := self._masked(owner[0], owner, atom))
                    atom = masked[-1].outputs[0] if masked else atom
                ends.append((atom, self._place(place, 1)))
        return self._draft.finish(operations, given, ends)

    def _stays(self, atom: Atom) -> bool:
        """Whether an atom is everybody's, or of a leaf that stands for its vector."""
        owner = _leaf_owner(self._program.owner_of(atom))
        return owner is None or owner in self._leaves

    def _place(self, place: LeafPlace, side: int) -> LeafPlace:
        if place.cell is None:
            return place
        vector, rank, _ = self._layout.owners[place.keys]
        slot = self._layout.slots[vector, side, place.tree, place.part]
        return dataclasses.replace(place, cell=(rank, self._layout.rows[vector]), slot=slot)

    def _rewritten(self, op: OwnedOperation) -> list[OwnedOperation]:
        owner = _leaf_owner(op.owner)
        if owner is None:
            # Of a sum over leaves the terms are left that stand for whole vectors.
            inputs = (a if self._stays(a) else _zero(self._draft.avals[a]) for a in op.inputs)  # type: ignore[index]
            return [dataclasses.replace(op, inputs=tuple(inputs))]
        if owner not in self._leaves:
            return []
        vector, name = owner[0], op.name
        op = dataclasses.replace(op, owner=self._cells[owner])
        if name == FILL:
            size, dtype = self._layout.sizes[vector], self._draft.avals[op.outputs[0]].dtype
            fill = self._function(vector, FILL, dtype, lambda x: [jnp.full(size, x, dtype)])
            return [dataclasses.replace(op, equation=fill)]
        if name == SUM:
            dtype = self._draft.avals[op.outputs[0]].dtype
            masked = self._masked(vector, owner, op.inputs[0])
            summed = masked[-1].outputs[0] if masked else op.inputs[0]
            add_up = self._function(vector, SUM, dtype, lambda x: [jnp.sum(x, dtype=dtype)])
            return [*masked, dataclasses.replace(op, equation=add_up, inputs=(summed,))]
        return [op]

    def _function(self, vector: Vector, name: str, dtype: DTypeLike, new: Equation) -> Equation:
        """One function for all ranks, by which their parts of the program are seen to be alike."""
        return self._functions.setdefault((vector, name, str(dtype)), new)

    def _masked(self, vector: Vector, owner: LeafOwner, atom: Atom) -> list[OwnedOperation]:
        """Puts zeros behind the elements that a rank has; nothing where vectors are full."""
        if not self._layout.is_padded(vector) or not isinstance(atom, int):
            return []
        form = self._draft.avals[atom]
        length = ConstantOperand(np.int32(self._layout.lengths[vector][owner[1]]), _INDEX)
        level, cell = self._draft.levels[atom], self._cells[owner]
        masked = self._draft.new(form, cell, level)
        return [OwnedOperation(_first_elements, (atom, length), (masked,), cell, level)]


_INDEX = ShapedArray((), np.dtype(np.int32))


def _first_elements(x: Array, length: Array) -> list[Array]:
    place = jnp.arange(x.shape[0], dtype=jnp.int32)
    return [jnp.where(place < length, x, jnp.zeros_like(x))]


def _zero(aval: ShapedArray) -> ConstantOperand:
    return ConstantOperand(np.zeros((), aval.dtype), aval)


def _leaf_owner(owner: Hashable) -> LeafOwner | None:
    return owner if isinstance(owner, tuple) else None
