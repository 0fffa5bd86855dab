"""`Choice`: an enum of texts that says which there are when it is asked for another."""

from __future__ import annotations

import enum
from typing import Any

from .errors import ConfigError, did_you_mean


def unknown(cls: type[enum.Enum], value: Any) -> ConfigError:
    """The error about a value that no member of an enum has."""
    names = [str(member.value) for member in cls]
    hint = did_you_mean(str(value), names)
    return ConfigError(f"{cls.__name__} got {value!r:.80}, and has no such member.{hint}")


class Choice(enum.StrEnum):
    """A `StrEnum` whose members are looked up by their values.

    Raises:
        ConfigError: for any other value.
    """

    @classmethod
    def _missing_(cls, value: object) -> Any:
        raise unknown(cls, value)
