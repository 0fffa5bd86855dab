"""The learning-rate schedules that a config can name, one dataclass each."""

from __future__ import annotations

import abc
import dataclasses
from types import MappingProxyType

import jax.numpy as jnp
import optax

from axon_dist.core.errors import ConfigError

from .read import Count, Fraction, Natural


@dataclasses.dataclass(frozen=True, kw_only=True)
class RateSchedule(abc.ABC):
    """How the learning rate changes over a run.

    Args:
        warmup_steps: steps of linear growth from 0 to the peak.
        warmup_fraction: the same as a fraction of the run's steps; set at most one of the two.
    """

    warmup_steps: Natural = 0
    warmup_fraction: Fraction = 0.0

    def validate(self) -> None:
        """Raises `ConfigError` if both `warmup_steps` and `warmup_fraction` are set."""
        if self.warmup_steps and self.warmup_fraction:
            raise ConfigError(
                f"got warmup_steps={self.warmup_steps} and warmup_fraction={self.warmup_fraction}, "
                "which both set the length of the warmup; leave one of them out",
                code="two-warmups",
            )

    def build(self, peak: float, num_steps: int) -> optax.Schedule:
        """Returns `learning_rate(step)` for a run of `num_steps` steps, including the warmup.

        Raises:
            ConfigError: when the warmup is as long as the run.
        """
        steps = self.warmup_steps or round(self.warmup_fraction * num_steps)
        if steps >= num_steps:
            key = "warmup_steps" if self.warmup_steps else "warmup_fraction"
            raise ConfigError(
                f"{key}={getattr(self, key)} leaves no step of a run of {num_steps} steps after "
                f"the warmup: lower optimizer.schedule.{key} or raise train.steps",
                code="warmup-too-long",
            )
        after = self.after_warmup(peak, num_steps - steps, steps)
        if not steps:
            return after
        return optax.join_schedules([optax.linear_schedule(0.0, peak, steps), after], [steps])

    @abc.abstractmethod
    def after_warmup(self, peak: float, num_steps: int, warmup: int) -> optax.Schedule:
        """Returns the schedule of the steps after the warmup."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConstantRate(RateSchedule):
    """Stays at the peak."""

    def after_warmup(self, peak: float, num_steps: int, warmup: int) -> optax.Schedule:
        """Returns the constant schedule."""
        return optax.constant_schedule(peak)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cosine(RateSchedule):
    """Decays along half a cosine (arXiv:1608.03983, without restarts).

    Args:
        final_fraction: the rate after the last step, as a fraction of the peak. The last step has
            the rate before that, as in optax.
    """

    final_fraction: Fraction = 0.1

    def after_warmup(self, peak: float, num_steps: int, warmup: int) -> optax.Schedule:
        """Returns the half cosine from the peak to its final fraction."""
        return optax.cosine_decay_schedule(peak, num_steps, self.final_fraction)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Linear(RateSchedule):
    """Decays linearly.

    Args:
        final_fraction: the rate after the last step, as a fraction of the peak. The last step has
            the rate before that, as in optax.
    """

    final_fraction: Fraction = 0.0

    def after_warmup(self, peak: float, num_steps: int, warmup: int) -> optax.Schedule:
        """Returns the line from the peak to its final fraction."""
        return optax.linear_schedule(peak, peak * self.final_fraction, num_steps)


@dataclasses.dataclass(frozen=True, kw_only=True)
class WarmupStableDecay(RateSchedule):
    """Stays at the peak, and decays linearly at the end (arXiv:2404.06395).

    Args:
        decay_fraction: the fraction of the run's steps over which the rate decays.
        final_fraction: the rate after the last step, as a fraction of the peak. The last step has
            the rate before that, as in optax.
    """

    decay_fraction: Fraction = 0.2
    final_fraction: Fraction = 0.0

    def decay_steps(self, num_steps: int) -> int:
        """Returns the number of steps of the decay; the first of them still has the peak.

        Example:
            >>> WarmupStableDecay().decay_steps(100), WarmupStableDecay().decay_steps(4)
            (20, 1)
        """
        return round(self.decay_fraction * num_steps)

    def after_warmup(self, peak: float, num_steps: int, warmup: int) -> optax.Schedule:
        """Returns the peak, and the line from there to its final fraction.

        Raises:
            ConfigError: when warmup and decay are longer than the run.
        """
        decay = self.decay_steps(num_steps + warmup)
        if decay > num_steps:
            raise ConfigError(
                f"decay_fraction={self.decay_fraction} is {decay} steps, but the run has only "
                f"{num_steps} after the warmup; lower optimizer.schedule.decay_fraction or the "
                "warmup",
                code="decay-too-long",
            )
        return optax.linear_schedule(
            peak, peak * self.final_fraction, decay, transition_begin=num_steps - decay
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class InverseSquareRoot(RateSchedule):
    """Decays as one over the square root of the step (arXiv:1706.03762).

    Args:
        timescale: the number of steps after the warmup in which the rate decays to 0.71 of the
            peak; the length of the warmup gives the schedule of the paper.
    """

    timescale: Count = 1000

    def after_warmup(self, peak: float, num_steps: int, warmup: int) -> optax.Schedule:
        """Returns `peak sqrt(timescale / (timescale + step))`."""
        scale = self.timescale
        return lambda step: peak * jnp.sqrt(scale / (scale + jnp.maximum(step, 0)))


RATES: MappingProxyType[str, type[RateSchedule]] = MappingProxyType(
    {
        "cosine": Cosine,
        "linear": Linear,
        "constant": ConstantRate,
        "wsd": WarmupStableDecay,
        "inverse_sqrt": InverseSquareRoot,
    }
)
"""The learning-rate schedules, by name; pipeline schedules are in `schedule.SCHEDULES`."""
