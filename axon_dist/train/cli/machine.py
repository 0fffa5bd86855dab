"""The verb for this machine: `axon doctor` inspects it."""

from __future__ import annotations

import argparse
import importlib.metadata
import math
import os
import platform
import re
import sys
from collections.abc import Mapping

from rich.console import Console

from axon_dist.core.errors import AxonDistError, install_command
from axon_dist.core.words import byte_size, duration, first_few, plural
from axon_dist.launch import from_env
from axon_dist.launch.distributed import prepare_emulation
from axon_dist.mesh import MeshSpec, World, process_index
from axon_dist.mesh.chips import machine_of, unknown_chip
from axon_dist.train.app import AxisSpeed, attention_rows, check_network, check_numerics

from .values import fitted

EMULATED = 4
"""The number of devices to emulate if there are too few for a mesh with two axes."""


def doctor(arguments: argparse.Namespace) -> int:
    """Prints versions, devices, meshes and extras.

    The exit code is 1 if no backend starts, a gradient is wrong, or a host is slow.
    """
    if arguments.numerics or arguments.network:
        _add_devices(arguments.network)
    info = devices()
    starts = "devices" in info
    console = Console(
        highlight=False,
        soft_wrap=not sys.stdout.isatty(),
        quiet=starts and process_index() != 0,
    )
    _section(console, "Versions", versions())
    _section(console, "Devices", info)
    _section(console, "Meshes", _meshes(info))
    if starts:
        _section(console, "Attention", attention_rows(World.init()))
    _section(console, "Extras", _extras())
    are_right = not arguments.numerics or _numerics(console, arguments.numerics == "full")
    is_fast = not (arguments.network and starts) or _network(console, arguments.network)
    return 0 if starts and are_right and is_fast else 1


def _add_devices(axes: str | None) -> None:
    """Adds emulated CPU devices for the checks; GPUs and TPUs remain the default devices.

    Call it before anything starts the backend, which fixes the number of devices.
    """
    if from_env(os.environ).is_distributed:
        return
    spec = MeshSpec("dp=-1" if axes is None else axes)
    known = math.prod(size for _, size in spec.axes if size != -1)
    has_rest = any(size == -1 for _, size in spec.axes)
    count = known * -(-EMULATED // known) if has_rest else known
    prepare_emulation(count, only_cpu=False)


def _network(console: Console, axes: str) -> bool:
    """Prints the measured network; returns whether no host is slow."""
    world = World.init(axes)
    found = check_network(world)
    rows: dict[str, object] = {speed.axis: _speed(speed) for speed in found.axes}
    if not rows:
        rows["links"] = "none: the mesh has one device"
    elif all(speed.planned_bandwidth is None for speed in found.axes):
        rows["planned"] = "unknown: the planner has no rates for these devices"
    if found.hosts:
        rows["hosts"] = f"{len(found.hosts)} compared, {len(found.slow) or 'none'} slow"
    for number, sentence in enumerate(found.slow, 1):
        rows[f"slow {number}"] = sentence
    _section(console, f"Network (all-reduces of {byte_size(found.num_bytes)} per device)", rows)
    return not found.slow


def _speed(speed: AxisSpeed) -> str:
    bandwidth = f"{byte_size(speed.bandwidth)}/s"
    latency = duration(speed.latency)
    if speed.planned_bandwidth is not None and speed.planned_latency is not None:
        bandwidth += f" (planned {byte_size(speed.planned_bandwidth)}/s)"
        latency += f" (planned {duration(speed.planned_latency)})"
    slow = f", slow in the groups of {first_few(speed.slow)}" if speed.slow else ""
    return f"{speed.ranks} ranks, {bandwidth}, latency {latency}{slow}"


def _numerics(console: Console, full: bool) -> bool:
    """Prints the findings of the numerics check; returns whether all gradients are correct."""
    real = World.init().mesh
    emulated = World.emulate(EMULATED).mesh
    fits = real.size >= EMULATED and real.size % 2 == 0
    selected = list((real if fits else emulated).devices.flat)
    findings = check_numerics(selected, full=full)
    wrong = [finding for finding in findings if not finding.is_right]
    worst = max((finding.error for finding in findings if finding.is_right), default=0.0)
    rows: dict[str, object] = {
        "devices": f"{len(selected)} x {selected[0].device_kind}",
        "gradients": f"{len(findings) - len(wrong)} of {len(findings)} right, error <= {worst:.1e}",
    }
    for finding in wrong:
        rows[f"{finding.sentinel}/{finding.leaf}"] = f"off by {finding.error:.1e}, {finding.layout}"
    _section(console, "Numerics", rows)
    return not wrong


def _meshes(info: Mapping[str, object]) -> dict[str, str]:
    count = info.get("devices")
    on = {f"on {count}": "  ".join(mesh_suggestions(count))} if isinstance(count, int) else {}
    return {**on, "emulated": "devices.emulate=8 in a config emulates 8 CPU devices"}


def _extras() -> dict[str, str]:
    found = extras()
    if not found:
        return {"none": "unknown, because axon_dist is not installed: pip install ."}
    rows = {name: f"lacks {', '.join(missing)}" for name, missing in found.items() if missing}
    present = ", ".join(name for name, missing in found.items() if not missing)
    if rows:
        rows["to add one"] = install_command(next(iter(rows)))
    return {**({"installed": present} if present else {}), **rows}


def _section(console: Console, title: str, rows: Mapping[str, object]) -> None:
    console.print(title, style="bold")
    width = max(map(len, rows))
    for label, value in rows.items():
        text = " ".join(str(value).split())
        line = f"  {label:<{width}}  {text}"
        console.print(fitted(line, sys.stdout, width + 4), soft_wrap=True, markup=False)


_DISTRIBUTION = "axon_dist"
_CORE = ("axon_dist", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy")
_REQUIREMENT = re.compile(r"(?P<name>[\w.-]+)\s*(\[(?P<extras>[^]]*)\])?")
_EXTRA = re.compile(r"""extra\s*==\s*["']([^"']+)["']""")


def versions() -> dict[str, str]:
    """Returns the versions of Python and of the packages that the library needs."""
    installed = {name: _version(name) or "missing" for name in _CORE}
    return {"python": platform.python_version(), **installed}


def devices() -> dict[str, object]:
    """Returns JAX's information about its backend, or the reason why the backend does not start."""
    cores: dict[str, object] = {"cpu cores": os.cpu_count()}
    try:
        world = World.init()
        info = {key: value for key, value in world.runtime_info().items() if key not in _CORE}
        return {**info, "chip": _chip(world), **cores}
    except (RuntimeError, AxonDistError) as error:
        return {"backend": f"does not start: {str(error).splitlines()[0]}", **cores}


def _chip(world: World) -> str:
    row = machine_of(world.mesh)
    if row is None:
        return unknown_chip(world.mesh) or "CPU: steps are compiled with the defaults of XLA"
    count = len(row.options_for(world.size))
    return f"{row.name}: steps are compiled with {plural(count, 'XLA option')} for this chip"


def mesh_suggestions(num_devices: int) -> tuple[str, ...]:
    """Suggests meshes that use all devices.

    Example:
        >>> mesh_suggestions(8)
        ('dp=8', 'fsdp=8', 'dp=4,tp=2', 'pp=2,dp=2,tp=2')
        >>> mesh_suggestions(1)
        ('dp=1',)
    """
    meshes = [f"dp={num_devices}"]
    if num_devices > 1:
        meshes.append(f"fsdp={num_devices}")
    if num_devices > 2 and num_devices % 2 == 0:
        meshes.append(f"dp={num_devices // 2},tp=2")
    if num_devices > 4 and num_devices % 4 == 0:
        meshes.append(f"pp=2,dp={num_devices // 4},tp=2")
    return tuple(meshes)


def extras() -> dict[str, tuple[str, ...]]:
    """Maps the package's extras to their missing distributions; empty if it is not installed."""
    if _version(_DISTRIBUTION) is None:
        return {}
    names = importlib.metadata.metadata(_DISTRIBUTION).get_all("Provides-Extra") or []
    return {name: _missing(_DISTRIBUTION, name) for name in sorted(names)}


def _missing(distribution: str, extra: str) -> tuple[str, ...]:
    """Lists the distributions that an extra needs and that are missing, including nested extras."""
    missing: list[str] = []
    for line in importlib.metadata.requires(distribution) or []:
        match = _REQUIREMENT.match(line)
        if match is None or _EXTRA.findall(line) != [extra]:
            continue
        if _version(match["name"]) is None:
            missing.append(match["name"])
        elif match["extras"]:
            for inner in match["extras"].split(","):
                missing.extend(_missing(match["name"], inner.strip()))
    return tuple(missing)


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
