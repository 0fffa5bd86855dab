"""Where metrics go: a JSON line per record, the loggers of the extras, a plot of the losses."""

from __future__ import annotations

import importlib.util
import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeAlias

from flax.traverse_util import flatten_dict

from axon_dist.core.errors import ConfigError, require
from axon_dist.core.files import as_path, kind_at


def has_module(name: str) -> bool:
    """Tells whether a module is installed, without importing it."""
    return importlib.util.find_spec(name) is not None


class MetricWriter(Protocol):
    """Something that keeps numbers by step."""

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Keeps the metrics of a step; names are such as `train/loss`."""
        ...

    def close(self) -> None:
        """Makes sure that everything written is kept."""
        ...


class JsonlWriter:
    """One JSON object a line, readable during the run.

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
        self._path, self.was_removed = as_path(path, "the file of metrics"), False
        if (kind := kind_at(self._path)) not in (None, "a file"):
            raise ConfigError(f"{str(path)!r} is {kind}; name a file, which metrics are added to")
        self._open()

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Adds a line."""
        values = {n: x if math.isfinite(x) else str(x) for n, x in metrics.items()}
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


class _RunWriter:
    """Logs to the run of a tracker with the interface of wandb."""

    _run: Any

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Logs the metrics of a step."""
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        """Ends the run."""
        self._run.finish()


class WandbWriter(_RunWriter):
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
        config: Mapping[str, object] | None = None,
    ):
        wandb = require("wandb", "loggers", "the logger 'wandb'")
        self._run = wandb.init(
            dir=str(directory), project=project, name=name, mode=mode, config=dict(config or {})
        )


class TrackioWriter(_RunWriter):
    """A run of trackio, which keeps it on this machine: `trackio show` draws it.

    Args:
        project: the project the run belongs to.
        name: the name of the run.
        config: what the run was made from, nested dicts.

    Raises:
        ConfigError: when trackio is not installed.
    """

    def __init__(self, *, project: str, name: str, config: Mapping[str, object] | None = None):
        trackio = require("trackio", "loggers", "the logger 'trackio'")
        self._run = trackio.init(project=project, name=name, config=dict(config or {}))


class MlflowWriter:
    """A run of MLflow.

    Args:
        uri: the server, or the folder that keeps the runs.
        experiment: the experiment the run belongs to, made where there is none of the name.
        name: the name of the run.
        config: what the run was made from, nested dicts; its values are the parameters.

    Raises:
        ConfigError: when mlflow is not installed.
    """

    def __init__(
        self, uri: str, *, experiment: str, name: str, config: Mapping[str, object] | None = None
    ):
        mlflow = require("mlflow", "loggers", "the logger 'mlflow'")
        self._client = mlflow.MlflowClient(tracking_uri=uri)
        existing = self._client.get_experiment_by_name(experiment)
        known = existing.experiment_id if existing else self._client.create_experiment(experiment)
        self._run = self._client.create_run(known, run_name=name).info.run_id
        for key, value in flatten_dict(dict(config or {}), sep=".").items():
            self._client.log_param(self._run, key, str(value)[:500])

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Logs the metrics of a step."""
        for name, value in metrics.items():
            self._client.log_metric(self._run, name, value, step=step)

    def close(self) -> None:
        """Ends the run."""
        self._client.set_terminated(self._run)


Curve: TypeAlias = Sequence[tuple[int, float]]
"""Pairs of step and value."""

_TRAIN, _VALIDATION, _INK, _GRID = "#9ab6d6", "#c1440e", "#333333", "#e6e6e6"


def plot_losses(
    path: str | Path,
    train: Curve,
    validation: Curve,
    unit: str,
    title: str,
    metrics: Mapping[str, tuple[Curve, Curve]] | None = None,
) -> None:
    """Draws training and validation loss over the steps into a PNG file, and metrics below them.

    Args:
        path: of the PNG file, replaced if it is there.
        train: training loss by step.
        validation: validation loss by step, few points.
        unit: of the loss, such as `nats/byte`.
        title: above the axes.
        metrics: of each further metric its training and validation curve, a panel for each.

    Raises:
        ConfigError: when matplotlib is not installed.
    """
    # Figure instead of pyplot: no window, no global state, and the user's backend is left alone.
    figure = require("matplotlib.figure", "plots", "the loss plot").Figure(
        figsize=(8, 4.5 + 2.5 * len(metrics or {})), dpi=150, layout="constrained"
    )
    panels = {f"loss ({unit})" if unit else "loss": (train, validation), **(metrics or {})}
    heights = [1.8] + [1.0] * len(metrics or {})
    rows = figure.subplots(len(panels), sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    for axes, (label, curves) in zip(rows, panels.items(), strict=True):
        _draw(axes, label, *curves)
    rows[0].set_title(title, loc="left", color=_INK, fontweight="bold")
    rows[0].legend(frameon=False)
    rows[-1].set_xlabel("step", color=_INK)
    figure.savefig(path)


def _draw(axes: Any, label: str, train: Curve, validation: Curve) -> None:
    axes.plot(*_columns(train), color=_TRAIN, linewidth=1.4, label="training")
    if validation:
        steps, losses = _columns(validation)
        axes.plot(steps, losses, "o-", color=_VALIDATION, markersize=4, label="validation")
        axes.annotate(
            f"{losses[-1]:.3f}",
            (steps[-1], losses[-1]),
            xytext=(0, 9),
            textcoords="offset points",
            ha="right",
            color=_VALIDATION,
            fontweight="bold",
        )
    axes.set_ylabel(label, color=_INK)
    axes.grid(color=_GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(x=0.02)


def _columns(curve: Curve) -> tuple[list[int], list[float]]:
    return [step for step, _ in curve], [value for _, value in curve]
