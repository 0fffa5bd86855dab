"""Windows of one long stream of tokens as samples."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import numpy as np

from axon_dist.core.errors import ConfigError

from .samples import LocalBatch
from .sampling import checksum, num_windows, spread_starts, windows_at


@dataclasses.dataclass(frozen=True, eq=False)
class Text:
    """Two streams of tokens and what they are.

    Args:
        train: 1-D unsigned integers, the training files one after another; may be memory-mapped.
        validation: the same of the validation files; no token is in both.
        vocab_size: token ids are below it.
        description: one sentence for people.
        document_end: the token that ends a document; windows then say where documents meet. None
            where windows run over them.
        validation_bytes: of the validation files; a byte that ends a document counts.
        show: tokens as people read them.
    """

    train: np.ndarray
    validation: np.ndarray
    vocab_size: int
    description: str
    document_end: int | None = None
    validation_bytes: int | None = None
    show: Callable[[np.ndarray], str] = lambda tokens: " ".join(map(str, tokens.tolist()))


class Windows:
    """The windows of a text as samples.

    Args:
        text: training and validation tokens, one dim each.
        length: tokens a model sees, T; windows hold T + 1.

    Raises:
        ConfigError: the length is out of range, or either side is shorter than a window.
    """

    padding = 0.0
    """Windows have none."""

    def __init__(self, text: Text, length: int):
        if length < 1:
            raise ConfigError(f"length={length} must be at least 1; change it.")
        _check_long_enough("training", text.train, length)
        _check_long_enough("validation", text.validation, length)
        self.text: Text = text
        self.length: int = length
        self.description: str = text.description
        self.vocab_size, self.show = text.vocab_size, text.show

    @property
    def identity(self) -> dict[str, int]:
        """The length, how many windows there are, and what they contain."""
        return {
            "length": self.length,
            "num_samples": num_windows(len(self.text.train), self.length),
            "contents": self._contents,
        }

    @functools.cached_property
    def _contents(self) -> int:
        return checksum(*map(_in_memory, (self.text.train, self.text.validation)))

    def train(self, numbers: np.ndarray) -> LocalBatch:
        """Cuts windows that lie side by side."""
        return self._cut(self.text.train, numbers * self.length)

    @property
    def num_validation(self) -> int:
        """Windows of the validation text side by side; less than a window of it is left out."""
        return num_windows(len(self.text.validation), self.length)

    @property
    def validation_bytes(self) -> int | None:
        """How many bytes the validation text has, where that is known."""
        return self.text.validation_bytes

    def spread(self, count: int) -> np.ndarray:
        """First positions of windows all over the validation text."""
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


_PIECE, _PIECES = 4096, 256


def _in_memory(stream: np.ndarray) -> np.ndarray:
    """A stream, or of a mapped one its length and pieces from all over."""
    if type(stream) is np.ndarray or len(stream) <= _PIECE:
        return stream[np.arange(len(stream))]
    starts = spread_starts(len(stream), _PIECE - 1, _PIECES)
    pieces = stream[starts[:, None] + np.arange(_PIECE)]
    return np.concatenate([pieces.ravel().astype(np.int64), [len(stream)]])


def _check_long_enough(side: str, stream: np.ndarray, length: int) -> None:
    if len(stream) <= length:
        raise ConfigError(
            f"the {side} text has {len(stream)} tokens, less than one window of {length + 1}: "
            "give more text in data.files, or a shorter length."
        )
