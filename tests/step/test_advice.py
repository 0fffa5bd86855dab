"""The advice of refusals of coupled losses works: the step then equals one device."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from axon_dist import World, build_train_step, ddp, per_sample
from axon_dist.core.errors import UnsupportedError

WORLD = World.emulate(2)
DRAW = np.random.default_rng(0)
X, Y, A = (DRAW.normal(size=size).astype(np.float32) for size in ((8, 4), (8, 2), (8,)))
BATCH = {"x": X, "y": Y, "a": A, "scaled": (A - A.mean()) / A.std(), "other": X[::-1].copy()}
BATCH["tokens"] = DRAW.normal(size=(8, 3, 4)).astype(np.float32)


def error(x, y, model):
    return jnp.mean((model(x) - y) ** 2)


def one_by_one(model, batch):
    return sum(error(batch["x"][i], batch["y"][i], model) for i in range(len(batch["x"]))) / len(
        batch["x"]
    )


def mapped(model, batch):
    return jnp.mean(jax.vmap(lambda x, y: error(x, y, model))(batch["x"], batch["y"]))


def looped(model, batch):
    pairs = batch["x"], batch["y"]
    return jnp.mean(jax.lax.map(lambda pair: error(*pair, model), pairs))


def halves(model, batch):
    chosen, rejected = jnp.split(model(batch["x"])[:, 0], 2)
    return -jnp.mean(jax.nn.log_sigmoid(chosen - rejected))


def pairs(model, batch):
    both = model(jnp.concatenate([batch["x"], batch["other"]]))[:, 0]
    chosen, rejected = jnp.split(both, 2)
    return -jnp.mean(jax.nn.log_sigmoid(chosen - rejected))


def advantages(name):
    def loss(model, batch):
        a = batch[name]
        scaled = (a - a.mean()) / a.std() if name == "a" else a
        ratio = jnp.exp(model(batch["x"])[:, 0])
        return -jnp.mean(jnp.minimum(ratio * scaled, jnp.clip(ratio, 0.8, 1.2) * scaled))

    return loss


def halved(mark):
    def small(y):
        return jax.lax.while_loop(lambda y: jnp.max(y) > 0.5, lambda y: y / 2, jnp.abs(y))

    return lambda model, batch: error(batch["x"], mark(jax.vmap(small))(batch["y"]), model)


def balance(model, tokens, dims):
    p = jax.nn.softmax(model(tokens))
    share = jax.nn.one_hot(p.argmax(-1), 2).mean(dims)
    return 2 * jnp.mean(jnp.sum(share * p.mean(dims), -1))


def balanced(dims):
    def loss(model, batch):
        return error(batch["x"], batch["y"], model) + balance(model, batch["tokens"], dims)

    return loss


def spectrum(dim):
    return lambda model, batch: jnp.mean(jnp.abs(jnp.fft.fft(model(batch["x"]), axis=dim)))


ROWS = {
    "a transform": (spectrum(0), "loss takes `fft` with sizes that follow", spectrum(1)),
    "a product of means": (balanced((0, 1)), "tokens of each sample and then", balanced(1)),
    "a loop of Python": (one_by_one, r"jax.vmap\(function\)\(samples\) or jax.lax.map", mapped),
    "the same by map": (one_by_one, r"jax.lax.map\(function, samples\)", looped),
    "halves": (halves, "two leaves of the batch", pairs),
    "advantages": (advantages("a"), "as normalised advantages", advantages("scaled")),
    "a loop for each": (halved(lambda run: run), "per_sample.jax.vmap", halved(per_sample)),
}


# What every advice does for a loop over microbatches; buckets read the same proof.
@pytest.mark.sample(
    *(f"{row}-{{'accumulate': 2}}" for row in ROWS),
    *(f"{row}-{{'bucket_capacity': 4}}" for row in ("a transform", "a loop for each")),
)
@pytest.mark.parametrize("options", [{"accumulate": 2}, {"bucket_capacity": 4}], ids=str)
@pytest.mark.parametrize("row", ROWS)
def test_advised_settings_work(row, options):
    refused, words, followed = ROWS[row]
    accumulate = options.get("accumulate", 1)
    strategy = ddp(bucket_capacity=options.get("bucket_capacity"))

    def build(loss_fn):
        return build_train_step(
            nnx.Linear(4, 2, rngs=nnx.Rngs(0)), optax.sgd(0.1), loss_fn, strategy, WORLD,
            accumulate=accumulate, batch=BATCH,
        )  # fmt: skip

    with pytest.raises(UnsupportedError, match=words):
        build(refused)
    step = build(followed)
    _, metrics = step(step.init(), BATCH)
    expected = nnx.jit(followed)(nnx.Linear(4, 2, rngs=nnx.Rngs(0)), BATCH)
    assert float(metrics["loss"]) == pytest.approx(float(expected), rel=1e-5)
