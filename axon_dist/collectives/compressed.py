"""Compressed means over a slow axis, with error feedback.

Each rank r has values v_r and sends q_r, an approximation in fewer bytes. All ranks get the same m,
approximately the mean of the v_r. Rank r keeps the error e_r and adds it to its next values. So
nothing is lost, only delayed:

    m + mean_r(e_r) = mean_r(v_r)
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Protocol

import jax
import jax.numpy as jnp

from ..core.checks import COUNT, TEXT, is_number
from ..core.errors import ConfigError, did_you_mean
from ..core.typing import Array


class Compression(Protocol):
    """A compressed mean over a mesh axis; instances compare by their fields."""

    def mean(
        self, values: Sequence[Array], axis: str, ranks: int
    ) -> tuple[list[Array], list[Array]]:
        """Averages inside `shard_map`.

        Args:
            values: this rank's float32 arrays. If they are equal along other axes, so are the
                results.
            axis: the axis to average over.
            ranks: its size.

        Returns:
            The mean, equal on all ranks of the axis, and this rank's error, to add next time.
        """
        ...

    def wire_bytes(self, sizes: Sequence[int], ranks: int) -> int:
        """The bytes that one device sends in `mean`, for values of these sizes."""
        ...


@dataclasses.dataclass(frozen=True)
class Quantized:
    """Sends eight bits per number, and a float32 scale per block of a leaf.

    An all-to-all gives each of the R ranks 1/R of the blocks, which it averages in float32. It
    quantizes the means, and an all-gather distributes them. This takes `2(R-1)/R · (1 + 4/block)`
    bytes per number, a quarter of an all-reduce. The rank that quantizes a mean adds R times the
    rounding error to its own error, because the next mean divides by R.

    Args:
        kind: `"int8"`, or `"fp8"` with 4 bits of exponent and 3 of mantissa.
        block: how many numbers share one scale.

    Example:
        >>> Quantized("int8", block=64).wire_bytes([1024], ranks=2)
        1088
    """

    kind: str = "int8"
    block: int = 256

    def __post_init__(self) -> None:
        if not TEXT.holds(self.kind) or self.kind not in _LARGEST:
            raise ConfigError(
                f"unknown kind {self.kind!r:.80}.{did_you_mean(str(self.kind), _LARGEST)}"
            )
        if not COUNT.holds(self.block):
            raise ConfigError(
                f"block is {self.block!r:.80}; give the number of values that share a scale, at "
                "least 1"
            )

    def mean(
        self, values: Sequence[Array], axis: str, ranks: int
    ) -> tuple[list[Array], list[Array]]:
        """See `Compression.mean`."""
        blocks = self._blocks(values, ranks)
        sent = self._pack(blocks)

        def exchange(x):
            return jax.lax.all_to_all(x, axis, 0, 0, tiled=True)

        def by_sender(x):
            return x.reshape(ranks, x.shape[0] // ranks, *x.shape[1:])

        mean = self._unpack(*(by_sender(exchange(x)) for x in sent)).mean(0)
        rounded = self._pack(mean)
        full = self._unpack(*(jax.lax.all_gather(x, axis, tiled=True) for x in rounded))
        error = blocks - self._unpack(*sent)
        rank = jax.lax.axis_index(axis)
        mean_error = ranks * (mean - self._unpack(*rounded))
        start = (rank * mean.shape[0], 0)
        own_error = jax.lax.dynamic_slice(error, start, mean.shape) + mean_error
        error = jax.lax.dynamic_update_slice(error, own_error, start)
        return self._leaves(full, values), self._leaves(error, values)

    def wire_bytes(self, sizes: Sequence[int], ranks: int) -> int:
        """See `Compression.wire_bytes`."""
        blocks = self._count(sizes, ranks)
        return 2 * (ranks - 1) * blocks // ranks * (self.block + 4)

    def _count(self, sizes: Sequence[int], ranks: int) -> int:
        # A block never spans two leaves: ranks along other axes may have only one of the two equal.
        return ranks * math.ceil(sum(math.ceil(size / self.block) for size in sizes) / ranks)

    def _blocks(self, values: Sequence[Array], ranks: int) -> Array:
        def pad(x):
            return jnp.pad(x.reshape(-1), (0, -x.size % self.block)).reshape(-1, self.block)

        blocks = jnp.concatenate([pad(value) for value in values])
        count = self._count([value.size for value in values], ranks)
        return jnp.pad(blocks, ((0, count - blocks.shape[0]), (0, 0)))

    def _leaves(self, blocks: Array, like: Sequence[Array]) -> list[Array]:
        leaves = []
        start = 0
        for leaf in like:
            stop = start + math.ceil(leaf.size / self.block)
            leaves.append(blocks[start:stop].reshape(-1)[: leaf.size].reshape(leaf.shape))
            start = stop
        return leaves

    def _pack(self, blocks: Array) -> tuple[Array, Array]:
        """Quantizes to eight bits per number, as int8 bit patterns, and a scale per block."""
        largest = _LARGEST[self.kind]
        top = jnp.max(jnp.abs(blocks), axis=-1, keepdims=True)
        scale = top / largest
        # Devices may take smaller scales for zero, and zero divided by zero is no number. Numbers
        # so small become zeros. A block that is not finite keeps its scale, which is not finite
        # either, so that the mean is not.
        scale = jnp.where(scale < jnp.finfo(scale.dtype).tiny, 1, scale)
        scaled = jnp.clip(blocks / scale, -largest, largest)
        if self.kind == "int8":
            return jnp.round(scaled).astype(jnp.int8), scale
        # Sent as int8 bits, because not every platform can send fp8.
        narrow = scaled.astype(jnp.float8_e4m3fn)
        return jax.lax.bitcast_convert_type(narrow, jnp.int8), scale

    def _unpack(self, numbers: Array, scale: Array) -> Array:
        if self.kind == "fp8":
            numbers = jax.lax.bitcast_convert_type(numbers, jnp.float8_e4m3fn)
        return numbers.astype(jnp.float32) * scale


_LARGEST = {"int8": 127.0, "fp8": 448.0}


@dataclasses.dataclass(frozen=True)
class TopK:
    """Sends only the largest numbers of every leaf, with their indices: eight bytes each.

    Args:
        share: the fraction of a leaf's numbers to send, above 0 and at most 1; at least one number.

    Example:
        >>> TopK(1 / 64).wire_bytes([1024], ranks=2)
        128
    """

    share: float = 0.01

    def __post_init__(self) -> None:
        if not is_number(self.share) or not 0 < self.share <= 1:
            raise ConfigError(
                f"share is {self.share!r:.80}; give the fraction of numbers to send, above 0 and "
                "at most 1, such as 0.01"
            )

    def mean(
        self, values: Sequence[Array], axis: str, ranks: int
    ) -> tuple[list[Array], list[Array]]:
        """See `Compression.mean`."""
        pairs = [self._mean(value, axis, ranks) for value in values]
        return [mean for mean, _ in pairs], [error for _, error in pairs]

    def _mean(self, value: Array, axis: str, ranks: int) -> tuple[Array, Array]:
        if not value.size:
            return value, value
        flat = value.reshape(-1)
        _, indices = jax.lax.top_k(jnp.abs(flat), self._num_sent(flat.size))
        largest = flat[indices]
        all_indices, numbers = (jax.lax.all_gather(x, axis, tiled=True) for x in (indices, largest))
        mean = jnp.zeros_like(flat).at[all_indices].add(numbers / ranks)
        return mean.reshape(value.shape), flat.at[indices].set(0).reshape(value.shape)

    def wire_bytes(self, sizes: Sequence[int], ranks: int) -> int:
        """See `Compression.wire_bytes`."""
        return (ranks - 1) * 8 * sum(map(self._num_sent, sizes))

    def _num_sent(self, size: int) -> int:
        return min(size, max(1, math.ceil(self.share * size)))


def compression_of(what: Compression | str | None) -> Compression | None:
    """Looks up a compression by name; returns a `Compression` or None unchanged.

    Raises:
        ConfigError: for an unknown name.

    Example:
        >>> compression_of("fp8")
        Quantized(kind='fp8', block=256)
    """
    if what is None or isinstance(what, (Quantized, TopK)):
        return what
    if isinstance(what, str) and what in _LARGEST:
        return Quantized(what)
    if isinstance(what, str) and what == "top_k":
        return TopK()
    names = (*_LARGEST, "top_k")
    raise ConfigError(
        f"there is no compression {what!r:.60}.{did_you_mean(str(what), names)} You may also "
        "give a Quantized or a TopK"
    )
