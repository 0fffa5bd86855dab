"""The memory that outlives a process: a folder of the host's, kept by the launcher."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

MEMORY = "AXON_MEMORY"
"""The variable with a folder in the memory of the host, for copies of the state of a run."""

_HOST_MEMORY = Path("/dev/shm")
_PREFIX, _LOCK = "axon-", "lock"


@contextlib.contextmanager
def host_folder(root: Path = _HOST_MEMORY) -> Iterator[Path | None]:
    """A folder in the memory of this host, for as long as the context lasts.

    It is for its owner alone, and locked: what a launcher that was killed has left behind is not,
    and is removed by the next one of the same user.

    Args:
        root: where memory is mounted as files.

    Yields:
        The folder; None on a host that has no such memory.

    Example:
        >>> with host_folder(Path(tempfile.mkdtemp())) as folder:
        ...     folder.is_dir()
        True
        >>> folder.exists()
        False
    """
    if not os.access(root, os.W_OK | os.X_OK):
        yield None
        return
    prefix = f"{_PREFIX}{os.getuid()}-"
    for left in root.glob(f"{prefix}*"):
        _remove_unless_locked(left)
    folder = Path(tempfile.mkdtemp(prefix=prefix, dir=root))
    with open(folder / f"{_LOCK}.new", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        os.replace(folder / f"{_LOCK}.new", folder / _LOCK)
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _remove_unless_locked(folder: Path) -> None:
    """Removes a folder whose launcher is gone; one without a lock is being made just now."""
    with contextlib.suppress(OSError), open(folder / _LOCK) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder, ignore_errors=True)
