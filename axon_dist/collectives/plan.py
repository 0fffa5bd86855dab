"""`BucketPlan`: which gradients are reduced together, decided from their shapes alone."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import numpy as np

from ..core.errors import ConfigError
from ..core.typing import PyTree, Shape

DEFAULT_CAPACITY = 25_000_000
"""Elements in one bucket: 100 MB in float32."""


@dataclasses.dataclass(frozen=True)
class BucketPlan:
    """Gradients by index, grouped into the buckets that are reduced one after another.

    Args:
        buckets: indices of the leaves in each bucket, in the order of reduction.
        shapes: the shape of every leaf, in the order of the tree.
        dtypes: the dtype of every leaf.
        capacity: how many elements a bucket of several leaves may hold.

    Raises:
        ConfigError: unless every leaf is in exactly one bucket, the dtypes within a bucket agree,
            and no bucket of several leaves exceeds the capacity.
    """

    buckets: tuple[tuple[int, ...], ...]
    shapes: tuple[Shape, ...]
    dtypes: tuple[np.dtype, ...]
    capacity: int

    def __post_init__(self) -> None:
        self.validate()

    def validate(self) -> None:
        """Raises `ConfigError` unless the plan reduces every leaf once, within the capacity."""
        check_capacity(self.capacity)
        placed = sorted(index for bucket in self.buckets for index in bucket)
        if placed != list(range(len(self.shapes))) or len(self.dtypes) != len(self.shapes):
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
        rows = [
            f"bucket {number}: {len(bucket)} gradients, {size} × {self.dtypes[bucket[0]]}"
            for number, (bucket, size) in enumerate(zip(self.buckets, self.sizes, strict=True))
        ]
        return "\n".join(rows)


def plan_buckets(tree_or_shapes: PyTree, capacity: int = DEFAULT_CAPACITY) -> BucketPlan:
    """Packs gradients into buckets greedily, the last gradient first.

    Backpropagation finishes the gradients of the last layers first, so in reverse order the first
    bucket is full while the others are still being computed. A gradient that does not fit opens a
    new bucket; one larger than the capacity gets a bucket of its own. Gradients of different
    dtypes never share one. Buckets are ordered by when their last gradient is ready.

    Args:
        tree_or_shapes: a pytree of arrays, of `jax.ShapeDtypeStruct`, or of shapes (tuples of
            ints, taken as float32).
        capacity: how many elements a bucket may hold.

    Returns:
        The plan, over the leaves in the order of `jax.tree.leaves`.

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
    """Replaces arrays, or float32 shapes where there are no arrays, by `jax.ShapeDtypeStruct`."""
    leaves = jax.tree.leaves(tree_or_shapes, is_leaf=_is_shape)
    if wrong := [leaf for leaf in leaves if not (_is_shape(leaf) or hasattr(leaf, "dtype"))]:
        raise ConfigError(
            f"got {wrong[0]!r} of type {type(wrong[0]).__name__} among what is to be packed into "
            "buckets; give a tree of arrays, of jax.ShapeDtypeStruct, or of shapes such as (3, 4)"
        )
    if all(_is_shape(leaf) for leaf in leaves):
        whole = lambda shape: jax.ShapeDtypeStruct(shape, np.float32)
        return jax.tree.map(whole, tree_or_shapes, is_leaf=_is_shape)
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree_or_shapes)


def _is_shape(node: Any) -> bool:
    return isinstance(node, tuple) and all(isinstance(size, int) for size in node)


def check_capacity(capacity: int) -> None:
    """Raises `ConfigError` unless a bucket can hold at least one element."""
    if isinstance(capacity, bool) or not isinstance(capacity, int) or capacity < 1:
        raise ConfigError(
            f"got a bucket capacity of {capacity!r}; it is a number of elements, at least 1, such "
            f"as {DEFAULT_CAPACITY}"
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
