"""A residual network with batch normalisation in plain Flax NNX."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from ..core.checks import RNGS, checked, instance_of
from ..core.errors import ConfigError
from ..core.tree import wide
from ..core.typing import Array
from .config import (
    MOST_LAYERS,
    Presets,
    check_above_zero,
    check_at_least_one,
    check_choice,
    check_floats,
    numerics,
)
from .layers import pixels

RESNET_PRESETS: MappingProxyType[str, Mapping[str, object]] = MappingProxyType(
    {
        "tiny": {
            "stage_sizes": (1, 1),
            "block": "basic",
            "width": 8,
            "num_classes": 10,
            "stem": "small",
        },
        "resnet18": {"stage_sizes": (2, 2, 2, 2), "block": "basic"},
        "resnet50": {"stage_sizes": (3, 4, 6, 3), "block": "bottleneck"},
    }
)
"""Named sizes of arXiv:1512.03385, table 1; `tiny` is for images of a few pixels."""

EXPANSION = MappingProxyType({"basic": 1, "bottleneck": 4})
"""The ratio of a block's output features to its width, by kind of block."""


@dataclasses.dataclass(frozen=True)
class ResNetConfig(Presets):
    """Sizes and numerics of a `ResNet`.

    Args:
        num_classes: number of logits.
        stage_sizes: blocks of each stage; the first block of every stage but the first halves the
            image and doubles the features.
        block: `basic`, two 3 x 3 convolutions; or `bottleneck`, 1 x 1, 3 x 3 and 1 x 1
            convolutions.
        width: features of the first stage's convolutions.
        channels: numbers per pixel.
        stem: `imagenet`, a 7 x 7 convolution and a pool, each of which halves the image; or
            `small`, a 3 x 3 convolution that keeps its size.
        norm_momentum: share of the running statistics that a step keeps, in [0, 1).
        norm_eps: added to the variance inside BatchNorm.
        param_dtype: dtype the parameters are created in.
        dtype: dtype of the convolutions; None for that of the parameters.

    Example:
        >>> ResNetConfig.preset("resnet18").num_features
        512
    """

    num_classes: int = 1000
    stage_sizes: tuple[int, ...] = (3, 4, 6, 3)
    block: Literal["basic", "bottleneck"] = "bottleneck"
    width: int = 64
    channels: int = 3
    stem: Literal["imagenet", "small"] = "imagenet"
    norm_momentum: float = 0.9
    norm_eps: float = 1e-5
    param_dtype: str = "float32"
    dtype: str | None = None

    presets: ClassVar[Mapping[str, Mapping[str, object]]] = RESNET_PRESETS

    @property
    def num_features(self) -> int:
        """The output features of the last stage, the input of the head."""
        return self.width * 2 ** (len(self.stage_sizes) - 1) * EXPANSION[self.block]

    def validate(self) -> None:
        """Checks the values.

        Raises:
            ConfigError: a size is not positive, or a name is unknown.
            DTypeError: a dtype is not a floating-point one.
        """
        check_at_least_one(self, ("num_classes", "width", "channels"))
        sizes = self.stage_sizes
        if not sizes or min(sizes) < 1 or sum(sizes) > MOST_LAYERS:
            raise ConfigError(
                f"stage_sizes={sizes!r:.80} must have at least one stage, each of 1 block or more, "
                f"and at most {MOST_LAYERS} blocks in total, for example (3, 4, 6, 3).",
                code="stage-sizes",
            )
        check_choice("block", self.block, EXPANSION, "a block")
        check_choice("stem", self.stem, ("imagenet", "small"), "a stem")
        if not 0.0 <= self.norm_momentum < 1.0:
            raise ConfigError(
                f"norm_momentum={self.norm_momentum} must be in [0, 1), for example 0.9.",
                code="norm-momentum-range",
            )
        check_above_zero(self, ("norm_eps",))
        check_floats(self)


_CONFIG = instance_of(ResNetConfig, "a ResNetConfig, such as ResNetConfig.preset('tiny')")


class ResNet(nnx.Module):
    """A residual network: convolutions with BatchNorm in residual blocks, then global mean pooling.

    In a bottleneck block that halves the image, the stride is in the 3 x 3 convolution (ResNet
    v1.5). In training mode, BatchNorm uses the statistics of its batch.

    Args:
        config: the sizes; validated here.
        rngs: source of the initial weights.

    Raises:
        ConfigError: a size is out of range.
        DTypeError: a dtype of the config is not floating-point.

    Example:
        >>> def scores(images):
        ...     return ResNet(ResNetConfig.preset("tiny"), rngs=nnx.Rngs(0))(images)
        >>> nnx.eval_shape(scores, jnp.zeros((2, 16, 16, 3), jnp.uint8)).shape
        (2, 10)

    Source: He et al., Deep Residual Learning, arXiv:1512.03385.
    """

    @checked("ResNet", config=_CONFIG, rngs=RNGS)
    def __init__(self, config: ResNetConfig, *, rngs: nnx.Rngs):
        config.validate()
        self.config = config
        size, stride = (7, 2) if config.stem == "imagenet" else (3, 1)
        self.stem: ConvNorm = ConvNorm(
            config, config.channels, config.width, size, stride, rngs=rngs
        )
        blocks = []
        features = config.width
        for stage, count in enumerate(config.stage_sizes):
            width = config.width * 2**stage
            for number in range(count):
                stride = 2 if stage and not number else 1
                blocks.append(ResidualBlock(config, features, width, stride, rngs=rngs))
                features = width * EXPANSION[config.block]
        self.blocks = nnx.List(blocks)
        self.head: nnx.Linear = nnx.Linear(
            features, config.num_classes, **numerics(config), rngs=rngs
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
            edges: Any = ((1, 1), (1, 1))  # supported by flax, but not in its annotation
            x = nnx.max_pool(x, (3, 3), strides=(2, 2), padding=edges)
        for block in self.blocks:
            x = block(x)
        dtype = jnp.promote_types(x.dtype, jnp.float32)
        mean = jnp.mean(x, axis=(1, 2), dtype=dtype).astype(x.dtype)
        return wide(self.head(mean))

    def example_inputs(self) -> tuple[jax.ShapeDtypeStruct]:
        """Returns the shape of two images, with which `suggest_plan` traces the model."""
        return (jax.ShapeDtypeStruct((2, 64, 64, self.config.channels), jnp.float32),)


class ConvNorm(nnx.Module):
    """A square convolution without bias, then BatchNorm.

    Args:
        config: numerics.
        num_inputs: input features.
        num_outputs: output features.
        size: height and width of the kernel, odd; the image is padded by half of it.
        stride: the factor by which the image shrinks.
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
        common = numerics(config)
        self.conv: nnx.Conv = nnx.Conv(
            num_inputs,
            num_outputs,
            (size, size),
            strides=(stride, stride),
            padding=((size // 2, size // 2),) * 2,
            use_bias=False,
            kernel_init=nnx.initializers.variance_scaling(2.0, "fan_out", "normal"),
            **common,
            rngs=rngs,
        )
        self.norm: nnx.BatchNorm = nnx.BatchNorm(
            num_outputs,
            momentum=config.norm_momentum,
            epsilon=config.norm_eps,
            **common,
            rngs=rngs,
        )

    def __call__(self, x: Array) -> Array:
        """Maps `[B, H, W, num_inputs]` to `[B, H/stride, W/stride, num_outputs]`."""
        return self.norm(self.conv(x))


class ResidualBlock(nnx.Module):
    """`relu(shortcut(x) + branch(x))`; the shortcut is a 1 x 1 convolution if sizes differ.

    Args:
        config: the kind of block, and numerics.
        num_inputs: input features.
        width: features of the branch; the output has `EXPANSION` times as many.
        stride: the factor by which the image shrinks.
        rngs: source of the initial weights.
    """

    def __init__(
        self, config: ResNetConfig, num_inputs: int, width: int, stride: int, *, rngs: nnx.Rngs
    ):
        layer = functools.partial(ConvNorm, config, rngs=rngs)
        num_outputs = width * EXPANSION[config.block]
        branch = [(num_inputs, width, 3, stride), (width, width, 3)]
        if config.block == "bottleneck":
            branch = [(num_inputs, width, 1), (width, width, 3, stride), (width, num_outputs, 1)]
        self.layers = nnx.List(layer(*sizes) for sizes in branch)
        same = stride == 1 and num_inputs == num_outputs
        self.shortcut = None if same else layer(num_inputs, num_outputs, 1, stride)

    def __call__(self, x: Array) -> Array:
        """Maps `[B, H, W, num_inputs]` to `[B, H/stride, W/stride, features]`."""
        *first, last = self.layers
        y = x
        for layer in first:
            y = nnx.relu(layer(y))
        shortcut = x if self.shortcut is None else self.shortcut(x)
        return nnx.relu(shortcut + last(y))
