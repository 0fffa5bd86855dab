"""The shape of a vision transformer as an immutable value."""

from __future__ import annotations

import dataclasses
from types import MappingProxyType
from typing import Any

from axon_dist.core.errors import ConfigError, did_you_mean

from .attention import ATTENTION_FORMS
from .config import check_above_zero, check_at_least_one, check_float, check_rate, from_preset

_B16 = {"patch_size": 16, "width": 768, "num_layers": 12, "num_heads": 12, "ffn_width": 3072}
_G14 = {"patch_size": 14, "width": 1408, "num_layers": 40, "num_heads": 16, "ffn_width": 6144}

VIT_PRESETS: MappingProxyType[str, dict[str, Any]] = MappingProxyType(
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
2, which has about a billion parameters. They take the mean of all positions and no class token."""


@dataclasses.dataclass(frozen=True)
class ViTConfig:
    """Sizes and numerics of a `ViT`; says nothing of devices.

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
        dtype: dtype of the matrix products; None for whatever the parameters have.
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

    @classmethod
    def preset(cls, name: str, **changes: Any) -> ViTConfig:
        """Returns a named size, with some of its fields changed.

        Args:
            name: a key of `VIT_PRESETS`.
            **changes: fields to set after the preset.

        Raises:
            ConfigError: there is no such preset or no such field.
        """
        return from_preset(cls, VIT_PRESETS, name, changes)

    @property
    def num_patches(self) -> int:
        """Patches of an image, the positions of its sequence."""
        return (self.image_size // self.patch_size) ** 2

    @property
    def hidden_size(self) -> int:
        """Hidden size of the feed-forward, the default resolved."""
        return 4 * self.width if self.ffn_width is None else self.ffn_width

    def validate(self) -> None:
        """Checks that the sizes fit each other.

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
        for field in ("param_dtype", "dtype"):
            check_float(self, field)
        if self.attention not in ATTENTION_FORMS:
            hint = did_you_mean(self.attention, ATTENTION_FORMS)
            raise ConfigError(f"attention={self.attention!r} is not a form of attention.{hint}")
