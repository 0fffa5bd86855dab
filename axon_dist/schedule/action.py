"""The actions of a pipeline schedule, their dependencies, and the layers of each stage."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Container, Sequence
from itertools import accumulate, pairwise
from math import inf
from operator import add, itemgetter
from typing import NamedTuple, SupportsIndex

from ..core.errors import NamedChoice, ScheduleError


class Phase(NamedChoice):
    """The computation of an action, for its stage and microbatch.

    `B` is the whole backward. `I` and `W` are its two halves, split as in zero-bubble pipelines
    (Qi et al., arXiv:2401.10241): only `I` is on the path to the previous stage. `E`, `V` and `G`
    occur if embedding and head are split over all ranks (Yeung et al., arXiv:2411.05288). All ranks
    run them together, and their `stage` is the first stage of the rank.
    """

    E = "E"
    """A rank's part of the embedding: its rows of the first stage's input."""
    F = "F"
    """The forward pass."""
    V = "V"
    """A rank's part of the vocabulary: head and loss, forward and backward."""
    B = "B"
    """The whole backward pass: the gradients of the input and of the weights."""
    I = "I"
    """The gradient of the stage's input alone."""
    W = "W"
    """The gradient of the stage's weights alone."""
    G = "G"
    """The gradient of a rank's part of the embedding."""

    # Enum hashes by member name through a Python call; tables are full of dictionary look-ups.
    __hash__ = str.__hash__


TOGETHER = (Phase.E, Phase.V, Phase.G)
"""Phases that all devices run in the same tick, each for its part of the vocabulary."""


class Action(NamedTuple):
    """One unit of work, printed as torch prints it: `2F0` is stage 2, forward, microbatch 0.

    Args:
        stage: the stage, numbered over the whole model and not per device.
        phase: the computation.
        microbatch: the number of the microbatch, from 0.

    Example:
        >>> str(Action(2, Phase.F, 0))
        '2F0'
        >>> Action.parse("2F0") == Action(2, Phase.F, 0)
        True
    """

    stage: int
    phase: Phase
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.phase}{self.microbatch}"

    @classmethod
    def parse(cls, text: str) -> Action:
        """Reads an action from its printed form.

        Args:
            text: for example `"2F0"`; blanks around it are dropped.

        Returns:
            The action.

        Raises:
            ScheduleError: the text is not an action.

        Example:
            >>> Action.parse(" 12W3 ")
            Action(stage=12, phase=<Phase.W: 'W'>, microbatch=3)
        """
        match = _PATTERN.fullmatch(text.strip())
        if match is None:
            raise ScheduleError(
                f"got {text!r}, which is not an action. An action is a stage, one of "
                f"{', '.join(Phase)}, and a microbatch, such as 2F0; several in one tick are "
                "joined by '+'."
            )
        stage, phase, microbatch = match.groups()
        return cls(int(stage), Phase(phase), int(microbatch))


Cell = tuple[Action, ...]
"""The actions of one device in one tick, left to right; empty if it is idle."""

_PATTERN = re.compile(r"([0-9]+)([EFVBIWG])([0-9]+)")

_MOST_ACTIONS = 2**20


def check_sizes(**sizes: SupportsIndex) -> None:
    """Refuses a number of stages, microbatches or chunks below 1, and tables that are too large.

    Args:
        **sizes: the numbers, by their names in the message.

    Raises:
        ScheduleError: a number is not a positive integer, or their product is above a million.

    Example:
        >>> check_sizes(num_stages=4, num_microbatches=8)
    """
    for name, size in sizes.items():
        try:
            # `operator.index` accepts NumPy integers too.
            is_size = not isinstance(size, bool) and operator.index(size) >= 1
        except TypeError:
            is_size = False
        if not is_size:
            raise ScheduleError(f"got {name}={size!r:.80}. It must be an integer of at least 1.")
    actions = math.prod(operator.index(size) for size in sizes.values())
    if actions > _MOST_ACTIONS:
        named = ", ".join(f"{name}={size}" for name, size in sizes.items())
        raise ScheduleError(
            f"got {named}, a table of {actions} forwards, which must be at most {_MOST_ACTIONS}. "
            "Lower one of them."
        )


def receiver(action: Action, num_stages: int) -> Action | None:
    """Returns the action of the neighbouring stage that reads a result; None if there is none.

    Example:
        >>> str(receiver(Action(1, Phase.F, 0), 4)), str(receiver(Action(1, Phase.I, 0), 4))
        ('2F0', '0I0')
    """
    if action.phase in (*TOGETHER, Phase.W):
        return None
    stage = action.stage + 1 if action.phase is Phase.F else action.stage - 1
    return action._replace(stage=stage) if 0 <= stage < num_stages else None


def dependencies(action: Action, num_stages: int, scheduled: Container[Action]) -> list[Action]:
    """Lists the actions whose results an action needs.

    The dependencies are those of the sequential program: `F(k) <- F(k-1)`, `B(k) <- F(k), B(k+1)`,
    and with a split backward `I(k) <- F(k), I(k+1)`, `W(k) <- I(k)`. With a split vocabulary, the
    first stage's `F` needs every `E`. Every `V` needs the last stage's `F`, whose `B` or `I` needs
    every `V`. Every `G` needs the first stage's `B` or `I`.

    Args:
        action: the action that waits.
        num_stages: stages of the whole model.
        scheduled: every action of the schedule. It tells whether the next stage's gradient comes
            from a whole backward `B` or from an `I`; a stage may split its backward while its
            neighbour does not.

    Returns:
        The direct dependencies, those of the same stage first.

    Example:
        >>> [str(a) for a in dependencies(Action(1, Phase.B, 0), 4, {Action(2, Phase.I, 0)})]
        ['1F0', '2I0']
    """
    stage, phase, microbatch = action

    def of_all(phase: Phase) -> list[Action]:
        parts = (Action(each, phase, microbatch) for each in range(num_stages))
        return [part for part in parts if part in scheduled]

    def gradient_from(stage: int) -> Action:
        split = Action(stage, Phase.I, microbatch)
        return split if split in scheduled else Action(stage, Phase.B, microbatch)

    if phase is Phase.E:
        return []
    if phase is Phase.F:
        return [Action(stage - 1, Phase.F, microbatch)] if stage else of_all(Phase.E)
    if phase is Phase.V:
        return [Action(num_stages - 1, Phase.F, microbatch)]
    if phase is Phase.W:
        return [Action(stage, Phase.I, microbatch)]
    if phase is Phase.G:
        return [gradient_from(0)]
    forward = Action(stage, Phase.F, microbatch)
    is_last = stage + 1 == num_stages
    return [forward, *(of_all(Phase.V) if is_last else [gradient_from(stage + 1)])]


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
    check_sizes(num_layers=num_layers, num_stages=num_stages)
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

    Example:
        >>> stage_ranges((0, 3, 6, 8, 10))
        (range(0, 3), range(3, 6), range(6, 8), range(8, 10))
    """
    return tuple(range(first, end) for first, end in pairwise(boundaries))


def _checked(boundaries: Sequence[int], num_layers: int, num_stages: int) -> Boundaries:
    bounds = tuple(boundaries)
    rising = all(first < end for first, end in pairwise(bounds))
    if len(bounds) != num_stages + 1 or not rising or (bounds[0], bounds[-1]) != (0, num_layers):
        raise ScheduleError(
            f"got the boundaries {list(bounds)} for {num_layers} layers in {num_stages} stages. "
            f"They must be {num_stages + 1} rising layer indices from 0 to {num_layers}, such as "
            f"{list(partition(num_layers, num_stages))}."
        )
    return bounds


def _balanced(costs: Sequence[float], num_layers: int, num_stages: int) -> Boundaries:
    if len(costs) != num_layers or not all(0 <= cost < inf for cost in costs):
        raise ScheduleError(
            f"got the costs {list(costs)} for {num_layers} layers. Give one cost per layer, each a "
            "finite number of at least 0."
        )
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
