"""Reads text files as two streams of tokens, one for training and one for validation."""

from __future__ import annotations

import dataclasses
import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from axon_dist.core.errors import ConfigError

from .files import (
    FEW,
    TextFile,
    check_disjoint,
    check_fits,
    find_files,
    held_out_fraction,
    small_training_share_note,
    split_bytes,
    split_files,
    standard_library_files,
)
from .samples import checksum, text_checksum
from .store import Document, Span, TokenCache
from .tokenizer import Tokenizer, byte_tokenizer, load_tokenizer
from .tokens import Joined, Text, Windows


@dataclasses.dataclass(frozen=True)
class TextSource:
    """Where text comes from and how it becomes tokens.

    Args:
        files: paths or globs; empty for the source of Python's standard library.
        validation_files: paths or globs for validation; empty to split `files`: many files by a
            hash of their names, few files by a share of their bytes.
        validation_fraction: the share for validation, in (0, 1), if there are no
            `validation_files`; None for a tenth.
        tokenizer: a `tokenizer.json` of Hugging Face `tokenizers`, or a SentencePiece
            `.model`; None for bytes.
        cache: the folder in which the tokens of a tokenizer are cached, so that all processes
            together tokenize only once; None for `.axon_tokens` next to the first file.
        max_bytes: on each side of the split, read only the first files by name (or parts of files
            that the split made) that together stay within this many bytes, and cut none; None for
            all.

    Example:
        >>> TextSource(validation_fraction=0.05).validate()
    """

    files: tuple[str, ...] = ()
    validation_files: tuple[str, ...] = ()
    validation_fraction: float | None = None
    tokenizer: str | None = None
    max_bytes: int | None = None
    cache: str | None = None

    def validate(self) -> None:
        """Checks the values without looking at any file.

        Raises:
            ConfigError: a value is out of range, files are not a sequence, or validation files come
                without files or with a fraction.
        """
        for field in ("files", "validation_files"):
            if isinstance(getattr(self, field), str):
                raise ConfigError(
                    f"data.{field}={getattr(self, field)!r} is a string: write a list, even for "
                    "one pattern.",
                    code="files-not-a-list",
                )
        held_out_fraction(self.validation_fraction, self.validation_files)
        if self.max_bytes is not None and self.max_bytes < 1:
            raise ConfigError(
                f"data.max_bytes={self.max_bytes} must be at least 1; leave it out to read all."
            )
        if self.validation_files and not self.files:
            raise ConfigError(
                f"data.validation_files={self.validation_files!s:.80} without data.files: name "
                "the training files as well."
            )

    arrays = ("tokens",)
    """The names of the arrays of a batch."""

    @property
    def unit(self) -> str:
        """The unit of a loss."""
        return "nats/byte" if self.tokenizer is None else "nats/token"

    def open(self, length: int) -> Windows:
        """Reads the text; its samples are windows of `length + 1` tokens."""
        return Windows(load_text(self), length)


def load_text(source: TextSource) -> Text:
    """Reads the files, splits them and tokenizes them.

    Without a tokenizer, bytes are the tokens; each file is followed by one zero byte, which text
    does not contain. With a tokenizer, each file is encoded as one document.

    Args:
        source: where the text comes from.

    Returns:
        Both streams, neither of them empty.

    Raises:
        ConfigError: a pattern matches no file, a side of the split is empty, a file is on both
            sides or is not UTF-8 (with a tokenizer), or the tokenizer cannot be loaded.

    Example:
        >>> text = load_text(TextSource(max_bytes=10_000))
        >>> text.vocab_size, len(text.validation) > 0
        (256, True)
    """
    source.validate()
    train, validation = (_fit(side, source.max_bytes) for side in _sides(source))
    check_fits((*train, *validation))
    more: dict[str, Any] = {}
    note = ""
    if source.tokenizer is None:
        tokenizer = byte_tokenizer()
        streams = [
            np.concatenate([tokenizer.encode(f.read()) for f in s]) for s in (train, validation)
        ]
        more["validation_bytes"] = len(streams[1])
    else:
        tokenizer = load_tokenizer(source.tokenizer)
        folder = TokenCache(train, source.cache)
        streams, digests = zip(
            *(_indexed(folder, side, tokenizer) for side in (train, validation)), strict=True
        )
        more["validation_bytes"] = _size(validation)
        note = folder.note
        more["contents"] = checksum(np.frombuffer(repr(digests).encode(), np.uint8))
        more["made_by"] = {"tokenizer": text_checksum(tokenizer.digest)}
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    origin = ", ".join(source.files) or f"the source of Python {version}'s standard library"
    return Text(
        train=streams[0],
        validation=streams[1],
        vocab_size=tokenizer.vocab_size,
        description=f"{origin}: {_amount(train)} for training, {_amount(validation)} for "
        f"validation, as {tokenizer.name}"
        + small_training_share_note(_size(train), _size(validation), "bytes")
        + note,
        show=tokenizer.decode,
        **more,
    )


def _sides(source: TextSource) -> tuple[Sequence[TextFile], Sequence[TextFile]]:
    files = find_files(source.files) if source.files else standard_library_files()
    if source.validation_files:
        validation = find_files(source.validation_files)
        check_disjoint(files, validation)
        return files, validation
    fraction = held_out_fraction(source.validation_fraction)
    is_few = len(files) * min(fraction, 1 - fraction) < FEW
    train, validation = (split_bytes if is_few else split_files)(files, fraction)
    if not train or not validation:
        empty = "training" if not train else "validation"
        raise ConfigError(
            f"data.validation_fraction={fraction} of {len(files)} files leaves nothing for "
            f"{empty}: give more text, change the fraction, or name data.validation_files."
        )
    return train, validation


def _fit(files: Sequence[TextFile], max_bytes: int | None) -> Sequence[TextFile]:
    """Returns the first files whose total size stays within the limit; never cuts a file."""
    if max_bytes is None:
        return files
    totals = itertools.accumulate(file.size for file in files)
    readable = [file for file, total in zip(files, totals, strict=True) if total <= max_bytes]
    if not readable:
        raise ConfigError(
            f"data.max_bytes={max_bytes} is less than the first file, {files[0].path} of "
            f"{files[0].size} bytes: raise it, because the limit never cuts a file.",
            code="max-bytes-too-small",
        )
    return readable


def _indexed(
    folder: TokenCache, files: Sequence[TextFile], tokenizer: Tokenizer
) -> tuple[Any, list[object]]:
    """Returns the tokens of files, each of them one document, and a key of what determines them."""
    indexed = [
        dataclasses.replace(entry, spans=[(file.start, file.start + file.size, 1, 0)])
        for file, entry in zip(files, folder.index(files, _scan, "text"), strict=True)
    ]

    def make(path: Path, span: Span) -> Iterator[Document]:
        try:
            yield tokenizer.encode(TextFile("", path, *span[:2]).read()), None
        except UnicodeDecodeError as error:
            raise ConfigError(
                f"{path} is not UTF-8 (byte {error.start}): convert it, take it out of "
                "data.files, or train on bytes without data.tokenizer."
            ) from error

    tokens = Joined(folder.tokens(indexed, [tokenizer.digest], make).tokens)
    return tokens, [tokenizer.digest, *((file.digest, file.spans) for file in indexed)]


def _scan(path: Path, update: Callable[[bytes], None]) -> list[Span]:
    update(TextFile("", path).read())
    return []


def _amount(files: Sequence[TextFile]) -> str:
    names = ("part of a file", "parts of files")
    if all(file.stop is None for file in files):
        names = ("file", "files")
    return f"{len(files)} {names[len(files) != 1]} of {_size(files) / 1e6:.2f} MB"


def _size(files: Sequence[TextFile]) -> int:
    return sum(file.size for file in files)
