"""Who writes to a folder: a lock of the operating system on a disk, a lease in a bucket.

A lease is an object that is written only where nobody wrote it since it was read, and renewed all
the time by the run that holds it. One that is not renewed for `SECONDS`, by the clock of the run
that waits for it, has expired; so the clocks of machines need not agree. The lease of a process of
this machine expires as soon as that process has ended.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from axon_dist.core.errors import ConfigError, StoreError, reworded
from axon_dist.core.files import Address, json_section, open_regular, read_text

LOCK = "run.lock"
"""The file in a folder that says who writes to it."""

_IN_USE = (errno.EWOULDBLOCK, errno.EACCES)
_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS)


@contextmanager
def locked(folder: Path, key: str, tell: Callable[[str], None]) -> Iterator[None]:
    """Keeps other runs out of a folder.

    The lock is one of the operating system, `flock`, which releases it when the process ends,
    however it ends: the file that a killed run leaves behind keeps nobody out.

    Args:
        folder: what is written to; it exists.
        key: of the config that names it, to open the message.
        tell: takes a sentence where the file system has no locks.

    Raises:
        ConfigError: when another run holds the lock, naming that run.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> with locked(folder, "run_dir", print):
        ...     [file.name for file in folder.iterdir()]
        ['run.lock']
        >>> list(folder.iterdir())
        []
    """
    path = folder / LOCK
    file = _take(path, folder, key, tell)
    try:
        yield
    finally:
        # Removed while it is held, so that the file of another run is never taken away.
        if _is_at(file, path):
            with suppress(OSError):
                path.unlink()
        os.close(file)


def _take(path: Path, folder: Path, key: str, tell: Callable[[str], None]) -> int:
    while True:
        file = _open(path, key)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(file)
            if error.errno in _NO_LOCKS:
                tell(f"{key}: the file system of {str(folder)!r} has no locks; see to it that no "
                     "other run writes there")  # fmt: skip
                return _open(path, key)
            if error.errno not in _IN_USE:
                raise ConfigError(
                    f"{key}: cannot find out whether another run writes to {str(folder)!r}, for "
                    f"{path.name} cannot be locked: {error.strerror}; name another folder"
                ) from error
            raise ConfigError(
                f"{key}: {str(folder)!r} is in use by {_holder(path)}; wait for its end, stop it, "
                "or name another folder"
            ) from None
        if _is_at(file, path):
            break
        # The run before removed it between our opening and our locking it.
        os.close(file)
    # On a full disk the lock is held all the same, and only says less.
    with suppress(OSError):
        os.ftruncate(file, 0)
        os.write(file, json.dumps(_this_process()).encode())
    return file


def _this_process() -> dict[str, str | int]:
    since = time.strftime("%Y-%m-%d %H:%M:%S")
    return {"host": socket.gethostname(), "pid": os.getpid(), "since": since}


def _open(path: Path, key: str) -> int:
    """Opens the file of the lock; refuses a link or a device in its place."""
    what = f"{key}: cannot open {str(path)!r}, which says who writes there"
    with reworded(what, "remove it, or name another folder"):
        return open_regular(path, os.O_RDWR | os.O_CREAT, 0o644)


def _holder(path: Path) -> str:
    try:
        holder = json.loads(read_text(path, str(path), most=2**12, links=False))
        return f"process {holder['pid']} on {holder['host']}, since {holder['since']}"
    except (ValueError, KeyError, TypeError, RecursionError):
        return f"another run, see {str(path)!r}"


def _is_at(file: int, path: Path) -> bool:
    with suppress(OSError):
        return os.path.samestat(path.stat(), os.fstat(file))
    return False


LEASE = "run.lease"
"""The object in a folder that says who writes to it."""

SECONDS = 60.0
"""After which a lease that is not renewed expires."""


class Lease:
    """The lease of a folder of a bucket: only the run that holds it writes there.

    Args:
        folder: in a bucket.
        key: of the config that names it, to open the messages.
        tell: takes a sentence while another run's lease is waited for.
        seconds: after which a lease that is not renewed expires.

    Raises:
        ConfigError: when another run has it, or the store ignores conditions of writes.
        StoreError: when the bucket cannot be written.
    """

    def __init__(
        self,
        folder: Address,
        key: str,
        tell: Callable[[str], None],
        seconds: float = SECONDS,
    ):
        self._object, self._folder, self._key = folder / LEASE, folder, key
        self._seconds, self._lost, self._mutex = seconds, "", threading.Lock()
        token = uuid.uuid4().hex
        self._holder = {**_this_process(), "machine": _machine(), "token": token, "renewed": 0}
        before = self._take(tell)
        if self._object.write(self._text(), before) is not None:
            raise ConfigError(
                f"{key}: the store of {str(folder)!r} writes an object also where another one is "
                "there than the one it is asked to replace, so that nothing keeps two runs apart; "
                "name a folder of another store"
            )

    def check(self) -> None:
        """Renews the lease.

        Raises:
            ConfigError: when another run has it; what was saved until then counts.
            StoreError: when the bucket does not answer.
        """
        with self._mutex:
            if self._lost:
                raise ConfigError(self._lost)
            self._holder["renewed"] += 1
            made = self._object.write(self._text(), self._version)
            if made is None:
                contents, made = self._object.read_versioned()
                holder = _read(contents)
                if holder.get("token") != self._holder["token"]:
                    self._lost = (
                        f"{self._key}: {str(self._folder)!r} was taken over by {_who(holder)}, for "
                        f"this run did not answer for {self._seconds:g} s; it goes on there, and "
                        "this one must not"
                    )
                    raise ConfigError(self._lost)
            self._version = made

    @contextmanager
    def renewing(self) -> Iterator[None]:
        """Renews the lease in a thread, and releases it in the end."""
        ended = threading.Event()

        def renew() -> None:
            while not ended.wait(self._seconds / 6):
                # The next save raises the error; nothing is written until then.
                with suppress(ConfigError, StoreError):
                    self.check()

        thread = threading.Thread(target=renew, name="lease", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()
            # S3 removes an object whatever the condition, so it stays, empty.
            with suppress(StoreError):
                self._object.write(b"{}", self._version)

    def _take(self, tell: Callable[[str], None]) -> bytes:
        """Takes the lease; returns the version that it replaced."""
        watched, end = None, 0.0
        while True:
            contents, version = self._object.read_versioned()
            holder = _read(contents)
            is_free = not holder or _is_gone(holder)
            if watched is not None and version != watched and not is_free:
                raise ConfigError(
                    f"{self._key}: {str(self._folder)!r} is in use by {_who(holder)}; wait for its "
                    "end, stop it, or name another folder"
                )
            if is_free or (watched is not None and time.monotonic() >= end):
                self._holder["renewed"] += 1
                made = self._object.write(self._text(), version)
                current, self._version = (b"", made) if made else self._object.read_versioned()
                if made or _read(current).get("token") == self._holder["token"]:
                    return version
                watched = None
            elif watched is None:
                watched, end = version, time.monotonic() + self._seconds
                tell(
                    f"{self._key}: {str(self._folder)!r} was in use by {_who(holder)}; waiting up "
                    f"to {self._seconds:g} s to see whether that is alive"
                )
            time.sleep(min(1.0, self._seconds / 10))

    def _text(self) -> bytes:
        return json.dumps(self._holder).encode()


def _read(contents: bytes | None) -> Mapping[str, Any]:
    holder = json_section(contents or b"{}")
    return {"host": "a machine that does not say so"} if holder is None else holder


def _who(holder: Mapping[str, object]) -> str:
    named = (holder.get(name, "?") for name in ("pid", "host", "since"))
    return "process {} on {}, since {}".format(*named)


def _machine() -> str:
    """An id of the host and its PID namespace, within which process ids are comparable."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    try:
        return f"{boot.read_text().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return uuid.uuid4().hex


def _is_gone(holder: Mapping[str, Any]) -> bool:
    """Whether it was a process of this machine that has ended."""
    pid = holder.get("pid")
    if holder.get("machine") != _machine() or not isinstance(pid, int):
        return False
    return not Path(f"/proc/{pid}").exists()
