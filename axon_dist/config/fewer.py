"""A run that has lost processes: the same global batch on fewer devices, by more microbatches."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

from axon_dist.launch import PLANNED
from axon_dist.mesh import World
from axon_dist.step import TrainStep

from .schema import RunConfig


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
