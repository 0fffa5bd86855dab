"""A log of what a sweep has tried, so that one that was cut off goes on."""

from __future__ import annotations

from pathlib import Path

GOOD = "no harm"


def as_line(problem: str | None) -> str:
    """The result of a cell, in one line."""
    return " / ".join((problem or GOOD).splitlines())


def done_in(log: Path | None) -> dict[str, str]:
    """By its name each cell of a log, and what it came to."""
    lines = log.read_text().splitlines() if log is not None and log.exists() else []
    # A line that was cut off has no end; its cell is tried again.
    return dict(line[:-1].split(": ", 1) for line in lines if ": " in line and line[-1] == ".")


def note_in(log: Path | None, cell: str, came_to: str) -> None:
    """Writes a line."""
    if log is not None:
        with open(log, "a") as file:
            file.write(f"{cell}: {came_to}.\n")
