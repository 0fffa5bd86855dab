"""The start time of this process, which is before Python can read a clock."""

from __future__ import annotations

import contextlib
import os
import time

_IMPORTED = time.perf_counter()
_USED = time.process_time()

LONGEST = 5.0
"""The most seconds between process start and this import, beyond the CPU time used."""


def process_began() -> float:
    """The reading of `time.perf_counter` at the moment this process started.

    Linux reports when a process was created. But a shell may have waited in the process before it
    became Python by `exec`, so an implausibly early time is rejected. Then, and on other systems,
    the CPU time used so far serves as an estimate.

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
    """The seconds since this process was created, according to Linux."""
    with open("/proc/self/stat") as file:
        # The program name, in parentheses, may contain spaces.
        fields = file.read().rpartition(")")[2].split()
    created = int(fields[19]) / os.sysconf("SC_CLK_TCK")
    return time.clock_gettime(time.CLOCK_BOOTTIME) - created
