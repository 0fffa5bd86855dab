"""What a step does besides its strategy."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from ..core.errors import ConfigError, did_you_mean
from ..core.told import REAL, TEXTS
from ..core.typing import OptionValue
from ..ops.precision import GradScaler
from .arguments import check_kind
from .nonfinite import Nonfinite

METRICS = ("loss", "grad_norm", "param_norm")
"""What a step can be asked to report."""

LOSS_SCALE = "loss_scale"
"""The metric in which a step with a `GradScaler` reports its scale."""


@dataclasses.dataclass(frozen=True)
class StepOptions:
    """What a step does besides the strategy.

    Args:
        accumulate: K microbatches per step, added up before the optimizer runs; 1 beside a
            pipeline, which has a number of its own.
        clip_norm: the largest global gradient norm; longer gradients are scaled down to it.
        metrics: which numbers a step reports, among `loss`, `grad_norm`, `param_norm`.
        scaler: the loss scale, or None without one.
        nonfinite: what to do after a loss or gradient that is not finite; None does not look.
        deterministic: whether every run has to give the same bits.
        pad: the leaf of the batch that weighs samples, to fill batches up by; None refuses them.
        compiler_options: what the compiler is told beside what the chip has.
        separable: whether the parts of a batch give its loss; None reads it from the program.
        eval_kwargs: what the call of the model is given in evaluations, in place of its own.
        ema: the decay of the moving average of the parameters; None keeps none.
        unroll: up to how many blocks are written out rather than run by a loop; None says so by
            what is recomputed.
    """

    accumulate: int = 1
    clip_norm: float | None = None
    metrics: tuple[str, ...] = ("loss",)
    scaler: GradScaler | None = None
    nonfinite: Nonfinite | None = None
    deterministic: bool = False
    pad: str | None = None
    compiler_options: Mapping[str, OptionValue | None] | None = None
    separable: bool | None = None
    eval_kwargs: Mapping[str, Any] | None = None
    ema: float | None = None
    unroll: int | None = None

    @property
    def holds(self) -> bool:
        """Whether the state stays as it was from the first step that is not finite."""
        return self.nonfinite is not None and self.nonfinite.holds

    def validate(self) -> None:
        """Raises `ConfigError` unless every option has a possible value."""
        whole = isinstance(self.accumulate, int) and not isinstance(self.accumulate, bool)
        if not whole or self.accumulate < 1:
            raise ConfigError(
                f"accumulate is {self.accumulate!r}; it must be a whole number of microbatches, "
                "at least 1"
            )
        whole = isinstance(self.unroll, int) and not isinstance(self.unroll, bool)
        if self.unroll is not None and not (whole and self.unroll >= 1):
            raise ConfigError(
                f"unroll is {self.unroll!r}; it must be up to how many blocks are written out, at "
                "least 1, which runs all of them by a loop, or None"
            )
        REAL.or_none().check("build_train_step", "clip_norm", self.clip_norm)
        REAL.or_none().check("build_train_step", "ema", self.ema)
        TEXTS.check("build_train_step", "metrics", self.metrics)
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise ConfigError(
                f"clip_norm is {self.clip_norm}; it must be positive, or None not to clip"
            )
        if self.ema is not None and not 0 <= self.ema < 1:
            raise ConfigError(
                f"ema is {self.ema}; it must be the decay of the average, at least 0 and below 1, "
                "such as 0.999, or None not to average"
            )
        check_kind("scaler", self.scaler, GradScaler, "such as GradScaler()")
        check_kind("deterministic", self.deterministic, bool, "True or False")
        check_kind("pad", self.pad, str, "the path of the leaf of the batch that weighs samples")
        check_kind("separable", self.separable, bool, "True or False")
        told = "arguments of the model's call by name, such as {'deterministic': True}"
        check_kind("eval_kwargs", self.eval_kwargs, Mapping, told)
        for name in self.metrics:
            if name not in METRICS:
                raise ConfigError(f"unknown metric {name!r}.{did_you_mean(name, METRICS)}")
