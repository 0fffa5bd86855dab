"""Methods that the library computes in another way: the user's own are what trains, or refused."""

import contextlib
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx

from axon_dist import World, build_train_step
from axon_dist.core.by_position import is_by_position
from axon_dist.core.errors import ConfigError, UnsupportedError
from axon_dist.core.same_function import compare as compare_functions
from axon_dist.core.same_function import is_from
from axon_dist.models import Transformer, TransformerConfig
from axon_dist.models.attention import einsum_attention
from axon_dist.models.experts import ExpertConfig, Experts
from axon_dist.models.generate import generate
from axon_dist.models.layers import PlainMLP, SelfAttention
from axon_dist.models.loss import cross_entropy, next_token_loss
from axon_dist.nn import lora
from axon_dist.parallel import (
    compose,
    context_parallel,
    ddp,
    expert_parallel,
    pipelined,
    suggest_plan,
    tensor_parallel,
)
from axon_dist.parallel.tensor_plan import Plan, Rule
from tests.drawn import drawn

TOKENS = np.random.default_rng(0).integers(0, 64, (4, 17)).astype(np.int32)
BATCH = {"tokens": TOKENS}
SIZES = dict(
    vocab_size=64, width=16, num_layers=1, num_heads=2, ffn_width=16, max_length=32, gated=False
)


def config(**more):
    return TransformerConfig(**{**SIZES, **more})


def whole(model, batch):
    """The loss of all logits, in plain JAX."""
    logits = model(batch["tokens"][:, :-1])
    return jnp.mean(cross_entropy(logits, batch["tokens"][:, 1:]))


def compare(make, strategy, axes, loss=whole, batch=BATCH, want=whole, **options):
    world = World.emulate(math.prod(int(part[-1]) for part in axes.split(",")), axes)
    model = drawn(make)
    step = build_train_step(model, optax.sgd(0.1), loss, strategy, world, batch=batch, **options)
    state, metrics = step(step.init(), batch)
    expected, grads = nnx.jit(nnx.value_and_grad(want))(model, batch)
    np.testing.assert_allclose(metrics["loss"], expected, rtol=1e-5)
    before = dict(nnx.to_flat_state(nnx.state(model, nnx.Param)))
    trained = dict(nnx.to_flat_state(nnx.state(step.merge(state), nnx.Param)))
    for path, grad in nnx.to_flat_state(grads):
        params = np.asarray(before[path][...]) - 0.1 * np.asarray(grad[...])
        np.testing.assert_allclose(trained[path][...], params, rtol=1e-4, atol=1e-6)


def compare_evaluation(make, strategy, axes):
    """The loss alone, which takes half of the time."""
    world = World.emulate(math.prod(int(part[-1]) for part in axes.split(",")), axes)
    model = drawn(make)
    step = build_train_step(model, optax.sgd(0.1), whole, strategy, world, batch=BATCH)
    found = step.evaluate(step.init(), BATCH)["loss"]
    np.testing.assert_allclose(found, nnx.jit(whole)(model, BATCH), rtol=1e-5)


class Halved(Transformer):
    def __call__(self, tokens, segments=None):
        return 0.5 * super().__call__(tokens, segments)


class OwnHead(Transformer):
    def head(self, x):
        return 0.5 * super().head(x)


class BiasedHead(Transformer):
    def __init__(self, config, *, rngs):
        super().__init__(config, rngs=rngs)
        self.lm_head = nnx.Linear(16, 64, rngs=rngs, bias_init=nnx.initializers.normal(1.0))


def times_two(x, kernel, *args, **kwargs):
    return 2 * jax.lax.dot_general(x, kernel, *args, **kwargs)


class OwnProduct(Transformer):
    def __init__(self, config, *, rngs):
        super().__init__(config, rngs=rngs)
        self.lm_head = nnx.Linear(16, 64, use_bias=False, dot_general=times_two, rngs=rngs)


@pytest.mark.parametrize("kind", [Halved, OwnHead, BiasedHead, OwnProduct])
def test_a_chunked_loss_is_that_of_the_logits(kind):
    model = drawn(lambda: kind(config(logits="chunked", tied_head=False), rngs=nnx.Rngs(0)))
    is_told = kind in (Halved, OwnHead)
    told = pytest.warns(UserWarning, match=rf"makes all logits of {kind.__name__} at once")
    both = nnx.jit(lambda *given: (next_token_loss(*given).mean, whole(*given)))
    with told if is_told else contextlib.nullcontext():
        loss, want = both(model, BATCH)
    np.testing.assert_allclose(loss, want, rtol=1e-5)


class Stacked(nnx.Sequential):
    """A table of one's own: a lookup and a product, without the attributes of `nnx.Embed`."""

    def __init__(self, rngs):
        super().__init__(nnx.Embed(64, 8, rngs=rngs), nnx.Linear(8, 16, rngs=rngs))

    def attend(self, x):
        return x @ (self.layers[0].embedding[...] @ self.layers[1].kernel[...]).T


@pytest.mark.parametrize("tied", [False, True])
def test_heads_and_tables_of_another_class_need_not_have_the_attributes_of_ours(tied):
    def make():
        rngs = nnx.Rngs(0)
        model = Transformer(config(logits="chunked", tied_head=tied), rngs=rngs)
        model.token_embedding = Stacked(rngs)
        if not tied:
            model.lm_head = nnx.Sequential(nnx.Linear(16, 64, use_bias=False, rngs=rngs))
        return model

    model = drawn(make)
    loss = nnx.jit(next_token_loss)(model, BATCH)
    np.testing.assert_allclose(loss.mean, nnx.jit(whole)(model, BATCH), rtol=1e-5)
    assert model.start_cache(jnp.zeros(2, jnp.int32), 4).past[0].keys.dtype == jnp.float32


class OwnBeforeHead(nnx.Module):
    def __init__(self, factor=1.0):
        rngs, self.factor = nnx.Rngs(0), factor
        self.embed = nnx.Embed(64, 16, rngs=rngs)
        self.up, self.out = nnx.Linear(16, 16, rngs=rngs), nnx.Linear(16, 64, rngs=rngs)

    def hidden(self, tokens):
        return jnp.tanh(self.up(self.embed(tokens)))

    def __call__(self, tokens):
        return self.out(self.hidden(tokens))

    def before_head(self, tokens):
        hidden = self.hidden(tokens) * self.factor
        return {"hidden": hidden, "kernel": self.out.kernel[...], "bias": self.out.bias[...]}


def test_a_before_head_of_ones_own_is_compared_with_the_call():
    compare(OwnBeforeHead, ddp(), "dp=2", loss=next_token_loss)
    with pytest.raises(
        UnsupportedError,
        match=r"OwnBeforeHead.before_head are not those of a call .* differs from this by",
    ):
        compare(lambda: OwnBeforeHead(0.5), ddp(), "dp=2", loss=next_token_loss)


class Positioned(Transformer):
    """Positions by the index of a row, whatever `positions` says."""

    def embed(self, tokens, positions=None):
        x = super().embed(tokens, positions)
        return x + jnp.sin(jnp.arange(x.shape[1], dtype=x.dtype))[:, None]


def shifted(config, rngs):
    model = Transformer(config, rngs=rngs)

    class Shift(nnx.Module):
        def __call__(self, x):
            return jnp.pad(x, ((0, 0), (1, 0), (0, 0)))[:, :-1]

    model.blocks[0].mlp = Shift()
    return model


def by_index(x, positions=None, window=None):
    """Scales heads by the index in the row, whatever `positions` says."""
    return x * (1 + jnp.cos(jnp.arange(x.shape[1], dtype=x.dtype)))[None, :, None, None]


def with_rotary():
    model = Transformer(config(), rngs=nnx.Rngs(0))
    for block in model.blocks:
        block.attention.rotary = by_index
    return model


def with_mlp(make):
    model = Transformer(config(), rngs=nnx.Rngs(0))
    model.blocks[0].mlp = make(nnx.Rngs(5))
    return model


def conv(rngs):
    return nnx.Conv(16, 16, (3,), padding="CAUSAL", rngs=rngs)


MIXING = {
    "convolution": lambda: with_mlp(conv),
    "function": lambda: with_mlp(
        lambda rngs: nnx.Sequential(nnx.Linear(16, 16, rngs=rngs), lambda x: jnp.cumsum(x, 1))
    ),
    "rotary": with_rotary,
}
ORDERED = {
    "index": lambda: Positioned(config(), rngs=nnx.Rngs(0)),
    "shift": lambda: shifted(config(), nnx.Rngs(0)),
    **MIXING,
    "einsum": lambda: with_mlp(lambda rngs: nnx.Einsum("btd,ts->bsd", (16, 16), rngs=rngs)),
}


@pytest.mark.full
@pytest.mark.parametrize("kind", ORDERED)
def test_a_ring_leaves_the_order_to_models_that_read_it(kind):
    compare(ORDERED[kind], context_parallel("ring"), "cp=2")


def test_a_ring_evaluates_a_model_that_reads_the_order_as_it_is_called():
    compare_evaluation(MIXING["convolution"], context_parallel("ring"), "cp=2")


def layer_of(kind, *args, **options):
    return kind(*args, rngs=nnx.Rngs(0), **options)


class Jitted(nnx.Linear):
    @nnx.jit
    def __call__(self, x):
        return jnp.cumsum(x, 1)


class Recomputed(nnx.Sequential):
    @nnx.remat
    def __call__(self, x):
        return jnp.cumsum(x, 1)


class Partial(PlainMLP):
    def mixed(self, x, dim):
        return jnp.cumsum(x, dim)

    __call__ = functools.partialmethod(mixed, dim=1)


BY_POSITION = {
    "Linear": lambda: layer_of(nnx.Linear, 2, 2, kernel_init=lambda _, shape, d: jnp.ones(shape)),
    "own product": lambda: layer_of(nnx.Linear, 2, 2, dot_general=times_two),
    "Embed": lambda: layer_of(nnx.Embed, 2, 2, dtype=jnp.bfloat16),
    "Dropout": lambda: layer_of(nnx.Dropout, 0.1),
    "LayerNorm": lambda: layer_of(nnx.LayerNorm, 2),
    "norm of positions": lambda: layer_of(nnx.LayerNorm, 2, reduction_axes=(-2, -1)),
    "GroupNorm": lambda: layer_of(nnx.GroupNorm, 2, num_groups=1),
    "LoRALinear": lambda: layer_of(nnx.LoRALinear, 2, 2, lora_rank=1),
    "split features": lambda: layer_of(nnx.LinearGeneral, 2, (2, 2)),
    "joined dims": lambda: layer_of(nnx.LinearGeneral, (2, 2), 2, axis=(-2, -1)),
    "Einsum": lambda: layer_of(nnx.Einsum, "btd,dhk->bthk", (2, 2, 2)),
    "moved einsum": lambda: layer_of(nnx.Einsum, "btd,df->tbf", (2, 2)),
    "own einsum": lambda: layer_of(nnx.Einsum, "btd,df->btf", (2, 2), einsum_op=times_two),
    "norm by position": lambda: layer_of(nnx.LayerNorm, 2, feature_axes=1),
    "jit of Flax": lambda: layer_of(Jitted, 2, 2),
    "remat of Flax": lambda: Recomputed(nnx.gelu),
    "partial method": lambda: Partial(config(), rngs=nnx.Rngs(0)),
    "activations": lambda: nnx.List([nnx.gelu, jnp.tanh, nnx.identity]),
    "functions": lambda: nnx.List([jax.jit(lambda x: jnp.cumsum(x, 1))]),
}
NOT_BY_POSITION = {
    *("own product", "norm of positions", "GroupNorm", "joined dims"),
    *("moved einsum", "own einsum", "functions", "norm by position"),
    *("jit of Flax", "remat of Flax", "partial method"),
}


@pytest.mark.parametrize("kind", BY_POSITION)
def test_layers_of_flax_are_known_by_their_class_and_options(kind):
    assert is_by_position(BY_POSITION[kind]()) == (kind not in NOT_BY_POSITION)


@pytest.mark.parametrize("form", ["plain", "lora", "stacked"])
def test_every_layer_of_a_decoder_of_this_library_is_known(form):
    model = Transformer(config(scan_layers=form == "stacked"), rngs=nnx.Rngs(0))
    model = lora(model, 2, rngs=nnx.Rngs(0)) if form == "lora" else model
    assert all(is_by_position(module) for _, module in nnx.iter_modules(model))


class Doubled(SelfAttention):
    @functools.wraps(SelfAttention.attend)
    def attend(self, query, key, value, segments=None):
        return 2 * super().attend(query, key, value, segments)


def doubled():
    model = Transformer(config(), rngs=nnx.Rngs(0))
    for number, block in enumerate(model.blocks):
        block.attention = Doubled(model.config, None, rngs=nnx.Rngs(number))
    return model


def test_attention_that_borrows_our_name_is_not_ours():
    assert not is_from(Doubled.attend, "axon_dist.")
    with pytest.raises(UnsupportedError, match=r"Doubled\.attend"):
        compare(doubled, context_parallel("ring"), "cp=2")


class Scaled(Experts):
    def mix_experts(self, *arrays):
        mixed, dropped = super().mix_experts(*arrays)
        return 2 * mixed, dropped


class Mean(Experts):
    """Subtracts the mean over the batch."""

    def mix_experts(self, *arrays):
        mixed, dropped = super().mix_experts(*arrays)
        return mixed - mixed.mean((0, 1)), dropped


class OwnFeed(Experts):
    def feed(self, product, rows, kernels):
        return 3 * super().feed(product, rows, kernels)


class RowsFeed(Experts):
    def feed(self, product, rows, kernels):
        return super().feed(product, rows - rows.mean(0), kernels)


class MeanSamples(Experts):
    def sum_samples(self, x):
        return jnp.mean(x, axis=0, dtype=jnp.float32), 1


class Mixture(nnx.Module):
    """Experts between a lookup and a head; attention plays no part in what is tried."""

    def __init__(self, kind):
        rngs = nnx.Rngs(0)
        experts = ExpertConfig(count=4, per_token=2, balance=0.0)
        self.embed = nnx.Embed(64, 16, rngs=rngs)
        self.mlp = kind(config(experts=experts), rngs=rngs)
        self.head = nnx.Linear(16, 64, use_bias=False, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens)
        return self.head(x + self.mlp(x))


@pytest.fixture
def few_sizes(monkeypatch):
    """Experts have one number of slots, or run in a loop, so fewer branches are compiled."""
    monkeypatch.setattr("axon_dist.ops.dropless.LOADS", (2,))


@pytest.mark.full
@pytest.mark.parametrize("kind", [Scaled, Mean, OwnFeed, RowsFeed], ids=lambda x: x.__name__)
def test_experts_of_ones_own_train_as_written(kind, few_sizes):
    compare(lambda: Mixture(kind), ddp(), "dp=2")


def test_experts_of_ones_own_are_evaluated_as_written(few_sizes):
    compare_evaluation(lambda: Mixture(Mean), ddp(), "dp=2")


@pytest.mark.sample("Scaled")
@pytest.mark.parametrize("kind", [Scaled, Mean, RowsFeed, OwnFeed], ids=lambda x: x.__name__)
def test_split_experts_are_the_users_or_refused(kind):
    run = functools.partial(compare, lambda: Mixture(kind), expert_parallel(), "ep=2")
    if kind is OwnFeed:
        run()
    else:
        with pytest.raises(UnsupportedError, match=rf"{kind.__name__}.mix_experts .* other"):
            run()


class HiddenFeed(Experts):
    """Normalises the hidden features of each row."""

    def feed(self, product, rows, kernels):
        hidden = product(rows, kernels["up"])
        return product(hidden / (1 + jnp.abs(hidden).mean(-1, keepdims=True)), kernels["down"])


class Reporting(Experts):
    """Returns something of its own as the share of dropped tokens."""

    def mix_experts(self, *arrays):
        mixed, _ = super().mix_experts(*arrays)
        return mixed, jnp.mean(mixed.astype(jnp.float32) ** 2)

    def _learn(self, logits, scores, expert_ids, dropped):
        super()._learn(logits, scores, expert_ids, dropped)
        self.report.set_value(self.report[...].at[0].set(dropped))


@pytest.mark.full
def test_hidden_features_of_experts_are_split_only_if_their_results_add_up(few_sizes):
    compare(lambda: Mixture(HiddenFeed), tensor_parallel("transformer"), "tp=2")


def test_what_experts_return_besides_their_sum_is_not_lost():
    with pytest.raises(UnsupportedError, match=r"Reporting.mix_experts .*differs"):
        compare(lambda: Mixture(Reporting), expert_parallel(), "ep=2")


class Joint(nnx.Linear):
    """A layer whose outputs depend on each other."""

    def __call__(self, x):
        y = super().__call__(x)
        return y / (1 + jnp.abs(y).mean(-1, keepdims=True))


class Rectified(nnx.Linear):
    def __call__(self, x):
        return jax.nn.relu(super().__call__(x))


def by_size(x, kernel, *args, **kwargs):
    return jax.lax.dot_general(x, kernel, *args, **kwargs) / (1 + jnp.abs(kernel).mean())


class Fused(nnx.Module):
    def __init__(self, kind, **options):
        rngs = nnx.Rngs(0)
        self.embed, self.qkv = nnx.Embed(64, 16, rngs=rngs), kind(16, 48, rngs=rngs, **options)
        self.out, self.head = nnx.Linear(48, 16, rngs=rngs), nnx.Linear(16, 64, rngs=rngs)

    def __call__(self, tokens):
        return self.head(self.out(self.qkv(self.embed(tokens))))


FUSED = {
    "joint": lambda: Fused(Joint),
    "rectified": lambda: Fused(Rectified),
    "product": lambda: Fused(nnx.Linear, dot_general=by_size),
}


@pytest.mark.sample("joint")
@pytest.mark.parametrize("kind", FUSED)
def test_a_fused_layer_is_cut_only_where_its_blocks_are_independent(kind):
    plan = Plan((Rule("qkv$", "column", num_fused=3), Rule("out$", "row")))
    compare(FUSED[kind], tensor_parallel(plan), "tp=2")


class MixedHeads(SelfAttention):
    def attend(self, query, key, value, segments=None):
        y = einsum_attention(query, key, value, segments=segments)
        return y - y.mean(2, keepdims=True)


class MixedSamples(SelfAttention):
    def attend(self, query, key, value, segments=None):
        y = einsum_attention(query, key, value, segments=segments)
        return y - y.mean(0, keepdims=True)


def attending(kind, form, num_layers=1):
    model = Transformer(config(attention=form, num_layers=num_layers), rngs=nnx.Rngs(0))
    for number, block in enumerate(model.blocks):
        block.attention = kind(model.config, None, rngs=nnx.Rngs(number))
    return model


KERNELS = {
    "heads-tp": (MixedHeads, lambda: tensor_parallel("transformer"), "tp=2"),
    "heads-dp": (MixedHeads, ddp, "dp=2"),
    "samples-tp": (MixedSamples, lambda: tensor_parallel("transformer"), "tp=2"),
    "samples-dp": (MixedSamples, ddp, "dp=2"),
    "heads-pp": (
        MixedHeads,
        lambda: compose(tensor_parallel("transformer"), pipelined(2, 2)),
        "pp=2,tp=2",
    ),
}
WRONG_AS_KERNEL = ("heads-tp", "samples-dp", "heads-pp")


@pytest.mark.sample("heads-tp-flash")
@pytest.mark.parametrize("form", ["auto", "flash"])
@pytest.mark.parametrize("row", KERNELS)
def test_attention_of_ones_own_runs_as_a_kernel_only_if_nothing_is_mixed(row, form):
    kind, make, axes = KERNELS[row]
    num_layers = 2 if "pp" in axes else 1
    run = functools.partial(compare, lambda: attending(kind, form, num_layers), make(), axes)
    if form == "flash" and row in WRONG_AS_KERNEL:
        with pytest.raises(UnsupportedError, match=rf"{kind.__name__}\.attend .*form='einsum'"):
            run()
    else:
        run()


def twice(*arrays, dtype=None, **options):
    return tuple(2 * x for x in arrays)


class Bridged(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        return nn.Dense(64)(nn.Embed(64, 16, name="embed", promote_dtype=twice)(tokens))


def test_a_linen_lookup_with_its_own_promotion_is_called_as_it_is():
    def make():
        return nnx.bridge.ToNNX(Bridged(), rngs=nnx.Rngs(0)).lazy_init(TOKENS[:, :-1])

    compare(make, tensor_parallel({"embed$": "vocab"}), "tp=2")


class Offset(nnx.Embed):
    def __call__(self, ids):
        return 2 * super().__call__((ids + 3) % 64)

    def attend(self, x):
        return 0.5 * super().attend(x)


class Tied(nnx.Module):
    def __init__(self):
        self.embed = Offset(64, 16, rngs=nnx.Rngs(0))

    def __call__(self, tokens):
        return self.embed.attend(self.embed(tokens))


def test_a_lookup_that_changes_its_ids_is_not_split():
    compare(Tied, tensor_parallel({"embed$": "vocab"}), "tp=2")


class RaisingBeforeHead(OwnBeforeHead):
    def before_head(self, tokens):
        if tokens.shape[0] == 1:
            raise ValueError("at least two samples")
        return super().before_head(tokens)


def test_a_before_head_that_cannot_be_compared_is_not_used_and_a_warning_says_why():
    with pytest.warns(UserWarning, match=r"before_head .* raises ValueError \(at least two samp"):
        compare(lambda: RaisingBeforeHead(0.5), ddp(), "dp=2", loss=next_token_loss)


class OwnAuxiliary(OwnBeforeHead):
    def auxiliary(self):
        return 1.0


class OtherBeforeHead(OwnBeforeHead):
    def before_head(self, tokens):
        return self.hidden(tokens)


def test_methods_of_other_meaning_are_told_what_the_loss_reads():
    with pytest.raises(ConfigError, match=r"OwnAuxiliary.auxiliary returned a float; .*pair of a"):
        next_token_loss(OwnAuxiliary(), BATCH)
    with pytest.raises(ConfigError, match=r"before_head returned a \w+; it must return a"):
        next_token_loss(OtherBeforeHead(), BATCH)


class DroppingBeforeHead(OwnBeforeHead):
    def __init__(self, factor=1.0):
        super().__init__(factor)
        self.dropout = nnx.Dropout(0.5, rngs=nnx.Rngs(1))

    def hidden(self, tokens):
        return self.dropout(super().hidden(tokens))


def test_a_before_head_with_dropout_is_compared():
    for factor in (1.0, 0.5):
        model = DroppingBeforeHead(factor)

        def loss(model):
            return next_token_loss(model, BATCH).mean

        if factor == 1:
            assert jnp.isfinite(nnx.jit(loss)(model))
        else:
            with pytest.raises(UnsupportedError, match="differs from this by"):
                nnx.jit(loss)(model)


def generated(model, prompts, count):
    """Takes the most likely token `count` times; rows have one length, so one program runs."""
    call = nnx.jit(lambda model, tokens: model(tokens))
    length = max(map(len, prompts)) + count
    rows = []
    for prompt in prompts:
        row = list(prompt)
        for _ in range(count):
            # The models are causal: what follows a token does not change its logits.
            tokens = np.pad(row, (0, length - len(row)))[None]
            row.append(int(jnp.argmax(call(model, tokens)[0, len(row) - 1])))
        rows.append(row[len(prompt) :])
    return rows


class Negated(Transformer):
    def __call__(self, tokens, segments=None):
        return -super().__call__(tokens, segments)


class Windowed(SelfAttention):
    def attend(self, query, key, value, segments=None):
        return einsum_attention(query, key, value, segments=segments, window=2)


class Renamed(SelfAttention):
    def attend(self, query, key, value, segments=None):
        return einsum_attention(query, key, value, segments=segments)


GENERATED = {
    "call": lambda: Negated(config(), rngs=nnx.Rngs(0)),
    "attend": lambda: attending(Windowed, "einsum"),
    "same": lambda: attending(Renamed, "einsum"),
    "flax": lambda: with_mlp(lambda rngs: nnx.Linear(16, 16, rngs=rngs)),
    **MIXING,
}


def sharp(make):
    """With larger logits, so that a difference in the layers changes the likeliest tokens."""
    model = drawn(make)
    kernel = model.token_embedding.embedding if model.config.tied_head else model.lm_head.kernel
    kernel[...] *= 20
    return model


@pytest.mark.sample("attend")
@pytest.mark.parametrize("kind", GENERATED)
def test_generating_gives_the_tokens_of_the_models_call(kind, recwarn):
    model = sharp(GENERATED[kind])
    prompts = [[1, 2, 3], [4]]
    got = generate(model, prompts, 4, temperature=0).rows
    assert got == generated(model, prompts, 4)
    warned = [str(each.message) for each in recwarn]
    assert any("inherits decode" in text for text in warned) == (kind not in ("same", "flax"))


@pytest.mark.full
def test_new_tokens_are_decoded_as_called_also_where_the_first_of_them_does_not_show_it(recwarn):
    """Behind one token, a shift by two reads nothing yet when the first new token is decoded."""

    class Earlier(nnx.Conv):
        def __call__(self, x):
            return jnp.pad(x, ((0, 0), (2, 0), (0, 0)))[:, : x.shape[1]]

    model = sharp(lambda: with_mlp(lambda rngs: Earlier(16, 16, (3,), rngs=rngs)))
    assert generate(model, [[4]], 6, temperature=0).rows == generated(model, [[4]], 6)
    assert any("read several positions: Earlier." in str(each.message) for each in recwarn)


def test_a_comparison_says_why_it_could_not_run():
    weight = jnp.ones((8, 8))

    def deep(x):
        for _ in range(8):
            x = jnp.tanh(x @ weight)
        return x

    def raises(x):
        raise KeyError("speed")

    shape = [jax.ShapeDtypeStruct((2, 8), jnp.float32)]
    assert compare_functions(deep, deep, shape).is_equal
    assert compare_functions(lambda x: deep(x) + deep(x), lambda x: 2 * deep(x), shape).is_equal
    differs = compare_functions(lambda x: 1.01 * deep(x), deep, shape)
    assert not differs.is_equal
    assert "differs from this by" in differs.why
    low = compare_functions(
        lambda x: x.astype("bfloat16") + 1, lambda x: x.astype("bfloat16"), shape
    )
    assert low.was_run
    key = jax.random.key(0)
    for one, why in (
        (raises, r"it raises KeyError ('speed') on arrays of float32[2, 8]"),
        (lambda x: x + jax.random.normal(key), "random numbers are drawn"),
        (lambda x: x.astype("complex64"), "not real numbers"),
    ):
        found = compare_functions(one, deep, shape)
        assert (found.is_equal, found.was_run) == (False, False)
        assert why in found.why
    assert "the latter raises" in compare_functions(deep, raises, shape).why


class OwnNorm(nnx.BatchNorm):
    def __call__(self, x, *args, **kwargs):
        mean, var = x.mean((0, 1)), x.var((0, 1))
        return (x - mean) * jax.lax.rsqrt(var + 0.1) * self.scale[...]


class Normed(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.embed, self.norm = nnx.Embed(64, 16, rngs=rngs), OwnNorm(16, rngs=rngs)
        self.head = nnx.Linear(16, 64, rngs=rngs)

    def __call__(self, tokens):
        return self.head(self.norm(self.embed(tokens)))


def test_a_batch_norm_of_ones_own_sees_the_whole_batch():
    compare(Normed, ddp(), "dp=2")


class Masked(nnx.Module):
    """Attention that takes its mask as an argument, and gives its heads in one dim."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.embed, self.qkv = nnx.Embed(64, 16, rngs=rngs), nnx.Linear(16, 48, rngs=rngs)
        self.out, self.head = nnx.Linear(16, 16, rngs=rngs), nnx.Linear(16, 64, rngs=rngs)

    def attend(self, query, key, value, mask=None):
        mixed = nnx.dot_product_attention(query, key, value, mask=mask)
        return mixed.reshape(*mixed.shape[:2], -1)

    def __call__(self, tokens):
        x = self.embed(tokens)
        heads = (y.reshape(*y.shape[:2], 2, 8) for y in jnp.split(self.qkv(x), 3, axis=-1))
        mask = jnp.tril(jnp.ones((tokens.shape[1],) * 2, bool))
        return self.head(x + self.out(self.attend(*heads, mask=mask)))


@pytest.mark.full
def test_a_plan_is_suggested_for_attention_of_another_form():
    tokens = TOKENS[:, :-1]
    plan = suggest_plan(Masked, tokens)
    compare(Masked, tensor_parallel(plan), "tp=2")


def test_functions_that_differ_in_a_constant_of_an_inner_program_are_not_the_same():
    def scaled(factor):
        return jax.jit(lambda x: jax.jit(lambda x: x * factor)(x))

    shape = [jax.ShapeDtypeStruct((2,), jnp.float32)]
    one, two = jnp.array([1.0, 2.0]), jnp.array([3.0, 4.0])
    assert compare_functions(scaled(one), scaled(one), shape).is_equal
    assert not compare_functions(scaled(one), scaled(two), shape).is_equal


@pytest.mark.parametrize("dtype", [jnp.int8, jnp.uint8, jnp.int32])
def test_functions_of_integers_are_compared_on_more_than_zero_and_one(dtype):
    shape = [jax.ShapeDtypeStruct((8, 4), dtype)]

    def scaled(x):
        x = x.astype(jnp.float32)
        return x / jnp.max(jnp.abs(x))

    def scaled_in_blocks(x):
        return jnp.concatenate([scaled(x[:, :2]), scaled(x[:, 2:])], axis=1)

    assert compare_functions(scaled, lambda x: scaled(x) * 1, shape).is_equal
    assert not compare_functions(scaled, scaled_in_blocks, shape).is_equal
    assert not compare_functions(lambda x: x, lambda x: jnp.clip(x, 0, 1), shape).is_equal
    assert not compare_functions(lambda x: 1.0 * x, lambda x: 1.0 * x * x, shape).is_equal


def test_functions_of_indices_are_compared_in_bounds():
    table = jax.random.normal(jax.random.key(0), (2, 4))
    shape = [jax.ShapeDtypeStruct((8,), jnp.int32)]
    looked_up = lambda ids: jnp.take(table, ids, axis=0)
    multiplied = lambda ids: jax.nn.one_hot(ids, 2) @ table
    assert compare_functions(looked_up, multiplied, shape).is_equal
    assert not compare_functions(looked_up, lambda ids: 2 * multiplied(ids), shape).is_equal
