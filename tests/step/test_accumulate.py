"""One scan over microbatches equals adding them up in a loop."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from axon_dist import Weighted, World, build_train_step, ddp, fsdp, pipelined
from axon_dist.step.microbatches import accumulate
from axon_dist.step.objective import Sums
from tests.drawn import drawn


def gradient(params, buffers, batch):
    """Sums that depend on the microbatch and on how many came before."""
    weight = jnp.float32(batch.shape[0])
    count = buffers["count"] + 1
    sums = Sums(
        {"w": params["w"] * batch.sum() * count}, Weighted(batch.sum(), weight), {"m": batch.max()}
    )
    return sums, {"count": count}


PARAMS = {"w": jnp.asarray(np.float32([1, 2]))}
START = {"count": jnp.asarray(np.float32(0))}


@pytest.mark.parametrize("count", [2, 5])
def test_it_equals_a_loop(count):
    batch = jnp.arange(float(count * 3)).reshape(count, 3)
    sums, buffers = accumulate(gradient, PARAMS, START, batch, count)
    expected, state = gradient(PARAMS, START, batch[0])
    for row in batch[1:]:
        new, state = gradient(PARAMS, state, row)
        expected = expected + new
    for got, want in zip(jax.tree.leaves(sums), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-6)
    assert float(buffers["count"]) == count


def test_one_microbatch_is_the_gradient_itself():
    batch = jnp.arange(3.0)
    sums, _ = accumulate(gradient, PARAMS, START, batch, 1)
    np.testing.assert_array_equal(sums.grads["w"], gradient(PARAMS, START, batch)[0].grads["w"])
    assert "scan" not in str(
        jax.make_jaxpr(lambda b: accumulate(gradient, PARAMS, START, b, 1))(batch)
    )


def test_accumulated_gradients_are_constrained_and_metrics_left_alone():
    doubled = lambda grads: jax.tree.map(lambda g: 2 * g, grads)
    batch = jnp.ones((2, 3))
    plain, _ = accumulate(gradient, PARAMS, START, batch, 2)
    bent, _ = accumulate(gradient, PARAMS, START, batch, 2, doubled)
    first = gradient(PARAMS, START, batch[0])[0].grads["w"]
    np.testing.assert_allclose(bent.grads["w"], 2 * plain.grads["w"] + 2 * first)
    np.testing.assert_array_equal(bent.metrics["m"], plain.metrics["m"])


WHOLE, BUCKETS = ddp(), ddp(bucket_capacity=100)
ONE_SHARD = {"deterministic": "elastic", "logical_shards": 1}


@pytest.mark.sample("whole-2-2", "buckets-1-1", "buckets-2-1", "pipeline-1-1", "elastic-1-1")
@pytest.mark.parametrize(
    ("strategy", "ranks", "count", "options"),
    [
        pytest.param(WHOLE, 1, 1, {}, id="whole-1-1"),
        pytest.param(WHOLE, 1, 2, {}, id="whole-1-2"),
        pytest.param(WHOLE, 2, 1, {}, id="whole-2-1"),
        pytest.param(WHOLE, 2, 2, {}, id="whole-2-2"),
        pytest.param(BUCKETS, 1, 1, {}, id="buckets-1-1"),
        pytest.param(BUCKETS, 1, 2, {}, id="buckets-1-2"),
        pytest.param(BUCKETS, 2, 1, {}, id="buckets-2-1"),
        pytest.param(BUCKETS, 2, 2, {}, id="buckets-2-2"),
        pytest.param(pipelined(2, 1), 1, 1, {}, id="pipeline-1-1"),
        pytest.param(ddp(), 1, 1, ONE_SHARD, id="elastic-1-1"),
    ],
)  # fmt: skip
def test_a_metric_without_weight_is_itself_for_a_batch_without_weight(
    strategy, ranks, count, options
):
    def loss_fn(model, batch):
        squares = jnp.mean(model(batch["x"]) ** 2, -1)
        total = Weighted(jnp.sum(squares * batch["weight"]), jnp.sum(batch["weight"]))
        return total, {"rate": 3.0, "mean": jnp.mean(batch["x"]), "samples": jnp.sum(batch["n"])}

    ones = np.ones(8, np.int32)
    batch = {"x": np.ones((8, 4), np.float32), "weight": np.zeros(8, np.float32), "n": ones}
    is_pipeline = strategy.pipeline is not None
    world = World.emulate(2, "pp=2") if is_pipeline else World.emulate(ranks)
    if not is_pipeline:
        options = {"accumulate": count, **options}
    step = build_train_step(Two(), optax.sgd(0.1), loss_fn, strategy, world, **options)
    _, metrics = step(step.init(), batch)
    assert {name: metrics[name].item() for name in ("loss", "rate", "mean", "samples")} == {
        "loss": 0, "rate": 3, "mean": 1, "samples": 8,
    }  # fmt: skip
    assert metrics["samples"].dtype == np.int32


class Two(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.layers = nnx.List([nnx.Linear(4, 4, rngs=rngs) for _ in range(2)])

    def __call__(self, x):
        for layer in self.layers:
            x = jnp.tanh(layer(x))
        return x


@pytest.mark.sample("ddp", "pipeline", "elastic")
@pytest.mark.parametrize(
    ("strategy", "axis", "ranks", "options"),
    [
        (ddp(), "dp", 1, {"accumulate": 3}),
        (ddp(), "dp", 2, {"accumulate": 3}),
        (fsdp(min_elements=4), "fsdp", 2, {"accumulate": 3}),
        (pipelined(2, 2), "pp", 2, {}),
        (ddp(), "dp", 2, {"deterministic": "elastic", "logical_shards": 4}),
    ],
    ids=["microbatches", "ddp", "fsdp", "pipeline", "elastic"],
)
def test_a_metric_that_is_a_sum_of_integers_stays_exact(strategy, axis, ranks, options):
    """float32 would round the sum, 2^24 + 3; a mean of integers is what one device gives."""

    def loss_fn(model, batch):
        loss = jnp.mean(model(batch["x"]) ** 2)
        counts = {"tokens": jnp.sum(batch["n"]), "some": jnp.sum(batch["n"] > 0)}
        # A function of sums next to the counts: they stay what they are.
        return loss, counts | {"mean": jnp.mean(batch["n"]), "perplexity": jnp.exp(loss)}

    numbers = np.asarray([2**24 + 1, *[0] * 10, 2], np.int32)
    batch = {"x": np.ones((12, 4), np.float32), "n": numbers}
    world = World.emulate(ranks, f"{axis}={ranks}")
    step = build_train_step(drawn(Two), optax.sgd(0.1), loss_fn, strategy, world, **options)
    _, metrics = step(step.init(), batch)
    counts = {name: metrics[name] for name in ("tokens", "some")}
    assert {name: (x.dtype, int(x)) for name, x in counts.items()} == {
        "tokens": (jnp.int32, 2**24 + 3),
        "some": (jnp.int32, 2),
    }
    assert float(metrics["mean"]) == pytest.approx((2**24 + 3) / 12)
    assert float(metrics["perplexity"]) == pytest.approx(np.exp(float(metrics["loss"])))
