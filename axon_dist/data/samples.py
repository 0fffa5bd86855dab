"""`Samples`: the samples of a loader, by number; sequences of the user, and mixtures.

Sample `g` of an endless run is the window at place `g mod W` of epoch `g div W`, W windows in the
stream, shuffled anew each epoch. A global batch of B is the next B samples, and process `p` of `P`
holds its rows `[p B/P, (p+1) B/P)`. The counter alone is the state of a run, so it can
go on with another number of processes or another batch.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import grain
import numpy as np

from ..core.errors import ConfigError, DivisibilityError


def num_windows(num_tokens: int, length: int) -> int:
    """Counts the windows of `length + 1` tokens in a stream, each starting on the last of the one
    before, so that every token but the first is a target exactly once.

    Args:
        num_tokens: tokens in the stream.
        length: tokens a model sees, T; a window has one more to predict.

    Returns:
        How many windows fit; what is left at the end is not used.

    Example:
        >>> num_windows(9, 4), num_windows(8, 4)
        (2, 1)
    """
    return max(num_tokens - 1, 0) // length


def windows_at(stream: np.ndarray, starts: np.ndarray, length: int) -> np.ndarray:
    """Cuts windows out of a stream.

    Args:
        stream: tokens `[N]`.
        starts: first position of each window, `[B]`.
        length: T.

    Returns:
        int32 `[B, T + 1]`.

    Raises:
        ConfigError: when a token is below 0 or beyond int32.
    """
    windows = stream[starts[:, None] + np.arange(length + 1)]
    if windows.dtype.itemsize >= 4 and windows.size and windows.dtype != np.int32:
        for token in (int(windows.min()), int(windows.max())):
            if not 0 <= token < 2**31:
                raise ConfigError(
                    f"data.files: the data has the token {token}, and tokens count from 0 to "
                    "2^31 - 1; write the files anew"
                )
    return windows.astype(np.int32)


def local_rows(global_batch: int, process: int, num_processes: int) -> slice:
    """Says which rows of a global batch a process holds.

    Args:
        global_batch: rows over all processes.
        process: which process, from 0.
        num_processes: how many there are.

    Returns:
        A slice of `global_batch / num_processes` rows.

    Raises:
        ConfigError: the batch is empty or there is no such process.
        DivisibilityError: the batch does not divide by the processes.

    Example:
        >>> local_rows(8, process=1, num_processes=2)
        slice(4, 8, None)
    """
    if not 0 <= process < num_processes:
        raise ConfigError(
            f"process {process} of {num_processes} does not exist: give one from 0 to "
            f"{num_processes - 1}."
        )
    if global_batch < 1:
        raise ConfigError(f"a global batch of {global_batch} must have at least 1 row; raise it.")
    size, rest = divmod(global_batch, num_processes)
    if rest:
        near = max(size, 1) * num_processes
        raise DivisibilityError(
            f"a global batch of {global_batch} rows does not divide by {num_processes} processes: "
            f"each loads the same number; choose a multiple of {num_processes}, such as {near}."
        )
    return slice(process * size, (process + 1) * size)


def shuffled(num_samples: int, seed: int) -> grain.MapDataset[int]:
    """Orders samples for an endless run, each epoch in another order.

    Args:
        num_samples: samples per epoch.
        seed: of the order, in [0, 2^32).

    Returns:
        A dataset whose item `g` is the sample at place `g mod num_samples` of epoch
        `g div num_samples`; computed without storing the order.

    Raises:
        ConfigError: the seed is out of range.

    Example:
        >>> order = shuffled(4, seed=0)
        >>> sorted(order[g] for g in range(4)) == sorted(order[g] for g in range(4, 8))
        True
    """
    if not 0 <= seed < 2**32:
        raise ConfigError(f"data seed {seed} must lie in [0, 2^32); choose another.")
    return grain.MapDataset.range(num_samples).seed(seed).shuffle().repeat()


def spread_starts(num_tokens: int, length: int, num_samples: int) -> np.ndarray:
    """Spreads windows evenly over a stream, the same ones every time.

    Args:
        num_tokens: tokens in the stream, more than `length`.
        length: T.
        num_samples: how many windows; they overlap where the stream is shorter than all of them.

    Returns:
        First positions, int64 `[num_samples]`.

    Example:
        >>> spread_starts(101, length=10, num_samples=4).tolist()
        [0, 30, 60, 90]
    """
    return np.linspace(0, num_tokens - length - 1, num_samples).astype(np.int64)


def random_of(kind: int, number: int) -> np.random.Generator:
    """Random numbers that depend on what they are for and on one number alone."""
    return np.random.Generator(np.random.Philox(key=np.array([kind, number], np.uint64)))


def checksum(*arrays: np.ndarray) -> int:
    """A number that other contents of the same sizes do not have, below 2^53 so that JSON holds it.

    Example:
        >>> checksum(np.arange(3)) == checksum(np.array([0, 2, 1]))
        False
    """
    digest = hashlib.blake2b(digest_size=8)
    for array in arrays:
        digest.update(f"{array.dtype.str}{array.shape}".encode())
        digest.update(np.ascontiguousarray(array).data.cast("B"))
    return int.from_bytes(digest.digest()) >> 11


def text_checksum(text: str) -> int:
    """As `checksum`, of a text."""
    return checksum(np.frombuffer(text.encode(errors="surrogateescape"), np.uint8))


LocalBatch = dict[str, np.ndarray]
"""Arrays of `B / P` rows, those of one process: `{"tokens": int32 [B / P, T + 1]}` of text,
`{"x": uint8 [B / P, H, W, C], "y": int32 [B / P]}` of images."""


@runtime_checkable
class Samples(Protocol):
    """The samples of a loader.

    It may have a method `order(seed)`, a grain dataset whose item `g` is the number of sample `g`
    of an endless run; without it every epoch is shuffled anew.
    """

    @property
    def description(self) -> str:
        """One sentence for people."""
        ...

    @property
    def identity(self) -> dict[str, int]:
        """What the order of samples depends on; `num_samples` of training is part of it.

        `contents` is a checksum of the samples: other files of the same size are other data. Where
        there are `tokenizer` and `template`, they are checksums of what made tokens of the files.
        """
        ...

    def train(self, numbers: np.ndarray) -> LocalBatch:
        """The training samples of some numbers, `[B]`, each below `num_samples`."""
        ...

    @property
    def num_validation(self) -> int:
        """How many disjoint validation samples there are; `spread` gives so many."""
        ...

    def spread(self, count: int) -> np.ndarray:
        """Places of `count` validation samples, `[count, ...]`, the same every time."""
        ...

    def validation(self, places: np.ndarray) -> LocalBatch:
        """The validation samples at some of the places."""
        ...


class TokenSamples(Samples, Protocol):
    """Samples of tokens, `"tokens"` int32 `[B, T + 1]`.

    Where several documents share a row, `"segments"` int32 `[B, T + 1]` numbers them from 1, and is
    0 where there is padding; `"mask"` int8 `[B, T + 1]` is 0 where a token is no target.
    """

    @property
    def vocab_size(self) -> int:
        """Token ids that were seen are below it."""
        ...

    @property
    def padding(self) -> float:
        """The share of the tokens of training that are padding."""
        ...

    def show(self, tokens: np.ndarray) -> str:
        """Tokens as people read them."""
        ...


class TwoSides:
    """Samples for training and for validation, each by its number.

    Attributes:
        sides: what has a length, of training and of validation; a subclass says what it gives.
    """

    sides: tuple[Any, Any]

    def take(self, side: Any, numbers: np.ndarray) -> LocalBatch:
        """Some samples of a side."""
        raise TypeError(f"{type(self).__name__} does not say what its samples are")

    def train(self, numbers: np.ndarray) -> LocalBatch:
        """Takes samples for training."""
        return self.take(self.sides[0], numbers)

    @property
    def num_validation(self) -> int:
        """How many samples there are for validation."""
        return len(self.sides[1])

    def spread(self, count: int) -> np.ndarray:
        """Evenly spaced numbers of validation samples."""
        return spread_starts(len(self.sides[1]), 0, count)

    def validation(self, places: np.ndarray) -> LocalBatch:
        """Takes samples of the validation."""
        return self.take(self.sides[1], places)


_CHECKED = 64
"""So many samples of a user's sequence go into its checksum."""


class Sequences(TwoSides):
    """Two sequences of samples, as those of torch, grain or Hugging Face, with their order.

    A sequence has a length and gives sample `i` when asked for item `i`, always the same: a dict of
    arrays, or one array, which is called `"x"`. Samples are asked for one by one, in a thread.

    Args:
        train: for training.
        validation: for validation.
        description: one sentence for people.

    Raises:
        ConfigError: when a side is empty, or its samples are no arrays.

    Example:
        >>> sides = [[{"x": np.full(3, i)} for i in range(n)] for n in (5, 2)]
        >>> Sequences(*sides, "numbers").train(np.array([4, 0]))["x"].tolist()
        [[4, 4, 4], [0, 0, 0]]
    """

    def __init__(self, train: Any, validation: Any, description: str):
        for side, samples in (("training", train), ("validation", validation)):
            if len(samples) < 1:
                raise ConfigError(f"the {side} side of {description} is empty; give it samples")
        self.sides = train, validation
        self.description: str = description
        self.example = _arrays(train, 0)
        self.given_dtypes = {name: x.dtype.name for name, x in _sample_arrays(train[0]).items()}

    @property
    def identity(self) -> dict[str, int]:
        """How many samples there are, and a checksum of some of them all over."""
        return {"num_samples": len(self.sides[0]), "contents": self._contents}

    @functools.cached_property
    def _contents(self) -> int:
        arrays = [
            array
            for side in self.sides
            for number in np.unique(spread_starts(len(side), 0, _CHECKED)).tolist()
            for _, array in sorted(_arrays(side, number).items())
        ]
        return checksum(*arrays)

    def take(self, side: Any, numbers: np.ndarray) -> LocalBatch:
        """Stacks samples of a side."""
        rows = [_arrays(side, number) for number in numbers.tolist()]
        shapes = {name: (x.shape, x.dtype) for name, x in self.example.items()}
        for number, row in zip(numbers.tolist(), rows, strict=True):
            row_shapes = {name: (x.shape, x.dtype) for name, x in row.items()}
            if row_shapes != shapes:
                raise ConfigError(
                    f"sample {number} of {self.description} has {_written(row)}, and the first one "
                    f"has {_written(self.example)}; all must be alike: pad them"
                )
        return {name: np.stack([row[name] for row in rows]) for name in shapes}


def _arrays(side: Any, number: int) -> dict[str, np.ndarray]:
    sample = side[number]
    arrays = {name: _narrow(array) for name, array in _sample_arrays(sample).items()}
    odd = [name for name, array in arrays.items() if array.dtype.kind not in "biufc"]
    if odd or not arrays:
        raise ConfigError(
            f"sample {number} is {sample!r:.200}, which must be a dict of arrays of numbers; "
            f"{odd[0] if odd else 'it'} is none"
        )
    return arrays


def _sample_arrays(sample: Any) -> dict[str, np.ndarray]:
    named = sample if isinstance(sample, Mapping) else {"x": sample}
    return {str(name): np.asarray(value) for name, value in named.items()}


def _narrow(array: np.ndarray) -> np.ndarray:
    """Numbers of at most 32 bits, as JAX takes them."""
    kind, size = array.dtype.kind, array.dtype.itemsize
    if kind not in "iufc" or size <= (8 if kind == "c" else 4):
        return array
    narrow = array.astype(f"{kind}{size // 2}")
    if kind in "iu" and not np.array_equal(narrow, array):
        raise ConfigError(
            f"a sample has integers up to {np.abs(array).max()}, beyond 32 bits; make them smaller"
        )
    return narrow


def _written(row: Mapping[str, np.ndarray]) -> str:
    return ", ".join(f"{name} {array.dtype}{list(array.shape)}" for name, array in row.items())


_OF_ONES = {"segments": np.int32, "mask": np.int8}
"""What is ones where a source has none: one document, every token of which is a target."""


class Mixture:
    """Samples of several sources, so many of each as its weight says in every stretch of the run.

    Which source sample `g` of a run is of, and which of its samples it is, depends on `g`, the
    weights and the seed alone. Each source has separate epochs: one that is small for its weight
    is repeated more often.

    Args:
        parts: the sources, of one length.
        weights: their shares, above 0, in any unit.

    Raises:
        ConfigError: when a weight is missing or not above 0.
    """

    def __init__(self, parts: Sequence[TokenSamples], weights: Sequence[float]):
        if len(parts) != len(weights) or not parts or min(weights) <= 0:
            raise ConfigError(
                f"data.weights: got {list(weights)} for {len(parts)} sources, which must be a "
                "number above 0 for each; write as many"
            )
        self._parts = parts
        self._shares = np.array(weights, float) / sum(weights)
        sizes = [part.identity["num_samples"] for part in parts]
        self._starts = np.cumsum([0, *sizes])
        self.vocab_size: int = max(part.vocab_size for part in parts)
        self.show = parts[0].show
        self.padding: float = float(
            sum((s * p.padding for s, p in zip(self._shares, parts, strict=True)))
        )
        self.description: str = " + ".join(
            f"{100 * share:.3g} % of ({part.description})"
            for share, part in zip(self._shares, parts, strict=True)
        )

    @property
    def identity(self) -> dict[str, int]:
        """What all parts are, and their shares."""
        parts = [part.identity for part in self._parts]
        sums = np.array([part["contents"] for part in parts])
        sizes = ("length", "num_samples", "contents")
        makers = [name for name in parts[0] if name not in sizes]
        common = [name for name in makers if all(name in part for part in parts)]
        made_by = {name: checksum(np.array([part[name] for part in parts])) for name in common}
        return {
            "length": parts[0]["length"],
            "num_samples": int(self._starts[-1]),
            "contents": checksum(sums, self._shares),
            **made_by,
        }

    def order(self, seed: int) -> grain.MapDataset[int]:
        """Each part shuffled by itself, epoch for epoch, and all drawn by their shares.

        Args:
            seed: of the order.
        """
        parts = []
        for number, part in enumerate(self._parts):
            start = int(self._starts[number])
            # Parts of one size would otherwise be shuffled alike.
            part_seed = (seed + number * 0x9E3779B9) % 2**32
            order = shuffled(part.identity["num_samples"], part_seed)
            parts.append(order.map(lambda sample, start=start: start + sample))
        return grain.MapDataset.mix(parts, self._shares.tolist())

    def train(self, numbers: np.ndarray) -> LocalBatch:
        """Takes training samples of the parts that they are of."""
        which = np.searchsorted(self._starts, numbers, side="right") - 1
        rows = [
            self._parts[part].train(np.array([number - self._starts[part]]))
            for part, number in zip(which.tolist(), numbers.tolist(), strict=True)
        ]
        return self._together(rows)

    @property
    def num_validation(self) -> int:
        """So many that no part repeats one."""
        counts = [part.num_validation for part in self._parts]
        most = max(1, int((np.array(counts) / self._shares).min()))
        part_of = self._parts_of(most)
        # Shares that do not come out even may take one more of a part than it has.
        while most > 1 and (np.bincount(part_of[:most], minlength=len(counts)) > counts).any():
            most -= 1
        return most

    def _parts_of(self, count: int) -> np.ndarray:
        """Which part each of some samples of the validation is of, by the shares."""
        order = grain.MapDataset.mix(
            [grain.MapDataset.source([n]).repeat() for n in range(len(self._parts))],
            self._shares.tolist(),
        )
        return np.array([order[g] for g in range(count)])

    def spread(self, count: int) -> np.ndarray:
        """Part and place of samples of the validations, by the same shares, `[count, 2]`."""
        part_of = self._parts_of(count)
        places = np.zeros(count, np.int64)
        for number, part in enumerate(self._parts):
            if num := int((part_of == number).sum()):
                places[part_of == number] = part.spread(num)
        return np.stack([part_of, places], axis=1)

    def validation(self, places: np.ndarray) -> LocalBatch:
        """Takes validation samples of the parts."""
        return self._together(
            [self._parts[p].validation(np.array([place])) for p, place in places.tolist()]
        )

    def _together(self, rows: list[LocalBatch]) -> LocalBatch:
        names = [name for name in ("tokens", "segments", "mask") if any(name in r for r in rows)]
        return {name: np.concatenate([_filled(row, name) for row in rows]) for name in names}


def _filled(row: LocalBatch, name: str) -> np.ndarray:
    return row[name] if name in row else np.ones(row["tokens"].shape, _OF_ONES[name])
