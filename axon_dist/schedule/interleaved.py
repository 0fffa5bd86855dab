"""Interleaved 1F1B: several small stages per device divide the bubble."""

from __future__ import annotations

from ..core.errors import ScheduleError
from .action import Action, Cell, Phase, check_sizes
from .order import order_to_table
from .table import Schedule


def interleaved_1f1b(num_devices: int, num_microbatches: int, chunks: int = 2) -> Schedule:
    """Builds interleaved 1F1B: device `d` holds the stages `d, d+P, d+2P, ...`.

    Each device works through its chunks in groups of `P` microbatches. The bubble is
    `(P-1)(F+B)/V`, the activations kept at most `2(P-d-1) + (V-1)P + 1` chunks, and `V` times as
    much crosses between devices. A steady forward and backward share a tick, so that the bubble is
    the same when devices are kept in step.

    Args:
        num_devices: devices `P`.
        num_microbatches: microbatches `M`, a multiple of `P`.
        chunks: stages per device `V`, at least 2.

    Returns:
        The table, of `P * V` stages.

    Raises:
        ScheduleError: a number below 1, fewer than 2 chunks, or `M` not a multiple of `P`.

    Example:
        >>> interleaved_1f1b(4, 8, chunks=2).placement
        (0, 1, 2, 3, 0, 1, 2, 3)

    Source: Narayanan et al., Efficient Large-Scale Language Model Training on GPU Clusters Using
    Megatron-LM, arXiv:2104.04473.
    """
    flat = "1f1b or eager_1f1b"
    check_groups("interleaved_1f1b", flat, num_devices, num_microbatches, chunks)
    order = paired_order(num_devices, num_microbatches, chunks)
    placement = [device for _ in range(chunks) for device in range(num_devices)]
    return order_to_table("interleaved_1f1b", order, placement, num_microbatches)


def check_groups(
    name: str, flat: str, num_devices: int, num_microbatches: int, chunks: int
) -> None:
    """Refuses sizes that do not make groups of as many microbatches as devices, in several chunks.

    Args:
        name: what the schedule is called, for the message.
        flat: what to use with one stage per device.
        num_devices: devices `P`.
        num_microbatches: microbatches `M`.
        chunks: stages per device `V`.

    Raises:
        ScheduleError: a number below 1, fewer than 2 chunks, or `M` not a multiple of `P`.
    """
    check_sizes(num_devices=num_devices, num_microbatches=num_microbatches, chunks=chunks)
    if chunks < 2:
        raise ScheduleError(
            f"{name} got chunks={chunks}. It needs at least 2 stages per device; for "
            f"one stage per device use {flat}."
        )
    if num_microbatches % num_devices:
        below = num_microbatches - num_microbatches % num_devices
        near = " or ".join(str(m) for m in (below, below + num_devices) if m)
        raise ScheduleError(
            f"{name} got {num_microbatches} microbatches for {num_devices} devices. It "
            "works in groups of as many microbatches as devices, so they must divide: use "
            f"{near} microbatches, or looped_bfs, which takes any number."
        )


def paired_order(num_devices: int, num_microbatches: int, chunks: int) -> list[list[Cell]]:
    """Orders Megatron's 1F1B with the steady forward and backward of a device in one cell.

    Device `d` does `2(P-1-d) + (V-1)P` forwards, then pairs of one forward and one backward, then
    the backwards that are left. One chunk gives eager 1F1B.

    Args:
        num_devices: devices `P`.
        num_microbatches: microbatches `M`.
        chunks: stages per device `V`.

    Returns:
        The cells of each device, in the order of execution.
    """
    return [_device_order(d, num_devices, num_microbatches, chunks) for d in range(num_devices)]


def _device_order(device: int, num_devices: int, num_microbatches: int, chunks: int) -> list[Cell]:
    visits = units(num_devices, num_microbatches, chunks)
    forwards = [Action(device + c * num_devices, Phase.F, m) for c, m in visits]
    # Backwards visit the chunks from the last to the first.
    backwards = [Action(device + (chunks - 1 - c) * num_devices, Phase.B, m) for c, m in visits]
    ahead = 2 * (num_devices - 1 - device) + (chunks - 1) * num_devices
    warmup = min(ahead, len(visits))
    paired = len(visits) - warmup
    return [
        *((forward,) for forward in forwards[:warmup]),
        *zip(forwards[warmup:], backwards, strict=False),
        *((backward,) for backward in backwards[paired:]),
    ]


def units(num_devices: int, num_microbatches: int, chunks: int) -> list[tuple[int, int]]:
    """(chunk, microbatch) in the order of forwards: groups of `P` microbatches, chunk by chunk.

    Args:
        num_devices: devices `P`.
        num_microbatches: microbatches `M`.
        chunks: stages per device `V`.

    Returns:
        The visits; backwards count the chunks from the last.
    """
    return [
        (chunk, microbatch)
        for first in range(0, num_microbatches, num_devices)
        for chunk in range(chunks)
        for microbatch in range(first, min(first + num_devices, num_microbatches))
    ]
