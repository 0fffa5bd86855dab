"""Which of the three views a strategy's gradients are computed in."""

from __future__ import annotations

from ..core.typing import Array, Batch, PyTree
from .global_view import global_gradients
from .local_view import local_gradients
from .objective import GradientFn, GradientResult
from .parts import SHARED
from .pipeline_view import pipeline_gradients
from .spec import StepSpec


def gradient_function(spec: StepSpec) -> GradientFn:
    """Builds the function that computes mean gradients, in the view that the strategy needs.

    A loss that couples samples cannot be computed rank by rank, which only the program for a batch
    shows: the view is then another one.

    Args:
        spec: model, loss, optimizer, strategy, devices and options of the step.

    Returns:
        The function; gradients leave it in stored form, where their moments lie.
    """
    usual = _in_view(spec, spec.is_local)

    def gradients(
        params: PyTree, frozen: PyTree, buffers: PyTree, batch: Batch, scale: Array | None
    ) -> GradientResult:
        here = spec.with_shared(buffers.get(SHARED, {}))
        found = here.separator.of(batch)
        by_rank = found.is_per_rank and spec.is_local
        if here is spec and found.loss_fn is spec.loss_fn and by_rank == spec.is_local:
            return usual(params, frozen, buffers, batch, scale)
        other = _in_view(here.with_loss(found.loss_fn), by_rank)
        return other(params, frozen, buffers, batch, scale)

    return gradients


def _in_view(spec: StepSpec, is_local: bool) -> GradientFn:
    if spec.strategy.pipeline is not None:
        return pipeline_gradients(spec)
    return local_gradients(spec) if is_local else global_gradients(spec)
