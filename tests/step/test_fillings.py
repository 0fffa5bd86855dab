"""Losses, metrics and buffers of batches that were filled up: as without fillings, or refused."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from axon_dist import Shared, Weighted, World, build_train_step, ddp
from axon_dist.core.errors import AxonDistError, ConfigError
from axon_dist.core.weighted import FilledBatch

RNG = np.random.default_rng(0)
BATCH = {
    "x": RNG.normal(size=(13, 8)).astype(np.float32),
    "y": RNG.normal(size=(13, 4)).astype(np.float32),
    "w": RNG.uniform(0.5, 2, size=13).astype(np.float32),
}


def make():
    return nnx.Linear(8, 4, rngs=nnx.Rngs(0))


def squares(model, batch):
    return jnp.mean((model(batch["x"]) - batch["y"]) ** 2, -1)


def mean(model, batch, metrics=None):
    w = batch["w"]
    loss = Weighted(jnp.sum(w * squares(model, batch)), jnp.sum(w))
    return loss if metrics is None else (loss, metrics)


def of(each):
    """A loss that sums what `each` makes of samples and weights, by the sum of the weights."""
    return lambda m, b: Weighted(jnp.sum(each(squares(m, b), b["w"])), jnp.sum(b["w"]))


def with_metric(metric):
    return lambda m, b: mean(m, b, {"metric": metric(squares(m, b), b["w"])})


def scanned(model, batch):
    def add(carry, row):
        x, y, w = row
        return (carry[0] + w * jnp.sum((model(x) - y) ** 2), carry[1] + w), None

    total, _ = jax.lax.scan(add, (0.0, 0.0), (batch["x"], batch["y"], batch["w"]))
    return Weighted(*total)


def contrastive(model, batch):
    logits, w = model(batch["x"]) @ batch["y"].T, batch["w"]
    each = optax.softmax_cross_entropy_with_integer_labels(logits, jnp.arange(len(logits)))
    return Weighted(jnp.sum(w * each), jnp.sum(w))


RIGHT = {
    "mean": mean,
    "dot": lambda m, b: Weighted(b["w"] @ squares(m, b), b["w"].sum()),
    "where": of(lambda s, w: jnp.where(w > 0, w * s, 0)),
    "guarded division": of(lambda s, w: jnp.where(w > 0, s / jnp.where(w > 0, w, 1), 0)),
    "einsum": lambda m, b: Weighted(jnp.einsum("b,b->", squares(m, b), b["w"]), b["w"].sum()),
    "squared weights": of(lambda s, w: w**2 * s),
    "count of weights": lambda m, b: Weighted(
        jnp.sum(jnp.where(b["w"] > 0, squares(m, b), 0)), jnp.sum(b["w"] > 0).astype(jnp.float32)
    ),
    "means": lambda m, b: Weighted(jnp.mean(b["w"] * squares(m, b)), jnp.mean(b["w"])),
    "penalty": lambda m, b: Weighted(
        jnp.sum(b["w"] * squares(m, b)) + jnp.sum(b["w"]) * jnp.sum(m.kernel**2), b["w"].sum()
    ),
    "per element": lambda m, b: Weighted(
        jnp.sum(b["w"][:, None] * jnp.abs(m(b["x"]) - b["y"])), 4 * b["w"].sum()
    ),
    "scan": scanned,
    "cross-entropy": lambda m, b: Weighted(
        jnp.sum(b["w"] * optax.softmax_cross_entropy(m(b["x"]), jax.nn.softmax(b["y"]))),
        b["w"].sum(),
    ),
    "vmap": of(jax.vmap(lambda s, w: w * jnp.log1p(s))),
    "jit": of(jax.jit(lambda s, w: w * jnp.sqrt(s))),
    "metrics": lambda m, b: mean(
        m,
        b,
        {
            "quotient": jnp.sum(b["w"] * squares(m, b) ** 2) / jnp.sum(b["w"]),
            "sum": jnp.sum(jnp.where(b["w"] > 0, squares(m, b), 0)),
            "weighted": Weighted(jnp.sum((b["w"] > 0) * squares(m, b)), jnp.sum(b["w"] > 0)),
            "of nothing": jnp.float32(3),
        },
    ),
}
WRONG = {
    "contrastive": contrastive,
    "plain term": lambda m, b: Weighted(
        jnp.sum(b["w"] * squares(m, b)) + jnp.sum(m(b["x"]) ** 2), b["w"].sum()
    ),
    "weights + 0.1": lambda m, b: Weighted(
        jnp.sum((b["w"] + 0.1) * squares(m, b)), jnp.sum(b["w"] + 0.1)
    ),
    "weight + 0.1": lambda m, b: Weighted(jnp.sum(b["w"] * squares(m, b)), jnp.sum(b["w"] + 0.1)),
    "softmax of weights": of(lambda s, w: jax.nn.softmax(w) * s),
    "sigmoid of weights": of(lambda s, w: jax.nn.sigmoid(w) * s),
    "exp of weights": lambda m, b: Weighted(
        jnp.sum(jnp.exp(b["w"]) * squares(m, b)), jnp.sum(jnp.exp(b["w"]))
    ),
    "centred": of(lambda s, w: w * (s - s.mean()) ** 2),
    "normalised": of(lambda s, w: w * s / s.sum()),
    "number of samples": lambda m, b: Weighted(
        jnp.sum(b["w"] * squares(m, b)), jnp.float32(len(b["w"]))
    ),
    "mean by sum": lambda m, b: Weighted(jnp.mean(b["w"] * squares(m, b)), b["w"].sum()),
    "sum by mean": lambda m, b: Weighted(jnp.sum(b["w"] * squares(m, b)), b["w"].mean()),
    "maximum": of(lambda s, w: w * s.max()),
    "ranks": of(lambda s, w: w * jnp.argsort(s)),
    "unguarded division": of(lambda s, w: w * (s / w)),
    "logarithm": of(lambda s, w: w * (s + jnp.log(w))),
    "where not": of(lambda s, w: jnp.where(w > 1, w * s, s)),
    "1 - weights": of(lambda s, w: (1 - w) * s),
    "metric of the mean": with_metric(lambda s, w: jnp.mean(s) + 0 * w.sum()),
    "metric mean of weighed": with_metric(lambda s, w: jnp.mean(w * s)),
    "metric count": with_metric(lambda s, w: jnp.float32(len(s))),
    "metric maximum": with_metric(lambda s, w: jnp.max(w * s)),
    "metric number": with_metric(lambda s, w: Weighted(jnp.sum(w * s), jnp.float32(len(s)))),
    "metric perplexity": with_metric(lambda s, w: jnp.exp(jnp.sum(w * s) / jnp.sum(w))),
}


def build(loss_fn, model=make, **options):
    world = World.emulate(4, "dp=4")
    options = {"pad": "w", "batch": BATCH, **options}
    return build_train_step(model(), optax.sgd(0.1), loss_fn, ddp(), world, **options)


# What is accepted is filled up in one way: a row for each form that a loss has by then.
TRAINED = ("count of weights", "scan", "metrics")


@pytest.mark.parametrize("name", [name for name in RIGHT if name not in TRAINED])
def test_a_loss_that_masks_padding_is_accepted_at_build(name):
    build(RIGHT[name])


# The others are only built by default; what a batch then gives is tried of these.
@pytest.mark.sample(*TRAINED)
@pytest.mark.parametrize("name", RIGHT)
def test_a_loss_that_masks_padding_is_unchanged_by_it(name):
    step = build(RIGHT[name])
    _, metrics = step(step.init(), BATCH)
    found = nnx.jit(RIGHT[name])(make(), BATCH)
    loss, extra = found if isinstance(found, tuple) else (found, {})
    for key, value in {"loss": loss, **extra}.items():
        want = value.total / value.weight if isinstance(value, Weighted) else value
        np.testing.assert_allclose(metrics[key], want, rtol=1e-5, err_msg=key)


@pytest.mark.parametrize("name", WRONG)
def test_a_loss_that_counts_padding_is_refused_at_build(name):
    kind = "metric" if name.startswith("metric") else "loss"
    with pytest.raises(ConfigError, match=rf"the {kind}.* of loss_fn .*pad='w'.*Weighted\("):
        build(WRONG[name])


class Counter(nnx.Module):
    def __init__(self, of):
        self.linear, self.of = make(), of
        self.seen = nnx.Variable(jnp.float32(0))

    def __call__(self, x):
        self.seen[...] += self.of(x)
        return self.linear(x)


@pytest.mark.parametrize("of", [lambda x: x.shape[0], jnp.sum], ids=["samples", "values"])
def test_buffers_that_count_fillings_are_refused(of):
    with pytest.raises(AxonDistError, match=r"buffer 'seen' depends on the batch.*pad='w'"):
        build(mean, lambda: Counter(of))


COUPLED = {
    "maximum": lambda s, w: s.max(),
    "median": lambda s, w: jnp.median(s),
    "spread": lambda s, w: s.std(),
    "area": lambda s, w: jnp.mean((s[:, None] > s[None]) & (w[:, None] > w[None])),
    "any": lambda s, w: jnp.any(s > 2).astype(jnp.float32),
}
OF_SUMS = {
    "perplexity": lambda s, w: jnp.exp(s.mean()),
    "F1": lambda s, w: 2 * jnp.sum((s > 1) & (w > 1)) / (jnp.sum(s > 1) + jnp.sum(w > 1)),
    "root": lambda s, w: jnp.sqrt(s.mean()),
    "quotient": lambda s, w: jnp.sum(s * w) / jnp.sum(w),
    "guarded": lambda s, w: Weighted(jnp.sum(s * w), jnp.maximum(jnp.sum(w), 1)),
}


def with_metrics(metrics):
    def loss_fn(model, batch):
        each = squares(model, batch)
        return each.mean(), {name: of(each, batch["w"]) for name, of in metrics.items()}

    return loss_fn


@pytest.mark.parametrize("name", COUPLED)
def test_metrics_that_couple_microbatches_are_refused(name):
    # If sums would give one of them, the error names the one that prevents it.
    loss_fn = with_metrics({"root": OF_SUMS["root"], name: COUPLED[name]})
    batch = jax.tree.map(lambda x: x[:8], BATCH)
    with pytest.raises(AxonDistError, match=rf"metric '{name}' .*2 microbatches") as told:
        build(loss_fn, pad=None, batch=batch, accumulate=2)
    assert "Weighted(" in str(told.value)


def test_metrics_that_couple_samples_are_those_of_a_batch_that_is_not_cut():
    loss_fn = with_metrics(COUPLED)
    batch = jax.tree.map(lambda x: x[:8], BATCH)
    step = build(loss_fn, pad=None, batch=batch)
    _, metrics = step(step.init(), batch)
    for name, want in nnx.jit(loss_fn)(make(), batch)[1].items():
        np.testing.assert_allclose(metrics[name], want, rtol=1e-5, err_msg=name)


def test_metrics_that_are_functions_of_sums_are_those_of_the_whole_batch():
    loss_fn = with_metrics(OF_SUMS)
    batch = jax.tree.map(lambda x: x[:8], BATCH)
    step = build(loss_fn, pad=None, batch=batch, accumulate=2)
    _, metrics = step(step.init(), batch)
    assert sorted(metrics) == sorted(["loss", *OF_SUMS])
    for name, want in nnx.jit(loss_fn)(make(), batch)[1].items():
        want = want.mean if isinstance(want, Weighted) else want
        np.testing.assert_allclose(metrics[name], want, rtol=1e-5, err_msg=name)


def test_a_filled_batch_of_a_loader_may_have_leaves_that_all_samples_share():
    def loss_fn(model, batch):
        each = squares(model, batch) * batch["factor"]
        return Weighted(jnp.sum(each * batch["w"]), jnp.sum(batch["w"]))

    model, world = make(), World.emulate(4, "dp=4")
    step = build_train_step(model, optax.sgd(0.1), loss_fn, ddp(), world, pad="w")
    state = step.init()
    rows = {"x": BATCH["x"], "y": BATCH["y"]}
    factor = Shared(np.float32(2))
    filled = {name: np.concatenate([x, x[:3]]) for name, x in rows.items()}
    batch = FilledBatch({**filled, "factor": factor}, samples={**rows, "factor": factor})
    outputs = rows["x"] @ np.asarray(model.kernel[...]) + np.asarray(model.bias[...])
    expected = 2 * np.mean((outputs - rows["y"]) ** 2)
    np.testing.assert_allclose(step.evaluate(state, batch)["loss"], expected, rtol=1e-5)
