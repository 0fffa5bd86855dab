"""`Recorded`: what a run left in its folder, read without a device and whatever is missing."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from axon_dist.core.errors import ConfigError
from axon_dist.core.files import as_path, host_memory, read_bytes

from .directory import RunDirectory

Curve = list[tuple[float, float]]
"""Pairs of step and value, finite ones alone."""


@dataclasses.dataclass(frozen=True)
class Recorded:
    """What is known of a run.

    Args:
        folder: where it lies.
        rows: of `metrics.jsonl`.
        summary: of `summary.json`; empty where it cannot be read.
        program: of `program.json`; empty where it cannot be read.
        config: the text of `config.yaml`.
        notes: a sentence for everything that is missing or broken.
        called: what it is called beside another run of its name; empty for that name.
    """

    folder: Path
    rows: tuple[Mapping[str, Any], ...]
    summary: Mapping[str, Any]
    program: Mapping[str, Any]
    config: str
    notes: tuple[str, ...]
    called: str = ""

    @property
    def name(self) -> str:
        """What the run is called."""
        return self.called or str(self.summary.get("name") or self.folder.name)

    def curve(self, metric: str) -> Curve:
        """The values of a metric over the steps."""
        wanted = ("step", metric)
        rows = (row for row in self.rows if all(_is_finite(row.get(name)) for name in wanted))
        return [(float(row["step"]), float(row[metric])) for row in rows]

    def metrics(self, prefix: str) -> list[str]:
        """The names of all metrics that begin so, in the order in which they came."""
        return list(dict.fromkeys(n for row in self.rows for n in row if n.startswith(prefix)))

    @property
    def num_not_finite(self) -> int:
        """How many numbers of the metrics are infinite or none."""
        words = {"nan", "inf", "-inf"}
        return sum(isinstance(x, str) and x in words for row in self.rows for x in row.values())


def read_recorded(folder: str | Path) -> Recorded:
    """Reads the folder of a run.

    Args:
        folder: that `axon train` wrote to, even if it has not ended or was damaged.

    Raises:
        ConfigError: when there is no such folder, or nothing of a run in it.
    """
    directory = RunDirectory(as_path(folder, "the run"))
    if not directory.path.is_dir():
        raise ConfigError(
            f"there is no folder {str(folder)!r}; name one that axon train wrote, such as "
            "runs/quickstart-20260101-120000"
        )
    notes: list[str] = []
    rows = tuple(_rows(directory.metrics, notes))
    found = Recorded(
        folder=directory.path,
        rows=rows,
        summary=_object(directory.summary, "the run has not ended, or was killed", notes),
        program=_object(directory.program, "the run never got past its first step", notes),
        config=_text(directory.config, "nobody knows what the run was made from", notes),
        notes=tuple(notes),
    )
    if not (found.rows or found.summary or found.program or found.config):
        raise ConfigError(f"{str(folder)!r} holds nothing of a run: {'; '.join(notes)}")
    return found


def _text(path: Path, otherwise: str, notes: list[str]) -> str:
    try:
        return read_bytes(path, path.name, most=host_memory() // 8).decode(errors="replace")
    except ConfigError as error:
        reason = str(error).removeprefix(f"cannot read {path.name}: ").partition(";")[0]
        notes.append(f"{path.name} cannot be read ({reason}): {otherwise}")
        return ""


def _object(path: Path, otherwise: str, notes: list[str]) -> Mapping[str, Any]:
    text = _text(path, otherwise, notes)
    if not text:
        return {}
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        notes.append(f"{path.name} is broken: it is no JSON object")
        return {}
    return found


def _rows(path: Path, notes: list[str]) -> list[Mapping[str, Any]]:
    lines = _text(path, "nothing was measured yet", notes).splitlines()
    found: list[Mapping[str, Any]] = []
    for line in lines:
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(row, dict) and _is_finite(row.get("step")):
            found.append(row)
    if len(found) < len(lines):
        notes.append(f"{path.name}: {len(lines) - len(found)} of {len(lines)} lines are broken")
    return found


def _is_finite(value: Any) -> bool:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    try:
        return is_number and math.isfinite(value)
    except OverflowError:
        return False
