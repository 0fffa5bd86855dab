"""Tasks: what a model learns from its data, and all that follows from it, in one row for each."""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol

import numpy as np

from axon_dist.core.errors import ConfigError
from axon_dist.core.typing import LossFn, Shape
from axon_dist.data import ImageLoader, Loader, TextLoader, load_images, load_text
from axon_dist.models import classification_loss, next_token_loss

from .data import ImageData, SyntheticImageData, TextData


@dataclasses.dataclass(frozen=True)
class Field:
    """One array of a batch.

    Args:
        shape: of one sample.
        dtype: of integers.
        below: what every number in it is below.
    """

    shape: Shape
    dtype: type
    below: int


class Task(Protocol):
    """What joins a kind of model and a kind of data.

    Attributes:
        loss_fn: what a step minimizes.
        data: the data sections that a model can be trained on.
        item: what throughput counts.
    """

    loss_fn: LossFn
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


class NextToken:
    """A language model predicts each token of a text from those before."""

    loss_fn = staticmethod(next_token_loss)
    data = (TextData,)
    item = "tokens"

    def check(self, model: Any, data: Any) -> None:
        """Sequences must not be too long for the model."""
        if data.sequence_length > model.max_length:
            raise ConfigError(
                f"data.sequence_length: got {data.sequence_length}, which must not exceed "
                f"model.max_length={model.max_length}; lower the one or raise the other"
            )

    def fields(self, model: Any, data: Any) -> dict[str, Field]:
        """Sequences with one token more to predict."""
        return {"tokens": Field((data.sequence_length + 1,), np.int32, model.vocab_size)}

    def load(self, model: Any, data: Any, **options: int) -> Loader:
        """Reads the text, whose tokens the model must know."""
        text = load_text(data)
        if text.vocab_size > model.vocab_size:
            raise ConfigError(
                f"model.vocab_size: got {model.vocab_size}, but the data has tokens up to "
                f"{text.vocab_size - 1}; set it to at least {text.vocab_size}"
            )
        return TextLoader(text, length=data.sequence_length, **options)

    def items_per_sample(self, data: Any) -> int:
        """Tokens that a sample predicts."""
        return data.sequence_length

    def batch(self, rows: int, data: Any) -> str:
        """Sequences and their length."""
        return f"{rows} x {data.sequence_length} tokens"

    def unit(self, data: Any) -> str:
        """Nats per whatever a token is."""
        return "nats/byte" if data.tokenizer is None else "nats/token"


class Classification:
    """A model of images says which class each is of."""

    loss_fn = staticmethod(classification_loss)
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
        shape = (data.image_size, data.image_size, model.channels)
        return {"x": Field(shape, np.uint8, 256), "y": Field((), np.int32, model.num_classes)}

    def load(self, model: Any, data: Any, **options: int) -> Loader:
        """Reads or makes the images."""
        return ImageLoader(load_images(data, model.channels, model.num_classes), **options)

    def items_per_sample(self, data: Any) -> int:
        """A sample is an image."""
        return 1

    def batch(self, rows: int, data: Any) -> str:
        """Images and their size."""
        return f"{rows} images of {data.image_size} x {data.image_size}"

    def unit(self, data: Any) -> str:
        """Nats per image."""
        return "nats/image"
