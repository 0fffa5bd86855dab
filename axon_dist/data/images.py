"""Labelled images from `.npz` files, or synthetic ones, split into training and validation."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from axon_dist.core.errors import ConfigError, reworded
from axon_dist.core.files import host_memory

from .files import (
    TextFile,
    check_disjoint,
    check_fits,
    find_files,
    held_out_fraction,
    held_out_mask,
)
from .samples import checksum, random_of

_MOST_IMAGES = 2**28
_MOST_PIXELS = 2**15
PATTERN = 8
"""Height and width of the pattern of a synthetic class."""


@dataclasses.dataclass(frozen=True)
class ImageSource:
    """Which files hold images, all of one size.

    Each file is written by `np.savez` with `images`, uint8 `[N, H, W, C]`, and `labels`, integers
    `[N]`. Every process keeps all of them in memory.

    Args:
        files: paths or globs.
        validation_files: paths or globs for validation; empty to split `files`.
        validation_fraction: the share of images for validation, in (0, 1), if there are no
            `validation_files`; the same images every time; None for a tenth.
        image_size: height and width of an image, in pixels.

    Example:
        >>> ImageSource(files=("train-*.npz",), image_size=32).validate()
    """

    files: tuple[str, ...] = ()
    validation_files: tuple[str, ...] = ()
    validation_fraction: float | None = None
    image_size: int = 32

    def validate(self) -> None:
        """Checks the values without looking at any file.

        Raises:
            ConfigError: a value is out of range, or there are no files.
        """
        if not self.files:
            raise ConfigError(
                "data.files names no file: name .npz files with images and labels, or use "
                "synthetic images, data.kind=synthetic_images.",
                code="no-image-files",
            )
        held_out_fraction(self.validation_fraction, self.validation_files)
        _check_size(self.image_size)

    def find(self, patterns: Sequence[str]) -> Sequence[TextFile]:
        """Returns the files, or folders, that the patterns match."""
        return find_files(patterns)

    def read(
        self, files: Sequence[TextFile], shape: tuple[int, int, int], num_classes: int
    ) -> ImageSet:
        """Reads the images of some files.

        Args:
            files: as returned by `find`.
            shape: height, width and channels.
            num_classes: labels are below it.

        Raises:
            ConfigError: when a file is malformed.
        """
        check_fits(files)
        parts = [_read_file(file.path, shape) for file in files]
        images = ArrayImages(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True)))
        check_labels(images.labels, num_classes, self.files)
        return images


@dataclasses.dataclass(frozen=True)
class SyntheticImages:
    """Synthetic images for runs without files: the pattern of a class, plus noise.

    An image depends only on its number and is made on demand. The classes can be learned, but are
    much easier than those of a real image set.

    Args:
        num_images: the number of images.
        validation_fraction: the share of them for validation, in (0, 1); None for a tenth.
        image_size: height and width of an image, in pixels.

    Example:
        >>> SyntheticImages(num_images=100, image_size=8).validate()
    """

    num_images: int = 10_000
    validation_fraction: float | None = None
    image_size: int = 32

    def validate(self) -> None:
        """Checks the values.

        Raises:
            ConfigError: a value is out of range.
        """
        if not 2 <= self.num_images <= _MOST_IMAGES:
            raise ConfigError(
                f"data.num_images={self.num_images} must be at least 2 and at most {_MOST_IMAGES}; "
                "change it."
            )
        held_out_fraction(self.validation_fraction)
        _check_size(self.image_size)


class ImageSet(Protocol):
    """Labelled images, by number."""

    def __len__(self) -> int:
        """Returns the number of images."""
        ...

    def take(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns images, uint8 `[B, H, W, C]`, and labels, integers `[B]`, by numbers `[B]`."""
        ...

    def checksum(self) -> int:
        """Returns a checksum of the images and labels."""
        ...

    def part(self, mask: np.ndarray) -> ImageSet:
        """Returns the images that a mask `[N]` selects."""
        ...


@dataclasses.dataclass(frozen=True, eq=False)
class Images:
    """Images for training and for validation.

    Args:
        train: for training.
        validation: for validation; no image is in both.
        shape: height, width and channels of an image.
        description: a one-sentence description for users.

    Example:
        >>> images = load_images(SyntheticImages(num_images=20, image_size=8), 3, num_classes=10)
        >>> len(images.train), len(images.validation), images.shape
        (18, 2, (8, 8, 3))
    """

    train: ImageSet
    validation: ImageSet
    shape: tuple[int, int, int]
    description: str


def load_images(source: ImageSource | SyntheticImages, channels: int, num_classes: int) -> Images:
    """Reads or makes images.

    Args:
        source: where they come from.
        channels: numbers per pixel that they must have.
        num_classes: labels are below it.

    Returns:
        Both sides, neither of them empty.

    Raises:
        ConfigError: a value is out of range, a pattern matches no file, a file is malformed, or a
            side is empty.

    Example:
        >>> images = load_images(SyntheticImages(num_images=20, image_size=8), 3, num_classes=10)
        >>> x, y = images.train.take(np.arange(4))
        >>> x.shape, x.dtype.name, y.shape
        ((4, 8, 8, 3), 'uint8', (4,))
    """
    source.validate()
    shape = (source.image_size, source.image_size, channels)
    images: ImageSet
    files: Sequence[TextFile] = ()
    if isinstance(source, SyntheticImages):
        images = MadeImages(np.arange(source.num_images), shape, num_classes)
        origin = "synthetic images"
    else:
        files = source.find(source.files)
        images = source.read(files, shape, num_classes)
        origin = ", ".join(source.files)
    if isinstance(source, ImageSource) and source.validation_files:
        validation_files = source.find(source.validation_files)
        check_disjoint(files, validation_files)
        train = images
        validation = source.read(validation_files, shape, num_classes)
    else:
        held_out = held_out_mask(len(images), held_out_fraction(source.validation_fraction))
        train = images.part(~held_out)
        validation = images.part(held_out)
    size = " x ".join(map(str, shape))
    amounts = f"{len(train)} for training, {len(validation)} for validation, of {size}"
    return Images(train, validation, shape, f"{origin}: {amounts}")


@dataclasses.dataclass(frozen=True, eq=False)
class ArrayImages:
    """Images in memory.

    Args:
        images: uint8 `[N, H, W, C]`.
        labels: integers `[N]`.
    """

    images: np.ndarray
    labels: np.ndarray

    def __len__(self) -> int:
        return len(self.images)

    def take(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Copies some of the images."""
        return self.images[numbers], self.labels[numbers]

    def checksum(self) -> int:
        """Returns a checksum of every pixel and label."""
        return checksum(self.images, self.labels)

    def part(self, mask: np.ndarray) -> ArrayImages:
        """Returns the images that a mask `[N]` selects."""
        return ArrayImages(self.images[mask], self.labels[mask])


@dataclasses.dataclass(frozen=True, eq=False)
class MadeImages:
    """Synthetic images, computed from their numbers.

    Args:
        numbers: the images of this set, `[N]`.
        shape: height, width and channels.
        num_classes: the number of classes.
    """

    numbers: np.ndarray
    shape: tuple[int, int, int]
    num_classes: int

    def __len__(self) -> int:
        return len(self.numbers)

    def take(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Makes some of the images."""
        pairs = [self._draw(number) for number in self.numbers[numbers].tolist()]
        images, labels = zip(*pairs, strict=True)
        return np.stack(images), np.array(labels)

    def checksum(self) -> int:
        """Returns a checksum of the values that determine the images."""
        return checksum(self.numbers, np.array((*self.shape, self.num_classes)))

    def part(self, mask: np.ndarray) -> MadeImages:
        """Returns the images that a mask `[N]` selects."""
        return dataclasses.replace(self, numbers=self.numbers[mask])

    def _draw(self, number: int) -> tuple[np.ndarray, int]:
        height, width, channels = self.shape
        generator = random_of(1, number)
        label = int(generator.integers(self.num_classes))
        coarse = random_of(0, label).integers(0, 256, (PATTERN, PATTERN, channels), np.uint8)
        rows, columns = (np.arange(size) * PATTERN // size for size in (height, width))
        noise = generator.integers(0, 256, self.shape, np.uint8)
        mean = (coarse[rows][:, columns].astype(np.uint16) + noise) // 2
        return mean.astype(np.uint8), label


def check_labels(labels: np.ndarray, num_classes: int, files: Sequence[str]) -> None:
    """Raises `ConfigError` unless labels run from 0 to `num_classes - 1`."""
    outside = labels[(labels < 0) | (labels >= num_classes)]
    if len(outside):
        raise ConfigError(
            f"model.num_classes: got {num_classes}, but {', '.join(files)} has the label "
            f"{outside[0]}; labels run from 0 to num_classes - 1."
        )


def _read_file(path: Path, shape: tuple[int, int, int]) -> tuple[np.ndarray, np.ndarray]:
    # numpy, zipfile and zlib raise a dozen kinds of errors for corrupt bytes.
    what = f"{path} is not an .npz file with the arrays images and labels"
    advice = "write it with np.savez(path, images=..., labels=...)"
    rewording = reworded(what, advice, of=Exception)
    # Opened here, because numpy does not close a file that is not an archive.
    with rewording, path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
        # A small archive may unpack to more than the memory of this host.
        size = sum(item.file_size for item in arrays.zip.infolist())
        memory = host_memory()
        if size > memory:
            raise ValueError(f"it unpacks to {size} bytes, and this host has {memory}")
        images = arrays["images"]
        labels = arrays["labels"]
    if images.dtype != np.uint8 or images.shape[1:] != shape:
        raise ConfigError(
            f"{path} has images of {images.dtype} {images.shape}, which must be uint8 (N, "
            f"{', '.join(map(str, shape))}): data.image_size sets height and width, the model sets "
            "the channels. Change these, or convert the images.",
            code="image-shape",
        )
    if labels.shape != images.shape[:1] or not np.issubdtype(labels.dtype, np.integer):
        raise ConfigError(
            f"{path} has labels of {labels.dtype} {labels.shape}, which must be integers "
            f"({len(images)},), one for each image."
        )
    return images, labels


def _check_size(image_size: int) -> None:
    if not 1 <= image_size <= _MOST_PIXELS:
        raise ConfigError(
            f"data.image_size={image_size} must be at least 1 and at most {_MOST_PIXELS}; set it."
        )
