"""Formats numbers, bytes, times and lists for people."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Sequence

AUTO = "auto"
"""The value of an option that lets the library choose."""


def si(value: float, giga: str = "G") -> str:
    """Formats a number with an SI suffix; use `giga="B"` for parameter counts.

    Example:
        >>> si(987), si(12_345), si(3_456_789), si(7e9, giga="B"), si(1.2e15)
        ('987', '12.3k', '3.46M', '7B', '1.2P')
    """
    if not math.isfinite(value):
        return str(value)
    # 999.5 is shown as 1000, so it has the next suffix.
    for unit in ("", "k", "M", giga, "T", "P", "E", "Z"):
        if abs(value) < 999.5:
            return f"{value:.0f}" if not unit else f"{value:.3g}{unit}"
        value /= 1000
    return f"{value:.3g}Y" if abs(value) < 999.5 else f"{value:.0f}Y"


def printable(text: str) -> str:
    """Replaces control characters in untrusted text for a terminal; keeps newlines and tabs.

    Example:
        >>> printable("red: \\x1b[31m")
        'red: \\ufffd[31m'
    """
    allowed = (c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text)
    return "".join(allowed)


def pattern_error(pattern: str) -> str | None:
    """Why a regular expression is invalid or could take for ever to match, or None.

    Example:
        >>> pattern_error("blocks/.*/kernel"), pattern_error("(a+)+")
        (None, 'repeats a group with choices, which can take for ever on a near match')
    """
    try:
        re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        return f"is not a regular expression: {error}"
    # Drop escapes and character classes; a group without alternatives cannot backtrack.
    plain = re.sub(r"\\.|\[\^?\]?[^\]]*\]", "x", pattern)
    plain = re.sub(r"\((\?:)?[^()*+{|?]*\)", "x", plain)
    if re.search(r"\)[*+{]", plain):
        return "repeats a group with choices, which can take for ever on a near match"
    if len(re.findall(r"[*+{]", plain)) > _MOST_REPEATS:
        return f"has more than {_MOST_REPEATS} repetitions, which can take for ever to match"
    return None


_MOST_REPEATS = 6


def plural(count: int, one: str, many: str | None = None) -> str:
    """Formats a count with its noun.

    Example:
        >>> plural(1, "step"), plural(0, "step"), plural(3, "microbatch")
        ('1 step', '0 steps', '3 microbatches')
    """
    if count == 1:
        return f"{count} {one}"
    return f"{count} {many or one + ('es' if one.endswith(('ch', 's', 'x')) else 's')}"


def byte_size(value: float) -> str:
    """Formats a number of bytes, in powers of 1000.

    Example:
        >>> byte_size(987), byte_size(3_456_789), byte_size(2.5e18)
        ('987 B', '3.46 MB', '2.5 EB')
    """
    number = si(value)
    has_suffix = math.isfinite(value) and number[-1].isalpha()
    return f"{number[:-1]} {number[-1]}B" if has_suffix else f"{number} B"


def duration(seconds: float) -> str:
    """Formats a duration in microseconds, milliseconds, seconds, minutes or hours.

    Example:
        >>> duration(0.0834), duration(1.25), duration(75), duration(3675)
        ('83.4 ms', '1.25 s', '1:15 min', '1:01:15 h')
    """
    if seconds < 0:
        return f"-{duration(-seconds)}"
    # Each limit is the least number that is shown as 1000, or 60, of its unit.
    if seconds < 999.5e-6:
        return f"{seconds * 1e6:.0f} us"
    if seconds < 999.5e-3:
        return f"{seconds * 1e3:.3g} ms"
    if seconds < 59.95 or not math.isfinite(seconds):
        return f"{seconds:.3g} s"
    return f"{clock_time(seconds)} {'h' if round(seconds) >= 3600 else 'min'}"


def clock_time(seconds: float) -> str:
    """Formats a duration as hours, minutes and seconds.

    Example:
        >>> clock_time(75), clock_time(3675)
        ('1:15', '1:01:15')
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def first_few(texts: Sequence[str], most: int = 3, between: str = ", ", more: str = "") -> str:
    """Joins the first few texts and counts the rest.

    Args:
        texts: all texts.
        most: how many to show.
        between: the separator.
        more: a noun for the rest, after "more".

    Example:
        >>> first_few(["a", "b", "c", "d", "e"], between="; ")
        'a; b; c; and 2 more'
    """
    num_hidden = len(texts) - most
    rest = [f"and {num_hidden} more{more}"] if num_hidden > 0 else []
    return between.join([*texts[:most], *rest])


def ranges(numbers: Iterable[int], between: str = ",") -> str:
    """Formats ascending integers as ranges.

    Example:
        >>> ranges([0, 1, 2, 3, 6])
        '0-3,6'
    """
    # The number minus its position is the same within a run of consecutive numbers.
    by_run = itertools.groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])
    runs = [[number for _, number in run] for _, run in by_run]
    return between.join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
