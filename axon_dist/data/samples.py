"""`Samples`: the numbered samples of a loader; user sequences, and mixtures.

Of W windows or user's samples, sample `g` of an endless run is number `g mod W` of epoch
`g div W`; each epoch is reshuffled. A `Mixture` draws from several such orders. A global batch is
the next samples, cut into microbatches, and a process has some rows of each
(`core/batch_rows.py`). Replicas that train independently first get consecutive rows of the
batch, and each cuts its own into microbatches. The counter is the only state, so a run can continue
with another number of processes, and without buckets with another batch size.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import grain
import jax.numpy as jnp
import numpy as np

from ..core.batch_rows import local_rows as local_rows
from ..core.errors import ConfigError
from ..core.tree import has_64_bits


def num_windows(num_tokens: int, length: int) -> int:
    """Counts the windows of `length + 1` tokens in a stream.

    Each window starts at the last token of the previous window, so that every token but the first
    is a target exactly once.

    Args:
        num_tokens: the number of tokens in the stream.
        length: the number of tokens that a model sees, T; a window has one more to predict.

    Returns:
        The number of windows that fit; remaining tokens at the end are not used.

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
                    f"data.files: the data has the token {token}, but tokens count from 0 to "
                    "2^31 - 1; write the files again",
                    code="token-out-of-range",
                )
    return windows.astype(np.int32)


def shuffled(num_samples: int, seed: int) -> grain.MapDataset[int]:
    """Orders samples for an endless run, each epoch in another order.

    Args:
        num_samples: samples per epoch.
        seed: the seed of the order, in [0, 2^32).

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
        num_samples: the number of windows; they overlap if the stream is too short for all.

    Returns:
        First positions, int64 `[num_samples]`.

    Example:
        >>> spread_starts(101, length=10, num_samples=4).tolist()
        [0, 30, 60, 90]
    """
    return np.linspace(0, num_tokens - length - 1, num_samples).astype(np.int64)


def random_of(kind: int, number: int) -> np.random.Generator:
    """Returns a generator that depends only on its purpose (`kind`) and a number."""
    return np.random.Generator(np.random.Philox(key=np.array([kind, number], np.uint64)))


def checksum(*arrays: np.ndarray) -> int:
    """Returns a digest of arrays, below 2^53 so that it is exact in JSON.

    Example:
        >>> checksum(np.arange(3)) == checksum(np.array([0, 2, 1]))
        False
    """
    digest = hashlib.blake2b(digest_size=8)
    for array in arrays:
        dtype = array.dtype
        # NumPy has one `str` for all extension dtypes of a size, such as "<V2" for bfloat16.
        name = dtype.name if dtype.kind == "V" else dtype.str
        digest.update(f"{name}{array.shape}".encode())
        # A view, because a memoryview has neither empty arrays nor the dtypes of extensions.
        digest.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return int.from_bytes(digest.digest()) >> 11


def text_checksum(text: str) -> int:
    """Returns the `checksum` of a text."""
    return checksum(np.frombuffer(text.encode(errors="surrogateescape"), np.uint8))


LocalBatch = dict[str, np.ndarray]
"""The arrays of one process, with `B / P` rows: for text `{"tokens": int32 [B / P, T + 1]}`, for
images `{"x": uint8 [B / P, H, W, C], "y": int32 [B / P]}`."""


@runtime_checkable
class Samples(Protocol):
    """The samples of a loader.

    Samples may have a method `order(seed)`, which returns a grain dataset: its item `g` is the
    number of sample `g` of an endless run. Without this method, every epoch is reshuffled.
    """

    @property
    def description(self) -> str:
        """A one-sentence description of the data."""
        ...

    @property
    def identity(self) -> dict[str, int]:
        """All values that determine the order of samples, including `num_samples` for training.

        `contents` is a checksum of the samples, because other files may have the same size.
        `tokenizer` and `template`, if present, are checksums of the tokenizer and the template.
        """
        ...

    def train(self, numbers: np.ndarray) -> LocalBatch:
        """Returns the training samples with these numbers, `[B]`, each below `num_samples`."""
        ...

    @property
    def num_validation(self) -> int:
        """The number of disjoint validation samples; `spread` can return that many."""
        ...

    def spread(self, count: int) -> np.ndarray:
        """Returns indices of `count` validation samples, `[count, ...]`, the same every time."""
        ...

    def validation(self, places: np.ndarray) -> LocalBatch:
        """Returns the validation samples at some of the indices that `spread` returned."""
        ...


class TokenSamples(Samples, Protocol):
    """Samples of tokens, `"tokens"` int32 `[B, T + 1]`.

    If several documents share a row, `"segments"` int32 `[B, T + 1]` numbers them from 1, with 0
    for padding. `"mask"` int8 `[B, T + 1]` is 0 for tokens that are not targets.
    """

    @property
    def vocab_size(self) -> int:
        """A number above all token ids that were seen."""
        ...

    @property
    def padding(self) -> float:
        """The share of training tokens that are padding."""
        ...

    def show(self, tokens: np.ndarray) -> str:
        """Decodes tokens to readable text."""
        ...


class TwoSides:
    """Samples for training and for validation, each side numbered from 0.

    Attributes:
        sides: the training and the validation side; both have a length, and subclasses define
            their type.
    """

    sides: tuple[Any, Any]

    def take(self, side: Any, numbers: np.ndarray) -> LocalBatch:
        """Returns some samples of a side."""
        raise TypeError(f"{type(self).__name__} does not define how to take samples")

    def train(self, numbers: np.ndarray) -> LocalBatch:
        """Takes samples for training."""
        return self.take(self.sides[0], numbers)

    @property
    def num_validation(self) -> int:
        """The number of validation samples."""
        return len(self.sides[1])

    def spread(self, count: int) -> np.ndarray:
        """Returns evenly spaced numbers of validation samples."""
        return spread_starts(len(self.sides[1]), 0, count)

    def validation(self, places: np.ndarray) -> LocalBatch:
        """Takes samples for validation."""
        return self.take(self.sides[1], places)


_CHECKED = 64
"""The number of samples of a user's sequence that go into its checksum."""


class Sequences(TwoSides):
    """Two map-style datasets, such as those of torch, grain or Hugging Face.

    A dataset has a length, and item `i` is always the same sample: a dict of arrays, or one array,
    which is then named `"x"`. No two threads of a process read it at the same time. As in JAX,
    64-bit numbers become 32-bit ones unless `jax_enable_x64` is set when this is made.

    Args:
        train: the dataset for training.
        validation: the dataset for validation.
        description: a one-sentence description for users.

    Raises:
        ConfigError: when a side is empty, or its samples are not arrays.

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
        # Read once: threads and processes of a loader may have another setting than this one.
        self._is_wide: bool = has_64_bits()
        self.example = _arrays(train, 0, self._is_wide)
        self.given_dtypes = {name: x.dtype.name for name, x in _sample_arrays(train[0], 0).items()}

    @property
    def identity(self) -> dict[str, int]:
        """The number of samples, and a checksum of some, spread over all of them."""
        return {"num_samples": len(self.sides[0]), "contents": self._contents}

    @functools.cached_property
    def _contents(self) -> int:
        arrays = [
            # In 32 bits where these hold the numbers, so that a run may go on with jax_enable_x64.
            array if (narrow := _narrow(array)) is None else narrow
            for side in self.sides
            for number in np.unique(spread_starts(len(side), 0, _CHECKED)).tolist()
            for _, array in sorted(_arrays(side, number, self._is_wide).items())
        ]
        return checksum(*arrays)

    def take(self, side: Any, numbers: np.ndarray) -> LocalBatch:
        """Stacks samples of a side."""
        rows = [_arrays(side, number, self._is_wide) for number in numbers.tolist()]
        shapes = {name: (x.shape, x.dtype) for name, x in self.example.items()}
        for number, row in zip(numbers.tolist(), rows, strict=True):
            row_shapes = {name: (x.shape, x.dtype) for name, x in row.items()}
            if row_shapes != shapes:
                raise ConfigError(
                    f"sample {number} of {self.description} has {_written(row)}, but the first one "
                    f"has {_written(self.example)}; all need the same shapes and dtypes: pad them",
                    code="samples-differ",
                )
        return {name: np.stack([row[name] for row in rows]) for name in shapes}


def _arrays(side: Any, number: int, is_wide: bool) -> dict[str, np.ndarray]:
    """Returns the arrays of a sample, in dtypes that JAX has."""
    arrays = _sample_arrays(side[number], number)
    odd = [name for name, array in arrays.items() if not _is_numeric(array.dtype)]
    if odd or not arrays:
        raise ConfigError(
            f"sample {number} is {side[number]!r:.200}, which must be a dict of arrays of numbers; "
            f"{odd[0] if odd else 'it'} is not one",
            code="sample-not-arrays",
        )
    return {name: _for_jax(array, is_wide) for name, array in arrays.items()}


def _sample_arrays(sample: Any, number: int) -> dict[str, np.ndarray]:
    """Returns the arrays of a sample, in their own dtypes."""
    if isinstance(sample, tuple):
        raise ConfigError(
            f"sample {number} is a tuple of {len(sample)}, {sample!r:.200}, whose parts have no "
            'names; return a dict of arrays, such as {"x": ..., "y": ...}',
            code="sample-is-tuple",
        )
    named = sample if isinstance(sample, Mapping) else {"x": sample}
    arrays = {}
    for name, value in named.items():
        try:
            arrays[str(name)] = np.asarray(value)
        except ValueError as error:
            raise ConfigError(
                f"sample {number} has {value!r:.200} as {name}, which is no array ({error!s:.80}); "
                "pad its rows to one length, or make a dict of several arrays",
                code="sample-not-arrays",
            ) from error
    return arrays


def _is_numeric(dtype: np.dtype) -> bool:
    # bfloat16, float8 and int4 of NumPy have kind "V", as structured arrays do.
    return dtype.kind in "biufc" or (dtype.kind == "V" and jnp.issubdtype(dtype, jnp.number))


def _for_jax(array: np.ndarray, is_wide: bool) -> np.ndarray:
    """Converts numbers to the widest that JAX has: of 64 bits if `is_wide`, else of 32."""
    kind = array.dtype.kind
    if is_wide:
        most = {"f": np.dtype(np.float64), "c": np.dtype(np.complex128)}.get(kind, array.dtype)
        return array if array.dtype.itemsize <= most.itemsize else array.astype(most)
    narrow = _narrow(array)
    if narrow is None:
        raise ConfigError(
            f"a sample has integers up to {max(-int(array.min()), int(array.max()))}, beyond 32 "
            "bits; make them smaller, or set jax_enable_x64"
        )
    return narrow


_NARROW = {"i": np.int32, "u": np.uint32, "f": np.float32, "c": np.complex64}
"""The widest dtypes that JAX has without `jax_enable_x64`, by kind."""


def _narrow(array: np.ndarray) -> np.ndarray | None:
    """Converts 64-bit numbers to 32 bits; returns None for integers that these do not hold."""
    kind = array.dtype.kind
    if kind not in _NARROW or array.dtype.itemsize <= np.dtype(_NARROW[kind]).itemsize:
        return array
    narrow = array.astype(_NARROW[kind])
    return None if kind in "iu" and not np.array_equal(narrow, array) else narrow


def _written(row: Mapping[str, np.ndarray]) -> str:
    return ", ".join(f"{name} {array.dtype}{list(array.shape)}" for name, array in row.items())


_OF_ONES = {"segments": np.int32, "mask": np.int8}
"""Arrays that default to ones: the row is one document, in which every token is a target."""


@dataclasses.dataclass(frozen=True)
class EpochsOf:
    """The epochs of a source of samples.

    Args:
        share: the share of the samples of a run that are of this source.
        size: the number of its samples in an epoch.
    """

    share: float
    size: int

    def after(self, count: float) -> float:
        """Returns the number of epochs after some samples of a run.

        Args:
            count: the number of samples, of all sources.
        """
        return self.share * count / self.size


class Mixture:
    """A mixture of sources; every part of a run has samples of each in proportion to its weight.

    The source and the number of sample `g` of a run depend only on `g`, the weights and the seed.
    Each source has its own epochs: a small source with a large weight is repeated more often.

    Weights are truncated to hundredths of the smallest one, so a share differs by up to 1% of
    itself: weights of 1 and 1.009 draw equally many samples. `description` has the drawn shares.

    Args:
        parts: the sources, all of one sequence length.
        weights: their weights, above 0; they need not sum to 1.

    Raises:
        ConfigError: when a weight is missing or not above 0.

    Example:
        >>> from axon_dist.data import Text, Windows
        >>> texts = [np.full(100, value, np.uint8) for value in (1, 2)]
        >>> parts = [Windows(Text(x, x, 256, "bytes"), length=9) for x in texts]
        >>> mixture = Mixture(parts, [3, 1])
        >>> order = mixture.order(0)
        >>> numbers = np.array([order[g] for g in range(8)])
        >>> mixture.train(numbers)["tokens"][:, 0].tolist().count(1)
        6
    """

    def __init__(self, parts: Sequence[TokenSamples], weights: Sequence[float]):
        if len(parts) != len(weights) or not parts or min(weights) <= 0:
            raise ConfigError(
                f"data.weights: got {list(weights)} for {len(parts)} sources; give one number "
                "above 0 per source",
                code="mixture-weights",
            )
        if any(getattr(part, "buckets", None) is not None for part in parts):
            raise ConfigError(
                "data.buckets of a source in a mixture: the rows of a batch come from several "
                "sources and need one length; leave buckets out, or pack the rows",
                code="buckets-mixture",
            )
        self._parts = parts
        self._shares = np.array(weights, float) / sum(weights)
        sizes = [part.identity["num_samples"] for part in parts]
        self._starts = np.cumsum([0, *sizes])
        self.vocab_size: int = max(part.vocab_size for part in parts)
        self.show = parts[0].show
        drawn = drawn_shares(self._shares.tolist())
        paddings = (s * p.padding for s, p in zip(drawn, parts, strict=True))
        self.padding: float = float(sum(paddings))
        self.description: str = " + ".join(
            f"{100 * share:.3g}% of ({part.description})"
            for share, part in zip(drawn, parts, strict=True)
        )

    @property
    def epochs(self) -> tuple[EpochsOf, ...]:
        """The epochs of each source: a small one with a large weight has the most."""
        sizes = np.diff(self._starts).tolist()
        shares = drawn_shares(self._shares.tolist())
        return tuple(EpochsOf(*pair) for pair in zip(shares, sizes, strict=True))

    @property
    def identity(self) -> dict[str, int]:
        """The combined identities of the sources, and their weights."""
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
        """Reshuffles each source in each of its epochs, and mixes the sources by weight.

        Args:
            seed: the seed of the order.
        """
        parts = []
        for number, part in enumerate(self._parts):
            start = int(self._starts[number])
            # With the same seed, sources of equal size would be shuffled in the same way.
            part_seed = (seed + number * 0x9E3779B9) % 2**32
            order = shuffled(part.identity["num_samples"], part_seed)
            parts.append(order.map(lambda sample, start=start: start + sample))
        return grain.MapDataset.mix(parts, self._shares.tolist())

    def train(self, numbers: np.ndarray) -> LocalBatch:
        """Takes training samples, each from its source."""
        which = np.searchsorted(self._starts, numbers, side="right") - 1
        rows = [
            self._parts[part].train(np.array([number - self._starts[part]]))
            for part, number in zip(which.tolist(), numbers.tolist(), strict=True)
        ]
        return self._concatenate(rows)

    @property
    def num_validation(self) -> int:
        """The largest number of validation samples that repeats none of any source."""
        counts = [part.num_validation for part in self._parts]
        most = max(1, int((np.array(counts) / self._shares).min()))
        part_of = self._parts_of(most)
        # Because of rounding, the shares may take one sample more of a source than it has.
        while most > 1 and (np.bincount(part_of[:most], minlength=len(counts)) > counts).any():
            most -= 1
        return most

    def _parts_of(self, count: int) -> np.ndarray:
        """Returns the source of each of the first `count` validation samples, by the weights."""
        order = grain.MapDataset.mix(
            [grain.MapDataset.source([n]).repeat() for n in range(len(self._parts))],
            self._shares.tolist(),
        )
        return np.array([order[g] for g in range(count)])

    def spread(self, count: int) -> np.ndarray:
        """Returns source and index of validation samples, by the same weights, `[count, 2]`."""
        part_of = self._parts_of(count)
        indices = np.zeros(count, np.int64)
        for number, part in enumerate(self._parts):
            if num := int((part_of == number).sum()):
                indices[part_of == number] = part.spread(num)
        return np.stack([part_of, indices], axis=1)

    def validation(self, places: np.ndarray) -> LocalBatch:
        """Takes validation samples, each from its source."""
        return self._concatenate(
            [self._parts[p].validation(np.array([index])) for p, index in places.tolist()]
        )

    def _concatenate(self, rows: list[LocalBatch]) -> LocalBatch:
        names = [name for name in ("tokens", "segments", "mask") if any(name in r for r in rows)]
        return {name: np.concatenate([_filled(row, name) for row in rows]) for name in names}


def drawn_shares(weights: Sequence[float]) -> list[float]:
    """Returns the shares in which grain mixes sources of these weights.

    Args:
        weights: the weights, above 0.

    Example:
        >>> drawn_shares([1.0, 1.009]), drawn_shares([0.75, 0.25])
        ([0.5, 0.5], [0.75, 0.25])
    """
    # These are the operations of `grain.MapDataset.mix`, in its order. Exact weights would change
    # the order of samples, and runs could not continue from their checkpoints.
    scale = 100 / min(weights)
    counts = [int(weight * scale) for weight in weights]
    return [count / sum(counts) for count in counts]


def _filled(row: LocalBatch, name: str) -> np.ndarray:
    return row[name] if name in row else np.ones(row["tokens"].shape, _OF_ONES[name])
