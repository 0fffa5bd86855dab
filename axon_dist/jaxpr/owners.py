"""Whose values a traced program computes.

The leaves that a program is given belong to owners, such as the blocks of a pipeline, or to all.
What is made of one owner's values is that owner's; what is made of several owners' values, such as
a norm over all gradients, is everybody's again, and has to be small, for it needs the values of
all of them in one place. So a program falls into the parts of its owners, each of which is run
where the owner's values live, and into what all share.
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
from .rows import select_case
from .walk import OPENED, Aval, called, interpret, struct_of

Owner: TypeAlias = Hashable
"""Whoever has values of its own; None stands for all."""

SMALL = 1024
"""The most elements of a value that one owner hands to the others."""


Atom: TypeAlias = int
"""The number of a value of a program: an input, a constant, or what an operation makes."""


@dataclasses.dataclass(frozen=True, eq=False)
class OwnedOperation:
    """One operation of the flat program.

    Args:
        equation: of a jaxpr, for its primitive and parameters.
        inputs: what it reads.
        outputs: what it makes.
        owner: whose they are.
        level: how many times values have gone from owners to all before it can run.
    """

    equation: JaxprEqn
    inputs: tuple[Atom, ...]
    outputs: tuple[Atom, ...]
    owner: Owner = None
    level: int = 0

    @property
    def key(self) -> Hashable | None:
        """A key that only operations have that compute the same; None where none is known."""
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
    """A program whose operations are each one owner's, or everybody's.

    Args:
        operations: in order.
        by_owner: the operations of each owner, and of all, in order.
        inputs: of the program.
        outputs: what it returns.
        homes: whose each output shall be.
        constants: the values that are parts of the program.
        owners: of every value, by its number; constants are everybody's.
        avals: of every value, by its number: shape and dtype.
        levels: of every value, by its number.
        num_levels: rounds in which owners run their parts, everybody's operations before each.
        value_numbers: of every value, by its number, a key that only equal values share, as in
            global value numbering: a rate that is cast twice has one key.
    """

    operations: tuple[OwnedOperation, ...]
    by_owner: Mapping[Owner, Sequence[OwnedOperation]]
    inputs: tuple[Atom, ...]
    outputs: tuple[Atom, ...]
    homes: tuple[Owner, ...]
    constants: Mapping[Atom, Array]
    owners: tuple[Owner, ...]
    avals: tuple[Aval, ...]
    levels: tuple[int, ...]
    num_levels: int
    value_numbers: tuple[Hashable, ...]


def owned(
    closed: ClosedJaxpr,
    owners: Sequence[Owner],
    names: Sequence[Path],
    homes: Sequence[Owner],
    results: Sequence[Path],
    small: int = SMALL,
) -> OwnedProgram:
    """Finds out whose the values of a program are.

    Args:
        closed: a closed jaxpr.
        owners: whose each input is; None for everybody's.
        names: what messages call each input.
        homes: whose each output shall be.
        results: what messages call each output.
        small: the most elements of a value that everybody makes, where one owner alone reads it.

    Returns:
        The program.

    Raises:
        UnsupportedError: naming the value and the operation, where one that is too large to be
            handed around would have to be.

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
    flat.settle(outputs, homes)
    return flat.finish(inputs, outputs, homes, results)


class _Flat:
    """A program on its way to being flat."""

    def __init__(self, small: int):
        self.small = small
        self.avals: list[Aval] = []
        self.owners: list[Owner] = []
        self.names: list[Path] = []
        self.operations: list[OwnedOperation] = []
        self.constants: dict[Atom, Array] = {}
        self.common: set[Atom] = set()

    def new(
        self, aval: Aval, owner: Owner = None, name: Path = "", value: Array | None = None
    ) -> Atom:
        """A value; that of a constant is known."""
        number = len(self.avals)
        self.avals.append(aval)
        self.owners.append(owner)
        self.names.append(name)
        if value is not None:
            self.constants[number] = value
        return number

    def follow(self, jaxpr: Jaxpr, consts: Sequence[Array], values: Sequence[Atom]) -> list[Atom]:
        pairs = zip(consts, jaxpr.constvars, strict=True)
        known = [self.new(v.aval, value=x) for x, v in pairs]
        return interpret(
            jaxpr, known, values, self._equation, lambda atom: self.new(atom.aval, value=atom.val)
        )

    def _equation(self, equation: JaxprEqn, operands: Sequence[Atom]) -> Sequence[Atom]:
        inner = called(equation) if equation.primitive.name in OPENED else None
        if inner is not None and len(inner.jaxpr.invars) == len(operands):
            return self.follow(inner.jaxpr, inner.consts, operands)
        if equation.primitive.name == "cond" and self._is_shared_choice(equation, operands):
            return self._choose(equation, operands)
        owner = self._whose(operands)
        named = [self.names[a] for a in operands if self.owners[a] is not None]
        name = named[0] if named else ""
        outputs = tuple(self.new(v.aval, owner, name) for v in equation.outvars)
        self.operations.append(OwnedOperation(equation, tuple(operands), outputs, owner))
        if owner is None and (named or not self.common.isdisjoint(operands)):
            self.common.update(outputs)
        return outputs

    def _whose(self, operands: Sequence[Atom]) -> Owner:
        """Whose an operation is: arrays draw it to their owner, numbers follow."""
        varying = [a for a in operands if a not in self.constants]
        arrays = [a for a in varying if self.avals[a].size > 1]
        if not arrays and not self.common.isdisjoint(varying):
            # What is added to a sum over owners is a part of that sum, not the last owner's.
            return None
        mine = {self.owners[a] for a in arrays or varying} - {None}
        return next(iter(mine)) if len(mine) == 1 else None

    def _is_shared_choice(self, equation: JaxprEqn, operands: Sequence[Atom]) -> bool:
        """Whether a branch is taken for several owners at once, by a number that all know."""
        which, *rest = operands
        whose = {self.owners[a] for a in rest if a not in self.constants}
        return self.owners[which] is None and not equation.effects and len(whose) > 1

    def _choose(self, equation: JaxprEqn, operands: Sequence[Atom]) -> list[Atom]:
        """Runs all branches, and selects: owner by owner, which one equation could not."""
        which, *rest = operands
        by_branch = [self.follow(b.jaxpr, b.consts, rest) for b in equation.params["branches"]]
        results: list[Atom] = []
        for variable, *cases in zip(equation.outvars, *by_branch, strict=True):
            if all(case == cases[0] for case in cases):
                results.append(cases[0])
                continue
            shapes = struct_of(equation.invars[0]), *[struct_of(variable)] * len(cases)
            select = jax.make_jaxpr(lambda which, *cases: select_case(which, cases))(*shapes)
            results += self.follow(select.jaxpr, select.consts, [which, *cases])
        return results

    def settle(self, outputs: Sequence[Atom], homes: Sequence[Owner]) -> None:
        """Drops what nobody reads, and gives what one side alone reads to that side.

        Large values that everybody could make and one owner reads are its own, such as zeros of a
        leaf's shape. Numbers made of an owner's numbers that only others read are everybody's, such
        as the first terms of a sum over all.
        """
        readers: dict[Atom, set[Owner]] = {}
        for atom, home in zip(outputs, homes, strict=True):
            readers.setdefault(atom, set()).add(home)
        live: list[OwnedOperation] = []
        for op in reversed(self.operations):
            by: set[Owner] = set().union(*(readers.get(a, ()) for a in op.outputs))
            owner, is_fixed = op.owner, bool(op.equation.effects)
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
        inputs: Sequence[Atom],
        outputs: Sequence[Atom],
        homes: Sequence[Owner],
        results: Sequence[Path],
    ) -> OwnedProgram:
        """The program, once it is settled whose all values are; see `owned`."""
        levels, operations = [0] * len(self.avals), list[OwnedOperation]()
        by_owner: dict[Owner, list[OwnedOperation]] = {}
        for op in self.operations:
            at = [levels[a] + (self.owners[a] not in (None, op.owner)) for a in op.inputs]
            op = dataclasses.replace(op, level=max(at, default=0))
            operations.append(op)
            by_owner.setdefault(op.owner, []).append(op)
            for atom in op.outputs:
                levels[atom] = op.level
        names = ((op, f"the operation {op.equation.primitive.name!r}") for op in operations)
        read = [(atom, op.owner, reader) for op, reader in names for atom in op.inputs]
        read += zip(outputs, homes, map(repr, results), strict=True)
        handed = [(atom, by) for atom, owner, by in read if self.owners[atom] not in (None, owner)]
        for atom, reader in handed:
            if self.avals[atom].size > SMALL:
                raise UnsupportedError(
                    f"the optimizer makes {self.avals[atom].str_short()} of {self.names[atom]!r}, "
                    f"and {reader} needs it together with what belongs to other blocks. A pipeline "
                    "keeps every block on the ranks of its stage, and hands no more than "
                    f"{SMALL} elements of each value around, such as norms. Use an optimizer that "
                    "works leaf by leaf, or by numbers over all leaves"
                )
        last = [*(op.level for op in operations), *(levels[atom] + 1 for atom, _ in handed)]
        return OwnedProgram(
            tuple(operations),
            by_owner,
            tuple(inputs),
            tuple(outputs),
            tuple(homes),
            self.constants,
            tuple(self.owners),
            tuple(self.avals),
            tuple(levels),
            1 + max(last, default=0),
            self._number_values(by_owner.get(None, ())),
        )

    def _number_values(self, operations: Sequence[OwnedOperation]) -> tuple[Hashable, ...]:
        """See `OwnedProgram`; `operations` are everybody's."""
        numbers: list[Hashable] = [*range(len(self.avals))]
        for atom, value in self.constants.items():
            aval = self.avals[atom]
            if aval.shape == () and not jnp.issubdtype(aval.dtype, jax.dtypes.extended):
                bits = np.asarray(value, aval.dtype).tobytes()
                numbers[atom] = "constant", str(aval.dtype), bits
        known: dict[Hashable, tuple[Atom, ...]] = {}
        for op in operations:
            if (key := op.key) is not None:
                key = key, tuple(numbers[a] for a in op.inputs)
                for made, first in zip(op.outputs, known.setdefault(key, op.outputs), strict=True):
                    numbers[made] = first
        return tuple(numbers)


def as_array(value: Array, aval: Aval) -> Array:
    """A value as an array of a dtype; random keys stay as they are."""
    is_key = jnp.issubdtype(aval.dtype, jax.dtypes.extended)
    return value if is_key else jnp.asarray(value, aval.dtype)


def sums_of(program: OwnedProgram) -> tuple[Mapping[int, tuple[Atom, ...]], frozenset[Atom]]:
    """The sums that all shall know: each as its value and the terms, however they are bracketed.

    Args:
        program: the program; what in it is no chain of additions of numbers stays as it is.

    Returns:
        For the value of each sum its terms; and the partial sums that nothing else reads.
    """
    # By the value of each sum of two numbers that all know; an unknown name is no addition.
    made = {
        op.outputs[0]: op.inputs
        for op in program.by_owner.get(None, ())
        if op.equation.primitive.name == "add"
        and op.level > 0
        and program.avals[op.outputs[0]].shape == ()
    }
    readers = Counter(a for op in program.operations for a in op.inputs)
    readers.update(program.outputs)
    inner = {a for terms in made.values() for a in terms if a in made and readers[a] == 1}
    sums: dict[Atom, tuple[Atom, ...]] = {}
    for value in (value for value in made if value not in inner):
        addends, waiting = list[Atom](), [value]
        while waiting:
            term = waiting.pop()
            is_partial = term == value or term in inner
            waiting += reversed(made[term]) if is_partial else []
            addends += [] if is_partial else [term]
        sums[value] = tuple(addends)
    return sums, frozenset(inner)
