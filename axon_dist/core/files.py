"""Local files, and objects in buckets at `gs://` and `s3://`.

Reads of local files are bounded in size and never block; errors are one sentence. tensorstore reads
and writes both kinds of bucket: it finds the credentials, retries requests that were throttled, cut
short or not answered, and returns the version of an object, a GCS generation or an S3 ETag.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import errno
import functools
import hashlib
import importlib
import json
import os
import re
import secrets
import shutil
import stat
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from .errors import AxonDistError, ConfigError, StoreError, reworded

MOST_TEXT = 2**24
"""The largest size of a config, an index or another text file, in bytes."""

_LONGEST_NAME, _LONGEST_PATH = 255, 4095
# Path("gs://bucket") turns the two slashes into one.
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")
_KINDS = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


def as_path(text: Any, label: str, error: type[AxonDistError] = ConfigError) -> Path:
    """Checks that a text can be a local path, and expands `~` and `~user`; reads no file.

    Args:
        text: a string or a path.
        label: the key, option or argument that names it; starts the message.
        error: the error to raise.

    Raises:
        AxonDistError: of type `error`, if no file can have this path.

    Example:
        >>> as_path("~nobody-here/runs", "run_dir")
        Traceback (most recent call last):
        axon_dist.core.errors.ConfigError: run_dir: got '~nobody-here/runs', and there is no user
        'nobody-here'; write the path without ~
    """
    if not isinstance(text, (str, os.PathLike)):
        raise error(f"{label}: got {text!r:.80}, a {type(text).__name__}; it must be a path")
    shown = repr(str(text))[:80]
    try:
        name = os.fsencode(text)
    except UnicodeEncodeError as cause:
        raise error(
            f"{label}: got {shown}, which cannot be encoded as a file name; remove the unpaired "
            "surrogates",
            code="path-encoding",
        ) from cause
    if _SCHEME.match(str(text)):
        # Path would turn it into a local folder, and the files would be lost with the machine.
        raise error(
            f"{label}: got {shown}, the address of an object store; run_dir, checkpoint.dir, data, "
            "weights and model.hub may be at gs:// and s3://, everything else must be a local "
            "path: mount the store as a folder (gcsfuse, mountpoint-s3) and give that path, or "
            "copy the files"
        )
    if not name:
        raise error(f"{label}: got an empty path; name a file or folder, or leave it out")
    if any(letter < 32 or letter == 127 for letter in name):
        raise error(
            f"{label}: got {shown}, a path with a line break or another control character; remove "
            "it"
        )
    if len(name) > _LONGEST_PATH or max(map(len, name.split(b"/"))) > _LONGEST_NAME:
        raise error(
            f"{label}: got {shown}..., of {len(name)} bytes; a path has at most {_LONGEST_PATH}, "
            f"and each name in it at most {_LONGEST_NAME}"
        )
    try:
        return Path(text).expanduser()
    except RuntimeError as cause:
        user = Path(text).parts[0][1:]
        raise error(
            f"{label}: got {shown}, and there is no user {user!r}; write the path without ~"
        ) from cause


def kind_at(path: Path) -> str | None:
    """The kind of file at a path, in words: `a file`, `a folder`, `a pipe`...; None if none.

    The result is also None for a broken link, and for a link into a folder without permission.

    Example:
        >>> kind_at(Path("/dev/null")), kind_at(Path("/no/such"))
        ('a device', None)
    """
    try:
        mode = path.stat().st_mode
    except (OSError, ValueError):
        return None
    return next((kind for test, kind in _KINDS if test(mode)), "a file")


NO_FILE = frozenset({errno.ELOOP, errno.ENXIO, errno.EINVAL, errno.EMLINK})
"""The errnos of `open_regular` for links and for anything that is not a regular file."""

LOCKED = frozenset({errno.EWOULDBLOCK, errno.EACCES})
"""The errnos of a lock that another process has."""

NO_LOCKS = frozenset({errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS})
"""The errnos of a file system without locks, such as Lustre without `-o flock`."""


def open_regular(
    path: Path, flags: int = os.O_RDONLY, mode: int = 0o666, *, links: bool = False
) -> int:
    """Opens a regular file; refuses links, and never waits for a pipe or a device.

    Whoever can write to a folder can replace any file there by a link or a pipe. So the library
    opens all of its own files here or in `replacing`. A file opened for writing must not have a
    second name either, because a hard link would have the same effect as a symbolic one.

    Args:
        path: the path of the file.
        flags: the flags for `os.open`.
        mode: the mode of the file if it is created.
        links: whether to follow a link at the path, as for files that the user names.

    Returns:
        The descriptor, which the caller closes.

    Raises:
        OSError: if the path is not a regular file; the reason says what it is.
    """
    flags |= os.O_NONBLOCK | os.O_CLOEXEC | (0 if links else os.O_NOFOLLOW)
    try:
        descriptor = os.open(path, flags, mode)
    except OSError as error:
        if error.errno == errno.ELOOP and path.is_symlink():
            raise _refusal(errno.ELOOP, "it is a link, which is not followed", path) from error
        if error.errno == errno.ENXIO:
            raise _refusal(errno.ENXIO, f"it is {kind_at(path)}, not a file", path) from error
        raise
    try:
        status = os.fstat(descriptor)
        kind = next((kind for test, kind in _KINDS if test(status.st_mode)), None)
        if kind is not None:
            raise _refusal(errno.EINVAL, f"it is {kind}, not a file", path)
        if flags & (os.O_WRONLY | os.O_RDWR) and status.st_nlink > 1:
            raise _refusal(errno.EMLINK, "it is a hard link to a file with another name", path)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _refusal(number: int, reason: str, path: Path) -> OSError:
    return OSError(number, reason, str(path))


TEMPORARY = ".axon.tmp"
"""The suffix of files that are being written; no reader opens them."""

_ABANDONED = 3600.0
"""Seconds without a write after which a temporary file counts as abandoned by its process."""


@contextlib.contextmanager
def replacing(path: Path, mode: int = 0o666, *, durable: bool = True) -> Iterator[BinaryIO]:
    """Opens a file that replaces another one atomically once it is completely written.

    It is newly created under a name that nobody can guess, so no link is followed. A link at the
    path itself is replaced; its target stays as it is.

    Args:
        path: the final name; after an error the old file is still there.
        mode: the mode of the new file, before the process's umask.
        durable: whether to sync the file to disk before this returns; without it a power cut may
            leave an empty file.

    Yields:
        The file.

    Raises:
        OSError: when the file cannot be written.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp(), "a.txt")
        >>> with replacing(path) as file:
        ...     _ = file.write(b"whole")
        >>> [(one.name, one.read_bytes()) for one in path.parent.iterdir()]
        [('a.txt', b'whole')]
    """
    temporary = path.with_name(f".{secrets.token_hex(8)}{TEMPORARY}")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    file = open(os.open(temporary, flags, mode), "wb")  # noqa: SIM115 (closed below)
    try:
        with file:
            yield file
            file.flush()
            if durable:
                sync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    if durable:
        sync_entries(path.parent)


def replace_text(path: Path, text: str, *, durable: bool = True) -> None:
    """Writes a text file atomically, see `replacing`."""
    with replacing(path, durable=durable) as file:
        file.write(text.encode())


def remove_abandoned(folder: Path, seconds: float = _ABANDONED) -> None:
    """Removes temporary files that killed processes have left in a folder.

    Args:
        folder: where to look.
        seconds: the age of the last write from which a file counts as abandoned.
    """
    with contextlib.suppress(OSError):
        for path in folder.glob(f".{'[0-9a-f]' * 16}{TEMPORARY}"):
            with contextlib.suppress(OSError):
                if time.time() - path.lstat().st_mtime >= seconds:
                    path.unlink()


_UNKNOWN_CALL = frozenset({errno.EINVAL, errno.ENOSYS, errno.ENOTSUP})


def sync(descriptor: int) -> None:
    """Syncs a file, or the entries of a folder, to disk."""
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Buckets mounted as folders do not support fsync for some of their files.
        if error.errno not in _UNKNOWN_CALL:
            raise


def sync_path(path: Path) -> None:
    """Syncs a file, or the entries of a folder, to disk; refuses a link."""
    _sync_opened(path, os.O_NONBLOCK | os.O_NOFOLLOW)


def sync_entries(folder: Path) -> None:
    """Syncs the entries of a folder to disk.

    The folder may be a link, as where a folder of runs lies on another disk.
    """
    _sync_opened(folder, os.O_DIRECTORY)


def _sync_opened(path: Path, flags: int) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | flags)
    try:
        sync(descriptor)
    finally:
        os.close(descriptor)


def make_folder(path: Path) -> None:
    """Makes a folder and its missing parents, and syncs their names to disk."""
    missing = [one for one in (path, *path.absolute().parents) if not one.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for one in missing:
        sync_entries(one.parent)


def read_bytes(
    path: Path,
    what: str,
    error: type[AxonDistError] = ConfigError,
    most: int = MOST_TEXT,
    *,
    links: bool = True,
) -> bytes:
    """Reads a regular file; refuses pipes and devices, which could block.

    Args:
        path: the path of the file.
        what: names the file in messages, after "cannot read".
        error: the error to raise.
        most: the largest size in bytes.
        links: whether to follow a link, as for files that the user names.

    Raises:
        AxonDistError: of type `error`, if the file is missing, unreadable or too large.

    Example:
        >>> read_bytes(Path("/dev/zero"), "the config '/dev/zero'")
        Traceback (most recent call last):
        axon_dist.core.errors.ConfigError: cannot read the config '/dev/zero': it is a device, not
        a file; name a file
    """
    kind = kind_at(path)
    if kind not in (None, "a file"):
        raise error(f"cannot read {what}: it is {kind}, not a file; name a file")
    rewording = reworded(f"cannot read {what}", "name another file", error)
    with rewording, open(open_regular(path, links=links), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        contents = file.read(most + 1) if size <= most else b""
    if size > most or len(contents) > most:
        raise error(
            f"cannot read {what}: it has {max(size, len(contents))} bytes, more than the limit of "
            f"{most}; name another one"
        )
    return contents


def read_text(
    path: Path,
    what: str,
    error: type[AxonDistError] = ConfigError,
    most: int = MOST_TEXT,
    *,
    links: bool = True,
) -> str:
    """Reads a UTF-8 file, with or without a byte order mark; see `read_bytes` for the rest."""
    try:
        return read_bytes(path, what, error, most, links=links).decode("utf-8-sig")
    except UnicodeDecodeError as cause:
        raise error(
            f"cannot read {what}: it is not UTF-8 text (byte {cause.start}); convert it, or "
            "name another file",
            code="not-utf8",
        ) from cause


def json_section(text: str | bytes) -> dict[str, Any] | None:
    """Parses a JSON object; None if the text is not valid JSON or not an object."""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return data if isinstance(data, dict) else None


_GROUPS = Path("/sys/fs/cgroup")
"""Where Linux shows control groups; those of version 1 with the memory controller at `memory`."""

_OWN_GROUPS = Path("/proc/self/cgroup")


def host_memory() -> int:
    """The bytes of memory available to this process: of the machine, or the limit of its group.

    Containers and jobs of Slurm run in control groups with limits.

    Example:
        >>> host_memory() > 2**28
        True
    """
    least = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for file in _limits():
        try:
            least = min(least, int(file.read_text()))
        except (OSError, ValueError):  # No such group, or no limit: the file says "max".
            continue
    return least


def _limits() -> Iterator[Path]:
    """The files of the memory limits of this process's group and of all groups around it."""
    try:
        lines = _OWN_GROUPS.read_text().splitlines()
    except OSError:
        lines = []
    # In a container the path may be that outside, and the root here is the container's own group.
    for line in ("0::/", "1:memory:/", *lines):
        _, controllers, own = line.split(":", 2)
        if not controllers:
            root, name = _GROUPS, "memory.max"
        elif "memory" in controllers.split(","):
            root, name = _GROUPS / "memory", "memory.limit_in_bytes"
        else:
            continue
        # A group outside of the namespace is shown as /../name, and cannot be read here.
        group = root if ".." in own.split("/") else root / own.strip("/")
        yield group / name
        yield from (one / name for one in group.parents if one.is_relative_to(root))


_ADDRESS = re.compile(r"(gs|s3):/{1,2}([a-z0-9][a-z0-9._-]{1,61}[a-z0-9])(?:/(.*))?", re.DOTALL)
_KEY = 1024
"""The largest size of an object's name, in bytes."""

_BLOCK = 2**26
_RETRIES = {"max_retries": 12, "initial_delay": "100ms", "max_delay": "30s"}
"""With these retries, a store that does not answer for two minutes is an error."""


@dataclasses.dataclass(frozen=True, order=True)
class Address:
    """The address of an object, and of the folder of all objects named `object/...`.

    Args:
        scheme: `gs` or `s3`.
        bucket: the name of the bucket.
        key: the name of the object in it, without a slash at either end.

    Example:
        >>> str(Address("gs", "bucket", "runs/one") / "config.yaml")
        'gs://bucket/runs/one/config.yaml'
    """

    scheme: str
    bucket: str
    key: str

    def __str__(self) -> str:
        return f"{self.scheme}://{self.bucket}/{self.key}"

    def __truediv__(self, name: str) -> Address:
        return dataclasses.replace(self, key=f"{self.key}/{name}" if self.key else name)

    def resolve(self) -> Address:
        """Returns itself: buckets have no links."""
        return self

    @property
    def name(self) -> str:
        """The last part of the key."""
        return self.key.rpartition("/")[2]

    @property
    def spec(self) -> dict[str, Any]:
        """The tensorstore spec of the bucket."""
        if self.scheme == "gs":
            return {"driver": "gcs", "bucket": self.bucket, "gcs_request_retries": _RETRIES}
        env = os.environ.get
        environment = {"endpoint": env("AWS_ENDPOINT_URL"), "aws_region": env("AWS_REGION")}
        spec = {"driver": "s3", "bucket": self.bucket, "use_conditional_write": True}
        options: dict[str, Any] = {key: value for key, value in environment.items() if value}
        if env("AWS_ACCESS_KEY_ID") and env("AWS_SECRET_ACCESS_KEY"):
            # The environment has priority anyway. Without this, tensorstore also tries the other
            # sources and prints lines about each.
            options["aws_credentials"] = {"type": "environment"}
        return {**spec, **options, "s3_request_retries": _RETRIES}

    def read(self) -> bytes | None:
        """The contents of the object, or None if it does not exist."""
        return self.read_versioned()[0]

    def read_versioned(self) -> tuple[bytes | None, bytes]:
        """The contents of the object, or None if it does not exist, and its version."""
        result = self._done(self._store.read(self.key))
        return result.value if result.state == "value" else None, result.stamp.generation

    def version(self) -> bytes:
        """The current version of the object; also defined if it does not exist."""
        return self._stat().stamp.generation

    def _stat(self) -> Any:
        """The answer to a read of no bytes: whether the object exists, and its version."""
        return self._done(self._store.read(self.key, byte_range=slice(0, 0)))

    def write(self, contents: bytes, version: bytes | None = None) -> bytes | None:
        """Writes an object atomically.

        Args:
            contents: the new contents.
            version: write only if the object has this version, see `version`; None for any.

        Returns:
            The new version, or None if the object had another version. A request without an answer
            is retried; None may then mean that the first try did succeed.
        """
        stamp = self._done(self._store.write(self.key, contents, if_equal=version))
        return stamp.generation or None

    def names(self) -> list[str]:
        """The names of the objects in the folder, relative to it, sorted."""
        # "0" is the character after "/", so this range holds all keys that begin with "key/".
        ends = (f"{self.key}/", f"{self.key}0") if self.key else ()
        inside = _tensorstore().KvStore.KeyRange(*ends)
        listed = self._done(self._store.list(inside, len("".join(ends[:1]).encode())))
        return sorted(name.decode() for name in listed)

    def remove(self, names: Iterable[str]) -> None:
        """Removes objects of the folder; those that do not exist are ignored."""
        keys = [(self / name).key for name in names]
        # Starts all requests before it waits for the first.
        for future in [self._store.write(key, None) for key in keys]:
            self._done(future)

    def fetched(self) -> Path:
        """A local copy of the object, cached by its version.

        Raises:
            StoreError: if the object does not exist or cannot be read, or the disk cannot be
                written.
        """
        now = self._stat()
        self._check_exists(now)
        version = now.stamp.generation
        path = _cache_path(f"{self} {version!r}") / self.name
        if path.is_file():
            return path
        what = f"{self} cannot be copied to {str(path)!r}"
        advice = "free space there, or set XDG_CACHE_HOME to another folder"
        with reworded(what, advice, StoreError):
            path.parent.mkdir(parents=True, exist_ok=True)
            remove_abandoned(path.parent)
            with replacing(path, 0o600) as file:
                for block in self._blocks():
                    if block.stamp.generation != version:
                        raise StoreError(f"{self} was replaced or removed meanwhile; try again")
                    file.write(block.value)
        return path

    def _blocks(self) -> Iterator[Any]:
        """Reads the object block by block."""
        start = 0
        stop = _BLOCK
        while stop is not None:
            try:
                block = self._store.read(self.key, byte_range=slice(start, stop)).result()
            except ValueError as error:
                # A request for bytes beyond the end fails instead of returning the rest.
                if "OUT_OF_RANGE" not in str(error):
                    raise self.refused(error) from error
                stop = None
                continue
            # An object that does not exist has no end: no range of it is out of range.
            self._check_exists(block)
            yield block
            start = stop
            stop += _BLOCK
        rest = self._store.read(self.key, byte_range=slice(start, None))
        if rest.exception() is None or "OUT_OF_RANGE" not in str(rest.exception()):
            block = self._done(rest)
            self._check_exists(block)
            yield block

    def _check_exists(self, read: Any) -> None:
        """Raises if the answer to a read says that there is no such object."""
        if read.state != "value":
            raise StoreError(
                f"{self} does not exist, or was removed while its folder was read; list the folder "
                "again, or correct the address"
            )

    @property
    def _store(self) -> Any:
        return _opened(json.dumps(self.spec))

    def _done(self, future: Any) -> Any:
        try:
            return future.result()
        except Exception as error:
            raise self.refused(error) from error

    def refused(self, error: Exception) -> StoreError:
        """The error for a failed tensorstore request, with advice."""
        reason = (str(error).partition(" [")[0].strip() or repr(error)).splitlines()[0]
        return StoreError(
            f"{self}: {reason}; check the name, that these credentials may read and write it, and "
            "the network"
        )


def _tensorstore() -> Any:
    # Importing it takes a quarter of a second, which a run without buckets does not need.
    return importlib.import_module("tensorstore")


@functools.cache
def _opened(spec: str) -> Any:
    return _tensorstore().KvStore.open(json.loads(spec)).result()


Place = Path | Address
"""A local file or folder, or one in a bucket."""


def as_place(
    text: Any, label: str, error: type[AxonDistError] = ConfigError, *, any_name: bool = False
) -> Place:
    """Reads a local path, as `as_path`, or an address in a bucket; accesses neither.

    Args:
        text: a string, a path or an address.
        label: the key, option or argument that names it; starts the message.
        error: the error to raise.
        any_name: whether a local path may have bytes that are not text. By default it may not,
            because Orbax and reports of runs cannot take them.

    Raises:
        AxonDistError: of type `error`, if the text is neither.

    Example:
        >>> as_place("s3://bucket/runs/one/", "run_dir")
        Address(scheme='s3', bucket='bucket', key='runs/one')
    """
    if isinstance(text, Address):
        return text
    match = _ADDRESS.fullmatch(str(text)) if isinstance(text, (str, Path)) else None
    if match is None:
        _check_bucket(text, label, error)
        path = as_path(text, label, error)
        # Python keeps bytes that it cannot decode as lone surrogates.
        if not any_name and any("\udc80" <= letter <= "\udcff" for letter in str(path)):
            raise error(
                f"{label}: got {str(text)!r:.400}, which is not in the encoding of this system's "
                f"file names, {sys.getfilesystemencoding()}; rename it",
                code="path-encoding",
            )
        return path
    key = (match[3] or "").rstrip("/")
    parts = key.split("/") if key else []
    is_named = key.isprintable() and len(key.encode(errors="surrogateescape")) <= _KEY
    if not is_named or any(part in ("", ".", "..") for part in parts):
        raise error(
            f"{label}: got {str(text)!r:.80}; the name of an object must have no empty part, no . "
            f"or .., no control character, and at most {_KEY} bytes",
            code="object-name",
        )
    return Address(match[1], match[2], key)


def _check_bucket(text: Any, label: str, error: type[AxonDistError]) -> None:
    """Raises if an address has the scheme of a bucket but no valid bucket name."""
    match = re.match(r"(?:gs|s3):/{1,2}([^/]*)", str(text), re.DOTALL)
    if match is not None and isinstance(text, (str, Path)):
        raise error(
            f"{label}: got {str(text)!r:.80}, and {match[1]!r:.80} cannot be the name of a bucket: "
            "a name has 3 to 63 characters, of a-z, 0-9, dots, hyphens and underscores, and starts "
            "and ends with a letter or digit"
        )


def all_fetched(addresses: Iterable[Address]) -> list[Path]:
    """Local copies of objects, several fetched at a time; see `Address.fetched`."""
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        return list(pool.map(Address.fetched, addresses))


def snapshot(folder: Address, wanted: Callable[[str], bool]) -> Path:
    """A local folder with copies of the current objects of a folder in a bucket.

    Args:
        folder: the folder in the bucket.
        wanted: returns whether to copy an object, given its name in the folder.

    Raises:
        StoreError: if no object is wanted, or one cannot be fetched, see `Address.fetched`.
    """
    names = [name for name in folder.names() if wanted(name)]
    if not names:
        raise StoreError(f"there are no such objects at {folder}; correct the address")
    copies = all_fetched(folder / name for name in names)
    path = _cache_path(f"{folder} {list(zip(names, copies, strict=True))}")
    for name, copy in zip(names, copies, strict=True):
        link = path / name
        link.parent.mkdir(parents=True, exist_ok=True)
        if link.is_symlink():
            link.unlink(missing_ok=True)
        if not link.exists():
            _link(copy, link)
    return path


def _link(copy: Path, link: Path) -> None:
    """Gives a file a second name by a hard link, because readers of a run follow no symlinks."""
    try:
        os.link(copy, link)
    except FileExistsError:
        pass  # Another process made it first.
    except OSError:
        with open(copy, "rb") as source, replacing(link, 0o600) as file:
            shutil.copyfileobj(source, file)


def _cache_path(what: str) -> Path:
    """The cache folder of copied objects; users may remove it at any time."""
    caches = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(caches) / "axon_dist" / hashlib.sha256(what.encode()).hexdigest()[:32]
