"""Estimates from shapes agree with the bytes that arrays occupy."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from axon_dist import FSDPMemoryStats, MixedPrecision, build_train_step, compose, ddp, fsdp
from axon_dist.core.errors import ConfigError
from axon_dist.mesh import MeshSpec
from axon_dist.models import Transformer, TransformerConfig
from axon_dist.parallel import (
    STRATEGIES,
    estimate,
    format_bytes,
    measure,
    pipelined,
    tensor_parallel,
    zero,
)
from axon_dist.sharding import explain, explain_optimizer
from tests.drawn import drawn

from . import tower

FIELDS = ("param_memory_bytes", "grad_memory_bytes", "optim_memory_bytes", "total_memory_bytes")


def test_stats_in_words():
    stats = FSDPMemoryStats(5050, 20200, 20200, 40400, 4, "no_shard", 80800)
    assert stats.total_memory_bytes == 80800
    assert stats.total_memory_mib == stats.total_memory_mb == pytest.approx(0.077057, rel=1e-4)
    assert str(stats) == "no_shard total: 78.9 KiB (savings 0.0%)"


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (5, "5.0 B"),
        (1536, "1.5 KiB"),
        (2**21, "2.0 MiB"),
        (5 * 2**30, "5.0 GiB"),
        (2**41, "2.0 TiB"),
    ],
)
def test_bytes_in_words(count, text):
    assert format_bytes(count) == text


LINEAR = {
    "kernel": jax.ShapeDtypeStruct((100, 50), jnp.float32),
    "bias": jax.ShapeDtypeStruct((50,), jnp.float32),
}


@pytest.mark.parametrize(
    ("num_ranks", "expected"), [(2, (80800, 60600, 50500, 40400)), (1, (80800,) * 4)]
)
def test_the_table_of_the_zero_paper_on_5050_parameters(num_ranks, expected):
    found = [
        estimate(zero(stage, min_elements=1), LINEAR, MeshSpec(dp=num_ranks)).total_memory_bytes
        for stage in range(4)
    ]
    assert tuple(found) == expected


def test_a_pipeline_is_not_estimated_as_if_every_rank_held_the_model():
    with pytest.raises(ConfigError, match="'pp'") as error:
        estimate(pipelined(2, 4), LINEAR, MeshSpec(pp=2))
    assert error.value.code == "estimate-of-a-pipeline"


def test_a_small_leaf_that_lies_whole_counts_whole(world):
    bias = {"bias": jax.ShapeDtypeStruct((96,), jnp.float32)}
    found = estimate(zero(3), bias, world.mesh, optax.adam(1e-3))
    assert found.param_memory_bytes == 4 * 96
    assert found.optim_memory_bytes == 8 * 96
    assert found.memory_savings == 0


class Tables(nnx.Module):
    """A vocabulary that is a prime number."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.table, self.head = nnx.Embed(997, 50, rngs=rngs), nnx.Linear(50, 997, rngs=rngs)

    def __call__(self, tokens):
        return self.head(self.table(tokens))


UNEVEN = {
    "linear": (lambda: nnx.Linear(100, 50, rngs=nnx.Rngs(0)), np.ones((8, 100), np.float32)),
    "tables": (Tables, np.zeros((8,), np.int32)),
}


@pytest.mark.sample("1-tables", "3-linear")
@pytest.mark.parametrize("name", UNEVEN)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_leaves_that_do_not_divide_stay_whole_and_are_counted_so(world, name, stage):
    make, x = UNEVEN[name]
    loss_fn = lambda model, batch: jnp.mean(model(batch["x"]) ** 2)
    step = build_train_step(drawn(make), optax.adam(1e-3), loss_fn, zero(stage), world)
    state = step.init()
    grads, _ = step.gradients(state, {"x": x})
    measured = measure(step.strategy, state.params, grads, state.opt_state)
    found = estimate(zero(stage), step.model_spec.params, world.mesh, accumulate=1)
    assert_within(found, measured, 0.02)


def test_the_optimizer_counts_what_it_keeps(world):
    weigh = lambda optimizer: estimate(zero(0), LINEAR, world.mesh, optimizer).optim_memory_bytes
    assert weigh(optax.sgd(0.1)) == 0
    assert weigh(optax.sgd(0.1, momentum=0.9)) == 4 * 5050
    assert weigh(optax.adam(0.1)) == 8 * 5050
    assert weigh(optax.adam(0.1, mu_dtype="bfloat16")) == 6 * 5050


def assert_within(estimated, measured, tolerance=0.05):
    for field in FIELDS:
        expected = pytest.approx(getattr(measured, field), rel=tolerance)
        assert getattr(estimated, field) == expected, field


@pytest.mark.full
@pytest.mark.sample("zero1-float32", "full_shard-bfloat16")
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("name", ["zero1", "shard_grad_op", "full_shard"])
def test_estimates_are_within_five_percent_of_what_is_measured(world, name, dtype):
    optimizer = optax.adamw(1e-3)
    strategy = STRATEGIES[name](None, world, min_elements=8)
    step = build_train_step(tower.make(1, dtype), optimizer, tower.loss_fn, strategy, world)
    state = step.init()
    grads, _ = step.gradients(state, tower.batch())
    measured = measure(step.strategy, state.params, grads, state.opt_state)
    shapes = step.model_spec.params
    assert_within(estimate(strategy, shapes, world.mesh, optimizer, accumulate=1), measured)
    assert measured.total_params == sum(leaf.size for leaf in jax.tree.leaves(state.params))


@pytest.fixture(scope="module")
def gpt2():
    """The shapes of a real model and of its moments."""
    config = TransformerConfig.preset("gpt2-124m")
    model = nnx.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(0)))
    params = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    return params, jax.eval_shape(optax.adam(1e-3).init, params)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_real_model_of_which_small_leaves_stay_whole(world, stage, gpt2):
    """GPT-2 with the default threshold: what the policies decide, leaf by leaf, within 5 %."""
    (params, moments), strategy = gpt2, zero(stage)
    planned = (
        explain(strategy.params, params, world.mesh).bytes_per_device
        + explain(strategy.opt_state, params, world.mesh).bytes_per_device
        + explain_optimizer(strategy.opt_state, params, moments, world.mesh).bytes_per_device
    )
    found = estimate(strategy, params, world.mesh, accumulate=1)
    assert found.total_memory_bytes == pytest.approx(planned, rel=0.01)


@pytest.mark.parametrize(("offload", "kept"), [("params", "moments"), ("full", None)])
def test_what_lies_in_host_memory_takes_none_of_a_device(world, offload, kept):
    params = {"kernel": jax.ShapeDtypeStruct((256, 256), jnp.float32)}
    strategies = (fsdp(axes=("dp",), cpu_offload=x) for x in ("none", offload))
    here, there = (estimate(strategy, params, world.mesh) for strategy in strategies)
    assert (here.param_memory_bytes > 0, there.param_memory_bytes) == (True, 0)
    assert there.optim_memory_bytes == (here.optim_memory_bytes if kept else 0)
    assert there.grad_memory_bytes == here.grad_memory_bytes


def test_a_precision_that_stores_half_is_estimated_so(world):
    """The estimate of a float32 model knows that the strategy keeps it in bfloat16."""
    precision = MixedPrecision(param="bfloat16", compute="bfloat16")
    strategy = fsdp(axes=("dp",), mixed_precision=precision, min_elements=8)
    optimizer = optax.adamw(1e-3)
    step = build_train_step(tower.make(1)(), optimizer, tower.loss_fn, strategy, world)
    state = step.init()
    shapes = jax.eval_shape(lambda p: p, state.params)
    float32 = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.float32), shapes)
    estimated = estimate(strategy, float32, world.mesh, optimizer)
    measured = measure(strategy, state.params, state.params, state.opt_state)
    assert_within(estimated, measured)


def test_hybrid_counts_the_axis_that_splits(make_world):
    world = make_world("dp=2,fsdp=4")
    strategy = fsdp("hybrid_shard", ("dp", "fsdp"), min_elements=8)
    step = build_train_step(tower.make()(), optax.adam(1e-3), tower.loss_fn, strategy, world)
    state = step.init()
    measured = measure(strategy, state.params, state.params, state.opt_state)
    assert_within(estimate(strategy, step.model_spec.params, world.mesh), measured)
    assert measured.memory_savings == pytest.approx(0.75, abs=0.02)


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("data", [ddp, lambda: zero(1, min_elements=8)], ids=["ddp", "zero1"])
def test_gradients_are_split_over_tensor_ranks_also_where_data_ranks_hold_them_whole(
    make_world, data, accumulate
):
    params = {
        "up": {"kernel": jax.ShapeDtypeStruct((64, 256), jnp.float32)},
        "down": {"kernel": jax.ShapeDtypeStruct((256, 64), jnp.float32)},
    }
    strategy = compose(data(), tensor_parallel({"up$": "column", "down$": "row"}))
    found = estimate(strategy, params, make_world("dp=2,tp=4").mesh, accumulate=accumulate)
    share = 4 * 2 * 64 * 256 // 4
    is_split = accumulate == 1 and data is not ddp
    assert found.param_memory_bytes == share
    assert found.grad_memory_bytes == (share // 2 if is_split else share)
