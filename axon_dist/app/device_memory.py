"""What a step may fill of a device's memory: checked before a run, and kept to by `remat: auto`."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import jax
import numpy as np

from axon_dist.core.errors import ConfigError
from axon_dist.core.files import host_memory
from axon_dist.core.typing import PyTree
from axon_dist.inspect import memory
from axon_dist.mesh import World, is_on_paper
from axon_dist.mesh.chips import machine_of
from axon_dist.nn import ActivationCheckpointing
from axon_dist.planner import read_step, recompute_least
from axon_dist.planner.reading import USABLE
from axon_dist.step import TrainStep

from ..config import RunConfig, abstract_batch


def recomputing_least(
    config: RunConfig, world: World, trains: bool, build: Callable[[RunConfig], TrainStep]
) -> TrainStep:
    """The step of a config whose `remat` is `auto`, compiled where it is looked for.

    Args:
        config: a run as YAML describes it, checked.
        world: the devices, and the mesh they form.
        trains: whether steps will be taken; else nothing is recomputed.
        build: makes the step of a config that says what is recomputed.

    Raises:
        ConfigError: when the strategy says itself what is recomputed, or nothing fits.
    """

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


def usable_bytes(world: World) -> int:
    """Bytes of a device that a step may fill: of its chip, or of this host's memory its share."""
    here = [d for d in world.mesh.devices.flat if d.process_index == world.process_index]
    row = machine_of(world.mesh)
    if row is not None:
        return int(USABLE * row.memory_bytes)
    stats = {} if world.is_cpu else here[0].memory_stats() or {}
    return int(USABLE * stats.get("bytes_limit", host_memory() // max(1, len(here))))


def check_memory(config: RunConfig, step: TrainStep) -> None:
    """Checks that the state and a batch can be there at all, before either is.

    A run needs more than these, which `axon inspect` reads from the compiled program.

    Raises:
        ConfigError: when the state alone is larger than the memory of the devices, or a batch than
            that of the host.
    """
    world = step.world
    each = bytes_per_device_of(step.abstract_state, step.state_shardings)
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


def bytes_per_device_of(shapes: PyTree, shardings: PyTree) -> int:
    """Bytes that arrays take on a device, from their shapes and shardings."""
    pairs = zip(jax.tree.leaves(shapes), jax.tree.leaves(shardings), strict=True)
    return sum(
        math.prod(where.shard_shape(leaf.shape)) * getattr(leaf.dtype, "itemsize", 8)
        for leaf, where in pairs
    )
