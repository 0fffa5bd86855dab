"""The Pallas kernel for attention on TPUs that ships with JAX, made for a shape."""

from __future__ import annotations

import jax
from jax.experimental.pallas.ops.tpu.splash_attention import (
    splash_attention_kernel,
    splash_attention_mask,
)

from .errors import UnsupportedError
from .typing import Array

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
    """Makes the kernel of one sample.

    Args:
        length: positions of queries and of keys, a multiple of 128.
        num_heads: heads of queries.
        causal: position t sees positions 0 to t; otherwise all.
        interpret: run in Python on any platform, slowly, for tests.
        save_residuals: give the logarithms of the weights besides, and no derivative.

    Returns:
        (queries `[H, T, K]`, scaled, keys and values `[N, T, K]`, maybe `SegmentIds`) ->
        `[H, T, K]`, and with residuals a tuple of `[H, T]` besides.

    Raises:
        UnsupportedError: the length is not a multiple of 128.
    """
    block = next((size for size in _BLOCKS if length % size == 0), None)
    if block is None:
        raise UnsupportedError(
            f"attention='flash' on a sequence of {length}: the kernel works in blocks of 128, so "
            "the length must be a multiple of 128; change it, or use attention='auto'."
        )
    keys = next(size for size in _KEY_BLOCKS if length % size == 0)
    # One backward kernel forms the scores again once, where two form them twice; it leaves an
    # addend of the queries' gradient for every block of keys, which must stay few.
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
    """Says why the kernel cannot run where this is traced, or None if it can.

    It needs a TPU that is compiled for, of whose mesh nothing is left to the compiler, which
    cannot partition it; and blocks of 128 positions.

    Args:
        query: `[B, T, H, K]`, as the caller has it.
    """
    mesh = jax.sharding.get_abstract_mesh()
    device = mesh.abstract_device
    if device is None or device.platform != "tpu":
        return "no TPU is compiled for."
    if any(mesh.shape[axis] > 1 for axis in mesh.axis_names if axis not in mesh.manual_axes):
        return "the compiler cannot partition a Pallas kernel over devices."
    return no_blocks(query.shape[1])


def no_blocks(length: int) -> str | None:
    """Says why a sequence cannot be cut into the kernel's blocks, or None if it can."""
    if length % _BLOCKS[-1]:
        return f"the length of {length} is no multiple of {_BLOCKS[-1]}."
    return None
