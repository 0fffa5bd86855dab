"""`RunConfig`: everything a run is made from, as frozen values that are checked when read."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, Literal, TypeAlias

import jax

from axon_dist.checkpoint.save import check_type
from axon_dist.core.errors import ConfigError, did_you_mean
from axon_dist.core.files import as_place
from axon_dist.mesh import MeshSpec, World
from axon_dist.ops.precision import GradScaler, MixedPrecision
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

    Other names of strategies become those of `parallel.STRATEGIES`.

    Raises:
        ValueError: for anything else, none, or a strategy that is named twice.

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
                f"got {list(value)}, in which {twice} appears twice; a strategy applies once, so "
                "name it once"
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
                f"{name} has {options!r:.80} under it, which must be a section of its options"
            )
    resolved: dict[str, dict[str, Any]] = {}
    written: dict[str, str] = {}
    for name, options in value.items():
        strategy, implied = resolve_name(str(name))
        if strategy in resolved:
            raise ValueError(
                f"got {written[strategy]} and {name}, which are both {strategy}; a strategy "
                "applies once, so name it once"
            )
        for key, value_implied in implied.items():
            if (options or {}).get(key, value_implied) != value_implied:
                raise ValueError(
                    f"got {key}: {options[key]} under {name}, which means {key}: {value_implied}; "
                    f"write {strategy} instead of {name}"
                )
        written[strategy] = str(name)
        given = {**implied, **(options or {})}
        row = STRATEGIES.get(strategy)
        resolved[strategy] = given if row is None else with_new_keys(row.make, given)
    return MappingProxyType(resolved)


def build_strategy(
    parallel: Mapping[str, Mapping[str, object]], model: Any, world: World
) -> Strategy:
    """Makes the strategies that a config names, and composes them.

    Args:
        parallel: options by strategy name, as plain data.
        model: a module or a factory of one.
        world: the devices, and the mesh they form.

    Raises:
        ConfigError: for an unknown strategy or option, an option of the wrong type, or a missing
            one that has no default.
        MeshError: when a strategy needs an axis that the mesh lacks.
        StrategyConflictError: when two of them contradict each other.

    Example:
        >>> build_strategy({"ddp": {"bucket_capacity": 1000}}, None, World.emulate(8)).name
        'ddp'
    """
    given = read_strategies(parallel)
    data_parallel = [name for name in given if STRATEGIES[name].is_data_parallel]
    # Alone, a data-parallel strategy is over all data axes; several take the axis of their name.
    shares = {"shares": True} if len(data_parallel) > 1 else {}
    strategies = [
        as_strategy(
            STRATEGIES[name](model, world, **options, **(shares if name in data_parallel else {}))
        )
        for name, options in given.items()
    ]
    return strategies[0] if len(strategies) == 1 else compose(*strategies)


def read_strategies(parallel: Mapping[str, Mapping[str, object]]) -> dict[str, JsonDict]:
    """Checks names and options against the registry, without a world.

    Raises:
        ConfigError: for an unknown strategy or option, an option of the wrong type, or a missing
            one that has no default.
    """
    for name in parallel:
        if name not in STRATEGIES:
            hint = did_you_mean(name, STRATEGIES)
            raise ConfigError(f"parallel.{name:.80}: there is no such strategy.{hint}")
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
        ValueError: for anything else, or for axes that make no mesh.
    """
    if not isinstance(value, (str, Mapping)):
        raise ValueError(
            f"got {value!r:.80}, which must be axes and sizes, such as dp=8 or {{dp: 8}}"
        )
    return MeshSpec(value)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Everything a run is made from; two runs with equal values are equal runs.

    Args:
        name: what the run is called.
        seed: of the initial weights, the dropout and the order of the samples.
        run_dir: the folder for what the run writes, also at `gs://` or `s3://`; None makes
            `runs/<name>-<time>`.
        mesh: axes and sizes, outer to inner; one size may be -1.
        devices: which devices the mesh is made of.
        model: the sizes of the model, under the `kind` it is of; or `{factory: module:name, ...}`.
        data: what the model is trained on, under the `kind` it is of; or a factory.
        loss: in place of that of the model's kind, `{function: module:name, ...}` or a factory.
        validation: further sets to validate on, files by name as in `{code: data/code/*.py}`; their
            metrics are `validation/code/loss` and so on.
        optimizer: the optimizer under its `name`, with its options and learning rate; or a factory.
        parallel: the strategies to compose, each with its options.
        precision: `float32`, `bf16`, `fp16`, `fp8`, or the dtypes one by one; None leaves it to
            the strategies.
        remat: what the backward pass recomputes; `auto` what the strategies say, and where they say
            nothing as little as the memory of a device allows, which is read from the traced step,
            and where that is close from the compiled one; nothing on devices whose memory is not
            known, as emulated ones. None recomputes what the strategies say.
        unroll: up to how many blocks are unrolled rather than run by a loop, where the strategy
            splits or recomputes them; None leaves it to `scan_layers`. It changes no number.
        scan_layers: whether equal blocks run as one loop, `true`, or are unrolled, `false`; `auto`
            decides by what it costs on the devices, and a run, `axon plan` and `axon inspect` say
            what it chose. Blocks that `model.scan_layers` keeps stacked
            are a loop in any case. It changes no number.
        axis_names: the axes of `mesh` that are meant by names in the code of a model of your own,
            such as `{data: [dp, fsdp], heads: tp}`, in `with_sharding_constraint`, `reshard` and
            `nnx.with_partitioning`; an empty list means no axis. Axes of the mesh are known by
            their own names, and `data` and `model` among others by what they mean elsewhere. It
            changes no number.
        weights: files with the first weights; None draws them.
        lora: adapters added to linear layers; only these are trained. None: no adapters.
        trainable: regular expressions, searched for in the paths of the parameters: what is found
            is trained, with the adapters if there are some, and all else frozen; empty trains
            everything, or the adapters alone.
        frozen_dtype: what frozen parameters are kept in, such as `bfloat16` or `int8`; None keeps
            theirs.
        loss_scale: keeps small gradients alive in half precision; None scales under `fp16` alone.
        deterministic: give the same bits in every run of this config on devices of one kind; CPUs
            and TPUs do that anyway, GPUs get slower by it. `elastic` gives them on any number of
            CPU devices too, under ddp, zero and fsdp.
        logical_shards: into how many parts a batch is cut for `deterministic: elastic`, a power of
            two and a multiple of the devices of every run that is to have the same bits.
        compiler_options: options of XLA by name, which add to and override those of the chip; null
            removes one of the chip. They change no number, only time and memory.
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

    @property
    def kind(self) -> ModelKind:
        """The kind that the model is of, and what it learns from this data."""
        return kind_of(self.model, self.data, self.loss)

    @classmethod
    def from_dict(cls, data: Mapping[str, object]) -> RunConfig:
        """Reads plain data, as a YAML file holds it.

        Raises:
            ConfigError: naming the dotted key of the first mistake.
        """
        return read(cls, with_hub_weights(data))

    def to_dict(self) -> JsonDict:
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
        if profile is not None and profile.at + profile.steps - 1 > self.train.steps:
            raise ConfigError(
                f"train.profile: got at={profile.at} and steps={profile.steps}, and the run ends "
                f"with step {self.train.steps}; lower them"
            )
        names = [next(n for n, row in LOGGERS.items() if row is type(x)) for x in self.loggers]
        if twice := [name for name in names if names.count(name) > 1]:
            raise ConfigError(f"loggers: got {twice[0]} twice, into one place; name it once")
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
                f"data.kind: got {kind}, and the model is a {model}, which needs "
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
        eval_every, save_every = train.eval_every, self.checkpoint.every
        if self.checkpoint.best and save_every and (not eval_every or save_every % eval_every):
            raise ConfigError(
                f"checkpoint.best: got {self.checkpoint.best}, which needs a validation before "
                f"every checkpoint; make checkpoint.every={save_every} a multiple of "
                f"train.eval_every={eval_every}"
            )
        for name, files in self.validation.items():
            if re.fullmatch(r"[\w.-]+", name) is None or not files:
                raise ConfigError(
                    f"validation.{name}: got {list(files)}; give each set files, and a name of "
                    "letters, digits, dots, - and _"
                )
        best = train.best
        if not best.metric.startswith("validation/"):
            raise ConfigError(
                f"train.best.metric: got {best.metric!r:.80}, which must be one of validations, "
                "such as validation/loss"
            )
        name, slash, _ = best.metric.removeprefix("validation/").partition("/")
        if slash and name not in self.validation:
            raise ConfigError(
                f"train.best.metric: got {best.metric!r:.80}, and there is no set {name!r:.80} in "
                f"validation.{did_you_mean(name, self.validation)}"
            )
        if best.patience and not train.eval_every:
            raise ConfigError(
                f"train.best.patience: got {best.patience}, and train.eval_every=0 validates only "
                "at the end; set train.eval_every"
            )


def abstract_batch(config: RunConfig) -> dict[str, jax.ShapeDtypeStruct]:
    """The shapes of a run's global batch, known before any data is read."""
    fields = config.kind.task.fields(config.model, config.data)
    return {
        name: jax.ShapeDtypeStruct((config.train.global_batch, *field.shape), field.dtype)
        for name, field in fields.items()
    }
