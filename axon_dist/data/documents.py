"""Records with text, with prompts and responses, or with chats, as documents of tokens."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Protocol

import numpy as np

from ..core.errors import ConfigError, did_you_mean
from .files import TextFile, check_disjoint, find_files, says_little
from .packing import PackedRows, TooLong
from .samples import checksum, drawn, held_fraction
from .tokenizer import (
    ChatTemplate,
    Pieces,
    Tokenizer,
    byte_tokenizer,
    check_messages,
    find_template,
    load_tokenizer,
)


class Records(Protocol):
    """Records by number, read when they are asked for, in whatever thread asks."""

    def __len__(self) -> int:
        """How many there are."""
        ...

    def __getitem__(self, number: int) -> Mapping[str, Any]:
        """The fields of one.

        Raises:
            ConfigError: when it cannot be read; the message says where it stands.
        """
        ...

    def place(self, number: int) -> str:
        """Where one stands, for people."""
        ...

    def checksum(self) -> int:
        """The same for the same records alone."""
        ...


@dataclasses.dataclass(frozen=True)
class DocumentSource:
    """Which files hold records, and which of their fields a model learns.

    Records with a text are learned whole. Of records with a prompt and a response, one behind the
    other, the model sees both and learns the response alone. Rows say which document each token is
    of: tokens see their own document alone, positions begin anew in each, and the first token of a
    document is no target. Of records with a chat, a list of `{role, content}`, the model learns
    what the assistant says, in all of its turns.

    Args:
        files: paths or globs.
        validation_files: paths or globs kept for validation; empty to draw records of `files`.
        validation_fraction: the share of records for validation, in (0, 1), where there are no
            `validation_files`; None for a tenth.
        text: the field that holds the text; None means `text`, without a prompt.
        prompt: the field that holds the prompt, with `response`.
        response: the field that holds what is learned.
        messages: the field that holds a chat.
        template: how a chat becomes a text: `plain`, `chatml`, `llama3`, or a file with a template
            in Jinja or a `tokenizer_config.json` that has one; None takes that beside the
            tokenizer, else `plain`.
        tokenizer: a `tokenizer.json` of Hugging Face `tokenizers`; None for bytes.
        end_token: put behind every document, such as `<|endoftext|>`; bytes end with a zero anyway.
        packed: put as many documents as fit into a row; otherwise one, and padding.
        too_long: what becomes of documents that do not fit into a row: `split` into several,
            `drop`, or `refuse`; None splits texts and refuses prompts and chats, which must not be
            parted from their responses.
    """

    files: tuple[str, ...] = ()
    validation_files: tuple[str, ...] = ()
    validation_fraction: float | None = None
    text: str | None = None
    prompt: str | None = None
    response: str | None = None
    messages: str | None = None
    template: str | None = None
    tokenizer: str | None = None
    end_token: str | None = None
    packed: bool = True
    too_long: TooLong | None = None

    kind: ClassVar[str] = "records"
    """What the files are, for messages."""

    def validate(self) -> None:
        """Checks the values without looking at any file.

        Raises:
            ConfigError: a value is out of range, or fields contradict each other.
        """
        if not self.files:
            raise ConfigError(f"data.files names no file: name {self.kind} files.")
        held_fraction(self.validation_fraction, self.validation_files)
        if (self.prompt is None) != (self.response is None):
            raise ConfigError(
                f"data.prompt={self.prompt!r} and data.response={self.response!r}: name both "
                "fields, or neither for records of text"
            )
        said = {name: x for name in ("text", "prompt", "messages") if (x := getattr(self, name))}
        if len(said) > 1:
            named = " and ".join(f"data.{name}={x!r}" for name, x in said.items())
            raise ConfigError(f"{named} both say what is read: leave one of them out")
        if self.template is not None and self.messages is None:
            raise ConfigError(
                f"data.template={self.template!r} is one of chats: name their field, "
                "data.messages=messages, or leave it out"
            )
        if self.end_token is not None and self.tokenizer is None:
            raise ConfigError(
                f"data.end_token={self.end_token!r} needs a data.tokenizer that knows it; bytes "
                "end with a zero: leave it out"
            )

    @property
    def arrays(self) -> tuple[str, ...]:
        """The names of the arrays of a batch."""
        return ("tokens", "segments", "mask") if self._has_mask else ("tokens", "segments")

    @property
    def learned(self) -> str:
        """The field of what is learned: a text, a response, or a chat."""
        return self.response or self.messages or self.text or "text"

    @property
    def _has_mask(self) -> bool:
        return self.prompt is not None or self.messages is not None

    @property
    def unit(self) -> str:
        """What a loss is measured in."""
        return "nats/byte" if self.tokenizer is None else "nats/token"

    def records(self, files: Sequence[TextFile]) -> Records:
        """Opens files.

        Raises:
            ConfigError: when they are not such files, or what reads them is not installed.
        """
        raise TypeError(f"{type(self).__name__} does not say how its files are read")

    def open(self, length: int) -> PackedRows:
        """Reads where the records are and how long; their samples are rows of `length + 1` tokens.

        Raises:
            ConfigError: a pattern matches no file, a record is not what it should be, or one is too
                long and that is refused.
        """
        self.validate()
        tokenizer = byte_tokenizer()
        if self.tokenizer is not None:
            tokenizer = load_tokenizer(self.tokenizer, self.end_token)
        template = None if self.messages is None else find_template(self.template, self.tokenizer)
        train, validation = (self._documents(part, tokenizer, template) for part in self._split())
        chats = "" if template is None else f", chats as {template.name}"
        amounts = f"{len(train)} records for training, {len(validation)} for validation"
        default = "refuse" if self._has_mask else "split"
        return PackedRows(
            train,
            validation,
            length,
            packed=self.packed,
            too_long=self.too_long or default,
            has_mask=self._has_mask,
            vocab_size=tokenizer.vocab_size,
            description=f"{', '.join(self.files)}: {amounts}, as {tokenizer.name}{chats}"
            + says_little(len(train), len(validation), "records"),
            show=tokenizer.decode,
        )

    def _split(self) -> list[tuple[Records, np.ndarray]]:
        files = find_files(self.files)
        records = self.records(files)
        if self.validation_files:
            validation_files = find_files(self.validation_files)
            check_disjoint(files, validation_files)
            sides = [records, self.records(validation_files)]
            return [(side, np.arange(len(side))) for side in sides]
        fraction = held_fraction(self.validation_fraction)
        is_held = drawn(len(records), fraction, "records")
        return [(records, np.flatnonzero(side)) for side in (~is_held, is_held)]

    def _documents(
        self, part: tuple[Records, np.ndarray], tokenizer: Tokenizer, template: ChatTemplate | None
    ) -> RecordDocuments:
        return RecordDocuments(*part, tokenizer, self.prompt or "", self.learned, template)


_EXAMPLE = [{"role": role, "content": role} for role in ("user", "assistant")]
"""What tells two templates apart."""

_THREADS = 8
"""Tokenizers and readers leave Python while they work."""


@dataclasses.dataclass(frozen=True, eq=False)
class RecordDocuments:
    """Some of the records as documents.

    Args:
        records: where they are read.
        numbers: which of them, `[N]`.
        tokenizer: makes tokens of them.
        prompt: the field of the prompt; empty for none.
        text: the field of what is learned.
        template: what makes a text of a chat, where that field holds one.
    """

    records: Records
    numbers: np.ndarray
    tokenizer: Tokenizer
    prompt: str
    text: str
    template: ChatTemplate | None = None

    def __len__(self) -> int:
        return len(self.numbers)

    def take(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Reads a record and makes tokens of it."""
        place = int(self.numbers[number])
        record = self.records[place]
        if self.template is not None:
            return self.tokenizer.chat(self._chat(record, self.template, place))
        text = self._field(record, self.text, place)
        if self.prompt:
            both, count = self.tokenizer.answer(self._field(record, self.prompt, place), text)
            return both, np.arange(len(both)) >= count
        tokens = self.tokenizer.encode(text.encode())
        return tokens, np.ones(len(tokens), bool)

    def lengths(self) -> np.ndarray:
        """Makes tokens of every record once, in threads, and keeps how many."""
        with concurrent.futures.ThreadPoolExecutor(_THREADS) as pool:
            lengths = pool.map(lambda number: len(self.take(number)[0]), range(len(self)))
            return np.fromiter(lengths, np.int64, len(self))

    def checksum(self) -> int:
        """Of the files, of which records these are, and of what becomes of them."""
        how = f"{self.tokenizer.name} {self.prompt} {self.text}"
        if self.template is not None:
            how += f" {self.template.pieces(_EXAMPLE)}"
        name = np.frombuffer(how.encode(), np.uint8)
        return checksum(np.array([self.records.checksum()]), self.numbers, name)

    def _chat(self, record: Mapping[str, Any], template: ChatTemplate, place: int) -> Pieces:
        where = self.records.place(place)
        if self.text not in record:
            raise ConfigError(
                f"{where} has no field {self.text!r}, which must hold a chat; set "
                f"data.messages.{did_you_mean(self.text, record)}"
            )
        if (wrong := check_messages(record[self.text])) is not None:
            raise ConfigError(
                f"{where} has {wrong}; write "
                '[{"role": "user", "content": ...}, {"role": "assistant", "content": ...}], or '
                "remove the line"
            )
        try:
            return template.pieces(record[self.text])
        except ValueError as error:
            raise ConfigError(f"{where} has {error}") from error

    def _field(self, record: Mapping[str, Any], name: str, place: int) -> str:
        if not isinstance(text := record.get(name), str):
            option = next(o for o, f in (("prompt", self.prompt), ("text", self.text)) if f == name)
            option = "response" if self.prompt and option == "text" else option
            what = f"has {text!r:.60} under" if name in record else "has no field"
            raise ConfigError(
                f"{self.records.place(place)} {what} {name!r}, which must be a text; set "
                f"data.{option}.{did_you_mean(name, record)}"
            )
        return text


@dataclasses.dataclass(frozen=True)
class JsonlSource(DocumentSource):
    """Files with a JSON object in every line; options as in `DocumentSource`.

    Example:
        >>> JsonlSource(files=("chats.jsonl",), prompt="question", response="answer").validate()
    """

    kind: ClassVar[str] = ".jsonl"

    def records(self, files: Sequence[TextFile]) -> JsonLines:
        """Finds where the lines begin; a line is read when it is asked for."""
        return JsonLines(files)


class JsonLines:
    """The lines of files, those with nothing in them left out.

    Args:
        files: which.

    Raises:
        ConfigError: when they have no line.
    """

    def __init__(self, files: Sequence[TextFile]):
        self._bytes = [np.memmap(f.path, np.uint8, "r") for f in files if f.size]
        self._paths = [file.path for file in files if file.size]
        tables = [
            np.column_stack([np.full(len(lines), number), lines])
            for number, content in enumerate(self._bytes)
            if len(lines := _lines(content))
        ]
        if not tables:
            names = ", ".join(str(file.path) for file in files)
            raise ConfigError(f"data.files: {names} has no line; give files with records.")
        self._lines = np.concatenate(tables)

    def __len__(self) -> int:
        return len(self._lines)

    def __getitem__(self, number: int) -> Mapping[str, Any]:
        file, start, stop, _ = self._lines[number].tolist()
        try:
            record = json.loads(self._bytes[file][start:stop].tobytes())
        except (ValueError, RecursionError) as error:
            raise ConfigError(
                f"{self.place(number)} is no JSON ({error}): correct or remove it"
            ) from error
        if not isinstance(record, dict):
            raise ConfigError(
                f"{self.place(number)} holds {record!r:.60}, which must be an object with fields; "
                'write {"text": ...}'
            )
        return record

    def place(self, number: int) -> str:
        """The file and the line."""
        file, _, _, line = self._lines[number].tolist()
        return f"{self._paths[file]}:{line}"

    def checksum(self) -> int:
        """Of all bytes."""
        return checksum(*self._bytes)


_PART = 2**26


def _lines(content: np.ndarray) -> np.ndarray:
    """First byte, the byte behind the last, and number of every line with something in it."""
    # In parts, for the mask of a whole file would be as large as the file.
    parts = range(0, len(content), _PART)
    ends = np.concatenate([p + np.flatnonzero(content[p : p + _PART] == ord("\n")) for p in parts])
    if content[-1] != ord("\n"):
        ends = np.append(ends, len(content))
    starts = np.concatenate([[0], ends[:-1] + 1])
    lines = np.column_stack([starts, ends, 1 + np.arange(len(ends))])
    # A line of one byte or two can hold no object; what stands there is looked at.
    is_short = ends - starts <= 2
    blank = [not content[a:b].tobytes().strip() for a, b in lines[is_short, :2].tolist()]
    is_short[is_short] = blank
    return lines[~is_short]


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
                    copied = chunk.take(np.arange(len(chunk)))
                    arrays += [
                        np.frombuffer(b, np.uint8) for b in copied.buffers() if b is not None
                    ]
        return checksum(*arrays)

    def _find(self, number: int) -> tuple[int, int]:
        file = int(np.searchsorted(self._ends, number, side="right"))
        return file, int(number - (self._ends[file] - self._tables[file].num_rows))
