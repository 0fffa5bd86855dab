"""A model with experts in a list, as others write them, in the ways in which they are added up."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from .models import Case

EXPERTS, WIDTH, HIDDEN, FEATURES = 4, 16, 32, 8


class FeedForward(nnx.Module):
    """Two matrices with biases."""

    def __init__(self, rngs, hidden=HIDDEN):
        self.up = nnx.Linear(WIDTH, hidden, rngs=rngs)
        self.down = nnx.Linear(hidden, WIDTH, rngs=rngs)

    def __call__(self, x):
        return self.down(nnx.gelu(self.up(x)))


def loop(layer, x, gates):
    """Adds up in a loop, slices of the gates times the experts."""
    y = 0
    for number, expert in enumerate(layer.experts):
        y = y + gates[..., number : number + 1] * expert(x)
    return x + y


def stacked(layer, x, gates):
    """Stacks what the experts give, for an einsum with the gates."""
    made = jnp.stack([expert(x) for expert in layer.experts], axis=-2)
    return x + jnp.einsum("...e,...ed->...d", gates, made)


def chosen(layer, x, gates):
    """The two best experts of each token, added to what goes by them and to a constant."""
    best, which = jax.lax.top_k(gates, 2)
    y = x
    for number, expert in enumerate(layer.experts):
        gate = jnp.sum(jnp.where(which == number, best, 0.0), -1)
        y = y + (expert(x) + 0.5) * gate[..., None] / jnp.sum(best, -1, keepdims=True)
    return y


def picked(layer, x, gates):
    """The best expert of each token, taken out of all."""
    which = jnp.argmax(gates, -1)[..., None]
    made = jnp.stack([expert(x) for expert in layer.experts], axis=-2)
    mine = jnp.take_along_axis(made, which[..., None], axis=-2)[..., 0, :]
    return x + mine * jnp.take_along_axis(gates, which, axis=-1)


def flat(layer, x, gates):
    """Of all tokens in a row."""
    rows, weights = x.reshape(-1, WIDTH), gates.reshape(-1, EXPERTS)
    made = [expert(rows) * weights[:, n, None] for n, expert in enumerate(layer.experts)]
    return x + sum(made).reshape(x.shape)


MIXES = {mix.__name__: mix for mix in (loop, stacked, chosen, picked, flat)}


class Mixture(nnx.Module):
    """A router, and experts in a list."""

    def __init__(self, mix, rngs, make=FeedForward):
        self.router = nnx.Linear(WIDTH, EXPERTS, rngs=rngs)
        self.experts = nnx.List([make(rngs) for _ in range(EXPERTS)])
        self.mix = mix

    def __call__(self, x):
        return self.mix(self, x, nnx.softmax(self.router(x)))


class Attending(nnx.Module):
    """A mixture of what attention gives."""

    def __init__(self, mix, rngs, make):
        self.attention = nnx.MultiHeadAttention(2, WIDTH, decode=False, rngs=rngs)
        self.mixture = Mixture(mix, rngs, make)

    def __call__(self, x):
        return self.mixture(x + self.attention(x))


class Listed(nnx.Module):
    """Mixtures one after another."""

    def __init__(self, mix, num_layers=2, make=FeedForward, attends=False):
        rngs, kind = nnx.Rngs(0), Attending if attends else Mixture
        self.inner = nnx.Linear(FEATURES, WIDTH, rngs=rngs)
        self.blocks = nnx.List([kind(mix, rngs, make) for _ in range(num_layers)])
        self.outer = nnx.Linear(WIDTH, 4, rngs=rngs)

    def __call__(self, x):
        x = jnp.tanh(self.inner(x))
        for block in self.blocks:
            x = block(x)
        return self.outer(x)


def sequences(step, samples=16, positions=4):
    """Sequences of features, and what they shall become."""
    x = np.random.default_rng(step).normal(size=(samples, positions, FEATURES)).astype(np.float32)
    return {"x": x, "y": np.sin(x[..., :4])}


def square(model, batch):
    """The mean squared difference."""
    return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)


def listed(mix, **options):
    """The case of a model whose experts are added up in one of `MIXES`."""
    return Case(lambda: Listed(MIXES[mix], **options), square, sequences)
