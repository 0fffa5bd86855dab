"""Models as other people write them: other names, other layouts, nothing of ours."""

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx


class GPT(nnx.Module):
    """In the manner of GPT-2: learned positions, one kernel for q, k and v, tied head."""

    def __init__(self, cut, rngs):
        self.wte = nnx.Embed(32, 32, rngs=rngs)
        self.wpe = nnx.Embed(16, 32, rngs=rngs)
        self.h = nnx.List(GPTBlock(cut, rngs) for _ in range(2))
        self.ln_f = nnx.LayerNorm(32, rngs=rngs)

    def __call__(self, tokens):
        x = self.wte(tokens) + self.wpe(jnp.arange(tokens.shape[1]))
        for block in self.h:
            x = block(x)
        return self.wte.attend(self.ln_f(x))


class GPTBlock(nnx.Module):
    def __init__(self, cut, rngs):
        self.ln_1, self.ln_2 = nnx.LayerNorm(32, rngs=rngs), nnx.LayerNorm(32, rngs=rngs)
        self.c_attn, self.c_proj = nnx.Linear(32, 96, rngs=rngs), nnx.Linear(32, 32, rngs=rngs)
        self.c_fc, self.c_out = nnx.Linear(32, 64, rngs=rngs), nnx.Linear(64, 32, rngs=rngs)
        self.cut = cut

    def __call__(self, x):
        q, k, v = CUTS[self.cut](self.c_attn(self.ln_1(x)))
        mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        x = x + self.c_proj(mixed.reshape(x.shape))
        return x + self.c_out(nnx.gelu(self.c_fc(self.ln_2(x))))


def heads(x):
    return x.reshape(*x.shape[:2], 4, 8)


CUTS = {
    "slices": lambda qkv: [heads(x) for x in jnp.split(qkv, 3, axis=-1)],
    "reshape": lambda qkv: [qkv.reshape(*qkv.shape[:2], 3, 4, 8)[:, :, i] for i in range(3)],
    "per_head": lambda qkv: jnp.split(qkv.reshape(*qkv.shape[:2], 4, 24), 3, axis=-1),
}


class Decoder(nnx.Module):
    """Bare parameters and einsums: grouped queries, a gated feed-forward in one kernel."""

    def __init__(self, rngs):
        init = lambda *shape: nnx.Param(0.1 * jax.random.normal(rngs.params(), shape))
        self.vocabulary = init(32, 32)
        self.ask, self.answer = init(32, 4, 8), init(4, 8, 32)
        self.keys, self.contents = init(32, 2, 8), init(32, 2, 8)
        self.expand, self.contract = init(32, 128), init(64, 32)
        self.gain = nnx.Param(jnp.ones(32))
        self.predict = init(32, 32)

    def norm(self, x):
        return x / jnp.sqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-5) * self.gain[...]

    def __call__(self, tokens):
        x = self.vocabulary[...][tokens]
        y = self.norm(x)
        q = jnp.einsum("btd,dhk->bthk", y, self.ask[...])
        k, v = (jnp.einsum("btd,dnk->btnk", y, w[...]) for w in (self.keys, self.contents))
        k, v = (jnp.repeat(heads, 2, axis=2) for heads in (k, v))
        weights = jax.nn.softmax(jnp.einsum("bthk,bshk->bhts", q, k) / 3.0)
        x = x + jnp.einsum("bhts,bshk,hkd->btd", weights, v, self.answer[...])
        gate, up = jnp.split(self.norm(x) @ self.expand[...], 2, axis=-1)
        x = x + (jax.nn.silu(gate) * up) @ self.contract[...]
        return self.norm(x) @ self.predict[...]


class LinenBlock(nn.Module):
    """A Linen encoder block, to be bridged."""

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(16)(x)
        x = x + nn.SelfAttention(4)(nn.LayerNorm()(x))
        y = nn.gelu(nn.Dense(32)(nn.LayerNorm()(x)))
        return x + nn.Dense(16)(y)


def bridged():
    """The Linen block as an NNX module."""
    return nnx.bridge.ToNNX(LinenBlock(), rngs=nnx.Rngs(0)).lazy_init(jnp.ones((1, 8, 16)))
