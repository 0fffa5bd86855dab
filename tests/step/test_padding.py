"""Batches that do not divide: filled up without a trace in loss, gradients and metrics."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from axon_dist import World, build_train_step, compose, ddp, pipelined
from axon_dist.core.errors import ConfigError, DivisibilityError, UnsupportedError
from axon_dist.core.weighted import Weighted
from axon_dist.models import MLP, next_token_loss

LAYERS = (8, 6, 6, 2)


def make():
    return MLP(LAYERS, rngs=nnx.Rngs(0))


def batch_of(samples, **more):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(samples, 8)).astype(np.float32)
    return {"x": x, "y": np.sin(x[:, :2]), **more}


def squares(model, batch):
    return jnp.mean((model(batch["x"]) - batch["y"]) ** 2, axis=-1)


def loss_fn(model, batch):
    """Squares with weights, and a weighted metric."""
    errors, weight = squares(model, batch), batch.get("weight", jnp.ones(len(batch["x"])))
    total, count = jnp.sum(errors * weight), jnp.sum(weight)
    return Weighted(total, count), {"worst": jnp.sum(weight * errors**2) / count}


PLANS = {
    "pipeline of 4 microbatches": ("pp=2", pipelined(2, 4), {}),
    "zero bubble": ("pp=2", pipelined(2, 4, "zero_bubble_h1"), {}),
    "pipeline and data": ("pp=2,dp=2", compose(pipelined(2, 2), ddp()), {}),
    "data": ("dp=4", ddp(), {}),
    "accumulated": ("dp=2", ddp(), {"accumulate": 3}),
}


def build(name, model=make, loss=loss_fn, pad="weight"):
    mesh, strategy, options = PLANS[name]
    size = int(np.prod([int(part.split("=")[1]) for part in mesh.split(",")]))
    world = World.emulate(size, mesh)
    return build_train_step(model, optax.sgd(0.1), loss, strategy, world, pad=pad, **options)


CASES = [
    ("zero bubble", 3),
    ("accumulated", 13),
    *(pytest.param(name, 13, marks=pytest.mark.full) for name in PLANS if name != "accumulated"),
]


@pytest.mark.full
@pytest.mark.sample("accumulated-13")
@pytest.mark.parametrize(("name", "samples"), CASES)
def test_equals_one_device_without_padding(name, samples):
    step, batch = build(name), batch_of(samples)
    state = step.init()
    grads, metrics = step.gradients(state, batch)
    objective = lambda model: (lambda loss, extra: (loss.mean, extra))(*loss_fn(model, batch))
    (loss, extra), want = nnx.jit(nnx.value_and_grad(objective, has_aux=True))(make())
    want = jax.tree.leaves(nnx.to_pure_dict(want))
    for got, expected in zip(jax.tree.leaves(step.storage.to_model(grads)), want, strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-7)
    assert float(metrics["loss"]) == pytest.approx(float(loss), rel=1e-5)
    if samples == 13:
        assert float(step.evaluate(state, batch)["loss"]) == pytest.approx(float(loss), rel=1e-5)
        evaluated = float(step.evaluate(state, batch)["worst"])
        assert evaluated == pytest.approx(float(extra["worst"]), rel=1e-5)
    assert np.isfinite(float(metrics["worst"]))


@pytest.mark.full
def test_samples_draw_as_on_one_device():
    class Noisy(nnx.Module):
        def __init__(self):
            self.mlp, self.dropout = make(), nnx.Dropout(0.5, rngs=nnx.Rngs(1))

        def __call__(self, x):
            return self.mlp(self.dropout(x))

    step, batch = build("accumulated", Noisy), batch_of(13)
    want, _ = loss_fn(Noisy(), batch)
    _, metrics = step(step.init(), batch)
    assert float(metrics["loss"]) == pytest.approx(float(want.mean), rel=1e-5)


def test_own_weights_stay_and_fillings_weigh_nothing():
    step = build("data")
    placed = step.place(batch_of(6, weight=np.arange(6, dtype=np.float32))).arrays
    np.testing.assert_array_equal(placed["weight"], [0, 1, 2, 3, 4, 5, 0, 0])
    np.testing.assert_array_equal(placed["x"][6:], np.stack([batch_of(6)["x"][-1]] * 2))
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batch_of(6))
    assert step.batch_layout.abstract(shapes).arrays["weight"].shape == (8,)


@pytest.mark.parametrize(("samples", "count"), [(5, 4), (2, 4)])
def test_samples_keep_their_places(samples, count):
    world, model = World.emulate(2, "pp=2"), make()
    step = build_train_step(
        model, optax.sgd(0.1), loss_fn, pipelined(2, count), world, pad="weight"
    )
    batch = batch_of(samples)
    placed = step.place(batch).arrays
    weight = np.asarray(placed["weight"]).reshape(-1)
    assert weight.tolist() == [1] * samples + [0] * (len(weight) - samples)
    x = np.asarray(placed["x"]).reshape(-1, 8)
    np.testing.assert_array_equal(x[:samples], batch["x"])


@pytest.mark.full
def test_tokens_count_by_the_weight_of_their_sample():
    tokens = np.random.default_rng(0).integers(0, 16, (5, 7)).astype(np.int32)
    model = lambda tokens: jax.nn.one_hot(tokens, 16) * 3
    weight = jnp.array([1, 1, 1, 0, 0], jnp.float32)
    got = next_token_loss(model, {"tokens": tokens, "weight": weight})
    want = next_token_loss(model, {"tokens": tokens[:3]})
    assert got.weight == want.weight == 18
    np.testing.assert_allclose(got.total, want.total, rtol=1e-6)


def test_a_loss_that_would_count_padding_raises():
    def counts(model, batch):
        return Weighted(
            jnp.sum(squares(model, batch)), jnp.float32(len(batch["x"])) + 0 * batch["x"].sum()
        )

    def metric(model, batch):
        return loss_fn(model, batch)[0], {"mean": jnp.mean(squares(model, batch))}

    class WithStatistics(nnx.Module):
        def __init__(self):
            self.norm = nnx.BatchNorm(8, rngs=nnx.Rngs(0))
            self.mlp = make()

        def __call__(self, x):
            return self.mlp(self.norm(x))

    plain = lambda model, batch: jnp.mean(squares(model, batch))
    with pytest.raises(ConfigError, match=r"without its weight.*pad='weight'.*Weighted\("):
        build("data", loss=plain).place(batch_of(6))
    with pytest.raises(
        ConfigError, match=r"loss of loss_fn has a term .* weight 0.*of batch\['weight'\]"
    ):
        build("data", loss=counts).place(batch_of(6))
    with pytest.raises(ConfigError, match=r"the metric 'mean' of loss_fn has a term that is not 0"):
        build("data", loss=metric).place(batch_of(6))
    with pytest.raises(UnsupportedError, match=r"'norm/mean' depends on the batch"):
        build("data", WithStatistics).place(batch_of(6))
    with pytest.raises(ConfigError, match=r"batch of type tuple with pad='weight'"):
        build("data").place((np.ones((6, 8)), np.ones((6, 2))))


def test_without_pad_a_batch_that_does_not_divide_raises():
    with pytest.raises(DivisibilityError, match=r"13 samples.*build_train_step\(pad=\.\.\.\)"):
        build("data", pad=None).place(batch_of(13))
