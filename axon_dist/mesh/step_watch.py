"""The step watch: a process that lives but takes no step is named, and all end.

The watchdog hears a heartbeat from a thread, which goes on while the main thread hangs: in a
lock, in a file system that does not answer, in a batch that never comes. The others then wait for
it in a collective for good. So the loop tells its step, and where nobody's step has changed for too
long, whoever is behind the others holds them up.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from ..core.compat import SharedStore
from ..launch.distributed import STEP_TIMEOUT, Timeouts
from ..launch.rendezvous import Peer
from ..launch.watchdog import KeyValueStore, Silences, post_verdict
from .world import World

_STEPS = "axon/watch/step/"
_MEASURED, _LEAST = 5, 300.0
"""From so many signs on the watch follows them, and gives so many seconds at least."""
_SHORTEST, _LONGEST = 0.2, 5.0


class StepWatch:
    """Tells the step of this process to the others; process 0 judges.

    Args:
        me: this process.
        store: what all processes share.
        timeout: seconds in which some process has to get ahead.
        follows: whether the timeout is that of the first steps alone, and then follows the time
            that steps, validations and saves have taken.
    """

    def __init__(self, me: Peer, store: KeyValueStore, timeout: float, follows: bool = False):
        self.me: Peer = me
        self.store: KeyValueStore = store
        self.timeout: float = timeout
        self.follows: bool = follows
        self._last = self._began = time.monotonic()
        self._first = self._longest = 0.0
        self.period = min(max(timeout / 20, _SHORTEST), _LONGEST)
        self._silences = Silences(range(me.num_processes))
        self._stopped = threading.Event()
        self._step, self._signs = 0, 0

    def __call__(self, step: int) -> None:
        """Takes a sign of the loop; all processes give the same signs in the same order."""
        now = time.monotonic()
        if self._signs:
            self._longest = max(self._longest, now - self._last)
        else:
            self._first = now - self._began
        self._last, self._step, self._signs = now, step, self._signs + 1

    @property
    def limit(self) -> float:
        """Seconds that the processes have now.

        Twice as long as until the first sign, for a validation is compiled too, and 20 times as
        long as any sign took after that.
        """
        if not self.follows or self._signs < _MEASURED:
            return self.timeout
        return max(_LEAST, 2 * self._first, 20 * self._longest)

    def run(self) -> None:
        """Tells and judges until it is stopped; the body of a thread."""
        while not self._stopped.wait(self.period):
            try:
                self._exchange()
            except Exception:
                # The store is gone: JAX says so itself, and ends the process.
                return

    def stop(self) -> None:
        """Ends the thread."""
        self._stopped.set()

    def _exchange(self) -> None:
        mine = {"who": str(self.me), "step": self._step, "signs": self._signs}
        self.store.set(f"{_STEPS}{self.me.process}", json.dumps(mine))
        if self.me.process == 0:
            told = {int(name): text for name, text in self.store.items(_STEPS).items()}
            self._silences.hear(told)
            self._silences.tick(self.period)
            limit = self.limit
            if len(self._silences.longer_than(limit)) == self.me.num_processes:
                post_verdict(self.store, find_culprit(told, limit))


def find_culprit(told: Mapping[int, str], timeout: float) -> str:
    """Says who holds the others up, where no process has gone on for too long.

    Args:
        told: what each process last told, as JSON.
        timeout: for how many seconds.

    Example:
        >>> signs = '{"who": "a", "step": 5, "signs": 9}', '{"who": "b", "step": 5, "signs": 8}'
        >>> find_culprit(dict(enumerate(signs)), 60)
        'b hangs: no sign for 60 s after step 5, and the others wait for it; see where its main ...'
    """
    rows = [json.loads(text) for text in told.values()]
    least, most = (choose(row["signs"] for row in rows) for choose in (min, max))
    behind = [row for row in rows if row["signs"] == least]
    after = f"for {timeout:g} s after step {behind[0]['step']}"
    if least == most:
        return (
            f"no process got any further {after}: the devices hang, or something takes that long; "
            "raise AXON_STEP_TIMEOUT if it does"
        )
    return (
        f"{', '.join(row['who'] for row in behind)} hangs: no sign {after}, and the others wait "
        "for it; see where its main thread is in its own log, or raise AXON_STEP_TIMEOUT"
    )


@contextmanager
def watch_steps(world: World) -> Iterator[Callable[[int], None]]:
    """Watches that all processes of a world get ahead, as long as the context lasts.

    `AXON_STEP_TIMEOUT` says within how many seconds; a process that compiles or saves gives no
    sign, so it must be longer than these take. Where it is not set the watch begins with 1800 and
    follows what steps take. Every process ends when one hangs, and each says
    where its main thread was.

    Args:
        world: whose processes; nothing is watched where there is only one.

    Yields:
        A function that takes the number of steps taken, after every step and whenever something
        else got done.

    Example:
        >>> with watch_steps(World.emulate(2)) as sign:
        ...     sign(1)
    """
    if world.num_processes == 1:
        yield lambda step: None
        return
    me = Peer.here(world.process_index, world.num_processes)
    timeout, follows = Timeouts.from_env(os.environ).step, STEP_TIMEOUT not in os.environ
    watch = StepWatch(me, SharedStore(), timeout, follows)
    threading.Thread(target=watch.run, name="axon-step-watch", daemon=True).start()
    try:
        yield watch
    finally:
        watch.stop()
