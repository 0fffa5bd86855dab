"""`Hardware`: the peak rates of one accelerator and of the wires around it, with sources."""

from __future__ import annotations

import dataclasses
import math
from types import MappingProxyType

from ..core.errors import ConfigError, did_you_mean


@dataclasses.dataclass(frozen=True)
class Hardware:
    """What one device holds and how fast it computes and talks; any machine can be described.

    Args:
        name: what targets call it.
        memory_bytes: device memory, bytes.
        flops: dense bfloat16 matrix operations, FLOP/s.
        memory_bandwidth: device memory, bytes/s.
        link: what a device sends into a ring inside its node, or over a torus axis, bytes/s.
        network: what a device sends out of its node, bytes/s; equal to `link` without nodes.
        node_size: devices per node; 0 where there are no nodes.
        float32_rate: the rate of XLA's default float32 products over that of bfloat16: TF32 runs
            at half, a TPU multiplies in bfloat16.
        link_latency: of one hop inside a node, seconds.
        network_latency: of one hop between nodes, seconds.
        source: where the numbers are from.

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
    link_latency: float = 1e-6
    network_latency: float = 1e-6
    source: str = ""

    def __post_init__(self):
        self.validate()

    def validate(self) -> None:
        """Raises `ConfigError` unless sizes and rates are positive."""
        for field in ("memory_bytes", "flops", "memory_bandwidth", "link", "network"):
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

        A ring that leaves its nodes is bound by what its members inside one node send together.

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
        members = max(1, min(num_ranks, self.node_size // stride))
        return min(self.link, members * self.network)

    def ring_latency(self, num_ranks: int, stride: int = 1) -> float:
        """The seconds that `num_ranks - 1` hops around a ring take, apart from the bytes."""
        crossings = self.num_nodes(num_ranks, stride) - 1
        crossings = min(crossings, num_ranks - 1)
        inside = num_ranks - 1 - crossings
        return crossings * self.network_latency + inside * self.link_latency


_GB = 10**9
# NCCL's own model, src/graph/tuning.cc, ring with the Simple protocol.
_NVLINK_HOP, _NETWORK_HOP = 3.4e-6, 14e-6


def _gpu(
    name: str, memory: int, flops: float, hbm: float, link: float, network: float, source: str
) -> Hardware:
    return Hardware(
        name, memory, flops, hbm, link, network, 8, 0.5, _NVLINK_HOP, _NETWORK_HOP, source
    )


def _tpu(name: str, memory: int, flops: float, hbm: float, link: float, source: str) -> Hardware:
    return Hardware(name, memory, flops, hbm, link, link, source=source)


_SHEET = "NVIDIA data sheet and DGX user guide"
_TPU_DOCS = "cloud.google.com/tpu/docs; jax-ml.github.io/scaling-book"

HARDWARE: MappingProxyType[str, Hardware] = MappingProxyType(
    {
        row.name: row
        for row in (
            # NVLink: half of the bidirectional number. Network: one port per GPU; HDR is
            # 200 Gb/s, NDR 400 Gb/s.
            _gpu("a100-40", 40 * _GB, 312e12, 1555e9, 300e9, 25e9, f"{_SHEET}, A100 SXM 40 GB"),
            _gpu("a100-80", 80 * _GB, 312e12, 2039e9, 300e9, 25e9, f"{_SHEET}, A100 SXM 80 GB"),
            # The driver leaves 84.978 GB of the H100's 80 GiB to programs.
            _gpu("h100", 84_978_434_048, 989e12, 3.35e12, 450e9, 50e9, f"{_SHEET}, H100 SXM"),
            _gpu("h200", 141 * _GB, 989e12, 4.8e12, 450e9, 50e9, f"{_SHEET}, H200 SXM"),
            _gpu("b200", 180 * _GB, 2.25e15, 8e12, 900e9, 50e9, f"{_SHEET}, DGX B200"),
            # A ring over one torus axis uses both directions of a link.
            _tpu("v4", 32 * _GB, 275e12, 1228e9, 90e9, _TPU_DOCS),
            _tpu("v5e", 16 * _GB, 197e12, 819e9, 90e9, _TPU_DOCS),
            _tpu("v5p", 95 * _GB, 459e12, 2765e9, 180e9, _TPU_DOCS),
            _tpu("v6e", 32 * _GB, 918e12, 1640e9, 180e9, _TPU_DOCS),
        )
    }
)
"""The machines whose rates are known, by name."""


def hardware(name: str) -> Hardware:
    """Looks up a machine.

    Args:
        name: a key of `HARDWARE`.

    Returns:
        Its row.

    Raises:
        ConfigError: for an unknown name; it suggests the nearest.

    Example:
        >>> hardware("v5p").memory_bytes // 10**9
        95
    """
    if name not in HARDWARE:
        raise ConfigError(f"no rates are known of {name!r}.{did_you_mean(name, HARDWARE)}")
    return HARDWARE[name]


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
    if not all(part.isdigit() and int(part) > 0 for part in parts):
        raise ConfigError(
            f"cannot read the number of devices {sizes!r} in {text!r}; write it as in {name}:8 or "
            f"{name}:4x8"
        )
    return row, math.prod(int(part) for part in parts)
