"""Summing the gradients of ranks, inside `shard_map`: one by one, or in buckets."""

from __future__ import annotations

import jax

from ..collectives import plan_buckets, reduce_buckets
from ..core.reduction import all_sum, on_wire
from ..core.typing import PyTree
from .gather import reduce_by
from .strategy import Reduction


def reduce_tree(
    grads: PyTree, specs: PyTree, axes: tuple[str, ...], reduction: Reduction
) -> PyTree:
    """Sums gradients over ranks and leaves each rank its shards.

    Args:
        grads: this rank's addends, whole.
        specs: where the sums shall lie; buckets are for sums that every rank holds whole.
        axes: the axes to sum over.
        reduction: in what dtype, and in which groups.
    """
    if reduction.bucket_capacity is None:
        return jax.tree.map(lambda g, spec: reduce_by(g, spec, axes, reduction.dtype), grads, specs)
    # Buckets hold one dtype each, so what is sent is cast before it is packed.
    wire = jax.tree.map(lambda g: on_wire(g, reduction.dtype), grads)
    buckets = plan_buckets(wire, reduction.bucket_capacity)
    total = lambda x: all_sum(x, axes)
    reduced = reduce_buckets(wire, buckets, total, strategy=reduction.sync)
    return jax.tree.map(lambda r, g: r.astype(g.dtype), reduced, grads)
