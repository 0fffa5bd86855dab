"""The collectives of a compiled program, read from its text alone.

To decide whether compute hides a transfer, two clocks run through the schedule of a computation:
one for the compute units and one for the links. Compute takes the least time its machine allows.
Transfers use the links one after another, so the same matrix product never hides two of them;
transfers of an inner loop use the links too. A transfer that counts as hidden would be hidden even
by compute at its peak rate. Latency, and the memory bandwidth that a transfer uses, are ignored.

A collective can be one instruction (`all-gather`), a pair (`all-gather-start`, `all-gather-done`),
a computation wrapped in an asynchronous pair (`async-start`, or `call-start` for the sparse core of
a TPU), a part of a fusion, or on TPU a chain of fusions that advance it while they compute.
On GPU a collective-permute can also be split into `send` and `recv`.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax

from ..mesh import SLOW_AXES
from ..mesh.chips import Hardware, machine_of
from ..mesh.group import (
    Groups,
    permuted_axes,
    replica_groups,
    source_target_pairs,
    spanned_axes,
)
from .computations import Visit, trip_count, usually_called, visits
from .flops import CostModel
from .ledger import KINDS, Collective, Exposure, Ledger, ring_bytes
from .parse import (
    Computation,
    Instruction,
    Module,
    ProgramLike,
    Shape,
    as_module,
    origin,
    total_bytes,
)


def collectives(
    program: ProgramLike,
    mesh: jax.sharding.Mesh | None = None,
    machine: Hardware | None = None,
) -> Ledger:
    """Lists the collectives that one step of a compiled program executes.

    The rows come only from the optimised program that will run, not from the strategies. On CPU,
    XLA widens bf16 collectives to f32 (`AllReducePromotion`), so the bytes are those of the
    emulation; compile for the real target to see its bytes.

    Args:
        program: a `jax.stages.Compiled`, its text, or a `Module`.
        mesh: the mesh it was compiled for; used to name the axes of every row.
        machine: the machine whose rates decide whether a transfer is hidden; looked up from the
            mesh's devices unless given.

    Returns:
        A row for every collective and every call path to it.

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
    wires = WireModel(module, machine or machine_of(mesh))
    rows = (row for visit in visits(module) for row in _rows(wires, visit, mesh))
    axes = mesh.axis_names if mesh is not None else ()
    return Ledger(tuple(rows), axes, wires.timed(module.entry).step)


def _rows(wires: WireModel, visit: Visit, mesh: jax.sharding.Mesh | None) -> Iterator[Collective]:
    for one, exposure, waited in wires.timed(visit.computation).judged:
        find_axes = permuted_axes if one.kind == "collective-permute" else spanned_axes
        op_name, source = origin(one.instruction.attributes, wires.module.sources)
        axes = find_axes(one.groups, mesh)
        yield Collective(
            name=one.instruction.name,
            kind=one.kind,
            dtypes=tuple(sorted({shape.dtype for shape in one.operands})),
            num_arrays=len(one.operands),
            bytes_in=total_bytes(one.operands),
            bytes_out=total_bytes(one.results),
            group_size=one.group_size,
            wire_bytes=one.wire_bytes,
            count=visit.count,
            unknown_trip=visit.unknown_trip,
            in_conditional=visit.in_conditional,
            axes=axes,
            is_async=one.done > one.start,
            exposure=exposure,
            seconds=None if wires.machine is None else wires.seconds(one),
            waited=waited,
            op_name=op_name,
            source=source,
            is_slow=one.wire_bytes > 0
            and (not set(SLOW_AXES).isdisjoint(axes or ()) or wires.leaves_node(one)),
        )


_CALLS = ("while", "conditional", "call")

NOTHING = 0.01
"""A transfer is exposed if compute covers less than this share of its time."""


def _exposure(seconds: float, waited: float, has_compute: bool) -> Exposure:
    if not has_compute or waited > (1 - NOTHING) * seconds:
        return "exposed"
    # The tolerance allows for rounding in sums of times.
    return "light" if waited > 1e-9 * seconds else "hidden"


def _waits(
    compute_seconds: Sequence[float],
    sent: Sequence[ScheduledCollective],
    alone: Sequence[float],
    within: Sequence[float],
) -> list[float]:
    """Runs the schedule and returns how long the compute units are idle for each transfer."""
    starts: dict[int, list[int]] = {}
    ends: dict[int, list[int]] = {}
    for number, transfer in enumerate(sent):
        starts.setdefault(transfer.start, []).append(number)
        ends.setdefault(transfer.done, []).append(number)
    clock = wire_free = 0.0
    arrival = [0.0] * len(sent)
    waits = [0.0] * len(sent)
    pending: set[int] = set()
    for index, (seconds, called) in enumerate(zip(compute_seconds, within, strict=True)):
        for number in starts.get(index, ()):
            wire_free = max(wire_free, clock) + alone[number]
            arrival[number] = wire_free
            pending.add(number)
        for number in ends.get(index, ()):
            waits[number] = max(0.0, arrival[number] - clock)
            clock += waits[number]
            pending.discard(number)
        if called:
            # Transfers of a loop delay pending transfers outside it that share its link.
            wire_free = max(wire_free, clock) + called
            for number in pending:
                arrival[number] += called if arrival[number] > clock else 0.0
        clock += max(seconds, called)
    return waits


class Execution(NamedTuple):
    """One execution of a computation.

    Attributes:
        judged: the collectives that it launches itself, not in its loops or branches, in order;
            each with its exposure and exposed seconds (None without a machine).
        wire: seconds for which it uses the links, including all it calls.
        step: seconds that it takes, instruction by instruction, each bound by its matrix operations
            or its memory traffic, plus exposed transfers. Loops count with their trip counts, and
            conditionals with their longest branch, which some device takes. 0 if no rates are
            known.
    """

    judged: Sequence[tuple[ScheduledCollective, Exposure, float | None]]
    wire: float
    step: float


class WireModel:
    """Judges the transfers of one program, each computation once.

    Args:
        module: the parsed HLO of a compiled program.
        machine: the machine whose rates apply. If None, a transfer that overlaps any compute is
            `light`.
    """

    def __init__(self, module: Module, machine: Hardware | None):
        self.module: Module = module
        self.machine: Hardware | None = machine
        self._costs = CostModel(module)
        self._known: dict[str, Execution] = {}

    def timed(self, computation: Computation) -> Execution:
        """Judges the transfers that a computation launches, and times it."""
        if computation.name not in self._known:
            self._known[computation.name] = self._timed(computation)
        return self._known[computation.name]

    def _timed(self, computation: Computation) -> Execution:
        sent = transfers(self.module, computation)
        work = [self._costs.instruction(computation, i) for i in computation.instructions]
        overlaps = [
            any(cost.low or cost.traffic for cost in work[one.start + 1 : one.done]) for one in sent
        ]
        called = [self._called(computation, i) for i in computation.instructions]
        alone = [self.seconds(one) for one in sent]
        within = [wire for wire, _ in called]
        wire = sum(alone) + sum(within)
        if self.machine is None:
            kinds: list[Exposure] = ["light" if covered else "exposed" for covered in overlaps]
            return Execution(
                [(one, kind, None) for one, kind in zip(sent, kinds, strict=True)], wire, 0.0
            )
        compute = [cost.seconds(self.machine) for cost in work]
        waits = _waits(compute, sent, alone, within)
        kinds = [_exposure(*one) for one in zip(alone, waits, overlaps, strict=True)]
        runs = (
            spent if i.opcode in _CALLS else least
            for i, least, (_, spent) in zip(computation.instructions, compute, called, strict=True)
        )
        return Execution(list(zip(sent, kinds, waits, strict=True)), wire, sum(waits) + sum(runs))

    def _called(self, computation: Computation, instruction: Instruction) -> tuple[float, float]:
        """Returns the seconds of what an instruction calls: on the links, and in total."""
        if instruction.opcode not in _CALLS:
            return 0.0, 0.0
        each = [self.timed(called) for called in usually_called(self.module, instruction)]
        if instruction.opcode == "conditional":
            return max(one.wire for one in each), max(one.step for one in each)
        is_loop = instruction.opcode == "while"
        trips = trip_count(self.module, computation, instruction) if is_loop else 1
        count = 1 if trips is None else trips
        return sum(one.wire for one in each) * count, sum(one.step for one in each) * count

    def waited(self, computation: Computation) -> float:
        """Returns the seconds an execution waits for transfers, including all it calls."""
        waits = self.timed(computation).judged
        total = sum(wait or 0.0 for _, _, wait in waits)
        for instruction in computation.instructions:
            if instruction.opcode in _CALLS:
                each = [self.waited(one) for one in usually_called(self.module, instruction)]
                if instruction.opcode == "conditional":
                    total += max(each, default=0.0)
                    continue
                is_loop = instruction.opcode == "while"
                trips = trip_count(self.module, computation, instruction) if is_loop else 1
                total += (1 if trips is None else trips) * sum(each)
        return total

    def leaves_node(self, sent: ScheduledCollective) -> bool:
        """Whether a transfer goes from one node to another; False if the machine has no nodes."""
        size = 0 if self.machine is None else self.machine.node_size
        return bool(size) and any(len({d // size for d in group}) > 1 for group in sent.groups)

    def seconds(self, sent: ScheduledCollective) -> float:
        """Returns the seconds of a transfer without contention; 0 if no rates are known."""
        if self.machine is None:
            return 0.0
        return self.machine.wire_seconds(sent.wire_bytes, sent.groups)


_CHANNEL = re.compile(r"\bchannel_id=(\d+)")
_CHAIN = re.compile(r'\bchain_id="(\d+)"')
_SCATTER = "all-reduce-scatter"
_MOVES = ("bitcast", "reshape", "copy", "transpose", "convert")


@dataclasses.dataclass(frozen=True)
class ScheduledCollective:
    """One collective, and the part of the schedule during which it is in flight.

    Args:
        module: the program.
        instruction: the collective itself.
        owner: the computation that holds it and its operands.
        start: position in the launching computation at which it starts.
        done: position at which its result is awaited; equal to `start` if it is synchronous.
    """

    module: Module
    instruction: Instruction
    owner: Computation
    start: int
    done: int

    @functools.cached_property
    def kind(self) -> str:
        """One of `KINDS`."""
        if reduced_slice(self.owner, self.instruction):
            return "reduce-scatter"
        return collective_kind(self.instruction) or self.instruction.opcode

    @functools.cached_property
    def groups(self) -> Groups:
        """The devices that take part; pairs of a collective-permute."""
        attributes = self.instruction.attributes
        if self.kind == "collective-permute":
            return source_target_pairs(attributes)
        return replica_groups(attributes, self.module.num_devices)

    @property
    def group_size(self) -> int:
        """Devices that take part together."""
        return max((len(set(group)) for group in self.groups), default=1)

    @property
    def operands(self) -> tuple[Shape, ...]:
        """The shapes of the operands that it sends from."""
        shapes = self.owner.operand_shapes(self.instruction)
        # The other operands of a ragged all-to-all are the buffer that it fills, and the offsets
        # and sizes of its rows.
        return shapes[:1] if self.kind == "ragged-all-to-all" else shapes

    @property
    def results(self) -> tuple[Shape, ...]:
        """The shapes of its results, without the operands and contexts that a `-start` returns."""
        if self.kind == "collective-permute":
            return self.operands
        if shard := reduced_slice(self.owner, self.instruction):
            return shard.shapes
        name = self.instruction.name
        is_start = self.instruction.opcode.endswith("-start")
        for later in self.owner.instructions if is_start else ():
            if name in later.operands and later.opcode.endswith("-done"):
                return later.shapes
        return self.instruction.shapes

    @property
    def wire_bytes(self) -> int:
        """Bytes that one device sends in one execution, by the ring algorithm."""
        sizes = total_bytes(self.operands), total_bytes(self.results)
        return ring_bytes(self.kind, *sizes, self.group_size)


def collective_kind(instruction: Instruction) -> str | None:
    """Returns the collective that an instruction is or starts; None for others and `-done`."""
    if _is_send(instruction):
        return "collective-permute"
    kind = instruction.opcode.removesuffix("-start")
    return kind if kind in KINDS else None


def reduced_slice(owner: Computation, instruction: Instruction) -> Instruction | None:
    """Returns the slice of an all-reduce that is the only part a TPU fusion keeps and sends.

    Such a fusion, named `all-reduce-scatter`, works as a reduce-scatter. TPU text has no other form
    of a reduce-scatter that runs on the cores themselves.

    Args:
        owner: the computation that holds the instruction.
        instruction: any instruction.

    Returns:
        The slice; None for any other instruction.
    """
    if instruction.opcode != "all-reduce" or not owner.name.startswith(_SCATTER):
        return None
    value = instruction
    while True:
        users = [user for user in owner.instructions if value.name in user.operands]
        if len(users) != 1:
            return None
        if users[0].opcode == "dynamic-slice":
            return users[0]
        if users[0].opcode not in _MOVES:
            return None
        value = users[0]


def transfers(module: Module, computation: Computation) -> list[ScheduledCollective]:
    """Lists the collectives that a computation launches itself, not in its loops or branches.

    Args:
        module: the parsed HLO of a compiled program.
        computation: one that the control flow reaches; see `visits`.

    Returns:
        The collectives in schedule order; a chain of fusions counts as one.
    """
    collectives: dict[object, ScheduledCollective] = {}
    for index, instruction in enumerate(computation.instructions):
        for owner, inner in _launched(module, computation, instruction):
            done = _done(computation, index) if _is_start(instruction) else index
            transfer = ScheduledCollective(module, inner, owner, index, done)
            chain = _chain(inner) or len(collectives)
            if chain in collectives:
                transfer = dataclasses.replace(collectives[chain], done=index)
            collectives[chain] = transfer
    return list(collectives.values())


def _launched(
    module: Module, computation: Computation, instruction: Instruction
) -> Iterator[tuple[Computation, Instruction]]:
    if collective_kind(instruction):
        yield computation, instruction
    elif instruction.opcode not in _CALLS:
        for callee in module.called(instruction):
            for inner in callee.instructions:
                yield from _launched(module, callee, inner)


def _is_send(instruction: Instruction) -> bool:
    """Whether an instruction sends to another device; other sends go to the host."""
    return instruction.opcode == "send" and "source_target_pairs" in instruction.attributes


def _is_start(instruction: Instruction) -> bool:
    runs_async = instruction.opcode.endswith("-start") or instruction.opcode == "send"
    return runs_async and '"is_sync":true' not in instruction.attributes.replace(" ", "")


def _done(computation: Computation, start: int) -> int:
    name = computation.instructions[start].name
    for index in range(start + 1, len(computation.instructions)):
        later = computation.instructions[index]
        if name in later.operands and later.opcode.endswith("-done"):
            return index
        if name in later.operands and later.opcode.endswith("-update"):
            name = later.name
    return len(computation.instructions) - 1


def _chain(instruction: Instruction) -> tuple[str, str] | None:
    chain = _CHAIN.search(instruction.attributes)
    channel = _CHANNEL.search(instruction.attributes)
    return (chain.group(1), channel.group(1)) if chain and channel else None
