"""Zero-bubble pipelines with one stage per device: ZB-H1 and ZB-H2."""

from __future__ import annotations

from collections.abc import Callable

from .action import Action, Phase, check_sizes
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
    ahead = lambda stage: num_stages - stage
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
    ahead = lambda stage: 2 * (num_stages - stage) - 1
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
