"""`World`: the devices of a run as a mesh; other files list devices only through this one."""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import flax
import jax
import jaxlib
import numpy as np
from jax.experimental import mesh_utils
from jax.extend.backend import clear_backends
from jax.sharding import AxisType, Mesh

from ..core.checks import instance_of, is_whole
from ..core.errors import BackendStartedError, GroupError, MeshError, NamedChoice, UnsupportedError
from ..core.typing import JsonDict
from ..launch.distributed import (
    Timeouts,
    can_restart,
    initialize,
    keep_collectives_in_order,
    prepare_emulation,
    share_of,
    stated_share,
)
from ..launch.environment import from_env
from .group import ProcessGroup
from .mesh_spec import SLOW_AXES, AxesLike, MeshSpec, by_links


def batch_shares(mesh: Mesh, axes: Sequence[str]) -> dict[int, int]:
    """Numbers the shares of a batch that processes load, in order of their first row.

    Args:
        mesh: devices of one or several processes.
        axes: the mesh axes that split the rows.

    Returns:
        The share of each process; processes with the same rows have the same share.

    Raises:
        MeshError: if the rows of two processes overlap only in part.
    """
    owned = batch_ranks(mesh, axes)
    parts = sorted(set(owned.values()))
    num_ranks = math.prod(mesh.shape[axis] for axis in axes)
    if len({len(part) for part in parts}) > 1 or sum(map(len, parts)) != num_ranks:
        listed = {process: list(part) for process, part in owned.items()}
        raise MeshError(
            f"along the batch axes {', '.join(axes)} the processes own the ranks {listed}; any two "
            "must own either identical or disjoint ranks, and all must own equally many: reorder "
            "the mesh axes, or change their sizes",
            code="ranks-of-processes",
        )
    return {process: parts.index(part) for process, part in owned.items()}


def batch_parts(mesh: Mesh, axes: Sequence[str]) -> tuple[dict[int, tuple[int, ...]], int]:
    """Finds the fewest equal parts of a batch of which each process loads whole ones.

    Args:
        mesh: devices of one or several processes.
        axes: the mesh axes that split the rows.

    Returns:
        The parts of each process, and their number. A process whose ranks are consecutive has one.

    Raises:
        MeshError: if the rows of two processes overlap only in part.
    """
    batch_shares(mesh, axes)
    owned = batch_ranks(mesh, axes)
    each = len(next(iter(owned.values())))
    num_ranks = math.prod(mesh.shape[axis] for axis in axes)
    size = next(
        size
        for size in range(each, 0, -1)
        if each % size == 0 and all(_are_blocks(ranks, size) for ranks in owned.values())
    )
    parts = {process: tuple(r // size for r in ranks[::size]) for process, ranks in owned.items()}
    return parts, num_ranks // size


def _are_blocks(ranks: tuple[int, ...], size: int) -> bool:
    """Whether ranks are whole blocks of consecutive ones, of which block b starts at b * size."""
    starts = ranks[::size]
    return all(start % size == 0 for start in starts) and ranks == tuple(
        start + at for start in starts for at in range(size)
    )


def batch_ranks(mesh: Mesh, axes: Sequence[str]) -> dict[int, tuple[int, ...]]:
    """Returns the ranks along the batch axes that each process owns, in order.

    Args:
        mesh: devices of one or several processes.
        axes: the mesh axes that split the rows; ranks count row-major along them.
    """
    process_of = np.vectorize(lambda device: device.process_index, otypes=[int])(mesh.devices)
    ranks = np.zeros(mesh.devices.shape, int)
    for axis in axes:
        position = mesh.axis_names.index(axis)
        ranks = ranks * mesh.shape[axis] + np.indices(mesh.devices.shape)[position]
    return {
        int(p): tuple(np.unique(ranks[process_of == p]).tolist()) for p in np.unique(process_of)
    }


def check_axes(mesh: Mesh, axes: Sequence[str]) -> None:
    """Raises `MeshError` unless `axes` is a list of axes of the mesh."""
    is_list = isinstance(axes, Iterable) and not isinstance(axes, (str, Mapping))
    odd = [axis for axis in axes if axis not in mesh.axis_names] if is_list else [axes]
    if odd:
        raise MeshError(
            f"got {odd[0]!r:.80} for batch axes; give a list of axes of the mesh, such as "
            f"{list(mesh.axis_names)}"
        )


class Backend(NamedChoice):
    """The transport of a world's collectives."""

    EMULATED = "emulated"
    """CPU devices that one process emulates: the same programs, without the speed."""
    GLOO = "gloo"
    """CPU devices of several processes."""
    NCCL = "nccl"
    """NVIDIA GPUs."""
    TPU = "tpu"
    """TPU chips over their own interconnect."""


@dataclasses.dataclass(frozen=True)
class World:
    """The devices of a run, arranged as a mesh with named axes.

    Args:
        mesh: a `jax.sharding.Mesh` whose axes are all of type Auto.
        backend: the transport of the collectives.

    Example:
        >>> world = World.emulate(8, "dp=4,tp=2")
        >>> world.size, world.group("tp").size
        (8, 2)
    """

    mesh: Mesh
    backend: Backend

    def __post_init__(self) -> None:
        if not isinstance(self.mesh, Mesh):
            raise MeshError(
                f"got a {type(self.mesh).__name__} for the mesh of a world; make the world by "
                "World.init(...) or World.emulate(8)"
            )
        object.__setattr__(self, "backend", Backend(self.backend))

    @classmethod
    def init(cls, axes: AxesLike = "dp=-1", devices: Sequence[Any] | None = None) -> World:
        """Arranges the devices of every process into a mesh.

        If the environment says that this process is one of several (`from_env`),
        `jax.distributed` connects them first, and every process must call this.

        Args:
            axes: anything `MeshSpec` reads; `"dp=-1"` puts all devices on one data axis.
            devices: the devices to use, in rank order; all of them by default.

        Returns:
            The world.

        Raises:
            LaunchError: if the environment contradicts itself, or a process does not arrive.
            MeshError: if the axes do not multiply to the number of devices.

        Example:
            >>> World.init().mesh.axis_names
            ('dp',)
        """
        if devices is None:
            share = stated_share(os.environ)
            initialize(from_env(os.environ), Timeouts.from_env(os.environ), share)
        members = list(jax.devices() if devices is None else _as_devices(devices))
        if not members:
            raise MeshError("got an empty list of devices; a world needs at least one")
        spec = MeshSpec(axes).resolve(len(members))
        keep_collectives_in_order(members)
        return cls(build_mesh(spec, members), _backend_of(members))

    @classmethod
    def emulate(cls, num_devices: int | None = None, axes: AxesLike = "dp=-1") -> World:
        """Makes a world of CPU devices that this process emulates.

        If the environment says that this process is one of several, each emulates its share.

        Call it before JAX starts its backend, that is before anything asks for a device or makes
        an array; importing is fine. It also enlarges XLA's thread pool for all devices: otherwise
        devices that wait for each other can occupy every thread, and XLA aborts the process.

        A later call may ask for more devices than the first. JAX's backend then starts again: the
        devices of `jax.devices()` are new ones, jitted functions compile again, and arrays and
        worlds made before still work, on the devices that they were made for.

        Args:
            num_devices: how many, over all processes; None uses the CPU devices that exist.
            axes: anything `MeshSpec` reads.

        Returns:
            The world, over the first `num_devices` CPU devices.

        Raises:
            BackendStartedError: if something else, such as an array, has started the backend with
                fewer devices.
            LaunchError: if the processes cannot share the devices, or one does not arrive.

        Example:
            >>> World.emulate(8).backend
            <Backend.EMULATED: 'emulated'>
        """
        if num_devices is not None:
            spec = from_env(os.environ)
            share = share_of(num_devices, spec, stated_share(os.environ))
            initialize(spec, Timeouts.from_env(os.environ), share)
            if can_restart() and len(jax.devices("cpu")) < share:
                # Arrays keep their backend alive, so those made before remain readable.
                clear_backends()
            prepare_emulation(share, reads_flag=not spec.is_distributed)
        available = jax.devices("cpu")
        count = len(available) if num_devices is None else int(num_devices)
        if len(available) < count:
            raise BackendStartedError(
                f"wanted {count} emulated devices, but JAX already runs with {len(available)}. "
                "World.emulate can start its backend again only if it started it, in a single "
                f"process without GPUs and TPUs. Call World.emulate({count}) before anything makes "
                "an array or asks for a device, or set the environment variables "
                f"JAX_NUM_CPU_DEVICES={count} and NPROC={2 * count}",
                code="backend-started",
            )
        return cls.init(axes, available[:count])

    @classmethod
    def mock(cls, num_devices: int | None = None, axes: AxesLike = "dp=-1") -> World:
        """An alias of `emulate`."""
        return cls.emulate(num_devices, axes)

    def __str__(self) -> str:
        """Describes the mesh, devices and processes in a few lines."""
        kinds = sorted({device.device_kind for device in self.mesh.devices.flat})
        axes = " × ".join(f"{axis}={size}" for axis, size in self.mesh.shape.items())
        lines = [
            f"World: mesh {axes}, {self.size} {self.backend} devices ({', '.join(kinds)})",
            "  axes from outer to inner; neighbours along the last one have consecutive ranks",
            f"  process {self.process_index} of {self.num_processes}",
        ]
        return "\n".join(lines)

    @property
    def spec(self) -> MeshSpec:
        """The axes and sizes of the mesh."""
        return MeshSpec({str(name): size for name, size in self.mesh.shape.items()})

    @property
    def size(self) -> int:
        """The number of devices."""
        return self.mesh.size

    @property
    def default_group(self) -> ProcessGroup:
        """The group of all ranks."""
        return ProcessGroup(self.mesh, self.mesh.axis_names)

    def group(self, *axes: str) -> ProcessGroup:
        """The parallel groups along one or several mesh axes.

        Args:
            *axes: axis names, in any order; none means all axes.

        Returns:
            The group; its ranks are ordered as the mesh orders them.

        Raises:
            GroupError: for an axis that the mesh lacks.
        """
        group = ProcessGroup(self.mesh, tuple(axes) or self.mesh.axis_names)
        ordered = tuple(axis for axis in self.mesh.axis_names if axis in group.axes)
        return ProcessGroup(self.mesh, ordered)

    def new_group(self, ranks: Sequence[int]) -> ProcessGroup:
        """The group of a list of global ranks; other ranks keep their values in its collectives.

        Raises:
            GroupError: for an empty list, a rank twice, or a rank that does not exist.
        """
        if isinstance(ranks, (str, Mapping)) or not isinstance(ranks, Iterable):
            raise GroupError(
                f"got ranks={ranks!r:.80}, a {type(ranks).__name__}; give a list of ranks, such as "
                "[0, 2]"
            )
        ranks = list(itertools.islice(ranks, self.size + 1))
        if len(ranks) > self.size:
            raise GroupError(
                f"got more than {self.size} ranks, {ranks[0]!r:.40}, {ranks[1]!r:.40}, ..., for a "
                f"world of {self.size}; name each at most once"
            )
        members = tuple(int(rank) if is_whole(rank) else rank for rank in ranks)
        return ProcessGroup(self.mesh, self.mesh.axis_names, members)

    @property
    def is_emulated(self) -> bool:
        """Whether the devices are CPU devices emulated by one process."""
        return self.backend is Backend.EMULATED

    @property
    def is_cpu(self) -> bool:
        """Whether the devices are CPU devices, of one process or of several."""
        return self.backend in (Backend.EMULATED, Backend.GLOO)

    @property
    def process_index(self) -> int:
        """The index of this process."""
        return process_index()

    @property
    def num_processes(self) -> int:
        """How many processes own devices of this world."""
        return len({device.process_index for device in self.mesh.devices.flat})

    def share_of_batch(self, axes: Sequence[str]) -> tuple[int, int]:
        """Which rows of a global batch this process must load.

        Processes that own the same ranks along the batch axes load the same rows, for example
        those that differ only along a pipeline or tensor axis.

        Args:
            axes: the mesh axes that split the samples.

        Returns:
            `(index, count)`: this process loads share `index` of `count` shares of one size. The
            rows of a share are those of its ranks (`own_batch_ranks`), which are not always
            consecutive: `parts_of_batch` says which they are.

        Raises:
            MeshError: if the rows of two processes overlap only in part, or this process owns no
                device.

        Example:
            >>> World.emulate(4).share_of_batch(["dp"])
            (0, 1)
        """
        check_axes(self.mesh, axes)
        shares = batch_shares(self.mesh, axes)
        if self.process_index not in shares:
            raise MeshError(
                f"process {self.process_index} owns no device of the mesh {self.spec}, whose "
                f"devices belong to the processes {sorted(shares)}; build the mesh of all devices"
            )
        return shares[self.process_index], len(set(shares.values()))

    def parts_of_batch(self, axes: Sequence[str]) -> tuple[tuple[int, ...], int]:
        """Which rows of a global batch this process must load, whatever the order of its ranks.

        Args:
            axes: the mesh axes that split the samples.

        Returns:
            `(parts, count)`: of `count` equal parts of the rows this process loads those numbered
            `parts`, in this order.

        Raises:
            MeshError: as for `share_of_batch`.

        Example:
            >>> World.emulate(4).parts_of_batch(["dp"])
            ((0,), 1)
        """
        self.share_of_batch(axes)
        parts, count = batch_parts(self.mesh, axes)
        return parts[self.process_index], count

    def own_batch_ranks(self, axes: Sequence[str]) -> tuple[int, ...]:
        """The ranks along the batch axes, counted row-major, that this process owns."""
        return batch_ranks(self.mesh, axes).get(self.process_index, ())

    def num_batch_shares(self, axes: Sequence[str]) -> int:
        """The number of shares into which processes split a batch; see `share_of_batch`."""
        return len(set(batch_shares(self.mesh, axes).values()))

    def memory_kinds(self) -> frozenset[str]:
        """The kinds of memory that the devices can reach, such as `device` and `pinned_host`."""
        device = self.mesh.devices.flat[0]
        return frozenset(memory.kind for memory in device.addressable_memories())

    def runtime_info(self) -> JsonDict:
        """Versions, backend, devices and processes of this run.

        Returns:
            A flat dict of strings and numbers, ready for a table or a log.
        """
        device = self.mesh.devices.flat[0]
        return {
            "jax": jax.__version__,
            "jaxlib": jaxlib.__version__,
            "flax": flax.__version__,
            "backend": str(self.backend),
            "platform": device.platform,
            "platform_version": device.client.platform_version,
            "device_kind": device.device_kind,
            "devices": self.size,
            "processes": self.num_processes,
            "process": self.process_index,
            "mesh": str(self.spec),
        }


def _as_devices(devices: Any) -> list[Any]:
    if isinstance(devices, (str, Mapping)) or not isinstance(devices, Iterable):
        devices = [devices]
    listed = list(devices)
    odd = [device for device in listed if not isinstance(device, jax.Device)]
    if not all(isinstance(getattr(device, "platform", None), str) for device in odd):
        raise MeshError(
            f"got {odd[0]!r:.80}, a {type(odd[0]).__name__}, among the devices; give devices of "
            "JAX, such as list(world.mesh.devices.flat), or none for all"
        )
    if len(set(listed)) < len(listed):
        twice = next(device for device in listed if listed.count(device) > 1)
        raise MeshError(f"got the device {twice} more than once; every rank needs a different one")
    return listed


def process_index() -> int:
    """Returns the index of this process; 0 is the main one."""
    return jax.process_index()


def available_devices() -> list[Any]:
    """All JAX devices, including those of other processes."""
    return list(jax.devices())


def build_mesh(spec: MeshSpec, devices: Sequence[Any]) -> Mesh:
    """Arranges devices row-major over the axes of a resolved spec; every axis has type Auto.

    On TPUs `jax.make_mesh` orders the devices by the wiring of the slice. Physical axes are split
    only if the mesh axes are not products of whole ones. Elsewhere ranks follow the given order,
    except that slow axes, such as `nodes`, go between nodes and the others within them
    (`by_links`). The axis types are always explicit, because JAX's two ways to make a mesh have
    different defaults.

    Raises:
        MeshError: if the sizes do not multiply to the number of devices.
    """
    spec = spec.resolve(len(devices))
    types = (AxisType.Auto,) * len(spec.names)
    parts = by_links(spec, devices)
    if devices[0].platform != "tpu":
        return Mesh(np.array(parts).reshape(spec.sizes), spec.names, axis_types=types)
    if len(parts) > 1:
        # One torus per rank of the slow axes, because no wires connect these.
        sizes = [size for name, size in spec.axes if name not in SLOW_AXES]
        wired = [
            mesh_utils.create_device_mesh(sizes, part, allow_split_physical_axes=True)
            for part in parts
        ]
        return Mesh(np.array(wired).reshape(spec.sizes), spec.names, axis_types=types)
    try:
        return jax.make_mesh(spec.sizes, spec.names, axis_types=types, devices=devices)
    except NotImplementedError:
        split = mesh_utils.create_device_mesh(spec.sizes, devices, allow_split_physical_axes=True)
        return Mesh(split, spec.names, axis_types=types)


def _backend_of(devices: Sequence[Any]) -> Backend:
    platform = devices[0].platform
    if platform == "cpu" and len({device.process_index for device in devices}) > 1:
        return Backend.GLOO
    known = {
        "cpu": Backend.EMULATED,
        "gpu": Backend.NCCL,
        "cuda": Backend.NCCL,
        "tpu": Backend.TPU,
    }
    if platform not in known:
        raise UnsupportedError(
            f"devices of platform {platform!r} are not supported; use cpu, gpu (CUDA) or tpu"
        )
    return known[platform]


@dataclasses.dataclass(frozen=True)
class PlaceholderDevice:
    """A stand-in for a device; programs for it can be traced but not compiled.

    Args:
        id: its number in the mesh.
        platform: `cpu`, `gpu` or `tpu`, as in `jax.Device`.
        process_index: the index of the process that owns it.
        device_kind: not the name of a chip, so no compiler options are looked up for it.
        compute_capability: that of an NVIDIA GPU, such as `9.0`; None for other devices.
    """

    id: int
    platform: str
    process_index: int = 0
    device_kind: str = "placeholder"
    compute_capability: str | None = None

    def memory_stats(self) -> None:
        """Returns None: its memory is unknown."""

    def addressable_memories(self) -> list[object]:
        """Returns no memories."""
        return []


def is_abstract(world: World) -> bool:
    """Whether a world is from `abstract_world`: its programs are traced but never lowered."""
    return isinstance(world.mesh.devices.flat[0], PlaceholderDevice)


def abstract_world(
    axes: AxesLike, num_devices: int, platform: str, compute_capability: str | None = None
) -> World:
    """A world of placeholder devices, for which steps can be built and traced.

    Args:
        axes: anything `MeshSpec` reads.
        num_devices: the product of the axes.
        platform: `cpu`, `gpu` or `tpu`.
        compute_capability: of NVIDIA GPUs, on which the choice of kernels depends; None if unknown.

    Returns:
        The world; its programs can be traced but not compiled.

    Raises:
        MeshError: if the axes do not multiply to the number of devices.

    Example:
        >>> abstract_world("dp=2,tp=4", 8, "tpu").size
        8
    """
    spec = MeshSpec(axes).resolve(num_devices)
    device = PlaceholderDevice(0, platform, compute_capability=compute_capability)
    devices = [dataclasses.replace(device, id=number) for number in range(num_devices)]
    # `build_mesh` would ask the devices of a TPU for their wiring.
    types = (AxisType.Auto,) * len(spec.names)
    mesh = Mesh(np.array(devices).reshape(spec.sizes), spec.names, axis_types=types)
    return World(mesh, _backend_of(devices))


GROUP = instance_of(ProcessGroup, 'a ProcessGroup, such as world.group("dp")', GroupError)
WORLD = instance_of(World, "a World, made by World.init(...) or World.emulate(8)")
