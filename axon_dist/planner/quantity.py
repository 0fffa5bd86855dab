"""Sizes and counts as people write them: `80GB`, `16GiB`, `7e9`, `175B`."""

from __future__ import annotations

import math
import re

from ..core.errors import ConfigError, did_you_mean

BYTE_UNITS: dict[str, int] = {
    "B": 1,
    **{f"{prefix}B": 1000**power for power, prefix in enumerate("KMGTP", start=1)},
    **{f"{prefix}iB": 1024**power for power, prefix in enumerate("KMGTP", start=1)},
}
"""Bytes per unit; GB is 10**9, GiB is 2**30."""

COUNT_UNITS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
"""How model sizes are spoken: 350M, 7B."""

_NUMBER = re.compile(r"\s*([0-9]*\.?[0-9]+(?:[eE][+-]?[0-9]+)?)\s*([A-Za-z]*)\s*")


def parse_bytes(text: str | float) -> int:
    """Reads a size in bytes.

    Args:
        text: a number with a unit such as `"80GB"` or `"16 GiB"`, or bytes as a number.

    Returns:
        Bytes.

    Raises:
        ConfigError: for something else, or a size that is not positive.

    Example:
        >>> parse_bytes("80GB"), parse_bytes("16GiB"), parse_bytes(1e9)
        (80000000000, 17179869184, 1000000000)
    """
    return _parse(text, BYTE_UNITS, "size in bytes", "80GB")


def parse_memory(text: str) -> int:
    """Reads the memory of a device, which has to have a unit.

    Args:
        text: such as `"80GB"` or `"80GiB"`.

    Returns:
        Bytes.

    Raises:
        ConfigError: for a number without a unit, or what `parse_bytes` refuses.

    Example:
        >>> parse_memory("80GiB")
        85899345920
    """
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
        ConfigError: for something else, or a number that is not positive.

    Example:
        >>> parse_count("7e9"), parse_count("350M"), parse_count("1.3B")
        (7000000000, 350000000, 1300000000)
    """
    return _parse(text, COUNT_UNITS, "number of parameters", "7e9 or 7B")


def _parse(text: str | float, units: dict[str, int], what: str, example: str) -> int:
    match = _NUMBER.fullmatch(str(text))
    if match is None:
        raise ConfigError(f"cannot read {text!r} as a {what}; write it as in {example}")
    number, unit = match.groups()
    unit = unit or next(iter(units))
    if unit not in units:
        raise ConfigError(f"unknown unit {unit!r} in {text!r}.{did_you_mean(unit, units)}")
    exact = float(number) * units[unit]
    if not math.isfinite(exact):
        raise ConfigError(f"got {text!r}, which is more than a {what} can be; write {example}")
    value = round(exact)
    if value < 1:
        raise ConfigError(f"got {text!r}; a {what} must be positive, as in {example}")
    return value
