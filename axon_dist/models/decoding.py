"""What a causal model keeps of the positions it has seen, so that the next one costs one position.

Attention at position t needs the keys and values of positions 0 to t, and nothing else of them.
A `Cache` holds these for every layer in arrays of a fixed length, which a loop can carry.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from axon_dist.core.typing import Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Past:
    """Keys and values of one layer, or of several in a further dim in front.

    Args:
        keys: `[B, S, N, K]`, rotated already; what lies behind the positions seen is not looked at.
        values: `[B, S, N, K]`.
    """

    keys: Array
    values: Array

    def extended(self, keys: Array, values: Array, start: Array) -> Past:
        """The same with `[B, T, N, K]` written at the positions from `start` on."""
        write = lambda old, new: jax.lax.dynamic_update_slice_in_dim(
            old, new.astype(old.dtype), start, axis=1
        )
        return Past(write(self.keys, keys), write(self.values, values))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Place:
    """Which positions of a sequence a call brings.

    Rows of several lengths end together: a shorter one has padding in front, which no position
    sees and which does not count.

    Args:
        start: how many positions came before, padding among them; an int32 scalar.
        padding: how many of them are padding, int32 `[B]`.
    """

    start: Array
    padding: Array

    def positions(self, length: int) -> Array:
        """The numbers of `length` positions within their rows, int32 `[B, T]`; 0 for padding."""
        indices = self.start + jnp.arange(length)
        return jnp.maximum(indices - self.padding[:, None], 0)

    def visible(self, length: int, size: int) -> Array:
        """Which of `size` positions each of `length` positions sees, `[B, T, S]`."""
        query, key = self.start + jnp.arange(length), jnp.arange(size)
        is_before = key[None, None, :] <= query[None, :, None]
        return is_before & (key[None, None, :] >= self.padding[:, None, None])


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Cache:
    """What a whole model keeps.

    Args:
        past: the `Past` of each layer.
        place: where the next tokens stand.
    """

    past: Any
    place: Place

    def after(self, past: Any, length: int) -> Cache:
        """The cache once `length` positions more are in it."""
        return Cache(past, dataclasses.replace(self.place, start=self.place.start + length))


def cached_attention(query: Array, past: Past, visible: Array) -> Array:
    """Computes `softmax(q k^T / sqrt(K) + mask) v` over everything kept, the softmax in float32.

    Key heads are not repeated for the query heads that share them: reading them is what a step of
    decoding costs.

    Args:
        query: `[B, T, H, K]`.
        past: keys and values, `[B, S, N, K]`; query head h takes key head `h // (H / N)`.
        visible: `[B, T, S]`.

    Returns:
        `[B, T, H, K]` in the dtype of the values.
    """
    shape, num_kv = query.shape, past.keys.shape[2]
    grouped = query.reshape(*shape[:2], num_kv, -1, shape[-1])
    scores = jnp.einsum("btngk,bsnk->bngts", grouped, past.keys, preferred_element_type=jnp.float32)
    scores = scores * shape[-1] ** -0.5
    scores = jnp.where(visible[:, None, None], scores, jnp.finfo(jnp.float32).min)
    weights = jax.nn.softmax(scores, axis=-1).astype(past.values.dtype)
    return jnp.einsum("bngts,bsnk->btngk", weights, past.values).reshape(shape)
