"""ZB-V: a zero-bubble pipeline whose stages run down the devices and back up."""

from __future__ import annotations

from collections import Counter

from .action import Action, Phase, check_sizes
from .order import order_to_table
from .table import Schedule


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
    order = [_device_order(d, num_devices, num_microbatches) for d in range(num_devices)]
    placement = [*range(num_devices), *reversed(range(num_devices))]
    return order_to_table("zero_bubble_v", order, placement, num_microbatches)


def _device_order(device: int, num_devices: int, num_microbatches: int) -> list[Action]:
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
