"""The step of replicas that train on their own: a row of the state each, and nothing between."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from ..core.typing import Array, PyTree
from .batch import Placed
from .local_view import batch_spec
from .nonfinite import FLAG
from .objective import GradientResult
from .separable import Separation
from .spec import StepSpec
from .state import TrainState
from .take import Gradients, Take, one_step, unscaled_gradients

ROWS = ("params", "opt_state", "buffers", "scaler")
"""What of a state has a row for each replica."""


def steps_of(spec: StepSpec) -> tuple[Gradients, Take]:
    """The gradients of a state's parameters, and the step; of one replica, or of all of them.

    Args:
        spec: model, loss, optimizer, strategy, devices and options of the step.
    """
    if spec.strategy.slow is not None:
        return replica_steps(spec)
    gradients = unscaled_gradients(spec)
    return gradients, one_step(spec, gradients)


def replica_steps(spec: StepSpec) -> tuple[Gradients, Take]:
    """The gradients of all replicas, and a step that each takes by itself.

    The axis between the replicas is manual, and the program of one replica is that of the same
    strategy on the rest of the mesh: no collective in it can cross the axis, for it does not know
    the axis by name. Equals

        for r in range(R):
            state[r] = step(state[r], share r of the batch)

    Args:
        spec: model, loss, optimizer, strategy, devices and options of the step.

    Returns:
        Both as pure functions, to be traced; gradients and metrics have a row for each replica.
    """
    inner = spec.replica()
    gradients = unscaled_gradients(inner)
    take = one_step(inner, gradients)

    def differentiate(state: TrainState, placed: Placed) -> GradientResult:
        run = lambda state, placed: _stacked(tuple(gradients(_own_row(state), placed)))
        return GradientResult(*_on_each(spec, inner, run, _rows(spec))(state, placed))

    def step(
        state: TrainState, placed: Placed, held: Array | None = None
    ) -> tuple[TrainState, dict]:
        def run(state: TrainState, placed: Placed) -> tuple[TrainState, dict]:
            new, metrics = take(_own_row(state), placed, held)
            return _with_rows(new, _stacked), _stacked(metrics)

        new, metrics = _on_each(spec, inner, run, (_specs(spec), _rows(spec)))(state, placed)
        return dataclasses.replace(new, outer=state.outer, meeting=state.meeting), metrics

    return differentiate, step


def _on_each(spec: StepSpec, inner: StepSpec, run: Any, out_specs: Any) -> Any:
    """A function of one replica's state and share as one of all of them."""

    def mapped(state: TrainState, placed: Placed) -> Any:
        # Looked at here, and known in the region, where it could not be traced.
        separation_of(inner, spec, placed)
        batch: Any = batch_spec(_axes(spec), spec.num_microbatches)
        here = jax.shard_map(
            run,
            mesh=spec.world.mesh,
            axis_names=frozenset(_axes(spec)),
            in_specs=(_specs(spec), Placed(batch, PartitionSpec())),
            out_specs=out_specs,
            check_vma=False,
        )
        # What they have in common stays out: no step looks at it.
        return here(dataclasses.replace(state, outer=None, meeting=None), placed)

    return mapped


def shared_metrics(metrics: dict[str, Array]) -> dict[str, Array]:
    """What all replicas report, as one: their means, and of what is true or false whether any is.

    Args:
        metrics: rows of scalars, one for each replica.
    """
    one = lambda name, x: jnp.any(x) if name == FLAG else jnp.mean(x, axis=0)
    return {name: one(name, x) for name, x in metrics.items()}


def first_rows(state: TrainState, replicas: int) -> TrainState:
    """A state with a row for each replica, all of them alike but for their random streams.

    The keys of the first replica are the model's own; those of replica r are folded with r.

    Args:
        state: of one replica.
        replicas: how many.
    """
    return _with_rows(state, lambda tree: jax.tree.map(lambda x: _repeated(x, replicas), tree))


def mean_rows(buffers: PyTree) -> PyTree:
    """The buffers to evaluate with: the mean of statistics, and of the rest the first replica's."""
    is_float = lambda x: jnp.issubdtype(x.dtype, jnp.inexact)
    return jax.tree.map(lambda x: x.mean(0).astype(x.dtype) if is_float(x) else x[0], buffers)


def _repeated(x: Array, replicas: int) -> Array:
    if not jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return jnp.broadcast_to(x, (replicas, *x.shape))
    folded = [jnp.vectorize(jax.random.fold_in)(x, number) for number in range(1, replicas)]
    return jnp.stack([x, *folded])


def separation_of(inner: StepSpec, spec: StepSpec, placed: Placed) -> Separation:
    """How the loss of a replica's share is made of those of its parts.

    Args:
        inner: the step of one replica; itself where there is one.
        spec: the step of all of them.
        placed: the batch of all of them, arrays or shapes.
    """
    if spec.strategy.slow is None:
        return spec.with_shared(placed.shared).separator.of(placed.arrays)
    lead, ranks = int(spec.num_microbatches > 1), spec.mesh.shape[_axes(spec)[0]]

    def share(x: Any) -> jax.ShapeDtypeStruct:
        samples = (*x.shape[:lead], x.shape[lead] // ranks, *x.shape[lead + 1 :])
        return jax.ShapeDtypeStruct(samples, x.dtype)

    return inner.with_shared(placed.shared).separator.of(jax.tree.map(share, placed.arrays))


def _axes(spec: StepSpec) -> tuple[str, ...]:
    slow: Any = spec.strategy.slow
    return (slow.axis,)


def _rows(spec: StepSpec) -> PartitionSpec:
    return PartitionSpec(_axes(spec)[0])


def _specs(spec: StepSpec) -> Any:
    """The specs of a state in the region, but for what lies outside of it."""
    rows, whole = _rows(spec), PartitionSpec()
    placed: Any = {name: rows for name in ROWS}
    return TrainState(step=whole, frozen=whole, ema=whole, outer=whole, meeting=whole, **placed)  # type: ignore[arg-type]


def _own_row(state: TrainState) -> TrainState:
    return _with_rows(state, lambda tree: jax.tree.map(lambda x: x[0], tree))


def _stacked(tree: Any) -> Any:
    return jax.tree.map(lambda x: jnp.asarray(x)[None], tree)


def _with_rows(state: TrainState, change: Any) -> TrainState:
    return dataclasses.replace(state, **{name: change(getattr(state, name)) for name in ROWS})
