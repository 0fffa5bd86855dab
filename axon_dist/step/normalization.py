"""BatchNorm inside a manual region: statistics of the global batch, or of each rank alone."""

from __future__ import annotations

from collections.abc import Iterator

from flax import nnx

from ..core.errors import UnsupportedError


def synchronise_statistics(model: nnx.Module, axes: tuple[str, ...]) -> None:
    """Makes every BatchNorm of a model average its statistics over mesh axes, in place.

    Equals BatchNorm on the whole batch on one device; PyTorch calls it SyncBatchNorm.

    Args:
        model: a model merged inside `shard_map`.
        axes: the mesh axes that split the batch.

    Raises:
        UnsupportedError: when the model keeps batch statistics in a module of its own.
    """
    owned: set[int] = set()
    for module in _batch_norms(model):
        module.axis_name = axes  # type: ignore[assignment]
        owned.update(id(variable) for variable in (module.mean, module.var))
    for path, variable in nnx.iter_graph(model):
        if isinstance(variable, nnx.BatchStat) and id(variable) not in owned:
            raise UnsupportedError(
                f"{'/'.join(map(str, path))} holds batch statistics outside nnx.BatchNorm, which "
                "cannot be averaged over the ranks from outside. Use nnx.BatchNorm, or reduce "
                'the gradients of each microbatch: Reduction(per="microbatch")'
            )


def _batch_norms(model: nnx.Module) -> Iterator[nnx.BatchNorm]:
    for _, module in nnx.iter_modules(model):
        if isinstance(module, nnx.BatchNorm):
            yield module
