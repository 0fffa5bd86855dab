"""The pieces of models: pixels, norms, rotary positions, attention, feed-forwards.

Attention at position t needs the keys and values of positions 0 to t, and nothing else of them.
A `Cache` holds these for every layer in arrays of a fixed length, which a loop can carry.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from ..core.typing import Array, PyTree
from .attention import ATTENTION_FORMS
from .mlp import ACTIVATIONS
from .transformer_config import TransformerConfig


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

        def write(old, new):
            return jax.lax.dynamic_update_slice_in_dim(old, new.astype(old.dtype), start, axis=1)

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

    past: PyTree
    place: Place

    def after(self, past: PyTree, length: int) -> Cache:
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


class RMSNorm(nnx.Module):
    """Root-mean-square normalisation `x / sqrt(mean(x^2) + eps) * scale` (arXiv:1910.07467).

    Args:
        width: size of the last dim.
        eps: added to the mean square.
        param_dtype: dtype of `scale`, `[width]`.
    """

    def __init__(self, width: int, *, eps: float, param_dtype: str):
        self.scale = nnx.Param(jnp.ones((width,), param_dtype))
        self.eps = eps

    def __call__(self, x: Array) -> Array:
        """Normalises the last dim in float32 and returns the dtype of `x`."""
        wide = x.astype(jnp.float32)
        wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.eps)
        return (wide * self.scale[...].astype(jnp.float32)).astype(x.dtype)


def rotate(x: Array, theta: float, positions: Array | None = None) -> Array:
    """Rotates pairs of features by an angle that grows with the position (RoPE, arXiv:2104.09864).

    The pair `(x[i], x[i + K/2])` at position `t` turns by `t * theta^(-2i/K)`, so the product of a
    query and a key depends on the distance between them and on nothing else.

    Args:
        x: `[B, T, H, K]`, K even.
        theta: base of the wavelengths.
        positions: integers `[B, T]`; None for those of the sequence index.

    Returns:
        The rotated array in the dtype of `x`; the rotation is float32.
    """
    length, half = x.shape[1], x.shape[-1] // 2
    frequency = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    if positions is None:
        positions = jnp.arange(length)[None]
    angle = positions.astype(jnp.float32)[..., None] * frequency
    cos, sin = (f(angle)[:, :, None, :] for f in (jnp.cos, jnp.sin))
    left, right = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = [left * cos - right * sin, right * cos + left * sin]
    return jnp.concatenate(turned, axis=-1).astype(x.dtype)


class SelfAttention(nnx.Module):
    """Causal grouped-query attention with separate `q`, `k`, `v` and `out` layers.

    Queries and keys are rotated by their position unless the model has learned positions.

    Args:
        config: sizes and numerics.
        rngs: source of the initial weights.
    """

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs):
        size, width = config.key_size, config.width
        self.q = linear(config, width, config.num_heads * size, rngs=rngs)
        self.k = linear(config, width, config.kv_heads * size, rngs=rngs)
        self.v = linear(config, width, config.kv_heads * size, rngs=rngs)
        self.out = linear(config, config.num_heads * size, width, residual=True, rngs=rngs)
        self.head_dim = size
        self.is_rotary = config.positions == "rotary"
        self.rope_theta = config.rope_theta
        self.form = config.attention

    def __call__(
        self, x: Array, segments: Array | None = None, positions: Array | None = None
    ) -> Array:
        """Maps `[B, T, D]` to `[B, T, D]`; position t sees those of 0 to t in its own segment.

        Args:
            x: the residual stream.
            segments: integers `[B, T]`, the document of each position; None for one in each row.
            positions: integers `[B, T]`, by which queries and keys are rotated; None for those of
                the sequence index.
        """
        query, key, value = (self._heads(project(x)) for project in (self.q, self.k, self.v))
        if self.is_rotary:
            query, key = (rotate(heads, self.rope_theta, positions) for heads in (query, key))
        more = {} if segments is None else {"segments": segments}
        mixed = self.attend(query, key, value, **more)
        return self.out(mixed.reshape(*x.shape[:2], -1))

    def decode(self, x: Array, past: Past, place: Place) -> tuple[Array, Past]:
        """Maps further positions `[B, T, D]`, beside those that are kept; and keeps them too."""
        positions = place.positions(x.shape[1])
        query, key, value = (self._heads(project(x)) for project in (self.q, self.k, self.v))
        if self.is_rotary:
            query, key = (rotate(heads, self.rope_theta, positions) for heads in (query, key))
        past = past.extended(key, value, place.start)
        visible = place.visible(x.shape[1], past.keys.shape[1])
        mixed = cached_attention(query, past, visible)
        return self.out(mixed.reshape(*x.shape[:2], -1)), past

    def attend(
        self, query: Array, key: Array, value: Array, segments: Array | None = None
    ) -> Array:
        """Mixes values by queries and keys, in the form of the config."""
        return ATTENTION_FORMS[self.form](query, key, value, segments=segments)

    def _heads(self, x: Array) -> Array:
        return x.reshape(*x.shape[:2], -1, self.head_dim)


class GatedMLP(nnx.Module):
    """The feed-forward `down(act(gate(x)) * up(x))`, with silu SwiGLU (arXiv:2002.05202).

    Args:
        config: sizes and numerics.
        rngs: source of the initial weights.
    """

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs):
        self.gate = linear(config, config.width, config.hidden_size, rngs=rngs)
        self.up = linear(config, config.width, config.hidden_size, rngs=rngs)
        self.down = linear(config, config.hidden_size, config.width, residual=True, rngs=rngs)
        self.activation = config.activation

    def __call__(self, x: Array) -> Array:
        """Maps `[..., D]` to `[..., D]`."""
        return self.down(ACTIVATIONS[self.activation](self.gate(x)) * self.up(x))


class PlainMLP(nnx.Module):
    """The feed-forward `down(act(up(x)))`.

    Args:
        config: sizes and numerics.
        rngs: source of the initial weights.
    """

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs):
        self.up = linear(config, config.width, config.hidden_size, rngs=rngs)
        self.down = linear(config, config.hidden_size, config.width, residual=True, rngs=rngs)
        self.activation = config.activation

    def __call__(self, x: Array) -> Array:
        """Maps `[..., D]` to `[..., D]`."""
        return self.down(ACTIVATIONS[self.activation](self.up(x)))


def linear(
    config: TransformerConfig,
    num_inputs: int,
    num_outputs: int,
    *,
    residual: bool = False,
    bias: bool | None = None,
    rngs: nnx.Rngs,
) -> nnx.Linear:
    """Makes a kernel `[num_inputs, num_outputs]` in the dtypes of the config.

    Args:
        config: dtypes and depth.
        num_inputs: size of the last dim of what goes in.
        num_outputs: size of the last dim of what comes out.
        residual: the output is added to the residual stream; as in GPT-2 its initial weights are
            smaller by `sqrt(2 * num_layers)`, so that the sum of all branches does not grow with
            depth.
        bias: whether it has a bias; None leaves it to the config.
        rngs: source of the initial weights.

    Returns:
        The layer.
    """
    std = init_std(config) / ((2 * config.num_layers) ** 0.5 if residual else 1.0)
    return nnx.Linear(
        num_inputs,
        num_outputs,
        use_bias=config.bias if bias is None else bias,
        dtype=config.dtype and jnp.dtype(config.dtype),
        param_dtype=jnp.dtype(config.param_dtype),
        kernel_init=nnx.initializers.normal(std),
        rngs=rngs,
    )


def init_std(config: TransformerConfig) -> float:
    """Gives the standard deviation of fresh kernels and tables, `sqrt(2 / (5 D))`.

    The small initialisation of arXiv:1910.05895: at width 1000 it is the 0.02 of GPT-2, and unlike
    a constant it also trains narrow models at full speed.
    """
    return (2.0 / (5.0 * config.width)) ** 0.5


def pixels(images: Array, dtype: DTypeLike) -> Array:
    """Maps bytes to [-1, 1]; floats are taken as they are.

    Bytes cross from host to device as bytes, a quarter of what floats would be.

    Args:
        images: `[B, H, W, C]`, unsigned bytes or floats.
        dtype: what the first layer computes in.

    Returns:
        `[B, H, W, C]` of the dtype.

    Example:
        >>> pixels(jnp.array([0, 255], jnp.uint8), jnp.float32).tolist()
        [-1.0, 1.0]
    """
    if jnp.issubdtype(images.dtype, jnp.integer):
        images = images.astype(jnp.float32) / 127.5 - 1.0
    return images.astype(dtype)
