"""The step as a pure function: gradients, clipping, the update, and what undoes it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import optax

from ..core.typing import Array
from .batch import Placed
from .gradients import gradient_function
from .nonfinite import FLAG
from .objective import GradientResult
from .options import LOSS_SCALE
from .parts import own_and_given
from .spec import StepSpec
from .state import TrainState
from .update import are_finite, average, clip, skip_overflow, undo_nonfinite

Gradients: TypeAlias = Callable[[TrainState, Placed], GradientResult]
"""(state, batch) -> mean gradients in the dtype of the parameters, metrics and new buffers."""

Take: TypeAlias = Callable[[TrainState, Placed, Array | None], tuple[TrainState, dict[str, Any]]]
"""(state, batch, flag of the step before) -> the next state, and metrics."""


def unscaled_gradients(spec: StepSpec) -> Gradients:
    """The gradients of a state's parameters, whatever their losses are scaled by.

    Args:
        spec: model, loss, optimizer, strategy, devices and options of the step.

    Returns:
        A pure function, to be traced.
    """
    scaler, gradient_fn = spec.options.scaler, gradient_function(spec)

    def gradients(state: TrainState, placed: Placed) -> GradientResult:
        scale = None if scaler is None else state.scaler.scale
        buffers = spec.parts.with_given(state.buffers, state.step, placed.shared)
        found = gradient_fn(state.params, state.frozen, buffers, placed.arrays, scale)
        grads = found.grads if scaler is None else scaler.unscale(found.grads, state.scaler)
        return found._replace(
            grads=jax.tree.map(lambda g, p: g.astype(p.dtype), grads, state.params),
            buffers=own_and_given(found.buffers)[0],
        )

    return gradients


def one_step(spec: StepSpec, gradients: Gradients) -> Take:
    """From one state to the next.

    Args:
        spec: model, loss, optimizer, strategy, devices and options of the step.
        gradients: from `unscaled_gradients`.

    Returns:
        A pure function of a state in device memory, to be traced.
    """
    options = spec.options

    def take(
        state: TrainState, placed: Placed, held: Array | None = None
    ) -> tuple[TrainState, dict[str, Any]]:
        grads, metrics, buffers = gradients(state, placed)
        clipped, measured = clip(grads, options)
        with jax.named_scope("optimizer"):
            updates, opt_state = spec.distributed(
                clipped, state.opt_state, state.params, value=metrics["loss"]
            )
            params = optax.apply_updates(state.params, updates)
        if "param_norm" in options.metrics:
            measured["param_norm"] = optax.tree.norm(params)
        new = dataclasses.replace(
            state,
            step=state.step + 1,
            params=params,
            opt_state=opt_state,
            buffers=buffers,
            ema=average(options.ema, state.ema, params),
        )
        if options.scaler is not None:
            new = skip_overflow(options.scaler, are_finite(grads, measured), new, state)
            measured[LOSS_SCALE] = new.scaler.scale
        if options.nonfinite is not None:
            loss, finite = metrics["loss"], are_finite(grads, measured)
            new, measured[FLAG] = undo_nonfinite(options, loss, finite, new, state, held)
        return new, {**metrics, **measured}

    return take
