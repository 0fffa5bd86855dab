"""The `data` section: text, images, images that are made up, or samples of the user's own."""

from __future__ import annotations

import dataclasses
import functools
from types import MappingProxyType
from typing import ClassVar

from axon_dist.core.errors import ConfigError
from axon_dist.data import ImageSource, Samples, Sequences, SyntheticImages, TextSource

from .kinds import Count, Natural
from .own import Own


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextData(TextSource):
    """Which text a run reads, and in pieces of which length.

    Args:
        sequence_length: tokens that a sample predicts.
        num_ahead: batches loaded ahead by a thread; 0 loads each when it is asked for.
    """

    sequence_length: Count = 128
    num_ahead: Natural = 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class ImageData(ImageSource):
    """Which images a run reads.

    Args:
        num_ahead: batches loaded ahead by a thread; 0 loads each when it is asked for.
    """

    num_ahead: Natural = 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class SyntheticImageData(SyntheticImages):
    """Which images a run makes up.

    Args:
        num_ahead: batches made ahead by a thread; 0 makes each when it is asked for.
    """

    num_ahead: Natural = 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class OwnData(Own):
    """Samples of the user's own: `data: {factory: package.module:make, ...}`.

    The factory returns two sequences of samples, for training and for validation, each with a
    length and with items that are dicts of arrays, all alike; or one object with the methods of
    `axon_dist.data.Samples`.

    Args:
        num_ahead: batches loaded ahead by a thread; 0 loads each when it is asked for.
    """

    section: ClassVar[str] = "data"

    num_ahead: Natural = 2

    @functools.cached_property
    def samples(self) -> Samples:
        """What the factory makes, called once.

        Raises:
            ConfigError: when it makes neither samples nor two sequences of them.
        """
        made = self.call()
        if all(hasattr(made, name) for name in ("identity", "train", "spread", "validation")):
            return made
        is_pair = isinstance(made, (tuple, list)) and len(made) == 2
        if not is_pair or not all(hasattr(side, "__getitem__") for side in made):
            raise ConfigError(
                f"data.factory: {self.path} returns a {type(made).__name__}, which must be two "
                "sequences of samples, (training, validation), or one axon_dist.data.Samples"
            )
        train, validation = made
        return Sequences(train, validation, self.path)


DATA: MappingProxyType[str, type] = MappingProxyType(
    {"text": TextData, "images": ImageData, "synthetic_images": SyntheticImageData}
)
"""What `data.kind` can name, each by the dataclass of the section."""

TOKENS: tuple[type, ...] = (TextData,)
"""Those of them that are sequences of tokens."""
