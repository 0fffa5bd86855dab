"""Gradients in global view: the user's program as written, laid out by the compiler."""

from __future__ import annotations

from collections.abc import Callable

import jax

from ..core.tree import leaves_with_paths, map_with_path
from ..core.typing import Array, Batch, Path, PyTree
from ..jaxpr.pieces import read_in_loops
from ..parallel.gather import GlobalGather, only_axes
from .draws import OfRank, draws_of
from .microbatches import accumulate
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
    once, splits = spec.strategy.gathers_once, _splits(spec)

    def constrain(grads: PyTree) -> PyTree:
        return jax.lax.with_sharding_constraint(grads, spec.owners)

    def gradients(
        params: PyTree, frozen: PyTree, buffers: PyTree, batch: Batch, scale: Array | None
    ) -> GradientResult:
        looped = _read_in_loops(spec, batch) if splits else frozenset()
        forward = global_forward(spec, spec.change_layers, once, looped)
        of_trained = beside(forward, frozen)
        if once:
            params = made_whole(spec, params)
        if spec.num_microbatches == 1:
            found = gradient_means(of_trained, scale)(params, buffers, batch)
            return found._replace(grads=constrain(found.grads))
        count = spec.num_microbatches
        sums_of = gradient_sums(of_trained, scale=scale, parts=count)
        draws = draws_of(spec, batch, 1)
        drawing = None if draws is None else OfRank(draws)
        sums, buffers = accumulate(
            sums_of, params, buffers, batch, count, constrain, drawing=drawing
        )
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

    def whole(path, p):
        return gather(path).forward(p)  # type: ignore[union-attr]

    return map_with_path(whole, spec.view.cast(params))


def _splits(spec: StepSpec) -> bool:
    """Whether weights or their gradients lie split, so that units gather them."""
    strategy = spec.strategy
    return bool(strategy.params.split_axes or strategy.opt_state.split_axes)


def _read_in_loops(spec: StepSpec, batch: Batch) -> frozenset[Path]:
    """The weights that a loop of the model reads in every turn, as recurrent layers do."""
    lead = 0 if spec.num_microbatches == 1 else 1
    few = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[lead:], x.dtype), batch)
    jaxpr = spec.separator.program(few, jax.tree.leaves(few)[0].shape[0]).jaxpr
    return read_in_loops(jaxpr, [path for path, _ in leaves_with_paths(spec.parts.weights)])


def global_forward(
    spec: StepSpec,
    also: Prepare,
    gathered: bool = False,
    looped: frozenset[Path] = frozenset(),
) -> Forward:
    """The forward pass in global view: units gather their weights, in the compute dtype.

    Args:
        spec: model, loss, optimizer, strategy, devices and options of the step.
        also: changes the merged model first.
        gathered: whether the parameters given are whole already, and only gradients move.
        looped: the weights that a loop reads in every turn.

    Returns:
        A function (params, buffers, batch) -> `Outcome`.
    """
    make_gather = gather_of(spec, gathered, looped) if _splits(spec) else None
    forward = forward_of(spec.parts, spec.loss_fn, spec.view.prepare(make_gather, also))
    return spec.view.with_layer_scan(spelled(forward, spec.strategy, spec.mesh))


def gather_of(
    spec: StepSpec, gathered: bool = False, looped: frozenset[Path] = frozenset()
) -> Callable[[Path], GlobalGather | None]:
    """How weights are gathered in global view: whole over the data axes, gradients to owners.

    Args:
        spec: model, loss, optimizer, strategy, devices and options of the step.
        gathered: whether trained weights are whole already.
        looped: the weights that a loop reads in every turn.
    """
    strategy, mesh = spec.strategy, spec.mesh
    gathered_over = set(strategy.data_axes) - set(strategy.resident)
    others = tuple(axis for axis in mesh.axis_names if axis not in gathered_over)

    def make(path: Path) -> GlobalGather | None:
        shape = spec.parts.shape_of(path)
        own = strategy.params(path, shape, mesh)
        is_frozen = path in spec.parts.frozen_paths
        owner = None if is_frozen else strategy.opt_state(path, shape, mesh)
        full = only_axes(own, others)
        lies = full if gathered and not is_frozen else own
        return GlobalGather(mesh, lies, owner, full, len(shape), path in looped)

    return make
