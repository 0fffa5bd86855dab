"""What lies where in a checkpoint, and whether its leaves are those a program asks for: no arrays.

step_00000012/        the checkpoint; `step_00000012.tmp` while it is being written
    COMMITTED         the checksum of the manifest, written last
    manifest.json     every leaf and every file, with their checksums
    arrays/           the values, as the store of the checkpoint's type writes them
"""

from __future__ import annotations

import dataclasses
import operator
import re
from collections.abc import Mapping
from pathlib import Path

from ..core.errors import ConfigError
from ..core.typing import Path as LeafPath

MARKER = "COMMITTED"
MANIFEST = "manifest.json"
ARRAYS = "arrays"
UNFINISHED = ".tmp"
"""The ending of a folder that no reader may look into."""

_STEP_NAME = re.compile(r"step_([0-9]{8,18})")
_SHOWN = 3


def step_name(step: int) -> str:
    """The name of the checkpoint of a step; names sort as their steps do.

    Args:
        step: how many steps the state has taken, at least 0.

    Raises:
        ConfigError: for anything else.

    Example:
        >>> step_name(12)
        'step_00000012'
    """
    try:
        number = operator.index(step)
    except TypeError:
        number = -1
    if number < 0:
        raise ConfigError(
            f"step={step!r} cannot be the step of a checkpoint: it counts the steps taken; give an "
            "integer of at least 0"
        )
    return f"step_{number:08d}"


def step_of(name: str) -> int | None:
    """The step of a checkpoint's name, or None for any other name.

    Example:
        >>> step_of("step_00000012"), step_of("step_00000012.tmp")
        (12, None)
    """
    match = _STEP_NAME.fullmatch(name)
    return int(match[1]) if match and step_name(int(match[1])) == name else None


def staging_of(folder: Path) -> Path:
    """Where a checkpoint is written before it gets its name."""
    return folder.with_name(folder.name + UNFINISHED)


def replaced_of(folder: Path) -> Path:
    """Where the checkpoint that had the name lies while another one takes it."""
    return folder.with_name(f"{folder.name}.old{UNFINISHED}")


@dataclasses.dataclass(frozen=True)
class LeafSpec:
    """The dtype and the global shape of a leaf, whatever mesh it lies on.

    Args:
        dtype: as JAX names it, such as `bfloat16` or `key<fry>`.
        shape: the global shape.

    Example:
        >>> str(LeafSpec("float32", (8, 4)))
        'float32[8,4]'
    """

    dtype: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


def differences(
    saved: Mapping[LeafPath, LeafSpec], wanted: Mapping[LeafPath, LeafSpec]
) -> list[str]:
    """Says leaf by leaf how a checkpoint differs from what a program asks for.

    Args:
        saved: the leaves of the checkpoint.
        wanted: the leaves of the state to restore.

    Returns:
        A sentence for each leaf that differs; none where the two agree.

    Example:
        >>> differences({"w": LeafSpec("float32", (2,))}, {"w": LeafSpec("float32", (3,))})
        ['w is float32[2] in the checkpoint and float32[3] here']
    """
    found = []
    for path in [*saved, *(path for path in wanted if path not in saved)]:
        if path not in wanted:
            found.append(f"{path} ({saved[path]}) is in the checkpoint and not here")
        elif path not in saved:
            found.append(f"{path} ({wanted[path]}) is here and not in the checkpoint")
        elif saved[path] != wanted[path]:
            found.append(f"{path} is {saved[path]} in the checkpoint and {wanted[path]} here")
    return found


def shortened(sentences: list[str]) -> str:
    """Joins the first few sentences, and counts the others.

    Example:
        >>> shortened(["a", "b", "c", "d", "e"])
        'a; b; c; and 2 more'
    """
    more = len(sentences) - _SHOWN
    return "; ".join(sentences[:_SHOWN] + ([f"and {more} more"] if more > 0 else []))
