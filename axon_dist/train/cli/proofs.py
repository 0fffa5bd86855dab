"""`axon prove` and `axon bisect`: run the checks and print the findings."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from axon_dist.core.errors import ConfigError
from axon_dist.mesh import World
from axon_dist.train.config import RunConfig, load_config

if TYPE_CHECKING:
    from axon_dist.prove.trace import Subject

_DEVICES = 8


def prove(arguments: argparse.Namespace) -> int:
    """Prints the findings; the exit code is 1 for a mistake, 2 if a mesh cannot be tried."""
    _emulate(arguments.meshes)
    from axon_dist.prove.file import prove_file  # noqa: PLC0415

    report = prove_file(
        arguments.target,
        arguments.meshes,
        arguments.shapes,
        arguments.arguments,
        arguments.draws,
    )
    _write(arguments.json, report.dumps("json"))
    _write(arguments.sarif, report.dumps("sarif"))
    print(report)
    return report.exit_code


def bisect(arguments: argparse.Namespace) -> int:
    """Prints where two programs diverge; the exit code is 1 if they do."""
    if arguments.other is None and arguments.record is None:
        raise ConfigError("[PROVE002] axon bisect needs a second program B, or --record FILE")
    targets = [target for target in (arguments.one, arguments.other) if target is not None]
    configs = {path: load_config(path) for path in targets if path.endswith((".yaml", ".yml"))}
    given = [mesh for mesh in (arguments.mesh, arguments.other_mesh) if mesh]
    _emulate(given, [_devices_of(config) for config in configs.values()])
    from axon_dist.prove import parting  # noqa: PLC0415
    from axon_dist.prove.recording import Recording  # noqa: PLC0415

    one, mesh = _side(arguments, arguments.one, arguments.mesh, configs)
    if arguments.record is not None:
        recording = parting.record(one, parting.paired(mesh, None)[0], arguments.steps)
        recording.save(arguments.record)
        count = len(recording.program.operations)
        print(f"{arguments.record}: fingerprints of {count} operations by {recording.made_by}")
    if arguments.other is None:
        return 0
    if arguments.other.endswith(".npz"):
        found = parting.bisect_recording(Recording.load(arguments.other), one, mesh)
    else:
        other, other_mesh = _side(arguments, arguments.other, arguments.other_mesh, configs)
        meshes = parting.paired(mesh, other_mesh)
        found = parting.bisect_subjects(one, other, *meshes, arguments.steps)
    _write(arguments.json, json.dumps(found.as_json(), indent=1))
    print(found)
    return 0 if found.ok else 1


def _side(
    arguments: argparse.Namespace,
    target: str,
    mesh: str | None,
    configs: Mapping[str, RunConfig],
) -> tuple[Subject, Any]:
    """Returns a program and its mesh, if it has one: of a config, or of a function in a file."""
    if target not in configs:
        from axon_dist.prove.file import file_subject  # noqa: PLC0415

        given_by = None if arguments.one in configs else arguments.one
        subject, own = file_subject(target, arguments.shapes, arguments.arguments, given_by)
        return subject, mesh or own
    if mesh is not None:
        raise ConfigError(
            f"[PROVE013] {target} is a config, which names its own mesh; leave out --mesh and "
            "--other-mesh, or change the key mesh in a copy of the config"
        )
    from axon_dist.train.app.proofs import config_subject  # noqa: PLC0415

    return config_subject(configs[target])


def _emulate(meshes: Sequence[str], counts: Sequence[int] = ()) -> None:
    """Emulates as many devices as the meshes need, before JAX starts with fewer."""
    sizes = [
        math.prod(int(part.partition("=")[2] or 1) for part in mesh.split(","))
        for mesh in meshes
        if all(part.partition("=")[2].isdecimal() for part in mesh.split(","))
    ]
    World.emulate(max([_DEVICES, *sizes, *counts]))


def _devices_of(config: RunConfig) -> int:
    """Returns how many devices a config needs; 0 if its mesh takes all that there are."""
    return config.devices.emulate or max(0, math.prod(config.mesh.shape.values()))


def _write(path: Path | None, text: str) -> None:
    if path is not None:
        Path(path).write_text(f"{text}\n")
