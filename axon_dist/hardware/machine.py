"""How fast a device computes, reads its memory and talks to others: vendors' peak numbers."""

from __future__ import annotations

import dataclasses
from collections import Counter

import jax

from ..hlo.groups import Groups


@dataclasses.dataclass(frozen=True)
class Machine:
    """Peak rates of one device, which decide whether a transfer can hide behind compute.

    Args:
        name: what targets and reports call it.
        kinds: the values of `device.device_kind` that mean this machine.
        flops: bf16 matrix operations per second.
        memory: bytes per second from and to device memory.
        link: bytes per second that a device sends into a ring inside its node or torus axis.
        network: bytes per second that a device sends out of its node; equal to `link` where there
            are no nodes.
        node_size: devices per node, or 0 where there are no nodes.
        hbm_bytes: bytes of device memory.
    """

    name: str
    kinds: tuple[str, ...]
    flops: float
    memory: float
    link: float
    network: float
    node_size: int
    hbm_bytes: int

    def wire_seconds(self, wire_bytes: int, groups: Groups) -> float:
        """The time that a transfer takes alone on the wire, latency left out.

        A ring that leaves the node is bound by what the members inside one node send together.

        Args:
            wire_bytes: bytes that each device sends.
            groups: who takes part, as device positions; consecutive ones share a node.
        """
        return wire_bytes / self._bandwidth(groups)

    def _bandwidth(self, groups: Groups) -> float:
        if not self.node_size:
            return self.link
        slowest = self.link
        for group in groups:
            members = Counter(device // self.node_size for device in group)
            if len(members) > 1:
                slowest = min(slowest, self.network * min(members.values()))
        return slowest


_GB = 10**9

MACHINES = (
    # NVIDIA H100 and H200 SXM data sheets; NVLink 4 gives 450 GB/s each way, one NDR port 50 GB/s.
    # The driver leaves 84.978 GB of the H100's memory to programs.
    Machine("h100", ("NVIDIA H100 80GB HBM3",), 989e12, 3.35e12, 450e9, 50e9, 8, 84_978_434_048),
    Machine("h200", ("NVIDIA H200",), 989e12, 4.8e12, 450e9, 50e9, 8, 141 * _GB),
    # cloud.google.com/tpu/docs; a ring over one axis of the torus uses both directions of a link.
    Machine("v5e", ("TPU v5 lite", "TPU v5e"), 197e12, 819e9, 90e9, 90e9, 0, 16 * _GB),
    Machine("v5p", ("TPU v5", "TPU v5p"), 459e12, 2765e9, 180e9, 180e9, 0, 95 * _GB),
    Machine("v6e", ("TPU v6 lite", "TPU v6e"), 918e12, 1640e9, 180e9, 180e9, 0, 32 * _GB),
)
"""The machines whose rates are known."""


def machine_of(mesh: jax.sharding.Mesh | None) -> Machine | None:
    """Looks up the machine whose devices form a mesh; None for one that is not in the table."""
    if mesh is None:
        return None
    kind = getattr(mesh.devices.flat[0], "device_kind", None)
    return next((machine for machine in MACHINES if kind in machine.kinds), None)
