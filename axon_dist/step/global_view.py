"""Gradients in global view: the user's program as written, laid out by the compiler."""

from __future__ import annotations

from collections.abc import Callable

import jax

from ..core.tree import map_with_path
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
from .view import spelled


def global_gradients(spec: StepSpec) -> GradientFn:
    """Builds the gradient function that the compiler partitions.

    Args:
        spec: the step; the policies of its strategy say where weights and moments lie.

    Returns:
        The function; gradients lie where their moments do.
    """
    once = spec.strategy.gathers_once
    forward = global_forward(spec, spec.change_layers, gathered=once)

    def constrain(grads: PyTree) -> PyTree:
        return jax.lax.with_sharding_constraint(grads, spec.owners)

    def gradients(
        params: PyTree, frozen: PyTree, buffers: PyTree, batch: Batch, scale: Array | None
    ) -> GradientResult:
        of_trained = beside(forward, frozen)
        if once:
            params = made_whole(spec, params)
        if spec.num_microbatches == 1:
            found = gradient_means(of_trained, scale)(params, buffers, batch)
            return found._replace(grads=constrain(found.grads))
        count = spec.num_microbatches
        sums_of = gradient_sums(of_trained, scale=scale, parts=count)
        sums, buffers = accumulate(sums_of, params, buffers, batch, count, constrain)
        grads, metrics = sums.means()
        return GradientResult(constrain(grads), metrics, buffers)

    return gradients


def made_whole(spec: StepSpec, params: PyTree) -> PyTree:
    """The trained parameters in the compute dtype, whole over the data axes.

    Args:
        spec: model, loss, optimizer, strategy, devices and options of the step.
        params: as they lie between steps.
    """
    gather = gather_of(spec)
    return map_with_path(lambda path, p: gather(path).forward(p), spec.view.cast(params))


def global_forward(spec: StepSpec, also: Prepare, gathered: bool = False) -> Forward:
    """The forward pass in global view: units gather their weights, in the compute dtype.

    Args:
        spec: model, loss, optimizer, strategy, devices and options of the step.
        also: changes the merged model first.
        gathered: whether the parameters given are whole already, and only gradients move.

    Returns:
        A function (params, buffers, batch) -> `Outcome`.
    """
    splits = spec.strategy.params.split_axes or spec.strategy.opt_state.split_axes
    prepare = spec.view.prepare(gather_of(spec, gathered) if splits else None, also)
    forward = forward_of(spec.parts, spec.loss_fn, prepare)
    return spec.view.with_layer_scan(spelled(forward, spec.strategy, spec.mesh))


def gather_of(spec: StepSpec, gathered: bool = False) -> Callable[[Path], GlobalGather]:
    """How weights are gathered in global view: whole over the data axes, gradients to owners.

    Args:
        spec: model, loss, optimizer, strategy, devices and options of the step.
        gathered: whether trained weights are whole already.
    """
    strategy, mesh = spec.strategy, spec.mesh
    gathered_over = set(strategy.data_axes) - set(strategy.resident)
    others = tuple(axis for axis in mesh.axis_names if axis not in gathered_over)

    def make(path: Path) -> GlobalGather:
        shape = spec.parts.shape_of(path)
        own = strategy.params(path, shape, mesh)
        is_frozen = path in spec.parts.frozen_paths
        owner = None if is_frozen else strategy.opt_state(path, shape, mesh)
        full = only_axes(own, others)
        lies = full if gathered and not is_frozen else own
        return GlobalGather(mesh, lies, owner, full, len(shape))

    return make
