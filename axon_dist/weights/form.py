"""`Form`: how the dims of a tensor in a file become those of a parameter, and back."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence

import numpy as np

from ..core.errors import ConfigError
from ..core.typing import Shape

_TOKEN = re.compile(r"\(|\)|[a-z]\w*")

Side = tuple[tuple[str, ...], ...]
"""The named dims of one side, grouped as they are merged into the dims of an array."""


@dataclasses.dataclass(frozen=True)
class Form:
    """A rearrangement of dims, written as einops does: `"out in -> in out"` transposes.

    Dims in parentheses are merged into one, the last of them running fastest. Nothing else happens
    to an array, so that the two sides exchanged are the way back.

    Args:
        text: both sides; empty leaves arrays of any shape as they are.
        sizes: of the dims that no shape tells.

    Raises:
        ConfigError: when the text cannot be read, or its sides have other names.

    Example:
        >>> pairs_apart = Form("(head pair two) d -> d (head two pair)", {"two": 2, "head": 1})
        >>> pairs_apart.apply(np.arange(4)[:, None]).tolist()
        [[0, 2, 1, 3]]
    """

    text: str = ""
    sizes: Mapping[str, int] = dataclasses.field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        if self.text:
            self._check()

    @property
    def inverse(self) -> Form:
        """From the parameter to the file."""
        return Form(" -> ".join(reversed(self.text.split(" -> "))), self.sizes)

    def shape_of(self, shape: Shape) -> Shape:
        """The shape that an array of some shape gets.

        Raises:
            ConfigError: when it cannot have come from that side; `fault` says why beforehand.
        """
        if not self.text:
            return tuple(shape)
        sizes = self._bind(shape)
        return tuple(math.prod(sizes[name] for name in group) for group in self._sides[1])

    def fault(self, shape: Shape) -> str | None:
        """Why no array of a shape can be rearranged, or None."""
        try:
            self.shape_of(shape)
        except ConfigError as error:
            return str(error)
        return None

    def apply(self, array: np.ndarray) -> np.ndarray:
        """Rearranges all of an array; a view of it where that can be."""
        return self._spread(array).reshape(self.shape_of(array.shape))

    def take(self, array: np.ndarray, index: Sequence[slice]) -> np.ndarray:
        """Equals `apply(array)[index]`, and touches nothing else of the array.

        Args:
            array: mapped from a file, say.
            index: a slice with start and stop for every dim of the result.
        """
        if not self.text:
            return array[tuple(index)]
        spread, groups = self._spread(array), self._sides[1]
        if all(len(group) == 1 for group in groups):
            return spread[tuple(index)]
        sizes = self._bind(array.shape)
        picked: list[np.ndarray] = []
        for number, (group, part) in enumerate(zip(groups, index, strict=True)):
            within = np.unravel_index(
                np.arange(part.start, part.stop), [sizes[name] for name in group]
            )
            others = (1,) * (len(groups) - 1 - number)
            picked += [which.reshape(-1, *others) for which in within]
        return spread[tuple(picked)]

    @property
    def leading(self) -> int:
        """The dim of the result along which a slice is nearest to a piece of the file."""
        if not self.text:
            return 0
        first = self._sides[0][0][0]
        return next(dim for dim, group in enumerate(self._sides[1]) if first in group)

    @property
    def _sides(self) -> tuple[Side, Side]:
        left, right = self.text.split("->")
        return _groups(left), _groups(right)

    def _check(self) -> None:
        if self.text.count("->") != 1:
            raise ConfigError(f"the form {self.text!r} needs two sides, as in 'out in -> in out'")
        left, right = ([name for group in side for name in group] for side in self._sides)
        if sorted(left) != sorted(right) or len(set(left)) < len(left) or not left:
            raise ConfigError(
                f"the form {self.text!r} must name every dim once on either side, as in "
                "'out in -> in out'"
            )

    def _spread(self, array: np.ndarray) -> np.ndarray:
        """The array with every named dim for itself, in the order of the result: a view."""
        if not self.text:
            return array
        sizes, (left, right) = self._bind(array.shape), self._sides
        names = [name for group in left for name in group]
        wanted = [name for group in right for name in group]
        return array.reshape([sizes[n] for n in names]).transpose([names.index(n) for n in wanted])

    def _bind(self, shape: Shape) -> dict[str, int]:
        left = self._sides[0]
        if len(left) != len(shape):
            raise ConfigError(f"the form {self.text!r} takes {len(left)} dims, not {list(shape)}")
        sizes = dict(self.sizes)
        for group, size in zip(left, shape, strict=True):
            known = math.prod(sizes[name] for name in group if name in sizes)
            unknown = [name for name in group if name not in sizes]
            if len(unknown) > 1:
                raise ConfigError(f"the form {self.text!r} needs sizes={{{unknown[0]!r}: ...}}")
            if (size % known if unknown else size != known) or not known:
                raise ConfigError(
                    f"the form {self.text!r} with {dict(self.sizes)} does not fit {list(shape)}"
                )
            sizes |= {name: size // known for name in unknown}
        return sizes


def _groups(side: str) -> Side:
    """Reads one side, such as `"(head size) d"`."""
    found: list[tuple[str, ...]] = []
    group: list[str] | None = None
    if _TOKEN.sub("", side).strip():
        raise ConfigError(f"cannot read {side.strip()!r} in a form; write 'name (name name)'")
    for token in _TOKEN.findall(side):
        if token == "(" and group is None:
            group = []
        elif token == ")" and group:
            found.append(tuple(group))
            group = None
        elif token in "()":
            raise ConfigError(f"the parentheses in {side.strip()!r} do not pair up around names")
        elif group is None:
            found.append((token,))
        else:
            group.append(token)
    if group is not None:
        raise ConfigError(f"the parentheses in {side.strip()!r} do not pair up around names")
    return tuple(found)
