"""JPEG, PNG and other encoded images, from folders or records, decoded on demand."""

from __future__ import annotations

import dataclasses
import io
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeAlias

import numpy as np

from ..core.errors import ConfigError, require, reworded
from ..core.files import kind_at, read_bytes
from .array_record import ArrayRecordSource
from .arrow import ARROW, DatasetsSource, ParquetSource
from .documents import DocumentSource, Record, StoredDocuments
from .files import TextFile, find_files
from .images import ImageSet, ImageSource, check_labels
from .samples import checksum
from .store import Document, TokenCache

SUFFIXES = frozenset(
    {".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm"}
)
"""The suffixes of image files in folders."""

_FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "PPM")
"""The formats that Pillow may decode; for some others it would start external programs."""

_SCALED = ("PPM", "PNG")
"""The formats whose mode "I" holds 16 bits; in others it has 32.

Pillow scales a PGM of 9 to 16 bits to 16, and some versions open a PNG of 16 bits in this mode."""

_MODES: Mapping[int, str] = MappingProxyType({1: "L", 3: "RGB", 4: "RGBA"})
_MOST_PIXELS = 2**26
_MOST_BYTES = 2**28

Shape: TypeAlias = tuple[int, int, int]


@dataclasses.dataclass(frozen=True, eq=False)
class EncodedImages:
    """Images that are decoded on demand, center-cropped and resized.

    Args:
        read: maps the number of an image to its origin, for error messages, and its bytes.
        labels: the integer labels of all images that `read` can read.
        numbers: the images of this set, `[N]`.
        shape: height, width and channels of the decoded images.
        contents: a checksum of all images.
    """

    read: Callable[[int], tuple[str, bytes]]
    labels: np.ndarray
    numbers: np.ndarray
    shape: Shape
    contents: int

    def __len__(self) -> int:
        return len(self.numbers)

    def take(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Decodes some of the images."""
        stored = self.numbers[numbers]
        images = [decode(*self.read(number), self.shape) for number in stored.tolist()]
        return np.stack(images), self.labels[stored]

    def checksum(self) -> int:
        """Returns a checksum of the source, the selection and the labels."""
        return checksum(np.array([self.contents]), self.numbers, self.labels)

    def part(self, mask: np.ndarray) -> EncodedImages:
        """Returns the images that a mask `[N]` selects."""
        return dataclasses.replace(self, numbers=self.numbers[mask])


def decode(origin: str, data: bytes, shape: Shape) -> np.ndarray:
    """Decodes an image, applies its EXIF orientation, crops it to the aspect ratio and resizes it.

    Transparent pixels are blended with white, as image viewers show them, unless the model has an
    alpha channel.

    Args:
        origin: the file or record that holds the image, for error messages.
        data: the bytes of a file.
        shape: height, width and channels: 1 grey, 3 colors, 4 with transparency.

    Returns:
        uint8 `[H, W, C]`.

    Raises:
        ConfigError: when `data` is not an image, is truncated, has too many pixels, or has 32-bit
            pixels.
    """
    height, width, channels = shape
    pillow = _pillow("Image")
    ops = _pillow("ImageOps")
    # Pillow raises a dozen kinds of errors for corrupt bytes.
    advice = "write it again, or remove it"
    rewording = reworded(f"{origin} is not an image that can be decoded", advice, of=Exception)
    with rewording, pillow.open(io.BytesIO(data), formats=_FORMATS) as image:
        if (pixels := image.width * image.height) > _MOST_PIXELS:
            raise ValueError(f"it has {pixels} pixels, more than {_MOST_PIXELS}")
        if image.mode == "F" or (image.mode == "I" and image.format not in _SCALED):
            raise ConfigError(
                f"{origin} is not an image that can be decoded: its pixel mode is {image.mode}, "
                "which is neither 8 nor 16 bits; write it again as a PNG of 8 or 16 bits, or "
                "remove it",
                code="image-bits",
            )
        # Decode a JPEG at a reduced size that is still at least twice the wanted one. Both dims use
        # the longer side, because the image may be rotated afterwards.
        longest = 2 * max(width, height)
        image.draft(None, (longest, longest))
        upright = ops.exif_transpose(image)
        fitted = ops.fit(_converted(pillow, upright, _MODES[channels]), (width, height))
        return np.asarray(fitted).reshape(shape)


def _converted(pillow: Any, image: Any, mode: str) -> Any:
    """Converts an image to grey, RGB or RGBA.

    Without an alpha channel, the image is first blended with white, because the colors of
    transparent pixels are arbitrary. Palette images may be transparent, too.
    """
    if image.mode == "I" or image.mode.startswith("I;16"):
        # Pillow's own conversion clips at 255. It reads 16-bit colors by their high byte; do the
        # same here.
        image = pillow.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    if mode == "RGBA" or not image.has_transparency_data:
        return image.convert(mode)
    # This conversion also undoes premultiplied alpha ("RGBa", "La").
    shown = image.convert("RGBA")
    white = pillow.new("RGBA", shown.size, "white")
    return pillow.alpha_composite(white, shown).convert(mode)


def _pillow(name: str) -> Any:
    return require(f"PIL.{name}", "images", "decoding images")


def _check_decodes(shape: Shape) -> None:
    _pillow("Image")
    if shape[2] not in _MODES:
        raise ConfigError(
            f"model.channels: got {shape[2]}, but encoded images have 1, 3 or 4 channels; "
            "change it",
            code="image-channels",
        )


@dataclasses.dataclass(frozen=True)
class ImageFolder(ImageSource):
    """Folders with one subfolder of images per class, like torchvision's `ImageFolder`.

    Classes are numbered by the order of their names; `validation_files` use the same numbers.
    Images are center-cropped and resized when they are read.

    Args:
        files: the folders, or globs of them.
        validation_files: folders for validation; empty to draw images from `files`.

    Example:
        >>> ImageFolder(files=("imagenet/train",), validation_files=("imagenet/val",)).validate()
    """

    def find(self, patterns: Sequence[str]) -> Sequence[TextFile]:
        """Returns the folders that the patterns match."""
        return find_files(patterns, kind="a folder")

    def read(self, files: Sequence[TextFile], shape: Shape, num_classes: int) -> ImageSet:
        """Lists the images; opens none of them."""
        _check_decodes(shape)
        trained = {file.path for file in self.find(self.files)}
        known = sorted({folder.name for path in trained for folder in _folders_in(path)})
        rows: list[tuple[bytes, int, int]] = []
        for file in files:
            for folder in _folders_in(file.path):
                if folder.name not in known:
                    raise ConfigError(
                        f"{folder} is not a class of data.files; remove or rename it",
                        code="unknown-image-class",
                    )
                images = _images_in(folder)
                if not images and file.path in trained:
                    # As torchvision does: it would shift the numbers of the classes after it.
                    raise ConfigError(
                        f"{folder} has no images, so it is no class of data.files; remove it, or "
                        "add its images",
                        code="image-class-without-images",
                    )
                label = known.index(folder.name)
                rows += [(os.fsencode(p), size, label) for p, size in images]
        if not rows:
            raise ConfigError(
                f"data.files: {', '.join(str(f.path) for f in files)} has no folders with images; "
                "name a folder that has one subfolder per class",
                code="no-image-folders",
            )
        paths, sizes, labels = zip(*sorted(rows), strict=True)
        # Arrays rather than lists of strings, because each worker process gets a copy.
        names = np.array(paths)
        labels = np.array(labels)
        check_labels(labels, num_classes, self.files)
        inside = [os.fsencode(os.path.join(*Path(os.fsdecode(p)).parts[-2:])) for p in paths]
        contents = checksum(np.array(inside), np.array(sizes))

        def encoded(number: int) -> tuple[str, bytes]:
            path = os.fsdecode(bytes(names[number]))
            return path, read_bytes(Path(path), f"the image {path}", most=_MOST_BYTES)

        return EncodedImages(encoded, labels, np.arange(len(labels)), shape, contents)


def _folders_in(folder: Path) -> list[Path]:
    """Returns the folders in a folder, without hidden ones such as `.ipynb_checkpoints`."""
    with reworded(f"{folder} cannot be read", "correct it"):
        visible = [path for path in folder.iterdir() if not path.name.startswith(".")]
        return [path for path in visible if kind_at(path) == "a folder"]


def _images_in(folder: Path) -> list[tuple[str, int]]:
    """Returns the paths of the images below a folder, and their sizes."""
    sized: list[tuple[str, int]] = []
    for root, folders, files in os.walk(folder):
        if links := [name for name in folders if os.path.islink(os.path.join(root, name))]:
            raise ConfigError(
                f"{os.path.join(root, links[0])} is a link to a folder, which may form a cycle; "
                "link the folder of the class itself, or its images",
                code="link-to-folder",
            )
        images = [name for name in files if os.path.splitext(name)[1].lower() in SUFFIXES]
        for path in (os.path.join(root, name) for name in images):
            if (kind := kind_at(Path(path))) != "a file":
                raise ConfigError(
                    f"{path} is {kind or 'a dangling link'} and must be a file; remove it",
                    code="not-a-file",
                )
            sized.append((path, os.path.getsize(path)))
    return sized


READERS: MappingProxyType[str, type[DocumentSource]] = MappingProxyType(
    {".parquet": ParquetSource, ARROW: DatasetsSource, ".array_record": ArrayRecordSource}
)
"""The readers of record files, by suffix, ignoring a shard number at the end."""


@dataclasses.dataclass(frozen=True)
class ImageRecords(ImageSource):
    """Records with an image and a label, in Parquet, Arrow or ArrayRecord files.

    The image field holds the bytes of a JPEG, PNG or other image file, or `{bytes: ...}` as in
    Hugging Face's image datasets. The first run copies the images to `cache`, which allows random
    access.

    Args:
        image: the field of the image.
        label: the field of its class, a whole number.
        cache: the folder of the copy; None for `.axon_tokens` next to the first file.

    Example:
        >>> ImageRecords(files=("train-*.parquet",)).validate()
    """

    image: str = "image"
    label: str = "label"
    cache: str | None = None

    def read(self, files: Sequence[TextFile], shape: Shape, num_classes: int) -> ImageSet:
        """Copies images that are not cached yet, and reads the labels."""
        _check_decodes(shape)
        ends = {next((end for end in READERS if end in f.path.name), None) for f in files}
        end, *others = ends
        if end is None or others:
            raise ConfigError(
                f"data.files: {', '.join(self.files)} must all be files of one kind, one of "
                f"{', '.join(READERS)}; name such files, or set data.kind=image_folder to read "
                "folders",
                code="mixed-record-files",
            )
        # `prompt` and `response` are the two fields that the source reads.
        reader = READERS[end](files=self.files, prompt=self.label, response=self.image)
        folder = TokenCache(files, self.cache)
        how = ["image", self.image, self.label]
        documents = reader.documents(folder, files, how, self._document)
        [labels] = documents.cached("labels", lambda: [_labels(documents)])
        check_labels(labels, num_classes, self.files)

        def encoded(number: int) -> tuple[str, bytes]:
            data = documents.take(number)[0].tobytes()
            return f"image {number} of {', '.join(self.files)}", data[_LABEL:]

        return EncodedImages(encoded, labels, np.arange(len(labels)), shape, documents.checksum())

    def _document(self, located: Record) -> Document:
        """Encodes a record as the label in eight bytes, then the image."""
        name, record = located
        image = record.get(self.image)
        label = record.get(self.label)
        image = image.get("bytes") if isinstance(image, Mapping) else image
        if not isinstance(image, bytes) or not image:
            raise ConfigError(
                f"{name} has no bytes under {self.image!r}, which must be an image; set data.image"
            )
        if not isinstance(label, int) or not -(2**63) <= label < 2**63:
            raise ConfigError(
                f"{name} has {label!r:.60} under {self.label!r}, which must be a whole number; "
                "set data.label"
            )
        return np.frombuffer(label.to_bytes(_LABEL, "little", signed=True) + image, np.uint8), None


_LABEL = 8
"""The number of bytes of a label."""


def _labels(documents: StoredDocuments) -> np.ndarray:
    heads = [documents.store.take(number, _LABEL)[0].tobytes() for number in range(len(documents))]
    return np.array([int.from_bytes(head, "little", signed=True) for head in heads])
