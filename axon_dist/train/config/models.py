"""The `model` section: kinds of models, and the tasks that join them with kinds of data."""

from __future__ import annotations

import abc
import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, ClassVar, Generic, TypeAlias, TypeVar

import flax.linen as nn
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from axon_dist.core.errors import ConfigError
from axon_dist.core.typing import LossFn, Shape
from axon_dist.data import ImageLoader, Loader, load_images
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
    classification_loss,
    next_token_loss,
)
from axon_dist.models.snapshot import format_name, hub_config

from .read import HUB, write
from .sections import (
    DATA,
    TOKENS,
    ImageData,
    ImageFolderData,
    ImageRecordsData,
    OwnData,
    SyntheticImageData,
    TokenSection,
)
from .user_code import UserCode, parameters_of

NO_LIMIT = 2**31
"""What the labels of a model that does not say how many classes it has must be below."""


_Data = TypeVar("_Data")
_Pictures: TypeAlias = ImageData | ImageFolderData | ImageRecordsData | SyntheticImageData


@dataclasses.dataclass(frozen=True)
class Field:
    """One array of a batch.

    Args:
        shape: of one sample.
        dtype: of its numbers.
        below: what every integer in it is below; None where only the data can say it.
        rises: whether numbers never fall along a sample.
    """

    shape: Shape
    dtype: DTypeLike
    below: int | None = None
    rises: bool = False

    def draw(self, random: np.random.Generator, rows: int) -> np.ndarray:
        """Random numbers of the field, `[rows, *shape]`; it must say what they are below."""
        assert self.below is not None
        drawn = random.integers(0, self.below, (rows, *self.shape)).astype(self.dtype)
        return np.sort(drawn, axis=-1) if self.rises else drawn


@dataclasses.dataclass(frozen=True)
class Task(abc.ABC, Generic[_Data]):
    """What joins a kind of model and a kind of data.

    Args:
        loss_fn: what a step minimizes.

    Attributes:
        data: the data sections that a model can be trained on.
        item: what throughput counts.
    """

    loss_fn: LossFn
    data: ClassVar[tuple[type, ...]]
    item: ClassVar[str]

    def check(self, model: object, data: _Data) -> None:
        """Raises `ConfigError` unless a model can take the samples of a data section."""

    @abc.abstractmethod
    def fields(self, model: object, data: _Data) -> dict[str, Field]:
        """The arrays of a batch."""

    @abc.abstractmethod
    def load(self, model: object, data: _Data, **options: int) -> Loader:
        """Reads the data and makes the batches of one process; options are those of `Loader`.

        Raises:
            ConfigError: when the data is missing, damaged, or not what the model can take.
        """

    def items_per_sample(self, data: _Data) -> int:
        """How many items a sample has."""
        return 1

    def batch(self, rows: int, data: _Data) -> str:
        """The size of a global batch, in words."""
        return f"{rows} {self.item}"

    @abc.abstractmethod
    def unit(self, data: _Data) -> str:
        """What the loss is measured in."""


@dataclasses.dataclass(frozen=True)
class NextToken(Task[TokenSection]):
    """A language model predicts each token of a text from those before."""

    loss_fn: LossFn = next_token_loss
    data = TOKENS
    item = "tokens"

    def check(self, model: object, data: TokenSection) -> None:
        """Sequences must not be too long for the model, where it says how long they may be."""
        longest = getattr(model, "max_length", data.sequence_length)
        if data.sequence_length > longest:
            raise ConfigError(
                f"data.sequence_length: got {data.sequence_length}, which must not exceed "
                f"model.max_length={longest}; lower the one or raise the other"
            )

    def fields(self, model: object, data: TokenSection) -> dict[str, Field]:
        """Sequences with one token more to predict, and what goes with each of their tokens."""
        of_tokens = {
            "tokens": (np.int32, getattr(model, "vocab_size", None), False),
            "segments": (np.int32, 4, True),
            "mask": (np.int8, 2, False),
        }
        shape = (data.sequence_length + 1,)
        return {name: Field(shape, *of_tokens[name]) for name in data.arrays}

    def load(self, model: object, data: TokenSection, **options: int) -> Loader:
        """Opens the data, whose tokens the model must know."""
        samples, vocab_size = data.open(data.sequence_length), getattr(model, "vocab_size", None)
        if vocab_size is not None and samples.vocab_size > vocab_size:
            raise ConfigError(
                f"model.vocab_size: got {vocab_size}, but the data has tokens up to "
                f"{samples.vocab_size - 1}; set it to at least {samples.vocab_size}"
            )
        return Loader(samples, vocab_size=vocab_size, **options)

    def items_per_sample(self, data: TokenSection) -> int:
        """Tokens that a sample predicts."""
        return data.sequence_length

    def batch(self, rows: int, data: TokenSection) -> str:
        """Sequences and their length."""
        return f"{rows} x {data.sequence_length} tokens"

    def unit(self, data: TokenSection) -> str:
        """Nats per whatever a token is."""
        return data.unit


@dataclasses.dataclass(frozen=True)
class Classification(Task[_Pictures]):
    """A model of images says which class each is of."""

    loss_fn: LossFn = classification_loss
    data = tuple(row for row in DATA.values() if row not in TOKENS)
    item = "images"

    def check(self, model: object, data: _Pictures) -> None:
        """Images must have the size of the model, where it has one."""
        size = getattr(model, "image_size", data.image_size)
        if data.image_size != size:
            raise ConfigError(
                f"data.image_size: got {data.image_size}, which must be model.image_size={size}; "
                "change one of them"
            )

    def fields(self, model: object, data: _Pictures) -> dict[str, Field]:
        """Images as bytes, and their classes."""
        shape = (data.image_size, data.image_size, _channels(model))
        num_classes = getattr(model, "num_classes", None)
        return {"x": Field(shape, np.uint8, 256), "y": Field((), np.int32, num_classes)}

    def load(self, model: object, data: _Pictures, **options: int) -> Loader:
        """Reads or makes the images."""
        num_classes = getattr(model, "num_classes", NO_LIMIT)
        return ImageLoader(load_images(data, _channels(model), num_classes), **options)

    def batch(self, rows: int, data: _Pictures) -> str:
        """Images and their size."""
        return f"{rows} images of {data.image_size} x {data.image_size}"

    def unit(self, data: _Pictures) -> str:
        """Nats per image."""
        return "nats/image"


def _channels(model: object) -> int:
    """Numbers per pixel; 3 for a user's model without `channels`."""
    return getattr(model, "channels", 3)


@dataclasses.dataclass(frozen=True)
class UserTask(Task[OwnData]):
    """The task of a user's samples, which a model and a loss take as they are."""

    data = (OwnData,)
    item = "samples"

    def fields(self, model: object, data: OwnData) -> dict[str, Field]:
        """The arrays of the first sample."""
        example = data.samples.train(np.array([0]))
        return {name: Field(array.shape[1:], array.dtype) for name, array in example.items()}

    def load(self, model: object, data: OwnData, **options: int) -> Loader:
        """Calls the factory of the data."""
        return Loader(data.samples, **options)

    def unit(self, data: OwnData) -> str:
        """Empty: only the loss knows it."""
        return ""


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
    task: Task[Any]
    presets: Mapping[str, Mapping[str, object]]


MODELS: MappingProxyType[str, ModelKind] = MappingProxyType(
    {
        "transformer": ModelKind(TransformerConfig, Transformer, NextToken(), PRESETS),
        "vit": ModelKind(ViTConfig, ViT, Classification(), VIT_PRESETS),
        "resnet": ModelKind(ResNetConfig, ResNet, Classification(), RESNET_PRESETS),
    }
)
"""The models that `axon train` can name."""


def sizes_of_hub(path: str) -> Mapping[str, object]:
    """The sizes of the `Transformer` of a snapshot, as plain values.

    Args:
        path: a folder, or `hf://org/name`.
    """
    return write(hub_config(path))


def with_hub_weights(data: Mapping[str, object]) -> Mapping[str, object]:
    """Plain data of a run whose `weights` are of the snapshot that its model is of.

    Args:
        data: as a YAML file holds it; where it has `weights`, also empty ones, these stay.
    """
    model: Any = data.get("model")
    if not isinstance(model, Mapping) or HUB not in model or "weights" in data:
        return data
    files, name = [model[HUB]], format_name(model[HUB])
    return {**data, "weights": {"files": files, "format": name, "cast": True}}


@dataclasses.dataclass(frozen=True, kw_only=True)
class OwnModel(UserCode):
    """A model of the user's own: `model: {factory: package.module:make, ...}`.

    The factory is called with `rngs` and the keys beside it, and returns an `nnx.Module`.
    """

    section: ClassVar[str] = "model"
    provided: ClassVar[tuple[str, ...]] = ("rngs",)

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
            raise self.returned(made, f"an nnx.Module; {remedy}")
        return made


@dataclasses.dataclass(frozen=True, kw_only=True)
class LossFactory(UserCode):
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
            hint = "; to name the function itself, write loss: {function: ...}"
            raise self.returned(made, f"a function of a model and a batch{hint}")
        return made


@dataclasses.dataclass(frozen=True, kw_only=True)
class LossFunction(UserCode):
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


UserLoss: TypeAlias = LossFactory | LossFunction
"""A user's loss, in either form."""

LOSSES: MappingProxyType[str, type[UserLoss]] = MappingProxyType(
    {"function": LossFunction, "factory": LossFactory}
)
"""The keys by which a user's loss is named."""


def kind_of(sizes: object, data: object = None, loss: UserLoss | None = None) -> ModelKind:
    """The row of the sizes of a model, with the task that the data and a user's loss make it.

    Args:
        sizes: of one of the kinds, or a user's model.
        data: the data section, from which a user's model gets its task.
        loss: in place of the task's own.

    Raises:
        ConfigError: when there is no loss for a user's data.

    Example:
        >>> kind_of(ViTConfig()).task.item
        'images'
    """
    user_loss = None if loss is None else loss.loss_fn()
    if isinstance(sizes, OwnModel):
        row = ModelKind(OwnModel, OwnModel.make, _task_of(data, user_loss), {})
    else:
        row = next(kind for kind in MODELS.values() if kind.sizes is type(sizes))
    task = UserTask(row.task.loss_fn) if isinstance(data, OwnData) else row.task
    if user_loss is not None:
        task = dataclasses.replace(task, loss_fn=user_loss)
    return row if task is row.task else dataclasses.replace(row, task=task)


def _task_of(data: object, user_loss: LossFn | None) -> Task[Any]:
    """The task of a user's model, which follows from its data."""
    if not isinstance(data, OwnData):
        tasks = (kind.task for kind in MODELS.values())
        return next(task for task in tasks if isinstance(data, task.data))
    if user_loss is None:
        raise ConfigError(
            "loss: missing, and for a model and data of your own there is none; set "
            "loss: {function: package.module:loss}, a function of a model and a batch"
        )
    return UserTask(user_loss)


def make_model(sizes: object, seed: int) -> nnx.Module:
    """Makes the model; used as a factory, its arrays are made on their devices.

    Args:
        sizes: of one of the kinds, or a user's model.
        seed: of the initial weights and of dropout.
    """
    rngs = nnx.Rngs(seed)
    return (
        sizes.make(rngs) if isinstance(sizes, OwnModel) else kind_of(sizes).make(sizes, rngs=rngs)
    )
