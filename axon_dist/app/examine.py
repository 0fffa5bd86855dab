"""What the step of a config costs, read from its compiled program, here or for another machine."""

from __future__ import annotations

import dataclasses
from typing import Any

from axon_dist.core.errors import MeshError
from axon_dist.core.told import told
from axon_dist.core.words import byte_size
from axon_dist.inspect import Report, report, target_devices
from axon_dist.mesh import MeshSpec, World
from axon_dist.mesh.targets import Target, parse_target, prepare_environment

from ..config.build import abstract_batch, build_step, build_world
from ..config.load import CONFIG
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
        meetings: of replicas that train on their own, the reports of what follows the steps after
            which they meet, a fragment each.
        every: after how many steps each fragment meets; 0 where there is one replica.
    """

    report: Report
    mesh: MeshSpec
    strategy: str
    parameters: str
    target: Target | None
    attention: str | None = None
    meetings: tuple[Report, ...] = ()
    every: int = 0

    def to_dict(self) -> dict[str, Any]:
        """The reports as plain values."""
        found = self.report.to_dict()
        if not self.meetings:
            return found
        return {**found, "meetings": [one.to_dict() for one in self.meetings], "every": self.every}

    def meeting_lines(self) -> list[str]:
        """What each meeting sends, and what that comes to a step; none where there are none."""
        sent = [one.collectives.by_link() for one in self.meetings]
        lines = [
            f"meeting of fragment {number}, every {self.every} steps: "
            f"{byte_size(links.get('slow', 0))} over slow links, "
            f"{byte_size(links.get('fast', 0))} over fast ones"
            for number, links in enumerate(sent)
        ]
        if lines:
            a_step = sum(links.get("slow", 0) for links in sent) // self.every
            lines.append(f"all of them: {byte_size(a_step)} a step over slow links")
        return lines


@told(config=CONFIG)
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
    meetings = tuple(report(lowered.compile(), world.mesh) for lowered in step.lower_meetings())
    slow = step.strategy.slow
    return Examination(
        found,
        world.spec,
        step.strategy.name,
        parameters,
        machine,
        line,
        meetings,
        0 if slow is None else slow.every,
    )


def _target_world(config: RunConfig, target: Target) -> World:
    prepare_environment(target)
    try:
        return World.init(config.mesh, target_devices(target))
    except MeshError as error:
        raise MeshError(f"{target.name}: {error}") from None
