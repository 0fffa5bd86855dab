"""The state of a step, described: shapes, places, claims, and how the first one is made."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec, Sharding
from rich.console import Group

from ..core.errors import ConfigError, did_you_mean
from ..core.tree import combine, leaves_with_paths, map_with_path
from ..core.typing import Array, Function, Leaf, Metrics, Path, PyTree
from ..mesh import agree, checksums, digest
from ..ops.int8 import NUMBERS
from ..parallel import CPUOffload, Strategy
from ..sharding import (
    Explanation,
    LargestDim,
    explain,
    explain_optimizer,
    optimizer_shardings,
    put,
    shardings,
)
from ..sharding.padding import (
    Padding,
    even_places,
    model_tree,
    padding_of,
    stored_shapes,
    stored_tree,
)
from .batch import Placed
from .init_programs import IN_FLIGHT, InParts
from .model_changes import buffer_partition, mean_buffers, stack_buffers
from .objective import GradientResult
from .parts import ModelSpec, Source
from .spec import StepSpec
from .state import TrainState
from .update import one_step, unscaled_gradients, wide_copy


@dataclasses.dataclass(frozen=True)
class Claims:
    """The shardings a strategy claims for parameters, gradients and moments, and why, as tables.

    Args:
        params: about the parameters.
        grads: about the gradients that reach the optimizer: they are sharded like its moments.
        opt_state: about the optimizer state.
        frozen: about the frozen parameters; of no rows where there are none.
        programs: what a compiled step must show besides; each raises where it does not.
    """

    params: Explanation
    grads: Explanation
    opt_state: Explanation
    frozen: Explanation
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
        self.check(jax.tree.map(placed_shape, state, compiled.output_shardings[0]))

    def __rich__(self) -> Group:
        frozen = [self.frozen] if self.frozen.rows else []
        explanations = (self.params, self.grads, self.opt_state, *frozen)
        return Group(*(one.table() for one in explanations))


def placed_shape(x: Leaf, sharding: Sharding) -> jax.ShapeDtypeStruct:
    """The shape of an array with its sharding."""
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)


def weight_shapes(parts: ModelSpec) -> dict[Path, jax.ShapeDtypeStruct]:
    """Every array of a model but those of random streams, by path.

    Args:
        parts: the model's structure, and the shapes of its arrays.
    """
    drawn, _ = nnx.split_state(nnx.state(parts.abstract), nnx.RngState, ...)
    streams = {path for path, _ in leaves_with_paths(nnx.to_pure_dict(drawn))}
    both = [*leaves_with_paths(parts.weights), *leaves_with_paths(parts.buffers)]
    return {path: leaf for path, leaf in both if path not in streams}


class StateLayout:
    """What a `TrainState` looks like, is init, and goes from one step to the next; its model.

    Args:
        spec: what the step is made of.
        source: where the first values of its model come from.
        strategy: lays trained parameters and their moments out; None is that of the stored form.

    Attributes:
        spec: what the step is made of.
        source: where the first values of its model come from.
        whole: the place of what every device holds.
        reported: where a step leaves its metrics.
        shapes: a `TrainState` of shapes, as they are stored: padded where devices do not divide a
            dim.
        places: a `TrainState` of shardings.
        model_shapes: a `TrainState` of shapes without padding, with which a step computes.
        padding: which leaves are padded; None where none is.
        owners: the shardings of the gradients after reduction: those of their moments.
        claims: the shardings that the strategy claims, and why.
        outer_steps: what replicas that train on their own do in an outer step; none where there is
            one.
    """

    def __init__(self, spec: StepSpec, source: Source, strategy: Strategy | None = None):
        self.spec, self.source = spec, source
        parts, stored, mesh = spec.parts, spec.stored, spec.mesh
        self.replicated = self.reported = NamedSharding(mesh, PartitionSpec())
        self.outer_steps: tuple[Callable[[TrainState], TrainState], ...] = ()
        store, one = stored.storage.store, stored.storage.strategy
        state = jax.eval_shape(lambda w, b: self.around(store(w), b), parts.weights, parts.buffers)
        # The shardings of one replica's parameters, trained and frozen.
        self._stored: tuple[Any, Any] = (
            shardings(one.params, stored.params, mesh),
            shardings(one.params, stored.frozen, mesh),
        )
        buffers = buffer_partition(parts.buffers, spec.reduction, spec.strategy.batch_axes)
        if parts.others and spec.reduction.sync_buffers:
            # Buffers that are no layer's statistics are sharded as parameters would be. Rules about
            # paths are about parameters; what divides any leaf divides these too.
            policy = spec.strategy.params.flexible_part
            buffers = map_with_path(
                lambda path, x, spec: policy(path, x.shape, mesh) if path in parts.others else spec,
                parts.buffers,
                buffers,
            )
        self._divided = parts.others & {
            path for path, spec in leaves_with_paths(buffers) if spec != PartitionSpec()
        }
        strategy = strategy or one
        rows, moments = state.params, strategy.opt_state
        self.owners = shardings(moments, rows, mesh)
        self.places: Any = TrainState(
            step=self.replicated,  # type: ignore[arg-type]
            params=shardings(strategy.params, rows, mesh),
            opt_state=optimizer_shardings(moments, rows, state.opt_state, mesh),
            buffers=jax.tree.map(lambda place: NamedSharding(mesh, place), buffers),
            scaler=jax.tree.map(lambda _: self.replicated, state.scaler),
            frozen=self._stored[1],
            # Made shard by shard where the moments are, which are never less divided than
            # parameters.
            ema=None if state.ema is None else shardings(moments, state.ema, mesh),
        )
        if spec.strategy.offload is not CPUOffload.NONE:
            # Of replicas that train on their own nothing is offloaded.
            self.places = _offloaded(self.places, spec.strategy.offload)
            self._stored = self.places.params, self.places.frozen
        under, opt_state = f"under {strategy.name}", state.opt_state
        self.claims = Claims(
            explain(strategy.params, rows, mesh, f"parameters {under}"),
            explain(moments, rows, mesh, f"gradients {under}"),
            explain_optimizer(moments, rows, opt_state, mesh, f"optimizer state {under}"),
            explain(one.params, state.frozen, mesh, f"frozen parameters {under}"),
        )
        self.model_shapes: TrainState = state
        self._places = self._with_replicas(self.places)
        self.padding: Padding | None = padding_of(state, self._places)
        self.places = dataclasses.replace(self._places, padding=self.padding)
        stored = stored_shapes(state, self._places) if self.padding else state
        self.shapes: TrainState = dataclasses.replace(stored, padding=self.padding)

    def _with_replicas(self, places: TrainState) -> TrainState:
        """The shardings with those of what replicas have in common; nothing where there is one."""
        return places

    def unpadded(self, state: TrainState) -> TrainState:
        """A stored state without the rows that pad it, as a step computes with it; in `jit`."""
        if self.padding is None:
            return state
        return model_tree(dataclasses.replace(state, padding=None), self.model_shapes, self._places)

    def padded(self, state: TrainState) -> TrainState:
        """A state as it is stored; the inverse of `unpadded`, in `jit`."""
        if self.padding is None:
            return state
        return dataclasses.replace(stored_tree(state, self._places), padding=self.padding)

    def due(self, step: int) -> tuple[int, ...]:
        """Which of the outer steps follow after so many steps."""
        return ()

    @property
    def placed_shapes(self) -> TrainState:
        """A `TrainState` of shapes with shardings."""
        return jax.tree.map(placed_shape, self.shapes, self.places)

    def on_device(self, state: TrainState) -> TrainState:
        """The same state as a step computes with it.

        It is in device memory, without padding, and its buffers are whole.
        """
        if self.spec.strategy.offload is not CPUOffload.NONE:
            places = jax.tree.map(lambda place: place.with_memory_kind("device"), self.places)
            state = jax.device_put(state, places)
        state = self.unpadded(state)
        if not self._divided:
            return state
        buffers = map_with_path(
            lambda path, x: (
                jax.lax.with_sharding_constraint(x, self.replicated) if path in self._divided else x
            ),
            state.buffers,
        )
        return dataclasses.replace(state, buffers=buffers)

    def gradients(self, state: TrainState, placed: Placed) -> GradientResult:
        """The gradients of a state's parameters, whatever their losses are scaled by."""
        return unscaled_gradients(self.spec, state, placed)

    def step(
        self, state: TrainState, placed: Placed, was_nonfinite: Array | None = None
    ) -> tuple[TrainState, Metrics]:
        """From one state in device memory to the next."""
        return one_step(self.spec, state, placed, was_nonfinite)

    def model_of(self, state: TrainState) -> tuple[PyTree, PyTree]:
        """The trained parameters as stored, and the buffers, of the model in a state."""
        return state.params, mean_buffers(state.buffers, self.spec.reduction)

    def values(self, state: TrainState) -> tuple[PyTree, PyTree]:
        """The model's own parameters, trained and frozen, and buffers, as a state holds them."""
        params, buffers = self.model_of(state)
        return self.spec.stored.storage.weights(params, state.frozen), buffers

    @cached_property
    def values_of_rows(self) -> Callable[[TrainState], tuple[PyTree, PyTree]]:
        """`values` as one program, where they are cut out of rows or of padded arrays."""
        if self.padding is None:
            return jax.jit(self.values)
        return self._placed_values

    @cached_property
    def _placed_values(self) -> Callable[[TrainState], tuple[PyTree, PyTree]]:
        """`values` as one program, each array laid out as `weight_targets` says."""
        targets = self.weight_targets
        places = map_with_path(lambda path, _: targets[path].sharding, self.spec.parts.weights)
        return jax.jit(
            lambda s: self.values(self.on_device(s)), out_shardings=(places, self.replicated)
        )

    def arguments(self, state: TrainState, shared: PyTree) -> tuple[PyTree, PyTree]:
        """What a forward pass takes beside the samples, as a state and a batch hold it."""
        params, buffers = self.model_of(state)
        weights = self.spec.stored.storage.forward(params, state.frozen)
        return weights, self.spec.parts.with_inputs(buffers, state.step, shared)

    @cached_property
    def weight_targets(self) -> dict[Path, jax.ShapeDtypeStruct]:
        """The model's arrays but those of random streams: shape, dtype and sharding by path.

        The sharding is the state's own, but for a pipeline, whose rows are put together from arrays
        that are split over all axes of the mesh. A dim that the state pads is split over as many
        axes as divide it.
        """
        parts, mesh = self.spec.parts, self.spec.mesh
        if self.spec.stored.storage.rows is None:
            places = combine(*self._stored)
        else:
            places = shardings(LargestDim(tuple(mesh.axis_names)), parts.weights, mesh)
        by_path: dict[Path, Any] = dict(leaves_with_paths(places))
        by_path |= {path: by_path[f"{path}/{NUMBERS}"] for path in parts.int8}
        shapes = weight_shapes(parts)
        places = {path: by_path.get(path, self.replicated) for path in shapes}
        return jax.tree.map(placed_shape, shapes, even_places(shapes, places))

    def weights(self, state: TrainState) -> dict[Path, Array]:
        """The arrays of `weight_targets` with the values of a state."""
        targets, values = self.weight_targets, self.values
        if self.spec.stored.storage.rows is not None or self.padding is not None:
            values = self._placed_values
        arrays = {path: leaf for tree in values(state) for path, leaf in leaves_with_paths(tree)}
        return {path: arrays[path] for path in targets}

    def init(self, weights: Mapping[Path, Array]) -> TrainState:
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
        world, is_placed = self.spec.world, self.source.make is None and not weights
        if is_placed:
            params, buffers = self.source.arrays or ({}, {})
            if world.num_processes > 1:
                agree(world, "parameters of the model", checksums(params))
            stored = self.spec.stored.storage.store(params)
            stored = put(stored_tree(stored, self._stored), self._stored)
            buffers = jax.device_put(buffers, self.replicated)
        else:
            stored, buffers = self._drawn(weights)
        # A given module keeps its arrays: placing one on the device where it is makes no copy.
        complete = self._in_parts(self._first, self.places, owns=not is_placed)
        state = complete(stored, buffers)
        if world.num_processes > 1:
            first = state.params, state.frozen
            # Of the blocks of one row some may be trained and others frozen, at one place in each
            # tree.
            is_same = self.spec.stored.storage.rows is None
            agree(world, "first parameters", checksums(combine(*first) if is_same else first))
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
                "function that makes the module, and its arrays are init where they live"
            )
        return self._factory.lower({})

    def around(
        self, stored: tuple[PyTree, PyTree], buffers: PyTree, opt_state: PyTree = None
    ) -> TrainState:
        """The first state with given parameters, trained and frozen, as stored, and buffers.

        Args:
            stored: the parameters.
            buffers: the model's.
            opt_state: of the optimizer; None has it made.
        """
        (params, frozen), spec, scaler = stored, self.spec, self.spec.options.scaler
        if not spec.reduction.sync_buffers:
            buffers = stack_buffers(buffers, spec.reduction, spec.num_ranks)
        return TrainState(
            step=jnp.zeros((), jnp.int32),
            params=params,
            opt_state=spec.stored.update.traced.optimizer.init(params)
            if opt_state is None
            else opt_state,
            buffers=buffers,
            scaler=None if scaler is None else scaler.init(),
            frozen=frozen,
            ema=None if spec.options.ema is None else wide_copy(params),
        )

    def _first(self, stored: tuple[PyTree, PyTree], buffers: PyTree) -> TrainState:
        """The first state, stored, with given parameters as they are stored."""
        shapes = self.spec.stored.params, self.spec.stored.frozen
        return self.padded(self.around(model_tree(stored, shapes, self._stored), buffers))

    @property
    def _is_same(self) -> bool:
        """Whether stored parameters are the model's own arrays.

        Rows of a pipeline, whole numbers and padded arrays are other ones.
        """
        is_same = self.spec.stored.storage.rows is None and not self.spec.parts.int8
        return is_same and self.padding is None

    def _first_stored(self, replacing: dict[Path, Array]) -> tuple[Any, PyTree]:
        """Stored parameters and buffers; what is replaced is not even drawn."""
        make: Any = self.source.make or (lambda: self.source.arrays)
        weights, buffers = map_with_path(
            lambda path, x: replacing.get(path.partition("/")[2], x), make()
        )
        stored = self.spec.stored.storage.store(weights)
        return stored_tree(stored, self._stored), buffers

    @cached_property
    def _factory(self) -> Any:
        """(weights) -> stored parameters and buffers, as one program."""
        places = (self._stored, self.replicated)
        donated = 0 if self._is_same else ()
        return jax.jit(self._first_stored, out_shardings=places, donate_argnums=donated)

    def _in_parts(self, function: Function, places: PyTree, owns: bool) -> InParts:
        world, is_cpu = self.spec.world, self.spec.world.is_cpu
        return InParts(
            function,
            places,
            owns=owns,
            in_flight=IN_FLIGHT if is_cpu and world.size > 1 else None,
            on_host=is_cpu,
            # Emulated devices share the cores of one machine.
            spreads=is_cpu and world.num_processes == 1,
        )

    def _drawn(self, weights: Mapping[Path, Array]) -> tuple[Any, PyTree]:
        targets = self.weight_targets
        for path, array in weights.items():
            if path not in targets:
                raise ConfigError(f"the model has no array {path!r}.{did_you_mean(path, targets)}")
            got, wanted = (f"{x.dtype}{list(x.shape)}" for x in (array, targets[path]))
            if got != wanted:
                raise ConfigError(f"{path!r} is {wanted} in the model; got {got}; convert it first")
        # An array that is in its place is not copied; those of a module stay usable.
        arrays = {path: jax.device_put(x, targets[path].sharding) for path, x in weights.items()}
        if self.source.arrays is not None:
            pairs = (pair for tree in self.source.arrays for pair in leaves_with_paths(tree))
            arrays |= {
                path: jax.device_put(x, targets[path].sharding, may_alias=False)
                for path, x in pairs
                if path in targets and path not in arrays
            }
        elif self.spec.world.num_processes > 1:
            # Processes that hold different shards have no parameters to compare.
            program = {"program": digest(self.lower_factory())}
            agree(self.spec.world, "factory of the model", program)
        buffers = jax.tree.map(lambda _: self.replicated, self.spec.parts.buffers)
        places = self._stored, buffers
        return self._in_parts(self._first_stored, places, owns=self._is_same)(arrays)


def _offloaded(places: TrainState, offload: CPUOffload) -> TrainState:
    """The same places, those of what is offloaded in the memory of the host."""
    kinds = {"params": offload.params, "opt_state": offload.opt_state}
    kinds |= {"frozen": offload.params, "ema": offload.opt_state}
    moved = {
        name: jax.tree.map(lambda place, to=kind: place.with_memory_kind(to), getattr(places, name))
        for name, kind in kinds.items()
        if kind is not None
    }
    return dataclasses.replace(places, **moved)
