"""Whether the compute scheduled beside a transfer is enough to hide it.

Two clocks run through the schedule of a computation: one of the compute units and one of the wire.
Compute takes the least time its machine allows, and transfers queue up on the wire, so the same
matrix product never hides two of them. What this calls overlapped would be hidden even by compute
that runs at its peak rate; latency, and the memory bandwidth a transfer takes away, are left out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from ..hardware import Hardware
from ..hlo.parse import Computation
from ..hlo.transfers import Transfer
from .collective import Exposure
from .cost import Cost, CostModel


@dataclasses.dataclass(frozen=True)
class Wire:
    """A transfer and the seconds it needs alone on the wire."""

    transfer: Transfer
    seconds: float


def exposures(
    costs: CostModel, computation: Computation, wires: Sequence[Wire], machine: Hardware | None
) -> list[Exposure]:
    """Judges every transfer that a computation launches.

    Args:
        costs: the costs of the program.
        computation: what launches the transfers.
        wires: the transfers with their times, in the order of the schedule.
        machine: whose rates apply; without one, a transfer with any compute beside it is `light`.

    Returns:
        One judgement per transfer.
    """
    work = [costs.instruction(computation, i) for i in computation.instructions]
    if machine is None:
        return [_judge(work, wire.transfer, waited=True) for wire in wires]
    waits = _waits([cost.seconds(machine) for cost in work], wires)
    return [
        _judge(work, wire.transfer, waited=wait > 0)
        for wire, wait in zip(wires, waits, strict=True)
    ]


def _judge(work: Sequence[Cost], transfer: Transfer, waited: bool) -> Exposure:
    between = work[transfer.start + 1 : transfer.done]
    if not any(cost.low or cost.traffic for cost in between):
        return "exposed"
    return "light" if waited else "overlapped"


def _waits(compute_seconds: Sequence[float], wires: Sequence[Wire]) -> list[float]:
    """Runs the schedule and returns how long the compute units stand still for each transfer."""
    starts: dict[int, list[int]] = {}
    ends: dict[int, list[int]] = {}
    for number, wire in enumerate(wires):
        starts.setdefault(wire.transfer.start, []).append(number)
        ends.setdefault(wire.transfer.done, []).append(number)
    clock = wire_free = 0.0
    arrival = [0.0] * len(wires)
    waits = [0.0] * len(wires)
    for index, seconds in enumerate(compute_seconds):
        for number in starts.get(index, ()):
            wire_free = max(wire_free, clock) + wires[number].seconds
            arrival[number] = wire_free
        for number in ends.get(index, ()):
            waits[number] = max(0.0, arrival[number] - clock)
            clock += waits[number]
        clock += seconds
    return waits
