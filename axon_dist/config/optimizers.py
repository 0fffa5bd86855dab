"""The optimizers and learning-rate schedules that a config can name, a dataclass each."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable
from types import MappingProxyType
from typing import Annotated, ClassVar

import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from axon_dist.core.errors import ConfigError
from axon_dist.optim import hidden_matrices, muon

from .own import Own
from .read import Fraction, Natural, NonNegative, OneOf, Positive


@dataclasses.dataclass(frozen=True, kw_only=True)
class RateSchedule(abc.ABC):
    """How the learning rate moves over a run.

    Args:
        warmup_steps: steps of linear growth from 0 to the peak.
        warmup_fraction: the same as a share of the steps of the run; one of the two may be given.
    """

    warmup_steps: Natural = 0
    warmup_fraction: Fraction = 0.0

    def validate(self) -> None:
        """Raises `ConfigError` for a warmup that is said in both ways."""
        if self.warmup_steps and self.warmup_fraction:
            raise ConfigError(
                f"got warmup_steps={self.warmup_steps} and warmup_fraction={self.warmup_fraction}, "
                "which both say how long the warmup is; leave one of them out"
            )

    def build(self, peak: float, num_steps: int) -> optax.Schedule:
        """Returns `learning_rate(step)` for a run of some steps, warmup included.

        Raises:
            ConfigError: when the warmup is as long as the run.
        """
        steps = self.warmup_steps or round(self.warmup_fraction * num_steps)
        if steps >= num_steps:
            key = "warmup_steps" if self.warmup_steps else "warmup_fraction"
            raise ConfigError(
                f"{key}={getattr(self, key)} leaves nothing of a run of {num_steps} steps; "
                f"it must be smaller: lower optimizer.schedule.{key} or raise train.steps"
            )
        after = self.after_warmup(peak, num_steps - steps)
        if not steps:
            return after
        return optax.join_schedules([optax.linear_schedule(0.0, peak, steps), after], [steps])

    @abc.abstractmethod
    def after_warmup(self, peak: float, num_steps: int) -> optax.Schedule:
        """Returns the schedule of the steps that follow the warmup."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConstantRate(RateSchedule):
    """Stays at the peak."""

    def after_warmup(self, peak: float, num_steps: int) -> optax.Schedule:
        """Returns the peak, whatever the step."""
        return optax.constant_schedule(peak)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cosine(RateSchedule):
    """Falls along half a cosine (arXiv:1608.03983, without restarts).

    Args:
        final_fraction: what is left of the peak at the last step.
    """

    final_fraction: Fraction = 0.1

    def after_warmup(self, peak: float, num_steps: int) -> optax.Schedule:
        """Returns the half cosine from the peak to its final fraction."""
        return optax.cosine_decay_schedule(peak, num_steps, self.final_fraction)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Linear(RateSchedule):
    """Falls along a straight line.

    Args:
        final_fraction: what is left of the peak at the last step.
    """

    final_fraction: Fraction = 0.0

    def after_warmup(self, peak: float, num_steps: int) -> optax.Schedule:
        """Returns the line from the peak to its final fraction."""
        return optax.linear_schedule(peak, peak * self.final_fraction, num_steps)


SCHEDULES: MappingProxyType[str, type[RateSchedule]] = MappingProxyType(
    {"cosine": Cosine, "linear": Linear, "constant": ConstantRate}
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Optimizer(abc.ABC):
    """What every optimizer takes.

    Args:
        learning_rate: the peak of the schedule.
        schedule: how the rate moves over the run.
    """

    learning_rate: Positive = 3e-4
    schedule: Annotated[RateSchedule, OneOf(SCHEDULES)] = Cosine()

    def build(
        self, num_steps: int, make_model: Callable[[], nnx.Module] | None = None
    ) -> optax.GradientTransformation:
        """Returns the optax transformation for a run of some steps.

        Args:
            num_steps: of the run.
            make_model: makes the model, for an optimizer that tells its layers apart.

        Raises:
            ConfigError: when the schedule does not fit the run.

        Example:
            >>> AdamW(learning_rate=1e-3).build(num_steps=100).init({"w": 1.0})[0].count.shape
            ()
        """
        return self.transform(self.schedule.build(self.learning_rate, num_steps))

    def rates(self, num_steps: int) -> np.ndarray:
        """The learning rate of every step of a run, `[num_steps]`.

        Example:
            >>> SGD(learning_rate=1.0, schedule=Linear(warmup_fraction=0.5)).rates(4).tolist()
            [0.0, 0.5, 1.0, 0.5]
        """
        rate = self.schedule.build(self.learning_rate, num_steps)
        return np.asarray(jnp.broadcast_to(rate(jnp.arange(num_steps)), (num_steps,)))

    @abc.abstractmethod
    def transform(self, rate: optax.Schedule) -> optax.GradientTransformation:
        """Returns the optax transformation that follows a learning rate."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Adam(Optimizer):
    """Adam (arXiv:1412.6980).

    Args:
        b1: decay of the mean of the gradients.
        b2: decay of the mean of their squares.
        eps: added to the root of the latter.
    """

    b1: Fraction = 0.9
    b2: Fraction = 0.999
    eps: Positive = 1e-8

    def transform(self, rate: optax.Schedule) -> optax.GradientTransformation:
        """Returns `optax.adam`."""
        return optax.adam(rate, b1=self.b1, b2=self.b2, eps=self.eps)


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdamW(Optimizer):
    """Adam with decoupled weight decay (arXiv:1711.05101), its second decay as for transformers.

    Args:
        b1: decay of the mean of the gradients.
        b2: decay of the mean of their squares.
        eps: added to the root of the latter.
        weight_decay: the part of every parameter that a step at rate 1 takes away.
    """

    b1: Fraction = 0.9
    b2: Fraction = 0.95
    eps: Positive = 1e-8
    weight_decay: NonNegative = 0.1

    def transform(self, rate: optax.Schedule) -> optax.GradientTransformation:
        """Returns `optax.adamw`."""
        return optax.adamw(
            rate, b1=self.b1, b2=self.b2, eps=self.eps, weight_decay=self.weight_decay
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lion(Optimizer):
    """Lion, the sign of a momentum (arXiv:2302.06675); its rate is 3 to 10 times below Adam's.

    Args:
        b1: how much of the step comes from the momentum.
        b2: decay of the momentum.
        weight_decay: the part of every parameter that a step at rate 1 takes away.
    """

    b1: Fraction = 0.9
    b2: Fraction = 0.99
    weight_decay: NonNegative = 0.1

    def transform(self, rate: optax.Schedule) -> optax.GradientTransformation:
        """Returns `optax.lion`."""
        return optax.lion(rate, b1=self.b1, b2=self.b2, weight_decay=self.weight_decay)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SGD(Optimizer):
    """Stochastic gradient descent.

    Args:
        momentum: decay of the velocity; 0 keeps none.
        nesterov: looks one step ahead along the velocity.
    """

    momentum: Fraction = 0.0
    nesterov: bool = False

    def validate(self) -> None:
        """Raises `ConfigError` for Nesterov's look ahead without a velocity to look along."""
        if self.nesterov and not self.momentum:
            raise ConfigError("nesterov=true needs a momentum above 0 and got 0; set momentum")

    def transform(self, rate: optax.Schedule) -> optax.GradientTransformation:
        """Returns `optax.sgd`."""
        return optax.sgd(rate, momentum=self.momentum or None, nesterov=self.nesterov)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Muon(Optimizer):
    """Muon for the matrices in the blocks of a model, AdamW for all else (arXiv:2502.16982).

    Args:
        momentum: decay of the momentum of matrices.
        nesterov: looks one step ahead along the momentum.
        ns_steps: iterations of Newton–Schulz.
        rms: updates of matrices have this root mean square, as those of AdamW have about 0.2, so
            that one learning rate fits both.
        weight_decay: the part of every parameter that a step at rate 1 takes away.
        b1: of AdamW: decay of the mean of the gradients.
        b2: of AdamW: decay of the mean of their squares.
    """

    momentum: Fraction = 0.95
    nesterov: bool = True
    ns_steps: Natural = 5
    rms: Positive = 0.2
    weight_decay: NonNegative = 0.1
    b1: Fraction = 0.9
    b2: Fraction = 0.95

    def build(
        self, num_steps: int, make_model: Callable[[], nnx.Module] | None = None
    ) -> optax.GradientTransformation:
        """Returns `muon` for the hidden matrices of the model."""
        rate = self.schedule.build(self.learning_rate, num_steps)
        return self._muon(rate, None if make_model is None else hidden_matrices(make_model))

    def transform(self, rate: optax.Schedule) -> optax.GradientTransformation:
        """Returns `muon` for every matrix."""
        return self._muon(rate, None)

    def _muon(self, rate: optax.Schedule, matrices: object) -> optax.GradientTransformation:
        return muon(
            rate,
            beta=self.momentum,
            nesterov=self.nesterov,
            ns_steps=self.ns_steps,
            consistent_rms=self.rms,
            weight_decay=self.weight_decay,
            adam_weight_decay=self.weight_decay,
            adam_b1=self.b1,
            adam_b2=self.b2,
            muon_weight_dimension_numbers=matrices,
        )


OPTIMIZERS: MappingProxyType[str, type[Optimizer]] = MappingProxyType(
    {"adamw": AdamW, "adam": Adam, "lion": Lion, "muon": Muon, "sgd": SGD}
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class OwnOptimizer(Own):
    """An optimizer of the user's own: `optimizer: {factory: package.module:make, ...}`.

    The factory is called with the keys beside it, and with `num_steps`, the length of the run,
    where it takes that; it returns an `optax.GradientTransformation`. Those of optax can be named
    too, as in `{factory: optax:adafactor, learning_rate: 0.001}`.
    """

    section: ClassVar[str] = "optimizer"
    offered: ClassVar[tuple[str, ...]] = ("num_steps",)

    def build(
        self, num_steps: int, make_model: Callable[[], nnx.Module] | None = None
    ) -> optax.GradientTransformation:
        """Calls the factory.

        Args:
            num_steps: of the run.
            make_model: makes the model, which such a factory does not see.

        Raises:
            ConfigError: when it returns something else.

        Example:
            >>> own = OwnOptimizer(path="optax:sgd", options={"learning_rate": 0.5})
            >>> float(own.build(10).update({"w": 1.0}, own.build(10).init({"w": 1.0}))[0]["w"])
            -0.5
        """
        made = self.call(num_steps=num_steps)
        if not isinstance(made, optax.GradientTransformation):
            raise ConfigError(
                f"optimizer.factory: {self.path} returns a {type(made).__name__}, which must be "
                "an optax.GradientTransformation; return one"
            )
        return made

    def rates(self, num_steps: int) -> None:
        """Nothing is known of its learning rate."""
