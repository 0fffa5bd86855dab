"""Verifies that a config's strategy trains to the same numbers as one device."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from axon_dist.core.checks import COUNT, ArgumentKind, checked
from axon_dist.core.errors import ConfigError
from axon_dist.core.own_context import in_context_of_step, in_own_context
from axon_dist.core.tree import is_key, leaves_with_paths, map_with_path
from axon_dist.core.typing import LossFn, Path, PyTree
from axon_dist.core.weighted import Weighted
from axon_dist.data import LocalBatch
from axon_dist.mesh import World
from axon_dist.ops.precision import MixedPrecision, without_gathers
from axon_dist.parallel import OuterLoop, ddp
from axon_dist.separability.abstract_values import LossDependence
from axon_dist.step import TrainState, TrainStep, build_train_step
from axon_dist.step.replicas import addends_of, shared_metrics

from ..config import CONFIG, Optimizer, RunConfig, with_own_precision
from .runs import build_loader
from .steps import (
    build_step,
    build_world,
    check_memory,
    model_of,
    optimizer_of,
    what_is_trained,
    without_axes,
)

COMPARED = ("loss", "grad_norm")
"""The metrics that are compared, in addition to the parameters."""


def synchronizing_soon(outer_loop: OuterLoop | None) -> OuterLoop | None:
    """Returns the loop with an outer step after at most two steps, and without compression.

    The reference on one device does not compress outer gradients.
    """
    if outer_loop is None:
        return None
    interval = min(outer_loop.every, 2)
    fragments = min(outer_loop.fragments, interval)
    return dataclasses.replace(outer_loop, every=interval, compression=None, fragments=fragments)


def train_replicas(
    step: TrainStep,
    alone: TrainStep,
    batches: Sequence[LocalBatch],
    first: Callable[[PyTree], PyTree] = lambda params: params,
) -> tuple[dict, dict]:
    """Trains every replica of a step in turn on one device, each on its rows of the batches.

    Args:
        step: the step, whose strategy defines the number of replicas and when they synchronize.
        alone: a step with the same model and optimizer, on one device.
        batches: the batches of all replicas.
        first: changes the initial parameters of all replicas.

    Returns:
        The metrics by name, and the outer parameters by path. The loss is that of the samples of
        all replicas, as a step reports it; other metrics are means over the replicas.
    """
    loop: Any = step.strategy.outer_loop
    count = step.world.mesh.shape[loop.axis]

    states = [_of_replica(_first_state(alone, first), number) for number in range(count)]
    # A step donates its state, so the outer parameters must be a copy.
    outer = jax.tree.map(jnp.copy, states[0].params)
    sizes = {path: leaf.size for path, leaf in leaves_with_paths(outer)}
    fragment_paths = loop.fragment_paths(sizes)
    outer_states = [loop.outer.init(outer) for _ in fragment_paths]
    compared: dict[str, Any] = {}
    for number, batch in enumerate(batches):
        dependence = _dependence(step, batch)
        reported = []
        for replica in range(count):
            share = _share(batch, replica, count)
            # The step donates the state, so the weight is computed before.
            weight = alone.evaluate_sums(states[replica], share)["loss"].weight
            states[replica], metrics = alone(states[replica], share)
            loss = {"loss": Weighted(metrics["loss"] * weight, weight)}
            reported.append({**metrics, **addends_of(loss, dependence)})
        together = shared_metrics(jax.tree.map(lambda *x: jnp.stack(x), *reported))
        compared |= {metric_of(name, number): np.asarray(together[name]) for name in COMPARED}
        for fragment in loop.due(number + 1):
            means = jax.tree.map(lambda *p: sum(p) / count, *(state.params for state in states))
            grads = jax.tree.map(jnp.subtract, outer, means)
            updates, outer_states[fragment] = loop.outer.update(
                grads, outer_states[fragment], outer
            )
            updated = optax.apply_updates(outer, updates)
            outer = _replaced(outer, updated, fragment_paths[fragment])
            states = [_follow(state, updated, fragment_paths[fragment]) for state in states]
    return compared, params_of(alone.merge(dataclasses.replace(states[0], params=outer)))


@in_context_of_step
def _dependence(step: TrainStep, batch: LocalBatch) -> LossDependence | None:
    """Returns how what a replica reports relates to the numbers of all samples."""
    layout: Any = step.state_layout
    return layout.dependence(step.batch_layout.abstract(batch))


def _replaced(old: PyTree, new: PyTree, paths: Collection[Path]) -> PyTree:
    """Returns a tree whose leaves at some paths are replaced by those of another tree."""
    return map_with_path(lambda path, leaf, other: other if path in paths else leaf, old, new)


def _follow(state: TrainState, outer: PyTree, paths: Collection[Path]) -> TrainState:
    params = jax.tree.map(jnp.copy, _replaced(state.params, outer, paths))
    return dataclasses.replace(state, params=params)


def metric_of(name: str, number: int) -> str:
    """Returns the name of a step's metric in a comparison."""
    return f"{name} of step {number}"


def params_of(model: nnx.Module) -> dict[str, Any]:
    """Returns the parameters of a model by path, in host memory."""
    params = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    return {path: np.asarray(jax.device_get(x)) for path, x in leaves_with_paths(params)}


def _first_state(step: TrainStep, first: Callable[[PyTree], PyTree]) -> TrainState:
    state = step.init()
    return dataclasses.replace(state, params=first(state.params))


def _of_replica(state: TrainState, number: int) -> TrainState:
    """Gives each replica but the first its own random keys, by folding in its number."""

    def fold(x):
        return jax.random.fold_in(x, number) if number and is_key(x) else x

    return dataclasses.replace(state, buffers=jax.tree.map(fold, state.buffers))


def _share(batch: Mapping[str, object], replica: int, count: int) -> PyTree:
    """Returns a replica's rows, which are consecutive."""
    return {name: np.split(np.asarray(leaf), count)[replica] for name, leaf in batch.items()}


LEARNING_RATE = 0.1
_POSITIONS = 64
EXACT, ROUNDED = 1e-5, 2e-2
"""Tolerances: for float32 everywhere, and for a narrower compute dtype."""
NUDGES, SPREAD, MOST_SPREAD = 2, 4.0, 1e-3
"""NUDGES: the number of one-device runs from parameters perturbed by rounding errors. SPREAD: a row
may differ by this multiple of their largest difference, but by at most MOST_SPREAD."""


@dataclasses.dataclass(frozen=True)
class Difference:
    """The difference of one number or array from that of one device.

    Args:
        what: the metric with its step, or the path of a parameter.
        relative: the largest difference, relative to the largest element on one device; infinite
            if anything is not finite.
        rounding: the same measure between runs on one device whose initial parameters differ by
            rounding errors; 0 if it was not measured, because all rows passed.
    """

    what: str
    relative: float
    rounding: float = 0.0

    def passes(self, tolerance: float) -> bool:
        """Whether the difference is within the tolerance, or rounding explains it."""
        explained = min(SPREAD * self.rounding, MOST_SPREAD)
        return self.relative <= max(tolerance, explained)


@dataclasses.dataclass(frozen=True)
class Verification:
    """The compared values and the tolerance.

    Args:
        strategy: the name of the strategy.
        mesh: its mesh, as text.
        metrics: one row per step and compared metric.
        params: one row per parameter, after the last step.
        tolerance: the largest relative difference that passes.
    """

    strategy: str
    mesh: str
    metrics: tuple[Difference, ...]
    params: tuple[Difference, ...]
    tolerance: float

    @property
    def worst(self) -> Difference:
        """The row with the largest difference, of those that fail if any does."""
        return self.ranked((*self.metrics, *self.params))[0]

    def ranked(self, rows: Sequence[Difference]) -> list[Difference]:
        """Sorts rows: those that fail first, then by their difference, the largest first.

        A difference that rounding explains may be larger than one that fails.
        """
        return sorted(rows, key=lambda row: (row.passes(self.tolerance), -row.relative))

    @property
    def passed(self) -> bool:
        """Whether every row passes."""
        return all(row.passes(self.tolerance) for row in (*self.metrics, *self.params))


def tiny(config: RunConfig) -> RunConfig:
    """Makes the config as small as its mesh allows, for the present devices.

    Widths stay the same, because strategies split them. Layers, positions and samples are reduced
    to the fewest that give every rank, stage, microbatch and logical shard some work. Layers stay
    if the config has expressions with numbers, which may name any of them.

    Args:
        config: a checked run, as YAML describes it.

    Example:
        >>> config = RunConfig.from_dict({"mesh": "dp=4", "train": {"global_batch": 512}})
        >>> small = tiny(config)
        >>> small.model.num_layers, small.train.global_batch
        (2, 4)
    """
    plain = config.to_dict()
    shape = config.mesh.shape
    if -1 in shape.values():
        # That axis takes the devices that the others leave.
        shape = World.init(config.mesh).mesh.shape
    size = math.prod(shape.values())
    pipeline = plain["parallel"].get("pipeline", {})
    microbatches = max(config.train.accumulate, pipeline.get("num_microbatches", 1))
    plain["devices"]["emulate"] = None
    samples = math.lcm(size * microbatches, config.logical_shards or 1)
    plain["train"]["global_batch"] = min(config.train.global_batch, samples)
    model = plain["model"]
    data = plain["data"]
    if "sequence_length" in data and "factory" not in data:
        data["sequence_length"] = min(data["sequence_length"], _POSITIONS * size)
    # Explicit boundaries and costs refer to single layers, so the number of layers must stay.
    refers_to_layers = {"boundaries", "costs"} & pipeline.keys() or _names_numbers(config)
    if "num_layers" in model and "factory" not in model and not refers_to_layers:
        stages = shape.get("pp", 1) * pipeline.get("chunks", 2)
        model["num_layers"] = min(model["num_layers"], max(stages, 2))
    return RunConfig.from_dict(plain)


def _names_numbers(config: RunConfig) -> bool:
    """Whether an expression for paths has a digit, such as that of a layer."""
    groups = config.optimizer.groups if isinstance(config.optimizer, Optimizer) else ()
    paths = [*config.trainable, *(path for group in groups for path in group.paths)]
    if config.lora is not None:
        paths += [*config.lora.paths, *config.lora.rank_pattern, *config.lora.alpha_pattern]
    plan = config.parallel.get("tensor", {}).get("plan")
    if isinstance(plan, Mapping):
        paths += plan
    paths += MixedPrecision.of(with_own_precision(config).precision).skip
    return any(character.isdigit() for path in paths for character in path)


@checked(
    config=CONFIG,
    steps=ArgumentKind("a number, 1 to 1000", lambda x: COUNT.holds(x) and x <= 1000),
)
@in_own_context
def verify(config: RunConfig, steps: int = 5) -> Verification:
    """Trains a few steps with the config's strategy and on one device, and compares them.

    Both use SGD with momentum, because Adam hides constant factors of a gradient, and turns
    rounding errors of zero gradients into full-size steps. The inputs are random numbers, or the
    first batches of the data if only the data determine which values are valid. Microbatches,
    clipping, dropout and precision are the config's. Replicas with outer steps are each trained on
    one device in turn; they synchronize after every second step at the latest, without compression.

    Args:
        config: a checked run, as YAML describes it.
        steps: the number of steps.

    Returns:
        The differences.

    Raises:
        ConfigError: for fewer than one step or more than a thousand, when there are several
            processes, or when the config's own optimizer cannot be built.
    """
    config = with_own_precision(config)
    world = build_world(config)
    if world.num_processes > 1:
        raise ConfigError(
            f"verify compares with one device of this process, but there are {world.num_processes} "
            "processes; run it in one process, on a mesh of its devices",
            code="several-processes",
        )
    # Neither run uses the config's optimizer, but a run that passes should also train.
    optimizer_of(config, functools.partial(model_of, config))
    step = build_step(config, world, _optimizer(), COMPARED, change_outer_loop=synchronizing_soon)
    check_memory(config, step)
    alone = one_device_step(config, world, step.batch_layout.num_microbatches, _optimizer())
    train_alone = (
        _train if step.strategy.outer_loop is None else functools.partial(train_replicas, step)
    )
    # By default, accelerators multiply float32 with fewer bits.
    with jax.default_matmul_precision("highest"):
        batches = list(drawn_batches(config, world, steps))
        seen = _train(step, batches)
        reference = train_alone(alone, batches)
        comparison = Verification(
            strategy=step.strategy.name,
            mesh=str(world.spec),
            metrics=tuple(_compare(seen[0], reference[0])),
            params=tuple(_compare(seen[1], reference[1])),
            tolerance=tolerance_of(config),
        )
        if comparison.passed:
            return comparison
        # Some differences are pure rounding: sums that cancel, such as the gradient of a bias
        # before a normalization, have few correct digits. Measure how much rounding alone changes
        # the results of one device.
        nudged = [train_alone(alone, batches, _nudge(seed)) for seed in range(NUDGES)]
    moved = ([list(_compare(run[part], reference[part])) for run in nudged] for part in (0, 1))
    metrics, params = map(_with_rounding, (comparison.metrics, comparison.params), moved)
    return dataclasses.replace(comparison, metrics=metrics, params=params)


def tolerance_of(config: RunConfig) -> float:
    """Returns the largest relative difference that passes, by the precision of a config.

    Example:
        >>> tolerance_of(RunConfig()), tolerance_of(RunConfig(precision="bf16"))
        (1e-05, 0.02)
    """
    policy = MixedPrecision.of(with_own_precision(config).precision)
    return EXACT if policy == MixedPrecision() else ROUNDED


def _optimizer() -> optax.GradientTransformation:
    return optax.sgd(LEARNING_RATE, momentum=0.9)


def one_device_step(
    config: RunConfig,
    world: World,
    num_microbatches: int,
    optimizer: optax.GradientTransformation,
    around: Callable[[LossFn], LossFn] = lambda loss_fn: loss_fn,
) -> TrainStep:
    """Builds the step of a config on the first device of a world, in global view.

    Args:
        config: a checked run, as YAML describes it.
        world: the devices.
        num_microbatches: how many microbatches the batch has.
        optimizer: the optimizer.
        around: wraps the loss of the config's task.
    """
    one = World.init("dp=1", [world.mesh.devices.flat[0]])
    return build_train_step(
        functools.partial(model_of, config),
        optimizer,
        around(config.kind.task.loss_fn),
        # Global view reduces nothing by hand, so the reference does not use the verified code.
        ddp(per="microbatch"),
        one,
        accumulate=num_microbatches,
        clip_norm=config.train.clip_norm,
        metrics=COMPARED,
        precision=without_gathers(with_own_precision(config).precision),
        scaler=config.loss_scale,
        axis_names=without_axes(config.axis_names),
        **what_is_trained(config),
    )


def _train(
    step: TrainStep, batches: list[LocalBatch], first: Callable[[PyTree], PyTree] = lambda p: p
) -> tuple[dict, dict]:
    """Returns the metrics by step, and the final parameters of the model by path.

    `first` maps the initial parameters to those of the first state.
    """
    state = _first_state(step, first)
    compared = {}
    for number, batch in enumerate(batches):
        state, metrics = step(state, batch)
        # Like Adam, clipping hides a constant factor of the gradients; the norm reveals it.
        for name in COMPARED:
            compared[metric_of(name, number)] = np.asarray(metrics[name])
    return compared, params_of(step.merge(state))


def drawn_batches(config: RunConfig, world: World, steps: int) -> Iterator[LocalBatch]:
    """Yields random batches shaped like the data; the data itself if random values are invalid."""
    fields = config.kind.task.fields(config.model, config.data)
    rows = config.train.global_batch
    if any(field.below is None for field in fields.values()):
        yield from itertools.islice(build_loader(config, world), steps)
        return
    for number in range(steps):
        random = np.random.default_rng((config.seed, number))
        yield {name: field.draw(random, rows) for name, field in fields.items()}


def _nudge(seed: int) -> Callable[[PyTree], PyTree]:
    """Returns a function that perturbs parameters randomly by up to two machine epsilons."""

    def nudge(leaf: jax.Array) -> jax.Array:
        off = 2 * float(jnp.finfo(leaf.dtype).eps) * random.uniform(-1, 1, leaf.shape)
        return jax.device_put(leaf * jnp.asarray(1 + off, leaf.dtype), leaf.sharding)

    random = np.random.default_rng(seed)
    return functools.partial(jax.tree.map, nudge)


def _with_rounding(
    rows: Sequence[Difference], moved: Sequence[Sequence[Difference]]
) -> tuple[Difference, ...]:
    """Sets each row's `rounding` to its largest difference in the perturbed runs."""
    farthest = (max(row.relative for row in same) for same in zip(*moved, strict=True))
    return tuple(
        dataclasses.replace(row, rounding=far) for row, far in zip(rows, farthest, strict=True)
    )


def _compare(seen: dict[str, object], expected: dict[str, object]) -> Iterator[Difference]:
    for what, want in expected.items():
        want, got = (np.asarray(x, np.float64) for x in (want, seen[what]))
        # A NaN is neither below nor above a tolerance, and would hide in the maximum of the rows.
        if not (np.isfinite(want).all() and np.isfinite(got).all()):
            yield Difference(what, math.inf)
            continue
        scale = max(float(np.abs(want).max(initial=0)), float(jnp.finfo(jnp.float32).tiny))
        yield Difference(what, float(np.abs(got - want).max(initial=0)) / scale)
