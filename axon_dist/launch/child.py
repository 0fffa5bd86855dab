"""`Child`: a process that the local launcher started, in a session of its own, with its log."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

_CHUNK_BYTES = 2**16
_NOISE = b"[Gloo] Rank "
_TAIL_BYTES = 2**14
_OURS = "axon: "
_TRACEBACK = "Traceback (most recent call last):"
_ERROR = re.compile(r"[A-Za-z_][\w.]*(:|$)")
_ABORTS = ("coordination service", "distributed service")
_DEATH_SECONDS = 10.0
_GUARD = (
    'groups=; while read -r group; do groups="$groups -$group"; done; kill -s KILL -- $groups; '
    'rm -rf -- "$0"'
)
_LOST = "it lost the coordination service, the process beside rank 0 through which all meet"


@dataclasses.dataclass
class Child:
    """One rank of a run.

    Args:
        rank: which.
        process: the process; it leads a session, so that a key pressed in the terminal reaches the
            launcher alone, and whatever it starts can be ended with it.
        log: where its output goes.
        pump: copies the output to the screen too; None if it goes to the file alone.
    """

    rank: int
    process: subprocess.Popen[bytes]
    log: Path
    pump: threading.Thread | None = None

    @property
    def code(self) -> int | None:
        """The exit code, 128 + n after signal n, None while it runs."""
        code = self.process.poll()
        return code if code is None or code >= 0 else 128 - code

    @property
    def was_killed(self) -> bool:
        """Whether a signal ended it."""
        return (self.process.poll() or 0) < 0

    def send(self, number: int) -> None:
        """Sends it a signal, if it still runs."""
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(number)

    def kill(self) -> bool:
        """Ends it and all that it started, also when it is stopped.

        Returns:
            Whether it is gone; false for one that the kernel holds, as over a disk that is gone.
        """
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(_DEATH_SECONDS)
        if self.pump is not None:
            # What left the group may hold the other end open for good.
            self.pump.join(_DEATH_SECONDS)
        return self.process.poll() is not None

    def describe_end(self) -> str:
        """How it ended, in words, with the last that it said."""
        code = self.process.poll()
        if code is not None and code < 0:
            # JAX ends a process by this signal when the service of the run is gone.
            is_lost = code == -signal.SIGABRT and any(x in _tail(self.log) for x in _ABORTS)
            lost = f": {_LOST}" if is_lost else ""
            return f"rank {self.rank} was killed by {signal.Signals(-code).name}{lost}"
        words = last_words(self.log)
        return f"rank {self.rank} exited with code {code}{f': {words}' if words else ''}"


def start_child(
    command: Sequence[str], env: Mapping[str, str], rank: int, log: Path, on_screen: bool
) -> Child:
    """Starts a rank.

    Args:
        command: program and arguments.
        env: its environment.
        rank: its rank.
        log: the file for its output; appended to.
        on_screen: whether the output goes to the standard output as well.
    """
    file = open(log, "ab", buffering=0)  # noqa: SIM115
    if not on_screen:
        with file:
            return Child(rank, _start(command, env, file.fileno()), log)
    source, sink = os.openpty() if sys.stdout.isatty() else os.pipe()
    process = _start(command, env, sink)
    os.close(sink)
    pump = threading.Thread(target=_copy, args=(source, file), daemon=True)
    pump.start()
    return Child(rank, process, log, pump)


class Reaper:
    """Ends the process groups of a launcher that died; runs as a separate process.

    The kernel can end a process whose parent died, but not what that process started; and asking it
    to takes a fork, which JAX warns of.

    Args:
        doomed: a folder to remove when the launcher dies; "" for none.
    """

    def __init__(self, doomed: str = "") -> None:
        self._process = subprocess.Popen(
            ["/bin/sh", "-c", _GUARD, doomed],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def watch(self, child: Child) -> None:
        """Adds a process whose group is ended if the launcher dies."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(f"{child.process.pid}\n".encode())
            self._process.stdin.flush()

    def close(self) -> None:
        """Stops watching: all processes have ended."""
        assert self._process.stdin is not None
        self._process.kill()
        self._process.wait()
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()


def lasting(tell: Callable[[str], None]) -> Callable[[str], None]:
    """Ignores errors of a terminal that is gone: they must not end a run."""

    def tell_or_not(line: str) -> None:
        with contextlib.suppress(OSError):
            tell(line)

    return tell_or_not


def last_words(log: Path) -> str:
    """The last line in a log that this library wrote; or the last error of all, or the last line.

    The error below a traceback need not be the last line: its message may have several, and JAX
    adds that it left frames out.
    """
    lines = [line for line in _tail(log).splitlines() if line.strip()]
    ours = [line for line in lines if line.startswith(_OURS)]
    starts = [number for number, line in enumerate(lines) if line.startswith(_TRACEBACK)]
    errors = [line for line in lines[max(starts, default=len(lines)) :] if _ERROR.match(line)]
    return (ours[-1:] or errors[:1] or lines[-1:] or [""])[0].removeprefix(_OURS)


def _tail(log: Path) -> str:
    """The end of a log; nothing where it cannot be read."""
    with contextlib.suppress(OSError), open(log, "rb") as file:
        file.seek(max(file.seek(0, os.SEEK_END) - _TAIL_BYTES, 0))
        return file.read().decode(errors="replace")
    return ""


def _start(command: Sequence[str], env: Mapping[str, str], output: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        command,
        env=dict(env),
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        start_new_session=True,
    )


def _copy(source: int, file) -> None:
    """Copies until the other end is closed, which a terminal reports as an error."""
    has_screen = True
    with file, contextlib.suppress(OSError):
        while chunk := os.read(source, _CHUNK_BYTES):
            file.write(chunk)
            has_screen = has_screen and _show(chunk)
    os.close(source)


def _show(chunk: bytes) -> bool:
    """Copies to the screen; false once its reader is gone, which must not stop the rank."""
    lines = chunk.splitlines(keepends=True)
    try:
        sys.stdout.buffer.write(b"".join(x for x in lines if not x.startswith(_NOISE)))
        sys.stdout.buffer.flush()
    except OSError:
        return False
    return True
