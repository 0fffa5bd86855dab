"""A vision transformer in plain Flax NNX."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from ..core.checks import RNGS, checked, instance_of
from ..core.errors import ConfigError
from ..core.tree import wide
from ..core.typing import Array
from .attention import ATTENTION_FORMS
from .config import (
    Presets,
    check_above_zero,
    check_at_least_one,
    check_choice,
    check_floats,
    check_rate,
    numerics,
)
from .layers import dropout_layer, pixels

_B16 = {"patch_size": 16, "width": 768, "num_layers": 12, "num_heads": 12, "ffn_width": 3072}
_G14 = {"patch_size": 14, "width": 1408, "num_layers": 40, "num_heads": 16, "ffn_width": 6144}

VIT_PRESETS: MappingProxyType[str, Mapping[str, object]] = MappingProxyType(
    {
        "tiny": {
            "image_size": 16,
            "patch_size": 4,
            "num_classes": 10,
            "width": 32,
            "num_layers": 2,
            "num_heads": 4,
            "ffn_width": 64,
        },
        "b16": _B16,
        "l16": {**_B16, "width": 1024, "num_layers": 24, "num_heads": 16, "ffn_width": 4096},
        "g14": _G14,
        "1b": _G14,
    }
)
"""Named sizes: `b16` and `l16` of arXiv:2010.11929, table 1, and `g14` of arXiv:2106.04560, table
2, which has about a billion parameters. They use mean pooling instead of a class token."""


@dataclasses.dataclass(frozen=True)
class ViTConfig(Presets):
    """Sizes and numerics of a `ViT`.

    Args:
        image_size: height and width of an image, in pixels.
        patch_size: height and width of a patch; divides the image.
        channels: numbers per pixel.
        num_classes: number of logits.
        width: size of the residual stream.
        num_layers: number of blocks.
        num_heads: heads per block.
        ffn_width: hidden size of the feed-forward; None for 4 x width.
        dropout: rate on the embeddings and on the output of every residual branch, in [0, 1).
        norm_eps: added to the variance inside LayerNorm.
        param_dtype: dtype the parameters are created in.
        dtype: dtype of the matrix products; None for that of the parameters.
        attention: how attention is computed, see `axon_dist.models.attention`.

    Example:
        >>> config = ViTConfig.preset("b16")
        >>> config.num_patches, config.hidden_size
        (196, 3072)
    """

    image_size: int = 224
    patch_size: int = 16
    channels: int = 3
    num_classes: int = 1000
    width: int = 768
    num_layers: int = 12
    num_heads: int = 12
    ffn_width: int | None = None
    dropout: float = 0.0
    norm_eps: float = 1e-6
    param_dtype: str = "float32"
    dtype: str | None = None
    attention: str = "auto"

    presets: ClassVar[Mapping[str, Mapping[str, object]]] = VIT_PRESETS

    @property
    def num_patches(self) -> int:
        """The number of patches of an image, which are the positions of its sequence."""
        return (self.image_size // self.patch_size) ** 2

    @property
    def hidden_size(self) -> int:
        """The hidden size of the feed-forward, with the default resolved."""
        return 4 * self.width if self.ffn_width is None else self.ffn_width

    def validate(self) -> None:
        """Checks that the sizes are consistent.

        Raises:
            ConfigError: a size is not positive, patches or heads do not divide, or a name is
                unknown.
            DTypeError: a dtype is not a floating-point one.
        """
        sizes = ("image_size", "patch_size", "channels", "num_classes", "width", "num_layers")
        check_at_least_one(self, (*sizes, "num_heads", "hidden_size"))
        if self.image_size % self.patch_size:
            raise ConfigError(
                f"image_size={self.image_size} does not divide by patch_size={self.patch_size}: "
                "change one of them."
            )
        if self.width % self.num_heads:
            raise ConfigError(
                f"width={self.width} does not divide by num_heads={self.num_heads}: "
                "change one of them."
            )
        check_rate(self, "dropout")
        check_above_zero(self, ("norm_eps",))
        check_floats(self)
        check_choice("attention", self.attention, ATTENTION_FORMS, "a form of attention")


_CONFIG = instance_of(ViTConfig, "a ViTConfig, such as ViTConfig.preset('tiny')")


class ViT(nnx.Module):
    """A vision transformer: pre-norm blocks over image patches, then mean pooling.

    `logits = head(mean(norm(blocks(patches(image) + positions))))`, with bidirectional attention.
    Patches are cut by a reshape instead of a convolution, so that all products are matrix products.

    Args:
        config: the sizes; validated here.
        rngs: source of the initial weights (`params`) and of dropout.

    Raises:
        ConfigError: the sizes are inconsistent.
        DTypeError: a dtype of the config is not floating-point.

    Example:
        >>> def scores(images):
        ...     return ViT(ViTConfig.preset("tiny"), rngs=nnx.Rngs(0))(images)
        >>> nnx.eval_shape(scores, jnp.zeros((2, 16, 16, 3), jnp.uint8)).shape
        (2, 10)

    Source: Dosovitskiy et al., An Image is Worth 16x16 Words, arXiv:2010.11929.
    """

    @checked("ViT", config=_CONFIG, rngs=RNGS)
    def __init__(self, config: ViTConfig, *, rngs: nnx.Rngs):
        config.validate()
        self.config = config
        inputs = config.patch_size**2 * config.channels
        self.patch_embedding = _linear(config, inputs, config.width, rngs)
        draw = nnx.initializers.normal(0.02)
        shape = (config.num_patches, config.width)
        self.positions = nnx.Param(draw(rngs.params(), shape, jnp.dtype(config.param_dtype)))
        self.blocks = nnx.List(ViTBlock(config, rngs=rngs) for _ in range(config.num_layers))
        self.final_norm = _norm(config, rngs)
        self.head = _linear(config, config.width, config.num_classes, rngs)
        self.dropout = dropout_layer(config.dropout, rngs)

    def __call__(self, images: Array) -> Array:
        """Classifies images.

        Args:
            images: `[B, image_size, image_size, channels]`, bytes or floats around zero.

        Returns:
            Logits `[B, num_classes]`, float32.

        Raises:
            ConfigError: the images have another size.
        """
        x = self.embed(images)
        for block in self.blocks:
            x = block(x)
        x = jnp.mean(self.final_norm(x), axis=1)
        return wide(self.head(x))

    def example_inputs(self) -> tuple[jax.ShapeDtypeStruct]:
        """Returns the shape of two images, with which `suggest_plan` traces the model."""
        config = self.config
        shape = (2, config.image_size, config.image_size, config.channels)
        return (jax.ShapeDtypeStruct(shape, jnp.float32),)

    def embed(self, images: Array) -> Array:
        """Turns images `[B, H, W, C]` into the residual stream `[B, num_patches, width]`."""
        config = self.config
        want = (config.image_size, config.image_size, config.channels)
        if images.shape[1:] != want:
            raise ConfigError(
                f"images of {images.shape[1:]} (height, width, channels) for a model of {want}: "
                "change image_size and channels, or the images."
            )
        kernel = self.patch_embedding.kernel[...]
        patches = cut_patches(pixels(images, config.dtype or kernel.dtype), config.patch_size)
        x = self.patch_embedding(patches)
        return self.dropout(x + self.positions[...].astype(x.dtype)[None])


class ViTBlock(nnx.Module):
    """One pre-norm layer: `x += attention(norm(x))`, then `x += mlp(norm(x))`.

    Args:
        config: sizes and numerics.
        rngs: source of the initial weights and of dropout.
    """

    def __init__(self, config: ViTConfig, *, rngs: nnx.Rngs):
        self.attention_norm = _norm(config, rngs)
        self.attention: ViTAttention = ViTAttention(config, rngs=rngs)
        self.mlp_norm = _norm(config, rngs)
        self.mlp: ViTMLP = ViTMLP(config, rngs=rngs)
        self.dropout = dropout_layer(config.dropout, rngs)

    def __call__(self, x: Array) -> Array:
        """Maps the residual stream `[B, T, D]` to `[B, T, D]`."""
        x = x + self.dropout(self.attention(self.attention_norm(x)))
        return x + self.dropout(self.mlp(self.mlp_norm(x)))


class ViTAttention(nnx.Module):
    """Bidirectional self-attention, with `q`, `k`, `v` and `out` layers; all but `k` have biases.

    Keys have no bias, because softmax is invariant to it: its gradient would be pure rounding
    noise, which Adam would amplify.

    Args:
        config: sizes and numerics.
        rngs: source of the initial weights.
    """

    causal = False

    def __init__(self, config: ViTConfig, *, rngs: nnx.Rngs):
        self.q, self.k, self.v, self.out = (
            _linear(config, config.width, config.width, rngs, use_bias=name != "k")
            for name in ("q", "k", "v", "out")
        )
        self.head_dim = config.width // config.num_heads
        self.form = config.attention

    def __call__(self, x: Array) -> Array:
        """Maps `[B, T, D]` to `[B, T, D]`."""
        query = self._heads(self.q(x))
        key = self._heads(self.k(x))
        value = self._heads(self.v(x))
        return self.out(self.attend(query, key, value).reshape(*x.shape[:2], -1))

    def attend(self, query: Array, key: Array, value: Array) -> Array:
        """Computes attention with the implementation that the config selects."""
        return ATTENTION_FORMS[self.form](query, key, value, self.causal)

    def _heads(self, x: Array) -> Array:
        return x.reshape(*x.shape[:2], -1, self.head_dim)


class ViTMLP(nnx.Module):
    """The feed-forward `down(gelu(up(x)))`.

    Args:
        config: sizes and numerics.
        rngs: source of the initial weights.
    """

    def __init__(self, config: ViTConfig, *, rngs: nnx.Rngs):
        self.up = _linear(config, config.width, config.hidden_size, rngs)
        self.down = _linear(config, config.hidden_size, config.width, rngs)

    def __call__(self, x: Array) -> Array:
        """Maps `[..., D]` to `[..., D]`."""
        return self.down(nnx.gelu(self.up(x)))


def cut_patches(images: Array, size: int) -> Array:
    """Cuts images into square patches, row by row.

    Args:
        images: `[B, H, W, C]`, H and W multiples of the size.
        size: height and width of a patch, P.

    Returns:
        `[B, H/P * W/P, P * P * C]`.

    Example:
        >>> cut_patches(jnp.arange(16).reshape(1, 4, 4, 1), 2)[0, 1].tolist()
        [2, 3, 6, 7]
    """
    batch, height, width, channels = images.shape
    grid = images.reshape(batch, height // size, size, width // size, size, channels)
    return grid.swapaxes(2, 3).reshape(batch, -1, size * size * channels)


def _linear(
    config: ViTConfig, num_inputs: int, num_outputs: int, rngs: nnx.Rngs, use_bias: bool = True
) -> nnx.Linear:
    return nnx.Linear(
        num_inputs,
        num_outputs,
        use_bias=use_bias,
        **numerics(config),
        kernel_init=nnx.initializers.xavier_uniform(),
        rngs=rngs,
    )


def _norm(config: ViTConfig, rngs: nnx.Rngs) -> nnx.LayerNorm:
    return nnx.LayerNorm(
        config.width,
        epsilon=config.norm_eps,
        **numerics(config),
        rngs=rngs,
    )
