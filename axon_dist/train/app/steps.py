"""Builds the world, the model and the step of a `RunConfig`."""

from __future__ import annotations

import dataclasses
import functools
import math
import os
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from flax.traverse_util import empty_node, flatten_dict

from axon_dist.core.errors import ConfigError, warn
from axon_dist.core.files import host_memory
from axon_dist.core.tree import own_bytes
from axon_dist.core.typing import Batch, LossFn, OptionValue
from axon_dist.core.words import AUTO, byte_size, plural
from axon_dist.inspect import separation
from axon_dist.launch import Timeouts
from axon_dist.mesh import SLOW_AXES, MeshSpec, World, agree, self_test
from axon_dist.models.formats import NATIVE_NAME, format_of
from axon_dist.nn import ActivationCheckpointing
from axon_dist.optim import watched
from axon_dist.parallel import OuterLoop, Strategy
from axon_dist.parallel.strategy import DATA_AXES
from axon_dist.step import TrainStep, build_train_step, recomputing_least, trainable_filter

from ..config import Optimizer, RunConfig, abstract_batch, build_strategy, make_model
from ..config.optimizers import Adam, AdamW, Lion
from ..config.rates import WarmupStableDecay

PATH_KEYS = frozenset({"files", "validation_files", "tokenizer", "dir", "run_dir", "file"})
"""Config keys whose values are paths, which may differ between hosts.

`validation` has paths too, by name. The CSV file of a pipeline's `schedule` is not among them,
because the name of a schedule, which this key may have instead, must be equal on all hosts.
"""


def build_world(config: RunConfig) -> World:
    """Builds the config's mesh over its devices; call this before anything makes an array.

    Several processes compare their configs here, and test the communication between their devices.

    Raises:
        LaunchError: when the processes of the run cannot reach each other.
        MeshError: when the mesh does not fit the devices.
        BackendStartedError: when JAX has started, so the devices can no longer be emulated.
    """
    if config.devices.emulate is not None:
        world = World.emulate(config.devices.emulate, config.mesh)
    else:
        world = World.init(config.mesh)
    if world.num_processes > 1:
        timeout = Timeouts.from_env(os.environ).launch
        agree(world, "config", config_facts(config), timeout)
        self_test(world, timeout)
    return world


def config_facts(config: RunConfig) -> dict[str, object]:
    """Returns the config values that must agree on all processes, by dotted key.

    The paths under `PATH_KEYS` and `validation` may differ between hosts; the contents of the files
    are compared after they are read.

    Example:
        >>> config_facts(RunConfig())["train.steps"]
        1000
    """
    plain = {**config.to_dict(), "validation": sorted(config.validation)}
    flat = flatten_dict(_without_paths(plain), sep=".", keep_empty_nodes=True)
    return {key: {} if value is empty_node else value for key, value in flat.items()}


def _without_paths(plain: object) -> Any:
    if isinstance(plain, dict):
        return {k: _without_paths(value) for k, value in plain.items() if k not in PATH_KEYS}
    return [_without_paths(item) for item in plain] if isinstance(plain, list) else plain


def build_step(
    config: RunConfig,
    world: World,
    optimizer: optax.GradientTransformation | None = None,
    metrics: tuple[str, ...] = ("loss", "grad_norm"),
    loss_fn: LossFn | None = None,
    compiler_options: Mapping[str, OptionValue | None] | None = None,
    change_outer_loop: Callable[[OuterLoop | None], OuterLoop | None] = lambda loop: loop,
    trains: bool = True,
    checks_loss: bool = True,
    factory: Callable[[], nnx.Module] | None = None,
) -> TrainStep:
    """Builds the step of a run, without compiling it.

    Args:
        config: a checked run, as YAML describes it.
        world: the devices and their mesh.
        optimizer: replaces the config's optimizer.
        metrics: the metrics that the step reports, in addition to those that the config asks for.
        loss_fn: replaces the loss of the config's task.
        compiler_options: compiler options that override those of the config.
        change_outer_loop: changes the strategy's `OuterLoop`, for example removes it.
        trains: whether steps will be taken. If so, a loss that couples samples is refused where
            the step needs the losses of parts. If not, there are no outer steps and one replica.
        checks_loss: whether to determine here how the loss of the batch follows from its parts.
            Otherwise the first trace of the step determines it, and raises the same errors.
        factory: makes the model; None makes that of the config, with its initial weights.

    Raises:
        ConfigError: when an option of the strategy does not exist, or the batch does not divide
            over the mesh and the microbatches.
        MeshError: when the strategy needs an axis that the mesh lacks.
        StrategyConflictError: when strategies contradict each other.
        UnsupportedError: when the step needs the losses of parts of the batch, and the loss couples
            samples.
    """
    if config.weights is not None and config.weights.format != NATIVE_NAME:
        format_of(config.weights.format)
    # Not left to `build_train_step`, which could choose only with a `batch`; see below.
    if config.remat == AUTO:

        def build(remat: ActivationCheckpointing | None) -> TrainStep:
            return build_step(
                dataclasses.replace(config, remat=remat),
                world,
                optimizer,
                metrics=metrics,
                loss_fn=loss_fn,
                compiler_options=compiler_options,
                change_outer_loop=change_outer_loop,
                trains=trains,
                checks_loss=checks_loss,
                factory=factory,
            )

        return recomputing_least(build, abstract_batch(config)) if trains else build(None)
    factory = factory or functools.partial(model_of, config)
    strategy = build_strategy(config.parallel, factory, world)
    outer_loop = change_outer_loop(strategy.outer_loop) if trains else None
    strategy = dataclasses.replace(strategy, outer_loop=outer_loop)
    is_own = optimizer is None
    by_layer = ("norms_by_layer",) if trains and config.train.norms_by_layer else ()
    step = build_train_step(
        factory,
        optimizer_of(config, factory) if optimizer is None else optimizer,
        loss_fn or config.kind.task.loss_fn,
        strategy,
        world,
        accumulate=config.train.accumulate,
        clip_norm=config.train.clip_norm,
        metrics=(*metrics, *by_layer),
        precision=config.precision,
        remat=config.remat,
        unroll=config.unroll,
        scan_layers=config.scan_layers,
        axis_names=config.axis_names,
        scaler=config.loss_scale,
        nonfinite=config.train.nonfinite,
        deterministic=config.deterministic,
        logical_shards=config.logical_shards,
        **what_is_trained(config),
        ema=config.train.ema,
        compiler_options={**config.compiler_options, **(compiler_options or {})},
        # Only a pipeline needs a batch here. If none is given, the loss is not traced before
        # `_check_batch`, so that its error, which names the key of the config, comes first.
        # `separation` then checks the loss as `batch` would.
        batch=_example(config, strategy, world),
    )
    _check_batch(config, step)
    if trains:
        warn_of_vanishing(config, step)
    if trains and is_own:
        warn_of_no_decay(config)
    if trains and checks_loss:
        separation(step, abstract_batch(config))
    return step


TYPICAL = 0.02
"""The typical size of a transformer weight: GPT-2 initializes with this standard deviation."""

_MOVES_BY_RATE = (Adam, AdamW, Lion)
"""Optimizers whose update of each element is about as large as the learning rate."""


def warn_of_vanishing(config: RunConfig, step: TrainStep) -> None:
    """Warns if weights are stored in a dtype too coarse for updates of this learning rate.

    A stored weight w can only change to another number of its dtype. In bfloat16, neighboring
    numbers differ by up to w / 128, so rounding loses an update of less than half of that.

    Args:
        config: the config of a run.
        step: its step.
    """
    optimizer = config.optimizer
    if not isinstance(optimizer, _MOVES_BY_RATE):
        return
    dtypes = {leaf.dtype for leaf in jax.tree.leaves(step.abstract_state.params)}
    coarse = [d for d in dtypes if d in (jnp.bfloat16, jnp.float16)]
    for dtype in coarse:
        # The spacing of numbers near w is between w * eps / 2 and w * eps, and rounding loses
        # updates below half the spacing. So weights below `largest` keep every update, and weights
        # above twice that lose every one.
        largest = optimizer.learning_rate * 2 / float(jnp.finfo(dtype).eps)
        if largest < TYPICAL:
            warn(
                f"parameters are stored in {dtype}, and updates of {optimizer.learning_rate:g}, "
                f"the peak of optimizer.learning_rate, are lost in weights above about "
                f"{2 * largest:.2g}, because the next {dtype} number is more than twice as far "
                "away. Store them in float32 and compute in half precision with 'precision: bf16', "
                "or raise the learning rate"
            )


def warn_of_no_decay(config: RunConfig) -> None:
    """Warns if the decay of a schedule is so short that every step of the run has the peak.

    Args:
        config: the config of a run.
    """
    schedule = getattr(config.optimizer, "schedule", None)
    if not isinstance(schedule, WarmupStableDecay) or not schedule.decay_fraction:
        return
    steps = config.train.steps
    decay = schedule.decay_steps(steps)
    if decay > 1 or schedule.final_fraction == 1:
        return
    warn(
        f"optimizer.schedule.decay_fraction={schedule.decay_fraction:g} of train.steps={steps} is "
        f"{plural(decay, 'step')}, and the first step of the decay still has the peak, so the "
        "learning rate never decays. Raise one of the two, or use the schedule constant",
        code="decay-too-short",
    )


def optimizer_of(
    config: RunConfig, factory: Callable[[], nnx.Module]
) -> optax.GradientTransformation:
    """Returns the optimizer of a config, which skips spikes but leaves clipping to the step.

    Args:
        config: a checked run.
        factory: makes its model.
    """
    train = config.train
    optimizer = config.optimizer.build(train.steps, factory)
    return optimizer if train.spikes is None else watched(optimizer, spikes=train.spikes)


def _example(config: RunConfig, strategy: Strategy, world: World) -> Batch | None:
    """Returns the batch for which a pipeline traces block calls, if there is one.

    None without a pipeline, and for a batch that does not divide over its ranks and microbatches.
    """
    if strategy.pipeline is None:
        return None
    ranks = math.prod(world.mesh.shape[axis] for axis in strategy.batch_axes)
    divides = config.train.global_batch % (ranks * strategy.pipeline.schedule.num_microbatches) == 0
    return abstract_batch(config) if divides else None


def model_of(config: RunConfig) -> nnx.Module:
    """Makes the model of a run, with its LoRA adapters if it has any.

    Raises:
        ConfigError: when an adapter path matches no layer.
    """
    model = make_model(config.model, config.seed)
    return model if config.lora is None else config.lora.add_to(model, config.seed)


class ModelOfZeros:
    """Makes the model of a run with zeros for its arrays, for steps that are traced and never run.

    The first call traces the model, and later ones reuse its structure. Call it only where JAX
    traces: elsewhere it would allocate the zeros.

    Args:
        config: a checked run.
    """

    def __init__(self, config: RunConfig):
        self._make = functools.partial(model_of, config)
        self._split: tuple[Any, Any] | None = None

    def __call__(self) -> nnx.Module:
        """Makes a model."""
        if self._split is None:
            with nnx.use_eager_sharding(False):
                self._split = nnx.split(nnx.eval_shape(self._make))
        graphdef, shapes = self._split
        return nnx.merge(graphdef, jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes))


def without_axes(axis_names: Mapping[str, str | tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
    """Maps each name of axes to none, for a step on one device, whose mesh lacks the other axes.

    Example:
        >>> without_axes({"heads": "tp"})
        {'heads': ()}
    """
    return dict.fromkeys(axis_names, ())


def names_on(
    axis_names: Mapping[str, str | tuple[str, ...]], own: MeshSpec, other: MeshSpec
) -> dict[str, str | tuple[str, ...]]:
    """Maps the names of axes in a model to axes of another mesh than the one that they are for.

    A name for all data axes of `own` larger than 1 stands for the batch: on `other` it becomes all
    axes that split the batch. Every name keeps its other axes, if `other` has them.

    Args:
        axis_names: maps each name to axes of `own`.
        own: the mesh of the config; sizes may be open.
        other: the mesh to map the names to.

    Example:
        >>> names = {"rows": ("dp",), "heads": "tp"}
        >>> names_on(names, MeshSpec(dp=2, tp=2), MeshSpec(fsdp=4))
        {'rows': ('fsdp',), 'heads': ()}
    """
    if own.shape.keys() == other.shape.keys():
        return dict(axis_names)
    data = {*SLOW_AXES, *DATA_AXES}
    split = {axis for axis, size in own.shape.items() if axis in data and size != 1}
    # Ranks of experts have different samples too, but a name may leave them out.
    batch = tuple(axis for axis in other.shape if axis in data or axis == "ep")

    def moved(axes: str | tuple[str, ...]) -> str | tuple[str, ...]:
        before = (axes,) if isinstance(axes, str) else axes
        kept = tuple(axis for axis in before if axis in other.shape)
        if split.issubset(before) and not data.isdisjoint(before):
            kept = (*batch, *(axis for axis in kept if axis not in batch))
        return axes if set(kept) == set(before) else kept

    return {name: moved(axes) for name, axes in axis_names.items()}


def what_is_trained(config: RunConfig) -> dict[str, Any]:
    """Returns the arguments of `build_train_step` about trained and frozen parameters."""
    adapters = () if config.lora is None else (nnx.LoRAParam,)
    trainable = (*adapters, *config.trainable) or nnx.Param
    optimizer = config.optimizer
    if isinstance(optimizer, Optimizer) and any(group.frozen for group in optimizer.groups):
        is_trainable = trainable_filter(trainable)

        def is_trained(keys: Any, variable: Any) -> bool:
            path = "/".join(map(str, keys))
            return is_trainable(keys, variable) and not optimizer.is_frozen(path)

        trainable = is_trained
    return {"trainable": trainable, "frozen_dtype": config.frozen_dtype}


def _check_batch(config: RunConfig, step: TrainStep) -> None:
    batch = config.train.global_batch
    divisor = step.batch_layout.divisor
    if batch % divisor:
        raise ConfigError(
            f"train.global_batch: got {batch} samples, which do not divide over mesh "
            f"{step.world.spec} with num_microbatches={step.batch_layout.num_microbatches}; "
            f"make it a multiple of {divisor}, such as {-(-batch // divisor) * divisor}"
        )


def check_memory(config: RunConfig, step: TrainStep) -> None:
    """Checks that the state and a batch fit into memory, before either is made.

    A run needs more memory than this; `axon inspect` reads it from the compiled program.

    Raises:
        ConfigError: when the state alone exceeds the memory of the devices, or a batch exceeds
            that of the host.
    """
    world = step.world
    each = own_bytes(step.state_layout.placed_shapes, world.is_cpu)
    local = [d for d in world.mesh.devices.flat if d.process_index == world.process_index]
    if world.is_cpu:
        # The devices of a CPU process share the memory of the host.
        need = each * len(local)
        available = host_memory()
        place = "this host"
    else:
        need = each
        place = f"a {local[0].device_kind}"
        available = (local[0].memory_stats() or {}).get("bytes_limit", need)
    if need > available:
        raise ConfigError(
            f"the parameters and the optimizer state need {byte_size(each)} on each of "
            f"{world.size} devices, {byte_size(need)} on {place}, which has "
            f"{byte_size(available)}; make the model smaller, or split it over more devices",
            code="state-too-large",
        )
    arrays = abstract_batch(config).values()
    batch = sum(math.prod(x.shape) * np.dtype(x.dtype).itemsize for x in arrays)
    batch //= world.num_batch_shares(step.strategy.batch_axes)
    if batch > host_memory():
        raise ConfigError(
            f"train.global_batch: got {config.train.global_batch} samples, of which this process "
            f"loads {byte_size(batch)} at once; this host has {byte_size(host_memory())} of "
            "memory. Make train.global_batch smaller",
            code="batch-too-large",
        )
