import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from axon_dist.collectives import DEFAULT_CAPACITY, BucketPlan, plan_buckets
from axon_dist.core.errors import ConfigError

LEAVES = st.lists(
    st.builds(
        jax.ShapeDtypeStruct,
        st.lists(st.integers(0, 6), max_size=3).map(tuple),
        st.sampled_from([jnp.float32, jnp.bfloat16, jnp.int32]),
    ),
    max_size=20,
)


@given(LEAVES, st.integers(1, 60))
def test_every_plan_is_valid_and_greedy(leaves, capacity):
    plan = plan_buckets(leaves, capacity)
    plan.validate()
    sizes = [math.prod(leaf.shape) for leaf in leaves]
    assert sum(plan.sizes) == sum(sizes)
    assert plan.shapes == tuple(leaf.shape for leaf in leaves)
    for bucket, size in zip(plan.buckets, plan.sizes, strict=True):
        assert list(bucket) == sorted(bucket, reverse=True)
        assert len(bucket) == 1 or size <= capacity
        following = [i for i in range(min(bucket)) if leaves[i].dtype == leaves[bucket[0]].dtype]
        assert not following or size + sizes[following[-1]] > capacity
    assert [min(bucket) for bucket in plan.buckets] == sorted(map(min, plan.buckets), reverse=True)


@given(LEAVES)
def test_capacity_sets_the_number_of_buckets(leaves):
    dtypes = {leaf.dtype for leaf in leaves}
    assert len(plan_buckets(leaves, 10**6)) == len(dtypes)
    finest = plan_buckets(leaves, 1)
    assert len(finest) >= sum(math.prod(leaf.shape) > 0 for leaf in leaves)


def test_reverse_order_and_oversized_gradients():
    plan = plan_buckets([(2,), (3,), (100,), (1,), (4,)], capacity=5)
    assert plan.buckets == ((4, 3), (2,), (1, 0))
    assert plan.sizes == (5, 100, 5)
    assert plan.num_bytes == (20, 400, 20)
    assert len(plan) == 3


def test_dtypes_never_share_a_bucket():
    a, b = jnp.zeros(2, jnp.float32), jnp.zeros(2, jnp.bfloat16)
    plan = plan_buckets({"a": a, "b": b, "c": a, "d": b}, capacity=4)
    assert plan.buckets == ((3, 1), (2, 0))
    assert plan.num_bytes == (8, 16)
    assert str(plan) == ("bucket 0: 2 gradients, 4 × bfloat16\nbucket 1: 2 gradients, 4 × float32")


def test_default_capacity_is_100_megabytes_of_float32():
    plan = plan_buckets([(DEFAULT_CAPACITY,)])
    assert DEFAULT_CAPACITY == 25_000_000
    assert plan.num_bytes == (100_000_000,)


def test_what_can_be_planned():
    arrays = {"w": jnp.zeros((2, 3)), "none": None, "empty": ()}
    assert plan_buckets(arrays, 9).shapes == ((2, 3),)
    assert plan_buckets([(), (2, 3)], 9).shapes == ((), (2, 3))
    assert plan_buckets([], 9).buckets == ()


@pytest.mark.parametrize("capacity", [0, -1, 2.5, True])
def test_impossible_capacities(capacity):
    with pytest.raises(ConfigError, match=f"capacity of {capacity!r}; it is a number of elements"):
        plan_buckets([(2,)], capacity)


def test_plans_by_hand_are_checked():
    plan = plan_buckets([(2,), (3,)], 5)
    with pytest.raises(ConfigError, match=r"buckets \(\(0,\),\) do not hold each of 2 leaves"):
        dataclasses.replace(plan, buckets=((0,),))
    with pytest.raises(ConfigError, match=r"bucket \(1, 0\) holds 5 elements .* at most 4"):
        dataclasses.replace(plan, capacity=4)
    dtypes = (np.dtype(jnp.float32), np.dtype(jnp.bfloat16))
    with pytest.raises(ConfigError, match=r"dtypes \['bfloat16', 'float32'\]; a bucket has one"):
        BucketPlan(((1, 0),), ((2,), (3,)), dtypes, 5)


@pytest.mark.parametrize("wrong", [10, {"w": 2.5}, [(3, 4), "kernel"]])
def test_leaves_that_cannot_be_packed_raise(wrong):
    with pytest.raises(ConfigError, match=r"among the arrays to pack.*a tree of arrays"):
        plan_buckets(wrong, 100)
