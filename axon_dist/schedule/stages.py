"""The layers of each stage: a chain of layers, divided into consecutive stages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from math import inf
from operator import add, itemgetter

from ..core.arguments import is_number
from ..core.errors import ScheduleError
from .action import MOST_ACTIONS, check_positive, check_sizes, is_index, is_list

Boundaries = tuple[int, ...]
"""`S + 1` layer indices from 0 to the number of layers; stage `s` has layers `b[s]` to `b[s+1]`."""


def partition(
    num_layers: int,
    num_stages: int,
    costs: Sequence[float] | None = None,
    boundaries: Sequence[int] | None = None,
) -> Boundaries:
    """Divides layers into consecutive stages, none of them empty.

    Without costs, all stages have equally many layers, and the first ones take the remainder. With
    costs, the most expensive stage is as cheap as possible, because it sets the pace of a pipeline.
    Among such partitions, the one with the least sum of squared costs is chosen.

    Args:
        num_layers: layers in the chain.
        num_stages: stages of the whole model.
        costs: the cost of each layer, in any unit; None for equal layers.
        boundaries: the boundaries to use; they are only checked.

    Returns:
        The `num_stages + 1` boundaries, from 0 to `num_layers`.

    Raises:
        ScheduleError: fewer layers than stages, costs of the wrong number, not finite or negative,
            boundaries that do not cut all layers into non-empty stages, or both costs and
            boundaries.

    Example:
        >>> partition(10, 4)
        (0, 3, 6, 8, 10)
        >>> partition(4, 2, costs=[10, 20, 15, 5])
        (0, 2, 4)
    """
    check_positive(num_layers=num_layers)
    # A table has at least one forward per stage; its size does not depend on the layers.
    check_sizes(num_stages=num_stages)
    if num_layers < num_stages:
        raise ScheduleError(
            f"got {num_layers} layers for {num_stages} stages. Every stage needs a layer; use at "
            f"most {num_layers} stages."
        )
    if boundaries is not None:
        if costs is not None:
            raise ScheduleError(
                "got both costs and boundaries. Boundaries leave nothing to choose; give one."
            )
        return _checked(boundaries, num_layers, num_stages)
    if costs is None:
        size, rest = divmod(num_layers, num_stages)
        return tuple(s * size + min(s, rest) for s in range(num_stages + 1))
    return _balanced(costs, num_layers, num_stages)


def stage_ranges(boundaries: Boundaries) -> tuple[range, ...]:
    """Returns the layers of each stage.

    Args:
        boundaries: the result of `partition`.

    Returns:
        One range per stage.

    Raises:
        ScheduleError: the boundaries are not a list of layer indices.

    Example:
        >>> stage_ranges((0, 3, 6, 8, 10))
        (range(0, 3), range(3, 6), range(6, 8), range(8, 10))
    """
    if not is_list(boundaries, range(MOST_ACTIONS + 2), is_index):
        raise ScheduleError(
            f"got the boundaries {boundaries!r:.200}. Give rising layer indices, as partition "
            "returns them, such as (0, 2, 4)."
        )
    return tuple(range(first, end) for first, end in pairwise(boundaries))


def _checked(boundaries: Sequence[int], num_layers: int, num_stages: int) -> Boundaries:
    is_right = is_list(boundaries, (num_stages + 1,), is_index)
    bounds = tuple(boundaries) if is_right else ()
    rising = all(first < end for first, end in pairwise(bounds))
    if not is_right or not rising or (bounds[0], bounds[-1]) != (0, num_layers):
        raise ScheduleError(
            f"got the boundaries {boundaries!r:.200} for {num_layers} layers in {num_stages} "
            f"stages. They must be {num_stages + 1} rising layer indices from 0 to {num_layers}, "
            f"such as {list(partition(num_layers, num_stages))!s:.200}."
        )
    return bounds


def _balanced(costs: Sequence[float], num_layers: int, num_stages: int) -> Boundaries:
    if not is_list(costs, (num_layers,), lambda cost: is_number(cost) and cost >= 0):
        raise ScheduleError(
            f"got the costs {costs!r:.200} for {num_layers} layers. Give a list with one cost "
            "per layer, each a finite number of at least 0."
        )
    costs = [float(cost) for cost in costs]  # Squares of large integers fit no float.
    ends = [0, *accumulate(costs)]
    pace, _ = _cheapest_cut(ends, num_stages, price=lambda cost: cost, total=max)

    def squared(cost):
        return cost * cost if cost <= pace else inf

    return _cheapest_cut(ends, num_stages, price=squared, total=add)[1]


def _cheapest_cut(
    ends: Sequence[float],
    num_stages: int,
    price: Callable[[float], float],
    total: Callable[[float, float], float],
) -> tuple[float, Boundaries]:
    """Finds the cheapest cut by dynamic programming over (stage, layer at which it ends)."""
    best: dict[int, tuple[float, Boundaries]] = {0: (0, (0,))}
    for stage in range(num_stages):
        best = {
            end: min(
                (
                    (total(paid, price(ends[end] - ends[start])), (*bounds, end))
                    # From the back, so that among equally cheap cuts the first stages are longer.
                    for start, (paid, bounds) in reversed(best.items())
                    if start < end
                ),
                key=itemgetter(0),
            )
            for end in range(stage + 1, len(ends))
        }
    return best[len(ends) - 1]
