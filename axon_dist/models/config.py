"""What the dataclasses of model sizes share: named presets, and checks of single values."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TypeVar

import jax.numpy as jnp

from axon_dist.core.errors import ConfigError, DTypeError, did_you_mean
from axon_dist.core.told import REAL, WHOLE
from axon_dist.core.tree import has_64_bits

_T = TypeVar("_T")

_MOST_SIZE, _MOST_LAYERS = 2**31 - 1, 10_000
_MOST_FLOAT = 3.4e38


def from_preset(
    cls: type[_T],
    presets: Mapping[str, Mapping[str, object]],
    name: str,
    changes: Mapping[str, object],
) -> _T:
    """Makes a config of a named size, some of its fields changed.

    Args:
        cls: a dataclass whose fields are the sizes.
        presets: values of its fields, by name.
        name: one of the names.
        changes: fields to set after the preset.

    Raises:
        ConfigError: there is no such preset or no such field.
    """
    if name not in presets:
        kind = cls.__name__.removesuffix("Config")
        raise ConfigError(f"no {kind} preset {name!r}.{did_you_mean(name, presets)}")
    check_fields(cls, changes)
    return cls(**{**presets[name], **changes})


def check_fields(cls: type, changes: Mapping[str, object]) -> None:
    """Raises `ConfigError` for a change of a field that a dataclass has not."""
    fields = [field.name for field in dataclasses.fields(cls)]
    for change in changes:
        if change not in fields:
            hint = did_you_mean(change, fields)
            raise ConfigError(f"{cls.__name__} has no field {change!r}.{hint}")


def check_at_least_one(config: object, fields: tuple[str, ...]) -> None:
    """Raises `ConfigError` unless every one of some fields or properties is 1 or more.

    Arrays count their elements in 32 bits along a dim; and each layer is a part of the program.
    """
    for field in fields:
        value, most = getattr(config, field), _MOST_LAYERS if field == "num_layers" else _MOST_SIZE
        WHOLE.check(type(config).__name__, field, value)
        if value < 1:
            raise ConfigError(f"{field}={value} must be at least 1; set it so.")
        if value > most:
            raise ConfigError(f"{field}={value} must be at most {most}; lower it.")


def check_above_zero(config: object, fields: tuple[str, ...]) -> None:
    """Raises `ConfigError` unless every one of some fields is above 0."""
    for field in fields:
        REAL.check(type(config).__name__, field, getattr(config, field))
        if not 0 < getattr(config, field) < _MOST_FLOAT:
            raise ConfigError(
                f"{field}={getattr(config, field)} must be above 0, and a number that float32 "
                "holds; set it so."
            )


def check_rate(config: object, field: str) -> None:
    """Raises `ConfigError` unless a field is a rate of dropout."""
    rate = getattr(config, field)
    REAL.check(type(config).__name__, field, rate)
    if not 0.0 <= rate < 1.0:
        raise ConfigError(f"{field}={rate} must lie in [0, 1); 0 turns it off.")


def check_float(config: object, field: str) -> None:
    """Raises `DTypeError` unless a field is None or names a floating-point dtype."""
    dtype = getattr(config, field)
    if dtype is None:
        return
    try:
        known = jnp.dtype(dtype)
    except TypeError as error:
        raise DTypeError(
            f"{field}={dtype!r} is not a dtype; write for example 'float32' or 'bfloat16'."
        ) from error
    if not jnp.issubdtype(known, jnp.floating):
        raise DTypeError(
            f"{field}={dtype!r} has no fractions: a model needs a floating-point dtype, "
            "for example 'float32' or 'bfloat16'."
        )
    if known.itemsize > 4 and not has_64_bits():
        raise DTypeError(
            f"{field}={dtype!r} is a dtype of which JAX keeps 32 bits; take 'float32', or set "
            "JAX_ENABLE_X64=1."
        )
