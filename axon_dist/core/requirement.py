"""Requirements as rows of a table: what must hold, and what is said where it does not."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

from .errors import AxonDistError

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Requirement(Generic[T]):
    """One row.

    Args:
        name: what must hold, in a few words.
        check: raises an `AxonDistError` about what is wrong, where it does not hold.
    """

    name: str
    check: Callable[[T], Any]

    @classmethod
    def row(
        cls,
        name: str,
        error: type[AxonDistError],
        sentence: str,
        when: Callable[[T], Mapping[str, Any] | None],
    ) -> Requirement[T]:
        """A requirement by when it is broken and what is said then.

        Args:
            name: what must hold, in a few words.
            error: the kind of error.
            sentence: what was got, what must hold and what to do, with names in braces.
            when: gives the values of these names where it does not hold, and else None.

        Example:
            >>> even = Requirement.row(
            ...     "even", AxonDistError, "got {n}", lambda n: {"n": n} if n % 2 else None
            ... )
            >>> even.check(2)
        """

        def check(subject: T) -> None:
            found = when(subject)
            if found is not None:
                raise error(sentence.format(**found))

        return cls(name, check)

    def of(self, part: Callable[[Any], T]) -> Requirement[Any]:
        """The requirement about a part of something larger."""
        return Requirement(self.name, lambda whole: self.check(part(whole)))


def check_all(rules: tuple[Requirement[T], ...], subject: T) -> None:
    """Raises what the first requirement says that does not hold, if there is one."""
    for rule in rules:
        rule.check(subject)
