"""Records from files with a JSON object in every line."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from axon_dist.core.errors import ConfigError

from .documents import DocumentSource
from .files import TextFile
from .sampling import checksum


@dataclasses.dataclass(frozen=True)
class JsonlSource(DocumentSource):
    """Files with a JSON object in every line; options as in `DocumentSource`.

    Example:
        >>> JsonlSource(files=("chats.jsonl",), prompt="question", response="answer").validate()
    """

    kind: ClassVar[str] = ".jsonl"

    def records(self, files: Sequence[TextFile]) -> JsonLines:
        """Finds where the lines begin; a line is read when it is asked for."""
        return JsonLines(files)


class JsonLines:
    """The lines of files, those with nothing in them left out.

    Args:
        files: which.

    Raises:
        ConfigError: when they have no line.
    """

    def __init__(self, files: Sequence[TextFile]):
        self._bytes = [np.memmap(f.path, np.uint8, "r") for f in files if f.size]
        self._paths = [file.path for file in files if file.size]
        found = [
            np.column_stack([np.full(len(lines), number), lines])
            for number, content in enumerate(self._bytes)
            if len(lines := _lines(content))
        ]
        if not found:
            names = ", ".join(str(file.path) for file in files)
            raise ConfigError(f"data.files: {names} has no line; give files with records.")
        self._lines = np.concatenate(found)

    def __len__(self) -> int:
        return len(self._lines)

    def __getitem__(self, number: int) -> Mapping[str, Any]:
        file, start, stop, _ = self._lines[number].tolist()
        try:
            record = json.loads(self._bytes[file][start:stop].tobytes())
        except (ValueError, RecursionError) as error:
            raise ConfigError(
                f"{self.place(number)} is no JSON ({error}): correct or remove it"
            ) from error
        if not isinstance(record, dict):
            raise ConfigError(
                f"{self.place(number)} holds {record!r:.60}, which must be an object with fields; "
                'write {"text": ...}'
            )
        return record

    def place(self, number: int) -> str:
        """The file and the line."""
        file, _, _, line = self._lines[number].tolist()
        return f"{self._paths[file]}:{line}"

    def checksum(self) -> int:
        """Of all bytes."""
        return checksum(*self._bytes)


_PART = 2**26


def _lines(content: np.ndarray) -> np.ndarray:
    """First byte, the byte behind the last, and number of every line with something in it."""
    # In parts, for the mask of a whole file would be as large as the file.
    parts = range(0, len(content), _PART)
    ends = np.concatenate([p + np.flatnonzero(content[p : p + _PART] == ord("\n")) for p in parts])
    if content[-1] != ord("\n"):
        ends = np.append(ends, len(content))
    starts = np.concatenate([[0], ends[:-1] + 1])
    lines = np.column_stack([starts, ends, 1 + np.arange(len(ends))])
    # A line of one byte or two can hold no object; what stands there is looked at.
    is_short = ends - starts <= 2
    blank = [not content[a:b].tobytes().strip() for a, b in lines[is_short, :2].tolist()]
    is_short[is_short] = blank
    return lines[~is_short]
