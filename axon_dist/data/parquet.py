"""Parquet files, a group of rows at a time."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

from ..core.errors import ConfigError, did_you_mean, install_command
from .documents import DocumentSource, Record, parts_of
from .store import Span


def check_columns(path: Path, wanted: Sequence[str], names: Sequence[str]) -> None:
    """Raises `ConfigError` unless a table has the columns that are read."""
    twice = next((name for name in wanted if names.count(name) > 1), None)
    if twice is not None:
        raise ConfigError(f"{path} has the column {twice!r} twice; write it anew with one")
    missing = next((name for name in wanted if name not in names), None)
    if missing is not None:
        raise ConfigError(
            f"{path} has no column {missing!r}; name the one that is meant in the data section."
            f"{did_you_mean(missing, names)}"
        )


def rows_of(
    table: Any, wanted: Sequence[str], count: int, first: int, path: Path
) -> Iterator[Record]:
    """The rows of a table of Arrow as records.

    Args:
        table: with columns of such names.
        wanted: the names.
        count: how many rows it has.
        first: the number of its first row in the file.
        path: the file.

    Raises:
        ConfigError: when a value cannot be read.
    """
    columns = {name: table.column(name) for name in wanted}
    for row in range(count):
        where = f"row {first + row} of {path}"
        try:
            yield where, {name: column[row].as_py() for name, column in columns.items()}
        except Exception as error:  # a time out of range, bytes that are no UTF-8
            raise ConfigError(f"{where} cannot be read ({error}): correct or remove it") from error


_ROWS = 2**14


@dataclasses.dataclass(frozen=True)
class ParquetSource(DocumentSource):
    """Parquet files; options as in `DocumentSource`, whose fields are the names of columns.

    Example:
        >>> ParquetSource(files=("articles.parquet",), text="body").validate()
    """

    kind: ClassVar[str] = ".parquet"

    def scan(self, path: Path, update: Callable[[bytes], None]) -> list[Span]:
        """Finds the groups of rows."""
        with self._reading(path) as file:
            spans: list[Span] = []
            first = 0
            for group in range(file.num_row_groups):
                count = file.metadata.row_group(group).num_rows
                spans.append((group, group + 1, count, first))
                first += count
        for part in parts_of(path):
            update(part)
        return spans

    def read(self, path: Path, span: Span) -> Iterator[Record]:
        """Reads the columns that are asked for of a group of rows."""
        group, _, _, first = span
        with self._reading(path) as file:
            check_columns(path, self.columns, file.schema_arrow.names)
            # A group of any size, of which a few rows at a time are in memory.
            for batch in file.iter_batches(_ROWS, [group], list(self.columns)):
                yield from rows_of(batch, self.columns, batch.num_rows, first, path)
                first += batch.num_rows

    @contextlib.contextmanager
    def _reading(self, path: Path) -> Iterator[Any]:
        try:
            parquet: Any = importlib.import_module("pyarrow.parquet")
        except ImportError as error:
            raise ConfigError(
                "data.kind=parquet needs pyarrow, which is not installed: "
                f"{install_command('parquet')}"
            ) from error
        try:
            with parquet.ParquetFile(path) as file:
                yield file
        except ConfigError:
            raise
        except Exception as error:  # whatever bytes that lie make of a reader in C++
            raise ConfigError(
                f"{path} is not a parquet file that pyarrow reads ({error}): write it anew, or "
                "take it out of data.files."
            ) from error
