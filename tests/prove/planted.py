"""Twenty differences planted in a transformer: in a layer, an operation, or a step."""

import jax
import jax.numpy as jnp
import numpy as np

from .parts import normal

LAYERS = 4
PARAMETERS = {
    "embed": 0.5 * normal(16, 8),
    "qkv": 0.3 * normal(LAYERS, 8, 24),
    "out": 0.3 * normal(LAYERS, 8, 8),
    "up": 0.3 * normal(LAYERS, 8, 16),
    "down": 0.3 * normal(LAYERS, 16, 8),
    "scale": 1.0 + 0.1 * normal(LAYERS, 8),
}
TOKENS = np.arange(24).reshape(2, 12).astype(np.int32) * 7 % 16
COUNT = np.zeros((), np.int32)


class Plant:
    """Which place is changed, in which layer, and from which step on."""

    def __init__(self, place=None, layer=0, step=1):
        self.place, self.layer, self.step = place, layer, step

    def __call__(self, place, value, changed, layer, count):
        """The value, or the changed one at the planted place."""
        if place != self.place or layer != self.layer:
            return value
        return jnp.where(count + 1 >= self.step, changed(value), value)


def block(w, x, layer, count, plant):
    def at(place, value, changed):
        return plant(place, value, changed, layer, count)

    norm = x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-5)
    norm = at("norm", norm * w["scale"], lambda v: v * 1.01)
    q, k, v = jnp.split(norm @ w["qkv"], 3, -1)
    scores = at("scores", q @ jnp.swapaxes(k, 1, 2) / np.sqrt(8), lambda s: s * 1.05)
    seen = jnp.tril(jnp.ones((x.shape[1], x.shape[1]), bool))
    weights = at("weights", jax.nn.softmax(jnp.where(seen, scores, -1e9)), jnp.square)
    mixed = at("mixed", weights @ v @ w["out"], lambda m: m + 0.01)
    x = x + mixed
    hidden = at("hidden", jax.nn.silu(x @ w["up"]), jnp.abs)
    return at("result", x + hidden @ w["down"], lambda r: r * 0.99)


def model(parameters, tokens, count, plant):
    x = parameters["embed"][tokens]
    layers = {name: value for name, value in parameters.items() if name != "embed"}
    for layer in range(len(parameters["qkv"])):
        own = {name: value[layer] for name, value in layers.items()}
        x = block(own, x, layer, count, plant)
    return x @ parameters["embed"].T


def train_step(plant):
    def step(count, parameters, tokens):
        def loss(parameters):
            scores = jax.nn.log_softmax(model(parameters, tokens[:, :-1], count, plant))
            return -jnp.take_along_axis(scores, tokens[:, 1:, None], -1).mean()

        grads = jax.grad(loss)(parameters)
        return count + 1, jax.tree.map(lambda p, g: p - 0.1 * g, parameters, grads)

    return step


PLACES = ("norm", "scores", "weights", "mixed", "hidden", "result")
PLANTS = [(place, layer, 1) for layer in (0, 1, 3) for place in PLACES][:16]
PLANTS += [("scores", 2, 2), ("hidden", 1, 3), ("norm", 0, 2), ("result", 3, 3)]
