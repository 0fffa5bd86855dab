"""Files of token ids, read on demand: raw numbers in the format of nanoGPT, or `.npy`."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from ..core.errors import ConfigError, reworded
from .files import check_disjoint, find_files, held_out_fraction, small_training_share_note
from .samples import LocalBatch, checksum, num_windows, spread_starts, windows_at
from .store import FileNumbers
from .tokenizer import load_tokenizer


def _numbers(tokens: np.ndarray) -> str:
    return " ".join(map(str, tokens.tolist()))


@dataclasses.dataclass(frozen=True, eq=False)
class Text:
    """Two streams of tokens, for training and for validation.

    Args:
        train: 1-D unsigned integers, the training files one after another; may be memory-mapped.
        validation: the same for the validation files; no token is in both.
        vocab_size: token ids are below it.
        description: one sentence for users.
        document_end: the token that ends a document; windows then have segment ids. None if windows
            ignore document boundaries.
        validation_bytes: the size of the validation files, including bytes that end a document.
        show: decodes tokens to readable text.
        contents: a checksum of the text; None computes it from the tokens.
        made_by: checksums of the tokenizer and other inputs of the tokens, by name.

    Example:
        >>> stream = np.arange(40, dtype=np.uint8)
        >>> Text(stream[:30], stream[30:], 256, "numbers").vocab_size
        256
    """

    train: np.ndarray
    validation: np.ndarray
    vocab_size: int
    description: str
    document_end: int | None = None
    validation_bytes: int | None = None
    show: Callable[[np.ndarray], str] = _numbers
    contents: int | None = None
    made_by: Mapping[str, int] = dataclasses.field(default_factory=dict)


class Windows:
    """The windows of a text as samples.

    Args:
        text: training and validation tokens, one dim each.
        length: the number of tokens that a model sees, T; windows have T + 1.

    Attributes:
        num_validation: the number of consecutive windows in the validation text; remaining tokens
            at the end are left out.
        validation_bytes: the bytes of the validation text, if known.

    Raises:
        ConfigError: the length is out of range, or either side is shorter than a window.

    Example:
        >>> stream = np.arange(40, dtype=np.uint8)
        >>> windows = Windows(Text(stream[:30], stream[30:], 256, "numbers"), length=4)
        >>> windows.train(np.array([0, 1]))["tokens"].tolist()
        [[0, 1, 2, 3, 4], [4, 5, 6, 7, 8]]
    """

    padding = 0.0
    """Windows have no padding."""

    def __init__(self, text: Text, length: int):
        if length < 1:
            raise ConfigError(f"length={length} must be at least 1; change it.")
        for side, stream in (("training", text.train), ("validation", text.validation)):
            if len(stream) <= length:
                raise ConfigError(
                    f"the {side} text has {len(stream)} tokens, fewer than one window of "
                    f"{length + 1}: give more text in data.files, or a shorter length.",
                    code="text-too-short",
                )
        self.text: Text = text
        self.length: int = length
        self.description: str = text.description
        self.vocab_size = text.vocab_size
        self.show = text.show
        self.num_validation: int = num_windows(len(text.validation), length)
        self.validation_bytes: int | None = text.validation_bytes

    @property
    def identity(self) -> dict[str, int]:
        """The length, the number of windows, and checksums of their contents."""
        return {
            "length": self.length,
            "num_samples": num_windows(len(self.text.train), self.length),
            "contents": self._contents,
            **self.text.made_by,
        }

    @functools.cached_property
    def _contents(self) -> int:
        if self.text.contents is not None:
            return self.text.contents
        return checksum(*map(_in_memory, (self.text.train, self.text.validation)))

    def train(self, numbers: np.ndarray) -> LocalBatch:
        """Cuts consecutive windows."""
        return self._cut(self.text.train, numbers * self.length)

    def spread(self, count: int) -> np.ndarray:
        """Returns start positions of windows spread evenly over the validation text."""
        return spread_starts(len(self.text.validation), self.length, count)

    def validation(self, places: np.ndarray) -> LocalBatch:
        """Cuts windows out of the validation text."""
        return self._cut(self.text.validation, places)

    def _cut(self, stream: np.ndarray, starts: np.ndarray) -> LocalBatch:
        tokens = windows_at(stream, starts, self.length)
        if self.text.document_end is None:
            return {"tokens": tokens}
        return {"tokens": tokens, "segments": segments_of(tokens, self.text.document_end)}


def segments_of(tokens: np.ndarray, end: int) -> np.ndarray:
    """Numbers the documents of every row, from 1; the token that ends one belongs to it.

    Args:
        tokens: integers `[B, T]`.
        end: the last token of every document.

    Returns:
        int32 `[B, T]`.

    Example:
        >>> segments_of(np.array([[5, 0, 7, 8, 0, 9]]), end=0).tolist()
        [[1, 1, 2, 2, 2, 3]]
    """
    ended = np.cumsum(tokens == end, axis=-1, dtype=np.int32)
    return 1 + np.concatenate([np.zeros_like(ended[:, :1]), ended[:, :-1]], axis=-1)


_PIECE = 4096
_PIECES = 256


def _in_memory(stream: np.ndarray) -> np.ndarray:
    """Returns a stream for a checksum; of a stream in files, its length and some pieces."""
    if type(stream) is np.ndarray or len(stream) <= _PIECE:
        return stream[np.arange(len(stream))]
    starts = spread_starts(len(stream), _PIECE - 1, _PIECES)
    pieces = stream[starts[:, None] + np.arange(_PIECE)]
    return np.concatenate([pieces.ravel().astype(np.int64), [len(stream)]])


_LOOK = 2**16
"""The number of tokens of a file that are checked before a run; each batch is checked again."""


@dataclasses.dataclass(frozen=True)
class TokenSource:
    """Which files hold token ids, one after another and nothing else.

    They stay on disk: each batch reads its own tokens. nanoGPT's `train.bin` and `val.bin` are such
    files. A `.npy` file has its dtype in its header.

    Args:
        files: paths or globs; several are read as one stream, sorted by name.
        validation_files: paths or globs for validation; empty to take the end of `files`.
        validation_fraction: the share of the tokens for validation, in (0, 1), if there are no
            `validation_files`; None for a tenth.
        dtype: the dtype of files without a header, little-endian.
        document_end: the token that ends every document, such as 50256 for GPT-2: tokens then
            attend only within their document, and the first token of a document is not a target.
            None if windows ignore document boundaries.
        tokenizer: a `tokenizer.json` or SentencePiece `.model`, to show samples as text and to
            generate text and export a run; None if nothing of this is needed.

    Example:
        >>> TokenSource(files=("train.bin",), validation_files=("val.bin",)).validate()
    """

    files: tuple[str, ...] = ()
    validation_files: tuple[str, ...] = ()
    validation_fraction: float | None = None
    dtype: Literal["uint16", "uint32"] = "uint16"
    document_end: int | None = None
    tokenizer: str | None = None

    unit = "nats/token"

    def validate(self) -> None:
        """Checks the values without looking at any file.

        Raises:
            ConfigError: a value is out of range, or there are no files.
        """
        if not self.files:
            raise ConfigError("data.files names no file: name files of tokens, such as train.bin.")
        held_out_fraction(self.validation_fraction, self.validation_files)
        if self.document_end is not None and self.document_end < 0:
            raise ConfigError(
                f"data.document_end={self.document_end} must be a token, at least 0; change it, or "
                "leave it out."
            )

    @property
    def arrays(self) -> tuple[str, ...]:
        """The names of the arrays of a batch."""
        return ("tokens",) if self.document_end is None else ("tokens", "segments")

    def open(self, length: int) -> Windows:
        """Opens the files; their samples are windows of `length + 1` tokens.

        Raises:
            ConfigError: a pattern matches no file, a file is malformed, or a side is shorter than a
                window.
        """
        return Windows(map_tokens(self), length)


def map_tokens(source: TokenSource) -> Text:
    """Opens files of tokens, which stay on disk.

    Args:
        source: the files, and their format.

    Returns:
        Both streams; several files are one stream through `Joined`.

    Raises:
        ConfigError: a pattern matches no file, or a file is malformed.
    """
    source.validate()
    train = _stream(source, source.files)
    end = source.document_end
    most = np.iinfo(train.dtype).max
    if end is not None and end > most:
        raise ConfigError(
            f"data.document_end={end} does not fit into files of {train.dtype.name}, whose largest "
            f"token is {most}, so no document would end; name the token that ends documents there",
            code="document-end-too-large",
        )
    if source.validation_files:
        check_disjoint(find_files(source.files), find_files(source.validation_files))
        validation = _stream(source, source.validation_files)
    else:
        border = len(train) - round(held_out_fraction(source.validation_fraction) * len(train))
        validation = train[border:]
        train = train[:border]
    seen = [_some(side) for side in (train, validation)]
    names = ", ".join(source.files)
    more = {}
    if source.tokenizer is not None:
        more["show"] = load_tokenizer(source.tokenizer).decode
    return Text(
        train=train,
        validation=validation,
        vocab_size=1 + max(end or 0, *(int(part.max(initial=0)) for part in seen)),
        description=f"{names}: {len(train)} tokens for training, {len(validation)} for validation"
        + small_training_share_note(len(train), len(validation), "tokens"),
        document_end=source.document_end,
        **more,
    )


class Joined:
    """A concatenation of arrays in files, `[N_i]` -> `[sum N_i]`, without reading them.

    Indexing with an array copies these elements; a slice is another `Joined`.

    Args:
        parts: the arrays, all of one dtype.
        start: the first element of the concatenation that belongs to this view.
        stop: the first element after the view; None for the end.

    Example:
        >>> joined = Joined([np.arange(3), np.arange(10, 14)])[1:]
        >>> len(joined), joined[np.array([[0, 1], [2, 3]])].tolist()
        (6, [[1, 2], [10, 11]])
    """

    def __init__(
        self, parts: Sequence[np.ndarray | FileNumbers], start: int = 0, stop: int | None = None
    ):
        self._parts = parts
        self._ends = np.cumsum([len(part) for part in parts])
        self._start = start
        self._stop = int(self._ends[-1]) if stop is None else stop

    def __len__(self) -> int:
        return self._stop - self._start

    @property
    def dtype(self) -> np.dtype:
        """The dtype of the elements."""
        return self._parts[0].dtype

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            start, stop, _ = index.indices(len(self))
            return Joined(self._parts, self._start + start, self._start + stop)
        indices = np.asarray(index) + self._start
        part_of = np.searchsorted(self._ends, indices, side="right")
        tokens = np.empty(indices.shape, self._parts[0].dtype)
        for number in np.unique(part_of).tolist():
            mask = part_of == number
            part = self._parts[number]
            tokens[mask] = part[indices[mask] - (self._ends[number] - len(part))]
        return tokens


def _stream(source: TokenSource, patterns: tuple[str, ...]) -> Any:
    parts = [_map(file.path, source.dtype) for file in find_files(patterns)]
    kinds = sorted({str(part.dtype) for part in parts})
    if len(kinds) > 1:
        raise ConfigError(
            f"data.files: {', '.join(patterns)} has tokens of {' and '.join(kinds)}, which are "
            "read as one stream and must be of one dtype; write the files again",
            code="mixed-token-dtypes",
        )
    return Joined(parts)


def _map(path: Path, dtype: str) -> FileNumbers:
    if path.suffix == ".npy":
        return _map_npy(path)
    size = path.stat().st_size
    width = np.dtype(dtype).itemsize
    if not size or size % width:
        raise ConfigError(
            f"{path} has {size} bytes, which is not a whole number of {dtype} tokens of {width} "
            "bytes each; set data.dtype to the dtype that the file was written with",
            code="partial-token",
        )
    kind = np.dtype(dtype).newbyteorder("<")
    tokens = FileNumbers(path, kind, 0, size // width, path.stat().st_ino)
    some = _some(tokens)
    if dtype == "uint16" and len(tokens) > 2 and not some[1::2].any() and some.any():
        raise ConfigError(
            f"{path}: every other token is 0, as if the file had numbers of 4 bytes; set "
            "data.dtype=uint32",
            code="wrong-token-width",
        )
    return tokens


def _map_npy(path: Path) -> FileNumbers:
    # numpy raises a dozen kinds of errors for corrupt headers.
    advice = "write it with np.save, or name raw tokens .bin"
    with reworded(f"{path} is not an .npy file", advice, of=Exception):
        tokens = np.load(path, mmap_mode="r", allow_pickle=False)
    if not isinstance(tokens, np.memmap):
        raise ConfigError(
            f"{path} is an .npz archive and must be one array: write it with np.save",
            code="npz-archive",
        )
    if tokens.ndim != 1 or tokens.dtype.kind not in "ui" or not len(tokens):
        raise ConfigError(
            f"{path} has {tokens.dtype} {tokens.shape} and must be a 1-D array of integers; save "
            "token ids one after another",
            code="tokens-not-1d",
        )
    numbers = FileNumbers(path, tokens.dtype, tokens.offset, len(tokens), path.stat().st_ino)
    if (smallest := int(_some(numbers).min())) < 0:
        raise ConfigError(
            f"{path} has the token {smallest}, but tokens count from 0; write the file again",
            code="negative-token",
        )
    return numbers


def _some(tokens: Any) -> np.ndarray:
    """Reads the first tokens."""
    return np.asarray(tokens[np.arange(min(len(tokens), _LOOK))])
