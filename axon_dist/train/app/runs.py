"""`Run` combines a step, its data and a trainer, checked against each other."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax

from axon_dist.core.errors import AxonDistError, ConfigError, did_you_mean, require
from axon_dist.data import Loader, standard_library_files
from axon_dist.data.buckets import Buckets
from axon_dist.inspect import coupling
from axon_dist.launch import ELASTIC, PLANNED
from axon_dist.launch.environment import parse_count
from axon_dist.mesh import World, agree, build_mesh
from axon_dist.mesh.chips import machine_of
from axon_dist.step import TrainState, TrainStep
from axon_dist.train.loop import LoopOptions, MetricWriter, Progress, Trainer
from axon_dist.weights import find_tensors, load_weights
from axon_dist.weights.load import check_weights

from ..config import RunConfig, abstract_batch, unit_of
from ..config.sections import MixtureData, ProfileConfig, TextData
from .steps import build_step, build_world, check_memory


def build_loader(
    config: RunConfig,
    world: World,
    batch_axes: Sequence[str] | None = None,
    num_microbatches: int = 1,
    num_replicas: int = 1,
) -> Loader:
    """Builds the loader that reads the data and makes the batches of this process.

    Args:
        config: a checked run, as YAML describes it.
        world: the devices and their mesh.
        batch_axes: the mesh axes that split the batch; None for all.
        num_microbatches: the number of microbatches in each batch.
        num_replicas: the number of replicas that each cut their own rows into microbatches.

    Raises:
        ConfigError: when the data is missing, damaged, too small, or unsuitable for the model.
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
        num_microbatches=num_microbatches,
        num_replicas=num_replicas,
        share=world.parts_of_batch(axes),
        num_ahead=config.data.num_ahead,
        num_workers=config.data.num_workers,
    )


@dataclasses.dataclass(frozen=True)
class Run:
    """The parts of a run, checked against each other; nothing is compiled.

    Args:
        config: the config it was built from.
        world: the devices and their mesh.
        step: the step of the config's model, strategy and optimizer.
        loader: the training and validation batches of this process.
        note: the changes that lost processes made necessary, as a sentence; empty if nothing
            changes.
        validation: loaders of further validation sets, by name.
    """

    config: RunConfig
    world: World
    step: TrainStep
    loader: Loader
    note: str = ""
    validation: Mapping[str, Loader] = dataclasses.field(default_factory=dict)

    @property
    def is_main(self) -> bool:
        """Whether this process writes the files of the run."""
        return self.world.process_index == 0

    def check_weights(self, resume: str | None = None) -> None:
        """Raises `ConfigError` unless the files of its initial weights, if any, fit the model.

        Args:
            resume: the `resume` argument of the run; if it is not None, the files are not needed.
        """
        if self.config.weights is not None and resume is None:
            check_weights(self.step, **self._weights)

    def first_state(self, tell: Callable[[str], None]) -> TrainState | None:
        """Loads the initial weights into a state; None if the config names no files.

        Args:
            tell: called with messages about the files.
        """
        if self.config.weights is None:
            return None
        tell(f"weights: from {', '.join(self.config.weights.files)}")
        if line := self._dtype_line(self.config.weights.files):
            tell(line)
        return load_weights(self.step, **self._weights)

    def _dtype_line(self, files: Sequence[str]) -> str | None:
        """Suggests keeping frozen weights in the dtype of their files, if that is narrower."""
        frozen = jax.tree.leaves(self.step.model_spec.frozen)
        if self.config.frozen_dtype is not None or all(x.dtype.itemsize <= 2 for x in frozen):
            return None
        narrow = {str(x.dtype) for x in find_tensors(files).values()} & {"bfloat16", "float16"}
        return next(
            (f"the files are {x}; frozen_dtype: {x} keeps frozen weights in it" for x in narrow),
            None,
        )

    @property
    def _weights(self) -> dict[str, Any]:
        """The arguments of `load_weights`."""
        weights = self.config.weights
        assert weights is not None
        return {
            "files": weights.files[0] if len(weights.files) == 1 else list(weights.files),
            "rules": weights.format,
            "cast": weights.cast,
            "keep": (*weights.keep, _ADAPTER),
            "differ": weights.differ,
        }

    @property
    def item(self) -> str:
        """The unit of throughput, such as tokens."""
        return self.config.kind.task.item

    @property
    def items_per_step(self) -> int:
        """The number of items in a global batch; with buckets of several lengths, the mean."""
        config = self.config
        if self._buckets is not None:
            return round(config.train.global_batch * self._buckets.mean_length)
        return config.train.global_batch * config.kind.task.items_per_sample(config.data)

    @property
    def sequence_length(self) -> int:
        """The items in a sample; with buckets of several lengths, the mean over all items."""
        if self._buckets is not None:
            return round(self._buckets.length_around_a_token)
        return self.config.kind.task.items_per_sample(self.config.data)

    @property
    def _buckets(self) -> Buckets | None:
        return getattr(self.loader.samples, "buckets", None)

    @property
    def unit(self) -> str:
        """The unit of the loss."""
        return unit_of(self.config)

    def trainer(
        self,
        progress: Progress,
        writers: Sequence[MetricWriter],
        save: Callable[[TrainState, int, float | None], None],
        copy: Callable[[TrainState, int], None] | None = None,
        **others: Any,
    ) -> Trainer:
        """Builds the trainer of the step.

        Args:
            progress: displays the progress of the run.
            writers: receive the metrics.
            save: saves the state; see `Trainer`.
            copy: copies the state to host memory; see `Trainer`.
            **others: fields of the `Trainer`: `go_back`, `earlier_counts`, `is_saved`, `history`,
                `counts`, `on_counts`, `on_compiled`, `profile_dir`.
        """
        train = self.config.train
        sets = {"": self.loader, **self.validation}
        return Trainer(
            step=self.step,
            batches=self.loader,
            options=self.loop_options(copy is not None),
            validation={
                name: functools.partial(one.validation_batches, train.eval_batches)
                for name, one in sets.items()
            },
            writers=writers,
            progress=progress,
            save=save,
            copy=copy,
            give_back=self.give_back,
            facts=self.facts(),
            data_facts=self.data_facts(),
            **others,
        )

    def loop_options(self, has_copies: bool = False) -> LoopOptions:
        """Returns the length and cadence of the run.

        Args:
            has_copies: whether states are copied to host memory.
        """
        train = self.config.train
        traced = train.profile or ProfileConfig(at=0)
        return LoopOptions(
            num_steps=train.steps,
            log_every=train.log_every,
            eval_every=train.eval_every,
            save_every=self.config.checkpoint.every,
            copy_every=self.config.checkpoint.memory_every if has_copies else 0,
            items_per_step=self.items_per_step,
            item=self.item,
            peak_flops=self.peak_flops,
            sequence_length=self.sequence_length,
            max_rollbacks=train.max_rollbacks,
            best_metric=train.best.metric,
            best_mode=train.best.mode,
            patience=train.best.patience,
            min_delta=train.best.min_delta,
            profile_at=0 if traced.traces_nothing else traced.at,
            profile_steps=traced.steps,
        )

    @property
    def peak_flops(self) -> float | None:
        """The peak FLOP/s of a device: the config's, or the chip's for the step's dtype.

        None where neither is known; the utilization is not reported then.
        """
        chip = machine_of(self.world.mesh)
        if self.config.train.peak_flops is not None or self.item != "tokens" or chip is None:
            return self.config.train.peak_flops
        precision = self.step.strategy.precision
        return chip.rate(self.step.model_spec.dtype if precision is None else precision.compute)

    def facts(self) -> Callable[[int, int], dict[str, float]]:
        """Returns a function for the learning rate, which is logged with the metrics.

        Returns:
            A function from the number of steps taken, and of those that changed the parameters, to
            numbers by name.
        """
        rates = self.config.optimizer.rates(self.config.train.steps)

        def facts(step: int, updates: int) -> dict[str, float]:
            if rates is None:
                return {}
            return {"optimizer/learning_rate": float(rates[max(updates - 1, 0)])}

        return facts

    def data_facts(self) -> Callable[[int], dict[str, float]]:
        """Returns a function for the items and epochs seen, which are logged with the metrics.

        The epochs of a mixture are those of the source that is repeated most.

        Call it when the loader is at the position from which the run goes on.

        Returns:
            A function from the number of batches after that position to numbers by name.
        """
        global_batch = self.config.train.global_batch
        # Batches before a resume may have had another size, so count samples and not steps.
        before = self.loader.state()["samples_seen"]

        def facts(batches: int) -> dict[str, float]:
            samples = before + batches * global_batch
            return {
                f"seen/{self.item}": samples * self.items_per_step / global_batch,
                "seen/epoch": max(one.after(samples) for one in self.loader.epochs),
            }

        return facts

    def give_back(self, num_batches: int) -> None:
        """Moves the loader back by some batches, which it will yield again."""
        state = self.loader.state()
        samples = num_batches * self.config.train.global_batch
        self.loader.restore({**state, "samples_seen": state["samples_seen"] - samples})


_ADAPTER = r"(?:.*/)?lora/lora_[ab]"
"""Matches the paths of LoRA adapters, which weight files need not contain."""


def build_run(config: RunConfig) -> Run:
    """Builds everything a run needs, and makes all checks that do not need a compiled program.

    Raises:
        AxonDistError: when a check fails; the subclass is the kind of error.

    Example:
        >>> config = RunConfig.from_dict(
        ...     {"devices": {"emulate": 8}, "data": {"max_bytes": 9999}, "model": {"num_layers": 1}}
        ... )
        >>> str(build_run(config).world.spec)
        'dp=8'
    """
    for logger in config.loggers:
        require(logger.module, "loggers", f"the logger {type(logger).__name__}")
    world = build_world(config)
    step, note = step_for(config, world)
    check_memory(config, step)
    cut = step.batch_layout
    loader = build_loader(config, world, cut.axes, cut.num_microbatches, cut.num_replicas)
    for batch in _batches(config, loader):
        step.check(batch)
    _check_best(config, step)
    sets = {}
    for name, files in config.validation.items():
        other = measured_on(config, files, f"validation.{name}")
        sets[name] = build_loader(other, world, step.strategy.batch_axes)
    for name, one in {"": loader, **sets}.items():
        prefix = f"validation.{name}" if name else "data"
        agree(world, prefix, {f"{prefix}.{key}": value for key, value in one.state().items()})
    return Run(config, world, step, loader, note, sets)


def _check_best(config: RunConfig, step: TrainStep) -> None:
    """Raises `ConfigError` unless every validation has the metric of `train.best`.

    Every validation has a loss; for another metric, the evaluation is traced.
    """
    best = config.train.best.metric.removeprefix("validation/")
    # The config has checked that a name with a slash begins with that of a set.
    _, slash, of_set = best.partition("/")
    metric = of_set if slash else best
    if metric == "loss":
        return
    names = step.evaluated_names(abstract_batch(config))
    if metric not in names:
        raise ConfigError(
            f"train.best.metric: got {config.train.best.metric!r:.80}, but the validation has no "
            f"metric {metric!r:.80}.{did_you_mean(metric, names)}",
            code="best-metric-unknown",
        )


def measured_on(config: RunConfig, files: Sequence[str], key: str = "files") -> RunConfig:
    """Returns the config with `files` as its validation files.

    Args:
        config: a checked run config.
        files: paths or globs; if empty, the config is returned unchanged.
        key: the name of the argument, for the error message.

    Raises:
        ConfigError: when the data of the run are not read from files.
    """
    if not files:
        return config
    data = config.data
    named = ", ".join(files)
    if isinstance(data, MixtureData):
        raise ConfigError(
            f"got {key} {named} for a run whose data are a mixture of {len(data.sources)} sources, "
            f"which may read files differently; leave {key} out, or change the data to one "
            "source, as in data={kind: jsonl, files: [...]}",
            code="data-of-mixture",
        )
    if not hasattr(data, "validation_files"):
        raise ConfigError(
            f"got {key} {named} for a run whose data are not read from files; leave {key} out, or "
            "change the data, as in data={kind: images, files: [...]} or data={kind: text}",
            code="data-not-from-files",
        )
    changes = {"validation_files": tuple(files), "validation_fraction": None}
    if isinstance(data, TextData) and not data.files:
        changes["files"] = tuple(str(file.path) for file in standard_library_files())
    return dataclasses.replace(config, data=dataclasses.replace(data, **changes))


def step_for(config: RunConfig, world: World) -> tuple[TrainStep, str]:
    """Builds the step for the present processes, and adapts it if some were lost.

    Args:
        config: a run as YAML describes it.
        world: the devices of the processes and their mesh.

    Returns:
        The step, and a sentence about the change; "" if nothing changes.
    """
    step = build_step(config, world)
    present = world.num_processes
    planned = max(parse_count(os.environ.get(PLANNED) or str(present), PLANNED), present)
    smaller = for_fewer(config, world, step, planned, present)
    before = config.train.accumulate
    count = smaller.train.accumulate
    if count == before:
        return step, ""
    missing = f"{present} of {planned} processes: "
    # More microbatches change the results of a loss that couples the samples of a batch.
    if why := coupling(step, abstract_batch(config)):
        return step, (
            f"{missing}each device holds more of the global batch at a time, because {why}, and "
            "more microbatches would change that"
        )
    return build_step(smaller, world), (
        f"{missing}{count} microbatches per step instead of {before} keep the global batch of "
        f"{config.train.global_batch} samples"
    )


def microbatches_for_fewer(
    global_batch: int, accumulate: int, planned_ranks: int, ranks: int
) -> int:
    """Returns the number of microbatches that keeps the global batch and the memory of a device.

    Args:
        global_batch: samples per step.
        accumulate: the planned number of microbatches per step.
        planned_ranks: the planned number of devices that share a microbatch.
        ranks: the actual number.

    Returns:
        The smallest number, at least `accumulate`, that divides the batch and gives a device no
        more samples at a time than planned; `accumulate` if there is none.

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
    """Returns the config with enough microbatches to keep the global batch on fewer devices.

    Args:
        config: a run as YAML describes it.
        world: the remaining devices.
        step: the step of the unchanged config.
        planned: the planned number of processes.
        present: the actual number.

    Returns:
        The config; unchanged if no process is missing, the mesh does not shrink with them, or a
        pipeline sets the microbatches.
    """
    if not _mesh_shrinks(config):
        return config
    axes = step.strategy.batch_axes
    planned_mesh = config.mesh.resolve(world.size * planned // present)
    planned_ranks = math.prod(size for name, size in planned_mesh.shape.items() if name in axes)
    ranks = math.prod(world.mesh.shape[name] for name in axes)
    if ranks >= planned_ranks or step.strategy.pipeline is not None:
        return config
    train = config.train
    count = microbatches_for_fewer(train.global_batch, train.accumulate, planned_ranks, ranks)
    return dataclasses.replace(config, train=dataclasses.replace(train, accumulate=count))


def _mesh_shrinks(config: RunConfig) -> bool:
    return -1 in config.mesh.shape.values() and config.devices.emulate is None


_CACHE = ("jax_compilation_cache_dir", "jax_enable_compilation_cache")


def _batches(config: RunConfig, loader: Loader) -> Iterator[dict[str, jax.ShapeDtypeStruct]]:
    """Yields the shapes of a run's batches: one for each length of its rows."""
    batch = abstract_batch(config)
    yield batch
    buckets: Buckets | None = getattr(loader.samples, "buckets", None)
    for length in () if buckets is None else buckets.lengths[:-1]:
        yield {
            name: jax.ShapeDtypeStruct((x.shape[0], length + 1), x.dtype)
            for name, x in batch.items()
        }


@contextlib.contextmanager
def compiling_ahead(
    config: RunConfig, world: World, env: Mapping[str, str], tell: Callable[[str], None]
) -> Iterator[Callable[[], None]]:
    """Compiles the step for fewer processes into JAX's cache, in case the run loses one.

    Of the remaining processes, as many run it as can continue: usually all of them.

    It does not matter which process is lost: the remaining processes are renumbered from 0, so they
    run the program of the first processes. They find it in the cache when they restart.

    Args:
        config: the config of the run.
        world: the world of all processes.
        env: the environment, in which an elastic launcher sets `ELASTIC`. Without `ELASTIC`, or
            without a cache that outlives the processes, nothing is compiled.
        tell: called with a message if the loss of one process leaves others that cannot continue.

    Yields:
        A function that starts the compilation; call it after the step of the run is compiled. The
        context waits for the compilation on exit.
    """
    thread = threading.Thread(target=_compile_ahead, args=(config, world, tell), name="axon-ahead")
    # Without a cache, the compiled program would be lost when the processes end.
    has_cache = all(getattr(jax.config, name) for name in _CACHE)
    can_lose = bool(env.get(ELASTIC)) and world.num_processes > 1
    try:
        yield thread.start if _mesh_shrinks(config) and has_cache and can_lose else lambda: None
    finally:
        if thread.ident is not None:
            thread.join()


def _compile_ahead(config: RunConfig, world: World, tell: Callable[[str], None]) -> None:
    """Compiles the step for the run with the most remaining processes that can continue it."""
    reasons = []
    for fewer in range(world.num_processes - 1, 0, -1):
        try:
            step, _ = step_for(config, world_of_first(config, world, fewer))
            step.lower(abstract_batch(config)).compile()
        except AxonDistError as error:
            reasons.append(str(error))
        else:
            if reasons:
                tell(f"if one process is lost, only {fewer} can continue: {reasons[0]}")
            return
    tell(f"if one process is lost, the others cannot continue: {reasons[0]}")


def world_of_first(config: RunConfig, world: World, count: int) -> World:
    """Returns the world of the first processes of a run without the others.

    Args:
        config: the config of the run.
        world: the world of all processes.
        count: the number of processes.
    """
    devices = [d for d in world.mesh.devices.flat if d.process_index < count]
    devices.sort(key=lambda device: device.id)
    return World(build_mesh(config.mesh.resolve(len(devices)), devices), world.backend)
