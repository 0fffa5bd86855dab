"""The table of chips: rates, memory, links, wiring and compiler options, with sources.

XLA:GPU flags are described in `xla.proto`. The XLA:TPU flags are those that public recipes for
large models set (MaxText, `benchmarks/xla_flags_library.py`).
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections import Counter
from collections.abc import Iterable
from types import MappingProxyType
from typing import Literal, TypeAlias

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from ..core.arguments import TEXT
from ..core.compat import gpu_pipelining
from ..core.errors import ConfigError, did_you_mean
from .group import Groups

CompilerOptions: TypeAlias = dict[str, str | bool | int]
"""Compiler options for `jax.jit`, by name."""

Flags: TypeAlias = MappingProxyType[str, str | bool | int]
"""Immutable compiler options."""

PIPELINED: Flags = MappingProxyType(gpu_pipelining("all_gather", "reduce_scatter", "all_reduce"))
"""Moves a collective in a loop into the iteration before or after, where compute hides it."""

DOUBLE_BUFFERED: Flags = MappingProxyType({"xla_gpu_enable_while_loop_double_buffering": True})
"""Unrolls loops by two, with one buffer for each half.

A loop carries the weights gathered for its next iteration, and XLA otherwise copies them to keep
one buffer for all iterations.
"""

SINGLE_BUFFERED: Flags = MappingProxyType(dict.fromkeys(DOUBLE_BUFFERED, False))
"""Turns double buffering off for steps in which no loop gathers, where it only costs memory.

It took 2.9 of 26.6 GiB in a data-parallel step of 1.3 billion parameters with eight microbatches.
"""

IN_PARALLEL: Flags = MappingProxyType({"xla_gpu_experimental_parallel_collective_overlap_limit": 8})
"""Sets how many collectives may be in flight.

With one, gathers that compute cannot hide run one after another at the start of a loop, and arrays
that go around a ring together wait for each other. Inside a node the default is better: gathers are
short, and XLA, which assumes that each has the links to itself, would start them too late. A step
of 70 billion parameters on 64 H100s waits 63 ms with 4, 12 ms with 8, and 18 ms with 16.
"""

SCHEDULED: Flags = MappingProxyType(
    {**dict.fromkeys(IN_PARALLEL, 16), "xla_gpu_enable_latency_hiding_scheduler": True}
)
"""Turns the latency-hiding scheduler on, and allows many collectives in flight.

XLA knows no rates of GPUs before Hopper. Without this scheduler it then starts a collective only
where its result is needed. The scheduler guesses when each collective ends and starts the next one
too late, so many are allowed in flight: at 6.7 billion parameters 8 A100s wait 84 of 957 ms with 1,
40 ms with 4, and 4 ms with 16.
"""

SUMS_NOT_PIPELINED: Flags = MappingProxyType(gpu_pipelining("all_reduce", on=False))
"""Turns pipelining off for steps whose only transfers are gradient all-reduces.

Compute hides each of them in place. Pipelined into the next iteration, the last one would run after
the loop, where nothing hides it.
"""

NO_WINDOWS: Flags = MappingProxyType({"xla_jf_spmd_threshold_for_windowed_einsum_mib": "1000000"})
"""Turns off windowed einsums (Wang et al., ASPLOS 2023), by which XLA:TPU makes a matmul with a
gathered operand a loop of thousands of collective-permutes."""

ASYNC_GATHERS: Flags = MappingProxyType(
    {
        # Only for v5e: on other TPUs it gave wrong results (jax-ml/jax issue 38741), and libtpu
        # rejects it there since 0.0.50.
        "xla_tpu_enable_async_collective_fusion": "true",
        "xla_tpu_enable_async_collective_fusion_fuse_all_gather": "true",
        "xla_tpu_enable_async_collective_fusion_multiple_steps": "true",
        "xla_tpu_overlap_compute_collective_tc": "true",
        "xla_enable_async_all_gather": "true",
    }
)
"""Fuses all-gathers on a TPU into compute, so they advance in steps instead of blocking it."""

SPARSE_CORE: Flags = MappingProxyType(
    {
        # The first two together: a reduce-scatter over a whole slice otherwise becomes an
        # all-reduce of twice the bytes.
        "xla_tpu_enable_sparse_core_collective_offload_reduce_scatter": "true",
        "xla_tpu_enable_sparse_core_collective_offload_nd_reduce_scatter": "true",
        # Without this, a reduce-scatter that the compute units cannot do, such as of 11008 rows
        # over 64 chips, becomes an all-reduce even if the sparse core could do it.
        "xla_tpu_check_legacy_constraints_in_reduce_scatter_legalizer": "false",
        "xla_tpu_enable_sparse_core_collective_offload_all_gather": "true",
        # All-gathers over two or three ring dims of a torus have separate emitters and switches.
        # Without these the compute units run the gather and cannot compute meanwhile.
        "xla_tpu_enable_sparse_core_collective_offload_2d_all_gather": "true",
        "xla_tpu_enable_sparse_core_collective_offload_3d_all_gather": "true",
    }
)
"""Offloads collectives to the sparse cores of a TPU, while the other cores compute."""


Platform: TypeAlias = Literal["cpu", "cuda", "tpu"]
"""The compiler that a chip needs."""

Options: TypeAlias = tuple[tuple[str, str | bool | int], ...]
"""Hashable compiler options: pairs of name and value."""


@dataclasses.dataclass(frozen=True)
class Wiring:
    """How devices of one kind are connected, as compilers need to know it.

    Args:
        platform: the platform of the compiler.
        examples: valid shapes; the last one has several nodes or closed rings.
        num_dims: the valid numbers of dims of a shape.
        max_last_dim: the most devices along the last dim.
        full_ring: a torus axis closes into a ring if its size is a multiple of this; 0 without a
            torus.
        topology: further arguments of `jax.experimental.topologies.get_topology_desc`.
    """

    platform: Platform
    examples: tuple[str, ...]
    num_dims: tuple[int, ...]
    max_last_dim: int
    full_ring: int = 0
    topology: Options = ()


EMULATED = Wiring("cpu", ("8",), (1,), 4096)
"""CPU devices that a process emulates; they have no rates."""


@dataclasses.dataclass(frozen=True)
class Hardware:
    """The data of one chip; you can describe any machine.

    Args:
        name: the chip's name in targets and reports.
        memory_bytes: device memory, bytes.
        flops: dense bfloat16 matmuls, FLOP/s.
        memory_bandwidth: device memory, bytes/s.
        link: the rate of a device into a ring inside its node, or over a torus axis, bytes/s.
        network: the rate of a device out of its node, bytes/s; equal to `link` without nodes.
        node_size: devices per node; 0 without nodes.
        float32_rate: the rate of XLA's default float32 matmuls relative to bfloat16: TF32 runs at
            half, and a TPU multiplies in bfloat16.
        float8_rate: the same for float8, which is cast to bfloat16 on chips without a unit for it.
        link_latency: the latency of one hop inside a node, seconds.
        network_latency: the latency of one hop between nodes, seconds.
        source: the source of the numbers.
        kinds: regular expressions for the values of `device.device_kind` of this chip.
        aliases: other names in targets.
        wiring: how devices are connected; None for a machine that cannot be compiled for.
        options: default compiler options of a step.
        no_gather_options: options that override these for steps in which no loop gathers weights,
            such as those of DDP.
        sums_only_options: the same for steps whose only transfers are gradient all-reduces.
        parallel_options: the same for steps with several transfers in flight at once: between
            nodes, of weights and gradients, and in rings over positions.
        capability: the compute capability of an NVIDIA GPU, such as `9.0`; "" for others.
        like: the chip whose description the compiler gets if there is none of this chip; "" if
            there is.
        block_seconds: roughly the time to compile one more block of a model; 0 if loops over
            blocks have not been compared with unrolled ones.
        largest_slice: the most devices that its links join, as in the largest slice of a TPU; 0 if
            there are nodes, of which there may be any number.

    Raises:
        ConfigError: for a rate or size that is not positive.

    Example:
        >>> pcie = dataclasses.replace(hardware("a100-80"), name="pcie", link=32e9)
        >>> pcie.bandwidth(num_ranks=8) / 1e9
        32.0
    """

    name: str
    memory_bytes: int
    flops: float
    memory_bandwidth: float
    link: float
    network: float
    node_size: int = 0
    float32_rate: float = 1.0
    float8_rate: float = 1.0
    link_latency: float = 1e-6
    network_latency: float = 1e-6
    source: str = ""
    kinds: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()
    wiring: Wiring | None = None
    options: Options = ()
    no_gather_options: Options = ()
    sums_only_options: Options = ()
    parallel_options: Options = ()
    capability: str = ""
    like: str = ""
    block_seconds: float = 0.0
    largest_slice: int = 0

    def __post_init__(self) -> None:
        self.validate()

    def validate(self) -> None:
        """Raises `ConfigError` unless sizes and rates are positive."""
        for field in (
            *("memory_bytes", "flops", "memory_bandwidth", "link", "network"),
            *("float32_rate", "float8_rate"),
        ):
            if not getattr(self, field) > 0:
                raise ConfigError(
                    f"hardware {self.name!r} has {field}={getattr(self, field)!r}; it must be a "
                    "positive number of bytes, FLOP/s or bytes/s"
                )
        if self.node_size < 0:
            raise ConfigError(
                f"hardware {self.name!r} has node_size={self.node_size}; it must be the devices "
                "per node, or 0 where there are no nodes"
            )

    def check_size(self, num_devices: int) -> None:
        """Raises `ConfigError` if the links of the chip join fewer devices than these."""
        if 0 < self.largest_slice < num_devices:
            raise ConfigError(
                f"got {num_devices} devices of {self.name}, but its largest slice has "
                f"{self.largest_slice}, and the rates between slices are not in the table of "
                f"chips; take at most {self.largest_slice}",
                code="slice-too-large",
            )

    def options_for(
        self, num_devices: int, whole: bool = False, only_sums: bool = False,
        parallel: bool | None = None,
    ) -> CompilerOptions:  # fmt: skip
        """Compiler options of a step.

        Args:
            num_devices: the number of devices of the mesh.
            whole: whether no loop gathers weights.
            only_sums: whether gradient all-reduces are the only transfers.
            parallel: whether several transfers are in flight; None: if there are several nodes.
        """
        parallel = self.num_nodes(num_devices) > 1 if parallel is None else parallel
        options = self.options + self.parallel_options * parallel + self.no_gather_options * whole
        return dict(options + self.sums_only_options * only_sums)

    def num_nodes(self, num_ranks: int, stride: int = 1) -> int:
        """The number of nodes of a group whose members are `stride` devices apart."""
        return math.ceil(num_ranks * stride / self.node_size) if self.node_size else 1

    def bandwidth(self, num_ranks: int, stride: int = 1) -> float:
        """The rate at which each member of a ring sends, bytes/s.

        The first member of the first group is the first device of a node. The node with the fewest
        members has the fewest ports, and all others wait for it.

        Args:
            num_ranks: members of the group.
            stride: the distance of neighbours in devices; 1 for the innermost mesh axis.

        Example:
            >>> h100 = hardware("h100")
            >>> [h100.bandwidth(ranks) / 1e9 for ranks in (8, 16)], h100.bandwidth(2, stride=8)
            ([450.0, 400.0], 50000000000.0)
        """
        if self.num_nodes(num_ranks, stride) == 1:
            return self.link
        return self._out_of_nodes(_fewest_in_a_node(num_ranks, stride, self.node_size))

    def ring_latency(self, num_ranks: int, stride: int = 1) -> float:
        """The latency of `num_ranks - 1` hops around a ring, in seconds."""
        crossings = self.num_nodes(num_ranks, stride) - 1
        crossings = min(crossings, num_ranks - 1)
        inside = num_ranks - 1 - crossings
        return crossings * self.network_latency + inside * self.link_latency

    def rate(self, dtype: DTypeLike) -> float | None:
        """Dense matmul FLOP/s for operands of a dtype, at XLA's default precision.

        None for numbers of more than four bytes, such as float64, whose rate the table does not
        have: it is a small fraction of the others, or the chip has no unit for them.

        Example:
            >>> h100 = hardware("h100")
            >>> [h100.rate(dtype) / h100.flops for dtype in ("float32", "float16", "float8_e5m2")]
            [0.5, 1.0, 2.0]
        """
        size = jnp.dtype(dtype).itemsize
        return None if size > 4 else self.flops * self.rate_share(size)

    def rate_share(self, itemsize: int) -> float:
        """The rate of products of numbers of this many bytes, relative to `flops`.

        Plans price wider numbers than float32 like float32, which is less than they take.
        """
        if itemsize >= 4:
            return self.float32_rate
        return self.float8_rate if itemsize == 1 else 1.0

    def wire_seconds(self, wire_bytes: int, groups: Groups) -> float:
        """The time of a transfer that has the links to itself, without latency.

        Args:
            wire_bytes: the bytes that each device sends.
            groups: device positions of each group; consecutive positions share a node.
        """
        if not self.node_size:
            return wire_bytes / self.link
        slowest = self.link
        for group in groups:
            if members := _fewest_of(group, self.node_size):
                slowest = min(slowest, self._out_of_nodes(members))
        return wire_bytes / slowest

    def _out_of_nodes(self, members: int) -> float:
        """The rate of a ring across nodes: its members inside a node share its network ports."""
        return min(self.link, members * self.network)


def _fewest_of(group: Iterable[int], node_size: int) -> int:
    """The fewest members that a group has in one of its nodes; 0 if it is inside a node."""
    members = Counter(device // node_size for device in group)
    return min(members.values()) if len(members) > 1 else 0


@functools.cache
def _fewest_in_a_node(num_ranks: int, stride: int, node_size: int) -> int:
    """The fewest members in a node, of the groups that begin at the first `stride` devices.

    Args:
        num_ranks: members of a group.
        stride: the distance of neighbours in devices.
        node_size: devices per node.
    """
    groups = (range(start, start + stride * num_ranks, stride) for start in range(stride))
    found = (_fewest_of(group, node_size) for group in groups)
    return min(filter(None, found), default=1)


_GB = 10**9
# NCCL's model, src/graph/tuning.cc, ring with the Simple protocol.
_NVLINK_HOP, _NETWORK_HOP = 3.4e-6, 14e-6
_SHEET = "NVIDIA data sheet and DGX user guide"
_DRIVER = "memory as its driver reports it (openxla/xla, xla/backends/gpu/target_config/specs)"
_TPU_DOCS = "cloud.google.com/tpu/docs; jax-ml.github.io/scaling-book"

_NODES = Wiring("cuda", ("8", "8x8"), (1, 2), 8)
_FOURS = Wiring("cuda", ("4", "8x4"), (1, 2), 4)
# The NVLink domain of a rack has 72 GPUs; meshes use 64.
_RACK = Wiring("cuda", ("64", "4x64"), (1, 2), 64)
_TORUS_2D = Wiring("tpu", ("4x4", "16x16"), (2,), 16, 16)
_TORUS_3D = Wiring("tpu", ("2x2x2", "4x4x4"), (3,), 16, 4)
# JAX sees the two cores of a v4 chip as one device.
_TORUS_V4 = dataclasses.replace(_TORUS_3D, topology=(("chip_config_name", "megacore"),))

_ON_V5E = tuple({**NO_WINDOWS, **ASYNC_GATHERS}.items())
_ON_SPARSE_CORE = tuple({**NO_WINDOWS, **SPARSE_CORE}.items())

# Each rate is written once (a test checks it): all SXM cards with the same chip have the same
# dense bfloat16 rate.
_AMPERE, _HOPPER, _HOPPER_NVL, _BLACKWELL, _GRACE_BLACKWELL = (
    312e12, 989e12, 835e12, 2.25e15, 2.5e15,
)  # fmt: skip
# NVLink: half of the bidirectional rate. PCIe: 16 lanes; a ring of eight goes over PCIe even on
# cards with NVLink bridges, which join only pairs.
_NVLINK3, _NVLINK4, _NVLINK5, _PCIE5 = 300e9, 450e9, 900e9, 64e9
# One port per GPU: HDR is 200 Gb/s, NDR 400 Gb/s, XDR 800 Gb/s.
_HDR, _NDR, _XDR = 25e9, 50e9, 100e9


_BLOCK_SECONDS = 1.0
"""An upper bound of the compile time per GPT block, on one core. A double-buffered loop compiles
as two blocks."""


def _gpu(
    name: str, memory: int, flops: float, hbm: float, link: float, network: float, sheet: str,
    kind: str, capability: str, like: str = "", wiring: Wiring = _NODES,
) -> Hardware:  # fmt: skip
    """The row of an NVIDIA GPU.

    Args:
        name: the name in `Hardware`. Arguments that are not listed here are as in `Hardware` too.
        memory: `memory_bytes`.
        flops: `flops`.
        hbm: `memory_bandwidth`.
        link: `link`.
        network: `network`.
        sheet: the name of its data sheet.
        kind: a regular expression for its `device_kind`.
        capability: `capability`.
        like: `like`.
        wiring: `wiring`.
    """
    from_hopper = _version(capability) >= (9, 0)
    return Hardware(
        name, memory, flops, hbm, link, network, node_size=wiring.max_last_dim, float32_rate=0.5,
        float8_rate=2.0 if from_hopper else 1.0,
        link_latency=_NVLINK_HOP, network_latency=_NETWORK_HOP,
        source=f"{_SHEET}, {sheet}; {_DRIVER}", kinds=(kind,), wiring=wiring,
        options=tuple((PIPELINED | (DOUBLE_BUFFERED if from_hopper else SCHEDULED)).items()),
        no_gather_options=tuple(SINGLE_BUFFERED.items()) if from_hopper else (),
        sums_only_options=tuple(SUMS_NOT_PIPELINED.items()),
        parallel_options=tuple(IN_PARALLEL.items()) if from_hopper else (),
        capability=capability, like=like, block_seconds=_BLOCK_SECONDS,
    )  # fmt: skip


def _version(capability: str) -> tuple[int, ...]:
    return tuple(map(int, capability.split(".")))


def _tpu(
    name: str, memory: int, flops: float, hbm: float, link: float, wiring: Wiring, largest: int,
    *kinds: str, aliases: tuple[str, ...] = (), options: Options = _ON_SPARSE_CORE,
    float8_rate: float = 1.0,
) -> Hardware:  # fmt: skip
    return Hardware(
        name, memory, flops, hbm, link, link, float8_rate=float8_rate, source=_TPU_DOCS,
        kinds=kinds, aliases=aliases, wiring=wiring, options=options, largest_slice=largest,
    )  # fmt: skip


HARDWARE: MappingProxyType[str, Hardware] = MappingProxyType(
    {
        row.name: row
        for row in (
            _gpu("a100-40", 42_331_013_120, _AMPERE, 1555e9, _NVLINK3, _HDR, "A100 SXM 40 GB",
                 "NVIDIA A100-SXM4-40GB", "8.0"),
            _gpu("a100-80", 85_100_068_864, _AMPERE, 2039e9, _NVLINK3, _HDR, "A100 SXM 80 GB",
                 "NVIDIA A100-SXM4-80GB", "8.0"),
            _gpu("h100", 84_978_434_048, _HOPPER, 3.35e12, _NVLINK4, _NDR, "H100 SXM",
                 r"NVIDIA H100( SXM\d?)?( 80GB)?( HBM3)?", "9.0"),
            _gpu("h100-pcie", 84_942_979_072, 756e12, 2.039e12, _PCIE5, _NDR, "H100 PCIe",
                 "NVIDIA H100 PCIe", "9.0", "h100"),
            _gpu("h100-nvl", 94 * _GB, _HOPPER_NVL, 3.9e12, _PCIE5, _NDR, "H100 NVL",
                 "NVIDIA H100 NVL", "9.0", "h100"),
            _gpu("h200", 151_397_597_184, _HOPPER, 4.8e12, _NVLINK4, _NDR, "H200 SXM",
                 r"NVIDIA H200( SXM\d?)?( 141GB)?( HBM3e)?", "9.0"),
            _gpu("h200-nvl", 141 * _GB, _HOPPER_NVL, 4.8e12, _PCIE5, _NDR, "H200 NVL",
                 "NVIDIA H200 NVL", "9.0", "h200"),
            # Boards of four. The device name of the first has the size of its CPU memory.
            _gpu("gh200-96", 96 * _GB, _HOPPER, 4e12, _NVLINK4, _NDR, "GH200 96 GB",
                 "NVIDIA GH200 (120GB|480GB)", "9.0", "h100", _FOURS),
            _gpu("gh200-144", 144 * _GB, _HOPPER, 4.9e12, _NVLINK4, _NDR, "GH200 144 GB",
                 "NVIDIA GH200 144G( HBM3e)?", "9.0", "h200", _FOURS),
            _gpu("b200", 191_514_411_008, _BLACKWELL, 8e12, _NVLINK5, _NDR, "DGX B200",
                 r"NVIDIA B200( SXM\d?)?( AC)?", "10.0"),
            _gpu("gb200", 197_897_748_480, _GRACE_BLACKWELL, 8e12, _NVLINK5, _NDR, "GB200 NVL72",
                 "NVIDIA GB200", "10.0", "b200", _RACK),
            _gpu("b300", 297_021_865_984, _BLACKWELL, 8e12, _NVLINK5, _XDR, "DGX B300",
                 r"NVIDIA B300( SXM\d?)?( AC)?", "10.3", "b200"),
            _gpu("gb300", 297_021_079_552, _GRACE_BLACKWELL, 8e12, _NVLINK5, _XDR, "GB300 NVL72",
                 "NVIDIA GB300", "10.3", "b200", _RACK),
            # A ring over a torus axis uses both directions of a link. The largest slice is a pod
            # (cloud.google.com/tpu/docs/v4, v5e, v6e and tpu7x), but of v5p two thirds of one.
            _tpu("v4", 32 * _GB, 275e12, 1228e9, 90e9, _TORUS_V4, 4096, "TPU v4"),
            # v5e has no sparse core.
            _tpu("v5e", 16 * _GB, 197e12, 819e9, 90e9, _TORUS_2D, 256, "TPU v5 lite",
                 "TPU v5e", aliases=("v5litepod",), options=_ON_V5E),
            # At most 16x16x24 (cloud.google.com/tpu/docs/v5p).
            _tpu("v5p", 95 * _GB, 459e12, 2765e9, 180e9, _TORUS_3D, 6144, "TPU v5", "TPU v5p"),
            _tpu("v6e", 32 * _GB, 918e12, 1640e9, 180e9, _TORUS_2D, 256, "TPU v6 lite",
                 "TPU v6e", aliases=("trillium",)),
            # Each half of a chip is a device, with half of its links.
            _tpu("tpu7x", 96 * _GB, 1153.5e12, 3690e9, 180e9, _TORUS_3D, 2 * 9216,
                 "TPU ?v?7x?", aliases=("ironwood", "v7x"), float8_rate=2.0),
        )
    }
)  # fmt: skip
"""The known chips, by name."""

MACHINES: tuple[Hardware, ...] = tuple(HARDWARE.values())
Machine = Hardware  # The name in `inspect`.


def machine_of(mesh: jax.sharding.Mesh | None) -> Hardware | None:
    """Looks up the chip of a mesh's devices; None if it is not in the table."""
    if mesh is None:
        return None
    kind = str(getattr(mesh.devices.flat[0], "device_kind", None))
    rows = HARDWARE.values()
    return next((row for row in rows if any(re.fullmatch(x, kind) for x in row.kinds)), None)


def options_row_of(mesh: jax.sharding.Mesh) -> Hardware | None:
    """The row whose compiler options suit the devices of a mesh.

    That is their own row. For a GPU without one it is the newest known GPU that is not newer,
    because the effect of options depends on the compute capability; the rates do not apply then.
    """
    capability = getattr(mesh.devices.flat[0], "compute_capability", None)
    exact = machine_of(mesh)
    if exact is not None or not re.fullmatch(r"\d+\.\d+", str(capability)):
        return exact
    older = [row for row in HARDWARE.values() if row.capability]
    older = [row for row in older if _version(row.capability) <= _version(str(capability))]
    return max(older, key=lambda row: _version(row.capability), default=None)


def unknown_chip(mesh: jax.sharding.Mesh) -> str | None:
    """A sentence about a mesh of unknown chips; None if the chip is in the table."""
    device = mesh.devices.flat[0]
    if machine_of(mesh) is not None or getattr(device, "platform", "cpu") == "cpu":
        return None
    row = options_row_of(mesh)
    options = "without options of their own" if row is None else f"with the options of {row.name}"
    return (
        f"the table of chips has no row for {device.device_kind!r}: steps are compiled {options}, "
        "and neither times nor whether memory suffices is known"
    )


def hardware(name: str) -> Hardware:
    """Looks up a chip.

    Args:
        name: a key of `HARDWARE`, or an alias of one.

    Returns:
        Its row.

    Raises:
        ConfigError: for an unknown name; the message suggests the nearest.

    Example:
        >>> hardware("v5p").memory_bytes // 10**9
        95
    """
    TEXT.check("hardware", "name", name)
    known = chip_names()
    if name not in known:
        raise ConfigError(f"the table of chips has no {name!r:.80}.{did_you_mean(name, known)}")
    return HARDWARE[known[name]]


def chip_names() -> dict[str, str]:
    """Maps the names and aliases of all chips to their names."""
    return {alias: row.name for row in HARDWARE.values() for alias in (row.name, *row.aliases)}


def option_names() -> tuple[str, ...]:
    """The names of all compiler options that the table sets for any chip."""
    fields = ("options", "no_gather_options", "sums_only_options", "parallel_options")
    option_lists = [getattr(row, field) for row in HARDWARE.values() for field in fields]
    return tuple(sorted({name for options in option_lists for name, _ in options}))


MOST_DEVICES = 2**20
"""The largest number of devices in a cluster description."""


def parse_cluster(text: str) -> tuple[Hardware, int]:
    """Parses a chip and a number of devices: `h100:8`, `h100:4x8`, `v5p:4x4x4`.

    Args:
        text: the name of the chip, a colon, and sizes whose product is the number of devices.

    Returns:
        The row and the number of devices.

    Raises:
        ConfigError: for unknown hardware, sizes that cannot be read, and more devices than a TPU
            slice has.

    Example:
        >>> row, num_devices = parse_cluster("h100:4x8")
        >>> row.name, num_devices
        ('h100', 32)
    """
    TEXT.check("parse_cluster", "text", text)
    name, _, sizes = text.partition(":")
    row = hardware(name)
    parts = sizes.split("x")
    # Not `isdigit`: it accepts characters such as superscripts, which `int` rejects.
    if not all(re.fullmatch("[0-9]{1,9}", part) and int(part) > 0 for part in parts):
        raise ConfigError(
            f"cannot read the number of devices {sizes!r:.40} in {text!r:.40}; write it as "
            f"in {name}:8 or {name}:4x8"
        )
    count = math.prod(int(part) for part in parts)
    if count > MOST_DEVICES:
        raise ConfigError(
            f"got {text!r:.80}; name at most {MOST_DEVICES} devices, such as {name}:8"
        )
    row.check_size(count)
    return row, count
