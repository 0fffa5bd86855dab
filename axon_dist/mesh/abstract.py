"""Devices on paper: a mesh to trace for where no such device, nor its compiler, is."""

from __future__ import annotations

import dataclasses

import numpy as np
from jax.sharding import AxisType, Mesh

from .mesh_spec import AxesLike, MeshSpec
from .world import Backend, World

_BACKENDS = {"cpu": Backend.EMULATED, "gpu": Backend.NCCL, "tpu": Backend.TPU}


@dataclasses.dataclass(frozen=True)
class PaperDevice:
    """What a trace asks of a device; nothing runs on it, and nothing is compiled for it.

    Args:
        id: its number in the mesh.
        platform: `cpu`, `gpu` or `tpu`, as devices call it.
        process_index: of the process that has it.
        device_kind: the name of no chip, so that no compiler is asked for its options.
        compute_capability: of an NVIDIA GPU, such as `9.0`, as devices call it; None for others.
    """

    id: int
    platform: str
    process_index: int = 0
    device_kind: str = "paper"
    compute_capability: str | None = None

    def memory_stats(self) -> None:
        """Nothing is known of its memory."""

    def addressable_memories(self) -> list[object]:
        """It has none."""
        return []


def is_on_paper(world: World) -> bool:
    """Whether a world is one of `paper_world`, for which nothing can be lowered."""
    return isinstance(world.mesh.devices.flat[0], PaperDevice)


def paper_world(
    axes: AxesLike, num_devices: int, platform: str, compute_capability: str | None = None
) -> World:
    """A world of devices that are nowhere, for which steps can be built and traced.

    Args:
        axes: anything `MeshSpec` reads.
        num_devices: what the axes multiply to.
        platform: `cpu`, `gpu` or `tpu`.
        compute_capability: of NVIDIA GPUs, which says what kernels take; None where it is unknown.

    Returns:
        The world; programs for it can be read and not compiled.

    Raises:
        MeshError: when the axes do not multiply to the number of devices.

    Example:
        >>> paper_world("dp=2,tp=4", 8, "tpu").size
        8
    """
    spec = MeshSpec(axes).resolve(num_devices)
    device = PaperDevice(0, platform, compute_capability=compute_capability)
    devices = [dataclasses.replace(device, id=number) for number in range(num_devices)]
    # Not by `build_mesh`, which asks the devices of a TPU how they are wired.
    types = (AxisType.Auto,) * len(spec.names)
    mesh = Mesh(np.array(devices).reshape(spec.sizes), spec.names, axis_types=types)
    return World(mesh, _BACKENDS[platform])
