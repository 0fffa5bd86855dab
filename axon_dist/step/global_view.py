"""Gradients in global view, where the compiler partitions the user's program.

Evaluations share the forward pass, `global_forward`.
"""

from __future__ import annotations

import functools

import jax

from ..core.tree import leaves_with_paths, map_with_path
from ..core.typing import Path
from ..ir.pieces import read_in_loops
from .gather import GlobalGather, only_axes
from .microbatches import accumulate, part_buffers_of
from .model_changes import change_layers, rewritten
from .objective import (
    Forward,
    GradientArguments,
    GradientResult,
    ModelChange,
    forward_of,
    gradient_means,
    gradient_sums,
    with_frozen,
)
from .plan import StepPlan
from .spec import StepSpec


def global_gradients(plan: StepPlan, arguments: GradientArguments) -> GradientResult:
    """Computes gradients, sharded like their moments, in a program that the compiler partitions.

    Args:
        plan: the plan of the step. The policies of its strategy give the shardings of weights and
            moments.
        arguments: parameters, buffers, batch and scale.
    """
    spec = plan.spec
    params, frozen, buffers, batch, scale = arguments
    count = spec.num_microbatches
    gathers_once = spec.strategy.gathers_once
    grad_shardings = plan.state_plan.grad_shardings
    read_in_loop: frozenset[Path] = frozenset()
    if spec.strategy.splits:
        # Recurrent layers read their weights in every iteration of a loop.
        samples, shapes = spec.microbatch(batch)
        jaxpr = plan.separator.program(shapes, samples).jaxpr
        read_in_loop = read_in_loops(
            jaxpr, [p for p, _ in leaves_with_paths(spec.model_spec.weights)]
        )
    before = functools.partial(change_layers, spec.strategy, spec.world.mesh)
    forward = global_forward(plan, before, gathers_once, read_in_loop)
    if frozen:
        forward = with_frozen(forward, frozen)
    if gathers_once:
        params = map_with_path(
            lambda path, weight: global_gather(spec, path).forward(weight),
            plan.changes.cast(params),
        )
    if count == 1:
        means = gradient_means(forward, params, buffers, batch, scale)
        grads = jax.lax.with_sharding_constraint(means.grads, grad_shardings)
        return means._replace(grads=grads)
    sums, buffers = accumulate(
        gradient_sums(forward, count, scale),
        params,
        buffers,
        batch,
        count,
        constrain=lambda grads: jax.lax.with_sharding_constraint(grads, grad_shardings),
        part_buffers=part_buffers_of(spec, plan.separator, batch),
    )
    result = sums.result(buffers, count)
    grads = jax.lax.with_sharding_constraint(result.grads, grad_shardings)
    return result._replace(grads=grads)


def global_forward(
    plan: StepPlan,
    before: ModelChange,
    is_whole: bool = False,
    read_in_loop: frozenset[Path] = frozenset(),
) -> Forward:
    """Returns the forward pass in global view: units gather weights in the compute dtype.

    Args:
        plan: the plan of the step.
        before: a change to the merged model that is made before those of the plan.
        is_whole: whether trained weights are whole already, and only their gradients are
            reduced.
        read_in_loop: the weights that a loop reads in every iteration.

    Returns:
        A function (params, buffers, batch) -> `Outcome`.
    """
    spec = plan.spec
    gather = functools.partial(global_gather, spec, is_whole=is_whole, read_in_loop=read_in_loop)
    change = plan.changes.change_with(gather if spec.strategy.splits else None, before)
    forward = forward_of(spec.model_spec, spec.loss_fn, change)
    return plan.changes.with_layer_scan(
        rewritten(forward, spec.strategy, spec.mesh, spec.memory_bytes)
    )


def global_gather(
    spec: StepSpec,
    path: Path,
    is_whole: bool = False,
    read_in_loop: frozenset[Path] = frozenset(),
) -> GlobalGather:
    """Returns the gather of a weight in global view.

    It all-gathers the weight over the axes whose ranks have different data, except the ungathered
    ones, and reduce-scatters its gradient.

    Args:
        spec: the resolved arguments of the step.
        path: of the parameter.
        is_whole: whether trained weights are whole already, and only their gradients are
            reduced.
        read_in_loop: the weights that a loop reads in every iteration.
    """
    strategy = spec.strategy
    mesh = spec.mesh
    shape = spec.model_spec.shapes[path]
    gathered_over = {*strategy.reduced_axes} - {*strategy.ungathered_axes}
    sharded = strategy.params(path, shape, mesh)
    full = only_axes(sharded, tuple(axis for axis in mesh.axis_names if axis not in gathered_over))
    if path in spec.model_spec.frozen_paths:
        return GlobalGather(mesh, sharded, None, full, len(shape), path in read_in_loop)
    owner = strategy.opt_state(path, shape, mesh)
    stored = full if is_whole else sharded
    return GlobalGather(mesh, stored, owner, full, len(shape), path in read_in_loop)
