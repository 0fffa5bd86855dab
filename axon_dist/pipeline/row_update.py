"""Runs an optimizer's update on parameters that are stacked by rank.

The update is traced on the model's own tree, so it sees every leaf as on one device. The
operations on a block's leaves are that block's part of the program. A row has one block on each
rank. Blocks of a row with equal parts run as one `jax.vmap` over the ranks. If the parts differ
only in scalars, such as learning rates per layer, the scalars are stacked. If they differ in
operations, every variant runs, and each rank keeps the results of its own. Only shared values, such
as norms, are communicated between ranks.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Hashable, Mapping, Sequence
from typing import TypeAlias

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ..core.compat import eval_equation
from ..core.typing import Array
from ..ir.walk import same
from .owners import OwnedOperation, OwnedProgram, ValueId, as_array, sums_of
from .storage import RankRow
from .tree_storage import LeafPlace, StoredKey

Name: TypeAlias = Hashable
"""The name of a value in a block's part, equal for all blocks that have an equal part."""

Arrays: TypeAlias = Sequence[Array]
Named: TypeAlias = dict[Name, Array]

VariantPlace: TypeAlias = tuple[int, Name]
"""The number of the variant that computes a value, and the value's name in it."""


@dataclasses.dataclass(frozen=True, eq=False)
class BlockPart:
    """One block's part of a program.

    Args:
        operations: the operations of the block, in order.
        names: the names of the block's values.
    """

    operations: tuple[OwnedOperation, ...]
    names: Mapping[ValueId, Name]

    def is_like(self, other: BlockPart, program: OwnedProgram) -> bool:
        """Whether another block's part has the same operations, up to shared values."""

        def reads(part: BlockPart, op: OwnedOperation) -> list[Name]:
            avals = [(atom, program.avals[atom]) for atom in op.inputs]
            return [part.names.get(atom, (aval.shape, aval.dtype)) for atom, aval in avals]

        def are_equal(op: OwnedOperation, other_op: OwnedOperation) -> bool:
            return (
                op.equation.primitive is other_op.equation.primitive
                and same(op.equation.params, other_op.equation.params)
                and op.level == other_op.level
                and reads(self, op) == reads(other, other_op)
            )

        if len(self.operations) != len(other.operations):
            return False
        return all(map(are_equal, self.operations, other.operations))


RowVariant: TypeAlias = Mapping[int, BlockPart]
"""The equal parts of blocks of one row, by rank; the first one is run for all ranks."""


@dataclasses.dataclass(frozen=True, eq=False)
class _Sum:
    """A sum over blocks.

    Args:
        rows: the rows that are summed over their ranks, with the ranks that have a term.
        single: the terms that are not summed as rows.
    """

    rows: Mapping[VariantPlace, tuple[int, ...]]
    single: tuple[ValueId, ...]


class RowProgram:
    """Runs a program of a model's leaves on rows that stack these leaves by rank.

    Args:
        program: a program of the model's leaves; owners are `RankRow`s.
        sources: the place of each input among the leaves of the arguments.
        targets: the place of each output among the leaves of the results.
        mesh: the mesh of all devices.
        num_ranks: the number of ranks along the pipeline, the size of dim 0 of every row.
    """

    def __init__(
        self,
        program: OwnedProgram,
        sources: Sequence[LeafPlace],
        targets: Sequence[LeafPlace],
        mesh: Mesh,
        num_ranks: int,
    ):
        self._program = program
        self._targets = targets
        self._num_ranks = num_ranks
        self._ranks = range(num_ranks)
        self._replicated = NamedSharding(mesh, PartitionSpec())
        pairs = zip(program.inputs, sources, strict=True)
        self._stored_keys: dict[int, StoredKey] = {
            value: place.stored_key for value, place in pairs
        }
        owners = [*program.owners, *program.destinations]
        rank_rows: list[RankRow] = sorted({owner for owner in owners if isinstance(owner, tuple)})
        self._variants = self._find_variants(rank_rows)
        variant_of: dict[RankRow, int] = {
            (rank, row): number
            for number, (row, variant) in enumerate(self._variants)
            for rank in variant
        }
        used = {*program.inputs, *(v for op in program.operations for v in op.outputs)}
        self._places: dict[ValueId, VariantPlace] = {}
        for value, owner in enumerate(program.owners):
            if isinstance(owner, tuple) and value in used:
                number = variant_of[owner]
                members = self._variants[number][1]
                self._places[value] = number, members[owner[0]].names[value]
        sums, self._partial_sums = sums_of(program)
        self._sums = {value: self._sum_of(terms) for value, terms in sums.items()}
        self._sent = self._values_to_send()

    def run(self, stored: Mapping[StoredKey, Array]) -> dict[StoredKey, Array]:
        """Runs the program.

        Args:
            stored: the stored leaves of all arguments.

        Returns:
            The stored leaves of all results.
        """
        known: dict[ValueId, Array] = {**self._program.constants}
        for value, key in self._stored_keys.items():
            if self._program.owners[value] is None:
                known[value] = stored[key]
        made: list[Named] = [{**stored} for _ in self._variants]
        for level in range(self._program.num_levels):
            self._replicate(level - 1, made, known)
            for op in self._program.by_owner.get(None, ()):
                if op.level == level:
                    known.update(self._run_shared(op, made, known))
            for number, (_, variant) in enumerate(self._variants):
                made[number].update(self._run_part(variant, level, made[number], known))
        return self._collect(made, known)

    def _find_variants(self, rank_rows: list[RankRow]) -> Sequence[tuple[int, RowVariant]]:
        """Groups the blocks of each row by equal parts; returns each group with its row."""
        variants: list[tuple[int, dict[int, BlockPart]]] = []
        for rank, row in rank_rows:
            operations = self._program.by_owner.get((rank, row), ())
            owners = self._program.owners
            names: dict[ValueId, Name] = {
                v: key for v, key in self._stored_keys.items() if owners[v] == (rank, row)
            }
            for number, op in enumerate(operations):
                names.update({value: (number, i) for i, value in enumerate(op.outputs)})
            part = BlockPart(tuple(operations), names)
            for other_row, members in variants:
                first = next(iter(members.values()))
                if other_row == row and first.is_like(part, self._program):
                    members[rank] = part
                    break
            else:
                variants.append((row, {rank: part}))
        return variants

    def _run_part(
        self, variant: RowVariant, level: int, made: Named, known: Mapping[ValueId, Array]
    ) -> Named:
        """Runs one level of a variant as one `jax.vmap` over all ranks."""
        first = next(iter(variant.values()))
        numbers = [i for i, op in enumerate(first.operations) if op.level == level]
        reads = [(i, at) for i in numbers for at in range(len(first.operations[i].inputs))]
        # The shared values that blocks read: either equal on all ranks, or one per rank.
        equal: dict[tuple[int, int], Array] = {}
        per_rank: dict[tuple[int, int], Array] = {}
        for i, at in reads:
            atom = first.operations[i].inputs[at]
            if atom in first.names:
                continue
            atoms = {rank: part.operations[i].inputs[at] for rank, part in variant.items()}
            if len({self._program.value_numbers[each] for each in atoms.values()}) == 1:
                equal[i, at] = known[atom]
            else:
                row = {rank: atoms.get(rank, atom) for rank in self._ranks}
                per_rank[i, at] = self._row_of(row, known)
        names = [first.names.get(first.operations[i].inputs[at]) for i, at in reads]
        inputs = {name: made[name] for name in names if name in made}
        results = [first.names[v] for i in numbers for v in first.operations[i].outputs]

        def part(rows: list[Array], of_rank: dict[tuple[int, int], Array]) -> list[Array]:
            values = dict(zip(inputs, rows, strict=True))
            shared = {**equal, **of_rank}
            for i in numbers:
                op = first.operations[i]
                operands = [
                    shared[i, at] if (i, at) in shared else values[first.names[atom]]
                    for at, atom in enumerate(op.inputs)
                ]
                outputs = eval_equation(op.equation, operands)
                values.update(zip((first.names[v] for v in op.outputs), outputs, strict=True))
            return [values[name] for name in results]

        run = jax.vmap(part, axis_size=self._num_ranks)
        outputs = run([*inputs.values()], per_rank) if numbers else []
        return dict(zip(results, outputs, strict=True))

    def _row_of(self, atoms: Mapping[int, ValueId], known: Mapping[ValueId, Array]) -> Array:
        """Stacks shared values, one for each rank."""
        first = next(iter(atoms.values()))
        aval = self._program.avals[first]
        values = [as_array(known[atoms.get(rank, first)], aval) for rank in self._ranks]
        return jnp.stack(values)

    def _sum_of(self, terms: Sequence[ValueId]) -> _Sum:
        """Returns a sum over blocks, by rows if each block of a variant has one term in it."""
        terms_at: dict[VariantPlace, list[ValueId]] = {}
        for term in terms:
            if self._program.owners[term] is not None:
                terms_at.setdefault(self._places[term], []).append(term)  # type: ignore[index]
        ranks = {place: tuple(self._variants[place[0]][1]) for place in terms_at}

        def is_whole(place):
            return len(terms_at[place]) == len(set(terms_at[place])) == len(ranks[place])

        rows = {place: ranks[place] for place in terms_at if is_whole(place)}
        single = [term for term in terms if self._places.get(term) not in rows]  # type: ignore[arg-type]
        return _Sum(rows, tuple(single))

    def _values_to_send(self) -> tuple[int, ...]:
        """Returns the values that another owner reads, except as terms of a sum over rows."""
        program = self._program
        reads = []
        for op in program.operations:
            if op.outputs[0] in self._partial_sums:
                continue
            total = self._sums.get(op.outputs[0])
            read = op.inputs if total is None else total.single
            reads += [(a, op.owner) for a in read]
        reads += zip(program.outputs, program.destinations, strict=True)
        sent = [a for a, by in reads if program.owners[a] not in (None, by)]
        return tuple(dict.fromkeys(sent))  # type: ignore[arg-type]

    def _run_shared(
        self, op: OwnedOperation, made: list[Named], known: Mapping[ValueId, Array]
    ) -> dict[ValueId, Array]:
        """Runs a shared operation; all ranks need its results."""
        if op.outputs[0] in self._partial_sums:
            return {}
        if (addends := self._sums.get(op.outputs[0])) is None:
            results = eval_equation(op.equation, [known[a] for a in op.inputs])
            return dict(zip(op.outputs, results, strict=True))
        aval = self._program.avals[op.outputs[0]]
        terms = [jnp.asarray(known[term], aval.dtype) for term in addends.single]
        for (number, name), ranks in addends.rows.items():
            row = made[number][name]
            row = jnp.where(self._is_in(ranks, row.ndim), row, 0)
            terms.append(jnp.sum(row, axis=0, dtype=aval.dtype))
        return {op.outputs[0]: functools.reduce(jnp.add, terms)}

    def _is_in(self, ranks: Sequence[int], ndim: int) -> Array | bool:
        """Returns a mask of some ranks' entries in a row with `ndim` dims; True for all ranks."""
        if len(ranks) == self._num_ranks:
            return True
        mask = jnp.isin(jnp.arange(self._num_ranks), jnp.array(ranks))
        return mask.reshape(-1, *[1] * (ndim - 1))

    def _replicate(self, level: int, made: list[Named], known: dict[ValueId, Array]) -> None:
        """Replicates the values of a level that other owners read.

        Values of equal shape and dtype are stacked, so that they are gathered together.
        """
        sent = {v: self._places[v] for v in self._sent if self._program.levels[v] == level}
        groups: dict[Hashable, dict[VariantPlace, Array]] = {}
        for number, name in sent.values():
            row = made[number][name]
            groups.setdefault((row.shape, row.dtype), {})[number, name] = row
        columns = {}
        for rows in groups.values():
            stacked = jnp.stack(list(rows.values()), axis=1)
            stacked = jax.lax.with_sharding_constraint(stacked, self._replicated)
            columns.update({place: stacked[:, number] for number, place in enumerate(rows)})
        for value, place in sent.items():
            owner = self._program.owners[value]
            assert isinstance(owner, tuple)
            known[value] = columns[place][owner[0]]

    def _collect(self, made: list[Named], known: Mapping[ValueId, Array]) -> dict[StoredKey, Array]:
        """Returns the stored leaves; each entry of a row is the result of that block's part."""
        stored: dict[StoredKey, Array] = {}
        rows: dict[tuple[StoredKey, int], dict[int, ValueId]] = {}
        for atom, place in zip(self._program.outputs, self._targets, strict=True):
            key = place.stored_key
            if place.rank_row is None:
                stored[key] = as_array(known[atom], self._program.avals[atom])
            else:
                rows.setdefault((key, place.rank_row[1]), {})[place.rank_row[0]] = atom
        for (key, row), atoms in rows.items():
            place_of = {
                rank: self._places[atom] if self._program.owners[atom] == (rank, row) else None  # type: ignore[index]
                for rank, atom in atoms.items()
            }
            for computed_at in dict.fromkeys(place_of.values()):
                ranks = [rank for rank in place_of if place_of[rank] == computed_at]
                if computed_at is None:
                    values = self._row_of({rank: atoms[rank] for rank in ranks}, known)
                else:
                    values = made[computed_at[0]][computed_at[1]]
                if len(ranks) < self._num_ranks:
                    mask = self._is_in(ranks, values.ndim)
                    # Ranks without a block in this row keep zeros, whatever the part computes.
                    others = stored[key] if key in stored else jnp.zeros_like(values)
                    values = jnp.where(mask, values, others)
                stored[key] = values
        return stored
