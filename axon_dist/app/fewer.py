"""A run that has lost processes: more microbatches, and the program for the next loss."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import threading
from collections.abc import Callable, Iterator, Mapping

import jax

from axon_dist.core.errors import AxonDistError
from axon_dist.launch import ELASTIC, PLANNED
from axon_dist.mesh import World, build_mesh
from axon_dist.step import TrainStep

from ..config.schema import RunConfig
from .steps import abstract_batch, build_step


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


_CACHE = ("jax_compilation_cache_dir", "jax_enable_compilation_cache")


@contextlib.contextmanager
def compiling_ahead(
    config: RunConfig, world: World, env: Mapping[str, str], tell: Callable[[str], None]
) -> Iterator[Callable[[], None]]:
    """Lets process 0 compile the step of a run that has lost a process into the cache of JAX.

    Which process is lost does not matter: those that are left count from 0 again, so that they run
    the program of the first ones. JAX looks into the cache when they start.

    Args:
        config: of the run.
        world: of all processes.
        env: the environment, in which an elastic launcher says so; nothing is compiled elsewhere,
            nor without a cache that outlives the processes.
        tell: takes a sentence when fewer processes could not go on.

    Yields:
        Starts the compilation, once the step of the run is compiled; the context waits for it.
    """
    begun: list[threading.Thread] = []

    def begin() -> None:
        if _can_shrink(config, world, env):
            begun.append(
                threading.Thread(target=_compile, args=(config, world, tell), name="axon-ahead")
            )
            begun[0].start()

    try:
        yield begin
    finally:
        for thread in begun:
            thread.join()


def _can_shrink(config: RunConfig, world: World, env: Mapping[str, str]) -> bool:
    """Whether a run on fewer processes would have another mesh, whose program can be kept."""
    shrinks = -1 in config.mesh.shape.values() and config.devices.emulate is None
    has_cache = all(getattr(jax.config, name) for name in _CACHE)
    return shrinks and has_cache and bool(env.get(ELASTIC)) and world.num_processes > 1


def _compile(config: RunConfig, world: World, tell: Callable[[str], None]) -> None:
    fewer = world.num_processes - 1
    try:
        step, _ = step_for(config, world_of_first(config, world, fewer))
        step.lower(abstract_batch(config)).compile()
    except AxonDistError as error:
        tell(f"{fewer} processes could not go on if one were lost: {error}")


def world_of_first(config: RunConfig, world: World, count: int) -> World:
    """The world that the first processes of a run would make up without the others.

    Args:
        config: of the run.
        world: of all processes.
        count: how many of them.
    """
    devices = [d for d in world.mesh.devices.flat if d.process_index < count]
    devices.sort(key=lambda device: device.id)
    return World(build_mesh(config.mesh.resolve(len(devices)), devices), world.backend)
