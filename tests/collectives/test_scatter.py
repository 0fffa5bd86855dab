import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axon_dist.collectives import (
    all_gather,
    all_reduce_sum,
    reduce_scatter_mean,
    reduce_scatter_sum,
    scatter_tensor,
)
from axon_dist.core.errors import DivisibilityError, DTypeError

from .dense import in_shard_map


def test_numbers(make_world):
    group = make_world("dp=4").default_group
    x = np.arange(1, 9, dtype=np.float32) * np.arange(1, 5, dtype=np.float32)[:, None]
    mean = np.asarray(reduce_scatter_mean(x, group))
    np.testing.assert_array_equal(mean.ravel(), [2.5, 5, 7.5, 10, 12.5, 15, 17.5, 20])
    np.testing.assert_array_equal(reduce_scatter_sum(x, group), 4 * mean)


@pytest.mark.parametrize("ranks", [None, [3, 1]])
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_the_gathered_slices_are_the_all_reduce(ranks, dim, make_world):
    world = make_world("dp=4")
    group = world.default_group if ranks is None else world.new_group(ranks)
    x = np.arange(4 * 32, dtype=np.float32).reshape(4, 4, 8)
    slices = reduce_scatter_sum(x, group, dim=dim)
    whole = np.asarray(all_gather(slices, group, tiled=True, dim=dim))
    members = [0, 1, 2, 3] if ranks is None else ranks
    np.testing.assert_array_equal(whole[members], np.asarray(all_reduce_sum(x, group))[members])


def test_reduce_then_gather_is_the_sum(make_world):
    group = make_world("dp=4").default_group
    x = np.arange(32, dtype=np.int32).reshape(4, 8)
    whole = all_gather(reduce_scatter_sum(x, group), group, tiled=True)
    np.testing.assert_array_equal(whole, np.tile([48, 52, 56, 60, 64, 68, 72, 76], (4, 1)))


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("dim", [0, 1])
def test_padding_loses_nothing(size, dim, make_world):
    group = make_world(f"dp={size}").default_group
    x = np.random.default_rng(0).normal(size=(size, 5, 11)).astype(np.float32)
    with pytest.raises(
        DivisibilityError,
        match=rf"shape \(5, 11\) into {size} slices.* {(5, 11)[dim]} is not a multiple of {size}; "
        "pass pad=True",
    ):
        reduce_scatter_sum(x, group, dim=dim)
    slices = np.asarray(reduce_scatter_sum(x, group, pad=True, dim=dim))
    whole = np.concatenate(list(slices), dim)
    true, padding = np.split(whole, [(5, 11)[dim]], dim)
    np.testing.assert_allclose(true, x.sum(0), rtol=1e-5, atol=1e-6)
    assert not padding.any()
    assert whole.shape[dim] % size == 0
    mean = np.asarray(reduce_scatter_mean(x, group, pad=True, dim=dim))
    np.testing.assert_allclose(mean * size, slices, rtol=1e-6)


def test_dtypes(make_world):
    group = make_world("dp=2").default_group
    x = np.array([[True, False], [True, True]])
    assert reduce_scatter_sum(x, group).tolist() == [[2], [1]]
    assert reduce_scatter_mean(x.astype(jnp.bfloat16), group).dtype == jnp.bfloat16
    with pytest.raises(DTypeError, match="dtype int32"):
        reduce_scatter_mean(x.astype(jnp.int32), group)


# Every collective once; the sum with and without check_vma.
@pytest.mark.sample(
    "sum-True", "sum-False", "mean-True", "scatter-False", "gather-True", "grad-True"
)
@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize(
    "collective",
    [
        reduce_scatter_sum,
        functools.partial(reduce_scatter_mean, pad=True),
        scatter_tensor,
        functools.partial(all_gather, tiled=True),
        jax.grad(lambda x, group: all_gather(x, group, tiled=True).sum()),
    ],
    ids=["sum", "mean", "scatter", "gather", "grad"],
)
def test_an_empty_dim_stays_empty(collective, check_vma, make_world):
    """XLA itself refuses to scatter or gather along one."""
    world = make_world("dp=2,tp=2")
    x = jnp.zeros((4, 0, 3))
    for group in (world.default_group, world.group("tp"), world.new_group([0, 1])):
        run = functools.partial(collective, group=group)
        assert in_shard_map(run, world.mesh, check_vma)(x).shape == (4, 0, 3)
        assert run(x).shape == (4, 0, 3)
