"""cuDNN's fused attention, traced for the target machine.

Whether it is used depends only on dtypes, shapes and the target's chip. JAX's public call instead
asks the tracing process whether cuDNN is installed and which GPU it has. A step for another machine
would then trace differently on a host without CUDA.
"""

from __future__ import annotations

import functools
import inspect
from types import MappingProxyType

import jax
import jax.numpy as jnp

from .compat import cudnn_operations
from .compat import fused_attention_stablehlo as kernels
from .typing import Array, Leaf

MOST_FEATURES = 256
"""The largest head size on Hopper and later chips."""

MOST_BEFORE_HOPPER = 128
"""The largest head size on earlier chips."""

HIDDEN: MappingProxyType[str, float] = MappingProxyType(
    {"bfloat16": -(2.0**41), "float16": -(2.0**15)}
)
"""Added to masked scores, as in JAX: large, yet cuDNN can subtract two of them."""


def cudnn_obstacle(query: Leaf, has_bias: bool = False) -> str | None:
    """Returns why cuDNN cannot compute attention of these arrays, or None if it can.

    Args:
        query: `[B, T, H, K]`, or its shape and dtype; keys and values have the same dtype.
        has_bias: whether a mask or a bias is added to the scores.

    Example:
        >>> cudnn_obstacle(jax.ShapeDtypeStruct((1, 8, 2, 64), jnp.float32))
        'it takes bfloat16 and float16, and got float32.'
    """
    length = query.shape[1]
    features = query.shape[-1]
    if query.dtype not in (jnp.bfloat16, jnp.float16):
        return f"it takes bfloat16 and float16, and got {query.dtype}."
    if features % 8 or features > MOST_FEATURES:
        return f"heads must be a multiple of 8 and at most {MOST_FEATURES}, and got {features}."
    if has_bias and length % 2:
        return f"with segments the length must be even, and got {length}."
    return None


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def cudnn_attention(
    query: Array, key: Array, value: Array, bias: Array | None, causal: bool
) -> Array:
    """Computes attention with cuDNN's kernels, forward and backward.

    Args:
        query: `[B, T, H, K]` in bfloat16 or float16.
        key: `[B, T, N, K]`.
        value: `[B, T, N, K]`.
        bias: `[B, 1, T, T]`, a constant added to the scores, or None.
        causal: position t sees positions 0 to t.

    Returns:
        `[B, T, H, K]`; it can be lowered only for NVIDIA GPUs.
    """
    (out,) = cudnn_attention_forward(query, key, value, bias, causal, keeps_weights=False)
    return out


def _forward(query: Array, key: Array, value: Array, bias: Array | None, causal: bool):
    out, log_weight = cudnn_attention_forward(query, key, value, bias, causal, keeps_weights=True)
    return out, (query, key, value, bias, log_weight, out)


def _backward(causal: bool, residuals: tuple, cotangent: Array):
    query, key, value, bias, log_weight, out = residuals
    gradients = cudnn_attention_gradients(
        query, key, value, bias, causal, log_weight, out, cotangent
    )
    # The bias is computed from integers, so it has no gradient.
    return *gradients, None


cudnn_attention.defvjp(_forward, _backward)


def cudnn_attention_forward(
    query: Array, key: Array, value: Array, bias: Array | None, causal: bool, keeps_weights: bool
) -> tuple[Array, ...]:
    """Calls cuDNN's forward attention kernel without asking this process whether it has cuDNN.

    JAX's public call asks, and it also returns the logsumexp with a wrong layout: it labels as
    `[B, T, H]` what the kernel wrote as `[B, H, T]`.

    Args:
        query: `[B, T, H, K]` in bfloat16 or float16.
        key: `[B, S, N, K]`.
        value: `[B, S, N, K]`.
        bias: `[B, 1, T, S]`, added to the scores, or None.
        causal: position t sees positions 0 to t.
        keeps_weights: whether to return the logsumexp too.

    Returns:
        `[B, T, H, K]`, and with `keeps_weights` the logsumexp, float32 `[B, H, T]`.
    """
    forward, _ = cudnn_operations()
    outputs = forward.bind(
        *_cudnn_operands(query, key, value, bias),
        **_cudnn_parameters(query, bias, causal),
        is_training=keeps_weights,
    )
    return tuple(outputs[: 1 + keeps_weights])


def _cudnn_operands(
    query: Array, key: Array, value: Array, bias: Array | None
) -> tuple[Array, ...]:
    """The array operands of a kernel call, without lengths, offsets or pages."""
    unused = jnp.zeros(0, query.dtype)
    return query, key, value, unused if bias is None else bias, *[unused] * 6


def _cudnn_parameters(query: Array, bias: Array | None, causal: bool) -> dict[str, object]:
    # JAX 0.11 added the parameter score_mod.
    names = inspect.signature(kernels.dot_product_attention).parameters
    more = {"score_mod": None} if "score_mod" in names else {}
    return {
        "scale": query.shape[-1] ** -0.5,
        "seed": 42,  # dropout is off
        "dropout_rate": 0.0,
        "variadic_args": (bias is not None, False),
        "mask_type": kernels.MaskType.CAUSAL if causal else kernels.MaskType.NO_MASK,
        "layout": kernels.AttentionLayout.BTNH.value,
        "sliding_window_length": None,
        **more,
    }


def cudnn_attention_gradients(
    query: Array,
    key: Array,
    value: Array,
    bias: Array | None,
    causal: bool,
    log_weight: Array,
    out: Array,
    cotangent: Array,
) -> tuple[Array, Array, Array]:
    """Calls cuDNN's backward attention kernel with a given logsumexp.

    Args:
        query: as in `cudnn_attention`.
        key: as in `cudnn_attention`.
        value: as in `cudnn_attention`.
        bias: as in `cudnn_attention`.
        causal: as in `cudnn_attention`.
        log_weight: float32 `[B, H, T]`, the logsumexp; it may cover more keys than `key` has.
        out: `[B, T, H, K]`, the attention output over all of those keys.
        cotangent: the cotangent of `out`.

    Returns:
        The gradients of queries, keys and values.
    """
    _, backward = cudnn_operations()
    gradients = backward.bind(
        *_cudnn_operands(query, key, value, bias),
        log_weight,
        out,
        cotangent,
        **_cudnn_parameters(query, bias, causal),
    )
    return tuple(gradients[:3])
