"""Your own model: trained over 8 devices, saved, loaded as a plain module, and asked to go on.

python examples/08_your_own_model.py
"""

import tempfile
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from axon_dist import FSDP, Trainer, World, build_train_step, load_checkpoint, save_checkpoint
from axon_dist.models import generate, next_token_loss
from axon_dist.train.loop import LoopOptions

WEEK = "monday tuesday wednesday thursday friday saturday sunday "
LENGTH = 64
world = World.emulate(8, "fsdp=8")


class Block(nnx.Module):
    """Attention and a feed-forward, from the layers of Flax."""

    def __init__(self, width, rngs):
        self.norms = nnx.List([nnx.LayerNorm(width, rngs=rngs) for _ in range(2)])
        self.attention = nnx.MultiHeadAttention(4, width, decode=False, rngs=rngs)
        self.up = nnx.Linear(width, 4 * width, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, rngs=rngs)

    def __call__(self, x):
        mask = jnp.tril(jnp.ones((x.shape[1], x.shape[1]), bool))
        x = x + self.attention(self.norms[0](x), mask=mask)
        return x + self.down(nnx.gelu(self.up(self.norms[1](x))))


class Speller(nnx.Module):
    """Maps bytes [B, T] to logits [B, T, 128]; written for one device."""

    def __init__(self, rngs, width=32):
        self.letters = nnx.Embed(128, width, rngs=rngs)
        self.places = nnx.Embed(LENGTH, width, rngs=rngs)
        self.blocks = nnx.List([Block(width, rngs) for _ in range(2)])
        self.head = nnx.Linear(width, 128, rngs=rngs)

    def __call__(self, tokens):
        x = self.letters(tokens) + self.places(jnp.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def batches():
    """Pieces of an endless week."""
    text, random = np.frombuffer((WEEK * 9).encode(), np.uint8), np.random.default_rng(0)
    while True:
        starts = random.integers(0, len(WEEK), 32)
        yield {"tokens": text[starts[:, None] + np.arange(LENGTH + 1)].astype(np.int32)}


def main() -> None:
    """Trains, saves, loads the parameters alone, and generates."""
    model = Speller(nnx.Rngs(0))
    fsdp = FSDP(model, world.group("fsdp"), min_elements=512)
    step = build_train_step(model, optax.adam(3e-3), next_token_loss, fsdp, world)
    path = Path(tempfile.mkdtemp(), "last")
    trainer = Trainer(
        step=step,
        batches=batches(),
        options=LoopOptions(num_steps=120, log_every=40),
        save=lambda state, number, loss: save_checkpoint(path, state),
    )
    for number, loss in trainer.fit().train_curve:
        print(f"step {number}: loss {loss:.4f}")

    plain = Speller(nnx.Rngs(1))  # on one device, without optimizer or mesh
    params = nnx.to_pure_dict(nnx.state(plain, nnx.Param))
    loaded = load_checkpoint(path, {"params": params}, parts=("params",))
    nnx.update(plain, loaded["params"])
    prompts = ["wednesday ", "sun"]
    found = generate(plain, [list(prompt.encode()) for prompt in prompts], 24, temperature=0)
    for prompt, row in zip(prompts, found.rows, strict=True):
        print(f"{prompt!r} goes on with {bytes(row).decode()!r}")


if __name__ == "__main__":
    main()
