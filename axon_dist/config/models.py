"""The `model` section: kinds of models, one row each."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from flax import nnx

from axon_dist.models import (
    PRESETS,
    RESNET_PRESETS,
    VIT_PRESETS,
    ResNet,
    ResNetConfig,
    Transformer,
    TransformerConfig,
    ViT,
    ViTConfig,
)

from .tasks import Classification, NextToken, Task


@dataclasses.dataclass(frozen=True, eq=False)
class ModelKind:
    """A kind of model that a config can name.

    Args:
        sizes: the dataclass of its sizes, which is the section.
        make: makes it from its sizes and `rngs`.
        task: what it learns.
        presets: named sizes.
    """

    sizes: type
    make: Callable[..., nnx.Module]
    task: Task
    presets: Mapping[str, Mapping[str, Any]]


MODELS: MappingProxyType[str, ModelKind] = MappingProxyType(
    {
        "transformer": ModelKind(TransformerConfig, Transformer, NextToken(), PRESETS),
        "vit": ModelKind(ViTConfig, ViT, Classification(), VIT_PRESETS),
        "resnet": ModelKind(ResNetConfig, ResNet, Classification(), RESNET_PRESETS),
    }
)
"""The models that `axon train` can name."""


def kind_of(sizes: Any) -> ModelKind:
    """The row of the sizes of a model.

    Example:
        >>> kind_of(ViTConfig()).task.item
        'images'
    """
    return next(kind for kind in MODELS.values() if kind.sizes is type(sizes))


def make_model(sizes: Any, seed: int) -> nnx.Module:
    """Makes the model; a factory of it gives arrays that are born where they live.

    Args:
        sizes: of one of the kinds.
        seed: of the initial weights and of dropout.
    """
    return kind_of(sizes).make(sizes, rngs=nnx.Rngs(seed))
