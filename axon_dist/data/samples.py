"""`Samples`: what a loader hands out, by number; and sequences of the user's own as samples."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np

from axon_dist.core.errors import ConfigError

from .sampling import checksum, spread_starts

LocalBatch = dict[str, np.ndarray]
"""Arrays of `B / P` rows, those of one process: `{"tokens": int32 [B / P, T + 1]}` of text,
`{"x": uint8 [B / P, H, W, C], "y": int32 [B / P]}` of images."""


class Samples(Protocol):
    """What a loader hands out, sample by sample.

    It may have a method `order(seed)`, a grain dataset whose item `g` is the number of sample `g`
    of an endless run; without it every epoch is shuffled anew.
    """

    @property
    def description(self) -> str:
        """One sentence for people."""
        ...

    @property
    def identity(self) -> dict[str, int]:
        """What the order of samples counts in; `num_samples` of training is part of it.

        `contents` is a checksum of the samples: other files of the same size are other data.
        """
        ...

    def train(self, numbers: np.ndarray) -> LocalBatch:
        """The training samples of some numbers, `[B]`, each below `num_samples`."""
        ...

    @property
    def num_validation(self) -> int:
        """How many validation samples there are that share nothing; `spread` gives so many."""
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


_CHECKED = 64
"""So many samples of a sequence of the user's own go into its checksum."""


class Sequences:
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
        self._train = train
        self._validation = validation
        self.description: str = description
        self.example = _arrays(train, 0)

    @property
    def identity(self) -> dict[str, int]:
        """How many samples there are, and a checksum of some of them all over."""
        return {"num_samples": len(self._train), "contents": self._contents}

    @functools.cached_property
    def _contents(self) -> int:
        arrays = [
            array
            for side in (self._train, self._validation)
            for number in np.unique(spread_starts(len(side), 0, _CHECKED)).tolist()
            for _, array in sorted(_arrays(side, number).items())
        ]
        return checksum(*arrays)

    def train(self, numbers: np.ndarray) -> LocalBatch:
        """Stacks training samples."""
        return self._stack(self._train, numbers)

    @property
    def num_validation(self) -> int:
        """How many samples there are for validation."""
        return len(self._validation)

    def spread(self, count: int) -> np.ndarray:
        """Numbers all over the validation samples."""
        return spread_starts(len(self._validation), 0, count)

    def validation(self, places: np.ndarray) -> LocalBatch:
        """Stacks validation samples."""
        return self._stack(self._validation, places)

    def _stack(self, side: Any, numbers: np.ndarray) -> LocalBatch:
        rows = [_arrays(side, number) for number in numbers.tolist()]
        shapes = {name: (x.shape, x.dtype) for name, x in self.example.items()}
        for number, row in zip(numbers.tolist(), rows, strict=True):
            found = {name: (x.shape, x.dtype) for name, x in row.items()}
            if found != shapes:
                raise ConfigError(
                    f"sample {number} of {self.description} has {_written(row)}, and the first one "
                    f"has {_written(self.example)}; all must be alike: pad them"
                )
        return {name: np.stack([row[name] for row in rows]) for name in shapes}


def _arrays(side: Any, number: int) -> dict[str, np.ndarray]:
    sample = side[number]
    named = sample if isinstance(sample, Mapping) else {"x": sample}
    arrays = {str(name): _narrow(np.asarray(value)) for name, value in named.items()}
    odd = [name for name, array in arrays.items() if array.dtype.kind not in "biufc"]
    if odd or not arrays:
        raise ConfigError(
            f"sample {number} is {sample!r:.200}, which must be a dict of arrays of numbers; "
            f"{odd[0] if odd else 'it'} is none"
        )
    return arrays


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
