"""A config's strategy and one device, side by side: the same batches, the same numbers."""

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
from axon_dist.core.tree import is_key, leaves_with_paths, map_with_path
from axon_dist.core.typing import Path, PyTree
from axon_dist.data import LocalBatch
from axon_dist.mesh import World
from axon_dist.ops.precision import without_gathers
from axon_dist.parallel import OuterLoop, ddp
from axon_dist.step import TrainState, TrainStep, build_train_step

from ...core.own_context import in_own_context
from ..config import CONFIG, RunConfig
from .runs import build_loader
from .steps import build_step, build_world, check_memory, model_of, what_is_trained

COMPARED = ("loss", "grad_norm")
"""The metrics that are compared, beside the parameters."""


def synchronizing_soon(slow: OuterLoop | None) -> OuterLoop | None:
    """The plan with an outer step after every second step, uncompressed.

    Compressed outer gradients equal nothing that one device computes.
    """
    if slow is None:
        return None
    interval = min(slow.every, 2)
    fragments = min(slow.fragments, interval)
    return dataclasses.replace(slow, every=interval, compression=None, fragments=fragments)


def train_replicas(
    step: TrainStep,
    alone: TrainStep,
    batches: Sequence[LocalBatch],
    first: Callable[[PyTree], PyTree] = lambda params: params,
) -> tuple[dict, dict]:
    """Trains every replica of a step by a step of one device, each on its rows of the batches.

    Args:
        step: whose strategy says how many replicas there are, and when they synchronize.
        alone: of the same model and optimizer, on one device.
        batches: of all replicas.
        first: makes the parameters that all replicas begin with from what they would be.

    Returns:
        The means of their metrics by name, and the outer parameters by path.
    """
    plan: Any = step.strategy.slow
    count = step.world.mesh.shape[plan.axis]

    states = [_of_replica(_first_state(alone, first), number) for number in range(count)]
    # A step donates its state, so the outer parameters are a copy.
    outer = jax.tree.map(jnp.copy, states[0].params)
    parts = plan.parts({path: leaf.size for path, leaf in leaves_with_paths(outer)})
    outer_states = [plan.outer.init(outer) for _ in parts]
    averages: dict[str, Any] = {}
    for number, batch in enumerate(batches):
        for replica in range(count):
            share = _share(batch, replica, count, step.layout.num_microbatches)
            states[replica], metrics = alone(states[replica], share)
            for name in COMPARED:
                total = averages.setdefault(metric_of(name, number), 0.0)
                averages[metric_of(name, number)] = total + np.asarray(metrics[name]) / count
        for part in plan.due(number + 1):
            means = jax.tree.map(lambda *p: sum(p) / count, *(state.params for state in states))
            grads = jax.tree.map(jnp.subtract, outer, means)
            updates, outer_states[part] = plan.outer.update(grads, outer_states[part], outer)
            updated = optax.apply_updates(outer, updates)
            outer = _replaced(outer, updated, parts[part])
            states = [_follow(state, updated, parts[part]) for state in states]
    return averages, params_of(alone.merge(dataclasses.replace(states[0], params=outer)))


def _replaced(old: PyTree, new: PyTree, paths: Collection[Path]) -> PyTree:
    """A tree with the leaves of another at some paths."""
    return map_with_path(lambda path, leaf, other: other if path in paths else leaf, old, new)


def _follow(state: TrainState, outer: PyTree, paths: Collection[Path]) -> TrainState:
    params = jax.tree.map(jnp.copy, _replaced(state.params, outer, paths))
    return dataclasses.replace(state, params=params)


def metric_of(name: str, number: int) -> str:
    """What a metric of a step is called in a comparison."""
    return f"{name} of step {number}"


def params_of(model: nnx.Module) -> dict[str, Any]:
    """The parameters of a model by path, in host memory."""
    params = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    return {path: np.asarray(jax.device_get(x)) for path, x in leaves_with_paths(params)}


def _first_state(step: TrainStep, first: Callable[[PyTree], PyTree]) -> TrainState:
    state = step.init()
    return dataclasses.replace(state, params=first(state.params))


def _of_replica(state: TrainState, number: int) -> TrainState:
    """The first replica draws as the model would, the others from keys folded with their number."""

    def fold(x):
        return jax.random.fold_in(x, number) if number and is_key(x) else x

    return dataclasses.replace(state, buffers=jax.tree.map(fold, state.buffers))


def _share(batch: Mapping[str, object], replica: int, count: int, microbatches: int) -> PyTree:
    """The rows of every microbatch that a replica has."""
    parts = {name: np.split(np.asarray(leaf), microbatches * count) for name, leaf in batch.items()}
    return {name: np.concatenate(rows[replica::count]) for name, rows in parts.items()}


LEARNING_RATE = 0.1
_POSITIONS = 64
EXACT, ROUNDED = 1e-5, 2e-2
"""Tolerances: float32 everywhere, or a narrower compute dtype."""
NUDGES, SPREAD, MOST_SPREAD = 2, 4.0, 1e-3
"""How many runs of one device start from parameters nudged by rounding errors, how many times their
largest difference a row may be off, and the most that a row may be off for that reason."""


@dataclasses.dataclass(frozen=True)
class Difference:
    """How far one number or array is from one device's.

    Args:
        what: the metric with its step, or the path of a parameter.
        relative: the largest difference, relative to the largest element of one device's; infinite
            where anything is not finite.
        rounding: how far one device alone moves from parameters that differ in their last digits,
            in the same measure; 0 where it was not asked, because nothing was far off.
    """

    what: str
    relative: float
    rounding: float = 0.0

    def passes(self, tolerance: float) -> bool:
        """Whether it is within the tolerance, or no more than rounding makes of one device."""
        explained = min(SPREAD * self.rounding, MOST_SPREAD)
        return self.relative <= max(tolerance, explained)


@dataclasses.dataclass(frozen=True)
class Verification:
    """What was compared, and how far apart it may be.

    Args:
        strategy: the name of the strategy.
        mesh: its mesh, as text.
        metrics: one row per step.
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
        """The row that is farthest off."""
        return max((*self.metrics, *self.params), key=lambda row: row.relative)

    @property
    def passed(self) -> bool:
        """Whether every row is."""
        return all(row.passes(self.tolerance) for row in (*self.metrics, *self.params))


def tiny(config: RunConfig) -> RunConfig:
    """The config made as small as its mesh lets it be, on the devices that there are.

    Widths stay, for strategies split them; layers, positions and samples become as few as every
    rank, stage and microbatch needs one of.

    Args:
        config: a run as YAML describes it, checked.

    Example:
        >>> config = RunConfig.from_dict({"mesh": "dp=4", "train": {"global_batch": 512}})
        >>> small = tiny(config)
        >>> small.model.num_layers, small.train.global_batch
        (2, 4)
    """
    plain = config.to_dict()
    size = math.prod(abs(axis) for axis in config.mesh.shape.values())
    pipeline = plain["parallel"].get("pipeline", {})
    microbatches = max(config.train.accumulate, pipeline.get("num_microbatches", 1))
    plain["devices"]["emulate"] = None
    plain["train"]["global_batch"] = min(config.train.global_batch, size * microbatches)
    model, data = plain["model"], plain["data"]
    if "sequence_length" in data and "factory" not in data:
        data["sequence_length"] = min(data["sequence_length"], _POSITIONS * size)
    is_cut_by_hand = {"boundaries", "costs"} & pipeline.keys()
    if "num_layers" in model and "factory" not in model and not is_cut_by_hand:
        stages = config.mesh.shape.get("pp", 1) * pipeline.get("chunks", 2)
        model["num_layers"] = min(model["num_layers"], max(stages, 2))
    return RunConfig.from_dict(plain)


@checked(
    config=CONFIG,
    steps=ArgumentKind("a number, 1 to 1000", lambda x: COUNT.holds(x) and x <= 1000),
)
@in_own_context
def verify(config: RunConfig, steps: int = 5) -> Verification:
    """Trains a few steps with the config's strategy and on one device, and compares.

    Both use SGD with momentum on the config's model and random numbers, or, where only the data say
    what numbers there can be, on its first batches: Adam hides constant factors
    of a gradient, and turns rounding of gradients that should be zero into steps of full size.
    Microbatches, clipping, dropout and precision are the config's. Replicas with outer steps are
    each compared with one device in turn; they synchronize after every second step, without
    compression.

    Args:
        config: a run as YAML describes it, checked.
        steps: how many steps.

    Returns:
        The differences.

    Raises:
        ConfigError: for fewer than one step or more than a thousand, or in one of several
            processes.
    """
    world = build_world(config)
    if world.num_processes > 1:
        raise ConfigError(
            f"verify compares with one device of this process, and there are {world.num_processes} "
            "processes; run it in one, on a mesh of its devices"
        )
    step = build_step(config, world, _optimizer(), COMPARED, slow=synchronizing_soon)
    check_memory(config, step)
    alone = _one_device(config, world, step.layout.num_microbatches)
    by_turns = _train if step.strategy.slow is None else functools.partial(train_replicas, step)
    # By default accelerators multiply float32 in fewer bits.
    with jax.default_matmul_precision("highest"):
        batches = list(_batches(config, world, steps))
        seen, reference = _train(step, batches), by_turns(alone, batches)
        rounded = config.precision not in (None, "float32")
        comparison = Verification(
            strategy=step.strategy.name,
            mesh=str(world.spec),
            metrics=tuple(_compare(seen[0], reference[0])),
            params=tuple(_compare(seen[1], reference[1])),
            tolerance=ROUNDED if rounded else EXACT,
        )
        if comparison.passed:
            return comparison
        # Sums that cancel keep few digits: a bias before a normalization, a ReLU at its kink.
        nudged = [by_turns(alone, batches, _nudge(seed)) for seed in range(NUDGES)]
    moved = ([list(_compare(run[part], reference[part])) for run in nudged] for part in (0, 1))
    metrics, params = map(_with_rounding, (comparison.metrics, comparison.params), moved)
    return dataclasses.replace(comparison, metrics=metrics, params=params)


def _optimizer() -> optax.GradientTransformation:
    return optax.sgd(LEARNING_RATE, momentum=0.9)


def _one_device(config: RunConfig, world: World, num_microbatches: int) -> TrainStep:
    one = World.init("dp=1", [world.mesh.devices.flat[0]])
    return build_train_step(
        functools.partial(model_of, config),
        _optimizer(),
        config.kind.task.loss_fn,
        # In global view, where nothing is reduced by hand: not the code that is being verified.
        ddp(per="microbatch"),
        one,
        accumulate=num_microbatches,
        clip_norm=config.train.clip_norm,
        metrics=COMPARED,
        precision=without_gathers(config.precision),
        scaler=config.loss_scale,
        # One device splits nothing, whatever the names mean on the mesh of the run.
        axis_names=dict.fromkeys(config.axis_names, ()),
        **what_is_trained(config),
    )


def _train(
    step: TrainStep, batches: list[LocalBatch], first: Callable[[PyTree], PyTree] = lambda p: p
) -> tuple[dict, dict]:
    """Losses by step, and the parameters of the model at the end by path.

    `first` makes the parameters of the first state from what they would be.
    """
    state, losses = _first_state(step, first), {}
    for number, batch in enumerate(batches):
        state, metrics = step(state, batch)
        # Clipping hides a constant factor in the gradients, as Adam does, but not in their norm.
        for name in COMPARED:
            losses[metric_of(name, number)] = np.asarray(metrics[name])
    return losses, params_of(step.merge(state))


def _batches(config: RunConfig, world: World, steps: int) -> Iterator[LocalBatch]:
    """Random numbers in the shapes of the data, or the data where nothing else can be."""
    fields, rows = config.kind.task.fields(config.model, config.data), config.train.global_batch
    if any(field.below is None for field in fields.values()):
        yield from itertools.islice(build_loader(config, world), steps)
        return
    for number in range(steps):
        random = np.random.default_rng((config.seed, number))
        yield {name: field.draw(random, rows) for name, field in fields.items()}


def _nudge(seed: int) -> Callable[[PyTree], PyTree]:
    """Puts parameters up to two units in the last place off, at random."""

    def nudge(leaf: jax.Array) -> jax.Array:
        off = 2 * float(jnp.finfo(leaf.dtype).eps) * random.uniform(-1, 1, leaf.shape)
        return jax.device_put(leaf * jnp.asarray(1 + off, leaf.dtype), leaf.sharding)

    random = np.random.default_rng(seed)
    return functools.partial(jax.tree.map, nudge)


def _with_rounding(
    rows: Sequence[Difference], moved: Sequence[Sequence[Difference]]
) -> tuple[Difference, ...]:
    """Rows with the farthest that any of the nudged runs moved each."""
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
