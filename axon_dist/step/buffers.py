"""The buffers of a model on many ranks: one for all, or statistics that every rank keeps."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

from ..core.tree import is_key
from ..core.typing import Leaf, Path, PyTree
from ..parallel import Reduction, sum_over_ranks, sums_samples
from .parts import own_and_given


def buffer_partition(buffers: PyTree, reduction: Reduction, axes: tuple[str, ...]) -> PyTree:
    """The specs of the buffers: whole, or one copy of the statistics per rank in dim 0."""

    def whole(_):
        return PartitionSpec()

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

    def one(leaf):
        return function(leaf) if _per_rank(leaf) else otherwise(leaf)

    return jax.tree.map(one, own) | jax.tree.map(otherwise, given)


def _per_rank(leaf: Leaf) -> bool:
    return not is_key(leaf) and jnp.issubdtype(leaf.dtype, jnp.inexact)


def own_buffers(buffers: PyTree, reduction: Reduction) -> PyTree:
    """The statistics of this rank, inside `shard_map`."""
    if reduction.sync_buffers:
        return buffers
    return _of_ranks(lambda x: x[0], buffers)


def synchronise_statistics(model: nnx.Module, axes: tuple[str, ...]) -> None:
    """Makes what a model finds out about its samples that of the samples of all ranks, in place.

    Equals BatchNorm on the whole batch on one device, which PyTorch calls SyncBatchNorm, and a
    mixture of experts that counts the tokens of the whole batch.

    Args:
        model: a model merged inside `shard_map`.
        axes: the mesh axes that split the batch.

    """
    for module in _batch_norms(model):
        module.axis_name = axes  # type: ignore[assignment]
    sum_over_ranks(model, axes)


def has_statistics(model: nnx.Module) -> bool:
    """Whether a model has what `synchronise_statistics` changes; of arrays or shapes."""
    counts = any(sums_samples(module) for _, module in nnx.iter_modules(model))
    return counts or next(_batch_norms(model), None) is not None


def warn_of_statistics(model: nnx.Module, num_microbatches: int) -> None:
    """Warns of modules that see one microbatch where one device would see the whole batch.

    Args:
        model: a model, of arrays or shapes.
        num_microbatches: into how many a batch is cut.
    """
    named = {id(module): keys for keys, module in nnx.iter_modules(model)}
    found = [named[id(m)] for m in _batch_norms(model) if not m.use_running_average]
    if num_microbatches > 1 and found:
        warn_of_parts("/".join(map(str, found[0])) or type(model).__name__, num_microbatches)


def warn_of_parts(path: Path, num_microbatches: int) -> None:
    """Warns of statistics, by their path, of one microbatch and not of the whole batch."""
    warnings.warn(
        f"BatchNorm at {path!r} takes its statistics of each of {num_microbatches} "
        "microbatches, and one device would take them of the whole batch: losses and weights "
        "differ from one device's. Use one microbatch, a normalisation of each sample such as "
        "nnx.LayerNorm, or freeze the statistics with use_running_average=True",
        stacklevel=4,
    )


def own_statistics(model: nnx.Module) -> list[Path]:
    """The paths of the batch statistics that a model keeps in modules of its own.

    Args:
        model: a model, of arrays or shapes.
    """
    owned = {id(variable) for norm in _batch_norms(model) for variable in (norm.mean, norm.var)}
    # What SpectralNorm keeps is about its weights alone.
    spectral = (m for _, m in nnx.iter_modules(model) if isinstance(m, nnx.SpectralNorm))
    owned |= {id(variable) for module in spectral for _, variable in nnx.iter_graph(module)}
    return [
        "/".join(map(str, path))
        for path, variable in nnx.iter_graph(model)
        if isinstance(variable, nnx.BatchStat) and id(variable) not in owned
    ]


def _batch_norms(model: nnx.Module) -> Iterator[nnx.BatchNorm]:
    for _, module in nnx.iter_modules(model):
        if isinstance(module, nnx.BatchNorm):
            yield module
