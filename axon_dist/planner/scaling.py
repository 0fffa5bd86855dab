"""Rules of thumb for scaling to more devices, and for choosing a first parallelism.

Also parses numbers as people write them: `80GB`, `16GiB`, `7e9`, `175B`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from types import MappingProxyType
from typing import Any

from ..core.arguments import COUNT, REAL, TEXT, ArgumentKind, checked, whole
from ..core.errors import ConfigError, NamedChoice, did_you_mean
from ..mesh.chips import HARDWARE

LR_RULES: MappingProxyType[str, Callable[[float], float]] = MappingProxyType(
    {"linear": lambda ratio: ratio, "sqrt": math.sqrt, "none": lambda ratio: 1.0}
)
"""The factor of the learning rate, given the factor of the batch."""


def _fits_a_float(value: Any) -> bool:
    try:
        return float(value) > 0
    except OverflowError:  # A whole number or a fraction that no float can hold.
        return False


# A tracer (it has an `aval`) is tested too: its truth value is unknown, and so JAX's error shows.
POSITIVE = ArgumentKind(
    "a number above 0, which a float can hold",
    lambda x: x > 0 if hasattr(x, "aval") else REAL.holds(x) and _fits_a_float(x),
)
MANY = whole(", at least 1 and at most 10^18", 1, 10**18)


@checked(local=COUNT, dp=COUNT, accum=COUNT)
def effective_batch(local: int, dp: int, accum: int = 1) -> int:
    """Returns the samples per step: those of a microbatch, times ranks, times microbatches.

    Args:
        local: samples per microbatch on a rank.
        dp: data-parallel ranks.
        accum: microbatches that a step accumulates.

    Raises:
        ConfigError: for a number below 1.

    Example:
        >>> effective_batch(8, 32), effective_batch(4, 2, accum=4)
        (256, 32)
    """
    return local * dp * accum


@checked(base=POSITIVE, batch=MANY, base_batch=MANY)
def scale_lr(base: float, batch: int, base_batch: int, rule: str = "linear") -> float:
    """Returns the learning rate for another batch size.

    Args:
        base: the rate that was tuned.
        batch: the new samples per step.
        base_batch: the samples per step for which it was tuned.
        rule: `linear` for SGD, `sqrt` for Adam, or `none`.

    Returns:
        The rate.

    Raises:
        ConfigError: for an unknown rule or numbers that are not positive.

    Example:
        >>> scale_lr(0.1, batch=8192, base_batch=256), scale_lr(1e-3, 64, 16, "sqrt")
        (3.2, 0.002)

    Source: Goyal et al., arXiv:1706.02677 (linear); Malladi et al., arXiv:2205.10287 (sqrt).
    """
    if rule not in LR_RULES:
        raise ConfigError(f"unknown learning-rate rule {rule!r:.80}.{did_you_mean(rule, LR_RULES)}")
    return base * LR_RULES[rule](batch / base_batch)


@checked(t1=POSITIVE, tn=POSITIVE, n=MANY)
def scaling_efficiency(t1: float, tn: float, n: int) -> float:
    """Returns the share of n-fold speed that n devices reach on the same work, `t1/(n tn)`.

    Args:
        t1: seconds on one device.
        tn: seconds on n devices.
        n: devices.

    Returns:
        1 for perfect scaling.

    Raises:
        ConfigError: for numbers that are not positive.

    Example:
        >>> scaling_efficiency(8.0, 1.25, 8)
        0.8
    """
    return t1 / (n * tn)


FAST = 100e9
"""The bytes/s per device from which layers can be gathered while others compute."""


class Direction(NamedChoice):
    """The parallelism to start from."""

    DATA = "data"
    PIPELINE = "pipeline"
    FSDP = "fsdp"
    TENSOR = "tensor"


@checked(interconnect=ArgumentKind("bytes/s, above 0", lambda x: REAL.holds(x) and x > 0))
def decide(
    fits: bool, sequential: bool = False, interconnect: float = HARDWARE["h100"].link
) -> Direction:
    """Returns the parallelism to start from.

    A model that fits is replicated. One that does not fit is cut into stages if it is a sequence of
    layers. Otherwise it is sharded if the links are fast, and its layers are split within a node if
    they are not. `axon plan` estimates the costs instead.

    Args:
        fits: whether the training state (16 bytes per parameter with Adam in float32) and the
            activations fit on one device.
        sequential: whether the model is a chain of similar layers.
        interconnect: bytes/s that a device sends to others; by default an H100's inside its node.

    Returns:
        The direction.

    Raises:
        ConfigError: for an interconnect that is not positive.

    Example:
        >>> decide(fits=True).value, decide(fits=False, sequential=True).value
        ('data', 'pipeline')
        >>> decide(fits=False).value
        'fsdp'
    """
    if fits:
        return Direction.DATA
    if sequential:
        return Direction.PIPELINE
    return Direction.FSDP if interconnect >= FAST else Direction.TENSOR


BYTE_UNITS: dict[str, int] = {
    "B": 1,
    **{f"{prefix}B": 1000**power for power, prefix in enumerate("KMGTP", start=1)},
    **{f"{prefix}iB": 1024**power for power, prefix in enumerate("KMGTP", start=1)},
}
"""Bytes per unit; GB is 10**9, GiB is 2**30."""

COUNT_UNITS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
"""The suffixes of model sizes, as in 350M or 7B."""

_NUMBER = re.compile(r"\s*([0-9]*\.?[0-9]+(?:[eE][+-]?[0-9]+)?)\s*([A-Za-z]*)\s*")


def parse_bytes(text: str | float) -> int:
    """Reads a size in bytes.

    Args:
        text: a number with a unit such as `"80GB"` or `"16 GiB"`, or bytes as a number.

    Returns:
        Bytes.

    Raises:
        ConfigError: for any other text, or a size that is not positive.

    Example:
        >>> parse_bytes("80GB"), parse_bytes("16GiB"), parse_bytes(1e9)
        (80000000000, 17179869184, 1000000000)
    """
    return _parse(text, BYTE_UNITS, "size in bytes", "80GB")


def parse_memory(text: str) -> int:
    """Reads the memory of a device, which must have a unit.

    Args:
        text: such as `"80GB"` or `"80GiB"`.

    Returns:
        Bytes.

    Raises:
        ConfigError: for a number without a unit, or text that `parse_bytes` refuses.

    Example:
        >>> parse_memory("80GiB")
        85899345920
    """
    TEXT.check("parse_memory", "text", text)
    match = _NUMBER.fullmatch(text)
    if match is not None and not match.group(2):
        raise ConfigError(
            f"got a memory of {text!r} without a unit, which could be bytes or gigabytes; write "
            f"{text.strip()}GB (10**9 bytes) or {text.strip()}GiB (2**30 bytes)"
        )
    return parse_bytes(text)


def parse_count(text: str | float) -> int:
    """Reads a number of parameters.

    Args:
        text: such as `"7e9"` or `"7B"`, or a number.

    Returns:
        The number.

    Raises:
        ConfigError: for any other text, or a number that is not positive.

    Example:
        >>> parse_count("7e9"), parse_count("350M"), parse_count("1.3B")
        (7000000000, 350000000, 1300000000)
    """
    return _parse(text, COUNT_UNITS, "number of parameters", "7e9 or 7B")


def _parse(text: str | float, units: dict[str, int], what: str, example: str) -> int:
    match = _NUMBER.fullmatch(str(text))
    if match is None:
        raise ConfigError(f"cannot read {text!r:.80} as a {what}; write it as in {example}")
    number, unit = match.groups()
    unit = unit or next(iter(units))
    if unit not in units:
        raise ConfigError(f"unknown unit {unit!r:.80} in {text!r:.80}.{did_you_mean(unit, units)}")
    exact = float(number) * units[unit]
    if not math.isfinite(exact):
        raise ConfigError(f"got {text!r:.80}, which is more than a {what} can be; write {example}")
    value = round(exact)
    if value < 1:
        raise ConfigError(f"got {text!r:.80}; a {what} must be positive, as in {example}")
    return value
