"""The optimizers that a config can name, one dataclass each."""

from __future__ import annotations

import abc
import dataclasses
import functools
import re
from collections.abc import Callable
from types import MappingProxyType
from typing import Annotated, ClassVar, Literal, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from axon_dist.core.errors import ConfigError
from axon_dist.core.tree import leaves_with_paths
from axon_dist.core.typing import PyTree
from axon_dist.core.words import pattern_error
from axon_dist.optim import adamw_8bit, decayed, hidden_matrices, muon
from axon_dist.optim.wrappers import by_label

from .rates import RATES, Cosine, RateSchedule
from .read import Fraction, Natural, NonNegative, OneOf, Positive
from .user_code import UserCode


@dataclasses.dataclass(frozen=True, kw_only=True)
class Group:
    """Parameters that are trained differently; a parameter belongs to the first group that matches.

    Args:
        paths: regular expressions, searched for in paths such as `blocks/0/mlp/up/kernel`.
        rate: the multiplier of the learning rate.
        weight_decay: the weight decay of every parameter of the group; null for the optimizer's.
        frozen: do not train them: they have no gradient and no moments.
    """

    paths: tuple[str, ...]
    rate: Positive = 1.0
    weight_decay: NonNegative | None = None
    frozen: bool = False

    def validate(self) -> None:
        """Raises `ConfigError` for an invalid pattern, or a frozen group with training options."""
        for path in self.paths:
            if why := pattern_error(path):
                raise ConfigError(f"paths: {path!r:.80} {why}")
        if not self.paths:
            raise ConfigError(
                "paths is empty; write a regular expression, such as head", code="empty-group-paths"
            )
        if self.frozen and (self.rate != 1 or self.weight_decay is not None):
            raise ConfigError(
                "got frozen=true with rate or weight_decay, which apply to trained parameters; "
                "leave frozen out, or rate and weight_decay",
                code="frozen-group",
            )

    @property
    def label(self) -> str:
        """The name of the group in the state of the optimizer, and so in checkpoints."""
        return "|".join(f"(?:{path})" for path in self.paths)

    def has(self, path: str) -> bool:
        """Whether a pattern matches the path of a parameter."""
        return any(re.search(pattern, path) for pattern in self.paths)


Dtype: TypeAlias = Literal["float32", "bfloat16"]
Transform: TypeAlias = optax.GradientTransformation
Factory: TypeAlias = Callable[[], nnx.Module]
"""Makes a model."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Optimizer(abc.ABC):
    """The options of every optimizer.

    Args:
        learning_rate: the peak learning rate of the schedule.
        schedule: how the learning rate changes over the run.
        groups: parameters that are trained differently, or not at all.
        momentum_dtype: the dtype of the mean of gradients, `float32` or `bfloat16`; null for that
            of the parameters. The mean of squared gradients has the dtype of the parameters,
            because its updates are too small for bfloat16; with `eight_bit` it has eight bits.
    """

    learning_rate: Positive = 3e-4
    schedule: Annotated[RateSchedule, OneOf(RATES)] = Cosine()
    groups: tuple[Group, ...] = ()
    momentum_dtype: Dtype | None = None

    def validate(self) -> None:
        """Raises `ConfigError` for a group with weight decay if the optimizer has none."""
        decaying = [name for name, kind in OPTIMIZERS.items() if issubclass(kind, Decaying)]
        for number, group in enumerate(self.groups):
            if group.weight_decay is not None and not isinstance(self, Decaying):
                raise ConfigError(
                    f"groups[{number}].weight_decay: got {group.weight_decay}, but this optimizer "
                    f"has no weight decay; leave it out, or use {' or '.join(decaying)}",
                    code="no-weight-decay",
                )

    def build(self, num_steps: int, make_model: Factory | None = None) -> Transform:
        """Returns the optax transformation for a run of `num_steps` steps.

        Args:
            num_steps: the length of the run.
            make_model: makes the model, for an optimizer that treats layers differently.

        Raises:
            ConfigError: when the schedule does not fit the run, or a group has no parameter.

        Example:
            >>> adamw = AdamW(learning_rate=1e-3).build(num_steps=100)
            >>> adamw.init({"w": jnp.ones(2)})[0].count.shape
            ()
        """
        if self.groups and make_model is not None:
            with nnx.use_eager_sharding(False):
                model = nnx.eval_shape(make_model)
            params = nnx.to_pure_dict(nnx.state(model, nnx.Param))
            paths = [path for path, _ in leaves_with_paths(params)]
            for number, group in enumerate(self.groups):
                if not any(group.has(path) for path in paths):
                    raise ConfigError(
                        f"optimizer.groups[{number}].paths: no parameter of the model has "
                        f"{' or '.join(group.paths)} in its path; paths are, for example, "
                        f"{', '.join(paths[:: max(1, len(paths) // 4)][:5])}",
                        code="group-without-parameter",
                    )
        rate = self.schedule.build(self.learning_rate, num_steps)
        base = self.transform(rate, make_model)
        trained = [group for group in self.groups if not group.frozen]
        if not trained:
            return base
        # Of groups with the same paths the first counts, which is the last of the reversed ones.
        members = {g.label: self._member(g, num_steps)(make_model) for g in reversed(trained)}
        return by_label(
            members, base, lambda path: next((g.label for g in trained if g.has(path)), None)
        )

    def _member(self, group: Group, num_steps: int) -> Callable[..., Transform]:
        """Returns a function that maps `make_model` to the optimizer of a group."""
        peak = group.rate * self.learning_rate
        changes: dict[str, object] = {}
        if group.weight_decay is not None:
            changes = {"weight_decay": group.weight_decay, "decay": "all"}
        member = dataclasses.replace(self, **changes)
        return functools.partial(member.transform, self.schedule.build(peak, num_steps))

    def is_frozen(self, path: str) -> bool:
        """Whether the group of a parameter is frozen."""
        return next((group.frozen for group in self.groups if group.has(path)), False)

    def rates(self, num_steps: int) -> np.ndarray:
        """Returns the learning rate of every step of a run, `[num_steps]`.

        Example:
            >>> from axon_dist.train.config.rates import Linear
            >>> SGD(learning_rate=1.0, schedule=Linear(warmup_fraction=0.5)).rates(4).tolist()
            [0.0, 0.5, 1.0, 0.5]
        """
        rate = self.schedule.build(self.learning_rate, num_steps)
        return np.asarray(jnp.broadcast_to(jax.jit(rate)(jnp.arange(num_steps)), (num_steps,)))

    @abc.abstractmethod
    def transform(self, rate: optax.Schedule, make_model: Factory | None = None) -> Transform:
        """Returns the optax transformation with a learning-rate schedule."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Decaying(Optimizer):
    """An optimizer with decoupled weight decay.

    Args:
        weight_decay: the fraction of a parameter that a step with learning rate 1 subtracts.
        decay: which parameters decay: `matrices`, which excludes norms, biases, embeddings and
            positions; or `all`.
    """

    weight_decay: NonNegative = 0.1
    decay: Literal["matrices", "all"] = "matrices"

    @property
    def mask(self) -> Callable[[PyTree], PyTree] | None:
        """The optax mask of parameters with weight decay; None for all."""
        return None if self.decay == "all" else decayed


@dataclasses.dataclass(frozen=True, kw_only=True)
class Adam(Optimizer):
    """Adam (arXiv:1412.6980).

    Args:
        b1: decay of the mean of the gradients.
        b2: decay of the mean of their squares.
        eps: added to the square root of the mean of squares.
    """

    b1: Fraction = 0.9
    b2: Fraction = 0.999
    eps: Positive = 1e-8

    def transform(self, rate: optax.Schedule, make_model: Factory | None = None) -> Transform:
        """Returns `optax.adam`."""
        return optax.adam(rate, self.b1, self.b2, self.eps, mu_dtype=self.momentum_dtype)


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdamW(Decaying):
    """Adam with decoupled weight decay (arXiv:1711.05101); the default `b2` is for transformers.

    Args:
        b1: decay of the mean of the gradients.
        b2: decay of the mean of their squares.
        eps: added to the square root of the mean of squares.
        eight_bit: keep the moments of large parameters in 8 bits, a quarter of their memory in
            float32.
    """

    b1: Fraction = 0.9
    b2: Fraction = 0.95
    eps: Positive = 1e-8
    eight_bit: bool = False

    def validate(self) -> None:
        """Raises `ConfigError` if `eight_bit` and `momentum_dtype` are both set."""
        super().validate()
        if self.eight_bit and self.momentum_dtype is not None:
            raise ConfigError(
                f"got eight_bit=true and momentum_dtype={self.momentum_dtype}, which both set the "
                "dtype of the mean of gradients; leave one of them out",
                code="eight-bit-momentum",
            )

    def transform(self, rate: optax.Schedule, make_model: Factory | None = None) -> Transform:
        """Returns `optax.adamw`, or `adamw_8bit`."""
        if self.eight_bit:
            return adamw_8bit(rate, self.b1, self.b2, self.eps, self.weight_decay, self.mask)
        return optax.adamw(
            rate,
            b1=self.b1,
            b2=self.b2,
            eps=self.eps,
            mu_dtype=self.momentum_dtype,
            weight_decay=self.weight_decay,
            mask=self.mask,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lion(Decaying):
    """Lion, updates by the sign of a momentum (arXiv:2302.06675); use 1/3 to 1/10 of Adam's rate.

    Args:
        b1: the weight of the momentum in an update.
        b2: decay of the momentum.
    """

    b1: Fraction = 0.9
    b2: Fraction = 0.99

    def transform(self, rate: optax.Schedule, make_model: Factory | None = None) -> Transform:
        """Returns `optax.lion`."""
        return optax.lion(
            rate, self.b1, self.b2, self.momentum_dtype, self.weight_decay, mask=self.mask
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class SGD(Optimizer):
    """Stochastic gradient descent.

    Args:
        momentum: decay of the momentum; 0 for no momentum.
        nesterov: use Nesterov momentum.
    """

    momentum: Fraction = 0.0
    nesterov: bool = False

    def validate(self) -> None:
        """Raises `ConfigError` for options that need a momentum above 0."""
        super().validate()
        if self.nesterov and not self.momentum:
            raise ConfigError(
                "nesterov=true needs a momentum above 0, but got 0; set momentum",
                code="nesterov-without-momentum",
            )
        if self.momentum_dtype is not None and not self.momentum:
            raise ConfigError(
                f"momentum_dtype={self.momentum_dtype} needs a momentum above 0, but got 0; set "
                "momentum",
                code="dtype-without-momentum",
            )

    def transform(self, rate: optax.Schedule, make_model: Factory | None = None) -> Transform:
        """Returns `optax.sgd`."""
        return optax.sgd(rate, self.momentum or None, self.nesterov, self.momentum_dtype)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Muon(Decaying):
    """Muon for the matrices in a model's blocks, AdamW for the rest (arXiv:2502.16982).

    Args:
        momentum: decay of the momentum of matrices.
        nesterov: use Nesterov momentum.
        ns_steps: the number of Newton–Schulz iterations.
        rms: the root mean square of the updates of matrices; 0.2 is about that of AdamW, so that
            one learning rate suits both.
        b1: in AdamW, the decay of the mean of the gradients.
        b2: in AdamW, the decay of the mean of their squares.
    """

    momentum: Fraction = 0.95
    nesterov: bool = True
    ns_steps: Natural = 5
    rms: Positive = 0.2
    b1: Fraction = 0.9
    b2: Fraction = 0.95

    def transform(self, rate: optax.Schedule, make_model: Factory | None = None) -> Transform:
        """Returns `muon` for the hidden matrices of the model; without it, for every matrix."""
        return muon(
            rate,
            beta=self.momentum,
            nesterov=self.nesterov,
            ns_steps=self.ns_steps,
            consistent_rms=self.rms,
            weight_decay=self.weight_decay,
            weight_decay_mask=self.mask,
            mu_dtype=self.momentum_dtype,
            adam_weight_decay=self.weight_decay,
            adam_weight_decay_mask=self.mask,
            adam_b1=self.b1,
            adam_b2=self.b2,
            muon_weight_dimension_numbers=None
            if make_model is None
            else hidden_matrices(make_model),
        )


OPTIMIZERS: MappingProxyType[str, type[Optimizer]] = MappingProxyType(
    {"adamw": AdamW, "adam": Adam, "lion": Lion, "muon": Muon, "sgd": SGD}
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class OwnOptimizer(UserCode):
    """A user's optimizer: `optimizer: {factory: package.module:make, ...}`.

    The factory is called with the other keys of the section, and with `num_steps`, the length of
    the run, if it has this parameter. It returns an `optax.GradientTransformation`. Functions of
    optax work, as in `{factory: optax:adafactor, learning_rate: 0.001}`.
    """

    section: ClassVar[str] = "optimizer"
    offered: ClassVar[tuple[str, ...]] = ("num_steps",)

    def build(self, num_steps: int, make_model: Factory | None = None) -> Transform:
        """Calls the factory.

        Args:
            num_steps: the length of the run.
            make_model: not passed to the factory.

        Raises:
            ConfigError: when it does not return an `optax.GradientTransformation`.

        Example:
            >>> sgd = OwnOptimizer(path="optax:sgd", options={"learning_rate": 0.5})
            >>> float(sgd.build(10).update({"w": 1.0}, sgd.build(10).init({"w": 1.0}))[0]["w"])
            -0.5
        """
        made = self.call(num_steps=num_steps)
        if not isinstance(made, optax.GradientTransformation):
            raise self.returned(made, "an optax.GradientTransformation; return one")
        return made

    def rates(self, num_steps: int) -> None:
        """Returns None: the learning rate of a user's optimizer is unknown."""
