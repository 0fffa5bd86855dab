"""The share of the data that is held out for validation."""

from __future__ import annotations

from collections.abc import Sequence

from axon_dist.core.errors import ConfigError

HELD_FRACTION = 0.1
"""What is held out where nothing is said."""


def held_fraction(fraction: float | None, validation_files: Sequence[str] = ()) -> float:
    """The share to hold out where no files are named for validation.

    Args:
        fraction: what `data.validation_fraction` says; None stands for a tenth.
        validation_files: what `data.validation_files` says.

    Raises:
        ConfigError: when the fraction is not one, or both are said.

    Example:
        >>> held_fraction(None)
        0.1
    """
    if fraction is None:
        return HELD_FRACTION
    if not 0.0 < fraction < 1.0:
        raise ConfigError(
            f"data.validation_fraction={fraction} must lie between 0 and 1, for example 0.1."
        )
    if validation_files:
        raise ConfigError(
            f"data.validation_fraction={fraction} and data.validation_files={validation_files} "
            "both say what validation reads: leave one of them out."
        )
    return fraction
