"""The `data` section: text, images, or images that are made up."""

from __future__ import annotations

import dataclasses
from types import MappingProxyType

from axon_dist.data import ImageSource, SyntheticImages, TextSource

from .kinds import Count, Natural


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


DATA: MappingProxyType[str, type] = MappingProxyType(
    {"text": TextData, "images": ImageData, "synthetic_images": SyntheticImageData}
)
"""What `data.kind` can name, each by the dataclass of the section."""
