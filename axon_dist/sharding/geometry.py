"""The geometry of a flat shard: ceil division, zero padding at the end, exact both ways.

A policy splits an array along a dim that divides. Where the elements of an array are counted as
one row instead, as in estimates of memory and in flat buckets, this is how the row is cut:

    shard_size = ceil(numel / num_shards),  padding = shard_size * num_shards - numel
"""

from __future__ import annotations

import dataclasses
import math

import jax.numpy as jnp

from ..core.errors import ConfigError
from ..core.typing import Array, Shape


@dataclasses.dataclass(frozen=True)
class ShardSpec:
    """How an array, seen as one row of elements, is cut into equal shards.

    Args:
        original_shape: the shape of the array.
        num_shards: how many ranks share it.

    Raises:
        ConfigError: when there is no rank to share it.

    Example:
        >>> spec = ShardSpec((10,), 4)
        >>> spec.shard_size, spec.padding, spec.real_sizes
        (3, 2, (3, 3, 3, 1))
    """

    original_shape: Shape
    num_shards: int

    def __post_init__(self) -> None:
        if self.num_shards < 1:
            raise ConfigError(f"num_shards is {self.num_shards}; an array needs at least 1 shard")

    @property
    def numel(self) -> int:
        """Elements of the array."""
        return math.prod(self.original_shape)

    @property
    def shard_size(self) -> int:
        """Elements of every shard, padding included."""
        return -(-self.numel // self.num_shards)

    @property
    def padding(self) -> int:
        """Zeros at the end of the row."""
        return self.shard_size * self.num_shards - self.numel

    @property
    def real_sizes(self) -> tuple[int, ...]:
        """Elements of the array in each shard, padding left out."""
        return tuple(self.local_slice(r).stop - self.local_slice(r).start for r in self._ranks)

    def local_slice(self, rank: int) -> slice:
        """Which elements of the row a rank holds; empty where only padding is left for it."""
        start, stop = (min(r * self.shard_size, self.numel) for r in (rank, rank + 1))
        return slice(start, stop)

    def shard(self, array: Array) -> Array:
        """Cuts an array into rows `[num_shards, shard_size]`, one for each rank.

        Raises:
            ConfigError: when the array has another shape.
        """
        if tuple(array.shape) != tuple(self.original_shape):
            raise ConfigError(f"got an array of shape {array.shape} to cut as {self}")
        return jnp.pad(array.reshape(-1), (0, self.padding)).reshape(self.num_shards, -1)

    def unshard(self, shards: Array) -> Array:
        """The array of its rows; bit for bit what `shard` was given."""
        return shards.reshape(-1)[: self.numel].reshape(self.original_shape)

    @property
    def _ranks(self) -> range:
        return range(self.num_shards)
