"""Where compiled programs are kept, so that a run that starts again loads its step."""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path

import jax

from axon_dist.core.compat import keep_executables
from axon_dist.core.errors import ConfigError
from axon_dist.core.files import as_path

MOST_BYTES = 4 * 2**30
"""What compiled programs take on the disk; the least recently used ones go first."""

_DIGEST, _NAME = 32, "-program"
_CPU = ("model name", "flags", "Features", "CPU part")


def keep_programs(tell: Callable[[str], None]) -> None:
    """Keeps compiled programs in this user's cache folder, unless JAX was told of another.

    An executable is code, and the folder of a run may come from anybody: programs are not kept
    there but in `$XDG_CACHE_HOME/axon_dist`, or `~/.cache/axon_dist`, in a folder for each kind of
    host, that only this user can write to. JAX finds them by a hash of the program, the versions,
    the devices, the flags and the options of the compiler. `JAX_ENABLE_COMPILATION_CACHE=0` keeps
    none, and `JAX_COMPILATION_CACHE_DIR` names another folder.

    Args:
        tell: takes a sentence where none can be kept.
    """
    settings = jax.config.values
    if settings["jax_compilation_cache_dir"] or not settings["jax_enable_compilation_cache"]:
        return
    try:
        home = as_path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "XDG_CACHE_HOME")
        store = ProgramStore(home.absolute() / "axon_dist" / _host())
    except (OSError, ConfigError) as error:
        tell(f"compiled programs are not kept: {error}")
        return
    keep_executables(store.path, store.get, store.put)


class ProgramStore:
    """Compiled programs as files, in a folder that nobody else writes to.

    A file is there whole or not at all, whenever its process is killed; one that has changed since
    is removed.

    Args:
        folder: made where it is missing.
        most_bytes: of all files.

    Raises:
        PermissionError: when it is not this user's, or others may write to it.
    """

    def __init__(self, folder: Path, most_bytes: int = MOST_BYTES):
        for one in (folder.parent, folder):
            one.mkdir(mode=0o700, parents=True, exist_ok=True)
            found = one.stat()
            if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o022:
                raise PermissionError(
                    f"{str(one)!r} belongs to user {found.st_uid}, mode "
                    f"{stat.S_IMODE(found.st_mode):o}, and an executable is code; make it writable "
                    f"by user {os.geteuid()} alone, or remove it"
                )
        self.path = folder
        self._drop_oldest(most_bytes)

    def get(self, key: str) -> bytes | None:
        """The program of a key, or None."""
        file = self._file(key)
        try:
            found = file.read_bytes()
            os.utime(file)
        except FileNotFoundError:
            return None
        program = found[_DIGEST:]
        if hashlib.sha256(program).digest() != found[:_DIGEST]:
            file.unlink(missing_ok=True)
            return None
        return program

    def put(self, key: str, value: bytes) -> None:
        """Keeps the program of a key."""
        with tempfile.NamedTemporaryFile(dir=self.path, suffix=_NAME, delete=False) as file:
            file.write(hashlib.sha256(value).digest() + value)
        os.replace(file.name, self._file(key))

    def _file(self, key: str) -> Path:
        return self.path / (key + _NAME)

    def _drop_oldest(self, most_bytes: int) -> None:
        left = most_bytes
        for file in sorted(self.path.glob("*" + _NAME), key=_last_use, reverse=True):
            with contextlib.suppress(FileNotFoundError):  # another run may do the same
                left -= file.stat().st_size
                if left < 0:
                    file.unlink()


def _last_use(file: Path) -> float:
    try:
        return file.stat().st_mtime
    except FileNotFoundError:
        return 0.0


def _host() -> str:
    """A name for the kind of this host: homes are shared, and code for one CPU may fail on another.

    JAX asks for the kind of the devices alone.
    """
    known = [platform.machine(), platform.system()]
    if (info := Path("/proc/cpuinfo")).exists():
        lines = (line.partition(":") for line in info.read_text().splitlines())
        known += sorted({value for name, _, value in lines if name.strip() in _CPU})
    return hashlib.sha256("\n".join(known).encode()).hexdigest()[:16]
