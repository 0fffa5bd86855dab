"""Which of the three views a strategy's gradients are computed in."""

from __future__ import annotations

from typing import Any

from jax.sharding import Mesh

from ..core.typing import LossFn
from ..parallel import Reduction, Strategy
from .global_view import global_gradients
from .local_view import local_gradients
from .parts import ModelParts
from .pipeline_view import pipeline_gradients
from .storage import Storage


def gradient_function(
    parts: ModelParts,
    loss_fn: LossFn,
    strategy: Strategy,
    mesh: Mesh,
    storage: Storage,
    num_microbatches: int,
) -> Any:
    """Builds the function that computes mean gradients, in the view that the strategy needs.

    Args:
        parts: the model.
        loss_fn: the user's loss.
        strategy: the strategy, about the model's own leaves.
        mesh: the mesh.
        storage: how the state holds the parameters.
        num_microbatches: how many microbatches the batch is cut into.

    Returns:
        A function (stored params, buffers, batch, scale) -> (mean gradients, metrics, new buffers).
    """
    if strategy.pipeline is not None:
        return pipeline_gradients(parts, loss_fn, strategy, mesh, storage)
    compute = parts.dtype if strategy.precision is None else strategy.precision.compute
    # Without batch axes no rank has gradients of its own to hold back.
    has_ranks = bool(strategy.batch_axes)
    reduction = strategy.reduction or Reduction()
    is_local = has_ranks and reduction.is_local(num_microbatches, compute)
    build = local_gradients if is_local else global_gradients
    return build(parts, loss_fn, strategy, mesh, num_microbatches)
