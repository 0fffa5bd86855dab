"""`axon prove` and `axon bisect`: run the checks and print the findings."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path

from axon_dist.mesh import World

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
    _emulate([mesh for mesh in (arguments.mesh, arguments.other_mesh) if mesh])
    from axon_dist.prove.file import bisect_files  # noqa: PLC0415

    parting = bisect_files(
        arguments.one,
        arguments.other,
        arguments.mesh,
        arguments.other_mesh,
        arguments.shapes,
        arguments.arguments,
        arguments.steps,
    )
    _write(arguments.json, json.dumps(parting.as_json(), indent=1))
    print(parting)
    return 0 if parting.ok else 1


def _emulate(meshes: Sequence[str]) -> None:
    """Emulates as many devices as the meshes need, before JAX starts with fewer."""
    sizes = [
        math.prod(int(part.partition("=")[2] or 1) for part in mesh.split(","))
        for mesh in meshes
        if all(part.partition("=")[2].isdecimal() for part in mesh.split(","))
    ]
    World.emulate(max([_DEVICES, *sizes]))


def _write(path: Path | None, text: str) -> None:
    if path is not None:
        Path(path).write_text(f"{text}\n")
