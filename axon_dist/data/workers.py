"""What is made ahead of those who ask: by a thread, or by processes that take turns."""

from __future__ import annotations

import collections
import concurrent.futures
import itertools
import multiprocessing
import multiprocessing.util
import pickle
import signal
from collections.abc import Callable, Generator, Iterator
from typing import Any, TypeVar

import cloudpickle

from ..core.errors import AxonDistError, ConfigError

T = TypeVar("T")


def ahead(items: Iterator[T], count: int) -> Generator[T]:
    """The same items, of which a thread makes so many before they are asked for.

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
        pool.shutdown(cancel_futures=True)
        if isinstance(items, Generator):
            items.close()


def by_workers(make: Callable[[int], T], given: Iterator[int], count: int) -> Generator[T]:
    """What a function makes of endless numbers, in their order, each in one of some processes.

    A process has one number to go on with while its last item waits. It ends with the process that
    it works for, and not by a signal to all of them, on which that one goes on until it has saved.

    Args:
        make: the function; every process gets a copy.
        given: the numbers.
        count: how many processes.

    Raises:
        ConfigError: when a process ends, or what `make` raises.
    """
    context, function = multiprocessing.get_context("spawn"), cloudpickle.dumps(make)
    workers: list[tuple[Any, Any]] = []
    # As the last resort, at the end of Python, which would wait for them.
    stop = multiprocessing.util.Finalize(None, _stop, (workers,), exitpriority=1)
    try:
        for _ in range(count):
            ours, theirs = context.Pipe()
            process = context.Process(target=_work, args=(theirs, function), daemon=True)
            process.start()
            theirs.close()
            ours.send(next(given))
            workers.append((ours, process))
        for pipe, process in itertools.cycle(workers):
            try:
                pipe.send(next(given))
                item = pipe.recv()
            except (EOFError, OSError) as error:
                process.join(1)
                raise ConfigError(
                    f"a worker that makes batches ended with exit code {process.exitcode}; it was "
                    "killed, perhaps for memory: lower data.num_workers"
                ) from error
            if isinstance(item, Exception):
                raise item
            yield item
    finally:
        stop()


def _stop(workers: list[tuple[Any, Any]]) -> None:
    for pipe, process in workers:
        process.kill()
        process.join()
        pipe.close()


def _work(pipe: Any, function: bytes) -> None:
    """Answers numbers until nobody asks any more."""
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
        except Exception as error:  # of a user's own samples, and perhaps not to be pickled
            item = RuntimeError(f"{type(error).__name__}: {error}")
        try:
            pipe.send(item)
        except OSError:
            return
