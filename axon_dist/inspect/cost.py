"""What running a computation costs: matrix operations and bytes of memory traffic."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from ..hardware import Hardware
from ..hlo.loops import trip_count
from ..hlo.parse import Computation, Instruction, Module
from .matmuls import matmul_flops

_FREE = (
    *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all"),
    *("partition-id", "replica-id", "opt-barrier", "add-dependency", "iota"),
)
_SLICES = ("dynamic-slice", "slice", "gather")


@dataclasses.dataclass(frozen=True)
class Cost:
    """Bounds on the matrix operations, and the bytes of memory traffic, of one execution.

    `low` lets every conditional take its cheapest branch, `high` its dearest.
    """

    low: int = 0
    high: int = 0
    traffic: int = 0

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.low + other.low, self.high + other.high, self.traffic + other.traffic)

    def times(self, count: int) -> Cost:
        """The cost of so many executions."""
        return Cost(self.low * count, self.high * count, self.traffic * count)

    def seconds(self, machine: Hardware) -> float:
        """The least time that a machine needs, at its peak rates and on the cheapest branches."""
        return max(self.low / machine.flops, self.traffic / machine.memory_bandwidth)


class CostModel:
    """Adds up costs over the call graph of one program, each computation once.

    Args:
        module: the parsed HLO of a compiled program.
    """

    def __init__(self, module: Module):
        self._module = module
        self._known: dict[str, Cost] = {}

    def computation(self, computation: Computation) -> Cost:
        """The cost of one execution of a computation, with all that it calls."""
        if computation.name not in self._known:
            costs = (self.instruction(computation, i) for i in computation.instructions)
            self._known[computation.name] = _total(costs)
        return self._known[computation.name]

    def instruction(self, computation: Computation, instruction: Instruction) -> Cost:
        """The cost of one instruction of a computation, with all that it calls."""
        opcode = instruction.opcode
        called = [self.computation(callee) for callee in self._module.called(instruction)]
        if opcode == "while":
            trips = trip_count(self._module, computation, instruction)
            return _total(called).times(1 if trips is None else trips)
        if opcode == "conditional":
            return Cost(
                low=min(cost.low for cost in called),
                high=max(cost.high for cost in called),
                traffic=min(cost.traffic for cost in called),
            )
        if opcode == "call":
            return _total(called)
        own = matmul_flops(computation, instruction)
        inner = _total(called)
        traffic = self._traffic(computation, instruction)
        return Cost(own + inner.low, own + inner.high, traffic)

    def _traffic(self, computation: Computation, instruction: Instruction) -> int:
        if instruction.opcode in _FREE or instruction.opcode.endswith(("-start", "-done")):
            return 0
        if instruction.opcode == "fusion":
            (fused,) = self._module.called(instruction)
            return _read(fused) + _written(fused, fused.root)
        if instruction.opcode == "dynamic-update-slice":
            return _written(computation, instruction)
        operands = (computation.by_name.get(name) for name in instruction.operands)
        return instruction.bytes + sum(operand.bytes for operand in operands if operand)


def _total(costs: Iterable[Cost]) -> Cost:
    return sum(costs, Cost())


def _read(fused: Computation) -> int:
    """What a fusion reads: a stack of layers of which it slices one counts as that one."""
    total = 0
    for parameter in fused.instructions:
        if parameter.opcode != "parameter":
            continue
        users = [user for user in fused.instructions if parameter.name in user.operands]
        if users and all(user.opcode in _SLICES for user in users):
            total += sum(user.bytes for user in users)
        elif not any(_overwrites(user, parameter) for user in users):
            total += parameter.bytes
    return total


def _overwrites(user: Instruction, parameter: Instruction) -> bool:
    return user.opcode == "dynamic-update-slice" and user.operands[0] == parameter.name


def _written(computation: Computation, value: Instruction) -> int:
    """What storing a value writes: an update in place counts as the slice it replaces."""
    elements = [computation.by_name[name] for name in value.operands if value.opcode == "tuple"]
    if elements:
        return sum(_written(computation, element) for element in elements)
    if value.opcode == "dynamic-update-slice":
        return computation.by_name[value.operands[1]].bytes
    return value.bytes
