"""Tokenizes records: texts, prompts with responses, or chats."""

from __future__ import annotations

import bz2
import concurrent.futures
import dataclasses
import functools
import gzip
import io
import json
import lzma
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, ClassVar

import numpy as np

from ..core.errors import MALFORMED, ConfigError, did_you_mean, require, reworded
from .chat import (
    OPTIONAL_FIELDS,
    ChatTemplate,
    Pieces,
    after_prompt,
    find_template,
    parse_conversation,
)
from .files import (
    TextFile,
    check_disjoint,
    find_files,
    held_out_fraction,
    held_out_mask,
    small_training_share_note,
)
from .packing import PackedRows, TooLong
from .samples import checksum, text_checksum
from .store import Document, Span, TokenCache, TokenStore, digest_of
from .tokenizer import Tokenizer, byte_tokenizer, load_tokenizer, utf8

Record = tuple[str, Any]
"""The origin of a record for error messages, such as file and line; and the record."""


@dataclasses.dataclass(frozen=True)
class DocumentSource:
    """Which files hold records, and which of their fields a model learns.

    All of a `text` record is learned. If a record has a prompt and a response, the model sees both
    and learns only the response. If a record is a chat, a list of `{role, content}`, the model
    learns all turns of the assistant. If `prompt` holds messages, too, they come before those of
    the chat and are not learned. Rows have segment ids, one per document: tokens attend only
    within their document, positions restart in each document, and the first token of a document is
    not a target.

    Args:
        files: paths or globs.
        validation_files: paths or globs for validation; empty to draw records from `files`.
        validation_fraction: the share of records for validation, in (0, 1), if there are no
            `validation_files`; None for a tenth.
        text: the field that holds the text; None is the field `text`, if neither `prompt` nor
            `messages` is set.
        prompt: the field that holds the prompt, with `response`; or the first messages, with
            `messages`.
        response: the field that holds the response, which is learned.
        messages: the field that holds a chat.
        template: the chat template: `plain`, `chatml`, `llama3`, a Jinja file, or a
            `tokenizer_config.json` or `chat_template.json` that has one; None takes the one next to
            the tokenizer, else `plain`.
        tokenizer: a `tokenizer.json` of Hugging Face `tokenizers`, or a SentencePiece
            `.model`; None for bytes.
        end_token: appended to every document, such as `<|endoftext|>`; without a tokenizer,
            documents end with a zero byte anyway.
        packed: put as many documents as fit into a row; otherwise one, and padding.
        buckets: without packing, pad training rows to at most this many different lengths, chosen
            from the data, and make each batch of rows of one length; None pads all rows to the
            sequence length.
        too_long: what to do with documents that do not fit into a row: `split` them into several,
            `drop` them, or `refuse` to run; None splits texts, but refuses prompts and chats, which
            must not be separated from their responses.
        cache: the folder in which tokens are cached, so that all processes together tokenize only
            once; None for `.axon_tokens` next to the first file. A change of files, tokenizer or
            fields makes new tokens.

    Example:
        >>> import json, pathlib, tempfile
        >>> path = pathlib.Path(tempfile.mkdtemp(), "texts.jsonl")
        >>> lines = [json.dumps({"text": f"line {i}"}) + "\\n" for i in range(20)]
        >>> _ = path.write_text("".join(lines))
        >>> samples = JsonlSource(files=(str(path),)).open(31)
        >>> samples.train(np.array([0]))["tokens"].shape
        (1, 32)
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
    buckets: int | None = None
    too_long: TooLong | None = None
    cache: str | None = None

    suffix: ClassVar[str] = "records"
    """The suffix of the files, for messages and for the names of cached files."""

    def validate(self) -> None:
        """Checks the values without looking at any file.

        Raises:
            ConfigError: a value is out of range, or fields contradict each other.
        """
        if not self.files:
            raise ConfigError(f"data.files names no file: name {self.suffix} files.")
        held_out_fraction(self.validation_fraction, self.validation_files)
        is_chat = self.messages is not None and self.response is None
        if (self.prompt is None) != (self.response is None) and not is_chat:
            raise ConfigError(
                f"data.prompt={self.prompt!r} and data.response={self.response!r}: name both "
                "fields, or neither for records of text"
            )
        names = ("text", "messages") if is_chat else ("text", "prompt", "messages")
        fields = {name: x for name in names if (x := getattr(self, name))}
        if len(fields) > 1:
            named = " and ".join(f"data.{name}={x!r}" for name, x in fields.items())
            raise ConfigError(
                f"{named} both name the field to read: leave one of them out",
                code="two-fields-to-read",
            )
        if self.template is not None and self.messages is None:
            raise ConfigError(
                f"data.template={self.template!r} applies to chats only: name the field that holds "
                "them, as in data.messages=messages, or leave data.template out",
                code="template-without-chats",
            )
        if self.buckets is not None and not 1 <= self.buckets <= MOST_BUCKETS:
            raise ConfigError(
                f"data.buckets={self.buckets} must be from 1 to {MOST_BUCKETS}, because each is a "
                "separate program to compile; change it",
                code="buckets-range",
            )
        if self.buckets is not None and self.packed:
            raise ConfigError(
                f"data.buckets={self.buckets} with data.packed=true: packed rows are full, so they "
                "all have one length; set data.packed=false, or leave buckets out",
                code="buckets-packed",
            )
        if self.end_token is not None and self.tokenizer is None:
            raise ConfigError(
                f"data.end_token={self.end_token!r} needs a data.tokenizer that has this token; "
                "set one, or leave data.end_token out: documents of bytes end with a zero",
                code="end-token-without-tokenizer",
            )

    @property
    def arrays(self) -> tuple[str, ...]:
        """The names of the arrays of a batch."""
        return ("tokens", "segments", "mask") if self._has_mask else ("tokens", "segments")

    @property
    def learned(self) -> str:
        """The field that is learned: a text, a response, or a chat."""
        return self.response or self.messages or self.text or "text"

    @property
    def _has_mask(self) -> bool:
        return self.prompt is not None or self.messages is not None

    @property
    def unit(self) -> str:
        """The unit of a loss."""
        return "nats/byte" if self.tokenizer is None else "nats/token"

    def scan(self, path: Path, update: Callable[[bytes], None]) -> list[Span]:
        """Reads a file once, to divide it into parts.

        Args:
            path: the path of the file.
            update: called with all bytes of the file, for a digest.

        Returns:
            The parts, as arguments of `read`.

        Raises:
            ConfigError: when the file has another format, or its reader is not installed.
        """
        raise TypeError(f"{type(self).__name__} does not define how its files are read")

    def read(self, path: Path, span: Span) -> Iterator[Record]:
        """Yields the records of a part of a file.

        Raises:
            ConfigError: when a record cannot be read.
        """
        raise TypeError(f"{type(self).__name__} does not define how its files are read")

    def open(self, length: int) -> PackedRows:
        """Tokenizes the records, or reads cached tokens; samples are rows of `length + 1` tokens.

        Raises:
            ConfigError: a pattern matches no file, a record is malformed, or one is too long and
                `too_long` is `refuse`.
        """
        self.validate()
        tokenizer = byte_tokenizer()
        if self.tokenizer is not None:
            tokenizer = load_tokenizer(self.tokenizer, self.end_token)
        template = None if self.messages is None else find_template(self.template, self.tokenizer)
        how = [self.suffix, tokenizer.digest, self.prompt or "", self.learned, self.columns]
        how += self.optional_columns
        how += [] if template is None else [template.identity]
        made_by = {"tokenizer": text_checksum(tokenizer.digest)}
        if template is not None:
            made_by["template"] = text_checksum(template.identity)
        document = functools.partial(self._document, tokenizer, template)
        files = self.find(self.files)
        folder = TokenCache(files, self.cache)
        documents = self.documents(folder, files, how, document)
        if self.validation_files:
            validation_files = self.find(self.validation_files)
            check_disjoint(files, validation_files)
            train = documents
            validation = self.documents(folder, validation_files, how, document)
        else:
            held_out = held_out_mask(
                len(documents), held_out_fraction(self.validation_fraction), "records"
            )
            train, validation = (documents.part(side) for side in (~held_out, held_out))
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
            + small_training_share_note(len(train), len(validation), "records")
            + folder.note,
            show=tokenizer.decode,
            made_by=made_by,
            num_buckets=self.buckets,
        )

    def find(self, patterns: Sequence[str]) -> Sequence[TextFile]:
        """Returns the files that the patterns match."""
        return find_files(patterns)

    def documents(
        self,
        folder: TokenCache,
        files: Sequence[TextFile],
        how: Sequence[object],
        document: Callable[[Record], Document],
    ) -> StoredDocuments:
        """Makes documents of all records, or reads cached ones.

        Args:
            folder: the folder of the token cache.
            files: the files to read.
            how: everything that documents depend on besides the files.
            document: turns a record into a document.

        Raises:
            ConfigError: when there is no record, or one cannot be read.
        """
        indexed = folder.index(files, self.scan, self.suffix)
        if not any(span[2] for file in indexed for span in file.spans):
            names = ", ".join(str(file.path) for file in indexed)
            raise ConfigError(
                f"data.files: {names} has no record; give files with records.", code="no-records"
            )

        def make(path: Path, span: Span) -> Iterator[Document]:
            with concurrent.futures.ThreadPoolExecutor(_THREADS) as pool:
                yield from pool.map(document, self.read(path, span))

        store = folder.tokens(indexed, how, make)
        digests = [file.digest for file in indexed]
        return StoredDocuments(
            store, np.arange(len(store)), digest_of(repr((digests, how)).encode()), folder
        )

    @property
    def columns(self) -> tuple[str, ...]:
        """The fields that are read."""
        return tuple(name for name in (self.prompt, self.learned) if name is not None)

    @property
    def optional_columns(self) -> tuple[str, ...]:
        """The fields that are read if a record has them."""
        return OPTIONAL_FIELDS if self.messages is not None else ()

    def _document(
        self, tokenizer: Tokenizer, template: ChatTemplate | None, located: Record
    ) -> Document:
        """Tokenizes a record."""
        origin, record = located
        if template is not None:
            return tokenizer.chat(self._chat(record, template, origin))
        text = self._field(record, self.learned, origin)
        if self.prompt:
            both, count = tokenizer.answer(self._field(record, self.prompt, origin), text)
            return both, np.arange(len(both)) >= count
        return tokenizer.encode(utf8(text, origin)), None

    def _chat(self, record: Mapping[str, Any], template: ChatTemplate, origin: str) -> Pieces:
        for option, name in (("prompt", self.prompt), ("messages", self.learned)):
            if name is not None and name not in record:
                raise ConfigError(
                    f"{origin} has no field {name!r}, which must hold a chat; set "
                    f"data.{option}.{did_you_mean(name, record)}"
                )
        try:
            if self.prompt is not None:
                both = after_prompt(record[self.prompt], record[self.learned])
                record = {**record, self.learned: both}
            chat = parse_conversation(record, self.learned)
        except ValueError as error:
            raise ConfigError(
                f"{origin} has {error}; write "
                '[{"role": "user", "content": ...}, {"role": "assistant", "content": ...}], or '
                "remove the record",
                code="malformed-chat",
            ) from error
        try:
            pieces = template.pieces(chat)
        except ValueError as error:
            raise ConfigError(f"{origin} has {error}") from error
        if not any(is_learned and text for text, is_learned in pieces):
            raise ConfigError(
                f"{origin} has messages in which the template {template.name!r} marks nothing to "
                "learn; correct its {% generation %} tags, or remove the record",
                code="nothing-learned",
            )
        utf8("".join(text for text, _ in pieces), origin)
        return pieces

    def _field(self, record: Mapping[str, Any], name: str, origin: str) -> str:
        text = record.get(name)
        if isinstance(text, bytes):
            text = text.decode(errors="surrogateescape")
        if not isinstance(text, str):
            if text is None and name in record:
                raise ConfigError(
                    f"{origin} has null under {name!r}, which must be a text; correct or remove "
                    "the record"
                )
            self._check_no_messages(text, name, origin)
            answer = "response" if self.prompt else "text"
            option = "prompt" if name == self.prompt else answer
            what = f"has {text!r:.60} under" if name in record else "has no field"
            pair = "data.prompt and data.response, or " * (option == "text")
            raise ConfigError(
                f"{origin} {what} {name!r}, which must be a text; set "
                f"{pair}data.{option}.{did_you_mean(name, record) if name not in record else ''}"
            )
        utf8(text, origin)
        return text

    def _check_no_messages(self, value: Any, name: str, origin: str) -> None:
        """Raises if a value is a list of messages where a text must be."""
        if not isinstance(value, list) or not any(isinstance(x, dict) for x in value):
            return
        instead = "data.text" if self.response is None else "data.response"
        kept = "" if self.prompt is None else f", with messages in data.prompt={self.prompt} too"
        raise ConfigError(
            f"{origin} has a list of {len(value)} messages under {name!r}, which must be a text; "
            f"to learn chats, set data.messages={self.learned} in place of {instead}{kept}",
            code="messages-as-text",
        )


MOST_BUCKETS = 32
"""The maximum number of row lengths; each is a separate program to compile."""

_THREADS = 8
"""The number of tokenizing threads; tokenizers and readers release the GIL while they work."""


@dataclasses.dataclass(frozen=True, eq=False)
class StoredDocuments:
    """A subset of the documents of some files.

    Args:
        store: the tokens of all documents.
        numbers: the documents of this subset, `[N]`.
        digest: a digest of the files and of how they are tokenized.
        folder: the cache.
    """

    store: TokenStore
    numbers: np.ndarray
    digest: str
    folder: TokenCache

    def __len__(self) -> int:
        return len(self.numbers)

    def part(self, mask: np.ndarray) -> StoredDocuments:
        """Returns the documents that a mask `[N]` selects."""
        return dataclasses.replace(self, numbers=self.numbers[mask])

    def take(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Reads the tokens of a document."""
        return self.store.take(int(self.numbers[number]))

    def lengths(self) -> np.ndarray:
        """Returns the number of tokens of each document."""
        return self.store.lengths[self.numbers]

    def cached(self, name: str, make: Callable[[], list[np.ndarray]]) -> list[np.ndarray]:
        """Returns arrays computed from these documents, from the cache if possible."""
        return self.folder.cached(
            digest_of(name.encode(), self.digest.encode(), self.numbers.tobytes()), make
        )

    def checksum(self) -> int:
        """A checksum of the files, the selected records, and how they are tokenized."""
        return checksum(np.frombuffer(bytes.fromhex(self.digest), np.uint8), self.numbers)


@dataclasses.dataclass(frozen=True)
class JsonlSource(DocumentSource):
    """Files with a JSON object on every line; options as in `DocumentSource`.

    Files that end in `.gz`, `.xz`, `.bz2` or `.zst` are decompressed as they are read.

    Example:
        >>> JsonlSource(files=("chats.jsonl",), prompt="question", response="answer").validate()
    """

    suffix: ClassVar[str] = ".jsonl"

    def scan(self, path: Path, update: Callable[[bytes], None]) -> list[Span]:
        """Divides a file at line ends; a compressed file is one part, since it cannot be seeked."""
        if path.suffix in COMPRESSED:
            for part in parts_of(path):
                update(part)
            count = sum(1 for _, text in _unpacked_lines(path) if text.strip())
            return [(0, path.stat().st_size, count, 0)]
        spans: list[Span] = []
        start = line = 0
        pieces: list[bytes] = []

        def cut(last: bytes) -> None:
            nonlocal start, line
            lines = b"".join([*pieces, last]).split(b"\n")
            size = sum(map(len, lines)) + len(lines) - 1
            count = sum(1 for text in lines if text.strip())
            spans.append((start, start + size, count, line))
            start += size
            line += len(lines) - 1
            pieces.clear()

        for part in parts_of(path):
            update(part)
            if end := part.rfind(b"\n") + 1:
                cut(part[:end])
            pieces.append(part[end:])
        cut(b"")
        return spans

    def read(self, path: Path, span: Span) -> Iterator[Record]:
        """Reads the lines of a part; skips blank lines."""
        start, stop, _, line = span
        if path.suffix in COMPRESSED:
            lines: Iterable[tuple[int, bytes]] = _unpacked_lines(path)
        else:
            content = TextFile("", path, start, stop).read()
            lines = enumerate(content.split(b"\n"), start=line + 1)
        for number, text in lines:
            if text.strip():
                yield f"{path}:{number}", object_of(text, f"{path}:{number}")


class _ZstdFile(io.RawIOBase):
    """Decompresses a file of zstd frames.

    Unlike the reader of `zstandard`, it raises `EOFError` for a truncated file.
    """

    def __init__(self, file: IO[bytes]):
        self._file = file
        self._decompressor = require("zstandard", "zstd", "a file .zst").ZstdDecompressor()
        self._frame: Any = None
        self._packed = b""
        self._content = b""

    def readable(self) -> bool:
        """Returns True."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Decompresses as much as fits; returns 0 only at the end."""
        while not self._content:
            self._packed = self._packed or self._file.read(2**16)
            if not self._packed:
                if self._frame is not None:
                    raise EOFError("the file ends in the middle of a frame")
                return 0
            self._frame = self._frame or self._decompressor.decompressobj()
            self._content = self._frame.decompress(self._packed)
            self._packed = self._frame.unused_data
            if self._frame.eof:
                self._frame = None
        count = min(len(buffer), len(self._content))
        buffer[:count] = self._content[:count]
        self._content = self._content[count:]
        return count


def _unpack(path: Path, file: IO[bytes]) -> Any:
    """Opens a compressed file by the suffix of its name."""
    if path.suffix == ".gz":
        return gzip.open(file)
    if path.suffix == ".xz":
        return lzma.open(file)
    return bz2.open(file) if path.suffix == ".bz2" else _ZstdFile(file)


COMPRESSED = frozenset({".gz", ".xz", ".bz2", ".zst"})
"""The suffixes of compressed files."""

_MOST_LINE = 2**28
"""The maximum bytes of a line of a compressed file, which may unpack to more than memory."""


def _unpacked_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yields the lines of a compressed file, numbered from 1."""
    # Each library raises its own errors for corrupt bytes. Without O_NONBLOCK, opening a FIFO could
    # hang.
    advice = "write it again, or take it out of data.files"
    rewording = reworded(f"{path} cannot be unpacked", advice, of=Exception)
    with (
        rewording,
        open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as packed,
        _unpack(path, packed) as stream,
        io.BufferedReader(stream) as lines,
    ):
        number = 0
        while text := lines.readline(_MOST_LINE):
            number += 1
            if len(text) == _MOST_LINE:
                raise ValueError(f"line {number} has more than {_MOST_LINE} bytes")
            yield number, text


def object_of(text: bytes, origin: str) -> Mapping[str, Any]:
    """Parses a JSON object; raises `ConfigError` for anything else."""
    with reworded(f"{origin} is not valid JSON", "correct or remove it", of=MALFORMED):
        record = _parsed(text)
    if not isinstance(record, dict):
        raise ConfigError(
            f"{origin} is {record!r:.60}, which must be an object with fields; "
            'write {"text": ...}',
            code="record-not-an-object",
        )
    return record


def _parsed(text: bytes) -> Any:
    try:
        return json.loads(text)
    except (json.JSONDecodeError, UnicodeDecodeError):
        raise
    except ValueError:
        # Python does not convert a number of thousands of digits, but such a number is valid JSON.
        return json.loads(text, parse_int=_whole_number)


def _whole_number(text: str) -> int | float:
    try:
        return int(text)
    except ValueError:
        return float(text)


PART = 2**23
"""The number of bytes of a file that are read at a time."""


def parts_of(path: Path) -> Iterator[bytes]:
    """Yields the bytes of a file, 8 MiB at a time."""
    rewording = reworded(f"{path} cannot be read", "take it out of data.files")
    with rewording, open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
        while part := file.read(PART):
            yield part
