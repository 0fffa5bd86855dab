"""Devices and meshes of machines that are not here.

The compilers of GPUs and TPUs run without the device. Compiled with the devices of a target, the
very step that would train there tells its memory, its collectives and its FLOPs on a laptop.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax.experimental import topologies

from ..core.errors import UnsupportedError
from ..hardware.compilers import prepare_environment
from ..hardware.targets import Target, as_target
from ..mesh import AxesLike, MeshSpec, World, build_mesh


def target_devices(target: Target | str) -> Sequence[Any]:
    """Returns devices that programs can be compiled for but not run on.

    Args:
        target: a target or its name. For `cpu` these are the emulated devices of this process,
            which do run.

    Returns:
        All devices of the target.

    Raises:
        UnsupportedError: the compiler is not installed, or knows no such slice.
        BackendStartedError: JAX has already started without what the target needs.

    Example:
        >>> len(target_devices("cpu:1"))
        1
    """
    target = as_target(target)
    if target.platform == "cpu":
        world = World.emulate(target.num_devices)
        return list(world.mesh.devices.flat)
    prepare_environment(target)
    try:
        return topologies.get_topology_desc(**target.topology).devices
    except RuntimeError as error:
        raise UnsupportedError(
            f"the {target.platform} compiler cannot describe target {target.name!r} ({error}); "
            f"use a shape that exists, such as {' or '.join(target.examples)}"
        ) from error


def target_mesh(target: Target | str, axes: AxesLike) -> jax.sharding.Mesh:
    """Lays the devices of a target out over mesh axes, all of type Auto.

    Args:
        target: a target or its name.
        axes: sizes by axis name, outer to inner, one of them -1 at most; the sizes multiply to the
            number of devices.

    Returns:
        The mesh. On TPU the devices are ordered after the wiring (`jax.make_mesh`), so that the
        neighbours on an axis are neighbours in the torus. `World.init(axes,
        devices=target_devices(target))` is the same with a world around it.

    Raises:
        MeshError: the sizes do not multiply to the number of devices.
        UnsupportedError: as in `target_devices`.
        BackendStartedError: as in `target_devices`.

    Example:
        >>> dict(target_mesh("cpu:1", {"dp": 1}).shape)
        {'dp': 1}
    """
    target = as_target(target)
    spec = MeshSpec(axes).resolve(target.num_devices)
    return build_mesh(spec, target_devices(target))
