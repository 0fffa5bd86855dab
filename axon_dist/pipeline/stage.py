"""What the executor runs: a stage as three functions, with nothing of schedules in them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from ..core.typing import Array
from ..program.piece import as_it_lies


class Wire(NamedTuple):
    """What one stage passes to the next.

    Args:
        floats: activations, which have gradients.
        others: counts and flags, which have none.
        left: what a stage leaves in its own buffers for the next microbatch; it is not passed on.
    """

    floats: list[Any]
    others: list[Any]
    left: Sequence[Any] = ()

    @property
    def sent(self) -> Wire:
        """What is passed on."""
        return Wire(self.floats, self.others)


class Data(NamedTuple):
    """What every rank knows about a microbatch.

    Args:
        buffers: leaves of the model's buffers before the microbatch.
        batch: leaves of the microbatch.
        rows: what was looked up for it in tables that lie in parts over the ranks; only the first
            stage knows it.
    """

    buffers: list[Any]
    batch: list[Any]
    rows: Sequence[Any] = ()


class Loss(NamedTuple):
    """The outputs of the loss function: a sum, its weight, and weighted means."""

    total: Array
    weight: Array
    metrics: list[Array]


Rest = dict[int, Any]
"""Parameters outside the blocks, by their position among them."""


class Frozen(NamedTuple):
    """The parameters that nothing is differentiated by.

    Args:
        weights: by row, None at the places of those that are trained.
        rest: those outside the blocks.
    """

    weights: Sequence[Sequence[Any]]
    rest: Rest

    def beside(self, weights: Sequence[Sequence[Any]]) -> Sequence[Sequence[Any]]:
        """All weights by row, given those that are trained, None at the places of the others."""
        if not self.weights:
            return weights
        rows = zip(weights, self.weights, strict=True)
        either = lambda row, other: [b if a is None else a for a, b in zip(row, other, strict=True)]
        return [either(row, other) for row, other in rows]


@dataclasses.dataclass(frozen=True, eq=False)
class StageProgram:
    """The stages that run the same program, on whatever ranks they are.

    Args:
        stages: which.
        chunk: which of its rank's chunks each is.
        rows: the rows of parameters they use.
        first: (rest, data) -> the input of stage 0.
        middle: (weights by row, rest, data, stage, input) -> output; `left` is by `learns`.
        last: (rest, data, output of the last stage) -> loss.
        first_uses: the rest parameters that `first` reads.
        middle_uses: those that `middle` reads.
        last_uses: those that `last` reads.
        learns: the numbers of the buffers that `middle` leaves, in their order, and the stage that
            each is of.
    """

    stages: tuple[int, ...]
    chunk: int
    rows: Sequence[int]
    first: Callable[[Rest, Data], Wire]
    middle: Callable[[Sequence[Sequence[Any]], Rest, Data, Array, Wire], Wire]
    last: Callable[[Rest, Data, Wire], Loss]
    first_uses: tuple[int, ...]
    middle_uses: tuple[int, ...]
    last_uses: tuple[int, ...]
    learns: Mapping[int, int] = dataclasses.field(default_factory=dict)

    def at(self, which: int, stage: Array, then: Callable, otherwise: Callable) -> Any:
        """Runs `then` at one stage and `otherwise` at others; a branch where both can happen."""
        if which not in self.stages:
            return otherwise()
        if self.stages == (which,):
            return then()
        laid = [lambda run=run: as_it_lies(run()) for run in (then, otherwise)]
        return jax.lax.cond(stage == which, *laid)
