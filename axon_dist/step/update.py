"""Between gradients and the next state: clipping, and undoing what is not finite."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import optax

from ..core.typing import Array, Batch, PyTree
from ..ops.precision import GradScaler, all_finite, clip_by_global_norm, keep_if
from ..optim.wrappers import metrics_of
from .batch import Placed
from .global_view import global_gradients
from .local_view import local_gradients
from .objective import GradientFn, GradientResult
from .options import LOSS_SCALE, StepOptions
from .parts import SHARED, own_and_given
from .pipeline_view import pipeline_gradients
from .spec import StepSpec
from .state import FLAG, TrainState


def clip(grads: PyTree, options: StepOptions) -> tuple[PyTree, dict[str, Array]]:
    """Scales gradients down to the largest norm allowed, if there is one.

    Args:
        grads: reduced, in global view, in the dtypes of the parameters.
        options: `clip_norm`, and whether `grad_norm` is among the metrics.

    Returns:
        The gradients, and the norm before clipping where it is wanted.
    """
    limit = options.clip_norm
    if limit is None and "grad_norm" not in options.metrics:
        return grads, {}
    clipped, norm = clip_by_global_norm(grads, limit)
    return clipped, {"grad_norm": norm}


def are_finite(grads: PyTree, measured: dict[str, Array]) -> Array:
    """Whether every gradient is finite, read off their norm where that is known already.

    Args:
        grads: reduced, in global view, in the dtypes of the parameters.
        measured: what `clip` gave.
    """
    norm = measured.get("grad_norm")
    return all_finite(grads) if norm is None else jnp.isfinite(norm)


def average(decay: float | None, ema: PyTree, params: PyTree) -> PyTree:
    """The moving average of the parameters after an update.

        ema = decay * ema + (1 - decay) * params

    Args:
        decay: how much of it stays; None where there is no average.
        ema: before, in float32 or wider.
        params: after the update, in their own dtypes.

    Returns:
        The next one.

    Example:
        >>> float(average(0.75, {"w": jnp.ones(())}, {"w": jnp.zeros(())})["w"])
        0.75
    """
    if decay is None:
        return ema
    return jax.tree.map(lambda e, p: decay * e + (1 - decay) * p.astype(e.dtype), ema, params)


def first_average(decay: float | None, params: PyTree) -> PyTree:
    """The average that a run starts with: the first parameters, in float32 or wider."""
    if decay is None:
        return None

    # Half precision would round away the small steps that an average is made of. A copy, since a
    # state gives the memory of all its arrays to the next.
    def wide(p):
        return jnp.array(p, jnp.promote_types(p.dtype, jnp.float32), copy=True)

    return jax.tree.map(wide, params)


def skip_overflow(
    scaler: GradScaler, finite: Array, new: TrainState, old: TrainState
) -> TrainState:
    """Keeps the old state where a gradient is not finite, and adjusts the scale.

    Args:
        scaler: the loss scale.
        finite: whether the gradients are.
        new: the state that the step would lead to.
        old: the state that it started from.

    Returns:
        The state that it leads to; counts of random draws advance either way.
    """
    kept = _update_if(finite, new, old)
    return dataclasses.replace(kept, scaler=scaler.update(old.scaler, finite))


def undo_nonfinite(
    options: StepOptions,
    loss: Array,
    finite: Array,
    new: TrainState,
    old: TrainState,
    held: Array | None,
) -> tuple[TrainState, Array]:
    """Keeps the old state where the loss or a gradient is not finite.

    Gradients that overflow under a loss scale are not counted until the scale is at its lowest.

    Args:
        options: what to do then, and the loss scale.
        loss: the mean loss of the batch.
        finite: whether the gradients are.
        new: the state that the step would lead to.
        old: the state that it started from.
        held: whether a step before was not finite, where the policy keeps the state from then on.

    Returns:
        The state that it leads to, and a boolean scalar: whether it was kept. Skipped steps count
        as steps, held ones never happened.
    """
    lost = ~finite
    if options.scaler is not None:
        lost &= old.scaler.scale <= options.scaler.min_scale
    lost |= ~jnp.isfinite(loss)
    if not options.holds:
        return _update_if(~lost, new, old), lost
    lost = lost if held is None else lost | held
    return keep_if(~lost, new, old), lost


def _update_if(applies: Array, new: TrainState, old: TrainState) -> TrainState:
    """The new state, without its update where that does not apply; random counts advance."""

    def is_float(x):
        return jnp.issubdtype(x.dtype, jnp.inexact)

    def kept(n, o):
        return jnp.where(applies, n, o) if is_float(n) else n

    return dataclasses.replace(
        new,
        params=keep_if(applies, new.params, old.params),
        opt_state=keep_if(applies, new.opt_state, old.opt_state),
        ema=keep_if(applies, new.ema, old.ema),
        buffers=jax.tree.map(kept, new.buffers, old.buffers),
    )


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
        result = other(params, frozen, buffers, batch, scale)
        return result if found.complete is None else found.complete(result)

    return gradients


def _in_view(spec: StepSpec, is_local: bool) -> GradientFn:
    if spec.strategy.pipeline is not None:
        return pipeline_gradients(spec)
    return local_gradients(spec) if is_local else global_gradients(spec)


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
        measured |= metrics_of(opt_state)
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
