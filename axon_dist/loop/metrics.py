"""Where metrics go: a JSON line per record, TensorBoard, Weights & Biases."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from .extras import require


class MetricWriter(Protocol):
    """Something that keeps numbers by step."""

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Keeps the metrics of a step; names are such as `train/loss`."""
        ...

    def close(self) -> None:
        """Makes sure that everything written is kept."""
        ...


class JsonlWriter:
    """One JSON object a line, readable while the run goes on.

    A number that JSON cannot hold (a loss that became infinite or NaN) is written as a text.

    Args:
        path: the file; lines are added to it. Where it is removed meanwhile, a new one is begun.

    Attributes:
        was_removed: whether that has happened, so that earlier lines are gone.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp(), "metrics.jsonl")
        >>> writer = JsonlWriter(path)
        >>> writer.write(1, {"train/loss": 5.5})
        >>> writer.close()
        >>> path.read_text()
        '{"step": 1, "train/loss": 5.5}\\n'
    """

    def __init__(self, path: str | Path):
        self._path, self.was_removed = Path(path), False
        self._open()

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Adds a line."""
        values = {name: _as_json(value) for name, value in metrics.items()}
        if not os.fstat(self._file.fileno()).st_nlink:
            self.was_removed = True
            self.close()
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._open()
        self._file.write(json.dumps({"step": step, **values}) + "\n")

    def _open(self) -> None:
        self._file = open(self._path, "a", buffering=1)  # noqa: SIM115 (`close` closes it)

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


class TensorBoardWriter:
    """Event files for TensorBoard, through tensorboardX.

    Args:
        directory: the folder that `tensorboard --logdir` is given.

    Raises:
        ConfigError: when tensorboardX is not installed.
    """

    def __init__(self, directory: str | Path):
        tensorboard = require("tensorboardX", "loggers", "the logger 'tensorboard'")
        self._writer = tensorboard.SummaryWriter(str(directory))

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Adds one scalar per metric."""
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Writes what is buffered and closes the files."""
        self._writer.close()


class WandbWriter:
    """A run of Weights & Biases.

    Args:
        directory: the folder that keeps its files; `wandb sync` uploads an offline run from it.
        project: the project the run belongs to.
        name: the name of the run.
        mode: `"offline"` needs no account and no network, `"online"` both.
        config: what the run was made from, nested dicts.

    Raises:
        ConfigError: when wandb is not installed.
    """

    def __init__(
        self,
        directory: str | Path,
        *,
        project: str,
        name: str,
        mode: str = "offline",
        config: Mapping[str, Any] | None = None,
    ):
        wandb = require("wandb", "loggers", "the logger 'wandb'")
        self._run = wandb.init(
            dir=str(directory), project=project, name=name, mode=mode, config=dict(config or {})
        )

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Logs the metrics of a step."""
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        """Ends the run."""
        self._run.finish()


def _as_json(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)
