"""ArrayRecord files, of JSON or of `tf.train.Example`, which is what TensorFlow Datasets writes.

An Example is a protobuf of maps from names to lists of one kind, read here without TensorFlow:

    Example {1: Features}    Features {1: (1: name, 2: Feature) of each}
    Feature {1: BytesList | 2: FloatList | 3: Int64List}    each list {1: values}
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from ..core.errors import ConfigError
from ..core.files import kind_at
from .documents import PART, DocumentSource, Record, object_of, parts_of
from .store import Span


@dataclasses.dataclass(frozen=True)
class ArrayRecordSource(DocumentSource):
    """Files of ArrayRecord; options as in `DocumentSource`, whose fields are those of a record.

    A record is an object of JSON, or a `tf.train.Example`.

    Example:
        >>> ArrayRecordSource(files=("c4-train.array_record-*",)).validate()
    """

    kind: ClassVar[str] = ".array_record"

    def scan(self, path: Path, update: Callable[[bytes], None]) -> list[Span]:
        """Cuts a file into runs of records."""
        for part in parts_of(path):
            update(part)
        count, size = _opened(path).num_records(), path.stat().st_size
        run = max(1, count * PART // max(size, 1))
        return [
            (first, stop, stop - first, first)
            for first in range(0, count, run)
            for stop in [min(first + run, count)]
        ]

    def read(self, path: Path, span: Span) -> Iterator[Record]:
        """Reads a run of records."""
        first, stop, _, _ = span
        try:
            records = _opened(path).read(first, stop)
        except Exception as error:
            raise ConfigError(
                f"{path} cannot be read from record {first} on ({error}): write it anew"
            ) from error
        for number, record in enumerate(records, start=first):
            where = f"record {number} of {path}"
            if record[:1] == b"{":
                yield where, object_of(record, where)
                continue
            try:
                yield where, example_of(record)
            except (ValueError, IndexError) as error:
                raise ConfigError(
                    f"{where} is neither JSON nor a tf.train.Example ({error}): write it anew"
                ) from error


def _opened(path: Path) -> Any:
    if kind_at(path) != "a file":
        raise ConfigError(f"{path} is {kind_at(path)}, and must be a file; correct data.files")
    module: Any = importlib.import_module("array_record.python.array_record_module")
    try:
        return module.ArrayRecordReader(str(path), "readahead_buffer_size:0,max_parallelism:0")
    except Exception as error:  # whatever bytes that lie make of a reader in C++
        raise ConfigError(
            f"{path} is no file of ArrayRecord ({error}): write it anew, or take it out of "
            "data.files"
        ) from error


def example_of(data: bytes) -> dict[str, Any]:
    """Reads a `tf.train.Example`: its fields as bytes, float or int, or as lists of them.

    Args:
        data: serialized.

    Raises:
        ValueError: when it is something else.

    Example:
        >>> example_of(bytes.fromhex("0a120a100a0161120b0a090a0768656c6c6f2121"))
        {'a': b'hello!!'}
    """
    found: dict[str, Any] = {}
    for _, features in _fields(data):
        for _, entry in _fields(features):
            parts = dict(_fields(entry))
            [(kind, values)] = _fields(parts[2])
            listed = [x for _, value in _fields(values) for x in _values(kind, value)]
            found[parts[1].decode()] = listed[0] if len(listed) == 1 else listed
    return found


def _values(kind: int, value: Any) -> list[Any]:
    if kind == 1:
        return [value]
    if kind == 2:
        return np.frombuffer(value, "<f4").tolist()
    whole = [value] if isinstance(value, int) else _packed(value)
    return [x - 2**64 if x >= 2**63 else x for x in whole]


def _packed(data: bytes) -> list[int]:
    found, place = [], 0
    while place < len(data):
        value, place = _varint(data, place)
        found.append(value)
    return found


def _fields(data: Any) -> list[tuple[int, Any]]:
    """The fields of a message by their numbers: bytes, or an int where it is a varint."""
    if isinstance(data, int):
        raise ValueError("a number where a message should be")
    found, place = [], 0
    while place < len(data):
        key, place = _varint(data, place)
        number, wire = divmod(key, 8)
        if wire == 0:
            value, place = _varint(data, place)
        elif wire in (2, 5):
            size, place = _varint(data, place) if wire == 2 else (4, place)
            value, place = data[place : place + size], place + size
            if len(value) < size:
                raise ValueError("it ends too early")
        else:
            raise ValueError(f"a field of wire type {wire}")
        found.append((number, value))
    return found


def _varint(data: bytes, place: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        value |= (data[place] & 0x7F) << shift
        place += 1
        if data[place - 1] < 0x80:
            return value, place
    raise ValueError("a number of more than 64 bits")
