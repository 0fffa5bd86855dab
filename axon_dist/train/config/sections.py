"""Sections of a config: devices, training, checkpoints, loggers, initial weights, and the data."""

from __future__ import annotations

import dataclasses
import functools
import zlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

import jax
from flax import nnx

from axon_dist.checkpoint import Retention, StateDictType
from axon_dist.core.errors import ConfigError
from axon_dist.core.words import pattern_error
from axon_dist.data import (
    ArrayRecordSource,
    DatasetsSource,
    ImageFolder,
    ImageRecords,
    ImageSource,
    JsonlSource,
    Mixture,
    ParquetSource,
    Samples,
    Sequences,
    SyntheticImages,
    TextSource,
    TokenSource,
)
from axon_dist.nn import lora
from axon_dist.optim import Spikes
from axon_dist.step import Nonfinite

from .read import Ahead, Count, Devices, Fraction, Natural, NonNegative, OneOf, Port, Positive
from .user_code import UserCode


@dataclasses.dataclass(frozen=True, kw_only=True)
class DevicesConfig:
    """Which devices a run uses.

    Args:
        emulate: the number of CPU devices to emulate; None uses the real devices.
    """

    emulate: Devices | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProfileConfig:
    """Which steps of a run are traced, into `profile` in its folder, for Perfetto or XProf.

    SIGUSR1 sent to a process traces its next steps, whether or not the config has this section.

    Args:
        at: the first traced step, counted from 1; the first step of a process compiles and is
            skipped; 0 waits for the signal.
        steps: the number of traced steps.
        port: the port at which XProf or TensorBoard can trace process 0 at any time; each further
            process uses the next port; null opens none.
    """

    at: Natural = 20
    steps: Count = 3
    port: Port | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class BestConfig:
    """Which checkpoint is the best, and when a run without improvement ends.

    Args:
        metric: a validation metric, as named in `metrics.jsonl`: `validation/loss`, or that of a
            set, such as `validation/code/loss`, or another metric of the loss function.
        mode: `min` if less is better, `max` if more is.
        patience: the run ends after this many validations without improvement; 0 never ends it.
        min_delta: the smallest change that counts as an improvement.
    """

    metric: str = "validation/loss"
    mode: Literal["min", "max"] = "min"
    patience: Natural = 0
    min_delta: NonNegative = 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """How long a run trains, with which batch size, and how often it validates and reports.

    Args:
        steps: optimizer steps.
        global_batch: samples in one step, over all devices and microbatches.
        accumulate: microbatches whose gradients one step accumulates.
        clip_norm: largest global norm of the gradients; None does not clip.
        eval_every: steps between validations; 0 validates only at the end.
        eval_batches: the most global batches in one validation, spread over the validation data,
            each sample once; `axon eval` uses all of it.
        best: which checkpoint is the best, and when a run ends early.
        log_every: steps between written metrics, each averaged over those steps.
        peak_flops: the peak FLOP/s of one device, for the utilization in the metrics; None takes
            that of the chip; for an unknown chip there is no utilization.
        ema: decay of a moving average of the parameters, which is then validated instead; None
            keeps none.
        nonfinite: what to do when a loss or gradient is not finite: `stop` with an error, `skip`
            that batch, or `rollback` to the newest checkpoint and continue with new batches.
        max_rollbacks: the most rollbacks before a run stops.
        spikes: which steps are skipped, because loss or gradient are outliers; None skips none.
        layer_norms: write the norms of weights, gradients and updates of every layer.
        profile: which steps are traced; None traces none.
    """

    steps: Count = 1000
    global_batch: Count = 32
    accumulate: Count = 1
    clip_norm: Positive | None = 1.0
    eval_every: Natural = 100
    eval_batches: Count = 16
    best: BestConfig = BestConfig()
    log_every: Count = 10
    peak_flops: Positive | None = None
    ema: Fraction | None = None
    nonfinite: Nonfinite = Nonfinite.STOP
    max_rollbacks: Count = 3
    spikes: Spikes | None = None
    layer_norms: bool = False
    profile: ProfileConfig | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """When and how a run saves its state, and which checkpoints it keeps.

    Args:
        every: steps between checkpoints; 0 saves only the last state.
        memory_every: steps between copies of the state in host memory. A run that has lost a
            process continues from the newest copy without reading a checkpoint, and repeats the
            steps since. 0 makes none. `axon launch --max-restarts N` keeps them.
        keep: how many of the newest checkpoints to keep.
        best: how many of the best checkpoints by `train.best` to keep.
        keep_every: also keep checkpoints whose step is a multiple of this; 0 for none.
        background: write while the run continues.
        type: `sharded`, every process writes its shards; or `full`, process 0 writes everything to
            one file.
        dir: the folder; None for `checkpoints` in the folder of the run.
    """

    every: Natural = 100
    memory_every: Natural = 0
    keep: Count = 3
    best: Natural = 0
    keep_every: Natural = 0
    background: bool = True
    type: StateDictType = StateDictType.SHARDED
    dir: str | None = None

    @property
    def retention(self) -> Retention:
        """Which checkpoints are kept."""
        return Retention(last=self.keep, best=self.best, every=self.keep_every)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Logger:
    """A metrics logger; `module` is the package that the extra `loggers` installs."""

    module: ClassVar[str]


@dataclasses.dataclass(frozen=True, kw_only=True)
class TensorBoard(Logger):
    """Event files in the folder of the run."""

    module: ClassVar[str] = "tensorboardX"


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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trackio(Logger):
    """Trackio, on this machine.

    Args:
        project: the project the run belongs to.
    """

    module: ClassVar[str] = "trackio"

    project: str = "axon_dist"


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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prometheus(Logger):
    """The last values of the metrics, as Prometheus reads them.

    Args:
        file: the file, which ends in `.prom`, such as one in the folder of node_exporter's textfile
            collector; null for `metrics.prom` in the folder of the run.
        port: also serve `/metrics` on this port of the main process; null serves none.
    """

    module: ClassVar[str] = "prometheus_client"

    file: str | None = None
    port: Port | None = None


LOGGERS: MappingProxyType[str, type[Logger]] = MappingProxyType(
    {
        "tensorboard": TensorBoard,
        "wandb": Wandb,
        "trackio": Trackio,
        "mlflow": Mlflow,
        "prometheus": Prometheus,
    }
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lora:
    """Low-rank adapters, which are then the only trained parameters; see `axon_dist.lora`.

    Args:
        rank: columns of the first matrix of an adapter, and rows of the second.
        paths: regular expressions, searched for in the paths of linear layers; empty takes all. One
            that matches none of them is searched for in the paths of embeddings.
        alpha: scales the product by alpha / rank; None for a scale of 1.
        rslora: scales by alpha / sqrt(rank) instead.
        rank_pattern: other ranks, by regular expressions of paths.
        alpha_pattern: other alphas, by regular expressions of paths.
    """

    elsewhere: ClassVar[Mapping[str, str]] = MappingProxyType(
        {
            "dropout": "there is none on adapters; leave it out",
            "target_modules": "write paths, regular expressions such as attention",
        }
    )

    rank: Count = 8
    paths: tuple[str, ...] = ()
    alpha: Positive | None = None
    rslora: bool = False
    rank_pattern: Mapping[str, Count] = dataclasses.field(default_factory=dict, hash=False)
    alpha_pattern: Mapping[str, Positive] = dataclasses.field(default_factory=dict, hash=False)

    def add_to(self, model: nnx.Module, seed: int) -> nnx.Module:
        """Returns a copy of the model with adapters.

        Raises:
            ConfigError: when a path finds no layer.
        """
        key = jax.random.fold_in(jax.random.key(seed), zlib.crc32(b"lora"))
        return lora(
            model,
            self.rank,
            self.paths or "",
            rngs=nnx.Rngs(key),
            alpha=self.alpha,
            rslora=self.rslora,
            rank_pattern=self.rank_pattern,
            alpha_pattern=self.alpha_pattern,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Weights:
    """The files of a run's initial weights; see `axon_dist.load_weights`.

    Args:
        files: safetensors files, or one folder with them, such as the snapshot of a hub's
            repository.
        format: how tensors are named, `native` or the layout of a hub, such as `hf-llama`.
        cast: convert between float dtypes, rounding to nearest.
        keep: regular expressions of paths that keep the model's initial values if the files have
            none; adapters do so anyway.
        differ: fields of the model that may differ from the `config.json` next to the files; any
            other difference is an error.
    """

    files: tuple[str, ...]
    format: str = "native"
    cast: bool = False
    keep: tuple[str, ...] = ()
    differ: tuple[str, ...] = ()

    def validate(self) -> None:
        """Checks that a file is named, and that patterns are valid.

        Raises:
            ConfigError: when no file is named, or a pattern is invalid.
        """
        if not self.files:
            raise ConfigError("weights.files names no file: name safetensors files, or a folder")
        for pattern in self.keep:
            if why := pattern_error(pattern):
                raise ConfigError(f"weights.keep: {pattern!r:.80} {why}; correct it")


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """How batches are loaded.

    Args:
        num_ahead: batches that a thread prefetches; 0 loads each on demand.
        num_workers: processes that make whole batches in turn, such as those that decode images; 0
            leaves that to the thread.
    """

    num_ahead: Ahead = 2
    num_workers: Ahead = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class SequenceOptions(LoadOptions):
    """The length of token sequences, and how they are loaded.

    Args:
        sequence_length: tokens that a sample predicts.
    """

    sequence_length: Count = 128


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextData(SequenceOptions, TextSource):
    """Text files, read as windows of one length."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenData(SequenceOptions, TokenSource):
    """Files of token ids, read as windows of one length."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class JsonlData(SequenceOptions, JsonlSource):
    """JSONL files, read as rows of one length."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParquetData(SequenceOptions, ParquetSource):
    """Parquet files, read as rows of one length."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ArrayRecordData(SequenceOptions, ArrayRecordSource):
    """ArrayRecord files, read as rows of one length."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DatasetsData(SequenceOptions, DatasetsSource):
    """Hugging Face datasets, read as rows of one length."""


SOURCES: MappingProxyType[str, type] = MappingProxyType(
    {
        "text": TextSource,
        "tokens": TokenSource,
        "jsonl": JsonlSource,
        "parquet": ParquetSource,
        "array_record": ArrayRecordSource,
        "datasets": DatasetsSource,
    }
)
"""The sources that a mixture can have, by their `kind`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class MixtureData(SequenceOptions):
    """A mixture of sources, sampled in proportion to their weights.

    Args:
        sources: the sources, each with its `kind` and its own options.
        weights: the weight of each source, a number above 0; they need not sum to 1.
    """

    sources: tuple[Annotated[Any, OneOf(SOURCES, tag="kind")], ...]
    weights: tuple[Positive, ...]

    def validate(self) -> None:
        """Checks that every source has a weight, and that all have the same unit and tokenizer.

        Raises:
            ConfigError: when one of these does not hold.
        """
        if len(self.weights) != len(self.sources) or not self.sources:
            raise ConfigError(
                f"data.weights: got {list(self.weights)} for {len(self.sources)} sources; write a "
                "number above 0 for each"
            )
        if len(units := {source.unit for source in self.sources}) > 1:
            raise ConfigError(
                f"data.sources: got losses in {' and '.join(sorted(units))}, which cannot be "
                "mixed; give all sources a tokenizer, or none"
            )
        if len(named := {source.tokenizer for source in self.sources} - {None}) > 1:
            raise ConfigError(
                f"data.sources: got the tokenizers {' and '.join(sorted(named))}, whose tokens "
                "mean different things; give all sources one"
            )

    @property
    def tokenizer(self) -> str | None:
        """The tokenizer of the sources that name one."""
        return next((s.tokenizer for s in self.sources if s.tokenizer is not None), None)

    @property
    def unit(self) -> str:
        """The unit of a loss."""
        return self.sources[0].unit

    @property
    def arrays(self) -> tuple[str, ...]:
        """The names of the arrays of a batch: all that any source has."""
        names = {name for source in self.sources for name in source.arrays}
        return tuple(name for name in ("tokens", "segments", "mask") if name in names)

    def open(self, length: int) -> Mixture:
        """Opens every source."""
        return Mixture([source.open(length) for source in self.sources], self.weights)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ImageData(LoadOptions, ImageSource):
    """Images in `.npz` files."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ImageFolderData(LoadOptions, ImageFolder):
    """Folders of images, one subfolder per class."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ImageRecordsData(LoadOptions, ImageRecords):
    """Records with an image and a label."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SyntheticImageData(LoadOptions, SyntheticImages):
    """Synthetic images, which need no files."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class OwnData(LoadOptions, UserCode):
    """A user's samples: `data: {factory: package.module:make, ...}`.

    The factory returns two sequences of samples, for training and for validation, each with a
    length and with items that are dicts of arrays, all of the same shapes and dtypes; or one object
    with the methods of `axon_dist.data.Samples`.
    """

    section: ClassVar[str] = "data"

    @functools.cached_property
    def samples(self) -> Samples:
        """The samples that the factory returns; it is called once.

        Raises:
            ConfigError: when it makes neither samples nor two sequences of them.
        """
        made = self.call()
        if all(hasattr(made, name) for name in ("identity", "train", "spread", "validation")):
            return made
        is_pair = isinstance(made, (tuple, list)) and len(made) == 2
        if not is_pair or not all(hasattr(side, "__getitem__") for side in made):
            raise self.returned(
                made,
                "two sequences of samples, (training, validation), or one axon_dist.data.Samples",
            )
        train, validation = made
        return Sequences(train, validation, self.path)


DATA: MappingProxyType[str, type] = MappingProxyType(
    {
        "text": TextData,
        "tokens": TokenData,
        "jsonl": JsonlData,
        "parquet": ParquetData,
        "array_record": ArrayRecordData,
        "datasets": DatasetsData,
        "mixture": MixtureData,
        "images": ImageData,
        "image_folder": ImageFolderData,
        "image_records": ImageRecordsData,
        "synthetic_images": SyntheticImageData,
    }
)
"""The dataclass of the section for each `data.kind`."""

TokenSection: TypeAlias = (
    TextData | TokenData | JsonlData | ParquetData | ArrayRecordData | DatasetsData | MixtureData
)
"""A section whose samples are sequences of tokens."""

TOKENS: tuple[type, ...] = tuple(row for row in DATA.values() if issubclass(row, SequenceOptions))
"""The sections of `DATA` whose samples are sequences of tokens."""
