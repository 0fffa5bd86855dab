"""V-Min: a zero-bubble pipeline in a third of 1F1B's memory."""

from __future__ import annotations

from .building_block import Hops, v_schedule
from .table import Schedule


def v_min(num_devices: int, num_microbatches: int) -> Schedule:
    """Builds V-Min: device `d` holds the stages `d` and `2P-1-d`, and every hop takes one tick.

    A device keeps `floor((P+4)/3)` whole microbatches from `F` to `W`, where 1F1B keeps `P`. With
    `F = I = W` the bubble is `(2P - 5/2)F`, and `F` more where 3 divides `P`: the paper's "about
    two thirds of 1F1B's", `3(P-1)F`. With unequal times each device waits a little in every
    microbatch, so that the bubble grows with their number: V-Half does not pay that.

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
