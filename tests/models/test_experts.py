"""The mixture of experts on one device, compared with applying every expert to every token."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from axon_dist.core.errors import ConfigError
from axon_dist.models import ExpertConfig, Experts, Transformer, TransformerConfig, num_params
from axon_dist.models.experts import Findings
from axon_dist.models.formats import FORMATS
from axon_dist.ops import dropless
from axon_dist.ops.dropless import in_fitting_slots
from axon_dist.ops.routing import Choice, in_order, in_slots, slots_for

SIZES = {"width": 8, "ffn_width": 12, "num_heads": 2, "num_kv_heads": 2, "num_layers": 1}


def config(sizes=None, **experts):
    return TransformerConfig(**{**SIZES, **(sizes or {})}, experts=ExpertConfig(**experts))


def layer(sizes=None, **experts):
    return Experts(config(sizes, **experts), rngs=nnx.Rngs(0))


def inputs(seed=0, shape=(3, 5, 8)):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape).astype(np.float32))


@nnx.jit
def called(model, x):
    return model(x)


def every_expert(model, x):
    """Applies all experts to each token, and sums the chosen ones, as the formula says."""
    scores = jax.nn.softmax(x @ model.router[...])
    bias = model.bias[...] if hasattr(model, "bias") else 0
    k = model.experts.per_token
    edge = jnp.sort(scores + bias)[..., -k][..., None]
    gates = jnp.where(scores + bias >= edge, scores, 0)
    gates = gates / gates.sum(-1, keepdims=True) if k > 1 else gates
    hidden = jnp.einsum("btd,edh->bteh", x, model.up[...])
    if hasattr(model, "gate"):
        hidden = hidden * jax.nn.silu(jnp.einsum("btd,edh->bteh", x, model.gate[...]))
    else:
        hidden = jax.nn.silu(hidden)
    made = jnp.einsum("bteh,ehd,bte->btd", hidden, model.down[...], gates)
    return made + model.shared_mlp(x) if hasattr(model, "shared_mlp") else made


@pytest.mark.full
@pytest.mark.sample("sizes1-experts1")
@pytest.mark.parametrize(
    ("sizes", "experts"),
    [({}, {"per_token": 2, "shared": 2}), ({"gated": False}, {"per_token": 1})],
)
def test_equals_every_token_through_every_expert(sizes, experts):
    model, x = layer(sizes, count=4, **experts), inputs()
    graph, params, rest = nnx.split(model, nnx.Param, ...)

    def run(f):
        def total(params):
            made = f(nnx.merge(graph, params, rest, copy=True), x)
            return jnp.sum(jnp.sin(made)), made

        (_, made), grads = jax.jit(jax.value_and_grad(total, has_aux=True))(params)
        return made, grads

    got, want = run(lambda model, x: model(x)), run(every_expert)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), got, want)


def published_balance(logits, k):
    """Computes the balance term of published models: over all layers, summed over k choices."""
    scores = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    chosen = np.argsort(-scores, axis=-1)[:, :k]
    shares = np.stack([np.bincount(slot, minlength=logits.shape[-1]) for slot in chosen.T])
    return logits.shape[-1] * np.sum(shares / len(logits) * scores.mean(0))


@pytest.mark.sample("3-2")
@pytest.mark.parametrize(("layers", "k"), [(1, 2), (3, 2), (2, 4)])
def test_a_published_balance_weighs_as_much_here(layers, k):
    entries = {"num_hidden_layers": layers, "hidden_size": 8, "intermediate_size": 12,
               "vocab_size": 16, "num_attention_heads": 2, "num_local_experts": 4,
               "num_experts_per_tok": k, "output_router_logits": True}  # fmt: skip
    family = FORMATS["hf-mixtral"]
    model, x = Experts(family.from_hub(entries), rngs=nnx.Rngs(0)), inputs()
    called(model, x)
    # All layers get the same inputs and so route alike.
    logits = np.asarray(x, np.float64).reshape(-1, 8) @ np.asarray(model.router[...])
    published = published_balance(np.concatenate([logits] * layers), k)
    balance = Findings(*np.asarray(model.report[...])).balance
    for given, weight in (({"router_aux_loss_coef": 0.02}, 0.02), ({}, 0.001)):
        found = family.from_hub(entries | given)
        assert family.to_hub(found)["router_aux_loss_coef"] == pytest.approx(weight)
        got = layers * found.experts.balance * balance
        np.testing.assert_allclose(got, weight * published, rtol=1e-5)


@pytest.mark.full
def test_the_bias_chooses_and_does_not_weigh():
    model, x = layer(count=4, bias_rate=0.5), inputs()
    model.bias.set_value(jnp.array([9.0, 0.0, 0.0, 9.0]))
    want = every_expert(model, x)
    np.testing.assert_allclose(model(x), want, atol=1e-6)
    # Experts 0 and 3 get all tokens, so their biases fall; the others rise.
    assert model.bias[...].tolist() == [8.5, 0.5, 0.5, 8.5]
    assert float(model.report[...][3]) == 2.0


def test_evaluation_changes_no_state():
    model = layer(count=4, bias_rate=0.5)
    model.eval()
    called(model, inputs())
    assert not model.bias[...].any()
    assert not model.report[...].any()


def test_balance_and_z_terms():
    model, x = layer(count=4), inputs()
    logits = np.asarray(x) @ np.asarray(model.router[...])
    total = np.log(np.exp(logits).sum(-1, keepdims=True))
    scores = np.exp(logits - total)
    chosen = (scores >= np.sort(scores)[..., -2:-1]) / 2
    called(model, x)
    over = lambda *axes: (chosen.mean(axes) * scores.mean(axes)).sum(-1)
    z = (total**2).mean()
    np.testing.assert_allclose(model.report[...][:2], [4 * over(0, 1), z], rtol=1e-5)
    model = layer(count=4, balance_per="sequence")
    called(model, x)
    np.testing.assert_allclose(model.report[...][0], 4 * over(1).mean(), rtol=1e-5)


@pytest.mark.full
def test_the_balance_term_moves_the_router():
    model, x = layer(count=4), inputs()
    graph, params, rest = nnx.split(model, nnx.Param, ...)

    def balance(params):
        made = nnx.merge(graph, params, rest, copy=True)
        made(x)
        return made.report[...][0]

    def by_hand(router):
        scores = jax.nn.softmax(x @ router)
        chosen = jax.nn.one_hot(jax.lax.top_k(scores, 2)[1], 4).sum(2) / 2
        return 4 * (chosen.mean((0, 1)) * scores.mean((0, 1))).sum()

    want = jax.grad(by_hand)(model.router[...])
    np.testing.assert_allclose(jax.grad(balance)(params)["router"][...], want, atol=1e-6)
    assert float(jnp.abs(want).max()) > 1e-3


@pytest.mark.full
def test_slots_leave_out_the_last_and_count_them():
    tokens = inputs(shape=(6, 3))
    choice = Choice(jnp.array([[0], [1], [0], [0], [1], [0]]), jnp.ones((6, 1)))
    kernels = jnp.stack([jnp.eye(3), 2 * jnp.eye(3)])
    feed = lambda product, rows, kernels: product(rows, kernels)
    whole = in_order(feed, tokens, choice, kernels)
    np.testing.assert_allclose(whole, tokens * (1 + choice.experts), rtol=1e-6)
    mixed, left_out = in_slots(feed, tokens, choice, kernels, 2, 2)
    kept = np.array([1, 1, 1, 0, 1, 0])[:, None]
    np.testing.assert_allclose(mixed, whole * kept, rtol=1e-6)
    assert float(left_out) == 2


def test_experts_from_a_number_on_add_what_is_theirs():
    tokens, kernels = inputs(shape=(6, 3)), inputs(1, (4, 3, 3))
    choice = Choice(jax.lax.top_k(inputs(2, (6, 4)), 2)[1], jnp.full((6, 2), 0.5))
    feed = lambda product, rows, kernels: jnp.cos(product(rows, kernels))

    @jax.jit
    def sums():
        halves = [(i, kernels[i : i + 2]) for i in (0, 2)]
        return (
            in_order(feed, tokens, choice, kernels),
            sum(in_order(feed, tokens, choice, half, i) for i, half in halves),
            sum(in_fitting_slots(feed, tokens, choice, half, 4, i) for i, half in halves),
            sum(in_slots(feed, tokens, choice, half, 2, 6, i)[0] for i, half in halves),
        )

    whole, *parts = sums()
    for found in parts:
        np.testing.assert_allclose(found, whole, atol=1e-6)


@pytest.mark.full
@pytest.mark.sample("loop-40-4-2")
@pytest.mark.parametrize(
    ("tokens", "experts", "per_token"), [(1, 4, 1), (40, 4, 2), (70, 3, 1), (33, 8, 8)]
)
@pytest.mark.parametrize("form", ["slots", "loop"])
def test_fitting_slots_are_as_rows_in_order(tokens, experts, per_token, form, monkeypatch):
    """Groups without rows, smaller than a block, of several blocks; values and all gradients."""
    if form == "loop":
        monkeypatch.setattr(dropless, "LOADS", (0.5,))
    x, gates, up, down = (
        inputs(seed, shape)
        for seed, shape in enumerate(
            [(tokens, 5), (tokens, per_token), (experts, 5, 7), (experts, 7, 5)]
        )
    )
    # Everybody's first choice is the last expert, and nobody chooses the first, if possible.
    liked = inputs(4, (tokens, experts)) + 3 * jnp.arange(experts)
    chosen = jax.lax.top_k(liked, per_token)[1]
    feed = lambda product, rows, kernels: product(jnp.tanh(product(rows, kernels[0])), kernels[1])
    fitting = functools.partial(in_fitting_slots, num_experts=experts)

    def total(how, x, gates, *kernels):
        return jnp.sum(jnp.sin(how(feed, x, Choice(chosen, gates), kernels)))

    results = [
        jax.jit(jax.value_and_grad(functools.partial(total, how), (0, 1, 2, 3)))(x, gates, up, down)
        for how in (fitting, in_order)
    ]
    for got, want in zip(*map(jax.tree.leaves, results), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=2e-5)


@pytest.mark.sample("to one-16-1.125")
@pytest.mark.parametrize(
    ("spread", "here", "most"),
    # Of 16 experts those here, and how often the rows of these may be multiplied.
    [("evenly", 16, 1.0625), ("evenly", 4, 1.0625), ("at random", 16, 1.22), ("to one", 16, 1.125)],
)
def test_rows_that_are_multiplied(spread, here, most):
    """Products are counted as they run: in the forward pass, and twice in the backward pass."""
    num, count, per_token = 2048, 16, 2
    number = np.arange(num, dtype=np.int32)[:, None]
    chosen = {
        "evenly": (number + np.array([0, 8])) % count,
        "at random": np.argsort(-inputs(1, (num, count)))[:, :per_token],
        "to one": np.concatenate([number * 0, 1 + number % (count - 1)], axis=1),
    }[spread].astype(np.int32)
    rows = []

    @jax.custom_vjp
    def counted(x):
        jax.debug.callback(lambda: rows.append(x.size // x.shape[-1]))
        return x

    counted.defvjp(lambda x: (counted(x), None), lambda _, ct: (counted(ct),))
    feed = lambda product, rows, kernels: counted(product(rows, kernels))
    gates, kernels = np.ones((num, per_token), np.float32), inputs(2, (here, 4, 4))

    def total(tokens, kernels):
        return in_fitting_slots(feed, tokens, Choice(chosen, gates), kernels, count).sum()

    jax.block_until_ready(jax.jit(jax.grad(total, (0, 1)))(inputs(3, (num, 4)), kernels))
    jax.effects_barrier()
    theirs = int(np.sum(chosen < here))
    assert 3 * theirs <= sum(rows) <= most * 3 * theirs


def test_slots_are_at_least_one_and_at_most_one_for_each_token():
    assert [slots_for(8, 2, 4, f) for f in (0.01, 1.0, 1.1, 9.0)] == [1, 4, 5, 8]


def test_parameters_are_counted():
    for sizes, experts in (({}, {"shared": 2}), ({"gated": False}, {"width": 5, "count": 3})):
        of = config(sizes, **experts)
        made = nnx.eval_shape(lambda of=of: Transformer(of, rngs=nnx.Rngs(0)))
        leaves = jax.tree.leaves(nnx.state(made, nnx.Param))
        assert sum(leaf.size for leaf in leaves) == num_params(of)


@pytest.mark.parametrize(
    ("sizes", "experts", "message"),
    [
        ({}, {"per_token": 9}, "per_token=9 is more than experts.count=8"),
        ({}, {"count": 0}, "count=0 must be at least 1"),
        ({}, {"balance": -1.0}, "experts.balance=-1.0 must be 0 or more"),
        ({}, {"balance_per": "sequences"}, "'sequences' is not known.*sequence"),
        ({"bias": True}, {}, "experts have none: leave bias out"),
    ],
)
def test_refused(sizes, experts, message):
    with pytest.raises(ConfigError, match=message):
        config(sizes, **experts).validate()
