"""Batches of text: shuffled, divided among processes, loaded ahead, and resumable."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping

import grain
import numpy as np

from axon_dist.core.errors import ConfigError

from .sampling import local_rows, num_windows, shuffled, spread_starts, windows_at
from .text import Text

LocalBatch = dict[str, np.ndarray]
"""`{"tokens": int32 [B / P, T + 1]}`: the rows of one process."""

_ENDLESS = 2**62
"""More samples than any run sees, and still an int64."""


class TextLoader:
    """Endless batches of windows of a text, as `next_token_loss` takes them.

    An iterator over this process's rows of each global batch, built on grain. The order of samples
    depends on the text, the window length and the seed alone. Where it stands is one number, the
    samples handed out so far over all processes: batches loaded ahead but not handed out yet are
    not counted, so a resumed run repeats none and skips none.

    Args:
        text: what to read.
        length: tokens a model sees, T; windows hold T + 1.
        global_batch: rows per step over all processes, B.
        seed: of the order, in [0, 2^32).
        process: which process this is, from 0.
        num_processes: how many share every batch.
        num_ahead: batches a thread loads ahead; 0 to load each when it is asked for.

    Raises:
        ConfigError: a value is out of range, or either side of the text is shorter than a window.
        DivisibilityError: the batch does not divide by the processes.

    Example:
        >>> text = Text(np.arange(41, dtype=np.uint8), np.arange(9, dtype=np.uint8), 256, "numbers")
        >>> loader = TextLoader(text, length=4, global_batch=2, seed=0)
        >>> next(loader)["tokens"].shape, loader.state()["samples_seen"]
        ((2, 5), 2)
    """

    def __init__(
        self,
        text: Text,
        *,
        length: int,
        global_batch: int,
        seed: int = 0,
        process: int = 0,
        num_processes: int = 1,
        num_ahead: int = 2,
    ):
        if length < 1 or num_ahead < 0:
            raise ConfigError(
                f"length={length} must be at least 1 and num_ahead={num_ahead} at least 0; "
                "change them."
            )
        _check_long_enough("training", text.train, length)
        _check_long_enough("validation", text.validation, length)
        self.text = text
        self.length = length
        self.global_batch = global_batch
        self.seed = seed
        self.num_samples = num_windows(len(text.train), length)
        self._rows = local_rows(global_batch, process, num_processes)
        self._order = shuffled(self.num_samples, seed)
        self._num_ahead = num_ahead
        self._samples_seen = 0
        self._batches = self._start()

    def __iter__(self) -> TextLoader:
        return self

    def __next__(self) -> LocalBatch:
        batch = next(self._batches)
        self._samples_seen += self.global_batch
        return batch

    def state(self) -> dict[str, int]:
        """Says where the run stands, as JSON: the same on every process and for any number of them.

        Returns:
            `samples_seen`, and the `seed`, `length` and `num_samples` per epoch it counts in.
        """
        return {
            "samples_seen": self._samples_seen,
            "seed": self.seed,
            "length": self.length,
            "num_samples": self.num_samples,
        }

    def restore(self, state: Mapping[str, int]) -> None:
        """Goes on where `state` was taken, whatever the batch and the number of processes were.

        Args:
            state: what `state()` returned, of a loader with this text, length and seed.

        Raises:
            ConfigError: the state counts in another order of samples, or is not a state.
        """
        _check_state(state, self.state())
        self._samples_seen = state["samples_seen"]
        self._batches.close()
        self._batches = self._start()

    def validation_batches(self, num_batches: int) -> Iterator[LocalBatch]:
        """Cuts this process's rows of batches spread evenly over the validation text.

        The same every time, and the same rows over all processes for any number of them. Where the
        text is shorter than `num_batches * global_batch` windows, they overlap.

        Args:
            num_batches: how many global batches.

        Returns:
            An iterator of batches as in training.

        Raises:
            ConfigError: fewer than one batch.
        """
        if num_batches < 1:
            raise ConfigError(f"{num_batches} validation batches must be at least 1; raise it.")
        num_tokens = len(self.text.validation)
        starts = spread_starts(num_tokens, self.length, num_batches * self.global_batch)
        return (
            {"tokens": windows_at(self.text.validation, batch[self._rows], self.length)}
            for batch in starts.reshape(num_batches, self.global_batch)
        )

    def _start(self) -> grain.DatasetIterator[LocalBatch]:
        rows = np.arange(self.global_batch)[self._rows]
        load = functools.partial(_load, self.text.train, self._order, self.length, rows)
        counters = grain.MapDataset.range(self._samples_seen, _ENDLESS, self.global_batch)
        options = grain.ReadOptions(
            num_threads=min(1, self._num_ahead), prefetch_buffer_size=self._num_ahead
        )
        return iter(counters.map(load).to_iter_dataset(options))


def _load(
    stream: np.ndarray, order: grain.MapDataset[int], length: int, rows: np.ndarray, counter: int
) -> LocalBatch:
    """The given rows of the global batch whose first sample is number `counter` of the run."""
    samples = np.array([order[sample] for sample in (counter + rows).tolist()])
    return {"tokens": windows_at(stream, samples * length, length)}


def _check_state(state: Mapping[str, int], here: Mapping[str, int]) -> None:
    missing = [name for name in here if name not in state]
    if missing:
        raise ConfigError(
            f"the data state {dict(state)} has no {missing[0]!r}: give what state() returned."
        )
    for name in ("seed", "length", "num_samples"):
        if state[name] != here[name]:
            raise ConfigError(
                f"the data state was taken with {name}={state[name]}, this loader has "
                f"{name}={here[name]}: the samples left would be others. Use the same text, "
                "length and seed, or start the data anew."
            )
    if state["samples_seen"] < 0:
        raise ConfigError(
            f"the data state has samples_seen={state['samples_seen']}, which must be 0 or "
            "more: give what state() returned."
        )


def _check_long_enough(side: str, stream: np.ndarray, length: int) -> None:
    if len(stream) <= length:
        raise ConfigError(
            f"the {side} text has {len(stream)} tokens, less than one window of {length + 1}: "
            "give more text in data.files, or a shorter length."
        )
