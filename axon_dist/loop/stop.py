"""Stopping between two steps: on a signal, and everywhere as soon as anyone wants to."""

from __future__ import annotations

import collections
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from axon_dist.core.typing import Array
from axon_dist.mesh import World

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_ANOTHER = "another process"
INTERRUPTIONS = frozenset({*(number.name for number in _SIGNALS), _ANOTHER})
"""The reasons of runs that a signal has ended, here or in another process."""


class StopRequest:
    """Whether somebody asked this process to stop, and who."""

    def __init__(self) -> None:
        self.reason: str | None = None

    def ask(self, reason: str) -> None:
        """Asks; the first reason stays."""
        self.reason = self.reason or reason

    def __bool__(self) -> bool:
        return self.reason is not None


@contextmanager
def stop_on_signals(on_first: Callable[[str], None] = lambda name: None) -> Iterator[StopRequest]:
    """Turns the first SIGINT (Ctrl-C), SIGTERM or SIGHUP into a request; a second acts as usual.

    A second SIGHUP does nothing: a terminal that closes sends it by its kernel and by its shell. A
    process that ignores SIGHUP, as under `nohup`, goes on ignoring it.

    A step that has begun holds donated buffers: an exception in the middle of it would leave no
    state to save. So the signal only leaves a note, which the loop reads between steps.

    `jax.distributed.initialize` takes SIGTERM for its own preemption notice, so entering this
    context puts ours in its place for as long as it lasts.

    Args:
        on_first: called with the name of the first signal, to tell the user; in a thread of its
            own, for the signal may have come in the middle of a write to the same file.

    Yields:
        The request; false until a signal came. Outside the main thread, where Python takes no
        signals, it stays false unless `ask` is called.
    """
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    all_before = {number: signal.getsignal(number) for number in _SIGNALS}
    before = {
        number: handler
        for number, handler in all_before.items()
        if number != signal.SIGHUP or handler is not signal.SIG_IGN
    }

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def handle(number: int, frame: FrameType | None) -> None:
        restore()
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        name = signal.Signals(number).name
        request.ask(name)
        threading.Thread(target=on_first, args=(name,)).start()

    for number in before:
        signal.signal(number, handle)
    try:
        yield request
    finally:
        restore()


class StopConsensus:
    """One answer for all processes to "does anyone want to stop?", asked once per step.

    If one process left the loop alone, the others would wait for it in the next collective for
    good. Here every step starts a reduction over the devices and reads the one that was started
    `lag` steps before: it never stalls a step, and every process reads the same answer at the same
    step. A process that is alone answers itself at once.

    Args:
        world: whose processes have to agree.
        lag: steps between a question and its answer.

    Example:
        >>> consensus = StopConsensus(World.emulate(8))
        >>> consensus(False), consensus(True)
        (False, True)
    """

    def __init__(self, world: World, lag: int = 2):
        self.world: World = world
        self.lag: int = lag
        self._split = NamedSharding(world.mesh, PartitionSpec(world.mesh.axis_names))
        self._any = jax.jit(jnp.any, out_shardings=NamedSharding(world.mesh, PartitionSpec()))
        self._asked: collections.deque[Array] = collections.deque()

    def __call__(self, wanted: bool) -> bool:
        """Asks for this step, and tells whether to stop now.

        Args:
            wanted: whether this process wants to stop.
        """
        if self.world.num_processes == 1:
            return wanted
        self._asked.append(self.any_rank([wanted] * self.world.size))
        return len(self._asked) > self.lag and bool(self._asked.popleft())

    def any_rank(self, wanted: Sequence[bool]) -> Array:
        """Starts the reduction: a scalar on every device, true if any rank wants to stop.

        Args:
            wanted: one entry per rank; only those of this process's own ranks are read.

        Example:
            >>> bool(StopConsensus(World.emulate(4)).any_rank([False, False, True, False]))
            True
        """
        flags = np.asarray(wanted)
        placed = jax.make_array_from_callback(flags.shape, self._split, lambda index: flags[index])
        return self._any(placed)


class Stops:
    """Tells a loop when to stop: because of a signal, or of what the run has come to.

    Args:
        consensus: among the processes.
        request: of this process.
        should_stop: reads the latest record of metrics; None never stops.
    """

    def __init__(
        self,
        consensus: StopConsensus,
        request: StopRequest,
        should_stop: Callable[[Mapping[str, float]], bool] | None = None,
    ):
        self._consensus, self._request, self._should_stop = consensus, request, should_stop

    @property
    def reason(self) -> str:
        """Who asked."""
        return self._request.reason or _ANOTHER

    def between_steps(self, latest: Mapping[str, float]) -> bool:
        """Whether to stop now; every process must ask before every step.

        Args:
            latest: the latest record; empty before the first.
        """
        if self._should_stop is not None and latest and self._should_stop(latest):
            self._request.ask("should_stop")
        return self.meanwhile()

    def meanwhile(self) -> bool:
        """The same within something longer that happens between two steps."""
        return self._consensus(bool(self._request))
