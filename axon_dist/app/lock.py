"""`locked`: a folder that one run at a time writes to."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from axon_dist.core.errors import ConfigError
from axon_dist.core.files import read_text

LOCK = "run.lock"
"""The file in a folder that says who writes to it."""

_IN_USE = (errno.EWOULDBLOCK, errno.EACCES)
_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS)


@contextmanager
def locked(folder: Path, key: str, tell: Callable[[str], None]) -> Iterator[None]:
    """Keeps other runs out of a folder.

    The operating system holds the lock, by `flock`, and gives it up with the process, however that
    ends: the file of a run that was killed is told apart from that of one that lives.

    Args:
        folder: what is written to; it exists.
        key: of the config that names it, to open the message.
        tell: takes a sentence where the file system has no locks.

    Raises:
        ConfigError: when another run holds it, naming that.

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
    os.ftruncate(file, 0)
    os.write(file, json.dumps(_myself()).encode())
    return file


def _open(path: Path, key: str) -> int:
    """Opens the file of the lock, and nothing that somebody has put in its place."""
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o644)
    except OSError as error:
        raise ConfigError(
            f"{key}: cannot open {str(path)!r}, which says who writes there: {error.strerror}; "
            "remove it, or name another folder"
        ) from error


def _myself() -> dict[str, Any]:
    since = time.strftime("%Y-%m-%d %H:%M:%S")
    return {"host": socket.gethostname(), "pid": os.getpid(), "since": since}


def _holder(path: Path) -> str:
    try:
        found = json.loads(read_text(path, str(path), most=2**12))
        return f"process {found['pid']} on {found['host']}, since {found['since']}"
    except (ValueError, KeyError, TypeError, RecursionError):
        return f"another run, see {str(path)!r}"


def _is_at(file: int, path: Path) -> bool:
    try:
        found = path.stat()
    except OSError:
        return False
    mine = os.fstat(file)
    return (found.st_dev, found.st_ino) == (mine.st_dev, mine.st_ino)
