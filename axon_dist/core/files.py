"""What lies at a path that somebody typed: said in one sentence, bounded, and never waited for."""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path
from typing import Any

from .errors import AxonDistError, ConfigError

MOST_TEXT = 2**24
"""A file that people write, such as a config, or that says what others hold, is no larger."""

_LONGEST_NAME, _LONGEST_PATH = 255, 4095
# Path("gs://bucket") has one slash left.
_ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")
_KINDS = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


def as_path(text: Any, where: str, error: type[AxonDistError] = ConfigError) -> Path:
    """A path that can be one on this machine, `~` and `~user` resolved; nothing is looked up.

    Args:
        text: a text or a path.
        where: the key, option or argument that names it; it opens the message.
        error: the kind of error.

    Raises:
        AxonDistError: of that kind, when no file can have this path.

    Example:
        >>> as_path("~nobody-here/runs", "run_dir")
        Traceback (most recent call last):
        axon_dist.core.errors.ConfigError: run_dir: got '~nobody-here/runs', and there is no user
        'nobody-here' whose home that could be; write the path out
    """
    if not isinstance(text, (str, os.PathLike)):
        raise error(f"{where}: got {text!r:.80}, a {type(text).__name__}, which must be a path")
    shown = repr(str(text))[:80]
    try:
        name = os.fsencode(text)
    except UnicodeEncodeError as cause:
        raise error(f"{where}: got {shown}, which no file name can hold; correct it") from cause
    if _ADDRESS.match(str(text)):
        # As a path it would be a folder of this machine, which is lost with it.
        raise error(
            f"{where}: got {shown}, the address of an object store; run_dir, checkpoint.dir, data "
            "and weights may be at gs:// and s3://, all else is a file of this machine: mount the "
            "store as a folder (gcsfuse, mountpoint-s3) and name that, or copy to it and from it"
        )
    if not name:
        raise error(f"{where}: got an empty path; name a file or folder, or leave it out")
    if b"\0" in name:
        raise error(f"{where}: got {shown}, a path with a NUL character in it; take that out")
    if any(letter < 32 or letter == 127 for letter in name):
        raise error(
            f"{where}: got {shown}, a path with a line break or another control character; take "
            "that out"
        )
    if len(name) > _LONGEST_PATH or max(map(len, name.split(b"/"))) > _LONGEST_NAME:
        raise error(
            f"{where}: got {shown}..., of {len(name)} bytes; a path has at most {_LONGEST_PATH}, "
            f"and each name in it at most {_LONGEST_NAME}"
        )
    try:
        return Path(text).expanduser()
    except RuntimeError as cause:
        user = Path(text).parts[0][1:]
        raise error(
            f"{where}: got {shown}, and there is no user {user!r} whose home that could be; write "
            "the path out"
        ) from cause


def kind_at(path: Path) -> str | None:
    """What lies at a path, in words: `a file`, `a folder`, `a pipe`...; None for nothing.

    A link that leads nowhere, or into a folder that may not be entered, is nothing.

    Example:
        >>> kind_at(Path("/dev/null")), kind_at(Path("/no/such"))
        ('a device', None)
    """
    try:
        mode = path.stat().st_mode
    except (OSError, ValueError):
        return None
    return next((kind for test, kind in _KINDS if test(mode)), "a file")


def read_bytes(
    path: Path, what: str, error: type[AxonDistError] = ConfigError, most: int = MOST_TEXT
) -> bytes:
    """The contents of a file; of nothing else, so that no pipe or device is waited for.

    Args:
        path: of the file.
        what: it is, to follow "cannot read".
        error: the kind of error.
        most: bytes that it may have.

    Raises:
        AxonDistError: of that kind, when there is no file, it cannot be read, or is too large.

    Example:
        >>> read_bytes(Path("/dev/zero"), "the config '/dev/zero'")
        Traceback (most recent call last):
        axon_dist.core.errors.ConfigError: cannot read the config '/dev/zero': it is a device and
        no file; name a file
    """
    kind = kind_at(path)
    if kind not in (None, "a file"):
        raise error(f"cannot read {what}: it is {kind} and no file; name a file")
    try:
        # Something else may have taken the name meanwhile, and must not be waited for either.
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
            size = os.fstat(file.fileno()).st_size
            contents = file.read(most + 1) if size <= most else b""
    except OSError as cause:
        raise error(f"cannot read {what}: {cause.strerror}; name another file") from cause
    if size > most or len(contents) > most:
        raise error(
            f"cannot read {what}: it has {max(size, len(contents))} bytes, and such a file has at "
            f"most {most}; name another one"
        )
    return contents


def read_text(
    path: Path, what: str, error: type[AxonDistError] = ConfigError, most: int = MOST_TEXT
) -> str:
    """The contents of a file as UTF-8, with or without a mark of it in front; as `read_bytes`."""
    try:
        return read_bytes(path, what, error, most).decode("utf-8-sig")
    except UnicodeDecodeError as cause:
        raise error(
            f"cannot read {what}: not a text of UTF-8 (byte {cause.start}); convert it, or "
            "name another file"
        ) from cause


def host_memory() -> int:
    """How many bytes of memory this process can have: those of the machine, or of its container.

    Example:
        >>> host_memory() > 2**28
        True
    """
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for file in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            machine = min(machine, int(Path(file).read_text()))
        except (OSError, ValueError):  # No container, or one without a limit, which says "max".
            continue
    return machine
