"""Bytes of activations that a transformer keeps for its backward pass."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..ops.linear_loss import CHUNK_BYTES

if TYPE_CHECKING:
    from .shape import TransformerShape

CHUNKED_FROM = 16_384
"""From how many tokens on the loss makes the logits a chunk of positions at a time."""

# Korthikanti et al., section 4.1, in elements of size (s, b, h) and dropout masks of one byte each.
_SPLIT = 12  # Q, K, V and the input of the projection; the MLP's hidden (4) before and after GELU
_WHOLE = 4  # the inputs of the attention, of the MLP and of both norms
_MASKS = 2  # of the dropout after the attention and after the MLP
# Where what is made of products element by element is made again: the MLP's hidden once, before
# GELU; and beside the block's input what the attention's projection gives.
_SPLIT_REMADE = 8
_WHOLE_REMADE = 2


def layer_activations(
    shape: TransformerShape,
    microbatch: int,
    *,
    itemsize: int = 2,
    tp: int = 1,
    sequence: bool = False,
    flash: bool = True,
    remade: bool = False,
) -> int:
    """Bytes that one block keeps without recomputation: `s b h (34 + 5 a s / h)` in 16 bits.

    Tensor parallelism over `t` ranks leaves `s b h (10 + 24 / t + 5 a s / (h t))`, and sequence
    parallelism divides all of it by `t`. Fused attention keeps no scores, which drops the last
    term. A block whose weights are gathered keeps products, and makes what comes of them element
    by element again: `22 s b h` without scores.

    Args:
        shape: sizes `s`, `h`, `a`.
        microbatch: samples `b`.
        itemsize: bytes of an activation.
        tp: ranks `t` of tensor parallelism.
        sequence: whether norms and residuals are split over them too.
        flash: whether attention is fused.
        remade: whether only products are kept, as the blocks of FSDP do.

    Returns:
        Bytes per device.

    Example:
        >>> from axon_dist.planner import guess_shape
        >>> gpt3, sbh = guess_shape(175e9), 2048 * 12288
        >>> layer_activations(gpt3, 1) / sbh, layer_activations(gpt3, 1, flash=False) / sbh
        (34.0, 114.0)
        >>> layer_activations(gpt3, 1, tp=8) / sbh  # 10 + 24 / 8
        13.0

    Source: Korthikanti et al., Reducing Activation Recomputation, arXiv:2205.05198, equations 1-4.
    """
    sbh = shape.sequence_length * microbatch * shape.width
    split = float((_SPLIT_REMADE if remade else _SPLIT) * itemsize)
    if not flash:
        scores = shape.num_heads * shape.sequence_length / shape.width
        split += (2 * itemsize + 1) * scores
    whole = (_WHOLE_REMADE if remade else _WHOLE) * itemsize + _MASKS
    return round(sbh * (whole / (tp if sequence else 1) + split / tp))


def step_activations(
    shape: TransformerShape,
    microbatch: int,
    *,
    itemsize: int = 2,
    tp: int = 1,
    pp: int = 1,
    cp: int = 1,
    sequence: bool = False,
    flash: bool = True,
    remat: bool = False,
    remade: bool = False,
    in_flight: int = 0,
) -> int:
    """Bytes of activations at the peak of a step, on the fullest device.

    With recomputation each block keeps its input, `s b h`, and one block at a time is whole. A
    pipeline keeps the inputs of its stages for all microbatches in flight, and the blocks of its
    stage for one microbatch. The logits and their gradient are in float32.

    Args:
        shape: layers, widths and lengths of a transformer.
        microbatch: samples per device that are computed at a time.
        itemsize: bytes of an activation.
        tp: ranks of tensor parallelism.
        pp: stages of the pipeline.
        cp: ranks that split the positions.
        sequence: whether norms and residuals are split over the tp ranks.
        flash: whether attention is fused.
        remat: whether every block is recomputed in the backward pass.
        remade: whether a block that is not keeps products alone, as those of FSDP do; where it is,
            all of it is there while it is recomputed.
        in_flight: microbatches whose stage inputs wait for their backward pass.

    Returns:
        Bytes.

    Example:
        >>> from axon_dist.planner import guess_shape
        >>> shape = guess_shape(7e9)
        >>> step_activations(shape, 1) // 10**6, step_activations(shape, 1, remat=True) // 10**6
        (10660, 1282)
    """
    layers = -(-shape.num_layers // pp)
    block = layer_activations(
        shape,
        microbatch,
        itemsize=itemsize,
        tp=tp,
        sequence=sequence,
        flash=flash,
        remade=remade and not remat,
    )
    tokens = -(-shape.sequence_length // cp) * microbatch
    inputs = tokens * shape.width * itemsize // (tp if sequence else 1)
    block //= cp
    kept = layers * inputs + block if remat else layers * block
    logits = 4 * tokens * shape.vocab_size // tp
    if shape.vocab_size >= CHUNKED_FROM:
        # Products of a chunk in float32, and their gradient in the dtype of the compute.
        logits = min(logits, CHUNK_BYTES) * (4 + itemsize) // 4
    else:
        logits *= 2
    return kept + logits + in_flight * inputs
