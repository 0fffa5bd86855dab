"""`RunDirectory`: the folder of a run, and what lies in it under which name."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from axon_dist.core.errors import ConfigError

from ..config.schema import RunConfig

AUTO = "auto"
"""Where to resume from: the newest good checkpoint of the run itself, if there is one."""


@dataclasses.dataclass(frozen=True)
class RunDirectory:
    """What a run leaves behind.

    Args:
        path: of the folder of the run.
    """

    path: Path

    @property
    def config(self) -> Path:
        """The config, every default spelled out."""
        return self.path / "config.yaml"

    @property
    def metrics(self) -> Path:
        """Metrics, a JSON object a line."""
        return self.path / "metrics.jsonl"

    @property
    def summary(self) -> Path:
        """What the run came to, as JSON."""
        return self.path / "summary.json"

    @property
    def checkpoints(self) -> Path:
        """The checkpoints, where the config does not put them elsewhere."""
        return self.path / "checkpoints"

    @property
    def plot(self) -> Path:
        """The loss curves."""
        return self.path / "loss.png"

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Writes `summary.json`."""
        self.summary.write_text(json.dumps(summary, indent=2) + "\n")

    def forget_metrics_after(self, step: int) -> None:
        """Drops the metrics of steps that are going to be taken again, and half a last line."""
        if not self.metrics.exists():
            return
        lines = self.metrics.read_text().splitlines(keepends=True)
        kept = [line for line in lines if line.endswith("\n") and json.loads(line)["step"] <= step]
        unfinished = self.metrics.with_suffix(".tmp")
        unfinished.write_text("".join(kept))
        os.replace(unfinished, self.metrics)


def create_directory(config: RunConfig, resume: str | None = None) -> RunDirectory:
    """Makes the folder of a run, with its config in it, or opens that of a run to go on with.

    Args:
        config: where `run_dir` says so, or as `runs/<name>-<time>` where it does not.
        resume: None for a new run, whose folder must not hold one; `"auto"` to go on in the folder
            of the config, or in the newest of that name with a checkpoint; a path to go on from
            there, in the folder of the config or in a new one.

    Raises:
        ConfigError: when there is a run in it already, or it cannot be made.
    """
    stamp = time.strftime("%Y%m%d-%H%M%S")
    newest = _newest_run(config.name) if resume == AUTO else None
    path = Path(config.run_dir or newest or f"runs/{config.name}-{stamp}").expanduser()
    directory = RunDirectory(path)
    try:
        path.mkdir(parents=True, exist_ok=True)
        with open(directory.config, "x" if resume is None else "w") as file:
            yaml.safe_dump(config.to_dict(), file, sort_keys=False)
    except FileExistsError as error:
        raise ConfigError(
            f"run_dir: {str(path)!r} holds a run already; name another, remove it, or go on with "
            "it: --resume auto"
        ) from error
    except OSError as error:
        raise ConfigError(
            f"run_dir: cannot write to {str(path)!r}: {error.strerror}; name another"
        ) from error
    return directory


def _newest_run(name: str) -> Path | None:
    pattern = re.compile(re.escape(name) + r"-\d{8}-\d{6}")
    runs = (folder.parent for folder in Path("runs").glob("*/checkpoints"))
    return max((run for run in runs if pattern.fullmatch(run.name)), default=None)
