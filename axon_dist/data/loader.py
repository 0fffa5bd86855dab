"""Loaders: shuffled batches, sharded by process, prefetched, and resumable."""

from __future__ import annotations

import collections
import concurrent.futures
import functools
import itertools
import multiprocessing
import multiprocessing.util
import pickle
import signal
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import cloudpickle
import numpy as np

from axon_dist.core.batch_rows import local_rows, rows_of_parts
from axon_dist.core.checks import is_whole
from axon_dist.core.errors import AxonDistError, ConfigError
from axon_dist.core.weighted import FilledBatch

from .buckets import Buckets
from .images import Images, ImageSet
from .samples import (
    EpochsOf,
    LocalBatch,
    Mixture,
    Samples,
    TwoSides,
    checksum,
    shuffled,
)
from .tokens import Text, Windows

T = TypeVar("T")


class Loader:
    """Endless batches of samples.

    Iterates over this process's rows of each global batch. The order of samples depends only on
    the samples and the seed, and with buckets also on `global_batch`. The state is one number: the
    samples yielded so far over all processes. Batches that were prefetched but not yielded do not
    count, so a resumed run neither repeats nor skips a sample.

    Args:
        samples: the samples to read.
        global_batch: rows per step over all processes, B.
        seed: the seed of the order, in [0, 2^32).
        process: the index of this process, from 0.
        num_processes: the number of processes that share each batch.
        num_microbatches: the number of microbatches of a step, K. A process has its rows of each
            microbatch, one microbatch after another. So a sample has the same position in the same
            microbatch for any number of processes.
        num_replicas: the number of replicas that train independently. Each has consecutive rows of
            the global batch, and cuts its own into K microbatches.
        share: `(parts, count)`, for a process whose rows are not consecutive: of `count` equal
            parts of each microbatch it has those numbered `parts`, as `World.parts_of_batch`
            returns them. None for part `process` of `num_processes`.
        num_ahead: the number of batches that a thread prefetches; 0 to load each on demand.
        num_workers: the number of processes that make whole batches in turn, each from a copy of
            the samples; 0 to make them in the thread.
        vocab_size: raise if a batch has a token that is not below this; None for no check.

    Attributes:
        description: a one-sentence description of the data.
        num_samples: the number of all samples for training.
        epochs: the epochs of each source of the data; of one, unless the samples are a `Mixture`.

    Raises:
        ConfigError: a value is out of range.
        DivisibilityError: the batch does not divide by the replicas, microbatches and processes.

    Example:
        >>> from axon_dist.data import Sequences
        >>> sides = [[{"x": np.full(3, i)} for i in range(n)] for n in (8, 2)]
        >>> loader = Loader(Sequences(*sides, "numbers"), global_batch=4, seed=0)
        >>> next(loader)["x"].shape
        (4, 3)
        >>> place = loader.state()
        >>> after = next(loader)["x"]
        >>> loader.restore(place)
        >>> bool((next(loader)["x"] == after).all())
        True
    """

    def __init__(
        self,
        samples: Samples,
        *,
        global_batch: int,
        seed: int = 0,
        process: int = 0,
        num_processes: int = 1,
        num_microbatches: int = 1,
        num_replicas: int = 1,
        share: tuple[Sequence[int], int] | None = None,
        num_ahead: int = 2,
        num_workers: int = 0,
        vocab_size: int | None = None,
    ):
        for name, value in (("num_ahead", num_ahead), ("num_workers", num_workers)):
            if value < 0:
                raise ConfigError(f"{name}={value} must be at least 0; change it.")
        if not all(hasattr(samples, name) for name in ("identity", "train", "spread")):
            raise ConfigError(
                f"Loader got samples={samples!r:.80}, a {type(samples).__name__}; give samples, "
                "such as axon_dist.data.Sequences(train, validation, description)"
            )
        self.samples = samples
        self.description: str = samples.description
        self.global_batch = global_batch
        self.seed = seed
        self.num_samples: int = samples.identity["num_samples"]
        local_rows(global_batch, process, num_processes)
        parts, num_parts = ((process,), num_processes) if share is None else share
        self._rows = rows_of_parts(global_batch, parts, num_parts)
        self._local_samples = rows_of_parts(
            global_batch, parts, num_parts, num_microbatches, num_replicas
        )
        order = getattr(samples, "order", functools.partial(shuffled, self.num_samples))
        self._buckets: Buckets | None = getattr(samples, "buckets", None)
        self._order: Any = order(seed)
        self.epochs: tuple[EpochsOf, ...] = (EpochsOf(1.0, self.num_samples),)
        if isinstance(samples, Mixture):
            self.epochs = samples.epochs
        if self._buckets is not None:
            self._order = self._buckets.order(seed, global_batch)
            self.epochs = (EpochsOf(1.0, self._order.samples_per_epoch),)
        self._vocab_size = vocab_size
        self._num_ahead = num_ahead
        self._num_workers = num_workers
        self._samples_seen = 0
        self._batches = self._start()

    def __iter__(self) -> Loader:
        return self

    def __next__(self) -> LocalBatch:
        batch = next(self._batches)
        self._samples_seen += self.global_batch
        return batch

    def state(self) -> dict[str, int]:
        """Returns the position in the data, as JSON; independent of the number of processes.

        Returns:
            `samples_seen`, and the `seed` and identity of the samples, such as `num_samples` per
            epoch. With buckets also `global_batch`, because the order then depends on it.
        """
        position = {"samples_seen": self._samples_seen, "seed": self.seed, **self.samples.identity}
        return position if self._buckets is None else position | {"global_batch": self.global_batch}

    def restore(self, state: Mapping[str, int]) -> None:
        """Continues from a state; the batch size and the number of processes may differ.

        Args:
            state: the result of `state()` of a loader with the same samples and seed, and with
                buckets also the same batch size.

        Raises:
            ConfigError: the state belongs to other samples or another seed, or is not a state.
        """
        _check_state(state, self.state())
        self._samples_seen = state["samples_seen"]
        self._batches.close()
        self._batches = self._start()

    def validation_batches(self, num_batches: int | None = None) -> Iterator[LocalBatch]:
        """Yields this process's rows of batches spread evenly over the validation samples.

        The global batches are the same every time, and for any number of processes. No sample is in
        two batches: with fewer than `num_batches * global_batch` samples there are fewer batches.
        If the last batch has fewer samples than the others, it is a `FilledBatch`: its field
        `samples` has these samples, and its rows repeat them up to the size of the other batches.

        Args:
            num_batches: the maximum number of global batches; None for all samples.

        Returns:
            An iterator of batches as in training.

        Raises:
            ConfigError: fewer than one batch.
        """
        indices = self.samples.spread(self.num_validated(num_batches))
        starts = range(0, len(indices), self.global_batch)
        return (self._validation(indices[at : at + self.global_batch]) for at in starts)

    def num_validated(self, num_batches: int | None = None) -> int:
        """Returns the number of samples that `validation_batches` yields.

        Raises:
            ConfigError: fewer than one batch; or None, and the samples have no `num_validation`.
        """
        if num_batches is None:
            return self._num_validation()
        if num_batches < 1:
            raise ConfigError(f"{num_batches} validation batches must be at least 1; raise it.")
        most = num_batches * self.global_batch
        has_count = getattr(self.samples, "num_validation", None) is not None
        return min(most, self._num_validation()) if has_count else most

    def _num_validation(self) -> int:
        count = getattr(self.samples, "num_validation", None)
        if count is None:
            raise ConfigError(
                f"the samples of {self.description} have no num_validation, the number of "
                "validation samples; define this property, or set the number of batches",
                code="no-validation-count",
            )
        return count

    def _validation(self, indices: np.ndarray) -> LocalBatch:
        if len(indices) == self.global_batch:
            return _checked(self.samples.validation(indices[self._rows]), self._vocab_size)
        samples = _checked(self.samples.validation(indices), self._vocab_size)
        repeated = np.arange(self.global_batch)[self._rows] % len(indices)
        return FilledBatch({name: x[repeated] for name, x in samples.items()}, samples)

    def _start(self) -> Generator[LocalBatch]:
        """Yields the batches from the current position on, prefetched by a thread or by workers."""
        # Locals, because workers get a pickled copy of `load`, which must not contain the loader.
        samples = self.samples
        order = self._order
        local = self._local_samples
        vocab_size = self._vocab_size
        buckets = self._buckets
        whole = np.arange(self.global_batch)

        def load(start: int) -> LocalBatch:
            if buckets is None:
                numbers = np.array([order[sample] for sample in (start + local).tolist()])
                return _checked(samples.train(numbers), vocab_size)
            # All processes pad their rows to the length of the whole batch.
            numbers = np.array([order[sample] for sample in (start + whole).tolist()])
            padded: Any = samples
            return _checked(padded.train(numbers[local], buckets.length_of(numbers)), vocab_size)

        starts = itertools.count(self._samples_seen, self.global_batch)
        batches = (
            by_workers(load, starts, self._num_workers) if self._num_workers else map(load, starts)
        )
        return ahead(batches, self._num_ahead) if self._num_ahead else (batch for batch in batches)


class TextLoader(Loader):
    """Endless batches of windows of a text, for `next_token_loss`.

    Args:
        text: the text to read.
        length: the number of tokens that a model sees, T; windows have T + 1.
        global_batch: rows per step over all processes, B.
        options: the other arguments of `Loader`.

    Raises:
        ConfigError: a value is out of range, or either side of the text is shorter than a window.
        DivisibilityError: the batch does not divide by the processes.

    Example:
        >>> text = Text(np.arange(41, dtype=np.uint8), np.arange(9, dtype=np.uint8), 256, "numbers")
        >>> loader = TextLoader(text, length=4, global_batch=2, seed=0)
        >>> next(loader)["tokens"].shape, loader.state()["samples_seen"]
        ((2, 5), 2)
    """

    def __init__(self, text: Text, *, length: int, global_batch: int, **options: Any):
        super().__init__(Windows(text, length), global_batch=global_batch, **options)


class ImageLoader(Loader):
    """Endless batches of images, for `classification_loss`.

    Args:
        images: the images to read.
        global_batch: rows per step over all processes, B.
        options: the other arguments of `Loader`.

    Raises:
        ConfigError: a value is out of range.
        DivisibilityError: the batch does not divide by the processes.

    Example:
        >>> from axon_dist.data import SyntheticImages, load_images
        >>> images = load_images(SyntheticImages(num_images=100, image_size=8), 3, 10)
        >>> batch = next(ImageLoader(images, global_batch=4))
        >>> batch["x"].shape, batch["y"].shape
        ((4, 8, 8, 3), (4,))
    """

    def __init__(self, images: Images, *, global_batch: int, **options: Any):
        super().__init__(Pictures(images), global_batch=global_batch, **options)


class Pictures(TwoSides):
    """Images and their labels as samples.

    Args:
        images: images for training and validation, with their labels.
    """

    def __init__(self, images: Images):
        self.images: Images = images
        self.sides = images.train, images.validation
        self.description = images.description

    @property
    def identity(self) -> dict[str, int]:
        """The number of training images, their size, and a checksum of their contents."""
        height, width, _ = self.images.shape
        sizes = {"height": height, "width": width, "num_samples": len(self.images.train)}
        return {**sizes, "contents": self._contents}

    @functools.cached_property
    def _contents(self) -> int:
        return checksum(np.array([side.checksum() for side in self.sides]))

    def take(self, side: ImageSet, numbers: np.ndarray) -> LocalBatch:
        """Takes images and labels of a side."""
        x, y = side.take(numbers)
        return {"x": x, "y": y.astype(np.int32)}


def _checked(batch: LocalBatch, vocab_size: int | None) -> LocalBatch:
    """Returns a batch; raises for tokens out of range.

    The embedding lookup would silently read wrong rows for them.
    """
    if vocab_size is not None and "tokens" not in batch:
        raise ConfigError(
            f"vocab_size={vocab_size} limits the tokens of a batch, but the samples have "
            f"{', '.join(batch)}, and no 'tokens'; name them so, or leave vocab_size out",
            code="batch-without-tokens",
        )
    if vocab_size is not None and (largest := int(batch["tokens"].max())) >= vocab_size:
        raise ConfigError(
            f"model.vocab_size: got {vocab_size}, but the data has the token {largest}; set it to "
            f"at least {largest + 1}, or use files with tokens of this model's tokenizer",
            code="vocabulary-too-small",
        )
    if vocab_size is not None and (smallest := int(batch["tokens"].min())) < 0:
        raise ConfigError(
            f"data.files: the data has the token {smallest}, but tokens count from 0; write the "
            "files again",
            code="negative-token",
        )
    return batch


def _check_state(state: Mapping[str, int], here: Mapping[str, int]) -> None:
    is_state = isinstance(state, Mapping) and all(map(is_whole, state.values()))
    if not is_state:
        raise ConfigError(
            f"the data state {state!r:.80} must be a dict of integers: give what state() returned.",
            code="malformed-data-state",
        )
    # States of older versions have no checksums.
    here = {name: value for name, value in here.items() if name in state or name not in _CONTENTS}
    missing = [name for name in here if name not in state]
    if missing:
        raise ConfigError(
            f"the data state {dict(state)} has no {missing[0]!r}: give what state() returned."
        )
    sizes = [
        name
        for name in here
        if name not in ("samples_seen", "seed", "num_samples") and name not in _CONTENTS
    ]
    changed = [name for name in here if name != "samples_seen" and state[name] != here[name]]
    # Report the root cause first: another tokenizer also changes contents and num_samples.
    changed.sort(key=lambda name: (name not in _MADE_BY, name == "contents"))
    if changed:
        name = changed[0]
        of_old = f"{name}={state[name]}"
        of_new = f"{name}={here[name]}"
        reason = _CONTENTS.get(name, "")
        raise ConfigError(
            f"the data state was taken with {of_old}, but this loader has {of_new}{reason}: the "
            "remaining samples would differ. Use the same "
            f"{', '.join(['data', *sizes])} and seed, or start the data from the beginning.",
            code="data-state-differs",
        )
    if not 0 <= state["samples_seen"] < _MOST_SEEN:
        raise ConfigError(
            f"the data state has samples_seen={state['samples_seen']}, which must be 0 or "
            f"more, and less than {_MOST_SEEN}: give what state() returned."
        )


_MADE_BY = ("tokenizer", "template")
_CONTENTS = {
    "contents": " (a checksum: the files have changed, or are read differently)",
    "tokenizer": " (a checksum: data.tokenizer or data.end_token has changed)",
    "template": " (a checksum: data.template, or that of the tokenizer, has changed)",
}
"""Explains each changed checksum of the samples."""

_MOST_SEEN = 2**62


def ahead(items: Iterator[T], count: int) -> Generator[T]:
    """Yields the items of an iterator; a thread prefetches `count` of them.

    Example:
        >>> list(itertools.islice(ahead(map(str, itertools.count()), 2), 3))
        ['0', '1', '2']
    """
    pool = concurrent.futures.ThreadPoolExecutor(1, "axon-data")
    waiting = collections.deque(pool.submit(next, items) for _ in range(count))
    try:
        while True:
            item = waiting.popleft().result()
            waiting.append(pool.submit(next, items))
            yield item
    finally:
        # `shutdown(cancel_futures=True)` fails at interpreter exit, after modules were cleared.
        for future in waiting:
            future.cancel()
        pool.shutdown()
        if isinstance(items, Generator):
            items.close()


def by_workers(make: Callable[[int], T], numbers: Iterator[int], count: int) -> Generator[T]:
    """Yields `make(number)` for each of endless numbers, in order, computed by processes.

    A worker makes its next item while its last one waits to be read. Workers end with the process
    that started them. They ignore signals sent to the process group, because the parent process
    keeps running after such a signal until it has saved.

    Args:
        make: the function; every process gets a copy.
        numbers: the arguments of `make`.
        count: the number of processes.

    Raises:
        ConfigError: when a process ends; errors of `make` are raised unchanged.
    """
    context = multiprocessing.get_context("spawn")
    function = cloudpickle.dumps(make)
    workers: list[tuple[Any, Any]] = []
    # The last resort at interpreter exit, where Python would wait for the workers.
    stop = multiprocessing.util.Finalize(None, _stop, (workers,), exitpriority=1)
    try:
        for _ in range(count):
            pipe, worker_pipe = context.Pipe()
            process = context.Process(target=_work, args=(worker_pipe, function), daemon=True)
            process.start()
            worker_pipe.close()
            pipe.send(next(numbers))
            workers.append((pipe, process))
        for pipe, process in itertools.cycle(workers):
            try:
                pipe.send(next(numbers))
                item = pipe.recv()
            except (EOFError, OSError) as error:
                process.join(1)
                raise ConfigError(
                    f"a data worker ended with exit code {process.exitcode}; "
                    + _why_ended(process.exitcode),
                    code="data-worker-lost",
                ) from error
            if isinstance(item, Exception):
                raise item
            yield item
    finally:
        stop()


def _why_ended(code: int | None) -> str:
    """Returns the likely cause of a worker's exit code, and what to do."""
    if code is None or code <= 0:
        # Minus a signal.
        return "it was killed, perhaps because memory ran out: lower data.num_workers"
    return (
        "it printed its error above. A worker imports the script that started it: make the loader "
        'under `if __name__ == "__main__":`, and check that all modules of the samples can be '
        "imported; or set data.num_workers=0"
    )


def _stop(workers: list[tuple[Any, Any]]) -> None:
    for pipe, process in workers:
        process.kill()
        process.join()
        pipe.close()


def _work(pipe: Any, function: bytes) -> None:
    """Runs a worker: sends the item of each received number until the pipe is closed."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    make = pickle.loads(function)
    while True:
        try:
            number = pipe.recv()
        except EOFError:
            return
        try:
            item = make(number)
        except AxonDistError as error:
            item = error
        except Exception as error:  # raised by a user's samples; may not be picklable
            item = RuntimeError(f"{type(error).__name__}: {error}")
        try:
            pipe.send(item)
        except OSError:
            return
