"""The training step: one jitted function, and methods to start, evaluate and inspect it."""

from __future__ import annotations

import dataclasses
import functools
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from ..core.errors import AxonDistError, ConfigError, UnsupportedError
from ..core.own_context import AxisNames, in_context_of_step, in_own_context, readable_by_caller
from ..core.tree import combine, leaves_with_paths, partition, shape_key, shapes_of
from ..core.typing import Array, Batch, Metrics, Path, PyTree
from ..core.weighted import FilledBatch, Weighted
from ..core.words import byte_size
from ..ir.loop_rule import LoopChoice
from ..mesh import agree, digest, is_abstract
from ..sharding import LargestDim, LeafDecision, shardings
from ..sharding.padding import model_tree, padding_of, stored_shapes, stored_tree
from .batch import BatchLayout, Placed, samples_of, split_shared
from .describe import describe
from .global_view import evaluation, means
from .guards import ESCAPED, DeadlockGuard, trace
from .replicas import separation_of, shared_metrics
from .separable import Separation
from .spec import StepSpec
from .state import WEIGHTS, TrainState, averaged, check_fits, check_usable
from .state_form import Claims, StateLayout, placed_shape
from .uneven import added, adds_up, pieces

STEPS_IN_FLIGHT = 16
"""The most steps in flight on emulated devices."""


_AT_BUILD = "Pass batch=... to build_train_step to get this error when the step is built"


class TrainStep:
    """A jitted training step, made by `build_train_step`.

    Args:
        spec: the definition of the step.
        form: the layout of its states, and how the first one is made.

    Attributes:
        spec: the definition of the step.
        parts: the structure of the model and the shapes of its arrays.
        strategy: the strategy, with every option resolved.
        world: the devices.
        options: the options of the step other than its strategy.
        storage: how the state stores the parameters.
        compiler_options: the compiler options of its programs.
        layout: how batches are cut.
        abstract_state: a `TrainState` of shapes.
        state_shardings: a `TrainState` of shardings.
        claims: the shardings that the strategy claims, and why; `init` checks them.
        on_device: (state) -> the state as a step computes with it: in device memory, without
            padding, buffers gathered.
        axis_names: which mesh axes the axis names in the model's code refer to.
        form: the layout of its states, and how the first one is made.

    Example:
        >>> import jax.numpy as jnp, optax
        >>> from flax import nnx
        >>> from axon_dist import World, build_train_step, ddp
        >>> model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
        >>> loss_fn = lambda model, batch: jnp.mean(model(batch["x"]) ** 2)
        >>> step = build_train_step(model, optax.sgd(0.1), loss_fn, ddp(), World.emulate(8))
        >>> state, metrics = step(step.init(), {"x": jnp.ones((16, 2))})
        >>> int(state.step), "loss" in metrics
        (1, True)
    """

    def __init__(self, spec: StepSpec, form: StateLayout):
        self.spec = spec
        self.parts = spec.parts
        self.strategy = spec.strategy
        self.world = spec.world
        self.options = spec.options
        self.storage = spec.stored.storage
        self.compiler_options = spec.compiler_options
        self.form = form
        self._agreed = set[str]()
        self.axis_names = AxisNames.of(spec.world.mesh, spec.options.axis_names)
        # Whether the state stays unchanged from the first nonfinite step on.
        self._keeps_state = bool(spec.options.nonfinite and spec.options.nonfinite.holds)
        self._last: weakref.ref[TrainState] | None = None
        self.layout: BatchLayout = BatchLayout.of(spec)
        self.abstract_state: TrainState = form.shapes
        self.state_shardings: TrainState = form.places
        self.claims: Claims = form.claims
        self.on_device: Callable[[TrainState], TrainState] = form.on_device
        self._in_flight = deque[Array]()
        pipeline = spec.strategy.pipeline
        sizes = spec.mesh.shape
        # The compiler partitions each stage of a pipeline over the axes that are not manual.
        manual = sizes.keys() if pipeline is None else {pipeline.axis, *spec.strategy.batch_axes}
        is_partitioned = any(size > 1 for axis, size in sizes.items() if axis not in manual)
        guarded = DeadlockGuard if is_partitioned else jax.jit
        jit = functools.partial(guarded, compiler_options=spec.compiler_options)
        on_device = form.on_device

        # Profilers show a compiled program under the name of its function.
        def train_step(
            state: TrainState, placed: Placed, was_nonfinite: Array | None = None
        ) -> tuple[TrainState, Metrics]:
            new, metrics = form.step(on_device(state), placed, was_nonfinite)
            return form.padded(new), metrics

        self._step = jit(train_step, donate_argnums=0, out_shardings=(form.places, form.reported))
        self._evaluate = jit(
            lambda state, placed: evaluation(
                spec.together(),
                *form.arguments(on_device(state), placed.shared),
                self.layout.over_ranks(placed.arrays),
            ),
            out_shardings=form.replicated,
        )

        def gradients(state: TrainState, placed: Placed) -> tuple[PyTree, Metrics]:
            grads, metrics, _ = form.gradients(on_device(state), placed)
            return stored_tree(grads, form.owners), metrics

        self._differentiate = jit(gradients, out_shardings=(form.owners, form.reported))
        self._outer_steps = [
            jit(_on_stored(run, form), donate_argnums=0, out_shardings=form.places)
            for run in form.outer_steps
        ]
        self._report = jax.jit(shared_metrics, out_shardings=form.replicated)
        self._sums_of_parts: dict[Any, bool] = {}
        self._counted: tuple[Callable[[], TrainState | None], int] = (lambda: None, 0)
        self._means = jax.jit(means)

    @property
    def idle_axes(self) -> tuple[str, ...]:
        """The mesh axes over which no strategy splits: all ranks along one compute the same."""
        sizes = self.world.mesh.shape.items()
        return tuple(axis for axis, size in sizes if size > 1 and axis not in self.strategy.axes)

    @property
    def whole(self) -> tuple[LeafDecision, ...]:
        """The arrays that every device holds whole although the strategy splits arrays, and why.

        If it splits parameters, these are trained and frozen parameters; otherwise the parameters
        whose moments are whole. Empty under a strategy that splits no array.
        """
        strategy = self.storage.strategy
        sizes = self.spec.mesh.shape
        if any(sizes[axis] > 1 for axis in strategy.params.split_axes):
            return (*self.claims.params.whole, *self.claims.frozen.whole)
        if any(sizes[axis] > 1 for axis in strategy.opt_state.split_axes):
            return self.claims.grads.whole
        return ()

    @property
    def whole_summary(self) -> str:
        """How many arrays stay whole, their bytes, and why the largest does; "" if none does."""
        if not self.whole:
            return ""
        largest = max(self.whole, key=lambda row: row.bytes)
        size = byte_size(self.whole_bytes)
        subject = "the largest" if len(self.whole) > 1 else "it"
        return (
            f"whole on every device: {len(self.whole)} "
            f"array{'s' * (len(self.whole) > 1)} of {size}, "
            f"{subject} {largest.path!r} ({largest.decision.reason})"
        )

    @property
    def whole_bytes(self) -> int:
        """The bytes per device of the arrays that stay whole."""
        return sum(row.bytes for row in self.whole)

    def __repr__(self) -> str:
        world = self.world
        count = self.spec.num_microbatches
        what = f"{self.strategy.name} on mesh {world.spec} of {world.size} {world.backend} devices"
        what += f", {count} microbatches" if count > 1 else ""
        idle = (f", no strategy uses axis {axis!r}" for axis in self.idle_axes)
        return f"TrainStep({what}{''.join(idle)})"

    def __str__(self) -> str:
        """Describes the step on one screen: mesh, split and whole arrays, view, options."""
        return describe(self)

    @property
    def loop_choices(self) -> tuple[LoopChoice, ...]:
        """Which blocks run as a loop, and why, for the batches traced so far."""
        return tuple(self.spec.loop_choices)

    @in_context_of_step
    def init(self, weights: Mapping[Path, Array] | None = None) -> TrainState:
        """Makes the first state; every array is created with its final sharding.

        Args:
            weights: arrays by path that replace the model's first values, all or some, as
                `weight_targets` describes them. They are donated.

        Returns:
            The state. Its arrays are its own: the module given stays usable.

        Raises:
            ClaimError: when an array is not split as the strategy claims.
            ConfigError: when the model has no such array, or one of another shape or dtype.
            LaunchError: when the processes of the run start from different parameters.
        """
        weights = {} if weights is None else weights
        WEIGHTS.check("init", "weights", weights)
        return self.form.init(weights)

    @in_context_of_step
    def init_from(self, params: PyTree) -> TrainState:
        """Makes the first state of a run that starts from the parameters of another.

        The optimizer state, the averages, the buffers and the count of steps start fresh. Frozen
        parameters are the model's own.

        Args:
            params: parameters in the form of a state of this step, such as
                `load_checkpoint(path, step, parts="params")` returns.

        Returns:
            The state. The moving average, and the outer parameters of replicas that train
            independently, start from these parameters too.

        Raises:
            ConfigError: when they do not have the structure of this step's parameters.
        """
        state = self.form.init({})
        if jax.tree.structure(params) != jax.tree.structure(state.params):
            found, wanted = (
                sorted(path for path, _ in leaves_with_paths(x)) for x in (params, state.params)
            )
            odd = sorted(set(found) ^ set(wanted))
            raise ConfigError(
                f"init_from got {len(found)} parameters for {len(wanted)} of the step, among "
                f"them {', '.join(odd[:4]) or 'some of another kind'}; give what "
                "load_checkpoint(path, step, parts='params') returns for this step"
            )
        state = dataclasses.replace(state, params=params)
        return self.form.init(self.form.weights(state))

    def _check(self, state: TrainState) -> None:
        """Raises unless a state fits this step; the step's own last state is not checked again."""
        check_usable(state)
        if self._last is None or self._last() is not state:
            check_fits(state, self.abstract_state, self.state_shardings)
            self._last = weakref.ref(state)

    @property
    def weight_targets(self) -> dict[Path, jax.ShapeDtypeStruct]:
        """Shape, dtype and sharding by path of the model's arrays, without random streams."""
        return self.form.weight_targets

    @in_context_of_step
    def weights(self, state: TrainState, *, ema: bool = False) -> dict[Path, Array]:
        """Returns the arrays of `weight_targets` by path, in the model's form.

        Args:
            state: a state of this step; it stays usable.
            ema: whether to take the moving average of the parameters instead.

        Returns:
            The arrays; those of a pipeline are cut out of its rows.
        """
        self._check(state)
        return self.form.weights(averaged(state) if ema else state)

    @in_context_of_step
    def lower_init(self) -> jax.stages.Lowered:
        """Lowers the program that initializes the arrays of a model given as a function.

        It is one program, whose memory is the most that `init` takes. `init` itself runs several
        smaller programs with the same results, which compile faster.

        Returns:
            The lowered program; `.compile()` it to read how much memory initialization takes.

        Raises:
            ConfigError: when the step was given a module, whose arrays exist already.
        """
        return self.form.lower_factory()

    @readable_by_caller
    @in_context_of_step
    def __call__(
        self,
        state: TrainState,
        batch: Batch | Placed,
        was_nonfinite: Array | None = None,
        *,
        held: Array | None = None,
    ) -> tuple[TrainState, Metrics]:
        """Takes one step; the arrays of the given state are donated.

        Args:
            state: from `init` or the step before.
            batch: leaves of shape [B, ...]: the global batch, or with several processes the rows
                of this one; or the result of `place`.
            was_nonfinite: the metric `nonfinite` of the previous step. If true, and the step was
                built with `nonfinite="stop"` or `"rollback"`, the state is returned unchanged.
            held: the deprecated name of `was_nonfinite`.

        Returns:
            The next state, and the metrics as scalars on the devices; the step does not wait for
            them.

        Raises:
            DivisibilityError: when the batch cannot be cut evenly.
            ConfigError: when an earlier step has used the state up.
            UnsupportedError: when, for a batch shape not traced before, the loss cannot be computed
                from the losses of its parts.
        """
        if held is not None:
            warnings.warn(
                "held= is deprecated; use was_nonfinite=", DeprecationWarning, stacklevel=2
            )
            was_nonfinite = held
        self._check(state)
        placed = batch if isinstance(batch, Placed) else self.layout.place(batch)
        was_nonfinite = self._flag(was_nonfinite) if self._keeps_state else None
        if self.world.num_processes > 1:
            self._agree_on_program(state, placed, was_nonfinite)
        # The count of steps is read from the devices only if the state is not this step's last one.
        last, count = self._counted
        if self._outer_steps and last() is not state:
            count = int(state.step)
        try:
            state, metrics = self._step(state, placed, was_nonfinite)
        except AxonDistError as error:
            if self.spec.batch is None:
                error.args = (f"{error}. {_AT_BUILD}",)
            raise
        except jax.errors.UnexpectedTracerError as error:
            message = f"{ESCAPED}. {_AT_BUILD}"
            raise UnsupportedError(message) from error
        if self._outer_steps:
            metrics = self._report(metrics)
            for number in self.form.due(count + 1):
                state = self._outer_steps[number](state)
            self._counted = weakref.ref(state), count + 1
        self._last = weakref.ref(state)
        if self.world.is_cpu:
            # Each emulated device of a step in flight blocks a thread while it waits for the
            # others. If blocked threads fill the pool, the others cannot arrive, and XLA aborts.
            self._in_flight.append(metrics["loss"])
            if len(self._in_flight) > STEPS_IN_FLIGHT:
                jax.block_until_ready(self._in_flight.popleft())
        return state, metrics

    def _agree_on_program(self, *args: Any) -> None:
        """Checks, once per batch shape, that all processes run the same program."""
        shapes = str(jax.tree.map(jnp.shape, args[1:]))
        if shapes not in self._agreed:
            agree(self.world, "step", {"program": digest(self._step.lower(*args))})
            self._agreed.add(shapes)

    def _flag(self, was_nonfinite: Array | None) -> Array:
        """Places the flag of the step before; the first step gets one with the same sharding."""
        if was_nonfinite is not None:
            # Under a caller's explicit mesh the flag is on that mesh.
            return jax.device_put(was_nonfinite, self.form.replicated)
        return jax.make_array_from_callback((), self.form.replicated, lambda _: np.zeros((), bool))

    @in_context_of_step
    def place(self, batch: Batch) -> Placed:
        """Puts a batch on the devices ahead of time, so that a later step does not wait for it."""
        return self.layout.place(batch)

    @in_context_of_step
    def separation(self, batch: Batch) -> Separation:
        """Returns in which view the gradients of such a batch are computed, and why.

        Args:
            batch: leaves of shape [B, ...] with B the samples of all processes; shapes will do.

        Returns:
            How the loss is computed from the parts of the batch; prints as a sentence.

        Raises:
            UnsupportedError: when the strategy needs every rank to compute the loss from its own
                samples, and the loss couples samples.
        """
        replica = self.spec.replica(region=False)
        return separation_of(replica, self.spec, self.layout.abstract(batch))

    @in_context_of_step
    def coupling(self, batch: Batch) -> str:
        """Says what couples samples, so that other microbatches would change the loss; or "".

        Args:
            batch: leaves of shape [B, ...] with B the samples of all processes; shapes will do.
        """
        placed = self.layout.abstract(batch)
        return self.spec.with_shared(placed.shared).separator.coupling(placed.arrays)

    @readable_by_caller
    @in_context_of_step
    def gradients(self, state: TrainState, batch: Batch | Placed) -> tuple[PyTree, Metrics]:
        """Computes the reduced gradients of a batch, before clipping.

        Args:
            state: a state of this step; it stays usable.
            batch: as for a step.

        Returns:
            A tree like the parameters, sharded and padded like their moments, as within a step; and
            the metrics.
        """
        self._check(state)
        placed = batch if isinstance(batch, Placed) else self.layout.place(batch)
        grads, metrics = self._differentiate(state, placed)
        return grads, self._report(metrics) if self._outer_steps else metrics

    @readable_by_caller
    @in_context_of_step
    def evaluate_sums(
        self, state: TrainState, batch: Batch, *, ema: bool = False
    ) -> dict[str, Weighted]:
        """Computes the numbers of `evaluate` as sums, which add up over batches of any sizes.

        Over several batches a metric is `sum(totals) / sum(weights)`. A `Weighted` metric has its
        own weight; any other metric has the weight of the loss. The weight of a plain scalar loss
        is the number of samples.

        Args:
            state: a state of this step; it stays usable.
            batch: as for `evaluate`.
            ema: as for `evaluate`.

        Returns:
            `loss` and the metrics of the loss function, scalars on the devices.
        """
        self._check(state)
        state = averaged(state) if ema else state
        layout = dataclasses.replace(self.layout, num_microbatches=1, logical_shards=1)
        if isinstance(batch, FilledBatch):
            return self._sums_of_samples(state, batch.samples, layout)
        can_place = layout.padding is not None or layout.num_processes > 1
        if can_place or samples_of(split_shared(batch)[0]) % layout.divisor == 0:
            return self._evaluate(state, layout.place(batch))
        return self._sums_of_samples(state, batch, layout)

    def _sums_of_samples(
        self, state: TrainState, batch: Batch, layout: BatchLayout
    ) -> dict[str, Weighted]:
        """Computes `evaluate_sums` for any number of samples, all of which this process has."""
        if layout.padding is not None:
            batch = layout.padding.fill(batch, 1)
        ranks = layout.divisor
        samples = samples_of(split_shared(batch)[0])
        if samples % ranks and not self._adds_up(batch):
            return self._evaluate(state, layout.place_whole(batch))
        sums = []
        for piece in pieces(samples, ranks):
            rows = layout.rows_of(piece.samples, self.world)
            sums.append(piece.once(self._evaluate(state, layout.place(piece.of(batch, rows)))))
        return added(sums)

    def _adds_up(self, batch: Batch) -> bool:
        """Whether the `evaluate_sums` of the parts of a batch add up to that of the batch."""
        samples, shared = split_shared(batch)
        key = shape_key((shapes_of(samples), shapes_of(shared)))
        if key not in self._sums_of_parts:
            spec = self.spec.together().with_shared(shared)
            self._sums_of_parts[key] = adds_up(spec, samples)
        return self._sums_of_parts[key]

    @readable_by_caller
    @in_context_of_step
    def evaluate(self, state: TrainState, batch: Batch, *, ema: bool = False) -> dict[str, Array]:
        """Computes the loss and metrics of a batch with the model in eval mode.

        Args:
            state: a state of this step; it stays usable.
            batch: leaves of shape [B, ...], as for a step. If one process has all samples, B need
                not divide by the ranks: each sample still counts once.
            ema: whether to take the moving average of the parameters instead.

        Returns:
            `loss` and the metrics of the loss function, scalars on the devices.
        """
        return self._means(self.evaluate_sums(state, batch, ema=ema))

    @in_context_of_step
    def merge(self, state: TrainState, *, ema: bool = False) -> nnx.Module:
        """Returns the model with the values of a state, or with the average of its parameters.

        Where nothing is converted, its arrays are those of the state, so the next step donates
        them.
        """
        self._check(state)
        state = averaged(state) if ema else state
        if self.storage.rows is not None or self.form.padding is not None:
            # Rows are cut out of stacks, which needs device memory. With padding, the jitted
            # `values_of_rows` moves the state itself.
            state = state if self.form.padding else self.on_device(state)
            return self.parts.merge(*self.form.values_of_rows(state))
        return self.parts.merge(*self.form.values(state))

    @in_context_of_step
    def lower(self, batch: Batch) -> jax.stages.Lowered:
        """Lowers the step for a batch of shapes or arrays, without running or storing anything.

        Args:
            batch: leaves of shape [B, ...] with B the samples of all processes; shapes will do.

        Returns:
            The lowered step; `.compile()` it to read its memory and collectives. It is the program
            that runs, and compiles with the same `compiler_options`.
        """
        return self._lower(batch, 1)

    @in_context_of_step
    def lower_outer_steps(self) -> tuple[jax.stages.Lowered, ...]:
        """Lowers the outer steps, in which replicas synchronize; one program per fragment.

        Returns:
            The lowered programs; empty if the strategy has no replicas that train independently.
        """
        return tuple(run.lower(self.form.placed_shapes) for run in self._outer_steps)

    @in_context_of_step
    def program(self, batch: Batch) -> tuple[Any, list[jax.ShapeDtypeStruct]]:
        """Traces the step for a batch of shapes, without lowering it for any device.

        Args:
            batch: as for `lower`.

        Returns:
            The closed jaxpr over global arrays, and the shapes and shardings of its arguments: the
            leaves of the state first, which it returns first, then those of the batch.
        """
        arguments = self._arguments(batch, 1)
        return trace(self._step, arguments).jaxpr, jax.tree.leaves(arguments)

    @in_context_of_step
    def outer_step_programs(self) -> tuple[tuple[Any, list[jax.ShapeDtypeStruct]], ...]:
        """Traces the outer steps, in which replicas synchronize; one program per fragment.

        Returns:
            As for `program`, with the state as the only argument; empty if the strategy has no
            replicas that train independently.
        """
        state = self.form.placed_shapes
        return tuple((run.trace(state).jaxpr, jax.tree.leaves(state)) for run in self._outer_steps)

    @in_context_of_step
    def check(self, batch: Batch) -> None:
        """Traces and lowers the step for a batch, without compiling or storing anything.

        The results are cached: a step on such a batch then only has to be compiled. In an abstract
        world it only traces.

        Args:
            batch: as for `lower`.

        Raises:
            AxonDistError: when the step cannot run on such a batch.
        """
        if is_abstract(self.world):
            trace(self._step, self._arguments(batch, 1))
        else:
            self._lower(batch, 1)

    @in_context_of_step
    def check_rows(self, batch: Batch) -> None:
        """As `check`, but takes the rows of this process, as a step does."""
        self._lower(batch, self.layout.num_processes)

    def _lower(self, batch: Batch, num_processes: int) -> jax.stages.Lowered:
        traced = trace(self._step, self._arguments(batch, num_processes))
        try:
            return traced.lower()
        except Exception as error:
            raise UnsupportedError(
                f"the traced step cannot be lowered for {self.world.backend} devices: {error}. "
                "Trace the model alone for them, jax.jit(loss).lower(...), to find the operation, "
                "and use another one or another precision"
            ) from error

    def _arguments(self, batch: Batch, num_processes: int) -> tuple[Any, Placed, Any]:
        """Returns the arguments of the step as shapes."""
        flag = jax.ShapeDtypeStruct((), bool, sharding=self.form.replicated)
        placed = self.layout.abstract(batch, num_processes)
        return self.form.placed_shapes, placed, flag if self._keeps_state else None


def _on_stored(
    run: Callable[[TrainState], TrainState], form: StateLayout
) -> Callable[[TrainState], TrainState]:
    """Turns a function of states without padding into one of stored states."""

    # Profilers show a compiled program under the name of its function.
    @functools.wraps(run)
    def on_stored(state: TrainState) -> TrainState:
        return form.padded(run(form.unpadded(state)))

    return on_stored


class PortableForm:
    """The canonical form of a step's states, which a step of any strategy can load.

    Most strategies shard the model's own arrays, so their states are portable as they are. A
    pipeline stores the blocks of its stages in rows: its parameters and optimizer state are
    converted back to the model's form. They are then split over all mesh axes, so that no device
    holds more than its share.

    Args:
        step: the step whose states are converted.

    Example:
        >>> import jax.numpy as jnp, optax
        >>> from flax import nnx
        >>> from axon_dist import World, build_train_step, ddp
        >>> loss_fn = lambda model, batch: jnp.mean(model(batch["x"]))
        >>> model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
        >>> step = build_train_step(model, optax.sgd(0.1), loss_fn, ddp(), World.emulate(8))
        >>> PortableForm(step).target.params["kernel"].shape
        (2, 1)
    """

    @in_own_context
    def __init__(self, step: TrainStep):
        self._step = step
        self.target: TrainState = step.form.placed_shapes
        self._is_same = step.storage.rows is None
        if self._is_same:
            return
        storage = step.storage
        optimizer: Any = step.spec.stored.update.traced.optimizer
        paths = step.parts.frozen_paths

        def model_weights(params: PyTree, frozen: PyTree) -> tuple[PyTree, PyTree]:
            return partition(storage.weights(params, frozen), paths)

        def row_weights(params: PyTree, frozen: PyTree) -> tuple[PyTree, PyTree]:
            return storage.store(combine(params, frozen))

        to_model = functools.partial(_convert, model_weights, optimizer.state_to_model)
        to_rows = functools.partial(_convert, row_weights, optimizer.state_from_model)
        form = step.form
        mesh = step.world.mesh
        portable = jax.eval_shape(to_model, form.model_shapes)
        places = shardings(LargestDim(tuple(mesh.axis_names)), portable, mesh)
        padding = padding_of(portable, places)
        padded = dataclasses.replace(places, padding=padding)
        stored = dataclasses.replace(stored_shapes(portable, places), padding=padding)
        self.target = jax.tree.map(placed_shape, stored, padded)

        def from_rows(state: TrainState) -> TrainState:
            converted = stored_tree(to_model(form.on_device(state)), places)
            return dataclasses.replace(converted, padding=padding)

        def into_rows(state: TrainState) -> TrainState:
            converted = model_tree(dataclasses.replace(state, padding=None), portable, places)
            return form.padded(to_rows(converted))

        self._to_model = jax.jit(from_rows, out_shardings=padded)
        self._to_rows = jax.jit(into_rows, out_shardings=step.state_shardings)

    @in_own_context
    def of(self, state: TrainState) -> TrainState:
        """Returns the portable form of a state, which stays usable."""
        return state if self._is_same else self._to_model(state)

    @in_own_context
    def with_weights(self, weights: PyTree, buffers: PyTree) -> TrainState:
        """Builds the first state of a step that is not going to train, around other weights.

        Args:
            weights: trained and frozen parameters in the model's form, with the step's shardings.
            buffers: the model's, on every device.
        """
        step = self._step
        is_same = self._is_same
        places = step.state_shardings
        if is_same:
            stored = step.storage.store(weights)
        else:
            stored = partition(weights, step.parts.frozen_paths)
        state = step.form.state_from(stored, buffers, self.target.opt_state)
        if is_same and step.form.padding is not None:
            return jax.jit(step.form.padded, out_shardings=places)(state)
        names = ("frozen", "buffers") if is_same else ("buffers",)
        placed = {n: jax.device_put(getattr(state, n), getattr(places, n)) for n in names}
        return self.take_up(dataclasses.replace(state, **placed))

    @in_own_context
    def take_up(self, portable: TrainState) -> TrainState:
        """Converts a portable state to the step's form; the exact inverse of `of`."""
        return portable if self._is_same else self._to_rows(portable)


def _convert(
    weights: Callable[[PyTree, PyTree], tuple[PyTree, PyTree]],
    opt_state: Callable[[PyTree], PyTree],
    state: TrainState,
) -> TrainState:
    params, frozen = weights(state.params, state.frozen)
    ema = None if state.ema is None else weights(state.ema, state.frozen)[0]
    return dataclasses.replace(
        state, params=params, frozen=frozen, ema=ema, opt_state=opt_state(state.opt_state)
    )
