"""What `watched` measures, whatever the dtypes of parameters and gradients."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from axon_dist.core.errors import ConfigError
from axon_dist.optim import Spikes, watched


def test_gradients_in_half_precision_with_a_large_norm_are_no_spikes():
    """Their squares overflow float16; the norm is 300 in every step."""
    optimizer = watched(optax.sgd(1e-3), spikes=Spikes(window=2))
    params = {"w": jnp.ones(100, jnp.float16)}
    state = optimizer.init(params)
    for _ in range(5):
        grads = {"w": jnp.full(100, 30, jnp.float16)}
        updates, state = optimizer.update(grads, state, params, value=jnp.float32(1))
        assert float(state.metrics["spike"]) == 0
        np.testing.assert_allclose(updates["w"], np.full(100, -0.03), rtol=1e-3)


def test_gradients_in_half_precision_are_clipped_by_a_norm_that_does_not_overflow():
    grads = {"w": jnp.full(100, 30, jnp.float16)}
    optimizer = watched(optax.sgd(1.0), clip_norm=3.0)
    updates, _ = optimizer.update(grads, optimizer.init(grads), grads, value=0.0)
    assert updates["w"].dtype == jnp.float16
    np.testing.assert_allclose(updates["w"], np.full(100, -0.3), rtol=1e-3)


@pytest.mark.parametrize("limit", [0, -1.0])
def test_a_limit_that_is_not_positive_is_refused(limit):
    with pytest.raises(ConfigError, match=r"clip_norm is .*must be positive, or None"):
        watched(optax.sgd(1.0), clip_norm=limit)


def test_the_norm_of_a_layer_has_the_imaginary_part():
    params = {"w": jnp.array([3 + 4j, 0], jnp.complex64), "half": jnp.full(4, 300, jnp.float16)}
    optimizer = watched(optax.sgd(0.0), norms_by_layer=True)
    _, state = optimizer.update(params, optimizer.init(params), params, value=0.0)
    assert float(state.metrics["grad_norm/w"]) == float(state.metrics["param_norm/w"]) == 5
    assert float(state.metrics["grad_norm/half"]) == 600
