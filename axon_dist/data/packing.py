"""Packs documents of different lengths into rows of one length, with segment ids."""

from __future__ import annotations

import bisect
import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping
from typing import Literal, Protocol, TypeAlias

import numpy as np

from axon_dist.core.errors import ConfigError

from .buckets import Buckets, bucket_lengths
from .samples import LocalBatch, TwoSides, checksum

TooLong: TypeAlias = Literal["split", "drop", "refuse"]
"""What to do with a document longer than a row: split it into several, drop it, or raise."""


class Documents(Protocol):
    """Documents by number; tokens are read on demand, in the thread that asks for them."""

    def __len__(self) -> int:
        """Returns the number of documents."""
        ...

    def take(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the tokens of a document, `[n]`, and which of them are learned, bool `[n]`."""
        ...

    def lengths(self) -> np.ndarray:
        """Returns the number of tokens of each document, int64 `[N]`."""
        ...

    def cached(self, name: str, make: Callable[[], list[np.ndarray]]) -> list[np.ndarray]:
        """Returns what `make` computes from these documents, from a cache if possible."""
        ...

    def checksum(self) -> int:
        """Returns a checksum of the documents."""
        ...


def pack(lengths: np.ndarray, capacity: int) -> list[list[int]]:
    """Packs items into rows by best fit decreasing.

    Items are placed from longest to shortest, each into the open row with the smallest free space
    that suffices. The number of rows is at most about 11/9 of the optimum.

    Args:
        lengths: the length of each item, from 1 to the capacity, `[N]`.
        capacity: the length of a row.

    Returns:
        For each row, the numbers of its items.

    Example:
        >>> pack(np.array([3, 5, 2, 4, 1]), 5)
        [[1], [3, 4], [0, 2]]
    """
    rows: list[list[int]] = []
    open_rows: dict[int, list[int]] = {}  # by free space
    spaces: list[int] = []  # the sorted keys of `open_rows` that have rows
    sizes = lengths.tolist()
    for number in np.argsort(-lengths, kind="stable").tolist():
        size = sizes[number]
        smallest = bisect.bisect_left(spaces, size)
        if smallest == len(spaces):
            rows.append([])
            row = len(rows) - 1
            space = capacity
        else:
            space = spaces[smallest]
            row = open_rows[space].pop()
            if not open_rows[space]:
                spaces.pop(smallest)
        rows[row].append(number)
        if rest := space - size:
            if not open_rows.setdefault(rest, []):
                bisect.insort(spaces, rest)
            open_rows[rest].append(row)
    return rows


@dataclasses.dataclass(frozen=True, eq=False)
class RowLayout:
    """The pieces of documents in each row.

    Args:
        documents: the documents that the pieces are cut from.
        pieces: document, first token and one past the last token, int64 `[P, 3]`.
        order: the numbers of the pieces, row after row, `[P]`.
        ends: the end of each row in `order`, `[R]`.
        num_dropped: the number of documents left out.
    """

    documents: Documents
    pieces: np.ndarray
    order: np.ndarray
    ends: np.ndarray
    num_dropped: int

    def __len__(self) -> int:
        return len(self.ends)

    @property
    def num_tokens(self) -> int:
        """The number of tokens in all rows, without padding."""
        return int((self.pieces[:, 2] - self.pieces[:, 1]).sum())

    @property
    def num_tokens_by_row(self) -> np.ndarray:
        """The number of tokens of each row, without padding, `[R]`."""
        sizes = self.pieces[self.order, 2] - self.pieces[self.order, 1]
        return np.diff(np.cumsum(sizes)[self.ends - 1], prepend=0)

    def take(self, numbers: np.ndarray, size: int) -> LocalBatch:
        """Returns some rows of `size` tokens, with `segments` and `mask`."""
        tokens = np.zeros((len(numbers), size), np.int32)
        segments = np.zeros((len(numbers), size), np.int32)
        mask = np.zeros((len(numbers), size), np.int8)
        for row, number in enumerate(numbers.tolist()):
            offset = 0
            first = int(self.ends[number - 1]) if number else 0
            placed = self.order[first : int(self.ends[number])]
            for segment, piece in enumerate(self.pieces[placed].tolist(), start=1):
                document, start, stop = piece
                ids, is_learned = self.documents.take(document)
                here = slice(offset, offset + stop - start)
                tokens[row, here] = ids[start:stop]
                segments[row, here] = segment
                mask[row, here] = is_learned[start:stop]
                offset += stop - start
        return {"tokens": tokens, "segments": segments, "mask": mask}


def lay_out(documents: Documents, length: int, packed: bool, too_long: TooLong) -> RowLayout:
    """Decides which documents share a row of `length + 1` tokens.

    Args:
        documents: the documents to lay out.
        length: the number of tokens that a model sees, T.
        packed: whether a row has as many documents as fit, or only one.
        too_long: what to do with documents of more than T + 1 tokens. Consecutive pieces of a split
            document share one token, so that every token but the first is a target once.

    Raises:
        ConfigError: when a document is too long and `too_long` is `refuse`, or none remains.
    """
    lengths = documents.lengths()
    long = np.flatnonzero(lengths > length + 1)
    if len(long) and too_long == "refuse":
        raise ConfigError(
            f"data.sequence_length: {len(long)} of {len(lengths)} documents are longer than "
            f"{length + 1} tokens, the longest has {lengths.max()}; raise it, or set "
            "data.too_long to drop or split"
        )
    is_kept = (lengths >= 2) & ((lengths <= length + 1) | (too_long == "split"))
    retained = np.flatnonzero(is_kept)
    counts = np.maximum(-(-(lengths[retained] - 1) // length), 1)
    document = np.repeat(retained, counts)
    number = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    start = number * length
    stop = np.minimum(start + length + 1, lengths[document])
    pieces = np.stack([document, start, stop], axis=1).astype(np.int64)
    if not len(pieces):
        raise ConfigError(
            f"none of {len(lengths)} documents has from 2 to {length + 1} tokens; give other "
            "documents, or change data.sequence_length",
            code="no-document-fits",
        )

    def packed_rows() -> list[np.ndarray]:
        rows = pack(stop - start, length + 1)
        flat = itertools.chain.from_iterable(rows)
        return [np.fromiter(flat, np.int64, len(pieces)), np.cumsum([len(row) for row in rows])]

    order = np.arange(len(pieces))
    ends = np.arange(1, len(pieces) + 1)
    if packed:
        order, ends = documents.cached(f"rows of {length} {too_long}", packed_rows)
    return RowLayout(documents, pieces, order, ends, len(lengths) - len(retained))


class PackedRows(TwoSides):
    """Documents as samples: rows of `length + 1` tokens with segment ids.

    Args:
        train: documents for training.
        validation: documents for validation.
        length: the number of tokens that a model sees, T.
        packed: whether a row has as many documents as fit, or only one.
        too_long: what to do with documents that do not fit into a row.
        has_mask: whether only a part of a document is learned.
        vocab_size: token ids are below it.
        description: one sentence for users.
        show: decodes tokens to text.
        made_by: checksums of the tokenizer and other inputs of the tokens, by name.
        num_buckets: without packing, the maximum number of lengths that training rows are padded
            to; None pads all rows to `length`.

    Attributes:
        buckets: the lengths of training rows; None if all have one.

    Raises:
        ConfigError: when a document is too long and `too_long` is `refuse`, or a side is empty.

    Example:
        >>> import json, pathlib, tempfile
        >>> from axon_dist.data import JsonlSource
        >>> path = pathlib.Path(tempfile.mkdtemp(), "texts.jsonl")
        >>> lines = [json.dumps({"text": f"line {i}"}) + "\\n" for i in range(20)]
        >>> _ = path.write_text("".join(lines))
        >>> rows = JsonlSource(files=(str(path),)).open(31)
        >>> type(rows).__name__, rows.train(np.array([0]))["segments"].max().item()
        ('PackedRows', 4)
    """

    def __init__(
        self,
        train: Documents,
        validation: Documents,
        length: int,
        *,
        packed: bool,
        too_long: TooLong,
        has_mask: bool,
        vocab_size: int,
        description: str,
        show: Callable[[np.ndarray], str],
        made_by: Mapping[str, int] | None = None,
        num_buckets: int | None = None,
    ):
        self._made_by: dict[str, int] = dict(made_by or {})
        rows = [lay_out(side, length, packed, too_long) for side in (train, validation)]
        self.sides = rows[0], rows[1]
        self.length: int = length
        self.vocab_size: int = vocab_size
        self.show: Callable[[np.ndarray], str] = show
        self._has_mask = has_mask
        self.buckets: Buckets | None = None
        if num_buckets is not None:
            needed = rows[0].num_tokens_by_row - 1
            self.buckets = Buckets(bucket_lengths(needed, length, num_buckets), needed)
        self._how = (length, packed, too_long != "split", *self._lengths)
        dropped = sum(side.num_dropped for side in self.sides)
        none_packed = packed and len(self.sides[0]) == len(rows[0].order) > 1
        text = f"{description}, in {len(self.sides[0])} rows of which {100 * self.padding:.1f}"
        text += "% is padding"
        if self.buckets is not None:
            text += f", padded to {' or '.join(map(str, self._lengths))} tokens"
        if dropped:
            text += f"; {dropped} documents are dropped"
        if none_packed:
            text += f"; no two fit into {length} tokens: raise data.sequence_length"
        self.description: str = text

    @property
    def padding(self) -> float:
        """The share of padding in the training rows."""
        rows = self.sides[0]
        length = self.length if self.buckets is None else self.buckets.mean_length
        return 1 - rows.num_tokens / (len(rows) * (length + 1))

    @property
    def _lengths(self) -> tuple[int, ...]:
        return () if self.buckets is None else self.buckets.lengths

    @property
    def identity(self) -> dict[str, int]:
        """The length, the number of rows, and checksums of their contents."""
        return {
            "length": self.length,
            "num_samples": len(self.sides[0]),
            "contents": self._contents,
            **self._made_by,
        }

    @functools.cached_property
    def _contents(self) -> int:
        sums = [side.documents.checksum() for side in self.sides]
        return checksum(np.array([*sums, *map(int, self._how)]))

    def train(self, numbers: np.ndarray, length: int | None = None) -> LocalBatch:
        """Returns training rows, padded to `length`; None for the length of the samples."""
        return self.take(self.sides[0], numbers, length)

    def take(self, side: RowLayout, numbers: np.ndarray, length: int | None = None) -> LocalBatch:
        """Returns rows of a side, padded to `length`; None for the length of the samples."""
        batch = side.take(numbers, (self.length if length is None else length) + 1)
        if not self._has_mask:
            del batch["mask"]
        return batch
