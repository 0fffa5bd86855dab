"""The shape of a residual network as an immutable value."""

from __future__ import annotations

import dataclasses
from types import MappingProxyType
from typing import Any, Literal

from axon_dist.core.errors import ConfigError, did_you_mean

from .config import check_above_zero, check_at_least_one, check_float, from_preset

RESNET_PRESETS: MappingProxyType[str, dict[str, Any]] = MappingProxyType(
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
"""How many times as many features as its convolutions a block of each kind gives."""


@dataclasses.dataclass(frozen=True)
class ResNetConfig:
    """Sizes and numerics of a `ResNet`; says nothing of devices.

    Args:
        num_classes: number of logits.
        stage_sizes: blocks of each stage; the first block of every stage but the first halves the
            image and doubles the features.
        block: `basic`, two convolutions of 3 x 3; or `bottleneck`, 1 x 1, 3 x 3 and 1 x 1.
        width: features of the first stage's convolutions.
        channels: numbers per pixel.
        stem: `imagenet`, a convolution of 7 x 7 and a pool that halve the image each; or `small`,
            a convolution of 3 x 3 that keeps it.
        norm_momentum: share of the running statistics that a step keeps, in [0, 1).
        norm_eps: added to the variance inside BatchNorm.
        param_dtype: dtype the parameters are created in.
        dtype: dtype of the convolutions; None for whatever the parameters have.

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

    @classmethod
    def preset(cls, name: str, **changes: Any) -> ResNetConfig:
        """Returns a named size, with some of its fields changed.

        Args:
            name: a key of `RESNET_PRESETS`.
            **changes: fields to set after the preset.

        Raises:
            ConfigError: there is no such preset or no such field.
        """
        return from_preset(cls, RESNET_PRESETS, name, changes)

    @property
    def num_features(self) -> int:
        """Features of the last stage, which the head takes."""
        return self.width * 2 ** (len(self.stage_sizes) - 1) * EXPANSION[self.block]

    def validate(self) -> None:
        """Checks the values.

        Raises:
            ConfigError: a size is not positive, or a name is unknown.
            DTypeError: a dtype is not a floating-point one.
        """
        check_at_least_one(self, ("num_classes", "width", "channels"))
        if not self.stage_sizes or min(self.stage_sizes) < 1:
            raise ConfigError(
                f"stage_sizes={self.stage_sizes} must name at least one stage, each of 1 block or "
                "more, for example (3, 4, 6, 3)."
            )
        for field, names in (("block", tuple(EXPANSION)), ("stem", ("imagenet", "small"))):
            if (value := getattr(self, field)) not in names:
                raise ConfigError(f"{field}={value!r} is unknown.{did_you_mean(value, names)}")
        if not 0.0 <= self.norm_momentum < 1.0:
            raise ConfigError(
                f"norm_momentum={self.norm_momentum} must lie in [0, 1), for example 0.9."
            )
        check_above_zero(self, ("norm_eps",))
        for field in ("param_dtype", "dtype"):
            check_float(self, field)
