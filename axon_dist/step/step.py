"""The training step: one jitted function, and what belongs to it."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from ..core.errors import ConfigError, UnsupportedError
from ..core.tree import leaves_with_paths, map_with_path
from ..core.typing import Array, Batch, Path, PyTree
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
from .state import TrainState, check_usable
from .storage import Storage
from .update import are_finite, clip, skip_overflow, undo_nonfinite
from .weights import kept_weights, placed_weights, replaced, weight_targets

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

    @cached_property
    def weight_targets(self) -> dict[Path, jax.ShapeDtypeStruct]:
        """The model's arrays but those of random streams: shape, dtype and sharding by path."""
        return weight_targets(self.spec, self.state_shardings.params)

    def weights(self, state: TrainState) -> dict[Path, Array]:
        """The arrays of `weight_targets` with the values of a state, which stays usable."""
        check_usable(state)
        params, targets = state.params, self.weight_targets
        if self.storage.rows is not None:
            where = map_with_path(lambda path, _: targets[path].sharding, self.parts.params)
            to_model = lambda state: self.storage.to_model(self.near(state).params)
            params = jax.jit(to_model, out_shardings=where)(state)
        buffers = mean_buffers(state.buffers, self.spec.reduction)
        found = dict(leaves_with_paths(params)) | dict(leaves_with_paths(buffers))
        return {path: found[path] for path in targets}

    def init(self, weights: Mapping[Path, Array] | None = None) -> TrainState:
        """Makes the first state, every array born where it lives.

        Args:
            weights: by path, arrays that take the place of the model's first values, as
                `weight_targets` describes them; all of them or some. They are used up.

        Returns:
            The state. Its arrays are its own: the module given stays usable.

        Raises:
            ClaimError: when an array is not split as the strategy claims.
            ConfigError: when there is no such array in the model, or it is another one.
            LaunchError: when the processes of the run start from different parameters.
        """
        state = self._born(placed_weights(weights or {}, self.weight_targets))
        if self.world.num_processes > 1:
            agree(self.world, "first parameters", checksums(state.params))
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
        return self._factory().lower({})

    def _factory(self) -> Any:
        """(weights) -> stored parameters and buffers; what is replaced is not even drawn."""
        make: Any = self._source.make or (lambda: self._source.arrays)

        def born(weights: dict[Path, Array]) -> tuple[PyTree, PyTree]:
            params, buffers = (replaced(tree, weights) for tree in make())
            return self.storage.from_model(params), buffers

        # The rows of a pipeline are other arrays than what they are put together from.
        donated = 0 if self.storage.rows is None else ()
        where = (self.state_shardings.params, self._whole)
        return jax.jit(born, out_shardings=where, donate_argnums=donated)

    def _born(self, weights: dict[Path, Array]) -> TrainState:
        """Parameters first, moments second: what drawing the former took is free again by then."""
        is_given = self._source.make is None
        if self.world.num_processes > 1 and not is_given:
            # Processes that hold different shards have none to compare.
            agree(self.world, "factory of the model", {"program": digest(self.lower_init())})
        is_placed = is_given and not weights
        if is_given and weights:
            for arrays in self._source.arrays or ():
                weights |= kept_weights(arrays, weights, self.weight_targets)
        params, buffers = self._placed() if is_placed else self._factory()(weights)
        # A given module keeps its arrays: on the device it lies on, placing makes no copy.
        donated = () if is_placed else (0,)
        complete = jax.jit(
            self._new_state, out_shardings=self.state_shardings, donate_argnums=donated
        )
        return complete(params, buffers)

    def _placed(self) -> tuple[PyTree, PyTree]:
        params, buffers = self._source.arrays or ({}, {})
        if self.world.num_processes > 1:
            agree(self.world, "parameters of the model", checksums(params))
        stored = self.storage.from_model(params)
        return jax.device_put((stored, buffers), (self.state_shardings.params, self._whole))

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

    def evaluate_sums(self, state: TrainState, batch: Batch) -> dict[str, Weighted]:
        """What `evaluate` reports, as sums that add up over batches of any sizes.

        Over several batches a metric is `sum(totals) / sum(weights)`. Its weight is its own where
        it is `Weighted`, else that of the loss, and the number of samples where that has none.

        Args:
            state: of this step; it stays usable.
            batch: as for `evaluate`.

        Returns:
            `loss` and the metrics of the loss function, scalars on the devices.
        """
        check_usable(state)
        layout = dataclasses.replace(self.layout, num_microbatches=1)
        return self._evaluate(state, layout.place(batch))

    def evaluate(self, state: TrainState, batch: Batch) -> dict[str, Array]:
        """The loss and metrics of a batch with the model in eval mode; the state stays.

        Args:
            state: of this step; it stays usable.
            batch: leaves of shape [B, ...] as for a step; B divides by the batch ranks.

        Returns:
            `loss` and the metrics of the loss function, scalars on the devices.
        """
        return self._means(self.evaluate_sums(state, batch))

    def merge(self, state: TrainState) -> nnx.Module:
        """The model with the values of a state."""
        check_usable(state)
        if self.storage.rows is not None:
            # Rows are cut out of stacks, which only device memory lets one do.
            state = self.near(state)
        params = self.storage.to_model(state.params)
        return self.parts.merge(params, mean_buffers(state.buffers, self.spec.reduction))

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
        return jax.eval_shape(self._first_state, self.parts.params, self.parts.buffers)

    def _first_state(self, params: PyTree, buffers: PyTree) -> TrainState:
        return self._new_state(self.storage.from_model(params), buffers)

    def _new_state(self, params: PyTree, buffers: PyTree) -> TrainState:
        return TrainState(
            step=jnp.zeros((), jnp.int32),
            params=params,
            opt_state=self.spec.stored_optimizer.init(params),
            buffers=stack_buffers(buffers, self.spec.reduction, self.spec.num_ranks),
            scaler=None if self.options.scaler is None else self.options.scaler.init(),
        )

    def _gradients(self, state: TrainState, batch: Batch) -> GradientResult:
        """Mean gradients in the dtype of the parameters, metrics and new buffers."""
        scaler = self.options.scaler
        scale = None if scaler is None else state.scaler.scale
        found = self._gradient_fn(state.params, state.buffers, batch, scale)
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
        new = TrainState(state.step + 1, params, opt_state, buffers, state.scaler)
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
        return self._evaluation(self.storage.to_model(state.params), buffers, placed.arrays)
