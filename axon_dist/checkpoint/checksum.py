"""Checksums: of an array, the same on every mesh; of a file.

Orbax stores arrays without a checksum over their values, so a flipped byte in them would be
restored silently. The checksum of a leaf is taken on the devices before it leaves them and again
after it came back, and so covers the whole way; the checksum of a file names the one at fault.
"""

from __future__ import annotations

import collections
import math
import zlib
from collections.abc import Mapping
from pathlib import Path

import jax
import jax.numpy as jnp
from jax import lax

from ..core.errors import CheckpointError
from ..core.typing import Array
from ..core.typing import Path as LeafPath

_BLOCK = 1 << 20
_GOLDEN = 0x9E3779B1
"""2^32 divided by the golden ratio: its multiples spread evenly over 32 bits (Knuth, TAOCP 6.4)."""


def leaf_checksum(x: Array) -> Array:
    """Mixes every element with its position into 32 bits, wherever the array lives.

    With `u_i` the bits of element i in row-major order, all modulo 2^32,

        sum over i of (u_i xor 0x9E3779B1 i) (2 i + 1)

    A sum does not depend on how the array is split; each factor is odd, so that a change in one
    element always changes the sum. Positions come from `iota` along each dim and not from
    flattening, which would gather a split array.

    Args:
        x: an array of any dtype but a random key.

    Returns:
        Scalar uint32.

    Example:
        >>> int(leaf_checksum(jnp.arange(4.0))) == int(leaf_checksum(jnp.arange(4.0)))
        True
        >>> int(leaf_checksum(jnp.arange(4.0))) == int(leaf_checksum(jnp.arange(4.0)[::-1]))
        False
    """
    words = _as_words(x)
    index = _row_major_index(words.shape)
    mixed = (words ^ (index * jnp.uint32(_GOLDEN))) * (2 * index + 1)
    return jnp.sum(mixed, dtype=jnp.uint32)


def leaf_checksums(leaves: Mapping[LeafPath, Array]) -> dict[LeafPath, Array]:
    """Starts computing the checksums of leaves; nothing waits for them.

    Args:
        leaves: arrays, in device or host memory; those on the same devices share one program.

    Returns:
        Scalars on the devices, by path.
    """
    groups: dict[frozenset, dict[LeafPath, Array]] = collections.defaultdict(dict)
    for path, leaf in leaves.items():
        if leaf.is_deleted():
            raise CheckpointError(
                f"leaf {path} of the state was deleted, or given away by a step, which gives the "
                "memory of its state to the next one; save the state that the step returned"
            )
        groups[frozenset(leaf.sharding.device_set)][path] = leaf
    sums: dict[LeafPath, Array] = {}
    for group in groups.values():
        sums |= _checksums_of_group(group)
    return {path: sums[path] for path in leaves}


def file_checksum(path: Path) -> int:
    """The CRC-32 of a file, read in blocks."""
    crc = 0
    with open(path, "rb") as file:
        while block := file.read(_BLOCK):
            crc = zlib.crc32(block, crc)
    return crc


@jax.jit
def _checksums_of_group(leaves: dict[LeafPath, Array]) -> dict[LeafPath, Array]:
    near = jax.tree.map(lambda x: jax.device_put(x, jax.memory.Space.Device), leaves)
    return jax.tree.map(leaf_checksum, near)


def _as_words(x: Array) -> Array:
    """The bits of each element as uint32; wider elements get a dim of their words."""
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        return jnp.stack([_as_words(x.real), _as_words(x.imag)], axis=-1)
    if x.dtype == jnp.bool_:
        return x.astype(jnp.uint32)
    bits = jnp.iinfo(x.dtype).bits if jnp.issubdtype(x.dtype, jnp.integer) else 8 * x.itemsize
    return lax.bitcast_convert_type(x, f"uint{min(bits, 32)}").astype(jnp.uint32)


def _row_major_index(shape: tuple[int, ...]) -> Array:
    index = jnp.zeros(shape, jnp.uint32)
    for dim in range(len(shape)):
        stride = math.prod(shape[dim + 1 :]) % 2**32
        index += lax.broadcasted_iota(jnp.uint32, shape, dim) * jnp.uint32(stride)
    return index
