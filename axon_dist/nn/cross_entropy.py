"""Cross-entropy over logits that are split by vocabulary: no rank ever holds them whole."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ..core.reduction import all_max, all_sum
from ..core.typing import Array
from ..mesh import ProcessGroup
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


def _cross_entropy(logits: Array, labels: Array, start: Array | int, axis: str | None) -> Array:
    """Cross-entropy of one rank's classes, which begin at `start`; whole without an axis."""
    total = lambda x: x if axis is None else all_sum(x, axis)
    largest = jax.lax.stop_gradient(logits.max(-1))
    largest = largest if axis is None else all_max(largest, axis)
    exponentials = total(jnp.exp(logits - largest[..., None]).sum(-1))
    classes = jax.lax.broadcasted_iota(labels.dtype, logits.shape, logits.ndim - 1) + start
    chosen = total(jnp.where(classes == labels[..., None], logits, 0.0).sum(-1))
    return jnp.log(exponentials) + largest - chosen
