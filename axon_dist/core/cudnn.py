"""cuDNN's fused attention, traced for the target machine.

Whether it runs follows from dtypes, shapes and the target's chip. JAX's own call asks the process
that traces whether cuDNN is installed and which GPU it has, so that a step for
another machine would be traced differently where no CUDA is installed.
"""

from __future__ import annotations

import functools
import inspect
from types import MappingProxyType

import jax
import jax.numpy as jnp

from .compat import fused_attention_stablehlo as kernels
from .typing import Array, Leaf

MOST_FEATURES = 256
"""The largest head, on Hopper and later chips."""

MOST_BEFORE_HOPPER = 128
"""The largest head on chips before."""

HIDDEN: MappingProxyType[str, float] = MappingProxyType(
    {"bfloat16": -(2.0**41), "float16": -(2.0**15)}
)
"""What is added to a score that is not seen: large, and cuDNN can subtract two of it (JAX's)."""


def cudnn_obstacle(query: Leaf, has_bias: bool = False) -> str | None:
    """Says why cuDNN cannot compute attention of these arrays, or None if it can.

    Args:
        query: `[B, T, H, K]`, or its shape and dtype; keys and values are alike.
        has_bias: whether a mask or a bias is added to the scores.

    Example:
        >>> cudnn_obstacle(jax.ShapeDtypeStruct((1, 8, 2, 64), jnp.float32))
        'it takes bfloat16 and float16, and got float32.'
    """
    length, features = query.shape[1], query.shape[-1]
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
        value: likewise.
        bias: `[B, 1, T, T]`, added to the scores, a constant; None for none.
        causal: position t sees positions 0 to t.

    Returns:
        `[B, T, H, K]`; it can be lowered for NVIDIA GPUs alone.
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
    # The bias is made of integers; nothing is differentiated by it.
    return *gradients, None


cudnn_attention.defvjp(_forward, _backward)


def cudnn_attention_forward(
    query: Array, key: Array, value: Array, bias: Array | None, causal: bool, keeps_weights: bool
) -> tuple[Array, ...]:
    """The forward kernel of cuDNN's attention, asked of no process whether it has cuDNN.

    The public call asks that, and scrambles the logarithms of the weights besides: it gives them as
    `[B, T, H]` where the kernel wrote `[B, H, T]`.

    Args:
        query: `[B, T, H, K]` in bfloat16 or float16.
        key: `[B, S, N, K]`.
        value: likewise.
        bias: `[B, 1, T, S]`, added to the scores; None for none.
        causal: position t sees positions 0 to t.
        keeps_weights: whether the logarithms of the weights are given too.

    Returns:
        `[B, T, H, K]`, and float32 `[B, H, T]` where they are kept.
    """
    outputs = kernels._dot_product_attention_fwd_p_wrapper.bind(
        *_cudnn_operands(query, key, value, bias),
        **_cudnn_parameters(query, bias, causal),
        is_training=keeps_weights,
    )
    return tuple(outputs[: 1 + keeps_weights])


def _cudnn_operands(
    query: Array, key: Array, value: Array, bias: Array | None
) -> tuple[Array, ...]:
    """The arrays of a call: no lengths, offsets or pages."""
    unused = jnp.zeros(0, query.dtype)
    return query, key, value, unused if bias is None else bias, *[unused] * 6


def _cudnn_parameters(query: Array, bias: Array | None, causal: bool) -> dict[str, object]:
    # Since 0.11 a score may be changed by a function.
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
    """The backward kernel of cuDNN by itself, with the weights that the caller names.

    Args:
        query: as of `cudnn_attention`, like the others up to `causal`.
        key: likewise.
        value: likewise.
        bias: likewise.
        causal: likewise.
        log_weight: float32 `[B, H, T]`, may count more keys than those given.
        out: `[B, T, H, K]`, the result with all of those keys.
        cotangent: of that result.

    Returns:
        The gradients of queries, keys and values.
    """
    gradients = kernels._dot_product_attention_bwd_p_wrapper.bind(
        *_cudnn_operands(query, key, value, bias),
        log_weight,
        out,
        cotangent,
        **_cudnn_parameters(query, bias, causal),
    )
    return tuple(gradients[:3])
