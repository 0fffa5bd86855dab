"""Context parallelism of whole models against one device."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from axon_dist import World, build_train_step, compose, ddp
from axon_dist.core.errors import ConfigError, DivisibilityError, MeshError, UnsupportedError
from axon_dist.inspect import collectives
from axon_dist.models import MLP, Transformer, TransformerConfig, next_token_loss
from axon_dist.nn import ActivationCheckpointing
from axon_dist.parallel import context_parallel, fsdp, tensor_parallel
from tests.drawn import drawn

CONFIG = dataclasses.replace(TransformerConfig.preset("tiny"), vocab_size=32)
BATCH = {"tokens": np.random.default_rng(0).integers(0, 32, size=(4, 17)).astype(np.int32)}


def make(**changes):
    config = dataclasses.replace(CONFIG, **changes)
    return Transformer(config, rngs=nnx.Rngs(0, dropout=1))


def assert_close(got, want, tolerance):
    """Compares leaf by leaf, relative to the largest element of each expected leaf."""
    for ours, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        scale = max(np.abs(theirs).max(), 1e-3)
        np.testing.assert_allclose(ours / scale, theirs / scale, atol=tolerance)


def gradients(model, strategy, world, batch=BATCH, loss_fn=next_token_loss):
    step = build_train_step(model, optax.sgd(0.1), loss_fn, strategy, world)
    return step.gradients(step.init(), batch)


@pytest.mark.full
@pytest.mark.sample("ring-fsdp=2,cp=2,tp=2-changes2")
@pytest.mark.parametrize(
    ("mode", "mesh", "changes"),
    [
        ("ring", "cp=8", {}),
        pytest.param("ring", "dp=2,cp=4", {"dropout": 0.1}, marks=pytest.mark.full),
        ("ring", "fsdp=2,cp=2,tp=2", {"scan_layers": True}),
        ("ulysses", "cp=4", {}),
        ("ulysses", "dp=2,cp=2,tp=2", {}),
    ],
)
def test_gradients_equal_one_device(mode, mesh, changes):
    world = World.emulate(8 if "2" in mesh else int(mesh[3:]), mesh)
    parts = [context_parallel(mode)]
    parts += [ddp()] if "dp=2,c" in mesh and "fsdp" not in mesh else []
    parts += [fsdp(min_elements=8)] if "fsdp" in mesh else []
    parts += [tensor_parallel("transformer", sequence=mode == "ring")] if "tp" in mesh else []
    got, metrics = gradients(make(**changes), compose(*parts), world)
    alone = World.emulate(1, "dp=1")
    want, expected = gradients(make(**changes), ddp(), alone)
    assert float(metrics["loss"]) == pytest.approx(float(expected["loss"]), rel=1e-5)
    assert_close(got, want, 2e-5)


class Encoder(nnx.Module):
    """Attention of Flax that is not causal."""

    def __init__(self, rngs):
        self.inner = nnx.Linear(8, 16, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(4, 16, decode=False, rngs=rngs)

    def __call__(self, x, mask=None):
        return self.attention(self.inner(x), mask=mask)


@pytest.mark.full
@pytest.mark.sample("ulysses")
@pytest.mark.parametrize("mode", ["ring", "ulysses"])
def test_attention_of_flax(mode):
    x = np.random.default_rng(1).normal(size=(2, 8, 8)).astype(np.float32)
    loss = lambda model, batch: jnp.mean(jnp.sin(model(batch["x"])))
    world, alone = World.emulate(4, "cp=4"), World.emulate(1, "dp=1")
    got, _ = gradients(Encoder(nnx.Rngs(0)), context_parallel(mode), world, {"x": x}, loss)
    want, _ = gradients(Encoder(nnx.Rngs(0)), ddp(), alone, {"x": x}, loss)
    # A softmax does not see what all its scores have in common: nothing but rounding is in these.
    for nothing in (g["attention"]["key"].pop("bias") for g in (got, want)):
        assert np.abs(nothing).max() < 1e-7
    assert_close(got, want, 1e-5)
    masked = lambda model, batch: jnp.mean(model(batch["x"], jnp.ones((1, 1, 8, 8), bool)))
    with pytest.raises(UnsupportedError, match=r"takes no mask .* attend\(query, key, value\)"):
        gradients(Encoder(nnx.Rngs(0)), context_parallel(mode), world, {"x": x}, masked)


@pytest.mark.full
def test_errors_name_sizes_and_remedies():
    world = World.emulate(8, "cp=8")
    with pytest.raises(DivisibilityError, match=r"24 positions .* cp=8, in two pieces .* of 16"):
        gradients(make(), context_parallel(), world, {"tokens": np.zeros((2, 25), np.int32)})
    with pytest.raises(DivisibilityError, match=r"4 heads .* cp=8; .*\[1, 2, 4\], or .* 'ring'"):
        gradients(make(), context_parallel("ulysses"), world)
    batch = {"x": np.zeros((2, 16), np.float32)}
    loss = lambda model, batch: jnp.mean(model(batch["x"]))
    with pytest.raises(UnsupportedError, match=r"no attention to replace among .*MLP; give"):
        gradients(MLP((16, 24, 4), rngs=nnx.Rngs(0)), context_parallel(), world, batch, loss)
    with pytest.raises(
        ConfigError, match=r"ContextMode got 'rings', and has no such member. Did you mean 'ring'"
    ):
        context_parallel("rings")
    with pytest.raises(MeshError, match=r"over axis 'cp', which mesh dp=8 lacks"):
        gradients(make(), context_parallel(), World.emulate(8, "dp=8"))


@pytest.mark.full
def test_positions_are_distributed_once_and_keys_go_around_twice():
    """Two arrays a layer forwards and three backwards; the residual stream once there and back."""
    world, model = World.emulate(2, "cp=2"), make(num_layers=2, num_kv_heads=None)
    step = build_train_step(
        model,
        optax.sgd(0.1),
        next_token_loss,
        context_parallel(),
        world,
        remat=ActivationCheckpointing(),
    )
    ledger = collectives(step.lower(BATCH).compile(), world.mesh)
    heads = 4 * 16 * CONFIG.width * 4 // 2
    numbers = 2 * heads // model.config.key_size
    sent = ledger.by_kind()["collective-permute"] - 2 * (5 * heads + numbers)
    assert 0 < sent <= 2.25 * heads


@pytest.mark.full
def test_activations_shrink_with_the_ranks():
    """Temporary memory of a long sequence, compiled: no rank holds scores of the whole."""
    loss = lambda model, batch: jnp.mean(model(batch["tokens"]) ** 2)
    long = {"tokens": jax.ShapeDtypeStruct((1, 2048), jnp.int32)}
    used = []
    for size in (2, 8):
        model = make(num_layers=1, max_length=2048)
        world = World.emulate(size, f"cp={size}")
        step = build_train_step(model, optax.sgd(0.1), loss, context_parallel(), world)
        used.append(step.lower(long).compile().memory_analysis().temp_size_in_bytes)
    assert used[1] < used[0] / 3


@pytest.mark.full
def test_positions_may_be_given_without_segments():
    model = drawn(lambda: make(num_layers=1))
    positions = 2 * jnp.arange(16)[None]

    def loss_fn(model, batch):
        return jnp.mean(model.residual(batch["tokens"], None, positions) ** 2)

    world = World.emulate(2, "cp=2")
    step = build_train_step(model, optax.sgd(0.1), loss_fn, context_parallel(), world)
    batch = {"tokens": np.arange(64, dtype=np.int32).reshape(4, 16) % 32}
    metrics = step.evaluate(step.init(), batch)
    expected = nnx.jit(loss_fn)(model, batch)
    np.testing.assert_allclose(metrics["loss"], expected, rtol=1e-5)


class Reader(nnx.Module):
    """Attention of Flax to another sequence."""

    def __init__(self):
        self.attention = nnx.MultiHeadAttention(4, 8, decode=False, rngs=nnx.Rngs(0))

    def __call__(self, x, read):
        return self.attention(x, read)


def test_keys_that_do_not_divide_are_refused_as_queries_are():
    loss = lambda model, batch: jnp.mean(model(batch["x"], batch["read"]))
    batch = {"x": np.ones((2, 6, 8), np.float32), "read": np.ones((2, 7, 8), np.float32)}
    with pytest.raises(DivisibilityError, match=r"7 positions of the keys does not .* cp=2"):
        gradients(drawn(Reader), context_parallel("ulysses"), World.emulate(2, "cp=2"), batch, loss)
