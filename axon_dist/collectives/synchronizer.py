"""`GradientSynchronizer`: gradients come one by one, are reduced in buckets, and go back."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ..core.errors import ConfigError, DTypeError
from ..core.typing import Array, PyTree
from ..mesh import ProcessGroup
from .buckets import GradSyncStrategy, reduce_buckets
from .place import is_inside
from .plan import DEFAULT_CAPACITY, BucketPlan, as_structs, check_capacity, plan_buckets
from .reduce import all_reduce_mean


class GradientSynchronizer:
    """Averages the gradients of a model over a group, as many at once as fit into a bucket.

    The life of one step: `add_gradient` for every parameter in any order, `sync_all`, `extract`,
    `clear`. It serves code that handles gradients one by one; a jitted step calls
    `reduce_buckets` on the whole tree.

    Args:
        strategy: a `GradSyncStrategy`; NO_SYNC makes `sync_all` leave the gradients alone.
        bucket_capacity: how many elements are reduced together; 25 million are 100 MB in float32.

    Raises:
        ConfigError: for a capacity below 1.

    Example:
        >>> from axon_dist.mesh import World
        >>> sync = GradientSynchronizer(bucket_capacity=4)
        >>> sync.prepare({"w": jnp.zeros((2, 2)), "b": jnp.zeros(2)}).buckets
        ((1,), (0,))
        >>> sync.add_gradient(0, jnp.array([[1.0, 2.0], [3.0, 4.0]]))
        >>> sync.add_gradient(1, jnp.zeros((2, 2, 2)))
        >>> sync.sync_all(World.emulate(2).default_group)
        >>> sync.extract()["b"].tolist()
        [[2.0, 3.0], [2.0, 3.0]]
    """

    def __init__(
        self,
        strategy: GradSyncStrategy | str = GradSyncStrategy.SYNCHRONOUS,
        bucket_capacity: int = DEFAULT_CAPACITY,
    ):
        check_capacity(bucket_capacity)
        self.strategy: GradSyncStrategy = GradSyncStrategy(strategy)
        self.bucket_capacity: int = bucket_capacity
        self._planned: tuple[BucketPlan, Any] | None = None
        self._gradients: dict[int, Array] = {}

    def prepare(self, tree_or_shapes: PyTree) -> BucketPlan:
        """Plans the buckets and forgets all gradients.

        Args:
            tree_or_shapes: what `plan_buckets` takes; the parameters will do. Gradients are
                numbered in the order of its leaves.

        Returns:
            The plan.
        """
        plan = plan_buckets(tree_or_shapes, self.bucket_capacity)
        self._planned = plan, jax.tree.structure(as_structs(tree_or_shapes))
        self._gradients = {}
        return plan

    @property
    def plan(self) -> BucketPlan:
        """The buckets.

        Raises:
            ConfigError: before `prepare`.
        """
        return self._prepared()[0]

    def add_gradient(self, index: int, gradient: Any) -> None:
        """Hands in the gradient of one parameter.

        Args:
            index: which parameter, counted over the leaves given to `prepare`.
            gradient: of the planned dtype, and of the planned shape or, outside `shard_map`,
                rank-stacked: the planned shape with a leading dim of one row per rank.

        Raises:
            ConfigError: for an index out of range or handed in already, or another shape.
            DTypeError: for another dtype.
        """
        gradient = jnp.asarray(gradient)
        self._check_gradient(index, gradient)
        self._gradients[index] = gradient

    def ready(self) -> bool:
        """Tells whether every gradient has been handed in."""
        return not self._missing()

    def sync_all(self, group: ProcessGroup) -> None:
        """Replaces the gradients by their mean over the group, bucket by bucket.

        Args:
            group: the ranks; inside `shard_map` gradients are this rank's, outside rank-stacked.

        Raises:
            ConfigError: when gradients are missing.
            GroupError: outside `shard_map`, when gradients are not rank-stacked.
            DTypeError: for the mean of integers.
        """
        gradients = self._complete()
        if self.strategy is GradSyncStrategy.NO_SYNC:
            return
        if is_inside(group):
            reduced = _mean(self.plan, group, self.strategy)(gradients)
        else:
            rows = [jax.ShapeDtypeStruct(g.shape[1:], g.dtype) for g in gradients]
            plan = plan_buckets(rows, self.bucket_capacity)
            reduced = _stacked_mean(plan, group, self.strategy)(gradients)
        self._gradients = dict(enumerate(reduced))

    def extract(self) -> PyTree:
        """Returns the gradients in the tree that `prepare` was given, and keeps them.

        Raises:
            ConfigError: when gradients are missing.
        """
        return jax.tree.unflatten(self._prepared()[1], self._complete())

    def clear(self) -> None:
        """Forgets the gradients and keeps the plan, ready for the next step."""
        self._gradients = {}

    def _prepared(self) -> tuple[BucketPlan, Any]:
        if self._planned is None:
            raise ConfigError(
                "the synchronizer has no plan yet; call prepare(parameters) before handing "
                "gradients in"
            )
        return self._planned

    def _missing(self) -> list[int]:
        return [i for i in range(len(self.plan.shapes)) if i not in self._gradients]

    def _complete(self) -> list[Array]:
        missing = self._missing()
        if missing:
            raise ConfigError(
                f"gradients {missing} of {len(self.plan.shapes)} are missing; hand each in with "
                "add_gradient(index, gradient) first"
            )
        return [self._gradients[index] for index in range(len(self._gradients))]

    def _check_gradient(self, index: int, gradient: Array) -> None:
        num = len(self.plan.shapes)
        if not 0 <= index < num:
            raise ConfigError(f"got gradient {index}; the plan has {num}, 0..{num - 1}")
        if index in self._gradients:
            raise ConfigError(
                f"gradient {index} was handed in already; call clear() before the next step"
            )
        shape, dtype = self.plan.shapes[index], self.plan.dtypes[index]
        if shape not in (gradient.shape, gradient.shape[1:]):
            raise ConfigError(
                f"gradient {index} has shape {gradient.shape}; the plan expects {shape}, or that "
                "behind a leading dim of one row per rank"
            )
        if gradient.dtype != dtype:
            raise DTypeError(
                f"gradient {index} has dtype {gradient.dtype}, and the plan expects {dtype}; "
                f"cast it, or prepare() with arrays of dtype {gradient.dtype}"
            )


def _mean(
    plan: BucketPlan, group: ProcessGroup, strategy: GradSyncStrategy
) -> Callable[[list[Array]], list[Array]]:
    mean = functools.partial(all_reduce_mean, group=group)
    return lambda gradients: reduce_buckets(gradients, plan, mean, strategy)


@functools.lru_cache(maxsize=64)
def _stacked_mean(
    plan: BucketPlan, group: ProcessGroup, strategy: GradSyncStrategy
) -> Callable[[list[Array]], list[Array]]:
    return group.spmd(_mean(plan, group, strategy))
