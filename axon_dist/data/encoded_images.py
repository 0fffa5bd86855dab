"""Images as JPEG, PNG and others, decoded when they are asked for: of folders, or of records."""

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
from .store import Document, Folder

SUFFIXES = frozenset(
    {".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm"}
)
"""Of files in folders that are images."""

_FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "PPM")
"""The formats that Pillow may decode; for some others it runs programs."""

_MODES: Mapping[int, str] = MappingProxyType({1: "L", 3: "RGB", 4: "RGBA"})
_MOST_PIXELS, _MOST_BYTES = 2**26, 2**28

Shape: TypeAlias = tuple[int, int, int]


@dataclasses.dataclass(frozen=True, eq=False)
class EncodedImages:
    """Images that are decoded when they are asked for, cut to the middle and resized.

    Args:
        read: the number of an image -> its origin, for messages, and its bytes.
        labels: of all images that `read` knows, integers.
        numbers: which of them these are, `[N]`.
        shape: height, width and channels that they get.
        contents: a checksum of all of them.
    """

    read: Callable[[int], tuple[str, bytes]]
    labels: np.ndarray
    numbers: np.ndarray
    shape: Shape
    contents: int

    def __len__(self) -> int:
        return len(self.numbers)

    def take(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Decodes some of them."""
        stored = self.numbers[numbers]
        images = [decode(*self.read(number), self.shape) for number in stored.tolist()]
        return np.stack(images), self.labels[stored]

    def checksum(self) -> int:
        """Of what they are read from, and of which they are."""
        return checksum(np.array([self.contents]), self.numbers, self.labels)

    def part(self, mask: np.ndarray) -> EncodedImages:
        """Those that a mask `[N]` chooses."""
        return dataclasses.replace(self, numbers=self.numbers[mask])


def decode(origin: str, data: bytes, shape: Shape) -> np.ndarray:
    """Decodes an image, turns it upright, crops it to the aspect ratio and resizes it.

    An image is as a viewer shows it: its EXIF orientation is applied, and where it is transparent
    and the model sees no transparency, it lies on white.

    Args:
        origin: the file or record that holds it, for messages.
        data: the bytes of a file.
        shape: height, width and channels: 1 grey, 3 colors, 4 with transparency.

    Returns:
        uint8 `[H, W, C]`.

    Raises:
        ConfigError: when it is no image, is cut short, has too many pixels, or its pixels are
            numbers of 32 bits.
    """
    height, width, channels = shape
    pillow, ops = _pillow("Image"), _pillow("ImageOps")
    # Pillow raises a dozen kinds of errors for corrupt bytes.
    advice = "write it anew, or remove it"
    rewording = reworded(f"{origin} is no image that can be decoded", advice, of=Exception)
    with rewording, pillow.open(io.BytesIO(data), formats=_FORMATS) as image:
        if (pixels := image.width * image.height) > _MOST_PIXELS:
            raise ValueError(f"it has {pixels} pixels, more than {_MOST_PIXELS}")
        if image.mode in ("I", "F"):
            raise ValueError(f"its pixels are of mode {image.mode}, and not of 8 or 16 bits")
        # A JPEG is decoded at half the size or less where that leaves twice the wanted size; one
        # that lies on its side is cut after it was turned.
        longest = 2 * max(width, height)
        image.draft(None, (longest, longest))
        upright = ops.exif_transpose(image)
        fitted = ops.fit(_converted(pillow, upright, _MODES[channels]), (width, height))
        return np.asarray(fitted).reshape(shape)


def _converted(pillow: Any, image: Any, mode: str) -> Any:
    """The image in grey, colors, or colors with transparency.

    The colors of transparent pixels are arbitrary, so that they are laid on white first. Colors of
    a palette may be transparent, too.
    """
    if image.mode.startswith("I;16"):
        # Pillow's own conversion cuts at 255; colors of 16 bits are read by their high byte, too.
        image = pillow.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    if mode == "RGBA" or not image.has_transparency_data:
        return image.convert(mode)
    # Premultiplied colors ("RGBa", "La") are divided by this conversion.
    shown = image.convert("RGBA")
    white = pillow.new("RGBA", shown.size, "white")
    return pillow.alpha_composite(white, shown).convert(mode)


def _pillow(name: str) -> Any:
    return require(f"PIL.{name}", "images", "decoding images")


def _check_decodes(shape: Shape) -> None:
    _pillow("Image")
    if shape[2] not in _MODES:
        raise ConfigError(
            f"model.channels: got {shape[2]}, and an image has 1, 3 or 4 numbers for a pixel; "
            "change it"
        )


@dataclasses.dataclass(frozen=True)
class ImageFolder(ImageSource):
    """Folders with one folder for each class, with its images, as torchvision has them.

    Classes are numbered in the order of their names, and those of `validation_files` are the same.
    Images are cut to the middle and resized when they are read.

    Args:
        files: the folders, or globs of them.
        validation_files: folders kept for validation; empty to draw images of `files`.
    """

    def find(self, patterns: Sequence[str]) -> Sequence[TextFile]:
        """The folders."""
        return find_files(patterns, kind="a folder")

    def read(self, files: Sequence[TextFile], shape: Shape, num_classes: int) -> ImageSet:
        """Lists the images; none is opened before it is asked for."""
        _check_decodes(shape)
        known = sorted({p.name for f in self.find(self.files) for p in _folders_in(f.path)})
        rows: list[tuple[bytes, int, int]] = []
        for file in files:
            for folder in _folders_in(file.path):
                if folder.name not in known:
                    raise ConfigError(
                        f"{folder} is of no class that data.files has; remove or rename it"
                    )
                label = known.index(folder.name)
                rows += [(os.fsencode(p), size, label) for p, size in _images_in(folder)]
        if not rows:
            raise ConfigError(
                f"data.files: {', '.join(str(f.path) for f in files)} has no folders with images; "
                "name a folder that has one folder for each class"
            )
        paths, sizes, labels = zip(*sorted(rows), strict=True)
        # Arrays of bytes, because each worker process gets a copy.
        names, labels = np.array(paths), np.array(labels)
        check_labels(labels, num_classes, self.files)
        inside = [os.fsencode(os.path.join(*Path(os.fsdecode(p)).parts[-2:])) for p in paths]
        contents = checksum(np.array(inside), np.array(sizes))

        def encoded(number: int) -> tuple[str, bytes]:
            path = os.fsdecode(bytes(names[number]))
            return path, read_bytes(Path(path), f"the image {path}", most=_MOST_BYTES)

        return EncodedImages(encoded, labels, np.arange(len(labels)), shape, contents)


def _folders_in(folder: Path) -> list[Path]:
    with reworded(f"{folder} cannot be read", "correct it"):
        return [path for path in folder.iterdir() if kind_at(path) == "a folder"]


def _images_in(folder: Path) -> list[tuple[str, int]]:
    """The paths of the images below a folder, and their sizes."""
    sized: list[tuple[str, int]] = []
    for root, folders, files in os.walk(folder):
        if links := [name for name in folders if os.path.islink(os.path.join(root, name))]:
            raise ConfigError(
                f"{os.path.join(root, links[0])} is a link to a folder, which may lead round in "
                "circles; link the folder of the class itself, or its images"
            )
        images = [name for name in files if os.path.splitext(name)[1].lower() in SUFFIXES]
        for path in (os.path.join(root, name) for name in images):
            if (kind := kind_at(Path(path))) != "a file":
                raise ConfigError(f"{path} is {kind or 'a link to nothing'}, no file; remove it")
            sized.append((path, os.path.getsize(path)))
    return sized


READERS: MappingProxyType[str, type[DocumentSource]] = MappingProxyType(
    {".parquet": ParquetSource, ARROW: DatasetsSource, ".array_record": ArrayRecordSource}
)
"""The readers of files of records, by the suffix of their names, without a last number."""


@dataclasses.dataclass(frozen=True)
class ImageRecords(ImageSource):
    """Records with an image and a label, in parquet, Arrow or ArrayRecord by the names of files.

    An image is the bytes of a JPEG, a PNG..., or `{bytes: ...}`, as Hugging Face's data sets of
    images have it. The first run copies images to `cache`, where each can be read at random.

    Args:
        image: the field of the image.
        label: the field of its class, a whole number.
        cache: the folder of the copy; None for `.axon_tokens` beside the first file.
    """

    image: str = "image"
    label: str = "label"
    cache: str | None = None

    def read(self, files: Sequence[TextFile], shape: Shape, num_classes: int) -> ImageSet:
        """Copies images that were not copied before, and reads labels."""
        _check_decodes(shape)
        ends = {next((end for end in READERS if end in f.path.name), None) for f in files}
        end, *others = ends
        if end is None or others:
            raise ConfigError(
                f"data.files: {', '.join(self.files)} must be of one kind, {', '.join(READERS)}; "
                "name such files, or take a folder, data.kind=image_folder"
            )
        # The two fields that the records are read for.
        reader = READERS[end](files=self.files, prompt=self.label, response=self.image)
        folder = Folder(files, self.cache)
        how = ["image", self.image, self.label]
        documents = reader.documents(folder, files, how, self._document)
        [labels] = documents.cached("labels", lambda: [_labels(documents)])
        check_labels(labels, num_classes, self.files)

        def encoded(number: int) -> tuple[str, bytes]:
            data = documents.take(number)[0].tobytes()
            return f"image {number} of {', '.join(self.files)}", data[_LABEL:]

        return EncodedImages(encoded, labels, np.arange(len(labels)), shape, documents.checksum())

    def _document(self, located: Record) -> Document:
        """The label as eight bytes, and the image."""
        name, record = located
        image, label = record.get(self.image), record.get(self.label)
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


def _labels(documents: StoredDocuments) -> np.ndarray:
    heads = [documents.store.take(number, _LABEL)[0].tobytes() for number in range(len(documents))]
    return np.array([int.from_bytes(head, "little", signed=True) for head in heads])
