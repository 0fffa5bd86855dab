"""Attention: several implementations ("forms") of the same function.

All forms take queries `[B, T, H, K]`, keys and values `[B, T, N, K]` (H a multiple of N), a flag
`causal` (position t sees only positions 0 to t), and segments, integers `[B, T]` (a position sees
only its own segment). They return `[B, T, H, K]`:

| form | runs on | memory | what it is |
|---|---|---|---|
| `einsum` | everything | B x H x T x T scores | two matrix products and a float32 softmax |
| `cudnn` | NVIDIA GPUs, bfloat16 or float16 | linear in T | cuDNN's fused flash attention |
| `flash` | TPUs | linear in T | the Pallas splash attention kernel that ships with JAX |
| `auto` | everything | that of the form chosen | a fused kernel where it can run, or `einsum` |

With segments, `cudnn` works on pairs of pieces of 1024 positions, each with its own mask, and skips
pairs without a common segment; `flash` skips masked blocks.

`auto` decides when the program is lowered, by the platform it is lowered for, so one traced step
works on CPU and GPU. On a GPU it falls back to `einsum` in the cases that `cudnn_obstacle` names,
above all for float32: set the compute dtype to bfloat16 to get the fused kernel, or use `cudnn`,
which raises instead. On TPUs it takes `flash` inside a `shard_map` over all devices, as in a train
step. XLA cannot partition a Pallas kernel, so elsewhere, and for lengths that are not a multiple of
128, it takes `einsum`. `describe_attention` says which form runs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import MappingProxyType

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel
from jax.typing import DTypeLike

from ..core.cudnn import HIDDEN
from ..core.cudnn import cudnn_attention as fused_attention
from ..core.cudnn import cudnn_obstacle as fused_obstacle
from ..core.errors import UnsupportedError
from ..core.typing import Array, Leaf
from ..core.weighted import per_sample
from ..ops.attention import no_blocks, splash_kernel, splash_obstacle
from ..ops.packed import num_pieces, packed_attention


def flash_attention(
    query: Array,
    key: Array,
    value: Array,
    causal: bool = True,
    segments: Array | None = None,
    *,
    interpret: bool = False,
) -> Array:
    """Computes attention block by block, without storing the scores.

    Online softmax of arXiv:2205.14135 as a TPU kernel: memory grows linearly with T. XLA cannot
    partition the kernel, so with several devices the call belongs inside `shard_map`. Lowering it
    for a CPU or GPU fails: choose `"auto"` there.

    Args:
        query: `[B, T, H, K]`, T a multiple of 128.
        key: `[B, T, N, K]`, every head shared by `H / N` query heads.
        value: `[B, T, N, K]`.
        causal: position t sees positions 0 to t; otherwise all.
        segments: integers `[B, T]`; a position sees only its own segment. None for one segment.
        interpret: run the kernel in Python on any platform, slowly, for tests.

    Returns:
        `[B, T, H, K]` in the dtype of `query`.

    Raises:
        UnsupportedError: T is not a multiple of 128.
    """
    length, num_heads = query.shape[1:3]
    attend = per_sample(jax.vmap(splash_kernel(length, num_heads, causal, interpret)))
    query = query * query.shape[-1] ** -0.5
    query = query.swapaxes(1, 2)
    key = key.swapaxes(1, 2)
    value = value.swapaxes(1, 2)
    more = () if segments is None else (splash_attention_kernel.SegmentIds(segments, segments),)
    return jnp.swapaxes(attend(query, key, value, *more), 1, 2)


def einsum_attention(
    query: Array,
    key: Array,
    value: Array,
    causal: bool = True,
    segments: Array | None = None,
    window: Array | int | None = None,
    softcap: float | None = None,
) -> Array:
    """Computes `softmax(q k^T / sqrt(K) + mask) v` with the scores in memory.

    Heads are first moved before the sequence dim, so that the products are plain batched matrix
    products. On CPU, forward and backward together take about two thirds of the time of
    `jax.nn.dot_product_attention`.

    Args:
        query: `[B, T, H, K]`.
        key: `[B, T, N, K]`, every head shared by `H / N` query heads.
        value: `[B, T, N, K]`.
        causal: position t sees positions 0 to t; otherwise all.
        segments: integers `[B, T]`; a position sees only its own segment. None for one segment.
        window: position t sees only positions after t - window; 0 or None for no window.
        softcap: c of `c tanh(score / c)`; None for no cap.

    Returns:
        `[B, T, H, K]` in the dtype of `value`; the softmax is at least float32.
    """
    group = query.shape[2] // key.shape[2]
    query = query.swapaxes(1, 2)
    key, value = (jnp.repeat(x, group, axis=2).swapaxes(1, 2) for x in (key, value))
    dtype = jnp.promote_types(jnp.result_type(query, key), jnp.float32)
    scores = jnp.einsum("bhtk,bhsk->bhts", query, key, preferred_element_type=dtype)
    scores = capped(scores * query.shape[-1] ** -0.5, softcap)
    length = query.shape[2]
    if causal:
        visible = jnp.tril(jnp.ones((length, length), bool))[None, None]
        scores = jnp.where(visible, scores, jnp.finfo(scores.dtype).min)
    if window is not None:
        distance = jnp.arange(length)[:, None] - jnp.arange(length)[None]
        scores = jnp.where(in_window(distance, window), scores, jnp.finfo(scores.dtype).min)
    if segments is not None:
        scores = jnp.where(same_segment(segments), scores, jnp.finfo(scores.dtype).min)
    weights = jax.nn.softmax(scores, axis=-1).astype(value.dtype)
    return jnp.einsum("bhts,bhsk->bhtk", weights, value).swapaxes(1, 2)


def capped(scores: Array, softcap: float | None) -> Array:
    """Soft-caps scores, `c tanh(score / c)` (arXiv:2408.00118); None for no cap."""
    return scores if softcap is None else softcap * jnp.tanh(scores / softcap)


def in_window(distance: Array, window: Array | int) -> Array:
    """Whether a key `distance` positions before its query is within the window; 0 for no window."""
    return (distance < window) | (jnp.asarray(window) == 0)


def same_segment(segments: Array) -> Array:
    """Returns which keys each query may see, `[B, 1, T, T]`, from segments `[B, T]`."""
    return (segments[:, :, None] == segments[:, None, :])[:, None]


def cudnn_attention(
    query: Array, key: Array, value: Array, causal: bool = True, segments: Array | None = None
) -> Array:
    """Computes attention with cuDNN's fused kernel; arguments as in `einsum_attention`.

    Raises:
        UnsupportedError: cuDNN does not take this dtype or head size.
    """
    obstacle = cudnn_obstacle(query, key, value, segments)
    if obstacle is not None:
        raise UnsupportedError(
            f"attention='cudnn' with {query.dtype} heads of {query.shape[-1]}: {obstacle} Compute "
            "in bfloat16, or use attention='auto' or 'einsum'."
        )
    return _cudnn(query, key, value, segments, causal=causal)


def cudnn_obstacle(query: Leaf, key: Leaf, value: Leaf, segments: Leaf | None = None) -> str | None:
    """Returns why cuDNN cannot compute attention of these arrays, or None if it can.

    The dtype must be bfloat16 or float16, the head size a multiple of 8 up to 256 (in a train step
    on chips before Hopper, up to 128), and with segments the length even. The answer is the same on
    every machine; neither a GPU nor CUDA is needed.

    Example:
        >>> heads = jax.ShapeDtypeStruct((1, 8, 2, 64), jnp.float32)
        >>> cudnn_obstacle(heads, heads, heads) is None
        False
    """
    return fused_obstacle(query, segments is not None)


def auto_attention(
    query: Array, key: Array, value: Array, causal: bool = True, segments: Array | None = None
) -> Array:
    """Computes attention with the platform's fused kernel if that can run, else with `einsum`."""
    if splash_obstacle(query) is None:
        return flash_attention(query, key, value, causal, segments)
    arrays = (query, key, value) if segments is None else (query, key, value, segments)

    def einsum(q, k, v, s=None):
        return einsum_attention(q, k, v, causal, s)

    if cudnn_obstacle(*arrays) is not None:
        return einsum(*arrays)
    cudnn = functools.partial(_cudnn, causal=causal)
    return jax.lax.platform_dependent(*arrays, cuda=cudnn, default=einsum)


def describe_attention(
    form: str,
    platform: str,
    dtype: DTypeLike,
    shape: tuple[int, int, int],
    segments: bool = False,
    tiled: bool = False,
) -> str:
    """Describes in one sentence which attention runs in a train step, and how to get a fused one.

    Args:
        form: a key of `ATTENTION_FORMS`.
        platform: `"gpu"`, `"tpu"` or `"cpu"`.
        dtype: the dtype of queries, keys and values.
        shape: (positions, heads, size of a head).
        segments: whether batches have segment ids.
        tiled: whether matrix products compute scores tile by tile, as ring attention does.

    Returns:
        The sentence.

    Example:
        >>> describe_attention("einsum", "tpu", "bfloat16", (1024, 2, 64))
        'einsum, which stores the scores of all pairs, as asked for: "auto" takes a fused kernel'
    """
    length, heads, size = shape
    kernel = {"gpu": "cudnn", "tpu": "flash"}.get(platform)
    plain = _NAMES["tiles" if tiled else "einsum"]
    if form not in ("auto", kernel):
        asked = "as asked for" + (': "auto" takes a fused kernel' if kernel else "")
        return f"{plain if form == 'einsum' else _NAMES.get(form, form)}, {asked}"
    if kernel is None:
        return f"{plain}: there is no fused kernel for {platform.upper()}s"
    heads_of = jax.ShapeDtypeStruct((1, length, heads, size), dtype)
    why = no_blocks(length) if kernel == "flash" else fused_obstacle(heads_of, segments)
    if why is not None:
        reason = " ".join(why.split()).rstrip(".")
        return f"{plain}, because {kernel} cannot run: {reason}; {_CURES[kernel]}"
    piece = length // num_pieces(length)
    more = f", and reads masks [B, 1, {piece}, {piece}] made from the segments"
    return _NAMES[kernel] + (more if kernel == "cudnn" and segments else "")


_NAMES = MappingProxyType(
    {
        "einsum": "einsum, which stores the scores of all pairs",
        "tiles": "matrix products, which keep one tile of the scores in memory at a time",
        "cudnn": "the fused kernel of cuDNN",
        "flash": "the fused kernel for TPUs (splash attention)",
    }
)

_CURES = MappingProxyType(
    {
        "cudnn": "precision bf16, with heads of a multiple of 8 up to 128 (from Hopper on, 256), "
        "would fuse it",
        "flash": "a length that is a multiple of 128 would fuse it",
    }
)
"""Advice on how to make a kernel run, by form."""


def _cudnn(
    query: Array, key: Array, value: Array, segments: Array | None = None, *, causal: bool
) -> Array:
    bias = None
    if segments is not None and num_pieces(query.shape[1]) > 1:
        return packed_attention(query, key, value, segments, causal, "cudnn")
    if segments is not None:
        bias = jnp.where(same_segment(segments), 0, HIDDEN[query.dtype.name]).astype(query.dtype)
    return fused_attention(query, key, value, bias, causal)


ATTENTION_FORMS: MappingProxyType[str, Callable[..., Array]] = MappingProxyType(
    {
        "auto": auto_attention,
        "cudnn": cudnn_attention,
        "einsum": einsum_attention,
        "flash": flash_attention,
    }
)
