"""What this machine has for the library: versions, devices, extras."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import os
import platform
import re
from typing import Any

from axon_dist.core.errors import AxonDistError
from axon_dist.mesh import World
from axon_dist.mesh.chips import machine_of

_DISTRIBUTION = "axon_dist"
_CORE = ("axon_dist", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy")
_REQUIREMENT = re.compile(r"(?P<name>[\w.-]+)\s*(\[(?P<extras>[^]]*)\])?")
_EXTRA = re.compile(r"""extra\s*==\s*["']([^"']+)["']""")


@dataclasses.dataclass(frozen=True)
class Extra:
    """An extra of the package.

    Args:
        name: as in `pip install 'axon_dist[name]'`.
        missing: the distributions of it that are not installed.
    """

    name: str
    missing: tuple[str, ...]


def versions() -> dict[str, str]:
    """Versions of Python and of the packages the library stands on."""
    found = {name: _version(name) or "missing" for name in _CORE}
    return {"python": platform.python_version(), **found}


def devices() -> dict[str, Any]:
    """What JAX finds when it starts its backend here, or why it does not start."""
    cores = {"cpu cores": os.cpu_count()}
    try:
        world = World.init()
        info = {key: value for key, value in world.runtime_info().items() if key not in _CORE}
        return info | {"chip": _chip(world)} | cores
    except (RuntimeError, AxonDistError) as error:
        return {"backend": f"does not start: {str(error).splitlines()[0]}", **cores}


def _chip(world: World) -> str:
    row = machine_of(world.mesh)
    if row is None:
        return "not in the table of chips: steps are compiled without options of their own"
    return f"{row.name}: steps are compiled with {len(row.options)} options of its own"


def mesh_suggestions(num_devices: int) -> tuple[str, ...]:
    """Meshes that use all devices.

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


def extras() -> tuple[Extra, ...]:
    """The extras that this package declares, with what each lacks here; none if not installed."""
    if _version(_DISTRIBUTION) is None:
        return ()
    names = importlib.metadata.metadata(_DISTRIBUTION).get_all("Provides-Extra") or []
    return tuple(Extra(name, _missing(_DISTRIBUTION, name)) for name in sorted(names))


def _missing(distribution: str, extra: str) -> tuple[str, ...]:
    """The distributions that an extra needs and that are not there, through extras of theirs."""
    missing: list[str] = []
    for line in importlib.metadata.requires(distribution) or []:
        found = _REQUIREMENT.match(line)
        if found is None or _EXTRA.findall(line) != [extra]:
            continue
        if _version(found["name"]) is None:
            missing.append(found["name"])
        elif found["extras"]:
            for inner in found["extras"].split(","):
                missing.extend(_missing(found["name"], inner.strip()))
    return tuple(missing)


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
