"""Many names in few words."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable

_NUMBER = re.compile(r"(?<!\w)\d+(?!\w)")
_MOST = 8


def shorten(names: Iterable[str]) -> str:
    """Lists names; those that differ in their numbers alone are listed as one.

    Args:
        names: such as those of tensors.

    Example:
        >>> shorten(["norm", *(f"blocks/{i}/kernel" for i in (0, 1, 2, 5))])
        'norm, blocks/*/kernel (0-2, 5)'
    """
    kinds: dict[str, list[str]] = {}
    for name in names:
        kinds.setdefault(_NUMBER.sub("*", name), []).append(name)
    listed = [_spelled(kind, alike) for kind, alike in kinds.items()]
    more = len(listed) - _MOST
    return ", ".join(listed[:_MOST] + ([f"and {more} more kinds"] if more > 0 else []))


def _spelled(kind: str, names: list[str]) -> str:
    if len(names) == 1:
        return names[0]
    numbers = [_NUMBER.findall(name) for name in names]
    varying = [column for column in zip(*numbers, strict=True) if len(set(column)) > 1]
    if len(varying) != 1:
        return f"{kind} ({len(names)} of them)"
    values = sorted(map(int, varying[0]))
    runs = [
        [value for _, value in run]
        for _, run in itertools.groupby(enumerate(values), lambda pair: pair[1] - pair[0])
    ]
    texts = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    return f"{kind} ({', '.join(texts)})"
