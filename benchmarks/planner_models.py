"""Nine kinds of models for `benchmarks.planner`: ours, and what a user might bring."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from axon_dist.models import (
    ExpertConfig,
    ResNet,
    ResNetConfig,
    Transformer,
    TransformerConfig,
    ViT,
    ViTConfig,
    classification_loss,
    next_token_loss,
)


@dataclasses.dataclass(frozen=True)
class Subject:
    """A model with its loss and its samples.

    Args:
        make: makes the model.
        loss_fn: of a model and a batch.
        sample: shape and dtype of each leaf of a batch, for one sample.
        rows: samples that a device has in a step.
    """

    make: Callable[[], nnx.Module]
    loss_fn: Any
    sample: dict[str, tuple[tuple[int, ...], Any]]
    rows: int

    def batch(self, rows: int) -> dict[str, jax.ShapeDtypeStruct]:
        """The shapes of a batch."""
        return {
            name: jax.ShapeDtypeStruct((rows, *shape), dtype)
            for name, (shape, dtype) in self.sample.items()
        }


class Mixing(nnx.Module):
    """A block of an MLP-Mixer: over positions, then over channels."""

    def __init__(self, positions: int, width: int, rngs: nnx.Rngs):
        self.norms = nnx.List([nnx.LayerNorm(width, rngs=rngs) for _ in range(2)])
        self.across = nnx.List(
            [
                nnx.Linear(positions, 2 * positions, rngs=rngs),
                nnx.Linear(2 * positions, positions, rngs=rngs),
            ]
        )
        self.up = nnx.Linear(width, 4 * width, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps `[B, positions, width]` to the same."""
        y = self.norms[0](x).swapaxes(1, 2)
        x = x + self.across[1](nnx.gelu(self.across[0](y))).swapaxes(1, 2)
        return x + self.down(nnx.gelu(self.up(self.norms[1](x))))


class Mixer(nnx.Module):
    """Patches, mixing blocks and a mean: Tolstikhin et al., arXiv:2105.01601."""

    def __init__(self, rngs: nnx.Rngs, width: int = 512, depth: int = 8):
        self.stem = nnx.Conv(3, width, (16, 16), (16, 16), rngs=rngs)
        self.blocks = nnx.List([Mixing(196, width, rngs) for _ in range(depth)])
        self.head = nnx.Linear(width, 1000, rngs=rngs)

    def __call__(self, images: jax.Array) -> jax.Array:
        """Classifies images `[B, 224, 224, 3]`."""
        x = self.stem(images)
        x = x.reshape(x.shape[0], -1, x.shape[-1])
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


class Tower(nnx.Module):
    """Residual linear layers over vectors."""

    def __init__(self, rngs: nnx.Rngs, width: int = 2048, depth: int = 8):
        self.layers = nnx.List([nnx.Linear(width, width, rngs=rngs) for _ in range(depth)])

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps `[B, width]` to the same."""
        for layer in self.layers:
            x = x + jnp.tanh(layer(x))
        return x


class Recurrent(nnx.Module):
    """Two layers of GRUs over a sequence of vectors."""

    def __init__(self, rngs: nnx.Rngs, width: int = 512):
        cell = lambda: nnx.GRUCell(width, width, rngs=rngs)
        self.layers = nnx.List([nnx.RNN(cell(), rngs=rngs) for _ in range(2)])
        self.head = nnx.Linear(width, width, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps `[B, T, width]` to the same."""
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class UNet(nnx.Module):
    """Convolutions down and up again; the way up concatenates the results of the way down."""

    def __init__(self, rngs: nnx.Rngs, width: int = 32, depth: int = 4):
        conv = lambda a, b: nnx.Conv(a, b, (3, 3), rngs=rngs)
        sizes = [width * 2**i for i in range(depth)]
        self.down = nnx.List([conv(a, b) for a, b in zip([3, *sizes], sizes, strict=False)])
        self.norms = nnx.List([nnx.GroupNorm(size, 8, rngs=rngs) for size in sizes])
        self.up = nnx.List(
            [conv(a + b, b) for a, b in zip(sizes[::-1], sizes[-2::-1], strict=False)]
        )
        self.head = conv(width, 3)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps images `[B, H, W, 3]` to images."""
        kept = []
        for layer, norm in zip(self.down, self.norms, strict=True):
            x = nnx.silu(norm(layer(x)))
            kept.append(x)
            x = nnx.avg_pool(x, (2, 2), (2, 2))
        x = nnx.avg_pool(kept.pop(), (1, 1), (1, 1))
        for layer, skip in zip(self.up, reversed(kept), strict=True):
            x = jax.image.resize(x, (*skip.shape[:-1], x.shape[-1]), "nearest")
            x = nnx.silu(layer(jnp.concatenate([x, skip], -1)))
        return self.head(x)


def squares(model: Any, batch: Any) -> jax.Array:
    """The mean square of what a model misses."""
    return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)


GPT = TransformerConfig(
    vocab_size=4096, width=512, num_layers=8, num_heads=8, max_length=512, tied_head=True,
    norm="layer", positions="learned", gated=False, activation="gelu", bias=True,
)  # fmt: skip
LLAMA = TransformerConfig(
    vocab_size=32_768, width=512, num_layers=8, num_heads=8, num_kv_heads=4, max_length=1024
)
EXPERTS = dataclasses.replace(LLAMA, experts=ExpertConfig(count=8, per_token=2, width=512))
_TOKENS = lambda length: {"tokens": ((length + 1,), jnp.int32)}
_IMAGES = {"x": ((224, 224, 3), jnp.float32), "y": ((), jnp.int32)}
_PAIR = lambda *shape: {"x": (shape, jnp.float32), "y": (shape, jnp.float32)}

SUBJECTS: dict[str, Subject] = {
    "gpt": Subject(lambda: Transformer(GPT, rngs=nnx.Rngs(0)), next_token_loss, _TOKENS(512), 8),
    "llama": Subject(
        lambda: Transformer(LLAMA, rngs=nnx.Rngs(0)), next_token_loss, _TOKENS(1024), 4
    ),
    "experts": Subject(
        lambda: Transformer(EXPERTS, rngs=nnx.Rngs(0)), next_token_loss, _TOKENS(1024), 4
    ),
    "vit": Subject(
        lambda: ViT(
            ViTConfig(image_size=224, width=512, num_layers=8, num_heads=8, num_classes=1000),
            rngs=nnx.Rngs(0),
        ),
        classification_loss,
        _IMAGES,
        16,
    ),
    "resnet": Subject(
        lambda: ResNet(ResNetConfig.preset("resnet18"), rngs=nnx.Rngs(0)),
        classification_loss,
        _IMAGES,
        8,
    ),
    "mixer": Subject(lambda: Mixer(nnx.Rngs(0)), classification_loss, _IMAGES, 16),
    "tower": Subject(lambda: Tower(nnx.Rngs(0)), squares, _PAIR(2048), 4096),
    "recurrent": Subject(lambda: Recurrent(nnx.Rngs(0)), squares, _PAIR(256, 512), 32),
    "unet": Subject(lambda: UNet(nnx.Rngs(0)), squares, _PAIR(128, 128, 3), 16),
}
"""The models by name."""
