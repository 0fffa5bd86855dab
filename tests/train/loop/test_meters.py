import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from axon_dist import build_train_step, ddp
from axon_dist.core.errors import ConfigError
from axon_dist.core.tree import bytes_per_device, leaves_with_paths
from axon_dist.mesh import abstract_world
from axon_dist.mesh.chips import hardware
from axon_dist.models import ExpertConfig, Transformer, TransformerConfig, next_token_loss
from axon_dist.train.app import config_plans, plan_config
from axon_dist.train.app.steps import build_step
from axon_dist.train.config import RunConfig
from axon_dist.train.loop import model_flops_utilization, profile, time_step
from axon_dist.train.loop.meters import percentiles, utilization_of


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
    # A shared machine may speed up in between; the dispatch alone takes well under 1 %.
    assert timed.best > blocked / 10


def test_warm_up_calls_are_not_counted():
    calls = []
    timed = time_step(lambda: time.sleep(0 if calls else 0.2) or calls.append(1), 3, warmup=1)
    assert len(calls) == 4
    assert max(timed.seconds) < 0.2


@pytest.mark.parametrize("kwargs", [{"num_calls": 0}, {"warmup": -1}])
def test_nothing_to_time(kwargs):
    with pytest.raises(ConfigError, match=r"num_calls must be 1 to 1000000, and warmup 0"):
        time_step(lambda: None, **kwargs)


def test_profile_leaves_a_trace(tmp_path):
    with profile(tmp_path):
        jax.block_until_ready(jnp.ones(3) + 1)
    assert list(tmp_path.rglob("*.xplane.pb"))


def test_utilization_is_six_flops_per_parameter_and_token():
    assert model_flops_utilization(10, 100.0, peak_flops=6000.0) == 1.0
    assert model_flops_utilization(10, 100.0, peak_flops=6000.0, num_devices=8) == 1 / 8


@pytest.mark.parametrize("count", [1, 3, 10, 99, 100, 150])
def test_percentiles_are_those_of_the_nearest_rank(count):
    seconds = np.arange(count, 0, -1.0)
    exact = np.percentile(seconds, [50, 90, 99, 100], method="inverted_cdf")
    assert list(percentiles(seconds).values()) == list(exact)


def test_bytes_per_device_counts_shards(world):
    split = jax.device_put(jnp.ones((16, 4)), NamedSharding(world.mesh, PartitionSpec("dp")))
    whole = jax.device_put(jnp.ones(3), NamedSharding(world.mesh, PartitionSpec()))
    assert bytes_per_device({"split": split, "whole": whole}) == 2 * 4 * 4 + 3 * 4
    assert bytes_per_device({"none": None, "number": 3}) == 0


def test_utilization_counts_the_experts_of_a_token_and_causal_attention(world):
    sizes = dict(vocab_size=32, width=8, num_layers=2, num_heads=2, max_length=16)

    def counted(experts, length=None):
        config = TransformerConfig(**sizes, experts=experts)
        step = build_train_step(
            lambda: Transformer(config, rngs=nnx.Rngs(0)),
            optax.sgd(0.1),
            next_token_loss,
            ddp(),
            world,
        )
        params = {path: leaf.size for path, leaf in leaves_with_paths(step.model_spec.params)}
        return params, utilization_of(step, 6 / world.size, length)(1.0)

    dense, flops = counted(None)
    assert flops == sum(dense.values())
    # Two layers of two heads of four numbers, one multiply-add each for the scores and the sums,
    # half of them masked, and three passes: 6 * 2 * 2 * 4 * 16 FLOPs.
    assert counted(None, 16)[1] == pytest.approx(flops + 2 * 2 * 4 * 16)
    mixture, flops = counted(ExpertConfig(count=8, per_token=2))
    stacked = sum(n for path, n in mixture.items() if path.split("/")[-1] in ("gate", "up", "down"))
    assert stacked > sum(mixture.values()) / 2
    assert flops == pytest.approx(sum(mixture.values()) - stacked * 6 / 8)


@pytest.mark.parametrize(
    ("experts", "chip", "precision"),
    [
        ({"count": 4, "per_token": 1}, "h100", "bf16"),
        pytest.param(None, "v5p", None, marks=pytest.mark.full),
    ],
)
def test_a_plan_and_its_run_count_the_same_flops(experts, chip, precision, monkeypatch):
    monkeypatch.setattr(config_plans, "MOST", 1)
    monkeypatch.setattr(config_plans, "FEW", 0)
    sizes = {"num_layers": 2, "width": 32, "num_heads": 2, "vocab_size": 16, "max_length": 128}
    model = {"kind": "transformer", **sizes, "windows": [16, 0], "experts": experts}
    plain = {"model": model, "data": {"kind": "text", "sequence_length": 128}}
    config = RunConfig.from_dict({**plain, "train": {"global_batch": 2}, "precision": precision})
    row = hardware(chip)
    plan = plan_config(config, row, 1).best
    world = abstract_world(plan.config.mesh, 1, "cpu", None)
    per_token = utilization_of(build_step(plan.config, world), row.flops, 128)
    assert plan.utilization == pytest.approx(per_token(2 * 128 / plan.time.total))
