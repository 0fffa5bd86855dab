"""1F1B: start a backward as soon as one can run, so that few activations are alive."""

from __future__ import annotations

from .action import Action, Phase, check_sizes
from .interleaved import paired_order
from .order import order_to_table
from .table import Schedule


def one_f_one_b(num_stages: int, num_microbatches: int) -> Schedule:
    """Builds 1F1B: stage `s` does `S-1-s` forwards, then alternates one forward, one backward.

    The bubble is GPipe's, `(S-1)(F+B)`; what 1F1B saves is memory: stage `s` keeps
    `min(S-s, M)` microbatches, however many there are. A round trip between neighbours takes two
    ticks, so that an executor which keeps devices in step runs `eager_1f1b` faster.

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
    order = [_stage_order(s, num_stages, num_microbatches) for s in range(num_stages)]
    return order_to_table("1f1b", order, range(num_stages), num_microbatches)


def _stage_order(stage: int, num_stages: int, num_microbatches: int) -> list[Action]:
    forwards = [Action(stage, Phase.F, m) for m in range(num_microbatches)]
    warmup = min(num_stages - 1 - stage, num_microbatches)
    order = forwards[:warmup]
    for m in range(num_microbatches):
        order += forwards[warmup + m : warmup + m + 1]
        order.append(Action(stage, Phase.B, m))
    return order


def eager_1f1b(num_stages: int, num_microbatches: int) -> Schedule:
    """Builds 1F1B in step: a forward and a backward share a tick.

    Stage `s` does the forward of microbatch `t-s` and the backward of `t-(2(S-1)-s)` in tick `t`.
    Forwards run ahead just far enough for every steady tick to be full. With devices kept in step
    its bubble stays `(S-1)(F+B)`, which no schedule with one chunk and whole backwards undercuts;
    stage `s` keeps `min(2(S-s)-1, M)` microbatches for it.

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
