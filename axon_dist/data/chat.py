"""How a chat becomes one text: templates by name, and those of hubs, each in a separate process."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import select
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeAlias

from ..core.errors import MALFORMED, ConfigError, did_you_mean, require, reworded
from ..core.files import read_text
from ..core.typing import JsonDict

LEARNED = "assistant"
"""The role whose turns are learned."""

Message: TypeAlias = Mapping[str, Any]
"""`role` and `content`, both text."""

Pieces: TypeAlias = Sequence[tuple[str, bool]]
"""A text in pieces, each with whether it is learned."""


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

    @property
    def identity(self) -> str:
        """Other for templates that write other texts."""
        return f"{self.begin!r} {sorted(self.heads.items())} {self.tail!r}"

    def pieces(self, messages: Sequence[Message]) -> Pieces:
        """The text of a chat."""
        pieces: list[tuple[str, bool]] = []
        prompt = self.begin
        for message in messages:
            role, content = message["role"], message["content"] + self.tail
            if role not in self.heads:
                raise ValueError(
                    f"the role {role!r:.80}, which the template {self.name!r} does not have."
                    f"{did_you_mean(role[:80], self.heads)}"
                )
            prompt += self.heads[role]
            if role == LEARNED:
                pieces += [(prompt, False), (content, True)]
                prompt = ""
            else:
                prompt += content
        return [*pieces, (prompt, False)] if prompt else pieces


@dataclasses.dataclass(frozen=True, eq=False)
class Rendered:
    """A template of a hub's tokenizer, in Jinja.

    A turn of an assistant is learned from where the text that asks for an answer ends.

    Args:
        name: what people call it.
        source: the template.
        tokens: texts that it calls by name.
    """

    name: str
    source: str
    tokens: Mapping[str, str]

    @property
    def identity(self) -> str:
        """Other for templates that write other texts."""
        return f"{self.source} {sorted(self.tokens.items())}"

    @functools.cached_property
    def process(self) -> TemplateProcess:
        """What writes the text."""
        return TemplateProcess(self.source, self.tokens)

    def pieces(self, messages: Sequence[Message]) -> Pieces:
        """The text of a chat."""
        turns = [n for n, message in enumerate(messages) if message["role"] == LEARNED]
        prefixes = [(n + more, not more) for n in turns for more in (0, 1)]
        try:
            text, *ends = self.process.texts(messages, prefixes)
        except ValueError as error:
            raise ValueError(f"messages that its template refuses: {error}") from error
        pieces: list[tuple[str, bool]] = []
        end = 0
        for number, prompt_end, answer_end in zip(turns, ends[::2], ends[1::2], strict=True):
            if prompt_end is None or answer_end is None or not end <= prompt_end <= answer_end:
                raise ValueError(
                    f"message {number + 1}, which the template {self.name!r} writes otherwise "
                    "where more follows it, so that it is not known what of the text is the "
                    "answer; choose data.template among " + ", ".join(TEMPLATES)
                )
            pieces += [(text[end:prompt_end], False), (text[prompt_end:answer_end], True)]
            end = answer_end
        return [*pieces, (text[end:], False)] if end < len(text) else pieces


ChatTemplate: TypeAlias = Turns | Rendered
"""How messages become one text, of which the assistant's turns and their ends are learned."""

MOST_LETTERS = 2**24
"""The most letters of the text of a chat."""

_MEMORY, _SECONDS = 2**30, 5.0
"""Bytes that the process of a template may use, and seconds for one chat."""


class TemplateProcess:
    """A template in a separate process, because it is a program that is not trusted.

    Args:
        source: the template.
        tokens: texts that it calls by name.
    """

    def __init__(self, source: str, tokens: Mapping[str, str]):
        self._setup = source, tokens
        self._lock = threading.Lock()
        self._running: subprocess.Popen[bytes] | None = None

    def texts(self, messages: Sequence[Message], prefixes: Sequence[tuple[int, bool]]) -> list[Any]:
        """The text of some messages.

        Args:
            messages: those of a chat.
            prefixes: how many of the first, and whether an answer to them is asked for.

        Returns:
            The text, and for each prefix how many of its letters are the text of so many
            messages; None where that is no beginning of it.

        Raises:
            ValueError: saying in one line why it refuses them.
        """
        with self._lock:
            return self._answer(self._started(), (messages, prefixes))

    def start(self) -> None:
        """Raises `ValueError` unless it can be read."""
        with self._lock:
            self._started()

    def _started(self) -> subprocess.Popen[bytes]:
        if self._running is None:
            limits = [str(_MEMORY), str(_SECONDS), str(MOST_LETTERS)]
            self._running = subprocess.Popen(
                [sys.executable, "-P", str(Path(__file__).with_name("chat_process.py")), *limits],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env={key: os.environ[key] for key in _ENVIRONMENT if key in os.environ},
                cwd="/",
            )
            weakref.finalize(self, _end, self._running)
            self._answer(self._running, self._setup)
        return self._running

    def _answer(self, process: subprocess.Popen[bytes], question: Any) -> list[Any]:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(json.dumps(question).encode() + b"\n")
            process.stdin.flush()
            # The process ends itself after so many seconds of work; it may also wait.
            line = _line_of(process.stdout.fileno(), time.monotonic() + 4 * _SECONDS)
        except OSError:
            line = b""
        if not line.endswith(b"\n"):
            self._running = None
            _end(process)
            raise ValueError(
                f"it takes more than {_SECONDS:g} seconds or {_MEMORY / 2**30:g} GiB, or writes "
                f"more than {MOST_LETTERS} letters"
            )
        answer = json.loads(line)
        if isinstance(answer, str):
            raise ValueError(answer)
        return answer


_ENVIRONMENT = ("PATH", "PYTHONPATH", "PYTHONHOME", "LD_LIBRARY_PATH", "SYSTEMROOT")
"""What a process needs to find Python's libraries; a template sees no other variable."""


def _line_of(file: int, deadline: float) -> bytes:
    """A line of a pipe, or what there is of it where it ends, is late or too long."""
    line = bytearray()
    while not line.endswith(b"\n") and len(line) <= 8 * MOST_LETTERS:
        if not select.select([file], [], [], max(0, deadline - time.monotonic()))[0]:
            break
        part = os.read(file, 2**16)
        if not part:
            break
        line += part
    return bytes(line)


def _end(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(OSError), process:  # waits, and closes the pipes
        process.kill()


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
        parsed = _template_in(path) if path.is_file() else None
        if parsed is None:
            why = "has no chat_template" if path.is_file() else "is neither a template nor a file"
            raise ConfigError(
                f"data.template={template!r} {why}; name a file of Jinja, a "
                f"tokenizer_config.json, or one of {', '.join(TEMPLATES)}"
            )
        return parsed
    for name in _BESIDE if tokenizer is not None else ():
        path = Path(tokenizer or "").expanduser().parent / name
        if path.is_file() and (parsed := _template_in(path)) is not None:
            return parsed
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
    config = _config_in(path) if path.suffix == ".json" else {}
    source = config.get("chat_template")
    if path.suffix != ".json":
        source = read_text(path, f"the chat template {str(path)!r}")
    if isinstance(source, list):
        named = [one for one in source if isinstance(one, dict) and one.get("name") == "default"]
        source = named[-1].get("template") if named else None
    if not isinstance(source, str):
        return None
    beside = path.with_name("tokenizer_config.json")
    if not config and beside.is_file():
        config = _config_in(beside)
    other = f", or set data.template to one of {', '.join(TEMPLATES)}"
    require("jinja2", "tokenizers", f"the chat template in {str(path)!r}", other)
    template = Rendered(path.name, source, _special_tokens(config))
    what = f"the chat template in {str(path)!r} cannot be used"
    with reworded(what, f"correct it{other}", of=ValueError):
        template.process.start()
    return template


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """The tokens that templates call by name, such as `bos_token`."""

    def text(x):
        return x.get("content") if isinstance(x, dict) else x

    texts = {name: text(x) for name, x in config.items() if name.endswith("_token")}
    return {name: x for name, x in texts.items() if isinstance(x, str)}


def _config_in(path: Path) -> JsonDict:
    """A `tokenizer_config.json`, which is an object."""
    what = f"the config of a tokenizer {str(path)!r}"
    with reworded(f"cannot read {what}", "correct it", of=MALFORMED):
        config = json.loads(read_text(path, what))
    if not isinstance(config, dict):
        raise ConfigError(f"{what} is a {type(config).__name__} and must be an object; correct it")
    return config
