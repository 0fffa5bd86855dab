"""Blockwise attention: queries attend to a block of keys, and results of blocks are merged.

Let `o` be the result for a block of keys and `l = log sum_j exp(s_j)` the logsumexp of its scores.
The result for two blocks is `(exp(l1) o1 + exp(l2) o2) / (exp(l1) + exp(l2))`. The gradients of
each block follow from the `l` of all keys and from `delta`, the sum over features of result times
cotangent; the gradients of the blocks are summed.

Source: Dao et al., FlashAttention, arXiv:2205.14135; Liu et al., arXiv:2310.01889.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.splash_attention import (
    splash_attention_kernel,
    splash_attention_mask,
)
from jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_kernel import SegmentIds

from ..core.compat import splash_gradients
from ..core.cudnn import cudnn_attention_forward, cudnn_attention_gradients, cudnn_obstacle
from ..core.errors import UnsupportedError
from ..core.tree import wide
from ..core.typing import Array, PyTree
from ..core.weighted import per_sample

_BLOCKS = (512, 256, 128)
_KEY_BLOCKS = (1024, *_BLOCKS)
_MOST_ADDENDS = 8


def splash_kernel(
    length: int,
    num_heads: int,
    causal: bool,
    interpret: bool = False,
    save_residuals: bool = False,
) -> splash_attention_kernel.SplashAttentionKernel:
    """Makes the kernel for one sample.

    Args:
        length: number of positions of queries and of keys, a multiple of 128.
        num_heads: number of query heads.
        causal: position t sees positions 0 to t; otherwise all positions.
        interpret: run in Python on any platform, slowly, for tests.
        save_residuals: also return the logsumexp of the scores; the kernel then has no derivative.

    Returns:
        (scaled queries `[H, T, K]`, keys and values `[N, T, K]`, optional `SegmentIds`) ->
        `[H, T, K]`; with residuals, also a tuple of `[H, T]`.

    Raises:
        UnsupportedError: if the length is not a multiple of 128.
    """
    block = next((size for size in _BLOCKS if length % size == 0), None)
    if block is None:
        raise UnsupportedError(
            f"attention='flash' on a sequence of {length}: the kernel works in blocks of 128, so "
            "the length must be a multiple of 128; change it, or use attention='auto'."
        )
    keys = next(size for size in _KEY_BLOCKS if length % size == 0)
    # The fused backward kernel recomputes the scores once; two separate kernels do so twice. But it
    # writes one addend of the queries' gradient per block of keys, so it is used for few blocks.
    is_fused = length // keys <= _MOST_ADDENDS
    sizes = splash_attention_kernel.BlockSizes(
        block_q=block,
        block_kv=block,
        block_q_dkv=block,
        block_kv_dkv=keys if is_fused else block,
        block_kv_dkv_compute=block,
        block_q_dq=None if is_fused else block,
        block_kv_dq=None if is_fused else block,
        use_fused_bwd_kernel=is_fused,
    )
    kind = splash_attention_mask.CausalMask if causal else splash_attention_mask.FullMask
    mask = splash_attention_mask.MultiHeadMask([kind((length, length))] * num_heads)
    return splash_attention_kernel.make_splash_mha(
        mask,
        block_sizes=sizes,
        head_shards=1,
        q_seq_shards=1,
        interpret=interpret,
        save_residuals=save_residuals,
    )


def splash_obstacle(query: Array) -> str | None:
    """Returns why the kernel cannot run in the current context, or None if it can.

    It needs blocks of 128 positions, and a TPU as the compilation target. All mesh axes must be
    manual, because the compiler cannot partition a Pallas kernel.

    Args:
        query: `[B, T, H, K]`, in the caller's layout.
    """
    mesh = jax.sharding.get_abstract_mesh()
    device = mesh.abstract_device
    if device is None or device.platform != "tpu":
        return "the compilation target is not a TPU."
    if any(mesh.shape[axis] > 1 for axis in mesh.axis_names if axis not in mesh.manual_axes):
        return "the compiler cannot partition a Pallas kernel over devices."
    return no_blocks(query.shape[1])


def no_blocks(length: int) -> str | None:
    """Returns why a sequence cannot be cut into the kernel's blocks, or None if it can."""
    if length % _BLOCKS[-1]:
        return f"the length of {length} is not a multiple of {_BLOCKS[-1]}."
    return None


BLOCK = 512
"""The largest number of queries, and of keys, in one tile of scores without a fused kernel."""

HIDDEN = -1e30
"""The score of a key of another segment. It is finite: if a query sees no key of a block, the
block's weights then vanish at the first visible key, instead of giving inf - inf = NaN."""


class Keys(NamedTuple):
    """A block of keys.

    Args:
        key: `[B, S, N, K]`.
        value: `[B, S, N, K]`.
        segments: integers `[B, S]`, or None.
        positions: integers `[1, S]`, positions in the whole sequence; None without a window.
    """

    key: Array
    value: Array
    segments: Array | None = None
    positions: Array | None = None


class Queries(NamedTuple):
    """A block of queries, and the further values that their gradients need.

    Args:
        query: `[B, T, H, K]`, H a multiple of N.
        segments: integers `[B, T]`, or None; a query sees only the keys of its segment.
        cotangent: the cotangent of the result with all keys, in the shape of `query`.
        log_weight: the logsumexp of the scores of all keys, at least float32 `[B, T, H]`.
        delta: the sum over features of result times cotangent, in that dtype, `[B, T, H]`.
        out: the result itself; None if it was not sent along.
        positions: integers `[1, T]`, as in `Keys`.
    """

    query: Array
    segments: Array | None = None
    cotangent: Any = None
    log_weight: Any = None
    delta: Any = None
    out: Array | None = None
    positions: Array | None = None


Tile: TypeAlias = tuple[PyTree, ...]
"""The values that a loop over tiles reads or carries: arrays, and None for absent segments."""


@dataclasses.dataclass(frozen=True)
class BlockAttention:
    """Attention to a block of keys, with the kernel of the platform that is compiled for.

    Args:
        form: `"auto"`, or one of `BLOCK_KERNELS`. Windows and caps use plain products, whatever it
            is.
        window: position t sees only positions after t - window; None for no window. Windows read
            the positions of queries and keys.
        softcap: c of `c tanh(score / c)`; None for uncapped scores.
    """

    form: str = "auto"
    window: int | None = None
    softcap: float | None = None

    def forward(self, queries: Queries, keys: Keys, causal: bool = False) -> tuple[Array, Array]:
        """Attends to these keys.

        Args:
            queries: the queries; the fields for gradients are not read.
            keys: the keys and values, for as many positions as there are queries.
            causal: position t sees positions 0 to t.

        Returns:
            The result `[B, T, H, K]`, and the logsumexp of its scores `[B, T, H]`, both in
            float32, or in float64 for float64 queries.

        Raises:
            UnsupportedError: if the form cannot run here.
        """
        return self._run("forward", queries, keys, causal)

    def backward(
        self, queries: Queries, keys: Keys, causal: bool = False
    ) -> tuple[Array, Array, Array]:
        """Returns this block's share of the gradients of queries, keys and values, as wide."""
        return self._run("backward", queries, keys, causal)

    def _run(self, method: str, queries: Queries, keys: Keys, causal: bool) -> Any:
        def run(name):
            return functools.partial(getattr(BLOCK_KERNELS[name], method), causal=causal)

        if self.window is not None or self.softcap is not None:
            return getattr(_Chunked(self.window, self.softcap), method)(queries, keys, causal)

        if self.form in BLOCK_KERNELS:
            why = BLOCK_KERNELS[self.form].obstacle(queries, keys)
            if why is not None:
                raise UnsupportedError(
                    f"attention={self.form!r} around a ring, blocks of "
                    f"{jax.typeof(queries.query).str_short()}: {why} Use attention='auto'."
                )
            return run(self.form)(queries, keys)
        if BLOCK_KERNELS["flash"].obstacle(queries, keys) is None:
            return run("flash")(queries, keys)
        if BLOCK_KERNELS["cudnn"].obstacle(queries, keys) is not None:
            return run("einsum")(queries, keys)
        return jax.lax.platform_dependent(queries, keys, cuda=run("cudnn"), default=run("einsum"))


def merged(one: tuple[Array, Array], other: tuple[Array, Array]) -> tuple[Array, Array]:
    """Merges the results for two blocks of keys, in at least float32.

    Args:
        one: a result `[B, T, H, K]` and the logsumexp of its scores `[B, T, H]`.
        other: the same for other keys.
    """
    weight = jnp.logaddexp(one[1], other[1])
    parts = (wide(x) * jnp.exp(log_weight - weight)[..., None] for x, log_weight in (one, other))
    return sum(parts), weight  # pyright: ignore[reportReturnType]


@dataclasses.dataclass(frozen=True)
class _Chunked:
    """Matrix products on tiles of `BLOCK` queries and keys, with an online softmax.

    Args:
        window: as in `BlockAttention`.
        softcap: as in `BlockAttention`.
    """

    window: int | None = None
    softcap: float | None = None

    def obstacle(self, queries: Queries, keys: Keys) -> str | None:
        return None

    def forward(self, queries: Queries, keys: Keys, causal: bool) -> tuple[Array, Array]:
        key_tiles = self._key_tiles(keys)
        dtype = _sum_dtype(queries, keys)

        def attend_tile(_: None, tile: Tile) -> tuple[None, tuple[Array, Array]]:
            query_tile, query, query_segments, query_positions = tile
            total = query.astype(dtype) * 0
            state = (total, total[..., 0] - jnp.inf, total[..., 0])

            def fold(state: Tile, tile: Tile) -> tuple[Tile, None]:
                total, largest, weight = state
                key_tile, key, value, key_segments, key_positions = tile
                scores = _capped(_scores(query, key), self.softcap)
                scores = _masked(scores, query_segments, key_segments, causal, query_tile, key_tile)
                scores = self._in_window(scores, query_positions, key_positions)
                # `largest` is -inf only before the first tile: a query either sees the first key,
                # or that key has the finite score HIDDEN.
                higher = jnp.maximum(largest, scores.max(-1))
                weights = jnp.exp(scores - higher[..., None])
                decay = jnp.exp(largest - higher)
                mixed = _product("bngts,bnsk->bngtk", weights.astype(value.dtype), value)
                total = total * decay[..., None] + mixed
                return (total, higher, weight * decay + weights.sum(-1)), None

            total, largest, weight = jax.lax.scan(fold, state, key_tiles)[0]
            return None, (total / weight[..., None], largest + jnp.log(weight))

        heads = keys.key.shape[2]
        row_tiles = (_tile_rows(queries.segments), _tile_rows(queries.positions))
        tiles = _numbered(_tile_heads(queries.query, heads), *row_tiles)
        out, log_weight = jax.lax.scan(attend_tile, None, tiles)[1]
        return _untiled(out), _untiled(log_weight)

    def backward(self, queries: Queries, keys: Keys, causal: bool) -> tuple[Array, Array, Array]:
        heads = keys.key.shape[2]
        dtype = queries.query.dtype
        sum_dtype = _sum_dtype(queries, keys)
        cotangents = queries.cotangent.astype(dtype)
        by_head = (queries.query, cotangents, queries.log_weight, queries.delta)
        row_tiles = (_tile_rows(queries.segments), _tile_rows(queries.positions))
        tiles = _numbered(*(_tile_heads(x, heads) for x in by_head), *row_tiles)

        def add_key_tile(d_query: Array, tile: Tile) -> tuple[Array, tuple[Array, Array]]:
            key_tile, key, value, key_segments, key_positions = tile

            def add(
                sums: tuple[Array, Array], tile: tuple[Tile, Array]
            ) -> tuple[tuple[Array, Array], Array]:
                (query_tile, query, cotangent, log_weight, delta, *rows), d_query = tile
                query_segments, query_positions = rows
                products = _scores(query, key)
                scores = _capped(products, self.softcap)
                scores = _masked(scores, query_segments, key_segments, causal, query_tile, key_tile)
                scores = self._in_window(scores, query_positions, key_positions)
                weights = jnp.exp(scores - log_weight[..., None])
                d_value = _product("bngts,bngtk->bnsk", weights.astype(dtype), cotangent)
                d_weights = _product("bngtk,bnsk->bngts", cotangent, value)
                d_scores = weights * (d_weights - delta[..., None]) * query.shape[-1] ** -0.5
                if self.softcap is not None:
                    d_scores = d_scores * (1 - jnp.tanh(products / self.softcap) ** 2)
                d_scores = d_scores.astype(dtype)
                d_key = _product("bngts,bngtk->bnsk", d_scores, query)
                d_query = d_query + _product("bngts,bnsk->bngtk", d_scores, key)
                return (sums[0] + d_key, sums[1] + d_value), d_query

            sums = (key.astype(sum_dtype) * 0, value.astype(sum_dtype) * 0)
            sums, d_query = jax.lax.scan(add, sums, (tiles, d_query))
            return d_query, sums

        key_tiles = self._key_tiles(keys)
        zeros = tiles[1].astype(sum_dtype) * 0
        d_query, d_kv = jax.lax.scan(add_key_tile, zeros, key_tiles)
        d_key, d_value = (_untiled(x[:, :, :, None]) for x in d_kv)
        return _untiled(d_query), d_key, d_value

    def _key_tiles(self, keys: Keys) -> Tile:
        row_tiles = _tile_rows(keys.segments), _tile_rows(keys.positions)
        return _numbered(*map(_tile_keys, keys[:2]), *row_tiles)

    def _in_window(
        self, scores: Array, query_positions: Array | None, key_positions: Array | None
    ) -> Array:
        """Hides the scores `[B, N, G, T, S]` of keys outside the window."""
        if self.window is None or query_positions is None or key_positions is None:
            return scores
        distance = query_positions[:, :, None] - key_positions[:, None, :]
        return jnp.where((distance < self.window)[:, None, None], scores, HIDDEN)


class _Cudnn:
    """cuDNN's flash attention; segments become a bias, computed for one pair of blocks a time."""

    def obstacle(self, queries: Queries, keys: Keys) -> str | None:
        return cudnn_obstacle(queries.query, queries.segments is not None)

    def forward(self, queries: Queries, keys: Keys, causal: bool) -> tuple[Array, Array]:
        bias = self._bias(queries, keys)
        out, log_weight = cudnn_attention_forward(
            queries.query, keys.key, keys.value, bias, causal, keeps_weights=True
        )
        return out.astype(jnp.float32), log_weight.swapaxes(1, 2)

    def backward(self, queries: Queries, keys: Keys, causal: bool) -> tuple[Array, Array, Array]:
        grads = cudnn_attention_gradients(
            queries.query,
            keys.key,
            keys.value,
            self._bias(queries, keys),
            causal,
            queries.log_weight.swapaxes(1, 2),
            _result(queries),
            queries.cotangent.astype(queries.query.dtype),
        )
        return _wide(grads)

    def _bias(self, queries: Queries, keys: Keys) -> Array | None:
        if queries.segments is None or keys.segments is None:
            return None
        is_same = queries.segments[:, :, None] == keys.segments[:, None, :]
        # Below any score, but finite: a query may see none of these keys.
        hidden = 0.7 * float(jnp.finfo(queries.query.dtype).min)
        return jnp.where(is_same, 0, hidden).astype(queries.query.dtype)[:, None]


@dataclasses.dataclass(frozen=True)
class _Splash:
    """The Pallas kernel for TPUs.

    Args:
        interpret: run in Python on any platform, for tests.
    """

    interpret: bool = False

    def obstacle(self, queries: Queries, keys: Keys) -> str | None:
        return splash_obstacle(queries.query)

    def forward(self, queries: Queries, keys: Keys, causal: bool) -> tuple[Array, Array]:
        kernel = self._kernel(queries, causal, save_residuals=True)
        query, *rest = self._arrays(queries, keys)
        out, (log_weight,) = per_sample(jax.vmap(kernel))(query, *rest)
        return out.swapaxes(1, 2).astype(jnp.float32), log_weight.swapaxes(1, 2)

    def backward(self, queries: Queries, keys: Keys, causal: bool) -> tuple[Array, Array, Array]:
        kernel = self._kernel(queries, causal)
        query, key, value, *segments = self._arrays(queries, keys)
        results = (queries.log_weight, _result(queries), queries.cotangent)
        log_weight, out, cotangent = (x.swapaxes(1, 2) for x in results)

        def sample_gradients(
            query: Array, key: Array, value: Array, *rest: Array
        ) -> tuple[Array, Array, Array]:
            *segments, log_weight, out, cotangent = rest
            ids = segments[0] if segments else None
            return splash_gradients(kernel, query, key, value, ids, log_weight, out, cotangent)

        run = per_sample(jax.vmap(sample_gradients))
        grads = run(query, key, value, *segments, log_weight, out, cotangent.astype(query.dtype))
        d_query, d_key, d_value = _wide(x.swapaxes(1, 2) for x in grads)
        return d_query * query.shape[-1] ** -0.5, d_key, d_value

    def _kernel(
        self, queries: Queries, causal: bool, save_residuals: bool = False
    ) -> splash_attention_kernel.SplashAttentionKernel:
        length, heads = queries.query.shape[1:3]
        return splash_kernel(length, heads, causal, self.interpret, save_residuals)

    def _arrays(self, queries: Queries, keys: Keys) -> tuple[PyTree, ...]:
        query = queries.query * queries.query.shape[-1] ** -0.5
        arrays = tuple(x.swapaxes(1, 2) for x in (query, keys.key, keys.value))
        if queries.segments is None:
            return arrays
        return *arrays, SegmentIds(queries.segments, keys.segments)  # pyright: ignore


BLOCK_KERNELS: MappingProxyType[str, _Chunked | _Cudnn | _Splash] = MappingProxyType(
    {"einsum": _Chunked(), "cudnn": _Cudnn(), "flash": _Splash()}
)
"""The kernels for attention to a block of keys, named as in `ATTENTION_FORMS` of models."""


def _result(queries: Queries) -> Array:
    """Returns the attention output of some queries, or an array with the same `delta`.

    Kernels use the result only to compute `delta`, its sum of products with the cotangent. If
    queries are sent to other ranks, `delta` is sent instead of the result: one number per head.
    """
    if queries.out is not None:
        return queries.out
    cotangent = queries.cotangent.astype(jnp.float32)
    largest = jnp.max(jnp.abs(cotangent), axis=-1, keepdims=True)
    largest = jnp.where(largest > 0, largest, 1)
    unit = cotangent / largest  # Its square neither underflows nor overflows.
    square = jnp.maximum(jnp.sum(unit * unit, axis=-1, keepdims=True), 1)
    return (unit * (queries.delta[..., None] / largest / square)).astype(queries.query.dtype)


def _wide(arrays: Iterable[Array]) -> tuple[Array, Array, Array]:
    d_query, d_key, d_value = (x.astype(jnp.float32) for x in arrays)
    return d_query, d_key, d_value


def in_dtypes_of(
    gradients: Iterable[Array], arrays: tuple[Array, Array, Array]
) -> tuple[Array, Array, Array]:
    """Casts the gradients of queries, keys and values to the dtypes of these arrays."""
    pairs = zip(gradients, arrays, strict=True)
    d_query, d_key, d_value = (gradient.astype(x.dtype) for gradient, x in pairs)
    return d_query, d_key, d_value


def _sum_dtype(queries: Queries, keys: Keys) -> jnp.dtype:
    """Returns the dtype of sums over keys, and of gradients: that of the operands, or float32."""
    return jnp.promote_types(jnp.result_type(queries.query, keys.key, keys.value), jnp.float32)


def _product(subscripts: str, left: Array, right: Array) -> Array:
    dtype = jnp.promote_types(jnp.result_type(left, right), jnp.float32)
    return jnp.einsum(subscripts, left, right, preferred_element_type=dtype)


def _scores(query: Array, key: Array) -> Array:
    """Computes the scaled scores of a tile, `[B, N, G, T, S]` in at least float32.

    Args:
        query: `[B, N, G, T, K]`.
        key: `[B, N, S, K]`.
    """
    return _product("bngtk,bnsk->bngts", query, key) * query.shape[-1] ** -0.5


def _capped(scores: Array, softcap: float | None) -> Array:
    """Caps scores softly: `c tanh(score / c)`; None leaves them unchanged."""
    return scores if softcap is None else softcap * jnp.tanh(scores / softcap)


def _masked(
    scores: Array,
    query_segments: Array | None,
    key_segments: Array | None,
    causal: bool,
    query_tile: Array,
    key_tile: Array,
) -> Array:
    """Masks the scores of a tile `[B, N, G, T, S]`.

    Args:
        scores: the scores of all pairs.
        query_segments: segments of the queries `[B, T]`, or None.
        key_segments: segments of the keys `[B, S]`, or None.
        causal: whether to mask keys after the query.
        query_tile: the index of the tile of queries.
        key_tile: the index of the tile of keys.
    """
    if query_segments is not None and key_segments is not None:
        is_same = query_segments[:, :, None] == key_segments[:, None, :]
        scores = jnp.where(is_same[:, None, None], scores, HIDDEN)
    if not causal:
        return scores
    num_queries, num_keys = scores.shape[-2:]
    query_offset = jax.lax.broadcasted_iota(jnp.int32, (num_queries, num_keys), 0)
    query_position = query_tile * num_queries + query_offset
    key_offset = jax.lax.broadcasted_iota(jnp.int32, (num_queries, num_keys), 1)
    key_position = key_tile * num_keys + key_offset
    return jnp.where(query_position >= key_position, scores, -jnp.inf)


def _count(length: int) -> int:
    """Returns the smallest number of equal tiles of at most `BLOCK` positions."""
    fewest = -(-length // BLOCK)
    return next(n for n in range(fewest, length + 1) if length % n == 0)


def _numbered(first: Array, *more: Array | None) -> Tile:
    """Prepends the index of each tile."""
    return (jnp.arange(first.shape[0]), first, *more)


def _tile_heads(x: Array, heads: int) -> Array:
    """Cuts `[B, T, H, ...]` into tiles `[tiles, B, N, G, T / tiles, ...]` for N heads of keys."""
    count = _count(x.shape[1])
    x = x.reshape(x.shape[0], count, -1, heads, x.shape[2] // heads, *x.shape[3:])
    return jnp.moveaxis(jnp.moveaxis(x, 1, 0), 2, 4)


def _tile_keys(x: Array) -> Array:
    """Cuts `[B, S, N, K]` into tiles `[tiles, B, N, S / tiles, K]`."""
    return _tile_heads(x, x.shape[2])[:, :, :, 0]


def _tile_rows(segments: Array | None) -> Array | None:
    """Cuts `[B, T]` into tiles `[tiles, B, T / tiles]`."""
    if segments is None:
        return None
    return jnp.moveaxis(segments.reshape(segments.shape[0], _count(segments.shape[1]), -1), 1, 0)


def _untiled(tiles: Array) -> Array:
    """Undoes `_tile_heads`."""
    x = jnp.moveaxis(jnp.moveaxis(tiles, 4, 2), 0, 1)
    return x.reshape(x.shape[0], x.shape[1] * x.shape[2], -1, *x.shape[5:])
