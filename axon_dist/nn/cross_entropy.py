"""Cross-entropy over logits that are split by vocabulary: no rank ever holds them whole."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from ..core.errors import DivisibilityError
from ..core.reduction import all_max, all_sum, varying
from ..core.typing import Array
from ..mesh import ProcessGroup
from ..sharding import spec_axes
from .layout import Axes, Layout
from .linear import check_divides, is_manual, pinned, split_axis


def vocab_parallel_cross_entropy(
    logits: Array, labels: Array, group: ProcessGroup | None = None
) -> Array:
    """Computes `logsumexp(logits) - logits[label]` in float32, the classes split over a group.

    The ranks exchange three numbers per position, the largest logit, the sum of exponentials and
    the logit of the label: bytes of the order of the labels, never of the vocabulary.

    Args:
        logits: `[..., V]`, as a column layer or `VocabParallelEmbedding.attend` leaves them.
        labels: integers `[...]` in `[0, V)`.
        group: the ranks that split the classes; None for whole logits.

    Returns:
        Losses `[...]` in nats, float32, whole on every rank.

    Raises:
        DivisibilityError: when the classes do not divide over the group.

    Example:
        >>> float(vocab_parallel_cross_entropy(jnp.zeros((1, 4)), jnp.array([2]))[0])
        1.3862943649291992
    """
    axis = split_axis(group)
    if not is_manual(axis):
        check_divides("the number of classes", logits.shape[-1], group)
        return _cross_entropy(pinned(logits.astype(jnp.float32), group, -1), labels, 0, None)
    assert axis is not None
    start = jax.lax.axis_index(axis) * logits.shape[-1]
    return _cross_entropy(logits.astype(jnp.float32), labels, start, axis)


def linear_cross_entropy(
    hidden: Array,
    kernel: Array,
    labels: Array,
    layout: Layout,
    *,
    vocab: str | None = None,
    num_chunks: int = 1,
) -> Array:
    """Cross-entropy of `hidden @ kernel`, a chunk of the positions at a time.

    Only one chunk's logits exist at once, forward and backward. The loop runs inside one
    `shard_map`, so that the kernel is whole before it and its gradient is reduced after it: a loop
    that the compiler partitions gathers and reduces the kernel once per chunk.

    Args:
        hidden: `[B, T, D]`.
        kernel: `[D, V]`.
        labels: integers `[B, T]` in `[0, V)`.
        layout: where activations lie.
        vocab: the mesh axis that splits the columns of the kernel; None for none.
        num_chunks: how many chunks the positions of a rank are cut into.

    Returns:
        Losses `[B, T]` in nats, float32.

    Raises:
        DivisibilityError: when positions or classes do not divide.
    """
    columns: Axes = () if vocab is None else (vocab,)
    spec = layout.spec(hidden.shape)
    positions = PartitionSpec(*spec[:2])
    columns_spec = PartitionSpec(None, *columns)
    layout.spec((1, kernel.shape[-1]), columns)

    def local(hidden: Array, kernel: Array, labels: Array) -> Array:
        if hidden.shape[1] % num_chunks:
            raise DivisibilityError(
                f"{hidden.shape[1]} positions per rank do not divide into {num_chunks} chunks; "
                "choose a divisor"
            )
        # Marked as this rank's own, so that its gradient stays local until here.
        kernel = varying(kernel, spec_axes(positions))
        start = 0 if vocab is None else jax.lax.axis_index(vocab) * kernel.shape[-1]

        @jax.checkpoint
        def chunk(_, piece):
            logits = (piece[0] @ kernel).astype(jnp.float32)
            return None, _cross_entropy(logits, piece[1], start, vocab)

        cut = lambda x: x.reshape(x.shape[0], num_chunks, -1, *x.shape[2:]).swapaxes(0, 1)
        _, losses = jax.lax.scan(chunk, None, (cut(hidden), cut(labels)))
        return losses.swapaxes(0, 1).reshape(labels.shape)

    mapped = layout.mapped(local, (spec, columns_spec, positions), positions)
    return mapped(hidden, kernel, labels)


def _cross_entropy(logits: Array, labels: Array, start: Array | int, axis: str | None) -> Array:
    """Cross-entropy of one rank's classes, which begin at `start`; whole without an axis."""
    total = lambda x: x if axis is None else all_sum(x, axis)
    largest = jax.lax.stop_gradient(logits.max(-1))
    largest = largest if axis is None else all_max(largest, axis)
    exponentials = total(jnp.exp(logits - largest[..., None]).sum(-1))
    classes = jax.lax.broadcasted_iota(labels.dtype, logits.shape, logits.ndim - 1) + start
    chosen = total(jnp.where(classes == labels[..., None], logits, 0.0).sum(-1))
    return jnp.log(exponentials) + largest - chosen
