"""When this process began, which is before Python can look at a clock."""

from __future__ import annotations

import contextlib
import os
import time

_IMPORTED, _USED = time.perf_counter(), time.process_time()

LONGEST = 5.0
"""Seconds that Python may take until this module is imported, over those that it computes."""


def process_began() -> float:
    """The reading of `time.perf_counter` at the start of this process.

    Linux says when a process was made. A shell may have waited in it before it became Python by
    `exec`: an earlier time than can be is left out, and the CPU-seconds used so far are taken, as
    they are where the system does not say.

    Example:
        >>> process_began() < time.perf_counter()
        True
    """
    with contextlib.suppress(OSError, AttributeError, ValueError, IndexError):
        age = _age()
        before = age - (time.perf_counter() - _IMPORTED)
        if 0 <= before <= _USED + LONGEST:
            return _IMPORTED - before
    return _IMPORTED - _USED


def _age() -> float:
    """The seconds since this process was made, as Linux counts them."""
    with open("/proc/self/stat") as file:
        # The name of the program, in parentheses, may have blanks.
        fields = file.read().rpartition(")")[2].split()
    made = int(fields[19]) / os.sysconf("SC_CLK_TCK")
    return time.clock_gettime(time.CLOCK_BOOTTIME) - made
