"""`Child`: a rank that the local launcher started, in its own session, with its log."""

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

from ..core.errors import LaunchError
from ..core.files import NO_FILE, open_regular
from ..core.words import printable

_CHUNK_BYTES = 2**16
_NOISE = b"[Gloo] Rank "
_TAIL_BYTES = 2**14
_OURS = "axon: "
_TRACEBACK = "Traceback (most recent call last):"
_ERROR = re.compile(r"[A-Za-z_][\w.]*(:|$)")
_ABORTS = ("coordination service", "distributed service")
"""Words in the log of a process that JAX aborted because the service is gone."""
_DEATH_SECONDS = 10.0
_PUMP_SECONDS = 1.0
_MOST_PUMPS = 256
"""The most ranks whose output is copied by threads; each takes two open files of the launcher."""
_GUARD = (
    'groups=; while read -r group; do groups="$groups -$group"; done; kill -s KILL -- $groups; '
    'rm -rf -- "$0"'
)
_LOST = "it lost the coordination service, a separate process on the host of rank 0"


@dataclasses.dataclass
class Child:
    """One rank of a run.

    Args:
        rank: its number.
        process: the process. It leads its own session, so keys pressed in the terminal reach only
            the launcher, and all processes that it starts can be ended with it.
        log: the file for its output.
        pump: the thread that copies its output to the log and the screen; None if the rank writes
            the log itself.
        was_starting: whether a signal reached it before it had a signal handler.
    """

    rank: int
    process: subprocess.Popen[bytes]
    log: Path
    pump: threading.Thread | None = None
    was_starting: bool = False

    @property
    def code(self) -> int | None:
        """The exit code, 128 + n after signal n; None while it runs."""
        code = self.process.poll()
        return code if code is None or code >= 0 else 128 - code

    @property
    def was_killed(self) -> bool:
        """Whether a signal ended it."""
        return (self.process.poll() or 0) < 0

    def stop(self, number: int) -> None:
        """Forwards a signal that ends the run.

        A process that is still starting has no handler yet. SIGINT then raises an exception in the
        middle of an import, which may turn it into any other error, or into SIGABRT.
        """
        self.was_starting |= not _has_handler(self.process.pid, signal.SIGTERM)
        self.send(number)

    def send(self, number: int) -> None:
        """Sends it a signal if it still runs."""
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(number)

    def kill(self) -> bool:
        """Kills it and everything that it started, even if it is stopped.

        Returns:
            Whether it is gone; False if the kernel blocks it, for example on a lost disk.
        """
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(_DEATH_SECONDS)
        if self.pump is not None:
            # A process that left the group may keep the other end open for ever.
            self.pump.join(_DEATH_SECONDS)
        return self.process.poll() is not None

    def describe_end(self) -> str:
        """A sentence about how it ended, with its last error or line."""
        code = self.process.poll()
        if code is not None and code < 0:
            # JAX aborts a process when the coordination service of the run is gone.
            is_lost = code == -signal.SIGABRT and any(x in _tail(self.log) for x in _ABORTS)
            lost = f": {_LOST}" if is_lost else ""
            return f"rank {self.rank} was killed by {signal.Signals(-code).name}{lost}"
        if self.pump is not None:
            # The rank's last output may not be in the log yet.
            self.pump.join(_PUMP_SECONDS)
        words = last_message(self.log)
        return f"rank {self.rank} exited with code {code}{f': {words}' if words else ''}"


def start_child(
    command: Sequence[str],
    env: Mapping[str, str],
    rank: int,
    log: Path,
    tell: Callable[[str], None],
) -> Child:
    """Starts a rank; the output of local rank 0 goes to the standard output too.

    A rank that wrote its log itself would fail at a print when the disk is full. So a thread of the
    launcher copies its output, and continues to read it if the log cannot be written.

    Args:
        command: program and arguments.
        env: the environment of the rank.
        rank: the index of the rank.
        log: the file to which its output is appended.
        tell: called with a sentence when the log cannot be written.

    Raises:
        LaunchError: if something other than a file has the name of the log.
        OSError: if the program cannot be started.
    """
    local = int(env["LOCAL_RANK"])
    output = _Log(log, tell)
    if local >= _MOST_PUMPS:
        try:
            return Child(rank, _start(command, env, output.descriptor), log)
        finally:
            output.close()
    # The standard output is None if its descriptor was closed when Python started.
    screen = sys.stdout if local == 0 else None
    source, sink = os.openpty() if screen and screen.isatty() else os.pipe()
    try:
        process = _start(command, env, sink)
    except BaseException:
        os.close(source)
        output.close()
        raise
    finally:
        os.close(sink)
    pump = threading.Thread(target=_copy, args=(source, output, bool(screen)), daemon=True)
    pump.start()
    return Child(rank, process, log, pump)


class _Log:
    """The log of a rank; a disk error loses lines, but does not end the rank.

    Args:
        path: the file to append to.
        tell: called with a sentence when the first line is lost.

    Raises:
        LaunchError: if something other than a file has its name.
    """

    def __init__(self, path: Path, tell: Callable[[str], None]):
        self._path = path
        self._tell = tell
        self._has_failed = False
        try:
            self.descriptor = open_regular(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        except OSError as error:
            if error.errno in NO_FILE:
                raise LaunchError(
                    f"cannot write the log {str(path)!r}: {error.strerror}; remove it, or choose "
                    "another folder with --log-dir"
                ) from error
            self.descriptor = os.open(os.devnull, os.O_WRONLY)
            self._fail(error)

    def write(self, chunk: bytes) -> None:
        """Appends to the log as much as the disk accepts."""
        try:
            while chunk:
                chunk = chunk[os.write(self.descriptor, chunk) :]
        except OSError as error:
            self._fail(error)

    def close(self) -> None:
        """Closes the file."""
        with contextlib.suppress(OSError):
            os.close(self.descriptor)

    def _fail(self, error: OSError) -> None:
        if not self._has_failed:
            self._tell(f"{self._path}: the log loses lines ({error.strerror}); the ranks continue")
        self._has_failed = True


class Reaper:
    """Kills the process groups of a launcher that died; runs as a separate process.

    The kernel can kill a process whose parent died (`PR_SET_PDEATHSIG`), but not that process's
    children. Setting it would also take a fork, about which JAX warns.

    Args:
        remove_folder: a folder to remove when the launcher dies; "" for none.
    """

    def __init__(self, remove_folder: str = "") -> None:
        self._process = subprocess.Popen(
            ["/bin/sh", "-c", _GUARD, remove_folder],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def watch(self, child: Child) -> None:
        """Adds a process whose group is killed if the launcher dies."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(f"{child.process.pid}\n".encode())
            self._process.stdin.flush()

    def close(self) -> None:
        """Stops watching, after all processes have ended."""
        assert self._process.stdin is not None
        self._process.kill()
        self._process.wait()
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()


def _has_handler(pid: int, number: int) -> bool:
    """Whether a process handles a signal; True if the kernel does not report it."""
    with contextlib.suppress(OSError):
        found = re.search(r"SigCgt:\s*([0-9a-f]+)", Path(f"/proc/{pid}/status").read_text())
        return found is None or bool(int(found[1], 16) >> number - 1 & 1)
    return True


def ignoring_closed_terminal(tell: Callable[[str], None]) -> Callable[[str], None]:
    """Wraps `tell` to ignore errors of a closed terminal, which must not end a run."""

    def tell_if_open(line: str) -> None:
        with contextlib.suppress(OSError):
            tell(line)

    return tell_if_open


def last_message(log: Path) -> str:
    """The last line of this library in a log, else the last error, else the last line.

    The error below a traceback need not be the last line: its message may have several lines, and
    JAX appends a note about filtered frames.
    """
    lines = [line for line in _tail(log).splitlines() if line.strip()]
    ours = [line for line in lines if line.startswith(_OURS)]
    starts = [number for number, line in enumerate(lines) if line.startswith(_TRACEBACK)]
    errors = [line for line in lines[max(starts, default=len(lines)) :] if _ERROR.match(line)]
    words = (ours[-1:] or errors[:1] or lines[-1:] or [""])[0].removeprefix(_OURS)
    return printable(words.replace("\t", " "))[:_MOST_WORDS]


_MOST_WORDS = 2000


def _tail(log: Path) -> str:
    """The end of a log; "" if it cannot be read."""
    with contextlib.suppress(OSError), open(open_regular(log), "rb") as file:
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


def _copy(source: int, log: _Log, has_screen: bool) -> None:
    """Copies output until the other end is closed, which a terminal reports as an error."""
    with contextlib.suppress(OSError):
        while chunk := os.read(source, _CHUNK_BYTES):
            log.write(chunk)
            has_screen = has_screen and _show(chunk)
    log.close()
    os.close(source)


def _show(chunk: bytes) -> bool:
    """Copies to the screen; returns False if its reader is gone, so that the rank continues."""
    lines = chunk.splitlines(keepends=True)
    try:
        sys.stdout.buffer.write(b"".join(x for x in lines if not x.startswith(_NOISE)))
        sys.stdout.buffer.flush()
    except (OSError, ValueError):  # A closed stream raises ValueError.
        return False
    return True
