"""The train step of a config as a function that `axon bisect` compares with another."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from jax.sharding import Mesh

from axon_dist.mesh import World
from axon_dist.mesh.world import available_devices
from axon_dist.prove.trace import Subject
from axon_dist.step.step import PortableForm

from ..config import RunConfig
from .steps import build_step
from .verify import random_batches


def config_subject(config: RunConfig) -> tuple[Subject, Mesh]:
    """Returns the train step of a config, and its mesh over the devices of this process.

    Its arguments are the first state in the form that all strategies share, and a random batch like
    the data, or the first batch of the data if only the data tell which values are valid. Its first
    output is the next state.

    Args:
        config: a checked run, as YAML describes it.
    """
    devices = available_devices()
    # A size of -1 takes all devices.
    size = math.prod(config.mesh.shape.values())
    count = config.devices.emulate or (size if size > 0 else len(devices))
    world = World.init(config.mesh, devices[:count])

    def make(mesh: Mesh) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        step = build_step(config, world)
        form = PortableForm(step)
        (batch,) = random_batches(config, world, 1)

        def run(state: Any, batch: Any) -> tuple[Any, Any]:
            placed = step.layout.place(batch)
            after, metrics = step._step(form.take_up(state), placed, None)
            return form.of(after), metrics

        return run, (form.of(step.init()), dict(batch))

    return Subject(make, config.name), world.mesh
