"""How the bytes of a file become token ids: as they are, or by a Hugging Face tokenizer."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from ..core.errors import ConfigError, require
from ..core.files import as_path, kind_at, read_text
from .chat import Pieces
from .store import digest_of


@dataclasses.dataclass(frozen=True)
class Tokenizer:
    """A function from the bytes of one document to token ids.

    Args:
        name: for messages.
        vocab_size: every id is below it.
        encode: maps the content of a file to a 1-D array of ids, in the smallest dtype that holds
            them all; raises UnicodeDecodeError if it needs UTF-8 and gets something else.
        prompt: maps the beginning of a document to a 1-D array of ids, without the end of one.
        decode: maps ids to text for people.
        answer: maps a prompt and what follows it to the ids of both together, and how many of them
            belong to the prompt.
        chat: maps a text in pieces, each with whether it is learned, to ids and which of them are,
            bool; the end of the document is learned where the last piece is.
        end: the id that ends a document; None where none does.
        digest: other for tokenizers that make other tokens.
    """

    name: str
    vocab_size: int
    encode: Callable[[bytes], np.ndarray]
    prompt: Callable[[str], np.ndarray]
    decode: Callable[[np.ndarray], str]
    answer: Callable[[str, str], tuple[np.ndarray, int]]
    chat: Callable[[Pieces], tuple[np.ndarray, np.ndarray]]
    end: int | None = None
    digest: str = "bytes"


def byte_tokenizer() -> Tokenizer:
    """Makes the tokenizer that takes every byte for a token and ends a document with a zero byte.

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
        decode=lambda ids: ids.astype(np.uint8).tobytes().decode(errors="replace"),
        answer=lambda prompt, text: (encode((prompt + text).encode()), len(prompt.encode())),
        chat=_bytes_of_chat,
        end=0,
    )


def load_tokenizer(path: str, end_token: str | None = None) -> Tokenizer:
    """Loads a `tokenizer.json` as Hugging Face `tokenizers` writes it.

    Args:
        path: of the `tokenizer.json`.
        end_token: a token put behind every document, such as `"<|endoftext|>"`.

    Returns:
        The tokenizer; special tokens are added as the post-processor of the file says.

    Raises:
        ConfigError: there is no such file, it is not a tokenizer, it has no such token, or the
            library is missing.
    """
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
    known = min(model.get_vocab(with_added_tokens=False), key=len, default="")
    added = () if end_token is None else (model.token_to_id(end_token),)
    if None in added:
        raise ConfigError(
            f"data.end_token={end_token!r} is not in the vocabulary of {path}: name a token that "
            "is, or leave it out."
        )
    last = encoded_by(known)
    behind = [*last.ids[len(last.ids) - _num_behind(last) :], *added]

    def encode(content: bytes) -> np.ndarray:
        return _ids(path, [*encoded_by(content.decode()).ids, *added], vocab_size)

    def prompt(text: str) -> np.ndarray:
        encoded = encoded_by(utf8(text, f"the prompt {text!r:.60}").decode())
        ids = encoded.ids[: len(encoded.ids) - _num_behind(encoded)]
        return _ids(path, ids, vocab_size)

    def answer(prompt: str, text: str) -> tuple[np.ndarray, int]:
        encoded = encoded_by(prompt + text)
        offsets = _encoded(path, exact, prompt + text, add_special_tokens=False).offsets
        # Tokens that the tokenizer adds at the end are learned, and a token across the border
        # counts as prompt.
        in_front = len(encoded.ids) - len(offsets) - _num_behind(encoded)
        before = [i for i, (a, _) in enumerate(offsets) if a < len(prompt)]
        ids = _ids(path, [*encoded.ids, *added], vocab_size)
        return ids, in_front + before[-1] + 1 if before else 0

    return Tokenizer(
        f"tokens of {Path(path).name}",
        vocab_size,
        encode=encode,
        prompt=prompt,
        decode=lambda ids: model.decode(ids.tolist(), skip_special_tokens=False),
        answer=answer,
        chat=functools.partial(_tokens_of_chat, path, exact, added, vocab_size),
        end=behind[0] if behind else None,
        digest=digest_of(text.encode(), repr(end_token).encode(), _OFFSETS),
    )


def _read(path: str) -> tuple[str, Any]:
    """A `tokenizer.json`, and the tokenizer that it is."""
    other = ", or leave it out to train on bytes"
    tokenizers = require("tokenizers", "tokenizers", f"data.tokenizer={path!r}", other)
    file = as_path(path, "data.tokenizer")
    if kind_at(file) != "a file":
        raise ConfigError(
            f"data.tokenizer={path!r} is not a file (looked from {Path.cwd()}): give the path of a "
            "tokenizer.json, or leave it out to train on bytes."
        )
    try:
        text = read_text(file, f"data.tokenizer={path!r}", most=_MOST_BYTES)
        model = tokenizers.Tokenizer.from_str(text)
        # Truncation and padding would apply to documents, too.
        model.no_truncation()
        model.no_padding()
        state = model.normalizer.__getstate__() if model.normalizer else b"{}"
        if (growth := _growth(json.loads(state))) > _MOST_GROWTH:
            raise ValueError(f"its normalizer can make {growth} letters of one")
        return text, model
    except (ConfigError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        # A panic of the library, which is written in Rust, is no Exception.
        raise ConfigError(
            f"data.tokenizer={path!r} is not a tokenizer.json that tokenizers "
            f"{tokenizers.__version__} reads ({error!s:.200}): save it with Tokenizer.save."
        ) from error


_MOST_GROWTH = 64


def _growth(normalizer: Any) -> int:
    """How many characters a normalizer can make of one, where it replaces texts by others."""
    parts = normalizer.get("normalizers", ())
    length = max(1, len(normalizer.get("content", "")))
    return length * math.prod(map(_growth, parts))


def _encoded(path: str, model: Any, text: str, **options: bool) -> Any:
    """A text as the library encodes it, which may fail by what is in its file."""
    try:
        return model.encode(text, **options)
    except BaseException as error:
        # A panic of the library, which is written in Rust, is no Exception.
        if isinstance(error, (KeyboardInterrupt, SystemExit)):
            raise
        raise ConfigError(
            f"data.tokenizer={path!r} cannot encode {text!r:.60} ({error!s:.200}): give it a "
            "token for what it does not know, or train it on such texts"
        ) from error


def _ids(path: str, ids: list[int], vocab_size: int) -> np.ndarray:
    """Ids in the smallest dtype that holds those of the vocabulary; others are refused."""
    if (most := max(ids, default=0)) >= vocab_size:
        raise ConfigError(
            f"data.tokenizer={path!r} adds the token {most}, and its vocabulary ends at "
            f"{vocab_size - 1}; correct its post_processor"
        )
    return np.array(ids, np.min_scalar_type(vocab_size - 1))


def _tokens_of_chat(
    path: str, exact: Any, added: tuple[int, ...], vocab_size: int, pieces: Pieces
) -> tuple[np.ndarray, np.ndarray]:
    """The tokens of a chat, and which of them hold letters that are learned and no others."""
    # A template states where it puts each special token.
    text = "".join(text for text, _ in pieces)
    encoded = _encoded(path, exact, text, add_special_tokens=False)
    letters = np.concatenate([np.full(len(text), learned) for text, learned in pieces])
    is_learned = [_holds(letters, start, end) for start, end in encoded.offsets]
    ids = _ids(path, [*encoded.ids, *added], vocab_size)
    return ids, np.array([*is_learned, *[pieces[-1][1] for _ in added]], bool)


def _holds(letters: np.ndarray, start: int, end: int) -> bool:
    """Whether all letters of a token are learned; one without letters belongs to the next letter.

    A normalizer may put a token in front of a text that is in none of its letters.
    """
    if start == end:
        start = min(start, len(letters) - 1)
        end = start + 1
    return bool(letters[start:end].all())


def _with_exact_offsets(text: str, model: Any) -> Any:
    """The same tokenizer, whose tokens have all of their letters.

    The post-processor of byte-level tokenizers trims blanks off the offsets of tokens
    (`trim_offsets`, which is the default): a token that is a blank has no letter then, and cannot
    be told from others. Without special tokens a post-processor does nothing else.
    """
    if '"trim_offsets":true' not in "".join(text.split()):
        return model
    exact = type(model).from_str(text)
    exact.no_truncation()
    exact.no_padding()
    exact.post_processor = None
    return exact


def utf8(text: str, origin: str) -> bytes:
    """A text as bytes; one of JSON may hold lone surrogates."""
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"{origin} holds {text[error.start]!a}, half a letter that UTF-8 has not; correct or "
            "remove it"
        ) from error


def _bytes_of_chat(pieces: Pieces) -> tuple[np.ndarray, np.ndarray]:
    parts = [(np.frombuffer(text.encode(), np.uint8), learned) for text, learned in pieces]
    parts.append((np.zeros(1, np.uint8), pieces[-1][1]))
    is_learned = [np.full(len(part), learned) for part, learned in parts]
    return np.concatenate([part for part, _ in parts]), np.concatenate(is_learned)


_MOST_BYTES = 2**28
"""Bytes of a tokenizer.json."""

_OFFSETS = b"untrimmed"
"""Other where the tokens of a text are learned by another rule, so that caches are made anew."""


def _num_behind(encoded: Any) -> int:
    """How many special tokens are at the end of an encoded text."""
    return len([*itertools.takewhile(bool, reversed(encoded.special_tokens_mask))])
