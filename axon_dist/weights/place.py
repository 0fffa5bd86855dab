"""From slices in files to arrays on the devices, no more of them in host memory than must be."""

from __future__ import annotations

from typing import Any

import jax

from axon_dist.core.typing import Array

from .source import Source


def place(source: Source, target: jax.ShapeDtypeStruct) -> Array:
    """Reads a parameter shard by shard, each put on its devices before the next is read.

    Args:
        source: where its values lie.
        target: its shape and dtype, and the sharding to put it on; those shards alone are read
            that lie on devices of this process, and each of them once.

    Returns:
        The array.
    """
    sharding: Any = target.sharding
    where = sharding.addressable_devices_indices_map(target.shape)
    devices_of: dict[tuple[tuple[int, int], ...], list[Any]] = {}
    for device, index in where.items():
        parts = (part.indices(n)[:2] for part, n in zip(index, target.shape, strict=True))
        devices_of.setdefault(tuple(parts), []).append(device)
    shards: list[Array] = []
    for parts, devices in devices_of.items():
        values = source.read([slice(*part) for part in parts])
        for device in devices:
            kind = jax.sharding.SingleDeviceSharding(device, memory_kind=sharding.memory_kind)
            shards.append(jax.device_put(values, kind))
        # Until a transfer has ended, the host's copy stays.
        jax.block_until_ready(shards)
    return jax.make_array_from_single_device_arrays(target.shape, sharding, shards)
