"""V-Half: a zero-bubble pipeline in half of 1F1B's memory."""

from __future__ import annotations

from .building_block import Hops, v_schedule
from .table import Schedule


def v_half(num_devices: int, num_microbatches: int) -> Schedule:
    """Builds V-Half: device `d` holds the stages `d` and `2P-1-d`; the way up takes twice as long.

    A device keeps `floor((P+2)/2)` whole microbatches from `F` to `W`, where 1F1B keeps `P`. With
    `F = I = W` the bubble is `(3P/2 - 2)F` from three devices on: the paper's "about half of
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
