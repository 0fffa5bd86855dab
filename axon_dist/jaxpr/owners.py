"""Whose values a traced program computes.

The leaves that a program is given belong to owners, such as the blocks of a pipeline, or to all.
What is made of one owner's values is that owner's; what is made of several owners' values, such as
a norm over all gradients, is everybody's again, and has to be small, for it needs the values of
all of them in one place. So a program falls into the parts of its owners, each of which is run
where the owner's values live, and into what all share.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

from ..core.compat import eval_equation
from ..core.errors import UnsupportedError
from ..core.typing import Array, Path
from .rows import select_case
from .walk import OPENED, Aval, called, interpret, same, struct_of

Owner: TypeAlias = Hashable
"""Whoever has values of its own; None stands for all."""

SMALL = 1024
"""The most elements of a value that one owner hands to the others."""


@dataclasses.dataclass(frozen=True, eq=False)
class ConstantOperand:
    """A value that is part of the program.

    Args:
        value: the array or number.
        aval: its shape and dtype.
    """

    value: Any
    aval: Aval


Atom: TypeAlias = "int | ConstantOperand"
"""The number of a value, or a constant."""


@dataclasses.dataclass(frozen=True, eq=False)
class OwnedOperation:
    """One operation of the flat program.

    Args:
        equation: of a jaxpr, for its primitive and parameters.
        inputs: what it reads.
        outputs: the numbers of the values that it makes.
        owner: whose they are.
        level: how many times values have gone from owners to all before it can run.
    """

    equation: JaxprEqn
    inputs: tuple[Atom, ...]
    outputs: tuple[int, ...]
    owner: Owner = None
    level: int = 0

    @property
    def name(self) -> str:
        """That of its primitive."""
        return self.equation.primitive.name

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

    def computes_as(self, other: OwnedOperation) -> bool:
        """Whether another operation computes the same of its inputs."""
        mine, theirs = self.equation, other.equation
        return mine.primitive is theirs.primitive and same(mine.params, theirs.params)

    def run(self, operands: Sequence[Array]) -> Sequence[Array]:
        """Computes the outputs."""
        return eval_equation(self.equation, operands)


@dataclasses.dataclass(frozen=True, eq=False)
class OwnedProgram:
    """A program whose operations are each one owner's, or everybody's.

    Args:
        operations: in order.
        inputs: the numbers of its inputs.
        outputs: what it returns.
        homes: whose each output shall be.
        owners: of every value, by its number.
        avals: of every value, by its number.
        levels: of every value, by its number.
    """

    operations: tuple[OwnedOperation, ...]
    inputs: tuple[int, ...]
    outputs: tuple[Atom, ...]
    homes: tuple[Owner, ...]
    owners: tuple[Owner, ...]
    avals: tuple[Aval, ...]
    levels: tuple[int, ...]

    @property
    def num_levels(self) -> int:
        """Rounds in which owners run their parts, everybody's operations before each."""
        pairs = zip(self.outputs, self.homes, strict=True)
        handed = [a for a, home in pairs if self.owner_of(a) not in (None, home)]
        read = [self.levels[a] + 1 for a in _values(handed)]
        return 1 + max([0, *(op.level for op in self.operations), *read])

    def owner_of(self, atom: Atom) -> Owner:
        """Whose an atom is; constants are everybody's."""
        return None if isinstance(atom, ConstantOperand) else self.owners[atom]

    def aval_of(self, atom: Atom) -> Aval:
        """The shape and dtype of an atom."""
        return atom.aval if isinstance(atom, ConstantOperand) else self.avals[atom]

    def of(self, owner: Owner) -> tuple[OwnedOperation, ...]:
        """The operations of an owner, or of all."""
        return self._by_owner.get(owner, ())

    def spelled(self, atom: Atom) -> Hashable:
        """A key that atoms have in common only if they are one value, such as a rate cast twice."""
        if not isinstance(atom, ConstantOperand):
            return self._spellings.get(atom, atom)
        aval = atom.aval
        if aval.shape != () or jnp.issubdtype(aval.dtype, jax.dtypes.extended):
            return atom
        return "constant", str(aval.dtype), np.asarray(atom.value, aval.dtype).tobytes()

    @cached_property
    def _spellings(self) -> dict[int, Hashable]:
        found: dict[int, Hashable] = {}
        known: dict[Hashable, tuple[int, ...]] = {}
        for op in self.operations:
            if op.owner is None and op.key is not None:

                def spell(a):
                    return found.get(a, a) if isinstance(a, int) else self.spelled(a)

                key = (op.key, tuple(map(spell, op.inputs)))
                first = known.setdefault(key, op.outputs)
                found.update(zip(op.outputs, first, strict=True))
        return found

    @cached_property
    def _by_owner(self) -> dict[Owner, tuple[OwnedOperation, ...]]:
        found: dict[Owner, list[OwnedOperation]] = {}
        for op in self.operations:
            found.setdefault(op.owner, []).append(op)
        return {owner: tuple(operations) for owner, operations in found.items()}


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
    return flat.finish(inputs, outputs, tuple(homes), results)


class _Flat:
    """A program on its way to being flat."""

    def __init__(self, small: int):
        self.small = small
        self.avals: list[Aval] = []
        self.owners: list[Owner] = []
        self.names: list[Path] = []
        self.operations: list[OwnedOperation] = []
        self.common: set[int] = set()

    def new(self, aval: Aval, owner: Owner, name: Path) -> int:
        self.avals.append(aval)
        self.owners.append(owner)
        self.names.append(name)
        return len(self.avals) - 1

    def owner(self, atom: Atom) -> Owner:
        return None if isinstance(atom, ConstantOperand) else self.owners[atom]

    def follow(self, jaxpr: Jaxpr, consts: Sequence[Array], values: Sequence[Atom]) -> list[Atom]:
        pairs = zip(consts, jaxpr.constvars, strict=True)
        given: list[Atom] = [ConstantOperand(x, v.aval) for x, v in pairs]
        return interpret(
            jaxpr, given, values, self._equation, lambda atom: ConstantOperand(atom.val, atom.aval)
        )

    def _equation(self, equation: JaxprEqn, operands: Sequence[Atom]) -> Sequence[Atom]:
        inner = called(equation) if equation.primitive.name in OPENED else None
        if inner is not None and len(inner.jaxpr.invars) == len(operands):
            return self.follow(inner.jaxpr, inner.consts, operands)
        if equation.primitive.name == "cond" and self._is_shared_choice(equation, operands):
            return self._choose(equation, operands)
        owner = self._whose(operands)
        named = [self.names[a] for a in _values(operands) if self.owners[a] is not None]
        name = named[0] if named else ""
        outputs = tuple(self.new(v.aval, owner, name) for v in equation.outvars)
        self.operations.append(OwnedOperation(equation, tuple(operands), outputs, owner))
        if owner is None and (named or not self.common.isdisjoint(operands)):
            self.common.update(outputs)
        return outputs

    def _whose(self, operands: Sequence[Atom]) -> Owner:
        """Whose an operation is: arrays draw it to their owner, numbers follow."""
        arrays = [a for a in _values(operands) if _size(self.avals[a]) > 1]
        if arrays:
            mine = {self.owners[a] for a in arrays} - {None}
        else:
            mine = {self.owner(a) for a in operands} - {None}
            # What is added to a sum over owners is a part of that sum, not the last owner's.
            mine = mine if self.common.isdisjoint(operands) else set()
        return next(iter(mine)) if len(mine) == 1 else None

    def _is_shared_choice(self, equation: JaxprEqn, operands: Sequence[Atom]) -> bool:
        """Whether a branch is taken for several owners at once, by a number that all know."""
        which, *rest = operands
        whose = {self.owners[value] for value in _values(rest)}
        return self.owner(which) is None and not equation.effects and len(whose) > 1

    def _choose(self, equation: JaxprEqn, operands: Sequence[Atom]) -> list[Atom]:
        """Runs all branches, and selects: owner by owner, which one equation could not."""
        which, *rest = operands
        found = [self.follow(b.jaxpr, b.consts, rest) for b in equation.params["branches"]]
        results: list[Atom] = []
        for variable, *cases in zip(equation.outvars, *found, strict=True):
            if all(case is cases[0] for case in cases):
                results.append(cases[0])
                continue
            shapes = struct_of(equation.invars[0]), *[struct_of(variable)] * len(cases)
            select = jax.make_jaxpr(lambda which, *cases: select_case(which, cases))(*shapes)
            results += self.follow(select.jaxpr, select.consts, [which, *cases])
        return results

    def finish(
        self,
        inputs: list[int],
        outputs: list[Atom],
        homes: tuple[Owner, ...],
        results: Sequence[Path],
    ) -> OwnedProgram:
        self._drop_unused(outputs)
        self._settle(outputs, homes)
        self._check(outputs, homes, results)
        levels = self._levels()
        return OwnedProgram(
            tuple(self.operations),
            tuple(inputs),
            tuple(outputs),
            homes,
            tuple(self.owners),
            tuple(self.avals),
            levels,
        )

    def _drop_unused(self, outputs: list[Atom]) -> None:
        wanted = {*_values(outputs)}
        kept = []
        for op in reversed(self.operations):
            if op.equation.effects or not wanted.isdisjoint(op.outputs):
                kept.append(op)
                wanted.update(_values(op.inputs))
        self.operations = kept[::-1]

    def _settle(self, outputs: list[Atom], homes: tuple[Owner, ...]) -> None:
        """Gives what one side alone reads to that side.

        Large values that everybody could make and one owner reads are its own, such as zeros of a
        leaf's shape. Numbers made of an owner's numbers that only others read are everybody's, such
        as the first terms of a sum over all.
        """
        readers: dict[Atom, set[Owner]] = {}
        for atom, home in zip(outputs, homes, strict=True):
            readers.setdefault(atom, set()).add(home)
        for index in reversed(range(len(self.operations))):
            op = self.operations[index]
            by: set[Owner] = set().union(*(readers.get(v, set()) for v in op.outputs))
            if (owner := self._settled(op, by)) != op.owner:
                op = self.operations[index] = dataclasses.replace(op, owner=owner)
                for value in op.outputs:
                    self.owners[value] = owner
            for atom in op.inputs:
                readers.setdefault(atom, set()).add(op.owner)

    def _settled(self, op: OwnedOperation, readers: set[Owner]) -> Owner:
        if op.equation.effects:
            return op.owner
        sizes = [_size(self.avals[v]) for v in op.outputs]
        owned = [a for a in _values(op.inputs) if self.owners[a] is not None]
        if op.owner is None:
            is_free = not owned and max(sizes, default=0) > self.small and len(readers) == 1
            return next(iter(readers)) if is_free else None
        is_number = max([*sizes, *(_size(self.avals[a]) for a in owned)]) <= 1
        return None if is_number and op.owner not in readers else op.owner

    def _check(
        self, outputs: list[Atom], homes: tuple[Owner, ...], results: Sequence[Path]
    ) -> None:
        for op in self.operations:
            for atom in op.inputs:
                self._check_small(atom, op.owner, f"the operation {op.name!r}")
        for atom, home, result in zip(outputs, homes, results, strict=True):
            self._check_small(atom, home, repr(result))

    def _check_small(self, atom: Atom, by: Owner, reader: str) -> None:
        if isinstance(atom, ConstantOperand) or self.owners[atom] in (None, by):
            return
        if _size(self.avals[atom]) > SMALL:
            raise UnsupportedError(
                f"the optimizer makes {self.avals[atom].str_short()} of {self.names[atom]!r}, and "
                f"{reader} needs it together with what belongs to other blocks. A pipeline keeps "
                "every block on the ranks of its stage, and hands no more than "
                f"{SMALL} elements of each value around, such as norms. Use an optimizer that "
                "works leaf by leaf, or by numbers over all leaves"
            )

    def _levels(self) -> tuple[int, ...]:
        levels = [0] * len(self.avals)
        for index, op in enumerate(self.operations):
            read = _values(op.inputs)
            level = max([0, *(levels[a] + (self.owners[a] not in (None, op.owner)) for a in read)])
            self.operations[index] = dataclasses.replace(op, level=level)
            for value in op.outputs:
                levels[value] = level
        return tuple(levels)


def _values(atoms: Iterable[Atom]) -> list[int]:
    """The atoms that are no constants."""
    return [atom for atom in atoms if not isinstance(atom, ConstantOperand)]


def _size(aval: Aval) -> int:
    return math.prod(aval.shape)


def value_of(atom: Atom, known: Mapping[Atom, Array]) -> Array:
    """The value of an atom."""
    return atom.value if isinstance(atom, ConstantOperand) else known[atom]


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
    made = {op.outputs[0]: op for op in program.operations if _is_addition(program, op)}
    readers: dict[Atom, int] = {}
    for atom in [*(a for op in program.operations for a in op.inputs), *program.outputs]:
        readers[atom] = readers.get(atom, 0) + 1
    inner = {a for op in made.values() for a in op.inputs if a in made and readers[a] == 1}

    def terms(atom: Atom) -> tuple[Atom, ...]:
        found: list[Atom] = []
        waiting = [atom]
        while waiting:
            term = waiting.pop()
            is_partial = term in made and (term == atom or term in inner)
            waiting += reversed(made[term].inputs) if is_partial else []  # type: ignore[index]
            found += [] if is_partial else [term]
        return tuple(found)

    return {value: terms(value) for value in made if value not in inner}, frozenset(inner)


def _is_addition(program: OwnedProgram, op: OwnedOperation) -> bool:
    """Whether an operation adds two numbers that all know; an unknown name is no addition."""
    is_number = all(program.aval_of(a).shape == () for a in op.outputs)
    is_shared = op.owner is None and op.level > 0
    return is_shared and is_number and op.name == "add"
