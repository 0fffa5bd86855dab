"""What a `Trainer` is given: `LoopOptions`, and the kind of each of its fields."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Literal

from axon_dist.core.errors import ConfigError
from axon_dist.core.told import COUNT, FUNCTION, ArgumentKind, check_fields


@dataclasses.dataclass(frozen=True)
class LoopOptions:
    """How long a loop runs and how often it tells.

    Args:
        num_steps: the step to stop at, counted from the first of the state.
        log_every: steps averaged into one record.
        eval_every: steps between validations; 0 validates only at the end. More than 0 needs a
            `validation` of the trainer.
        save_every: steps between saves; 0 saves only at the end. More than 0 needs a `save` of the
            trainer.
        copy_every: steps between copies; 0 makes none. More than 0 needs a `copy` of the trainer.
        items_per_step: items in a global batch; None leaves the throughput out.
        item: what they are; utilization is that of tokens.
        peak_flops: FLOP/s of one device at best, to measure utilization against; None leaves it
            out.
        sequence_length: tokens of a sequence, so that utilization counts attention; None leaves
            attention out.
        max_rollbacks: how often a run goes back to a checkpoint, where the step's `nonfinite` says
            so; after that it stops.
        best_metric: the metric of validations by which a state is the best, as writers get it.
        best_mode: `"min"` where less of it is better, `"max"` where more is.
        patience: so many validations without a better number end the run; 0 lets it go on.
        min_delta: by so much a number has to be better to count for that.
        profile_at: the first step that is traced, counted from 1; 0 traces none.
        profile_steps: how many are traced.
    """

    num_steps: int
    _: dataclasses.KW_ONLY
    log_every: int = 10
    eval_every: int = 0
    save_every: int = 0
    copy_every: int = 0
    items_per_step: int | None = None
    item: str = "tokens"
    peak_flops: float | None = None
    sequence_length: int | None = None
    max_rollbacks: int = 3
    best_metric: str = "validation/loss"
    best_mode: Literal["min", "max"] = "min"
    patience: int = 0
    min_delta: float = 0.0
    profile_at: int = 0
    profile_steps: int = 3

    def __post_init__(self) -> None:
        self.validate()

    def validate(self) -> None:
        """Raises `ConfigError` unless the counts are possible."""
        check_fields(self)
        for name in ("items_per_step", "sequence_length"):
            COUNT.or_none().check("LoopOptions", name, getattr(self, name))
        if (
            min(self.num_steps, self.log_every) < 1
            or min(self.eval_every, self.save_every, self.copy_every) < 0
        ):
            raise ConfigError(
                f"got num_steps={self.num_steps}, log_every={self.log_every}, "
                f"eval_every={self.eval_every}, save_every={self.save_every} and "
                f"copy_every={self.copy_every}; the first two must be at least 1, the others at "
                "least 0"
            )
        if self.profile_at < 0 or self.profile_steps < 1:
            raise ConfigError(
                f"got profile_at={self.profile_at} and profile_steps={self.profile_steps}; trace "
                "from a step of at least 0, and at least 1 of them"
            )
        if self.best_mode not in ("min", "max") or not self.best_metric.startswith("validation/"):
            raise ConfigError(
                f"got best_metric={self.best_metric!r} and best_mode={self.best_mode!r}; name a "
                "metric of validations, such as 'validation/loss', and 'min' or 'max'"
            )
        if self.patience < 0 or self.min_delta < 0:
            raise ConfigError(
                f"got patience={self.patience} and min_delta={self.min_delta}; both are at least 0"
            )
        if self.max_rollbacks < 1:
            raise ConfigError(f"max_rollbacks={self.max_rollbacks} must be at least 1; raise it")
        if self.peak_flops is not None and (self.items_per_step is None or self.item != "tokens"):
            raise ConfigError(
                f"peak_flops={self.peak_flops} needs items_per_step in tokens to measure "
                f"utilization, and got {self.items_per_step} {self.item}; set it"
            )


BATCHES = ArgumentKind(
    'an iterable of batches, such as a loader or a list of {"x": ..., "y": ...}',
    lambda x: isinstance(x, Iterable) and not isinstance(x, (str, bytes, Mapping, type)),
)
STATE = ArgumentKind(
    "a TrainState, such as step.init()", lambda x: hasattr(x, "step") and hasattr(x, "params")
).or_none()
_FUNCTION = FUNCTION.or_none()
KINDS: MappingProxyType[str, ArgumentKind] = MappingProxyType(
    {
        "step": ArgumentKind(
            "a TrainStep, which build_train_step makes", lambda x: _has(x, "evaluate_sums")
        ),
        "batches": BATCHES,
        "options": ArgumentKind("LoopOptions(num_steps=...)", lambda x: isinstance(x, LoopOptions)),
        "validation": ArgumentKind(
            "a function of no arguments that returns batches, such as lambda: batches, or several "
            "by name",
            lambda x: all(map(callable, x.values())) if isinstance(x, Mapping) else callable(x),
        ).or_none(),
        "writers": ArgumentKind(
            "a list of writers, each with write(step, metrics) and close()",
            lambda x: isinstance(x, Sequence) and all(_has(one, "write", "close") for one in x),
        ),
        "progress": ArgumentKind(
            "a Progress, such as SilentProgress()", lambda x: _has(x, "phase", "update", "note")
        ),
        "should_stop": _FUNCTION,
        "save": _FUNCTION,
        "copy": _FUNCTION,
        "give_back": _FUNCTION,
        "go_back": _FUNCTION,
        "history": ArgumentKind(
            "a list of dicts",
            lambda x: isinstance(x, Sequence) and all(isinstance(row, Mapping) for row in x),
        ),
    }
)
"""What the fields of a `Trainer` can be."""


def _has(value: object, *methods: str) -> bool:
    is_class = isinstance(value, type)
    return not is_class and all(callable(getattr(value, name, None)) for name in methods)
