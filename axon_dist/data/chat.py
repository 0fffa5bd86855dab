"""Chat templates: built-in ones, and Jinja templates from the Hugging Face hub.

Jinja templates are rendered in a separate process. The text is byte for byte that of
`transformers.apply_chat_template`. A record with a field that the template does not write is an
error; nothing is dropped silently.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import json
import os
import re
import select
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

from ..core.errors import MALFORMED, ConfigError, did_you_mean, require, reworded
from ..core.files import as_path, read_text
from ..core.typing import JsonDict

LEARNED = "assistant"
"""The role whose turns are learned."""

Message: TypeAlias = Mapping[str, Any]
"""`role`, a string; `content`, a string or a list of parts; and other template fields."""

Pieces: TypeAlias = Sequence[tuple[str, bool]]
"""A text in pieces, each with a flag that says whether the model learns it."""


WRITTEN_FIELDS = (
    *("tool_calls", "function_call", "tool_responses", "tool_plan"),
    *("reasoning_content", "reasoning", "thinking", "refusal"),
    *("images", "videos", "audio"),
)
"""Fields of a message that a model should see."""

WEIGHTS = ("weight", "train")
"""Fields of a message that say whether it is learned; templates do not see them."""

OPTIONAL_FIELDS = ("tools", "documents", "chat_template_kwargs", "functions")
"""Fields of a record, other than its messages, that are passed to a template or rejected."""


@dataclasses.dataclass(frozen=True)
class Conversation:
    """The messages of a record, and the other inputs of a template.

    Args:
        messages: in their order.
        learned: whether each is learned.
        tools: descriptions of functions that the model may call, as JSON schemas; None for none.
        documents: texts to answer from; None for none.
        options: further variables of the template, such as `enable_thinking`.
    """

    messages: Sequence[Message]
    learned: Sequence[bool]
    tools: Sequence[Any] | None = None
    documents: Sequence[Any] | None = None
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(cls, messages: Sequence[Message]) -> Conversation:
        """Makes a conversation from messages only; the assistant's messages are learned."""
        return cls(messages, [message["role"] == LEARNED for message in messages])

    def validate(self) -> None:
        """Raises `ValueError` if no message is learned."""
        if not any(self.learned):
            roles = ", ".join(dict.fromkeys(message["role"] for message in self.messages))
            if any(message["role"] == LEARNED for message in self.messages):
                raise ValueError(f"messages of {roles}, whose weights exclude all from learning")
            raise ValueError(f"only messages of {roles}, and none of an {LEARNED} to learn")

    def to_json(self) -> JsonDict:
        """Returns the JSON object that is sent to the template process."""
        return {
            "messages": list(self.messages),
            "tools": self.tools,
            "documents": self.documents,
            "options": dict(self.options),
        }


def parse_conversation(record: Mapping[str, Any], field: str) -> Conversation:
    """Reads the chat of a record.

    Args:
        record: with messages, and perhaps `tools`, `documents` and `chat_template_kwargs`.
        field: the field that holds the messages.

    Raises:
        ValueError: when the chat is malformed; the message describes what the record has instead.
    """
    messages = record[field]
    if not isinstance(messages, list) or not messages:
        raise ValueError(f"{messages!r:.60}, which must be a list of messages")
    for number, message in enumerate(messages, start=1):
        _check_message(message, number)
    learned = [_is_learned(message, number) for number, message in enumerate(messages, start=1)]
    shown = [{k: x for k, x in message.items() if k not in WEIGHTS} for message in messages]
    options = record.get("chat_template_kwargs") or {}
    if not isinstance(options, Mapping):
        raise ValueError(f"{options!r:.60} as chat_template_kwargs, which must be an object")
    if functions := record.get("functions"):
        raise ValueError(
            f"{functions!r:.60} as functions, which no template reads; write them as tools: "
            '[{"type": "function", "function": ...}]'
        )
    documents = record.get("documents") or None
    are_documents = isinstance(documents, list) and all(isinstance(x, dict) for x in documents)
    if documents is not None and not are_documents:
        raise ValueError(f"{documents!r:.60} as documents, which must be a list of objects")
    conversation = Conversation(shown, learned, _tools(record.get("tools")), documents, options)
    conversation.validate()
    return conversation


def after_prompt(prompt: Any, messages: Any) -> list[Any]:
    """Returns the messages of a prompt, none of them to be learned, and those after it.

    Raises:
        ValueError: when one of both is not a list.
    """
    for part in (prompt, messages):
        if not isinstance(part, list):
            raise ValueError(f"{part!r:.60}, which must be a list of messages")
    shown = [{**x, "weight": 0} if isinstance(x, dict) else x for x in prompt]
    return [*shown, *messages]


def _tools(tools: Any) -> list[Any] | None:
    """Returns a list of schemas; parses the JSON string that tables often store instead."""
    parsed = tools
    if isinstance(tools, str):
        with contextlib.suppress(ValueError):
            parsed = json.loads(tools) if tools.strip() else None
    if parsed is None:
        return None
    if not isinstance(parsed, list) or not all(isinstance(x, dict) for x in parsed):
        raise ValueError(f"{tools!r:.60} as tools, which must be a list of JSON schemas")
    return parsed


def _check_message(message: Any, number: int) -> None:
    fields = message if isinstance(message, dict) else {}
    content = fields.get("content")
    if isinstance(content, list) and isinstance(fields.get("role"), str):
        for part in content:
            is_text = isinstance(part, dict) and isinstance(part.get("text"), str)
            if not is_text or part.get("type", "text") != "text":
                raise ValueError(
                    f"{part!r:.60} as a part of message {number}, which must be a text: "
                    '{"type": "text", "text": ...}'
                )
        return
    calls = fields.get("role") == LEARNED and bool(fields.get("tool_calls"))
    has_content = isinstance(content, str) or (content is None and calls)
    if not has_content or not isinstance(fields.get("role"), str):
        raise ValueError(
            f"{message!r:.60} as message {number}, whose role and content must both be texts"
        )


def _is_learned(message: Message, number: int) -> bool:
    """Whether a message is learned, by its role and its weight."""
    is_assistant = message["role"] == LEARNED
    for name in WEIGHTS:
        weight = message.get(name)
        if weight is None:
            continue
        if weight not in (0, 1):
            raise ValueError(f"{weight!r:.40} as {name} of message {number}, which must be 0 or 1")
        if weight and not is_assistant:
            raise ValueError(
                f"{weight!r} as {name} of message {number}, of {message['role']!r:.40}; only "
                f"messages of an {LEARNED} can be learned"
            )
        if not weight:
            return False
    return is_assistant


def content_text(message: Message) -> str:
    """Returns the text of a message; parts are concatenated."""
    content = message.get("content")
    if isinstance(content, str):
        return content
    return "".join(part["text"] for part in content or ())


@dataclasses.dataclass(frozen=True)
class Turns:
    """A template that puts a header before every turn and an end marker after it.

    Args:
        name: the name of the template.
        begin: the text before the first turn.
        heads: the header of a turn, by role.
        tail: the end of a turn; after an assistant's turn it is learned, because it ends an answer.

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
        """A string that differs between templates that write different texts."""
        return f"{self.begin!r} {sorted(self.heads.items())} {self.tail!r}"

    def pieces(self, chat: Conversation | Sequence[Message]) -> Pieces:
        """Returns the text of a chat.

        Args:
            chat: the chat of a record, which must be written completely; or messages alone.

        Raises:
            ValueError: naming the part of the chat that this template does not write.
        """
        if isinstance(chat, Conversation):
            self._check_all_is_written(chat)
        else:
            chat = Conversation.of(chat)
        pieces: list[tuple[str, bool]] = []
        prompt = self.begin
        for message, is_learned in zip(chat.messages, chat.learned, strict=True):
            role = message["role"]
            if role not in self.heads:
                raise ValueError(
                    f"the role {role!r:.80}, which the template {self.name!r} does not have."
                    f"{did_you_mean(role[:80], self.heads)}"
                )
            content = content_text(message) + self.tail
            prompt += self.heads[role]
            if is_learned:
                pieces += [(prompt, False), (content, True)]
                prompt = ""
            else:
                prompt += content
        return [*pieces, (prompt, False)] if prompt else pieces

    def _check_all_is_written(self, chat: Conversation) -> None:
        for number, message in enumerate(chat.messages, start=1):
            for field in WRITTEN_FIELDS:
                if message.get(field):
                    raise ValueError(_not_written(f"{field} in message {number}", self.name))
        others = {
            "tools": chat.tools, "documents": chat.documents, "chat_template_kwargs": chat.options
        }  # fmt: skip
        for field, value in others.items():
            if value:
                raise ValueError(_not_written(field, self.name))


def _not_written(what: str, template: str) -> str:
    return (
        f"{what}, which the template {template!r} does not write; name one that does as "
        "data.template, such as that of the model's tokenizer, or remove the field"
    )


@dataclasses.dataclass(frozen=True, eq=False)
class Rendered:
    """The Jinja template of a hub's tokenizer.

    If the template has `{% generation %}` tags, the text inside them is learned. Without such tags,
    an assistant's turn is learned from the end of the generation prompt on.

    Args:
        name: the name of the template.
        source: the template.
        tokens: strings that the template uses by name.
        tool_source: the template of chats with tools, if the tokenizer has a separate one.
    """

    name: str
    source: str
    tokens: Mapping[str, Any]
    tool_source: str | None = None

    @property
    def identity(self) -> str:
        """A string that differs between templates that write different texts."""
        has_tags = any(map(_GENERATION.search, (self.source, self.tool_source or "")))
        rendering = f"{_RENDERING}, without tags that overlap" if has_tags else _RENDERING
        parts = (rendering, self.source, self.tool_source or "", sorted(self.tokens.items()))
        return " ".join(map(str, parts))

    @functools.cached_property
    def process(self) -> TemplateProcess:
        """The process that renders the template."""
        return TemplateProcess(self.source, self.tokens)

    @functools.cached_property
    def _for_tools(self) -> Rendered:
        if self.tool_source is None:
            return self
        return Rendered(self.name, self.tool_source, self.tokens)

    def pieces(self, chat: Conversation | Sequence[Message]) -> Pieces:
        """Returns the text of a chat.

        Args:
            chat: the chat of a record, which must be written completely; or messages alone, which
                the template may write in part.

        Raises:
            ValueError: when the template rejects the chat or does not write a part of it, or when
                the answers in the text cannot be found.
        """
        is_record = isinstance(chat, Conversation)
        if not isinstance(chat, Conversation):
            chat = Conversation.of(chat)
        if chat.tools is not None and self.tool_source is not None:
            return self._for_tools.pieces(chat)
        variants = self._variants(chat) if is_record else []
        turns = [n for n, message in enumerate(chat.messages) if message["role"] == LEARNED]
        # With tags, turns need to be located only if one of them is not learned.
        has_tags = _GENERATION.search(self.source) is not None
        asked = [] if has_tags and all(chat.learned[n] for n in turns) else turns
        # Two prefixes per turn: up to its generation prompt, and including the turn.
        prefixes = [(n + more, not more) for n in asked for more in (0, 1)]
        try:
            written = self.process.write(chat, prefixes, [variant for _, variant in variants])
        except ValueError as error:
            raise ValueError(f"messages that its template rejects: {error}") from error
        for (what, _), is_same in zip(variants, written.same, strict=True):
            if is_same:
                raise ValueError(_not_written(what, self.name))
        if is_record:
            self._check_parts(chat, written.text)
            self._check_messages(chat, written.text)
            self._check_functions(chat, written.text)
        answers = self._answers(asked, written)
        if has_tags:
            unlearned = [answer for n, answer in answers.items() if not chat.learned[n]]
            # A tag may begin before the answer, with its header.
            spans = [
                x for x in written.spans if not any(x[0] < b and a < x[1] for a, b in unlearned)
            ]
        else:
            spans = [answer for n, answer in answers.items() if chat.learned[n]]
        return _cut(written.text, spans)

    def _answers(self, turns: Sequence[int], written: Written) -> dict[int, tuple[int, int]]:
        """Returns the start and end in the text of each of these turns, by message number."""
        answers: dict[int, tuple[int, int]] = {}
        end = 0
        for number, start, stop in zip(turns, written.ends[::2], written.ends[1::2], strict=True):
            if start is None or stop is None or not end <= start <= stop:
                raise ValueError(
                    f"message {number + 1}, which the template {self.name!r} writes differently "
                    "when more messages follow, so the answer cannot be located in the text; mark "
                    "answers in the template with {% generation %}, or set data.template to one of "
                    + ", ".join(TEMPLATES)
                )
            answers[number] = (start, stop)
            end = stop
        return answers

    def _variants(self, chat: Conversation) -> list[tuple[str, Conversation]]:
        """Returns variants of a chat, each without something that the template may not write.

        If a variant has the same text, the template does not write that part.
        """
        variants: list[tuple[str, Conversation]] = []
        messages = chat.messages
        for field in WRITTEN_FIELDS:
            if any(message.get(field) for message in messages) and not self._names(field):
                without = [{k: x for k, x in m.items() if k != field} for m in messages]
                variants.append((field, dataclasses.replace(chat, messages=without)))
        for role in dict.fromkeys(m["role"] for m in messages if content_text(m)):
            if role not in ("user", LEARNED):
                other = [_changed(m) if m["role"] == role else m for m in messages]
                variant = dataclasses.replace(chat, messages=other)
                variants.append((f"messages of the role {role!r:.40}", variant))
        for field in ("tools", "documents"):
            if getattr(chat, field) and not self._names(field):
                none: dict[str, Any] = {field: None}
                variants.append((field, dataclasses.replace(chat, **none)))
        for name in chat.options:
            if not self._names(name):
                options = {k: x for k, x in chat.options.items() if k != name}
                what = f"{name!r:.40} in chat_template_kwargs"
                variants.append((what, dataclasses.replace(chat, options=options)))
        return variants

    def _names(self, field: str) -> bool:
        """Whether the template mentions a field; if so, it decides itself whether to write it."""
        return field in self._words

    @functools.cached_property
    def _words(self) -> frozenset[str]:
        """Names and strings in the expressions of the template, not those in its prose."""
        environment = importlib.import_module("jinja2").Environment()
        words = {
            word.strip("\"'")
            for _, kind, word in environment.lex(self.source)
            if kind in ("name", "string")
        }
        return frozenset(words)

    def _check_messages(self, chat: Conversation, text: str) -> None:
        """Raises if the template leaves out a message, for example all after the fourth."""
        end = 0
        missing: list[int] = []
        for number, message in enumerate(chat.messages):
            content = content_text(message).strip()
            found = text.find(content, end)
            if found < 0:
                missing.append(number)
            else:
                end = found + len(content)
        # The template may have rewritten these contents. Render the chat with each one changed: if
        # the text stays the same, the template ignores that message.
        variants = [
            dataclasses.replace(
                chat,
                messages=[_changed(m) if n == number else m for n, m in enumerate(chat.messages)],
            )
            for number in missing
        ]
        same = self.process.write(chat, (), variants).same if variants else ()
        for number, is_same in zip(missing, same, strict=True):
            if is_same:
                raise ValueError(_not_written(f"message {number + 1}", self.name))

    def _check_functions(self, chat: Conversation, text: str) -> None:
        """Raises if the template leaves out a tool or a tool call."""
        calls = [call for message in chat.messages for call in message.get("tool_calls") or ()]
        named = [_function_name(one) for one in (*(chat.tools or ()), *calls)]
        for name in dict.fromkeys(named):
            if name and text.count(name) < named.count(name):
                raise ValueError(
                    _not_written(f"the function {name!r:.80} of a tool or a call", self.name)
                )

    def _check_parts(self, chat: Conversation, text: str) -> None:
        """Raises if the template wrote the Python `str` of a list of parts or of None."""
        for number, message in enumerate(chat.messages, start=1):
            content = message.get("content", "")
            if isinstance(content, list) and str(content) in text:
                raise ValueError(
                    f"a list of parts as content of message {number}, which the template "
                    f"{self.name!r} writes as a Python list; give the content as one text"
                )
            if content is None and "None" in text and "None" not in self.source:
                raise ValueError(
                    f"no content in message {number}, which the template {self.name!r} writes as "
                    "None; give an empty text"
                )


def _function_name(tool: Any) -> str:
    """Returns the name of the function of a tool or a call, "" if it has none."""
    function = tool.get("function", tool) if isinstance(tool, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    return name if isinstance(name, str) else ""


def _changed(message: Message) -> Message:
    """Returns a message with different content."""
    content = message.get("content")
    if isinstance(content, list):
        return {**message, "content": [*content, {"type": "text", "text": " ..."}]}
    return {**message, "content": f"{content} ..."}


def _cut(text: str, spans: Sequence[tuple[int, int]]) -> Pieces:
    """Cuts a text into pieces; the pieces inside the spans, which are sorted, are learned."""
    pieces: list[tuple[str, bool]] = []
    end = 0
    for start, stop in spans:
        pieces += [(text[end:start], False), (text[start:stop], True)]
        end = stop
    return [*pieces, (text[end:], False)] if end < len(text) else pieces


_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
"""The template tag around learned text."""

_RENDERING = "rendered as by transformers 4.57, whole, by names"
"""Part of a template's identity. Change it with the template environment: cached tokens are then
made again."""


ChatTemplate: TypeAlias = Turns | Rendered
"""Renders messages as one text; the assistant's turns and their end markers are learned."""

MOST_LETTERS = 2**24
"""The maximum number of characters of a rendered chat."""

_MEMORY = 2**30
"""The memory limit of a template process, in bytes."""
_SECONDS = 5.0
"""The time limit of one chat, in seconds of CPU time."""


@dataclasses.dataclass(frozen=True)
class Written:
    """The answer of a template process.

    Args:
        text: the text of the chat.
        spans: start and end of each part of the text between generation tags.
        ends: for each prefix the length of its text, without an `eos_token` that only closes the
            text, or None if `text` does not begin with it.
        same: for each variant, whether its text equals `text`.
    """

    text: str
    spans: Sequence[tuple[int, int]]
    ends: Sequence[int | None]
    same: Sequence[bool]


class TemplateProcess:
    """Runs a template in a separate process, because templates are untrusted programs.

    Args:
        source: the template.
        tokens: strings that the template uses by name.
    """

    def __init__(self, source: str, tokens: Mapping[str, Any]):
        self._setup = source, dict(tokens)
        self._lock = threading.Lock()
        self._running: subprocess.Popen[bytes] | None = None

    def write(
        self,
        chat: Conversation,
        prefixes: Sequence[tuple[int, bool]] = (),
        variants: Sequence[Conversation] = (),
    ) -> Written:
        """Renders a chat.

        Args:
            chat: the messages and other inputs of the template.
            prefixes: pairs: how many first messages to render, and whether to add a generation
                prompt.
            variants: chats whose texts are compared with that of `chat`.

        Raises:
            ValueError: when the template rejects the chat; the message is one line.
        """
        question = {
            "chat": chat.to_json(),
            "prefixes": list(prefixes),
            "variants": [variant.to_json() for variant in variants],
        }
        with self._lock:
            answer = self._answer(self._started(), question)
        spans = [(start, end) for start, end in answer["spans"]]
        return Written(answer["text"], spans, answer["ends"], answer["same"])

    def start(self) -> None:
        """Raises `ValueError` unless the template can be parsed."""
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

    def _answer(self, process: subprocess.Popen[bytes], question: Any) -> Any:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(json.dumps(question).encode() + b"\n")
            process.stdin.flush()
            # The process limits its own CPU time to `_SECONDS`. It could block without using CPU
            # time, so the wait is limited, too.
            line = _line_of(process.stdout.fileno(), time.monotonic() + 4 * _SECONDS)
        except OSError:
            line = b""
        if not line.endswith(b"\n"):
            self._running = None
            _end(process)
            raise ValueError(
                f"it takes more than {_SECONDS:g} seconds or {_MEMORY / 2**30:g} GiB, or writes "
                f"more than {MOST_LETTERS} characters"
            )
        answer = json.loads(line)
        if isinstance(answer, str):
            raise ValueError(answer)
        return answer


_ENVIRONMENT = ("PATH", "PYTHONPATH", "PYTHONHOME", "LD_LIBRARY_PATH", "SYSTEMROOT")
"""The only environment variables that a template process gets: those that locate libraries."""


def _line_of(file: int, deadline: float) -> bytes:
    """Reads a line from a pipe; returns an incomplete line on end of file, timeout or overflow."""
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
"""The built-in templates, by their name in `data.template`."""

_CONFIG = "tokenizer_config.json"
_OF_PROCESSOR = "chat_template.json"
_TEMPLATE_FILES = ("chat_template.jinja", _CONFIG, _OF_PROCESSOR)
"""The files next to a hub tokenizer that may hold its chat template, in the order of search.

The last is that of older processors of images or sound, whose tokenizers have no template.
"""


def find_template(template: str | None, tokenizer: str | None) -> ChatTemplate:
    """Finds the chat template for a name, a file or a tokenizer.

    Args:
        template: a key of `TEMPLATES`, a Jinja file, a `tokenizer_config.json`, or the
            `chat_template.json` of a processor; None takes the one next to the tokenizer, else
            `plain`.
        tokenizer: the path of a `tokenizer.json`, or None.

    Raises:
        ConfigError: when there is no such template, it cannot be read, or jinja2 is missing.
    """
    if template is not None and template in TEMPLATES:
        return TEMPLATES[template]
    if template is not None:
        # A text of several lines is no path, and the error below says what to give.
        path = as_path(template, "data.template") if template.isprintable() else Path(template)
        parsed = _template_in(path) if path.is_file() else None
        if parsed is None:
            why = "has no chat_template" if path.is_file() else "is neither a template nor a file"
            raise ConfigError(
                f"data.template={template!r} {why}; name a file of Jinja, a "
                f"tokenizer_config.json or chat_template.json, or one of {', '.join(TEMPLATES)}"
            )
        return parsed
    for name in _TEMPLATE_FILES if tokenizer is not None else ():
        path = Path(tokenizer or "").expanduser().parent / name
        if path.is_file() and (parsed := _template_in(path)) is not None:
            return parsed
    return TEMPLATES["plain"]


_ANSWER = "answer"


class Question(NamedTuple):
    """The prompt of an answer, and the parts of the answer that a template writes.

    Args:
        prompt: the text before the answer; none of it is learned in training.
        answer: the learned text of a made-up answer.
        ending: the end of `answer`, which ends every answer.
    """

    prompt: str
    answer: str
    ending: str


def ask(
    template: ChatTemplate,
    messages: Sequence[Message],
    options: Mapping[str, Any] = MappingProxyType({}),
) -> Question:
    """Renders messages up to the start of the model's answer.

    The prompt ends where the learned text of a chat begins. What a template writes before the
    content of an answer, such as `<think>`, is learned, so the model writes it itself.

    Args:
        template: a chat template.
        messages: the conversation so far; the last message is not the assistant's.
        options: further variables of the template, as `chat_template_kwargs` of a record.

    Raises:
        ValueError: when the template rejects the messages, or does not write one of them or an
            option.

    Example:
        >>> ask(TEMPLATES["plain"], [{"role": "user", "content": "2 + 2?"}])
        Question(prompt='User: 2 + 2?\\nAssistant: ', answer='answer\\n', ending='\\n')
    """
    # Where learned text begins depends on the template and its tags. So render a made-up answer,
    # and cut the text as in training.
    chat = Conversation.of([*messages, {"role": LEARNED, "content": _ANSWER}])
    pieces = template.pieces(dataclasses.replace(chat, options=options))
    learned = [number for number, (_, is_learned) in enumerate(pieces) if is_learned]
    if not learned or _ANSWER not in pieces[learned[-1]][0]:
        raise ValueError("messages whose answer the template does not mark as learned")
    prompt = "".join(text for text, _ in pieces[: learned[-1]])
    answer = pieces[learned[-1]][0]
    return Question(prompt, answer, answer.rpartition(_ANSWER)[2])


def _template_in(path: Path) -> Rendered | None:
    """Returns the chat template in a file; None for a tokenizer config without a template."""
    config = _config_in(path) if path.suffix == ".json" else {}
    source = config.get("chat_template")
    tool_source = None
    if path.suffix != ".json":
        source = read_text(path, f"the chat template {str(path)!r}")
        more = path.with_name("additional_chat_templates") / "tool_use.jinja"
        if path.name == "chat_template.jinja" and more.is_file():
            tool_source = read_text(more, f"the chat template {str(more)!r}")
    if isinstance(source, list):
        named = [x for x in source if isinstance(x, dict) and isinstance(x.get("name"), str)]
        by_name = {one["name"]: one.get("template") for one in named}
        source = by_name.get("default")
        tool_source = by_name.get("tool_use")
    if not isinstance(source, str):
        return None
    config_path = path.with_name(_CONFIG)
    if path.suffix != ".json" or path.name == _OF_PROCESSOR:
        config = _config_in(config_path) if config_path.is_file() else {}
    tokens = _special_tokens(_with_map(config, path.with_name("special_tokens_map.json")))
    other = f", or set data.template to one of {', '.join(TEMPLATES)}"
    require("jinja2", "tokenizers", f"the chat template in {str(path)!r}", other)
    tool_source = tool_source if isinstance(tool_source, str) else None
    template = Rendered(path.name, source, tokens, tool_source)
    what = f"the chat template in {str(path)!r} cannot be used"
    with reworded(what, f"correct it{other}", of=ValueError):
        template.process.start()
    return template


def _with_map(config: JsonDict, path: Path) -> JsonDict:
    """Returns a tokenizer's config with the entries of an older `special_tokens_map.json`.

    As transformers 4.57 does, such a file is read, and then prevails, only if the config does not
    list its tokens in `added_tokens_decoder`.
    """
    if "added_tokens_decoder" in config or not path.is_file():
        return config
    return {**config, **_config_in(path)}


def _special_tokens(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the tokens that templates use by name, such as `bos_token`.

    A model may name more of them in `extra_special_tokens`, such as `image_token`.
    """

    def text(x):
        return x.get("content") if isinstance(x, dict) else x

    named = {name: x for name, x in config.items() if name.endswith("_token")}
    extra = config.get("extra_special_tokens")
    named |= extra if isinstance(extra, dict) else {}
    texts = {name: text(x) for name, x in named.items()}
    return {name: x for name, x in texts.items() if isinstance(x, str)}


def _config_in(path: Path) -> JsonDict:
    """Reads a JSON file of a tokenizer, such as its config, which must be an object."""
    what = f"the config of a tokenizer {str(path)!r}"
    with reworded(f"cannot read {what}", "correct it", of=MALFORMED):
        config = json.loads(read_text(path, what))
    if not isinstance(config, dict):
        raise ConfigError(f"{what} is a {type(config).__name__} and must be an object; correct it")
    return config
