"""DualPipeV: forwards and backwards of two chunks in pairs, down the devices and back up."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator

from .action import Action, Cell, Phase, check_sizes
from .order import order_to_table
from .table import Schedule


def dual_pipe_v(num_devices: int, num_microbatches: int) -> Schedule:
    """Builds DualPipeV: device `d` holds the stages `d` and `2P-1-d`, a half of DualPipe's V.

    In the steady state each tick pairs a forward of one chunk with a whole backward of the other,
    so that what moves for one is covered by the other; backwards are split into `I` and `W` at the
    ends alone, where `W` fills the bubble. Every device keeps at most `2P+1` chunks. Its authors'
    bubble is `(P-1)(F&B + B - 3W)` in times of chunks, `F&B` for a pair: with pairs that take
    `F + B` and no time won by overlap, `(P-1)(F + 2I - W)/2`, in times of whole devices. Devices
    that need not stay in step lose less: with `F = I = W` `(P-1)F/2`, as ZB-V.

    Args:
        num_devices: devices `P`, with two stages each.
        num_microbatches: microbatches `M`; the bubble grows below `2P`.

    Returns:
        The table, of `2P` stages.

    Raises:
        ScheduleError: a number below 1.

    Example:
        >>> print(dual_pipe_v(1, 2))
        dual_pipe_v: 2 stages on 1 devices, 2 microbatches, 8 ticks
        tick         0    1    2    3        4    5    6    7
        device 0   0F0  1F0  0F1  1B0  1F1+0B0  1B1  0I1  0W1

    Source: DeepSeek-AI, DeepSeek-V3 Technical Report, arXiv:2412.19437, and Sea AI Lab's cut in
    half of it, which DeepSeek's DualPipe repository documents.
    """
    check_sizes(num_devices=num_devices, num_microbatches=num_microbatches)
    # The pattern needs 2P microbatches; with fewer, those that do not exist are left out.
    total = max(num_microbatches, 2 * num_devices)
    order = []
    for device in range(num_devices):
        cells = _cells(device, num_devices, total)
        kept = (tuple(a for a in cell if a.microbatch < num_microbatches) for cell in cells)
        order.append([cell for cell in kept if cell])
    placement = [*range(num_devices), *reversed(range(num_devices))]
    return order_to_table("dual_pipe_v", order, placement, num_microbatches)


def _steps(device: int, num_devices: int, total: int) -> Iterator[str]:
    """The cells of a device, as phase and chunk; `W` is the longest waiting weight gradient."""
    down = num_devices - 1 - device  # devices from the next to the turn of the V
    here = device + 1
    yield from ["F0"] * (2 * down)
    yield from ["F0", "F1"] * here
    yield from ["I1", "W", "F1"] * down
    for number in range(total - 2 * num_devices + here):
        # The last device makes its own input of chunk 1: pairing would delay its first gradient.
        yield from ["F0", "B1"] if number == 0 and down == 0 else ["F0 B1"]
        yield "F1 B0"
    yield from ["B1", "F1 B0"] * down
    for number in range(2 * here):
        # The second half is split: what other devices wait for goes first.
        phase = "I" if number >= here else "B"
        yield f"{phase}{1 - number % 2}"
    yield from ["W", "I0"] * down
    yield from ["W"] * here


def _cells(device: int, num_devices: int, total: int) -> Iterator[Cell]:
    stages = {"0": device, "1": 2 * num_devices - 1 - device}
    forwards: Counter[str] = Counter()
    backwards: Counter[str] = Counter()
    weights: deque[Action] = deque()
    for step in _steps(device, num_devices, total):
        cell = []
        for task in step.split():
            if task == "W":
                cell.append(weights.popleft())
                continue
            phase, chunk = Phase(task[0]), task[1]
            seen = forwards if phase is Phase.F else backwards
            cell.append(Action(stages[chunk], phase, seen[chunk]))
            seen[chunk] += 1
            if phase is Phase.I:
                weights.append(cell[-1]._replace(phase=Phase.W))
        yield tuple(cell)
