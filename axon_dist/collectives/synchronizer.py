"""`GradientSynchronizer`: collects gradients one by one and reduces them in buckets."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from ..core.checks import NUMBERS, is_whole
from ..core.errors import ConfigError, DTypeError, GroupError
from ..core.reduction import all_sum
from ..core.typing import Array, PyTree, Shape
from ..mesh import ProcessGroup
from .buckets import (
    DEFAULT_CAPACITY,
    BucketPlan,
    GradSyncStrategy,
    as_structs,
    check_capacity,
    plan_buckets,
    reduce_buckets,
)
from .place import check_arrays, each_leaf, has_varying_types, is_inside
from .reduce import check_mean, mean_leaf


class GradientSynchronizer:
    """Averages the gradients of a model over a group, bucket by bucket.

    One step calls `add_gradient` for every parameter in any order, then `sync_all`, `extract` and
    `clear`. It is for code that handles gradients one by one; a jitted step calls
    `reduce_buckets` on the whole tree.

    Args:
        strategy: a `GradSyncStrategy`; with NO_SYNC `sync_all` does not change the gradients.
        bucket_capacity: elements per bucket; 25 million are 100 MB in float32.

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
        """Plans the buckets and drops all gradients.

        Args:
            tree_or_shapes: a tree for `plan_buckets`, for example the parameters. Gradients are
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

    def add_gradient(self, index: int, gradient: Array | np.ndarray | float) -> None:
        """Adds the gradient of one parameter.

        Args:
            index: the index of the parameter among the leaves given to `prepare`.
            gradient: an array of the planned dtype and shape; outside `shard_map` it may be
                rank-stacked, with a leading dim of one row per rank.

        Raises:
            ConfigError: for an index that is out of range or added twice, or another shape.
            DTypeError: for another dtype.
        """
        check_arrays(gradient)
        gradient = jnp.asarray(gradient)
        self._check_gradient(index, gradient)
        self._gradients[index] = gradient

    def ready(self) -> bool:
        """Whether every gradient has been added."""
        return not self._missing()

    def sync_all(self, group: ProcessGroup) -> None:
        """Replaces the gradients by their mean over the group, bucket by bucket.

        Gradients that JAX has already summed, under `check_vma=True`, are only divided; see
        `sync_gradients`.

        Args:
            group: the ranks; inside `shard_map` gradients are this rank's, outside rank-stacked.

        Raises:
            ConfigError: if gradients are missing.
            GroupError: outside `shard_map`, if gradients are not rank-stacked, or only some are;
                inside, for a group by ranks, if JAX has already summed one over all ranks.
            DTypeError: for the mean of integers.
        """
        gradients = self._complete()
        if self.strategy is GradSyncStrategy.NO_SYNC:
            return
        if is_inside(group):
            reduced = _mean(self.plan, group, self.strategy)(gradients)
        else:
            self._check_stacked(gradients)
            structs = [jax.ShapeDtypeStruct(g.shape[1:], g.dtype) for g in gradients]
            plan = plan_buckets(structs, self.bucket_capacity)
            reduced = _stacked_mean(plan, group, self.strategy)(gradients)
        self._gradients = dict(enumerate(reduced))

    def _check_stacked(self, gradients: list[Array]) -> None:
        """Raises `GroupError` if only some gradients have an unplanned leading dim of ranks.

        Where none has, stacked arrays were planned, and their rows are those of the ranks.
        """
        pairs = list(zip(gradients, self.plan.shapes, strict=True))
        stacked = [index for index, (g, shape) in enumerate(pairs) if g.ndim > len(shape)]
        single = [index for index in range(len(pairs)) if index not in stacked]
        if stacked and single:
            shapes = [gradients[index].shape for index in (single[0], stacked[0])]
            raise GroupError(
                f"gradient {single[0]} has the planned shape {shapes[0]}, but gradient "
                f"{stacked[0]} of shape {shapes[1]} is rank-stacked; outside of shard_map give "
                "every gradient with one row per rank"
            )

    def extract(self) -> PyTree:
        """Returns the gradients in the tree given to `prepare`, and keeps them.

        Raises:
            ConfigError: if gradients are missing.
        """
        return jax.tree.unflatten(self._prepared()[1], self._complete())

    def clear(self) -> None:
        """Drops the gradients and keeps the plan for the next step."""
        self._gradients = {}

    def _prepared(self) -> tuple[BucketPlan, Any]:
        if self._planned is None:
            raise ConfigError(
                "the synchronizer has no plan yet; call prepare(parameters) before adding gradients"
            )
        return self._planned

    def _missing(self) -> list[int]:
        return [i for i in range(len(self.plan.shapes)) if i not in self._gradients]

    def _complete(self) -> list[Array]:
        missing = self._missing()
        if missing:
            raise ConfigError(
                f"gradients {missing} of {len(self.plan.shapes)} are missing; add each with "
                "add_gradient(index, gradient) first"
            )
        return [self._gradients[index] for index in range(len(self._gradients))]

    def _check_gradient(self, index: int, gradient: Array) -> None:
        num = len(self.plan.shapes)
        if not is_whole(index) or not 0 <= index < num:
            raise ConfigError(f"got gradient {index}; the plan has {num}, 0..{num - 1}")
        if index in self._gradients:
            raise ConfigError(
                f"gradient {index} was already added; call clear() before the next step"
            )
        shape = self.plan.shapes[index]
        dtype = self.plan.dtypes[index]
        if shape not in (gradient.shape, gradient.shape[1:]):
            raise ConfigError(
                f"gradient {index} has shape {gradient.shape}; the plan expects {shape}, or "
                f"(world_size, *{shape}) for rank-stacked gradients"
            )
        if gradient.dtype != dtype:
            raise DTypeError(
                f"gradient {index} has dtype {gradient.dtype}, and the plan expects {dtype}; "
                f"cast it, or prepare() with arrays of dtype {gradient.dtype}"
            )


def _mean(
    plan: BucketPlan, group: ProcessGroup, strategy: GradSyncStrategy
) -> Callable[[list[Array]], list[Array]]:
    mean = functools.partial(sync_gradients, group=group)
    return lambda gradients: reduce_buckets(gradients, plan, mean, strategy)


@functools.lru_cache(maxsize=64)
def _stacked_mean(
    plan: BucketPlan, group: ProcessGroup, strategy: GradSyncStrategy
) -> Callable[[list[Array]], list[Array]]:
    return group.spmd(_mean(plan, group, strategy))


def sync_gradients(tree: PyTree, group: ProcessGroup) -> PyTree:
    """Averages the local gradients of all ranks.

    If all ranks have equally many samples, the mean of the local gradients is the gradient of the
    mean loss over all samples: `grad = (1/N) sum_r grad_r`.

    Inside a `shard_map` with `check_vma=True`, JAX itself sums the gradient with respect to a
    replicated value, and types the sum as invariant. The mean of that sum over ranks would be N
    times too large, so it is only divided by N. Either way, differentiate the rank's own loss, not
    yet averaged over the group.

    Args:
        tree: a pytree of gradients: this rank's inside `shard_map`, rank-stacked ones outside.
        group: the ranks among which the samples are split, N of them.

    Returns:
        A pytree like `tree`.

    Raises:
        DTypeError: for integers.
        GroupError: for a group by ranks, if JAX has already summed the gradient over all ranks.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from axon_dist.mesh import World
        >>> group = World.emulate(4).default_group
        >>> sync_gradients({"w": jnp.array([1.0, 2.0, 3.0, 4.0])}, group)["w"]
        Array([2.5, 2.5, 2.5, 2.5], dtype=float32)

    Source: Li et al., PyTorch Distributed, VLDB 2020, arXiv:2006.15704.
    """
    return each_leaf(_averaged, tree, group)


def sync_gradient(g: Array, group: ProcessGroup) -> Array:
    """Averages one gradient over the group; see `sync_gradients`.

    Args:
        g: this rank's gradient inside `shard_map`, a rank-stacked one outside.
        group: the ranks among which the samples are split.

    Returns:
        An array like `g`.
    """
    return sync_gradients(g, group)


def _averaged(g: Array, group: ProcessGroup) -> Array:
    check_mean(g)
    if not has_varying_types(group.axes[0]):
        return mean_leaf(g, group)
    pending = tuple(axis for axis in group.axes if axis in jax.typeof(g).mat.varying)
    if pending == group.axes:
        return mean_leaf(g, group)
    if group.members is not None:
        raise GroupError(
            f"got a gradient of shape {g.shape} that JAX has already summed over all ranks, so the "
            f"sum over the group {group} cannot be recovered; differentiate with respect to "
            f"jax.lax.pcast(params, {group.axes}, to='varying'), or use check_vma=False"
        )
    return all_sum(g, pending) / group.size


class GradientBucket:
    """Packs gradients into one flat array, and unpacks them again.

    Args:
        capacity: how many elements fit.
        dtype: the dtype of the flat array. Gradients of a narrower float dtype are widened, and
            `extract` narrows them again, which is exact for gradients that were not changed.

    Raises:
        ConfigError: for a capacity below 1.

    Example:
        >>> bucket = GradientBucket(5)
        >>> bucket.add(jnp.array([0.1, 0.2])), bucket.add(jnp.array([0.3, 0.4, 0.5]))
        (True, True)
        >>> bucket.add(jnp.array([0.6])), bucket.is_full, bucket.shapes
        (False, True, ((2,), (3,)))
        >>> bucket.data
        Array([0.1, 0.2, 0.3, 0.4, 0.5], dtype=float32)
    """

    def __init__(self, capacity: int, dtype: DTypeLike = jnp.float32):
        check_capacity(capacity)
        self.capacity: int = capacity
        NUMBERS.check("GradientBucket", "dtype", dtype)
        self.dtype: np.dtype[Any] = np.dtype(dtype)
        self._gradients: list[Array] = []

    def add(self, gradient: Array | np.ndarray | float) -> bool:
        """Appends a gradient unless it would overflow the bucket.

        Args:
            gradient: an array of any shape.

        Returns:
            Whether it fit; if not, the bucket does not change.

        Raises:
            DTypeError: if the bucket's dtype cannot represent the gradient exactly.
        """
        check_arrays(gradient)
        gradient = jnp.asarray(gradient)
        self._check_dtype(gradient.dtype)
        if self.size + gradient.size > self.capacity:
            return False
        self._gradients.append(gradient)
        return True

    @property
    def size(self) -> int:
        """The number of elements in the bucket."""
        return sum(math.prod(shape) for shape in self.shapes)

    def __len__(self) -> int:
        """The number of elements in the bucket."""
        return self.size

    @property
    def is_full(self) -> bool:
        """Whether the bucket has no space left."""
        return self.size >= self.capacity

    @property
    def shapes(self) -> tuple[Shape, ...]:
        """The shapes of the gradients, in the order in which they were added."""
        return tuple(gradient.shape for gradient in self._gradients)

    @property
    def data(self) -> Array:
        """All elements in one array of the bucket's dtype, shape `(size,)`."""
        # Empty arrays are skipped: XLA aborts at a slice of a concatenation with one.
        flat = [x.ravel().astype(self.dtype) for x in self._gradients if x.size]
        return jnp.concatenate(flat) if flat else jnp.zeros(0, self.dtype)

    def extract(self, data: Array | None = None) -> list[Array]:
        """Returns the gradients in their shapes and dtypes, and keeps them.

        Args:
            data: a flat array to unpack instead of the bucket's own, such as the reduced one.

        Returns:
            Arrays in the order in which they were added.

        Raises:
            ConfigError: if `data` has another shape than the bucket's own.
        """
        flat = self.data if data is None else data
        if flat.shape != (self.size,):
            raise ConfigError(
                f"got data of shape {flat.shape} for a bucket of {self.size} elements; give an "
                f"array like its `data`, of shape {(self.size,)}"
            )
        ends = np.cumsum([math.prod(shape) for shape in self.shapes])
        parts = jnp.split(flat, ends[:-1]) if self._gradients else []
        return [
            part.reshape(gradient.shape).astype(gradient.dtype)
            for part, gradient in zip(parts, self._gradients, strict=True)
        ]

    def clear(self) -> None:
        """Empties the bucket."""
        self._gradients = []

    def _check_dtype(self, dtype: DTypeLike) -> None:
        floats = jnp.issubdtype(dtype, jnp.floating) and jnp.issubdtype(self.dtype, jnp.floating)
        fits = floats and jnp.promote_types(dtype, self.dtype) == self.dtype
        if dtype != self.dtype and not fits:
            raise DTypeError(
                f"a bucket of {self.dtype} cannot hold a gradient of {dtype} exactly; make it "
                f"GradientBucket({self.capacity}, dtype=jnp.{dtype}), or cast the gradient"
            )
