"""Schedules that split B into I and W: zero bubble H1 and H2, V, and interleaved."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from .action import Action, Phase, check_sizes
from .one_f_one_b import check_groups, units
from .order import order_to_table
from .table import Schedule


def zero_bubble_h1(num_stages: int, num_microbatches: int) -> Schedule:
    """Builds ZB-H1: 1F1B whose weight gradients fill the bubble, in 1F1B's memory.

    The backward is split into `I` (input gradient, on the critical path) and `W` (weight
    gradient, free to wait). Stage `s` puts `W` off by `s` microbatches, so that every stage keeps
    `S` microbatches in all: `S-s` before `I` and `s` between `I` and `W`. The bubble is
    `(S-1)(F+I) - (min(S, M)-1)W`, which is the paper's `(S-1)(F+I-W)` from `M = S` on.

    Args:
        num_stages: stages `S`, one per device.
        num_microbatches: microbatches `M`.

    Returns:
        The table.

    Raises:
        ScheduleError: a number below 1.

    Example:
        >>> zero_bubble_h1(4, 8).num_ticks
        27

    Source: Qi et al., Zero Bubble Pipeline Parallelism, arXiv:2401.10241.
    """

    def ahead(stage):
        return num_stages - stage

    return _table("zero_bubble_h1", num_stages, num_microbatches, ahead)


def zero_bubble_h2(num_stages: int, num_microbatches: int) -> Schedule:
    """Builds ZB-H2: forwards fill the warm-up too, for twice the memory.

    Stage `s` keeps `2(S-s)-1` microbatches before `I` and `2s` between `I` and `W`, `2S-1` in all.
    From `M = 2S-1` on each device's own span, first to last task, has a bubble of
    `max(0, (S-1)(F+I-2W))`: none where `F = I = W`. The step as a whole still takes `(S-1)F` more,
    because the last device starts so late: only an optimizer that lets devices step one by one can
    hide that, and a global gradient norm forbids it.

    Takes, returns and raises what `zero_bubble_h1` does.

    Example:
        >>> zero_bubble_h2(4, 8).num_ticks
        27

    Source: the same paper.
    """

    def ahead(stage):
        return 2 * (num_stages - stage) - 1

    return _table("zero_bubble_h2", num_stages, num_microbatches, ahead)


def _table(
    name: str, num_stages: int, num_microbatches: int, ahead: Callable[[int], int]
) -> Schedule:
    """Orders each stage from how many forwards it runs ahead; the first stage's is the most."""
    check_sizes(num_stages=num_stages, num_microbatches=num_microbatches)
    orders = []
    for stage in range(num_stages):
        warmup = min(ahead(stage), num_microbatches)
        # With few microbatches there is no tail to fill: W must then not wait for one.
        delay = min(ahead(0) - ahead(stage), num_microbatches - warmup)
        orders.append(_stage_order(stage, num_microbatches, warmup, delay))
    return order_to_table(name, orders, range(num_stages), num_microbatches)


def _stage_order(stage: int, num_microbatches: int, warmup: int, delay: int) -> list[Action]:
    forwards = [Action(stage, Phase.F, m) for m in range(num_microbatches)]
    weights = [Action(stage, Phase.W, m) for m in range(num_microbatches)]
    order = forwards[:warmup]
    for m in range(num_microbatches):
        order.append(Action(stage, Phase.I, m))
        if m >= delay:
            order.append(weights[m - delay])
        order += forwards[warmup + m : warmup + m + 1]
    return order + weights[num_microbatches - delay :]


def zero_bubble_v(num_devices: int, num_microbatches: int) -> Schedule:
    """Builds ZB-V: device `d` holds the stages `d` and `2P-1-d`, and 1F1B's memory suffices.

    The first and the last stage share device 0, so that a microbatch's first gradient is ready
    where its forward began: every device keeps `2P` chunks, as much as `P` whole microbatches.
    With `F = I = W` and `M >= 2P-1` no device is idle between its first and last task, and the
    step takes `(P-1)F/2` more than its work; no schedule with two chunks can take less.

    Args:
        num_devices: devices `P`, with two stages each.
        num_microbatches: microbatches `M`; the bubble grows below `2P-1`.

    Returns:
        The table, of `2P` stages.

    Raises:
        ScheduleError: a number below 1.

    Example:
        >>> zero_bubble_v(4, 8).placement
        (0, 1, 2, 3, 3, 2, 1, 0)

    Source: Qi et al., Zero Bubble Pipeline Parallelism, arXiv:2401.10241, and Pipeline
    Parallelism with Controllable Memory, arXiv:2405.15362.
    """
    check_sizes(num_devices=num_devices, num_microbatches=num_microbatches)
    order = [_v_order(d, num_devices, num_microbatches) for d in range(num_devices)]
    placement = [*range(num_devices), *reversed(range(num_devices))]
    return order_to_table("zero_bubble_v", order, placement, num_microbatches)


def _v_order(device: int, num_devices: int, num_microbatches: int) -> list[Action]:
    # The pattern needs 2P-1 microbatches; with fewer, those that do not exist are left out.
    total = max(num_microbatches, 2 * num_devices - 1)
    down = num_devices - device  # devices from here to the turn of the V, this one included
    steps = (
        # Warm-up: the first microbatch goes down the V and comes back up.
        ["F0"] * (2 * down - 1)
        + ["F1", "F0"] * device
        + ["F1", "I1", "W1"] * down
        # Steady: six tasks for each microbatch.
        + ["F0", "I0", "W0", "F1", "I1", "W1"] * (total - 2 * num_devices + 1 + device)
        + ["I0", "W0", "F1", "I1", "W1"] * (down - 1)
        # Cool-down: what others wait for first, the weight gradients put off last.
        + ["I0", "I1"] * device
        + ["I0", "W0"] * down
        + ["W1"] * device
        + ["W0"] * device
    )
    stages = {"0": device, "1": 2 * num_devices - 1 - device}
    seen: Counter[str] = Counter()
    order = []
    for step in steps:
        order.append(Action(stages[step[1]], Phase(step[0]), seen[step]))
        seen[step] += 1
    return [action for action in order if action.microbatch < num_microbatches]


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
    order = [
        _interleaved_order(d, num_devices, num_microbatches, chunks) for d in range(num_devices)
    ]
    placement = [device for _ in range(chunks) for device in range(num_devices)]
    return order_to_table("interleaved_zero_bubble", order, placement, num_microbatches)


def _interleaved_order(
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
