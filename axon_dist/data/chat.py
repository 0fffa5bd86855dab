"""Chats as text: which words stand around what is said, and what of it a model learns to say."""

from __future__ import annotations

import dataclasses
import importlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol, TypeAlias

from axon_dist.core.errors import ConfigError, did_you_mean

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
        found: list[tuple[str, bool]] = []
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
                found += [(given, False), (said, True)]
                given = ""
            else:
                given += said
        return [*found, (given, False)] if given else found


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
        found: list[tuple[str, bool]] = []
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
            found += [(whole[end : len(asked)], False), (whole[len(asked) : len(said)], True)]
            end = len(said)
        return [*found, (whole[end:], False)] if end < len(whole) else found


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
        text = path.read_text()
        config = {} if path.suffix != ".json" else json.loads(text)
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read the chat template in {str(path)!r}: {error}") from error
    source = config.get("chat_template") if path.suffix == ".json" else text
    if isinstance(source, list):
        named = {one.get("name"): one.get("template") for one in source if isinstance(one, dict)}
        source = named.get("default")
    if not isinstance(source, str):
        return None
    beside = path.with_name("tokenizer_config.json")
    if not config and beside.is_file():
        config = json.loads(beside.read_text())
    return Rendered(path.name, _renderer(source, path, _special_tokens(config)))


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """The tokens that templates call by name, such as `bos_token`."""
    text = lambda x: x.get("content") if isinstance(x, dict) else x
    found = {name: text(x) for name, x in config.items() if name.endswith("_token")}
    return {name: x for name, x in found.items() if isinstance(x, str)}


def _renderer(
    source: str, path: Path, tokens: Mapping[str, str]
) -> Callable[[Sequence[Message], bool], str]:
    try:
        jinja2 = importlib.import_module("jinja2")
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
    box.globals["raise_exception"] = _refuse
    try:
        template = box.from_string(source)
    except jinja2.TemplateError as error:
        raise ConfigError(f"the chat template in {str(path)!r} is no Jinja: {error}") from error

    def render(messages: Sequence[Message], asks: bool) -> str:
        given = {**tokens, "messages": list(messages), "add_generation_prompt": asks}
        try:
            return template.render(**given)
        except (jinja2.TemplateError, TypeError, ValueError) as error:
            raise ValueError(f"messages that its template refuses: {error}") from error

    return render


def _refuse(message: str) -> None:
    raise ValueError(message)
