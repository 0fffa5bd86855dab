"""Partitions a traced program by the owners of the values that it computes.

Each input of the program has an owner, such as a block of a pipeline, or is shared by all of them.
A value that is computed from one owner's values has the same owner. A value that is computed from
several owners' values, such as a norm over all gradients, is shared; its operands must be small,
because every rank needs them. The result is one part of the program per owner, which runs on the
ranks that store the owner's values, and one shared part, which every rank runs.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

from ..core.errors import UnsupportedError
from ..core.typing import Array, Path
from ..ir.rows import select_case
from ..ir.walk import OPENED, Aval, called, interpret, struct_of

Owner: TypeAlias = Hashable
"""An owner of values, such as a block; None for values that all owners share."""

SMALL = 1024
"""The largest number of elements of a value that one owner sends to the others."""

ValueId: TypeAlias = int
"""The number of a value of a program: an input, a constant, or the result of an operation."""


@dataclasses.dataclass(frozen=True, eq=False)
class OwnedOperation:
    """One operation of the flat program.

    Args:
        equation: an equation of a jaxpr, for its primitive and parameters.
        inputs: the values that it reads.
        outputs: the values that it computes.
        owner: the owner of the outputs.
        level: the number of exchanges of values between owners that must precede it.
    """

    equation: JaxprEqn
    inputs: tuple[ValueId, ...]
    outputs: tuple[ValueId, ...]
    owner: Owner = None
    level: int = 0

    @property
    def key(self) -> Hashable | None:
        """A key shared only by operations that compute the same function; None if unknown."""
        if self.equation.effects:
            return None
        key = self.equation.primitive, tuple(sorted(self.equation.params.items()))
        try:
            hash(key)
        except TypeError:
            return None
        return key


@dataclasses.dataclass(frozen=True, eq=False)
class OwnedProgram:
    """A program in which each operation has one owner, or is shared.

    Args:
        operations: all operations, in order.
        by_owner: the operations of each owner in order; None has the shared ones.
        inputs: the values that the program takes.
        outputs: the values that the program returns.
        destinations: the owner that needs each output; None if all need it.
        constants: the constants of the program.
        owners: the owner of every value, by its number; constants are shared.
        avals: the shape and dtype of every value, by its number.
        levels: the level of every value, by its number.
        num_levels: the number of rounds in which the owners' parts run, each after the shared
            operations of its level.
        value_numbers: for every value, by its number, a key that only equal values share, as in
            global value numbering. For example, a rate that is cast twice has one key.
    """

    operations: tuple[OwnedOperation, ...]
    by_owner: Mapping[Owner, Sequence[OwnedOperation]]
    inputs: tuple[ValueId, ...]
    outputs: tuple[ValueId, ...]
    destinations: tuple[Owner, ...]
    constants: Mapping[ValueId, Array]
    owners: tuple[Owner, ...]
    avals: tuple[Aval, ...]
    levels: tuple[int, ...]
    num_levels: int
    value_numbers: tuple[Hashable, ...]


def owned(
    closed: ClosedJaxpr,
    owners: Sequence[Owner],
    names: Sequence[Path],
    destinations: Sequence[Owner],
    results: Sequence[Path],
    small: int = SMALL,
) -> OwnedProgram:
    """Infers the owner of every value of a program.

    Args:
        closed: a closed jaxpr.
        owners: the owner of each input; None if it is shared.
        names: the names of the inputs, for error messages.
        destinations: the owner that needs each output; None if all need it.
        results: the names of the outputs, for error messages.
        small: a shared value that only one owner reads stays shared up to this many elements.

    Returns:
        The program.

    Raises:
        UnsupportedError: if an owner needs a value of another owner with more than `SMALL`
            elements; it names the value and the operation.

    Example:
        >>> closed = jax.make_jaxpr(lambda x, y: (x / (x.sum() + y.sum()), y * 2))(
        ...     jnp.ones(2), jnp.ones(3)
        ... )
        >>> program = owned(closed, ["x", "y"], ["x", "y"], ["x", "y"], ["x", "y"])
        >>> [(op.equation.primitive.name, op.owner, op.level) for op in program.operations]
        [('reduce_sum', 'x', 0), ('reduce_sum', 'y', 0), ('add', None, 1), ('div', 'x', 1), \
('mul', 'y', 0)]
    """
    flat = _Flat(small)
    pairs = zip(closed.jaxpr.invars, owners, names, strict=True)
    inputs = [flat.new(v.aval, owner, name) for v, owner, name in pairs]
    outputs = flat.follow(closed.jaxpr, closed.consts, inputs)
    flat.settle(outputs, destinations)
    return flat.finish(inputs, outputs, destinations, results)


class _Flat:
    """Builds an `OwnedProgram`: inlines calls and gives every value an owner."""

    def __init__(self, small: int):
        self.small = small
        self.avals: list[Aval] = []
        self.owners: list[Owner] = []
        self.names: list[Path] = []
        self.operations: list[OwnedOperation] = []
        self.constants: dict[ValueId, Array] = {}
        self.common: set[ValueId] = set()

    def new(
        self, aval: Aval, owner: Owner = None, name: Path = "", value: Array | None = None
    ) -> ValueId:
        """Adds a value and returns its number; only a constant has a `value`."""
        number = len(self.avals)
        self.avals.append(aval)
        self.owners.append(owner)
        self.names.append(name)
        if value is not None:
            self.constants[number] = value
        return number

    def follow(
        self, jaxpr: Jaxpr, consts: Sequence[Array], values: Sequence[ValueId]
    ) -> list[ValueId]:
        pairs = zip(consts, jaxpr.constvars, strict=True)
        known = [self.new(v.aval, value=x) for x, v in pairs]
        return interpret(
            jaxpr, known, values, self._equation, lambda atom: self.new(atom.aval, value=atom.val)
        )

    def _equation(self, equation: JaxprEqn, operands: Sequence[ValueId]) -> Sequence[ValueId]:
        inner = called(equation) if equation.primitive.name in OPENED else None
        if inner is not None and len(inner.jaxpr.invars) == len(operands):
            return self.follow(inner.jaxpr, inner.consts, operands)
        if equation.primitive.name == "cond" and self._is_shared_choice(equation, operands):
            return self._choose(equation, operands)
        varying = [a for a in operands if a not in self.constants]
        arrays = [a for a in varying if self.avals[a].size > 1]
        # The owner is that of the arrays, or of the scalars if there are no arrays.
        candidates = {self.owners[a] for a in arrays or varying} - {None}
        owner = next(iter(candidates)) if len(candidates) == 1 else None
        if not arrays and not self.common.isdisjoint(varying):
            # A sum over owners stays shared when an owner's term is added to it.
            owner = None
        named = [self.names[a] for a in operands if self.owners[a] is not None]
        name = named[0] if named else ""
        outputs = tuple(self.new(v.aval, owner, name) for v in equation.outvars)
        self.operations.append(OwnedOperation(equation, tuple(operands), outputs, owner))
        if owner is None and (named or not self.common.isdisjoint(operands)):
            self.common.update(outputs)
        return outputs

    def _is_shared_choice(self, equation: JaxprEqn, operands: Sequence[ValueId]) -> bool:
        """Whether a shared scalar selects a branch that reads values of several owners."""
        which, *rest = operands
        owners = {self.owners[a] for a in rest if a not in self.constants}
        return self.owners[which] is None and not equation.effects and len(owners) > 1

    def _choose(self, equation: JaxprEqn, operands: Sequence[ValueId]) -> list[ValueId]:
        """Inlines all branches and one select per result, since an equation has only one owner."""
        which, *rest = operands
        by_branch = [self.follow(b.jaxpr, b.consts, rest) for b in equation.params["branches"]]
        results: list[ValueId] = []
        for variable, *cases in zip(equation.outvars, *by_branch, strict=True):
            if all(case == cases[0] for case in cases):
                results.append(cases[0])
                continue
            shapes = struct_of(equation.invars[0]), *[struct_of(variable)] * len(cases)
            select = jax.make_jaxpr(lambda which, *cases: select_case(which, cases))(*shapes)
            results += self.follow(select.jaxpr, select.consts, [which, *cases])
        return results

    def settle(self, outputs: Sequence[ValueId], destinations: Sequence[Owner]) -> None:
        """Eliminates dead operations and moves others to the owner that reads their results.

        A large shared value that only one owner reads, such as zeros of a leaf's shape, becomes
        that owner's. A scalar that is computed from an owner's scalars and read only by others,
        such as the first terms of a sum over all owners, becomes shared.
        """
        readers: dict[ValueId, set[Owner]] = {}
        for atom, destination in zip(outputs, destinations, strict=True):
            readers.setdefault(atom, set()).add(destination)
        live: list[OwnedOperation] = []
        for op in reversed(self.operations):
            by: set[Owner] = set().union(*(readers.get(a, ()) for a in op.outputs))
            owner = op.owner
            is_fixed = bool(op.equation.effects)
            if not by and not is_fixed:
                continue
            sizes = [self.avals[a].size for a in op.outputs]
            owned = [self.avals[a].size for a in op.inputs if self.owners[a] is not None]
            if not is_fixed and owner is None:
                is_free = not owned and len(by) == 1 and max(sizes) > self.small
                owner = next(iter(by)) if is_free else None
            elif not is_fixed and owner not in by and max([*sizes, *owned]) <= 1:
                owner = None
            for atom in op.outputs:
                self.owners[atom] = owner
            for atom in op.inputs:
                readers.setdefault(atom, set()).add(owner)
            live.append(dataclasses.replace(op, owner=owner))
        self.operations = live[::-1]

    def finish(
        self,
        inputs: Sequence[ValueId],
        outputs: Sequence[ValueId],
        destinations: Sequence[Owner],
        results: Sequence[Path],
    ) -> OwnedProgram:
        """Computes the levels, checks what owners exchange, and returns the program."""
        levels = [0] * len(self.avals)
        operations: list[OwnedOperation] = []
        by_owner: dict[Owner, list[OwnedOperation]] = {}
        for op in self.operations:
            at = [levels[a] + (self.owners[a] not in (None, op.owner)) for a in op.inputs]
            op = dataclasses.replace(op, level=max(at, default=0))
            operations.append(op)
            by_owner.setdefault(op.owner, []).append(op)
            for atom in op.outputs:
                levels[atom] = op.level
        named = ((op, f"the operation {op.equation.primitive.name!r}") for op in operations)
        reads = [(atom, op.owner, reader) for op, reader in named for atom in op.inputs]
        reads += zip(outputs, destinations, map(repr, results), strict=True)
        sent = [(atom, by) for atom, owner, by in reads if self.owners[atom] not in (None, owner)]
        for atom, reader in sent:
            if self.avals[atom].size > SMALL:
                raise UnsupportedError(
                    f"the optimizer computes {self.avals[atom].str_short()} of "
                    f"{self.names[atom]!r}, and {reader} needs it together with values of other "
                    "blocks. A pipeline keeps every block on the ranks of its stage, and sends at "
                    f"most {SMALL} elements of each value, such as norms, between them. Use an "
                    "optimizer that works leaf by leaf, or with scalars over all leaves",
                    code="optimizer-across-stages",
                )
        last = [*(op.level for op in operations), *(levels[atom] + 1 for atom, _ in sent)]
        return OwnedProgram(
            tuple(operations),
            by_owner,
            tuple(inputs),
            tuple(outputs),
            tuple(destinations),
            self.constants,
            tuple(self.owners),
            tuple(self.avals),
            tuple(levels),
            1 + max(last, default=0),
            self._number_values(by_owner.get(None, ())),
        )

    def _number_values(self, operations: Sequence[OwnedOperation]) -> tuple[Hashable, ...]:
        """Numbers the values of the shared operations; see `OwnedProgram.value_numbers`."""
        numbers: list[Hashable] = [*range(len(self.avals))]
        for atom, value in self.constants.items():
            aval = self.avals[atom]
            if aval.shape == () and not jnp.issubdtype(aval.dtype, jax.dtypes.extended):
                bits = np.asarray(value, aval.dtype).tobytes()
                numbers[atom] = "constant", str(aval.dtype), bits
        known: dict[Hashable, tuple[ValueId, ...]] = {}
        for op in operations:
            if (key := op.key) is not None:
                key = key, tuple(numbers[a] for a in op.inputs)
                first_outputs = known.setdefault(key, op.outputs)
                for output, first in zip(op.outputs, first_outputs, strict=True):
                    numbers[output] = first
        return tuple(numbers)


def as_array(value: Array, aval: Aval) -> Array:
    """Returns the value as an array of the aval's dtype; random keys are returned unchanged."""
    is_key = jnp.issubdtype(aval.dtype, jax.dtypes.extended)
    return value if is_key else jnp.asarray(value, aval.dtype)


def sums_of(program: OwnedProgram) -> tuple[Mapping[int, tuple[ValueId, ...]], frozenset[ValueId]]:
    """Finds the shared sums over owners, each with its terms, however they are bracketed.

    Args:
        program: the program. Only chains of additions of shared scalars count as sums.

    Returns:
        The terms of each sum, by its value; and the partial sums that nothing else reads.
    """
    # The two operands of each shared addition of scalars, by its result.
    additions = {
        op.outputs[0]: op.inputs
        for op in program.by_owner.get(None, ())
        if op.equation.primitive.name == "add"
        and op.level > 0
        and program.avals[op.outputs[0]].shape == ()
    }
    readers = Counter(a for op in program.operations for a in op.inputs)
    readers.update(program.outputs)
    inner = {a for terms in additions.values() for a in terms if a in additions and readers[a] == 1}
    sums: dict[ValueId, tuple[ValueId, ...]] = {}
    for value in (value for value in additions if value not in inner):
        addends: list[ValueId] = []
        waiting = [value]
        while waiting:
            term = waiting.pop()
            if term == value or term in inner:
                waiting += reversed(additions[term])
            else:
                addends.append(term)
        sums[value] = tuple(addends)
    return sums, frozenset(inner)
