"""Preferences (DPO): adapters are trained against the same model with its adapters switched off.

python examples/11_preferences.py

One loss calls one model twice: as it is, the policy, and with zeros for its adapters, which is the
pretrained model, the reference. No second copy of the weights lies on any device.

Source: Rafailov et al., Direct Preference Optimization, arXiv:2305.18290.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from axon_dist import World, build_train_step, fsdp, lora
from axon_dist.models import Transformer, TransformerConfig

BETA = 0.5
CONFIG = TransformerConfig(vocab_size=64, width=32, num_layers=2, num_heads=4, max_length=32)


def adapted() -> nnx.Module:
    """A model with adapters on its attention; its weights represent pretrained ones."""
    return lora(Transformer(CONFIG, rngs=nnx.Rngs(0)), 4, "attention", rngs=nnx.Rngs(1))


def reference_of(policy: nnx.Module) -> nnx.Module:
    """The same model with its adapters switched off."""
    graph, adapters, rest = nnx.split(policy, nnx.LoRAParam, ...)
    return nnx.merge(graph, jax.tree.map(jnp.zeros_like, adapters), rest)


def log_probability(model: nnx.Module, tokens: jax.Array) -> jax.Array:
    """The log-probability that a model gives each sequence: [B, T] -> [B]."""
    log_probs = jax.nn.log_softmax(model(tokens[:, :-1]))
    chosen = jnp.take_along_axis(log_probs, tokens[:, 1:, None], axis=-1)
    return chosen[..., 0].sum(-1)


def dpo_loss(policy: nnx.Module, batch: dict) -> tuple[jax.Array, dict]:
    """-log sigmoid(beta * (log-ratio of the preferred answer - log-ratio of the other))."""
    reference = reference_of(policy)
    ratio = lambda tokens: (
        log_probability(policy, tokens) - jax.lax.stop_gradient(log_probability(reference, tokens))
    )
    margin = BETA * (ratio(batch["preferred"]) - ratio(batch["other"]))
    return -jnp.mean(jax.nn.log_sigmoid(margin)), {"preferred": jnp.mean(margin > 0)}


def batch_of(number: int) -> dict:
    """Pairs of answers: sequences that count upwards are preferred to those that count down."""
    draw = np.random.default_rng(number)
    first, steps = draw.integers(0, 64, (16, 1)), np.arange(17)
    return {
        "preferred": ((first + steps) % 64).astype(np.int32),
        "other": ((first - steps) % 64).astype(np.int32),
    }


def main() -> None:
    """Trains the adapters on eight devices."""
    world = World.emulate(8, "fsdp=8")
    step = build_train_step(
        adapted, optax.adam(5e-3), dpo_loss, fsdp(min_elements=64), world,
        trainable=nnx.LoRAParam, batch=batch_of(0),
    )  # fmt: skip
    state = step.init()
    for number in range(31):
        state, metrics = step(state, batch_of(number))
        if number % 10 == 0:
            loss, right = (float(metrics[name]) for name in ("loss", "preferred"))
            print(f"step {number:2}: loss {loss:.3f}, preferred in {right:.0%} of the pairs")


if __name__ == "__main__":
    main()
