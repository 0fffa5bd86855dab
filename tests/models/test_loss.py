import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axon_dist.core.errors import ConfigError
from axon_dist.models import (
    classification_loss,
    cross_entropy,
    is_likeliest,
    next_token_loss,
    next_token_scores,
)
from axon_dist.nn import linear_cross_entropy, vocab_parallel_cross_entropy

TABLE = np.random.default_rng(7).normal(size=(5, 5)).astype(np.float32) * 3
TOKENS = np.array([[0, 3, 1, 4], [2, 2, 0, 1]])


def bigram(tokens):
    return jnp.asarray(TABLE)[tokens]


def run(loss, model, batch):
    """Returns a loss as one jitted program."""
    return jax.jit(lambda batch: loss(model, batch))(batch)


def expected_losses():
    table = np.asarray(TABLE, np.float64)
    log_probs = table - np.log(np.exp(table).sum(-1, keepdims=True))
    tokens = np.asarray(TOKENS)
    return -log_probs[tokens[:, :-1], tokens[:, 1:]]


def test_next_token_loss_sums_and_counts():
    loss = run(next_token_loss, bigram, {"tokens": TOKENS})
    np.testing.assert_allclose(loss.total, expected_losses().sum(), rtol=1e-6)
    assert float(loss.weight) == 6


def test_a_float64_model_has_a_float64_loss():
    with jax.enable_x64(True):
        table = jnp.asarray(TABLE, jnp.float64)
        loss = run(next_token_loss, lambda tokens: table[tokens], {"tokens": TOKENS})
        split = jax.jit(vocab_parallel_cross_entropy)(table[TOKENS[:, :-1]], TOKENS[:, 1:])
        for total in (loss.total, split.sum()):
            np.testing.assert_allclose(total, expected_losses().sum(), rtol=1e-13)


def test_masked_tokens_are_not_targets():
    mask = np.array([[0, 1, 0, 1], [1, 0, 0, 1]])
    loss = run(next_token_loss, bigram, {"tokens": TOKENS, "mask": mask})
    losses = expected_losses()
    np.testing.assert_allclose(loss.total, losses[0, 0] + losses[0, 2] + losses[1, 2], rtol=1e-6)
    assert float(loss.weight) == 3


def test_a_mask_of_another_shape_is_refused():
    with pytest.raises(ConfigError, match=r"\(2, 3\) for tokens of shape \(2, 4\).*one mask"):
        next_token_loss(bigram, {"tokens": TOKENS, "mask": jnp.ones((2, 3))})


def test_cross_entropy_gradient_is_softmax_minus_one_hot():
    labels = np.array([1, 4], np.int32)
    grad = jax.jit(jax.grad(lambda logits: cross_entropy(logits, labels).sum()))(TABLE[:2])
    shares = np.exp(TABLE[:2])
    want = shares / shares.sum(-1, keepdims=True) - np.eye(5)[labels]
    np.testing.assert_allclose(grad, want, atol=1e-6)


def test_cross_entropy_of_low_precision_logits_is_float32_and_does_not_overflow():
    logits = np.array([[1e4, 0.0]]).astype(jnp.bfloat16)
    loss = jax.jit(cross_entropy)(logits, np.array([1]))
    assert loss.dtype == jnp.float32
    np.testing.assert_allclose(loss, [1e4], rtol=1e-2)


def test_classification_loss_is_the_mean():
    batch = {"x": np.array([0, 2, 3]), "y": np.array([1, 1, 0])}
    want = jax.jit(cross_entropy)(TABLE[batch["x"]], batch["y"])
    loss, metrics = run(classification_loss, bigram, batch)
    np.testing.assert_allclose(loss, np.mean(want), rtol=1e-6)
    likeliest = np.asarray(TABLE)[batch["x"]].argmax(-1)
    assert float(metrics["accuracy"]) == pytest.approx(np.mean(likeliest == batch["y"]))


def test_the_first_of_equal_logits_is_the_likeliest():
    logits = np.array([[1, 2, 2, 0]] * 4, np.float32)
    assert jax.jit(is_likeliest)(logits, np.arange(4)).tolist() == [0, 1, 0, 0]


def test_the_scores_of_tokens_are_the_loss_and_how_many_are_right():
    mask, weight = np.array([[0, 1, 0, 1], [1, 0, 1, 1]]), np.array([1, 0.5], np.float32)
    batch = {"tokens": TOKENS, "mask": mask, "weight": weight}
    loss, metrics = run(next_token_scores, bigram, batch)
    want = run(next_token_loss, bigram, batch)
    assert (float(loss.total), float(loss.weight)) == (float(want.total), float(want.weight))
    hits = np.asarray(TABLE)[TOKENS[:, :-1]].argmax(-1) == np.asarray(TOKENS[:, 1:])
    counts = np.asarray(mask[:, 1:] * weight[:, None])
    assert 0 < (hits * counts).sum() < counts.sum()
    np.testing.assert_allclose(metrics["accuracy"].total, (hits * counts).sum())
    assert float(metrics["accuracy"].weight) == counts.sum()


class WithTermOfEveryCall:
    """A model with a term of its own, in evaluation too; with or without a head by chunks."""

    def __init__(self, by_chunks):
        self.by_chunks = by_chunks

    def __call__(self, tokens):
        return bigram(tokens)

    def before_head(self, tokens):
        hidden = jax.nn.one_hot(tokens, 5)
        return {"hidden": hidden, "kernel": jnp.asarray(TABLE)} if self.by_chunks else None

    def auxiliary(self):
        return jnp.float32(0.25), {"spread": jnp.float32(3.0)}


@pytest.mark.parametrize("by_chunks", [False, True])
def test_the_scores_of_a_model_with_a_term_of_its_own_have_the_term_of_its_loss(by_chunks):
    model = WithTermOfEveryCall(by_chunks)
    loss, metrics = run(next_token_scores, model, {"tokens": TOKENS})
    want, terms = run(next_token_loss, model, {"tokens": TOKENS})
    plain = run(next_token_loss, bigram, {"tokens": TOKENS})
    assert float(loss.mean) == pytest.approx(float(want.mean))
    assert float(loss.mean) == pytest.approx(float(plain.mean) + 0.25)
    assert metrics.keys() == {"accuracy", *terms} == {"accuracy", "spread"}
    assert float(metrics["spread"]) == 3


@jax.jit
def of_labels(labels):
    """All losses of two samples among 512 classes with their gradients, and which are right."""
    hidden = np.ones((2, 4), np.float32)
    kernel = np.random.default_rng(0).normal(size=(4, 512)).astype(np.float32)
    chunked = lambda kernel: linear_cross_entropy(hidden, kernel, labels).total
    logits = hidden @ kernel
    whole = lambda logits: cross_entropy(logits, labels).sum()
    split = lambda logits: vocab_parallel_cross_entropy(logits, labels).sum()
    return [
        jax.value_and_grad(chunked)(kernel),
        jax.value_and_grad(whole)(logits),
        jax.value_and_grad(split)(logits),
        is_likeliest(jnp.eye(512)[labels.astype(int)], labels),
    ]


@pytest.mark.parametrize("dtype", ["uint8", "int8"])
def test_labels_of_a_narrow_dtype_are_those_classes_alone(dtype):
    """In 8 bits classes 3 and 259 are one number."""
    labels = np.array([3, 7])
    narrow, wide = of_labels(labels.astype(dtype)), of_labels(labels)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), narrow, wide)
    np.testing.assert_array_equal(narrow[-1], [1.0, 1.0])
