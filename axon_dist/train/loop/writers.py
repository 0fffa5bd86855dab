"""Metric writers: JSON lines, the loggers of the optional extras, and a plot of the losses."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import json
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeAlias

from flax.traverse_util import flatten_dict

from axon_dist.core.errors import ConfigError, require, reworded, warn
from axon_dist.core.files import as_path, kind_at, open_regular, replacing
from axon_dist.core.words import plural


def has_module(name: str) -> bool:
    """Returns whether a module is installed, without importing it."""
    return importlib.util.find_spec(name) is not None


class MetricWriter(Protocol):
    """Stores metrics by step."""

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Stores the metrics of a step, with names such as `train/loss`."""
        ...

    def close(self) -> None:
        """Flushes everything that was written; called after the last `write`, by its owner."""
        ...


class JsonlWriter:
    """Writes one JSON object per line, readable during the run.

    A number that JSON cannot represent, such as an infinite or NaN loss, is written as a string. If
    a line cannot be written, the run continues; the line is written before the next one, as soon as
    the disk has space.

    Args:
        path: the file; lines are appended. If the file is removed during the run, a new file is
            made.
        tell: called with a message when lines can no longer be written, and when lines are lost.

    Attributes:
        was_removed: whether the file was removed, so that earlier lines are lost.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp(), "metrics.jsonl")
        >>> writer = JsonlWriter(path)
        >>> writer.write(1, {"train/loss": 5.5})
        >>> writer.close()
        >>> path.read_text()
        '{"step": 1, "train/loss": 5.5}\\n'
    """

    def __init__(self, path: str | Path, tell: Callable[[str], None] = warn):
        self._path = as_path(path, "the file of metrics")
        self.was_removed = False
        if (kind := kind_at(self._path)) not in (None, "a file"):
            raise ConfigError(
                f"{str(path)!r} is {kind} and must be a file that metrics are appended to; name "
                "another path",
                code="not-a-file",
            )
        if self._path.is_symlink():
            raise ConfigError(
                f"{str(path)!r} is a link, which is not followed; name its target", code="is-a-link"
            )
        self._tell = tell
        self._waiting = bytearray()
        self._is_refused = False
        self._file: int | None = None
        if not self._path.parent.is_dir():
            raise ConfigError(
                f"{str(path)!r}: there is no folder {str(self._path.parent)!r}; make it first"
            )
        self._flush()

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Adds a line."""
        values = {n: x if math.isfinite(x) else str(x) for n, x in metrics.items()}
        line = json.dumps({"step": step, **values}).encode() + b"\n"
        if len(self._waiting) + len(line) > _MOST_WAITING:
            self._drop()
        self._waiting += line
        self._flush()

    def close(self) -> None:
        """Writes the remaining lines, and closes the file."""
        if self._waiting:
            self._flush()
        if self._waiting:
            self._drop()
        self._close_file()

    def _flush(self) -> None:
        """Writes as many of the waiting lines as the disk accepts."""
        try:
            # A link count of 0 means that the file was removed; lines written to it would be lost.
            if self._file is not None and not os.fstat(self._file).st_nlink:
                self.was_removed = True
                self._close_file()
                self._path.parent.mkdir(parents=True, exist_ok=True)
            if self._file is None:
                self._file = open_regular(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
            while self._waiting:
                # `os.write` may write only a part; the loop writes the rest.
                del self._waiting[: os.write(self._file, self._waiting)]
            self._is_refused = False
        except OSError as error:
            # Reopen it next time: the handle may be stale, for example after a file server restart.
            self._close_file()
            if not self._is_refused:
                self._tell(
                    f"{self._path.name}: lines cannot be written yet ({error.strerror}); the run "
                    "continues"
                )
            self._is_refused = True

    def _drop(self) -> None:
        count = self._waiting.count(b"\n")
        self._tell(f"{self._path.name}: {plural(count, 'line')} could not be written and are lost")
        self._waiting.clear()

    def _close_file(self) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):
                os.close(self._file)
        self._file = None


_MOST_WAITING = 2**24
"""The maximum bytes of lines that wait to be written."""


class TolerantWriter:
    """A writer whose errors are reported once and do not end the run.

    Args:
        writer: the writer that may fail.
        name: the name of the writer in the report.
        tell: called with the report.
    """

    def __init__(self, writer: MetricWriter, name: str, tell: Callable[[str], None]):
        self.writer = writer
        self._name = name
        self._tell = tell
        self._has_failed = False

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Stores the metrics of a step, unless the writer fails."""
        self._try(lambda: self.writer.write(step, metrics))

    def close(self) -> None:
        """Closes the writer, unless that fails."""
        self._try(self.writer.close)

    def _try(self, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:  # trackers raise all kinds of errors
            if not self._has_failed:
                reason = f"{type(error).__name__}: {error}".splitlines()[0]
                self._tell(f"{self._name}: metrics are lost ({reason:.300}); the run continues")
            self._has_failed = True


class TensorBoardWriter:
    """Writes event files for TensorBoard with tensorboardX.

    TensorBoard hides the events of steps that are taken again.

    Args:
        directory: the folder to pass to `tensorboard --logdir`.
        first_step: the number of steps that the run has taken; events of later steps that are in
            the folder were abandoned.

    Raises:
        ConfigError: when tensorboardX is not installed.
    """

    def __init__(self, directory: str | Path, first_step: int = 0):
        tensorboard = require("tensorboardX", "loggers", "the logger 'tensorboard'")
        has_events = any(Path(directory).glob("events*"))
        # A run in a bucket writes its events there, so this folder may be empty though the run has
        # abandoned events.
        purge_step = first_step + 1 if has_events or first_step else None
        self._open = functools.partial(tensorboard.SummaryWriter, str(directory))
        self._writer = self._open(purge_step=purge_step)
        self._num_rollbacks = 0
        self._last = (first_step, frozenset[str]())

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Adds one scalar per metric."""
        self._hide_from(step, metrics.keys())
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def _hide_from(self, step: int, names: Iterable[str]) -> None:
        """Hides the events from a step on, if the run has gone back to before it."""
        last, before = self._last
        # A step has several records, such as that of a validation, but each metric only once.
        if step < last or (step == last and not before.isdisjoint(names)):
            self._writer.close()
            self._num_rollbacks += 1
            # Files of one second differ only in the suffix.
            suffix = f".{self._num_rollbacks}"
            self._writer = self._open(purge_step=step, filename_suffix=suffix)
            before = frozenset()
        self._last = step, before.union(names) if step == last else frozenset(names)

    def close(self) -> None:
        """Flushes and closes the files."""
        self._writer.close()


class WandbWriter:
    """A run of Weights & Biases.

    W&B drops a record whose W&B step is lower than an earlier one, as after a rollback. So the
    records have a metric `step` instead, which is the x-axis of the others.

    Args:
        directory: the folder for its files; `wandb sync` uploads an offline run from it.
        project: the project the run belongs to.
        name: the name of the run.
        mode: `"offline"` needs no account and no network, `"online"` needs both.
        config: the config of the run, as nested dicts.
        run_id: the run to continue; None makes a new one.

    Attributes:
        run_id: identifies the run.

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
        run_id: str | None = None,
    ):
        wandb = require("wandb", "loggers", "the logger 'wandb'")
        # A resumed run may have another config.
        resumed = {"id": run_id, "resume": "allow", "allow_val_change": True} if run_id else {}
        self._run = wandb.init(
            dir=str(directory),
            project=project,
            name=name,
            mode=mode,
            config=dict(config or {}),
            **resumed,
        )
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        self.run_id: str = self._run.id

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Logs the metrics of a step."""
        self._run.log({**metrics, "step": step})

    def close(self) -> None:
        """Ends the run."""
        self._run.finish()


class TrackioWriter:
    """A run of trackio, which stores it on this machine; `trackio show` draws it.

    Args:
        project: the project the run belongs to.
        name: the name of the run; trackio chooses another one if the project has a run of it.
        config: the config of the run, as nested dicts.
        run_id: the run to continue; None makes a new one.

    Attributes:
        run_id: identifies the run in its project.

    Raises:
        ConfigError: when trackio is not installed.
    """

    def __init__(
        self,
        *,
        project: str,
        name: str,
        config: Mapping[str, object] | None = None,
        run_id: str | None = None,
    ):
        trackio = require("trackio", "loggers", "the logger 'trackio'")
        # Trackio identifies a run by its name.
        resumed = {"resume": "allow"} if run_id else {}
        self._run = trackio.init(
            project=project, name=run_id or name, config=dict(config or {}), **resumed
        )
        self.run_id: str = self._run.name

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Logs the metrics of a step."""
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        """Ends the run."""
        self._run.finish()


class MlflowWriter:
    """A run of MLflow.

    Args:
        uri: MLflow's tracking URI: a server, a database or a folder.
        experiment: the experiment the run belongs to; created if it does not exist.
        name: the name of the run.
        config: the config of the run, as nested dicts; its values become MLflow parameters.
        run_id: the run to continue, which keeps its parameters; None makes a new one, and so does a
            run that the server does not have.

    Attributes:
        run_id: identifies the run.

    Raises:
        ConfigError: when mlflow is not installed.
    """

    def __init__(
        self,
        uri: str,
        *,
        experiment: str,
        name: str,
        config: Mapping[str, object] | None = None,
        run_id: str | None = None,
    ):
        mlflow = require("mlflow", "loggers", "the logger 'mlflow'")
        self._client = mlflow.MlflowClient(tracking_uri=uri)
        if run_id is not None and self._continues(run_id):
            self.run_id = run_id
            return
        existing = self._client.get_experiment_by_name(experiment)
        known = existing.experiment_id if existing else self._client.create_experiment(experiment)
        self.run_id: str = self._client.create_run(known, run_name=name).info.run_id
        for key, value in flatten_dict(dict(config or {}), sep=".").items():
            self._client.log_param(self.run_id, key, str(value)[:500])

    def _continues(self, run_id: str) -> bool:
        """Opens a run again; returns false if there is no such run."""
        try:
            self._client.update_run(run_id, status="RUNNING")
        except Exception:  # the database may be another one, or the run deleted
            return False
        return True

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Logs the metrics of a step."""
        for name, value in metrics.items():
            self._client.log_metric(self.run_id, name, value, step=step)

    def close(self) -> None:
        """Ends the run."""
        self._client.set_terminated(self.run_id)


class PrometheusWriter:
    """Exports the last values of all metrics for Prometheus, in a file and optionally on a port.

    The file is in the text format that the textfile collector of node_exporter reads. It is
    replaced after every record. The metric `train/loss` is the gauge `axon_train_loss`, with the
    label `run`. The rest of a name is the label `part`: `train/grad_norm/blocks/0` is
    `axon_train_grad_norm{part="blocks/0"}`. The step is `axon_step`.

    Args:
        path: the file; its name must end in `.prom`.
        run: the name of the run.
        port: the port on which `/metrics` is served; None for no server.

    Raises:
        ConfigError: when prometheus_client is not installed, or the port cannot be opened.
    """

    def __init__(self, path: str | Path, *, run: str, port: int | None = None):
        client = require("prometheus_client", "loggers", "the logger 'prometheus'")
        self._client = client
        self._path = as_path(path, "the file of the logger 'prometheus'")
        if self._path.suffix != ".prom":
            raise ConfigError(
                f"the logger 'prometheus' got the file {str(path)!r}, but collectors read only "
                "files whose names end in .prom; name such a file",
                code="not-prom",
            )
        self._run = run
        self._registry = client.CollectorRegistry()
        self._gauges: dict[str, Any] = {}
        self._server: Any = None
        if port is not None:
            advice = "choose another port, or leave it out to write only the file"
            with reworded(f"the logger 'prometheus' cannot serve port {port}", advice, of=OSError):
                self._server, self._thread = client.start_http_server(port, registry=self._registry)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Sets the gauges, and replaces the file."""
        for name, value in {"step": step, **metrics}.items():
            first, _, rest = name.partition("/")
            second, _, part = rest.partition("/")
            gauge = re.sub(r"[^a-zA-Z0-9_]", "_", "_".join(filter(None, ("axon", first, second))))
            if gauge not in self._gauges:
                help_text = f"the last value of {'/'.join(filter(None, (first, second)))}"
                self._gauges[gauge] = self._client.Gauge(
                    gauge, help_text, ("run", "part"), registry=self._registry
                )
            self._gauges[gauge].labels(run=self._run, part=part).set(value)
        self._client.write_to_textfile(str(self._path), self._registry)

    def close(self) -> None:
        """Stops serving; the file keeps the last values."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._thread.join()


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
    """Draws training and validation loss by step into a PNG file, with other metrics below.

    Args:
        path: the PNG file; replaced if it exists.
        train: training loss by step.
        validation: validation loss by step; each point is marked.
        unit: the unit of the loss, such as `nats/byte`.
        title: the title above the axes.
        metrics: the training and validation curves of further metrics, one panel for each.

    Raises:
        ConfigError: when matplotlib is not installed.
    """
    # Use Figure instead of pyplot, which has global state and may change the user's backend.
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
    with replacing(Path(path), durable=False) as file:
        figure.savefig(file, format="png")


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
