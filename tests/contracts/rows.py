"""Tables of tests, of which every run tries a part and a full run all."""

from collections.abc import Iterable

import pytest


def part(names: Iterable, always: Iterable) -> list:
    """The names of a table as parameters; those that are not always tried are of the full run."""
    always = list(always)
    return [
        pytest.param(name, marks=() if name in always else pytest.mark.full, id=None)
        for name in names
    ]


def and_full(always: Iterable[tuple], more: Iterable[tuple]) -> list:
    """Rows that are always tried, and rows of the full run."""
    return [*always, *(pytest.param(*row, marks=pytest.mark.full) for row in more)]
