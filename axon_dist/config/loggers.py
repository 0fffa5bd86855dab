"""The metric writers that a config can name, besides the JSON lines that every run keeps."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, Literal

from axon_dist.loop import (
    MetricWriter,
    MlflowWriter,
    TensorBoardWriter,
    TrackioWriter,
    WandbWriter,
    require,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Logger(abc.ABC):
    """A place that metrics go to; `module` is what writes there, of the extra `loggers`."""

    module: ClassVar[str]

    def check(self) -> None:
        """Raises `ConfigError`, with the command that helps, unless the module is installed."""
        require(self.module, "loggers", f"the logger {type(self).__name__}")

    @abc.abstractmethod
    def open(self, directory: Path, name: str, config: Mapping[str, Any]) -> MetricWriter:
        """Opens the writer of a run.

        Args:
            directory: the folder of the run.
            name: its name.
            config: what it was made from, as plain data.
        """


@dataclasses.dataclass(frozen=True, kw_only=True)
class TensorBoard(Logger):
    """Event files in the folder of the run."""

    module: ClassVar[str] = "tensorboardX"

    def open(self, directory: Path, name: str, config: Mapping[str, Any]) -> MetricWriter:
        """Opens a `TensorBoardWriter` in `tensorboard/`."""
        return TensorBoardWriter(directory / "tensorboard")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Wandb(Logger):
    """Weights & Biases.

    Args:
        project: the project the run belongs to.
        mode: `offline` keeps the run in its folder, `online` uploads it as it goes.
    """

    module: ClassVar[str] = "wandb"

    project: str = "axon_dist"
    mode: Literal["offline", "online"] = "offline"

    def open(self, directory: Path, name: str, config: Mapping[str, Any]) -> MetricWriter:
        """Opens a `WandbWriter`."""
        return WandbWriter(
            directory, project=self.project, name=name, mode=self.mode, config=config
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trackio(Logger):
    """Trackio, on this machine.

    Args:
        project: the project the run belongs to.
    """

    module: ClassVar[str] = "trackio"

    project: str = "axon_dist"

    def open(self, directory: Path, name: str, config: Mapping[str, Any]) -> MetricWriter:
        """Opens a `TrackioWriter`."""
        return TrackioWriter(project=self.project, name=name, config=config)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mlflow(Logger):
    """MLflow.

    Args:
        experiment: the experiment the run belongs to.
        uri: the server; None keeps the run in its folder, in a file `mlflow.db`.
    """

    module: ClassVar[str] = "mlflow"

    experiment: str = "axon_dist"
    uri: str | None = None

    def open(self, directory: Path, name: str, config: Mapping[str, Any]) -> MetricWriter:
        """Opens a `MlflowWriter`."""
        uri = self.uri or f"sqlite:///{(directory / 'mlflow.db').resolve()}"
        return MlflowWriter(uri, experiment=self.experiment, name=name, config=config)


LOGGERS: MappingProxyType[str, type[Logger]] = MappingProxyType(
    {"tensorboard": TensorBoard, "wandb": Wandb, "trackio": Trackio, "mlflow": Mlflow}
)
