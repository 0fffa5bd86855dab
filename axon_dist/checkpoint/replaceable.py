"""What a save may replace: nothing, an empty folder, or an earlier checkpoint; no arrays."""

from __future__ import annotations

import json
from pathlib import Path

from ..core.errors import CheckpointError
from .layout import ARRAYS, MANIFEST, MARKER, UNFINISHED, replaced_of, staging_of
from .seal import is_checkpoint

_SHOWN = 3


def check_replaceable(folder: Path) -> None:
    """Raises unless a save into a folder loses nothing but an earlier checkpoint.

    A save takes three names: that of the checkpoint, and two that last as long as it does.

    Args:
        folder: of the checkpoint, which need not exist.

    Raises:
        CheckpointError: saying what lies there.
    """
    if not folder.name or folder.name == ".." or folder.name.endswith(UNFINISHED):
        raise CheckpointError(
            f"{str(folder)!r} cannot be the name of a checkpoint: it has to end with a name, and "
            f"one that does not end with {UNFINISHED}, as unfinished ones do; name another folder"
        )
    for path in (folder, staging_of(folder), replaced_of(folder)):
        try:
            found = foreign_in(path, may_be_partial=path != folder)
        except OSError as error:
            raise CheckpointError(
                f"could not save checkpoint {str(folder)!r}: cannot look at what lies at "
                f"{str(path)!r}: {error.strerror}; allow this program to read it, or name another "
                "folder"
            ) from error
        if found is not None:
            raise CheckpointError(
                f"could not save checkpoint {str(folder)!r}: at {str(path)!r} lies {found}, which "
                "saving would delete; only an empty folder or an earlier checkpoint is replaced. "
                f"Name a new folder, such as {f'{folder}-checkpoint'!r}, or move away what "
                "lies there; nothing was changed"
            )


def foreign_in(path: Path, *, may_be_partial: bool) -> str | None:
    """Describes what lies at a path if it is anything but an empty folder or a checkpoint.

    A checkpoint holds the entries that `layout.py` names and no others, whatever state they are
    in, and one of them says so: the marker, whose name is enough, or the manifest by its contents.

    Args:
        path: of a file, a folder, or nothing.
        may_be_partial: whether the name alone says that this is a checkpoint half written or half
            removed; it then needs neither marker nor manifest.

    Returns:
        What lies there; None where it may be removed.
    """
    if path.is_symlink():
        return "a symbolic link"
    if not path.is_dir():
        return "a file" if path.exists() else None
    names = sorted(entry.name for entry in path.iterdir())
    others = [name for name in names if not _is_part(name)]
    if others:
        what = "a checkpoint together with" if is_checkpoint(path) else "a folder that holds"
        return f"{what} {_listed(others)}"
    if not names or may_be_partial or is_checkpoint(path) or _is_manifest(path / MANIFEST):
        return None
    return f"a folder that holds {_listed(names)} but no {MARKER} file and no manifest"


def _listed(names: list[str]) -> str:
    more = len(names) - _SHOWN
    return ", ".join(map(repr, names[:_SHOWN])) + (f" and {more} more" if more > 0 else "")


def _is_part(name: str) -> bool:
    # While a store writes, the values lie under their name with an ending of the store's.
    return name in (MARKER, MANIFEST, ARRAYS) or name.startswith(f"{ARRAYS}.")


def _is_manifest(path: Path) -> bool:
    """Whether a file is a manifest of this library, rather than of anything else of that name."""
    try:
        found = json.loads(path.read_bytes())
    except (FileNotFoundError, ValueError):
        return False
    return isinstance(found, dict) and {"format", "leaves", "checksums"} <= found.keys()
