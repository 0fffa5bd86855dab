"""The advice of refusals of coupled losses works: the step then equals one device."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from axon_dist import World, build_train_step, compose, ddp, per_sample, pipelined
from axon_dist.core.errors import UnsupportedError
from tests.drawn import drawn

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


TANH = np.vectorize(np.tanh)


def scaled_by(make):
    """A loss that a foreign function scales."""

    def loss_fn(model, batch):
        like = jax.ShapeDtypeStruct((), jnp.float32)
        scale = jax.pure_callback(make(), like, jnp.float32(2))
        return mapped(model, batch) * jax.lax.stop_gradient(scale)

    return loss_fn


ROWS = {
    "a foreign function of each trace": (
        scaled_by(lambda: np.vectorize(np.tanh)),
        "another one in each trace.* Make that function once, outside the loss function",
        scaled_by(lambda: TANH),
    ),
    "a transform": (
        spectrum(0),
        "loss takes `fft` with sizes or other parameters that differ",
        spectrum(1),
    ),
    "a product of means": (balanced((0, 1)), "tokens of each sample and then", balanced(1)),
    "a loop of Python": (one_by_one, r"jax.vmap\(function\)\(samples\) or jax.lax.map", mapped),
    "the same by map": (one_by_one, r"jax.lax.map\(function, samples\)", looped),
    "halves": (halves, "two leaves of the batch", pairs),
    "advantages": (advantages("a"), "as normalised advantages", advantages("scaled")),
    "a loop for each": (halved(lambda run: run), "per_sample.jax.vmap", halved(per_sample)),
}


def linear():
    return nnx.Linear(4, 2, rngs=nnx.Rngs(0))


@pytest.mark.parametrize("row", ROWS)
def test_advised_settings_are_not_refused(row):
    refused, words, followed = ROWS[row]
    build = lambda loss_fn: build_train_step(
        linear, optax.sgd(0.1), loss_fn, ddp(), WORLD, accumulate=2, batch=BATCH
    )
    with pytest.raises(UnsupportedError, match=words):
        build(refused)
    build(followed)


def test_a_foreign_function_of_each_trace_is_not_advised_to_have_more_samples():
    with pytest.raises(UnsupportedError, match="another one in each trace") as refused:
        build_train_step(
            linear, optax.sgd(0.1), ROWS["a foreign function of each trace"][0],
            ddp(bucket_capacity=4), WORLD, accumulate=4, batch=BATCH,
        )  # fmt: skip
    assert "two samples or more" not in str(refused.value)


# What every advice does for a loop over microbatches; buckets read the same proof.
@pytest.mark.sample(
    "the same by map-{'accumulate': 2}",
    "halves-{'accumulate': 2}",
    "a loop for each-{'bucket_capacity': 4}",
)
@pytest.mark.parametrize("options", [{"accumulate": 2}, {"bucket_capacity": 4}], ids=str)
@pytest.mark.parametrize("row", ROWS)
def test_advised_settings_work(row, options):
    refused, words, followed = ROWS[row]
    accumulate = options.get("accumulate", 1)
    strategy = ddp(bucket_capacity=options.get("bucket_capacity"))

    def build(loss_fn):
        return build_train_step(
            drawn(linear), optax.sgd(0.1), loss_fn, strategy, WORLD,
            accumulate=accumulate, batch=BATCH,
        )  # fmt: skip

    with pytest.raises(UnsupportedError, match=words):
        build(refused)
    step = build(followed)
    _, metrics = step(step.init(), BATCH)
    expected = nnx.jit(followed)(drawn(linear), BATCH)
    assert float(metrics["loss"]) == pytest.approx(float(expected), rel=1e-5)


def test_an_option_that_needs_ranks_is_left_out_together_with_the_microbatches():
    refused = advantages("a")

    def build(strategy, **options):
        return build_train_step(
            drawn(linear), optax.sgd(0.1), refused, strategy, WORLD, batch=BATCH, **options
        )

    overlapped = ddp(sync="overlapped")
    with pytest.raises(UnsupportedError, match="or leave sync=OVERLAPPED out, and the step comp"):
        build(overlapped)
    words = "or leave sync=OVERLAPPED out and use one microbatch, and the step computes it"
    with pytest.raises(UnsupportedError, match=words):
        build(overlapped, accumulate=2)
    # Leaving out the option alone is not enough.
    with pytest.raises(UnsupportedError, match="2 microbatches of 4 samples"):
        build(ddp(), accumulate=2)
    step = build(ddp())
    _, metrics = step(step.init(), BATCH)
    expected = nnx.jit(refused)(drawn(linear), BATCH)
    assert float(metrics["loss"]) == pytest.approx(float(expected), rel=1e-5)


class Kept(nnx.Variable):
    """A buffer of the user's."""


class Keeping(nnx.Module):
    """Two blocks, and a buffer that a loss changes."""

    def __init__(self, dtype=jnp.float32):
        rngs = nnx.Rngs(0)
        self.blocks = nnx.List([nnx.Linear(4, 4, rngs=rngs) for _ in range(2)])
        self.head = nnx.Linear(4, 2, rngs=rngs)
        self.kept = Kept(jnp.zeros((), dtype))

    def __call__(self, x):
        for block in self.blocks:
            x = x + jnp.tanh(block(x))
        return self.head(x)


def keeping(change):
    def loss(model, batch):
        model.kept[...] = change(model.kept[...], batch["y"]).astype(model.kept[...].dtype)
        return error(batch["x"], batch["y"], model)

    return loss


def keeper(change, strategy, mesh, make=Keeping, **options):
    """A step that changes the buffer."""
    loss_fn, world = keeping(change), World.emulate(2 * mesh.count("="), mesh)
    return build_train_step(make, optax.sgd(0.1), loss_fn, strategy, world, batch=BATCH, **options)


def kept_by(change, strategy, mesh, make=Keeping, **options):
    """The buffer after two steps, and the loss of the second."""
    step = keeper(change, strategy, mesh, drawn(make), **options)
    state = step.init()
    for _ in range(2):
        state, metrics = step(state, BATCH)
    return np.asarray(state.buffers["kept"]), float(metrics["loss"])


def decays(kept, y):
    return 0.9 * kept + 0.1 * y.mean()


def adds(kept, y):
    return kept + jnp.sum(y > 0)


STAGES = compose(ddp(), pipelined(2, 2))


@pytest.fixture(scope="module")
def decayed_without_stages():
    return kept_by(decays, ddp(), "dp=2")[0]


@pytest.mark.parametrize("separable", [None, True])
def test_advice_about_a_buffer_in_a_pipeline_does_not_go_in_a_circle(
    separable, decayed_without_stages
):
    with pytest.raises(UnsupportedError) as refused:
        keeper(decays, STAGES, "pp=2,dp=2", separable=separable)
    words = str(refused.value)
    assert "the buffer 'kept' changes with the samples" in words
    # What a pipeline, or what is said of the loss, cannot help with is not offered.
    assert "sync_buffers" not in words
    assert "pass separable=True" not in words
    leave = "leave the pipeline out" if separable is None else "Leave separable=True and the pipe"
    assert leave in words
    assert decayed_without_stages == pytest.approx(0.19 * Y.mean(), rel=1e-5)


@pytest.fixture(scope="module")
def loss_without_stages():
    """The loss does not depend on the dtype of the buffer."""
    return kept_by(adds, ddp(), "dp=2")[1]


@pytest.mark.sample("True-float32")
@pytest.mark.parametrize("dtype", ["float32", "int32"])
@pytest.mark.parametrize("separable", [None, True])
def test_a_sum_that_stages_keep_is_that_of_all_ranks(dtype, separable, loss_without_stages):
    make = lambda: Keeping(jnp.dtype(dtype))
    kept, loss = kept_by(adds, STAGES, "pp=2,dp=2", make, separable=separable)
    assert kept == 2 * np.sum(Y > 0)
    assert kept.dtype == dtype
    assert loss == pytest.approx(loss_without_stages, rel=1e-5)


def test_advice_about_a_buffer_of_one_rank_works():
    largest = lambda kept, y: jnp.maximum(kept, jnp.max(y))
    buckets = ddp(bucket_capacity=64)
    with pytest.raises(UnsupportedError, match="Leave separable=True and bucket_capacity=64 out"):
        keeper(largest, buckets, "dp=2", separable=True)
    kept, _ = kept_by(largest, ddp(), "dp=2")
    assert kept == pytest.approx(Y.max())
    own = ddp(bucket_capacity=64, broadcast_buffers=False)
    kept, _ = kept_by(largest, own, "dp=2", separable=True)
    assert kept == pytest.approx(Y.reshape(2, -1).max(1))


def test_an_integer_that_ranks_cannot_keep_as_their_own_is_refused():
    """Ranks keep their own statistics, and these are floating-point numbers."""
    largest = lambda kept, y: jnp.maximum(kept, jnp.sum(y > 0))
    make = lambda: Keeping(jnp.int32)
    own = ddp(broadcast_buffers=False)
    with pytest.raises(UnsupportedError, match="Leave separable=True and broadcast_b") as refused:
        keeper(largest, own, "dp=2", make, separable=True)
    assert "sync_buffers" not in str(refused.value)
    assert kept_by(largest, ddp(), "dp=2", make)[0] == np.sum(Y > 0)
    assert kept_by(adds, own, "dp=2", make, separable=True)[0] == 2 * np.sum(Y > 0)


def test_advice_to_change_a_buffer_in_turn_is_not_refused():
    doubles = lambda kept, y: 2 * kept + jnp.max(y)
    for strategy, declared in ((ddp(), False), (ddp(broadcast_buffers=False), True)):
        with pytest.raises(UnsupportedError, match=rf"in turn.*\(separable={declared}\)"):
            keeper(doubles, strategy, "dp=2", accumulate=2)
        keeper(doubles, strategy, "dp=2", accumulate=2, separable=declared)
