"""The watchdog: a process that is killed, hangs or fails is named by the others, which then end.

Without it they wait in a collective for good, or JAX aborts them without a name. Every process
writes a heartbeat into the key-value store of `jax.distributed`; process 0 reads all of them and
posts who is lost on a bulletin; the others read that, and the heartbeat of process 0. So the
traffic grows with the number of processes and not with its square.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import traceback
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from .rendezvous import Peer

EXIT_PEER_LOST = 76
"""The exit code of a process that ended because another one was lost (`EX_PROTOCOL`).

Nothing was saved for it: 75 says that, and another try starts from an older checkpoint."""

_HEARTBEATS, _FAILURES, _BROKEN, _BULLETIN = (
    "axon/watch/heartbeat/",
    "axon/watch/failed/",
    "axon/watch/broken/",
    "axon/watch/bulletin/",
)
_SHORTEST, _LONGEST = 0.2, 1.0
_MISSED = 5
"""Heartbeats that a process may miss once a collective broke, as it does when one died."""
_STACK_LINES = 12


class KeyValueStore(Protocol):
    """A key-value store that all processes share."""

    def set(self, key: str, value: str) -> None:
        """Writes a value, over another one too."""
        ...

    def items(self, prefix: str) -> Mapping[str, str]:
        """All values under a prefix, by what follows the prefix."""
        ...


class Silences:
    """How long each of several signals has not changed.

    It counts its own ticks instead of reading a clock: a process that was stopped, or got no
    processor, does not blame the others for it.

    Args:
        names: of the signals.

    Example:
        >>> silences = Silences([1, 2])
        >>> silences.hear({1: "a"})
        >>> silences.tick(3.0); silences.hear({1: "b", 2: "a"}); silences.tick(2.0)
        >>> silences.longer_than(1.0), silences.longer_than(2.0)
        ([1, 2], [])
    """

    def __init__(self, names: Sequence[int]):
        self._silence = dict.fromkeys(names, 0.0)
        self._heard: dict[int, str] = {}

    def hear(self, values: Mapping[int, str]) -> None:
        """Notes the present values; one that differs from before ends a silence."""
        for name, value in values.items():
            if name in self._silence and self._heard.get(name) != value:
                self._heard[name], self._silence[name] = value, 0.0

    def tick(self, seconds: float) -> None:
        """Lets time pass."""
        for name in self._silence:
            self._silence[name] += seconds

    def longer_than(self, seconds: float) -> list[int]:
        """The signals that were silent for longer."""
        return [name for name, silence in self._silence.items() if silence > seconds]


class Watchdog:
    """Watches over the processes of a run with two threads in each.

    Args:
        me: which process this is.
        present: all processes, in order.
        store: what they share.
        timeout: seconds of silence after which a process counts as lost.
    """

    def __init__(self, me: int, present: Sequence[Peer], store: KeyValueStore, timeout: float):
        self.me: int = me
        self.present: Sequence[Peer] = present
        self.store: KeyValueStore = store
        self.timeout: float = timeout
        self.period = min(max(timeout / 10, _SHORTEST), _LONGEST)
        watched = [p.process for p in present if p.process != me] if me == 0 else [0]
        self._silences = Silences(watched)
        self._stopped = threading.Event()
        self._verdict: str | None = None
        self._patience = timeout

    def start(self) -> None:
        """Starts both threads; they end with the process."""
        for run in (self._beat, self._watch):
            threading.Thread(target=run, name=f"axon-watchdog{run.__name__}", daemon=True).start()

    def stop(self) -> None:
        """Ends the watch, before JAX closes the store."""
        self._stopped.set()

    def wait_for_verdict(self) -> None:
        """Waits, once a collective broke, until who is lost is known, which ends this process."""
        with contextlib.suppress(Exception):
            self.store.set(f"{_BROKEN}{self.me}", "1")
        self._stopped.wait(self.timeout + 5 * self.period)

    def _beat(self) -> None:
        """Talks to the store; a call may block when the network does."""
        count = 0
        while not self._stopped.wait(self.period):
            count += 1
            try:
                self.store.set(f"{_HEARTBEATS}{self.me}", str(count))
                self._listen(count)
            except Exception:
                # The store is gone: JAX reports that itself, and ends the process.
                return

    def _listen(self, count: int) -> None:
        if self.store.items(_BROKEN):
            self._patience = min(self.timeout, _MISSED * self.period)
        if self.me == 0:
            self.store.set(f"{_BULLETIN}heartbeat", str(count))
            self._silences.hear(_by_process(self.store.items(_HEARTBEATS)))
            failed = _by_process(self.store.items(_FAILURES))
            posted = self.store.items(_BULLETIN).get("verdict")
            failures = (f"{self.present[p]} failed: {failed[p]}" for p in sorted(failed))
            self._verdict = self._verdict or posted or next(failures, None)
            return
        bulletin = self.store.items(_BULLETIN)
        self._silences.hear({0: bulletin.get("heartbeat", "")})
        self._verdict = bulletin.get("verdict")

    def _watch(self) -> None:
        """Judges, and never blocks."""
        while not self._stopped.wait(self.period):
            self._silences.tick(self.period)
            silent = self._silences.longer_than(self._patience)
            verdict = self._verdict or (self._silence(silent) if silent else None)
            if verdict is not None:
                self._end(verdict)

    def _silence(self, silent: Sequence[int]) -> str:
        names = ", ".join(str(self.present[process]) for process in silent)
        return f"lost {names}: no sign of life for {self._patience:g} s, so it was killed or hangs"

    def _end(self, verdict: str) -> None:
        if self.me == 0:
            with contextlib.suppress(Exception):
                post_verdict(self.store, verdict)
        say(f"axon: {self.present[self.me]}: {verdict}; ending this process\n{_main_stack()}")
        os._exit(EXIT_PEER_LOST)


def post_failure(store: KeyValueStore, process: int, reason: str) -> None:
    """Tells the other processes why this one ends."""
    store.set(f"{_FAILURES}{process}", reason)
    if process == 0:
        # Only process 0 posts verdicts.
        post_verdict(store, f"process 0 failed: {reason}")


def post_verdict(store: KeyValueStore, verdict: str) -> None:
    """Lets every process know who is lost; they end."""
    store.set(f"{_BULLETIN}verdict", verdict)


def say(text: str) -> None:
    """Writes to the standard error past every lock that a stuck thread may hold."""
    os.write(2, text.encode(errors="replace"))


def _by_process(items: Mapping[str, str]) -> dict[int, str]:
    return {int(name): value for name, value in items.items()}


def _main_stack() -> str:
    """The stack of the main thread, which shows what it waits for."""
    frames: Mapping[int, Any] = sys._current_frames()
    frame = frames.get(threading.main_thread().ident or 0)
    if frame is None:
        return ""
    lines = "".join(traceback.format_stack(frame)).splitlines()[-_STACK_LINES:]
    return "\n".join(["  the main thread is in:", *lines, ""])
