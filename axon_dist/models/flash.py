"""Flash attention on TPUs: the Pallas splash kernel that ships with JAX, grouped."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel

from axon_dist.core.per_sample import per_sample
from axon_dist.core.splash import splash_kernel
from axon_dist.core.typing import Array


def flash_attention(
    query: Array,
    key: Array,
    value: Array,
    causal: bool = True,
    segments: Array | None = None,
    *,
    interpret: bool = False,
) -> Array:
    """Computes attention block by block without ever storing the scores.

    Online softmax of arXiv:2205.14135 as a TPU kernel: memory grows linearly with T. XLA cannot
    partition the kernel, so with several devices the call belongs inside `shard_map`. Lowering it
    for a CPU or GPU fails: choose `"auto"` there.

    Args:
        query: `[B, T, H, K]`, T a multiple of 128.
        key: `[B, T, N, K]`, every head shared by `H / N` query heads.
        value: `[B, T, N, K]`.
        causal: position t sees positions 0 to t; otherwise all.
        segments: integers `[B, T]`; a position sees those of its own alone. None for one segment.
        interpret: run the kernel in Python on any platform, slowly, for tests.

    Returns:
        `[B, T, H, K]` in the dtype of `query`.

    Raises:
        UnsupportedError: T is not a multiple of 128.
    """
    length, num_heads = query.shape[1:3]
    attend = per_sample(jax.vmap(splash_kernel(length, num_heads, causal, interpret)))
    query = query * query.shape[-1] ** -0.5
    query, key, value = (x.swapaxes(1, 2) for x in (query, key, value))
    more = () if segments is None else (splash_attention_kernel.SegmentIds(segments, segments),)
    return jnp.swapaxes(attend(query, key, value, *more), 1, 2)
