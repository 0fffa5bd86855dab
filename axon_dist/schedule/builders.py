"""GPipe, 1F1B and its descendants: interleaved, looped, and zero bubble, which splits `B`."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from ..core.errors import ScheduleError
from .action import Action, Cell, Phase, check_sizes
from .table import Schedule, order_to_table


def gpipe(num_stages: int, num_microbatches: int) -> Schedule:
    """Builds GPipe: every stage does all its forwards, then all its backwards.

    The bubble is `(S-1)(F+B)`, a fraction `(S-1)/(M+S-1)`. Every stage keeps all `M` microbatches.

    Args:
        num_stages: stages `S`, one per device.
        num_microbatches: microbatches `M`.

    Returns:
        The table, of `2(M+S-1)` ticks.

    Raises:
        ScheduleError: a number below 1.

    Example:
        >>> gpipe(4, 8).num_ticks
        22

    Source: Huang et al., GPipe: Efficient Training of Giant Neural Networks using Pipeline
    Parallelism, arXiv:1811.06965.
    """
    check_sizes(num_stages=num_stages, num_microbatches=num_microbatches)
    order = [
        [Action(stage, phase, m) for phase in (Phase.F, Phase.B) for m in range(num_microbatches)]
        for stage in range(num_stages)
    ]
    return order_to_table("gpipe", order, range(num_stages), num_microbatches)


def interleaved_1f1b(num_devices: int, num_microbatches: int, chunks: int = 2) -> Schedule:
    """Builds interleaved 1F1B: device `d` holds the stages `d, d+P, d+2P, ...`.

    Each device works through its chunks in groups of `P` microbatches. The bubble is
    `(P-1)(F+B)/V`. Device `d` keeps at most `2(P-d-1) + (V-1)P + 1` stage inputs. Devices
    send each other `V` times as much as in 1F1B. In the steady state, a forward and a backward
    share a tick, so that lockstep does not enlarge the bubble.

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
    """Raises unless there are several chunks, and microbatches are a multiple of the devices.

    Args:
        name: the name of the schedule, for the message.
        flat: the schedule to use with one stage per device, for the message.
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
            f"{name} got {num_microbatches} microbatches for {num_devices} devices, but it "
            "needs a multiple of the number of devices: use "
            f"{near} microbatches, or looped_bfs, which takes any number."
        )


def paired_order(num_devices: int, num_microbatches: int, chunks: int) -> list[list[Cell]]:
    """Returns Megatron's order of 1F1B; a steady cell has one forward and one backward.

    Device `d` does `2(P-1-d) + (V-1)P` forwards, then pairs of one forward and one backward, then
    the remaining backwards. One chunk gives eager 1F1B.

    Args:
        num_devices: devices `P`.
        num_microbatches: microbatches `M`.
        chunks: stages per device `V`.

    Returns:
        The cells of each device, in the order of execution.
    """
    order = []
    for device in range(num_devices):
        forwards, backwards = _walks(device, num_devices, num_microbatches, chunks)
        unpaired = 2 * (num_devices - 1 - device) + (chunks - 1) * num_devices
        warmup = min(unpaired, len(forwards))
        order.append(
            [
                *((forward,) for forward in forwards[:warmup]),
                *zip(forwards[warmup:], backwards, strict=False),
                *((backward,) for backward in backwards[len(forwards) - warmup :]),
            ]
        )
    return order


def _walks(
    device: int, num_devices: int, num_microbatches: int, chunks: int
) -> tuple[list[Action], list[Action]]:
    """Returns a device's forwards and backwards: groups of `P` microbatches, chunk by chunk."""
    visits = [
        (chunk, microbatch)
        for first in range(0, num_microbatches, num_devices)
        for chunk in range(chunks)
        for microbatch in range(first, min(first + num_devices, num_microbatches))
    ]
    forwards = [Action(device + c * num_devices, Phase.F, m) for c, m in visits]
    # Backwards visit the chunks from the last to the first.
    backwards = [Action(device + (chunks - 1 - c) * num_devices, Phase.B, m) for c, m in visits]
    return forwards, backwards


def one_f_one_b(num_stages: int, num_microbatches: int) -> Schedule:
    """Builds 1F1B: stage `s` does `S-1-s` forwards, then alternates one forward, one backward.

    The bubble is GPipe's, `(S-1)(F+B)`. 1F1B saves memory: stage `s` keeps only `min(S-s, M)`
    microbatches. A round trip between neighbours takes two ticks, so an executor that keeps devices
    in lockstep runs `eager_1f1b` faster.

    Args:
        num_stages: stages `S`, one per device.
        num_microbatches: microbatches `M`; fewer than `S` are allowed.

    Returns:
        The table, of `2(M+S-1)` ticks.

    Raises:
        ScheduleError: a number below 1.

    Example:
        >>> print(" ".join(map(str, one_f_one_b(4, 3).order(2))))
        2F0 2F1 2B0 2F2 2B1 2B2

    Source: Harlap et al., PipeDream, arXiv:1806.03377 (the order), and Narayanan et al.,
    Memory-Efficient Pipeline-Parallel DNN Training, arXiv:2006.09503 (the flush at the end).
    """
    check_sizes(num_stages=num_stages, num_microbatches=num_microbatches)
    order = [
        alternating_order(s, num_stages, num_microbatches, ahead=num_stages - s)
        for s in range(num_stages)
    ]
    return order_to_table("1f1b", order, range(num_stages), num_microbatches)


def alternating_order(
    device: int,
    num_devices: int,
    num_microbatches: int,
    chunks: int = 1,
    *,
    ahead: int,
    delay: int | None = None,
) -> list[Action]:
    """Orders the actions of a device: some forwards, then backwards and forwards in turn.

    Args:
        device: the number of the device in the pipeline.
        num_devices: devices `P`.
        num_microbatches: microbatches `M`.
        chunks: stages per device `V`.
        ahead: the number of forwards before the first backward.
        delay: the number of backwards by which `W` follows `I`; None does not split backwards.

    Returns:
        The actions, in the order of execution.
    """
    forwards, backwards = _walks(device, num_devices, num_microbatches, chunks)
    warmup = min(ahead, len(forwards))
    order = forwards[:warmup]
    waiting: deque[Action] = deque()
    for number, backward in enumerate(backwards):
        order.append(backward if delay is None else backward._replace(phase=Phase.I))
        if delay is not None:
            waiting.append(backward._replace(phase=Phase.W))
            # If fewer than `delay` backwards come before the cool-down, W starts with the
            # cool-down: to wait longer would fill no bubble.
            if number >= min(delay, len(forwards) - warmup):
                order.append(waiting.popleft())
        order += forwards[warmup + number : warmup + number + 1]
    return [*order, *waiting]


def eager_1f1b(num_stages: int, num_microbatches: int) -> Schedule:
    """Builds 1F1B for devices in lockstep: a forward and a backward share a tick.

    Stage `s` does the forward of microbatch `t-s` and the backward of `t-(2(S-1)-s)` in tick `t`.
    Forwards run ahead just far enough to fill every steady tick. With devices in lockstep, the
    bubble remains `(S-1)(F+B)`, the least of any schedule with one chunk and whole backwards. In
    return, stage `s` keeps `min(2(S-s)-1, M)` microbatches.

    Args:
        num_stages: stages `S`, one per device.
        num_microbatches: microbatches `M`.

    Returns:
        The table, of `M+2(S-1)` ticks.

    Raises:
        ScheduleError: a number below 1.

    Example:
        >>> print(eager_1f1b(2, 3))
        eager_1f1b: 2 stages on 2 devices, 3 microbatches, 5 ticks
        tick        0    1        2        3    4
        device 0  0F0  0F1  0F2+0B0      0B1  0B2
        device 1    .  1F0+1B0  1F1+1B1  1F2+1B2    .

    Source: JaxPP's Eager1F1B (Xhebraj et al., arXiv:2412.14374).
    """
    check_sizes(num_stages=num_stages, num_microbatches=num_microbatches)
    order = paired_order(num_stages, num_microbatches, chunks=1)
    return order_to_table("eager_1f1b", order, range(num_stages), num_microbatches)


def looped_bfs(num_devices: int, num_microbatches: int, chunks: int = 2) -> Schedule:
    """Builds looped BFS: all microbatches through chunk 0, then chunk 1, ..., and back in reverse.

    The bubble is `(P-1)(F+B)/V` for `M >= P`, and any `M` is allowed. All `M` microbatches stay
    alive in every chunk. Each chunk runs its microbatches consecutively. In the paper a device
    therefore gathers the sharded parameters of a chunk once per step; the step of this library does
    so with every schedule.

    Args:
        num_devices: devices `P`; device `d` holds the stages `d, d+P, d+2P, ...`.
        num_microbatches: microbatches `M`.
        chunks: stages per device `V`; 1 is GPipe.

    Returns:
        The table, of `P * V` stages.

    Raises:
        ScheduleError: a number below 1.

    Example:
        >>> print(" ".join(map(str, looped_bfs(2, 2, chunks=2).order(0))))
        0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1

    Source: Lamy-Poirier, Breadth-First Pipeline Parallelism, arXiv:2211.05953.
    """
    check_sizes(num_devices=num_devices, num_microbatches=num_microbatches, chunks=chunks)
    num_stages = num_devices * chunks
    order = []
    for device in range(num_devices):
        stages = range(device, num_stages, num_devices)
        walks = [*((k, Phase.F) for k in stages), *((k, Phase.B) for k in reversed(stages))]
        order.append([Action(k, phase, m) for k, phase in walks for m in range(num_microbatches)])
    placement = [stage % num_devices for stage in range(num_stages)]
    return order_to_table("looped_bfs", order, placement, num_microbatches)


def zero_bubble_h1(num_stages: int, num_microbatches: int) -> Schedule:
    """Builds ZB-H1: 1F1B whose weight gradients fill the bubble, in 1F1B's memory.

    The backward is split into `I` (the input gradient, on the critical path) and `W` (the weight
    gradient, which can wait). Stage `s` delays `W` by `s` microbatches, so that every stage keeps
    `S` microbatches in total: `S-s` before `I` and `s` between `I` and `W`. The bubble is
    `(S-1)(F+I) - (min(S, M)-1)W`, which is the paper's `(S-1)(F+I-W)` for `M >= S`.

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
    return _zero_bubble_table(
        "zero_bubble_h1", num_stages, num_microbatches, lambda stage: num_stages - stage
    )


def zero_bubble_h2(num_stages: int, num_microbatches: int) -> Schedule:
    """Builds ZB-H2: forwards fill the warm-up too, for twice the memory.

    Stage `s` keeps `2(S-s)-1` microbatches before `I` and `2s` between `I` and `W`, `2S-1` in
    total. For `M >= 2S-1`, each device's own span, from its first to its last task, has a bubble of
    `max(0, (S-1)(F+I-2W))`, which is zero if `F = I = W`. The step as a whole still takes `(S-1)F`
    longer, because the last device starts that late. Only an optimizer that lets devices step one
    by one could hide this, and a global gradient norm prevents that.

    Arguments, results and errors are those of `zero_bubble_h1`.

    Example:
        >>> zero_bubble_h2(4, 8).num_ticks
        27

    Source: Qi et al., Zero Bubble Pipeline Parallelism, arXiv:2401.10241.
    """
    return _zero_bubble_table(
        "zero_bubble_h2", num_stages, num_microbatches, lambda stage: 2 * (num_stages - stage) - 1
    )


def _zero_bubble_table(
    name: str, num_stages: int, num_microbatches: int, ahead: Callable[[int], int]
) -> Schedule:
    """Builds a table whose stage `s` runs `ahead(s)` forwards before its first `I`.

    Each `W` follows its `I` by `ahead(0) - ahead(s)` backwards. `ahead(0)` must be the largest.
    """
    check_sizes(num_stages=num_stages, num_microbatches=num_microbatches)
    orders = [
        alternating_order(
            s, num_stages, num_microbatches, ahead=ahead(s), delay=ahead(0) - ahead(s)
        )
        for s in range(num_stages)
    ]
    return order_to_table(name, orders, range(num_stages), num_microbatches)


def interleaved_zero_bubble(num_devices: int, num_microbatches: int, chunks: int = 2) -> Schedule:
    """Builds interleaved 1F1B whose weight gradients fill the bubble: ZB-H1 with several chunks.

    Device `d` holds the stages `d, d+P, ...`. It runs `VP - d` forwards ahead, `P-1-d` fewer than
    interleaved 1F1B, and delays each `W` by `d` backwards. So every device keeps `VP` stage inputs,
    which is 1F1B's memory. The bubble is `((P-1)(F+I) - (min(P, VM)-1)W)/V`. For `M >= P` this is
    `(P-1)(F+I-W)/V`, ZB-H1's bubble divided by the number of chunks.

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
    order of Narayanan et al., arXiv:2104.04473. PyTorch's ScheduleInterleavedZeroBubble needs as
    much memory and has the same bubble.
    """
    check_groups("interleaved_zero_bubble", "zero_bubble_h1", num_devices, num_microbatches, chunks)
    order = [
        alternating_order(
            d, num_devices, num_microbatches, chunks, ahead=chunks * num_devices - d, delay=d
        )
        for d in range(num_devices)
    ]
    placement = [device for _ in range(chunks) for device in range(num_devices)]
    return order_to_table("interleaved_zero_bubble", order, placement, num_microbatches)
