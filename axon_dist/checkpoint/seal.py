"""Seals the folder of a checkpoint when it is complete, and verifies it before it is read.

Orbax stores no checksums of array values, so a flipped byte would be restored silently. The
checksum of a leaf is computed on the devices before a save and again after a restore, so it covers
the whole path. Checksums of files identify the damaged file.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import math
import os
import shutil
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path

import jax
import jax.numpy as jnp
from jax import lax

from ..core.errors import CheckpointError, DamagedCheckpointError, reworded
from ..core.files import (
    Address,
    Place,
    as_place,
    json_section,
    kind_at,
    open_regular,
    read_bytes,
    sync,
    sync_entries,
    sync_path,
)
from ..core.typing import Array
from ..core.typing import Path as LeafPath
from ..core.words import first_few
from . import object_store
from .layout import (
    MANIFEST,
    MARKER,
    SLOTS,
    UNFINISHED,
    FileRecord,
    Manifest,
    is_part,
    marker_of,
    replaced_of,
    staging_of,
)

_BLOCK = 1 << 20
_GOLDEN = 0x9E3779B1
"""2^32 divided by the golden ratio: its multiples spread evenly over 32 bits (Knuth, TAOCP 6.4)."""


@jax.jit  # traced once for all leaves of a shape
def leaf_checksum(x: Array) -> Array:
    """A 32-bit checksum of an array that does not depend on its sharding.

    With `u_i` the 32-bit word i of the elements in row-major order, all modulo 2^32,

        sum over i of (u_i xor 0x9E3779B1 i) (2 i + 1)

    A sum does not depend on how the array is split. Each factor is odd, so a change in one word
    always changes the sum. Positions come from `iota` along each dim, because flattening would
    gather a sharded array.

    Args:
        x: an array of any dtype except random keys.

    Returns:
        Scalar uint32.

    Example:
        >>> int(leaf_checksum(jnp.arange(4.0))) == int(leaf_checksum(jnp.arange(4.0)))
        True
        >>> int(leaf_checksum(jnp.arange(4.0))) == int(leaf_checksum(jnp.arange(4.0)[::-1]))
        False
    """
    words = _as_words(x)
    index = _row_major_index(words.shape)
    mixed = (words ^ (index * jnp.uint32(_GOLDEN))) * (2 * index + 1)
    return jnp.sum(mixed, dtype=jnp.uint32)


def leaf_checksums(leaves: Mapping[LeafPath, Array]) -> dict[LeafPath, Array]:
    """Starts to compute the checksums of leaves, asynchronously.

    Args:
        leaves: arrays, in device or host memory; those on the same devices share one program.

    Returns:
        Scalars on the devices, by path.
    """
    groups: dict[frozenset, dict[LeafPath, Array]] = collections.defaultdict(dict)
    for path, leaf in leaves.items():
        if leaf.is_deleted():
            raise CheckpointError(
                f"leaf {path} of the state was deleted, or donated to a step, which reuses the "
                "memory of its input; save the state that the step returned"
            )
        groups[frozenset(leaf.sharding.device_set)][path] = leaf
    sums = collections.ChainMap(*map(_checksums_of_group, groups.values()))
    return {path: sums[path] for path in leaves}


def file_checksum(path: Path) -> int:
    """The CRC-32 of a file, read in blocks."""
    crc = 0
    with open(open_regular(path), "rb") as file:
        while block := file.read(_BLOCK):
            crc = zlib.crc32(block, crc)
    return crc


@jax.jit
def _checksums_of_group(leaves: dict[LeafPath, Array]) -> dict[LeafPath, Array]:
    on_device = jax.tree.map(lambda x: jax.device_put(x, jax.memory.Space.Device), leaves)
    return jax.tree.map(leaf_checksum, on_device)


def _as_words(x: Array) -> Array:
    """The bits of each element as uint32; wider elements get an extra dim of words."""
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        return jnp.stack([_as_words(x.real), _as_words(x.imag)], axis=-1)
    if x.dtype == jnp.bool_:
        return x.astype(jnp.uint32)
    # An element narrower than a byte has an itemsize of 1.
    info = jnp.iinfo if jnp.issubdtype(x.dtype, jnp.integer) else jnp.finfo
    bits = info(x.dtype).bits
    return lax.bitcast_convert_type(x, f"uint{min(bits, 32)}").astype(jnp.uint32)


def _row_major_index(shape: tuple[int, ...]) -> Array:
    index = jnp.zeros(shape, jnp.uint32)
    for dim in range(len(shape)):
        stride = math.prod(shape[dim + 1 :]) % 2**32
        index += lax.broadcasted_iota(jnp.uint32, shape, dim) * jnp.uint32(stride)
    return index


def seal(folder: Path, manifest: Manifest) -> None:
    """Adds the files of a folder to the manifest, and writes it and the marker.

    Everything is synced to disk when it returns, so an older checkpoint may be removed once this
    one has its name; after a power cut one of the two exists.

    Args:
        folder: the folder with all values.
        manifest: the manifest, still without files.
    """
    files = {
        str(path.relative_to(folder)): FileRecord(path.stat().st_size, file_checksum(path))
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
    text = dataclasses.replace(manifest, files=files).to_json().encode()
    for name in files:
        sync_path(folder / name)
    write_durably(folder / MANIFEST, text)
    write_durably(folder / MARKER, marker_of(text))
    for inner in (folder, *(path for path in folder.rglob("*") if path.is_dir())):
        sync_path(inner)


def publish(folder: Path) -> None:
    """Gives a sealed checkpoint its name, and replaces an older one of that name.

    The older one is renamed and stays until the new name is synced to disk. Between the two renames
    nothing has the name, and `found_at` returns where the older one is.
    """
    replaced = replaced_of(folder)
    if os.path.lexists(folder):
        if os.path.lexists(replaced):
            # Left by a save that was killed after its rename, which may not be synced yet.
            sync_entries(folder.parent)
            _discard(replaced)
        os.rename(folder, replaced)
        try:
            os.rename(staging_of(folder), folder)
        except OSError:
            os.rename(replaced, folder)
            raise
    else:
        os.rename(staging_of(folder), folder)
    sync_entries(folder.parent)
    with contextlib.suppress(OSError):
        _discard(replaced)


def found_at(folder: Path) -> Path:
    """The actual folder of a checkpoint.

    Args:
        folder: the folder by the checkpoint's name.

    Returns:
        The folder; or the renamed older checkpoint, if a save was killed between its two renames.
    """
    replaced = replaced_of(folder)
    is_between = not os.path.lexists(folder) and is_sealed(replaced)
    return replaced if is_between else folder


def put_back(folder: Path) -> None:
    """Undoes the first rename of a killed save, see `found_at`; only for the single writer."""
    there = found_at(folder)
    if there != folder:
        os.rename(there, folder)


def remove(folder: Place) -> None:
    """Removes a checkpoint; it loses its name first, so no partial one is ever read."""
    if isinstance(folder, Address):
        object_store.clear(folder)
        return
    # Otherwise `found_at` would find this older one after the removal.
    _discard(replaced_of(folder))
    unnamed = staging_of(folder)
    os.rename(folder, unnamed)
    sync_entries(folder.parent)
    _discard(unnamed)


def _discard(folder: Path) -> None:
    """Removes the rest of a checkpoint; the marker first, so no partial one is ever found."""
    with contextlib.suppress(FileNotFoundError):
        (folder / MARKER).unlink()
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(folder)


def write_durably(path: Path, contents: bytes) -> None:
    """Writes a new file and syncs it to disk."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    with open(open_regular(path, flags), "wb") as file:
        file.write(contents)
        file.flush()
        sync(file.fileno())


def is_checkpoint(folder: str | Place) -> bool:
    """Whether a folder is a finished checkpoint, damaged or not."""
    folder = as_place(folder, "the checkpoint", CheckpointError)
    if isinstance(folder, Address):
        return (folder / MARKER).read() is not None
    return is_sealed(found_at(folder))


def is_sealed(folder: Path) -> bool:
    """Whether exactly this folder has a marker; compare `found_at`."""
    return os.path.isfile(folder / MARKER)


def read_manifest(folder: str | Place) -> Manifest:
    """Reads the metadata of a checkpoint, without its values.

    Args:
        folder: the folder of a finished checkpoint.

    Returns:
        The manifest; its `meta` is the user data of the save.

    Raises:
        CheckpointError: if there is none, or a newer version wrote it.
        DamagedCheckpointError: if it is unfinished, or the manifest was changed.
    """
    folder = as_place(folder, "the checkpoint", CheckpointError)
    text, marker = _objects_of(folder) if isinstance(folder, Address) else _files_of(folder)
    if marker != marker_of(text):
        raise DamagedCheckpointError(
            f"checkpoint {str(folder)!r}: {MANIFEST} and {MARKER} do not match, so one of them was "
            "changed after it was written; use another checkpoint"
        )
    try:
        return Manifest.from_json(text.decode(errors="replace"))
    except DamagedCheckpointError as error:
        raise DamagedCheckpointError(f"checkpoint {str(folder)!r}: {error}") from error


def _files_of(folder: Path) -> tuple[bytes, bytes]:
    """The manifest and the marker of a checkpoint on a disk."""
    folder = found_at(folder)
    kind = kind_at(folder)
    if kind not in (None, "a folder") or (kind is None and os.path.lexists(folder)):
        raise DamagedCheckpointError(
            f"checkpoint {str(folder)!r} is {kind or 'a broken link'}, not a folder; use another "
            "one"
        )
    if kind is None:
        raise CheckpointError(f"there is no checkpoint {str(folder)!r}; name a folder of one")
    if not is_sealed(folder):
        raise DamagedCheckpointError(
            f"checkpoint {str(folder)!r} has no {MARKER} file: it was never finished, or is not a "
            "checkpoint; use another one"
        )
    try:
        marker = read_bytes(folder / MARKER, MARKER, CheckpointError, links=False)
        for name, _ in SLOTS[1:]:
            # A downloaded copy of a checkpoint that had replaced another in a bucket.
            if os.path.lexists(folder / name):
                text = read_bytes(folder / name, name, CheckpointError, _MOST_BYTES, links=False)
                if marker_of(text) == marker:
                    return text, marker
        text = read_bytes(folder / MANIFEST, MANIFEST, CheckpointError, _MOST_BYTES, links=False)
        return text, marker
    except CheckpointError as error:
        raise DamagedCheckpointError(f"checkpoint {str(folder)!r}: {error}") from error


def _objects_of(folder: Address) -> tuple[bytes, bytes]:
    """The manifest and the marker of a checkpoint in a bucket."""
    marker = None
    text = None
    for _ in range(_MOST_REPLACED):
        marker = (folder / MARKER).read()
        if marker is None:
            break
        if (found := object_store.slot_of(folder, marker)) is not None:
            return found[1], marker
        if (folder / MARKER).read() == marker:
            # It matches no manifest; `read_manifest` reports that.
            texts = [(folder / name).read() for name, _ in SLOTS]
            text = next((one for one in texts if one is not None), None)
            break
    if text is not None and marker is not None:
        return text, marker
    if not folder.names():
        raise CheckpointError(f"there is no checkpoint {str(folder)!r}; name a folder of one")
    raise DamagedCheckpointError(
        f"checkpoint {str(folder)!r} has no {MARKER if marker is None else MANIFEST}: it was never "
        "finished, or is not a checkpoint; use another one"
    )


def check_files(folder: Place, manifest: Manifest) -> None:
    """Reads every file of a checkpoint, and compares sizes and checksums.

    In a bucket it only lists the objects: each process reads what it needs, and the checksums of
    the leaves verify that.

    Raises:
        DamagedCheckpointError: about the first missing or corrupted file.
    """
    if isinstance(folder, Address):
        lost = sorted(manifest.files.keys() - set(folder.names()))
        problems = ((name, "is missing") for name in lost)
    else:
        actual = found_at(folder)
        problems = (
            (name, _problem_of(actual / name, record)) for name, record in manifest.files.items()
        )
    for name, problem in problems:
        if problem is not None:
            raise DamagedCheckpointError(
                f"checkpoint {str(folder)!r}: file {name} {problem}; use another checkpoint"
            )


def stray_in(folder: Place, manifest: Manifest) -> str | None:
    """A file in a checkpoint that was added after it was sealed, or None."""
    known = {*manifest.files, MANIFEST, MARKER}
    there = folder.names() if isinstance(folder, Address) else _names_in(found_at(folder))
    slots = {name for slot in SLOTS for name in slot}
    if not slots.isdisjoint(name.split("/")[0] for name in manifest.files):
        # Leftovers of a killed save in the other slot of a bucket are not part of the checkpoint,
        # also in a copy of it on a disk.
        there = (name for name in there if name.split("/")[0] not in slots)
    return next((name for name in there if name not in known), None)


def _names_in(folder: Path) -> Iterator[str]:
    return (str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir())


_MOST_REPLACED = 3
"""How often a checkpoint may be replaced while its manifest is being read."""

_MOST_BYTES = 2**30
"""The largest size of a manifest, in bytes; it has a few hundred per leaf."""


def _problem_of(path: Path, record: FileRecord) -> str | None:
    if path.is_symlink():
        return "is a link, which is not followed"
    try:
        size = path.stat().st_size
        if size != record.size:
            return f"has {size} bytes, {record.size} were written"
        crc = file_checksum(path)
    except FileNotFoundError:
        return "is missing"
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    if crc != record.crc32:
        return f"has the checksum {crc:08x}, {record.crc32:08x} was written: its bytes changed"
    return None


def check_replaceable(folder: Place) -> None:
    """Raises if a save into a folder would delete anything but an earlier checkpoint.

    A save uses three names: the checkpoint's name, and two temporary ones.

    Args:
        folder: the folder of the checkpoint; it need not exist.

    Raises:
        CheckpointError: with a description of the other files.
    """
    if not folder.name or folder.name == ".." or folder.name.endswith(UNFINISHED):
        raise CheckpointError(
            f"{str(folder)!r} cannot be the name of a checkpoint: it must end with a name, and not "
            f"with {UNFINISHED}, the suffix of unfinished ones; name another folder"
        )
    on_disk = isinstance(folder, Path)
    for path in (folder, staging_of(folder), replaced_of(folder)) if on_disk else (folder,):
        what = f"could not save checkpoint {str(folder)!r}: cannot read {str(path)!r}"
        advice = "allow this program to read it, or name another folder"
        with reworded(what, advice, CheckpointError):
            foreign = foreign_in(path, may_be_partial=path != folder)
        if foreign is not None:
            raise CheckpointError(
                f"could not save checkpoint {str(folder)!r}: at {str(path)!r} there is {foreign}, "
                "which saving would delete; only an empty folder or an earlier checkpoint is "
                f"replaced. Name a new folder, such as {f'{folder}-checkpoint'!r}, or move it "
                "away; nothing was changed"
            )


def foreign_in(path: Place, *, may_be_partial: bool) -> str | None:
    """Describes what is at a path, unless it is an empty folder or a checkpoint.

    A checkpoint, even a damaged one, has only the entries that `layout.py` names. It is recognized
    by the existence of the marker, or by the contents of the manifest.

    Args:
        path: the path of a file, a folder, or nothing.
        may_be_partial: whether the name already says that this is an unfinished checkpoint; it then
            needs neither marker nor manifest.

    Returns:
        A description of the files; None if they may be removed.
    """
    if isinstance(path, Address):
        names = sorted({name.split("/")[0] for name in path.names()})
    elif path.is_symlink():
        return "a symbolic link"
    elif not path.is_dir():
        return "a file" if path.exists() else None
    else:
        names = sorted(entry.name for entry in path.iterdir())
    others = [name for name in names if not is_part(name)]
    if others:
        is_one = is_checkpoint(path) if isinstance(path, Address) else is_sealed(path)
        what = "a checkpoint together with" if is_one else "a folder that holds"
        return f"{what} {first_few([*map(repr, others)])}"
    if isinstance(path, Address) or not names or may_be_partial:
        return None
    if is_sealed(path) or _is_manifest(path / MANIFEST):
        return None
    return (
        f"a folder that holds {first_few([*map(repr, names)])} but no {MARKER} file and no manifest"
    )


def _is_manifest(path: Path) -> bool:
    """Whether a file is a manifest of this library, not another file of that name."""
    try:
        text = read_bytes(path, MANIFEST, CheckpointError, _MOST_BYTES, links=False)
    except CheckpointError:
        return False
    manifest = json_section(text)
    return manifest is not None and {"format", "leaves", "checksums"} <= manifest.keys()
