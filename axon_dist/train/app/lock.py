"""Locks a folder for one writer: an operating system lock on a disk, a lease in a bucket.

A lease is an object that is written with a compare-and-swap, and renewed regularly by the run that
has it. A lease that is not renewed for `SECONDS` has expired. A run that waits for a lease measures
this time with its own clock, so the clocks of machines need not agree. The lease of a process on
this machine expires as soon as that process ends.
"""

from __future__ import annotations

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
from axon_dist.core.files import (
    LOCKED,
    NO_LOCKS,
    Address,
    json_section,
    open_regular,
    read_text,
)

LOCK = "run.lock"
"""The file in a folder that names its writer."""


@contextmanager
def locked(folder: Path, key: str, tell: Callable[[str], None]) -> Iterator[None]:
    """Keeps other runs out of a folder.

    Uses `flock`: the operating system releases the lock when the process ends, so the lock file of
    a killed run does not block other runs.

    Args:
        folder: the folder to lock; it exists.
        key: the config key that names the folder, for the beginning of messages.
        tell: called with a message if the file system has no locks.

    Raises:
        ConfigError: when another run has the lock; the message names that run.

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
        # Remove the file before releasing the lock, so that another run's file is never removed.
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
            if error.errno in NO_LOCKS:
                tell(f"{key}: the file system of {str(folder)!r} has no locks; make sure that no "
                     "other run writes there")  # fmt: skip
                return _open(path, key)
            if error.errno not in LOCKED:
                raise ConfigError(
                    f"{key}: cannot determine whether another run writes to {str(folder)!r}: its "
                    f"{path.name} cannot be locked: {error.strerror}; name another folder",
                    code="cannot-lock",
                ) from error
            raise ConfigError(
                f"{key}: {str(folder)!r} is in use by {_holder(path)}; wait until it ends, stop "
                "it, or name another folder",
                code="folder-in-use",
            ) from None
        if _is_at(file, path):
            break
        # The previous run removed the file after we opened it and before we locked it.
        os.close(file)
    # On a full disk the lock still works; the file just does not name its holder.
    with suppress(OSError):
        os.ftruncate(file, 0)
        os.write(file, json.dumps(_this_process()).encode())
    return file


def _this_process() -> dict[str, str | int]:
    since = time.strftime("%Y-%m-%d %H:%M:%S")
    return {"host": socket.gethostname(), "pid": os.getpid(), "since": since}


def _open(path: Path, key: str) -> int:
    """Opens the lock file; raises for a link or a device."""
    what = f"{key}: cannot open the lock file {str(path)!r}"
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
"""The object in a folder that names its writer."""

SECONDS = 60.0
"""Seconds after which a lease that is not renewed expires."""


class Lease:
    """The lease of a folder in a bucket; only the run with the lease writes to the folder.

    Args:
        folder: a folder in a bucket.
        key: the config key that names the folder, for the beginning of messages.
        tell: called with a message while waiting for another run's lease.
        seconds: seconds after which a lease that is not renewed expires.

    Raises:
        ConfigError: when another run has the lease, or the store ignores write conditions.
        StoreError: when the bucket cannot be written.
    """

    def __init__(
        self,
        folder: Address,
        key: str,
        tell: Callable[[str], None],
        seconds: float = SECONDS,
    ):
        self._object = folder / LEASE
        self._folder = folder
        self._key = key
        self._seconds = seconds
        self._lost = ""
        self._mutex = threading.Lock()
        token = uuid.uuid4().hex
        self._holder: dict[str, Any] = {
            **_this_process(),
            "machine": _machine(),
            "token": token,
            "renewed": 0,
        }
        before = self._take(tell)
        # Write again, conditional on the old version, which was just replaced. A store that checks
        # conditions rejects this write.
        if self._object.write(self._text(), before) is not None:
            raise ConfigError(
                f"{key}: the store of {str(folder)!r} ignores the condition of a conditional "
                "write, so two runs could write there at once; name a folder of another store",
                code="no-conditional-writes",
            )

    def renew(self) -> None:
        """Renews the lease.

        Raises:
            ConfigError: when another run has taken it over; everything saved before is valid.
            StoreError: when the bucket does not respond.
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
                        f"{self._key}: {str(self._folder)!r} was taken over by {_who(holder)}, "
                        f"because this run did not renew its lease for {self._seconds:g} s; that "
                        "run continues there, so this one must stop"
                    )
                    raise ConfigError(self._lost)
            self._version = made

    @contextmanager
    def renewing(self) -> Iterator[None]:
        """Renews the lease in a thread, and releases it on exit."""
        ended = threading.Event()

        def renew() -> None:
            while not ended.wait(self._seconds / 6):
                # Ignore errors here: the next save raises them before it writes anything.
                with suppress(ConfigError, StoreError):
                    self.renew()

        thread = threading.Thread(target=renew, name="lease", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()
            # S3 deletes objects unconditionally, so empty the object instead of deleting it.
            with suppress(StoreError):
                self._object.write(b"{}", self._version)

    def _take(self, tell: Callable[[str], None]) -> bytes:
        """Takes the lease, and returns the version that it replaced."""
        watched = None
        end = 0.0
        while True:
            contents, version = self._object.read_versioned()
            holder = _read(contents)
            is_free = not holder or _is_gone(holder)
            if watched is not None and version != watched and not is_free:
                raise ConfigError(
                    f"{self._key}: {str(self._folder)!r} is in use by {_who(holder)}; wait until "
                    "it ends, stop it, or name another folder",
                    code="folder-in-use",
                )
            if is_free or (watched is not None and time.monotonic() >= end):
                self._holder["renewed"] += 1
                made = self._object.write(self._text(), version)
                current, self._version = (b"", made) if made else self._object.read_versioned()
                if made or _read(current).get("token") == self._holder["token"]:
                    return version
                watched = None
            elif watched is None:
                watched = version
                end = time.monotonic() + self._seconds
                tell(
                    f"{self._key}: {str(self._folder)!r} was in use by {_who(holder)}; waiting up "
                    f"to {self._seconds:g} s to see whether that process is alive"
                )
            time.sleep(min(1.0, self._seconds / 10))

    def _text(self) -> bytes:
        return json.dumps(self._holder).encode()


def _read(contents: bytes | None) -> Mapping[str, Any]:
    holder = json_section(contents or b"{}")
    return {"host": "an unknown machine"} if holder is None else holder


def _who(holder: Mapping[str, object]) -> str:
    named = (holder.get(name, "?") for name in ("pid", "host", "since"))
    return "process {} on {}, since {}".format(*named)


def _machine() -> str:
    """Returns an id of the host and its PID namespace; process ids are unique within it."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    try:
        return f"{boot.read_text().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return uuid.uuid4().hex


def _is_gone(holder: Mapping[str, Any]) -> bool:
    """Whether the holder was a process of this machine that has ended."""
    pid = holder.get("pid")
    if holder.get("machine") != _machine() or not isinstance(pid, int):
        return False
    return not Path(f"/proc/{pid}").exists()
