"""The collectives of a compiled program: the independent witness of what a strategy claims.

Whether the compute scheduled beside a transfer hides it: two clocks run through the schedule of a
computation, one of the compute units and one of the wire. Compute takes the least time its machine
allows, and transfers queue up on the wire, so the same matrix product never hides two of them;
what a loop within sends takes its part of the wire, too. What this calls hidden would be hidden
even by compute that runs at its peak rate; latency, and the memory bandwidth a transfer takes
away, are left out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import jax

from ..mesh import SLOW_AXES
from ..mesh.chips import Hardware, machine_of
from ..mesh.replica_groups import (
    Groups,
    permuted_axes,
    replica_groups,
    source_target_pairs,
    spanned_axes,
)
from .computations import Visit, trip_count, visits
from .flops import Cost, CostModel
from .ledger import Collective, Exposure, Ledger, ring_bytes
from .parse import Computation, Instruction, Module, ProgramLike, as_module, origin, total_bytes
from .transfers import ScheduledCollective, results, transfers


def collectives(
    program: ProgramLike,
    mesh: jax.sharding.Mesh | None = None,
    machine: Hardware | None = None,
) -> Ledger:
    """Lists the collectives that one step of a compiled program executes.

    Nothing the strategies declare enters: the rows are read from the optimised program that will
    run. On CPU XLA widens bf16 collectives to f32 (`AllReducePromotion`), so bytes there are those
    of the emulation; compile for the real target to see its bytes.

    Args:
        program: a `jax.stages.Compiled`, its text, or a `Module`.
        mesh: the mesh it was compiled for; names the axes of every row.
        machine: the rates that decide whether a transfer is hidden; looked up from the mesh's
            devices unless given.

    Returns:
        A row for every collective and every way the control flow leads to it.

    Example:
        >>> ledger = collectives('''HloModule step, num_partitions=8
        ... ENTRY %main (x: f32[100]) -> f32[100] {
        ...   %x = f32[100]{0} parameter(0)
        ...   ROOT %sum = f32[100]{0} all-reduce(%x), replica_groups={{0,1,2,3},{4,5,6,7}}
        ... }''')
        >>> [(row.kind, row.group_size, row.wire_bytes) for row in ledger]
        [('all-reduce', 4, 600)]
    """
    module = as_module(program)
    machine = machine or machine_of(mesh)
    wires = WireModel(module, machine)
    rows = (row for visit in visits(module) for row in _rows(wires, visit, mesh))
    axes = mesh.axis_names if mesh is not None else ()
    return Ledger(tuple(rows), axes, wires.step_seconds(module.entry))


def _rows(wires: WireModel, visit: Visit, mesh: jax.sharding.Mesh | None) -> Iterator[Collective]:
    sent, judged = wires.sent(visit.computation), wires.judged(visit.computation)
    for one, judgement in zip(sent, judged, strict=True):
        instruction, kind = one.transfer.instruction, one.transfer.kind
        operands = one.transfer.owner.operand_shapes(instruction)
        find_axes = permuted_axes if kind == "collective-permute" else spanned_axes
        op_name, source = origin(instruction.attributes, wires.module.sources)
        axes = find_axes(one.groups, mesh)
        yield Collective(
            name=instruction.name,
            kind=kind,
            dtypes=tuple(sorted({shape.dtype for shape in operands})),
            num_arrays=len(operands),
            bytes_in=one.bytes_in,
            bytes_out=one.bytes_out,
            group_size=one.group_size,
            wire_bytes=one.wire_bytes,
            count=visit.count,
            unknown_trip=visit.unknown_trip,
            in_conditional=visit.in_conditional,
            axes=axes,
            is_async=one.transfer.is_async,
            exposure=judgement.exposure,
            seconds=judgement.seconds,
            waited=judgement.waited,
            op_name=op_name,
            source=source,
            is_slow=one.wire_bytes > 0
            and (not set(SLOW_AXES).isdisjoint(axes or ()) or wires.leaves_node(one)),
        )


_CALLS = ("while", "conditional", "call")

NOTHING = 0.01
"""A transfer is exposed where compute covers less than this share of its time."""


@dataclasses.dataclass(frozen=True)
class TransferTime:
    """A transfer and the seconds it needs alone on the wire."""

    transfer: ScheduledCollective
    seconds: float


@dataclasses.dataclass(frozen=True)
class Judged:
    """How much of one transfer is hidden; the fields are those of `Collective`."""

    exposure: Exposure
    seconds: float | None = None
    waited: float | None = None


def judge(
    work: Sequence[Cost],
    wires: Sequence[TransferTime],
    within: Sequence[float],
    machine: Hardware | None,
) -> list[Judged]:
    """Judges every transfer that a computation launches.

    Args:
        work: what each instruction of the computation costs, in the order of the schedule.
        wires: the transfers with their times, in the same order.
        within: for each instruction, the seconds for which what it calls has the wire.
        machine: whose rates apply; without one, a transfer with any compute beside it is `light`.

    Returns:
        One judgement per transfer.
    """
    beside = [_has_compute(work, wire.transfer) for wire in wires]
    if machine is None:
        return [Judged("light" if covered else "exposed") for covered in beside]
    waits = _waits([cost.seconds(machine) for cost in work], wires, within)
    return [
        Judged(_exposure(wire.seconds, wait, covered), wire.seconds, wait)
        for wire, wait, covered in zip(wires, waits, beside, strict=True)
    ]


def _has_compute(work: Sequence[Cost], transfer: ScheduledCollective) -> bool:
    return any(cost.low or cost.traffic for cost in work[transfer.start + 1 : transfer.done])


def _exposure(seconds: float, waited: float, has_compute: bool) -> Exposure:
    if not has_compute or waited > (1 - NOTHING) * seconds:
        return "exposed"
    # Sums of floating-point times differ from their parts.
    return "light" if waited > 1e-9 * seconds else "hidden"


def _waits(
    compute_seconds: Sequence[float], wires: Sequence[TransferTime], within: Sequence[float]
) -> list[float]:
    """Runs the schedule and returns how long the compute units stand still for each transfer."""
    starts: dict[int, list[int]] = {}
    ends: dict[int, list[int]] = {}
    for number, wire in enumerate(wires):
        starts.setdefault(wire.transfer.start, []).append(number)
        ends.setdefault(wire.transfer.done, []).append(number)
    clock = wire_free = 0.0
    arrival = [0.0] * len(wires)
    waits = [0.0] * len(wires)
    pending: set[int] = set()
    for index, (seconds, sent) in enumerate(zip(compute_seconds, within, strict=True)):
        for number in starts.get(index, ()):
            wire_free = max(wire_free, clock) + wires[number].seconds
            arrival[number] = wire_free
            pending.add(number)
        for number in ends.get(index, ()):
            waits[number] = max(0.0, arrival[number] - clock)
            clock += waits[number]
            pending.discard(number)
        if sent:
            # A wire that a loop shares serves what waits outside of it so much later.
            wire_free = max(wire_free, clock) + sent
            for number in pending:
                arrival[number] += sent if arrival[number] > clock else 0.0
        clock += max(seconds, sent)
    return waits


@dataclasses.dataclass(frozen=True)
class TransferBytes:
    """A transfer with its groups and bytes.

    Args:
        transfer: the collective and when it is under way.
        groups: who takes part; pairs of a collective-permute.
        bytes_in: bytes of its operands on one device.
        bytes_out: bytes of its results on one device.
    """

    transfer: ScheduledCollective
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
        self._sent: dict[str, list[TransferBytes]] = {}
        self._seconds: dict[str, float] = {}
        self._steps: dict[str, float] = {}

    def sent(self, computation: Computation) -> list[TransferBytes]:
        """What a computation launches itself, not in its loops or branches, in order."""
        if computation.name not in self._sent:
            in_order = transfers(self.module, computation)
            self._sent[computation.name] = [self._measured(transfer) for transfer in in_order]
        return self._sent[computation.name]

    def judged(self, computation: Computation) -> list[Judged]:
        """A judgement for each of what `sent` lists."""
        wires = [TransferTime(one.transfer, self._alone(one)) for one in self.sent(computation)]
        work = [self._costs.instruction(computation, i) for i in computation.instructions]
        within = [self._within(computation, i) for i in computation.instructions]
        return judge(work, wires, within, self._machine)

    def step_seconds(self, computation: Computation) -> float:
        """The time that one execution takes: compute at its peak rates, and what it waits for.

        One instruction after another, each bound by its matrix operations or its memory traffic,
        loops as often as they turn, and of branches the longest, which some device takes; 0 where
        no rates are known.
        """
        if self._machine is None:
            return 0.0
        if computation.name not in self._steps:
            waits = sum(judged.waited or 0.0 for judged in self.judged(computation))
            runs = (self._runs(computation, each) for each in computation.instructions)
            self._steps[computation.name] = waits + sum(runs)
        return self._steps[computation.name]

    def _runs(self, computation: Computation, instruction: Instruction) -> float:
        """For how long an instruction keeps the compute units, with what it calls waits for."""
        assert self._machine is not None
        if instruction.opcode not in _CALLS:
            return self._costs.instruction(computation, instruction).seconds(self._machine)
        each = [self.step_seconds(called) for called in self.module.called(instruction)]
        if instruction.opcode == "conditional":
            return max(each)
        return sum(each) * self._trips(computation, instruction)

    def _trips(self, computation: Computation, instruction: Instruction) -> int:
        if instruction.opcode != "while":
            return 1
        trips = trip_count(self.module, computation, instruction)
        return 1 if trips is None else trips

    def leaves_node(self, sent: TransferBytes) -> bool:
        """Whether a transfer goes from one node to another, where the machine has nodes."""
        size = 0 if self._machine is None else self._machine.node_size
        return bool(size) and any(len({d // size for d in group}) > 1 for group in sent.groups)

    def _measured(self, transfer: ScheduledCollective) -> TransferBytes:
        instruction = transfer.instruction
        if transfer.kind == "collective-permute":
            groups = source_target_pairs(instruction.attributes)
        else:
            groups = replica_groups(instruction.attributes, self.module.num_devices)
        operands = transfer.owner.operand_shapes(instruction)
        return TransferBytes(
            transfer, groups, total_bytes(operands), total_bytes(results(transfer))
        )

    def _alone(self, sent: TransferBytes) -> float:
        if self._machine is None:
            return 0.0
        return self._machine.wire_seconds(sent.wire_bytes, sent.groups)

    def _within(self, computation: Computation, instruction: Instruction) -> float:
        """For how many seconds what an instruction calls has the wire."""
        if instruction.opcode not in _CALLS:
            return 0.0
        each = [self._total(called) for called in self.module.called(instruction)]
        if instruction.opcode == "conditional":
            return max(each)
        return sum(each) * self._trips(computation, instruction)

    def _total(self, computation: Computation) -> float:
        if computation.name not in self._seconds:
            alone = sum(self._alone(one) for one in self.sent(computation))
            inner = sum(self._within(computation, i) for i in computation.instructions)
            self._seconds[computation.name] = alone + inner
        return self._seconds[computation.name]
