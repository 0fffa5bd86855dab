"""Interleaved zero bubble: ZB-H1 with several stages per device."""

from __future__ import annotations

from .action import Action, Phase
from .interleaved import check_groups, units
from .order import order_to_table
from .table import Schedule


def interleaved_zero_bubble(num_devices: int, num_microbatches: int, chunks: int = 2) -> Schedule:
    """Builds interleaved 1F1B whose weight gradients fill the bubble; `V = 1` is ZB-H1.

    Device `d` holds the stages `d, d+P, ...` and runs `(V-1)P + P-d` chunks ahead, half as far as
    interleaved 1F1B, and puts each `W` off by `d` chunks. So every device keeps `VP` chunks in
    all, which is 1F1B's memory, and the bubble is `((P-1)(F+I) - (min(P, VM)-1)W)/V`: from
    `M = P` on `(P-1)(F+I-W)/V`, ZB-H1's divided by the chunks.

    Args:
        num_devices: devices `P`.
        num_microbatches: microbatches `M`, a multiple of `P`.
        chunks: stages per device `V`, at least 2.

    Returns:
        The table, of `P * V` stages.

    Raises:
        ScheduleError: a number below 1, fewer than 2 chunks, or `M` not a multiple of `P`.

    Example:
        >>> from axon_dist.schedule import simulate
        >>> simulate(interleaved_zero_bubble(4, 8)).makespan
        25.5

    Source: the backward of Qi et al., Zero Bubble Pipeline Parallelism, arXiv:2401.10241, in the
    order of Narayanan et al., arXiv:2104.04473; PyTorch's ScheduleInterleavedZeroBubble keeps as
    much and has the same bubble.
    """
    check_groups("interleaved_zero_bubble", "zero_bubble_h1", num_devices, num_microbatches, chunks)
    order = [_device_order(d, num_devices, num_microbatches, chunks) for d in range(num_devices)]
    placement = [device for _ in range(chunks) for device in range(num_devices)]
    return order_to_table("interleaved_zero_bubble", order, placement, num_microbatches)


def _device_order(
    device: int, num_devices: int, num_microbatches: int, chunks: int
) -> list[Action]:
    visits = units(num_devices, num_microbatches, chunks)
    forwards = [Action(device + c * num_devices, Phase.F, m) for c, m in visits]
    backwards = [(device + (chunks - 1 - c) * num_devices, m) for c, m in visits]
    weights = [Action(stage, Phase.W, m) for stage, m in backwards]
    warmup = min(chunks * num_devices - device, len(visits))
    order = forwards[:warmup]
    for number, (stage, m) in enumerate(backwards):
        order.append(Action(stage, Phase.I, m))
        order += weights[number - device : number - device + 1] if number >= device else []
        order += forwards[warmup + number : warmup + number + 1]
    return order + weights[len(visits) - device :]
