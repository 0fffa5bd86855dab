"""Tasks: what a model learns from its data, and all that follows from it, in one row for each."""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol

import numpy as np

from axon_dist.core.errors import ConfigError
from axon_dist.core.typing import LossFn, Shape
from axon_dist.data import ImageLoader, Loader, load_images
from axon_dist.models import classification_loss, next_token_loss

from .data import TOKENS, ImageData, OwnData, SyntheticImageData

NO_LIMIT = 2**31
"""What the labels of a model that does not say how many classes it has must be below."""


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
    dtype: Any
    below: int | None = None
    rises: bool = False

    def draw(self, random: np.random.Generator, rows: int) -> np.ndarray:
        """Random numbers of the field, `[rows, *shape]`; it must say what they are below."""
        assert self.below is not None
        drawn = random.integers(0, self.below, (rows, *self.shape)).astype(self.dtype)
        return np.sort(drawn, axis=-1) if self.rises else drawn


class Task(Protocol):
    """What joins a kind of model and a kind of data.

    Attributes:
        data: the data sections that a model can be trained on.
        item: what throughput counts.
    """

    @property
    def loss_fn(self) -> LossFn:
        """What a step minimizes."""
        ...

    data: tuple[type, ...]
    item: str

    def check(self, model: Any, data: Any) -> None:
        """Raises `ConfigError` unless a model can take the samples of a data section."""
        ...

    def fields(self, model: Any, data: Any) -> dict[str, Field]:
        """The arrays of a batch."""
        ...

    def load(self, model: Any, data: Any, **options: int) -> Loader:
        """Reads the data and makes the batches of one process; options are those of `Loader`.

        Raises:
            ConfigError: when the data is missing, damaged, or not what the model can take.
        """
        ...

    def items_per_sample(self, data: Any) -> int:
        """How many items a sample has."""
        ...

    def batch(self, rows: int, data: Any) -> str:
        """The size of a global batch, in words."""
        ...

    def unit(self, data: Any) -> str:
        """What the loss is measured in."""
        ...


@dataclasses.dataclass(frozen=True)
class NextToken:
    """A language model predicts each token of a text from those before.

    Args:
        loss_fn: what a step minimizes.
    """

    loss_fn: LossFn = next_token_loss
    data = TOKENS
    item = "tokens"

    def check(self, model: Any, data: Any) -> None:
        """Sequences must not be too long for the model, where it says how long they may be."""
        if data.sequence_length > getattr(model, "max_length", data.sequence_length):
            raise ConfigError(
                f"data.sequence_length: got {data.sequence_length}, which must not exceed "
                f"model.max_length={model.max_length}; lower the one or raise the other"
            )

    def fields(self, model: Any, data: Any) -> dict[str, Field]:
        """Sequences with one token more to predict, and what goes with each of their tokens."""
        of_tokens = {
            "tokens": (np.int32, getattr(model, "vocab_size", None), False),
            "segments": (np.int32, 4, True),
            "mask": (np.int8, 2, False),
        }
        shape = (data.sequence_length + 1,)
        return {name: Field(shape, *of_tokens[name]) for name in data.arrays}

    def load(self, model: Any, data: Any, **options: int) -> Loader:
        """Opens the data, whose tokens the model must know."""
        samples, vocab_size = data.open(data.sequence_length), getattr(model, "vocab_size", None)
        if vocab_size is not None and samples.vocab_size > vocab_size:
            raise ConfigError(
                f"model.vocab_size: got {vocab_size}, but the data has tokens up to "
                f"{samples.vocab_size - 1}; set it to at least {samples.vocab_size}"
            )
        return Loader(samples, vocab_size=vocab_size, **options)

    def items_per_sample(self, data: Any) -> int:
        """Tokens that a sample predicts."""
        return data.sequence_length

    def batch(self, rows: int, data: Any) -> str:
        """Sequences and their length."""
        return f"{rows} x {data.sequence_length} tokens"

    def unit(self, data: Any) -> str:
        """Nats per whatever a token is."""
        return data.unit


@dataclasses.dataclass(frozen=True)
class Classification:
    """A model of images says which class each is of.

    Args:
        loss_fn: what a step minimizes.
    """

    loss_fn: LossFn = classification_loss
    data = (ImageData, SyntheticImageData)
    item = "images"

    def check(self, model: Any, data: Any) -> None:
        """Images must have the size of the model, where it has one."""
        size = getattr(model, "image_size", data.image_size)
        if data.image_size != size:
            raise ConfigError(
                f"data.image_size: got {data.image_size}, which must be model.image_size={size}; "
                "change one of them"
            )

    def fields(self, model: Any, data: Any) -> dict[str, Field]:
        """Images as bytes, and their classes."""
        shape = (data.image_size, data.image_size, _channels(model))
        num_classes = getattr(model, "num_classes", None)
        return {"x": Field(shape, np.uint8, 256), "y": Field((), np.int32, num_classes)}

    def load(self, model: Any, data: Any, **options: int) -> Loader:
        """Reads or makes the images."""
        num_classes = getattr(model, "num_classes", NO_LIMIT)
        return ImageLoader(load_images(data, _channels(model), num_classes), **options)

    def items_per_sample(self, data: Any) -> int:
        """A sample is an image."""
        return 1

    def batch(self, rows: int, data: Any) -> str:
        """Images and their size."""
        return f"{rows} images of {data.image_size} x {data.image_size}"

    def unit(self, data: Any) -> str:
        """Nats per image."""
        return "nats/image"


def _channels(model: Any) -> int:
    """Numbers per pixel; a model of the user's own that does not say is taken to see colors."""
    return getattr(model, "channels", 3)


@dataclasses.dataclass(frozen=True)
class OwnTask:
    """Samples of the user's own, which a model and a loss take as they are.

    Args:
        loss_fn: what a step minimizes.
    """

    loss_fn: LossFn

    data = (OwnData,)
    item = "samples"

    def check(self, model: Any, data: Any) -> None:
        """Nothing is known of them."""

    def fields(self, model: Any, data: Any) -> dict[str, Field]:
        """The arrays of the first sample."""
        example = data.samples.train(np.array([0]))
        return {name: Field(array.shape[1:], array.dtype) for name, array in example.items()}

    def load(self, model: Any, data: Any, **options: int) -> Loader:
        """Calls the factory of the data."""
        return Loader(data.samples, **options)

    def items_per_sample(self, data: Any) -> int:
        """A sample is a sample."""
        return 1

    def batch(self, rows: int, data: Any) -> str:
        """How many samples."""
        return f"{rows} samples"

    def unit(self, data: Any) -> str:
        """The loss alone knows."""
        return "loss"
