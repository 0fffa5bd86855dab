"""The `data` section: text, images, images that are made up, or samples of the user's own."""

from __future__ import annotations

import dataclasses
import functools
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, TypeAlias

from axon_dist.core.errors import ConfigError
from axon_dist.data import (
    ImageSource,
    JsonlSource,
    Mixture,
    ParquetSource,
    Samples,
    Sequences,
    SyntheticImages,
    TextSource,
    TokenSource,
)

from .own import Own
from .read import Ahead, Count, OneOf, Positive


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sequence:
    """In which pieces tokens are learned.

    Args:
        sequence_length: tokens that a sample predicts.
        num_ahead: batches loaded ahead by a thread; 0 loads each when it is asked for.
    """

    sequence_length: Count = 128
    num_ahead: Ahead = 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextData(Sequence, TextSource):
    """Which text a run reads, and in pieces of which length."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenData(Sequence, TokenSource):
    """Which files of tokens a run reads, and in pieces of which length."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class JsonlData(Sequence, JsonlSource):
    """Which lines a run reads, and in rows of which length."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParquetData(Sequence, ParquetSource):
    """Which parquet files a run reads, and in rows of which length."""


SOURCES: MappingProxyType[str, type] = MappingProxyType(
    {"text": TextSource, "tokens": TokenSource, "jsonl": JsonlSource, "parquet": ParquetSource}
)
"""What a mixture can be made of."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class MixtureData(Sequence):
    """Several sources, of each so many samples as its weight says.

    Args:
        sources: the parts, each with its `kind` and its own options.
        weights: their shares of the samples, a number above 0 for each, in any unit.
    """

    sources: tuple[Annotated[Any, OneOf(SOURCES, tag="kind")], ...]
    weights: tuple[Positive, ...]

    def validate(self) -> None:
        """Checks that every source has a weight, and that losses are measured alike.

        Raises:
            ConfigError: when not.
        """
        if len(self.weights) != len(self.sources) or not self.sources:
            raise ConfigError(
                f"data.weights: got {list(self.weights)} for {len(self.sources)} sources; write a "
                "number above 0 for each"
            )
        if len(units := {source.unit for source in self.sources}) > 1:
            raise ConfigError(
                f"data.sources: got losses in {' and '.join(sorted(units))}, which cannot be "
                "mixed; give all sources a tokenizer, or none"
            )
        if len(named := {source.tokenizer for source in self.sources} - {None}) > 1:
            raise ConfigError(
                f"data.sources: got the tokenizers {' and '.join(sorted(named))}, whose tokens "
                "mean different things; give all sources one"
            )

    @property
    def tokenizer(self) -> str | None:
        """The tokenizer of the sources that name one."""
        return next((s.tokenizer for s in self.sources if s.tokenizer is not None), None)

    @property
    def unit(self) -> str:
        """What a loss is measured in."""
        return self.sources[0].unit

    @property
    def arrays(self) -> tuple[str, ...]:
        """The names of the arrays of a batch: all that any source has."""
        names = {name for source in self.sources for name in source.arrays}
        return tuple(name for name in ("tokens", "segments", "mask") if name in names)

    def open(self, length: int) -> Mixture:
        """Opens every source."""
        return Mixture([source.open(length) for source in self.sources], self.weights)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ImageData(ImageSource):
    """Which images a run reads.

    Args:
        num_ahead: batches loaded ahead by a thread; 0 loads each when it is asked for.
    """

    num_ahead: Ahead = 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class SyntheticImageData(SyntheticImages):
    """Which images a run makes up.

    Args:
        num_ahead: batches made ahead by a thread; 0 makes each when it is asked for.
    """

    num_ahead: Ahead = 2


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

    num_ahead: Ahead = 2

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
    {
        "text": TextData,
        "tokens": TokenData,
        "jsonl": JsonlData,
        "parquet": ParquetData,
        "mixture": MixtureData,
        "images": ImageData,
        "synthetic_images": SyntheticImageData,
    }
)
"""What `data.kind` can name, each by the dataclass of the section."""

TokensData: TypeAlias = TextData | TokenData | JsonlData | ParquetData | MixtureData
"""A section whose samples are sequences of tokens."""

TOKENS: tuple[type[TokensData], ...] = (TextData, TokenData, JsonlData, ParquetData, MixtureData)
"""Those of `DATA` whose samples are sequences of tokens."""
