"""The loss scale follows its rule, without a transfer to the host."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axon_dist.core.errors import ConfigError
from axon_dist.ops.precision import GradScaler, all_finite, keep_if


def test_defaults():
    scaler = GradScaler()
    state = scaler.init()
    assert float(state.scale) == 65536.0
    assert (scaler.backoff_factor, scaler.growth_factor, scaler.growth_interval) == (0.5, 2.0, 2000)
    assert scaler.min_scale == 1.0


def test_scale_and_unscale():
    scaler = GradScaler(init_scale=100.0)
    state = scaler.init()
    assert float(scaler.scale(jnp.float32(0.5), state)) == 50.0
    grads = scaler.unscale({"w": jnp.array([100.0, 200.0, 300.0], jnp.float16)}, state)
    assert grads["w"].dtype == jnp.float32
    np.testing.assert_array_equal(grads["w"], [1.0, 2.0, 3.0])


def test_the_first_scale_does_not_overflow_a_float16_loss():
    scaler = GradScaler()
    assert float(scaler.scale(jnp.float16(1.0), scaler.init())) == 65536.0


def test_overflow_halves_and_good_steps_double():
    scaler = GradScaler(init_scale=1000.0)
    state = scaler.update(scaler.init(), jnp.array(False))
    assert (float(state.scale), int(state.good_steps), int(state.skipped)) == (500.0, 0, 1)
    scaler = GradScaler(init_scale=100.0, growth_interval=3)
    state, scales = scaler.init(), []
    for finite in (True, True, True, True, False, True, True, True):
        state = scaler.update(state, jnp.array(finite))
        scales.append(float(state.scale))
    assert scales == [100, 100, 200, 200, 100, 100, 100, 200]


def test_the_scale_has_a_floor():
    scaler, good = GradScaler(init_scale=2.0), jnp.array(False)
    state = scaler.init()
    for _ in range(4):
        state = scaler.update(state, good)
    assert (float(state.scale), int(state.skipped)) == (1.0, 4)


def test_a_scale_that_float32_cannot_hold_grown_stays():
    scaler = GradScaler(init_scale=2.0**126, growth_interval=1)
    state, scales = scaler.init(), []
    for finite in (True, True, True, False):
        state = scaler.update(state, jnp.array(finite))
        scales.append(float(state.scale))
    assert scales == [2.0**127, 2.0**127, 2.0**127, 2.0**126]
    assert int(state.good_steps) == 0


@pytest.mark.parametrize("scale", [np.inf, np.nan])
def test_a_restored_scale_that_is_not_finite_becomes_finite_at_the_next_step(scale):
    scaler = GradScaler(init_scale=1024.0)
    state = scaler.load_state_dict({"scale": scale, "good_steps": 0})
    assert float(scaler.update(state, jnp.array(False)).scale) == 512.0
    assert float(scaler.update(state, jnp.array(True)).scale) == 1024.0


def test_update_runs_under_jit_without_a_host():
    scaler = GradScaler(init_scale=8.0)
    update = jax.jit(scaler.update)
    state, finite = scaler.init(), jnp.array(False)
    with jax.transfer_guard("disallow"):
        state = update(state, finite)
    assert float(state.scale) == 4.0


def test_state_dict_round_trip():
    scaler = GradScaler(init_scale=500.0)
    state = scaler.load_state_dict({"scale": 500.0, "good_steps": 10})
    assert scaler.state_dict(state) == {"scale": 500.0, "good_steps": 10, "skipped": 0}
    assert state.good_steps.dtype == scaler.init().good_steps.dtype


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"growth_factor": 1.0}, "growth_factor must be above 1.*growth_factor=1.0"),
        ({"backoff_factor": 1.0}, "backoff_factor must lie between 0 and 1"),
        ({"growth_interval": 0}, "growth_interval must be at least 1"),
        ({"min_scale": 0.0, "init_scale": 1.0}, "min_scale must be positive"),
        ({"init_scale": 0.5}, "init_scale must be at least min_scale"),
    ],
)
def test_numbers_that_move_the_wrong_way(options, message):
    with pytest.raises(ConfigError, match=message):
        GradScaler(**options)


@pytest.mark.parametrize("bad", [jnp.nan, jnp.inf, -jnp.inf])
def test_one_bad_element_anywhere_is_found(world, bad):
    good = {"a": jnp.ones((8, 3)), "b": jnp.zeros(2)}
    assert bool(all_finite(good))
    assert not bool(all_finite(good | {"b": jnp.array([1.0, bad])}))
    rows = jax.sharding.NamedSharding(world.mesh, jax.sharding.PartitionSpec("dp"))
    split = jax.device_put(good["a"].at[5, 1].set(bad), rows)
    assert not bool(jax.jit(all_finite)({"a": split}))


def test_keep_if_selects_a_whole_tree():
    new, old = {"a": jnp.full(2, jnp.nan)}, {"a": jnp.ones(2)}
    np.testing.assert_array_equal(keep_if(jnp.array(False), new, old)["a"], [1, 1])
    assert np.isnan(keep_if(jnp.array(True), new, old)["a"]).all()


def test_numbers_of_python_are_scaled_like_arrays():
    scaler = GradScaler(init_scale=100.0)
    state = scaler.init()
    assert float(scaler.scale(3, state)) == float(jax.jit(scaler.scale)(3, state)) == 300.0
    assert float(scaler.unscale({"a": 50.0}, state)["a"]) == 0.5
