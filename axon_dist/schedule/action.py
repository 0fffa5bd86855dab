"""The actions of a pipeline schedule and their dependencies."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Container, Mapping
from typing import Any, NamedTuple, SupportsIndex

from ..core.errors import NamedChoice, ScheduleError


class Phase(NamedChoice):
    """The computation of an action, for its stage and microbatch.

    `B` is the whole backward. `I` and `W` are its two halves, split as in zero-bubble pipelines
    (Qi et al., arXiv:2401.10241): only `I` is on the path to the previous stage. `E`, `V` and `G`
    occur if embedding and head are split over all ranks (Yeung et al., arXiv:2411.05288). All ranks
    run them together, and their `stage` is the first stage of the rank.
    """

    E = "E"
    """A rank's part of the lookup: the tokens whose rows of the embedding table the rank stores."""
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

MOST_ACTIONS = 2**20


def check_positive(**sizes: SupportsIndex) -> None:
    """Refuses a number that is not a positive integer.

    Args:
        **sizes: the numbers, by their names in the message.

    Raises:
        ScheduleError: a number is not an integer of at least 1.

    Example:
        >>> check_positive(num_layers=20_000)
    """
    for name, size in sizes.items():
        if not is_index(size) or operator.index(size) < 1:
            raise ScheduleError(f"got {name}={size!r:.80}. It must be an integer of at least 1.")


def check_sizes(**sizes: SupportsIndex) -> None:
    """Refuses a number of stages, microbatches or chunks below 1, and tables that are too large.

    Args:
        **sizes: the numbers whose product is the forwards of a table, by their names in the
            message.

    Raises:
        ScheduleError: a number is not a positive integer, or their product is above a million.

    Example:
        >>> check_sizes(num_stages=4, num_microbatches=8)
    """
    check_positive(**sizes)
    actions = math.prod(operator.index(size) for size in sizes.values())
    if actions > MOST_ACTIONS:
        named = ", ".join(f"{name}={size}" for name, size in sizes.items())
        raise ScheduleError(
            f"got {named}, a table of {actions} forwards, which must be at most {MOST_ACTIONS}. "
            "Lower one of them."
        )


def is_index(value: Any) -> bool:
    """Whether a value is a whole number of Python, numpy or JAX; booleans are not."""
    try:
        return not isinstance(value, bool) and operator.index(value) is not None
    except TypeError:
        return False


def is_list(value: Any, lengths: Container[int], holds: Callable[[Any], bool]) -> bool:
    """Whether a value is a list, tuple or array of one of these lengths whose items all hold.

    Example:
        >>> is_list([1, 2], range(3), is_index), is_list(range(10**12), range(3), is_index)
        (True, False)
    """
    if isinstance(value, (str, bytes, Mapping)) or not hasattr(type(value), "__getitem__"):
        return False
    try:
        return len(value) in lengths and all(map(holds, value))
    except (TypeError, OverflowError):  # It has no length, or one of more than 63 bits.
        return False


def receiver(action: Action, num_stages: int) -> Action | None:
    """Returns the action that receives a result, with the sender's phase; None if no stage does.

    A schedule may lack this action: where only one of two neighbours splits its backward, an `I`
    sends to a `B`, or a `B` to an `I`.

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
