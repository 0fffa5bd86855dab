"""The step of replicas that train independently (DiLoCo); dim 0 of their state counts replicas."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec

from ..core.reduction import all_mean, mean_of_copies
from ..core.tree import combine, leaves_with_paths, num_params, partition
from ..core.typing import Array, Batch, Metrics, Path, PyTree
from ..core.weighted import Weighted
from ..parallel import OuterLoop
from ..separability.abstract_values import Dependence, LossDependence, OutputDependence
from ..sharding import Copies, optimizer_shardings, shardings, specs
from ..sharding.padding import cut_like, for_region, stored_shape
from .batch import Placed, batch_spec
from .layout import StateLayout
from .loss_sums import WITHOUT_LOSS_WEIGHT
from .model_spec import Source
from .objective import GradientResult, mean_loss, wide_number, wide_pair
from .options import FLAG
from .plan import StepPlan, plan_step
from .separation import Separation
from .state import TrainState, wide_copy
from .update import one_step, unscaled_gradients

PER_REPLICA = ("params", "opt_state", "buffers", "scaler")
"""The fields of a state whose dim 0 counts replicas."""


def shared_metrics(metrics: Mapping[str, Array | Weighted]) -> dict[str, Array]:
    """Combines the metrics of all replicas.

    Returns quotients of sums over the replicas; the logical or of the nonfinite flags; and the
    means of what replicas measure themselves. A quotient is what one device computes from the whole
    batch, if `addends_of` knew how it is made of parts; otherwise it is a weighted mean.

    Args:
        metrics: arrays [replicas], or `Weighted` of two.
    """

    def over_all(name: str, x: Array | Weighted) -> Array:
        if isinstance(x, Weighted):
            return mean_loss(jax.tree.map(lambda part: jnp.sum(part, axis=0), x))
        return jnp.any(x) if name == FLAG else jnp.mean(x, axis=0)

    return {name: over_all(name, x) for name, x in metrics.items()}


def addends_of(
    numbers: Mapping[str, Array | Weighted], dependence: LossDependence | None
) -> dict[str, Weighted]:
    """Returns what one replica adds to the sums from which the metrics of all are computed.

    A number that does not follow from those of parts, such as a maximum, gives a mean over the
    replicas, with its own weights or else those of the losses.

    Args:
        numbers: `loss` and the metrics of one replica; see `GradientResult`.
        dependence: how they relate to those of all replicas; None if that is not known, and then
            all of them give such means.
    """
    outputs = {} if dependence is None else {"loss": dependence.loss, **dependence.metrics}
    loss = numbers["loss"]
    weight = loss.weight if isinstance(loss, Weighted) else 1.0

    def addend(name: str, x: Array | Weighted) -> Weighted:
        output = outputs.get(name, OutputDependence(Dependence.COUPLED))
        if not isinstance(x, Weighted):
            weighs_one = name == "loss" or output.kind in WITHOUT_LOSS_WEIGHT
            own = 1.0 if weighs_one else wide_number(weight)
            x = Weighted(x * own, own)
        pair = wide_pair(Weighted(x.total, x.weight / output.factor))
        # A mean over no samples may be NaN, and must not make the sum over replicas NaN.
        return Weighted(jnp.where(pair.weight == 0, 0, pair.total), pair.weight)

    return {name: addend(name, x) for name, x in numbers.items()}


def buffers_for_evaluation(buffers: PyTree) -> PyTree:
    """Returns mean statistics, and the other buffers of the first replica."""

    def mean_or_first(x: Array) -> Array:
        return mean_of_copies(x) if jnp.issubdtype(x.dtype, jnp.inexact) else x[0]

    return jax.tree.map(mean_or_first, buffers)


def _repeated(x: Array, replicas: int) -> Array:
    """Repeats an array for each replica; random keys of replica r > 0 have r folded in."""
    if not jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return jnp.broadcast_to(x, (replicas, *x.shape))
    folded = [jnp.vectorize(jax.random.fold_in)(x, number) for number in range(1, replicas)]
    return jnp.stack([x, *folded])


def _specs(axis: str) -> Any:
    """Returns the specs of a state in the manual region; `outer` and `outer_state` stay outside."""
    per_replica = PartitionSpec(axis)
    full = PartitionSpec()
    placed: Any = {name: per_replica for name in PER_REPLICA}
    return TrainState(step=full, frozen=full, ema=full, outer=full, outer_state=full, **placed)  # type: ignore[arg-type]


def _own_state(state: TrainState) -> TrainState:
    """Drops dim 0, of size 1, of one replica's state inside the manual region."""
    return _map_own(state, lambda tree: jax.tree.map(lambda x: x[0], tree))


def _stacked(tree: PyTree) -> Any:
    return jax.tree.map(lambda x: jnp.asarray(x)[None], tree)


def _map_own(state: TrainState, change: Any) -> TrainState:
    """Applies a function to the trees of which each replica has its own."""
    return dataclasses.replace(
        state, **{name: change(getattr(state, name)) for name in PER_REPLICA}
    )


@dataclasses.dataclass(frozen=True, eq=False)
class Outer:
    """The parameters that all replicas of a step share, and the outer steps that update them.

    Args:
        plan: the plan of the step of all replicas.
    """

    plan: StepPlan

    @property
    def loop(self) -> OuterLoop:
        """When and how the replicas synchronize."""
        loop: Any = self.plan.spec.strategy.outer_loop
        return loop

    @property
    def fragments(self) -> tuple[frozenset[Path], ...]:
        """The paths of the parameters that synchronize together."""
        sizes = {path: num_params(x) for path, x in leaves_with_paths(self.plan.state_plan.params)}
        return self.loop.fragment_paths(sizes)

    def first(self, params: PyTree) -> tuple[PyTree, Metrics]:
        """Makes the first outer parameters and the first state of the outer optimizer.

        Args:
            params: the parameters of one replica; all replicas start from the same ones.

        Returns:
            `outer` and `outer_state` of a state.
        """
        outer = wide_copy(params)
        states = tuple(self.loop.outer.init(self._part(outer, n)) for n in self._numbers)
        if self.loop.compression is None:
            return outer, {"opt_state": states}
        replicas = self.plan.spec.mesh.shape[self.loop.axis]
        missing = jax.tree.map(lambda p: jnp.zeros((replicas, *p.shape), jnp.float32), params)
        return outer, {"opt_state": states, "missing": missing}

    def state_shardings(self, state: TrainState, params: PyTree) -> tuple[PyTree, Metrics]:
        """Returns the shardings: outer parameters are sharded like a replica's own parameters.

        Args:
            state: a state of shapes.
            params: the shardings of the replicas' own parameters.

        Returns:
            The shardings of `outer` and `outer_state`.
        """
        strategy = self.plan.state_plan.storage.strategy
        mesh = self.plan.spec.mesh
        states = tuple(
            optimizer_shardings(strategy.opt_state, self._part(state.outer, number), moments, mesh)
            for number, moments in enumerate(state.outer_state["opt_state"])
        )
        feedback = {"missing": params} if "missing" in state.outer_state else {}
        return shardings(strategy.params, state.outer, mesh), {"opt_state": states, **feedback}

    def program(self, number: int) -> Callable[[TrainState], TrainState]:
        """Returns the outer step of one fragment, to be jitted.

        Args:
            number: the index of the fragment.

        Returns:
            A function from a state to the next; it leaves the count of steps as it is.
        """
        paths = self.fragments[number]

        # Profilers show a compiled program under the name of its function.
        def outer_step(state: TrainState) -> TrainState:
            rest, params = partition(state.params, paths)
            rest_outer, outer = partition(state.outer, paths)
            others, missing = partition(state.outer_state.get("missing", {}), paths)
            grads, missing = self._mean(outer, params, missing)
            states = list(state.outer_state["opt_state"])
            with jax.named_scope("outer_optimizer"):
                updates, states[number] = self.loop.outer.update(grads, states[number], outer)
                outer = optax.apply_updates(outer, updates)
            params = jax.tree.map(
                lambda o, p: jnp.broadcast_to(o.astype(p.dtype), p.shape), outer, params
            )
            feedback = {"missing": combine(others, missing)} if missing else {}
            return dataclasses.replace(
                state,
                params=combine(rest, params),
                outer=combine(rest_outer, outer),
                outer_state={"opt_state": tuple(states), **feedback},
            )

        return outer_step

    def wire_bytes(self) -> int:
        """Returns the bytes that one device sends over the slow axis in H steps, by the formula."""
        mesh = self.plan.spec.mesh
        policy = self.plan.state_plan.storage.strategy.params
        state_shardings = shardings(policy, self.plan.state_plan.params, mesh)
        by_path = dict(leaves_with_paths(state_shardings))
        shapes = leaves_with_paths(self.plan.state_plan.params)
        sizes = {}
        for path, x in shapes:
            place = by_path[path]
            stored = stored_shape(x.shape, place.spec, mesh)
            sizes[path] = math.prod(place.shard_shape(stored))
        return self.loop.wire_bytes(sizes, mesh.shape[self.loop.axis])

    @property
    def _numbers(self) -> range:
        return range(self.loop.fragments)

    def _part(self, tree: PyTree, number: int) -> PyTree:
        return partition(tree, self.fragments[number])[1]

    def _mean(self, outer: PyTree, params: PyTree, missing: PyTree) -> tuple[PyTree, PyTree]:
        """Averages how far the replicas moved from the outer parameters, shard by shard.

        Returns:
            The mean, which is the gradient of the outer optimizer, and the new error feedback.
        """
        mesh = self.plan.spec.world.mesh
        axis = self.loop.axis
        compression = self.loop.compression
        ranks = mesh.shape[axis]
        split = specs(self.plan.state_plan.storage.strategy.params, outer, mesh)
        own_specs = jax.tree.map(lambda spec: PartitionSpec(axis, *spec), split)

        def local(outer: PyTree, params: PyTree, missing: PyTree) -> tuple[PyTree, PyTree]:
            deltas = jax.tree.map(lambda o, p: o - p[0].astype(o.dtype), outer, params)
            if compression is None:
                return all_mean(deltas, axis), missing
            values = jax.tree.map(lambda d, m: d + m[0], deltas, missing)
            leaves, structure = jax.tree.flatten(values)
            mean, errors = compression.mean(leaves, axis, ranks)
            return structure.unflatten(mean), structure.unflatten([x[None] for x in errors])

        feedback_specs = own_specs if compression is not None else missing
        mapped = jax.shard_map(
            local,
            mesh=mesh,
            in_specs=(split, own_specs, feedback_specs),
            out_specs=(split, feedback_specs),
            check_vma=False,
        )
        mean, errors = mapped(
            for_region(outer, split, mesh),
            for_region(params, own_specs, mesh),
            for_region(missing, own_specs, mesh) if missing else missing,
        )
        return cut_like(mean, outer), cut_like(errors, missing)


class ReplicaLayout(StateLayout):
    """The layout of the state of a step with several replicas.

    The model of such a state has the outer parameters, which are those after the last outer step,
    and the mean of the replicas' statistics.

    Args:
        plan: the plan of the step of all replicas.
        source: where the first values of its model come from.

    Attributes:
        outer: the parameters that all replicas share, and their outer steps.
        inner: the plan of one replica, in the region where the axis between replicas is manual.
    """

    def __init__(self, plan: StepPlan, source: Source):
        self.outer = Outer(plan)
        self.inner = plan_step(plan.spec.replica(), plan)
        loop = self.outer.loop
        strategy = plan.state_plan.storage.strategy
        params = Copies(strategy.params, loop.axis)
        moments = Copies(strategy.opt_state, loop.axis)
        super().__init__(
            plan, source, dataclasses.replace(strategy, params=params, opt_state=moments)
        )
        self.reported = NamedSharding(plan.spec.mesh, PartitionSpec(loop.axis))
        self.outer_steps = tuple(self.outer.program(number) for number in range(loop.fragments))

    def _with_replicas(self, state_shardings: TrainState) -> TrainState:
        """Adds the shardings of `outer` and `outer_state`, which all replicas share."""
        per_replica = NamedSharding(self.spec.mesh, PartitionSpec(self.outer.loop.axis))
        outer, outer_state = self.outer.state_shardings(self.model_shapes, state_shardings.params)
        return dataclasses.replace(
            state_shardings,
            buffers=jax.tree.map(lambda _: per_replica, self.model_shapes.buffers),
            scaler=jax.tree.map(lambda _: per_replica, self.model_shapes.scaler),
            outer=outer,
            outer_state=outer_state,
        )

    def due(self, step: int) -> tuple[int, ...]:
        """Returns which outer steps are due after a number of steps."""
        return self.outer.loop.due(step)

    def on_device(self, state: TrainState) -> TrainState:
        """Removes the padding; the state is in device memory and its buffers are not sharded."""
        return self.unpadded(state)

    def _on_each(
        self,
        run: Callable[[TrainState, Placed], Any],
        state: TrainState,
        placed: Placed,
        out_specs: Any,
    ) -> Any:
        """Runs a function of one replica's state and share of the batch on all replicas at once."""
        spec = self.spec
        axis = self.outer.loop.axis
        # The separator caches what it finds here: the loss could not be traced in the region.
        self.separation(placed)
        batch: PyTree = batch_spec((axis,), spec.num_microbatches)
        mapped = jax.shard_map(
            lambda state, placed: run(_own_state(state), placed),
            mesh=spec.world.mesh,
            axis_names=frozenset({axis}),
            in_specs=(_specs(axis), Placed(batch, PartitionSpec())),
            out_specs=out_specs,
            check_vma=False,
        )
        # The arrays that replicas share stay outside: inner steps do not read them.
        return mapped(dataclasses.replace(state, outer=None, outer_state=None), placed)

    def separation(self, placed: Placed) -> Separation:
        """Finds out how the loss of one replica's share of a batch is computed from its parts.

        Args:
            placed: the batch of all replicas, arrays or shapes.
        """
        separator = self.inner.with_shared(placed.shared).separator
        return separator.of(self._share(placed.arrays))

    def _share(self, batch: Batch) -> PyTree:
        """Returns the shapes of one replica's share of a placed batch."""
        spec = self.spec
        lead = int(spec.num_microbatches > 1)
        replicas = spec.mesh.shape[self.outer.loop.axis]

        def share(x: Array) -> jax.ShapeDtypeStruct:
            samples = (*x.shape[:lead], x.shape[lead] // replicas, *x.shape[lead + 1 :])
            return jax.ShapeDtypeStruct(samples, x.dtype)

        return jax.tree.map(share, batch)

    def dependence(self, placed: Placed) -> LossDependence | None:
        """Finds out how the metrics of the replicas relate to those of the whole batch.

        Args:
            placed: the batch of all replicas, arrays or shapes.

        Returns:
            The dependence; None if the loss cannot be computed for the samples of all replicas.
        """
        replicas = self.spec.mesh.shape[self.outer.loop.axis]
        separator = self.inner.with_shared(placed.shared).separator
        return separator.dependence_over(self._share(placed.arrays), replicas)

    @property
    def separations(self) -> tuple[Separation, ...]:
        """The results for the batch shapes of a replica seen so far."""
        return self.inner.separator.found

    def run_gradients(self, state: TrainState, placed: Placed) -> GradientResult:
        """Returns the gradients, and what `shared_metrics` takes; their dim 0 counts replicas."""
        inner = self.inner
        dependence = self.dependence(placed)

        def of_replica(state: TrainState, placed: Placed) -> tuple:
            result = unscaled_gradients(inner, state, placed)
            numbers = addends_of(result.numbers, dependence)
            return _stacked((result.grads, numbers, result.buffers))

        per_replica = PartitionSpec(self.outer.loop.axis)
        grads, numbers, buffers = self._on_each(of_replica, state, placed, per_replica)
        return GradientResult(grads, numbers, buffers, numbers)

    def with_params(self, state: TrainState, params: PyTree) -> TrainState:
        """See `StateLayout.with_params`; the outer parameters are the mean over the replicas."""

        def mean(replicas: Array, outer: Array) -> Array:
            return mean_of_copies(replicas.astype(outer.dtype))

        placed = jax.tree.map(lambda x: x.sharding, state.outer)
        outer = jax.jit(lambda p, o: jax.tree.map(mean, p, o), out_shardings=placed)(
            params, state.outer
        )
        return dataclasses.replace(state, params=params, outer=outer)

    def run_step(
        self, state: TrainState, placed: Placed, was_nonfinite: Array | None = None
    ) -> tuple[TrainState, Metrics]:
        """Takes one step on each replica independently.

        The axis between the replicas is manual. The program of one replica is that of the same
        strategy on the rest of the mesh. No collective in it can cross the axis, because the
        program does not name the axis. Equals

            for r in range(R):
                state[r] = step(state[r], share r of the batch)
        """
        inner = self.inner
        axis = self.outer.loop.axis
        dependence = self.dependence(placed)

        def reported(result: GradientResult) -> Metrics:
            return addends_of(result.numbers, dependence)

        def of_replica(state: TrainState, placed: Placed) -> tuple[TrainState, dict]:
            new, metrics = one_step(inner, state, placed, was_nonfinite, reported)
            return _map_own(new, _stacked), _stacked(metrics)

        out_specs = _specs(axis), PartitionSpec(axis)
        new, metrics = self._on_each(of_replica, state, placed, out_specs)
        return dataclasses.replace(new, outer=state.outer, outer_state=state.outer_state), metrics

    def stored_model(self, state: TrainState) -> tuple[PyTree, PyTree]:
        """Returns the parameters of the last outer step, and the mean of the replicas' buffers."""
        outer = jax.tree.map(lambda o, p: o.astype(p.dtype), state.outer, state.params)
        return outer, buffers_for_evaluation(state.buffers)

    def state_from(
        self, stored: tuple[PyTree, PyTree], buffers: PyTree, opt_state: PyTree = None
    ) -> TrainState:
        """Builds the first state around given parameters; see `StateLayout.state_from`."""
        one = super().state_from(stored, buffers, opt_state)
        count = self.spec.mesh.shape[self.outer.loop.axis]

        def repeated(tree: PyTree) -> PyTree:
            return jax.tree.map(lambda x: _repeated(x, count), tree)

        outer, outer_state = self.outer.first(one.params)
        return dataclasses.replace(_map_own(one, repeated), outer=outer, outer_state=outer_state)
