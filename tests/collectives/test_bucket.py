import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from axon_dist.collectives import GradientBucket
from axon_dist.core.errors import ConfigError, DTypeError


def test_elements_are_counted_and_joined():
    bucket = GradientBucket(100)
    assert bucket.add(jnp.array([1.0, 2.0, 3.0]))
    assert bucket.size == 3
    assert bucket.add(jnp.array([4.0, 5.0]))
    assert bucket.size == len(bucket) == 5
    assert bucket.data.tolist() == [1, 2, 3, 4, 5]
    assert not bucket.is_full


def test_leaves_that_do_not_fit_leave_a_bucket_unchanged():
    bucket = GradientBucket(5)
    assert bucket.add(jnp.ones(3)) is True
    assert bucket.add(jnp.ones(3)) is False
    assert bucket.size == 3
    assert bucket.add(jnp.ones((1, 2))) is True
    assert bucket.is_full
    assert bucket.shapes == ((3,), (1, 2))


def test_extract_and_clear():
    bucket = GradientBucket(10)
    bucket.add(jnp.array([0.1, 0.2]))
    bucket.add(jnp.array([0.3, 0.4, 0.5]))
    first, second = bucket.extract()
    np.testing.assert_array_equal(first, np.float32([0.1, 0.2]))
    np.testing.assert_array_equal(second, np.float32([0.3, 0.4, 0.5]))
    bucket.clear()
    assert bucket.size == 0
    assert bucket.extract() == []
    assert bucket.data.shape == (0,)


@settings(max_examples=20, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.lists(st.integers(0, 3), max_size=3),
            st.sampled_from(["float32", "bfloat16", "float16"]),
        ),
        max_size=4,
    )
)
@example([([3], "float32"), ([0], "float32")])
def test_round_trip_keeps_values_shapes_and_dtypes(specs):
    random = np.random.default_rng(0)
    gradients = [random.normal(size=shape).astype(jnp.dtype(dtype)) for shape, dtype in specs]

    @jax.jit
    def there_and_back(gradients):
        bucket = GradientBucket(1000)
        assert all(bucket.add(gradient) for gradient in gradients)
        return bucket.data, bucket.extract()

    data, extracted = there_and_back([np.asarray(x) for x in gradients])
    assert data.dtype == jnp.float32
    for gradient, back in zip(gradients, extracted, strict=True):
        assert (back.shape, back.dtype) == (gradient.shape, gradient.dtype)
        np.testing.assert_array_equal(back, gradient)


def test_reduced_data_goes_back_into_the_shapes():
    bucket = GradientBucket(6)
    bucket.add(jnp.ones((2, 2)))
    bucket.add(jnp.ones(2, jnp.bfloat16))
    matrix, vector = bucket.extract(bucket.data * jnp.arange(6))
    assert matrix.tolist() == [[0, 1], [2, 3]]
    assert vector.dtype == jnp.bfloat16
    with pytest.raises(ConfigError, match=r"shape \(5,\) for a bucket of 6 elements; give"):
        bucket.extract(jnp.zeros(5))


@pytest.mark.parametrize(
    ("held", "added"),
    [("float32", "int32"), ("bfloat16", "float32"), ("bfloat16", "float16"), ("int32", "int8")],
)
def test_dtypes_that_would_lose_digits(held, added):
    bucket = GradientBucket(4, dtype=held)
    with pytest.raises(
        DTypeError, match=rf"bucket of {held} cannot hold .* of {added} exactly.*jnp.{added}"
    ):
        bucket.add(jnp.zeros(2, added))
    assert GradientBucket(4, dtype=added).add(jnp.zeros(2, added))


def test_impossible_capacity():
    with pytest.raises(ConfigError, match="capacity of 0"):
        GradientBucket(0)
