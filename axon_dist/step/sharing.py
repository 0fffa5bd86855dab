"""What the steps of a search share.

A planner builds and traces dozens of steps of one model and one loss, with different meshes,
strategies and microbatches. Within `sharing_steps()` they share what does not depend on these.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

Value = TypeVar("Value")


@dataclasses.dataclass(frozen=True, eq=False)
class SharedValues:
    """Values that steps have computed, by the keys of all that they depend on.

    Args:
        values: the values; each lives until the search ends.
    """

    values: dict[Hashable, Any] = dataclasses.field(default_factory=dict)


_SHARED: ContextVar[SharedValues | None] = ContextVar("shared", default=None)


@contextmanager
def sharing_steps() -> Iterator[None]:
    """Lets the steps that are built and traced inside share models and traces of their loss."""
    token = _SHARED.set(SharedValues())
    try:
        yield
    finally:
        _SHARED.reset(token)


def shared_value(key: Hashable, make: Callable[[], Value]) -> Value:
    """Returns the value of a key. In a search it is made once and shared, otherwise in each call.

    Args:
        key: all that the value depends on. A value whose key has no hash is not shared.
        make: makes the value.
    """
    shared = _SHARED.get()
    if shared is None:
        return make()
    try:
        is_known = key in shared.values
    except TypeError:
        return make()
    if not is_known:
        shared.values[key] = make()
    return shared.values[key]
