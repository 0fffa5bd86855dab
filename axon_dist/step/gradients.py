"""Which of the three views a strategy's gradients are computed in."""

from __future__ import annotations

from typing import Any

from jax.sharding import Mesh

from ..core.typing import Array, Batch, PyTree
from ..parallel import Strategy
from .global_view import global_gradients
from .local_view import local_gradients
from .parts import ModelParts
from .pipeline_view import pipeline_gradients
from .separable import Separator
from .storage import Storage


def gradient_function(
    parts: ModelParts,
    separator: Separator,
    strategy: Strategy,
    mesh: Mesh,
    storage: Storage,
    num_microbatches: int,
) -> Any:
    """Builds the function that computes mean gradients, in the view that the strategy needs.

    Args:
        parts: the model.
        separator: knows the user's loss, and whether ranks may compute it on their own.
        strategy: the strategy, about the model's own leaves.
        mesh: the mesh.
        storage: how the state holds the parameters.
        num_microbatches: how many microbatches the batch is cut into.

    Returns:
        A function (stored params, buffers, batch, scale) -> (mean gradients, metrics, new buffers).
    """

    def gradients(params: PyTree, buffers: PyTree, batch: Batch, scale: Array | None) -> Any:
        found = separator.of(batch)
        if strategy.pipeline is not None:
            run = pipeline_gradients(parts, found.loss_fn, strategy, mesh, storage)
        else:
            build = local_gradients if found.is_per_rank else global_gradients
            run = build(parts, found.loss_fn, strategy, mesh, num_microbatches)
        return run(params, buffers, batch, scale)

    return gradients
