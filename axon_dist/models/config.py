"""Shared parts of the model configs: named presets, checks of values, and `ExpertConfig`."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping
from types import MappingProxyType
from typing import Any, ClassVar, Self

import jax.numpy as jnp
from flax import nnx

from axon_dist.core.checks import REAL, WHOLE, instance_of, is_dtype
from axon_dist.core.errors import ConfigError, DTypeError, did_you_mean
from axon_dist.core.tree import has_64_bits
from axon_dist.core.typing import Array

_MOST_SIZE = 2**31 - 1
MOST_LAYERS = 10_000
_LEAST_FLOAT = 1.2e-38
_MOST_FLOAT = 3.4e38


ACTIVATIONS: MappingProxyType[str, Callable[[Array], Array]] = MappingProxyType(
    {
        "gelu": nnx.gelu,
        "gelu_exact": functools.partial(nnx.gelu, approximate=False),
        "relu": nnx.relu,
        "silu": nnx.silu,
        "tanh": nnx.tanh,
    }
)
"""Activation functions; `gelu` is the tanh approximation, `gelu_exact` uses erf."""


class Presets:
    """The base class of config dataclasses with named presets.

    Attributes:
        presets: the field values of each preset, by its name.
    """

    presets: ClassVar[Mapping[str, Mapping[str, object]]]

    @classmethod
    def preset(cls, name: str, **changes: object) -> Self:
        """Returns a named size, with some of its fields changed.

        Args:
            name: a key of `presets`.
            **changes: fields to set after the preset.

        Raises:
            ConfigError: there is no such preset or no such field.
        """
        if name not in cls.presets:
            kind = cls.__name__.removesuffix("Config")
            raise ConfigError(f"no {kind} preset {name!r}.{did_you_mean(name, cls.presets)}")
        check_fields(cls, changes)
        return cls(**{**cls.presets[name], **changes})


def numerics(config: Any) -> dict[str, Any]:
    """Returns the dtypes of a config, as keyword arguments for Flax layers."""
    return {
        "dtype": config.dtype and jnp.dtype(config.dtype),
        "param_dtype": jnp.dtype(config.param_dtype),
    }


def check_fields(cls: type, changes: Mapping[str, object]) -> None:
    """Raises `ConfigError` if `changes` name a field that the dataclass lacks."""
    fields = [field.name for field in dataclasses.fields(cls)]
    for change in changes:
        if change not in fields:
            hint = did_you_mean(change, fields)
            raise ConfigError(f"{cls.__name__} has no field {change!r}.{hint}")


def check_at_least_one(config: object, fields: tuple[str, ...]) -> None:
    """Raises `ConfigError` unless each of these fields or properties is 1 or more.

    There are upper bounds, too: a dim has at most 2^31 - 1 elements, and each layer adds to the
    program.
    """
    for field in fields:
        value = getattr(config, field)
        most = MOST_LAYERS if field == "num_layers" else _MOST_SIZE
        WHOLE.check(type(config).__name__, field, value)
        if value < 1:
            raise ConfigError(f"{field}={value} must be at least 1; raise it.", code="below-one")
        if value > most:
            raise ConfigError(f"{field}={value} must be at most {most}; lower it.")


def check_above_zero(config: object, fields: tuple[str, ...]) -> None:
    """Raises `ConfigError` unless each of these fields is above 0."""
    for field in fields:
        REAL.check(type(config).__name__, field, getattr(config, field))
        if not _LEAST_FLOAT < getattr(config, field) < _MOST_FLOAT:
            raise ConfigError(
                f"{field}={getattr(config, field)} must be above 0 and representable in float32; "
                "change it.",
                code="not-above-zero",
            )


def check_choice(field: str, name: str, known: Collection[str], what: str) -> None:
    """Raises `ConfigError` unless the value of a field is one of the known names."""
    if name not in known:
        raise ConfigError(f"{field}={name!r:.80} is not {what}.{did_you_mean(name, known)}")


def check_flags(config: Any) -> None:
    """Raises `ConfigError` unless every field with a boolean default is a boolean."""
    for field in dataclasses.fields(config):
        if isinstance(field.default, bool):
            _FLAG.check(type(config).__name__, field.name, getattr(config, field.name))


_FLAG = instance_of(bool, "True or False")


def check_rate(config: object, field: str) -> None:
    """Raises `ConfigError` unless a field is a valid dropout rate."""
    rate = getattr(config, field)
    REAL.check(type(config).__name__, field, rate)
    if not 0.0 <= rate < 1.0:
        raise ConfigError(
            f"{field}={rate} must be in [0, 1); 0 turns it off.", code="dropout-range"
        )


def check_floats(config: object) -> None:
    """Raises `DTypeError` unless each dtype of a config is floating-point or None."""
    for field in ("param_dtype", "dtype"):
        if getattr(config, field) is not None:
            _check_float(field, getattr(config, field))


def _check_float(field: str, dtype: Any) -> None:
    if not is_dtype(dtype, jnp.generic):
        raise DTypeError(
            f"{field}={dtype!r:.80} is not a dtype; write for example 'float32' or 'bfloat16'."
        )
    if not is_dtype(dtype, jnp.floating):
        raise DTypeError(
            f"{field}={dtype!r:.80} must be a floating-point dtype, for example 'float32' or "
            "'bfloat16'.",
            code="dtype-not-float",
        )
    if jnp.dtype(dtype).itemsize > 4 and not has_64_bits():
        raise DTypeError(
            f"{field}={dtype!r:.80} is truncated to 32 bits by JAX; use 'float32', or set "
            "JAX_ENABLE_X64=1.",
            code="dtype-needs-x64",
        )


BALANCE = ("batch", "sequence")
"""The scopes over which the balance term counts the tokens of each expert."""


@dataclasses.dataclass(frozen=True)
class ExpertConfig:
    """The feed-forward of every block as a mixture of experts.

    A router gives each token a probability for every expert, `p = softmax(x W)`. The `per_token`
    most probable experts are chosen; their output is `sum g_e expert_e(x)`. The gates `g` are the
    probabilities, by default divided by their sum if there are several.

    Args:
        count: the number of experts, E.
        per_token: the number of experts that a token goes to, k.
        width: hidden size of one expert; None for that of the config's feed-forward.
        shared: the number of shared experts, which every token goes to. They are computed as one
            feed-forward of `shared` times the width (DeepSeekMoE, arXiv:2401.06066); 0 for none.
        balance: the weight of the load-balancing term `E sum_e f_e P_e`, with the share f_e of
            assignments that expert e gets and its mean probability P_e (Switch Transformers,
            arXiv:2101.03961, equation 4). The term is 1 if all experts get equally many tokens. 0
            leaves it out.
        balance_per: `"batch"` counts over all tokens of a (micro)batch, on all devices, and
            therefore couples its samples: with K microbatches, the term is the mean of K terms.
            `"sequence"` counts within each sequence and takes the mean, which does not depend on
            how a batch is split (DeepSeek-V3, arXiv:2412.19437, equation 17).
        z_loss: the weight of `mean(logsumexp(x W)^2)`, which keeps the router's logits small
            (ST-MoE, arXiv:2202.08906, equation 5). 0 leaves it out.
        normalize: divide the gates by their sum if a token goes to several experts.
        bias_rate: the step by which a bias of each expert changes after each (micro)batch: up if
            the expert got fewer tokens than the mean, else down. The bias affects only the choice
            of experts, not the gates, and has no gradient (DeepSeek-V3, section 2.1.2). It is a
            buffer of the model. 0 leaves it out.

    Example:
        >>> ExpertConfig(count=64, per_token=6, shared=2).validate()
    """

    count: int = 8
    per_token: int = 2
    width: int | None = None
    shared: int = 0
    balance: float = 0.01
    balance_per: str = "batch"
    z_loss: float = 0.0
    normalize: bool = True
    bias_rate: float = 0.0

    @property
    def divides_gates(self) -> bool:
        """Whether gates are divided by their sum; a single gate never is."""
        return self.normalize and self.per_token > 1

    def validate(self) -> None:
        """Checks that the values are consistent.

        Raises:
            ConfigError: a number is out of range, or a name is unknown.
        """
        given = () if self.width is None else ("width",)
        check_at_least_one(self, ("count", "per_token", *given))
        check_flags(self)
        if self.per_token > self.count:
            raise ConfigError(
                f"experts.per_token={self.per_token} is more than experts.count={self.count}, but "
                "a token goes to distinct experts; lower per_token or raise count.",
                code="too-many-experts-per-token",
            )
        for field in ("shared", "balance", "z_loss", "bias_rate"):
            if not 0 <= getattr(self, field) < _MOST_FLOAT:
                raise ConfigError(
                    f"experts.{field}={getattr(self, field)} must be 0 or more and representable "
                    "in float32; change it.",
                    code="expert-option-range",
                )
        check_choice("experts.balance_per", self.balance_per, BALANCE, "known")
