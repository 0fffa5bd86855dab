"""Length buckets: less padding, the same order for any number of processes, exact resume."""

import json

import jax
import numpy as np
import pytest
from flax import nnx

from axon_dist.core.errors import ConfigError
from axon_dist.data import JsonlSource, Loader, Mixture
from axon_dist.data.buckets import Buckets, bucket_lengths
from axon_dist.models import Transformer, TransformerConfig, next_token_loss
from tests.drawn import drawn

LENGTH = 512


def chats(tmp_path, count=600):
    """Prompts and responses with a skewed length distribution, as in real chats."""
    random = np.random.default_rng(0)
    sizes = np.clip(random.lognormal(4.0, 0.8, count), 4, LENGTH - 20).astype(int)
    rows = [{"q": "x" * min(8, n), "a": "y" * n} for n in sizes.tolist()]
    path = tmp_path / "chats.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def opened(path, buckets):
    source = JsonlSource((path,), prompt="q", response="a", packed=False, buckets=buckets)
    return source.open(LENGTH)


def loaded(path, buckets=8, **options):
    return Loader(opened(path, buckets), global_batch=16, seed=3, **options)


def measured(loader, num_batches):
    """Returns the share of padding in some batches."""
    batches = [next(loader)["segments"] for _ in range(num_batches)]
    return sum((x == 0).sum() for x in batches) / sum(x.size for x in batches)


def test_padding_of_a_skewed_distribution(tmp_path):
    path = chats(tmp_path, 6000)
    assert opened(path, None).padding > 0.8
    loader = loaded(path, 16)
    found = measured(loader, loader.num_samples // 16)
    assert found < 0.1
    assert 0 < found - loader.samples.padding < 0.02
    assert "% is padding, padded to 24 or 32 or" in loader.description
    lengths = loader.samples.buckets.lengths
    assert len(lengths) == 16
    assert lengths[-1] == LENGTH


def test_lengths_leave_the_least_padding():
    random = np.random.default_rng(1)
    needed = random.integers(1, 9, 40)

    def padding(lengths):
        return sum(min(x for x in lengths if x >= n) for n in needed.tolist())

    for count in (1, 2, 3):
        best = min(padding((*more, 8)) for more in np.ndindex(*(8,) * (count - 1)) if 0 not in more)
        assert padding(bucket_lengths(needed, 8, count)) == best
    assert bucket_lengths(np.array([5]), 7, 16) == (5, 7)


def test_the_length_around_a_token_is_the_mean_over_tokens():
    buckets = Buckets((10, 50), np.array([3, 10, 40]))
    assert buckets.mean_length == pytest.approx(70 / 3)
    assert buckets.length_around_a_token == pytest.approx((100 + 100 + 2500) / 70)


def test_a_length_that_few_numbers_divide_has_buckets():
    needed = np.array([5] * 50 + [300] * 50)
    for longest, multiple in ((1021, 1), (1018, 2)):
        lengths = bucket_lengths(needed, longest, 3)
        assert lengths[-1] == longest
        assert 5 <= lengths[0] <= 32
        assert 300 <= lengths[1] <= 320
        # An axis that splits the longest sequence splits the others.
        assert not any(length % multiple for length in lengths)


def test_an_epoch_has_every_row_once_and_batches_of_one_bucket():
    needed = np.random.default_rng(0).integers(1, 100, 100)
    buckets = Buckets((25, 50, 99), needed)
    orders = [buckets.order(seed, 8) for seed in (0, 0, 1)]
    rows = [[order[g] for g in range(192)] for order in orders]
    assert rows[0] == rows[1] != rows[2]
    for epoch in (rows[0][:96], rows[0][96:]):
        assert len({*epoch}) == 96
        kinds = [len({*buckets.which[epoch[at : at + 8]]}) for at in range(0, 96, 8)]
        assert sum(kind > 1 for kind in kinds) <= 2
    assert rows[0][:96] != rows[0][96:]


def test_processes_have_the_rows_of_one_batch_and_its_length(tmp_path):
    path = chats(tmp_path)
    whole = loaded(path)
    halves = [loaded(path, process=p, num_processes=2, num_microbatches=2) for p in (0, 1)]
    for _ in range(20):
        batch = next(whole)
        parts = [next(half) for half in halves]
        for name, x in batch.items():
            joined = np.stack([part[name].reshape(2, 4, -1) for part in parts], axis=1)
            np.testing.assert_array_equal(joined.reshape(16, -1), x)


def test_resumes_exactly(tmp_path):
    path = chats(tmp_path)
    first = loaded(path)
    for _ in range(5):
        next(first)
    state = json.loads(json.dumps(first.state()))
    again = loaded(path, num_ahead=0)
    again.restore(state)
    for _ in range(40):
        one, other = next(first), next(again)
        for name, x in one.items():
            np.testing.assert_array_equal(x, other[name])
    with pytest.raises(ConfigError, match="global_batch=16, but this loader has global_batch=8"):
        Loader(opened(path, 8), global_batch=8, seed=3).restore(state)
    with pytest.raises(ConfigError, match="contents"):
        loaded(path, 4).restore(state)


def test_the_loss_of_a_batch_is_that_of_the_padded_one(tmp_path):
    samples = opened(chats(tmp_path), 8)
    numbers = np.argsort(samples.buckets.needed)[:4]
    length = samples.buckets.length_of(numbers)
    assert length < LENGTH / 2
    config = TransformerConfig(
        vocab_size=256, width=32, num_layers=1, num_heads=2, max_length=LENGTH, gated=False
    )
    model = drawn(lambda: Transformer(config, rngs=nnx.Rngs(0)))

    def loss_and_grads(batch):
        def mean(model):
            loss = next_token_loss(model, batch)
            return loss.total / loss.weight

        return nnx.jit(nnx.value_and_grad(mean))(model)

    short = samples.train(numbers, length)
    full = samples.train(numbers)
    assert short["tokens"].shape == (4, length + 1)
    (loss, grads), (wanted, wanted_grads) = map(loss_and_grads, (short, full))
    np.testing.assert_allclose(loss, wanted, rtol=1e-6)
    for mine, theirs in zip(jax.tree.leaves(grads), jax.tree.leaves(wanted_grads), strict=True):
        np.testing.assert_allclose(mine, theirs, atol=1e-6)


REFUSED = {
    "buckets-packed": {"buckets": 4},
    "buckets-range": {"buckets": 33, "packed": False},
}


@pytest.mark.parametrize("code", REFUSED)
def test_what_has_no_buckets_is_refused(code):
    with pytest.raises(ConfigError) as error:
        JsonlSource(("a.jsonl",), **REFUSED[code]).validate()
    assert error.value.code == code


def test_too_few_rows_and_mixtures_are_refused(tmp_path):
    samples = opened(chats(tmp_path, 20), 2)
    with pytest.raises(ConfigError) as error:
        Loader(samples, global_batch=64)
    assert error.value.code == "buckets-rows"
    with pytest.raises(ConfigError) as error:
        Mixture([samples, samples], [1, 1])
    assert error.value.code == "buckets-mixture"
