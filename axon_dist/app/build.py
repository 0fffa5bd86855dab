"""From a `RunConfig` to a world, a step, batches and a trainer."""

from __future__ import annotations

import dataclasses
import functools
import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx
from flax.traverse_util import empty_node, flatten_dict

from axon_dist.core.errors import ConfigError
from axon_dist.core.files import host_memory
from axon_dist.core.typing import LossFn, OptionValue
from axon_dist.data import Loader
from axon_dist.inspect import memory
from axon_dist.launch import PLANNED, Timeouts
from axon_dist.loop import LoopOptions, MetricWriter, Progress, Trainer, require
from axon_dist.mesh import World, agree, is_on_paper, self_test
from axon_dist.mesh.chips import machine_of
from axon_dist.nn import ActivationCheckpointing
from axon_dist.parallel import SlowPlan, Strategy
from axon_dist.planner import read_step, recompute_least
from axon_dist.planner.remat import AUTO, USABLE, recomputing_line
from axon_dist.step import TrainState, TrainStep, build_train_step
from axon_dist.weights.formats import NATIVE_NAME, format_of

from ..config.models import make_model
from ..config.schema import RunConfig, build_strategy

PLACES = frozenset({"files", "validation_files", "tokenizer", "dir", "run_dir"})
"""Keys whose values are paths."""


def build_world(config: RunConfig) -> World:
    """Lays the config's mesh over its devices; must come before anything makes an array.

    Several processes meet here, and find out whether their devices can talk.

    Raises:
        LaunchError: when the processes of the run do not come together.
        MeshError: when the mesh does not fit the devices.
        BackendStartedError: when the devices can no longer be emulated.
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
    """What the processes of a run must have in common, by the dotted keys of the config.

    Files may lie elsewhere on every host: what they contain is compared once they are read.

    Example:
        >>> config_facts(RunConfig())["train.steps"]
        1000
    """
    flat = flatten_dict(_without_places(config.to_dict()), sep=".", keep_empty_nodes=True)
    return {key: {} if value is empty_node else value for key, value in flat.items()}


def _without_places(plain: object) -> Any:
    if isinstance(plain, dict):
        return {k: _without_places(value) for k, value in plain.items() if k not in PLACES}
    return [_without_places(item) for item in plain] if isinstance(plain, list) else plain


def build_step(
    config: RunConfig,
    world: World,
    optimizer: optax.GradientTransformation | None = None,
    metrics: tuple[str, ...] = ("loss",),
    loss_fn: LossFn | None = None,
    compiler_options: Mapping[str, OptionValue | None] | None = None,
    meeting: Callable[[SlowPlan | None], SlowPlan | None] = lambda slow: slow,
    trains: bool = True,
) -> TrainStep:
    """Builds the step of a run; nothing is compiled yet.

    Args:
        config: a run as YAML describes it, checked.
        world: the devices, and the mesh they form.
        optimizer: in place of the config's own.
        metrics: what the step reports.
        loss_fn: in place of that of the config's task.
        compiler_options: beside and over those of the config.
        meeting: changes when and how replicas meet that train on their own; None for a plan makes
            one model of them, as for a step that trains nothing.
        trains: whether steps will be taken, so that the loss of the config's batch has to be that
            of its parts.

    Raises:
        ConfigError: when an option of the strategy is not one.
        DivisibilityError: when the batch does not divide over the mesh and the microbatches.
        MeshError: when the strategy needs an axis that the mesh lacks.
        StrategyConflictError: when strategies contradict each other.
        UnsupportedError: when the loss of the batch cannot be had from its parts.
    """
    if config.weights is not None and config.weights.format != NATIVE_NAME:
        format_of(config.weights.format)
    if config.remat == AUTO:
        given = optimizer, metrics, loss_fn, compiler_options, meeting, trains
        return _recomputing_least(config, world, trains, lambda own: build_step(own, world, *given))
    factory = functools.partial(model_of, config)
    strategy = build_strategy(config.parallel, factory, world)
    strategy = dataclasses.replace(strategy, slow=meeting(strategy.slow))
    step = build_train_step(
        factory,
        optimizer or config.optimizer.build(config.train.steps, factory),
        loss_fn or config.kind.task.loss_fn,
        strategy,
        world,
        accumulate=config.train.accumulate,
        clip_norm=config.train.clip_norm,
        metrics=metrics,
        precision=config.precision,
        remat=config.remat,
        unroll=config.unroll,
        scaler=config.loss_scale,
        nonfinite=config.train.nonfinite,
        deterministic=config.deterministic,
        **what_is_trained(config),
        ema=config.train.ema,
        compiler_options={**config.compiler_options, **(compiler_options or {})},
        batch=_example(config, strategy, world),
    )
    _check_batch(config, step)
    if trains:
        step.separation(abstract_batch(config))
    return step


def _recomputing_least(
    config: RunConfig, world: World, trains: bool, build: Callable[[RunConfig], TrainStep]
) -> TrainStep:
    """The step of a config whose `remat` is `auto`, compiled where it is looked for."""

    def with_remat(remat: ActivationCheckpointing | None) -> TrainStep:
        return build(dataclasses.replace(config, remat=remat))

    def peak(step: TrainStep) -> int | None:
        return None if is_on_paper(world) else memory(step.lower(batch).compile()).peak

    batch = abstract_batch(config)
    plain = with_remat(None)
    if not trains:
        return plain
    if plain.strategy.remat is not None or plain.strategy.pipeline is not None:
        raise ConfigError(
            f"remat: auto, and strategy {plain.strategy.name!r} says itself what is recomputed; "
            "leave one of both out: full_shard's activation_checkpointing, or remat. In a pipeline "
            "pipeline.backward says it"
        )
    return recompute_least(
        lambda remat: plain if remat is None else with_remat(remat),
        lambda step: read_step(step, batch),
        peak,
        usable_bytes(world),
    )


def remat_line(config: RunConfig, step: TrainStep) -> str | None:
    """What `remat: auto` has chosen for a step, and what that saves; None where it was not asked.

    Args:
        config: a run as YAML describes it.
        step: its step.
    """
    if config.remat != AUTO:
        return None
    batch, usable = abstract_batch(config), usable_bytes(step.world)
    every = build_step(dataclasses.replace(config, remat=ActivationCheckpointing()), step.world)
    return recomputing_line(
        step.strategy.remat, read_step(step, batch), read_step(every, batch), usable
    )


def usable_bytes(world: World) -> int:
    """Bytes of a device that a step may fill: of its chip, or of this host's memory its share."""
    here = [d for d in world.mesh.devices.flat if d.process_index == world.process_index]
    row = machine_of(world.mesh)
    if row is not None:
        return int(USABLE * row.memory_bytes)
    stats = {} if world.is_cpu else here[0].memory_stats() or {}
    return int(USABLE * stats.get("bytes_limit", host_memory() // max(1, len(here))))


def _example(config: RunConfig, strategy: Strategy, world: World) -> dict[str, Any] | None:
    """The batch in which a pipeline looks for the calls of blocks; None where nobody looks."""
    if strategy.pipeline is None:
        return None
    ranks = math.prod(world.mesh.shape[axis] for axis in strategy.batch_axes)
    divides = config.train.global_batch % (ranks * strategy.pipeline.num_microbatches) == 0
    return abstract_batch(config) if divides else None


def model_of(config: RunConfig) -> nnx.Module:
    """Makes the model of a run, with the adapters that it has.

    Raises:
        ConfigError: when a path of the adapters finds no layer.
    """
    model = make_model(config.model, config.seed)
    return model if config.lora is None else config.lora.beside(model, config.seed)


def what_is_trained(config: RunConfig) -> dict[str, Any]:
    """What a config says to `build_train_step` about trained and frozen parameters."""
    adapters = () if config.lora is None else (nnx.LoRAParam,)
    chosen = (*adapters, *config.trainable)
    return {"trainable": chosen or nnx.Param, "frozen_dtype": config.frozen_dtype}


def abstract_batch(config: RunConfig) -> dict[str, jax.ShapeDtypeStruct]:
    """The shapes of a run's global batch, known before any data is read."""
    fields = config.kind.task.fields(config.model, config.data)
    return {
        name: jax.ShapeDtypeStruct((config.train.global_batch, *field.shape), field.dtype)
        for name, field in fields.items()
    }


def build_loader(
    config: RunConfig, world: World, batch_axes: Sequence[str] | None = None
) -> Loader:
    """Reads the data and makes the batches of this process.

    Args:
        config: a run as YAML describes it, checked.
        world: the devices, and the mesh they form.
        batch_axes: the mesh axes that split the batch; None stands for all.

    Raises:
        ConfigError: when the data is missing, damaged, too little, or not what the model can take.
    """
    axes = world.mesh.axis_names if batch_axes is None else batch_axes
    process, num_processes = world.share_of_batch(axes)
    return config.kind.task.load(
        config.model,
        config.data,
        global_batch=config.train.global_batch,
        seed=config.seed,
        process=process,
        num_processes=num_processes,
        num_ahead=config.data.num_ahead,
    )


@dataclasses.dataclass(frozen=True)
class Run:
    """The parts of a run, checked against each other, nothing compiled.

    Args:
        config: what it was made from.
        world: the devices, and the mesh they form.
        step: what the config's model, strategy and optimizer come to.
        loader: the batches of this process, and those of the validation.
        note: what is done otherwise because processes were lost; empty where none is.
    """

    config: RunConfig
    world: World
    step: TrainStep
    loader: Loader
    note: str = ""

    @property
    def item(self) -> str:
        """What throughput counts, such as tokens."""
        return self.config.kind.task.item

    @property
    def items_per_step(self) -> int:
        """How many items a global batch has."""
        config = self.config
        return config.train.global_batch * config.kind.task.items_per_sample(config.data)

    @property
    def unit(self) -> str:
        """What the loss is measured in."""
        return self.config.kind.task.unit(self.config.data)

    def trainer(
        self,
        progress: Progress,
        writers: Sequence[MetricWriter],
        save: Callable[[TrainState, int, float | None], None],
        go_back: Callable[[], TrainState | None] | None = None,
        history: Sequence[Mapping[str, object]] = (),
        on_compiled: Callable[[], None] = lambda: None,
        profile_dir: str | None = None,
        copy: Callable[[TrainState, int], None] | None = None,
    ) -> Trainer:
        """Puts the loop around the step.

        Args:
            progress: shows the run.
            writers: take its metrics.
            save: takes its state now and then, as that of a `Trainer`.
            go_back: returns the newest state saved, as that of a `Trainer`.
            history: the metrics of earlier legs, as those of a `Trainer`.
            on_compiled: called after the first step.
            profile_dir: the folder for traces.
            copy: keeps its state in the memory of the hosts, as that of a `Trainer`.
        """
        config, train = self.config, self.config.train
        profile = {}
        if train.profile is not None:
            profile = {"profile_at": train.profile.at, "profile_steps": train.profile.steps}
        return Trainer(
            step=self.step,
            batches=self.loader,
            options=LoopOptions(
                num_steps=train.steps,
                log_every=train.log_every,
                eval_every=train.eval_every,
                save_every=self.config.checkpoint.every,
                copy_every=0 if copy is None else self.config.checkpoint.memory_every,
                items_per_step=self.items_per_step,
                item=self.item,
                peak_flops=self.peak_flops,
                sequence_length=config.kind.task.items_per_sample(config.data),
                max_rollbacks=train.max_rollbacks,
                **profile,
            ),
            validation=lambda: self.loader.validation_batches(train.eval_batches),
            writers=writers,
            progress=progress,
            save=save,
            copy=copy,
            give_back=self.give_back,
            go_back=go_back,
            history=history,
            facts=self.facts(),
            on_compiled=on_compiled,
            profile_dir=profile_dir,
        )

    @property
    def peak_flops(self) -> float | None:
        """FLOP/s of a device at best: the config's, or those of the chip for the step's dtype."""
        chip = machine_of(self.world.mesh)
        if self.config.train.peak_flops is not None or self.item != "tokens" or chip is None:
            return self.config.train.peak_flops
        precision = self.step.strategy.precision
        return chip.rate(self.step.parts.dtype if precision is None else precision.compute)

    def facts(self) -> Callable[[int, int], dict[str, float]]:
        """What is known of a step beside its metrics: learning rate, items seen, epoch.

        Returns:
            From the number of steps taken, and of those that changed the state, to numbers by name.
        """
        train, rates = self.config.train, self.config.optimizer.rates(self.config.train.steps)

        def facts(step: int, updates: int) -> dict[str, float]:
            known = {
                f"seen/{self.item}": float(step * self.items_per_step),
                "seen/epoch": step * train.global_batch / self.loader.num_samples,
            }
            if rates is not None:
                known["optimizer/learning_rate"] = float(rates[max(updates - 1, 0)])
            return known

        return facts

    def give_back(self, num_batches: int) -> None:
        """Moves the loader back by some batches, which it will hand out again."""
        state = self.loader.state()
        samples = num_batches * self.config.train.global_batch
        self.loader.restore({**state, "samples_seen": state["samples_seen"] - samples})


def build_run(config: RunConfig) -> Run:
    """Builds everything a run needs; whatever can be checked is checked here.

    Raises:
        AxonDistError: of the kind that names what is wrong.

    Example:
        >>> config = RunConfig.from_dict({"devices": {"emulate": 8}, "data": {"max_bytes": 10**5}})
        >>> str(build_run(config).world.spec)
        'dp=8'
    """
    for logger in config.loggers:
        require(logger.module, "loggers", f"the logger {type(logger).__name__}")
    world = build_world(config)
    step, note = step_for(config, world)
    check_memory(config, step)
    loader = build_loader(config, world, step.strategy.batch_axes)
    agree(world, "data", {f"data.{name}": value for name, value in loader.state().items()})
    step.check(abstract_batch(config))
    return Run(config, world, step, loader, note)


def step_for(config: RunConfig, world: World) -> tuple[TrainStep, str]:
    """The step on the processes that there are; what it does otherwise where some are lost.

    Args:
        config: a run as YAML describes it.
        world: their devices, and the mesh that they form.

    Returns:
        The step, and a sentence; "" where none is lost.
    """
    step = build_step(config, world)
    planned, present = missing_share(os.environ, world.num_processes)
    smaller = for_fewer(config, world, step, planned, present)
    few, count = config.train.accumulate, smaller.train.accumulate
    if count == few:
        return step, ""
    missing = f"{present} of {planned} processes: "
    if why := step.coupling(abstract_batch(config)):
        return step, (
            f"{missing}each device holds more of the global batch at a time, for {why}, and more "
            "microbatches would change that"
        )
    return build_step(smaller, world), (
        f"{missing}{count} microbatches a step in place of {few} keep the global batch of "
        f"{config.train.global_batch} samples"
    )


def check_memory(config: RunConfig, step: TrainStep) -> None:
    """Checks that the state and a batch can be there at all, before either is.

    A run needs more than these, which `axon inspect` reads from the compiled program.

    Raises:
        ConfigError: when the state alone is larger than the memory of the devices, or a batch than
            that of the host.
    """
    world = step.world
    each = _bytes_per_device(step)
    here = [d for d in world.mesh.devices.flat if d.process_index == world.process_index]
    if world.is_cpu:
        need, there, where = each * len(here), host_memory(), "this host"
    else:
        need, where = each, f"a {here[0].device_kind}"
        there = (here[0].memory_stats() or {}).get("bytes_limit", need)
    if need > there:
        raise ConfigError(
            f"the parameters and what the optimizer keeps of them need {each / 1e9:.4g} GB on each "
            f"of {world.size} devices, {need / 1e9:.4g} GB on {where}, which has "
            f"{there / 1e9:.4g} GB; make the model smaller, or split it over more devices"
        )
    arrays = abstract_batch(config).values()
    batch = sum(math.prod(x.shape) * np.dtype(x.dtype).itemsize for x in arrays)
    batch //= world.num_batch_shares(step.strategy.batch_axes)
    if batch > host_memory():
        raise ConfigError(
            f"train.global_batch: got {config.train.global_batch} samples, of which this process "
            f"loads {batch / 1e9:.4g} GB at once; it has {host_memory() / 1e9:.4g} GB of memory. "
            "Lower it"
        )


def _bytes_per_device(step: TrainStep) -> int:
    leaves = jax.tree.leaves(step.abstract_state)
    places = jax.tree.leaves(step.state_shardings)
    return sum(
        math.prod(place.shard_shape(leaf.shape)) * getattr(leaf.dtype, "itemsize", 8)
        for leaf, place in zip(leaves, places, strict=True)
    )


def _check_batch(config: RunConfig, step: TrainStep) -> None:
    batch, divisor = config.train.global_batch, step.layout.divisor
    if batch % divisor:
        raise ConfigError(
            f"train.global_batch: got {batch} samples, which do not divide over mesh "
            f"{step.world.spec} and train.accumulate={config.train.accumulate} microbatches; "
            f"make it a multiple of {divisor}, such as {-(-batch // divisor) * divisor}"
        )


def missing_share(env: Mapping[str, str], num_processes: int) -> tuple[int, int]:
    """How many processes a run was planned with, and how many it has.

    Args:
        env: the environment, in which the launcher says how many it began with.
        num_processes: how many there are.

    Returns:
        Both; the same number twice where none is missing, or nobody said.

    Example:
        >>> missing_share({"AXON_PLANNED_WORLD_SIZE": "4"}, 3)
        (4, 3)
    """
    planned = int(env.get(PLANNED) or num_processes)
    return max(planned, num_processes), num_processes


def microbatches_for_fewer(
    global_batch: int, accumulate: int, planned_ranks: int, ranks: int
) -> int:
    """How many microbatches keep both the global batch and what a device holds of one at a time.

    Args:
        global_batch: samples of a step.
        accumulate: microbatches of a step as planned.
        planned_ranks: how many devices were to share a microbatch.
        ranks: how many do.

    Returns:
        The fewest, at least as many as planned, that divide the batch and give a device no more
        samples at a time than was planned; as many as planned where none do.

    Example:
        >>> microbatches_for_fewer(24, 1, 4, 3), microbatches_for_fewer(24, 1, 4, 2)
        (2, 2)
    """
    at_a_time = global_batch // (accumulate * planned_ranks)
    for count in range(accumulate, global_batch // ranks + 1):
        if global_batch % (count * ranks) == 0 and global_batch // (count * ranks) <= at_a_time:
            return count
    return accumulate


def for_fewer(
    config: RunConfig, world: World, step: TrainStep, planned: int, present: int
) -> RunConfig:
    """The config with so many microbatches as keep the global batch on the devices that are left.

    Args:
        config: a run as YAML describes it.
        world: the devices that are left.
        step: of the config as it is.
        planned: how many processes there were to be.
        present: how many there are.

    Returns:
        The config; as it is where none is missing, or the mesh does not shrink with them, or a
        pipeline has microbatches of its own.
    """
    if -1 not in config.mesh.shape.values() or config.devices.emulate is not None:
        return config
    axes = step.strategy.batch_axes
    was = config.mesh.resolve(world.size * planned // present)
    planned_ranks = math.prod(size for name, size in was.shape.items() if name in axes)
    ranks = math.prod(world.mesh.shape[name] for name in axes)
    if ranks >= planned_ranks or step.strategy.pipeline is not None:
        return config
    train = config.train
    count = microbatches_for_fewer(train.global_batch, train.accumulate, planned_ranks, ranks)
    return dataclasses.replace(config, train=dataclasses.replace(train, accumulate=count))
