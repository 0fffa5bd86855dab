"""The `model` section: kinds of models, one row each."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, ClassVar, TypeAlias

import flax.linen as nn
from flax import nnx

from axon_dist.core.errors import ConfigError
from axon_dist.core.typing import LossFn
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

from .data import OwnData
from .own import Own, parameters_of
from .tasks import Classification, NextToken, OwnTask, Task


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


@dataclasses.dataclass(frozen=True, kw_only=True)
class OwnModel(Own):
    """A model of the user's own: `model: {factory: package.module:make, ...}`.

    The factory is called with `rngs` and the keys beside it, and returns an `nnx.Module`.
    """

    section: ClassVar[str] = "model"
    given: ClassVar[tuple[str, ...]] = ("rngs",)

    def make(self, rngs: nnx.Rngs) -> nnx.Module:
        """Calls the factory.

        Raises:
            ConfigError: when it returns something else than a module.
        """
        made = self.call(rngs=rngs)
        if not isinstance(made, nnx.Module):
            remedy = "return one"
            if isinstance(made, nn.Module):
                remedy = "wrap it, nnx.bridge.ToNNX(module, rngs=rngs).lazy_init(example)"
            raise ConfigError(
                f"model.factory: {self.path} returns a {type(made).__name__}, which must be an "
                f"nnx.Module; {remedy}"
            )
        return made


@dataclasses.dataclass(frozen=True, kw_only=True)
class LossFactory(Own):
    """A loss of the user's own: `loss: {factory: package.module:make, ...}` returns it."""

    section: ClassVar[str] = "loss"

    def validate(self) -> None:
        """Checks what it takes, and that it is no loss itself."""
        function = self.find()
        if not inspect.isclass(function) and list(parameters_of(function) or ())[:1] == ["model"]:
            raise ConfigError(
                f"loss.factory: {self.path} takes a model, so it is a loss itself and no factory "
                "of one; write loss: {function: " + self.path + "}"
            )
        super().validate()

    def loss_fn(self) -> LossFn:
        """Makes the loss.

        Raises:
            ConfigError: when it cannot be called.
        """
        made = self.call()
        if not callable(made):
            raise ConfigError(
                f"loss.factory: {self.path} returns a {type(made).__name__}, which must be a "
                "function of a model and a batch; to name the function itself, write "
                "loss: {function: ...}"
            )
        return made


@dataclasses.dataclass(frozen=True, kw_only=True)
class LossFunction(Own):
    """A loss of the user's own: `loss: {function: package.module:loss}` is `loss(model, batch)`.

    The keys beside it are given by keyword in every call.
    """

    key: ClassVar[str] = "function"
    section: ClassVar[str] = "loss"
    by_position: ClassVar[tuple[str, ...]] = ("a model", "a batch")

    def loss_fn(self) -> LossFn:
        """The loss, its options bound."""
        function = self.find()
        return functools.partial(function, **self.options) if self.options else function


OwnLoss: TypeAlias = LossFactory | LossFunction
"""A loss of the user's own, in either form."""

LOSSES: MappingProxyType[str, type[OwnLoss]] = MappingProxyType(
    {"function": LossFunction, "factory": LossFactory}
)
"""How a loss of the user's own is named."""


def kind_of(
    sizes: Any, data: Any = None, loss: LossFactory | LossFunction | None = None
) -> ModelKind:
    """The row of the sizes of a model, its task as data and a loss of the user's own make it.

    Args:
        sizes: of one of the kinds, or a model of the user's own.
        data: the data section, by which a model of the user's own gets its task.
        loss: in place of the task's own.

    Raises:
        ConfigError: when there is no loss for data of the user's own.

    Example:
        >>> kind_of(ViTConfig()).task.item
        'images'
    """
    own_loss = None if loss is None else loss.loss_fn()
    if isinstance(sizes, OwnModel):
        row = ModelKind(OwnModel, OwnModel.make, _task_of(data, own_loss), {})
    else:
        row = _row(sizes)
    task: Any = row.task
    if isinstance(data, OwnData):
        task = OwnTask(task.loss_fn)
    if own_loss is not None:
        task = dataclasses.replace(task, loss_fn=own_loss)
    return row if task is row.task else dataclasses.replace(row, task=task)


def _row(sizes: Any) -> ModelKind:
    return next(kind for kind in MODELS.values() if kind.sizes is type(sizes))


def _task_of(data: Any, own_loss: LossFn | None) -> Task:
    """What a model of the user's own learns: what its data are there for."""
    if not isinstance(data, OwnData):
        tasks = (kind.task for kind in MODELS.values())
        return next(task for task in tasks if isinstance(data, task.data))
    if own_loss is None:
        raise ConfigError(
            "loss: missing, and for a model and data of your own there is none; set "
            "loss: {function: package.module:loss}, a function of a model and a batch"
        )
    return OwnTask(own_loss)


def make_model(sizes: Any, seed: int) -> nnx.Module:
    """Makes the model; a factory of it gives arrays that are born where they live.

    Args:
        sizes: of one of the kinds, or a model of the user's own.
        seed: of the initial weights and of dropout.
    """
    rngs = nnx.Rngs(seed)
    return (
        sizes.make(rngs) if isinstance(sizes, OwnModel) else kind_of(sizes).make(sizes, rngs=rngs)
    )
