"""`TrainResult`: what a run came to."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from ..step.state import TrainState
from .record import Curve
from .stop import INTERRUPTIONS

FINISHED = "finished"
"""The reason of a run that got to its last step."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainResult:
    """What a run came to.

    Args:
        state: after the last step.
        num_steps: steps that the state has taken.
        first_step: those of them that it had taken before this call; the seconds and the throughput
            are about the others.
        reason: why the run ended, such as `finished` or `SIGINT`.
        train_curve: pairs of step and mean training loss.
        validation_curve: pairs of step and validation loss.
        metric_curves: of every other metric of the loss function that is validated, its training
            curve and its validation curve.
        compile_seconds: until the first step was done.
        train_seconds: of all later steps, validations and saves not counted.
        items_per_second: over the train seconds; None if unknown.
        device_bytes: of the train state, on the fullest device.
        skipped_steps: steps whose batch changed nothing, because they were not finite.
        rollbacks: how often the run went back to a checkpoint.
        seconds: of this call, by what they were spent on: `initialize`, `compile`, `data` (waiting
            for a batch), `step`, `validation`, `save`, `lost` (steps that a rollback undid) and
            `other`.
        step_percentiles: seconds per step that so many percent of the steps stay within, by
            percent; empty where no step was timed.
    """

    state: TrainState
    num_steps: int
    reason: str
    train_curve: tuple[tuple[int, float], ...]
    validation_curve: tuple[tuple[int, float], ...]
    compile_seconds: float
    train_seconds: float
    items_per_second: float | None
    device_bytes: int
    first_step: int = 0
    skipped_steps: int = 0
    rollbacks: int = 0
    metric_curves: Mapping[str, tuple[Curve, Curve]] = dataclasses.field(default_factory=dict)
    seconds: Mapping[str, float] = dataclasses.field(default_factory=dict)
    step_percentiles: Mapping[int, float] = dataclasses.field(default_factory=dict)

    @property
    def is_finished(self) -> bool:
        """Whether the run got to its last step."""
        return self.reason == FINISHED

    @property
    def is_interrupted(self) -> bool:
        """Whether a signal ended the run, to this process or another one, before its last step."""
        return self.reason in INTERRUPTIONS
