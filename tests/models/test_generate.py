"""Decoding with a cache, in one scan, gives the same tokens as the plain loop."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from axon_dist.core.errors import ConfigError, UnsupportedError
from axon_dist.models import Transformer, TransformerConfig, generate

SMALL = TransformerConfig(
    vocab_size=17, width=16, num_layers=2, num_heads=4, num_kv_heads=2, ffn_width=24, max_length=12
)
PROMPTS = [[3, 1, 4, 1, 5], [9], [2, 6, 5]]


@functools.cache
def make(**fields):
    """Returns a model with larger weights than at initialization, so that no tokens nearly tie."""
    config = TransformerConfig(**{**vars(SMALL), **fields})
    model = nnx.jit(lambda: Transformer(config, rngs=nnx.Rngs(1)))()
    larger = lambda a: jnp.asarray(np.asarray(a) * np.asarray(3, a.dtype))
    nnx.update(model, jax.tree.map(larger, nnx.state(model, nnx.Param)))
    return model


@nnx.jit
def whole(model, tokens):
    return model(tokens)


def plain(model, prompt, num_tokens):
    """Continues one prompt with a loop over the whole sequence, taking the likeliest token.

    Zeros fill it up to one length, which a causal model does not see, so that it compiles once.
    """
    tokens = list(prompt)
    for _ in range(num_tokens):
        filled = jnp.array([tokens + [0] * (12 - len(tokens))])
        tokens.append(int(whole(model, filled)[0, len(tokens) - 1].argmax()))
    return tokens[len(prompt) :]


GPT2 = {"positions": "learned", "norm": "layer", "gated": False, "bias": True}


@pytest.mark.full
@pytest.mark.sample("fields1")
@pytest.mark.parametrize("fields", [{}, {"scan_layers": True, "tied_head": True}, GPT2])
def test_cached_logits_are_those_of_the_whole_sequence(fields):
    model = make(**fields)
    tokens = jax.random.randint(jax.random.key(7), (2, 10), 0, 17)
    want = np.asarray(whole(model, tokens))
    # The second row is cut to its last 7 tokens, after 3 positions of padding.
    shorter = np.asarray(whole(model, tokens[1:, 3:]))
    decode = nnx.jit(lambda model, tokens, cache: model.decode(tokens, cache))
    cache = model.start_cache(jnp.array([0, 3], jnp.int32), 12)
    logits, cache = decode(model, tokens[:, :5], cache)
    for position in range(5, 11):
        np.testing.assert_allclose(logits[0], want[0, position - 1], rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(logits[1], shorter[0, position - 4], rtol=1e-5, atol=1e-5)
        if position < 10:
            logits, cache = decode(model, tokens[:, position : position + 1], cache)


@pytest.mark.full
def test_greedy_tokens_are_those_of_the_plain_loop():
    model = make()
    done = generate(model, PROMPTS, 6, temperature=0)
    assert done.rows == [plain(model, prompt, 6) for prompt in PROMPTS]


# Both leave the tokens out before they draw; the second also has a limit that leaves out none.
@pytest.mark.sample("drawn")
@pytest.mark.parametrize(
    ("options", "no_padding"),
    [({"temperature": 0}, 17), ({"temperature": 50.0, "top_k": 9}, 99)],
    ids=["likeliest", "drawn"],
)
def test_rows_that_pad_the_vocabulary_are_never_drawn(options, no_padding):
    model = make(num_layers=1)
    all_rows = generate(model, PROMPTS, 6, **options)
    assert all_rows.tokens.max() >= 7
    assert generate(model, PROMPTS, 6, vocab_size=7, **options).tokens.max() < 7
    assert generate(model, PROMPTS, 6, vocab_size=no_padding, **options).rows == all_rows.rows


@pytest.mark.full
def test_dropout_rests():
    assert generate(make(dropout=0.5), PROMPTS, 6, temperature=0).rows == (
        generate(make(), PROMPTS, 6, temperature=0).rows
    )


def test_behind_the_end_is_the_end():
    model = make(num_layers=1)
    want = generate(model, PROMPTS, 6, temperature=0).rows
    end = want[0][2]
    done = generate(model, PROMPTS, 6, temperature=0, end=end)
    cut = [row[: row.index(end) + 1] if end in row else row for row in want]
    assert done.rows == cut
    assert len(done.rows[0]) < 6
    assert done.tokens[0].tolist() == cut[0] + [end] * (6 - len(cut[0]))


def test_a_seed_gives_one_text_and_rows_draw_independently():
    model = make(num_layers=1)
    draws = [generate(model, [[1]] * 4, 8, seed=seed, temperature=2.0).rows for seed in (0, 0, 1)]
    assert draws[0] == draws[1] != draws[2]
    assert len(set(map(tuple, draws[0]))) == 4


@pytest.mark.full
@pytest.mark.sample("tp=2")
@pytest.mark.parametrize("axes", ["tp=2", "fsdp=8"])
def test_a_mesh_gives_the_tokens_of_one_device(make_world, axes):
    model, mesh = make(), make_world(axes).mesh
    axis = mesh.axis_names[0]
    split = lambda x: NamedSharding(
        mesh, PartitionSpec(None, axis) if x.ndim == 2 and x.shape[1] % 8 == 0 else PartitionSpec()
    )
    graphdef, leaves = nnx.split(model)
    spread = nnx.merge(graphdef, jax.tree.map(lambda x: jax.device_put(x, split(x)), leaves))
    for options in ({"temperature": 0}, {"seed": 5, "top_p": 0.9}):
        want, got = (generate(m, PROMPTS, 6, **options).rows for m in (model, spread))
        assert got == want


@dataclasses.dataclass
class Sizes:
    """A typical user config: it is mutable, so it has no hash."""

    length: int


class Plain(nnx.Module):
    """A token model without a cache, with absolute positions."""

    def __init__(self, causal=True, length=12):
        self.inner, self.causal = make(num_layers=1), causal
        self.sizes = Sizes(length)
        self.positions = nnx.Embed(length, 16, rngs=nnx.Rngs(2))

    def __call__(self, tokens):
        x = self.inner.embed(tokens) + 3 * self.positions(jnp.arange(tokens.shape[1]))
        for block in self.inner.blocks:
            x = block(x)
        return self.inner.head(x if self.causal else x + x.mean(1, keepdims=True))


@pytest.mark.full
def test_a_causal_model_without_a_cache_sees_everything_each_time():
    model = Plain()
    want = [plain(model, prompt, 6) for prompt in PROMPTS]
    assert generate(model, PROMPTS, 6, temperature=0).rows == want


def total(x):
    return x.sum(axis=1)


def test_models_and_options_unfit_for_generation_are_refused():
    with pytest.raises(UnsupportedError, match=r"Plain has no cache .* depend on later tokens"):
        generate(Plain(causal=False), PROMPTS, 6)
    with pytest.raises(UnsupportedError, match="logits of Plain for 10 positions are not finite"):
        generate(Plain(length=8), PROMPTS, 6)
    with pytest.raises(UnsupportedError, match=r"Sequential maps .* \(3, 10\) to \(3, 4\)"):
        generate(nnx.Sequential(nnx.Embed(17, 4, rngs=nnx.Rngs(0)), total), PROMPTS, 6)


@pytest.mark.parametrize(
    ("prompts", "options", "message"),
    [
        ([], {}, "got no prompt; give at least one"),
        ([[1], []], {}, "prompt 1 is empty; it needs at least one token"),
        ([1, 2], {}, r"prompt 0 is int64 of shape \(\); a prompt is a sequence of token ids"),
        ([[0.5]], {}, r"prompt 0 is float64 of shape \(1,\)"),
        ([[17]], {}, "got token 17, but the model has tokens from 0 to 16"),
        ([[1]], {"end": 99}, "got token 99, but the model has tokens from 0 to 16"),
        ([[1] * 9], {}, r"9 tokens plus 6 new tokens exceeds max_length=12 .* at most 3 tokens"),
        ([[1]], {"num_tokens": 0}, "num_tokens=0, an int; give a whole number, at least 1"),
        ([[1]], {"temperature": -1.0}, r"temperature=-1.0 must be 0 or in \[1e-6, 1e6\]"),
        ([[1]], {"temperature": 0, "top_k": 2}, "temperature=0 .* top_k=2 has no effect"),
        ([[1]], {"top_k": 0}, "top_k=0, an int; give a whole number, at least 1"),
        ([[1]], {"top_p": 1.5}, r"top_p=1.5 must be in \(0, 1\]"),
    ],
)
def test_mistakes_are_named(prompts, options, message):
    with pytest.raises(ConfigError, match=message):
        generate(make(num_layers=1), prompts, **{"num_tokens": 6, **options})
