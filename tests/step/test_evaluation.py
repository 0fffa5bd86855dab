"""Evaluation: no noise in it, and the same over batches of any sizes."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from axon_dist import Trainer, Weighted, World, build_train_step, ddp, zero
from axon_dist.core.errors import ConfigError
from axon_dist.step.evaluation import WithArguments
from axon_dist.train.loop import LoopOptions
from axon_dist.train.loop.meters import MetricSums

X = np.random.default_rng(0).normal(size=(8, 16)).astype(np.float32)


def squares(model, batch):
    return jnp.mean((model(batch["x"]) - 1) ** 2)


class Told(nn.Module):
    """Is told by its call, under a name that is given; draws on its own, too."""

    switch: str = "deterministic"

    def run(self, x, rests):
        x = nn.Dropout(0.5, deterministic=rests)(nn.Dense(32)(x))
        if not rests:
            x = x * jax.random.bernoulli(self.make_rng("dropout"), 0.5, x.shape)
        return nn.Dense(4)(x)


class Deterministic(Told):
    @nn.compact
    def __call__(self, x, deterministic=False):
        return self.run(x, deterministic)


class Training(Told):
    @nn.compact
    def __call__(self, x, train=True):
        return self.run(x, not train)


class Fixed(nn.Module):
    """Has no argument: its layers were told when it was written."""

    @nn.compact
    def __call__(self, x):
        x = nn.BatchNorm(use_running_average=False)(nn.Dense(32)(x))
        x = nn.MultiHeadDotProductAttention(2, dropout_rate=0.5, deterministic=False)(x[:, None])
        return nn.Dense(4)(nn.Dropout(0.5, deterministic=False)(x[:, 0]))


class Own(nn.Module):
    """Tells under a name of its own."""

    @nn.compact
    def __call__(self, x, noisy=True):
        return nn.Dense(4)(x) + noisy * jax.random.normal(self.make_rng("dropout"), (4,))


def bridged(module, **options):
    make = lambda: nnx.bridge.ToNNX(module, rngs=nnx.Rngs(0, dropout=1))
    return lambda: make().lazy_init(X[:1], **options)


def build(make, loss_fn=squares, strategy=None, **options):
    world = World.emulate(2, "dp=2")
    return build_train_step(make, optax.sgd(0.1), loss_fn, strategy or ddp(), world, **options)


def evaluated(step, batch=None):
    state = step.init()
    first = float(step.evaluate(state, {"x": X} if batch is None else batch)["loss"])
    return first, step, state


def trains(model):
    """The value of a model's argument in training."""
    return isinstance(model.to_nnx__module, Training)


CALLS = {
    "left out": lambda m, b: jnp.mean((m(b["x"]) - 1) ** 2),
    "by position": lambda m, b: jnp.mean((m(b["x"], trains(m)) - 1) ** 2),
}


@pytest.mark.sample("left out-train", "by position-train")
@pytest.mark.parametrize("module", [Deterministic(), Training()], ids=["deterministic", "train"])
@pytest.mark.parametrize("call", CALLS)
def test_bridged_models_are_told_by_their_own_argument(module, call):
    make = bridged(module)
    rests = {"train": False} if isinstance(module, Training) else {"deterministic": True}
    got, step, state = evaluated(build(make, CALLS[call]))
    alone = nnx.jit(lambda model: jnp.mean((model(X, **rests) - 1) ** 2))
    expected = float(alone(step.merge(state)))
    assert got == pytest.approx(expected, rel=1e-6)


@pytest.mark.full
def test_layers_that_were_told_otherwise_rest():
    make = bridged(Fixed(), mutable=["batch_stats"])
    loss_fn = lambda m, b: jnp.mean((m(b["x"], mutable=["batch_stats"]) - 1) ** 2)
    got, step, state = evaluated(build(make, loss_fn))
    assert got == float(step.evaluate(state, {"x": X})["loss"])
    # Statistics of the batch would make the loss of a half depend on the rest of it.
    halves = ({"x": np.concatenate([x] * 2)} for x in (X[:4], X[4:]))
    losses = [float(step.evaluate(state, half)["loss"]) for half in halves]
    assert np.mean(losses) == pytest.approx(got, rel=1e-5)
    # In training they do what they were written for.
    _, metrics = step(step.init(), {"x": X})
    assert float(metrics["loss"]) != pytest.approx(got, rel=1e-3)


@pytest.mark.full
def test_eval_kwargs_reach_the_model():
    make = bridged(Own())
    silent, step, state = evaluated(build(make, eval_kwargs={"noisy": False}))
    assert silent == pytest.approx(
        float(jnp.mean((step.merge(state)(X, noisy=False) - 1) ** 2)), rel=1e-6
    )
    noisy, _, _ = evaluated(build(make))
    assert noisy != silent


def test_arguments_that_the_call_does_not_take():
    with pytest.raises(ConfigError, match=r"'noise', but the call of Own takes x, noisy.*'noisy'"):
        build(bridged(Own()), eval_kwargs={"noise": False})


def test_arguments_that_are_no_arguments():
    with pytest.raises(ConfigError, match="eval_kwargs=3, an int; give a mapping"):
        build(bridged(Own()), eval_kwargs=3)


class Plain(nnx.Module):
    def __init__(self):
        self.layer = nnx.Linear(16, 4, rngs=nnx.Rngs(0))
        self.drop = nnx.Dropout(0.5, rngs=nnx.Rngs(1))

    def __call__(self, x, deterministic=None):
        return self.drop(self.layer(x), deterministic=deterministic)


@pytest.mark.full
def test_modules_that_are_told_in_the_loss():
    loud = lambda m, b: jnp.mean((m(b["x"], deterministic=False) - 1) ** 2)
    quiet = float(squares(_eval(Plain()), {"x": X}))
    got, _, _ = evaluated(build(Plain, loud, eval_kwargs={"deterministic": True}))
    assert got == pytest.approx(quiet, rel=1e-6)
    assert evaluated(build(Plain))[0] == pytest.approx(quiet, rel=1e-6)


def _eval(model):
    model.eval()
    return model


def test_arguments_take_the_place_of_those_given():
    seen = lambda module, *args, **kwargs: (args, kwargs)
    run = WithArguments(("x", "train"), (("train", False),))
    assert run(seen, None, 1) == ((1,), {"train": False})
    assert run(seen, None, 1, True) == ((1, False), {})
    assert run(seen, None, 1, train=True, rngs=2) == ((1,), {"train": False, "rngs": 2})
    assert run(seen, None, 1, True, 3) == ((1, False, 3), {})
    elsewhere = {"train": True, "method": "encode"}
    assert run(seen, None, 1, **elsewhere) == ((1,), elsewhere)


def batch(count, value, weight=None):
    made = {"x": np.ones((count, 1), np.float32), "y": np.full((count, 1), value, np.float32)}
    return made if weight is None else made | {"w": np.full((count,), weight, np.float32)}


def means(model, batch):
    each = 0 * model(batch["x"]) + batch["y"]
    return each.mean(), {"square": (each**2).mean(), "own": Weighted(each.sum(), 2.0 * len(each))}


def masked(model, batch):
    each = (0 * model(batch["x"]) + batch["y"])[:, 0]
    return Weighted((each * batch["w"]).sum(), batch["w"].sum()), {
        "square": (each**2).mean(),
        "hits": jnp.sum(batch["w"] > 0),
        "sum": each.sum(),
        "classes": 7,
        "largest": each.max(),
    }


def counted(model, batch):
    each = (0 * model(batch["x"]) + batch["y"])[:, 0]
    return Weighted(each.sum(), float(len(each))), {"square": (each**2).mean()}


BATCHES = {
    "weights known when traced": (
        counted,
        [batch(12, 1.0), batch(4, 5.0)],
        {"loss": 2.0, "square": 7.0},
    ),
    "samples": (means, [batch(12, 1.0), batch(4, 5.0)], {"loss": 2.0, "square": 7.0, "own": 1.0}),
    "weights": (
        masked,
        [batch(4, 1.0, 1.0), batch(4, 5.0, 3.0), batch(8, 9.0, 0.0)],
        # The sum and the largest of each batch are weighted as the loss.
        {"loss": 4.0, "square": 47.0, "hits": 8, "sum": 16.0, "classes": 7, "largest": 4.0},
    ),
}


# Every kind of weight once, and both strategies.
@pytest.mark.sample("ddp-weights known when traced", "zero3-samples", "zero3-weights")
@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize("strategy", [ddp(), zero(3, min_elements=1)], ids=["ddp", "zero3"])
def test_validation_over_unequal_batches_is_that_of_all_samples(name, strategy):
    loss_fn, batches, expected = BATCHES[name]
    step = build(nnx.Linear(1, 1, rngs=nnx.Rngs(0)), loss_fn, strategy)
    records = []

    class Writer:
        def write(self, step, metrics):
            records.append(metrics)

        def close(self):
            pass

    result = Trainer(
        step=step,
        batches=[batches[0]] * 2,
        options=LoopOptions(num_steps=2, eval_every=2, log_every=1),
        validation=lambda: batches,
        writers=[Writer()],
    ).fit()
    written = {k: v for record in records for k, v in record.items() if k.startswith("validation/")}
    assert written == {f"validation/{k}": pytest.approx(v) for k, v in expected.items()}
    assert result.validation_curve[-1] == (2, pytest.approx(expected["loss"]))
    curves = result.metric_curves
    assert {name: curve[-1][1] for name, (_, curve) in curves.items()} == {
        name: pytest.approx(value) for name, value in expected.items() if name != "loss"
    }
    assert all(len(train) == 2 for train, _ in curves.values())


@pytest.mark.parametrize("name", ["num_steps", "log_every", "eval_every", "save_every"])
def test_counts_are_whole_numbers(name):
    with pytest.raises(ConfigError, match=rf"got {name}=2\.5, a float; give a whole number"):
        LoopOptions(**{"num_steps": 4, name: 2.5}).validate()


def test_sums_over_batches_of_any_size_are_those_of_all_samples():
    def loss_fn(model, batch):
        far = jnp.abs(model(batch["x"])) > 0.5
        return jnp.mean(model(batch["x"]) ** 2), {"far": jnp.sum(far), "share": jnp.mean(far)}

    data = np.random.default_rng(0).normal(size=(20, 4)).astype(np.float32)
    step = build(nnx.Linear(4, 3, rngs=nnx.Rngs(0)), loss_fn)
    state = step.init()
    _, expected = loss_fn(step.merge(state), {"x": data})
    for size in (20, 8, 7):
        sums = MetricSums()
        for start in range(0, 20, size):
            sums.add(step.evaluate_sums(state, {"x": data[start : start + size]}))
        assert sums.means["far"] == int(expected["far"])
        assert sums.means["share"] == pytest.approx(float(expected["share"]), rel=1e-6)
    assert step.evaluate(state, {"x": data[:7]})["far"].dtype == jnp.int32


def test_a_sum_of_integers_of_a_batch_that_does_not_divide_fits_where_that_of_copies_would_not():
    loss_fn = lambda model, batch: (
        jnp.mean(model(batch["x"]) ** 2),
        {"bytes": jnp.sum(batch["bytes"]), "small": jnp.sum(batch["small"], dtype=jnp.uint8)},
    )
    step = build(nnx.Linear(1, 1, rngs=nnx.Rngs(0)), loss_fn)
    batch = {
        "x": np.ones((3, 1), np.float32),
        "bytes": np.array([7, 7, 1_500_000_000], np.int32),
        "small": np.array([1, 2, 200], np.uint8),
    }
    found = step.evaluate(step.init(), batch)
    assert (int(found["bytes"]), int(found["small"])) == (1_500_000_014, 203)
