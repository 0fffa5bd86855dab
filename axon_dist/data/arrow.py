"""Arrow tables from Parquet files or Hugging Face `datasets`.

A dataset comes from the hub, from `save_to_disk`, or from Arrow files.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

from ..core.errors import ConfigError, did_you_mean, require, reworded
from ..core.files import kind_at
from .documents import PART, DocumentSource, Record, parts_of
from .files import TextFile, find_files
from .store import Span

ARROW = ".arrow"
_ROWS = 2**14
"""The most rows that are read at a time."""


def columns_of(source: DocumentSource, path: Path, names: Sequence[str]) -> Sequence[str]:
    """Returns the columns of a table that a source reads; raises if one is missing."""
    present = [name for name in source.optional_columns if name in names]
    wanted = list(dict.fromkeys([*source.columns, *present]))
    check_columns(path, wanted, names)
    return wanted


def check_columns(path: Path, wanted: Sequence[str], names: Sequence[str]) -> None:
    """Raises `ConfigError` unless a table has each wanted column exactly once."""
    twice = next((name for name in wanted if names.count(name) > 1), None)
    if twice is not None:
        raise ConfigError(
            f"{path} has the column {twice!r} twice; write it again with one", code="column-twice"
        )
    missing = next((name for name in wanted if name not in names), None)
    if missing is not None:
        raise ConfigError(
            f"{path} has no column {missing!r}; correct the column name in the data section."
            f"{did_you_mean(missing, names)}",
            code="no-such-column",
        )


def rows_of(
    table: Any, wanted: Sequence[str], count: int, first: int, path: Path
) -> Iterator[Record]:
    """Yields the rows of an Arrow table as records.

    Args:
        table: an Arrow table or record batch.
        wanted: the names of the columns to read.
        count: the number of its rows.
        first: the number of its first row in the file.
        path: the file.

    Raises:
        ConfigError: when a value cannot be read.
    """
    columns = {name: table.column(name) for name in wanted}
    for row in range(count):
        origin = f"row {first + row} of {path}"
        # Raised, for example, for a time out of range or for invalid UTF-8.
        with reworded(f"{origin} cannot be read", "correct or remove it", of=Exception):
            record = {name: column[row].as_py() for name, column in columns.items()}
        yield origin, record


@dataclasses.dataclass(frozen=True)
class ParquetSource(DocumentSource):
    """Parquet files; options as in `DocumentSource`, whose fields are the names of columns.

    Example:
        >>> ParquetSource(files=("articles.parquet",), text="body").validate()
    """

    suffix: ClassVar[str] = ".parquet"

    def scan(self, path: Path, update: Callable[[bytes], None]) -> list[Span]:
        """Returns the row groups."""
        with self._reading(path) as file:
            groups = range(file.num_row_groups)
            counts = [file.metadata.row_group(group).num_rows for group in groups]
        for part in parts_of(path):
            update(part)
        firsts = itertools.accumulate(counts, initial=0)
        # `firsts` has one more entry, the total.
        entries = zip(groups, counts, firsts, strict=False)
        return [(group, group + 1, count, first) for group, count, first in entries]

    def read(self, path: Path, span: Span) -> Iterator[Record]:
        """Reads the wanted columns of a row group."""
        group, _, _, first = span
        with self._reading(path) as file:
            columns = columns_of(self, path, file.schema_arrow.names)
            # A row group may be larger than memory, so only `_ROWS` rows are loaded at a time.
            for batch in file.iter_batches(_ROWS, [group], list(columns)):
                yield from rows_of(batch, columns, batch.num_rows, first, path)
                first += batch.num_rows

    @contextlib.contextmanager
    def _reading(self, path: Path) -> Iterator[Any]:
        parquet = require("pyarrow.parquet", "parquet", str(path))
        what = f"{path} is not a Parquet file that pyarrow can read"
        advice = "write it again, or take it out of data.files"
        with reworded(what, advice, of=Exception), parquet.ParquetFile(path) as file:
            yield file


@dataclasses.dataclass(frozen=True)
class DatasetsSource(DocumentSource):
    """Hugging Face `datasets`; options as in `DocumentSource`, whose fields are the columns.

    Each of `files` is `org/name`, `org/name:subset`, a folder written by `save_to_disk`, or a glob
    of `.arrow` files. The split follows an `@`; it defaults to `train`, also in `validation_files`.
    Save a filtered or shuffled dataset with `save_to_disk` first: its files do not record which
    rows were selected.

    Example:
        >>> split = ("Salesforce/wikitext:wikitext-103-raw-v1@validation",)
        >>> DatasetsSource(files=("Salesforce/wikitext:wikitext-103-raw-v1",),
        ...                validation_files=split).validate()
    """

    suffix: ClassVar[str] = ARROW

    def find(self, patterns: Sequence[str]) -> Sequence[TextFile]:
        """Returns the Arrow files of the datasets; `datasets` downloads them if needed."""
        return [file for pattern in patterns for file in _files_of(pattern)]

    def scan(self, path: Path, update: Callable[[bytes], None]) -> list[Span]:
        """Divides a file into runs of record batches, by their offsets in the file.

        A file with dictionary columns, or in the Arrow file format, is one run.
        """
        for part in parts_of(path):
            update(part)
        spans: list[Span] = []
        first = count = start = end = 0
        for batch, end in _batches(path):
            count += batch.num_rows
            if end - start >= PART:
                spans.append((start, end, count, first))
                start = end
                first += count
                count = 0
        return [*spans, (start, end, count, first)]

    def read(self, path: Path, span: Span) -> Iterator[Record]:
        """Reads the wanted columns of a run of record batches."""
        start, stop, _, first = span
        for batch, end in _batches(path, start):
            if end > stop:
                return
            columns = columns_of(self, path, batch.schema.names)
            yield from rows_of(batch, columns, batch.num_rows, first, path)
            first += batch.num_rows


def _batches(path: Path, start: int = 0) -> Iterator[tuple[Any, int]]:
    """Yields the record batches of an Arrow stream, each with the offset of its end.

    The offset is 0 if no reader can begin in the middle of the file.
    """
    arrow = require("pyarrow", "parquet", str(path))
    try:
        if (kind := kind_at(path)) != "a file":
            raise OSError(f"it is {kind}")
        with arrow.OSFile(str(path)) as file:
            for batch, end in _unchecked(arrow, file, start):
                # Without validation, reading a value from corrupt bytes could crash the process.
                batch.validate(full=True)
                yield batch, end
    except EOFError:
        return  # the end-of-stream marker
    except Exception as error:  # corrupt bytes may make the C++ reader raise anything
        raise ConfigError(
            f"{path} is not an Arrow stream that pyarrow can read ({error}): save the data set "
            "again with save_to_disk, or take it out of data.files",
            code="not-arrow",
        ) from error


_MAGIC = b"ARROW1"
"""The first bytes of the Arrow file format; a stream begins with a length."""


def _unchecked(arrow: Any, file: Any, start: int) -> Iterator[tuple[Any, int]]:
    """Yields the record batches of an open file as `_batches` does, without validation."""
    is_file_format = file.read(len(_MAGIC)) == _MAGIC
    file.seek(0)
    if is_file_format:
        with arrow.ipc.open_file(file) as reader:
            for number in range(reader.num_record_batches):
                yield reader.get_batch(number), 0
        return
    schema = arrow.ipc.read_schema(file)
    # The values of a dictionary column, such as a categorical of pandas, are in messages of their
    # own, which may be far before the batch.
    if any("dictionary<" in str(kind) for kind in schema.types):
        file.seek(0)
        with arrow.ipc.open_stream(file) as stream:
            for batch in stream:
                yield batch, 0
        return
    file.seek(max(start, file.tell()))
    while file.tell() < file.size():
        message = arrow.ipc.read_message(file)
        yield arrow.ipc.read_record_batch(message, schema), file.tell()


def _files_of(text: str) -> Sequence[TextFile]:
    if text.endswith(ARROW):
        return find_files([text])
    name, _, split = text.partition("@")
    path, _, subset = name.partition(":")
    datasets = require("datasets", "datasets", f"data.files: {text!r}")
    # The hub, the cache and the dataset builders raise dozens of kinds of errors.
    what = f"data.files: {text!r} cannot be loaded with datasets"
    advice = "write org/name, org/name:subset@split, or a folder of save_to_disk"
    with reworded(what, advice, of=Exception):
        if Path(path).is_dir():
            dataset = datasets.load_from_disk(path)
            dataset = dataset[split or "train"] if hasattr(dataset, "keys") else dataset
        else:
            dataset = datasets.load_dataset(path, subset or None, split=split or "train")
    paths = [Path(row["filename"]) for row in dataset.cache_files]
    files = [TextFile(path.name, path) for path in paths]
    stored = sum(map(_num_rows, files))
    if not files or stored != len(dataset):
        raise ConfigError(
            f"data.files: {text!r} has {len(dataset)} rows, but its files have {stored}: rows were "
            "selected, or the dataset is in memory; save it with save_to_disk and name that folder",
            code="dataset-not-saved",
        )
    return files


def _num_rows(file: TextFile) -> int:
    """Counts the rows of a file that `datasets` wrote; reads only the batch headers."""
    arrow = require("pyarrow", "parquet", str(file.path))
    with arrow.memory_map(str(file.path)) as mapped, arrow.ipc.open_stream(mapped) as stream:
        return sum(batch.num_rows for batch in stream)
