"""The distribution that tokens are drawn from, compared with a numpy implementation."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axon_dist.models import Sampling, draw, kept_logits

LOGITS = np.array([[1.0, 3.0, 3.0, -2.0, 0.5, 3.0], [0.0, 0.0, 0.0, 0.0, 0.0, 0.0]], np.float32)


def reference(logits, temperature=1.0, top_k=None, top_p=None):
    """Returns probabilities, from the likeliest token on; ties go to the lower id."""
    shares = np.exp(logits.astype(np.float64) / temperature)
    order = sorted(range(len(logits)), key=lambda token: (-shares[token], token))[:top_k]
    whole, kept, total = shares[order].sum(), np.zeros(len(logits)), 0.0
    for token in order:
        if kept.any() and top_p is not None and total >= top_p - 1e-7:
            break
        kept[token] = shares[token]
        total += shares[token] / whole
    return kept / kept.sum()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.5},
        {"top_k": 1},
        {"top_k": 2},
        {"top_k": 4, "temperature": 2.0},
        {"top_k": 99},
        {"top_p": 1.0},
        {"top_p": 1e-9},
        {"top_p": 0.5},
        {"top_p": 0.95, "temperature": 3.0},
        {"top_k": 4, "top_p": 0.7},
    ],
    ids=str,
)
def test_the_distribution_is_that_of_numpy(options):
    got = np.asarray(jax.nn.softmax(kept_logits(jnp.asarray(LOGITS), Sampling(**options)), axis=-1))
    want = np.stack([reference(row, **options) for row in LOGITS])
    np.testing.assert_allclose(got, want, atol=1e-6)


@pytest.mark.full
def test_draws_have_the_frequencies_of_the_distribution():
    sampling, count = Sampling(temperature=1.5, top_k=4, top_p=0.9), 20_000
    logits = jnp.broadcast_to(jnp.asarray(LOGITS[0]), (count, 6))
    drawn = np.asarray(draw(jax.random.key(0), logits, sampling))
    frequencies = np.bincount(drawn, minlength=6) / count
    want = reference(LOGITS[0], 1.5, 4, 0.9)
    np.testing.assert_allclose(frequencies, want, atol=4 * np.sqrt(0.25 / count))


def test_without_temperature_the_likeliest_is_taken_the_lower_id_of_equal_ones():
    taken = draw(jax.random.key(0), jnp.asarray(LOGITS), Sampling(temperature=0))
    assert taken.tolist() == [1, 0]
