"""Schedules whose second chunk runs back over the ranks: V-Half, V-Min, DualPipeV, ZB-V.

Device `d` of `P` holds the stages `d` and `2P-1-d`. A microbatch goes down the V, up, and back the
same way.

V-Half and V-Min repeat a building block, in which every hop between neighbours takes a fixed number
of ticks. The next microbatch follows 6 ticks later, because a device has 6 tasks per microbatch. So
the number of microbatches in flight on a device is the lifespan of the block divided by 6, for any
number of microbatches. DualPipeV and ZB-V are given cell by cell.

Source: Qi et al., Pipeline Parallelism with Controllable Memory, arXiv:2405.15362.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from itertools import product
from typing import NamedTuple

from .action import Action, Cell, Phase, check_sizes, dependencies
from .table import Schedule, order_to_table

_PERIOD = 6  # F, I and W of two stages


class Hops(NamedTuple):
    """Ticks from one device to the next, on each of the four paths through the V.

    Args:
        down: forwards from the first device to the last.
        up: forwards back to the first device.
        back_down: input gradients from the first device to the last.
        back_up: input gradients back to the first device.
    """

    down: int
    up: int
    back_down: int
    back_up: int


def v_schedule(
    name: str, num_devices: int, num_microbatches: int, hops: Hops, most: int
) -> Schedule:
    """Builds the schedule of a repeated building block.

    Forwards and input gradients are in the order of the repeated blocks, each as early as memory
    allows. Weight gradients run when a device would otherwise wait.

    Args:
        name: the name of the schedule.
        num_devices: devices `P`, with two stages each.
        num_microbatches: microbatches `M`.
        hops: the hops of the block.
        most: the largest number of chunks that a device may keep from `F` to `W`.

    Returns:
        The table, of `2P` stages.

    Raises:
        ScheduleError: a number below 1.
    """
    check_sizes(num_devices=num_devices, num_microbatches=num_microbatches)
    moments = _block(num_devices, hops)
    orders = [_order(d, moments[d], num_devices, num_microbatches) for d in range(num_devices)]
    rows = _fill(orders, 2 * num_devices, most)
    return Schedule(name, num_microbatches, _placement(num_devices), rows)


def _placement(num_devices: int) -> tuple[int, ...]:
    return (*range(num_devices), *reversed(range(num_devices)))


class _Moments(NamedTuple):
    """The ticks of a device's forwards and input gradients of the first microbatch."""

    f0: int
    f1: int
    i1: int
    i0: int


def _block(num_devices: int, hops: Hops) -> list[_Moments]:
    """Returns the shortest block in which no device has two tasks in one tick of the period."""
    waits = sorted(product(range(_PERIOD), repeat=3), key=lambda waits: (sum(waits), waits))
    blocks = (_with_waits(num_devices, hops, *turns) for turns in waits)

    def are_disjoint(moments):
        return len({tick % _PERIOD for tick in moments}) == len(moments)

    return next(block for block in blocks if all(map(are_disjoint, block)))


def _with_waits(
    num_devices: int, hops: Hops, before_f1: int, before_i1: int, before_i0: int
) -> list[_Moments]:
    """Returns the block with the given idle ticks before its later tasks, at the ends of the V."""
    last = num_devices - 1
    f1 = last * hops.down + 1 + before_f1  # on the last device
    i1 = f1 + last * hops.up + 1 + before_i1  # on the first device
    i0 = i1 + last * hops.back_down + 1 + before_i0  # on the last device
    return [
        _Moments(
            d * hops.down,
            f1 + (last - d) * hops.up,
            i1 + d * hops.back_down,
            i0 + (last - d) * hops.back_up,
        )
        for d in range(num_devices)
    ]


def _order(device: int, moments: _Moments, num_devices: int, num_microbatches: int) -> list[Action]:
    stages = (device, 2 * num_devices - 1 - device)
    tasks = [(stages[0], Phase.F), (stages[1], Phase.F), (stages[1], Phase.I), (stages[0], Phase.I)]
    timed = (
        (moment + _PERIOD * m, Action(stage, phase, m))
        for moment, (stage, phase) in zip(moments, tasks, strict=True)
        for m in range(num_microbatches)
    )
    return [action for _, action in sorted(timed)]


def _fill(orders: list[list[Action]], num_stages: int, most: int) -> tuple[tuple[Cell, ...], ...]:
    """Runs orders of forwards and input gradients tick by tick, and fills in weight gradients."""
    scheduled = {action for order in orders for action in order}
    waiting = [deque(order) for order in orders]
    weights: list[deque[Action]] = [deque() for _ in orders]
    stashed = [0] * len(orders)
    done: set[Action] = set()
    rows: list[list[Cell]] = [[] for _ in orders]
    while any(waiting) or any(weights):
        made: list[Action] = []
        for device, row in enumerate(rows):
            todo = waiting[device]
            is_full = bool(todo) and todo[0].phase is Phase.F and stashed[device] == most
            is_ready = (
                todo
                and not is_full
                and done.issuperset(dependencies(todo[0], num_stages, scheduled))
            )
            if is_ready:
                action = todo.popleft()
                stashed[device] += action.phase is Phase.F
                if action.phase is Phase.I:
                    weights[device].append(action._replace(phase=Phase.W))
                row.append((action,))
                made.append(action)
            elif weights[device]:
                row.append((weights[device].popleft(),))
                stashed[device] -= 1
            else:
                row.append(())
        done.update(made)
    return tuple(map(tuple, rows))


def v_half(num_devices: int, num_microbatches: int) -> Schedule:
    """Builds V-Half: device `d` holds the stages `d` and `2P-1-d`; hops up take twice as long.

    A device keeps `floor((P+2)/2)` whole microbatches from `F` to `W`, where 1F1B keeps `P`. With
    `F = I = W` the bubble is `(3P/2 - 2)F` for at least three devices: the paper's "about half of
    1F1B's", `3(P-1)F`.

    Args:
        num_devices: devices `P`, with two stages each.
        num_microbatches: microbatches `M`.

    Returns:
        The table, of `2P` stages.

    Raises:
        ScheduleError: a number below 1.

    Example:
        >>> from axon_dist.schedule import STASH_ENDS, peak_live
        >>> max(peak_live(v_half(8, 32), STASH_ENDS)) / 2
        5.0

    Source: Qi et al., Pipeline Parallelism with Controllable Memory, arXiv:2405.15362.
    """
    most = 2 * ((num_devices + 2) // 2)
    return v_schedule("v_half", num_devices, num_microbatches, Hops(1, 2, 1, 2), most)


def v_min(num_devices: int, num_microbatches: int) -> Schedule:
    """Builds V-Min: device `d` holds the stages `d` and `2P-1-d`, and every hop takes one tick.

    A device keeps `floor((P+4)/3)` whole microbatches from `F` to `W`, where 1F1B keeps `P`. With
    `F = I = W` the bubble is `(2P - 5/2)F`, and `F` more if 3 divides `P`: the paper's "about two
    thirds of 1F1B's", `3(P-1)F`. With unequal times each device waits a little in every
    microbatch, so the bubble grows with their number; V-Half does not have this cost.

    Args:
        num_devices: devices `P`, with two stages each.
        num_microbatches: microbatches `M`.

    Returns:
        The table, of `2P` stages.

    Raises:
        ScheduleError: a number below 1.

    Example:
        >>> from axon_dist.schedule import STASH_ENDS, peak_live
        >>> max(peak_live(v_min(8, 32), STASH_ENDS)) / 2
        4.0

    Source: Qi et al., Pipeline Parallelism with Controllable Memory, arXiv:2405.15362.
    """
    most = 2 * ((num_devices + 4) // 3)
    return v_schedule("v_min", num_devices, num_microbatches, Hops(1, 1, 1, 1), most)


def dual_pipe_v(num_devices: int, num_microbatches: int) -> Schedule:
    """Builds DualPipeV: device `d` holds the stages `d` and `2P-1-d`, one half of DualPipe.

    In the steady state each tick pairs a forward of one chunk with a whole backward of the other,
    so that the transfers of one are hidden behind the other. Backwards are split into `I` and `W`
    only at the ends, where `W` fills the bubble. Every device keeps at most `2P+1` chunks. The
    authors' bubble is `(P-1)(F&B + B - 3W)` in times of chunks, with `F&B` for a pair. If pairs
    take `F + B`, without a gain by overlap, this is `(P-1)(F + 2I - W)/2` in times of whole
    devices. If devices need not stay in lockstep, the bubble is smaller: `(P-1)F/2` with
    `F = I = W`, like ZB-V.

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

    Source: DeepSeek-AI, DeepSeek-V3 Technical Report, arXiv:2412.19437; DeepSeek's DualPipe
    repository documents the half of it that Sea AI Lab proposed.
    """

    def steps(device: int, total: int) -> Iterator[str]:
        down = num_devices - 1 - device  # devices after this one, down to the turn of the V
        here = device + 1
        yield from ["F0"] * (2 * down)
        yield from ["F0", "F1"] * here
        yield from ["I1", "W", "F1"] * down
        for number in range(total - 2 * num_devices + here):
            # The last device computes the input of its chunk 1 itself. A pair would delay its
            # first gradient.
            yield from ["F0", "B1"] if number == 0 and down == 0 else ["F0 B1"]
            yield "F1 B0"
        yield from ["B1", "F1 B0"] * down
        for number in range(2 * here):
            # Backwards of the second half are split, so that `I`, which others wait for, is first.
            phase = "I" if number >= here else "B"
            yield f"{phase}{1 - number % 2}"
        yield from ["W", "I0"] * down
        yield from ["W"] * here

    return _by_steps("dual_pipe_v", num_devices, num_microbatches, 2 * num_devices, steps)


def zero_bubble_v(num_devices: int, num_microbatches: int) -> Schedule:
    """Builds ZB-V: device `d` holds the stages `d` and `2P-1-d`, and 1F1B's memory suffices.

    The first and the last stage share device 0, so a microbatch's first gradient is computed where
    its forward began. Every device keeps `2P` chunks, as much as `P` whole microbatches. With
    `F = I = W` and `M >= 2P-1` no device is idle between its first and last task. The step then
    takes `(P-1)F/2` longer than its work; no schedule with two chunks can take less.

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

    def steps(device: int, total: int) -> list[str]:
        down = num_devices - device  # devices from this one, inclusive, to the turn of the V
        return (
            # Warm-up: the first microbatch goes down the V and comes back up.
            ["F0"] * (2 * down - 1)
            + ["F1", "F0"] * device
            + ["F1", "I1", "W1"] * down
            # Steady state: six tasks for each microbatch.
            + ["F0", "I0", "W0", "F1", "I1", "W1"] * (total - 2 * num_devices + 1 + device)
            + ["I0", "W0", "F1", "I1", "W1"] * (down - 1)
            # Cool-down: first the gradients that other devices wait for, delayed `W` last.
            + ["I0", "I1"] * device
            + ["I0", "W0"] * down
            + ["W1"] * device
            + ["W0"] * device
        )

    return _by_steps("zero_bubble_v", num_devices, num_microbatches, 2 * num_devices - 1, steps)


def _by_steps(
    name: str,
    num_devices: int,
    num_microbatches: int,
    least: int,
    steps: Callable[[int, int], Iterable[str]],
) -> Schedule:
    """Builds a schedule from a pattern of cells.

    The pattern needs at least `least` microbatches; those beyond `M` are dropped.

    Args:
        name: the name of the schedule.
        num_devices: devices `P`, with two stages each.
        num_microbatches: microbatches `M`.
        least: the number of microbatches that the pattern needs.
        steps: (device, microbatches of the pattern) -> its cells. A cell is a text of phases and
            chunks such as `F1 B0`; `W` alone is the weight gradient that has waited longest.
    """
    check_sizes(num_devices=num_devices, num_microbatches=num_microbatches)
    order = []
    for device in range(num_devices):
        cells = _cells(device, num_devices, steps(device, max(num_microbatches, least)))
        cells_of_m = (tuple(a for a in cell if a.microbatch < num_microbatches) for cell in cells)
        order.append([cell for cell in cells_of_m if cell])
    return order_to_table(name, order, _placement(num_devices), num_microbatches)


def _cells(device: int, num_devices: int, steps: Iterable[str]) -> Iterator[Cell]:
    stages = {"0": device, "1": 2 * num_devices - 1 - device}
    seen: Counter[str] = Counter()
    weights: deque[Action] = deque()
    for step in steps:
        cell = []
        for task in step.split():
            if task == "W":
                cell.append(weights.popleft())
                continue
            # Whole and split backwards of a chunk share one count of microbatches.
            kind = task.replace("I", "B")
            cell.append(Action(stages[task[1]], Phase(task[0]), seen[kind]))
            seen[kind] += 1
            if cell[-1].phase is Phase.I:
                weights.append(cell[-1]._replace(phase=Phase.W))
        yield tuple(cell)
