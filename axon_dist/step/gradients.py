"""Which of the three views a strategy's gradients are computed in."""

from __future__ import annotations

from .global_view import global_gradients
from .local_view import local_gradients
from .objective import GradientFn
from .pipeline_view import pipeline_gradients
from .spec import StepSpec


def gradient_function(spec: StepSpec) -> GradientFn:
    """Builds the function that computes mean gradients, in the view that the strategy needs.

    Args:
        spec: the step.

    Returns:
        The function; gradients leave it in stored form, where their moments lie.
    """
    if spec.strategy.pipeline is not None:
        return pipeline_gradients(spec)
    return local_gradients(spec) if spec.is_local else global_gradients(spec)
