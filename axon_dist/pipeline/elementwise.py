"""Runs a program that treats every element alike on whole vectors of leaves.

Most optimizers work element by element, but for norms over everything. Leaves that lie one behind
the other in a vector need not be taken apart for these, however differently they are shaped, and
a vector that other axes split stays split. What is done to leaves is read off the program of the
model's leaves; any operation that is not known to work element by element rules this form out.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, TypeAlias

import jax.numpy as jnp

from ..core.compat import eval_equation
from ..program.alike import hashable_params
from ..program.owners import Atom, Constant, Operation, OwnedProgram
from ..program.primitives import EACH
from ..program.sums import sums_of
from .form import Place, StoredForm
from .layout import Keys
from .rowwise import Slot
from .storage import FlatStorage

FILL, SUM = "broadcast_in_dim", "reduce_sum"

Vector: TypeAlias = tuple[int, int]
"""A chunk, and which of its vectors."""


@dataclasses.dataclass(frozen=True, eq=False)
class Leaf:
    """What a program does to one leaf.

    Args:
        shape: of the leaf.
        operations: that are the leaf's, in order.
        names: of the leaf's values, alike for all leaves that are treated alike.
    """

    shape: tuple[int, ...]
    operations: tuple[Operation, ...]
    names: Mapping[Atom, Hashable]

    def spelled(self, program: OwnedProgram) -> list[Hashable] | None:
        """The operations without the shape; None where one is not element by element."""
        found: list[Hashable] = []
        for op in self.operations:
            kind = self._kind(program, op)
            reads = [self._read(program, atom) for atom in op.inputs]
            if kind is None or None in reads:
                return None
            found.append((op.level, kind, tuple(reads)))
        return found

    def _kind(self, program: OwnedProgram, op: Operation) -> Hashable:
        name = op.equation.primitive.name
        shapes = [program.aval_of(atom).shape for atom in op.inputs]
        made = [program.avals[v].shape for v in op.outputs]
        if name == SUM and shapes == [self.shape] and made == [()]:
            return SUM, str(program.avals[op.outputs[0]].dtype)
        if name == FILL and shapes == [()] and made == [self.shape]:
            return FILL, str(program.avals[op.outputs[0]].dtype)
        if name in EACH and made == [self.shape] and all(s in ((), self.shape) for s in shapes):
            return (
                None if (params := hashable_params(op.equation.params)) is None else (name, params)
            )
        return None

    def _read(self, program: OwnedProgram, atom: Atom) -> Hashable:
        """How an operand is spelled: a value of the leaf, or a number that all know."""
        if atom in self.names:
            is_leaf = program.aval_of(atom).shape == self.shape
            return ("own", self.names[atom]) if is_leaf else None
        if program.aval_of(atom).shape != () or program.owner_of(atom) is not None:
            return None
        return "known", program.spelled(atom)


class ElementwiseProgram:
    """A program of a model's leaves, made one of vectors of leaves.

    Args:
        program: of the model's leaves, each of which in a block is an owner: its chunk, the number
            of its vector, its rank and its keys.
        leaves: what it does to each.
        sources: for each input, which argument it is a leaf of, and where.
        targets: for each output, which result it is a leaf of, and where.
        layout: of the vectors.
    """

    def __init__(
        self,
        program: OwnedProgram,
        leaves: Mapping[Hashable, Leaf],
        sources: Sequence[tuple[int, Place]],
        targets: Sequence[tuple[int, Place]],
        layout: Layout,
    ):
        self._program, self._layout = program, layout
        self._sources = list(zip(program.inputs, sources, strict=True))
        self._targets = list(zip(program.outputs, targets, strict=True))
        self._first: dict[Vector, Leaf] = {}
        for owner, leaf in leaves.items():
            self._first.setdefault(owner[:2], leaf)  # type: ignore[index]
        sums, self._partial = sums_of(program)
        names = {atom: name for leaf in leaves.values() for atom, name in leaf.names.items()}
        self._sums: dict[Atom, tuple[dict[Any, list[Atom]], list[Atom]]] = {}
        for value, terms in sums.items():
            rows: dict[Any, list[Atom]] = {}
            for term in terms:
                if (owner := program.owner_of(term)) is not None:
                    key = (owner[:2], names[term])  # type: ignore[index]
                    rows.setdefault(key, []).append(term)
            single = [term for term in terms if program.owner_of(term) is None]
            self._sums[value] = rows, single
        self._names = names

    @property
    def is_right(self) -> bool:
        """Whether vectors tell all that the program reads: sums over them, no leaf's alone."""
        program = self._program
        counts: dict[Vector, int] = {}
        for owner in {o for o in (*program.owners, *program.homes) if o is not None}:
            counts[owner[:2]] = counts.get(owner[:2], 0) + 1  # type: ignore[index]
        summed = all(
            len(found) == len(set(found)) == counts[vector]
            for rows, _ in self._sums.values()
            for (vector, _), found in rows.items()
        )
        single = [
            atom
            for op in program.of(None)
            if op.outputs[0] not in self._sums and op.outputs[0] not in self._partial
            for atom in op.inputs
        ]
        alone = any(program.owner_of(atom) is not None for atom in single)
        ends: dict[Any, set[Hashable]] = {}
        for (atom, (tree, place)), home in zip(self._targets, program.homes, strict=True):
            if program.owner_of(atom) != home:
                return False
            if home is not None:
                key = (home[:2], tree, place.part)  # type: ignore[index]
                ends.setdefault(key, set()).add(self._names[atom])
        return summed and not alone and all(len(n) == 1 for n in ends.values())

    def run(self, stored: Mapping[Slot, Any]) -> dict[Slot, Any]:
        """Runs the program.

        Args:
            stored: the stored leaves of all arguments.

        Returns:
            The stored leaves of all results.
        """
        known: dict[Atom, Any] = {
            value: stored[tree, place.part, place.keys]
            for value, (tree, place) in self._sources
            if place.cell is None
        }
        made: dict[tuple[Vector, Hashable], Any] = {
            (vector, (tree, part)): stored[slot]
            for (vector, side, tree, part), slot in self._layout.slots.items()
            if side == 0
        }
        for level in range(self._program.num_levels):
            for op in self._program.of(None):
                if op.level == level and op.outputs[0] not in self._partial:
                    known.update(zip(op.outputs, self._run_for_all(op, made, known), strict=True))
            for vector, leaf in self._first.items():
                for op in leaf.operations:
                    if op.level == level:
                        self._run_on(vector, leaf, op, made, known)
        return self._collect(made, known)

    def _run_for_all(self, op: Operation, made: Mapping[Any, Any], known: Any) -> Sequence[Any]:
        if op.outputs[0] not in self._sums:
            return eval_equation(op.equation, [_value(a, known) for a in op.inputs])
        rows, single = self._sums[op.outputs[0]]
        terms = [*(_value(a, known) for a in single), *(made[key] for key in rows)]
        return [functools.reduce(jnp.add, terms).astype(self._program.avals[op.outputs[0]].dtype)]

    def _run_on(
        self, vector: Vector, leaf: Leaf, op: Operation, made: dict[Any, Any], known: Any
    ) -> None:
        read = lambda a: made[vector, leaf.names[a]] if a in leaf.names else _value(a, known)
        operands, dtype = [read(a) for a in op.inputs], self._program.avals[op.outputs[0]].dtype
        if op.equation.primitive.name == SUM:
            result = jnp.sum(self._own_elements(vector, operands[0]), dtype=dtype)
        elif op.equation.primitive.name == FILL:
            result = jnp.full(self._layout.shapes[vector], operands[0], dtype)
        else:
            (result,) = eval_equation(op.equation, operands)
        made[vector, leaf.names[op.outputs[0]]] = result

    def _own_elements(self, vector: Vector, x: Any) -> Any:
        """A vector, zeros where a rank has no elements."""
        lengths = self._layout.lengths[vector]
        if min(lengths) == x.shape[1]:
            return x
        has = jnp.arange(x.shape[1]) < jnp.array(lengths)[:, None]
        return jnp.where(has, x, jnp.zeros_like(x))

    def _collect(self, made: Mapping[Any, Any], known: Any) -> dict[Slot, Any]:
        found: dict[Slot, Any] = {}
        for (atom, (tree, place)), home in zip(self._targets, self._program.homes, strict=True):
            if home is None:
                aval = self._program.aval_of(atom)
                found[tree, place.part, place.keys] = jnp.asarray(_value(atom, known), aval.dtype)
                continue
            vector: Any = home[:2]  # type: ignore[index]
            slot = self._layout.slots[vector, 1, tree, place.part]
            if slot not in found:
                found[slot] = self._own_elements(vector, made[vector, self._names[atom]])
        return found


@dataclasses.dataclass(frozen=True, eq=False)
class Layout:
    """How the leaves of several trees lie in vectors, where all lie alike.

    Args:
        owners: the owner of a leaf, by its keys.
        slots: by vector, side (0 for arguments, 1 for results), tree and part, the stored vector.
        shapes: of each vector.
        lengths: how many elements of each vector every rank has.
    """

    owners: Mapping[Keys, tuple[int, int, int, Keys]]
    slots: Mapping[tuple[Vector, int, int, int], Slot]
    shapes: Mapping[Vector, tuple[int, int]]
    lengths: Mapping[Vector, tuple[int, ...]]

    @classmethod
    def find(cls, storage: FlatStorage, sides: Sequence[Sequence[StoredForm]]) -> Layout | None:
        """The layout of the parameters, if every part of all trees has it."""
        owners: dict[Keys, Any] = {}
        order, slots = storage.vectors, {}
        for vector, ranks in order.items():
            owners.update({k: (*vector, rank, k) for rank, ks in enumerate(ranks) for k in ks})
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
                    slot = (tree, part, other.row_names[chunk][number])
                    slots[(chunk, number), side, tree, part] = slot
        size = lambda keys: sum(math.prod(storage.leaf(k).shape) for k in keys)
        lengths = {v: tuple(size(keys) for keys in ranks) for v, ranks in order.items()}
        longest = {n: form.shape[0] for n, form in enumerate(storage.packing.packed)}
        shapes = {v: (len(ranks), longest[v[1]]) for v, ranks in order.items()}
        return cls(owners, slots, shapes, lengths)


def elementwise(
    trace: Callable[[Mapping[Keys, Any]], OwnedProgram],
    sources: Sequence[tuple[int, Place]],
    targets: Sequence[tuple[int, Place]],
    layout: Layout,
) -> ElementwiseProgram | None:
    """The program on whole vectors, or None where it does not work element by element.

    Args:
        trace: finds the owned program, given the owner of each leaf by its keys.
        sources: for each input, which argument it is a leaf of, and where.
        targets: for each output, which result it is a leaf of, and where.
        layout: of the vectors.
    """
    program = trace(layout.owners)
    names: dict[Any, dict[Atom, Hashable]] = {}
    shapes: dict[Any, tuple[int, ...]] = {}
    for value, (tree, place) in zip(program.inputs, sources, strict=True):
        if (owner := program.owners[value]) is not None:
            names.setdefault(owner, {})[value] = (tree, place.part)
            if shapes.setdefault(owner, program.avals[value].shape) != program.avals[value].shape:
                return None
    leaves, spellings = {}, {}
    for owner, own in names.items():
        operations = program.of(owner)
        for number, op in enumerate(operations):
            own.update({v: (number, i, "made") for i, v in enumerate(op.outputs)})
        leaves[owner] = Leaf(shapes[owner], operations, own)
        spelled = (leaves[owner].spelled(program), sorted(map(repr, own.values())))
        if spelled[0] is None or spellings.setdefault(owner[:2], spelled) != spelled:
            return None
        if shapes[owner] == ():
            return None
    found = ElementwiseProgram(program, leaves, sources, targets, layout)
    return found if found.is_right else None


def _value(atom: Atom, known: Mapping[Atom, Any]) -> Any:
    return atom.value if isinstance(atom, Constant) else known[atom]
