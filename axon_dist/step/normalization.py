"""Statistics of samples inside a manual region: of the global batch, or of each rank alone."""

from __future__ import annotations

from collections.abc import Iterator

from flax import nnx

from ..core.typing import Path
from ..parallel import sum_over_ranks, sums_samples


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
