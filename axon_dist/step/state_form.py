"""The state of a step, described: shapes, places, claims, and how the first one is made."""

from __future__ import annotations

import dataclasses
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from ..core.errors import ConfigError
from ..core.tree import joined
from ..core.typing import PyTree
from ..mesh import agree, checksums, digest
from .claims import Claims, claims_of
from .local_view import mean_buffers, stack_buffers
from .parts import Source
from .placement import on_device, state_shardings
from .spec import StepSpec
from .state import TrainState
from .update import first_average


@dataclasses.dataclass(frozen=True, eq=False)
class StateForm:
    """What a `TrainState` of a step looks like, how it is born, and the model's values in it.

    Args:
        spec: what the step is made of.
        source: where the first values of its model come from.
    """

    spec: StepSpec
    source: Source

    @cached_property
    def shapes(self) -> TrainState:
        """A `TrainState` of shapes."""
        parts, store = self.spec.parts, self.spec.storage.store
        first = lambda weights, buffers: self._around(store(weights), buffers)
        return jax.eval_shape(first, parts.weights, parts.buffers)

    @cached_property
    def places(self) -> Any:
        """A `TrainState` of shardings."""
        return state_shardings(self.spec, self.shapes)

    @cached_property
    def claims(self) -> Claims:
        """Where the strategy says that arrays lie, and why."""
        return claims_of(self.spec, self.shapes)

    @property
    def whole(self) -> NamedSharding:
        """The place of what every device holds."""
        return NamedSharding(self.spec.mesh, PartitionSpec())

    @property
    def placed_shapes(self) -> TrainState:
        """A `TrainState` of shapes with shardings."""
        placed = lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place)
        return jax.tree.map(placed, self.shapes, self.places)

    def near(self, state: TrainState) -> TrainState:
        """The same state, all of it in device memory."""
        return on_device(self.spec.strategy.offload, self.places, state)

    def values(self, state: TrainState) -> tuple[PyTree, PyTree]:
        """The model's own parameters, trained and frozen, and buffers, as a state holds them."""
        weights = self.spec.storage.weights(state.params, state.frozen)
        return weights, mean_buffers(state.buffers, self.spec.reduction)

    def arguments(self, state: TrainState) -> tuple[PyTree, PyTree]:
        """What a forward pass takes beside the batch, as a state holds it."""
        weights, buffers = self.values(state)
        return weights, self.spec.parts.with_step(buffers, state.step)

    def born(self) -> TrainState:
        """Makes the first state, every array where it lives.

        Returns:
            The state; a module that was given keeps its arrays.

        Raises:
            ClaimError: when an array is not split as the strategy claims.
            LaunchError: when the processes of the run start from different parameters.
        """
        # Parameters first, moments second: what drawing the former took is free again by then.
        stored, buffers = self._placed() if self.source.make is None else self._drawn()
        # A given module keeps its arrays: on the device it lies on, placing makes no copy.
        donated = () if self.source.make is None else (0,)
        complete = jax.jit(self._around, out_shardings=self.places, donate_argnums=donated)
        state = complete(stored, buffers)
        self._agree("first parameters", joined(state.params, state.frozen))
        self.claims.check(state)
        return state

    def lower_factory(self) -> jax.stages.Lowered:
        """Lowers the making of a factory's parameters and buffers, without running it.

        Raises:
            ConfigError: when the step was given a module, whose arrays exist already.
        """
        return self._factory().lower()

    def _around(self, stored: tuple[PyTree, PyTree], buffers: PyTree) -> TrainState:
        """The first state with given parameters, trained and frozen, as stored, and buffers."""
        (params, frozen), spec, scaler = stored, self.spec, self.spec.options.scaler
        return TrainState(
            step=jnp.zeros((), jnp.int32),
            params=params,
            opt_state=spec.stored_optimizer.init(params),
            buffers=stack_buffers(buffers, spec.reduction, spec.num_ranks),
            scaler=None if scaler is None else scaler.init(),
            frozen=frozen,
            ema=first_average(spec.options.ema, params),
        )

    def _factory(self) -> Any:
        make = self.source.make
        if make is None:
            raise ConfigError(
                "the step was given a module, whose arrays exist; give build_train_step a "
                "function that makes the module, and its arrays are born where they live"
            )

        def drawn() -> tuple[Any, PyTree]:
            weights, buffers = make()
            return self.spec.storage.store(weights), buffers

        return jax.jit(drawn, out_shardings=(self._stored_places, self.whole))

    @property
    def _stored_places(self) -> tuple[Any, Any]:
        return self.places.params, self.places.frozen

    def _drawn(self) -> tuple[Any, PyTree]:
        if self.spec.world.num_processes > 1:
            # Processes that hold different shards have no parameters to compare.
            program = {"program": digest(self.lower_factory())}
            agree(self.spec.world, "factory of the model", program)
        return self._factory()()

    def _placed(self) -> tuple[Any, PyTree]:
        weights, buffers = self.source.arrays or ({}, {})
        self._agree("parameters of the model", weights)
        stored = self.spec.storage.store(weights)
        return jax.device_put((stored, buffers), (self._stored_places, self.whole))

    def _agree(self, what: str, weights: PyTree) -> None:
        if self.spec.world.num_processes > 1:
            agree(self.spec.world, what, checksums(weights))
