"""Runs a program of a model's leaves on vectors that hold the leaves of stages that differ.

Every rank unpacks the vectors of its own stages, runs what of the program is theirs, and packs the
results. The parts have nothing in common, so each rank takes the branch with its own.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ..core.compat import eval_equation
from ..program.owners import Atom, Constant, Operation, OwnedProgram
from .form import Place, StoredForm
from .layout import Keys
from .packing import Packing
from .rowwise import Slot
from .storage import FlatStorage, Stages


class VectorProgram:
    """A program of a model's leaves, made one of the vectors that ranks hold.

    Args:
        program: of the model's leaves; owners are cells: a rank and a chunk.
        sources: for each input, which argument it is a leaf of, and where.
        targets: for each output, which result it is a leaf of, and where.
        arguments: the stored forms of the arguments.
        results: the stored forms of the results.
        stages: which blocks are where.
        mesh: names and sizes of its axes, over all devices.
        axis: the axis of the pipeline.
    """

    def __init__(
        self,
        program: OwnedProgram,
        sources: Sequence[tuple[int, Place]],
        targets: Sequence[tuple[int, Place]],
        arguments: Sequence[StoredForm],
        results: Sequence[StoredForm],
        stages: Stages,
        mesh: Mesh,
        axis: str,
    ):
        self._program, self._mesh, self._axis = program, mesh, axis
        self._arguments, self._results, self._stages = arguments, results, stages
        self._sources = dict(zip(program.inputs, sources, strict=True))
        self._targets = list(zip(program.outputs, targets, strict=True))
        self._ranks = range(stages.num_devices)

    def run(self, stored: Mapping[Slot, Any]) -> dict[Slot, Any]:
        """Runs the program.

        Args:
            stored: the stored leaves of all arguments.

        Returns:
            The stored leaves of all results.
        """
        known: dict[Atom, Any] = {
            value: stored[tree, place.part, place.keys]
            for value, (tree, place) in self._sources.items()
            if place.cell is None
        }
        # Vectors that other axes split would have to be moved in branches, where permutes hang.
        place = NamedSharding(self._mesh, PartitionSpec(self._axis))
        rows = {
            slot: jax.lax.with_sharding_constraint(stored[slot], place)
            for slot in _rows_of(self._arguments)
        }
        kept: list[Any] = []
        found: list[Any] = []
        for level in range(self._program.num_levels):
            for op in self._program.of(None):
                if op.level == level:
                    results = eval_equation(op.equation, [_value(a, known) for a in op.inputs])
                    known.update(zip(op.outputs, results, strict=True))
            mine, handed, found = self._run_level(level, list(rows.values()), kept, known)
            kept.append(mine)
            self._take_over(level, handed, known)
        outputs: dict[Slot, Any] = dict(zip(_rows_of(self._results), found, strict=True))
        for atom, (tree, place) in self._targets:
            if place.cell is None:
                aval = self._program.aval_of(atom)
                outputs[tree, place.part, place.keys] = _array(_value(atom, known), aval)
        return outputs

    def _run_level(
        self, level: int, rows: list[Any], kept: list[Any], known: Mapping[Atom, Any]
    ) -> tuple[list[Any], list[Any], list[Any]]:
        """Every rank runs its own operations of a level, and in the last one packs the results."""
        shared = {a: known[a] for a in self._read_at(level)}

        def on_rank(rows: list[Any], kept: list[Any], shared: list[Any]) -> Any:
            given = (
                [x[0] for x in rows],
                [[x[0] for x in vectors] for vectors in kept],
                shared,
            )
            branches = [functools.partial(self._branch, rank, level) for rank in self._ranks]
            found = jax.lax.switch(jax.lax.axis_index(self._axis), branches, *given)
            return jax.tree.map(lambda x: x[None], found)

        own, whole = PartitionSpec(self._axis), PartitionSpec()
        mapped = jax.shard_map(
            on_rank,
            mesh=self._mesh,
            axis_names=frozenset({self._axis}),
            in_specs=(own, own, whole),
            out_specs=own,
            check_vma=False,
        )
        # Numbers that all know come whole, too.
        everywhere = NamedSharding(self._mesh, PartitionSpec())
        known_to_all = [
            jax.lax.with_sharding_constraint(jnp.asarray(x), everywhere) for x in shared.values()
        ]
        found = mapped(rows, kept, known_to_all)
        place = NamedSharding(self._mesh, own)
        return jax.tree.map(lambda x: jax.lax.with_sharding_constraint(x, place), found)

    def _branch(
        self, rank: int, level: int, rows: list[Any], kept: list[Any], shared: list[Any]
    ) -> tuple[list[Any], list[Any], list[Any]]:
        values: dict[Atom, Any] = dict(zip(self._read_at(level), shared, strict=True))
        slots = dict(zip(_rows_of(self._arguments), rows, strict=True))
        leaves = self._unpacked(rank, slots)
        values.update({v: leaves[tree, p.part, p.keys] for v, (tree, p) in self._of(rank)})
        for before, vectors in enumerate(kept):
            unpacked = self._packing(self._kept, before).unpack(rank, vectors)
            values.update(zip(self._kept[before][rank], unpacked, strict=True))
        for op in self._operations_of(rank, level):
            results = eval_equation(op.equation, [_value(a, values) for a in op.inputs])
            values.update(zip(op.outputs, results, strict=True))
        pack = lambda which: self._packing(which, level).pack(
            rank, [values[v] for v in which[level][rank]]
        )
        is_last = level == self._program.num_levels - 1
        results = self._packed(rank, values) if is_last else []
        return pack(self._kept), pack(self._handed), results

    def _unpacked(self, rank: int, slots: Mapping[Slot, Any]) -> dict[tuple[int, int, Keys], Any]:
        """The leaves of a rank's blocks, of all arguments."""
        found = {}
        for tree, part, storage in _storages(self._arguments):
            for chunk, names in enumerate(storage.row_names):
                if (stage := self._stage_at(rank, chunk)) is not None:
                    vectors = [slots[tree, part, name] for name in names]
                    leaves = storage.block_weights(stage, [vectors])
                    found.update({(tree, part, keys): x for keys, x in leaves.items()})
        return found

    def _packed(self, rank: int, values: Mapping[Atom, Any]) -> list[Any]:
        """The vectors of a rank, of all results."""
        flat = {
            (tree, place.part, place.keys): _array(
                _value(atom, values), self._program.aval_of(atom)
            )
            for atom, (tree, place) in self._targets
            if place.cell is not None and place.cell[0] == rank
        }
        vectors: list[Any] = []
        for tree, part, storage in _storages(self._results):
            own = {keys: x for (t, p, keys), x in flat.items() if (t, p) == (tree, part)}
            for chunk in range(len(storage.row_names)):
                vectors += storage.packed(own, chunk, rank)
        return vectors

    def _take_over(self, level: int, handed: list[Any], known: dict[Atom, Any]) -> None:
        """Makes known to all what ranks hand over at a level."""
        whole = NamedSharding(self._mesh, PartitionSpec())
        vectors = [jax.lax.with_sharding_constraint(x, whole) for x in handed]
        packing = self._packing(self._handed, level)
        for rank in self._ranks:
            unpacked = packing.unpack(rank, [x[rank] for x in vectors])
            known.update(zip(self._handed[level][rank], unpacked, strict=True))

    def _packing(self, which: list[list[list[int]]], level: int) -> Packing:
        """How values of a level lie in vectors that are alike on all ranks."""
        avals = self._program.avals
        return Packing.of([[avals[v] for v in values] for values in which[level]])

    def _stage_at(self, rank: int, chunk: int) -> int | None:
        stages = self._stages.stages_of(chunk)
        return next((s for s in stages if self._stages.placement[s] == rank), None)

    def _of(self, rank: int) -> list[tuple[int, tuple[int, Place]]]:
        sources = self._sources.items()
        return [(v, s) for v, s in sources if s[1].cell is not None and s[1].cell[0] == rank]

    def _operations_of(self, rank: int, level: int) -> list[Operation]:
        return [
            op for op in self._program.operations if _rank(op.owner) == rank and op.level == level
        ]

    def _read_at(self, level: int) -> list[int]:
        """What operations of ranks read that is not theirs, and in the last level return."""
        reads = [
            (a, _rank(op.owner))
            for op in self._program.operations
            if op.owner is not None and op.level == level
            for a in op.inputs
        ]
        if level == self._program.num_levels - 1:
            targets = [(atom, place.cell) for atom, (_, place) in self._targets]
            reads += [(atom, cell[0]) for atom, cell in targets if cell is not None]
        foreign = [
            a
            for a, rank in reads
            if isinstance(a, int) and _rank(self._program.owners[a]) not in (rank,)
        ]
        return list(dict.fromkeys(foreign))

    @cached_property
    def _handed(self) -> list[list[list[int]]]:
        """By level and rank, the values that others read."""
        reads = [(a, _rank(op.owner)) for op in self._program.operations for a in op.inputs]
        reads += [(atom, _rank(home)) for atom, home in self._ends]
        owners = self._program.owners
        return self._sorted(
            a for a, by in reads if isinstance(a, int) and _rank(owners[a]) not in (None, by)
        )

    @cached_property
    def _kept(self) -> list[list[list[int]]]:
        """By level and rank, the values that the rank itself reads at a later level."""
        levels, owners = self._program.levels, self._program.owners
        last = self._program.num_levels - 1
        reads = [(a, op.owner, op.level) for op in self._program.operations for a in op.inputs]
        reads += [(atom, home, last) for atom, home in self._ends]
        return self._sorted(
            a
            for a, by, at in reads
            if isinstance(a, int)
            and a not in self._sources
            and owners[a] is not None
            and _rank(owners[a]) == _rank(by)
            and levels[a] < at
        )

    @property
    def _ends(self) -> list[tuple[Atom, Any]]:
        return list(zip(self._program.outputs, self._program.homes, strict=True))

    def _sorted(self, values: Iterable[int]) -> list[list[list[int]]]:
        found: list[list[list[int]]] = [
            [[] for _ in self._ranks] for _ in range(self._program.num_levels)
        ]
        for value in dict.fromkeys(values):
            found[self._program.levels[value]][_rank(self._program.owners[value])].append(value)  # type: ignore[index]
        return found


def _storages(forms: Sequence[StoredForm]) -> Iterator[tuple[int, int, FlatStorage]]:
    for tree, form in enumerate(forms):
        for part, storage in enumerate(form.storages):
            if isinstance(storage, FlatStorage):
                yield tree, part, storage


def _rows_of(forms: Sequence[StoredForm]) -> list[Slot]:
    """The slots of the vectors of some trees."""
    return [
        (tree, part, keys) for tree, part, storage in _storages(forms) for keys in storage.row_keys
    ]


def _rank(owner: Any) -> int | None:
    return None if owner is None else owner[0]


def _value(atom: Atom, known: Mapping[Atom, Any]) -> Any:
    return atom.value if isinstance(atom, Constant) else known[atom]


def _array(value: Any, aval: Any) -> Any:
    is_key = jnp.issubdtype(aval.dtype, jax.dtypes.extended)
    return value if is_key else jnp.asarray(value, aval.dtype)
