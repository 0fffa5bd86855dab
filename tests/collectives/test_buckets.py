import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from axon_dist.collectives import GradSyncStrategy, all_reduce_mean, plan_buckets, reduce_buckets
from axon_dist.core.errors import ConfigError

SHAPES = [(30,), (2, 10), (), (7, 4), (5,), (16,)]
REDUCING = [GradSyncStrategy.SYNCHRONOUS, GradSyncStrategy.OVERLAPPED]


def step(mesh, plan, strategy, check_vma=True):
    """Scales a tree by a rank's number and reduces it in buckets."""

    def body(tree, rank):
        local = jax.tree.map(lambda x: (x * rank[0]).astype(x.dtype), tree)
        reduce = lambda leaves: jax.lax.pmean(leaves, "dp")
        return reduce_buckets(local, plan, reduce, strategy)

    mapped = jax.shard_map(
        body, mesh=mesh, in_specs=(P(), P("dp")), out_specs=P(), check_vma=check_vma
    )
    return jax.jit(mapped)


def num_reductions(compiled):
    return sum(" all-reduce(" in line for line in compiled.as_text().splitlines())


@pytest.fixture
def tree():
    random = np.random.default_rng(0)
    return [jnp.asarray(random.normal(size=shape), jnp.float32) for shape in SHAPES]


# Every capacity once; both strategies and both kinds of types with few leaves and with many.
@pytest.mark.sample(
    "1-synchronous-True", "40-overlapped-False", "60-overlapped-True", "1000000-synchronous-False"
)
@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("strategy", REDUCING)
@pytest.mark.parametrize("capacity", [1, 40, 60, 10**6])
def test_one_reduction_per_bucket(capacity, strategy, check_vma, make_world, tree):
    world = make_world("dp=4")
    plan = plan_buckets(tree, capacity)
    ranks = jnp.arange(1.0, 5.0)
    compiled = step(world.mesh, plan, strategy, check_vma).lower(tree, ranks).compile()
    assert num_reductions(compiled) == len(plan) == {1: 6, 40: 4, 60: 2, 10**6: 1}[capacity]
    for got, leaf in zip(compiled(tree, ranks), tree, strict=True):
        np.testing.assert_allclose(got, 2.5 * np.asarray(leaf), rtol=1e-6)


def test_without_a_chain_the_compiler_would_merge(make_world, tree):
    """The reference for `reduce_buckets`: the same buckets, reduced independently."""
    world = make_world("dp=4")
    plan = plan_buckets(tree, 40)

    def body(tree):
        return [jax.lax.psum([2 * tree[i] for i in bucket], "dp") for bucket in plan.buckets]

    mapped = jax.shard_map(body, mesh=world.mesh, in_specs=P(), out_specs=P(), check_vma=False)
    assert num_reductions(jax.jit(mapped).lower(tree).compile()) == 1


@pytest.mark.parametrize("strategy", REDUCING)
def test_dtypes_and_shapes_are_exact(strategy, make_world):
    world = make_world("dp=4")
    tree = {
        "a": jnp.ones((3, 2), jnp.bfloat16),
        "b": (jnp.ones(4), jnp.ones((), jnp.float16)),
        "c": jnp.zeros((0, 5)),
        "d": jnp.full(2, 3.0, jnp.bfloat16),
    }
    plan = plan_buckets(tree, 3)
    reduced = step(world.mesh, plan, strategy)(tree, jnp.arange(1.0, 5.0))
    for got, leaf in zip(jax.tree.leaves(reduced), jax.tree.leaves(tree), strict=True):
        assert (got.shape, got.dtype) == (leaf.shape, leaf.dtype)
        np.testing.assert_array_equal(got, 2.5 * np.asarray(leaf))


@pytest.mark.parametrize("strategy", REDUCING)
def test_non_finite_values_stay_in_their_gradient(strategy, make_world, tree):
    world = make_world("dp=4")
    tree[5] = tree[5].at[0].set(jnp.nan)
    tree[3] = tree[3].at[0, 0].set(-jnp.inf)
    reduced = step(world.mesh, plan_buckets(tree, 30), strategy)(tree, jnp.ones(4))
    for got, leaf in zip(reduced, tree, strict=True):
        np.testing.assert_allclose(got, leaf, rtol=1e-6)


def test_no_sync_leaves_the_tree_alone(tree):
    plan = plan_buckets(tree, 40)
    assert reduce_buckets(tree, plan, lambda x: x, "no_sync") is tree


def test_in_a_partly_manual_shard_map(make_world, tree):
    world = make_world("dp=2,tp=2")
    plan = plan_buckets(tree, 40)
    reduce = functools.partial(all_reduce_mean, group=world.group("dp"))
    mapped = jax.shard_map(
        lambda tree, rank: reduce_buckets([x * rank[0] for x in tree], plan, reduce),
        mesh=world.mesh,
        axis_names={"dp"},
        in_specs=(P(), P("dp")),
        out_specs=P(),
        check_vma=False,
    )
    for got, leaf in zip(jax.jit(mapped)(tree, jnp.array([1.0, 3.0])), tree, strict=True):
        np.testing.assert_allclose(got, 2 * np.asarray(leaf), rtol=1e-6)


def test_a_tree_of_numpy_is_planned_with_the_dtypes_that_jax_keeps():
    tree = {"w": np.ones(2), "n": np.arange(3)}
    reduced = reduce_buckets(tree, plan_buckets(tree), lambda leaves: leaves)
    np.testing.assert_array_equal(reduced["w"], tree["w"])


def test_the_tree_must_be_the_planned_one(tree):
    plan = plan_buckets(tree, 40)
    with pytest.raises(ConfigError, match=r"gradient 1 is float32\[3\].* expects float32\[2, 10\]"):
        reduce_buckets([tree[0], jnp.zeros(3), *tree[2:]], plan, lambda x: x)
    with pytest.raises(
        ConfigError, match=r"got 5 gradients for a plan of 6: gradient 5 is nothing, .*; call"
    ):
        reduce_buckets(tree[:-1], plan, lambda x: x)
    with pytest.raises(
        ConfigError,
        match=r"GradSyncStrategy got 'overlap', and has no such member. Did you mean 'overlapped'",
    ):
        reduce_buckets(tree, plan, lambda x: x, "overlap")
