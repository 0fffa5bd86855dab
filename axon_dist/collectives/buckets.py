"""Reduces gradients in buckets; the compiled program has one collective per bucket of the plan."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..core.checks import COUNT, is_whole
from ..core.errors import ConfigError, NamedChoice
from ..core.typing import Array, PyTree, Shape
from .place import check_arrays

DEFAULT_CAPACITY = 25_000_000
"""Elements in one bucket: 100 MB in float32."""


@dataclasses.dataclass(frozen=True)
class BucketPlan:
    """Gradients grouped into buckets, which are reduced one after another.

    Args:
        buckets: indices of the leaves in each bucket, in the order of reduction.
        shapes: the shape of every leaf, in the order of the tree.
        dtypes: the dtype of every leaf.
        capacity: the most elements in a bucket of several leaves.

    Raises:
        ConfigError: unless every leaf is in exactly one bucket, each bucket has one dtype, and no
            bucket of several leaves exceeds the capacity.
    """

    buckets: tuple[tuple[int, ...], ...]
    shapes: tuple[Shape, ...]
    dtypes: tuple[np.dtype, ...]
    capacity: int

    def __post_init__(self) -> None:
        self.validate()

    def validate(self) -> None:
        """Raises `ConfigError` unless the plan has every leaf once and respects the capacity."""
        check_capacity(self.capacity)
        indices = sorted(index for bucket in self.buckets for index in bucket)
        if indices != list(range(len(self.shapes))) or len(self.dtypes) != len(self.shapes):
            raise ConfigError(
                f"the buckets {self.buckets} do not hold each of {len(self.shapes)} leaves exactly "
                "once; let plan_buckets make the plan"
            )
        for bucket, size in zip(self.buckets, self.sizes, strict=True):
            dtypes = {self.dtypes[index] for index in bucket}
            if len(dtypes) != 1 or (len(bucket) > 1 and size > self.capacity):
                raise ConfigError(
                    f"bucket {bucket} holds {size} elements of dtypes {sorted(map(str, dtypes))}; "
                    f"a bucket has one dtype and at most {self.capacity} elements, or one leaf"
                )

    @property
    def sizes(self) -> tuple[int, ...]:
        """The number of elements in each bucket."""
        return tuple(sum(math.prod(self.shapes[i]) for i in bucket) for bucket in self.buckets)

    @property
    def num_bytes(self) -> tuple[int, ...]:
        """The number of bytes in each bucket."""
        width = [self.dtypes[bucket[0]].itemsize for bucket in self.buckets]
        return tuple(size * each for size, each in zip(self.sizes, width, strict=True))

    def __len__(self) -> int:
        """The number of buckets, which is the number of reductions."""
        return len(self.buckets)

    def __str__(self) -> str:
        lines = [
            f"bucket {number}: {len(bucket)} gradients, {size} × {self.dtypes[bucket[0]]}"
            for number, (bucket, size) in enumerate(zip(self.buckets, self.sizes, strict=True))
        ]
        return "\n".join(lines)


def plan_buckets(tree_or_shapes: PyTree, capacity: int = DEFAULT_CAPACITY) -> BucketPlan:
    """Packs gradients greedily into buckets, in reverse order.

    The backward pass finishes the gradients of the last layers first, so in reverse order the
    first bucket is full while the others are still being computed. A gradient that does not fit
    opens a new bucket; one larger than the capacity gets its own bucket. Gradients of different
    dtypes never share a bucket. Buckets are ordered by when their last gradient is ready.

    Args:
        tree_or_shapes: a pytree of arrays, of `jax.ShapeDtypeStruct`, or of shapes (tuples of
            ints, taken as float32).
        capacity: the most elements in a bucket.

    Returns:
        The plan; leaves are numbered in the order of `jax.tree.leaves`.

    Raises:
        ConfigError: for a capacity below 1.

    Example:
        >>> plan = plan_buckets([(4,), (2, 3), (3,), (100,)], capacity=9)
        >>> plan.buckets
        ((3,), (2, 1), (0,))
        >>> print(plan)
        bucket 0: 1 gradients, 100 × float32
        bucket 1: 2 gradients, 9 × float32
        bucket 2: 1 gradients, 4 × float32

    Source: Li et al., PyTorch Distributed, VLDB 2020, arXiv:2006.15704, section 3.2.3.
    """
    check_capacity(capacity)
    leaves = jax.tree.leaves(as_structs(tree_or_shapes))
    shapes = tuple(tuple(leaf.shape) for leaf in leaves)
    dtypes = tuple(np.dtype(leaf.dtype) for leaf in leaves)
    buckets = _pack([math.prod(shape) for shape in shapes], dtypes, capacity)
    return BucketPlan(buckets, shapes, dtypes, capacity)


def as_structs(tree_or_shapes: PyTree) -> PyTree:
    """Converts arrays, or plain shapes (as float32), to `jax.ShapeDtypeStruct`."""
    leaves = jax.tree.leaves(tree_or_shapes, is_leaf=_is_shape)
    if wrong := [leaf for leaf in leaves if not (_is_shape(leaf) or hasattr(leaf, "dtype"))]:
        raise ConfigError(
            f"got {wrong[0]!r} of type {type(wrong[0]).__name__} among the arrays to pack into "
            "buckets; give a tree of arrays, of jax.ShapeDtypeStruct, or of shapes such as (3, 4)"
        )
    if all(_is_shape(leaf) for leaf in leaves):

        def float32(shape):
            return jax.ShapeDtypeStruct(shape, np.float32)

        return jax.tree.map(float32, tree_or_shapes, is_leaf=_is_shape)

    def struct(x):
        # `reduce_buckets` gets arrays of JAX, which narrows numpy's 64 bits unless it is told not.
        return jax.ShapeDtypeStruct(x.shape, jax.dtypes.canonicalize_dtype(x.dtype))

    return jax.tree.map(struct, tree_or_shapes)


def _is_shape(node: Any) -> bool:
    return isinstance(node, tuple) and all(map(is_whole, node))


def check_capacity(capacity: int) -> None:
    """Raises `ConfigError` unless a bucket can hold at least one element."""
    if not COUNT.holds(capacity):
        raise ConfigError(
            f"got a bucket capacity of {capacity!r:.80}; it is a number of elements, at least 1, "
            f"such as {DEFAULT_CAPACITY}"
        )


def _pack(
    sizes: list[int], dtypes: tuple[np.dtype, ...], capacity: int
) -> tuple[tuple[int, ...], ...]:
    buckets: list[list[int]] = []
    current: dict[np.dtype, list[int]] = {}
    for index in reversed(range(len(sizes))):
        bucket = current.get(dtypes[index])
        if bucket is None or sum(sizes[i] for i in bucket) + sizes[index] > capacity:
            bucket = current[dtypes[index]] = []
            buckets.append(bucket)
        bucket.append(index)
    return tuple(tuple(b) for b in sorted(buckets, key=min, reverse=True))


SMALL = 2**16
"""Below this many elements, copying a gradient is cheaper than one more operand of a reduction.

An operand costs about 0.1 ms on eight emulated devices; from 256 kB on the two copies cost more.
"""


def pack(leaves: Sequence[Array]) -> list[Array]:
    """Concatenates the small arrays of a bucket into one flat array.

    Nothing is concatenated while any mesh axis is automatic: the compiler would have to gather
    arrays that it has sharded along that axis.

    Args:
        leaves: arrays of one dtype.

    Returns:
        The operands of one reduction: the large arrays, then the flat one.

    Example:
        >>> [x.shape for x in pack([jnp.ones(3), jnp.ones((500, 500)), jnp.ones((2, 2))])]
        [(500, 500), (7,)]
    """
    large, small = _split(leaves)
    flat = [jnp.concatenate([leaves[index].ravel() for index in small])] if small else []
    return [leaves[index] for index in large] + flat


def unpack(operands: Sequence[Array], leaves: Sequence[Array]) -> list[Array]:
    """The inverse of `pack`: splits operands shaped like `pack(leaves)` into the leaves' shapes."""
    large, small = _split(leaves)
    unpacked = dict(zip(large, operands, strict=False))
    ends = np.cumsum([leaves[index].size for index in small])
    for index, end in zip(small, ends, strict=True):
        leaf = leaves[index]
        unpacked[index] = operands[-1][end - leaf.size : end].reshape(leaf.shape)
    return [unpacked[index] for index in range(len(leaves))]


def _split(leaves: Sequence[Array]) -> tuple[list[int], list[int]]:
    """The indices of the arrays that stay separate, and of those to concatenate."""
    everything = range(len(leaves))
    small = [index for index in everything if leaves[index].size < SMALL]
    mesh = jax.sharding.get_abstract_mesh()
    if len(small) < 2 or len(mesh.manual_axes) < len(mesh.axis_names):
        return list(everything), []
    return [index for index in everything if leaves[index].size >= SMALL], small


class GradSyncStrategy(NamedChoice):
    """When the buckets of gradients are reduced."""

    SYNCHRONOUS = "synchronous"
    """After the whole backward pass, one bucket after another."""
    OVERLAPPED = "overlapped"
    """A bucket is reduced when its gradients are ready and the bucket before it is done, during the
    rest of the backward pass."""
    NO_SYNC = "no_sync"
    """Nothing is reduced: every rank keeps its gradients, to accumulate and reduce them later."""


def reduce_buckets(
    tree: PyTree,
    plan: BucketPlan,
    reduce: Callable[[list[Array]], list[Array]],
    strategy: GradSyncStrategy | str = GradSyncStrategy.SYNCHRONOUS,
) -> PyTree:
    """Reduces gradients inside `shard_map`, one collective per bucket of the plan.

    The result equals `reduce(leaves)` on all leaves at once. `reduce` gets the large gradients of a
    bucket as they are and the small ones concatenated, and XLA combines their reductions into one
    collective. Copying all gradients into one flat array would take more memory and, for large
    ones, more time. Each bucket waits for the one before it; otherwise XLA would combine the
    buckets too.

    On GPUs XLA splits a combined reduction above
    `xla_gpu_all_reduce_combine_threshold_bytes` (30 MB unless set), so raise that flag together
    with the capacity.

    Args:
        tree: gradients of this rank.
        plan: the result of `plan_buckets` for the same tree.
        reduce: maps a list of arrays to the list of their reductions over ranks, elementwise and
            with one collective each, such as `sync_gradients`. Under `check_vma=True` JAX has
            already summed the gradient with respect to a replicated value, which `sync_gradients`
            divides by N; the mean of `all_reduce_mean` or `jax.lax.pmean` leaves it N times too
            large. Such gradients are never concatenated with those that vary over ranks: each of
            the two kinds has its own reductions, and is reduced in the order of its own buckets.
        strategy: SYNCHRONOUS starts when all gradients are ready; NO_SYNC returns the tree.

    Returns:
        The reduced gradients, in their shapes and dtypes.

    Raises:
        ConfigError: if the plan is of another tree.

    Example:
        >>> import functools
        >>> from axon_dist.collectives import plan_buckets, sync_gradients
        >>> from axon_dist.mesh import World
        >>> group = World.emulate(2).default_group
        >>> plan = plan_buckets([(2,), (1,)], capacity=2)
        >>> mean = functools.partial(sync_gradients, group=group)
        >>> grads = [jnp.array([[1.0, 2.0], [3.0, 4.0]]), jnp.array([[5.0], [7.0]])]
        >>> [g.tolist() for g in group.spmd(lambda g: reduce_buckets(g, plan, mean))(grads)]
        [[[2.0, 3.0], [2.0, 3.0]], [[6.0], [6.0]]]
    """
    check_arrays(tree)
    leaves, treedef = jax.tree.flatten(jax.tree.map(jnp.asarray, tree))
    _check_planned(leaves, plan)
    strategy = GradSyncStrategy(strategy)
    if strategy is GradSyncStrategy.NO_SYNC:
        return tree
    reduced: dict[int, Array] = {}
    for numbers in _by_type(leaves):
        buckets = [[index for index in bucket if index in numbers] for bucket in plan.buckets]
        of_type = {index: leaves[index] for index in numbers}
        reduced |= _in_turn(of_type, [bucket for bucket in buckets if bucket], reduce, strategy)
    return jax.tree.unflatten(treedef, [reduced[index] for index in range(len(leaves))])


def _by_type(leaves: list[Array]) -> list[set[int]]:
    """Groups the numbers of leaves by the manual axes over which they vary.

    A leaf that is concatenated with another, or waits for it, varies over the axes of both. Then
    `reduce` could not see any more that JAX has already summed it.
    """
    groups: dict[frozenset[str], set[int]] = {}
    for number, leaf in enumerate(leaves):
        groups.setdefault(frozenset(jax.typeof(leaf).mat.varying), set()).add(number)
    return list(groups.values())


def _in_turn(
    gradients: dict[int, Array],
    plan: list[list[int]],
    reduce: Callable[[list[Array]], list[Array]],
    strategy: GradSyncStrategy,
) -> dict[int, Array]:
    """Reduces the buckets of gradients of one type, each after the one before it."""
    if strategy is GradSyncStrategy.SYNCHRONOUS and len(plan) > 1:
        waiting, _ = _wait(list(gradients.values()), [])
        gradients = dict(zip(gradients, waiting, strict=True))
    buckets = [pack([gradients[index] for index in bucket]) for bucket in plan]
    for number, operands in enumerate(buckets):
        if number:
            operands, buckets[number - 1] = _wait(operands, buckets[number - 1])
        buckets[number] = reduce(operands)
    reduced: dict[int, Array] = {}
    for bucket, operands in zip(plan, buckets, strict=True):
        reduced.update(zip(bucket, unpack(operands, [gradients[i] for i in bucket]), strict=True))
    return reduced


def _wait(leaves: list[Array], before: list[Array]) -> tuple[list[Array], list[Array]]:
    """Makes every leaf depend on `before`, or on all leaves if it is empty, to fix the order.

    The caller must use both results, because a barrier affects only results that are used.
    XLA:CPU strips barriers before it combines all-reduces, and under `check_vma=True` barriers
    type all results as varying. In both cases a select has the same effect, at the cost of one
    more pass over the leaves.
    """
    if len({jax.typeof(x).mat.varying for x in leaves + before}) > 1:
        return _choose(leaves, before)
    return jax.lax.platform_dependent(
        leaves, before, cpu=_choose, default=lambda *both: jax.lax.optimization_barrier(both)
    )


def _choose(leaves: list[Array], before: list[Array]) -> tuple[list[Array], list[Array]]:
    """Makes leaves depend on `before` by a select that always takes the leaf.

    XLA cannot know that nothing is below -inf. If the compiler has sharded a gradient, reading its
    first element costs a reduction of one number.
    """
    firsts = [jnp.real(x.ravel()[0]).astype(jnp.float32) for x in before or leaves if x.size]
    impossible = sum(firsts, start=jnp.float32(0)) < -jnp.inf
    return [jnp.where(impossible, jnp.zeros_like(leaf), leaf) for leaf in leaves], before


def _check_planned(leaves: list[Array], plan: BucketPlan) -> None:
    got = [f"{leaf.dtype}{list(leaf.shape)}" for leaf in leaves]
    planned = [f"{d}{list(s)}" for s, d in zip(plan.shapes, plan.dtypes, strict=True)]
    if got == planned:
        return
    pairs = itertools.zip_longest(got, planned, fillvalue="nothing")
    index, pair = next((i, pair) for i, pair in enumerate(pairs) if pair[0] != pair[1])
    raise ConfigError(
        f"got {len(got)} gradients for a plan of {len(planned)}: gradient {index} is {pair[0]}, "
        f"and the bucket plan expects {pair[1]}; call plan_buckets with the same tree"
    )
