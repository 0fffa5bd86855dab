"""ArrayRecord files with JSON or `tf.train.Example` records; TensorFlow Datasets writes these."""

from __future__ import annotations

import dataclasses
import functools
import importlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError

from ..core.errors import ConfigError, reworded
from ..core.files import kind_at
from .documents import PART, DocumentSource, Record, object_of, parts_of
from .store import Span


@dataclasses.dataclass(frozen=True)
class ArrayRecordSource(DocumentSource):
    """ArrayRecord files; options as in `DocumentSource`.

    A record is a JSON object or a `tf.train.Example`.

    Example:
        >>> ArrayRecordSource(files=("c4-train.array_record-*",)).validate()
    """

    suffix: ClassVar[str] = ".array_record"

    def scan(self, path: Path, update: Callable[[bytes], None]) -> list[Span]:
        """Divides a file into runs of records."""
        for part in parts_of(path):
            update(part)
        count = _opened(path).num_records()
        size = path.stat().st_size
        run = max(1, count * PART // max(size, 1))
        spans: list[Span] = []
        for first in range(0, count, run):
            stop = min(first + run, count)
            spans.append((first, stop, stop - first, first))
        return spans

    def read(self, path: Path, span: Span) -> Iterator[Record]:
        """Reads a run of records."""
        first, stop, _, _ = span
        what = f"{path} cannot be read from record {first} on"
        with reworded(what, "write it again", of=Exception):
            records = _opened(path).read(first, stop)
        for number, record in enumerate(records, start=first):
            origin = f"record {number} of {path}"
            if record[:1] == b"{":
                yield origin, object_of(record, origin)
                continue
            what = f"{origin} is neither JSON nor a tf.train.Example"
            with reworded(what, "write it again", of=DecodeError):
                yield origin, example_of(record)


def _opened(path: Path) -> Any:
    if kind_at(path) != "a file":
        raise ConfigError(
            f"{path} is {kind_at(path)} and must be a file; correct data.files", code="not-a-file"
        )
    module: Any = importlib.import_module("array_record.python.array_record_module")
    # Corrupt bytes may make the C++ reader raise any kind of exception.
    advice = "write it again, or take it out of data.files"
    with reworded(f"{path} is not an ArrayRecord file", advice, of=Exception):
        return module.ArrayRecordReader(str(path), "readahead_buffer_size:0,max_parallelism:0")


_BYTES, _FLOAT, _INT, _TEXT, _ONE, _MANY = 12, 2, 3, 9, 1, 3
_MESSAGES: Mapping[str, Mapping[int, tuple[int | str, int]]] = MappingProxyType(
    {
        "BytesList": {1: (_BYTES, _MANY)},
        "FloatList": {1: (_FLOAT, _MANY)},
        "Int64List": {1: (_INT, _MANY)},
        "Feature": {1: ("BytesList", _ONE), 2: ("FloatList", _ONE), 3: ("Int64List", _ONE)},
        "Entry": {1: (_TEXT, _ONE), 2: ("Feature", _ONE)},
        "Features": {1: ("Entry", _MANY)},
        "Example": {1: ("Features", _ONE)},
    }
)
"""The fields of each message, by field number: descriptor type or message name, and label."""


@functools.cache
def _example() -> Any:
    """Builds the message class of `tf.train.Example` without TensorFlow."""
    file = descriptor_pb2.FileDescriptorProto(name="axon_dist.proto", package="axon_dist")
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        for number, (kind, label) in fields.items():
            field = message.field.add(name=f"f{number}", number=number, label=label)  # type: ignore[arg-type]
            if isinstance(kind, int):
                field.type = kind  # type: ignore[assignment]
            else:
                field.type = 11  # type: ignore[assignment]
                field.type_name = f".axon_dist.{kind}"
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(file.SerializeToString())
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("axon_dist.Example"))


def example_of(data: bytes) -> dict[str, Any]:
    """Parses a `tf.train.Example`, whose fields are bytes, float or int, or lists of these.

    Args:
        data: the serialized message.

    Raises:
        DecodeError: when `data` is not such a message.

    Example:
        >>> example_of(bytes.fromhex("0a120a100a0161120b0a090a0768656c6c6f2121"))
        {'a': b'hello!!'}
    """
    fields: dict[str, Any] = {}
    for entry in _example().FromString(data).f1.f1:
        listed = [x for _, values in entry.f2.ListFields() for x in values.f1]
        fields[entry.f1] = listed[0] if len(listed) == 1 else listed
    return fields
