"""The watchdog: when a process is killed, stopped or fails, the others name it and end.

A process whose main thread hangs is found by `StepWatch`, see `mesh/agreement.py`.

Without it they would wait in a collective for ever, or JAX would abort them without naming the lost
process. Every process writes a heartbeat to the key-value store of `jax.distributed`. Process 0
reads all of them and posts a verdict about lost processes; the others read the verdict, the
heartbeat of process 0, and whether a collective failed. So the traffic grows linearly with the
number of processes.
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

Unlike with `INTERRUPTED` (75), no state was saved, so a restart continues from an older checkpoint.
"""

_HEARTBEATS, _FAILURES, _BROKEN, _BULLETIN = (
    "axon/watch/heartbeat/",
    "axon/watch/failed/",
    "axon/watch/broken/",
    "axon/watch/bulletin/",
)
_SHORTEST, _LONGEST = 0.2, 1.0
_MISSED = 5
"""Heartbeats that a process may miss after a collective failed, which a dead process may cause."""
_STACK_LINES = 12


class KeyValueStore(Protocol):
    """A key-value store that all processes share."""

    def set(self, key: str, value: str) -> None:
        """Writes a value; overwrites an existing one."""
        ...

    def items(self, prefix: str) -> Mapping[str, str]:
        """All values under a prefix; keys are without the prefix."""
        ...


class Silences:
    """Measures for how long each of several signals has not changed.

    It counts its own ticks instead of reading a clock, so a process that was stopped or got no CPU
    time does not blame the others.

    Args:
        names: the names of the signals.

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
        """Records the current values; a changed value resets its silence."""
        for name, value in values.items():
            if name in self._silence and self._heard.get(name) != value:
                self._heard[name] = value
                self._silence[name] = 0.0

    def tick(self, seconds: float) -> None:
        """Adds a period to all silences."""
        for name in self._silence:
            self._silence[name] += seconds

    def longer_than(self, seconds: float) -> list[int]:
        """The signals that have been silent for longer than this."""
        return [name for name, silence in self._silence.items() if silence > seconds]


class Watchdog:
    """Watches the processes of a run, with two threads in each process.

    Args:
        me: the index of this process.
        present: all processes, in order.
        store: the shared store.
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
        self._is_leaving = False

    def start(self) -> None:
        """Starts both threads; they end with the process."""
        for run in (self._beat, self._watch):
            threading.Thread(target=run, name=f"axon-watchdog{run.__name__}", daemon=True).start()

    def stop(self) -> None:
        """Stops the watch; call it before JAX closes the store."""
        self._stopped.set()

    def report_broken(self) -> None:
        """Tells all processes that a collective failed, so they wait less for a silent process."""
        with contextlib.suppress(Exception):
            self.store.set(f"{_BROKEN}{self.me}", "1")

    def wait_for_verdict(self) -> None:
        """Waits, after a collective failed, for the verdict, which ends this process."""
        self._is_leaving = True
        self.report_broken()
        self._stopped.wait(self.timeout + 5 * self.period)

    def _beat(self) -> None:
        """Exchanges heartbeats through the store; a call may block with the network."""
        count = 0
        while not self._stopped.wait(self.period):
            count += 1
            try:
                self.store.set(f"{_HEARTBEATS}{self.me}", str(count))
                self._listen(count)
            except Exception:
                # The store is gone; JAX reports that itself and ends the process.
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
        """Checks for a verdict or for silence; never blocks."""
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
        # After a failed collective the main thread waits in this class, so its stack says nothing.
        stack = "" if self._is_leaving else _main_stack()
        say(f"axon: {self.present[self.me]}: {verdict}; ending this process\n{stack}")
        os._exit(EXIT_PEER_LOST)


def post_failure(store: KeyValueStore, process: int, reason: str) -> None:
    """Posts the reason why this process ends, for the other processes to read."""
    store.set(f"{_FAILURES}{process}", reason)
    if process == 0:
        # Only process 0 posts verdicts.
        post_verdict(store, f"process 0 failed: {reason}")


def post_verdict(store: KeyValueStore, verdict: str) -> None:
    """Posts a verdict about a lost process; every process that reads it ends."""
    store.set(f"{_BULLETIN}verdict", verdict)


def say(text: str) -> None:
    """Writes to standard error without any lock that a stuck thread may hold."""
    os.write(2, text.encode(errors="replace"))


def _by_process(items: Mapping[str, str]) -> dict[int, str]:
    return {int(name): value for name, value in items.items()}


def _main_stack() -> str:
    """The stack of the main thread, which shows where it waits."""
    frames: Mapping[int, Any] = sys._current_frames()
    frame = frames.get(threading.main_thread().ident or 0)
    if frame is None:
        return ""
    lines = "".join(traceback.format_stack(frame)).splitlines()[-_STACK_LINES:]
    return "\n".join(["  the main thread is in:", *lines, ""])
