"""Renders one chat template, with limits on memory, time and output length.

`chat.py` starts this as a separate program, which imports nothing from the package. It reads one
JSON request per line and answers each with one line of JSON. The first request is the template. An
answer that is a string is an error message.

A template gets the same environment as in `transformers` (`utils/chat_template_utils.py`): an
immutable sandbox with loop controls, a `tojson` that keeps the order of keys and escapes nothing,
`raise_exception`, `strftime_now`, and the tag `{% generation %}` around text that a model learns.
"""

from __future__ import annotations

import datetime
import importlib
import json
import resource
import signal
import sys
from typing import Any


def main() -> None:
    """Answers requests until the input ends."""
    memory = int(sys.argv[1])
    seconds = float(sys.argv[2])
    letters = int(sys.argv[3])
    # Import before setting limits: a missing library is not an error of the template.
    sandbox = importlib.import_module("jinja2.sandbox")
    importlib.import_module("jinja2.ext")
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    for limit in (resource.RLIMIT_CORE, resource.RLIMIT_FSIZE):
        resource.setrlimit(limit, (0, 0))
    renderer: Renderer | None = None
    for line in sys.stdin:
        # SIGPROF kills the process, even inside one long multiplication.
        signal.setitimer(signal.ITIMER_PROF, seconds)
        try:
            if renderer is None:
                source, tokens = json.loads(line)
                renderer = Renderer(_environment(sandbox), source, tokens, letters)
                answer: Any = []
            else:
                answer = renderer.answer(json.loads(line))
        except BaseException as error:  # a template may raise anything, for example by 1 / 0
            text = "it exceeds its memory limit" if isinstance(error, MemoryError) else error
            answer = " ".join(f"{type(error).__name__}: {text}"[:400].split())
        signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


class Renderer:
    """Renders chats with a template.

    Args:
        environment: the Jinja environment.
        source: the template.
        tokens: strings that the template uses by name, such as `bos_token`.
        letters: the most characters of a rendered text.
    """

    def __init__(self, environment: Any, source: str, tokens: dict[str, Any], letters: int):
        self._tokens = tokens
        self._letters = letters
        self._length = 0
        self._generated: list[tuple[int, str]] = []
        environment.axon_generated = self._add_generated
        self._template = environment.from_string(source)

    def answer(self, question: Any) -> dict[str, Any]:
        """Renders a chat and compares it with renderings of prefixes and variants.

        Args:
            question: `chat`, the messages and other template inputs; `prefixes`, pairs: how many
                first messages to render, and whether to add a generation prompt; `variants`, other
                chats.

        Returns:
            `text`; `spans`, start and end of each part between generation tags; `ends`, for each
            prefix the length of its text, without an `eos_token` that only closes the text, or None
            if `text` does not begin with it; `same`, for each variant, whether its text equals
            `text`.
        """
        chat = question["chat"]
        text = self._text(chat, asks=False)
        spans = self._spans(text)
        ends = [self._end(text, chat, count, asks) for count, asks in question["prefixes"]]
        same = [self._is_written_as(text, variant) for variant in question["variants"]]
        return {"text": text, "spans": spans, "ends": ends, "same": same}

    def _end(self, text: str, chat: Any, count: int, asks: bool) -> int | None:
        """Returns where the first `count` messages end in `text`; None if it differs there."""
        part = self._of_first(chat, count, asks)
        if text.startswith(part):
            return len(part)
        rest = part.removesuffix(self._tokens.get("eos_token", ""))
        is_closed = not asks and text.startswith(rest) and self._is_closed(rest, chat, count)
        return len(rest) if is_closed else None

    def _is_closed(self, rest: str, chat: Any, count: int) -> bool:
        """Whether the `eos_token` after a text closes the text, and is no part of its last turn.

        All of these must hold. The template closes the text after the message before, too. A
        generation prompt takes the place of the `eos_token`. And the turn has an end of its own,
        which is some other text after its content.

        Args:
            rest: the text of the first `count` messages without the `eos_token` at its end.
            chat: all messages and other template inputs.
            count: the number of messages up to and including the turn.
        """
        before = self._of_first(chat, count - 1, asks=False)
        asked = self._of_first(chat, count - 1, asks=True)
        begin = before.removesuffix(self._tokens["eos_token"])
        if begin == before or not asked.startswith(begin):
            return False
        content = chat["messages"][count - 1].get("content")
        turn = rest[len(asked) :]
        if not isinstance(content, str) or content.strip() not in turn:
            return False
        ending = turn[turn.index(content.strip()) + len(content.strip()) :]
        prompt = asked[len(begin) :]
        return bool(ending.strip()) and self._of_first(chat, count, asks=True) == rest + prompt

    def _of_first(self, chat: Any, count: int, asks: bool) -> str:
        return self._text({**chat, "messages": chat["messages"][:count]}, asks)

    def _is_written_as(self, text: str, chat: Any) -> bool:
        """Whether a chat renders to `text`; False if the template rejects it."""
        try:
            return self._text(chat, asks=False) == text
        except Exception:  # a template may raise anything
            return False

    def _text(self, chat: Any, asks: bool) -> str:
        self._length = 0
        self._generated = []
        parts: list[str] = []
        names = {key: chat[key] for key in ("messages", "tools", "documents")}
        inputs = {**self._tokens, **chat["options"], **names, "add_generation_prompt": asks}
        for part in self._template.generate(**inputs):
            self._length += len(part)
            if self._length > self._letters:
                raise ValueError(f"it writes more than {self._letters} characters")
            parts.append(part)
        return "".join(parts)

    def _add_generated(self, text: str) -> None:
        """Records the text of a generation block; called before the block is written."""
        self._generated.append((self._length, text))

    def _spans(self, text: str) -> list[tuple[int, int]]:
        spans = [(start, start + len(part)) for start, part in self._generated]
        for (start, end), (_, part) in zip(spans, self._generated, strict=True):
            # Inside a macro or an assigned block, the offset of the text is not yet known.
            if text[start:end] != part:
                raise ValueError(
                    "a generation tag inside a macro, a filter or an assignment, so its text "
                    "cannot be located"
                )
        return spans


def _environment(sandbox: Any) -> Any:
    """Returns the Jinja environment that `transformers` uses."""
    extensions = ["jinja2.ext.loopcontrols", _generation_tag()]
    environment = sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=extensions
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = _now
    return environment


def _generation_tag() -> Any:
    """Returns the Jinja extension for `{% generation %} ... {% endgeneration %}`."""
    nodes: Any = importlib.import_module("jinja2.nodes")
    extension: Any = importlib.import_module("jinja2.ext")

    class Generation(extension.Extension):
        tags = frozenset({"generation"})

        def parse(self, parser):
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.CallBlock(self.call_method("_write"), [], [], body).set_lineno(line)

        def _write(self, caller):
            text = caller()
            self.environment.axon_generated(text)
            return text

    return Generation


def _to_json(
    x: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Serializes to JSON; unlike Jinja's filter, keeps key order and does not escape for HTML."""
    return json.dumps(
        x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


def _refuse(message: str) -> None:
    raise ValueError(message)


if __name__ == "__main__":
    main()
