"""How the bytes of a file become token ids: as they are, or by a Hugging Face tokenizer."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol, TypeAlias

import numpy as np
from jax.typing import DTypeLike

from ..core.errors import ConfigError, did_you_mean
from ..core.files import as_path, kind_at, read_text

LEARNED = "assistant"
"""The role whose turns are learned."""

Message: TypeAlias = Mapping[str, Any]
"""`role` and `content`, both text."""

Pieces: TypeAlias = Sequence[tuple[str, bool]]
"""A text in pieces, each with whether it is learned."""


class ChatTemplate(Protocol):
    """How messages become one text."""

    @property
    def name(self) -> str:
        """What people call it."""
        ...

    def pieces(self, messages: Sequence[Message]) -> Pieces:
        """The text of a chat, of which the assistant's turns and their ends are learned.

        Raises:
            ValueError: saying what of the messages it cannot take.
        """
        ...


@dataclasses.dataclass(frozen=True)
class Turns:
    """A template that puts something in front of every turn and something behind it.

    Args:
        name: what people call it.
        begin: in front of the first turn.
        heads: in front of what a role says, by role.
        tail: behind it; that of an assistant is learned, for it ends an answer.

    Example:
        >>> TEMPLATES["plain"].pieces([{"role": "user", "content": "2 + 2?"},
        ...                            {"role": "assistant", "content": "4"}])
        [('User: 2 + 2?\\nAssistant: ', False), ('4\\n', True)]
    """

    name: str
    begin: str
    heads: Mapping[str, str]
    tail: str

    def pieces(self, messages: Sequence[Message]) -> Pieces:
        """The text of a chat."""
        pieces: list[tuple[str, bool]] = []
        given = self.begin
        for message in messages:
            role, said = message["role"], message["content"] + self.tail
            if role not in self.heads:
                raise ValueError(
                    f"the role {role!r}, which the template {self.name!r} does not have."
                    f"{did_you_mean(role, self.heads)}"
                )
            given += self.heads[role]
            if role == LEARNED:
                pieces += [(given, False), (said, True)]
                given = ""
            else:
                given += said
        return [*pieces, (given, False)] if given else pieces


@dataclasses.dataclass(frozen=True, eq=False)
class Rendered:
    """A template of a hub's tokenizer, in Jinja.

    What is learned of a turn is what it adds to the text that ends where an answer is asked for.

    Args:
        name: what people call it.
        render: (messages, whether an answer is asked for) -> text.
    """

    name: str
    render: Callable[[Sequence[Message], bool], str]

    def pieces(self, messages: Sequence[Message]) -> Pieces:
        """The text of a chat."""
        whole = self.render(messages, False)
        pieces: list[tuple[str, bool]] = []
        end = 0
        for number, message in enumerate(messages):
            if message["role"] != LEARNED:
                continue
            asked = self.render(messages[:number], True)
            said = self.render(messages[: number + 1], False)
            if not (whole.startswith(said) and said.startswith(asked) and len(asked) >= end):
                raise ValueError(
                    f"message {number + 1}, which the template {self.name!r} writes otherwise "
                    "where more follows it, so that nobody can tell what of the text is the "
                    "answer; choose data.template among " + ", ".join(TEMPLATES)
                )
            pieces += [(whole[end : len(asked)], False), (whole[len(asked) : len(said)], True)]
            end = len(said)
        return [*pieces, (whole[end:], False)] if end < len(whole) else pieces


_ROLES = ("system", "user", LEARNED)

TEMPLATES: MappingProxyType[str, Turns] = MappingProxyType(
    {
        "plain": Turns("plain", "", {role: f"{role.title()}: " for role in _ROLES}, "\n"),
        "chatml": Turns(
            "chatml",
            "",
            {role: f"<|im_start|>{role}\n" for role in (*_ROLES, "tool")},
            "<|im_end|>\n",
        ),
        "llama3": Turns(
            "llama3",
            "<|begin_of_text|>",
            {role: f"<|start_header_id|>{role}<|end_header_id|>\n\n" for role in _ROLES},
            "<|eot_id|>",
        ),
    }
)
"""By the name that `data.template` takes."""

_BESIDE = ("chat_template.jinja", "tokenizer_config.json")
"""Where a snapshot of a hub keeps the template of its tokenizer."""


def find_template(template: str | None, tokenizer: str | None) -> ChatTemplate:
    """The template that a name, a file or a tokenizer stands for.

    Args:
        template: a key of `TEMPLATES`, or a file of Jinja or a `tokenizer_config.json`; None takes
            the one beside the tokenizer, else `plain`.
        tokenizer: the path of a `tokenizer.json`, or None.

    Raises:
        ConfigError: when there is no such template, it cannot be read, or jinja2 is missing.
    """
    if template is not None and template in TEMPLATES:
        return TEMPLATES[template]
    if template is not None:
        path = Path(template).expanduser()
        found = _template_in(path) if path.is_file() else None
        if found is None:
            why = "has no chat_template" if path.is_file() else "is neither a template nor a file"
            raise ConfigError(
                f"data.template={template!r} {why}; name a file of Jinja, a "
                f"tokenizer_config.json, or one of {', '.join(TEMPLATES)}"
            )
        return found
    for name in _BESIDE if tokenizer is not None else ():
        path = Path(tokenizer or "").expanduser().parent / name
        if path.is_file() and (found := _template_in(path)) is not None:
            return found
    return TEMPLATES["plain"]


def check_messages(messages: Any) -> str | None:
    """What is wrong with the messages of a chat, in words, or None."""
    if not isinstance(messages, list) or not messages:
        return f"{messages!r:.60}, which must be a list of messages"
    for number, message in enumerate(messages, start=1):
        fields = message if isinstance(message, dict) else {}
        if not all(isinstance(fields.get(name), str) for name in ("role", "content")):
            return (
                f"{message!r:.60} as message {number}, which must have a text as role and content"
            )
    if all(message["role"] != LEARNED for message in messages):
        roles = ", ".join(dict.fromkeys(message["role"] for message in messages))
        return f"messages of {roles} alone, and none of an {LEARNED} to learn"
    return None


def _template_in(path: Path) -> Rendered | None:
    """The template of a file; None where a tokenizer's config has none."""
    try:
        if path.suffix == ".json":
            text, config = "", _config_in(path)
        else:
            text, config = read_text(path, f"the chat template {str(path)!r}"), {}
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"cannot read the chat template in {str(path)!r}: {error}") from error
    source = config.get("chat_template") if path.suffix == ".json" else text
    if isinstance(source, list):
        named = {one.get("name"): one.get("template") for one in source if isinstance(one, dict)}
        source = named.get("default")
    if not isinstance(source, str):
        return None
    beside = path.with_name("tokenizer_config.json")
    if not config and beside.is_file():
        config = _config_in(beside)
    return Rendered(path.name, _renderer(source, path, _special_tokens(config)))


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """The tokens that templates call by name, such as `bos_token`."""

    def text(x):
        return x.get("content") if isinstance(x, dict) else x

    texts = {name: text(x) for name, x in config.items() if name.endswith("_token")}
    return {name: x for name, x in texts.items() if isinstance(x, str)}


def _renderer(
    source: str, path: Path, tokens: Mapping[str, str]
) -> Callable[[Sequence[Message], bool], str]:
    try:
        importlib.import_module("jinja2")
        sandbox = importlib.import_module("jinja2.sandbox")
    except ImportError as error:
        raise ConfigError(
            f"the chat template in {str(path)!r} needs jinja2, which is not installed: pip install "
            f"'axon_dist[tokenizers]', or set data.template to one of {', '.join(TEMPLATES)}"
        ) from error
    # As the hub's own library sets it up; a template is a stranger's program, and kept in a box.
    box = sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    box.intercepted_binops = frozenset({"*", "**", "%"})
    compute = box.call_binop

    def compute_bounded(context: Any, operator: str, left: Any, right: Any) -> Any:
        _check_operands(operator, left, right)
        return compute(context, operator, left, right)

    box.call_binop = compute_bounded
    box.globals["raise_exception"] = _refuse
    try:
        template = box.from_string(source)
    except Exception as error:  # its compiler raises what the program it reads makes it
        raise ConfigError(f"the chat template in {str(path)!r} is no Jinja: {error}") from error

    def render(messages: Sequence[Message], asks: bool) -> str:
        given = {**tokens, "messages": list(messages), "add_generation_prompt": asks}
        try:
            return _bounded(template.generate(**given))
        except Exception as error:  # a template may raise anything, as 1 / 0 does
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            raise ValueError(f"messages that its template refuses: {reason:.400}") from error

    return render


_MOST_LETTERS = 2**24
"""Of what a template makes of a chat."""


def _config_in(path: Path) -> dict[str, Any]:
    """A `tokenizer_config.json`, which is an object."""
    what = f"the config of a tokenizer {str(path)!r}"
    try:
        config = json.loads(read_text(path, what))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"cannot read {what}: {error}; correct it") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{what} is a {type(config).__name__} and must be an object; correct it")
    return config


def _bounded(parts: Iterable[str]) -> str:
    made, letters = [], 0
    for part in parts:
        letters += len(part)
        if letters > _MOST_LETTERS:
            raise ValueError(f"it writes more than {_MOST_LETTERS} letters")
        made.append(part)
    return "".join(made)


def _check_operands(operator: str, left: Any, right: Any) -> None:
    """Refuses what would make a text, a list or a number without end."""
    if operator == "%" and isinstance(left, str):
        raise ValueError("it formats a text by %, which has no bound")
    sizes = [len(x) for x in (left, right) if isinstance(x, str | bytes | list | tuple)]
    counts = [abs(x) for x in (left, right) if isinstance(x, int)]
    if operator == "*" and sizes and counts and sizes[0] * counts[0] > _MOST_LETTERS:
        raise ValueError(f"it repeats {sizes[0]} letters or items {counts[0]} times")
    if operator == "**" and len(counts) == 2 and counts[0].bit_length() * counts[1] > 2**12:
        raise ValueError("it takes a number to a power that is out of range")


def _refuse(message: str) -> None:
    raise ValueError(message)


@dataclasses.dataclass(frozen=True)
class Tokenizer:
    """A function from the bytes of one document to token ids.

    Args:
        name: what people call it.
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
    """

    name: str
    vocab_size: int
    encode: Callable[[bytes], np.ndarray]
    prompt: Callable[[str], np.ndarray]
    decode: Callable[[np.ndarray], str]
    answer: Callable[[str, str], tuple[np.ndarray, int]]
    chat: Callable[[Pieces], tuple[np.ndarray, np.ndarray]]
    end: int | None = None


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
        prompt=lambda text: np.frombuffer(_whole(text).encode(), np.uint8),
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
        The tokenizer; special tokens are added as the file's own post-processor says.

    Raises:
        ConfigError: there is no such file, it is not a tokenizer, it has no such token, or the
            library is missing.
    """
    try:
        import tokenizers  # noqa: PLC0415  (an optional dependency)
    except ImportError as error:
        raise ConfigError(
            f"data.tokenizer={path!r} needs the tokenizers library, which is not installed: "
            "pip install 'axon_dist[tokenizers]', or leave it out to train on bytes."
        ) from error
    file = as_path(path, "data.tokenizer")
    if kind_at(file) != "a file":
        raise ConfigError(
            f"data.tokenizer={path!r} is not a file (looked from {Path.cwd()}): give the path of a "
            "tokenizer.json, or leave it out to train on bytes."
        )
    try:
        text = read_text(file, f"data.tokenizer={path!r}", most=_MOST_BYTES)
        model = tokenizers.Tokenizer.from_str(text)
    except ConfigError:
        raise
    except BaseException as error:
        # A panic of the library, which is written in Rust, is no Exception.
        if isinstance(error, (KeyboardInterrupt, SystemExit)):
            raise
        raise _unreadable(path, tokenizers, error) from error
    vocabulary = model.get_vocab()
    if not vocabulary:
        raise ConfigError(
            f"data.tokenizer={path!r} has an empty vocabulary: train it, or leave it out to train "
            "on bytes."
        )
    vocab_size = max(vocabulary.values()) + 1
    dtype = np.min_scalar_type(vocab_size - 1)
    known = min(model.get_vocab(with_added_tokens=False), key=len, default="")
    added = _end(model.token_to_id, end_token, path)
    behind = [*_behind(model.encode(known)), *added]

    def encode(content: bytes) -> np.ndarray:
        return np.array([*model.encode(content.decode()).ids, *added], dtype)

    def answer(prompt: str, text: str) -> tuple[np.ndarray, int]:
        encoded = model.encode(prompt + text)
        # Tokens that the tokenizer adds have no letters; what it adds behind is for the model to
        # learn, and a token on the border counts as prompt.
        before = [i for i, (a, b) in enumerate(encoded.offsets) if a < b and a < len(prompt)]
        return np.array([*encoded.ids, *added], dtype), before[-1] + 1 if before else 0

    return Tokenizer(
        f"tokens of {Path(path).name}",
        vocab_size,
        encode=encode,
        prompt=lambda text: np.array(_without_end(model.encode(_whole(text))), dtype),
        decode=lambda ids: model.decode(ids.tolist(), skip_special_tokens=False),
        answer=answer,
        chat=functools.partial(_tokens_of_chat, model, added, dtype),
        end=behind[0] if behind else None,
    )


def _tokens_of_chat(
    model: Any, added: tuple[int, ...], dtype: DTypeLike, pieces: Pieces
) -> tuple[np.ndarray, np.ndarray]:
    # A template says itself where a special token stands.
    encoded = model.encode("".join(text for text, _ in pieces), add_special_tokens=False)
    letters = np.concatenate([np.full(len(text), learned) for text, learned in pieces])
    is_learned = [bool(letters[a:b].all()) for a, b in encoded.offsets]
    ids = np.array([*encoded.ids, *added], dtype)
    return ids, np.array([*is_learned, *[pieces[-1][1] for _ in added]], bool)


def _whole(prompt: str) -> str:
    """A prompt, if it is a text: an argument that was not UTF-8 holds half letters."""
    try:
        prompt.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"the prompt {prompt!r:.80} is no text of UTF-8 (letter {error.start}); correct it"
        ) from error
    return prompt


def _bytes_of_chat(pieces: Pieces) -> tuple[np.ndarray, np.ndarray]:
    parts = [(np.frombuffer(text.encode(), np.uint8), learned) for text, learned in pieces]
    parts.append((np.zeros(1, np.uint8), pieces[-1][1]))
    is_learned = [np.full(len(part), learned) for part, learned in parts]
    return np.concatenate([part for part, _ in parts]), np.concatenate(is_learned)


_MOST_BYTES = 2**28
"""Bytes of a tokenizer.json."""


def _unreadable(path: str, tokenizers: Any, error: BaseException) -> ConfigError:
    return ConfigError(
        f"data.tokenizer={path!r} is not a tokenizer.json that tokenizers "
        f"{tokenizers.__version__} reads ({error}): save it with Tokenizer.save."
    )


def _behind(encoded: Any) -> list[int]:
    """The special tokens at the end of an encoded text."""
    pairs = list(zip(encoded.ids, encoded.special_tokens_mask, strict=True))
    stop = len(pairs)
    while stop and pairs[stop - 1][1]:
        stop -= 1
    return encoded.ids[stop:]


def _without_end(encoded: Any) -> list[int]:
    return encoded.ids[: len(encoded.ids) - len(_behind(encoded))]


def _end(
    token_to_id: Callable[[str], int | None], end_token: str | None, path: str
) -> tuple[int, ...]:
    if end_token is None:
        return ()
    token_id = token_to_id(end_token)
    if token_id is None:
        raise ConfigError(
            f"data.end_token={end_token!r} is not in the vocabulary of {path}: name a token that "
            "is, or leave it out."
        )
    return (token_id,)
