"""A ring in place of attention of the user's: the same function, or refused."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from axon_dist import World, build_train_step
from axon_dist.core.errors import UnsupportedError
from axon_dist.nn import Unread, call_attend, kind_of, mixes
from axon_dist.parallel import context_parallel
from tests.drawn import drawn

WIDTH, LENGTH, HEADS, VOCAB = 16, 16, 2, 32
CAUSAL = np.tril(np.ones((LENGTH, LENGTH), bool))


def attention(mask=CAUSAL, scale=(WIDTH // HEADS) ** -0.5, cap=None, slopes=False):
    def attend(query, key, value):
        scores = jnp.einsum("bthd,bshd->bhts", query, key) * scale
        scores = scores if cap is None else cap * jnp.tanh(scores / cap)
        if slopes:
            heads = jnp.arange(query.shape[2]) / query.shape[2]
            scores = scores - heads[:, None, None] * jnp.arange(LENGTH)
        weights = jax.nn.softmax(jnp.where(mask, scores, -1e9), -1)
        return jnp.einsum("bhts,bshd->bthd", weights, value)

    return attend


class Attention(nnx.Module):
    def __init__(self, function, rngs):
        self.qkv, self.out = (
            nnx.Linear(WIDTH, 3 * WIDTH, rngs=rngs),
            nnx.Linear(WIDTH, WIDTH, rngs=rngs),
        )
        self.function = function

    def attend(self, query, key, value):
        return self.function(query, key, value)

    def __call__(self, x):
        heads = jnp.split(self.qkv(x), 3, -1)
        query, key, value = (y.reshape(*x.shape[:2], HEADS, -1) for y in heads)
        return self.out(self.attend(query, key, value).reshape(x.shape))


class Model(nnx.Module):
    def __init__(self, function):
        rngs = nnx.Rngs(0)
        self.embed, self.head = (
            nnx.Embed(VOCAB, WIDTH, rngs=rngs),
            nnx.Linear(WIDTH, VOCAB, rngs=rngs),
        )
        self.attention = Attention(function, rngs)

    def __call__(self, tokens):
        x = 3 * self.embed(tokens)
        return self.head(x + self.attention(x))


def loss_fn(model, batch):
    logits = model(batch["x"])
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]))


TOKENS = np.random.default_rng(0).integers(0, VOCAB, (2, LENGTH + 1)).astype(np.int32)
BATCH = {"x": TOKENS[:, :-1], "y": TOKENS[:, 1:]}
FORMS = {
    "window": attention(CAUSAL & ~np.tril(CAUSAL, -4)),
    "full": attention(np.ones((LENGTH, LENGTH), bool)),
    "scale": attention(scale=0.5),
    "cap": attention(cap=2.0),
    "cap and window": attention(CAUSAL & ~np.tril(CAUSAL, -6), cap=1.5),
}


@pytest.mark.sample("window")
@pytest.mark.parametrize("form", FORMS)
def test_a_ring_is_the_attention_that_it_replaces(form):
    model = drawn(lambda: Model(FORMS[form]))
    loss, grads = nnx.jit(nnx.value_and_grad(loss_fn))(model, BATCH)
    step = build_train_step(
        model,
        optax.sgd(0.1),
        loss_fn,
        context_parallel("ring"),
        World.emulate(2, "cp=2"),
        batch=BATCH,
    )
    got, metrics = step.gradients(step.init(), BATCH)
    assert float(metrics["loss"]) == pytest.approx(float(loss), rel=1e-6)
    want = nnx.to_pure_dict(grads)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=2e-6), got, want)


@pytest.mark.parametrize(
    ("mode", "function", "says"),
    [
        ("ring", attention(slopes=True), "differs from it by"),
        (
            "ring",
            attention(CAUSAL | (np.arange(LENGTH) < 5)),
            "without a mask, .* differs from it by",
        ),
        ("ulysses", attention(slopes=True), "when called with some of the heads"),
    ],
)
def test_other_attention_is_refused(mode, function, says):
    with pytest.raises(UnsupportedError, match=says):
        build_train_step(
            lambda: Model(function),
            optax.sgd(0.1),
            loss_fn,
            context_parallel(mode),
            World.emulate(2, "cp=2"),
            batch=BATCH,
        )


def limited(scores=None, query=None, key=None, value=None, mask=-1e9, dtype=jnp.float32):
    """Causal attention whose scores or inputs pass through functions."""
    same = lambda x: x

    def attend(q, k, v):
        q, k, v = ((f or same)(x).astype(dtype) for f, x in ((query, q), (key, k), (value, v)))
        found = (scores or same)(jnp.einsum("bthd,bshd->bhts", q, k) * 0.5)
        weights = jax.nn.softmax(jnp.where(CAUSAL, found.astype(jnp.float32), mask), -1)
        return jnp.einsum("bhts,bshd->bthd", weights.astype(dtype), v)

    return attend


def unguarded(query, key, value):
    """A softmax that does not subtract the largest score."""
    weights = jnp.exp(jnp.einsum("bthd,bshd->bhts", query, key) * 0.5) * CAUSAL
    return jnp.einsum("bhts,bshd->bthd", weights / weights.sum(-1, keepdims=True), value)


def guarded(query, key, value):
    """A softmax whose largest score of a row is at least the number of masked scores."""
    scores = jnp.where(CAUSAL, jnp.einsum("bthd,bshd->bhts", query, key) * 0.5, -1e4)
    weights = jnp.exp(scores - jnp.maximum(scores.max(-1, keepdims=True), -1e4))
    return jnp.einsum("bhts,bshd->bthd", weights / weights.sum(-1, keepdims=True), value)


LIMIT = jnp.float32(3000)
LIMITED = {
    "scores": limited(scores=lambda x: jnp.clip(x, -30, 30)),
    "scores above": limited(scores=lambda x: jnp.minimum(x, 100.0)),
    "scores next to a mask": limited(scores=lambda x: jnp.clip(x, -200, 200), mask=-1e3),
    "scores by a constant": limited(scores=lambda x: jnp.clip(x, -LIMIT, LIMIT)),
    "scores by comparison": limited(scores=lambda x: jnp.where(x > 3000, 3000.0, x)),
    "scores in half precision": limited(scores=lambda x: jnp.clip(x, -30, 30), dtype=jnp.bfloat16),
    "queries": limited(query=lambda x: jnp.clip(x, -50, 50)),
    "keys": limited(key=lambda x: jnp.clip(x, -20, 20)),
    "values": limited(value=lambda x: jnp.clip(x, -200, 200)),
}
UNLIMITED = {
    "plain": limited(),
    "guarded": guarded,
    "half precision": limited(dtype=jnp.bfloat16),
    "mask of 1000": limited(mask=-1e3),
    "unguarded": unguarded,
}


def kind_found(function):
    heads = jax.ShapeDtypeStruct((1, LENGTH, 2, 4), jnp.float32)
    return kind_of(function, heads, heads, heads)


@pytest.mark.sample(*LIMITED.keys() - {"scores"})
@pytest.mark.parametrize("kind", LIMITED)
def test_attention_that_limits_large_numbers_is_not_softmax_attention(kind):
    found = kind_found(LIMITED[kind])
    assert isinstance(found, Unread)
    assert "differs from it by" in found.why


def test_a_mask_of_a_small_number_is_named():
    found = kind_found(limited(mask=-100.0))
    assert isinstance(found, Unread)
    assert "if -100 masks scores, mask them with -inf or -1e9" in found.why


@pytest.mark.sample("guarded", "half precision", "mask of 1000", "unguarded")
@pytest.mark.parametrize("kind", UNLIMITED)
def test_large_scores_do_not_hide_softmax_attention(kind):
    assert str(kind_found(UNLIMITED[kind])) == "causal, of scale 0.5"


class Short(Attention):
    def attend(self, q, k, v):
        return self.function(q, k, v)


class Named(Attention):
    def attend(self, *, queries, keys, values, segments=None):
        return self.function(queries, keys, values)


class Gate(nnx.Module):
    def attend(self, x, gate, shift):
        return x * gate + shift


class Static(nnx.Module):
    @staticmethod
    def attend(query, key, value, causal):
        return value


@pytest.mark.parametrize(
    ("kind", "is_attention"),
    [(Attention, True), (Short, True), (Named, True), (Gate, False), (Static, False)],
)
def test_attention_is_known_by_the_names_of_its_three_arrays(kind, is_attention):
    args = (attention(), nnx.Rngs(0)) if issubclass(kind, Attention) else ()
    module = kind(*args)
    assert mixes(module) == is_attention
    if is_attention:
        query, key, value = jax.random.normal(jax.random.key(0), (3, 1, LENGTH, HEADS, 4))
        found = call_attend(kind.attend, module, query, key, value)
        np.testing.assert_array_equal(found, attention()(query, key, value))


@pytest.mark.parametrize("mode", ["ring", "ulysses"])
def test_attention_of_each_class_of_a_model_is_replaced(mode, make_world):
    layout = context_parallel(mode).layout(make_world("cp=2").mesh)
    kinds = (Attention, Short)
    model = nnx.Sequential(*(kind(attention(), nnx.Rngs(i)) for i, kind in enumerate(kinds)))
    for layers in context_parallel(mode).layers:
        layers.check(model, layout)
        layers(model, layout)
    x = jax.ShapeDtypeStruct((2, LENGTH, WIDTH), jnp.float32)
    program = jax.make_jaxpr(lambda x: model(x))(x)
    assert str(program).count("shard_map[") == len(kinds)


def test_a_method_of_that_name_on_other_arrays_is_refused(make_world):
    class Pool(nnx.Module):
        def attend(self, q, k, v):
            return q * k * v

    layout = context_parallel("ulysses").layout(make_world("cp=2").mesh)
    model = Pool()
    for layers in context_parallel("ulysses").layers:
        layers(model, layout)
    arrays = jnp.ones((2, 8, 4)), jnp.ones((2, 8, 1)), jnp.float32(1)
    with pytest.raises(UnsupportedError, match=r" \[2, 8, 1\], \[\];") as raised:
        model.attend(*arrays)
    assert "Pool.attend is called with" in str(raised.value)
    assert raised.value.code == "attend-of-other-arrays"


def test_a_window_longer_than_the_trial_is_found_in_the_program():
    def attend(query, key, value):
        distance = jnp.arange(query.shape[1])[:, None] - jnp.arange(key.shape[1])
        scores = jnp.einsum("bthd,bshd->bhts", query, key) * 0.25
        scores = jnp.where((distance >= 0) & (distance < 3000), scores, -1e9)
        return jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(scores, -1), value)

    heads = jax.ShapeDtypeStruct((1, 4096, 4, 16), jnp.float32)
    found = kind_of(attend, heads, heads, heads)
    assert isinstance(found, Unread)
    assert "3000" in found.why


@pytest.mark.parametrize("depends_on_length", ["window", "scale"])
def test_attention_that_depends_on_the_length_is_not_that_of_a_shorter_sequence(depends_on_length):
    def attend(query, key, value):
        length = query.shape[1]
        scale = math.log(length) if depends_on_length == "scale" else 0.25
        window = length // 4 if depends_on_length == "window" else length
        distance = jnp.arange(length)[:, None] - jnp.arange(length)
        scores = jnp.einsum("bthd,bshd->bhts", query, key) * scale
        scores = jnp.where((distance >= 0) & (distance < window), scores, -1e9)
        return jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(scores, -1), value)

    heads = jax.ShapeDtypeStruct((1, 2048, 2, 16), jnp.float32)
    found = kind_of(attend, heads, heads, heads)
    assert isinstance(found, Unread)
    assert "for 2048 positions, but the number" in found.why
