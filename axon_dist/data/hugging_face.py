"""Data sets of Hugging Face's `datasets`: of the hub, saved on the disk, or their Arrow files."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

from ..core.errors import ConfigError, install_command
from ..core.files import kind_at
from .documents import PART, DocumentSource, Record, parts_of
from .files import TextFile, find_files
from .parquet import check_columns, rows_of
from .store import Span

ARROW = ".arrow"


@dataclasses.dataclass(frozen=True)
class DatasetsSource(DocumentSource):
    """Data sets of `datasets`; options as in `DocumentSource`, whose fields are the columns.

    Each of `files` is `org/name`, `org/name:subset`, a folder that `save_to_disk` wrote, or a glob
    of `.arrow` files. Behind an `@` stands the split; without one it is `train`, or for
    `validation_files` the same. What a data set selects of its rows is not in its files: one that
    was filtered or shuffled has to be saved first.

    Example:
        >>> split = ("Salesforce/wikitext:wikitext-103-raw-v1@validation",)
        >>> DatasetsSource(files=("Salesforce/wikitext:wikitext-103-raw-v1",),
        ...                validation_files=split).validate()
    """

    kind: ClassVar[str] = ARROW

    def find(self, patterns: Sequence[str]) -> Sequence[TextFile]:
        """The Arrow files of the data sets, which `datasets` fetches and writes where needed."""
        return [file for pattern in patterns for file in _files_of(pattern)]

    def scan(self, path: Path, update: Callable[[bytes], None]) -> list[Span]:
        """Finds runs of record batches, by their places in the file."""
        for part in parts_of(path):
            update(part)
        spans: list[Span] = []
        first = count = 0
        with _Stream(path) as stream:
            start = stream.file.tell()
            while (batch := stream.next()) is not None:
                count += batch.num_rows
                if (place := stream.file.tell()) - start >= PART:
                    spans.append((start, place, count, first))
                    start, first, count = place, first + count, 0
            return [*spans, (start, stream.file.tell(), count, first)]

    def read(self, path: Path, span: Span) -> Iterator[Record]:
        """Reads the columns that are asked for of a run of batches."""
        start, stop, _, first = span
        with _Stream(path) as stream:
            check_columns(path, self.columns, stream.schema.names)
            stream.file.seek(start)
            while stream.file.tell() < stop and (batch := stream.next()) is not None:
                yield from rows_of(batch, self.columns, batch.num_rows, first, path)
                first += batch.num_rows


class _Stream:
    """A file with a stream of Arrow, as `datasets` writes it; what it is not is refused."""

    def __init__(self, path: Path):
        self._path = path
        try:
            self._arrow: Any = importlib.import_module("pyarrow")
        except ImportError as error:
            raise ConfigError(
                f"{path} needs pyarrow, which is not installed: {install_command('parquet')}"
            ) from error

    def __enter__(self) -> _Stream:
        if (kind := kind_at(self._path)) != "a file":
            raise ConfigError(f"{self._path} is {kind}, and must be a file; correct data.files")
        self.file: Any = self._arrow.OSFile(str(self._path))
        self.schema: Any = self._tried(self._arrow.ipc.read_schema, self.file)
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()

    def next(self) -> Any:
        """The next batch of rows; None at the end."""
        try:
            message = self._arrow.ipc.read_message(self.file)
        except EOFError:
            return None
        except Exception as error:
            raise self._error(error) from error
        return self._tried(self._arrow.ipc.read_record_batch, message, self.schema)

    def _tried(self, read: Callable[..., Any], *given: Any) -> Any:
        try:
            return read(*given)
        except Exception as error:  # whatever bytes that lie make of a reader in C++
            self.file.close()
            raise self._error(error) from error

    def _error(self, error: Exception) -> ConfigError:
        return ConfigError(
            f"{self._path} is no stream of Arrow that pyarrow reads ({error}): save the data set "
            "anew with save_to_disk, or take it out of data.files"
        )


def _files_of(text: str) -> Sequence[TextFile]:
    if text.endswith(ARROW):
        return find_files([text])
    name, _, split = text.partition("@")
    path, _, subset = name.partition(":")
    try:
        datasets: Any = importlib.import_module("datasets")
    except ImportError as error:
        raise ConfigError(
            f"data.files: {text!r} is read with datasets, which is not installed: "
            f"{install_command('datasets')}"
        ) from error
    try:
        if Path(path).is_dir():
            found = datasets.load_from_disk(path)
            found = found[split or "train"] if hasattr(found, "keys") else found
        else:
            found = datasets.load_dataset(path, subset or None, split=split or "train")
    except Exception as error:  # of a hub, a cache, a builder: dozens of kinds
        raise ConfigError(
            f"data.files: {text!r} cannot be loaded with datasets ({error}); write org/name, "
            "org/name:subset@split, or a folder of save_to_disk"
        ) from error
    paths = [Path(row["filename"]) for row in found.cache_files]
    files = [TextFile(path.name, path) for path in paths]
    stored = sum(map(_num_rows, files))
    if not files or stored != len(found):
        raise ConfigError(
            f"data.files: {text!r} has {len(found)} rows, and its files have {stored}, for rows "
            "were selected, or it is in memory; save it with save_to_disk, and name that folder"
        )
    return files


def _num_rows(file: TextFile) -> int:
    """Of a file that `datasets` wrote and has mapped; only what tells of batches is read."""
    arrow: Any = importlib.import_module("pyarrow")
    with arrow.memory_map(str(file.path)) as mapped, arrow.ipc.open_stream(mapped) as stream:
        return sum(batch.num_rows for batch in stream)
