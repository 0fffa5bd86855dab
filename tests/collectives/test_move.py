import re

import jax.numpy as jnp
import numpy as np
import pytest

from axon_dist.collectives import (
    all_gather,
    all_reduce_sum,
    all_to_all,
    broadcast,
    broadcast_from,
    gather_tensor,
    ring_all_reduce,
    scatter_tensor,
)
from axon_dist.core.errors import ConfigError, DivisibilityError, GroupError

from .dense import in_shard_map


def test_broadcast_numbers(make_world):
    group = make_world("dp=3").default_group
    x = np.arange(3, dtype=np.float32)[:, None] * np.full(6, 100, np.float32)
    np.testing.assert_array_equal(broadcast(x, group), np.zeros((3, 6)))
    group = make_world("dp=4").default_group
    assert broadcast_from(np.arange(1, 5, dtype=np.int32), group, src=2).tolist() == [3] * 4


@pytest.mark.parametrize("check_vma", [True, False])
def test_broadcast_lets_no_nan_through(check_vma, make_world):
    world = make_world("dp=4")
    x = np.float32([[1, np.inf], [np.nan, 2], [np.nan, np.nan], [np.inf, 0]])
    run = in_shard_map(
        lambda v: broadcast(v, world.default_group), world.mesh, check_vma, replicated=True
    )
    np.testing.assert_array_equal(run(x), [1.0, np.inf])


def test_broadcast_counts_the_source_within_the_group(make_world):
    world = make_world("dp=2,tp=2")
    x = jnp.array([1, 2, 3, 4])
    assert broadcast_from(x, world.group("dp"), src=1).tolist() == [3, 4, 3, 4]
    assert broadcast_from(x, world.new_group([3, 0]), src=0).tolist() == [4, 2, 3, 4]


# Every dtype once, and each kind of group.
@pytest.mark.sample("None-bool", "None-int8", "ranks1-bfloat16", "ranks1-complex64")
@pytest.mark.parametrize("dtype", ["bool", "int8", "bfloat16", "complex64"])
@pytest.mark.parametrize("ranks", [None, [2, 0]])
def test_dtypes_survive(dtype, ranks, make_world):
    world = make_world("dp=4")
    group = world.default_group if ranks is None else world.new_group(ranks)
    x = np.tile(np.array([[1, 0], [0, 1], [1, 1], [0, 0]]), (1, 4)).astype(jnp.dtype(dtype))
    for collective in (broadcast, all_gather, gather_tensor, scatter_tensor):
        assert collective(x, group).dtype == x.dtype
    source = 0 if ranks is None else 2
    np.testing.assert_array_equal(np.asarray(broadcast(x, group))[0], x[source])
    scattered = np.asarray(scatter_tensor(x, group))
    np.testing.assert_array_equal(scattered[0], x[source, : 8 // group.size])


def test_all_gather_numbers(make_world):
    assert all_gather(jnp.array([[2.0]]), make_world("dp=1").default_group)[0].shape == (1, 1)
    x = np.arange(8, dtype=np.int32).reshape(4, 2)
    group = make_world("dp=4").default_group
    assert all_gather(x, group).shape == (4, 4, 2)
    np.testing.assert_array_equal(np.asarray(all_gather(x, group))[3], x)
    np.testing.assert_array_equal(np.asarray(all_gather(x, group, tiled=True))[0], np.arange(8))
    np.testing.assert_array_equal(np.asarray(all_gather(x, group, dim=-1))[0], x.T)


def test_gather_gives_zeros_to_the_others(make_world):
    x = np.arange(1, 5, dtype=np.int32)
    result = np.asarray(gather_tensor(x, make_world("dp=4").default_group))
    np.testing.assert_array_equal(result[0], x)
    assert not result[1:].any()


def test_scatter_numbers(make_world):
    group = make_world("dp=4").default_group
    x = np.full((4, 8), np.nan, np.float32)
    x[0] = np.arange(8)
    np.testing.assert_array_equal(scatter_tensor(x, group), np.arange(8).reshape(4, 2))
    with pytest.raises(
        DivisibilityError,
        match=r"scatter_tensor cuts dim 0 of an array of shape \(7,\) into 4 slices.*dp=4.*7 is not"
        r" a multiple of 4; pad the array first, to 8",
    ):
        scatter_tensor(x[:, :7], group)


def test_scatter_gives_slices_in_the_order_of_a_list(make_world):
    group = make_world("dp=4").new_group([3, 1])
    x = np.zeros((4, 6), np.float32)
    x[1] = np.arange(6)
    want = np.zeros((4, 3))
    want[3], want[1] = [0, 1, 2], [3, 4, 5]
    np.testing.assert_array_equal(scatter_tensor(x, group, src=1), want)


def test_all_to_all_moves_a_sharding_and_back(make_world):
    group = make_world("dp=4").default_group
    by_sequence = np.arange(32, dtype=np.float32).reshape(4, 2, 4)
    by_heads = np.asarray(all_to_all(by_sequence, group, split_dim=1, concat_dim=0))
    np.testing.assert_array_equal(by_heads[1, :, 0], by_sequence.reshape(8, 4)[:, 1])
    back = all_to_all(by_heads, group, split_dim=0, concat_dim=1)
    np.testing.assert_array_equal(back, by_sequence)
    with pytest.raises(DivisibilityError, match=r"all_to_all cuts dim 0 .* 2 is not a multiple"):
        all_to_all(by_sequence, group, split_dim=0, concat_dim=1)


@pytest.mark.parametrize("root", [4, -1, 1.0])
def test_roots_out_of_range(root, make_world):
    group = make_world("dp=4").default_group
    x = jnp.zeros((4, 4))
    message = rf"={re.escape(str(root))} is not a rank of the group dp=4.* 0\.\.3"
    with pytest.raises(GroupError, match="src" + message):
        broadcast_from(x, group, src=root)
    with pytest.raises(GroupError, match="dst" + message):
        gather_tensor(x, group, dst=root)
    with pytest.raises(GroupError, match="src" + message):
        scatter_tensor(x, group, src=root)


def test_dims_that_do_not_exist(make_world):
    group = make_world("dp=2").default_group
    with pytest.raises(
        ConfigError, match=r"dim 2 for an array of shape \(4,\); dims here are 0..1"
    ):
        all_gather(jnp.zeros((2, 4)), group, dim=2)
    with pytest.raises(ConfigError, match=r"dim 0 for a scalar.*x\[None\]"):
        all_gather(jnp.zeros(2), group, tiled=True)
    with pytest.raises(ConfigError, match="dim 1 for an array of shape"):
        all_to_all(jnp.zeros((2, 4)), group, 0, 1)


def test_a_ring_counts_what_is_true(make_world):
    world, x = (
        make_world("dp=4"),
        np.array([[True, False], [True, True], [False, False], [True, False]]),
    )
    for group in (world.default_group, world.new_group([2, 0])):
        ring = ring_all_reduce(x, group)
        np.testing.assert_array_equal(ring, all_reduce_sum(x, group))
        assert ring.dtype == jnp.int32
