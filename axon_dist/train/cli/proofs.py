"""`axon prove` and `axon bisect`: run the checks and print the findings."""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from axon_dist.core.errors import ConfigError
from axon_dist.mesh import World

from .values import notice

if TYPE_CHECKING:
    from axon_dist.prove import Parting
    from axon_dist.prove.recording import Recording

_DEVICES = 8
_CONFIGS = (".yaml", ".yml")
_CONFIG_STEPS = 3
_OF_FUNCTIONS = ["mesh", "other_mesh", "shapes", "arguments"]


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
        tell=lambda title: notice(f"comparing on {title}"),
    )
    _write(arguments.json, report.dumps("json"))
    _write(arguments.sarif, report.dumps("sarif"))
    print(report)
    return report.exit_code


def bisect(arguments: argparse.Namespace) -> int:
    """Prints where two programs diverge; the exit code is 1 if they do."""
    targets = [text for text in arguments.targets if not _is_override(text)]
    overrides = [text for text in arguments.targets if _is_override(text)]
    wanted = 1 if arguments.record or arguments.python else 2
    if len(targets) != wanted:
        raise ConfigError(
            f"got {len(targets)} programs to bisect, but this needs {wanted}: axon bisect A B, "
            "axon bisect --python PATH A, or axon bisect --record FILE A",
            code="program-count",
        )
    _check_options(arguments, targets, overrides)
    if any(map(_is_function, targets)):
        # Configs define their devices; functions do not.
        _emulate([mesh for mesh in (arguments.mesh, arguments.other_mesh) if mesh])
    if arguments.record is not None:
        _recorded(targets[0], overrides, arguments.mesh, arguments).save(arguments.record)
        return 0
    parting = _parting(targets, overrides, arguments)
    _write(arguments.json, json.dumps(parting.as_json(), indent=1))
    print(parting)
    return 0 if parting.ok else 1


def _check_options(
    arguments: argparse.Namespace, targets: Sequence[str], overrides: Sequence[str]
) -> None:
    """Raises for options that would have no effect."""
    if overrides and not all(target.endswith(_CONFIGS) for target in targets):
        raise ConfigError(
            f"got {overrides[0]!r:.80}, which applies only to configs; leave it out",
            code="override-without-config",
        )
    unused = [] if any(_is_function(target) for target in targets) else _OF_FUNCTIONS
    unused = [*unused, "other_mesh"] if len(targets) == 1 else unused
    unused = [*unused, "json"] if arguments.record is not None else unused
    # A recording has its own number of steps.
    is_recorded = all(target.endswith(".json") for target in targets)
    unused = [*unused, "steps"] if is_recorded else unused
    if arguments.steps is not None and arguments.steps < 1:
        raise ConfigError(
            f"got --steps {arguments.steps}; it must be at least 1, or leave it out",
            code="too-few-steps",
        )
    for name in unused:
        if getattr(arguments, name):
            option = {"shapes": "shape"}.get(name, name).replace("_", "-")
            raise ConfigError(f"--{option} has no effect on {' and '.join(targets)}; leave it out")


def _is_function(target: str) -> bool:
    return not target.endswith((*_CONFIGS, ".json"))


def _is_override(text: str) -> bool:
    """Whether a word is an override of a config, such as `train.steps=3`."""
    key, separator, _ = text.partition("=")
    return bool(separator) and all(part.isidentifier() for part in key.split("."))


def _parting(
    targets: Sequence[str], overrides: Sequence[str], arguments: argparse.Namespace
) -> Parting:
    from axon_dist.prove.file import bisect_files  # noqa: PLC0415
    from axon_dist.prove.parting import compare  # noqa: PLC0415

    if len(targets) == 2 and all(map(_is_function, targets)):
        # In one process, a result that only the mesh changes is located, too.
        return bisect_files(
            targets[0],
            targets[1],
            arguments.mesh,
            arguments.other_mesh,
            arguments.shapes,
            arguments.arguments,
            1 if arguments.steps is None else arguments.steps,
        )
    one = _recorded(targets[0], overrides, arguments.mesh, arguments)
    if arguments.python is not None:
        other = _recorded_elsewhere(targets[0], overrides, arguments)
    else:
        mesh = arguments.other_mesh or arguments.mesh
        other = _recorded(targets[1], overrides, mesh, arguments)
    for letter, recording in (("A", one), ("B", other)):
        notice(f"{letter}: {recording.name} {recording.title} ({recording.made_by})")
    return compare(one, other)


def _recorded(
    target: str, overrides: Sequence[str], mesh: str | None, arguments: argparse.Namespace
) -> Recording:
    """Records a config or a function, or reads a recording."""
    if target.endswith(".json"):
        from axon_dist.prove.recording import Recording  # noqa: PLC0415

        return Recording.load(target)
    if target.endswith(_CONFIGS):
        from axon_dist.train.app.config_records import record_config  # noqa: PLC0415
        from axon_dist.train.config import load_config  # noqa: PLC0415

        steps = _CONFIG_STEPS if arguments.steps is None else arguments.steps
        return record_config(load_config(target, overrides), steps)
    from axon_dist.prove.file import record_file  # noqa: PLC0415

    steps = 1 if arguments.steps is None else arguments.steps
    return record_file(target, mesh, arguments.shapes, arguments.arguments, steps)


def _recorded_elsewhere(
    target: str, overrides: Sequence[str], arguments: argparse.Namespace
) -> Recording:
    """Records in the environment of another Python."""
    from axon_dist.prove.recording import Recording  # noqa: PLC0415

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "other.json")
        _record_elsewhere(target, overrides, file, arguments)
        return Recording.load(file)


def _record_elsewhere(
    target: str, overrides: Sequence[str], file: Path, arguments: argparse.Namespace
) -> None:
    words = [target, *overrides, "--record", str(file)]
    for name in ("mesh", "arguments", "steps"):
        value = getattr(arguments, name)
        words += [] if value is None else [f"--{name}", str(value)]
    for shape in arguments.shapes:
        words += ["--shape", shape]
    command = [arguments.python, "-m", "axon_dist.train.cli", "bisect", *words]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise ConfigError(
            f"--python: {arguments.python!r} cannot be run ({error.strerror}); give the path of "
            "the other environment's python"
        ) from error
    sys.stderr.write(done.stderr)
    if done.returncode:
        last = (done.stderr.strip() or "no message").splitlines()[-1]
        raise ConfigError(
            f"--python: {arguments.python} ended with exit code {done.returncode}: {last:.300}; "
            "axon_dist must be installed there, too",
            code="other-python-failed",
        )


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
