"""Random bits do not depend on how a batch is cut: microbatches, ranks and stages, one device."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from axon_dist import World, build_train_step, compose, ddp, fsdp
from axon_dist.core.errors import UnsupportedError
from axon_dist.parallel import pipelined
from tests.drawn import drawn
from tests.one_device import trained

BATCHES = [
    {name: np.random.default_rng(9 * i + k).normal(size=(8, n)).astype(np.float32)
     for k, (name, n) in enumerate({"x": 16, "y": 4}.items())}
    for i in range(3)
]  # fmt: skip


class Block(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(16, 16, rngs=rngs)
        self.drop = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x):
        return x + self.drop(jnp.tanh(self.up(x)))


class Net(nnx.Module):
    """Masks before, in and behind the blocks; one of them is the same for all samples."""

    def __init__(self, num_blocks=2):
        rngs = nnx.Rngs(0, dropout=1)
        self.before = nnx.Dropout(0.1, rngs=rngs)
        self.blocks = nnx.List([Block(rngs) for _ in range(num_blocks)])
        self.common = nnx.Dropout(0.1, broadcast_dims=(0,), rngs=rngs)
        self.behind = nnx.Dropout(0.1, rngs=rngs)
        self.head = nnx.Linear(16, 4, rngs=rngs)

    def __call__(self, x):
        x = self.before(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.common(self.behind(x)))


def loss_fn(model, batch):
    return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)


@functools.cache
def one_device(make, optimizer):
    """The whole batch in plain JAX: losses, and weights at the end."""
    model = drawn(make)
    return trained(model, optimizer, loss_fn, BATCHES), model


SGD = optax.sgd(0.1)
ROWS = {
    "gpipe": ("pp=2", lambda: pipelined(2, 4, "gpipe"), {}),
    "1f1b dp": ("pp=2,dp=2", lambda: compose(pipelined(2, 2), ddp()), {}),
    "interleaved": ("pp=2", lambda: pipelined(2, 4, "interleaved_1f1b"), {}),
    "zero bubble": ("pp=2", lambda: pipelined(2, 4, "zero_bubble_h1"), {}),
    "accumulate": ("dp=2", lambda: ddp(), {"accumulate": 2}),
    "accumulate fsdp": ("fsdp=2", lambda: fsdp(), {"accumulate": 4}),
}


def four_blocks():
    """As many as the stages of two ranks that have two each."""
    return Net(4)


@pytest.mark.sample("sgd-zero bubble")
@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("optimizer", [SGD, optax.adam(1e-2)], ids=["sgd", "adam"])
def test_dropout_draws_what_one_device_draws(row, optimizer):
    mesh, strategy, options = ROWS[row]
    make = four_blocks if row == "interleaved" else Net
    losses, model = one_device(make, optimizer)
    world = World.emulate(int(np.prod([int(part[-1]) for part in mesh.split(",")])), mesh)
    step = build_train_step(
        drawn(make), optimizer, loss_fn, strategy(), world, batch=BATCHES[0], **options
    )
    state = step.init()
    for batch, want in zip(BATCHES, losses, strict=True):
        state, metrics = step(state, batch)
        np.testing.assert_allclose(metrics["loss"], want, rtol=1e-5)
    for kind in (nnx.Param, nnx.RngCount):
        found, wanted = (nnx.to_flat_state(nnx.state(m, kind)) for m in (step.merge(state), model))
        for (keys, got), (_, want) in zip(found, wanted, strict=True):
            np.testing.assert_allclose(got[...], want[...], rtol=1e-5, atol=2e-6, err_msg=str(keys))


class KeyedBlock(nnx.Module):
    """Noise from a key that each call replaces, as JAX's own examples do."""

    def __init__(self, rngs):
        self.up = nnx.Linear(16, 16, rngs=rngs)
        self.key = nnx.Variable(rngs.params())

    def __call__(self, x):
        self.key[...], use = jax.random.split(self.key[...])
        return x + jnp.tanh(self.up(x + 0.1 * jax.random.normal(use, x.shape)))


class Keyed(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.blocks = nnx.List([KeyedBlock(rngs) for _ in range(2)])
        self.head = nnx.Linear(16, 4, rngs=rngs)

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


KEYED = {
    "accumulate": ("dp=2", lambda: ddp(), {"accumulate": 2}),
    "buckets": ("dp=2", lambda: ddp(bucket_capacity=100), {}),
    "fsdp": ("fsdp=4", lambda: fsdp(min_elements=1), {"accumulate": 2}),
    "elastic": ("dp=2", lambda: ddp(), {"deterministic": "elastic", "logical_shards": 4}),
    "pipeline": ("pp=2,dp=2", lambda: compose(pipelined(2, 2), ddp()), {}),
}


@pytest.mark.sample("pipeline")
@pytest.mark.parametrize("row", KEYED)
def test_keys_that_the_model_replaces_advance_as_on_one_device(row):
    mesh, strategy, options = KEYED[row]
    losses, model = one_device(Keyed, SGD)
    assert len(set(losses)) == len(losses)
    world = World.emulate(int(np.prod([int(part[-1]) for part in mesh.split(",")])), mesh)
    step = build_train_step(
        drawn(Keyed), SGD, loss_fn, strategy(), world, batch=BATCHES[0], **options
    )
    state = step.init()
    for batch, want in zip(BATCHES, losses, strict=True):
        state, metrics = step(state, batch)
        np.testing.assert_allclose(metrics["loss"], want, rtol=1e-5)
    for block, want in zip(step.merge(state).blocks, model.blocks, strict=True):
        assert bool(block.key[...] == want.key[...])


def test_a_key_that_depends_on_the_samples_is_refused():
    class Sampled(KeyedBlock):
        def __call__(self, x):
            self.key[...] = jax.random.split(self.key[...], len(x))[0]
            return self.up(x)

    loss = lambda model, batch: jnp.mean(model(batch["x"]) ** 2)
    step = build_train_step(
        lambda: Sampled(nnx.Rngs(0)), optax.sgd(0.1), loss, ddp(bucket_capacity=100),
        World.emulate(2, "dp=2"),
    )  # fmt: skip
    with pytest.raises(UnsupportedError, match="the buffer 'key' takes some of the samples"):
        step.lower(BATCHES[0])


def noisy_loss(model, batch):
    x = batch["x"] + 0.1 * jax.random.normal(jax.random.key(3), batch["x"].shape)
    return jnp.mean((model(x) - batch["y"]) ** 2)


def noisy_by(key):
    def loss_fn(model, batch):
        x = batch["x"] + 0.1 * jax.random.normal(key, batch["x"].shape)
        return jnp.mean((model(x) - batch["y"]) ** 2)

    return loss_fn


@pytest.mark.parametrize(
    "loss_fn", [noisy_loss, noisy_by(jax.random.key(3))], ids=["made", "closed over"]
)
def test_keys_made_on_the_way_are_refused(loss_fn):
    with pytest.raises(
        UnsupportedError, match=r"a key that the loss creates itself.*2 microbatches"
    ):
        build_train_step(
            nnx.Linear(16, 4, rngs=nnx.Rngs(0)), optax.sgd(0.1), loss_fn, ddp(),
            World.emulate(2, "dp=2"), accumulate=2, batch=BATCHES[0],
        )  # fmt: skip


def test_a_pipeline_asks_what_a_loss_draws_whose_model_has_no_buffers():
    rngs = nnx.Rngs(0)
    layers = [nnx.Linear(16, size, rngs=rngs) for size in (16, 4)]
    with pytest.raises(UnsupportedError, match="a key that it creates itself"):
        build_train_step(
            nnx.Sequential(*layers), optax.sgd(0.1), noisy_loss, compose(pipelined(2, 2), ddp()),
            World.emulate(4, "pp=2,dp=2"), batch=BATCHES[0], separable=True,
        )  # fmt: skip


class Gamma(nnx.Module):
    """Noise from one key for all samples, and from a key of each."""

    def __init__(self):
        self.head = nnx.Linear(16, 4, rngs=nnx.Rngs(0))
        self.noise = nnx.Rngs(noise=3).noise.fork()

    def __call__(self, x):
        x = x * jax.random.gamma(self.noise(), 2.0, (len(x), 1))
        keys = jax.random.split(self.noise(), len(x))
        return self.head(x * jax.vmap(lambda key: jax.random.gamma(key, 3.0))(keys)[:, None])


@pytest.mark.full
@pytest.mark.parametrize("options", [{"accumulate": 2}, {"bucket_capacity": 64}], ids=str)
def test_gamma_noise_is_that_of_one_device(options):
    accumulate = options.pop("accumulate", 1)
    losses, _ = one_device(Gamma, SGD)
    step = build_train_step(
        drawn(Gamma), SGD, loss_fn, ddp(**options), World.emulate(3 - accumulate),
        accumulate=accumulate, batch=BATCHES[0],
    )  # fmt: skip
    state = step.init()
    for batch, want in zip(BATCHES, losses, strict=True):
        state, metrics = step(state, batch)
        np.testing.assert_allclose(metrics["loss"], want, rtol=1e-5)


@pytest.mark.parametrize(
    ("samples", "words"),
    [(2, r"random keys of shape \(2,\) both with and without"), (4, "with the samples in dim 0")],
)
def test_gamma_noise_that_parts_cannot_draw(samples, words):
    class Noisy(Gamma):
        def __call__(self, x):
            shape = (samples // 2, len(x))
            return self.head(x * jax.random.gamma(self.noise(), 2.0, shape).sum(0)[:, None])

    with pytest.raises(UnsupportedError, match=words):
        build_train_step(
            Noisy(), optax.sgd(0.1), loss_fn, ddp(bucket_capacity=64), World.emulate(2),
            batch={name: x[: 2 * samples] for name, x in BATCHES[0].items()},
        )  # fmt: skip


@pytest.mark.parametrize("options", [{}, {"accumulate": 2}])
def test_statistics_of_microbatches_are_told_of(options, recwarn):
    class Normed(nnx.Module):
        def __init__(self):
            self.norm = nnx.BatchNorm(16, rngs=nnx.Rngs(0))
            self.head = nnx.Linear(16, 4, rngs=nnx.Rngs(0))

        def __call__(self, x):
            return self.head(self.norm(x))

    build_train_step(Normed(), optax.sgd(0.1), loss_fn, ddp(), World.emulate(2, "dp=2"), **options)
    told = [str(w.message) for w in recwarn if "BatchNorm at 'norm' computes" in str(w.message)]
    assert len(told) == bool(options)
