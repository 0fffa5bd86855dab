import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from axon_dist.core.errors import ConfigError
from axon_dist.models import Transformer, TransformerConfig, next_token_loss
from tests.drawn import drawn

SMALL = TransformerConfig(
    vocab_size=17, width=16, num_layers=2, num_heads=4, num_kv_heads=2, ffn_width=24, max_length=12
)
TOKENS = np.random.default_rng(7).integers(0, 17, (2, 10)).astype(np.int32)


def change(config, **fields):
    return TransformerConfig(**{**vars(config), **fields})


def make(seed=0, **fields):
    return Transformer(change(SMALL, **fields), rngs=nnx.Rngs(seed))


def made(**fields):
    """A model whose weights take less time to draw."""
    return drawn(lambda: make(**fields))


@nnx.jit
def whole(model, tokens):
    return model(tokens)


def plain_forward(model, tokens):
    """Computes the same function in float64 numpy from the weights, one head at a time."""
    weights = jax.tree.map(lambda a: np.asarray(a, np.float64), nnx.to_pure_dict(nnx.state(model)))
    config = model.config
    size = config.width // config.num_heads
    table = weights["token_embedding"]["embedding"]
    x = table[np.asarray(tokens)]
    for i in range(config.num_layers):
        block = weights["blocks"][i]
        normed = norm(x, block["attention_norm"]["scale"])
        x = x + plain_attention(normed, block["attention"], config, size)
        normed = norm(x, block["mlp_norm"]["scale"])
        gate, up = (normed @ block["mlp"][name]["kernel"] for name in ("gate", "up"))
        x = x + (gate / (1 + np.exp(-gate)) * up) @ block["mlp"]["down"]["kernel"]
    head = table.T if config.tied_head else weights["lm_head"]["kernel"]
    return norm(x, weights["final_norm"]["scale"]) @ head


def norm(x, scale):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + SMALL.norm_eps) * scale


def plain_attention(x, weights, config, size):
    def head_of(name, index):
        return x @ weights[name]["kernel"][:, index * size : (index + 1) * size]

    outputs = []
    for h in range(config.num_heads):
        kv = h // (config.num_heads // config.num_kv_heads)
        query, key, value = turn(head_of("q", h)), turn(head_of("k", kv)), head_of("v", kv)
        scores = query @ key.swapaxes(1, 2) / np.sqrt(size)
        scores[:, ~np.tri(x.shape[1], dtype=bool)] = -np.inf
        shares = np.exp(scores - scores.max(-1, keepdims=True))
        outputs.append(shares / shares.sum(-1, keepdims=True) @ value)
    return np.concatenate(outputs, -1) @ weights["out"]["kernel"]


def turn(x):
    half = x.shape[-1] // 2
    rotation = SMALL.rope_theta ** (-np.arange(half) / half)
    pairs = x[..., :half] + 1j * x[..., half:]
    pairs = pairs * np.exp(1j * np.arange(x.shape[1])[:, None] * rotation)
    return np.concatenate([pairs.real, pairs.imag], -1)


def spread_out(model):
    """Returns larger weights than at initialization, so that every part affects the logits."""
    state = jax.tree.map(lambda a: a * 3.0, nnx.state(model, nnx.Param))
    nnx.update(model, state)
    return model


@pytest.mark.sample("True")
@pytest.mark.parametrize("tied_head", [False, True])
def test_forward_equals_plain_numpy(tied_head):
    model = spread_out(made(tied_head=tied_head))
    want = plain_forward(model, TOKENS)
    assert np.abs(want).max() > 1
    np.testing.assert_allclose(
        whole(model, TOKENS), want, rtol=1e-4, atol=1e-4 * np.abs(want).max()
    )


@pytest.mark.full
def test_fresh_model_is_near_uniform():
    loss = next_token_loss(make(), {"tokens": TOKENS}).mean
    assert float(loss) == pytest.approx(np.log(17), rel=0.15)


def test_logits_depend_on_no_later_token():
    model = spread_out(made())
    changed = np.concatenate([TOKENS[:, :6], (TOKENS[:, 6:] + 1) % 17], 1)
    before, after = (np.asarray(whole(model, tokens)) for tokens in (TOKENS, changed))
    np.testing.assert_array_equal(before[:, :6], after[:, :6])
    assert np.all(np.abs(before - after)[:, 6:].max(-1) > 1e-4)


def test_parts_compose_to_the_whole():
    @nnx.jit
    def composed_and_whole(model):
        x = model.embed(TOKENS)
        for block in model.blocks:
            x = block(x)
        return model.head(x), model(TOKENS)

    np.testing.assert_array_equal(*composed_and_whole(made()))


def loss_and_grads(model):
    split = nnx.split(model, nnx.Param, ...)

    @jax.jit
    def run(params, rest):
        def loss(params):
            return next_token_loss(nnx.merge(split[0], params, rest, copy=True), batch).mean

        return jax.value_and_grad(loss)(params)

    batch = {"tokens": TOKENS}
    loss, grads = run(*split[1:])
    return loss, nnx.to_pure_dict(grads)


@pytest.mark.full
def test_scanned_layers_are_the_same_model():
    listed, scanned = make(dropout=0.3), make(dropout=0.3, scan_layers=True)
    (loss, grads), (scanned_loss, scanned_grads) = map(loss_and_grads, (listed, scanned))
    rows = [grads["blocks"][i] for i in range(SMALL.num_layers)]
    grads["blocks"] = jax.tree.map(lambda *leaves: jnp.stack(leaves), *rows)
    np.testing.assert_allclose(loss, scanned_loss, rtol=1e-6)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), grads, scanned_grads
    )


@pytest.mark.sample("False")
@pytest.mark.parametrize("scan_layers", [False, True])
def test_dropout_draws_anew_in_training_and_rests_in_evaluation(scan_layers):
    model = made(dropout=0.5, scan_layers=scan_layers)
    first, second = whole(model, TOKENS), whole(model, TOKENS)
    assert np.abs(np.asarray(first - second)).max() > 1e-3
    model.eval()
    np.testing.assert_array_equal(whole(model, TOKENS), whole(model, TOKENS))
    rested = whole(made(scan_layers=scan_layers), TOKENS)
    np.testing.assert_allclose(whole(model, TOKENS), rested, rtol=1e-6)


@pytest.mark.parametrize("scan_layers", [False, True])
def test_without_dropout_every_leaf_is_a_parameter(scan_layers):
    model = nnx.eval_shape(lambda: make(scan_layers=scan_layers))
    assert not jax.tree.leaves(nnx.state(model, nnx.Not(nnx.Param)))


def dtypes_of(factory):
    """The dtypes of the embedding, of a block's result and of the logits."""

    def results():
        model = factory()
        x = model.embed(TOKENS)
        return x, model.blocks[0](x), model(TOKENS)

    return [x.dtype for x in jax.eval_shape(results)]


def test_computes_in_the_dtype_asked_for_and_returns_float32_logits():
    model = made(dtype="bfloat16")
    assert dtypes_of(lambda: model) == [jnp.bfloat16, jnp.bfloat16, jnp.float32]
    assert {leaf.dtype for leaf in jax.tree.leaves(nnx.state(model))} == {jnp.dtype("float32")}
    np.testing.assert_allclose(whole(model, TOKENS), whole(made(), TOKENS), atol=0.05)


def test_without_a_dtype_it_computes_in_that_of_the_parameters():
    assert dtypes_of(lambda: make(param_dtype="bfloat16"))[:2] == [jnp.bfloat16] * 2


def test_a_sequence_beyond_max_length_is_refused():
    with pytest.raises(ConfigError, match=r"13 tokens is longer than max_length=12: .*raise"):
        made()(jnp.zeros((1, 13), jnp.int32))


def test_a_bad_config_is_refused_before_any_weight_is_made():
    with pytest.raises(ConfigError, match=r"num_heads=4 does not divide by num_kv_heads=3"):
        make(num_kv_heads=3)
