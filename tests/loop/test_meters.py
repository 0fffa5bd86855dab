import time

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from axon_dist.core.errors import ConfigError
from axon_dist.loop import bytes_per_device, model_flops_utilization, profile, time_step


def test_time_step_waits_for_the_device():
    @jax.jit
    def step(x):
        for _ in range(50):
            x = jnp.tanh(x @ x)
        return x

    x = jnp.eye(256)
    jax.block_until_ready(step(x))
    start = time.perf_counter()
    jax.block_until_ready(step(x))
    blocked = time.perf_counter() - start
    timed = time_step(lambda: step(x), num_calls=5)
    assert len(timed.seconds) == 5
    assert timed.best <= timed.median
    # A machine that others use may speed up in between; the dispatch alone takes well under 1 %.
    assert timed.best > blocked / 10


def test_warm_up_calls_are_not_counted():
    calls = []
    timed = time_step(lambda: time.sleep(0 if calls else 0.2) or calls.append(1), 3, warmup=1)
    assert len(calls) == 4
    assert max(timed.seconds) < 0.2


@pytest.mark.parametrize("kwargs", [{"num_calls": 0}, {"warmup": -1}])
def test_nothing_to_time(kwargs):
    with pytest.raises(ConfigError, match=r"it must time at least one call"):
        time_step(lambda: None, **kwargs)


def test_profile_leaves_a_trace(tmp_path):
    with profile(tmp_path):
        jax.block_until_ready(jnp.ones(3) + 1)
    assert list(tmp_path.rglob("*.xplane.pb"))


def test_utilization_is_six_flops_per_parameter_and_token():
    assert model_flops_utilization(10, 100.0, peak_flops=6000.0) == 1.0
    assert model_flops_utilization(10, 100.0, peak_flops=6000.0, num_devices=8) == 1 / 8


def test_bytes_per_device_counts_shards(world):
    split = jax.device_put(jnp.ones((16, 4)), NamedSharding(world.mesh, PartitionSpec("dp")))
    whole = jax.device_put(jnp.ones(3), NamedSharding(world.mesh, PartitionSpec()))
    assert bytes_per_device({"split": split, "whole": whole}) == 2 * 4 * 4 + 3 * 4
    assert bytes_per_device({"none": None, "number": 3}) == 0
