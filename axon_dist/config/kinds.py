"""What a config value may be, beyond its Python type: bounded, one of several, or parsed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Annotated, Any, TypeAlias

from .own import Own


@dataclasses.dataclass(frozen=True)
class Bound:
    """A condition on a number, put beside its type with `Annotated`.

    Args:
        text: the condition in words, to follow "must be".
        holds: tells whether a value meets it.

    Example:
        >>> Bound("at least 1", lambda value: value >= 1).holds(0)
        False
    """

    text: str
    holds: Callable[[Any], bool]


# Python 3.11 takes the hash of what stands in an optional annotation, and tables have none.
@dataclasses.dataclass(frozen=True, eq=False)
class OneOf:
    """A section that is one of several dataclasses; a tag in it says which.

    `{name: sgd, momentum: 0.9}` is read as `table["sgd"](momentum=0.9)`, and a lone `sgd` as
    `{name: sgd}`. Each variant owns its options, so one that means nothing to it is an unknown key.

    Args:
        table: the dataclasses by name; the first is meant when the tag is missing.
        tag: the key that holds the name.
        presets: for each name, sets of values by preset name; other keys override them.
        own: what may stand there of the user's own, by the key that holds its dotted path.

    Example:
        >>> OneOf({"sgd": dict, "adam": dict}).default
        'sgd'
    """

    table: Mapping[str, type]
    tag: str = "name"
    presets: Mapping[str, Mapping[str, Mapping[str, Any]]] = dataclasses.field(default_factory=dict)
    own: Mapping[str, type[Own]] = dataclasses.field(default_factory=dict)

    @property
    def default(self) -> str:
        """The name that is meant when the tag is missing."""
        return next(iter(self.table))

    def name_of(self, value: Any) -> str:
        """The name under which the type of a value stands in the table."""
        return next(name for name, cls in self.table.items() if type(value) is cls)


@dataclasses.dataclass(frozen=True)
class Parsed:
    """A value that another part of the library reads from several spellings.

    Args:
        read: takes plain data; raises `ValueError` or `TypeError` for what it cannot read.
        write: the inverse, into plain data.
        form: what is read, in words.

    Example:
        >>> Parsed(complex, str, "a complex number").read("1j")
        1j
    """

    read: Callable[[Any], Any]
    write: Callable[[Any], Any]
    form: str


MOST = 2**31 - 1
"""Steps and samples are counted in 32 bits on the devices."""

Count: TypeAlias = Annotated[
    int, Bound(f"at least 1 and at most {MOST}", lambda value: 1 <= value <= MOST)
]
"""A number of things of which there must be one."""

Natural: TypeAlias = Annotated[
    int, Bound(f"at least 0 and at most {MOST}", lambda value: 0 <= value <= MOST)
]
"""A number of things that may be missing."""

Ahead: TypeAlias = Annotated[
    int, Bound("at least 0 and at most 1024", lambda value: 0 <= value <= 1024)
]
"""Batches that wait in memory."""

Devices: TypeAlias = Annotated[
    int, Bound("at least 1 and at most 1024", lambda value: 1 <= value <= 1024)
]
"""CPU devices that are made up, each with threads of its own."""

Positive: TypeAlias = Annotated[
    float, Bound("above 0 and at most 3e38", lambda value: 0 < value <= 3e38)
]
"""A rate or a size."""

NonNegative: TypeAlias = Annotated[
    float, Bound("at least 0 and at most 3e38", lambda value: 0 <= value <= 3e38)
]
"""A rate that 0 turns off."""

Fraction: TypeAlias = Annotated[float, Bound("in [0, 1)", lambda value: 0 <= value < 1)]
"""A part of a whole."""

Seed: TypeAlias = Annotated[int, Bound("in [0, 2^32)", lambda value: 0 <= value < 2**32)]
"""Where random numbers start."""
