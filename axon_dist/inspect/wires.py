"""What each computation of a program sends, for how long, and how much of that compute hides."""

from __future__ import annotations

import dataclasses

from ..hardware import Hardware
from ..hlo.groups import Groups, replica_groups, source_target_pairs
from ..hlo.loops import trip_count
from ..hlo.parse import Computation, Instruction, Module
from ..hlo.shapes import total_bytes
from ..hlo.transfers import Transfer, results, transfers
from .collective import ring_bytes
from .cost import CostModel
from .overlap import Judged, Wire, judge


@dataclasses.dataclass(frozen=True)
class Sent:
    """A transfer with its groups and bytes.

    Args:
        transfer: the collective and when it is under way.
        groups: who takes part; pairs of a collective-permute.
        bytes_in: bytes of its operands on one device.
        bytes_out: bytes of its results on one device.
    """

    transfer: Transfer
    groups: Groups
    bytes_in: int
    bytes_out: int

    @property
    def group_size(self) -> int:
        """Devices that take part together."""
        return max((len(set(group)) for group in self.groups), default=1)

    @property
    def wire_bytes(self) -> int:
        """Bytes that one device sends in one execution, by the ring algorithm."""
        return ring_bytes(self.transfer.kind, self.bytes_in, self.bytes_out, self.group_size)


class WireModel:
    """Judges the transfers of one program, each computation once.

    Args:
        module: the parsed HLO of a compiled program.
        machine: whose rates apply; None where they are not known.
    """

    def __init__(self, module: Module, machine: Hardware | None):
        self.module: Module = module
        self._machine = machine
        self._costs = CostModel(module)
        self._sent: dict[str, list[Sent]] = {}
        self._seconds: dict[str, float] = {}

    def sent(self, computation: Computation) -> list[Sent]:
        """What a computation launches itself, not in its loops or branches, in order."""
        if computation.name not in self._sent:
            found = transfers(self.module, computation)
            self._sent[computation.name] = [self._measured(transfer) for transfer in found]
        return self._sent[computation.name]

    def judged(self, computation: Computation) -> list[Judged]:
        """A judgement for each of what `sent` lists."""
        wires = [Wire(one.transfer, self._alone(one)) for one in self.sent(computation)]
        work = [self._costs.instruction(computation, i) for i in computation.instructions]
        within = [self._within(computation, i) for i in computation.instructions]
        return judge(work, wires, within, self._machine)

    def leaves_node(self, sent: Sent) -> bool:
        """Whether a transfer goes from one node to another, where the machine has nodes."""
        size = 0 if self._machine is None else self._machine.node_size
        return bool(size) and any(len({d // size for d in group}) > 1 for group in sent.groups)

    def _measured(self, transfer: Transfer) -> Sent:
        instruction = transfer.instruction
        if transfer.kind == "collective-permute":
            groups = source_target_pairs(instruction.attributes)
        else:
            groups = replica_groups(instruction.attributes, self.module.num_devices)
        operands = transfer.owner.operand_shapes(instruction)
        return Sent(transfer, groups, total_bytes(operands), total_bytes(results(transfer)))

    def _alone(self, sent: Sent) -> float:
        if self._machine is None:
            return 0.0
        return self._machine.wire_seconds(sent.wire_bytes, sent.groups)

    def _within(self, computation: Computation, instruction: Instruction) -> float:
        """For how many seconds what an instruction calls has the wire."""
        if instruction.opcode not in ("while", "conditional", "call"):
            return 0.0
        each = [self._total(called) for called in self.module.called(instruction)]
        if instruction.opcode == "conditional":
            return max(each)
        loop = instruction.opcode == "while"
        trips = trip_count(self.module, computation, instruction) if loop else 1
        return sum(each) * (1 if trips is None else trips)

    def _total(self, computation: Computation) -> float:
        if computation.name not in self._seconds:
            own = sum(self._alone(one) for one in self.sent(computation))
            inner = sum(self._within(computation, i) for i in computation.instructions)
            self._seconds[computation.name] = own + inner
        return self._seconds[computation.name]
