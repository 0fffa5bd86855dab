"""Looped breadth-first pipeline: GPipe with several stages per device."""

from __future__ import annotations

from .action import Action, Phase, check_sizes
from .order import order_to_table
from .table import Schedule


def looped_bfs(num_devices: int, num_microbatches: int, chunks: int = 2) -> Schedule:
    """Builds looped BFS: all microbatches through chunk 0, then chunk 1, ..., and back reversed.

    The bubble is `(P-1)(F+B)/V` for `M >= P`, and any `M` will do; all `M` microbatches stay alive
    in every chunk. Each chunk runs in one piece, so that with sharded parameters it is gathered
    once per step and not once per microbatch.

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
