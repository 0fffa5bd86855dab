"""What a `Trainer` is given, by kind: a row per field."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from axon_dist.core.told import FUNCTION, Kind

from .cadence import LoopOptions

BATCHES = Kind(
    'an iterable of batches, such as a loader or a list of {"x": ..., "y": ...}',
    lambda x: isinstance(x, Iterable) and not isinstance(x, (str, bytes, Mapping, type)),
)
STATE = Kind(
    "a TrainState, such as step.init()", lambda x: hasattr(x, "step") and hasattr(x, "params")
).or_none()
_FUNCTION = FUNCTION.or_none()
KINDS: MappingProxyType[str, Kind] = MappingProxyType(
    {
        "step": Kind(
            "a TrainStep, which build_train_step makes", lambda x: _has(x, "evaluate_sums")
        ),
        "batches": BATCHES,
        "options": Kind("LoopOptions(num_steps=...)", lambda x: isinstance(x, LoopOptions)),
        "validation": Kind(
            "a function of no arguments that returns batches, such as lambda: batches", callable
        ).or_none(),
        "writers": Kind(
            "a list of writers, each with write(step, metrics) and close()",
            lambda x: isinstance(x, Sequence) and all(_has(one, "write", "close") for one in x),
        ),
        "progress": Kind(
            "a Progress, such as SilentProgress()", lambda x: _has(x, "phase", "update", "note")
        ),
        "should_stop": _FUNCTION,
        "save": _FUNCTION,
        "copy": _FUNCTION,
        "give_back": _FUNCTION,
        "go_back": _FUNCTION,
        "history": Kind(
            "a list of dicts",
            lambda x: isinstance(x, Sequence) and all(isinstance(row, Mapping) for row in x),
        ),
    }
)
"""What the fields of a `Trainer` can be."""


def _has(value: Any, *methods: str) -> bool:
    is_class = isinstance(value, type)
    return not is_class and all(callable(getattr(value, name, None)) for name in methods)
