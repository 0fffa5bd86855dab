"""Finds the tensors of a file, of several files, or of a hub or PEFT folder."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from axon_dist.checkpoint import TensorEntry, list_tensors
from axon_dist.core.errors import MALFORMED, CheckpointError, reworded
from axon_dist.core.files import as_path, kind_at, read_text

from ..models.snapshot import ADAPTER_CONFIG, ENDING, INDEX, Files, fetched
from .adapters import list_adapters

MOST_INDEX = 2**28
"""The maximum number of bytes of an index file, which has a line for every tensor."""


def find_tensors(files: Files) -> dict[str, TensorEntry]:
    """Reads the headers of safetensors files, without values.

    Args:
        files: one file or several; a `.index.json` that maps tensors to files in its folder; a
            folder, such as the local snapshot of a hub repository, with such an index, with one
            file, or with adapters written by peft; `hf://org/name`; or a file or folder at
            `gs://` or `s3://`.

    Returns:
        The entry of every tensor, which locates it in its file, by name.

    Raises:
        CheckpointError: when there is no file, one cannot be read, or two tensors have the same
            name.
    """
    several = [files] if isinstance(files, str | Path) else files
    if not isinstance(several, Sequence) or not several:
        raise CheckpointError(
            f"got {files!r:.80} as the files of weights; give a path, or a list of paths",
            code="weight-files",
        )
    tensors: dict[str, TensorEntry] = {}
    for each in several:
        path = as_path(fetched(each), "the weights", CheckpointError)
        for name, entry in (_of_folder if path.is_dir() else _of_file)(path).items():
            if name in tensors:
                raise CheckpointError(
                    f"{name} is in {str(tensors[name].path)!r} and in {str(path)!r}; name files "
                    "that belong together"
                )
            tensors[name] = entry
    return tensors


def _of_file(path: Path) -> dict[str, TensorEntry]:
    return _of_index(path) if path.name.endswith(INDEX) else list_tensors(path)


def _of_folder(folder: Path) -> dict[str, TensorEntry]:
    """Returns the tensors of a folder; raises if it has two sets of weights."""
    indices = sorted(folder.glob(f"*{ENDING}{INDEX}"))
    files = sorted(folder.glob(f"*{ENDING}"))
    index = folder / f"model{ENDING}{INDEX}"
    single = folder / f"model{ENDING}"
    named = [path for path in (index, single) if path in (*indices, *files)]
    adapters = [folder / ADAPTER_CONFIG] if (folder / ADAPTER_CONFIG).is_file() else []
    if len(sets := [*named, *adapters]) > 1 and not _is_of_index(single, index, sets):
        raise CheckpointError(
            f"the folder {str(folder)!r} has two sets of weights: "
            f"{' and '.join(path.name for path in sets)}; name the file to read, or remove the "
            "other set",
            code="two-sets-of-weights",
        )
    if adapters:
        return list_adapters(folder)
    for choice in (named, indices, files):
        if len(choice) == 1 or (choice is named and choice):
            return _of_file(choice[0])
    names = sorted(path.name for path in folder.iterdir())
    raise CheckpointError(
        f"the folder {str(folder)!r} has {len(indices)} files *{ENDING}{INDEX} and {len(files)} "
        f"files *{ENDING}, of {len(names)} files ({', '.join(names[:5])}); name the files to read"
    )


def _is_of_index(single: Path, index: Path, sets: Sequence[Path]) -> bool:
    """Whether two sets are the same weights: an index, and the only file that it names."""
    if list(sets) != [index, single]:
        return False
    return all(entry.path == single for entry in _of_index(index).values())


def _of_index(path: Path) -> dict[str, TensorEntry]:
    what = f"cannot read {str(path)!r} as the index of safetensors files"
    with reworded(what, "name the files themselves", CheckpointError, MALFORMED):
        text = read_text(path, f"the index {str(path)!r}", CheckpointError, MOST_INDEX)
        file_of: dict[str, str] = json.loads(text)["weight_map"]
        files = sorted(set(file_of.values()))
        if odd := [file for file in files if "/" in file or kind_at(path.parent / file) is None]:
            raise ValueError(f"it names {odd[0]!r:.80}, but its folder has no such file")
    entries = {file: list_tensors(path.parent / file) for file in files}
    for name, file in file_of.items():
        if name not in entries[file]:
            raise CheckpointError(
                f"the index {str(path)!r} has {name} in {file!r}, which lacks it; download "
                "the files again",
                code="tensor-not-in-file",
            )
    return {name: entries[file][name] for name, file in file_of.items()}
