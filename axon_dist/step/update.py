"""Between gradients and the next state: clipping, and undoing what is not finite."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from ..core.typing import Array, PyTree
from ..ops.precision import GradScaler, all_finite, clip_by_global_norm, keep_if
from .options import StepOptions
from .state import TrainState


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
    wide = lambda p: jnp.array(p, jnp.promote_types(p.dtype, jnp.float32), copy=True)
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
    is_float = lambda x: jnp.issubdtype(x.dtype, jnp.inexact)
    kept = lambda n, o: jnp.where(applies, n, o) if is_float(n) else n
    return dataclasses.replace(
        new,
        params=keep_if(applies, new.params, old.params),
        opt_state=keep_if(applies, new.opt_state, old.opt_state),
        ema=keep_if(applies, new.ema, old.ema),
        buffers=jax.tree.map(kept, new.buffers, old.buffers),
    )
