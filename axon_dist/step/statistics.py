"""Sample statistics in buffers, such as BatchNorm's: averaged over ranks, or a copy per rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

from ..core.errors import warn
from ..core.reduction import mean_of_copies
from ..core.tree import is_key
from ..core.typing import Path, PyTree
from ..parallel import SUM_SAMPLES, Reduction, has_experts, sum_over_ranks
from .model_spec import split_inputs


def buffer_partition(buffers: PyTree, reduction: Reduction, axes: tuple[str, ...]) -> PyTree:
    """Returns the specs of buffers: replicated, or with one copy of the statistics per rank."""
    replicated = PartitionSpec()
    if reduction.sync_buffers:
        return jax.tree.map(lambda _: replicated, buffers)
    return _map_statistics(reduction, lambda _: PartitionSpec(axes), buffers, lambda _: replicated)


def stack_buffers(buffers: PyTree, reduction: Reduction, num_ranks: int) -> PyTree:
    """Gives every rank its own copy of the statistics, if they are not synchronised."""
    return _map_statistics(reduction, lambda x: jnp.broadcast_to(x, (num_ranks, *x.shape)), buffers)


def mean_buffers(buffers: PyTree, reduction: Reduction) -> PyTree:
    """Averages the ranks' own statistics, for evaluation."""
    return _map_statistics(reduction, mean_of_copies, buffers)


def rank_buffers(buffers: PyTree, reduction: Reduction) -> PyTree:
    """Returns the statistics of this rank, inside `shard_map`."""
    return _map_statistics(reduction, lambda x: x[0], buffers)


def _map_statistics(
    reduction: Reduction,
    function: Callable[[Any], Any],
    buffers: PyTree,
    otherwise: Callable[[Any], Any] = lambda leaf: leaf,
) -> PyTree:
    """Maps a function over the floating-point buffers that each rank has its own copy of."""
    buffers, inputs = split_inputs(buffers)

    def one(leaf: Any) -> Any:
        is_statistic = not is_key(leaf) and jnp.issubdtype(leaf.dtype, jnp.inexact)
        is_own = is_statistic and not reduction.sync_buffers
        return (function if is_own else otherwise)(leaf)

    return jax.tree.map(one, buffers) | jax.tree.map(otherwise, inputs)


def synchronise_statistics(model: nnx.Module, axes: tuple[str, ...]) -> None:
    """Makes statistics of the samples span all ranks, in place.

    BatchNorm then equals BatchNorm on the whole batch on one device (PyTorch's SyncBatchNorm), and
    a mixture of experts counts the tokens of the whole batch.

    Args:
        model: a model merged inside `shard_map`.
        axes: the mesh axes that split the batch.
    """
    for _, module in list(nnx.iter_modules(model)):
        if isinstance(module, nnx.BatchNorm):
            module.axis_name = axes  # type: ignore[assignment]
        elif hasattr(module, SUM_SAMPLES) and has_experts(module):
            sum_over_ranks(module, axes)


def has_statistics(model: nnx.Module) -> bool:
    """Whether `synchronise_statistics` would change a model, of arrays or shapes."""
    return any(
        isinstance(module, nnx.BatchNorm) or (hasattr(module, SUM_SAMPLES) and has_experts(module))
        for _, module in nnx.iter_modules(model)
    )


def warn_of_statistics(model: nnx.Module, num_microbatches: int) -> None:
    """Warns of BatchNorm modules that see one microbatch at a time instead of the whole batch.

    Args:
        model: a model, of arrays or shapes.
        num_microbatches: how many microbatches a batch is cut into.
    """
    paths = {id(module): keys for keys, module in nnx.iter_modules(model)}
    norms = [paths[id(m)] for m in _batch_norms(model) if not m.use_running_average]
    if norms:
        path = "/".join(map(str, norms[0])) or type(model).__name__
        warn(_of_parts(f"BatchNorm at {path!r}", num_microbatches, FREEZE))


FREEZE = "freeze the statistics with use_running_average=True"
"""Advice for `nnx.BatchNorm` alone, which has this argument."""


def warn_of_analysed_statistic(
    model: nnx.Module, path: Path, num_microbatches: int, place: str
) -> None:
    """Warns that a statistic is of one microbatch, not of the whole batch.

    Args:
        model: a model, of arrays or shapes.
        path: the buffer with the statistic.
        num_microbatches: how many microbatches a batch is cut into.
        place: the line that normalises by it, in brackets; or "".
    """
    parts = {"/".join(map(str, keys)): part for keys, part in nnx.iter_graph(model)}
    owner = path.rpartition("/")[0]
    if isinstance(parts.get(owner), nnx.BatchNorm):
        name = owner or type(model).__name__
        warn(_of_parts(f"BatchNorm at {name!r}{place}", num_microbatches, FREEZE))
        return
    # Other modules, such as those of Linen and the user's own, need not have that argument.
    what = f"the module with the statistic {path!r}{place}"
    warn(_of_parts(what, num_microbatches, "normalise by the statistics that the last step left"))


def _of_parts(what: str, num_microbatches: int, instead: str) -> str:
    return (
        f"{what} computes its statistics from each of {num_microbatches} microbatches, where one "
        "device would use the whole batch: losses and weights differ from one device's. Use one "
        f"microbatch, a per-sample normalisation such as nnx.LayerNorm, or {instead}"
    )


def statistics_outside_batch_norm(model: nnx.Module) -> list[Path]:
    """Returns the paths of the batch statistics in modules other than BatchNorm and SpectralNorm.

    Args:
        model: a model, of arrays or shapes.
    """
    owned = {id(variable) for norm in _batch_norms(model) for variable in (norm.mean, norm.var)}
    # The statistics of SpectralNorm depend on its weights only.
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
