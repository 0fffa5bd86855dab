"""The one table of chips: rates, memory, links, wiring, and what to compile with, with sources.

Flags of XLA:GPU are described in `xla.proto`; those of XLA:TPU are the ones that public recipes for
large models set (MaxText, `benchmarks/xla_flags_library.py`).
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections import Counter
from types import MappingProxyType
from typing import Literal, TypeAlias

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from ..core.compat import gpu_pipelining
from ..core.errors import ConfigError, did_you_mean
from .replica_groups import Groups

CompilerOptions: TypeAlias = dict[str, str | bool]
"""Names and values that `jax.jit` hands to XLA."""

PIPELINED: MappingProxyType[str, str | bool] = MappingProxyType(
    gpu_pipelining("all_gather", "reduce_scatter", "all_reduce")
)
"""A collective in a loop is moved into the iteration before or after, where compute hides it."""

SUMS_STAY: MappingProxyType[str, str | bool] = MappingProxyType(
    gpu_pipelining("all_reduce", on=False)
)
"""Where sums of gradients are all that travels, each has enough beside it where it is; moved on,
that of the last iteration comes after the loop with nothing beside it."""

GATHERS_STAY: MappingProxyType[str, str | bool] = MappingProxyType(
    gpu_pipelining("all_gather", on=False)
)
"""Where weights are whole for a step, all that is computed of a microbatch comes of what its loop
does not change, and what XLA gathers of it, such as rows of a table's gradient, would be moved into
the iteration before with all of that: both passes ran twice."""

NO_WINDOWS: MappingProxyType[str, str | bool] = MappingProxyType(
    {"xla_jf_spmd_threshold_for_windowed_einsum_mib": "1000000"}
)
"""By default a product with a gathered operand becomes, on a TPU, a loop of thousands of
collective-permutes (windowed einsum, Wang et al., ASPLOS 2023)."""

ASYNC_GATHERS: MappingProxyType[str, str | bool] = MappingProxyType(
    {
        # For v5e alone: elsewhere it has made wrong numbers (jax-ml/jax issue 38741), and libtpu
        # refuses it there since 0.0.50.
        "xla_tpu_enable_async_collective_fusion": "true",
        "xla_tpu_enable_async_collective_fusion_fuse_all_gather": "true",
        "xla_tpu_enable_async_collective_fusion_multiple_steps": "true",
        "xla_tpu_overlap_compute_collective_tc": "true",
        "xla_enable_async_all_gather": "true",
    }
)
"""A gather on a TPU advances in steps between pieces of compute instead of stopping it."""

SPARSE_CORE: MappingProxyType[str, str | bool] = MappingProxyType(
    {
        # The first two together: a reduce-scatter over a whole slice otherwise becomes an
        # all-reduce of twice the bytes.
        "xla_tpu_enable_sparse_core_collective_offload_reduce_scatter": "true",
        "xla_tpu_enable_sparse_core_collective_offload_nd_reduce_scatter": "true",
        # What the compute units cannot scatter, such as rows of 11008 over 64 chips, becomes an
        # all-reduce before anything asks whether the sparse core can.
        "xla_tpu_check_legacy_constraints_in_reduce_scatter_legalizer": "false",
        "xla_tpu_enable_sparse_core_collective_offload_all_gather": "true",
        # A gather over two or three closed dims of a torus is another emitter, with a switch of its
        # own: without it the compute units run it themselves, and stand still meanwhile.
        "xla_tpu_enable_sparse_core_collective_offload_2d_all_gather": "true",
        "xla_tpu_enable_sparse_core_collective_offload_3d_all_gather": "true",
    }
)
"""The sparse core of a TPU sends while the others compute."""


Platform: TypeAlias = Literal["cpu", "cuda", "tpu"]
"""Which compiler a chip needs."""

Options: TypeAlias = tuple[tuple[str, str | bool], ...]
"""Names and values that a compiler takes."""


@dataclasses.dataclass(frozen=True)
class Wiring:
    """How devices of one kind are put together, and under which names compilers know that.

    Args:
        platform: whose compiler.
        examples: shapes that exist, the last one of several nodes or closed rings.
        num_dims: how many sizes a shape may have.
        max_last_dim: the most devices along the last one.
        full_ring: a torus axis of a multiple of it closes into a ring; 0 without a torus.
        topology: what else `jax.experimental.topologies.get_topology_desc` has to be told.
    """

    platform: Platform
    examples: tuple[str, ...]
    num_dims: tuple[int, ...]
    max_last_dim: int
    full_ring: int = 0
    topology: Options = ()


EMULATED = Wiring("cpu", ("8",), (1,), 4096)
"""Devices that the CPU makes up; they have no rates."""


@dataclasses.dataclass(frozen=True)
class Hardware:
    """All that is known of one chip; any machine can be described.

    Args:
        name: what targets and reports call it.
        memory_bytes: device memory, bytes.
        flops: dense bfloat16 matrix operations, FLOP/s.
        memory_bandwidth: device memory, bytes/s.
        link: what a device sends into a ring inside its node, or over a torus axis, bytes/s.
        network: what a device sends out of its node, bytes/s; equal to `link` without nodes.
        node_size: devices per node; 0 where there are no nodes.
        float32_rate: the rate of XLA's default float32 products over that of bfloat16: TF32 runs
            at half, a TPU multiplies in bfloat16.
        float8_rate: the same of float8, which is widened to bfloat16 where there is no unit for it.
        link_latency: of one hop inside a node, seconds.
        network_latency: of one hop between nodes, seconds.
        source: where the numbers are from.
        kinds: the values of `device.device_kind` that mean this chip.
        aliases: other names that targets may call it.
        wiring: how it is put together; None for a machine that cannot be compiled for.
        options: what a step is compiled with for it, as names and values.
        whole_options: what besides, and instead, where no loop of a step gathers weights.
        sum_options: the same where nothing travels but sums of gradients.

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
    whole_options: Options = ()
    sum_options: Options = ()

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

    def num_nodes(self, num_ranks: int, stride: int = 1) -> int:
        """The nodes that a group touches whose members are `stride` devices apart."""
        return math.ceil(num_ranks * stride / self.node_size) if self.node_size else 1

    def bandwidth(self, num_ranks: int, stride: int = 1) -> float:
        """What each member of a ring sends per second, bytes/s.

        Args:
            num_ranks: members of the group.
            stride: how many devices apart neighbours are; 1 for the innermost mesh axis.

        Example:
            >>> h100 = hardware("h100")
            >>> [h100.bandwidth(ranks) / 1e9 for ranks in (8, 16)], h100.bandwidth(2, stride=8)
            ([450.0, 400.0], 50000000000.0)
        """
        if self.num_nodes(num_ranks, stride) == 1:
            return self.link
        return self._out_of_nodes(max(1, min(num_ranks, self.node_size // stride)))

    def ring_latency(self, num_ranks: int, stride: int = 1) -> float:
        """The seconds that `num_ranks - 1` hops around a ring take, apart from the bytes."""
        crossings = self.num_nodes(num_ranks, stride) - 1
        crossings = min(crossings, num_ranks - 1)
        inside = num_ranks - 1 - crossings
        return crossings * self.network_latency + inside * self.link_latency

    def rate(self, dtype: DTypeLike) -> float:
        """Dense matrix operations per second on operands of a dtype, as XLA multiplies by default.

        Example:
            >>> h100 = hardware("h100")
            >>> [h100.rate(dtype) / h100.flops for dtype in ("float32", "float16", "float8_e5m2")]
            [0.5, 1.0, 2.0]
        """
        share = {4: self.float32_rate, 1: self.float8_rate}
        return self.flops * share.get(jnp.dtype(dtype).itemsize, 1.0)

    def wire_seconds(self, wire_bytes: int, groups: Groups) -> float:
        """The time that a transfer takes alone on the wire, latency left out.

        Args:
            wire_bytes: bytes that each device sends.
            groups: who takes part, as device positions; consecutive ones share a node.
        """
        if not self.node_size:
            return wire_bytes / self.link
        slowest = self.link
        for group in groups:
            members = Counter(device // self.node_size for device in group)
            if len(members) > 1:
                slowest = min(slowest, self._out_of_nodes(min(members.values())))
        return wire_bytes / slowest

    def _out_of_nodes(self, members: int) -> float:
        """A ring that leaves its nodes is bound by what its members inside one send together."""
        return min(self.link, members * self.network)


_GB = 10**9
# NCCL's own model, src/graph/tuning.cc, ring with the Simple protocol.
_NVLINK_HOP, _NETWORK_HOP = 3.4e-6, 14e-6
_SHEET = "NVIDIA data sheet and DGX user guide"
_DRIVER = "memory as its driver reports it (openxla/xla, xla/backends/gpu/target_config/specs)"
_TPU_DOCS = "cloud.google.com/tpu/docs; jax-ml.github.io/scaling-book"

_NODES = Wiring("cuda", ("8", "8x8"), (1, 2), 8)
_TORUS_2D = Wiring("tpu", ("4x4", "16x16"), (2,), 16, 16)
_TORUS_3D = Wiring("tpu", ("2x2x2", "4x4x4"), (3,), 16, 4)
# The two cores of a v4 chip are one device, as JAX finds them there.
_TORUS_V4 = dataclasses.replace(_TORUS_3D, topology=(("chip_config_name", "megacore"),))

_ON_GPU, _SUMS_ON_GPU = tuple(PIPELINED.items()), tuple(SUMS_STAY.items())
_WHOLE_ON_GPU = tuple(GATHERS_STAY.items())
_ON_V5E = tuple({**NO_WINDOWS, **ASYNC_GATHERS}.items())
_ON_SPARSE_CORE = tuple({**NO_WINDOWS, **SPARSE_CORE}.items())

# All SXM cards with the same chip have the same dense bfloat16 rate.
_AMPERE, _HOPPER = 312e12, 989e12


def _gpu(
    name: str, memory: int, flops: float, hbm: float, link: float, network: float, sheet: str,
    kind: str, float8_rate: float = 2.0,
) -> Hardware:  # fmt: skip
    source = f"{_SHEET}, {sheet}; {_DRIVER}"
    return Hardware(
        name, memory, flops, hbm, link, network, 8, 0.5, float8_rate, _NVLINK_HOP, _NETWORK_HOP,
        source, (kind,), wiring=_NODES, options=_ON_GPU,
        whole_options=_WHOLE_ON_GPU, sum_options=_SUMS_ON_GPU,
    )  # fmt: skip


def _tpu(
    name: str, memory: int, flops: float, hbm: float, link: float, wiring: Wiring,
    *kinds: str, aliases: tuple[str, ...] = (), options: Options = _ON_SPARSE_CORE,
) -> Hardware:  # fmt: skip
    return Hardware(
        name, memory, flops, hbm, link, link, source=_TPU_DOCS, kinds=kinds, aliases=aliases,
        wiring=wiring, options=options,
    )  # fmt: skip


HARDWARE: MappingProxyType[str, Hardware] = MappingProxyType(
    {
        row.name: row
        for row in (
            # NVLink: half of the bidirectional number. Network: one port per GPU; HDR is
            # 200 Gb/s, NDR 400 Gb/s.
            _gpu("a100-40", 42_331_013_120, _AMPERE, 1555e9, 300e9, 25e9, "A100 SXM 40 GB",
                 "NVIDIA A100-SXM4-40GB", float8_rate=1.0),
            _gpu("a100-80", 85_100_068_864, _AMPERE, 2039e9, 300e9, 25e9, "A100 SXM 80 GB",
                 "NVIDIA A100-SXM4-80GB", float8_rate=1.0),
            _gpu("h100", 84_978_434_048, _HOPPER, 3.35e12, 450e9, 50e9, "H100 SXM",
                 "NVIDIA H100 80GB HBM3"),
            _gpu("h200", 151_397_597_184, _HOPPER, 4.8e12, 450e9, 50e9, "H200 SXM", "NVIDIA H200"),
            _gpu("b200", 191_514_411_008, 2.25e15, 8e12, 900e9, 50e9, "DGX B200", "NVIDIA B200"),
            # A ring over one torus axis uses both directions of a link.
            _tpu("v4", 32 * _GB, 275e12, 1228e9, 90e9, _TORUS_V4, "TPU v4"),
            # Without a sparse core.
            _tpu("v5e", 16 * _GB, 197e12, 819e9, 90e9, _TORUS_2D, "TPU v5 lite", "TPU v5e",
                 aliases=("v5litepod",), options=_ON_V5E),
            _tpu("v5p", 95 * _GB, 459e12, 2765e9, 180e9, _TORUS_3D, "TPU v5", "TPU v5p"),
            _tpu("v6e", 32 * _GB, 918e12, 1640e9, 180e9, _TORUS_2D, "TPU v6 lite", "TPU v6e",
                 aliases=("trillium",)),
        )
    }
)  # fmt: skip
"""The chips that are known, by name."""

MACHINES: tuple[Hardware, ...] = tuple(HARDWARE.values())
"""The same as a tuple."""

Machine = Hardware
"""What `inspect` calls a row whose rates judge transfers."""


def machine_of(mesh: jax.sharding.Mesh | None) -> Hardware | None:
    """Looks up the chip whose devices form a mesh; None for one that is not in the table."""
    if mesh is None:
        return None
    kind = getattr(mesh.devices.flat[0], "device_kind", None)
    return next((row for row in HARDWARE.values() if kind in row.kinds), None)


def hardware(name: str) -> Hardware:
    """Looks up a machine.

    Args:
        name: a key of `HARDWARE`, or an alias of one.

    Returns:
        Its row.

    Raises:
        ConfigError: for an unknown name; it suggests the nearest.

    Example:
        >>> hardware("v5p").memory_bytes // 10**9
        95
    """
    known = chip_names()
    if name not in known:
        raise ConfigError(f"no rates are known of {name!r}.{did_you_mean(name, known)}")
    return HARDWARE[known[name]]


def chip_names() -> dict[str, str]:
    """The name of every chip that is known, by the names and aliases that it may be called."""
    return {alias: row.name for row in HARDWARE.values() for alias in (row.name, *row.aliases)}


def option_names() -> tuple[str, ...]:
    """The names of all compiler options that are set for some chip."""
    every = (row.options + row.whole_options + row.sum_options for row in HARDWARE.values())
    return tuple(sorted({name for options in every for name, _ in options}))


MOST_DEVICES = 2**20
"""More than this nobody has had."""


def parse_cluster(text: str) -> tuple[Hardware, int]:
    """Reads a machine and how many of it: `h100:8`, `h100:4x8`, `v5p:4x4x4`.

    Args:
        text: the name of the hardware, a colon, and sizes that multiply to the number of devices.

    Returns:
        The row and the number of devices.

    Raises:
        ConfigError: for unknown hardware or sizes that cannot be read.

    Example:
        >>> row, num_devices = parse_cluster("h100:4x8")
        >>> row.name, num_devices
        ('h100', 32)
    """
    name, _, sizes = text.partition(":")
    row = hardware(name)
    parts = sizes.split("x")
    # `isdigit` takes digits of every script, which `int` may not.
    if not all(re.fullmatch("[0-9]{1,9}", part) and int(part) > 0 for part in parts):
        raise ConfigError(
            f"cannot read the number of devices {sizes!r:.40} in {text!r:.40}; write it as "
            f"in {name}:8 or {name}:4x8"
        )
    count = math.prod(int(part) for part in parts)
    if count > MOST_DEVICES:
        raise ConfigError(
            f"got {text!r:.80}, {count} devices; name at most {MOST_DEVICES}, such as {name}:4096"
        )
    return row, count
