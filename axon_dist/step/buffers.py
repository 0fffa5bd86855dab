"""The buffers of a model on many ranks: one for all, or statistics that every rank keeps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from ..core.tree import is_key
from ..core.typing import PyTree
from ..parallel import Reduction
from .parts import own_and_given


def buffer_partition(buffers: PyTree, reduction: Reduction, axes: tuple[str, ...]) -> PyTree:
    """The specs of the buffers: whole, or one copy of the statistics per rank in dim 0."""
    whole = lambda _: PartitionSpec()
    if reduction.sync_buffers:
        return jax.tree.map(whole, buffers)
    return _of_ranks(lambda _: PartitionSpec(axes), buffers, whole)


def stack_buffers(buffers: PyTree, reduction: Reduction, num_ranks: int) -> PyTree:
    """Gives every rank its own copy of the statistics where they are not synchronised."""
    if reduction.sync_buffers:
        return buffers
    return _of_ranks(lambda x: jnp.broadcast_to(x, (num_ranks, *x.shape)), buffers)


def mean_buffers(buffers: PyTree, reduction: Reduction) -> PyTree:
    """The statistics to evaluate with: the average over the ranks' own."""
    if reduction.sync_buffers:
        return buffers
    return _of_ranks(lambda x: x.mean(0), buffers)


def _of_ranks(
    function: Callable[[Any], Any],
    buffers: PyTree,
    otherwise: Callable[[Any], Any] = lambda leaf: leaf,
) -> PyTree:
    """Maps over the statistics of the model, of which ranks may have their own."""
    own, given = own_and_given(buffers)
    one = lambda leaf: function(leaf) if _per_rank(leaf) else otherwise(leaf)
    return jax.tree.map(one, own) | jax.tree.map(otherwise, given)


def _per_rank(leaf: Any) -> bool:
    return not is_key(leaf) and jnp.issubdtype(leaf.dtype, jnp.inexact)


def own_buffers(buffers: PyTree, reduction: Reduction) -> PyTree:
    """The statistics of this rank, inside `shard_map`."""
    if reduction.sync_buffers:
        return buffers
    return _of_ranks(lambda x: x[0], buffers)
