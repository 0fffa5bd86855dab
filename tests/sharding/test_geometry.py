"""Flat shards: ceil division and zero padding, exact both ways."""

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings

from axon_dist.core.errors import ConfigError
from axon_dist.sharding import ShardSpec


@pytest.mark.parametrize(
    ("numel", "ranks", "size", "padding", "real"),
    [
        (10, 4, 3, 2, (3, 3, 3, 1)),
        (7, 3, 3, 2, (3, 3, 1)),
        (100, 3, 34, 2, (34, 34, 32)),
        (5, 4, 2, 3, (2, 2, 1, 0)),
        (1, 4, 1, 3, (1, 0, 0, 0)),
        (55, 8, 7, 1, (7,) * 7 + (6,)),
        (24, 2, 12, 0, (12, 12)),
    ],
)
def test_shards_of_a_flat_array(numel, ranks, size, padding, real):
    spec = ShardSpec((numel,), ranks)
    assert (spec.numel, spec.shard_size, spec.padding) == (numel, size, padding)
    assert spec.real_sizes == real
    values = np.arange(numel) + 1.0
    assert [values[spec.local_slice(rank)].size for rank in range(ranks)] == list(real)


@settings(deadline=None, max_examples=12)
@given(shape=st.lists(st.integers(1, 5), min_size=0, max_size=3).map(tuple), n=st.integers(1, 9))
def test_unshard_is_the_exact_inverse(shape, n):
    rng = np.random.default_rng(0)
    array = np.asarray(rng.normal(size=shape), np.float32)
    spec = ShardSpec(shape, n)

    @jax.jit
    def there_and_back(array):
        rows = spec.shard(array)
        return rows, spec.unshard(rows)

    rows, back = map(np.asarray, there_and_back(array))
    assert rows.shape == (n, spec.shard_size)
    assert np.array_equal(back, array)
    assert np.abs(rows).sum() == pytest.approx(np.abs(array).sum(), rel=1e-6)
    for rank in range(n):
        real = array.reshape(-1)[spec.local_slice(rank)]
        assert np.array_equal(rows[rank][: real.size], real)


def test_another_shape_and_no_rank_are_errors():
    with pytest.raises(ConfigError, match=r"shape \(3,\) to cut as ShardSpec.*\(4,\)"):
        ShardSpec((4,), 2).shard(jnp.ones(3))
    with pytest.raises(ConfigError, match=r"num_shards is 0; an array needs at least 1"):
        ShardSpec((4,), 0)
