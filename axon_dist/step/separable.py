"""Whether the parts of a batch give a loss, each on its own: read from the traced loss."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from ..core.errors import AxonDistError
from ..core.tree import leaves_with_paths
from ..core.typing import Batch, LossFn, PyTree
from ..core.weighted import Weighted
from ..program.sample_use import OutputUse, SampleUse, Use, use_of
from ..program.samples import RANKS, follow_samples
from .objective import evaluate
from .parts import ModelParts


def sample_use(
    parts: ModelParts, loss_fn: LossFn, batch: Batch, sizes: tuple[int, int]
) -> SampleUse:
    """What a loss function makes of the samples of its batch, read from its program.

    BatchNorm counts as one that averages its statistics over all parts, as the views that split
    the batch have it do.

    Args:
        parts: the model.
        loss_fn: the user's loss.
        batch: leaves of shape [B, ...], arrays or shapes; B does not matter.
        sizes: the numbers of samples of a part and of a whole, the latter a multiple.

    Returns:
        What it is.
    """
    shapes = [(leaf.shape[1:], leaf.dtype) for leaf in jax.tree.leaves(batch)]
    names: list[str] = []

    def trace(count: int) -> Any:
        leaves = [jax.ShapeDtypeStruct((count, *shape), dtype) for shape, dtype in shapes]
        given = jax.tree.unflatten(jax.tree.structure(batch), leaves)
        run, found = _forward(parts, loss_fn)
        jaxpr = jax.make_jaxpr(run)(parts.params, parts.buffers, given)
        names[:] = found
        return jaxpr

    whole = trace(sizes[1])
    try:
        part = trace(sizes[0])
    except AxonDistError:
        raise
    except Exception as error:  # Whatever the user's loss does with fewer samples.
        why = f"cannot be computed of {sizes[0]} samples alone: {str(error)[:200]}"
        return SampleUse(OutputUse(Use.COUPLED, 0.0, why), {}, {})
    traces = {sizes[0]: part, sizes[1]: whole}
    values = follow_samples(lambda count: traces[count], sizes, len(shapes))
    paths = [path for path, _ in leaves_with_paths(parts.buffers)]
    total, weight, *rest = values
    metrics = {name: tuple(rest[2 * i : 2 * i + 2]) for i, name in enumerate(names)}
    buffers = rest[2 * len(names) :]
    return use_of(total, weight, metrics, dict(zip(paths, buffers, strict=True)))


def _forward(parts: ModelParts, loss_fn: LossFn) -> tuple[Any, list[str]]:
    """(params, buffers, batch) -> total, weight, those of each metric, buffers; and the names."""
    names: list[str] = []
    norms = list(_batch_norms(parts.abstract))

    def prepare(model: nnx.Module) -> None:
        for module in _batch_norms(model):
            module.axis_name = (RANKS,)  # type: ignore[assignment]

    def run(params: PyTree, buffers: PyTree, batch: Batch) -> list[Any]:
        outcome = evaluate(parts, loss_fn, params, buffers, batch, prepare if norms else None)
        names[:] = sorted(outcome.metrics)
        numbers = [outcome.loss, *(outcome.metrics[name] for name in names)]
        pairs = [x if isinstance(x, Weighted) else Weighted(x, 1.0) for x in numbers]
        scalars = [jnp.asarray(x) for pair in pairs for x in (pair.total, pair.weight)]
        return [*scalars, *jax.tree.leaves(outcome.buffers)]

    if not norms:
        return run, names
    whole = PartitionSpec()
    mesh = AbstractMesh((2,), (RANKS,), axis_types=(AxisType.Auto,))
    return jax.shard_map(run, mesh=mesh, in_specs=whole, out_specs=whole, check_vma=False), names


def _batch_norms(model: nnx.Module) -> Iterable[nnx.BatchNorm]:
    return [m for _, m in nnx.iter_modules(model) if isinstance(m, nnx.BatchNorm)]
