"""From gradients to the next state: clipping, the update, and undoing nonfinite steps."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from jax.extend.core import ClosedJaxpr

from ..core.compat import eval_jaxpr
from ..core.errors import ConfigError, UnsupportedError
from ..core.tree import is_key, map_with_path, shapes_of, wide
from ..core.typing import Array, Metrics, Path, PyTree
from ..core.weighted import AUXILIARY
from ..ir.walk import needed_for
from ..ops.precision import GradScaler, NormOf, all_finite, clip_by_global_norm, keep_if
from ..optim.wrappers import Watched
from .batch import Placed
from .elastic import elastic_gradients, elastic_update, whole_layer_norms, whole_norm
from .global_view import global_gradients
from .local_view import check_normed_reads, local_gradients
from .model_spec import MEAN_WEIGHT, SHARED, split_inputs
from .objective import GradientArguments, GradientResult, evaluate, wide_number
from .options import FLAG, LOSS_SCALE, NORMS_BY_LAYER, OVERFLOW, StepOptions
from .pipeline_view import pipeline_gradients
from .plan import StepPlan
from .spec import StepSpec
from .state import TrainState


def clip(
    grads: PyTree,
    options: StepOptions,
    norm_of: NormOf = optax.tree.norm,
    needs_norm: bool = False,
) -> tuple[PyTree, dict[str, Array]]:
    """Clips gradients to the largest norm allowed, if there is a limit.

    Args:
        grads: reduced, in global view, in the dtypes of the parameters.
        options: `clip_norm`, and whether `grad_norm` is among the metrics.
        norm_of: computes the norm.
        needs_norm: whether the optimizer takes the norm, so that it is computed in any case.

    Returns:
        The gradients, and `grad_norm` before clipping if it was computed.
    """
    limit = options.clip_norm
    if limit is None and "grad_norm" not in options.metrics and not needs_norm:
        return grads, {}
    clipped, norm = clip_by_global_norm(grads, limit, norm_of)
    return clipped, {"grad_norm": norm}


def _watched_metrics(opt_state: PyTree) -> dict[str, Array]:
    """Returns the metrics that watched optimizers keep in their state."""
    found: dict[str, Array] = {}
    for node in jax.tree.leaves(opt_state, is_leaf=lambda x: isinstance(x, Watched)):
        found |= node.metrics if isinstance(node, Watched) else {}
    return found


def _norms_by_layer(plan: StepPlan, **trees: PyTree) -> dict[str, Array]:
    """Returns the norms of every layer of trees, such as `grad_norm/L` of `grad`, if asked for."""
    if NORMS_BY_LAYER not in plan.spec.options.metrics:
        return {}
    norms_of = plan.state_plan.layer_norms
    if plan.spec.options.is_elastic:
        norms_of = functools.partial(whole_layer_norms, plan.spec)
    return {
        f"{name}_norm/{layer}": norm
        for name, tree in trees.items()
        for layer, norm in norms_of(tree).items()
    }


def _check_names(observed: Metrics, metrics: Metrics) -> None:
    """Raises if the loss function returned a metric with the name of one that the step reports.

    Args:
        observed: what watched optimizers and the norms by layer report.
        metrics: what the loss function returned.
    """
    if taken := sorted(observed.keys() & metrics.keys()):
        raise ConfigError(
            f"loss_fn returned metrics named {', '.join(taken)}, which the step reports "
            "itself; give them other names, or leave them out",
            code="metric-of-the-optimizer",
        )


def _are_finite(grads: PyTree, measured: Metrics, options: StepOptions) -> Array:
    """Whether the gradients, and with `clip_norm` their norm, are finite.

    Args:
        grads: before clipping.
        measured: what `clip` has measured of them.
        options: `clip_norm`.
    """
    finite = all_finite(grads)
    if options.clip_norm is None:
        return finite
    # The norm of finite gradients can overflow, and clipping by it makes all of them 0.
    return finite & jnp.isfinite(measured["grad_norm"])


def average(decay: float, ema: PyTree, params: PyTree) -> PyTree:
    """Updates the moving average of the parameters.

        ema = decay * ema + (1 - decay) * params

    Args:
        decay: the weight of the old average.
        ema: the average before the update, in float32 or wider.
        params: the parameters after the update, in their own dtypes.

    Returns:
        The next average.

    Example:
        >>> float(average(0.75, {"w": jnp.ones(())}, {"w": jnp.zeros(())})["w"])
        0.75
    """
    return jax.tree.map(lambda e, p: decay * e + (1 - decay) * p.astype(e.dtype), ema, params)


def skip_overflow(
    scaler: GradScaler,
    finite: Array,
    new: TrainState,
    old: TrainState,
    random_state: frozenset[Path],
) -> TrainState:
    """Keeps the old state where a gradient is not finite, and adjusts the scale.

    Args:
        scaler: the loss scale.
        finite: whether the gradients are finite.
        new: the state after the update.
        old: the state before the step.
        random_state: the paths of the buffers that are keys and counts of random streams.

    Returns:
        The resulting state; random streams advance either way.
    """
    state = _update_if(finite, new, old, random_state)
    return dataclasses.replace(state, scaler=scaler.update(old.scaler, finite))


def undo_nonfinite(
    options: StepOptions,
    loss: Array,
    finite: Array,
    new: TrainState,
    old: TrainState,
    was_nonfinite: Array | None,
    random_state: frozenset[Path],
) -> tuple[TrainState, Array]:
    """Keeps the old state where the loss or a gradient is not finite.

    With a loss scale, gradients that overflow do not count as nonfinite until the scale has reached
    its minimum, because a lower scale may still make them finite.

    Args:
        options: the policy for nonfinite steps, and the loss scale.
        loss: the mean loss of the batch.
        finite: whether the gradients are finite.
        new: the state after the update.
        old: the state before the step.
        was_nonfinite: whether an earlier step was not finite, if the policy keeps the state from
            then on.
        random_state: the paths of the buffers that are keys and counts of random streams.

    Returns:
        The resulting state, and a boolean scalar: whether the step counts as nonfinite. `skip`
        counts a nonfinite step as a step; `stop` and `rollback` do not.
    """
    nonfinite = ~finite
    if options.scaler is not None:
        nonfinite &= old.scaler.scale <= options.scaler.min_scale
    nonfinite |= ~jnp.isfinite(loss)
    assert options.nonfinite is not None
    if not options.nonfinite.holds:
        return _update_if(~nonfinite, new, old, random_state), nonfinite
    nonfinite = nonfinite if was_nonfinite is None else nonfinite | was_nonfinite
    return keep_if(~nonfinite, new, old), nonfinite


def _update_if(
    applies: Array, new: TrainState, old: TrainState, random_state: frozenset[Path]
) -> TrainState:
    """Returns the new state, with the old values unless the update applies.

    Random streams and keys advance, so that the next step draws other numbers. All other buffers go
    back together: a total and its count, or a queue and its position, must cover the same steps.
    """

    def select(path: Path, n: Array, o: Array) -> Array:
        return n if path in random_state or is_key(n) else keep_if(applies, n, o)

    return dataclasses.replace(
        new,
        params=keep_if(applies, new.params, old.params),
        opt_state=keep_if(applies, new.opt_state, old.opt_state),
        ema=keep_if(applies, new.ema, old.ema),
        buffers=map_with_path(select, new.buffers, old.buffers),
    )


def mean_gradients(plan: StepPlan, arguments: GradientArguments) -> GradientResult:
    """Computes mean gradients in the view that the strategy needs.

    A loss that couples samples cannot be computed rank by rank, so it runs in global view. Only the
    traced program of a batch shows whether it does.

    Args:
        plan: the plan of the step.
        arguments: parameters, buffers, batch and scale.

    Returns:
        Gradients in stored form, sharded like their moments; metrics; and the new buffers.
    """
    spec = plan.spec
    arguments = with_mean_weight(spec, arguments)
    plan = plan.with_shared(arguments.buffers.get(SHARED, {}))
    separation = plan.separator.of(arguments.batch)
    check_normed_reads(plan, arguments.batch)
    if spec.strategy.pipeline is not None:
        view = pipeline_gradients
    elif spec.options.is_elastic:
        view = elastic_gradients
    else:
        is_local = separation.is_per_rank and spec.wants_local_view
        view = local_gradients if is_local else global_gradients
    if separation.loss_fn is not spec.loss_fn:
        plan = plan.with_loss(separation.loss_fn)
    result = view(plan, arguments)
    return result if separation.finalize is None else separation.finalize(result)


def with_mean_weight(spec: StepSpec, arguments: GradientArguments) -> GradientArguments:
    """Passes the mean weight of a sample to the parts of a batch, if the model adds to the loss.

    The term that the model adds is a mean over samples. In a microbatch it is weighted by the
    number of samples times the mean weight of a sample in the whole batch.

    Args:
        spec: the resolved arguments of the step.
        arguments: parameters, buffers, batch and scale.

    Raises:
        UnsupportedError: when the weight depends on parameters.
    """
    # The ranks of a pipeline cut even a single microbatch.
    of_ranks = spec.num_ranks if spec.strategy.pipeline is not None else 1
    is_cut = spec.num_microbatches * of_ranks > 1 or spec.options.is_elastic
    if not is_cut or not hasattr(spec.model_spec.abstract, AUXILIARY):
        return arguments
    batch = arguments.batch
    shared = arguments.buffers.get(SHARED, {})
    if spec.num_microbatches > 1:
        batch = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), batch)
    model_spec = dataclasses.replace(spec.model_spec, shared=shapes_of(shared))

    def weight_of(*inputs: PyTree) -> Array:
        return wide_number(evaluate(model_spec, spec.loss_fn, *inputs).loss.weight)

    closed = jax.make_jaxpr(weight_of)(*model_spec.arguments, shapes_of(batch))
    program, needed = needed_for(closed.jaxpr, [0])
    num_weights = len(jax.tree.leaves(model_spec.weights))
    if any(number < num_weights for number in needed):
        shards = spec.options.logical_shards
        parts = spec.num_microbatches * of_ranks
        count = f"{shards} logical shards" if shards else f"{parts} parts of the batch"
        raise UnsupportedError(
            "the weight of the loss depends on parameters, and the model adds its own terms to the "
            f"loss, so that {count} do not know how much these terms "
            "count; let the weight depend on the batch alone, or leave the batch whole",
            code="weight-of-parameters",
        )
    known = jax.tree.leaves((arguments.buffers, batch))
    values = [known[number - num_weights] for number in needed]
    (weight,) = eval_jaxpr(ClosedJaxpr(program, closed.consts), values)
    mean = weight / jax.tree.leaves(batch)[0].shape[0]
    shared = {**shared, MEAN_WEIGHT: mean}
    return arguments._replace(buffers={**arguments.buffers, SHARED: shared})


def unscaled_gradients(plan: StepPlan, state: TrainState, placed: Placed) -> GradientResult:
    """Computes the gradients of a state's parameters, with any loss scale divided out.

    Args:
        plan: the plan of the step.
        state: a state in device memory.
        placed: the batch.

    Returns:
        Mean gradients in the dtypes of the parameters, metrics, and new buffers.
    """
    spec = plan.spec
    scaler = spec.options.scaler
    scale = None if scaler is None else state.scaler.scale
    buffers = spec.model_spec.with_inputs(state.buffers, state.step, placed.shared)
    arguments = GradientArguments(state.params, state.frozen, buffers, placed.arrays, scale)
    result = mean_gradients(plan, arguments)
    grads = result.grads if scaler is None else scaler.unscale(result.grads, state.scaler)
    return result._replace(
        grads=jax.tree.map(lambda g, p: g.astype(p.dtype), grads, state.params),
        buffers=split_inputs(result.buffers)[0],
    )


def one_step(
    plan: StepPlan,
    state: TrainState,
    placed: Placed,
    was_nonfinite: Array | None = None,
    reported: Callable[[GradientResult], Metrics] = lambda result: result.metrics,
) -> tuple[TrainState, Metrics]:
    """Computes the next state.

    Args:
        plan: the plan of the step.
        state: a state in device memory.
        placed: the batch.
        was_nonfinite: the nonfinite flag of the step before.
        reported: maps the result of the gradients to the metrics to return.

    Returns:
        The next state, and metrics.
    """
    options = plan.spec.options
    result = unscaled_gradients(plan, state, placed)
    grads, metrics = result.grads, result.metrics
    norm_of = functools.partial(whole_norm, plan.spec) if options.is_elastic else optax.tree.norm
    needs_norm = "norm" in plan.state_plan.update.traced.extra_args
    clipped, measured = clip(grads, options, norm_of, needs_norm)
    # Not computed from the optimizer's results, so that the gradients can be freed before these.
    is_guarded = options.scaler is not None or options.nonfinite is not None
    finite = _are_finite(grads, measured, options) if is_guarded else None
    extra_args = {"value": metrics["loss"]}
    if needs_norm:
        extra_args["norm"] = measured["grad_norm"]
    with jax.named_scope("optimizer"):
        if options.is_elastic:
            keeps_updates = NORMS_BY_LAYER in options.metrics
            params, opt_state, updates = elastic_update(
                plan, clipped, state.opt_state, state.params, extra_args, keeps_updates
            )
        else:
            updates, opt_state = plan.state_plan.update(
                clipped, state.opt_state, state.params, **extra_args
            )
            params = optax.apply_updates(state.params, updates)
    observed = _watched_metrics(opt_state)
    observed |= _norms_by_layer(plan, grad=grads, param=state.params, update=updates)
    _check_names(observed, metrics)
    measured |= observed
    new = dataclasses.replace(
        state,
        step=state.step + 1,
        params=params,
        opt_state=opt_state,
        buffers=result.buffers,
        ema=None if options.ema is None else average(options.ema, state.ema, params),
    )
    random_state = plan.spec.model_spec.random_state
    if options.scaler is not None and finite is not None:
        new = skip_overflow(options.scaler, finite, new, state, random_state)
        measured[LOSS_SCALE] = new.scaler.scale
        measured[OVERFLOW] = ~finite
    if options.nonfinite is not None and finite is not None:
        new, measured[FLAG] = undo_nonfinite(
            options, metrics["loss"], finite, new, state, was_nonfinite, random_state
        )
    if "param_norm" in options.metrics:
        # Of the parameters that the next step starts from, also if this step is skipped.
        # Squares of float16 overflow from 256 on.
        measured["param_norm"] = norm_of(jax.tree.map(wide, new.params))
    return new, {**reported(result), **measured}
