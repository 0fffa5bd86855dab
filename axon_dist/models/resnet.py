"""A residual network with batch normalisation in plain Flax NNX."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import MappingProxyType
from typing import Any

import jax.numpy as jnp
from flax import nnx

from axon_dist.core.told import RNGS, Kind, told
from axon_dist.core.typing import Array

from .layers import pixels
from .resnet_config import EXPANSION, ResNetConfig

_CONFIG = Kind(
    "a ResNetConfig, such as ResNetConfig.preset('tiny')", lambda x: isinstance(x, ResNetConfig)
)


class ResNet(nnx.Module):
    """Convolutions in residual blocks, each followed by BatchNorm; the mean over the image is
    classified.

    Of the two customs for the block that halves the image, the stride is in the 3 x 3 convolution.
    In training mode BatchNorm takes the statistics of the batch that it is given.

    Args:
        config: the shape; checked here.
        rngs: source of the initial weights.

    Raises:
        ConfigError: a size is not possible.
        DTypeError: a dtype of the config is not floating-point.

    Example:
        >>> model = ResNet(ResNetConfig.preset("tiny"), rngs=nnx.Rngs(0))
        >>> model(jnp.zeros((2, 16, 16, 3), jnp.uint8)).shape
        (2, 10)

    Source: He et al., Deep Residual Learning, arXiv:1512.03385.
    """

    @told("ResNet", config=_CONFIG, rngs=RNGS)
    def __init__(self, config: ResNetConfig, *, rngs: nnx.Rngs):
        config.validate()
        self.config = config
        size, stride = (7, 2) if config.stem == "imagenet" else (3, 1)
        self.stem: ConvNorm = ConvNorm(
            config, config.channels, config.width, size, stride, rngs=rngs
        )
        blocks, features = [], config.width
        for stage, count in enumerate(config.stage_sizes):
            width = config.width * 2**stage
            for number in range(count):
                stride = 2 if stage and not number else 1
                blocks.append(ResidualBlock(config, features, width, stride, rngs=rngs))
                features = width * EXPANSION[config.block]
        self.blocks: Any = nnx.List(blocks)
        self.head: nnx.Linear = nnx.Linear(
            features,
            config.num_classes,
            dtype=config.dtype and jnp.dtype(config.dtype),
            param_dtype=jnp.dtype(config.param_dtype),
            rngs=rngs,
        )

    def __call__(self, images: Array) -> Array:
        """Classifies images.

        Args:
            images: `[B, H, W, channels]`, bytes or floats around zero.

        Returns:
            Logits `[B, num_classes]`, float32.
        """
        kernel = self.stem.conv.kernel[...]
        x = nnx.relu(self.stem(pixels(images, self.config.dtype or kernel.dtype)))
        if self.config.stem == "imagenet":
            edges: Any = ((1, 1), (1, 1))  # flax takes them, its annotation does not
            x = nnx.max_pool(x, (3, 3), strides=(2, 2), padding=edges)
        for block in self.blocks:
            x = block(x)
        mean = jnp.mean(x, axis=(1, 2), dtype=jnp.float32).astype(x.dtype)
        return self.head(mean).astype(jnp.float32)


class ConvNorm(nnx.Module):
    """A square convolution without bias, and BatchNorm.

    Args:
        config: numerics.
        num_inputs: features that go in.
        num_outputs: features that come out.
        size: height and width of the kernel, odd; the image is padded by half of it.
        stride: by how much the image shrinks.
        rngs: source of the initial weights.
    """

    def __init__(
        self,
        config: ResNetConfig,
        num_inputs: int,
        num_outputs: int,
        size: int,
        stride: int = 1,
        *,
        rngs: nnx.Rngs,
    ):
        numerics = {
            "dtype": config.dtype and jnp.dtype(config.dtype),
            "param_dtype": jnp.dtype(config.param_dtype),
            "rngs": rngs,
        }
        self.conv: nnx.Conv = nnx.Conv(
            num_inputs,
            num_outputs,
            (size, size),
            strides=(stride, stride),
            padding=((size // 2, size // 2),) * 2,
            use_bias=False,
            kernel_init=nnx.initializers.variance_scaling(2.0, "fan_out", "normal"),
            **numerics,
        )
        self.norm: nnx.BatchNorm = nnx.BatchNorm(
            num_outputs, momentum=config.norm_momentum, epsilon=config.norm_eps, **numerics
        )

    def __call__(self, x: Array) -> Array:
        """Maps `[B, H, W, num_inputs]` to `[B, H/stride, W/stride, num_outputs]`."""
        return self.norm(self.conv(x))


class ResidualBlock(nnx.Module):
    """`relu(shortcut(x) + branch(x))`, the shortcut a 1 x 1 convolution where sizes differ.

    Args:
        config: which branch, and numerics.
        num_inputs: features that go in.
        width: features of the branch; `EXPANSION` times as many come out.
        stride: by how much the image shrinks.
        rngs: source of the initial weights.
    """

    def __init__(
        self, config: ResNetConfig, num_inputs: int, width: int, stride: int, *, rngs: nnx.Rngs
    ):
        layer = functools.partial(ConvNorm, config, rngs=rngs)
        num_outputs = width * EXPANSION[config.block]
        self.layers: Any = nnx.List(_BRANCHES[config.block](layer, num_inputs, width, stride))
        same = stride == 1 and num_inputs == num_outputs
        self.shortcut: Any = None if same else layer(num_inputs, num_outputs, 1, stride)

    def __call__(self, x: Array) -> Array:
        """Maps `[B, H, W, num_inputs]` to `[B, H/stride, W/stride, features]`."""
        *first, last = self.layers
        y = x
        for layer in first:
            y = nnx.relu(layer(y))
        shortcut = x if self.shortcut is None else self.shortcut(x)
        return nnx.relu(shortcut + last(y))


def _basic(layer: Callable[..., ConvNorm], num_inputs: int, width: int, stride: int) -> list:
    return [layer(num_inputs, width, 3, stride), layer(width, width, 3)]


def _bottleneck(layer: Callable[..., ConvNorm], num_inputs: int, width: int, stride: int) -> list:
    num_outputs = width * EXPANSION["bottleneck"]
    return [
        layer(num_inputs, width, 1),
        layer(width, width, 3, stride),
        layer(width, num_outputs, 1),
    ]


_BRANCHES = MappingProxyType({"basic": _basic, "bottleneck": _bottleneck})
