"""The step of replicas that train on their own: a row of the state each, and nothing between."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from ..core.reduction import all_mean
from ..core.tree import joined, leaves_with_paths, num_params, parted
from ..core.typing import Array, Path, PyTree
from ..parallel import SlowPlan, Strategy
from ..sharding import Copies, optimizer_shardings, shardings, specs
from .batch import Placed
from .local_view import batch_spec
from .objective import GradientResult
from .parts import Source
from .separable import Separation
from .spec import StepSpec
from .state import FLAG, TrainState
from .state_form import Claims, StateForm, claims_of
from .update import Gradients, Take, one_step, unscaled_gradients

ROWS = ("params", "opt_state", "buffers", "scaler")
"""What of a state has a row for each replica."""


def steps_of(spec: StepSpec) -> tuple[Gradients, Take]:
    """The gradients of a state's parameters, and the step; of one replica, or of all of them.

    Args:
        spec: model, loss, optimizer, strategy, devices and options of the step.
    """
    if spec.strategy.slow is not None:
        return replica_steps(spec)
    gradients = unscaled_gradients(spec)
    return gradients, one_step(spec, gradients)


def replica_steps(spec: StepSpec) -> tuple[Gradients, Take]:
    """The gradients of all replicas, and a step that each takes by itself.

    The axis between the replicas is manual, and the program of one replica is that of the same
    strategy on the rest of the mesh: no collective in it can cross the axis, for it does not know
    the axis by name. Equals

        for r in range(R):
            state[r] = step(state[r], share r of the batch)

    Args:
        spec: model, loss, optimizer, strategy, devices and options of the step.

    Returns:
        Both as pure functions, to be traced; gradients and metrics have a row for each replica.
    """
    inner = spec.replica()
    gradients = unscaled_gradients(inner)
    take = one_step(inner, gradients)

    def differentiate(state: TrainState, placed: Placed) -> GradientResult:
        def run(state, placed):
            return _stacked(tuple(gradients(_own_row(state), placed)))

        return GradientResult(*_on_each(spec, inner, run, _rows(spec))(state, placed))

    def step(
        state: TrainState, placed: Placed, held: Array | None = None
    ) -> tuple[TrainState, dict]:
        def run(state: TrainState, placed: Placed) -> tuple[TrainState, dict]:
            new, metrics = take(_own_row(state), placed, held)
            return _with_rows(new, _stacked), _stacked(metrics)

        new, metrics = _on_each(spec, inner, run, (_specs(spec), _rows(spec)))(state, placed)
        return dataclasses.replace(new, outer=state.outer, meeting=state.meeting), metrics

    return differentiate, step


def _on_each(spec: StepSpec, inner: StepSpec, run: Any, out_specs: Any) -> Any:
    """A function of one replica's state and share as one of all of them."""

    def mapped(state: TrainState, placed: Placed) -> Any:
        # Looked at here, and known in the region, where it could not be traced.
        separation_of(inner, spec, placed)
        batch: PyTree = batch_spec(_axes(spec), spec.num_microbatches)
        here = jax.shard_map(
            run,
            mesh=spec.world.mesh,
            axis_names=frozenset(_axes(spec)),
            in_specs=(_specs(spec), Placed(batch, PartitionSpec())),
            out_specs=out_specs,
            check_vma=False,
        )
        # What they have in common stays out: no step looks at it.
        return here(dataclasses.replace(state, outer=None, meeting=None), placed)

    return mapped


def shared_metrics(metrics: dict[str, Array]) -> dict[str, Array]:
    """What all replicas report, as one: their means, and of what is true or false whether any is.

    Args:
        metrics: rows of scalars, one for each replica.
    """

    def one(name, x):
        return jnp.any(x) if name == FLAG else jnp.mean(x, axis=0)

    return {name: one(name, x) for name, x in metrics.items()}


def first_rows(state: TrainState, replicas: int) -> TrainState:
    """A state with a row for each replica, all of them alike but for their random streams.

    The keys of the first replica are the model's own; those of replica r are folded with r.

    Args:
        state: of one replica.
        replicas: how many.
    """
    return _with_rows(state, lambda tree: jax.tree.map(lambda x: _repeated(x, replicas), tree))


def mean_rows(buffers: PyTree) -> PyTree:
    """The buffers to evaluate with: the mean of statistics, and of the rest the first replica's."""

    def is_float(x):
        return jnp.issubdtype(x.dtype, jnp.inexact)

    return jax.tree.map(lambda x: x.mean(0).astype(x.dtype) if is_float(x) else x[0], buffers)


def _repeated(x: Array, replicas: int) -> Array:
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
    if spec.strategy.slow is None:
        return spec.with_shared(placed.shared).separator.of(placed.arrays)
    lead, ranks = int(spec.num_microbatches > 1), spec.mesh.shape[_axes(spec)[0]]

    def share(x: Array) -> jax.ShapeDtypeStruct:
        samples = (*x.shape[:lead], x.shape[lead] // ranks, *x.shape[lead + 1 :])
        return jax.ShapeDtypeStruct(samples, x.dtype)

    return inner.with_shared(placed.shared).separator.of(jax.tree.map(share, placed.arrays))


def _axes(spec: StepSpec) -> tuple[str, ...]:
    slow: Any = spec.strategy.slow
    return (slow.axis,)


def _rows(spec: StepSpec) -> PartitionSpec:
    return PartitionSpec(_axes(spec)[0])


def _specs(spec: StepSpec) -> Any:
    """The specs of a state in the region, but for what lies outside of it."""
    rows, whole = _rows(spec), PartitionSpec()
    placed: Any = {name: rows for name in ROWS}
    return TrainState(step=whole, frozen=whole, ema=whole, outer=whole, meeting=whole, **placed)  # type: ignore[arg-type]


def _own_row(state: TrainState) -> TrainState:
    return _with_rows(state, lambda tree: jax.tree.map(lambda x: x[0], tree))


def _stacked(tree: PyTree) -> Any:
    return jax.tree.map(lambda x: jnp.asarray(x)[None], tree)


def _with_rows(state: TrainState, change: Any) -> TrainState:
    return dataclasses.replace(state, **{name: change(getattr(state, name)) for name in ROWS})


@dataclasses.dataclass(frozen=True, eq=False)
class Outer:
    """What the replicas of a step have in common, and how it changes where they meet.

    Args:
        spec: model, loss, optimizer, strategy, devices and options of the step.
    """

    spec: StepSpec

    @property
    def plan(self) -> SlowPlan:
        """When they meet, and how."""
        plan: Any = self.spec.strategy.slow
        return plan

    @property
    def fragments(self) -> tuple[frozenset[Path], ...]:
        """The paths of the parameters that meet together."""
        sizes = {path: num_params(x) for path, x in leaves_with_paths(self.spec.stored_shapes)}
        return self.plan.parts(sizes)

    def first(self, params: PyTree) -> tuple[PyTree, dict[str, Any]]:
        """What a run begins with.

        Args:
            params: of one replica, which are all alike.

        Returns:
            `outer` and `meeting` of a state.
        """

        def wide(p):
            return jnp.array(p, _wide(p.dtype), copy=True)

        outer = jax.tree.map(wide, params)
        states = tuple(self.plan.outer.init(self._part(outer, n)) for n in range(self._count))
        if self.plan.compression is None:
            return outer, {"opt_state": states}
        rows = self.spec.mesh.shape[self.plan.axis]

        def missing(p):
            return jnp.zeros((rows, *p.shape), jnp.float32)

        return outer, {"opt_state": states, "missing": jax.tree.map(missing, params)}

    def places(self, state: TrainState, rows: PyTree) -> tuple[PyTree, dict[str, Any]]:
        """Where it lies: the parameters as those of a replica, alike on all of them.

        Args:
            state: of shapes.
            rows: the shardings of the replicas' own parameters.

        Returns:
            The shardings of `outer` and `meeting`.
        """
        strategy, mesh = self.spec.storage.strategy, self.spec.mesh
        states = tuple(
            optimizer_shardings(strategy.opt_state, self._part(state.outer, number), one, mesh)
            for number, one in enumerate(state.meeting["opt_state"])
        )
        left = {"missing": rows} if "missing" in state.meeting else {}
        return shardings(strategy.params, state.outer, mesh), {"opt_state": states, **left}

    def meet(self, number: int) -> Callable[[TrainState], TrainState]:
        """The program of one fragment's meeting, to be traced.

        Args:
            number: of the fragment.

        Returns:
            A function from a state to the next; the count of steps stays.
        """
        paths = self.fragments[number]

        # Profilers show a compiled program by the name of its function.
        def outer_step(state: TrainState) -> TrainState:
            rest, params = parted(state.params, paths)
            kept, outer = parted(state.outer, paths)
            others, missing = parted(state.meeting.get("missing", {}), paths)
            grads, missing = self._mean(outer, params, missing)
            states = list(state.meeting["opt_state"])
            with jax.named_scope("outer_optimizer"):
                updates, states[number] = self.plan.outer.update(grads, states[number], outer)
                outer = optax.apply_updates(outer, updates)

            def follow(o, p):
                return jnp.broadcast_to(o.astype(p.dtype), p.shape)

            params = jax.tree.map(follow, outer, params)
            left = {"missing": joined(others, missing)} if missing else {}
            return dataclasses.replace(
                state,
                params=joined(rest, params),
                outer=joined(kept, outer),
                meeting={"opt_state": tuple(states), **left},
            )

        return outer_step

    def wire_bytes(self) -> int:
        """Bytes that one device sends over the slow axis in H steps, by the formula."""
        mesh, policy = self.spec.mesh, self.spec.storage.strategy.params
        places = shardings(policy, self.spec.stored_shapes, mesh)
        shapes = leaves_with_paths(self.spec.stored_shapes)
        where = dict(leaves_with_paths(places))

        def shard(path, x):
            return jax.ShapeDtypeStruct(where[path].shard_shape(x.shape), x.dtype)

        sizes = {path: num_params(shard(path, x)) for path, x in shapes}
        return self.plan.wire_bytes(sizes, mesh.shape[self.plan.axis])

    @property
    def _count(self) -> int:
        return self.plan.fragments

    def _part(self, tree: PyTree, number: int) -> PyTree:
        return parted(tree, self.fragments[number])[1]

    def _mean(self, outer: PyTree, params: PyTree, missing: PyTree) -> tuple[PyTree, PyTree]:
        """The mean of how far the replicas went, each device about its own shards alone."""
        mesh, axis = self.spec.world.mesh, self.plan.axis
        compression, ranks = self.plan.compression, mesh.shape[axis]
        own = specs(self.spec.storage.strategy.params, outer, mesh)
        rows = jax.tree.map(lambda spec: PartitionSpec(axis, *spec), own)

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
            local, mesh=mesh, in_specs=(own, rows, left), out_specs=(own, left), check_vma=False
        )
        return mapped(outer, params, missing)


def _wide(dtype: DTypeLike) -> Any:
    return jnp.promote_types(dtype, jnp.float32)


@dataclasses.dataclass(frozen=True, eq=False)
class ReplicaForm(StateForm):
    """What the state of a step with several replicas looks like, and the model in it.

    The model of a state is the one with the outer parameters, those of the last meeting, and the
    mean of the replicas' statistics.
    """

    @cached_property
    def outer(self) -> Outer:
        """What the replicas have in common."""
        return Outer(self.spec)

    @cached_property
    def places(self) -> Any:
        """A `TrainState` of shardings."""
        spec, state, strategy = self.spec, self.shapes, self._rows
        row = NamedSharding(spec.mesh, PartitionSpec(self.outer.plan.axis))
        params = shardings(strategy.params, state.params, spec.mesh)
        moments = optimizer_shardings(strategy.opt_state, state.params, state.opt_state, spec.mesh)
        outer, meeting = self.outer.places(state, params)
        return TrainState(
            step=self.whole,  # type: ignore[arg-type]
            params=params,
            opt_state=moments,
            buffers=jax.tree.map(lambda _: row, state.buffers),
            scaler=jax.tree.map(lambda _: row, state.scaler),
            frozen=self._stored_places[1],
            outer=outer,
            meeting=meeting,
        )

    @cached_property
    def claims(self) -> Claims:
        """Where the strategy says that the arrays of all replicas lie, and why."""
        alone = dataclasses.replace(self.shapes, params={}, opt_state=())
        claims = claims_of(self.spec, dataclasses.replace(self.shapes, frozen={}), self._rows)
        return dataclasses.replace(claims, frozen=claims_of(self.spec, alone).frozen)

    @property
    def owners(self) -> Any:
        """The shardings of the gradients of all replicas."""
        return shardings(self._rows.opt_state, self.shapes.params, self.spec.mesh)

    @property
    def reported(self) -> NamedSharding:
        """Where a step leaves its metrics: each replica's own in its row."""
        return NamedSharding(self.spec.mesh, PartitionSpec(self.outer.plan.axis))

    @property
    def meetings(self) -> tuple[Callable[[TrainState], TrainState], ...]:
        """What the replicas do where they meet, a program for each fragment."""
        return tuple(self.outer.meet(number) for number in range(self.outer.plan.fragments))

    def due(self, step: int) -> tuple[int, ...]:
        """Which meetings follow after so many steps."""
        return self.outer.plan.due(step)

    def near(self, state: TrainState) -> TrainState:
        """The same state: all of it is in device memory, and no buffer divided."""
        return state

    def values(self, state: TrainState) -> tuple[PyTree, PyTree]:
        """The model's own parameters, as the replicas last agreed on them, and buffers."""
        return self.spec.storage.weights(self._met(state), state.frozen), mean_rows(state.buffers)

    def arguments(self, state: TrainState, shared: PyTree) -> tuple[PyTree, PyTree]:
        """What a forward pass of the model takes beside the samples."""
        weights = self.spec.storage.forward(self._met(state), state.frozen)
        return weights, self.spec.parts.with_given(mean_rows(state.buffers), state.step, shared)

    def _met(self, state: TrainState) -> PyTree:
        return jax.tree.map(lambda o, p: o.astype(p.dtype), state.outer, state.params)

    def _around(self, stored: tuple[PyTree, PyTree], buffers: PyTree) -> TrainState:
        one = super()._around(stored, buffers)
        rows = first_rows(one, self.spec.mesh.shape[self.outer.plan.axis])
        outer, meeting = self.outer.first(one.params)
        return dataclasses.replace(rows, outer=outer, meeting=meeting)

    @property
    def _rows(self) -> Strategy:
        strategy, axis = self.spec.storage.strategy, self.outer.plan.axis
        return dataclasses.replace(
            strategy,
            params=Copies(strategy.params, axis),
            opt_state=Copies(strategy.opt_state, axis),
        )

    @property
    def _stored_places(self) -> tuple[Any, Any]:
        spec = self.spec

        def place(shapes):
            return shardings(spec.storage.strategy.params, shapes, spec.mesh)

        return place(spec.stored_shapes), place(spec.stored_frozen)


def form_of(spec: StepSpec, source: Source) -> StateForm:
    """The form of the states of a step, of one replica or of several.

    Args:
        spec: what the step is made of.
        source: where the first values of its model come from.
    """
    return (StateForm if spec.strategy.slow is None else ReplicaForm)(spec, source)
