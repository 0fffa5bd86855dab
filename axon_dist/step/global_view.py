"""Gradients in global view: the user's program as written, laid out by the compiler."""

from __future__ import annotations

import jax

from ..core.typing import Array, Batch, Path, PyTree
from ..parallel import GlobalGather, only_axes
from .accumulate import accumulate
from .objective import (
    Forward,
    GradientFn,
    GradientResult,
    Prepare,
    beside,
    forward_of,
    gradient_means,
    gradient_sums,
)
from .spec import StepSpec
from .view import MakeGather, spelled


def global_gradients(spec: StepSpec) -> GradientFn:
    """Builds the gradient function that the compiler partitions.

    Args:
        spec: the step; the policies of its strategy say where weights and moments lie.

    Returns:
        The function; gradients lie where their moments do.
    """
    forward = global_forward(spec, spec.change_layers)

    def constrain(grads: PyTree) -> PyTree:
        return jax.lax.with_sharding_constraint(grads, spec.owners)

    def gradients(
        params: PyTree, frozen: PyTree, buffers: PyTree, batch: Batch, scale: Array | None
    ) -> GradientResult:
        of_trained = beside(forward, frozen)
        if spec.num_microbatches == 1:
            found = gradient_means(of_trained, scale)(params, buffers, batch)
            return found._replace(grads=constrain(found.grads))
        count = spec.num_microbatches
        sums_of = gradient_sums(of_trained, scale=scale, parts=count)
        sums, buffers = accumulate(sums_of, params, buffers, batch, count, constrain)
        grads, metrics = sums.means()
        return GradientResult(constrain(grads), metrics, buffers)

    return gradients


def global_forward(spec: StepSpec, also: Prepare) -> Forward:
    """The forward pass in global view: units gather their weights, in the compute dtype.

    Args:
        spec: model, loss, optimizer, strategy, devices and options of the step.
        also: changes the merged model first.

    Returns:
        A function (params, buffers, batch) -> `Outcome`.
    """
    splits = spec.strategy.params.split_axes or spec.strategy.opt_state.split_axes
    prepare = spec.view.prepare(gather_of(spec) if splits else None, also)
    forward = forward_of(spec.parts, spec.loss_fn, prepare)
    return spec.view.with_layer_scan(spelled(forward, spec.strategy, spec.mesh))


def gather_of(spec: StepSpec) -> MakeGather:
    """How weights are gathered in global view: whole over the batch axes, gradients to owners."""
    strategy, mesh = spec.strategy, spec.mesh
    others = tuple(axis for axis in mesh.axis_names if axis not in strategy.batch_axes)

    def make(path: Path) -> GlobalGather:
        shape = spec.parts.shape_of(path)
        own = strategy.params(path, shape, mesh)
        is_frozen = path in spec.parts.frozen_paths
        owner = None if is_frozen else strategy.opt_state(path, shape, mesh)
        return GlobalGather(mesh, own, owner, only_axes(own, others), len(shape))

    return make
