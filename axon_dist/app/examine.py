"""What the step of a config costs, read from its compiled program, here or for another machine."""

from __future__ import annotations

import dataclasses

from axon_dist.core.errors import MeshError
from axon_dist.hardware import Target, parse_target, prepare_environment
from axon_dist.inspect import Report, report, target_devices
from axon_dist.mesh import MeshSpec, World

from ..config.build import abstract_batch, build_step, build_world
from ..config.schema import RunConfig
from .attention import attention_line
from .report import parameters_of


@dataclasses.dataclass(frozen=True)
class Examination:
    """The report of a step and where it was compiled for.

    Args:
        report: memory, collectives and FLOPs per device.
        mesh: the axes and sizes.
        strategy: the name of the strategy.
        parameters: how many there are, how many are trained, and in what others are kept.
        target: the machine, or None for the devices of this one.
        attention: which attention runs, in a sentence; None for a model that is not ours.
    """

    report: Report
    mesh: MeshSpec
    strategy: str
    parameters: str
    target: Target | None
    attention: str | None = None


def examine(config: RunConfig, target: str | None = None) -> Examination:
    """Compiles the very step that a config would train with, and reads the program.

    Nothing is trained and no parameter is made. The batch is the config's global batch.

    Args:
        config: a run as YAML describes it, checked.
        target: a machine such as `"h100:8"` or `"v5p:2x2x2"`, which need not be there; None
            takes the config's own devices.

    Returns:
        The examination.

    Raises:
        MeshError: when the config's mesh does not fit the target.
        UnsupportedError: when the compiler for the target is not installed; it names the extra.
    """
    machine = None if target is None else parse_target(target)
    world = build_world(config) if machine is None else _target_world(config, machine)
    step = build_step(config, world)
    compiled = step.lower(abstract_batch(config)).compile()
    found = report(compiled, world.mesh)
    line, parameters = attention_line(config, step), parameters_of(step.parts)
    return Examination(found, world.spec, step.strategy.name, parameters, machine, line)


def _target_world(config: RunConfig, target: Target) -> World:
    prepare_environment(target)
    try:
        return World.init(config.mesh, target_devices(target))
    except MeshError as error:
        raise MeshError(f"{target.name}: {error}") from None
