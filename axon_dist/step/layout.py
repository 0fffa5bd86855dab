"""The layout of a step's state: shapes, shardings, claims, first values, and the step over it."""

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
from ..core.tree import combine, leaves_by_path, leaves_with_paths, map_with_path
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
from ..sharding.apply import on_devices_of
from ..sharding.padding import (
    Padding,
    even_shardings,
    model_tree,
    padding_of,
    stored_shapes,
    stored_tree,
)
from .batch import Placed
from .init_programs import IN_FLIGHT, InSlices
from .model_spec import ModelSpec, Source
from .objective import GradientResult
from .plan import StepPlan
from .separation import Separation
from .spec import StepSpec
from .state import TrainState, wide_copy
from .statistics import buffer_partition, mean_buffers, stack_buffers
from .update import one_step, unscaled_gradients


@dataclasses.dataclass(frozen=True)
class Claims:
    """The shardings that a strategy claims for parameters, gradients and moments, with reasons.

    Args:
        params: the table of the parameters.
        grads: the table of the gradients that reach the optimizer, which are sharded like its
            moments.
        opt_state: the table of the optimizer state.
        frozen: the table of the frozen parameters; without rows if there are none.
        programs: additional checks of a compiled step; each raises if the check fails.
    """

    params: Explanation
    grads: Explanation
    opt_state: Explanation
    frozen: Explanation
    programs: tuple[Callable[[jax.stages.Compiled], Any], ...] = ()

    def of_program(self, *checks: Callable[[jax.stages.Compiled], Any]) -> Claims:
        """Returns these claims with additional checks of a compiled step.

        Args:
            checks: functions of the compiled step that raise if they fail, such as
                `functools.partial(axon_dist.inspect.expect_kernels, attention=24, remat=0)`.

        Returns:
            The claims; `check_compiled` checks them all.
        """
        return dataclasses.replace(self, programs=(*self.programs, *checks))

    def check(self, state: TrainState, grads: PyTree | None = None) -> None:
        """Raises unless every array is split as claimed.

        Args:
            state: arrays, whose shards are measured, or shapes with shardings.
            grads: gradients, if there are any.

        Raises:
            ClaimError: naming the leaves of which a device has more than is claimed.
        """
        self.params.check(state.params)
        self.opt_state.check(state.opt_state)
        self.frozen.check(state.frozen)
        if grads is not None:
            self.grads.check(grads)

    def check_compiled(self, compiled: jax.stages.Compiled, state: TrainState) -> None:
        """Raises unless a compiled step returns its state split as claimed and passes all checks.

        Args:
            compiled: from `TrainStep.lower(batch).compile()`.
            state: the shapes of the state.

        Raises:
            ClaimError: as in `check`, or from one of `programs`.
        """
        for check in self.programs:
            check(compiled)
        self.check(jax.tree.map(placed_shape, state, compiled.output_shardings[0]))

    def __rich__(self) -> Group:
        frozen = [self.frozen] if self.frozen.rows else []
        explanations = (self.params, self.grads, self.opt_state, *frozen)
        return Group(*(explanation.table() for explanation in explanations))


def placed_shape(x: Leaf, sharding: Sharding) -> jax.ShapeDtypeStruct:
    """Returns the shape of an array with a sharding."""
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)


def weight_shapes(model_spec: ModelSpec) -> dict[Path, jax.ShapeDtypeStruct]:
    """Returns the shape of every array of a model by path, except those of random streams.

    Args:
        model_spec: the model's structure, and the shapes of its arrays.

    Raises:
        ConfigError: if two arrays have the same path.
    """
    rng_state, _ = nnx.split_state(nnx.state(model_spec.abstract), nnx.RngState, ...)
    streams = {path for path, _ in leaves_with_paths(nnx.to_pure_dict(rng_state))}
    leaves = leaves_by_path(model_spec.weights, model_spec.buffers)
    return {path: leaf for path, leaf in leaves.items() if path not in streams}


def _buffer_specs(spec: StepSpec) -> PyTree:
    """Returns the partition of every buffer."""
    model_spec = spec.model_spec
    buffers = buffer_partition(model_spec.buffers, spec.reduction, spec.strategy.batch_axes)
    if not model_spec.outside_forward_state or not spec.reduction.sync_buffers:
        return buffers
    # Buffers that are not statistics are sharded as parameters would be, but only by the part of
    # the policy that ignores the path of a leaf: rules about paths are for parameters.
    policy = spec.strategy.params.flexible_part
    return map_with_path(
        lambda path, x, own: (
            policy(path, x.shape, spec.mesh) if path in model_spec.outside_forward_state else own
        ),
        model_spec.buffers,
        buffers,
    )


class StateLayout:
    """The layout of a step's `TrainState`, how it is initialized and updated, and its model.

    Args:
        plan: the plan of the step.
        source: where the first values of its model come from.
        strategy: shards trained parameters and their moments; None for the strategy of
            `plan.state_plan.storage`, whose policies are about stored leaves.

    Attributes:
        plan: the plan of the step.
        spec: the resolved arguments of the step.
        source: where the first values of its model come from.
        replicated: the sharding of what every device holds whole.
        reported: the sharding of a step's metrics.
        shapes: a `TrainState` of shapes as stored: padded where a dim does not divide by the
            devices.
        state_shardings: a `TrainState` of shardings.
        model_shapes: a `TrainState` of shapes without padding, with which a step computes.
        padding: which leaves are padded; None if none is.
        grad_shardings: the shardings of the reduced gradients, which are those of their moments.
        claims: the shardings that the strategy claims, and why.
        outer_steps: the outer steps of replicas that train independently; empty without them.
    """

    def __init__(self, plan: StepPlan, source: Source, strategy: Strategy | None = None):
        spec = plan.spec
        self.plan = plan
        self.spec = spec
        self.source = source
        model_spec = spec.model_spec
        state_plan = plan.state_plan
        mesh = spec.mesh
        self.replicated = self.reported = NamedSharding(mesh, PartitionSpec())
        self.outer_steps: tuple[Callable[[TrainState], TrainState], ...] = ()
        store = state_plan.storage.store
        of_replica = state_plan.storage.strategy
        state = jax.eval_shape(
            lambda w, b: self.state_from(store(w), b), model_spec.weights, model_spec.buffers
        )
        # The shardings of one replica's parameters, trained and frozen.
        self._stored_shardings: tuple[Any, Any] = (
            shardings(of_replica.params, state_plan.params, mesh),
            shardings(of_replica.params, state_plan.frozen, mesh),
        )
        buffers = _buffer_specs(spec)
        self._split_buffers = model_spec.outside_forward_state & {
            path for path, place in leaves_with_paths(buffers) if place != PartitionSpec()
        }
        strategy = strategy or of_replica
        rows = state.params
        moments = strategy.opt_state
        self.grad_shardings = shardings(moments, rows, mesh)
        self.state_shardings: Any = TrainState(
            step=self.replicated,  # type: ignore[arg-type]
            params=shardings(strategy.params, rows, mesh),
            opt_state=optimizer_shardings(moments, rows, state.opt_state, mesh),
            buffers=jax.tree.map(lambda place: NamedSharding(mesh, place), buffers),
            scaler=jax.tree.map(lambda _: self.replicated, state.scaler),
            frozen=self._stored_shardings[1],
            # The average is sharded like the moments, which are never split less than parameters.
            ema=None if state.ema is None else shardings(moments, state.ema, mesh),
        )
        if spec.strategy.offload is not CPUOffload.NONE:
            # Replicas that train independently offload nothing: one replica's shardings will do.
            self.state_shardings = _offloaded(self.state_shardings, spec.strategy.offload)
            self._stored_shardings = self.state_shardings.params, self.state_shardings.frozen
        under = f"under {strategy.name}"
        self.claims = Claims(
            explain(strategy.params, rows, mesh, f"parameters {under}"),
            explain(moments, rows, mesh, f"gradients {under}"),
            explain_optimizer(moments, rows, state.opt_state, mesh, f"optimizer state {under}"),
            explain(of_replica.params, state.frozen, mesh, f"frozen parameters {under}"),
        )
        self.model_shapes: TrainState = state
        self._unpadded_shardings = self._with_replicas(self.state_shardings)
        self.padding: Padding | None = padding_of(state, self._unpadded_shardings)
        self.state_shardings = dataclasses.replace(self._unpadded_shardings, padding=self.padding)
        stored = stored_shapes(state, self._unpadded_shardings) if self.padding else state
        self.shapes: TrainState = dataclasses.replace(stored, padding=self.padding)

    def _with_replicas(self, state_shardings: TrainState) -> TrainState:
        """Adds the shardings of what replicas share; without replicas it adds nothing."""
        return state_shardings

    def unpadded(self, state: TrainState) -> TrainState:
        """Removes the padding of a state, as a step computes with it; call it in `jit`."""
        if self.padding is None:
            return state
        return model_tree(
            dataclasses.replace(state, padding=None), self.model_shapes, self._unpadded_shardings
        )

    def padded(self, state: TrainState) -> TrainState:
        """Pads a state as it is stored; the inverse of `unpadded`; call it in `jit`."""
        if self.padding is None:
            return state
        return dataclasses.replace(
            stored_tree(state, self._unpadded_shardings), padding=self.padding
        )

    def due(self, step: int) -> tuple[int, ...]:
        """Returns which outer steps are due after a number of steps."""
        return ()

    @property
    def placed_shapes(self) -> TrainState:
        """A `TrainState` of shapes with shardings."""
        return jax.tree.map(placed_shape, self.shapes, self.state_shardings)

    def on_device(self, state: TrainState) -> TrainState:
        """Returns the state as a step computes with it.

        It is in device memory, has no padding, and its buffers are gathered.
        """
        if self.spec.strategy.offload is not CPUOffload.NONE:
            on_device = jax.tree.map(
                lambda sharding: sharding.with_memory_kind("device"), self.state_shardings
            )
            state = jax.device_put(state, on_device)
        state = self.unpadded(state)
        if not self._split_buffers:
            return state

        def gather(path: Path, x: Array) -> Array:
            if path not in self._split_buffers:
                return x
            return jax.lax.with_sharding_constraint(x, self.replicated)

        buffers = map_with_path(gather, state.buffers)
        return dataclasses.replace(state, buffers=buffers)

    def separation(self, placed: Placed) -> Separation:
        """Finds out how the loss of a batch is computed from the losses of its parts.

        Args:
            placed: the batch, arrays or shapes.
        """
        return self.plan.with_shared(placed.shared).separator.of(placed.arrays)

    @property
    def separations(self) -> tuple[Separation, ...]:
        """The results for the batch shapes seen so far."""
        return self.plan.separator.found

    def run_gradients(self, state: TrainState, placed: Placed) -> GradientResult:
        """Computes the gradients of a state's parameters.

        Args:
            state: a state in device memory.
            placed: the batch.
        """
        return unscaled_gradients(self.plan, state, placed)

    def run_step(
        self, state: TrainState, placed: Placed, was_nonfinite: Array | None = None
    ) -> tuple[TrainState, Metrics]:
        """Computes the next state.

        Args:
            state: a state in device memory.
            placed: the batch.
            was_nonfinite: the nonfinite flag of the step before.
        """
        return one_step(self.plan, state, placed, was_nonfinite)

    def stored_model(self, state: TrainState) -> tuple[PyTree, PyTree]:
        """Returns the stored trained parameters and the buffers of a state's model."""
        return state.params, mean_buffers(state.buffers, self.spec.reduction)

    def with_params(self, state: TrainState, params: PyTree) -> TrainState:
        """Returns a state whose model has these parameters, given in the form of its `params`."""
        return dataclasses.replace(state, params=params)

    def values(self, state: TrainState) -> tuple[PyTree, PyTree]:
        """Returns a state's parameters, trained and frozen, and buffers, in the model's form."""
        params, buffers = self.stored_model(state)
        return self.plan.state_plan.storage.weights(params, state.frozen), buffers

    @cached_property
    def jitted_values(self) -> Callable[[TrainState], tuple[PyTree, PyTree]]:
        """`values` as one jitted function, for states with rows or padded arrays."""
        if self.padding is None:
            return jax.jit(self.values)
        return self._placed_values

    @cached_property
    def _placed_values(self) -> Callable[[TrainState], tuple[PyTree, PyTree]]:
        """`values` as one jitted function, with the shardings of `weight_targets`."""
        targets = self.weight_targets
        weight_shardings = map_with_path(
            lambda path, _: targets[path].sharding, self.spec.model_spec.weights
        )
        return jax.jit(
            lambda s: self.values(self.on_device(s)),
            out_shardings=(weight_shardings, self.replicated),
        )

    def arguments(self, state: TrainState, shared: PyTree) -> tuple[PyTree, PyTree]:
        """Returns the weights and buffers that a forward pass takes, from a state and a batch."""
        params, buffers = self.stored_model(state)
        weights = self.plan.state_plan.storage.forward(params, state.frozen)
        return weights, self.spec.model_spec.with_inputs(buffers, state.step, shared)

    @cached_property
    def weight_targets(self) -> dict[Path, jax.ShapeDtypeStruct]:
        """Shape, dtype and sharding by path of the model's arrays, except those of random streams.

        The sharding is the state's own. With a pipeline, whose rows are built from the model's
        arrays, these are split over all axes of the mesh instead. A dim that the state pads is
        split over as many axes as divide it.
        """
        model_spec = self.spec.model_spec
        mesh = self.spec.mesh
        if self.plan.state_plan.storage.stage_storage is None:
            stored = combine(*self._stored_shardings)
        else:
            stored = shardings(LargestDim(tuple(mesh.axis_names)), model_spec.weights, mesh)
        by_path: dict[Path, Any] = dict(leaves_with_paths(stored))
        by_path |= {path: by_path[f"{path}/{NUMBERS}"] for path in model_spec.int8}
        shapes = weight_shapes(model_spec)
        by_path = {path: by_path.get(path, self.replicated) for path in shapes}
        return jax.tree.map(placed_shape, shapes, even_shardings(shapes, by_path))

    def weights(self, state: TrainState) -> dict[Path, Array]:
        """Returns the arrays of `weight_targets` with the values of a state."""
        targets = self.weight_targets
        values = self.values
        if self.plan.state_plan.storage.stage_storage is not None or self.padding is not None:
            values = self._placed_values
        arrays = {path: leaf for tree in values(state) for path, leaf in leaves_with_paths(tree)}
        return {path: arrays[path] for path in targets}

    def init(self, weights: Mapping[Path, Array], owns: bool = True) -> TrainState:
        """Makes the first state; every array is created with its final sharding.

        Args:
            weights: arrays that replace the model's own first values, by path.
            owns: whether `weights` are donated; otherwise they are copied and stay usable.

        Returns:
            The state; a module that was given keeps its arrays.

        Raises:
            ClaimError: when an array is not split as the strategy claims.
            LaunchError: when the processes of the run start from different parameters.
        """
        # Parameters come before moments: the memory used for drawing them is free again by then.
        world = self.spec.world
        is_placed = self.source.make is None and not weights
        if is_placed:
            params, buffers = self.source.arrays or ({}, {})
            if world.num_processes > 1:
                agree(world, "parameters of the model", checksums(params))
            stored = self.plan.state_plan.storage.store(params)
            stored = put(stored_tree(stored, self._stored_shardings), self._stored_shardings)
            buffers = jax.device_put(buffers, self.replicated)
        else:
            stored, buffers = self._drawn(weights, owns)
        # A given module keeps its arrays: `put` does not copy one that is on its device already, so
        # the next program must not donate it.
        complete = self._in_slices(self._first, self.state_shardings, owns=not is_placed)
        state = complete(stored, buffers)
        if world.num_processes > 1:
            first = (state.params, state.frozen)
            # With rows, the trained and the frozen blocks of a row have the same path in both
            # trees, which cannot be combined then.
            can_combine = self.plan.state_plan.storage.stage_storage is None
            agree(world, "first parameters", checksums(combine(*first) if can_combine else first))
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
                "function that makes the module, and its arrays are created with their shardings"
            )
        return self._factory.lower({})

    def state_from(
        self, stored: tuple[PyTree, PyTree], buffers: PyTree, opt_state: PyTree = None
    ) -> TrainState:
        """Builds the first state from parameters and buffers.

        Args:
            stored: the stored parameters, trained and frozen.
            buffers: the model's.
            opt_state: the state of the optimizer; None to initialize it.
        """
        params, frozen = stored
        spec = self.spec
        scaler = spec.options.scaler
        if not spec.reduction.sync_buffers:
            buffers = stack_buffers(buffers, spec.reduction, spec.num_ranks)
        step = jnp.zeros((), jnp.int32)
        if opt_state is None:
            opt_state = self.plan.state_plan.update.traced.optimizer.init(params)
        return TrainState(
            step=step,
            params=params,
            opt_state=opt_state,
            buffers=buffers,
            scaler=None if scaler is None else scaler.init(),
            frozen=frozen,
            ema=None if spec.options.ema is None else wide_copy(params),
        )

    def _first(self, stored: tuple[PyTree, PyTree], buffers: PyTree) -> TrainState:
        """Builds the first state, padded, from stored parameters."""
        shapes = self.plan.state_plan.params, self.plan.state_plan.frozen
        return self.padded(
            self.state_from(model_tree(stored, shapes, self._stored_shardings), buffers)
        )

    @property
    def _stores_model_arrays(self) -> bool:
        """Whether stored parameters are the model's own arrays.

        Rows of a pipeline, int8 weights and padded arrays are not.
        """
        is_unchanged = (
            self.plan.state_plan.storage.stage_storage is None and not self.spec.model_spec.int8
        )
        return is_unchanged and self.padding is None

    def _first_stored(self, replacing: dict[Path, Array]) -> tuple[Any, PyTree]:
        """Makes stored parameters and buffers; arrays that are replaced are not drawn."""
        make: Any = self.source.make or (lambda: self.source.arrays)
        weights, buffers = map_with_path(
            lambda path, x: replacing.get(path.partition("/")[2], x), make()
        )
        stored = self.plan.state_plan.storage.store(weights)
        return stored_tree(stored, self._stored_shardings), buffers

    @cached_property
    def _factory(self) -> Any:
        """(weights) -> stored parameters and buffers, as one jitted function."""
        out_shardings = (self._stored_shardings, self.replicated)
        donated = 0 if self._stores_model_arrays else ()
        return jax.jit(self._first_stored, out_shardings=out_shardings, donate_argnums=donated)

    def _in_slices(self, function: Function, out_shardings: PyTree, owns: bool) -> InSlices:
        world = self.spec.world
        is_cpu = world.is_cpu
        return InSlices(
            function,
            out_shardings,
            owns=owns,
            in_flight=IN_FLIGHT if is_cpu and world.size > 1 else None,
            on_host=is_cpu,
            # Emulated devices share the cores of one machine.
            spreads=is_cpu and world.num_processes == 1,
        )

    def _drawn(self, weights: Mapping[Path, Array], owns: bool) -> tuple[Any, PyTree]:
        targets = self.weight_targets
        for path, array in weights.items():
            if path not in targets:
                raise ConfigError(f"the model has no array {path!r}.{did_you_mean(path, targets)}")
            got, wanted = (f"{x.dtype}{list(x.shape)}" for x in (array, targets[path]))
            if got != wanted:
                raise ConfigError(f"{path!r} is {wanted} in the model; got {got}; convert it first")
        # Donated arrays may be used in place; those of the module are copied, so it stays usable.
        may_alias = None if owns else False
        at = {path: target.sharding for path, target in targets.items()}
        arrays = {
            path: jax.device_put(on_devices_of(x, at[path]), at[path], may_alias=may_alias)
            for path, x in weights.items()
        }
        if self.source.arrays is not None:
            pairs = (pair for tree in self.source.arrays for pair in leaves_with_paths(tree))
            arrays |= {
                path: jax.device_put(on_devices_of(x, at[path]), at[path], may_alias=False)
                for path, x in pairs
                if path in targets and path not in arrays
            }
        elif self.spec.world.num_processes > 1:
            # Processes that hold different shards have no parameters to compare.
            program = {"program": digest(self.lower_factory())}
            agree(self.spec.world, "factory of the model", program)
        buffers = jax.tree.map(lambda _: self.replicated, self.spec.model_spec.buffers)
        made = (self._stored_shardings, buffers)
        return self._in_slices(self._first_stored, made, owns=self._stores_model_arrays)(arrays)


def _offloaded(state_shardings: TrainState, offload: CPUOffload) -> TrainState:
    """Moves the shardings of offloaded fields to host memory."""
    kinds = {"params": offload.params, "opt_state": offload.opt_state}
    kinds |= {"frozen": offload.params, "ema": offload.opt_state}
    moved = {
        name: jax.tree.map(
            lambda sharding, to=kind: sharding.with_memory_kind(to), getattr(state_shardings, name)
        )
        for name, kind in kinds.items()
        if kind is not None
    }
    return dataclasses.replace(state_shardings, **moved)
