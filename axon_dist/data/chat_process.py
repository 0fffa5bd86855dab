"""Runs one chat template, within bounds of memory, time and letters.

A separate program, started by `chat.py`: it imports nothing of the package, reads a question on
every line of its input and answers each with a line, all of them JSON. The first question is the
template; an answer that is a text says what is wrong.
"""

from __future__ import annotations

import importlib
import json
import resource
import signal
import sys
from collections.abc import Callable
from typing import Any


def main() -> None:
    """Answers until the input ends."""
    memory, seconds, letters = int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])
    # Before any limit: a missing library is not an error of the template.
    sandbox = importlib.import_module("jinja2.sandbox")
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    for limit in (resource.RLIMIT_CORE, resource.RLIMIT_FSIZE):
        resource.setrlimit(limit, (0, 0))
    render: Callable[[Any], Any] | None = None
    for line in sys.stdin:
        # The signal ends the process, even within one long multiplication.
        signal.setitimer(signal.ITIMER_PROF, seconds)
        try:
            if render is None:
                render = _renderer(sandbox, json.loads(line), letters)
                answer: Any = []
            else:
                answer = render(json.loads(line))
        except BaseException as error:  # a template may raise anything, as 1 / 0 does
            text = "more than the memory it may have" if isinstance(error, MemoryError) else error
            answer = " ".join(f"{type(error).__name__}: {text}"[:400].split())
        signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


def _renderer(sandbox: Any, setup: Any, letters: int) -> Callable[[Any], list[Any]]:
    source, tokens = setup
    # As the library of the hub sets it up.
    box = sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    box.globals["raise_exception"] = _refuse
    template = box.from_string(source)

    def text(messages: Any, asks: bool) -> str:
        left, parts = letters, []
        for part in template.generate(**tokens, messages=messages, add_generation_prompt=asks):
            left -= len(part)
            if left < 0:
                raise ValueError(f"it writes more than {letters} letters")
            parts.append(part)
        return "".join(parts)

    def render(question: Any) -> list[Any]:
        messages, prefixes = question
        full = text(messages, False)
        parts = (text(messages[:count], asks) for count, asks in prefixes)
        return [full, *(len(part) if full.startswith(part) else None for part in parts)]

    return render


def _refuse(message: str) -> None:
    raise ValueError(message)


if __name__ == "__main__":
    main()
