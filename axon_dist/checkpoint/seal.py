"""The folder of a checkpoint on disk: sealed when complete, checked before it is read."""

from __future__ import annotations

import dataclasses
import os
import shutil
import zlib
from pathlib import Path

from ..core.errors import CheckpointError, DamagedCheckpointError
from ..core.files import kind_at, read_bytes
from .checksum import file_checksum
from .layout import MANIFEST, MARKER, replaced_of, staging_of
from .manifest import FileRecord, Manifest


def seal(folder: Path, manifest: Manifest) -> None:
    """Completes the manifest with the files of a folder, and writes it and the marker.

    When it returns the disk has all of them, so that an older checkpoint may be removed once this
    one has its name: a power cut leaves one of the two.

    Args:
        folder: holds every value already.
        manifest: without files.
    """
    files = {
        str(path.relative_to(folder)): FileRecord(path.stat().st_size, file_checksum(path))
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
    text = dataclasses.replace(manifest, files=files).to_json().encode()
    for name in files:
        _sync(folder / name)
    write_durably(folder / MANIFEST, text)
    write_durably(folder / MARKER, _marker_of(text))
    for inner in (folder, *(path for path in folder.rglob("*") if path.is_dir())):
        _sync(inner)


def publish(folder: Path) -> None:
    """Gives a sealed checkpoint its name, in place of one that had it."""
    replaced = replaced_of(folder)
    if folder.exists():
        # What a save left there that was killed after its checkpoint had the name.
        shutil.rmtree(replaced, ignore_errors=True)
        os.rename(folder, replaced)
    os.rename(staging_of(folder), folder)
    _sync(folder.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def remove(folder: Path) -> None:
    """Removes a checkpoint; it loses its name first, so that no half of it is ever read."""
    doomed = staging_of(folder)
    os.rename(folder, doomed)
    shutil.rmtree(doomed)


def write_durably(path: Path, contents: bytes) -> None:
    """Writes a file, and returns when the disk has it."""
    with open(path, "wb") as file:
        file.write(contents)
        file.flush()
        os.fsync(file.fileno())


def is_checkpoint(folder: str | Path) -> bool:
    """Whether a folder is a finished checkpoint, damaged or not."""
    return (Path(folder) / MARKER).is_file()


def read_manifest(folder: str | Path) -> Manifest:
    """Reads what a checkpoint says about itself, without its values.

    Args:
        folder: of one checkpoint, all of whose files are written.

    Returns:
        The manifest; `meta` in it is what the checkpoint was saved with.

    Raises:
        CheckpointError: when there is none, or a newer version wrote it.
        DamagedCheckpointError: when it is unfinished, or the manifest was changed.
    """
    folder = Path(folder)
    kind = kind_at(folder)
    if kind not in (None, "a folder") or (kind is None and os.path.lexists(folder)):
        raise DamagedCheckpointError(
            f"checkpoint {str(folder)!r} is {kind or 'a link that leads nowhere'} and no folder; "
            "use another one"
        )
    if kind is None:
        raise CheckpointError(f"there is no checkpoint {str(folder)!r}; name a folder of one")
    if not is_checkpoint(folder):
        raise DamagedCheckpointError(
            f"checkpoint {str(folder)!r} has no {MARKER} file: it was never finished, or is no "
            "checkpoint; use another one"
        )
    try:
        text = read_bytes(folder / MANIFEST, MANIFEST, CheckpointError, _MOST_BYTES)
        marker = read_bytes(folder / MARKER, MARKER, CheckpointError)
    except CheckpointError as error:
        raise DamagedCheckpointError(f"checkpoint {str(folder)!r}: {error}") from error
    if marker != _marker_of(text):
        raise DamagedCheckpointError(
            f"checkpoint {str(folder)!r}: {MANIFEST} and {MARKER} do not belong together, one of "
            "them was changed after it was written; use another one"
        )
    try:
        return Manifest.from_json(text.decode())
    except CheckpointError:
        raise
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise DamagedCheckpointError(
            f"checkpoint {str(folder)!r}: {MANIFEST} is not one that a save writes "
            f"({error!r:.200}); use another one"
        ) from error


def check_files(folder: Path, manifest: Manifest) -> None:
    """Reads every file of a checkpoint, and compares sizes and checksums.

    Raises:
        DamagedCheckpointError: naming the first file that is missing, or no longer what it was.
    """
    for name, record in manifest.files.items():
        problem = _problem_of(folder / name, record)
        if problem is not None:
            raise DamagedCheckpointError(
                f"checkpoint {str(folder)!r}: file {name} {problem}; use another checkpoint"
            )


def stray_in(folder: Path, manifest: Manifest) -> str | None:
    """A file of a checkpoint that was not there when it was sealed, if there is one."""
    known = {*manifest.files, MANIFEST, MARKER}
    there = (str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir())
    return next((name for name in there if name not in known), None)


_MOST_BYTES = 2**30
"""Bytes of a manifest, which has some hundreds for every leaf."""


def _sync(path: Path) -> None:
    """Waits until the disk has a file, or the names in a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _marker_of(manifest: bytes) -> bytes:
    return f"{zlib.crc32(manifest):08x}\n".encode()


def _problem_of(path: Path, record: FileRecord) -> str | None:
    if not path.is_file():
        return "is missing"
    size = path.stat().st_size
    if size != record.size:
        return f"has {size} bytes, {record.size} were written"
    try:
        crc = file_checksum(path)
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    if crc != record.crc32:
        return f"has the checksum {crc:08x}, {record.crc32:08x} was written: its bytes changed"
    return None
