"""Length buckets: less padding for documents that are not packed.

Each document is a row, padded to the next larger bucket length. All rows of a batch have the same
length. There are only a few lengths, because each one is a separate program to compile.
"""

from __future__ import annotations

import dataclasses
import functools

import numpy as np

from axon_dist.core.errors import ConfigError

from .samples import random_of

_MOST_LENGTHS = 64
"""The number of evenly spaced candidate lengths that the bucket lengths are chosen from."""

_ORDER = 3
"""The `kind` argument of `random_of` for shuffling buckets."""


def bucket_lengths(needed: np.ndarray, longest: int, count: int) -> tuple[int, ...]:
    """Chooses the lengths that leave the least padding.

    Args:
        needed: for each row, the number of tokens that the model sees, from 1 to `longest`, `[N]`.
        longest: the largest length.
        count: the maximum number of lengths.

    Returns:
        The lengths in ascending order; the last one is `longest`.

    Example:
        >>> bucket_lengths(np.array([10, 10, 12, 100, 128]), longest=128, count=2)
        (12, 128)
    """
    edges = _candidates(longest, count)
    pieces = len(edges) - 1
    rows = np.bincount(np.searchsorted(edges, np.maximum(needed, 1)), minlength=pieces + 1)
    up_to = np.cumsum(rows[: pieces + 1])
    # Dynamic programming. total[k][j] is the smallest possible sum of padded lengths, over the rows
    # of at most edges[j] tokens, with k bucket lengths.
    total = np.full((count + 1, pieces + 1), np.inf)
    total[:, 0] = 0
    last = np.zeros((count + 1, pieces + 1), int)
    for k in range(1, count + 1):
        for j in range(1, pieces + 1):
            sums = total[k - 1, :j] + edges[j] * (up_to[j] - up_to[:j])
            last[k, j] = int(sums.argmin())
            total[k, j] = sums[last[k, j]]
    lengths = []
    j = pieces
    for k in range(count, 0, -1):
        if j:
            lengths.append(int(edges[j]))
            j = int(last[k, j])
    return tuple(reversed(lengths))


def _candidates(longest: int, count: int) -> np.ndarray:
    """Returns 0 and the lengths to choose from, evenly spaced up to the largest.

    The spaces divide the largest length, as do the axes that split a sequence. Where too few do so,
    as for a prime number of tokens, the lengths are rounded up.

    Example:
        >>> _candidates(128, 4)[:4].tolist(), _candidates(127, 4)[:4].tolist()
        ([0, 2, 4, 6], [0, 2, 4, 6])
    """
    pieces = max(n for n in range(1, _MOST_LENGTHS + 1) if longest % n == 0)
    if pieces >= min(count, longest):
        return np.arange(pieces + 1) * (longest // pieces)
    units = next(n for n in range(_MOST_LENGTHS + 1, longest + 1) if longest % n == 0)
    rounded = -(-np.arange(_MOST_LENGTHS + 1) * units // _MOST_LENGTHS)
    return rounded * (longest // units)


@dataclasses.dataclass(frozen=True, eq=False)
class Buckets:
    """The lengths to which rows are padded.

    Args:
        lengths: in ascending order.
        needed: for each row, the number of tokens that the model sees, `[N]`; none exceeds the last
            length.
    """

    lengths: tuple[int, ...]
    needed: np.ndarray

    @functools.cached_property
    def which(self) -> np.ndarray:
        """The number of the bucket of each row, `[N]`."""
        return np.searchsorted(self.lengths, self.needed).astype(np.int16)

    @property
    def mean_length(self) -> float:
        """The mean length of a padded row."""
        return float(np.array(self.lengths)[self.which].mean())

    @property
    def length_around_a_token(self) -> float:
        """The mean over all tokens of the length of their padded row.

        The attention of a token costs as much as its row is long, and long rows have more tokens.
        """
        lengths = np.array(self.lengths, float)[self.which]
        return float((lengths**2).sum() / lengths.sum())

    def length_of(self, numbers: np.ndarray) -> int:
        """Returns the padded length of a batch of these rows: the bucket of the longest row."""
        return self.lengths[int(self.which[numbers].max())]

    def order(self, seed: int, batch: int) -> BucketOrder:
        """Returns an endless order in which a batch has rows of one bucket, or of adjacent ones.

        Args:
            seed: the seed of the order.
            batch: the rows of a global batch.

        Raises:
            ConfigError: when there are fewer rows than a batch has.
        """
        if len(self.needed) < batch:
            raise ConfigError(
                f"data.buckets: {len(self.needed)} rows do not fill a batch of {batch}; leave "
                "buckets out, or lower train.global_batch",
                code="buckets-rows",
            )
        return BucketOrder(self, seed, batch)


class BucketOrder:
    """The rows of an endless run: item `g` is row `g mod n` of epoch `g div n`.

    Each epoch shuffles all rows and drops the last ones, which do not fill a batch; so each epoch
    drops different rows. The others are sorted by bucket and cut into batches, and the batches are
    shuffled. A batch may have rows of adjacent buckets, and then has the largest length.

    Args:
        buckets: the bucket of each row.
        seed: the seed of the order.
        batch: the rows of a batch.

    Attributes:
        samples_per_epoch: the rows of an epoch, n.
    """

    def __init__(self, buckets: Buckets, seed: int, batch: int):
        self._which = buckets.which
        self._seed = seed
        self._batch = batch
        self._num_batches = len(buckets.which) // batch
        self.samples_per_epoch: int = self._num_batches * batch
        self._known: tuple[int, np.ndarray] | None = None

    def __getitem__(self, sample: int) -> int:
        epoch, index = divmod(sample, self.samples_per_epoch)
        return int(self._rows(epoch)[index])

    def _rows(self, epoch: int) -> np.ndarray:
        if self._known is None or self._known[0] != epoch:
            self._known = epoch, self._shuffled(epoch)
        return self._known[1]

    def _shuffled(self, epoch: int) -> np.ndarray:
        random = random_of(_ORDER, self._seed + (epoch << 32))
        rows = random.permutation(len(self._which))[: self.samples_per_epoch]
        by_bucket = rows[np.argsort(self._which[rows], kind="stable")]
        batches = by_bucket.reshape(self._num_batches, self._batch)
        return batches[random.permutation(self._num_batches)].reshape(-1)
