"""`RunConfig`: the config of a run, as frozen dataclasses that are checked when they are read."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, Literal, TypeAlias

import jax

from axon_dist.checkpoint.save import check_type
from axon_dist.core.errors import ConfigError, did_you_mean, warn
from axon_dist.core.files import as_place
from axon_dist.mesh import MeshSpec, World
from axon_dist.ops.precision import GradScaler, MixedPrecision, preset_name
from axon_dist.parallel import STRATEGIES, Strategy, as_strategy, compose, resolve_name
from axon_dist.planner.reading import Remat

from ...core.typing import JsonDict
from .models import (
    LOSSES,
    MODELS,
    ModelKind,
    OwnModel,
    UserLoss,
    kind_of,
    sizes_of_hub,
    with_hub_weights,
)
from .optimizers import OPTIMIZERS, AdamW, Optimizer, OwnOptimizer
from .read import (
    OneOf,
    Parsed,
    Seed,
    meanings_of,
    options_of,
    read,
    read_options,
    shown,
    with_new_keys,
    write,
)
from .sections import (
    DATA,
    LOGGERS,
    CheckpointConfig,
    DevicesConfig,
    Logger,
    Lora,
    OwnData,
    TextData,
    TrainConfig,
    Weights,
)

StrategyOptions: TypeAlias = Mapping[str, Mapping[str, Any]]
"""Options by strategy name."""


def strategy_options(value: object) -> StrategyOptions:
    """Reads `ddp`, `[fsdp, tensor]` or `{ddp: {bucket_capacity: 1000000}}`.

    Aliases of strategies are replaced by the names in `parallel.STRATEGIES`.

    Raises:
        ValueError: for another form, for no strategy, or for a strategy that is named twice.

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
                f"got {list(value)!s:.200}, in which {shown(twice)} appears twice; a strategy "
                "applies once, so name it once"
            )
        value = {name: {} for name in value}
    if not isinstance(value, Mapping) or not value:
        raise ValueError(
            f"got {value!r:.80}, which must be a strategy, a list of them, or a section "
            "{strategy: {option: value}}"
        )
    for name, options in value.items():
        if options is not None and not isinstance(options, Mapping):
            raise ValueError(
                f"{shown(name)} has {options!r:.80} under it, which must be a section of its "
                "options"
            )
    resolved: dict[str, dict[str, Any]] = {}
    written: dict[str, str] = {}
    for name, options in value.items():
        strategy, implied = resolve_name(str(name))
        if strategy in resolved:
            raise ValueError(
                f"got {shown(written[strategy])} and {shown(name)}, which are both "
                f"{shown(strategy)}; a strategy applies once, so name it once"
            )
        for key, value_implied in implied.items():
            if (options or {}).get(key, value_implied) != value_implied:
                raise ValueError(
                    f"got {key}: {options[key]!r:.80} under {shown(name)}, which means {key}: "
                    f"{value_implied}; write {strategy} instead of {shown(name)}"
                )
        written[strategy] = str(name)
        merged = {**implied, **(options or {})}
        row = STRATEGIES.get(strategy)
        resolved[strategy] = merged if row is None else with_new_keys(row.make, merged)
    return MappingProxyType(resolved)


def build_strategy(
    parallel: Mapping[str, Mapping[str, object]], model: Any, world: World
) -> Strategy:
    """Makes the strategies that a config names, and composes them.

    Args:
        parallel: options by strategy name, as plain data.
        model: a module, or a factory of a module.
        world: the devices and their mesh.

    Raises:
        ConfigError: for an unknown strategy or option, an option of the wrong type, or a missing
            option without a default.
        MeshError: when a strategy needs an axis that the mesh lacks.
        StrategyConflictError: when two strategies contradict each other.

    Example:
        >>> build_strategy({"ddp": {"bucket_capacity": 1000}}, None, World.emulate(8)).name
        'ddp'
    """
    options_by_name = read_strategies(parallel)
    data_parallel = [name for name in options_by_name if STRATEGIES[name].is_data_parallel]
    # A single data-parallel strategy uses all data axes. If there are several, each of them uses
    # its default axes.
    shares = {"shares": True} if len(data_parallel) > 1 else {}
    strategies = [
        as_strategy(
            STRATEGIES[name](model, world, **options, **(shares if name in data_parallel else {}))
        )
        for name, options in options_by_name.items()
    ]
    return strategies[0] if len(strategies) == 1 else compose(*strategies)


def unit_of(config: RunConfig) -> str:
    """Returns the unit of a run's loss; an empty string for a user's own loss, which knows it."""
    return config.kind.task.unit(config.data) if config.loss is None else ""


def with_own_precision(config: RunConfig) -> RunConfig:
    """Returns the config with the `mixed_precision` of its strategies as its `precision`.

    Both mean the same to the step, but `precision` can be read without building a strategy, and
    stays if other strategies replace these. If they differ, the config is returned unchanged;
    building its step then raises.

    Example:
        >>> half = {"fsdp": {"mixed_precision": "bf16"}}
        >>> config = with_own_precision(RunConfig.from_dict({"parallel": half}))
        >>> config.precision, dict(config.parallel)
        ('bf16', {'fsdp': {}})
    """
    key = "mixed_precision"
    options = read_strategies(config.parallel).values()
    given = [one[key] for one in options if one.get(key) is not None]
    named = given if config.precision is None else [config.precision, *given]
    policies = [MixedPrecision.of(choice) for choice in named]
    if not given or any(policy != policies[0] for policy in policies):
        return config
    precision = named[0] if isinstance(named[0], str) else policies[0]
    parallel = MappingProxyType(without_option(config.parallel, key))
    return dataclasses.replace(config, precision=precision, parallel=parallel)


def without_option(
    parallel: Mapping[str, Mapping[str, object]], option: str
) -> dict[str, dict[str, object]]:
    """Returns strategies with their options, as plain data, but without one of these.

    Example:
        >>> without_option({"fsdp": {"mixed_precision": "bf16"}}, "mixed_precision")
        {'fsdp': {}}
    """
    return {
        name: {key: value for key, value in options.items() if key != option}
        for name, options in parallel.items()
    }


def read_strategies(parallel: Mapping[str, Mapping[str, object]]) -> dict[str, JsonDict]:
    """Checks names and options against the registry, without a world.

    Raises:
        ConfigError: for an unknown strategy or option, an option of the wrong type, or a missing
            option without a default.
    """
    for name in parallel:
        if name not in STRATEGIES:
            hint = did_you_mean(name, STRATEGIES)
            raise ConfigError(f"parallel.{shown(name)}: there is no such strategy.{hint}")
    return {
        name: read_options(
            options_of(STRATEGIES[name].make), options, f"parallel.{name}", "option", _says_missing
        )
        for name, options in parallel.items()
    }


def _says_missing(path: str, option: str) -> str:
    strategy = path.removeprefix("parallel.")
    row = STRATEGIES[strategy]
    meaning = meanings_of(row.make)[option].rstrip(".")
    value = row.needed.get(option, "...")
    return (
        f"parallel.{strategy} needs {option}: {meaning}; write "
        f"parallel: {{{strategy}: {{{option}: {value}}}}}"
    )


_MOST_SAMPLES = 2**27


def mesh_spec(value: object) -> MeshSpec:
    """Reads `dp=4,tp=2` or `{dp: 4, tp: 2}`.

    Raises:
        ValueError: for another form, or for invalid axes.
    """
    if not isinstance(value, (str, Mapping)):
        raise ValueError(
            f"got {value!r:.80}, which must be axes and sizes, such as dp=8 or {{dp: 8}}"
        )
    return MeshSpec(value)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunConfig:
    """The config of a run: equal configs describe equal runs.

    Args:
        name: the name of the run.
        seed: the seed of the initial weights, the dropout and the order of the samples.
        run_dir: the folder for the files of the run, also at `gs://` or `s3://`; None makes
            `runs/<name>-<time>`.
        mesh: axes and sizes, from outer to inner; one size may be -1.
        devices: which devices the mesh uses.
        model: the model, by its `kind` and sizes; or `{factory: module:name, ...}`.
        data: the training data, by its `kind` and options; or a factory.
        loss: replaces the loss of the model's kind, `{function: module:name, ...}` or a factory.
        validation: further validation sets, files by name as in `{code: data/code/*.py}`; their
            metrics are `validation/code/loss` and so on.
        optimizer: the optimizer, by its `name`, options and learning rate; or a factory.
        parallel: the strategies to compose, each with its options.
        precision: `float32`, `bf16`, `fp16`, `fp8`, or each dtype separately; None leaves it to the
            strategies.
        remat: what the backward pass recomputes. None recomputes what the strategies define. `auto`
            does the same if they define anything; otherwise it recomputes as little as the memory
            of a device allows. The memory is read from the traced step and, if it is close to the
            limit, from the compiled step. On devices of unknown memory, such as emulated ones, and
            in a pipeline, whose stages recompute by its own options, `auto` adds nothing.
        unroll: where the strategy splits or recomputes blocks, up to this many blocks are unrolled,
            and more blocks run as a loop; None leaves it to `scan_layers`. It changes numbers by
            rounding at most.
        scan_layers: `true` runs all equal blocks as one loop. `false` unrolls the blocks that the
            strategy splits or recomputes; `auto` decides about these by the costs on the devices,
            and a run, `axon plan` and `axon inspect` report the choice. Blocks that
            `model.scan_layers` stacks are always a loop. It changes numbers by rounding at most.
        axis_names: maps axis names in the code of a user-defined model to axes of `mesh`, such as
            `{data: [dp, fsdp], heads: tp}`, for `with_sharding_constraint`, `reshard` and
            `nnx.with_partitioning`; an empty list means no axis. Axes of the mesh are known by
            their own names, and common names such as `data` and `model` have defaults. It does not
            change the numbers.
        weights: files with the initial weights; None initializes them randomly.
        lora: adapters added to linear layers; trained are only the adapters, and what `trainable`
            matches. None for no adapters.
        trainable: regular expressions, searched for in the paths of parameters. Parameters that
            match are trained, and also the adapters if there are any; all others are frozen. Empty
            trains all parameters, or only the adapters.
        frozen_dtype: the dtype in which frozen parameters are stored, such as `bfloat16` or `int8`;
            None keeps their dtypes.
        loss_scale: loss scaling, which avoids underflow of gradients in half precision; None scales
            only under `fp16`.
        deterministic: give the same bits in every run of this config on devices of one kind; CPUs
            and TPUs always do, GPUs become slower. `elastic` also gives the same bits on
            every power of two of CPU devices up to `logical_shards`, under ddp, zero and fsdp.
        logical_shards: the number of parts into which a batch is cut for `deterministic: elastic`:
            a power of two, and a multiple of the number of devices times `train.accumulate`, in
            every run that must have the same bits.
        compiler_options: XLA options by name, which add to and override those of the chip; null
            removes an option of the chip. Most change only time and memory; some change the bits.
        train: length, batch size and cadence of the run.
        checkpoint: when the state is saved, and which checkpoints are kept.
        loggers: where metrics are logged in addition to `metrics.jsonl`.

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
            user_code={"factory": OwnModel},
            hubs={"transformer": sizes_of_hub},
        ),
    ] = MODELS["transformer"].sizes()
    data: Annotated[Any, OneOf(DATA, tag="kind", user_code={"factory": OwnData})] = TextData()
    loss: Annotated[UserLoss, OneOf({}, user_code=LOSSES)] | None = None
    validation: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    optimizer: Annotated[
        Optimizer | OwnOptimizer, OneOf(OPTIMIZERS, user_code={"factory": OwnOptimizer})
    ] = AdamW()
    parallel: Annotated[
        StrategyOptions,
        Parsed(
            strategy_options,
            lambda parallel: {name: dict(options) for name, options in parallel.items()},
            "a strategy, a list, or {strategy: {option: x}}",
        ),
    ] = dataclasses.field(default_factory=lambda: strategy_options("ddp"))
    precision: MixedPrecision | str | None = None
    remat: Remat = "auto"
    unroll: int | None = None
    scan_layers: bool | Literal["auto"] = "auto"
    axis_names: Mapping[str, str | tuple[str, ...]] = dataclasses.field(default_factory=dict)
    weights: Weights | None = None
    lora: Lora | None = None
    trainable: tuple[str, ...] = ()
    frozen_dtype: str | None = None
    loss_scale: GradScaler | None = None
    deterministic: bool | Literal["elastic"] = False
    logical_shards: int | None = None
    compiler_options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    train: TrainConfig = TrainConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    loggers: tuple[Annotated[Logger, OneOf(LOGGERS)], ...] = ()

    def __post_init__(self) -> None:
        # A run keeps one name of a preset, however it was spelled.
        object.__setattr__(self, "precision", preset_name(self.precision))

    @property
    def kind(self) -> ModelKind:
        """The kind of the model, with its task for this data."""
        return kind_of(self.model, self.data, self.loss)

    @classmethod
    def from_dict(cls, data: Mapping[str, object]) -> RunConfig:
        """Reads plain data, such as the contents of a YAML file.

        Raises:
            ConfigError: for the first mistake; the message names its dotted key.
        """
        return read(cls, with_hub_weights(data))

    def to_dict(self) -> JsonDict:
        """Returns plain data, including all defaults; `from_dict` reads it back."""
        return write(self)

    def validate(self) -> None:
        """Checks values that concern several sections.

        Raises:
            ConfigError: when the name cannot be a folder name, the model does not accept the data,
                the schedule does not fit the run, microbatches do not divide the batch, checkpoints
                cannot be compared, or a precision, a strategy, or an option is unknown.
        """
        if not self.name.isprintable() or "/" in self.name or not 0 < len(self.name) <= 100:
            raise ConfigError(
                f"name: got {self.name!r:.120}, which must be usable as a folder name: 1 to 100 "
                "printable characters without a slash",
                code="run-name",
            )
        for key, path in (("run_dir", self.run_dir), ("checkpoint.dir", self.checkpoint.dir)):
            if path is not None:
                as_place(path, key)
        checkpoint = self.checkpoint
        if (checkpoint.dir or self.run_dir) is not None:
            check_type(as_place(checkpoint.dir or self.run_dir, "checkpoint.dir"), checkpoint.type)
        self._check_task()
        if self.train.global_batch % self.train.accumulate:
            raise ConfigError(
                f"train.accumulate: got {self.train.accumulate} microbatches, which must divide "
                f"train.global_batch={self.train.global_batch}"
            )
        self._check_validation()
        profile = self.train.profile
        # With 0 a signal starts the trace, and the end of the run may cut it short.
        last = 0 if profile is None or not profile.at else profile.at + profile.steps - 1
        if profile is not None and last > self.train.steps:
            raise ConfigError(
                f"train.profile: got at={profile.at} and steps={profile.steps}, but the run ends "
                f"with step {self.train.steps}; lower them",
                code="profile-after-end",
            )
        # The configs of earlier runs may have it, so it is no error.
        if profile is not None and profile.traces_nothing:
            warn(
                "train.profile: got at=1 and steps=1, which trace nothing, because the first step "
                "of a process compiles and is never traced; raise one of them",
                code="profile-first-step",
            )
        names = [next(n for n, row in LOGGERS.items() if row is type(x)) for x in self.loggers]
        if twice := [name for name in names if names.count(name) > 1]:
            raise ConfigError(f"loggers: got {twice[0]} twice; name it once", code="logger-twice")
        self.optimizer.build(self.train.steps)
        MixedPrecision.of(self.precision)
        read_strategies(self.parallel)

    def _check_task(self) -> None:
        task = self.kind.task
        if not isinstance(self.data, task.data):
            model = next(name for name, row in MODELS.items() if row.sizes is type(self.model))
            kind = next(name for name, row in DATA.items() if row is type(self.data))
            *others, last = (name for name, row in DATA.items() if row in task.data)
            raise ConfigError(
                f"data.kind: got {kind}, but the model is a {model}, which needs "
                f"{', '.join(others)} or {last}; change data.kind or model.kind",
                code="data-kind-of-model",
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
        eval_every = train.eval_every
        save_every = self.checkpoint.every
        if self.checkpoint.best and save_every and (not eval_every or save_every % eval_every):
            raise ConfigError(
                f"checkpoint.best: got {self.checkpoint.best}, which needs a validation before "
                f"every checkpoint; make checkpoint.every={save_every} a multiple of "
                f"train.eval_every={eval_every}"
            )
        for name, files in self.validation.items():
            if re.fullmatch(r"[\w.-]+", name) is None or not files:
                raise ConfigError(
                    f"validation.{name}: got {list(files)}; each set needs at least one file, and "
                    "a name of letters, digits, dots, - and _",
                    code="validation-set",
                )
        best = train.best
        if not best.metric.startswith("validation/"):
            raise ConfigError(
                f"train.best.metric: got {best.metric!r:.80}, which must be a validation metric, "
                "such as validation/loss",
                code="best-metric-not-validation",
            )
        name, slash, _ = best.metric.removeprefix("validation/").partition("/")
        if slash and name not in self.validation:
            raise ConfigError(
                f"train.best.metric: got {best.metric!r:.80}, but there is no set {name!r:.80} in "
                f"validation.{did_you_mean(name, self.validation)}",
                code="best-metric-unknown-set",
            )
        if best.patience and not train.eval_every:
            raise ConfigError(
                f"train.best.patience: got {best.patience}, but train.eval_every=0 validates only "
                "at the end; set train.eval_every",
                code="patience-without-validations",
            )


def abstract_batch(config: RunConfig) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the shapes of a run's global batch, which are known before any data is read."""
    fields = config.kind.task.fields(config.model, config.data)
    return {
        name: jax.ShapeDtypeStruct((config.train.global_batch, *field.shape), field.dtype)
        for name, field in fields.items()
    }
