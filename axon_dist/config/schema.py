"""`RunConfig`: everything a run is made from, as frozen values that are checked when read."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, TypeAlias

from axon_dist.checkpoint import Retention, StateDictType
from axon_dist.core.errors import ConfigError
from axon_dist.core.files import as_path
from axon_dist.mesh import MeshSpec
from axon_dist.models import TransformerConfig
from axon_dist.nn import ActivationCheckpointing
from axon_dist.precision import GradScaler, MixedPrecision
from axon_dist.step import Nonfinite

from .data import DATA, OwnData, TextData
from .kinds import Count, Devices, Fraction, Natural, OneOf, Parsed, Positive, Seed
from .loggers import LOGGERS, Logger
from .models import LOSSES, MODELS, ModelKind, OwnLoss, OwnModel, kind_of
from .optimizers import OPTIMIZERS, AdamW, Optimizer, OwnOptimizer
from .read import read, write
from .start import Lora, Weights
from .strategies import read_strategies

StrategyOptions: TypeAlias = Mapping[str, Mapping[str, Any]]
"""Options by strategy name."""


_MOST_SAMPLES = 2**27


def mesh_spec(value: Any) -> MeshSpec:
    """Reads `dp=4,tp=2` or `{dp: 4, tp: 2}`.

    Raises:
        ValueError: for anything else, or for axes that make no mesh.
    """
    if not isinstance(value, (str, Mapping)):
        raise ValueError(f"got {value!r}, which must be axes and sizes, such as dp=8 or {{dp: 8}}")
    return MeshSpec(value)


def strategy_options(value: Any) -> StrategyOptions:
    """Reads `ddp`, `[full_shard, tensor]` or `{ddp: {bucket_capacity: 1000000}}`.

    Raises:
        ValueError: for anything else, none, or a strategy that stands twice.

    Example:
        >>> dict(strategy_options("ddp"))
        {'ddp': {}}
    """
    if isinstance(value, str):
        value = [value]
    if isinstance(value, (list, tuple)) and all(isinstance(name, str) for name in value):
        twice = next((name for name in value if value.count(name) > 1), None)
        if twice is not None:
            raise ValueError(
                f"got {list(value)}, in which {twice} stands twice; a strategy applies once, so "
                "name it once"
            )
        value = {name: {} for name in value}
    if not isinstance(value, Mapping) or not value:
        raise ValueError(
            f"got {value!r}, which must be a strategy, a list of them, or a section "
            "{strategy: {option: value}}"
        )
    for name, options in value.items():
        if options is not None and not isinstance(options, Mapping):
            raise ValueError(
                f"{name} has {options!r} under it, which must be a section of its options"
            )
    return MappingProxyType({str(name): dict(options or {}) for name, options in value.items()})


def _plain_options(options: StrategyOptions) -> dict[str, dict[str, Any]]:
    return {name: dict(values) for name, values in options.items()}


@dataclasses.dataclass(frozen=True, kw_only=True)
class DevicesConfig:
    """Which devices a run takes.

    Args:
        emulate: make up this many CPU devices; None takes the devices that there are.
    """

    emulate: Devices | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProfileConfig:
    """Which steps of a run are traced, into `profile` in its folder, for Perfetto or XProf.

    Args:
        at: the first of them, counted from 1; the first step of a process compiles and is left out.
        steps: how many.
    """

    at: Count = 20
    steps: Count = 3


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """How long a run trains, on how much at a time, and how often it says so.

    Args:
        steps: optimizer steps.
        global_batch: samples in one step, over all devices and microbatches.
        accumulate: microbatches that one step adds up.
        clip_norm: largest global norm of the gradients; None leaves them as they are.
        eval_every: steps between validations; 0 validates only at the end.
        eval_batches: global batches in one validation, spread over the validation data.
        log_every: steps between written metrics, each their mean over those steps.
        peak_flops: what one device computes at best, in FLOP/s, which the utilization in the
            metrics is measured against; None takes that of the chip, and on one that is not known
            there is no utilization.
        ema: decay of a moving average of the parameters, which is then what is validated; None
            keeps none.
        nonfinite: what to do when a loss or gradient is not finite: `stop` with an error, `skip`
            that batch, or `rollback` to the newest checkpoint and go on with new batches.
        max_rollbacks: how often a run goes back before it stops.
        profile: which steps are traced; None traces none.
    """

    steps: Count = 1000
    global_batch: Count = 32
    accumulate: Count = 1
    clip_norm: Positive | None = 1.0
    eval_every: Natural = 100
    eval_batches: Count = 16
    log_every: Count = 10
    peak_flops: Positive | None = None
    ema: Fraction | None = None
    nonfinite: Nonfinite = Nonfinite.STOP
    max_rollbacks: Count = 3
    profile: ProfileConfig | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """When a run saves its state, how, and which of its checkpoints stay.

    Args:
        every: steps between checkpoints; 0 saves only the last state.
        keep: how many of the newest stay.
        best: how many of those with the lowest validation loss stay.
        keep_every: those whose step is a multiple of it stay, too; 0 for none.
        background: write while the run goes on.
        type: `sharded`, every process its shards; or `full`, process 0 everything in one file.
        dir: the folder; None makes `checkpoints` in that of the run.
    """

    every: Natural = 100
    keep: Count = 3
    best: Natural = 0
    keep_every: Natural = 0
    background: bool = True
    type: StateDictType = StateDictType.SHARDED
    dir: str | None = None

    @property
    def retention(self) -> Retention:
        """Which checkpoints stay."""
        return Retention(last=self.keep, best=self.best, every=self.keep_every)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Everything a run is made from; two runs with equal values are equal runs.

    Args:
        name: what the run is called.
        seed: of the initial weights, the dropout and the order of the samples.
        run_dir: the folder for what the run writes; None makes `runs/<name>-<time>`.
        mesh: axes and sizes, outer to inner; one size may be -1.
        devices: which devices the mesh is laid over.
        model: the sizes of the model, under the `kind` it is of; or `{factory: module:name, ...}`.
        data: what the model is trained on, under the `kind` it is of; or a factory.
        loss: in place of that of the model's kind, `{function: module:name, ...}` or a factory.
        optimizer: the optimizer under its `name`, with its options and learning rate; or a factory.
        parallel: the strategies to compose, each with its options.
        precision: `float32`, `bf16`, `fp16`, or the dtypes one by one; None leaves it to the
            strategies.
        remat: what the backward pass recomputes; None leaves it to the strategies.
        weights: files with the first weights; None draws them.
        lora: adapters put beside linear layers, which are then what is trained; None for none.
        trainable: regular expressions, searched for in the paths of the parameters: what is found
            is trained, with the adapters if there are some, and all else frozen; empty trains
            everything, or the adapters alone.
        frozen_dtype: what frozen parameters are kept in, such as `bfloat16` or `int8`; None keeps
            theirs.
        loss_scale: keeps small gradients alive in half precision; None scales under `fp16` alone.
        deterministic: give the same bits in every run of this config on devices of one kind; CPUs
            and TPUs do that anyway, GPUs get slower by it.
        train: length, batch and cadence of the run.
        checkpoint: when the state is saved, and what of it stays.
        loggers: where metrics go besides `metrics.jsonl`.

    Example:
        >>> config = RunConfig.from_dict({"mesh": "dp=8", "train": {"steps": 5}})
        >>> config.train.steps, str(config.mesh)
        (5, 'dp=8')
        >>> RunConfig.from_dict(config.to_dict()) == config
        True
    """

    name: str = "run"
    seed: Seed = 0
    run_dir: str | None = None
    mesh: Annotated[
        MeshSpec, Parsed(mesh_spec, lambda spec: spec.shape, "dp=4,tp=2 or {dp: 4, tp: 2}")
    ] = MeshSpec(dp=-1)
    devices: DevicesConfig = DevicesConfig()
    model: Annotated[
        Any,
        OneOf(
            {name: kind.sizes for name, kind in MODELS.items()},
            tag="kind",
            presets={name: kind.presets for name, kind in MODELS.items()},
            own={"factory": OwnModel},
        ),
    ] = TransformerConfig()
    data: Annotated[Any, OneOf(DATA, tag="kind", own={"factory": OwnData})] = TextData()
    loss: Annotated[OwnLoss, OneOf({}, own=LOSSES)] | None = None
    optimizer: Annotated[
        Optimizer | OwnOptimizer, OneOf(OPTIMIZERS, own={"factory": OwnOptimizer})
    ] = AdamW()
    parallel: Annotated[
        StrategyOptions,
        Parsed(
            strategy_options,
            _plain_options,
            "a strategy, a list, or {strategy: {option: x}}",
        ),
    ] = dataclasses.field(default_factory=lambda: strategy_options("ddp"))
    precision: MixedPrecision | str | None = None
    remat: ActivationCheckpointing | None = None
    weights: Weights | None = None
    lora: Lora | None = None
    trainable: tuple[str, ...] = ()
    frozen_dtype: str | None = None
    loss_scale: GradScaler | None = None
    deterministic: bool = False
    train: TrainConfig = TrainConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    loggers: tuple[Annotated[Logger, OneOf(LOGGERS)], ...] = ()

    @property
    def kind(self) -> ModelKind:
        """The kind that the model is of, and what it learns from this data."""
        return kind_of(self.model, self.data, self.loss)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> RunConfig:
        """Reads plain data, as a YAML file holds it.

        Raises:
            ConfigError: naming the dotted key of the first mistake.
        """
        return read(cls, data)

    def to_dict(self) -> dict[str, Any]:
        """Writes plain data with every default spelled out; `from_dict` reads it back."""
        return write(self)

    def validate(self) -> None:
        """Checks what concerns several sections at once.

        Raises:
            ConfigError: when the name cannot be a folder, the model cannot take the data, the
                schedule does not fit the run, microbatches do not divide the batch, checkpoints
                cannot be compared, or there is no such precision, strategy, or option of it.
        """
        if not self.name.isprintable() or "/" in self.name or not 0 < len(self.name) <= 100:
            raise ConfigError(
                f"name: got {self.name!r:.120}, which must be usable as a folder's name: 1 to 100 "
                "letters that can be printed, no slash among them"
            )
        for key, path in (("run_dir", self.run_dir), ("checkpoint.dir", self.checkpoint.dir)):
            if path is not None:
                as_path(path, key)
        self._check_task()
        if self.train.global_batch % self.train.accumulate:
            raise ConfigError(
                f"train.accumulate: got {self.train.accumulate} microbatches, which must divide "
                f"train.global_batch={self.train.global_batch}"
            )
        self._check_validation()
        self._check_best()
        self._check_watchers()
        self.optimizer.build(self.train.steps)
        MixedPrecision.of(self.precision)
        read_strategies(self.parallel)

    def _check_task(self) -> None:
        task = self.kind.task
        if not isinstance(self.data, task.data):
            model = next(name for name, row in MODELS.items() if row.sizes is type(self.model))
            given = next(name for name, row in DATA.items() if row is type(self.data))
            *others, last = (name for name, row in DATA.items() if row in task.data)
            raise ConfigError(
                f"data.kind: got {given}, and the model is a {model}, which needs "
                f"{', '.join(others)} or {last}; change data.kind or model.kind"
            )
        task.check(self.model, self.data)
        if self.train.peak_flops is not None and task.item != "tokens":
            raise ConfigError(
                f"train.peak_flops: got {self.train.peak_flops}, but utilization counts 6 FLOPs "
                f"per parameter and token, which {task.item} do not have; leave it out"
            )

    def _check_validation(self) -> None:
        train = self.train
        if train.eval_batches * train.global_batch > _MOST_SAMPLES:
            raise ConfigError(
                f"train.eval_batches: got {train.eval_batches} batches of "
                f"{train.global_batch} samples; a validation has at most {_MOST_SAMPLES} samples: "
                "lower it, or train.global_batch"
            )

    def _check_watchers(self) -> None:
        profile = self.train.profile
        if profile is not None and profile.at + profile.steps - 1 > self.train.steps:
            raise ConfigError(
                f"train.profile: got at={profile.at} and steps={profile.steps}, and the run ends "
                f"with step {self.train.steps}; lower them"
            )
        names = [next(n for n, row in LOGGERS.items() if row is type(x)) for x in self.loggers]
        if twice := [name for name in names if names.count(name) > 1]:
            raise ConfigError(f"loggers: got {twice[0]} twice, into one place; name it once")

    def _check_best(self) -> None:
        eval_every, save_every = self.train.eval_every, self.checkpoint.every
        if self.checkpoint.best and save_every and (not eval_every or save_every % eval_every):
            raise ConfigError(
                f"checkpoint.best: got {self.checkpoint.best}, which needs a validation before "
                f"every checkpoint; make checkpoint.every={save_every} a multiple of "
                f"train.eval_every={eval_every}"
            )
