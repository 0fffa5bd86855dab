"""Reducing gradients bucket by bucket, so that the plan is what the compiled program does."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from ..core.choice import Choice
from ..core.errors import ConfigError, did_you_mean
from ..core.typing import Array, PyTree
from .pack import pack, unpack
from .plan import BucketPlan


class GradSyncStrategy(Choice):
    """When the buckets of gradients are reduced."""

    SYNCHRONOUS = "synchronous"
    """After all gradients are there: one bucket after another."""
    OVERLAPPED = "overlapped"
    """As soon as its gradients are there and the bucket before it is done, beside what the
    backward pass still computes."""
    NO_SYNC = "no_sync"
    """Not at all: every rank keeps its own gradients, to be accumulated and reduced later."""

    @classmethod
    def _missing_(cls, value: object) -> GradSyncStrategy:
        raise ConfigError(f"unknown strategy {value!r}.{did_you_mean(str(value), list(cls))}")


def reduce_buckets(
    tree: PyTree,
    plan: BucketPlan,
    reduce: Callable[[list[Array]], list[Array]],
    strategy: GradSyncStrategy | str = GradSyncStrategy.SYNCHRONOUS,
) -> PyTree:
    """Reduces gradients inside `shard_map`, one collective per bucket of the plan.

    It equals `reduce(leaves)` on all leaves at once. The gradients of a bucket are handed to
    `reduce` as they are, except that the small ones are joined into one, and XLA combines their
    reductions into one; copying all into one flat array would take more memory and, for large
    gradients, more time. Buckets are made to wait for each other, or XLA would combine them, too.

    On GPUs XLA splits a combined reduction above
    `xla_gpu_all_reduce_combine_threshold_bytes` (30 MB unless set), so raise that flag together
    with the capacity.

    Args:
        tree: gradients of this rank.
        plan: what `plan_buckets` made of the same tree.
        reduce: maps a list of arrays to the list of their reductions over ranks, elementwise and
            one collective each, such as `lambda gradients: jax.lax.pmean(gradients, "dp")`.
        strategy: SYNCHRONOUS waits for all gradients first; NO_SYNC returns the tree as it is.

    Returns:
        The reduced gradients, each of its own shape and dtype.

    Raises:
        ConfigError: when the tree is not the one that was planned for.

    Example:
        >>> import functools
        >>> from axon_dist.collectives import all_reduce_mean, plan_buckets
        >>> from axon_dist.mesh import World
        >>> group = World.emulate(2).default_group
        >>> plan = plan_buckets([(2,), (1,)], capacity=2)
        >>> mean = functools.partial(all_reduce_mean, group=group)
        >>> grads = [jnp.array([[1.0, 2.0], [3.0, 4.0]]), jnp.array([[5.0], [7.0]])]
        >>> [g.tolist() for g in group.spmd(lambda g: reduce_buckets(g, plan, mean))(grads)]
        [[[2.0, 3.0], [2.0, 3.0]], [[6.0], [6.0]]]
    """
    leaves, treedef = jax.tree.flatten(tree)
    _check_planned(leaves, plan)
    strategy = GradSyncStrategy(strategy)
    if strategy is GradSyncStrategy.NO_SYNC:
        return tree
    if strategy is GradSyncStrategy.SYNCHRONOUS and len(plan) > 1:
        leaves, _ = _wait(leaves, [])
    buckets = [pack([leaves[index] for index in bucket]) for bucket in plan.buckets]
    for number, operands in enumerate(buckets):
        if number:
            operands, buckets[number - 1] = _wait(operands, buckets[number - 1])
        buckets[number] = reduce(operands)
    return jax.tree.unflatten(treedef, _in_order(buckets, leaves, plan))


def _in_order(buckets: list[list[Array]], leaves: list[Array], plan: BucketPlan) -> list[Array]:
    reduced: dict[int, Array] = {}
    for bucket, operands in zip(plan.buckets, buckets, strict=True):
        reduced.update(zip(bucket, unpack(operands, [leaves[i] for i in bucket]), strict=True))
    return [reduced[index] for index in range(len(leaves))]


def _wait(leaves: list[Array], before: list[Array]) -> tuple[list[Array], list[Array]]:
    """Makes every leaf wait for all leaves, or for `before`, as the compiler has to respect.

    The caller goes on with both results: a barrier holds only what is used. XLA:CPU strips
    barriers before it combines all-reduces, and under `check_vma=True` they type all their results
    varying; there a choice does the same for one more pass over the leaves.
    """
    if len({jax.typeof(x).mat.varying for x in leaves + before}) > 1:
        return _choose(leaves, before)
    return jax.lax.platform_dependent(
        leaves, before, cpu=_choose, default=lambda *both: jax.lax.optimization_barrier(both)
    )


def _choose(leaves: list[Array], before: list[Array]) -> tuple[list[Array], list[Array]]:
    """A choice that always falls on the leaf, which XLA cannot know: nothing is below -inf.

    Where the compiler has sharded a gradient, its first element is on one device and costs a
    reduction of one number.
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
        f"gradient {index} is {pair[0]} and the bucket plan expects {pair[1]}, of {len(got)} and "
        f"{len(planned)} gradients; make the plan from the same tree with plan_buckets"
    )
