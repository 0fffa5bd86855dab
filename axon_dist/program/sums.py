"""Sums of numbers of several owners, which ranks add up instead of handing terms around."""

from __future__ import annotations

from collections.abc import Mapping

from .owners import Atom, Operation, OwnedProgram


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


def _is_addition(program: OwnedProgram, op: Operation) -> bool:
    """Whether an operation adds two numbers that all know; an unknown name is no addition."""
    is_number = all(program.aval_of(a).shape == () for a in op.outputs)
    is_shared = op.owner is None and op.level > 0
    return is_shared and is_number and op.name == "add"
