"""Layers of the models: norms, attention with its KV cache, feed-forwards, and pixel scaling.

Attention at position t needs only the keys and values of positions 0 to t. A `Cache` stores these
for every layer in arrays of fixed length, so that a `lax.scan` can carry it.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from ..core.checks import RNGS, is_whole
from ..core.errors import ConfigError
from ..core.tree import wide
from ..core.typing import Array, PyTree
from .attention import ATTENTION_FORMS, capped, einsum_attention, in_window
from .config import ACTIVATIONS, check_choice, numerics
from .rotary import Rotary
from .transformer_config import TransformerConfig


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Past:
    """Cached keys and values of one layer, or of several layers with a leading dim.

    Args:
        keys: `[B, S, N, K]`, already rotated; entries after the positions so far are ignored.
        values: `[B, S, N, K]`.
    """

    keys: Array
    values: Array

    def extended(self, keys: Array, values: Array, start: Array) -> Past:
        """Returns a copy with keys and values `[B, T, N, K]` written from position `start` on."""

        def write(old, new):
            return jax.lax.dynamic_update_slice_in_dim(old, new.astype(old.dtype), start, axis=1)

        return Past(write(self.keys, keys), write(self.values, values))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Place:
    """The positions of the tokens of a call within their sequences.

    Shorter rows are left-padded, so that all rows end together. No position sees padding, and
    padding does not count as a position.

    Args:
        start: the number of earlier positions, including padding; an int32 scalar.
        padding: the number of padding positions at the start of each row, int32 `[B]`.
    """

    start: Array
    padding: Array

    def positions(self, length: int) -> Array:
        """Returns the next `length` positions, int32 `[B, T]`; 0 for padding."""
        indices = self.start + jnp.arange(length)
        # Of equal ranks, as `jax_numpy_rank_promotion="raise"` asks.
        return jnp.maximum(indices[None] - self.padding[:, None], 0)

    def visible(self, length: int, size: int, window: Array | None = None) -> Array:
        """Returns the attention mask of `length` queries and `size` keys, bool `[B, T, S]`."""
        query = self.start + jnp.arange(length)
        key = jnp.arange(size)
        is_before = key[None, None, :] <= query[None, :, None]
        if window is not None:
            is_before &= in_window(query[:, None] - key[None], window)[None]
        return is_before & (key[None, None, :] >= self.padding[:, None, None])


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Cache:
    """The cache of a whole model.

    Args:
        past: the `Past` of each layer.
        place: the position of the next tokens.
    """

    past: PyTree
    place: Place

    def after(self, past: PyTree, length: int) -> Cache:
        """Returns the cache after `length` more positions."""
        return Cache(past, dataclasses.replace(self.place, start=self.place.start + length))


def cached_attention(
    query: Array, past: Past, visible: Array, softcap: float | None = None
) -> Array:
    """Computes `softmax(q k^T / sqrt(K) + mask) v` over cached positions, the softmax in float32.

    Key heads are not repeated for the query heads that share them, because reading keys dominates
    the cost of a decoding step.

    Args:
        query: `[B, T, H, K]`.
        past: keys and values, `[B, S, N, K]`; query head h takes key head `h // (H / N)`.
        visible: `[B, T, S]`.
        softcap: c of `c tanh(score / c)`; None for no cap.

    Returns:
        `[B, T, H, K]` in the dtype of the values.
    """
    shape = query.shape
    num_kv = past.keys.shape[2]
    grouped = query.reshape(*shape[:2], num_kv, -1, shape[-1])
    dtype = jnp.promote_types(jnp.result_type(query, past.keys), jnp.float32)
    scores = jnp.einsum("btngk,bsnk->bngts", grouped, past.keys, preferred_element_type=dtype)
    scores = capped(scores * shape[-1] ** -0.5, softcap)
    scores = jnp.where(visible[:, None, None], scores, jnp.finfo(scores.dtype).min)
    weights = jax.nn.softmax(scores, axis=-1).astype(past.values.dtype)
    return jnp.einsum("bngts,bsnk->btngk", weights, past.values).reshape(shape)


class RMSNorm(nnx.Module):
    """Root-mean-square normalisation `x / sqrt(mean(x^2) + eps) * scale` (arXiv:1910.07467).

    Args:
        width: size of the last dim.
        eps: added to the mean square.
        param_dtype: dtype of `scale`, `[width]`.
        plus_one: multiplies by `1 + scale`, which is then initialized to 0.
    """

    def __init__(self, width: int, *, eps: float, param_dtype: str, plus_one: bool = False):
        first = jnp.zeros if plus_one else jnp.ones
        self.scale = nnx.Param(first((width,), param_dtype))
        self.eps = eps
        self.plus_one = plus_one

    def __call__(self, x: Array) -> Array:
        """Normalises the last dim in at least float32; returns an array in the dtype of `x`."""
        y = wide(x)
        y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + self.eps)
        scale = wide(self.scale[...])
        scale = jax.lax.broadcast_to_rank(scale, x.ndim)  # under jax_numpy_rank_promotion=raise
        return (y * (1 + scale if self.plus_one else scale)).astype(x.dtype)


def rms_norm(config: TransformerConfig, width: int) -> RMSNorm:
    """Makes the RMSNorm of a config over `width` features."""
    plus_one = config.norm == "rms_plus_one"
    return RMSNorm(width, eps=config.norm_eps, param_dtype=config.param_dtype, plus_one=plus_one)


class LayerWindow(nnx.Variable):
    """The attention window of a layer, int32; 0 for none.

    It is data rather than a constant, so that all blocks run the same program.
    """


class SelfAttention(nnx.Module):
    """Causal grouped-query attention with separate `q`, `k`, `v` and `out` layers.

    Queries and keys are rotated by their position unless the model has learned positions.

    Args:
        config: sizes and numerics.
        window: the attention window, an int32 scalar, 0 for none; None if no layer has a window.
        rngs: source of the initial weights.
    """

    def __init__(self, config: TransformerConfig, window: Array | None = None, *, rngs: nnx.Rngs):
        size = config.key_size
        width = config.width
        bias = config.bias or config.qkv_bias
        self.q = linear(config, width, config.num_heads * size, bias=bias, rngs=rngs)
        self.k = linear(config, width, config.kv_heads * size, bias=bias, rngs=rngs)
        self.v = linear(config, width, config.kv_heads * size, bias=bias, rngs=rngs)
        self.out = linear(config, config.num_heads * size, width, residual=True, rngs=rngs)
        self.head_dim = size
        self.rotary = Rotary(
            config.rope_theta, config.rotary_fraction, config.rope_scaling, config.local_rope_theta
        )
        self.is_rotary = config.positions == "rotary"
        self.norm_by = config.qk_norm
        if config.qk_norm != "none":
            by_head = config.qk_norm == "head"
            self.q_norm = rms_norm(config, size * (1 if by_head else config.num_heads))
            self.k_norm = rms_norm(config, size * (1 if by_head else config.kv_heads))
        if window is not None:
            self.window = LayerWindow(window)
        self.softcap = config.attention_softcap
        # Attention forms already divide scores by the square root of the head size; multiply
        # queries by the remaining factor.
        self.scale = config.score_scale * size**0.5
        # No fused kernel here can cap scores or take a window as data.
        self.is_special = config.has_special_scores
        self.form = "einsum" if self.is_special else config.attention

    def __call__(
        self, x: Array, segments: Array | None = None, positions: Array | None = None
    ) -> Array:
        """Maps `[B, T, D]` to `[B, T, D]`; position t sees positions 0 to t of its own segment.

        Args:
            x: the residual stream.
            segments: integers `[B, T]`, the document of each position; None for one per row.
            positions: integers `[B, T]`, for rotating queries and keys; None for the sequence
                index.
        """
        query, key, value = self._projected(x, positions)
        more = {} if segments is None else {"segments": segments}
        mixed = self.attend(query, key, value, **more)
        return self.out(mixed.reshape(*x.shape[:2], -1))

    def decode(self, x: Array, past: Past, place: Place) -> tuple[Array, Past]:
        """Maps further positions `[B, T, D]`, which see cached ones; returns the extended cache."""
        positions = place.positions(x.shape[1])
        query, key, value = self._projected(x, positions)
        past = past.extended(key, value, place.start)
        visible = place.visible(x.shape[1], past.keys.shape[1], self._window)
        mixed = cached_attention(query, past, visible, self.softcap)
        return self.out(mixed.reshape(*x.shape[:2], -1)), past

    def attend(
        self, query: Array, key: Array, value: Array, segments: Array | None = None
    ) -> Array:
        """Computes attention with the implementation that the config selects."""
        if not self.is_special:
            return ATTENTION_FORMS[self.form](query, key, value, segments=segments)
        return einsum_attention(
            query, key, value, segments=segments, window=self._window, softcap=self.softcap
        )

    @property
    def _window(self) -> Array | None:
        return self.window[...] if hasattr(self, "window") else None

    def _projected(self, x: Array, positions: Array | None) -> list[Array]:
        """Returns queries, keys and values by head, normalised and rotated by the config."""
        norms = (self.q_norm, self.k_norm, None) if self.norm_by != "none" else (None,) * 3
        query, key, value = (
            self._normed_heads(project(x), norm)
            for project, norm in zip((self.q, self.k, self.v), norms, strict=True)
        )
        if self.is_rotary:
            query, key = (self.rotary(heads, positions, self._window) for heads in (query, key))
        if abs(self.scale - 1) > 1e-12:
            query = query * jnp.asarray(self.scale, query.dtype)
        return [query, key, value]

    def _normed_heads(self, x: Array, norm: RMSNorm | None) -> Array:
        if norm is not None and self.norm_by == "all":
            x = norm(x)
        x = x.reshape(*x.shape[:2], -1, self.head_dim)
        return norm(x) if norm is not None and self.norm_by == "head" else x


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


class GatedMLP(PlainMLP):
    """The feed-forward `down(act(gate(x)) * up(x))`, with silu SwiGLU (arXiv:2002.05202).

    Args:
        config: sizes and numerics.
        rngs: source of the initial weights.
    """

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs):
        self.gate = linear(config, config.width, config.hidden_size, rngs=rngs)
        super().__init__(config, rngs=rngs)

    def __call__(self, x: Array) -> Array:
        """Maps `[..., D]` to `[..., D]`."""
        return self.down(ACTIVATIONS[self.activation](self.gate(x)) * self.up(x))


class MLP(nnx.Module):
    """Linear layers with an activation and dropout after each but the last.

    Args:
        sizes: widths from the input to the output, for example `(784, 256, 10)`.
        activation: a key of `ACTIVATIONS`.
        dropout: rate after every activation, in [0, 1).
        rngs: source of the initial weights (`params`) and of dropout.

    Raises:
        ConfigError: fewer than two sizes, one below 1, a rate out of range, an unknown activation.

    Example:
        >>> def scores(images):
        ...     return MLP((784, 256, 10), rngs=nnx.Rngs(0))(images)
        >>> nnx.eval_shape(scores, jnp.ones((4, 784))).shape
        (4, 10)
    """

    def __init__(
        self,
        sizes: Sequence[int],
        *,
        activation: str = "relu",
        dropout: float = 0.0,
        rngs: nnx.Rngs,
    ):
        is_list = isinstance(sizes, Sequence) and all(map(is_whole, sizes))
        if not is_list or len(sizes) < 2 or min(sizes) < 1:
            raise ConfigError(
                f"sizes={sizes!r:.80} must have at least an input and an output width, each 1 or "
                "more, for example (784, 256, 10).",
                code="mlp-sizes",
            )
        check_choice("activation", activation, ACTIVATIONS, "an activation")
        if not 0.0 <= dropout < 1.0:
            raise ConfigError(
                f"dropout={dropout} must be in [0, 1); 0 turns it off.", code="dropout-range"
            )
        RNGS.check("MLP", "rngs", rngs)
        self.layers = nnx.List(
            nnx.Linear(num_inputs, num_outputs, rngs=rngs)
            for num_inputs, num_outputs in itertools.pairwise(sizes)
        )
        self.dropout = dropout_layer(dropout, rngs)
        self.activation = activation

    def __call__(self, x: Array) -> Array:
        """Maps `[..., sizes[0]]` to `[..., sizes[-1]]`."""
        *hidden, last = self.layers
        for layer in hidden:
            x = self.dropout(ACTIVATIONS[self.activation](layer(x)))
        return last(x)


def linear(
    config: TransformerConfig,
    num_inputs: int,
    num_outputs: int,
    *,
    residual: bool = False,
    bias: bool | None = None,
    rngs: nnx.Rngs,
) -> nnx.Linear:
    """Makes a linear layer with kernel `[num_inputs, num_outputs]` in the dtypes of the config.

    Args:
        config: dtypes and depth.
        num_inputs: size of the last dim of the input.
        num_outputs: size of the last dim of the output.
        residual: whether the output is added to the residual stream. As in GPT-2, initial weights
            are then divided by `sqrt(2 * num_layers)`, so that the sum of all branches does not
            grow with depth.
        bias: whether the layer has a bias; None for the config's `bias`.
        rngs: source of the initial weights.

    Returns:
        The layer.
    """
    std = init_std(config) / ((2 * config.num_layers) ** 0.5 if residual else 1.0)
    return nnx.Linear(
        num_inputs,
        num_outputs,
        use_bias=config.bias if bias is None else bias,
        **numerics(config),
        kernel_init=nnx.initializers.normal(std),
        rngs=rngs,
    )


def dropout_layer(rate: float, rngs: nnx.Rngs) -> nnx.Dropout:
    """Makes a dropout layer, with a random stream only if its rate is above 0."""
    return nnx.Dropout(rate, rngs=rngs if rate else None)


def init_std(config: TransformerConfig) -> float:
    """Returns the standard deviation of initial kernels and tables, `sqrt(2 / (5 D))`.

    This is the small initialisation of arXiv:1910.05895. At width 1000 it is the 0.02 of GPT-2;
    unlike a constant, it also trains narrow models at full speed.
    """
    return (2.0 / (5.0 * config.width)) ** 0.5


def pixels(images: Array, dtype: DTypeLike) -> Array:
    """Maps bytes to [-1, 1]; float images keep their values.

    So images can be transferred to the device as bytes, a quarter of the size of floats.

    Args:
        images: `[B, H, W, C]`, unsigned bytes or floats.
        dtype: the compute dtype of the first layer.

    Returns:
        `[B, H, W, C]` of the dtype.

    Example:
        >>> pixels(jnp.array([0, 255], jnp.uint8), jnp.float32).tolist()
        [-1.0, 1.0]
    """
    if jnp.issubdtype(images.dtype, jnp.integer):
        images = images.astype(jnp.float32) / 127.5 - 1.0
    return images.astype(dtype)
