"""Which tensors there are: in a file, in several, or in a folder as hubs lay them out."""

from __future__ import annotations

import dataclasses
import fnmatch
import importlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from axon_dist.checkpoint import TensorEntry, list_tensors
from axon_dist.core.errors import CheckpointError, install_command
from axon_dist.core.files import as_path, kind_at, read_text
from axon_dist.core.objects import Address, Place, as_place, snapshot

from .adapters import ADAPTER_CONFIG, list_adapters

ENDING = ".safetensors"
INDEX = ".index.json"
"""What follows the name of a file that was cut into several, to say which tensor is where."""

MOST_INDEX = 2**28
"""Bytes of an index, which has a line for every tensor."""

Files = str | Path | Sequence[str | Path]


REMOTE = "hf://"
"""How a repository of the Hugging Face hub begins: `hf://org/name`, or `hf://org/name@revision`."""

_BUCKETS = ("gs:/", "s3:/")

_WEIGHTS = (f"*{ENDING}", f"*{ENDING}{INDEX}", "config.json", ADAPTER_CONFIG)


def fetched(path: Any, patterns: tuple[str, ...] = _WEIGHTS) -> Any:
    """Where a repository of a hub, or what is in a bucket, lies here, fetched if need be.

    Args:
        path: a path, which is returned as it is; `hf://`, which needs huggingface_hub, in whose
            cache it then is; or `gs://` or `s3://`, a folder, or a file in one.
        patterns: of the files that are wanted, none of them in a folder.

    Raises:
        CheckpointError: when it cannot be fetched.
        StoreError: when a bucket cannot be read.
    """
    if isinstance(path, (str, Path)) and str(path).startswith(_BUCKETS):
        return _copied(as_place(path, "the weights", CheckpointError), patterns)
    if not isinstance(path, str) or not path.startswith(REMOTE):
        return path
    name, _, revision = path.removeprefix(REMOTE).partition("@")
    try:
        hub: Any = importlib.import_module("huggingface_hub")
    except ImportError as error:
        raise CheckpointError(
            f"{path!r} is fetched with huggingface_hub, which is not installed: "
            f"{install_command('hub')}, or name a local snapshot"
        ) from error
    try:
        folder = hub.snapshot_download(
            name, revision=revision or None, allow_patterns=[*patterns], ignore_patterns=["*/*"]
        )
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"cannot fetch {path!r}: {error}; check the name and that you may read it, or name a "
            "local snapshot"
        ) from error
    return Path(folder)


def _copied(place: Place, patterns: tuple[str, ...]) -> Path:
    """A folder of a bucket, or a file in one with what is said of it there, copied here."""
    assert isinstance(place, Address)
    folder, _, file = place.key.rpartition("/")
    is_file = any(fnmatch.fnmatchcase(file, pattern) for pattern in patterns)
    inside = dataclasses.replace(place, key=folder) if is_file else place

    def wanted(name: str) -> bool:
        is_asked = name == file or name.endswith(".json") or file.endswith(INDEX)
        is_there = "/" not in name and any(fnmatch.fnmatchcase(name, p) for p in patterns)
        return is_there and (is_asked or not is_file)

    copy = snapshot(inside, wanted)
    return copy / file if is_file else copy


def find_tensors(files: Files) -> dict[str, TensorEntry]:
    """Reads the headers of safetensors files, and none of their values.

    Args:
        files: a file; several; a `.index.json` that says which tensor is in which file beside it;
            or a folder, such as the local snapshot of a hub's repository, with such an index or
            with one file, or with adapters as peft writes them; `hf://org/name`; or a file or a
            folder at `gs://` or `s3://`.

    Returns:
        Where every tensor lies, by name.

    Raises:
        CheckpointError: when there is none, one cannot be read, or two have the same name.
    """
    several = [files] if isinstance(files, str | Path) else files
    if not isinstance(several, Sequence) or not several:
        raise CheckpointError(
            f"got {files!r:.80} for the files of weights; give a path, or a list of them"
        )
    found: dict[str, TensorEntry] = {}
    for each in several:
        path = as_path(fetched(each), "the weights", CheckpointError)
        for name, entry in (_of_folder if path.is_dir() else _of_file)(path).items():
            if name in found:
                raise CheckpointError(
                    f"{name} is in {str(found[name].path)!r} and in {str(path)!r}; name files that "
                    "belong together"
                )
            found[name] = entry
    return found


def _of_file(path: Path) -> dict[str, TensorEntry]:
    return _of_index(path) if path.name.endswith(INDEX) else list_tensors(path)


def _of_folder(folder: Path) -> dict[str, TensorEntry]:
    indices = sorted(folder.glob(f"*{ENDING}{INDEX}"))
    alone = sorted(folder.glob(f"*{ENDING}"))
    preferred = [path for path in (*indices, *alone) if path.name.startswith("model.")]
    for choice in (preferred, indices, alone):
        if len(choice) == 1 or (choice is preferred and choice):
            return _of_file(choice[0])
        if choice is preferred and (folder / ADAPTER_CONFIG).is_file():
            return list_adapters(folder)
    names = sorted(path.name for path in folder.iterdir())
    raise CheckpointError(
        f"the folder {str(folder)!r} has {len(indices)} files *{ENDING}{INDEX} and {len(alone)} "
        f"files *{ENDING}, of {len(names)} files ({', '.join(names[:5])}); name the files to read"
    )


def _of_index(path: Path) -> dict[str, TensorEntry]:
    try:
        text = read_text(path, f"the index {str(path)!r}", CheckpointError, MOST_INDEX)
        places: dict[str, str] = json.loads(text)["weight_map"]
        files = sorted(set(places.values()))
        if odd := [file for file in files if "/" in file or kind_at(path.parent / file) is None]:
            raise KeyError(f"it names {odd[0]!r:.80}, and no such file lies beside it")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            f"cannot read {str(path)!r} as the index of safetensors files: {error}; name the files "
            "themselves"
        ) from error
    there = {file: list_tensors(path.parent / file) for file in files}
    for name, file in places.items():
        if name not in there[file]:
            raise CheckpointError(
                f"the index {str(path)!r} has {name} in {file!r}, which does not hold it; fetch "
                "the files anew"
            )
    return {name: there[file][name] for name, file in places.items()}
