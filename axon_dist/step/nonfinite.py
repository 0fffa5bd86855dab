"""What happens after a loss or a gradient that is not finite; never nothing."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

import jax

from ..core.errors import Choice, ConfigError, did_you_mean
from ..ops.precision import all_finite
from .state import TrainState

FLAG = "nonfinite"
"""The metric in which a guarded step says that it changed nothing."""


class Nonfinite(Choice):
    """What a run does when a loss or a gradient is not finite.

    A step built with one of them leaves parameters and moments as they were, decided on the
    devices: the host learns of it only with the metrics. Gradients that a loss scale makes overflow
    are its own business, as long as it can still fall.
    """

    STOP = "stop"
    """The run ends with an error; what it keeps is the state before that batch."""
    SKIP = "skip"
    """The run goes on with the next batch, and counts."""
    ROLLBACK = "rollback"
    """The run goes on from its newest checkpoint, with batches that it has not seen yet."""

    @property
    def holds(self) -> bool:
        """Whether the state stays as it was in the steps under way, too."""
        return self is not Nonfinite.SKIP


@dataclasses.dataclass(frozen=True)
class Loss:
    """The first step of a run that was not finite.

    Args:
        step: which one, counted from 1.
        loss: its loss.
    """

    step: int
    loss: float

    def __str__(self) -> str:
        """Names the step and what was not finite in it."""
        if math.isfinite(self.loss):
            return f"step {self.step}: a gradient is not finite (the loss is {self.loss:.4g})"
        return f"step {self.step}: the loss is {self.loss}"


def is_lost(values: Mapping[str, float]) -> bool:
    """Whether the metrics of a step say so; those of a step without a guard have the loss alone."""
    return bool(values[FLAG]) if FLAG in values else not math.isfinite(values["loss"])


def is_finite(state: TrainState) -> bool:
    """Whether every parameter of a state is finite; computed on the devices."""
    return bool(jax.jit(all_finite)(state.params))


def nonfinite_policy(name: Nonfinite | str | None) -> Nonfinite | None:
    """Reads the name of a policy.

    Raises:
        ConfigError: when there is none of that name.

    Example:
        >>> nonfinite_policy("skip")
        <Nonfinite.SKIP: 'skip'>
    """
    if name is None:
        return None
    try:
        return Nonfinite(name)
    except ValueError:
        raise ConfigError(
            f"nonfinite: there is no {name!r}.{did_you_mean(name, Nonfinite)}"
        ) from None
