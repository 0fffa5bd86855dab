"""Loss functions made uniform: weights, metrics, and sums that add up to the mean."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from axon_dist import Weighted, World, build_train_step, ddp
from axon_dist.core.compat import eval_jaxpr
from axon_dist.core.errors import ConfigError, UnsupportedError
from axon_dist.optim import Spikes, watched
from axon_dist.step.microbatches import accumulate
from axon_dist.step.model_spec import split_model
from axon_dist.step.objective import (
    Sums,
    evaluate,
    forward_of,
    gradient_means,
    gradient_sums,
    mean_loss,
)

X = np.arange(12, dtype=np.float32).reshape(6, 2) / 10
WEIGHT = np.array([1.0, 0.0, 2.0, 0.0, 0.0, 1.0], np.float32)
KERNEL = jnp.asarray(np.float32([[0.7], [-0.4]]))
PARTS, SOURCE = split_model(nnx.Linear(2, 1, kernel_init=lambda *_: KERNEL, rngs=nnx.Rngs(0)))
PARAMS, BUFFERS = SOURCE.arrays
BATCH = {"x": X, "weight": WEIGHT}


def plain(model, batch):
    return jnp.mean(model(batch["x"]) ** 2)


def weighted(model, batch):
    squares = model(batch["x"])[:, 0] ** 2
    total = Weighted(jnp.sum(squares * batch["weight"]), jnp.sum(batch["weight"]))
    return total, {"largest": jnp.max(squares)}


def run(loss_fn):
    return evaluate(PARTS, loss_fn, PARAMS, BUFFERS, BATCH)


def test_a_scalar_weighs_one_and_a_weighted_loss_its_weight():
    assert run(plain).loss.weight == 1.0
    outcome = run(weighted)
    assert float(outcome.loss.weight) == 4.0
    assert outcome.metrics.keys() == {"largest"}


def test_a_shard_that_is_all_padding_has_loss_zero():
    assert float(mean_loss(Weighted(jnp.float32(0), jnp.float32(0)))) == 0.0
    assert float(mean_loss(Weighted(jnp.float32(6), jnp.float32(4)))) == 1.5


@pytest.mark.parametrize(
    ("total", "weight"),
    [
        (jnp.int32(4), jnp.float32(3.5)),
        (jnp.bool_(True), jnp.float32(0.5)),
        (jnp.bfloat16(166), jnp.float32(257)),
        (jnp.float16(166), jnp.float32(70000)),
        (jnp.float16(166), jnp.int32(70000)),
    ],
)
def test_neither_number_of_a_quotient_takes_the_type_of_the_other(total, weight):
    found = mean_loss(Weighted(total, weight))
    assert found.dtype == (total / weight).dtype
    exact = float(total) / float(weight)
    np.testing.assert_allclose(float(found), exact, rtol=jnp.finfo(found.dtype).eps)


def test_a_weight_too_large_for_the_type_of_the_total_divides_it_and_its_gradient():
    """As in plain JAX, with the weight of float32; an integer weight is no other."""
    half = jax.tree.map(lambda x: x.astype(jnp.float16), PARAMS)

    batch = {"x": X.astype(np.float16)}
    total = lambda params: jnp.sum(PARTS.merge(params, BUFFERS)(batch["x"]) ** 2)
    want = jax.value_and_grad(lambda params: total(params) / jnp.float32(70000))(half)
    for count in (jnp.float32(70000), jnp.int32(70000)):

        def loss_fn(model, batch, count=count):
            return Weighted(jnp.sum(model(batch["x"]) ** 2), count)

        forward = forward_of(PARTS, loss_fn)
        grads, metrics = gradient_means(forward, half, BUFFERS, batch)[:2]
        parts, _ = gradient_sums(forward, 2)(half, BUFFERS, batch)
        for loss, found in (
            (metrics["loss"], grads),
            (parts.means(2)[1]["loss"], parts.means(2)[0]),
        ):
            np.testing.assert_allclose(float(loss), float(want[0]), rtol=0.02)
            np.testing.assert_allclose(found["kernel"], want[1]["kernel"], rtol=0.02)


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (lambda m, b: m(b["x"]), r"a loss of shape \(6, 1\); it must be a scalar.*Weighted"),
        (lambda m, b: Weighted(jnp.ones(()), jnp.ones(3)), r"a weight of shape \(3,\)"),
        (lambda m, b: (jnp.ones(()), {"a": jnp.ones(2)}), r"a metric 'a' of shape \(2,\)"),
        (lambda m, b: (jnp.ones(()), [1]), r"metrics of type list; they must be a dict"),
    ],
)
def test_invalid_results_of_a_loss_are_refused(returned, message):
    with pytest.raises(ConfigError, match=message):
        run(returned)


def test_a_norm_excuses_only_the_parameters_inside_it():
    class Net(nnx.Module):
        def __init__(self):
            rngs = nnx.Rngs(0)
            self.norm = nnx.WeightNorm(nnx.Linear(2, 1, rngs=rngs), rngs=rngs)
            self.norm2 = nnx.Linear(2, 1, rngs=rngs)

    def changes(model, batch):
        model.norm2.kernel[...] = 0.9 * model.norm2.kernel[...]
        return plain(model.norm2, batch)

    model_spec, source = split_model(Net())
    params, buffers = source.arrays
    with pytest.raises(UnsupportedError, match="changes the parameter 'norm2/kernel'"):
        jax.make_jaxpr(lambda p: evaluate(model_spec, changes, p, buffers, BATCH).loss.total)(
            params
        )


@pytest.mark.parametrize("name", ["layer", "zlayer"])
@pytest.mark.parametrize("norm", [nnx.WeightNorm, nnx.SpectralNorm])
def test_a_norm_excuses_the_layer_it_wraps_whatever_attribute_also_holds_it(name, norm):
    class Net(nnx.Module):
        def __init__(self):
            layer = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
            setattr(self, name, layer)
            self.norm = norm(layer, rngs=nnx.Rngs(1))

    def both(model, batch):
        # The norm writes into the layer, which the loss then reads as on one device.
        return plain(model.norm, batch) + jnp.sum(getattr(model, name).kernel[...] ** 2)

    model = Net()
    model_spec, source = split_model(model)
    params, buffers = source.arrays
    traced = jax.make_jaxpr(lambda p: evaluate(model_spec, both, p, buffers, BATCH).loss.total)
    found = eval_jaxpr(traced(params), jax.tree.leaves(params))
    np.testing.assert_allclose(found[0], both(model, BATCH), rtol=1e-6)


def dense(loss_fn):
    def mean(params):
        value = loss_fn(PARTS.merge(params, BUFFERS), BATCH)
        value = value[0] if isinstance(value, tuple) else value
        return value.total / value.weight if isinstance(value, Weighted) else value

    return jax.value_and_grad(mean)(PARAMS)


@pytest.mark.sample("1024.0-plain", "1024.0-weighted")
@pytest.mark.parametrize("loss_fn", [plain, weighted])
@pytest.mark.parametrize("scale", [None, 1024.0])
def test_means_are_the_plain_gradient(loss_fn, scale):
    scale = None if scale is None else jnp.float32(scale)
    forward = forward_of(PARTS, loss_fn)
    grads, metrics = gradient_means(forward, PARAMS, BUFFERS, BATCH, scale)[:2]
    loss, expected = dense(loss_fn)
    np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-6)
    for got, want in zip(jax.tree.leaves(grads), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(got, want * (1 if scale is None else scale), rtol=1e-5)


@pytest.mark.parametrize("count", [2, 3, 6])
@pytest.mark.parametrize("loss_fn", [plain, weighted])
def test_sums_of_microbatches_are_the_mean_of_the_batch(loss_fn, count):
    sums_of = gradient_sums(forward_of(PARTS, loss_fn), count)
    pieces = jax.tree.map(lambda x: x.reshape(count, -1, *x.shape[1:]), BATCH)
    sums, _ = jax.jit(lambda b: accumulate(sums_of, PARAMS, BUFFERS, b, count))(pieces)
    loss, expected = dense(loss_fn)
    grads, metrics = sums.means(count)
    np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-6)
    for got, want in zip(jax.tree.leaves(grads), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5)


def test_metrics_are_means_weighed_as_the_loss():
    sums_of = gradient_sums(forward_of(PARTS, weighted), 2)
    pieces = jax.tree.map(lambda x: x.reshape(2, 3, *x.shape[1:]), BATCH)
    sums, _ = accumulate(sums_of, PARAMS, BUFFERS, pieces, 2)
    halves = [
        weighted(PARTS.merge(PARAMS, BUFFERS), jax.tree.map(lambda x, k=k: x[k], pieces))
        for k in range(2)
    ]
    weights = np.array([3.0, 1.0])
    expected = np.dot(weights, [float(m["largest"]) for _, m in halves]) / weights.sum()
    np.testing.assert_allclose(sums.means(2)[1]["largest"], expected, rtol=1e-6)


def test_a_mean_over_nothing_does_not_spoil_the_others():
    def undefined(model, batch):
        loss, weight = model(batch["x"])[:, 0] ** 2, batch["weight"]
        mean = jnp.sum(loss * weight) / jnp.sum(weight)
        return Weighted(jnp.sum(loss * weight), jnp.sum(weight)), {"mean": mean}

    pieces = jax.tree.map(lambda x: x.reshape(3, 2, *x.shape[1:]), BATCH)
    pieces["weight"] = jnp.array([[1.0, 2.0], [0.0, 0.0], [0.0, 3.0]])
    sums, _ = accumulate(gradient_sums(forward_of(PARTS, undefined), 3), PARAMS, BUFFERS, pieces, 3)
    metrics = sums.means(3)[1]
    assert np.isfinite(metrics["mean"])
    np.testing.assert_allclose(metrics["mean"], metrics["loss"], rtol=1e-6)


def test_sums_are_float32_whatever_the_model_computes_in():
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), PARAMS)
    sums, _ = gradient_sums(forward_of(PARTS, weighted), 2)(half, BUFFERS, BATCH)
    assert {x.dtype for x in jax.tree.leaves(sums)} == {jnp.dtype("float32")}


def test_gradients_of_a_common_weight_add_up():
    """Where ranks add gradients within the backward pass, all divide by one weight."""
    common = lambda weight: 0 * weight + 2.0
    own, _ = gradient_sums(forward_of(PARTS, weighted), 2)(PARAMS, BUFFERS, BATCH)
    shared, _ = gradient_sums(forward_of(PARTS, weighted), 2, common=common)(PARAMS, BUFFERS, BATCH)
    for a, b in zip(jax.tree.leaves(own), jax.tree.leaves(shared), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)


def test_no_weight_at_all_gives_zero_gradients_not_nan():
    sums = Sums(
        {"w": jnp.zeros(2)}, Weighted(jnp.float32(0), jnp.float32(0)), {"m": jnp.float32(0)}
    )
    grads, metrics = sums.means(2)
    np.testing.assert_array_equal(grads["w"], [0, 0])
    assert float(metrics["loss"]) == float(metrics["m"]) == 0.0


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (
            (1.0, {"loss": 2.0}),
            "metrics named loss, which the step reports itself; give them other",
        ),
        ((1.0, {"grad_norm": 2.0, "own": 1.0}), "metrics named grad_norm,"),
        ((1.0, {}, None), "loss_fn returned 3 values; it must return the loss, or the loss and"),
        (None, "loss of type NoneType; it must be a floating-point scalar"),
        (jnp.int32(3), "loss of dtype int32; it must be a floating-point scalar"),
    ],
)
def test_values_and_metrics_that_a_loss_function_may_not_return(returned, message):
    with pytest.raises(ConfigError, match=message):
        evaluate(PARTS, lambda model, batch: returned, PARAMS, BUFFERS, BATCH)


def test_a_metric_may_not_have_the_name_of_one_that_the_optimizer_reports():
    loss_fn = lambda model, batch: (jnp.mean(model(batch["x"]) ** 2), {"spike": jnp.float32(7)})
    optimizer = watched(optax.sgd(0.1), spikes=Spikes())
    make = lambda: nnx.Linear(4, 4, rngs=nnx.Rngs(0))
    step = build_train_step(make, optimizer, loss_fn, ddp(), World.emulate(1))
    with pytest.raises(ConfigError, match="metrics named spike, which the step reports") as error:
        step(step.init(), {"x": np.ones((4, 4), np.float32)})
    assert error.value.code == "metric-of-the-optimizer"


def test_a_metric_may_not_have_the_name_of_a_norm_of_a_layer():
    named = {"grad_norm/kernel": jnp.float32(7)}
    loss_fn = lambda model, batch: (jnp.mean(model(batch["x"]) ** 2), named)
    make = lambda: nnx.Linear(4, 4, rngs=nnx.Rngs(0))
    options = {"metrics": ("norms_by_layer",)}
    step = build_train_step(make, optax.sgd(0.1), loss_fn, ddp(), World.emulate(1), **options)
    with pytest.raises(ConfigError, match=r"named grad_norm/kernel, which the step reports itself"):
        step(step.init(), {"x": np.ones((4, 4), np.float32)})
