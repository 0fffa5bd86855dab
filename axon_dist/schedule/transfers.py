"""What crosses between devices, and after which tick."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

from .action import TOGETHER, Phase
from .table import Placed, Schedule


class Payload(StrEnum):
    """What a transfer carries."""

    ACTIVATION = "activation"
    """A stage's output, to the next stage."""
    GRADIENT = "gradient"
    """The gradient of a stage's input, to the previous stage."""


class Transfer(NamedTuple):
    """One value sent from one device to another at the end of a tick.

    `stage` and `microbatch` name the receiver's value: the input of `stage`, or the gradient of
    its output.
    """

    tick: int
    payload: Payload
    stage: int
    microbatch: int
    source: int
    target: int


def transfers(schedule: Schedule) -> tuple[Transfer, ...]:
    """Lists everything that crosses between devices, in the order of ticks.

    A forward of stage `k` sends its output to stage `k + 1`; a backward (`B` or `I`) sends the
    gradient of its input to stage `k - 1`. Neighbouring stages on one device send nothing. What
    devices exchange within an `E`, `V` or `G` that they do together is not listed.

    Args:
        schedule: a valid table.

    Returns:
        The transfers, sorted by tick; each is usable on its target from the next tick on.

    Example:
        >>> from axon_dist.schedule import gpipe
        >>> [(t.tick, str(t.payload), t.source, t.target) for t in transfers(gpipe(2, 1))]
        [(0, 'activation', 0, 1), (2, 'gradient', 1, 0)]
    """
    sent = (_sent(placed, schedule.placement) for placed in schedule.placed())
    return tuple(sorted(transfer for transfer in sent if transfer is not None))


def _sent(placed: Placed, placement: tuple[int, ...]) -> Transfer | None:
    stage, phase, microbatch = placed.action
    if phase in (*TOGETHER, Phase.W):
        return None
    payload = Payload.ACTIVATION if phase is Phase.F else Payload.GRADIENT
    receiver = stage + 1 if phase is Phase.F else stage - 1
    if not 0 <= receiver < len(placement) or placement[receiver] == placed.device:
        return None
    target = placement[receiver]
    return Transfer(placed.tick, payload, receiver, microbatch, placed.device, target)
