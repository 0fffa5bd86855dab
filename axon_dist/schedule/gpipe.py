"""GPipe: all forwards, then all backwards."""

from __future__ import annotations

from .action import Action, Phase, check_sizes
from .order import order_to_table
from .table import Schedule


def gpipe(num_stages: int, num_microbatches: int) -> Schedule:
    """Builds GPipe: every stage does all its forwards, then all its backwards.

    Bubble `(S-1)(F+B)`, a fraction `(S-1)/(M+S-1)`; every stage keeps all `M` microbatches.

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
