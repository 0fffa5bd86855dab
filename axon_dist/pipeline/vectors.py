"""Programs of leaves that lie in vectors, rewritten as programs of rows.

Most optimizers work element by element, but for norms over everything. Leaves that lie one behind
the other in a vector need not be unpacked for these, however differently they are shaped, and a
vector that other mesh axes split stays split (`on_whole_vectors`). For stages that differ, and an
optimizer that needs leaves as they are, every rank unpacks the vectors of its own stages, runs its
operations, and packs the results, in a branch of one operation that all ranks have
(`RankBranches`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Hashable, Mapping, Sequence
from typing import TypeAlias

import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray
from jax.typing import DTypeLike

from ..core.typing import Array
from ..jaxpr.factors import EACH
from ..jaxpr.owners import Atom, ConstantOperand, Equation, OwnedOperation, OwnedProgram, sums_of
from .layout import Keys
from .storage import Cell, FlatStorage
from .stored_form import LeafPlace, StoredForm

FILL, SUM = "broadcast_in_dim", "reduce_sum"

Vector: TypeAlias = tuple[int, int]
"""A chunk, and which of its vectors."""

LeafOwner: TypeAlias = tuple[Vector, int, Keys]
"""The vector in which a leaf lies, the rank that has it, and its keys in the model."""

Ends: TypeAlias = Sequence[tuple[int, LeafPlace]]
"""For each input or output: the number of the tree of which it is a leaf, and its place."""


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
        sources: for each input, which argument it is a leaf of, and its place.
        targets: for each output, which result it is a leaf of, and its place.
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
    for value, (tree, place) in zip(program.inputs, sources, strict=True):
        owner, shape = _leaf_owner(program.owners[value]), program.avals[value].shape
        if owner is not None:
            names.setdefault(owner, {})[value] = (tree, place.part)
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
    for atom, (tree, place), home in zip(program.outputs, targets, program.homes, strict=True):
        if program.owner_of(atom) != home:
            return False
        owner = _leaf_owner(home)
        if owner is None:
            continue
        key = owner[0], tree, place.part
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
        self._avals = list(program.avals)
        self._levels = list(program.levels)

        def cell_of(owner):
            return None if owner is None else self._cells.get(owner)

        self._owners = [cell_of(_leaf_owner(owner)) for owner in program.owners]
        self._functions: dict[tuple[Vector, str, str], Equation] = {}
        for owner, leaf in leaves.items():
            for value in leaf.names:
                if isinstance(value, int) and program.avals[value].shape == leaf.shape:
                    size = (layout.sizes[owner[0]],)
                    self._avals[value] = program.avals[value].update(shape=size)

    def run(self, sources: Ends, targets: Ends) -> tuple[OwnedProgram, Ends, Ends]:
        """The program of vectors, its sources and its targets."""
        operations = [op for old in self._program.operations for op in self._rewritten(old)]
        given = [
            (value, (tree, self._place(place, tree, 0)))
            for value, (tree, place) in zip(self._program.inputs, sources, strict=True)
            if self._stays(value)
        ]
        ends: list[tuple[Atom, tuple[int, LeafPlace], Cell | None]] = []
        for atom, (tree, place) in zip(self._program.outputs, targets, strict=True):
            if self._stays(atom):
                if (owner := _leaf_owner(self._program.owner_of(atom))) is not None:
                    operations += (masked := self._masked(owner[0], owner, atom))
                    atom = masked[-1].outputs[0] if masked else atom
                home = None if owner is None else self._cells[owner]
                ends.append((atom, (tree, self._place(place, tree, 1)), home))
        program = OwnedProgram(
            tuple(operations),
            tuple(value for value, _ in given),
            tuple(atom for atom, _, _ in ends),
            tuple(home for _, _, home in ends),
            tuple(self._owners),
            tuple(self._avals),
            tuple(self._levels),
        )
        return program, [source for _, source in given], [target for _, target, _ in ends]

    def _stays(self, atom: Atom) -> bool:
        """Whether an atom is everybody's, or of a leaf that stands for its vector."""
        owner = _leaf_owner(self._program.owner_of(atom))
        return owner is None or owner in self._leaves

    def _place(self, place: LeafPlace, tree: int, side: int) -> LeafPlace:
        if place.cell is None:
            return place
        vector, rank, _ = self._layout.owners[place.keys]
        slot = self._layout.slots[vector, side, tree, place.part]
        return dataclasses.replace(place, cell=(rank, self._layout.rows[vector]), slot=slot)

    def _rewritten(self, op: OwnedOperation) -> list[OwnedOperation]:
        owner = _leaf_owner(op.owner)
        if owner is None:
            # Of a sum over leaves the terms are left that stand for whole vectors.
            inputs = (a if self._stays(a) else _zero(self._avals[a]) for a in op.inputs)  # type: ignore[index]
            return [dataclasses.replace(op, inputs=tuple(inputs))]
        if owner not in self._leaves:
            return []
        vector, name = owner[0], op.name
        op = dataclasses.replace(op, owner=self._cells[owner])
        if name == FILL:
            size, dtype = self._layout.sizes[vector], self._avals[op.outputs[0]].dtype
            fill = self._function(vector, FILL, dtype, lambda x: [jnp.full(size, x, dtype)])
            return [dataclasses.replace(op, equation=fill)]
        if name == SUM:
            dtype = self._avals[op.outputs[0]].dtype
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
        form = self._avals[atom]
        length = ConstantOperand(np.int32(self._layout.lengths[vector][owner[1]]), _INDEX)
        level, cell = self._levels[atom], self._cells[owner]
        self._avals.append(form)
        self._owners.append(cell)
        self._levels.append(level)
        return [
            OwnedOperation(_first_elements, (atom, length), (len(self._avals) - 1,), cell, level)
        ]


_INDEX = ShapedArray((), np.dtype(np.int32))


def _first_elements(x: Array, length: Array) -> list[Array]:
    place = jnp.arange(x.shape[0], dtype=jnp.int32)
    return [jnp.where(place < length, x, jnp.zeros_like(x))]


def _zero(aval: ShapedArray) -> ConstantOperand:
    return ConstantOperand(np.zeros((), aval.dtype), aval)


def _leaf_owner(owner: Hashable) -> LeafOwner | None:
    return owner if isinstance(owner, tuple) else None
