"""The `model` section: kinds of models, and the tasks that connect them with kinds of data."""

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
"""The bound on labels for a model without `num_classes`."""


_Data = TypeVar("_Data")
_Pictures: TypeAlias = ImageData | ImageFolderData | ImageRecordsData | SyntheticImageData


@dataclasses.dataclass(frozen=True)
class Field:
    """One array of a batch.

    Args:
        shape: the shape of one sample.
        dtype: the dtype of the array.
        below: an exclusive upper bound of its integers; None if only the data determine it.
        rises: whether values never decrease along a sample.
    """

    shape: Shape
    dtype: DTypeLike
    below: int | None = None
    rises: bool = False

    def draw(self, random: np.random.Generator, rows: int) -> np.ndarray:
        """Draws random numbers, `[rows, *shape]`; `below` must not be None."""
        assert self.below is not None
        drawn = random.integers(0, self.below, (rows, *self.shape)).astype(self.dtype)
        return np.sort(drawn, axis=-1) if self.rises else drawn


@dataclasses.dataclass(frozen=True)
class Task(abc.ABC, Generic[_Data]):
    """Connects a kind of model with kinds of data.

    Args:
        loss_fn: the loss that a step minimizes.

    Attributes:
        data: the data sections that a model can be trained on.
        item: the items that throughput counts.
    """

    loss_fn: LossFn
    data: ClassVar[tuple[type, ...]]
    item: ClassVar[str]

    def check(self, model: object, data: _Data) -> None:
        """Raises `ConfigError` unless a model accepts the samples of a data section."""

    @abc.abstractmethod
    def fields(self, model: object, data: _Data) -> dict[str, Field]:
        """Returns the arrays of a batch."""

    @abc.abstractmethod
    def load(self, model: object, data: _Data, **options: Any) -> Loader:
        """Reads the data and returns the loader of one process; options are those of `Loader`.

        Raises:
            ConfigError: when the data is missing, damaged, or unsuitable for the model.
        """

    def items_per_sample(self, data: _Data) -> int:
        """Returns the number of items of a sample."""
        return 1

    def batch(self, rows: int, data: _Data) -> str:
        """Describes the size of a global batch."""
        return f"{rows} {self.item}"

    @abc.abstractmethod
    def unit(self, data: _Data) -> str:
        """Returns the unit of the loss."""


@dataclasses.dataclass(frozen=True)
class NextToken(Task[TokenSection]):
    """Language modelling: predicts each token of a text from those before it."""

    loss_fn: LossFn = next_token_loss
    data = TOKENS
    item = "tokens"

    def check(self, model: object, data: TokenSection) -> None:
        """Raises if sequences are longer than the model's `max_length`, if it has one."""
        longest = getattr(model, "max_length", data.sequence_length)
        if data.sequence_length > longest:
            raise ConfigError(
                f"data.sequence_length: got {data.sequence_length}, which must not exceed "
                f"model.max_length={longest}; lower the one or raise the other"
            )

    def fields(self, model: object, data: TokenSection) -> dict[str, Field]:
        """Returns the fields of sequences with one more token than the model sees."""
        of_tokens = {
            "tokens": (np.int32, getattr(model, "vocab_size", None), False),
            "segments": (np.int32, 4, True),
            "mask": (np.int8, 2, False),
        }
        shape = (data.sequence_length + 1,)
        return {name: Field(shape, *of_tokens[name]) for name in data.arrays}

    def load(self, model: object, data: TokenSection, **options: Any) -> Loader:
        """Opens the data; raises if it has tokens outside the model's vocabulary."""
        samples = data.open(data.sequence_length)
        vocab_size = getattr(model, "vocab_size", None)
        if vocab_size is not None and samples.vocab_size > vocab_size:
            raise ConfigError(
                f"model.vocab_size: got {vocab_size}, but the data has tokens up to "
                f"{samples.vocab_size - 1}; set it to at least {samples.vocab_size}"
            )
        return Loader(samples, vocab_size=vocab_size, **options)

    def items_per_sample(self, data: TokenSection) -> int:
        """Returns the number of tokens that a sample predicts."""
        return data.sequence_length

    def batch(self, rows: int, data: TokenSection) -> str:
        """Describes the number of sequences and their length."""
        return f"{rows} x {data.sequence_length} tokens"

    def unit(self, data: TokenSection) -> str:
        """Returns nats per token or byte."""
        return data.unit


@dataclasses.dataclass(frozen=True)
class Classification(Task[_Pictures]):
    """Classification of images."""

    loss_fn: LossFn = classification_loss
    data = tuple(row for row in DATA.values() if row not in TOKENS)
    item = "images"

    def check(self, model: object, data: _Pictures) -> None:
        """Raises unless images have the model's `image_size`, if it has one."""
        size = getattr(model, "image_size", data.image_size)
        if data.image_size != size:
            raise ConfigError(
                f"data.image_size: got {data.image_size}, which must be model.image_size={size}; "
                "change one of them"
            )

    def fields(self, model: object, data: _Pictures) -> dict[str, Field]:
        """Returns images as bytes, and their classes."""
        shape = (data.image_size, data.image_size, _channels(model))
        num_classes = getattr(model, "num_classes", None)
        return {"x": Field(shape, np.uint8, 256), "y": Field((), np.int32, num_classes)}

    def load(self, model: object, data: _Pictures, **options: Any) -> Loader:
        """Reads or makes the images."""
        num_classes = getattr(model, "num_classes", NO_LIMIT)
        return ImageLoader(load_images(data, _channels(model), num_classes), **options)

    def batch(self, rows: int, data: _Pictures) -> str:
        """Describes the number of images and their size."""
        return f"{rows} images of {data.image_size} x {data.image_size}"

    def unit(self, data: _Pictures) -> str:
        """Returns nats per image."""
        return "nats/image"


def _channels(model: object) -> int:
    """Returns the number of channels; 3 for a user's model without `channels`."""
    return getattr(model, "channels", 3)


@dataclasses.dataclass(frozen=True)
class UserTask(Task[OwnData]):
    """The task of a user's samples, which are passed to the model and loss unchanged."""

    data = (OwnData,)
    item = "samples"

    def fields(self, model: object, data: OwnData) -> dict[str, Field]:
        """Returns the arrays of the first sample."""
        example = data.samples.train(np.array([0]))
        return {name: Field(array.shape[1:], array.dtype) for name, array in example.items()}

    def load(self, model: object, data: OwnData, **options: Any) -> Loader:
        """Calls the factory of the data."""
        return Loader(data.samples, **options)

    def unit(self, data: OwnData) -> str:
        """Returns an empty string: only the loss knows its unit."""
        return ""


@dataclasses.dataclass(frozen=True, eq=False)
class ModelKind:
    """A kind of model that a config can name.

    Args:
        sizes: the dataclass of its sizes and options, which is the config section.
        make: makes the model from its sizes and `rngs`.
        task: the task of the model.
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
"""The models that a config can name."""


def sizes_of_hub(path: str) -> Mapping[str, object]:
    """Returns the sizes of the `Transformer` of a snapshot, as plain values.

    Args:
        path: a folder, or `hf://org/name`.
    """
    return write(hub_config(path))


def with_hub_weights(data: Mapping[str, object]) -> Mapping[str, object]:
    """Sets `weights` of a run to the snapshot named by `model.hub`.

    Args:
        data: the contents of a YAML file; if it has a key `weights`, even an empty one, it is
            returned unchanged.
    """
    model: Any = data.get("model")
    if not isinstance(model, Mapping) or HUB not in model or "weights" in data:
        return data
    files = [model[HUB]]
    name = format_name(model[HUB])
    return {**data, "weights": {"files": files, "format": name, "cast": True}}


@dataclasses.dataclass(frozen=True, kw_only=True)
class OwnModel(UserCode):
    """A user's model: `model: {factory: package.module:make, ...}`.

    The factory is called with `rngs` and the other keys of the section, and returns an
    `nnx.Module`.
    """

    section: ClassVar[str] = "model"
    provided: ClassVar[tuple[str, ...]] = ("rngs",)

    def make(self, rngs: nnx.Rngs) -> nnx.Module:
        """Calls the factory.

        Raises:
            ConfigError: when it does not return a module.
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
    """A factory of a user's loss: `loss: {factory: package.module:make, ...}` returns it."""

    section: ClassVar[str] = "loss"

    def validate(self) -> None:
        """Checks the arguments of the factory, and that it is not itself a loss."""
        function = self.find()
        if not inspect.isclass(function) and list(parameters_of(function) or ())[:1] == ["model"]:
            raise ConfigError(
                f"loss.factory: {self.path} takes a model, so it is itself a loss, not a factory; "
                "write loss: {function: " + self.path + "}",
                code="loss-as-factory",
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
    """A user's loss: `loss: {function: package.module:loss}` is called as `loss(model, batch)`.

    The other keys of the section are passed as keyword arguments in every call.
    """

    key: ClassVar[str] = "function"
    section: ClassVar[str] = "loss"
    by_position: ClassVar[tuple[str, ...]] = ("a model", "a batch")

    def loss_fn(self) -> LossFn:
        """Returns the loss with its options bound."""
        function = self.find()
        return functools.partial(function, **self.options) if self.options else function


UserLoss: TypeAlias = LossFactory | LossFunction
"""A user's loss, as a function or a factory."""

LOSSES: MappingProxyType[str, type[UserLoss]] = MappingProxyType(
    {"function": LossFunction, "factory": LossFactory}
)
"""The keys by which a user's loss is named."""


def kind_of(sizes: object, data: object = None, loss: UserLoss | None = None) -> ModelKind:
    """Returns the kind of a model, with its task adapted to the data and a user's loss.

    Args:
        sizes: the sizes of a model in `MODELS`, or a user's model.
        data: the data section, which determines the task of a user's model.
        loss: replaces the loss of the task.

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
    """Returns the task of a user's model, by its data."""
    if not isinstance(data, OwnData):
        tasks = (kind.task for kind in MODELS.values())
        return next(task for task in tasks if isinstance(data, task.data))
    if user_loss is None:
        raise ConfigError(
            "loss: missing, but a user-defined model with user-defined data has no default; set "
            "loss: {function: package.module:loss}, a function of a model and a batch",
            code="no-loss",
        )
    return UserTask(user_loss)


def make_model(sizes: object, seed: int) -> nnx.Module:
    """Makes the model; if a step uses this as a factory, arrays are made on their devices.

    Args:
        sizes: the sizes of a model in `MODELS`, or a user's model.
        seed: the seed of the initial weights and of dropout.
    """
    rngs = nnx.Rngs(seed)
    if isinstance(sizes, OwnModel):
        return sizes.make(rngs)
    return kind_of(sizes).make(sizes, rngs=rngs)
