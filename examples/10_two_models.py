"""Two models with optimizers and losses of their own: a GAN whose parts take turns.

python examples/10_two_models.py

One module holds both. A step trains the variables that it is told to and leaves the rest frozen, so
that two steps over the same module are the two halves of one: what one has trained, the other reads
as frozen. Each part is divided over all devices in both.
"""

import dataclasses
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from axon_dist import World, build_train_step, fsdp

NOISE, HIDDEN = 8, 64


def layers(inputs: int, outputs: int, rngs: nnx.Rngs) -> nnx.Sequential:
    """Three layers, with a bend between each two."""
    sizes = itertools.pairwise((inputs, HIDDEN, HIDDEN, outputs))
    first, second, third = (nnx.Linear(a, b, rngs=rngs) for a, b in sizes)
    return nnx.Sequential(first, nnx.leaky_relu, second, nnx.leaky_relu, third)


class Pair(nnx.Module):
    """A generator of points in the plane, and a critic that tells them from real ones."""

    def __init__(self, rngs: nnx.Rngs):
        self.generator = layers(NOISE, 2, rngs)
        self.critic = layers(2, 1, rngs)


def critic_loss(pair: Pair, batch: dict) -> jax.Array:
    """Real points should score high, made ones low."""
    real, made = pair.critic(batch["real"]), pair.critic(pair.generator(batch["noise"]))
    return jnp.mean(nnx.softplus(-real) + nnx.softplus(made))


def generator_loss(pair: Pair, batch: dict) -> jax.Array:
    """Made points should score high."""
    return jnp.mean(nnx.softplus(-pair.critic(pair.generator(batch["noise"]))))


def draw(random: np.random.Generator, size: int = 256) -> dict:
    """Real points lie around a ring of radius 2."""
    angles = random.uniform(0, 2 * np.pi, size)
    ring = 2 * np.stack([np.cos(angles), np.sin(angles)], 1)
    real = ring + 0.1 * random.normal(size=(size, 2))
    noise = random.normal(size=(size, NOISE))
    return {"real": real.astype(np.float32), "noise": noise.astype(np.float32)}


def main() -> None:
    """Trains both parts in turns on eight devices, and shows where the made points come to lie."""
    world = World.emulate(8, "fsdp=8")
    build = lambda part, loss, ema: build_train_step(
        lambda: Pair(nnx.Rngs(0)), optax.adam(2e-3, b1=0.5), loss, fsdp(), world,
        trainable=part, ema=ema,
    )  # fmt: skip
    criticise = build("critic", critic_loss, None)
    generate = build("generator", generator_loss, 0.98)
    critic, generator = criticise.init(), generate.init()
    random = np.random.default_rng(0)
    for number in range(301):
        batch = draw(random)
        # A step gives its arrays to the next state, so that what the other reads is a copy.
        hand_over = lambda params: jax.tree.map(jnp.copy, params)
        critic = dataclasses.replace(critic, frozen=hand_over(generator.params))
        critic, told = criticise(critic, batch)
        generator = dataclasses.replace(generator, frozen=hand_over(critic.params))
        generator, made = generate(generator, batch)
        if number % 100 == 0:
            pair: Any = generate.merge(generator, ema=True)
            points = pair.generator(batch["noise"])
            radius = np.linalg.norm(np.asarray(points), axis=1)
            print(
                f"step {number:3}: critic {float(told['loss']):.3f}, "
                f"generator {float(made['loss']):.3f}, radius {radius.mean():.2f} of 2"
            )


if __name__ == "__main__":
    main()
