"""The training step: one jitted function, and what belongs to it."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from ..core.errors import ConfigError, UnsupportedError
from ..core.tree import joined
from ..core.typing import Array, Batch, PyTree
from ..core.weighted import Weighted
from ..mesh import World, agree, checksums, digest
from ..parallel import Strategy
from .batch import BatchLayout, Placed
from .claims import claims_of
from .compiling import Value
from .deadlock_guard import jit_of
from .evaluation import evaluation
from .gradients import gradient_function
from .in_flight import InFlightLimit
from .local_view import mean_buffers, stack_buffers
from .nonfinite import FLAG
from .objective import GradientFn, GradientResult, mean_loss
from .options import LOSS_SCALE, StepOptions
from .parts import ModelParts, Source
from .placement import on_device, state_shardings
from .separable import Separation
from .spec import StepSpec
from .state import TrainState, averaged, check_usable
from .storage import Storage
from .update import are_finite, average, clip, first_average, skip_overflow, undo_nonfinite

STEPS_IN_FLIGHT = 16
"""The most un-waited steps on emulated devices."""


class TrainStep:
    """A jitted training step, and what belongs to it; made by `build_train_step`.

    Args:
        spec: what it is made of.
        source: where the first values of its model come from.

    Attributes:
        spec: what it is made of.
        layout: how batches are cut.
        abstract_state: a `TrainState` of shapes.
        state_shardings: a `TrainState` of shardings.
        claims: where the strategy says that arrays lie, and why; `init` checks it.
        near: (state) -> the same state, all of it in device memory.
    """

    def __init__(self, spec: StepSpec, source: Source):
        self.spec, self._source = spec, source
        self._agreed: set[str] = set()
        self.layout = BatchLayout.of(spec)
        self.abstract_state = self._abstract_state()
        self.state_shardings = state_shardings(spec, self.abstract_state)
        self.claims = claims_of(spec, self.abstract_state)
        self._gradient_fn: GradientFn = gradient_function(spec)
        self._evaluation = evaluation(spec)
        self.near = functools.partial(on_device, spec.strategy.offload, self.state_shardings)
        self._in_flight = InFlightLimit(STEPS_IN_FLIGHT if spec.world.is_cpu else 0)
        jit = functools.partial(jit_of(spec), compiler_options=spec.compiler_options)
        self._step = jit(
            self._take_step, donate_argnums=0, out_shardings=(self.state_shardings, self._whole)
        )
        self._evaluate = jit(self._evaluate_batch, out_shardings=self._whole)
        self._means = jax.jit(lambda sums: {name: mean_loss(x) for name, x in sums.items()})
        self._differentiate = jit(
            lambda state, placed: self._gradients(self.near(state), placed.arrays)[:2],
            out_shardings=(spec.owners, self._whole),
        )

    @property
    def parts(self) -> ModelParts:
        """The structure of the model and the shapes of its arrays."""
        return self.spec.parts

    @property
    def strategy(self) -> Strategy:
        """The strategy, with nothing left unsaid."""
        return self.spec.strategy

    @property
    def world(self) -> World:
        """The devices."""
        return self.spec.world

    @property
    def options(self) -> StepOptions:
        """What the step does besides the strategy."""
        return self.spec.options

    @property
    def compiler_options(self) -> Mapping[str, Value]:
        """What its programs are compiled with."""
        return self.spec.compiler_options

    @property
    def storage(self) -> Storage:
        """How the state holds the parameters."""
        return self.spec.storage

    def init(self) -> TrainState:
        """Makes the first state, every array born where it lives.

        Returns:
            The state. Its arrays are its own: the module given stays usable.

        Raises:
            ClaimError: when an array is not split as the strategy claims.
            LaunchError: when the processes of the run start from different parameters.
        """
        state = self._born()
        if self.world.num_processes > 1:
            weights = joined(state.params, state.frozen)
            agree(self.world, "first parameters", checksums(weights))
        self.claims.check(state)
        return state

    def lower_init(self) -> jax.stages.Lowered:
        """Lowers the making of a factory's parameters and buffers, without running it.

        Returns:
            The lowered program; `.compile()` it to read how much memory their birth takes.

        Raises:
            ConfigError: when the step was given a module, whose arrays exist already.
        """
        if self._source.make is None:
            raise ConfigError(
                "the step was given a module, whose arrays exist; give build_train_step a "
                "function that makes the module, and its arrays are born where they live"
            )
        return self._factory().lower()

    def _factory(self) -> Any:
        make: Any = self._source.make

        def born() -> tuple[Any, PyTree]:
            weights, buffers = make()
            return self.storage.store(weights), buffers

        return jax.jit(born, out_shardings=(self._weight_shardings, self._whole))

    @property
    def _weight_shardings(self) -> tuple[Any, Any]:
        return self.state_shardings.params, self.state_shardings.frozen

    def _born(self) -> TrainState:
        """Parameters first, moments second: what drawing the former took is free again by then."""
        is_given = self._source.make is None
        if self.world.num_processes > 1 and not is_given:
            # Processes that hold different shards have none to compare.
            agree(self.world, "factory of the model", {"program": digest(self.lower_init())})
        stored, buffers = self._placed() if is_given else self._factory()()
        # A given module keeps its arrays: on the device it lies on, placing makes no copy.
        donated = () if is_given else (0,)
        complete = jax.jit(
            self._new_state, out_shardings=self.state_shardings, donate_argnums=donated
        )
        return complete(stored, buffers)

    def _placed(self) -> tuple[Any, PyTree]:
        weights, buffers = self._source.arrays or ({}, {})
        if self.world.num_processes > 1:
            agree(self.world, "parameters of the model", checksums(weights))
        stored = self.storage.store(weights)
        return jax.device_put((stored, buffers), (self._weight_shardings, self._whole))

    def __call__(
        self, state: TrainState, batch: Batch | Placed, held: Array | None = None
    ) -> tuple[TrainState, dict]:
        """Takes one step; the arrays of the state given are used up.

        Args:
            state: from `init` or the step before.
            batch: leaves of shape [B, ...]: the global batch, or with several processes the rows
                of this one; or what `place` returned.
            held: the metric `nonfinite` of the step before. Where `nonfinite` is `"stop"` or
                `"rollback"`, the state then stays what it was before the first such step, without
                the host having to look; elsewhere it is ignored.

        Returns:
            The next state, and the metrics as scalars on the devices, not waited for.

        Raises:
            DivisibilityError: when the batch cannot be cut evenly.
            ConfigError: when an earlier step has used the state up.
        """
        check_usable(state)
        placed = batch if isinstance(batch, Placed) else self.place(batch)
        held = self._held(held)
        self._agree_on_program(state, placed, held)
        state, metrics = self._step(state, placed, held)
        self._in_flight.add(metrics["loss"])
        return state, metrics

    def _agree_on_program(self, *args: Any) -> None:
        """Before the first step on batches of a shape: whether all processes will run the same."""
        if self.world.num_processes == 1:
            return
        shapes = str(jax.tree.map(jnp.shape, args[1:]))
        if shapes not in self._agreed:
            agree(self.world, "step", {"program": digest(self._step.lower(*args))})
            self._agreed.add(shapes)

    @property
    def _whole(self) -> NamedSharding:
        return NamedSharding(self.world.mesh, PartitionSpec())

    def _held(self, held: Array | None) -> Array | None:
        """The flag of the step before; for the first step one that lies like all later ones."""
        if not self.options.holds:
            return None
        if held is not None:
            return held
        return jax.make_array_from_callback((), self._whole, lambda _: np.zeros((), bool))

    def place(self, batch: Batch) -> Placed:
        """Puts a batch on the devices, so that a later step does not wait for it."""
        return self.layout.place(batch)

    def separation(self, batch: Batch) -> Separation:
        """In which view the gradients of such a batch are computed, and why not another.

        Args:
            batch: leaves of shape [B, ...] with B the samples of all processes; shapes will do.

        Returns:
            What was found out about the loss; prints as a sentence.

        Raises:
            UnsupportedError: when the strategy needs ranks that compute the loss each from its own
                samples, and the loss couples them.
        """
        return self.spec.separator.of(self.layout.abstract(batch).arrays)

    def gradients(self, state: TrainState, batch: Batch | Placed) -> tuple[PyTree, dict]:
        """The reduced gradients of a batch, before clipping; the state stays.

        Args:
            state: of this step; it stays usable.
            batch: as for a step.

        Returns:
            A tree like the parameters, laid out as a step has them: each part where the moments
            lie that it updates; and the metrics.
        """
        check_usable(state)
        placed = batch if isinstance(batch, Placed) else self.place(batch)
        return self._differentiate(state, placed)

    def evaluate_sums(
        self, state: TrainState, batch: Batch, *, ema: bool = False
    ) -> dict[str, Weighted]:
        """What `evaluate` reports, as sums that add up over batches of any sizes.

        Over several batches a metric is `sum(totals) / sum(weights)`. Its weight is its own where
        it is `Weighted`, else that of the loss, and the number of samples where that has none.

        Args:
            state: of this step; it stays usable.
            batch: as for `evaluate`.
            ema: as for `evaluate`.

        Returns:
            `loss` and the metrics of the loss function, scalars on the devices.
        """
        check_usable(state)
        state = averaged(state) if ema else state
        layout = dataclasses.replace(self.layout, num_microbatches=1)
        return self._evaluate(state, layout.place(batch))

    def evaluate(self, state: TrainState, batch: Batch, *, ema: bool = False) -> dict[str, Array]:
        """The loss and metrics of a batch with the model in eval mode; the state stays.

        Args:
            state: of this step; it stays usable.
            batch: leaves of shape [B, ...] as for a step; B divides by the batch ranks.
            ema: with the moving average of the parameters in their place.

        Returns:
            `loss` and the metrics of the loss function, scalars on the devices.
        """
        return self._means(self.evaluate_sums(state, batch, ema=ema))

    def merge(self, state: TrainState, *, ema: bool = False) -> nnx.Module:
        """The model with the values of a state, or with the moving average of its parameters."""
        check_usable(state)
        state = averaged(state) if ema else state
        if self.storage.rows is not None:
            # Rows are cut out of stacks, which only device memory lets one do.
            state = self.near(state)
        weights = self.storage.weights(state.params, state.frozen)
        return self.parts.merge(weights, mean_buffers(state.buffers, self.spec.reduction))

    def lower(self, batch: Batch) -> jax.stages.Lowered:
        """Lowers the step for a batch of shapes or arrays, without running or storing anything.

        Args:
            batch: leaves of shape [B, ...] with B the samples of all processes;
                `jax.ShapeDtypeStruct` will do.

        Returns:
            The lowered step; `.compile()` it to read its memory and collectives. It compiles as it
            runs, with `compiler_options`.
        """
        return self._lower(batch, 1)

    def check(self, batch: Batch) -> None:
        """Traces and lowers the step for a batch, without compiling or storing anything.

        What it learns is kept: a step for such a batch then only has to be compiled.

        Args:
            batch: as for `lower`.

        Raises:
            AxonDistError: about what the step cannot do with such a batch.
        """
        self._lower(batch, 1)

    def check_rows(self, batch: Batch) -> None:
        """As `check`, for the rows of this process, which are what a step takes."""
        self._lower(batch, self.layout.num_processes)

    def _lower(self, batch: Batch, num_processes: int) -> jax.stages.Lowered:
        traced = self._step.trace(*self._arguments(batch, num_processes))
        try:
            return traced.lower()
        except Exception as error:
            raise UnsupportedError(
                f"the traced step cannot be lowered for {self.world.backend} devices: {error}. "
                "Trace the model alone for them, jax.jit(loss).lower(...), to find the operation, "
                "and use another one or another precision"
            ) from error

    def _arguments(self, batch: Batch, num_processes: int) -> tuple[Any, Placed, Any]:
        """The arguments of the step as shapes."""
        placed = lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s)
        state = jax.tree.map(placed, self.abstract_state, self.state_shardings)
        held = jax.ShapeDtypeStruct((), bool, sharding=self._whole) if self.options.holds else None
        return state, self.layout.abstract(batch, num_processes), held

    def _abstract_state(self) -> TrainState:
        return jax.eval_shape(self._first_state, self.parts.weights, self.parts.buffers)

    def _first_state(self, weights: PyTree, buffers: PyTree) -> TrainState:
        return self._new_state(self.storage.store(weights), buffers)

    def _new_state(self, stored: tuple[PyTree, PyTree], buffers: PyTree) -> TrainState:
        params, frozen = stored
        return TrainState(
            step=jnp.zeros((), jnp.int32),
            params=params,
            opt_state=self.spec.stored_optimizer.init(params),
            buffers=stack_buffers(buffers, self.spec.reduction, self.spec.num_ranks),
            scaler=None if self.options.scaler is None else self.options.scaler.init(),
            frozen=frozen,
            ema=first_average(self.options.ema, params),
        )

    def _gradients(self, state: TrainState, batch: Batch) -> GradientResult:
        """Mean gradients in the dtype of the parameters, metrics and new buffers."""
        scaler = self.options.scaler
        scale = None if scaler is None else state.scaler.scale
        found = self._gradient_fn(state.params, state.frozen, state.buffers, batch, scale)
        grads = found.grads if scaler is None else scaler.unscale(found.grads, state.scaler)
        return found._replace(
            grads=jax.tree.map(lambda g, p: g.astype(p.dtype), grads, state.params)
        )

    def _take_step(
        self, state: TrainState, placed: Placed, held: Array | None = None
    ) -> tuple[TrainState, dict]:
        state = self.near(state)
        grads, metrics, buffers = self._gradients(state, placed.arrays)
        clipped, measured = clip(grads, self.options)
        with jax.named_scope("optimizer"):
            updates, opt_state = self.spec.stored_optimizer.update(
                clipped, state.opt_state, state.params, value=metrics["loss"]
            )
            params = optax.apply_updates(state.params, updates)
        if "param_norm" in self.options.metrics:
            measured["param_norm"] = optax.tree.norm(params)
        new = dataclasses.replace(
            state,
            step=state.step + 1,
            params=params,
            opt_state=opt_state,
            buffers=buffers,
            ema=average(self.options.ema, state.ema, params),
        )
        if self.options.scaler is not None:
            new = skip_overflow(self.options.scaler, are_finite(grads, measured), new, state)
            measured[LOSS_SCALE] = new.scaler.scale
        if self.options.nonfinite is not None:
            loss, finite = metrics["loss"], are_finite(grads, measured)
            new, measured[FLAG] = undo_nonfinite(self.options, loss, finite, new, state, held)
        return new, {**metrics, **measured}

    def _evaluate_batch(self, state: TrainState, placed: Placed) -> dict[str, Weighted]:
        state = self.near(state)
        buffers = mean_buffers(state.buffers, self.spec.reduction)
        weights = self.storage.weights(state.params, state.frozen)
        return self._evaluation(weights, buffers, placed.arrays)
