"""Visits every computation that the control flow of a program reaches, with its execution count.

The CPU and GPU compilers write a loop's trip count into its instruction; for TPU it has to be
inferred. A loop from `lax.scan` or `fori_loop` counts an integer, so the integers among its carried
values are simulated until its condition fails.
"""

from __future__ import annotations

import dataclasses
import itertools
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TypeAlias

from ..core.compat import RARE
from .parse import Computation, Instruction, Module, ProgramLike, as_module, total_bytes

_KNOWN = re.compile(r'"known_trip_count":\s*\{\s*"n":\s*"?(\d+)"?')
_MAX_SIMULATED = 1 << 16

_COMPARE: dict[str, Callable[[int, int], bool]] = {
    "LT": operator.lt,
    "LE": operator.le,
    "GT": operator.gt,
    "GE": operator.ge,
    "EQ": operator.eq,
    "NE": operator.ne,
}
_OPERATIONS: dict[str, Callable[..., int]] = {
    "add": operator.add,
    "subtract": operator.sub,
    "multiply": operator.mul,
    "and": operator.and_,
    "or": operator.or_,
    "minimum": min,
    "maximum": max,
    **dict.fromkeys(("bitcast", "copy", "convert", "reshape"), int),
}

Known: TypeAlias = int | Mapping[int, int] | None
"""The known content of a value: an integer, the integers of a tuple by index, or nothing."""


def trip_count(module: Module, computation: Computation, loop: Instruction) -> int | None:
    """Returns how often the body of a `while` runs, or None if that depends on the data.

    Args:
        module: the parsed HLO of a compiled program.
        computation: the computation that holds the loop.
        loop: its `while` instruction.

    Returns:
        The number of iterations of one execution of the loop.
    """
    if match := _KNOWN.search(loop.attributes):
        return int(match.group(1))
    called = loop.called
    condition = module.computations[called["condition"][0]]
    body = module.computations[called["body"][0]]
    call = _Call(module, computation, _arguments(module, computation))
    state = call.value(loop.operands[0])
    for iteration in range(_MAX_SIMULATED):
        continues = _Call(module, condition, [state]).value(condition.root.name)
        if not isinstance(continues, int):
            return None
        if not continues:
            return iteration
        before = state
        state = _next_state(module, body, state)
        if state == before:
            return None
    return None


def _arguments(module: Module, computation: Computation) -> list[Known]:
    """Returns what is known about a computation's arguments if all its calls agree, else [].

    It is needed because XLA:CPU moves small loops into calls.
    """
    values = []
    for caller in module.computations.values():
        for call in (i for i in caller.instructions if i.opcode == "call"):
            if computation in module.called(call):
                outer = _Call(module, caller, _arguments(module, caller))
                values.append([outer.value(name) for name in call.operands])
    return values[0] if values and all(other == values[0] for other in values) else []


def _next_state(module: Module, body: Computation, state: Known) -> Mapping[int, int]:
    if body.root.opcode != "tuple" or not isinstance(state, Mapping):
        return {}
    return _Call(module, body, [state]).elements(body.root, state)


class _Call:
    """Evaluates values in one call of a computation, on demand.

    `arguments[n]` is what is known about parameter n.
    """

    def __init__(self, module: Module, computation: Computation, arguments: Sequence[Known]):
        self._module = module
        self._computation = computation
        self._arguments = arguments

    def value(self, name: str) -> Known:
        instruction = self._computation.by_name.get(name)
        if instruction is None:
            return None
        opcode = instruction.opcode
        operands = instruction.operands
        if opcode == "parameter":
            number = int(instruction.arguments)
            return self._arguments[number] if number < len(self._arguments) else None
        if opcode == "tuple":
            return self.elements(instruction, range(len(operands)))
        if opcode == "get-tuple-element":
            return self._element(operands[0], int(instruction.attribute("index") or 0))
        if len(instruction.shapes) != 1 or instruction.shapes[0].dims:
            return None
        if opcode == "constant":
            return _constant(instruction.arguments)
        if opcode in ("fusion", "call"):
            (callee,) = self._module.called(instruction)
            arguments = [self.value(operand) for operand in operands]
            return _Call(self._module, callee, arguments).value(callee.root.name)
        return self._computed(instruction)

    def elements(self, made: Instruction, indices: Iterable[int]) -> Mapping[int, int]:
        """Returns the integers among some elements of a tuple, by index."""
        values = {index: self.value(made.operands[index]) for index in indices}
        return {index: value for index, value in values.items() if isinstance(value, int)}

    def _element(self, name: str, index: int) -> Known:
        source = self._computation.by_name[name]
        if source.opcode == "tuple":
            return self.value(source.operands[index])
        carried = self.value(name)
        return carried.get(index) if isinstance(carried, Mapping) else None

    def _computed(self, instruction: Instruction) -> Known:
        """Evaluates an operation on integers."""
        opcode = instruction.opcode
        operands = instruction.operands
        if opcode == "select":
            test = self.value(operands[0])
            return self.value(operands[1 if test else 2]) if isinstance(test, int) else None
        compute = _OPERATIONS.get(opcode)
        if opcode == "compare":
            compute = _COMPARE[instruction.attribute("direction") or ""]
        if compute is None:
            return None
        values = [x for x in map(self.value, operands) if isinstance(x, int)]
        return int(compute(*values)) if len(values) == len(operands) else None


def _constant(text: str) -> int | None:
    if text in ("true", "false"):
        return int(text == "true")
    return int(text) if re.fullmatch(r"-?\d+", text) else None


@dataclasses.dataclass(frozen=True)
class Visit:
    """One way to reach a computation from the entry.

    Args:
        computation: the computation reached.
        count: executions per step: the product of the trip counts of the loops around it.
        unknown_trip: whether a loop around it has a data-dependent length and was counted once.
        in_conditional: whether it is reached through a branch of a conditional.
    """

    computation: Computation
    count: int = 1
    unknown_trip: bool = False
    in_conditional: bool = False


def visits(module: Module) -> Iterator[Visit]:
    """Follows loops, branches and calls from the entry of a program.

    It does not enter fusions and asynchronous wrappers: their instructions are scheduled where they
    are launched. All branches of a conditional count as executed, except those marked as rare.

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
        for computation in usually_called(module, instruction):
            yield from _descend(module, dataclasses.replace(inner, computation=computation))


def usually_called(module: Module, instruction: Instruction) -> list[Computation]:
    """Returns what an instruction calls, without the branches that this library marks as rare.

    Experts have slots for the busiest expert's load under a balanced choice. Branches with more
    slots are marked as rare, and so is a loop for even larger loads. They contain no collectives.
    """
    called = list(module.called(instruction))
    if instruction.opcode != "conditional":
        return called
    return [c for c in called if not any(RARE in i.attributes for i in c.instructions)] or called


def below_branches(module: Module) -> Iterator[Computation]:
    """Finds what only some devices may run: everything reached from a branch of a conditional.

    Unlike `visits`, it enters every computation that an instruction names, including fusions and
    asynchronous wrappers, and each only once.

    Args:
        module: the parsed HLO of a compiled program.

    Yields:
        The computations.
    """
    nodes = (i for computation in module.computations.values() for i in computation.instructions)
    waiting = [name for i in nodes if i.opcode == "conditional" for name in _named(i)]
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


def carried_bytes(program: ProgramLike) -> int:
    """Returns the bytes per device that a loop rewrites in every iteration.

    It is the largest number among the outermost loops. In a step with gradient accumulation, these
    bytes are the sums of gradients, and a few scalars. Values that a loop only reads, such as
    weights, do not count; nor do loops within it.

    Args:
        program: a compiled step, or its text.

    Returns:
        The bytes, 0 without a loop.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> add = lambda total, row: (total + row, None)
        >>> sums = jax.jit(lambda rows: jax.lax.scan(add, jnp.zeros(64), rows)[0])
        >>> carried_bytes(sums.lower(jnp.ones((9, 64))).compile())  # and the number of the turn
        260
    """
    module = as_module(program)
    return max((_rewritten(module, loop) for loop in _outermost(module, module.entry)), default=0)


def _outermost(module: Module, computation: Computation) -> Iterator[Instruction]:
    for instruction in computation.instructions:
        if instruction.opcode == "while":
            yield instruction
        elif instruction.opcode in ("call", "conditional"):
            for called in module.called(instruction):
                yield from _outermost(module, called)


def _rewritten(module: Module, loop: Instruction) -> int:
    body = module.computations[loop.called["body"][0]]
    pairs = zip(loop.shapes, body.root.operands, strict=True)
    shapes = [shape for at, (shape, operand) in enumerate(pairs) if not _is_kept(body, operand, at)]
    return total_bytes(tuple(shapes))


def _is_kept(body: Computation, operand: str, position: int) -> bool:
    """Whether an iteration returns the argument at a position unchanged."""
    maker = body.by_name[operand]
    return maker.opcode == "get-tuple-element" and maker.attribute("index") == str(position)
