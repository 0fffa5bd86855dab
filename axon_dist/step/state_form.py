"""The state of a step, described: shapes, places, claims, and how the first one is made."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from rich.console import Group

from ..core.errors import ConfigError
from ..core.tree import joined, leaves_with_paths, map_with_path
from ..core.typing import Array, Path, PyTree
from ..mesh import agree, checksums, digest
from ..parallel import CPUOffload, Strategy
from ..sharding import Explanation, explain, explain_optimizer, optimizer_shardings, shardings
from .buffers import buffer_partition, mean_buffers, stack_buffers
from .parts import Source
from .spec import StepSpec
from .state import TrainState
from .update import first_average
from .weights import kept_weights, placed_weights, replaced, weight_targets


def state_shardings(spec: StepSpec, state: TrainState) -> Any:
    """Places a train state as a strategy says.

    Args:
        spec: model, loss, optimizer, strategy, devices and options of the step.
        state: of shapes.

    Returns:
        A `TrainState` of shardings.
    """
    mesh, offload, stored = spec.mesh, spec.strategy.offload, spec.storage.strategy
    place = functools.partial(NamedSharding, mesh)
    whole: Any = place(PartitionSpec())
    return TrainState(
        step=whole,
        params=shardings(stored.params, state.params, mesh, offload.params),
        opt_state=optimizer_shardings(
            stored.opt_state, state.params, state.opt_state, mesh, offload.opt_state
        ),
        buffers=jax.tree.map(place, _buffers_at_rest(spec)),
        scaler=jax.tree.map(lambda _: whole, state.scaler),
        frozen=shardings(stored.params, state.frozen, mesh, offload.params),
        # Made shard by shard where the moments are, which are never less divided than parameters.
        ema=None
        if state.ema is None
        else shardings(stored.opt_state, state.ema, mesh, offload.opt_state),
    )


def whole_buffers(spec: StepSpec, buffers: PyTree) -> PyTree:
    """The buffers as a step computes with them: what lies divided between steps is made whole.

    Args:
        spec: model, loss, optimizer, strategy, devices and options of the step.
        buffers: of a state.
    """
    whole = NamedSharding(spec.mesh, PartitionSpec())
    at_rest = dict(leaves_with_paths(_buffers_at_rest(spec)))

    def is_divided(path):
        return path in spec.parts.others and at_rest[path] != PartitionSpec()

    def gather(path, x):
        return jax.lax.with_sharding_constraint(x, whole) if is_divided(path) else x

    return map_with_path(gather, buffers)


def _buffers_at_rest(spec: StepSpec) -> PyTree:
    """Where buffers lie between steps: those that are no layer's statistics as parameters would."""
    parts, reduction = spec.parts, spec.reduction
    specs = buffer_partition(parts.buffers, reduction, spec.strategy.batch_axes)
    if not reduction.sync_buffers:
        return specs
    # Rules about paths are about parameters; what divides any leaf divides these too.
    policy = spec.strategy.params.flexible_part

    def place(path, leaf, whole):
        return policy(path, leaf.shape, spec.mesh) if path in parts.others else whole

    return map_with_path(place, parts.buffers, specs)


def on_device(offload: CPUOffload, places: Any, state: TrainState) -> TrainState:
    """Copies what lives in host memory to the devices.

    Args:
        offload: what lives there.
        places: a `TrainState` of shardings.
        state: the state, within a trace.

    Returns:
        The state, all of it in device memory.
    """
    if offload is CPUOffload.NONE:
        return state
    return jax.device_put(state, jax.tree.map(lambda s: s.with_memory_kind("device"), places))


@dataclasses.dataclass(frozen=True)
class Claims:
    """Where a strategy says that parameters, gradients and moments lie, and why; prints as tables.

    Args:
        params: about the parameters.
        grads: about the gradients that reach the optimizer: they lie with its moments.
        opt_state: about the optimizer state.
        frozen: about the frozen parameters, where there are some.
        programs: what a compiled step must show besides; each raises where it does not.
    """

    params: Explanation
    grads: Explanation
    opt_state: Explanation
    frozen: Explanation | None = None
    programs: tuple[Callable[[jax.stages.Compiled], Any], ...] = ()

    def of_program(self, *checks: Callable[[jax.stages.Compiled], Any]) -> Claims:
        """These claims, and what a compiled step must show besides.

        Args:
            checks: functions of the compiled step that raise, such as
                `functools.partial(axon_dist.inspect.expect_kernels, attention=24, remat=0)`.

        Returns:
            The claims; `check_compiled` checks them all.
        """
        return dataclasses.replace(self, programs=(*self.programs, *checks))

    def check(self, state: TrainState, grads: PyTree | None = None) -> None:
        """Raises unless every array is split as claimed.

        Args:
            state: arrays, whose shards are measured, or shapes with shardings.
            grads: gradients, where there are some.

        Raises:
            ClaimError: naming the leaves that a device holds more of.
        """
        self.params.check(state.params)
        self.opt_state.check(state.opt_state)
        if self.frozen is not None:
            self.frozen.check(state.frozen)
        if grads is not None:
            self.grads.check(grads)

    def check_compiled(self, compiled: jax.stages.Compiled, state: TrainState) -> None:
        """Raises unless a compiled step leaves its state split, and shows besides, as claimed.

        Args:
            compiled: from `TrainStep.lower(batch).compile()`.
            state: the shapes of the state.

        Raises:
            ClaimError: as `check`, and as what is claimed of the program says.
        """
        for check in self.programs:
            check(compiled)

        def placed(x, sharding):
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

        self.check(jax.tree.map(placed, state, compiled.output_shardings[0]))

    def __rich__(self) -> Group:
        tables = [one.table() for one in (self.params, self.grads, self.opt_state)]
        return Group(*tables, *([] if self.frozen is None else [self.frozen.table()]))


def claims_of(spec: StepSpec, state: TrainState, strategy: Strategy | None = None) -> Claims:
    """The claims of a step's strategy about a state of given shapes.

    Args:
        spec: model, loss, optimizer, strategy, devices and options of the step.
        state: of shapes.
        strategy: lays it out; None is that of the storage.
    """
    strategy, mesh = strategy or spec.storage.strategy, spec.mesh
    return Claims(
        explain(strategy.params, state.params, mesh, f"parameters under {strategy.name}"),
        explain(strategy.opt_state, state.params, mesh, f"gradients under {strategy.name}"),
        explain_optimizer(
            strategy.opt_state,
            state.params,
            state.opt_state,
            mesh,
            f"optimizer state under {strategy.name}",
        ),
        explain(strategy.params, state.frozen, mesh, f"frozen parameters under {strategy.name}")
        if jax.tree.leaves(state.frozen)
        else None,
    )


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

        def first(weights, buffers):
            return self._around(store(weights), buffers)

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
    def owners(self) -> Any:
        """Where gradients lie in the end: with their moments."""
        return self.spec.owners

    @property
    def reported(self) -> NamedSharding:
        """Where a step leaves its metrics."""
        return self.whole

    @property
    def meetings(self) -> tuple[Callable[[TrainState], TrainState], ...]:
        """What replicas that train on their own do where they meet; none where there is one."""
        return ()

    def due(self, step: int) -> tuple[int, ...]:
        """Which of the meetings follow after so many steps."""
        return ()

    @property
    def whole(self) -> NamedSharding:
        """The place of what every device holds."""
        return NamedSharding(self.spec.mesh, PartitionSpec())

    @property
    def placed_shapes(self) -> TrainState:
        """A `TrainState` of shapes with shardings."""

        def placed(x, place):
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place)

        return jax.tree.map(placed, self.shapes, self.places)

    def near(self, state: TrainState) -> TrainState:
        """The same state as a step computes with it: in device memory, its buffers whole."""
        state = on_device(self.spec.strategy.offload, self.places, state)
        return dataclasses.replace(state, buffers=whole_buffers(self.spec, state.buffers))

    def values(self, state: TrainState) -> tuple[PyTree, PyTree]:
        """The model's own parameters, trained and frozen, and buffers, as a state holds them."""
        weights = self.spec.storage.weights(state.params, state.frozen)
        return weights, mean_buffers(state.buffers, self.spec.reduction)

    def arguments(self, state: TrainState, shared: PyTree) -> tuple[PyTree, PyTree]:
        """What a forward pass takes beside the samples, as a state and a batch hold it."""
        weights = self.spec.storage.forward(state.params, state.frozen)
        buffers = mean_buffers(state.buffers, self.spec.reduction)
        return weights, self.spec.parts.with_given(buffers, state.step, shared)

    @cached_property
    def weight_targets(self) -> dict[Path, jax.ShapeDtypeStruct]:
        """The model's arrays but those of random streams: shape, dtype and sharding by path."""
        is_same = self.spec.storage.rows is None
        return weight_targets(self.spec, joined(*self._stored_places) if is_same else {})

    def weights(self, state: TrainState) -> dict[Path, Array]:
        """The arrays of `weight_targets` with the values of a state."""
        targets = self.weight_targets
        where = map_with_path(lambda path, _: targets[path].sharding, self.spec.parts.weights)
        values = self.values
        if self.spec.storage.rows is not None:

            def near(state):
                return self.values(self.near(state))

            values = jax.jit(near, out_shardings=(where, self.whole))
        found = {path: leaf for tree in values(state) for path, leaf in leaves_with_paths(tree)}
        return {path: found[path] for path in targets}

    def born(self, weights: Mapping[Path, Array]) -> TrainState:
        """Makes the first state, every array where it lives.

        Args:
            weights: in place of the model's own first values, by path; they are used up.

        Returns:
            The state; a module that was given keeps its arrays.

        Raises:
            ClaimError: when an array is not split as the strategy claims.
            LaunchError: when the processes of the run start from different parameters.
        """
        # Parameters first, moments second: what drawing the former took is free again by then.
        is_placed = self.source.make is None and not weights
        stored, buffers = self._placed() if is_placed else self._drawn(weights)
        # A given module keeps its arrays: on the device it lies on, placing makes no copy.
        donated = () if is_placed else (0,)
        complete = jax.jit(self._around, out_shardings=self.places, donate_argnums=donated)
        state = complete(stored, buffers)
        first = state.params, state.frozen
        # Of the blocks of one row some may be trained and others frozen, at one place in each tree.
        is_same = self.spec.storage.rows is None
        self._agree("first parameters", joined(*first) if is_same else first)
        self.claims.check(state)
        return state

    def lower_factory(self) -> jax.stages.Lowered:
        """Lowers the making of a factory's parameters and buffers, without running it.

        Raises:
            ConfigError: when the step was given a module, whose arrays exist already.
        """
        if self.source.make is None:
            raise ConfigError(
                "the step was given a module, whose arrays exist; give build_train_step a "
                "function that makes the module, and its arrays are born where they live"
            )
        return self._factory().lower({})

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
        """(weights) -> stored parameters and buffers; what is replaced is not even drawn."""
        make: Any = self.source.make or (lambda: self.source.arrays)

        def drawn(replacing: dict[Path, Array]) -> tuple[Any, PyTree]:
            weights, buffers = (replaced(tree, replacing) for tree in make())
            return self.spec.storage.store(weights), buffers

        # Rows of a pipeline and whole numbers are other arrays than what they are made from.
        is_same = self.spec.storage.rows is None and not self.spec.parts.int8
        donated = 0 if is_same else ()
        places = (self._stored_places, self.whole)
        return jax.jit(drawn, out_shardings=places, donate_argnums=donated)

    @property
    def _stored_places(self) -> tuple[Any, Any]:
        return self.places.params, self.places.frozen

    def _drawn(self, weights: Mapping[Path, Array]) -> tuple[Any, PyTree]:
        given = placed_weights(weights, self.weight_targets)
        if self.source.make is None:
            given |= kept_weights(self.source.arrays, given, self.weight_targets)
        elif self.spec.world.num_processes > 1:
            # Processes that hold different shards have no parameters to compare.
            program = {"program": digest(self.lower_factory())}
            agree(self.spec.world, "factory of the model", program)
        return self._factory()(given)

    def _placed(self) -> tuple[Any, PyTree]:
        weights, buffers = self.source.arrays or ({}, {})
        self._agree("parameters of the model", weights)
        stored = self.spec.storage.store(weights)
        return jax.device_put((stored, buffers), (self._stored_places, self.whole))

    def _agree(self, what: str, weights: PyTree) -> None:
        if self.spec.world.num_processes > 1:
            agree(self.spec.world, what, checksums(weights))
