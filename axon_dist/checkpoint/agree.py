"""One process decides, all hear of it: so that none goes on alone into a collective."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
from jax.experimental import multihost_utils

from ..core.errors import AxonDistError
from ..mesh import process_index


def is_main() -> bool:
    """Whether this process is the one that decides, and that writes what is written once."""
    return process_index() == 0


def from_main(value: Any) -> Any:
    """The value that process 0 holds, on every process; all of them must call this.

    Args:
        value: anything JSON holds; that of the other processes is ignored.
    """
    text = np.frombuffer(json.dumps(value).encode(), np.uint8)
    size = int(multihost_utils.broadcast_one_to_all(np.int32(text.size)))
    sent = np.zeros(size, np.uint8)
    sent[: text.size] = text[:size]
    return json.loads(bytes(np.asarray(multihost_utils.broadcast_one_to_all(sent))))


def on_main(action: Callable[[], Any]) -> Any:
    """Runs something on process 0 alone; its result, or its error, reaches every process.

    Args:
        action: returns what JSON holds.

    Raises:
        AxonDistError: whatever error of this library the action raised.
    """
    outcome: dict[str, Any] = {}
    if is_main():
        try:
            outcome = {"result": action()}
        except AxonDistError as error:
            outcome = {"kind": type(error).__name__, "text": str(error)}
    outcome = from_main(outcome)
    if "kind" in outcome:
        raise _error_class(outcome["kind"])(outcome["text"])
    return outcome["result"]


def _error_class(name: str) -> type[AxonDistError]:
    """The error of this library with a name; process 0 raised it, so it exists."""
    found, waiting = {}, [AxonDistError]
    while waiting:
        cls = waiting.pop()
        found[cls.__name__] = cls
        waiting += cls.__subclasses__()
    return found[name]
