import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from axon_dist.collectives import (
    GradientSynchronizer,
    GradSyncStrategy,
    reduce_buckets,
    sync_gradients,
)
from axon_dist.core.errors import ConfigError, DTypeError, GroupError

STACKED = {
    "w": jnp.asarray(np.arange(24, dtype=np.float32).reshape(4, 3, 2)),
    "b": jnp.asarray(np.arange(8, dtype=np.float32).reshape(4, 2)),
}


@pytest.fixture
def group(make_world):
    return make_world("dp=4").default_group


def filled(strategy="synchronous", capacity=4):
    sync = GradientSynchronizer(strategy, capacity)
    sync.prepare(jax.tree.map(lambda x: x[0], STACKED))
    for index, gradient in reversed(list(enumerate(jax.tree.leaves(STACKED)))):
        sync.add_gradient(index, gradient)
    return sync


def test_defaults():
    sync = GradientSynchronizer()
    assert sync.strategy is GradSyncStrategy.SYNCHRONOUS
    assert sync.bucket_capacity == 25_000_000


@pytest.mark.parametrize("strategy", ["synchronous", "overlapped"])
@pytest.mark.parametrize("capacity", [1, 6, 100])
def test_gradients_are_averaged_and_come_back(strategy, capacity, group):
    sync = filled(strategy, capacity)
    sync.sync_all(group)
    synced = sync.extract()
    assert jax.tree.structure(synced) == jax.tree.structure(STACKED)
    for name, gradient in STACKED.items():
        expected = np.broadcast_to(gradient.mean(0), gradient.shape)
        np.testing.assert_array_equal(synced[name], expected)


def test_no_sync_leaves_values_untouched(group):
    sync = filled("no_sync")
    sync.sync_all(group)
    for name, gradient in STACKED.items():
        np.testing.assert_array_equal(sync.extract()[name], gradient)


def test_inside_shard_map(group):
    def body(tree):
        sync = GradientSynchronizer(bucket_capacity=6)
        sync.prepare(tree)
        for index, gradient in enumerate(jax.tree.leaves(tree)):
            sync.add_gradient(index, gradient)
        sync.sync_all(group)
        return sync.extract()

    synced = group.spmd(body)(STACKED)
    np.testing.assert_array_equal(synced["b"], np.tile(STACKED["b"].mean(0), (4, 1)))


# Buckets of one parameter and of several, by both strategies.
@pytest.mark.sample(
    "1-overlapped-True", "3-synchronous-True", "3-overlapped-False", "100-synchronous-False"
)
@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("strategy", ["synchronous", "overlapped"])
@pytest.mark.parametrize("capacity", [1, 3, 100])
def test_gradients_that_jax_has_already_summed_are_only_divided(
    check_vma, strategy, capacity, make_world
):
    """Two of three parameters are replicated, so JAX sums their gradients under check_vma=True."""
    world = make_world("dp=4")
    group = world.default_group
    params = {"a": jnp.ones(2), "b": jnp.ones(2), "c": jnp.ones(1)}

    def body(params, x):
        own = params | {"b": jax.lax.pcast(params["b"], ("dp",), to="varying")}
        loss = lambda p: jnp.mean(x @ p["a"] + 2 * x @ p["b"] + p["c"])
        gradients = jax.tree.leaves(jax.grad(loss)(own))
        sync = GradientSynchronizer(strategy, capacity)
        sync.prepare(params)
        for index, gradient in enumerate(gradients):
            sync.add_gradient(index, gradient)
        sync.sync_all(group)
        plan = sync.plan
        return sync.extract(), reduce_buckets(
            gradients, plan, functools.partial(sync_gradients, group=group), strategy
        )

    mapped = jax.shard_map(
        body, mesh=world.mesh, in_specs=(P(), P("dp")), out_specs=P(), check_vma=check_vma
    )
    x = jnp.arange(1.0, 9.0).reshape(8, 1) * jnp.ones((1, 2))
    synced, reduced = jax.jit(mapped)(params, x)
    expected = {"a": [4.5, 4.5], "b": [9.0, 9.0], "c": [1.0]}
    for got, (name, want) in zip(reduced, expected.items(), strict=True):
        assert got.tolist() == synced[name].tolist() == want


def test_a_gradient_that_jax_has_summed_over_all_ranks_has_no_mean_over_some(make_world):
    world = make_world("dp=4")

    def body(w):
        sync = GradientSynchronizer()
        sync.prepare(w)
        sync.add_gradient(0, w)
        sync.sync_all(world.new_group([0, 2]))
        return sync.extract()

    mapped = jax.shard_map(body, mesh=world.mesh, in_specs=P(), out_specs=P())
    with pytest.raises(GroupError, match="already summed over all ranks"):
        jax.jit(mapped)(jnp.ones(2))


def test_a_second_step(group):
    sync = filled()
    assert sync.ready()
    sync.sync_all(group)
    sync.clear()
    assert not sync.ready()
    for index, gradient in enumerate(jax.tree.leaves(STACKED)):
        sync.add_gradient(index, 2 * gradient)
    sync.sync_all(group)
    np.testing.assert_array_equal(sync.extract()["b"][0], 2 * STACKED["b"].mean(0))


def test_stacked_arrays_may_be_what_is_planned(group):
    sync = GradientSynchronizer(bucket_capacity=100)
    sync.prepare(STACKED)
    for index, gradient in enumerate(jax.tree.leaves(STACKED)):
        sync.add_gradient(index, gradient)
    sync.sync_all(group)
    np.testing.assert_array_equal(sync.extract()["b"][3], STACKED["b"].mean(0))


def test_mistakes_with_gradients(group):
    sync = GradientSynchronizer(bucket_capacity=4)
    with pytest.raises(ConfigError, match=r"no plan yet; call prepare\(parameters\)"):
        sync.add_gradient(0, jnp.zeros(2))
    sync.prepare([(2,), (3,)])
    sync.add_gradient(0, jnp.zeros(2))
    with pytest.raises(ConfigError, match=r"gradient 0 was already added; call clear\(\)"):
        sync.add_gradient(0, jnp.zeros(2))
    for index in (2, -1):
        with pytest.raises(ConfigError, match=rf"got gradient {index}; the plan has 2, 0\.\.1"):
            sync.add_gradient(index, jnp.zeros(2))
    with pytest.raises(ConfigError, match=r"has shape \(2, 2\); the plan expects \(3,\), or"):
        sync.add_gradient(1, jnp.zeros((2, 2)))
    with pytest.raises(DTypeError, match="dtype bfloat16, and the plan expects float32; cast"):
        sync.add_gradient(1, jnp.zeros(3, jnp.bfloat16))
    for incomplete in (lambda: sync.sync_all(group), sync.extract):
        with pytest.raises(ConfigError, match=r"gradients \[1\] of 2 are missing; add each with"):
            incomplete()


def test_gradients_outside_are_rank_stacked(group):
    sync = GradientSynchronizer()
    sync.prepare([(3,)])
    sync.add_gradient(0, jnp.zeros(3))
    with pytest.raises(GroupError, match="must be rank-stacked"):
        sync.sync_all(group)


def test_gradients_outside_are_all_rank_stacked_or_none_is(group):
    """A gradient of one rank, whose first dim is as large as the world, is no stack of four."""
    sync = GradientSynchronizer()
    sync.prepare([(4, 2), (2,)])
    sync.add_gradient(0, jnp.zeros((4, 2)))
    sync.add_gradient(1, jnp.zeros((4, 2)))
    with pytest.raises(
        GroupError, match=r"gradient 0 has the planned shape \(4, 2\), but gradient"
    ):
        sync.sync_all(group)


def test_impossible_settings():
    with pytest.raises(ConfigError, match="capacity of -5"):
        GradientSynchronizer(bucket_capacity=-5)
    with pytest.raises(
        ConfigError, match=r"got 'later', and has no such member\. .*no_sync, overlapped"
    ):
        GradientSynchronizer("later")


@pytest.mark.parametrize("index", [0.5, "0", None, True])
def test_the_index_of_a_gradient_is_a_whole_number(index):
    sync = GradientSynchronizer()
    sync.prepare({"a": jnp.ones(2), "b": jnp.ones(2)})
    with pytest.raises(ConfigError, match=rf"got gradient {index}; the plan has 2, 0\.\.1"):
        sync.add_gradient(index, jnp.ones(2))
