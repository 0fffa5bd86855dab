"""Sections of a config: devices, training, checkpoints, loggers, initial weights, and the data."""

from __future__ import annotations

import dataclasses
import functools
import zlib
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

import jax
from flax import nnx

from axon_dist.checkpoint import Retention, StateDictType
from axon_dist.core.errors import ConfigError
from axon_dist.core.files import Place
from axon_dist.core.renamed import renamed_fields
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

    SIGUSR1 sent to a process traces its next steps, even if the config does not have this section.

    Args:
        at: the first traced step, counted from 1. The first step of a process is never traced,
            because it compiles; 0 waits for the signal.
        steps: the number of traced steps.
        port: the port at which XProf or TensorBoard can trace process 0 at any time; each further
            process uses the next port; null opens no port.
    """

    at: Natural = 20
    steps: Count = 3
    port: Port | None = None

    @property
    def traces_nothing(self) -> bool:
        """Whether the only step to trace is the first of a process."""
        return self.at == self.steps == 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class BestConfig:
    """Which checkpoint is the best, and when a run without improvement ends.

    Args:
        metric: a validation metric, as named in `metrics.jsonl`: `validation/loss`, the loss of a
            set, such as `validation/code/loss`, or another metric of the loss function.
        mode: `min` if lower is better, `max` if higher is better.
        patience: the run ends after this many validations without improvement; 0 for no limit.
        min_delta: the smallest change that counts as an improvement.
    """

    metric: str = "validation/loss"
    mode: Literal["min", "max"] = "min"
    patience: Natural = 0
    min_delta: NonNegative = 0.0

    def has_scored(self, meta: Mapping[str, Any]) -> bool:
        """Whether the score of a checkpoint is by this metric and mode.

        Args:
            meta: the metadata of the checkpoint, in which a run saves its config. Checkpoints
                without one, or from before there was a choice, count.
        """
        saved: object = meta
        for key in ("config", "train", "best"):
            saved = saved.get(key) if isinstance(saved, Mapping) else None
        own = {"metric": self.metric, "mode": self.mode}
        return not isinstance(saved, Mapping) or {**own, **saved}.items() >= own.items()


@renamed_fields(layer_norms="norms_by_layer")
@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """How long a run trains, with which batch size, and how often it validates and reports.

    Args:
        steps: optimizer steps.
        global_batch: samples per step, over all devices and microbatches.
        accumulate: the number of microbatches whose gradients one step accumulates.
        clip_norm: the maximum global norm of the gradients; None does not clip.
        eval_every: steps between validations; 0 validates only at the end.
        eval_batches: the maximum number of global batches in one validation, spread over the
            validation data, each sample once; `axon eval` uses all validation data.
        best: which checkpoint is the best, and when a run ends early.
        log_every: steps between written metrics, each averaged over these steps.
        peak_flops: the peak FLOP/s of one device, for the utilization in the metrics; None for that
            of the chip for the compute dtype. Without it, an unknown chip has no utilization.
        ema: decay of a moving average of the parameters, which is then validated instead of them;
            None for no average.
        nonfinite: what to do if a loss or gradient is not finite: `stop` with an error, `skip`
            that batch, or `rollback` to the newest checkpoint and continue with new batches.
        max_rollbacks: the maximum number of rollbacks before a run stops.
        spikes: which steps are skipped because the loss or the gradient is an outlier; None skips
            none.
        norms_by_layer: write the norms of weights, gradients and updates of every layer.
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
    norms_by_layer: bool = False
    profile: ProfileConfig | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """When and how a run saves its state, and which checkpoints it keeps.

    Args:
        every: steps between checkpoints; 0 saves only the last state.
        memory_every: steps between copies of the state in host memory. A run that has lost a
            process continues from the newest copy without reading a checkpoint, and repeats the
            steps since then. 0 makes no copies. `axon launch --max-restarts N` keeps the copies
            when processes restart.
        keep: the number of newest checkpoints to keep.
        best: the number of best checkpoints by `train.best` to keep.
        keep_every: also keep checkpoints whose step is a multiple of this; 0 for none.
        background: write checkpoints while the run continues.
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
    """A metrics logger.

    Attributes:
        module: the package that the extra `loggers` installs.
        entry: the file or folder that it writes in the folder of a run; None if it writes none.
    """

    module: ClassVar[str]
    entry: ClassVar[str | None] = None

    def path(self, folder: Place) -> Place | None:
        """The file or folder that it writes; None if its package or a server decides where.

        Args:
            folder: the folder of the run.
        """
        return None if self.entry is None else folder / self.entry


@dataclasses.dataclass(frozen=True, kw_only=True)
class TensorBoard(Logger):
    """Event files in the folder of the run."""

    module: ClassVar[str] = "tensorboardX"
    entry: ClassVar[str | None] = "tensorboard"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Wandb(Logger):
    """Weights & Biases.

    Args:
        project: the project the run belongs to.
        mode: `offline` stores the run in its folder, `online` uploads it during the run.
    """

    module: ClassVar[str] = "wandb"
    entry: ClassVar[str | None] = "wandb"

    project: str = "axon_dist"
    mode: Literal["offline", "online"] = "offline"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trackio(Logger):
    """Trackio, which stores the run on this machine.

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
        uri: the server; None stores the run in the file `mlflow.db` in its folder.
    """

    module: ClassVar[str] = "mlflow"
    entry: ClassVar[str | None] = "mlflow.db"

    experiment: str = "axon_dist"
    uri: str | None = None

    def path(self, folder: Place) -> Place | None:
        """The database in the folder of the run; None with a server."""
        return super().path(folder) if self.uri is None else None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prometheus(Logger):
    """The last values of the metrics, in Prometheus's text format.

    Args:
        file: the file, which ends in `.prom`, such as one in the folder of node_exporter's textfile
            collector; null for `metrics.prom` in the folder of the run.
        port: also serve `/metrics` on this port of the main process; null for no server.
    """

    module: ClassVar[str] = "prometheus_client"
    entry: ClassVar[str | None] = "metrics.prom"

    file: str | None = None
    port: Port | None = None

    def path(self, folder: Place) -> Place | None:
        """The file that is named, else the one in the folder of the run."""
        return super().path(folder) if self.file is None else Path(self.file)


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
    """Low-rank adapters; see `axon_dist.lora`.

    Then only the adapters are trained, and what `trainable` matches.

    Args:
        rank: columns of the first matrix of an adapter, and rows of the second.
        paths: regular expressions, searched for in the paths of linear layers; empty for all. An
            expression that matches no linear layer is searched for in the paths of embeddings.
        alpha: scales the product by alpha / rank; None for a scale of 1.
        rslora: scale by alpha / sqrt(rank) instead.
        rank_pattern: ranks of some layers, by regular expressions of paths.
        alpha_pattern: alphas of some layers, by regular expressions of paths.
    """

    elsewhere: ClassVar[Mapping[str, str]] = MappingProxyType(
        {
            "dropout": "adapters have no dropout; leave it out",
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
            ConfigError: when a path matches no layer.
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
        files: safetensors files, or one folder with them, such as the snapshot of a hub repository.
        format: the names of tensors: `native`, or a hub format such as `hf-llama`.
        cast: convert between float dtypes, rounding to nearest.
        keep: regular expressions of paths of parameters that keep their initial values if they are
            not in the files; adapters always do.
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
        num_ahead: the number of batches that a thread prefetches; 0 loads each on demand.
        num_workers: the number of processes that make whole batches in turn, for example to decode
            images; 0 to make them in the thread.
    """

    num_ahead: Ahead = 2
    num_workers: Ahead = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class SequenceOptions(LoadOptions):
    """The length of token sequences, and how they are loaded.

    Args:
        sequence_length: the number of tokens that a sample predicts.
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
    """A mixture of sources, sampled in proportion to their weights, within 1%.

    Args:
        sources: the sources, each with its `kind` and its own options.
        weights: the weight of each source, a number above 0; they need not sum to 1.
    """

    sources: tuple[Annotated[Any, OneOf(SOURCES, tag="kind")], ...]
    weights: tuple[Positive, ...]

    def validate(self) -> None:
        """Checks that every source has a weight, and that all have the same unit and tokenizer.

        Raises:
            ConfigError: when a weight is missing, or units or tokenizers differ.
        """
        if len(self.weights) != len(self.sources) or not self.sources:
            raise ConfigError(
                f"data.weights: got {list(self.weights)} for {len(self.sources)} sources; give one "
                "number above 0 per source",
                code="mixture-weights",
            )
        if len(units := {source.unit for source in self.sources}) > 1:
            raise ConfigError(
                f"data.sources: got losses in {' and '.join(sorted(units))}, which cannot be "
                "mixed; give all sources a tokenizer, or none of them",
                code="mixed-loss-units",
            )
        if len(named := {source.tokenizer for source in self.sources} - {None}) > 1:
            raise ConfigError(
                f"data.sources: got the tokenizers {' and '.join(sorted(named))}, whose tokens "
                "mean different things; use one tokenizer for all sources",
                code="mixed-tokenizers",
            )

    @property
    def tokenizer(self) -> str | None:
        """The tokenizer of the sources that have one."""
        return next((s.tokenizer for s in self.sources if s.tokenizer is not None), None)

    @property
    def unit(self) -> str:
        """The unit of a loss."""
        return self.sources[0].unit

    @property
    def arrays(self) -> tuple[str, ...]:
        """The names of the arrays of a batch: those of any source."""
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

    The factory returns two sequences of samples, for training and for validation; or one object
    with the methods of `axon_dist.data.Samples`. A sequence has a length, and its items are dicts
    of arrays, all with the same shapes and dtypes.
    """

    section: ClassVar[str] = "data"

    @functools.cached_property
    def samples(self) -> Samples:
        """The samples that the factory returns; it is called once.

        Raises:
            ConfigError: when the factory returns neither `Samples` nor two sequences.
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
