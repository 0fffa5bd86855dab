import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

from axon_dist.models import RMSNorm, TransformerConfig, rotate
from axon_dist.models.layers import linear

LENGTH = 24


def normal(seed, shape):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


@functools.cache
def products_at_all():
    """Multiplies a query at each position by a key at each position."""

    @jax.jit
    def products(*pair):
        at_all = [rotate(jnp.broadcast_to(x, (1, LENGTH, 1, 8)), 100.0)[0, :, 0] for x in pair]
        return at_all[0] @ at_all[1].T

    return np.asarray(products(normal(0, 8), normal(1, 8)))


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 11), st.integers(0, 11), st.integers(0, 12))
def test_rotated_products_depend_on_the_distance_alone(i, j, shift):
    products = products_at_all()
    np.testing.assert_allclose(products[i, j], products[i + shift, j + shift], rtol=1e-4, atol=1e-4)


def test_rotation_turns_each_pair_by_its_angle():
    x = normal(0, (1, LENGTH, 2, 6)).astype(np.float64)
    pairs = x[..., :3] + 1j * x[..., 3:]
    angle = np.arange(LENGTH)[:, None] * 50.0 ** (-np.arange(3) / 3)
    want = pairs * np.exp(1j * angle)[None, :, None]
    got = np.asarray(jax.jit(lambda x: rotate(x, 50.0))(x.astype(np.float32)))
    np.testing.assert_allclose(got[..., :3], want.real, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(got[..., 3:], want.imag, rtol=1e-4, atol=1e-5)


def test_rms_norm_equals_its_formula():
    norm = RMSNorm(5, eps=1e-3, param_dtype="float32")
    norm.scale[...] = jnp.asarray(np.arange(5, dtype=np.float32))
    x = normal(0, (3, 5)).astype(np.float64)
    want = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-3) * np.arange(5)
    np.testing.assert_allclose(jax.jit(norm)(x.astype(np.float32)), want, rtol=1e-5)


def test_rms_norm_of_large_bfloat16_does_not_lose_the_mean():
    norm = RMSNorm(4096, eps=1e-5, param_dtype="float32")
    out = jax.jit(norm)(np.full((1, 4096), 300.0, jnp.bfloat16))
    assert out.dtype == jnp.bfloat16
    np.testing.assert_allclose(out.astype(jnp.float32), 1.0, rtol=1e-2)


@pytest.mark.parametrize(("residual", "shrink"), [(False, 1), (True, 4)])
def test_residual_kernels_start_smaller_with_depth(residual, shrink):
    config = TransformerConfig(width=1000, num_layers=8)
    layer = linear(config, 200, 300, residual=residual, rngs=nnx.Rngs(0))
    assert np.std(layer.kernel[...]) == pytest.approx(0.02 / shrink, rel=0.02)
    assert layer.bias is None
