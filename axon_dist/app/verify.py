"""A config's strategy and one device, side by side: the same batches, the same numbers."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from axon_dist.core.errors import ConfigError
from axon_dist.core.told import told
from axon_dist.core.typing import PyTree
from axon_dist.data import LocalBatch
from axon_dist.mesh import World
from axon_dist.ops.precision import without_gathers
from axon_dist.parallel import ddp
from axon_dist.step import TrainStep, build_train_step

from ..config.build import (
    build_loader,
    build_step,
    build_world,
    check_memory,
    model_of,
    what_is_trained,
)
from ..config.load import CONFIG
from ..config.schema import RunConfig
from .verify_replicas import COMPARED, meeting_soon, metric_of, params_of, train_replicas

LEARNING_RATE = 0.1
_MOST_STEPS = 1000
_POSITIONS = 64
EXACT, ROUNDED = 1e-5, 2e-2
"""Tolerances: float32 everywhere, or a narrower compute dtype."""
NUDGES, SPREAD, MOST_SPREAD = 2, 4.0, 1e-3
"""How often one device is tried from parameters that rounding cannot tell apart, how many times as
far as it then moves a row may be off, and the most that a row may be off for that reason."""


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


@told(config=CONFIG)
def verify(config: RunConfig, steps: int = 5) -> Verification:
    """Trains a few steps with the config's strategy and on one device, and compares.

    Both use SGD with momentum on the config's model and random numbers, or, where only the data say
    what numbers there can be, on its first batches: Adam hides constant factors
    of a gradient, and turns rounding of gradients that should be zero into steps of full size.
    Microbatches, clipping, dropout and precision are the config's. Replicas that train on their own
    are compared with each in turn on one device; they meet after every second step for it, and send
    what they do without compression.

    Args:
        config: a run as YAML describes it, checked.
        steps: how many steps.

    Returns:
        The differences.

    Raises:
        ConfigError: for fewer than one step or more than a thousand, or in one of several
            processes.
    """
    if steps < 1:
        raise ConfigError(f"verify got {steps} steps; it needs at least 1")
    if steps > _MOST_STEPS:
        raise ConfigError(f"verify got {steps} steps; it compares at most {_MOST_STEPS}")
    world = build_world(config)
    if world.num_processes > 1:
        raise ConfigError(
            f"verify compares with one device of this process, and there are {world.num_processes} "
            "processes; run it in one, on a mesh of its devices"
        )
    step = build_step(config, world, _optimizer(), COMPARED, meeting=meeting_soon)
    check_memory(config, step)
    alone = _one_device(config, world, step.layout.num_microbatches)
    by_turns = _train if step.strategy.slow is None else functools.partial(train_replicas, step)
    # Accelerators multiply float32 in fewer bits unless they are told not to.
    with jax.default_matmul_precision("highest"):
        batches = list(_batches(config, world, steps))
        seen, reference = _train(step, batches), by_turns(alone, batches)
        rounded = config.precision not in (None, "float32")
        found = Verification(
            strategy=step.strategy.name,
            mesh=str(world.spec),
            metrics=tuple(_compare(seen[0], reference[0])),
            params=tuple(_compare(seen[1], reference[1])),
            tolerance=ROUNDED if rounded else EXACT,
        )
        if found.passed:
            return found
        # Sums that cancel keep few digits: a bias before a normalization, a ReLU at its kink.
        nudged = [by_turns(alone, batches, _nudge(seed)) for seed in range(NUDGES)]
    moved = ([list(_compare(run[part], reference[part])) for run in nudged] for part in (0, 1))
    metrics, params = map(_with_rounding, (found.metrics, found.params), moved)
    return dataclasses.replace(found, metrics=metrics, params=params)


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
        **what_is_trained(config),
    )


def _train(
    step: TrainStep, batches: list[LocalBatch], first: Callable[[PyTree], PyTree] = lambda p: p
) -> tuple[dict, dict]:
    """Losses by step, and the parameters of the model at the end by path.

    `first` makes the parameters of the first state from what they would be.
    """
    state, losses = step.init(), {}
    state = dataclasses.replace(state, params=first(state.params))
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


def _compare(seen: dict[str, Any], expected: dict[str, Any]) -> Iterator[Difference]:
    for what, want in expected.items():
        want, got = (np.asarray(x, np.float64) for x in (want, seen[what]))
        # A NaN is neither below nor above a tolerance, and would hide in the maximum of the rows.
        if not (np.isfinite(want).all() and np.isfinite(got).all()):
            yield Difference(what, math.inf)
            continue
        scale = max(float(np.abs(want).max(initial=0)), float(jnp.finfo(jnp.float32).tiny))
        yield Difference(what, float(np.abs(got - want).max(initial=0)) / scale)
