"""The state of replicas that train on their own: a row for each, and what they have in common."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import cached_property
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from ..core.typing import PyTree
from ..parallel import Strategy
from ..sharding import Copies, optimizer_shardings, shardings
from .claims import Claims, claims_of
from .outer import Outer
from .parts import Source
from .replicas import first_rows, mean_rows
from .spec import StepSpec
from .state import TrainState
from .state_form import StateForm


@dataclasses.dataclass(frozen=True, eq=False)
class ReplicaForm(StateForm):
    """What the state of a step with several replicas looks like, and the model in it.

    The model of a state is the one with the outer parameters, those of the last meeting, and the
    mean of the replicas' statistics.
    """

    @cached_property
    def outer(self) -> Outer:
        """What the replicas have in common."""
        return Outer(self.spec)

    @cached_property
    def places(self) -> Any:
        """A `TrainState` of shardings."""
        spec, state, strategy = self.spec, self.shapes, self._rows
        row = NamedSharding(spec.mesh, PartitionSpec(self.outer.plan.axis))
        params = shardings(strategy.params, state.params, spec.mesh)
        moments = optimizer_shardings(strategy.opt_state, state.params, state.opt_state, spec.mesh)
        outer, meeting = self.outer.places(state, params)
        return TrainState(
            step=self.whole,  # type: ignore[arg-type]
            params=params,
            opt_state=moments,
            buffers=jax.tree.map(lambda _: row, state.buffers),
            scaler=jax.tree.map(lambda _: row, state.scaler),
            frozen=self._stored_places[1],
            outer=outer,
            meeting=meeting,
        )

    @cached_property
    def claims(self) -> Claims:
        """Where the strategy says that the arrays of all replicas lie, and why."""
        alone = dataclasses.replace(self.shapes, params={}, opt_state=())
        claims = claims_of(self.spec, dataclasses.replace(self.shapes, frozen={}), self._rows)
        return dataclasses.replace(claims, frozen=claims_of(self.spec, alone).frozen)

    @property
    def owners(self) -> Any:
        """The shardings of the gradients of all replicas."""
        return shardings(self._rows.opt_state, self.shapes.params, self.spec.mesh)

    @property
    def reported(self) -> NamedSharding:
        """Where a step leaves its metrics: each replica's own in its row."""
        return NamedSharding(self.spec.mesh, PartitionSpec(self.outer.plan.axis))

    @property
    def meetings(self) -> tuple[Callable[[TrainState], TrainState], ...]:
        """What the replicas do where they meet, a program for each fragment."""
        return tuple(self.outer.meet(number) for number in range(self.outer.plan.fragments))

    def due(self, step: int) -> tuple[int, ...]:
        """Which meetings follow after so many steps."""
        return self.outer.plan.due(step)

    def near(self, state: TrainState) -> TrainState:
        """The same state: all of it is in device memory, and no buffer divided."""
        return state

    def values(self, state: TrainState) -> tuple[PyTree, PyTree]:
        """The model's own parameters, as the replicas last agreed on them, and buffers."""
        return self.spec.storage.weights(self._met(state), state.frozen), mean_rows(state.buffers)

    def arguments(self, state: TrainState, shared: PyTree) -> tuple[PyTree, PyTree]:
        """What a forward pass of the model takes beside the samples."""
        weights = self.spec.storage.forward(self._met(state), state.frozen)
        return weights, self.spec.parts.with_given(mean_rows(state.buffers), state.step, shared)

    def _met(self, state: TrainState) -> PyTree:
        return jax.tree.map(lambda o, p: o.astype(p.dtype), state.outer, state.params)

    def _around(self, stored: tuple[PyTree, PyTree], buffers: PyTree) -> TrainState:
        one = super()._around(stored, buffers)
        rows = first_rows(one, self.spec.mesh.shape[self.outer.plan.axis])
        outer, meeting = self.outer.first(one.params)
        return dataclasses.replace(rows, outer=outer, meeting=meeting)

    @property
    def _rows(self) -> Strategy:
        strategy, axis = self.spec.storage.strategy, self.outer.plan.axis
        return dataclasses.replace(
            strategy,
            params=Copies(strategy.params, axis),
            opt_state=Copies(strategy.opt_state, axis),
        )

    @property
    def _stored_places(self) -> tuple[Any, Any]:
        spec = self.spec
        place = lambda shapes: shardings(spec.storage.strategy.params, shapes, spec.mesh)
        return place(spec.stored_shapes), place(spec.stored_frozen)


def form_of(spec: StepSpec, source: Source) -> StateForm:
    """The form of the states of a step, of one replica or of several.

    Args:
        spec: what the step is made of.
        source: where the first values of its model come from.
    """
    return (StateForm if spec.strategy.slow is None else ReplicaForm)(spec, source)
