"""Reads a training step without running it: its programs, and how it computes its loss.

`TrainStep.lower(batch).compile()` is the program that a step runs for a batch; the other functions
of this package take it.
"""

from __future__ import annotations

from typing import Any, Protocol

import jax
from jax.extend.core import ClosedJaxpr

from ..core.own_context import AxisNames, in_context_of_step
from ..core.typing import Batch


class Step(Protocol):
    """A training step, as `axon_dist.build_train_step` makes it."""

    axis_names: AxisNames

    @property
    def plan(self) -> Any:
        """The decisions that follow from its arguments."""

    @property
    def programs(self) -> Any:
        """Its jitted functions."""

    @property
    def state_layout(self) -> Any:
        """The layout of its states."""

    @property
    def batch_layout(self) -> Any:
        """How its batches are cut."""


@in_context_of_step
def lower_init(step: Step) -> jax.stages.Lowered:
    """Lowers the program that initializes the arrays of a model given as a function.

    It is one program, whose memory is the most that `step.init()` takes. `init` itself runs several
    smaller programs with the same results, which compile faster.

    Args:
        step: a `TrainStep`.

    Returns:
        The lowered program; `.compile()` it to read how much memory initialization takes.

    Raises:
        ConfigError: when the step was given a module, whose arrays exist already.
    """
    return step.state_layout.lower_factory()


@in_context_of_step
def trace_step(step: Step, batch: Batch) -> tuple[ClosedJaxpr, list[jax.ShapeDtypeStruct]]:
    """Traces a step for a batch of shapes, without lowering it for any device.

    Args:
        step: a `TrainStep`.
        batch: leaves of shape [B, ...] with B the samples of all processes; shapes will do.

    Returns:
        The closed jaxpr over global arrays, and the shapes and shardings of its arguments: the
        leaves of the state first, which it returns first, then those of the batch.
    """
    traced = step.programs.trace(batch)
    return traced.jaxpr, jax.tree.leaves(step.programs.arguments(batch))


@in_context_of_step
def lower_outer_steps(step: Step) -> tuple[jax.stages.Lowered, ...]:
    """Lowers the outer steps, in which replicas synchronize; one program per fragment.

    Args:
        step: a `TrainStep`.

    Returns:
        The lowered programs; empty if the strategy has no replicas that train independently.
    """
    state = step.state_layout.placed_shapes
    return tuple(run.lower(state) for run in step.programs.outer_steps)


@in_context_of_step
def trace_outer_steps(
    step: Step,
) -> tuple[tuple[ClosedJaxpr, list[jax.ShapeDtypeStruct]], ...]:
    """Traces the outer steps, in which replicas synchronize; one program per fragment.

    Args:
        step: a `TrainStep`.

    Returns:
        As for `trace_step`, with the state as the only argument; empty if the strategy has no
        replicas that train independently.
    """
    state = step.state_layout.placed_shapes
    leaves = jax.tree.leaves(state)
    return tuple((run.trace(state).jaxpr, leaves) for run in step.programs.outer_steps)


@in_context_of_step
def separation(step: Step, batch: Batch) -> Any:
    """Says in which view the gradients of such a batch are computed, and why.

    Args:
        step: a `TrainStep`.
        batch: leaves of shape [B, ...] with B the samples of all processes; shapes will do.

    Returns:
        How the loss is computed from the parts of the batch (`axon_dist.step.Separation`); prints
        as a sentence.

    Raises:
        UnsupportedError: when the loss couples samples, and an option needs every rank to compute
            it from its own samples or there are several microbatches.
    """
    return step.state_layout.separation(step.batch_layout.abstract(batch))


@in_context_of_step
def coupling(step: Step, batch: Batch) -> str:
    """Says what couples samples, so that other microbatches would change the loss; or "".

    Args:
        step: a `TrainStep`.
        batch: leaves of shape [B, ...] with B the samples of all processes; shapes will do.
    """
    placed = step.batch_layout.abstract(batch)
    return step.plan.with_shared(placed.shared).separator.coupling(placed.arrays)
