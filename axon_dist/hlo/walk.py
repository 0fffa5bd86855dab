"""Visits every computation that the control flow of a program reaches, and how often."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

from .loops import trip_count
from .parse import Computation, Instruction, Module


@dataclasses.dataclass(frozen=True)
class Visit:
    """One way to reach a computation from the entry.

    Args:
        computation: what is reached.
        count: executions per step, the trip counts of the loops around it multiplied.
        unknown_trip: whether a loop around it was counted once because only the data decide.
        in_conditional: whether a branch of a conditional leads to it.
    """

    computation: Computation
    count: int = 1
    unknown_trip: bool = False
    in_conditional: bool = False


def visits(module: Module) -> Iterator[Visit]:
    """Follows loops, branches and calls from the entry of a program.

    Fusions and asynchronous wrappers are not entered: what they hold is scheduled where they are
    launched. The branches of a conditional all count as executed.

    Args:
        module: the parsed HLO of a compiled program.

    Yields:
        A visit for every call path; a computation called twice is visited twice.
    """
    yield from _descend(module, Visit(module.entry))


def _descend(module: Module, visit: Visit) -> Iterator[Visit]:
    yield visit
    for instruction in visit.computation.instructions:
        if instruction.opcode == "while":
            trips = trip_count(module, visit.computation, instruction)
            inner = dataclasses.replace(
                visit,
                count=visit.count * (1 if trips is None else trips),
                unknown_trip=visit.unknown_trip or trips is None,
            )
        elif instruction.opcode == "conditional":
            inner = dataclasses.replace(visit, in_conditional=True)
        elif instruction.opcode == "call":
            inner = visit
        else:
            continue
        for computation in module.called(instruction):
            yield from _descend(module, dataclasses.replace(inner, computation=computation))


def below_branches(module: Module) -> Iterator[Computation]:
    """Finds what only some devices may run: all that a branch of a conditional leads to.

    Unlike `visits` it enters everything that is named on the way, fusions and asynchronous
    wrappers too, and each computation once.

    Args:
        module: the parsed HLO of a compiled program.

    Yields:
        The computations.
    """
    every = (i for computation in module.computations.values() for i in computation.instructions)
    waiting = [name for i in every if i.opcode == "conditional" for name in _named(i)]
    seen: set[str] = set()
    while waiting:
        name = waiting.pop()
        if name in seen or name not in module.computations:
            continue
        seen.add(name)
        yield module.computations[name]
        waiting += [name for i in module.computations[name].instructions for name in _named(i)]


def _named(instruction: Instruction) -> Iterator[str]:
    return itertools.chain.from_iterable(instruction.called.values())
