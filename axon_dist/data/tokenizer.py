"""Turns bytes into token ids: directly, by a Hugging Face tokenizer, or by SentencePiece."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import heapq
import itertools
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ..core.errors import ConfigError, require, reworded
from ..core.files import as_path, kind_at, read_bytes, read_text
from .chat import Pieces
from .store import digest_of


@dataclasses.dataclass(frozen=True)
class Tokenizer:
    """A function from the bytes of one document to token ids.

    Args:
        name: the name in messages.
        vocab_size: every id is below it.
        encode: maps the content of a file to a 1-D array of ids, in the smallest dtype that fits
            all ids; raises UnicodeDecodeError if it needs UTF-8 and the content is not UTF-8.
        prompt: maps the beginning of a document to a 1-D array of ids, without an end token.
        decode: maps ids to readable text; an id that is no token becomes U+FFFD.
        answer: maps a prompt and a response to the ids of both together, and the number of ids
            that belong to the prompt.
        chat: maps `Pieces` to ids and a bool array that is True for learned ids; the end token is
            learned if the last piece is.
        end: the id that ends a document; None if there is none.
        added: ids that `encode`, `answer` and `chat` append to every document or chat.
        digest: differs between tokenizers that make different tokens.
        special: the texts of tokens that stand for themselves, such as `<|im_end|>`, by id.

    Example:
        >>> tokenizer = byte_tokenizer()
        >>> tokenizer.decode(tokenizer.prompt("axon")), tokenizer.vocab_size, tokenizer.end
        ('axon', 256, 0)
    """

    name: str
    vocab_size: int
    encode: Callable[[bytes], np.ndarray]
    prompt: Callable[[str], np.ndarray]
    decode: Callable[[np.ndarray], str]
    answer: Callable[[str, str], tuple[np.ndarray, int]]
    chat: Callable[[Pieces], tuple[np.ndarray, np.ndarray]]
    end: int | None = None
    added: tuple[int, ...] = ()
    digest: str = "bytes"
    special: Mapping[int, str] = dataclasses.field(default_factory=dict, hash=False)


def byte_tokenizer() -> Tokenizer:
    """Returns the tokenizer in which every byte is a token and a zero byte ends a document.

    Example:
        >>> byte_tokenizer().encode(b"axon").tolist()
        [97, 120, 111, 110, 0]
    """

    def encode(content):
        return np.frombuffer(content + b"\0", np.uint8)

    return Tokenizer(
        "bytes",
        256,
        encode=encode,
        prompt=lambda text: np.frombuffer(utf8(text, f"the prompt {text!r:.60}"), np.uint8),
        decode=functools.partial(_decoded, _text_of_bytes, range(256).__contains__),
        answer=lambda prompt, text: (encode((prompt + text).encode()), len(prompt.encode())),
        chat=_bytes_of_chat,
        end=0,
        added=(0,),
    )


def _text_of_bytes(ids: list[int]) -> str:
    return bytes(ids).decode(errors="replace")


def _decoded(decode: Callable[[list[int]], str], knows: Callable[[int], bool], ids: Any) -> str:
    """Decodes ids; shows each id that is no token as U+FFFD.

    A model whose vocabulary is padded has such ids. The libraries leave them out or raise.
    """
    runs = itertools.groupby(ids.tolist(), knows)
    shown = (decode([*run]) if known else "\ufffd" * len([*run]) for known, run in runs)
    return "".join(shown)


def load_tokenizer(path: str, end_token: str | None = None) -> Tokenizer:
    """Loads a `tokenizer.json` of Hugging Face `tokenizers`, or a `.model` of SentencePiece.

    Args:
        path: the path of the `tokenizer.json`, or of a file that ends in `.model`.
        end_token: a token appended to every document, such as `"<|endoftext|>"`.

    Returns:
        The tokenizer. The post-processor of a `tokenizer.json` adds special tokens; SentencePiece
        adds none. In a chat, the control symbols of a `.model`, such as `</s>`, become their own
        tokens, and each text between two of them is encoded separately.

    Raises:
        ConfigError: there is no such file, it is not a tokenizer, it has no such token, or the
            library is missing.
    """
    if path.endswith(_SENTENCEPIECE):
        return _load_sentencepiece(path, end_token)
    text, model = _read(path)
    vocabulary = model.get_vocab()
    if not vocabulary:
        raise ConfigError(
            f"data.tokenizer={path!r} has an empty vocabulary: train it, or leave it out to train "
            "on bytes."
        )
    vocab_size = max(vocabulary.values()) + 1
    encoded_by = functools.partial(_encoded, path, model)
    exact = _with_exact_offsets(text, model)
    added = () if end_token is None else (model.token_to_id(end_token),)
    if None in added:
        raise ConfigError(
            f"data.end_token={end_token!r} is not in the vocabulary of {path}: name a token that "
            "is, or leave it out."
        )
    appended = _appended(model, encoded_by)
    suffix = [*appended, *added]

    def num_suffix(encoded: Any) -> int:
        # In a text without tokens of its own, the special tokens before it would count, too.
        return min(_num_suffix(encoded), len(appended))

    def encode(content: bytes) -> np.ndarray:
        return _ids(path, [*encoded_by(content.decode()).ids, *added], vocab_size)

    def prompt(text: str) -> np.ndarray:
        encoded = encoded_by(utf8(text, f"the prompt {text!r:.60}").decode())
        ids = encoded.ids[: len(encoded.ids) - num_suffix(encoded)]
        return _ids(path, ids, vocab_size)

    def answer(prompt: str, text: str) -> tuple[np.ndarray, int]:
        encoded = encoded_by(prompt + text)
        offsets = _encoded(path, exact, prompt + text, add_special_tokens=False).offsets
        # Special tokens at the end are learned. A token that spans prompt and response counts as
        # prompt.
        num_prefix = len(encoded.ids) - len(offsets) - num_suffix(encoded)
        before = [i for i, (a, _) in enumerate(offsets) if a < len(prompt)]
        ids = _ids(path, [*encoded.ids, *added], vocab_size)
        return ids, num_prefix + before[-1] + 1 if before else 0

    return Tokenizer(
        f"tokens of {Path(path).name}",
        vocab_size,
        encode=encode,
        prompt=prompt,
        decode=functools.partial(
            _decoded,
            functools.partial(model.decode, skip_special_tokens=False),
            lambda token: 0 <= token < vocab_size and model.id_to_token(token) is not None,
        ),
        answer=answer,
        chat=functools.partial(_tokens_of_chat, path, exact, added, vocab_size),
        end=suffix[0] if suffix else None,
        added=added,
        digest=digest_of(text.encode(), repr(end_token).encode(), _OFFSETS),
        special={i: token.content for i, token in model.get_added_tokens_decoder().items()},
    )


_SENTENCEPIECE = ".model"


def _load_sentencepiece(path: str, end_token: str | None) -> Tokenizer:
    content, model = _read_sentencepiece(path)
    vocab_size = model.get_piece_size()
    controls: dict[str, int] = {
        model.id_to_piece(i): i for i in range(vocab_size) if model.is_control(i)
    }
    names = sorted(controls, key=len, reverse=True)
    symbol = re.compile("|".join(["(?!)", *map(re.escape, names)]))
    added = () if end_token is None else (_end_piece(path, model, end_token, names),)

    def spans(text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Encodes a text; returns ids, and start and end of each in the text."""
        found = model.encode(text, return_type="offset_mapping")
        return found["ids"], found["offsets"]

    def encode(content: bytes) -> np.ndarray:
        return _ids(path, [*model.encode(content.decode(), return_type=int), *added], vocab_size)

    def prompt(text: str) -> np.ndarray:
        text = utf8(text, f"the prompt {text!r:.60}").decode()
        return _ids(path, model.encode(text, return_type=int), vocab_size)

    def answer(prompt: str, text: str) -> tuple[np.ndarray, int]:
        ids, offsets = spans(prompt + text)
        # A token that spans prompt and response counts as prompt.
        before = [i for i, (start, _) in enumerate(offsets) if start < len(prompt)]
        return _ids(path, [*ids, *added], vocab_size), before[-1] + 1 if before else 0

    def chat(pieces: Pieces) -> tuple[np.ndarray, np.ndarray]:
        text = "".join(text for text, _ in pieces)
        letters = np.concatenate([np.full(len(text), learned) for text, learned in pieces])
        ids: list[int] = []
        is_learned: list[bool] = []
        begin = 0
        for match in [*symbol.finditer(text), None]:
            stop = match.start() if match else len(text)
            found, offsets = spans(text[begin:stop])
            ids += found
            is_learned += [_all_learned(letters, begin + a, begin + b) for a, b in offsets]
            if match:
                ids.append(controls[match.group()])
                is_learned.append(_all_learned(letters, *match.span()))
                begin = match.end()
        is_learned += [pieces[-1][1] for _ in added]
        return _ids(path, [*ids, *added], vocab_size), np.array(is_learned, bool)

    return Tokenizer(
        f"tokens of {Path(path).name}",
        vocab_size,
        encode=encode,
        prompt=prompt,
        decode=functools.partial(_decoded, model.decode, range(vocab_size).__contains__),
        answer=answer,
        chat=chat,
        end=added[0] if added else None,
        added=added,
        digest=digest_of(content, repr(end_token).encode(), b"sentencepiece"),
        special={i: name for name, i in controls.items()},
    )


def _end_piece(path: str, model: Any, end_token: str, names: list[str]) -> int:
    """Returns the id of `end_token`; raises if it is no piece of the model."""
    end = model.piece_to_id(end_token)
    # `piece_to_id` returns the unknown piece for a token that the model lacks.
    if model.id_to_piece(end) != end_token:
        raise ConfigError(
            f"data.end_token={end_token!r} is not in the vocabulary of {path}: name a token that "
            f"is, such as {', '.join(names[:3]) or 'one of its pieces'}, or leave it out."
        )
    return end


def _read_sentencepiece(path: str) -> tuple[bytes, Any]:
    """Reads a `.model`; returns its bytes and the processor."""
    other = ", or leave it out to train on bytes"
    library = require("sentencepiece", "sentencepiece", f"data.tokenizer={path!r}", other)
    content = read_bytes(_file_at(path), f"data.tokenizer={path!r}", most=_MOST_BYTES)
    processor = library.SentencePieceProcessor()
    advice = "write it with SentencePieceTrainer, or name a tokenizer.json"
    what = f"data.tokenizer={path!r} is not a model that sentencepiece can read"
    with reworded(what, advice, of=Exception):
        processor.LoadFromSerializedProto(content)
        if not processor.get_piece_size():
            raise ValueError("it has no pieces")
    return content, processor


def _file_at(path: str) -> Path:
    """Returns the path of a tokenizer's file; raises if there is none."""
    file = as_path(path, "data.tokenizer")
    if kind_at(file) != "a file":
        raise ConfigError(
            f"data.tokenizer={path!r} is not a file (looked from {Path.cwd()}): give the path of a "
            "tokenizer.json or a SentencePiece .model, or leave it out to train on bytes."
        )
    return file


def _read(path: str) -> tuple[str, Any]:
    """Reads a `tokenizer.json`; returns its text and the tokenizer."""
    other = ", or leave it out to train on bytes"
    tokenizers = require("tokenizers", "tokenizers", f"data.tokenizer={path!r}", other)
    file = _file_at(path)
    try:
        text = read_text(file, f"data.tokenizer={path!r}", most=_MOST_BYTES)
        model = tokenizers.Tokenizer.from_str(text)
        # Truncation and padding of the file would change documents.
        model.no_truncation()
        model.no_padding()
        state = model.normalizer.__getstate__() if model.normalizer else b"{}"
        if (growth := _growth(json.loads(state))) > _MOST_GROWTH:
            raise ValueError(f"its normalizer can turn one character into {growth}")
        return text, model
    except (ConfigError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        # A panic of the library, which is written in Rust, is not an `Exception`.
        raise ConfigError(
            f"data.tokenizer={path!r} is not a tokenizer.json that tokenizers "
            f"{tokenizers.__version__} can read ({error!s:.200}): save it with Tokenizer.save.",
            code="not-a-tokenizer",
        ) from error


_MOST_GROWTH = 64


def _growth(normalizer: Any) -> int:
    """Returns the most characters that a normalizer's replacements make of one character."""
    parts = normalizer.get("normalizers", ())
    length = max(1, len(normalizer.get("content", "")))
    return length * math.prod(map(_growth, parts))


def _encoded(path: str, model: Any, text: str, **options: bool) -> Any:
    """Encodes a text; a faulty tokenizer file may make the library fail here."""
    try:
        return model.encode(text, **options)
    except BaseException as error:
        # A panic of the library, which is written in Rust, is not an `Exception`.
        if isinstance(error, (KeyboardInterrupt, SystemExit)):
            raise
        raise ConfigError(
            f"data.tokenizer={path!r} cannot encode {text!r:.60} ({error!s:.200}): give it an "
            "unknown token, or train it on such texts",
            code="cannot-encode",
        ) from error


def _ids(path: str, ids: list[int], vocab_size: int) -> np.ndarray:
    """Returns ids in the smallest dtype for the vocabulary; raises for ids outside it."""
    if (most := max(ids, default=0)) >= vocab_size:
        raise ConfigError(
            f"data.tokenizer={path!r} adds the token {most}, but its vocabulary ends at "
            f"{vocab_size - 1}; correct its post_processor",
            code="token-beyond-vocabulary",
        )
    return np.array(ids, np.min_scalar_type(vocab_size - 1))


def _tokens_of_chat(
    path: str, exact: Any, added: tuple[int, ...], vocab_size: int, pieces: Pieces
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the tokens of a chat, and which of them have only learned characters."""
    # `add_special_tokens=False`: the template already writes each special token.
    text = "".join(text for text, _ in pieces)
    encoded = _encoded(path, exact, text, add_special_tokens=False)
    letters = np.concatenate([np.full(len(text), learned) for text, learned in pieces])
    is_learned = [_all_learned(letters, start, end) for start, end in encoded.offsets]
    ids = _ids(path, [*encoded.ids, *added], vocab_size)
    return ids, np.array([*is_learned, *[pieces[-1][1] for _ in added]], bool)


def _all_learned(letters: np.ndarray, start: int, end: int) -> bool:
    """Whether all characters of a token are learned.

    A normalizer may add a token before a text, which covers no character. It counts as the next
    character.
    """
    if start == end:
        start = min(start, len(letters) - 1)
        end = start + 1
    return bool(letters[start:end].all())


def _with_exact_offsets(text: str, model: Any) -> Any:
    """Returns the same tokenizer with offsets that cover all characters of a token.

    The post-processor of byte-level tokenizers trims spaces off the offsets of tokens
    (`trim_offsets`, the default). A token that is only a space then has empty offsets. Without
    special tokens, a post-processor does nothing else, so it is removed.
    """
    if '"trim_offsets":true' not in "".join(text.split()):
        return model
    exact = type(model).from_str(text)
    exact.no_truncation()
    exact.no_padding()
    exact.post_processor = None
    return exact


def utf8(text: str, origin: str) -> bytes:
    """Encodes a text as UTF-8; raises for lone surrogates, which JSON can contain."""
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"{origin} has {text[error.start]!a}, a lone surrogate, which UTF-8 cannot encode; "
            "correct or remove it",
            code="lone-surrogate",
        ) from error


def _bytes_of_chat(pieces: Pieces) -> tuple[np.ndarray, np.ndarray]:
    parts = [(np.frombuffer(text.encode(), np.uint8), learned) for text, learned in pieces]
    parts.append((np.zeros(1, np.uint8), pieces[-1][1]))
    is_learned = [np.full(len(part), learned) for part, learned in parts]
    return np.concatenate([part for part, _ in parts]), np.concatenate(is_learned)


_MOST_BYTES = 2**28
"""The most bytes of a tokenizer.json."""

_OFFSETS = b"untrimmed"
"""Part of a tokenizer's digest. Change it with the rule for learned tokens: caches are then made
again."""


def _appended(model: Any, encoded_by: Callable[[str], Any]) -> list[int]:
    """Returns the special tokens that the post-processor appends to any text.

    Encodes tokens of the vocabulary, the shortest first, until one keeps an id of its own: a
    normalizer may remove a token, such as an accent, and then only special tokens are left.
    """
    plain = model.get_vocab(with_added_tokens=False)
    others = model.get_vocab().keys() - plain.keys()
    # By length and letters: the order of a vocabulary differs between processes.
    ordered = (*_shortest(plain), *_shortest(others))
    for token in ordered:
        with contextlib.suppress(ConfigError):
            encoded = encoded_by(token)
            if not all(encoded.special_tokens_mask):
                return encoded.ids[len(encoded.ids) - _num_suffix(encoded) :]
    return []


_TRIED = 256
"""How many tokens are encoded at most to find the special tokens around a text."""


def _shortest(tokens: Iterable[str]) -> list[str]:
    return heapq.nsmallest(_TRIED, tokens, key=lambda token: (len(token), token))


def _num_suffix(encoded: Any) -> int:
    """Counts the special tokens at the end of an encoded text, which has tokens of its own."""
    return len([*itertools.takewhile(bool, reversed(encoded.special_tokens_mask))])
