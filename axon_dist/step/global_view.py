"""Gradients in global view: the user's program as written, laid out by the compiler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh

from ..core.typing import Array, Batch, LossFn, Path, PyTree
from ..parallel import GlobalGather, Strategy, only_axes
from ..sharding import shardings
from .accumulate import accumulate
from .objective import (
    Forward,
    Prepare,
    forward_of,
    gradient_means,
    gradient_sums,
    mean_loss,
    mean_metrics,
)
from .parts import ModelParts
from .view import MakeGather, layers_of, view_of


def global_gradients(
    parts: ModelParts, loss_fn: LossFn, strategy: Strategy, mesh: Mesh, num_microbatches: int
) -> Any:
    """Builds the gradient function that the compiler partitions.

    Args:
        parts: the model.
        loss_fn: the user's loss.
        strategy: its policies say where weights, gradients and moments lie.
        mesh: the mesh.
        num_microbatches: how many microbatches the batch is cut into.

    Returns:
        A function (params, buffers, batch, scale) -> (mean gradients where their moments lie,
        metrics, new buffers).
    """
    owners = shardings(strategy.opt_state, parts.params, mesh)
    forward = global_forward(parts, loss_fn, strategy, mesh, layers_of(strategy, mesh))

    def constrain(grads: PyTree) -> PyTree:
        return jax.lax.with_sharding_constraint(grads, owners)

    def gradients(params: PyTree, buffers: PyTree, batch: Batch, scale: Array | None) -> Any:
        if num_microbatches == 1:
            grads, metrics, buffers = gradient_means(forward, scale)(params, buffers, batch)
            return constrain(grads), metrics, buffers
        sums_of = gradient_sums(forward, scale=scale)
        sums, buffers = accumulate(sums_of, params, buffers, batch, num_microbatches, constrain)
        grads, metrics = sums.means()
        return constrain(grads), metrics, buffers

    return gradients


def global_forward(
    parts: ModelParts, loss_fn: LossFn, strategy: Strategy, mesh: Mesh, also: Prepare
) -> Forward:
    """The forward pass in global view: units gather their weights, in the compute dtype.

    Args:
        parts: the model.
        loss_fn: the user's loss.
        strategy: its policies say where weights lie.
        mesh: the mesh.
        also: changes the merged model first.

    Returns:
        A function (params, buffers, batch) -> `Outcome`.
    """
    view = view_of(strategy, parts)
    splits = strategy.params.split_axes or strategy.opt_state.split_axes
    gather = gather_of(strategy, parts, mesh) if splits else None
    return view.rolled(forward_of(parts, loss_fn, view.prepare(gather, also)))


def evaluation(
    parts: ModelParts, loss_fn: LossFn, strategy: Strategy, mesh: Mesh
) -> Callable[[PyTree, PyTree, Batch], dict[str, Array]]:
    """The loss and metrics of a batch with the model in eval mode, computed as in training.

    Returns:
        A function (params, buffers, batch) -> `loss` and the metrics of the loss function.
    """
    change_layers = layers_of(strategy, mesh)

    def adapt(model: nnx.Module) -> None:
        model.eval()
        change_layers(model)

    forward = global_forward(parts, loss_fn, strategy, mesh, adapt)

    def evaluate(params: PyTree, buffers: PyTree, batch: Batch) -> dict[str, Array]:
        outcome = forward(params, buffers, batch)
        return {"loss": mean_loss(outcome.loss), **mean_metrics(outcome)}

    return evaluate


def gather_of(strategy: Strategy, parts: ModelParts, mesh: Mesh) -> MakeGather:
    """How weights are gathered in global view: whole over the batch axes, gradients to owners."""
    others = tuple(axis for axis in mesh.axis_names if axis not in strategy.batch_axes)

    def make(path: Path) -> GlobalGather:
        shape = parts.shape_of(path)
        own = strategy.params(path, shape, mesh)
        owner = strategy.opt_state(path, shape, mesh)
        return GlobalGather(mesh, own, owner, only_axes(own, others), len(shape))

    return make
