"""What stands before the first block of a pipeline, and the way back through it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from ..core.typing import Array
from ..program import needed_for
from .stage import Data, Rest, Wire


@dataclasses.dataclass(frozen=True, eq=False)
class Start:
    """The program that makes the input of the first stage, of one microbatch.

    It is run again on the way back, once per microbatch, instead of kept.

    Args:
        first: (rest, data) -> that input.
        trained: the parameters that it reads and that are trained.
        frozen: those that are not.
        data: what is known of the microbatch.
    """

    first: Callable[[Rest, Data], Wire]
    trained: Rest
    frozen: Rest
    data: Data

    @property
    def is_frozen(self) -> bool:
        """Whether it reads parameters, and none of them is trained."""
        return bool(self.frozen) and not self.trained

    def back(self, rows: Any, gradient: list[Array]) -> tuple[Rest, list[Array]]:
        """The gradients of the trained parameters and of what was looked up.

        Args:
            rows: what was looked up for the microbatch in tables that lie in parts.
            gradient: of the floats of the input.
        """

        def run(rest: Rest, rows: Any) -> list[Array]:
            return self.first({**rest, **self.frozen}, self.data._replace(rows=rows)).floats

        _, pull = jax.vjp(run, self.trained, rows)
        return pull(gradient)


def reads_rows(start: Start, rows: list[Any], gradient: list[Any]) -> bool:
    """Whether the way back depends on what was looked up, and not only on its gradient.

    A scale or a dropout behind a lookup needs no rows on the way back; a norm does, and a
    projection whose weights are trained.

    Args:
        start: of any microbatch.
        rows: arrays of the shapes of what is looked up.
        gradient: likewise of the floats of the input.
    """
    closed = jax.make_jaxpr(start.back)(rows, gradient)
    _, read = needed_for(closed.jaxpr, range(len(closed.jaxpr.outvars)))
    return any(number < len(rows) for number in read)
