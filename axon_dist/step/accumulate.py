"""Gradient accumulation: one scan over microbatches, equal to adding them up in a loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import jax
import jax.numpy as jnp

from ..core.typing import Batch, PyTree
from .objective import Sums

SumsFn: TypeAlias = Callable[[PyTree, PyTree, Batch], tuple[Sums, PyTree]]
"""(params, buffers, microbatch) -> (sums, new buffers)."""

LastFn: TypeAlias = Callable[[Sums, PyTree, PyTree, Batch], tuple[Sums, PyTree]]
"""(sums of those before, params, buffers, last microbatch) -> (sums of all, new buffers)."""


def accumulate(
    gradient: SumsFn,
    params: PyTree,
    buffers: PyTree,
    batch: Batch,
    num_microbatches: int,
    constrain: Callable[[PyTree], PyTree] = lambda grads: grads,
    last: LastFn | None = None,
) -> tuple[Sums, PyTree]:
    """Adds up the sums of every microbatch, threading the buffers through.

    Equals:

        for microbatch in batch:
            new, buffers = gradient(params, buffers, microbatch)
            sums = sums + new

    Args:
        gradient: differentiates one microbatch.
        params: the parameters, the same for every microbatch.
        buffers: statistics and random counts, changed by each microbatch in turn.
        batch: leaves of shape [num_microbatches, ...], or [...] when there is one.
        num_microbatches: how many.
        constrain: pins where accumulated gradients lie.
        last: takes the last microbatch apart from the others, with the sums of those, to the sums
            of all; None treats it as they are.

    Returns:
        The sums over all microbatches, and the buffers after the last.
    """
    if num_microbatches == 1:
        return gradient(params, buffers, batch)
    first = jax.tree.map(lambda leaf: leaf[0], batch)
    shapes, _ = jax.eval_shape(gradient, params, buffers, first)
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
    final = None
    if last is not None:
        batch, final = (jax.tree.map(lambda leaf, at=at: leaf[at], batch) for at in (slice(-1), -1))

    def body(carry: tuple[Sums, PyTree], microbatch: Batch) -> tuple[tuple[Sums, PyTree], None]:
        sums, buffers = carry
        with jax.named_scope("microbatch"):
            new, buffers = gradient(params, buffers, microbatch)
        total = sums + new
        return (Sums(constrain(total.grads), total.loss, total.metrics), buffers), None

    (sums, buffers), _ = jax.lax.scan(body, (zeros, buffers), batch)
    if last is None:
        return sums, buffers
    with jax.named_scope("last_microbatch"):
        return last(sums, params, buffers, final)
