"""Several documents in a row give the same results as each alone, for every form of attention."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from axon_dist.core.errors import ConfigError
from axon_dist.models import (
    ATTENTION_FORMS,
    Transformer,
    TransformerConfig,
    attention,
    flash_attention,
    next_token_loss,
    next_token_scores,
)

LENGTH = 128
ROWS = ((3, 60, 1, 50), (LENGTH + 1,), (40, 2, 70))
"""Draws the lengths of the documents of each row; the rest is padding."""
CONFIG = dataclasses.replace(
    TransformerConfig.preset("tiny"), vocab_size=32, num_layers=2, width=16, head_dim=4, ffn_width=8
)


def packed():
    """Returns rows of documents, and the documents."""
    random = np.random.default_rng(0)
    tokens, segments = (np.zeros((len(ROWS), LENGTH + 1), np.int32) for _ in range(2))
    documents = []
    for row, lengths in enumerate(ROWS):
        start = 0
        for number, length in enumerate(lengths, start=1):
            documents.append(random.integers(1, 32, length).astype(np.int32))
            tokens[row, start : start + length] = documents[-1]
            segments[row, start : start + length] = number
            start += length
    return {"tokens": tokens, "segments": segments}, documents


def value_and_grads(model, losses):
    """Returns the summed loss of several batches, its weight, and the gradients."""
    graph, params, rest = nnx.split(model, nnx.Param, ...)

    def total(params):
        found = [f(nnx.merge(graph, params, rest, copy=True)) for f in losses]
        return sum(f.total for f in found), sum(f.weight for f in found)

    return jax.jit(jax.value_and_grad(total, has_aux=True))(params)


@functools.cache
def one_by_one(**changes):
    model = Transformer(dataclasses.replace(CONFIG, **changes), rngs=nnx.Rngs(0))
    batches = [{"tokens": document[None]} for document in packed()[1] if len(document) > 1]
    return value_and_grads(model, [functools.partial(next_token_loss, batch=b) for b in batches])


@pytest.mark.full
@pytest.mark.parametrize(
    ("form", "changes"),
    [
        pytest.param("einsum", {}, marks=pytest.mark.full),
        pytest.param("auto", {"scan_layers": True}, marks=pytest.mark.full),
        ("flash", {}),
        pytest.param("einsum", {"positions": "learned", "norm": "layer"}, marks=pytest.mark.full),
    ],
)
def test_packed_documents_are_documents(form, changes, monkeypatch):
    forms = ATTENTION_FORMS | {"flash": functools.partial(flash_attention, interpret=True)}
    monkeypatch.setattr("axon_dist.models.layers.ATTENTION_FORMS", forms)
    model = Transformer(dataclasses.replace(CONFIG, attention=form, **changes), rngs=nnx.Rngs(0))
    (loss, weight), grads = value_and_grads(
        model, [functools.partial(next_token_loss, batch=packed()[0])]
    )
    (wanted, count), of_documents = one_by_one(**changes)
    assert float(weight) == float(count) == sum(n - 1 for row in ROWS for n in row)
    np.testing.assert_allclose(loss, wanted, rtol=1e-6)
    for got, want in zip(jax.tree.leaves(grads), jax.tree.leaves(of_documents), strict=True):
        np.testing.assert_allclose(got, want, atol=2e-5 * max(np.abs(want).max(), 1e-3))


@pytest.mark.full
def test_cudnn_is_given_segments_as_a_bias(monkeypatch):
    """Makes the same call with another implementation, because the kernel needs a GPU."""
    seen = []

    def call(query, key, value, bias, causal):
        seen.append(bias.shape)
        return jax.nn.dot_product_attention(query, key, value, bias, is_causal=causal)

    monkeypatch.setattr(attention, "fused_attention", call)
    arrays = [jax.random.normal(jax.random.key(n), (3, LENGTH, 2, 8)) for n in range(3)]
    arrays = [x.astype(jnp.bfloat16) for x in arrays]
    segments = jnp.asarray(packed()[0]["segments"][:, :-1])
    got = attention.cudnn_attention(*arrays, segments=segments)
    want = attention.einsum_attention(*arrays, segments=segments)
    np.testing.assert_allclose(
        got.astype(jnp.float32), want.astype(jnp.float32), rtol=2e-2, atol=2e-2
    )
    assert set(seen) == {(3, 1, LENGTH, LENGTH)}


def test_scores_count_what_the_loss_counts():
    model = lambda tokens, segments: jax.nn.one_hot(tokens + segments, 32)
    batch = packed()[0]
    loss, metrics = jax.jit(lambda: next_token_scores(model, batch))()
    assert float(metrics["accuracy"].weight) == float(loss.weight) == 347
    want = jax.jit(lambda: next_token_loss(model, batch))()
    np.testing.assert_allclose(loss.total, want.total)


def test_a_mask_and_segments_count_together():
    batch, _ = packed()
    mask = np.zeros_like(batch["tokens"])
    mask[0, :63] = 1
    model = lambda tokens, segments: jax.nn.one_hot(tokens + segments, 32)
    found = next_token_loss(model, batch | {"mask": mask})
    assert float(found.weight) == 2 + 59


def test_segments_that_cannot_be():
    batch, _ = packed()
    with pytest.raises(ConfigError, match=r"has segments, .* but function does not take them"):
        next_token_loss(lambda tokens: jnp.zeros((*tokens.shape, 4)), batch)
    with pytest.raises(ConfigError, match=r"segments of shape \(3, 128\) for tokens of shape"):
        next_token_loss(None, batch | {"segments": batch["segments"][:, :-1]})
