"""Where replicas meet: the mean of how far they went, and the outer parameters they go on from."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec

from ..core.reduction import all_mean
from ..core.tree import joined, leaves_with_paths, num_params, parted
from ..core.typing import Path, PyTree
from ..parallel import SlowPlan
from ..sharding import optimizer_shardings, shardings, specs
from .spec import StepSpec
from .state import TrainState


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
        wide = lambda p: jnp.array(p, _wide(p.dtype), copy=True)
        outer = jax.tree.map(wide, params)
        states = tuple(self.plan.outer.init(self._part(outer, n)) for n in range(self._count))
        if self.plan.compression is None:
            return outer, {"opt_state": states}
        rows = self.spec.mesh.shape[self.plan.axis]
        missing = lambda p: jnp.zeros((rows, *p.shape), jnp.float32)
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
            follow = lambda o, p: jnp.broadcast_to(o.astype(p.dtype), p.shape)
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
        shard = lambda path, x: jax.ShapeDtypeStruct(where[path].shard_shape(x.shape), x.dtype)
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


def _wide(dtype: Any) -> Any:
    return jnp.promote_types(dtype, jnp.float32)
