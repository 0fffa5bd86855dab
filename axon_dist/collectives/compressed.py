"""Means over a slow axis of values sent in few bits, with feedback of their errors.

Each rank r has values v_r and sends q_r, nearly the same in fewer bytes. All get the same m, about
the mean of the v_r, and rank r keeps the error e_r, to be added to its next values. Nothing is
lost, only late:

    m + mean_r(e_r) = mean_r(v_r)
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Protocol

import jax
import jax.numpy as jnp

from ..core.errors import ConfigError, did_you_mean
from ..core.typing import Array


class Compression(Protocol):
    """A way to average over a mesh axis in few bytes; a value that compares by its fields."""

    def mean(
        self, values: Sequence[Array], axis: str, ranks: int
    ) -> tuple[list[Array], list[Array]]:
        """Averages inside `shard_map`.

        Args:
            values: float32, this rank's; those that ranks of other axes have alike give the same
                results there.
            axis: the axis to average over.
            ranks: its size.

        Returns:
            The mean as all ranks of the axis have it, and what this rank has to add next time.
        """
        ...

    def wire_bytes(self, sizes: Sequence[int], ranks: int) -> int:
        """Bytes that `mean` has one device send, for values of so many elements."""
        ...


@dataclasses.dataclass(frozen=True)
class Quantized:
    """Eight bits a number, and a float32 scale for each block of a leaf.

    The ranks exchange blocks, so that each averages 1/R of them in float32, round the means, and
    gather those: `2(R-1)/R · (1 + 4/block)` bytes a number, a quarter of an all-reduce. The rank
    that rounds a mean keeps the error of that, times R, for the next mean divides by R.

    Args:
        kind: `"int8"`, or `"fp8"` with 4 bits of exponent and 3 of mantissa.
        block: numbers that share a scale.

    Example:
        >>> Quantized("int8", block=64).wire_bytes([1024], ranks=2)
        1088
    """

    kind: str = "int8"
    block: int = 256

    def __post_init__(self) -> None:
        if self.kind not in _LARGEST:
            raise ConfigError(
                f"there is no rounding {self.kind!r}.{did_you_mean(str(self.kind), _LARGEST)}"
            )
        if isinstance(self.block, bool) or not isinstance(self.block, int) or self.block < 1:
            raise ConfigError(f"block is {self.block!r}; give how many numbers share a scale")

    def mean(
        self, values: Sequence[Array], axis: str, ranks: int
    ) -> tuple[list[Array], list[Array]]:
        """As `Compression.mean`."""
        blocks = self._blocks(values, ranks)
        sent = self._pack(blocks)

        def share(x):
            return jax.lax.all_to_all(x, axis, 0, 0, tiled=True)

        def apart(x):
            return x.reshape(ranks, x.shape[0] // ranks, *x.shape[1:])

        mean = self._unpack(*(apart(share(x)) for x in sent)).mean(0)
        rounded = self._pack(mean)
        full = self._unpack(*(jax.lax.all_gather(x, axis, tiled=True) for x in rounded))
        missing = blocks - self._unpack(*sent)
        rank = jax.lax.axis_index(axis)
        twice = ranks * (mean - self._unpack(*rounded))
        start = (rank * mean.shape[0], 0)
        late = jax.lax.dynamic_slice(missing, start, mean.shape) + twice
        missing = jax.lax.dynamic_update_slice(missing, late, start)
        return self._leaves(full, values), self._leaves(missing, values)

    def wire_bytes(self, sizes: Sequence[int], ranks: int) -> int:
        """As `Compression.wire_bytes`."""
        blocks = self._count(sizes, ranks)
        return 2 * (ranks - 1) * blocks // ranks * (self.block + 4)

    def _count(self, sizes: Sequence[int], ranks: int) -> int:
        # No block has numbers of two leaves: ranks of other axes may share only one of them.
        return ranks * math.ceil(sum(math.ceil(size / self.block) for size in sizes) / ranks)

    def _blocks(self, values: Sequence[Array], ranks: int) -> Array:
        def pad(x):
            return jnp.pad(x.reshape(-1), (0, -x.size % self.block)).reshape(-1, self.block)

        rows = jnp.concatenate([pad(value) for value in values])
        count = self._count([value.size for value in values], ranks)
        return jnp.pad(rows, ((0, count - rows.shape[0]), (0, 0)))

    def _leaves(self, blocks: Array, like: Sequence[Array]) -> list[Array]:
        leaves, start = [], 0
        for leaf in like:
            stop = start + math.ceil(leaf.size / self.block)
            leaves.append(blocks[start:stop].reshape(-1)[: leaf.size].reshape(leaf.shape))
            start = stop
        return leaves

    def _pack(self, blocks: Array) -> tuple[Array, Array]:
        """Eight bits a number, as integers of any meaning, and a scale a block."""
        largest = _LARGEST[self.kind]
        top = jnp.max(jnp.abs(blocks), axis=-1, keepdims=True)
        scale = jnp.where(top > 0, top / largest, 1)
        scaled = jnp.clip(blocks / scale, -largest, largest)
        if self.kind == "int8":
            return jnp.round(scaled).astype(jnp.int8), scale
        # As whole numbers, for not every platform sends fp8.
        narrow = scaled.astype(jnp.float8_e4m3fn)
        return jax.lax.bitcast_convert_type(narrow, jnp.int8), scale

    def _unpack(self, numbers: Array, scale: Array) -> Array:
        if self.kind == "fp8":
            numbers = jax.lax.bitcast_convert_type(numbers, jnp.float8_e4m3fn)
        return numbers.astype(jnp.float32) * scale


_LARGEST = {"int8": 127.0, "fp8": 448.0}


@dataclasses.dataclass(frozen=True)
class TopK:
    """The largest numbers of every leaf, each with its place; eight bytes a number that is sent.

    Args:
        share: how many of a leaf's numbers a rank sends, above 0 and at most 1; one at least.

    Example:
        >>> TopK(1 / 64).wire_bytes([1024], ranks=2)
        128
    """

    share: float = 0.01

    def __post_init__(self) -> None:
        if not isinstance(self.share, (int, float)) or not 0 < self.share <= 1:
            raise ConfigError(
                f"share is {self.share!r}; give the part of the numbers that is sent, above 0 and "
                "at most 1, such as 0.01"
            )

    def mean(
        self, values: Sequence[Array], axis: str, ranks: int
    ) -> tuple[list[Array], list[Array]]:
        """As `Compression.mean`."""
        pairs = [self._mean(value, axis, ranks) for value in values]
        return [mean for mean, _ in pairs], [missing for _, missing in pairs]

    def _mean(self, value: Array, axis: str, ranks: int) -> tuple[Array, Array]:
        flat = value.reshape(-1)
        _, places = jax.lax.top_k(jnp.abs(flat), self._num_sent(flat.size))
        largest = flat[places]
        everywhere, numbers = (jax.lax.all_gather(x, axis, tiled=True) for x in (places, largest))
        mean = jnp.zeros_like(flat).at[everywhere].add(numbers / ranks)
        return mean.reshape(value.shape), flat.at[places].set(0).reshape(value.shape)

    def wire_bytes(self, sizes: Sequence[int], ranks: int) -> int:
        """As `Compression.wire_bytes`."""
        return (ranks - 1) * 8 * sum(map(self._num_sent, sizes))

    def _num_sent(self, size: int) -> int:
        return max(1, math.ceil(self.share * size))


def compression_of(what: Compression | str | None) -> Compression | None:
    """A compression by its name, or itself.

    Raises:
        ConfigError: when there is none of that name.

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
        f"there is no compression {what!r:.60}.{did_you_mean(str(what), names)} Or give "
        "a Quantized or a TopK"
    )
