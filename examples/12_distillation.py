"""Distillation: a small model learns what a large, frozen one predicts.

python examples/12_distillation.py

One module holds both; `trainable="student"` trains one of them. The teacher is kept in bfloat16
and divided over the devices as the student is, so that it may be larger than a device.

Source: Hinton et al., Distilling the Knowledge in a Neural Network, arXiv:1503.02531.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from axon_dist import World, build_train_step, fsdp
from axon_dist.models import Transformer, TransformerConfig

TEMPERATURE = 2.0


def transformer(width: int, num_layers: int, seed: int) -> Transformer:
    """A decoder over 64 tokens."""
    config = TransformerConfig(
        vocab_size=64, width=width, num_layers=num_layers, num_heads=4, max_length=32
    )
    return Transformer(config, rngs=nnx.Rngs(seed))


class Lesson(nnx.Module):
    """A teacher, whose random weights represent trained ones, and a student."""

    def __init__(self):
        self.teacher = transformer(64, 4, seed=0)
        self.student = transformer(32, 2, seed=1)


def distillation_loss(lesson: Lesson, batch: dict) -> tuple[jax.Array, dict]:
    """T^2 KL(teacher || student), both softened by a temperature T, as a mean over tokens."""
    soften = lambda logits: jax.nn.log_softmax(logits.astype(jnp.float32) / TEMPERATURE)
    teacher = jax.lax.stop_gradient(soften(lesson.teacher(batch["tokens"])))
    student = soften(lesson.student(batch["tokens"]))
    divergence = jnp.sum(jnp.exp(teacher) * (teacher - student), -1)
    agree = jnp.argmax(teacher, -1) == jnp.argmax(student, -1)
    return TEMPERATURE**2 * jnp.mean(divergence), {"agree": jnp.mean(agree)}


def main() -> None:
    """Trains the student on eight devices."""
    world = World.emulate(8, "fsdp=8")
    draw = np.random.default_rng(0)
    batch_of = lambda: {"tokens": draw.integers(0, 64, (16, 32)).astype(np.int32)}
    step = build_train_step(
        Lesson, optax.adam(1e-2), distillation_loss, fsdp(min_elements=64), world,
        trainable="student", frozen_dtype="bfloat16", batch=batch_of(),
    )  # fmt: skip
    state = step.init()
    for number in range(61):
        state, metrics = step(state, batch_of())
        if number % 20 == 0:
            loss, agree = (float(metrics[name]) for name in ("loss", "agree"))
            print(f"step {number:2}: divergence {loss:.3f}, same next token in {agree:.0%}")


if __name__ == "__main__":
    main()
