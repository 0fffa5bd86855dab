"""Methods that the library computes in another way: the user's own are what trains, or refused."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from axon_dist import World, build_train_step
from axon_dist.core.errors import UnsupportedError
from axon_dist.core.same_function import is_from
from axon_dist.models import Transformer, TransformerConfig
from axon_dist.models.experts import ExpertConfig, Experts
from axon_dist.models.layers import SelfAttention
from axon_dist.models.loss import cross_entropy, next_token_loss
from axon_dist.parallel import context_parallel, ddp, expert_parallel

TOKENS = np.random.default_rng(0).integers(0, 64, (4, 17)).astype(np.int32)
BATCH = {"tokens": TOKENS}
SIZES = dict(vocab_size=64, width=16, num_layers=2, num_heads=2, ffn_width=16, max_length=32)


def config(**more):
    return TransformerConfig(**{**SIZES, **more})


def whole(model, batch):
    """The loss of all logits, in plain JAX."""
    logits = model(batch["tokens"][:, :-1])
    return jnp.mean(cross_entropy(logits, batch["tokens"][:, 1:]))


def compare(make, strategy, axes, loss=whole, batch=BATCH, want=whole, **options):
    world = World.emulate(2, axes)
    step = build_train_step(make, optax.sgd(0.1), loss, strategy, world, batch=batch, **options)
    state, metrics = step(step.init(), batch)
    model = make()
    expected, grads = nnx.value_and_grad(want)(model, batch)
    np.testing.assert_allclose(metrics["loss"], expected, rtol=1e-5)
    _, params, _ = nnx.split(model, nnx.Param, ...)
    params = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
    for path, leaf in nnx.to_flat_state(params):
        got = functools.reduce(lambda tree, key: tree[key], path, state.params)
        np.testing.assert_allclose(got, leaf[...], rtol=1e-4, atol=1e-6)


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
    model = kind(config(logits="chunked", tied_head=False), rngs=nnx.Rngs(0))
    loss = nnx.jit(next_token_loss)(model, BATCH)
    np.testing.assert_allclose(loss.mean, whole(model, BATCH), rtol=1e-5)


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
        UnsupportedError, match=r"what OwnBeforeHead.before_head returns differs from this by"
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


ORDERED = {
    "index": lambda: Positioned(config(), rngs=nnx.Rngs(0)),
    "shift": lambda: shifted(config(), nnx.Rngs(0)),
}


@pytest.mark.sample("shift")
@pytest.mark.parametrize("kind", ORDERED)
def test_a_ring_leaves_the_order_to_models_that_read_it(kind):
    compare(ORDERED[kind], context_parallel("ring"), "cp=2")


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


def mixture(kind):
    more = {"experts": ExpertConfig(count=4, per_token=2, balance=0.0)}
    model = Transformer(config(**more), rngs=nnx.Rngs(0))
    for number, block in enumerate(model.blocks):
        block.mlp = kind(model.config, rngs=nnx.Rngs(number))
    return model


@pytest.mark.sample("Scaled", "Mean")
@pytest.mark.parametrize("kind", [Scaled, Mean, OwnFeed, RowsFeed], ids=lambda x: x.__name__)
def test_experts_of_ones_own_train_as_written(kind):
    compare(lambda: mixture(kind), ddp(), "dp=2")


@pytest.mark.sample("Scaled")
@pytest.mark.parametrize("kind", [Scaled, Mean, RowsFeed, OwnFeed], ids=lambda x: x.__name__)
def test_split_experts_are_the_users_or_refused(kind):
    run = functools.partial(compare, lambda: mixture(kind), expert_parallel(), "ep=2")
    if kind is OwnFeed:
        run()
    else:
        with pytest.raises(UnsupportedError, match=rf"{kind.__name__}.mix_experts .* other"):
            run()
