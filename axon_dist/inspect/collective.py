"""One collective of a compiled program, as a row of the ledger."""

from __future__ import annotations

import dataclasses
from typing import Literal, TypeAlias

Exposure: TypeAlias = Literal["hidden", "light", "exposed"]
"""How much of a transfer's time compute covers: all of it, a part, or none."""


@dataclasses.dataclass(frozen=True)
class Collective:
    """What one collective moves, how often, between whom, and whether anything hides it.

    Args:
        name: the instruction's name in the HLO text.
        kind: `all-reduce`, `all-gather`, `reduce-scatter`, `all-to-all`, `ragged-all-to-all`,
            `collective-permute` or `collective-broadcast`.
        dtypes: XLA's names of the element types that travel, each once.
        num_arrays: arrays in it; more than one where the compiler combined several.
        bytes_in: bytes of its operands on one device.
        bytes_out: bytes of its results on one device.
        group_size: devices that take part together; 2 for a collective-permute.
        wire_bytes: bytes that one device sends in one execution, by the ring algorithm.
        count: executions per step, the trip counts of the loops around it multiplied.
        unknown_trip: whether a loop around it was counted once because only the data decide.
        in_conditional: whether a branch of a conditional leads to it.
        axes: the mesh axes that its groups span; None where no set of axes matches.
        is_async: whether it is started and awaited at different places of the schedule.
        exposure: `exposed` where it is synchronous or what is scheduled until it is awaited covers
            next to nothing of it, `light` where that takes less time than the transfer, `hidden`
            otherwise.
        seconds: what one execution takes alone on the wire; None where no rates are known.
        waited: for how many seconds of one execution the compute units stand still for it; None
            where no rates are known.
        op_name: the traced operation it comes from, where the compiler kept it.
        source: `file.py:line` of the user's program, where the compiler kept it.
        is_slow: whether it leaves a node: it spans an axis of `SLOW_AXES`, or devices that the
            table of chips says are of several nodes.
    """

    name: str
    kind: str
    dtypes: tuple[str, ...]
    num_arrays: int
    bytes_in: int
    bytes_out: int
    group_size: int
    wire_bytes: int
    count: int
    unknown_trip: bool
    in_conditional: bool
    axes: tuple[str, ...] | None
    is_async: bool
    exposure: Exposure
    seconds: float | None
    waited: float | None
    op_name: str
    source: str
    is_slow: bool = False

    @property
    def total_bytes(self) -> int:
        """Bytes that one device sends for it in one step."""
        return self.wire_bytes * self.count

    @property
    def axis(self) -> str:
        """Its axes as one label: `fsdp`, `dp,tp`, `none` or `?` where no axes match."""
        if self.axes is None:
            return "?"
        return ",".join(self.axes) or "none"


def ring_bytes(kind: str, bytes_in: int, bytes_out: int, group_size: int) -> int:
    """Bytes that each device sends when the collective runs as a ring.

    With n devices an all-gather sends (n-1)/n of its result, a reduce-scatter and an all-to-all
    (n-1)/n of their operand, and an all-reduce, being a reduce-scatter and an all-gather, twice
    that (Patarasuk and Yuan, 2009). No algorithm sends less.

    Args:
        kind: as in `Collective`.
        bytes_in: bytes of the operands on one device.
        bytes_out: bytes of the results on one device.
        group_size: n.

    Returns:
        The bytes, rounded down.

    Example:
        >>> [ring_bytes(kind, 800, 800, 8) for kind in ("all-reduce", "collective-permute")]
        [1400, 800]
        >>> ring_bytes("all-gather", 100, 800, 8), ring_bytes("reduce-scatter", 800, 100, 8)
        (700, 700)
    """
    if group_size < 2:
        return 0
    if kind == "collective-permute":
        return bytes_in
    whole = bytes_out if kind == "all-gather" else bytes_in
    passes = 2 if kind == "all-reduce" else 1
    return passes * whole * (group_size - 1) // group_size
