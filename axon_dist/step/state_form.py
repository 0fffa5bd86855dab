"""The state of a step, described: shapes, places, claims, and how the first one is made."""

from __future__ import annotations

import dataclasses
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from ..core.errors import ConfigError
from ..core.typing import PyTree
from ..mesh import agree, checksums, digest
from .claims import Claims, claims_of
from .local_view import mean_buffers, stack_buffers
from .parts import Source
from .placement import on_device, state_shardings
from .spec import StepSpec
from .state import TrainState


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
        parts, to_stored = self.spec.parts, self.spec.storage.from_model
        first = lambda params, buffers: self._around(to_stored(params), buffers)
        return jax.eval_shape(first, parts.params, parts.buffers)

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
        """The model's own parameters and buffers, as a state holds them."""
        params = self.spec.storage.to_model(state.params)
        return params, mean_buffers(state.buffers, self.spec.reduction)

    def born(self) -> TrainState:
        """Makes the first state, every array where it lives.

        Returns:
            The state; a module that was given keeps its arrays.

        Raises:
            ClaimError: when an array is not split as the strategy claims.
            LaunchError: when the processes of the run start from different parameters.
        """
        # Parameters first, moments second: what drawing the former took is free again by then.
        params, buffers = self._placed() if self.source.make is None else self._drawn()
        # A given module keeps its arrays: on the device it lies on, placing makes no copy.
        donated = () if self.source.make is None else (0,)
        complete = jax.jit(self._around, out_shardings=self.places, donate_argnums=donated)
        state = complete(params, buffers)
        self._agree("first parameters", state.params)
        self.claims.check(state)
        return state

    def lower_factory(self) -> jax.stages.Lowered:
        """Lowers the making of a factory's parameters and buffers, without running it.

        Raises:
            ConfigError: when the step was given a module, whose arrays exist already.
        """
        return self._factory().lower()

    def _around(self, params: PyTree, buffers: PyTree) -> TrainState:
        """The first state with given parameters, in stored form, and buffers."""
        spec, scaler = self.spec, self.spec.options.scaler
        return TrainState(
            step=jnp.zeros((), jnp.int32),
            params=params,
            opt_state=spec.stored_optimizer.init(params),
            buffers=stack_buffers(buffers, spec.reduction, spec.num_ranks),
            scaler=None if scaler is None else scaler.init(),
        )

    def _factory(self) -> Any:
        make = self.source.make
        if make is None:
            raise ConfigError(
                "the step was given a module, whose arrays exist; give build_train_step a "
                "function that makes the module, and its arrays are born where they live"
            )

        def drawn() -> tuple[PyTree, PyTree]:
            params, buffers = make()
            return self.spec.storage.from_model(params), buffers

        return jax.jit(drawn, out_shardings=(self.places.params, self.whole))

    def _drawn(self) -> tuple[PyTree, PyTree]:
        if self.spec.world.num_processes > 1:
            # Processes that hold different shards have no parameters to compare.
            program = {"program": digest(self.lower_factory())}
            agree(self.spec.world, "factory of the model", program)
        return self._factory()()

    def _placed(self) -> tuple[PyTree, PyTree]:
        params, buffers = self.source.arrays or ({}, {})
        self._agree("parameters of the model", params)
        stored = self.spec.storage.from_model(params)
        return jax.device_put((stored, buffers), (self.places.params, self.whole))

    def _agree(self, what: str, params: PyTree) -> None:
        if self.spec.world.num_processes > 1:
            agree(self.spec.world, what, checksums(params))
