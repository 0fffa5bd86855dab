"""The step of replicas that train on their own: a row of the state each, and nothing between."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec

from ..core.reduction import all_mean
from ..core.tree import combine, leaves_with_paths, num_params, partition
from ..core.typing import Array, Metrics, Path, PyTree
from ..parallel import OuterLoop
from ..sharding import Copies, optimizer_shardings, shardings, specs
from ..sharding.padding import for_region, like, stored_shape
from .batch import Placed
from .model_changes import batch_spec
from .objective import GradientResult
from .parts import Source
from .separable import Separation
from .spec import StepSpec
from .state import FLAG, TrainState
from .state_form import StateLayout
from .update import one_step, unscaled_gradients, wide_copy

ROWS = ("params", "opt_state", "buffers", "scaler")
"""What of a state has a row for each replica."""


def shared_metrics(metrics: dict[str, Array]) -> dict[str, Array]:
    """What all replicas report, as one: their means, and of what is true or false whether any is.

    Args:
        metrics: rows of scalars, one for each replica.
    """
    return {
        name: jnp.any(x) if name == FLAG else jnp.mean(x, axis=0) for name, x in metrics.items()
    }


def mean_rows(buffers: PyTree) -> PyTree:
    """The buffers to evaluate with: the mean of statistics, and of the rest the first replica's."""

    def one(x: Array) -> Array:
        return x.mean(0).astype(x.dtype) if jnp.issubdtype(x.dtype, jnp.inexact) else x[0]

    return jax.tree.map(one, buffers)


def _repeated(x: Array, replicas: int) -> Array:
    """A row for each replica; the keys of the first are the model's own, of r folded with r."""
    if not jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return jnp.broadcast_to(x, (replicas, *x.shape))
    folded = [jnp.vectorize(jax.random.fold_in)(x, number) for number in range(1, replicas)]
    return jnp.stack([x, *folded])


def separation_of(inner: StepSpec, spec: StepSpec, placed: Placed) -> Separation:
    """How the loss of a replica's share is made of those of its parts.

    Args:
        inner: the step of one replica; itself where there is one.
        spec: the step of all of them.
        placed: the batch of all of them, arrays or shapes.
    """
    slow = spec.strategy.slow
    if slow is None:
        return spec.with_shared(placed.shared).separator.of(placed.arrays)
    lead, ranks = int(spec.num_microbatches > 1), spec.mesh.shape[slow.axis]

    def share(x: Array) -> jax.ShapeDtypeStruct:
        samples = (*x.shape[:lead], x.shape[lead] // ranks, *x.shape[lead + 1 :])
        return jax.ShapeDtypeStruct(samples, x.dtype)

    return inner.with_shared(placed.shared).separator.of(jax.tree.map(share, placed.arrays))


def _specs(axis: str) -> Any:
    """The specs of a state in the region, but for what stays outside of it."""
    rows, full = PartitionSpec(axis), PartitionSpec()
    placed: Any = {name: rows for name in ROWS}
    return TrainState(step=full, frozen=full, ema=full, outer=full, meeting=full, **placed)  # type: ignore[arg-type]


def _own_row(state: TrainState) -> TrainState:
    return _with_rows(state, lambda tree: jax.tree.map(lambda x: x[0], tree))


def _stacked(tree: PyTree) -> Any:
    return jax.tree.map(lambda x: jnp.asarray(x)[None], tree)


def _with_rows(state: TrainState, change: Any) -> TrainState:
    return dataclasses.replace(state, **{name: change(getattr(state, name)) for name in ROWS})


@dataclasses.dataclass(frozen=True, eq=False)
class Outer:
    """What the replicas of a step have in common, and how it changes in an outer step.

    Args:
        spec: model, loss, optimizer, strategy, devices and options of the step.
    """

    spec: StepSpec

    @property
    def plan(self) -> OuterLoop:
        """When they synchronize, and how."""
        plan: Any = self.spec.strategy.slow
        return plan

    @property
    def fragments(self) -> tuple[frozenset[Path], ...]:
        """The paths of the parameters that synchronize together."""
        sizes = {path: num_params(x) for path, x in leaves_with_paths(self.spec.stored.params)}
        return self.plan.parts(sizes)

    def first(self, params: PyTree) -> tuple[PyTree, Metrics]:
        """What a run begins with.

        Args:
            params: of one replica, which are all alike.

        Returns:
            `outer` and `meeting` of a state.
        """
        outer = wide_copy(params)
        states = tuple(self.plan.outer.init(self._part(outer, n)) for n in self._numbers)
        if self.plan.compression is None:
            return outer, {"opt_state": states}
        rows = self.spec.mesh.shape[self.plan.axis]
        missing = jax.tree.map(lambda p: jnp.zeros((rows, *p.shape), jnp.float32), params)
        return outer, {"opt_state": states, "missing": missing}

    def places(self, state: TrainState, rows: PyTree) -> tuple[PyTree, Metrics]:
        """Its shardings: the parameters as those of a replica, alike on all of them.

        Args:
            state: of shapes.
            rows: the shardings of the replicas' own parameters.

        Returns:
            The shardings of `outer` and `meeting`.
        """
        strategy, mesh = self.spec.stored.storage.strategy, self.spec.mesh
        states = tuple(
            optimizer_shardings(strategy.opt_state, self._part(state.outer, number), one, mesh)
            for number, one in enumerate(state.meeting["opt_state"])
        )
        left = {"missing": rows} if "missing" in state.meeting else {}
        return shardings(strategy.params, state.outer, mesh), {"opt_state": states, **left}

    def program(self, number: int) -> Callable[[TrainState], TrainState]:
        """The program of one fragment's outer step, to be traced.

        Args:
            number: of the fragment.

        Returns:
            A function from a state to the next; the count of steps stays.
        """
        paths = self.fragments[number]

        # Profilers show a compiled program by the name of its function.
        def outer_step(state: TrainState) -> TrainState:
            rest, params = partition(state.params, paths)
            rest_outer, outer = partition(state.outer, paths)
            others, missing = partition(state.meeting.get("missing", {}), paths)
            grads, missing = self._mean(outer, params, missing)
            states = list(state.meeting["opt_state"])
            with jax.named_scope("outer_optimizer"):
                updates, states[number] = self.plan.outer.update(grads, states[number], outer)
                outer = optax.apply_updates(outer, updates)
            params = jax.tree.map(
                lambda o, p: jnp.broadcast_to(o.astype(p.dtype), p.shape), outer, params
            )
            left = {"missing": combine(others, missing)} if missing else {}
            return dataclasses.replace(
                state,
                params=combine(rest, params),
                outer=combine(rest_outer, outer),
                meeting={"opt_state": tuple(states), **left},
            )

        return outer_step

    def wire_bytes(self) -> int:
        """Bytes that one device sends over the slow axis in H steps, by the formula."""
        mesh, policy = self.spec.mesh, self.spec.stored.storage.strategy.params
        places = shardings(policy, self.spec.stored.params, mesh)
        by_path = dict(leaves_with_paths(places))
        shapes = leaves_with_paths(self.spec.stored.params)
        sizes = {}
        for path, x in shapes:
            place = by_path[path]
            stored = stored_shape(x.shape, place.spec, mesh)
            sizes[path] = math.prod(place.shard_shape(stored))
        return self.plan.wire_bytes(sizes, mesh.shape[self.plan.axis])

    @property
    def _numbers(self) -> range:
        return range(self.plan.fragments)

    def _part(self, tree: PyTree, number: int) -> PyTree:
        return partition(tree, self.fragments[number])[1]

    def _mean(self, outer: PyTree, params: PyTree, missing: PyTree) -> tuple[PyTree, PyTree]:
        """The mean of how far the replicas went, each device about its own shards alone."""
        mesh, axis = self.spec.world.mesh, self.plan.axis
        compression, ranks = self.plan.compression, mesh.shape[axis]
        split = specs(self.spec.stored.storage.strategy.params, outer, mesh)
        rows = jax.tree.map(lambda spec: PartitionSpec(axis, *spec), split)

        def local(outer: PyTree, params: PyTree, missing: PyTree) -> tuple[PyTree, PyTree]:
            went = jax.tree.map(lambda o, p: o - p[0].astype(o.dtype), outer, params)
            if compression is None:
                return all_mean(went, axis), missing
            values = jax.tree.map(lambda w, m: w + m[0], went, missing)
            leaves, structure = jax.tree.flatten(values)
            mean, late = compression.mean(leaves, axis, ranks)
            left = [x[None] for x in late]
            return structure.unflatten(mean), structure.unflatten(left)

        left = rows if compression is not None else missing
        mapped = jax.shard_map(
            local, mesh=mesh, in_specs=(split, rows, left), out_specs=(split, left), check_vma=False
        )
        went, late = mapped(
            for_region(outer, split, mesh),
            for_region(params, rows, mesh),
            for_region(missing, rows, mesh) if missing else missing,
        )
        return like(went, outer), like(late, missing)


class ReplicaForm(StateLayout):
    """What the state of a step with several replicas looks like, and the model in it.

    The model of a state is the one with the outer parameters, those of the last outer step, and the
    mean of the replicas' statistics.

    Args:
        spec: what the step of all replicas is made of.
        source: where the first values of its model come from.

    Attributes:
        outer: what the replicas have in common.
        inner: the step of one replica, where the axis between them is manual.
    """

    def __init__(self, spec: StepSpec, source: Source):
        self.outer, self.inner = Outer(spec), spec.replica()
        plan, strategy = self.outer.plan, spec.stored.storage.strategy
        params, moments = (Copies(x, plan.axis) for x in (strategy.params, strategy.opt_state))
        super().__init__(
            spec, source, dataclasses.replace(strategy, params=params, opt_state=moments)
        )
        self.reported = NamedSharding(spec.mesh, PartitionSpec(plan.axis))
        self.outer_steps = tuple(self.outer.program(number) for number in range(plan.fragments))

    def _with_replicas(self, places: TrainState) -> TrainState:
        """The shardings with those of what the replicas have in common."""
        row = NamedSharding(self.spec.mesh, PartitionSpec(self.outer.plan.axis))
        outer, meeting = self.outer.places(self.model_shapes, places.params)
        return dataclasses.replace(
            places,
            buffers=jax.tree.map(lambda _: row, self.model_shapes.buffers),
            scaler=jax.tree.map(lambda _: row, self.model_shapes.scaler),
            outer=outer,
            meeting=meeting,
        )

    def due(self, step: int) -> tuple[int, ...]:
        """Which outer steps follow after so many steps."""
        return self.outer.plan.due(step)

    def on_device(self, state: TrainState) -> TrainState:
        """The same state without padding: it is in device memory, and no buffer divided."""
        return self.unpadded(state)

    def _on_each(
        self,
        run: Callable[[TrainState, Placed], Any],
        state: TrainState,
        placed: Placed,
        out_specs: Any,
    ) -> Any:
        """Runs a function of one replica's state and share on all of them, side by side."""
        spec, axis = self.spec, self.outer.plan.axis
        # Looked at here, and known in the region, where it could not be traced.
        separation_of(self.inner, spec, placed)
        batch: PyTree = batch_spec((axis,), spec.num_microbatches)
        mapped = jax.shard_map(
            lambda state, placed: run(_own_row(state), placed),
            mesh=spec.world.mesh,
            axis_names=frozenset({axis}),
            in_specs=(_specs(axis), Placed(batch, PartitionSpec())),
            out_specs=out_specs,
            check_vma=False,
        )
        # What they have in common stays out: no step looks at it.
        return mapped(dataclasses.replace(state, outer=None, meeting=None), placed)

    def gradients(self, state: TrainState, placed: Placed) -> GradientResult:
        """The gradients of all replicas, and their metrics: a row for each."""
        inner = self.inner

        def run(state: TrainState, placed: Placed) -> tuple:
            return _stacked(tuple(unscaled_gradients(inner, state, placed)))

        rows = PartitionSpec(self.outer.plan.axis)
        return GradientResult(*self._on_each(run, state, placed, rows))

    def step(
        self, state: TrainState, placed: Placed, was_nonfinite: Array | None = None
    ) -> tuple[TrainState, Metrics]:
        """A step that each replica takes by itself.

        The axis between the replicas is manual, and the program of one replica is that of the same
        strategy on the rest of the mesh: no collective in it can cross the axis, for it does not
        know the axis by name. Equals

            for r in range(R):
                state[r] = step(state[r], share r of the batch)
        """
        inner, axis = self.inner, self.outer.plan.axis

        def run(state: TrainState, placed: Placed) -> tuple[TrainState, dict]:
            new, metrics = one_step(inner, state, placed, was_nonfinite)
            return _with_rows(new, _stacked), _stacked(metrics)

        out_specs = _specs(axis), PartitionSpec(axis)
        new, metrics = self._on_each(run, state, placed, out_specs)
        return dataclasses.replace(new, outer=state.outer, meeting=state.meeting), metrics

    def model_of(self, state: TrainState) -> tuple[PyTree, PyTree]:
        """The parameters on which the replicas last agreed, and the mean of their buffers."""
        outer = jax.tree.map(lambda o, p: o.astype(p.dtype), state.outer, state.params)
        return outer, mean_rows(state.buffers)

    def around(
        self, stored: tuple[PyTree, PyTree], buffers: PyTree, opt_state: PyTree = None
    ) -> TrainState:
        """The first state with given parameters; see `StateLayout.around`."""
        one = super().around(stored, buffers, opt_state)
        count = self.spec.mesh.shape[self.outer.plan.axis]
        rows = _with_rows(one, lambda tree: jax.tree.map(lambda x: _repeated(x, count), tree))
        outer, meeting = self.outer.first(one.params)
        return dataclasses.replace(rows, outer=outer, meeting=meeting)
