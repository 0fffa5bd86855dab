"""Records from the rows of parquet files, by pyarrow."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from axon_dist.core.errors import ConfigError, did_you_mean

from .documents import DocumentSource
from .files import TextFile
from .sampling import checksum


@dataclasses.dataclass(frozen=True)
class ParquetSource(DocumentSource):
    """Parquet files; options as in `DocumentSource`, whose fields are the names of columns.

    Example:
        >>> ParquetSource(files=("articles.parquet",), text="body").validate()
    """

    kind: ClassVar[str] = ".parquet"

    def records(self, files: Sequence[TextFile]) -> ParquetRows:
        """Reads the columns that are asked for into memory."""
        names = (self.prompt, self.learned)
        return ParquetRows(files, tuple(name for name in names if name is not None))


class ParquetRows:
    """The rows of parquet files, of which some columns are kept in memory as arrow has them.

    Args:
        files: which.
        columns: the names of the columns.

    Raises:
        ConfigError: when pyarrow is not installed, a file is no parquet or has no such column, or
            there is no row.
    """

    def __init__(self, files: Sequence[TextFile], columns: Sequence[str]):
        try:
            import pyarrow  # noqa: PLC0415  (an optional dependency)
            from pyarrow import parquet  # noqa: PLC0415
        except ImportError as error:
            raise ConfigError(
                "data.kind=parquet needs pyarrow, which is not installed: "
                "pip install 'axon_dist[parquet]'."
            ) from error
        self._tables, self._paths = [], [file.path for file in files]
        for file in files:
            try:
                names = parquet.read_schema(file.path).names
                missing = next((name for name in columns if name not in names), None)
                if missing is not None:
                    raise ConfigError(
                        f"{file.path} has no column {missing!r}; set data.text, or data.prompt "
                        f"and data.response.{did_you_mean(missing, names)}"
                    )
                self._tables.append(parquet.read_table(file.path, columns=list(columns)))
            except ConfigError:
                raise
            except Exception as error:  # whatever bytes that lie make of a reader in C++
                raise ConfigError(
                    f"{file.path} is not a parquet file that pyarrow {pyarrow.__version__} reads "
                    f"({error}): write it anew, or take it out of data.files."
                ) from error
        self._ends = np.cumsum([table.num_rows for table in self._tables])
        if not len(self):
            raise ConfigError(
                f"data.files: {', '.join(map(str, self._paths))} has no row; give files with "
                "records."
            )

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, number: int) -> Mapping[str, Any]:
        file, row = self._find(number)
        table = self._tables[file]
        return {name: table.column(name)[row].as_py() for name in table.column_names}

    def place(self, number: int) -> str:
        """The file and the row."""
        file, row = self._find(number)
        return f"row {row} of {self._paths[file]}"

    def checksum(self) -> int:
        """Of the texts of all columns."""
        arrays = []
        for table in self._tables:
            for column in table.columns:
                for chunk in column.chunks:
                    # A slice of a larger buffer is copied out, so that equal rows give equal bytes.
                    own = chunk.take(np.arange(len(chunk)))
                    arrays += [np.frombuffer(b, np.uint8) for b in own.buffers() if b is not None]
        return checksum(*arrays)

    def _find(self, number: int) -> tuple[int, int]:
        file = int(np.searchsorted(self._ends, number, side="right"))
        return file, int(number - (self._ends[file] - self._tables[file].num_rows))
