"""Whether the compute scheduled beside a transfer is enough to hide it.

Two clocks run through the schedule of a computation: one of the compute units and one of the wire.
Compute takes the least time its machine allows, and transfers queue up on the wire, so the same
matrix product never hides two of them; what a loop within sends takes its part of the wire, too.
What this calls hidden would be hidden even by compute that runs at its peak rate; latency, and the
memory bandwidth a transfer takes away, are left out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from ..hardware import Hardware
from ..hlo.transfers import Transfer
from .collective import Exposure
from .cost import Cost

NOTHING = 0.01
"""A transfer is exposed where compute covers less than this share of its time."""


@dataclasses.dataclass(frozen=True)
class Wire:
    """A transfer and the seconds it needs alone on the wire."""

    transfer: Transfer
    seconds: float


@dataclasses.dataclass(frozen=True)
class Judged:
    """How much of one transfer is hidden; the fields are those of `Collective`."""

    exposure: Exposure
    seconds: float | None = None
    waited: float | None = None


def judge(
    work: Sequence[Cost], wires: Sequence[Wire], within: Sequence[float], machine: Hardware | None
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


def _has_compute(work: Sequence[Cost], transfer: Transfer) -> bool:
    return any(cost.low or cost.traffic for cost in work[transfer.start + 1 : transfer.done])


def _exposure(seconds: float, waited: float, has_compute: bool) -> Exposure:
    if not has_compute or waited > (1 - NOTHING) * seconds:
        return "exposed"
    # Sums of floating-point times differ from their parts.
    return "light" if waited > 1e-9 * seconds else "hidden"


def _waits(
    compute_seconds: Sequence[float], wires: Sequence[Wire], within: Sequence[float]
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
