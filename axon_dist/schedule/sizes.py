"""The checks that all builders share."""

from __future__ import annotations

import operator
from typing import SupportsIndex

from ..core.errors import ScheduleError


def check_sizes(**sizes: SupportsIndex) -> None:
    """Refuses a number of stages, microbatches or chunks below 1.

    Args:
        **sizes: the numbers, by their names in the message.

    Raises:
        ScheduleError: a number is not a positive integer.

    Example:
        >>> check_sizes(num_stages=4, num_microbatches=8)
    """
    for name, size in sizes.items():
        if isinstance(size, bool) or not _is_whole(size) or operator.index(size) < 1:
            raise ScheduleError(f"got {name}={size!r}. It must be an integer of at least 1.")


def _is_whole(size: SupportsIndex) -> bool:
    """Whether it is an integer, of NumPy too."""
    try:
        operator.index(size)
    except TypeError:
        return False
    return True
