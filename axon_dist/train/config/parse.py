"""Reads a `RunConfig` from a YAML file and `key.path=value` arguments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from axon_dist.core.checks import ArgumentKind
from axon_dist.core.errors import ConfigError
from axon_dist.core.plain_yaml import apply_override, read_yaml

from ...core.typing import JsonDict
from .schema import RunConfig

CONFIG = ArgumentKind(
    "a RunConfig, such as axon_dist.train.config.load_config('configs/quickstart.yaml')",
    lambda x: isinstance(x, RunConfig),
)
"""The check of an argument that must be a `RunConfig`."""


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Reads a run from a file, and overrides some of its values.

    Args:
        path: a YAML file.
        overrides: overrides such as `"train.steps=100"`; the value is read as YAML.

    Returns:
        The checked config.

    Raises:
        ConfigError: when the file is missing or is not valid YAML, or a value is invalid.
    """
    data = read_yaml(path)
    for override in overrides:
        data = apply_override(data, override)
    return RunConfig.from_dict(data)


def load_untrusted(
    path: str | Path, overrides: Sequence[str] = (), *, trust: bool = False
) -> RunConfig:
    """Reads a run from an untrusted file; functions that it names are not imported.

    Args:
        path: a YAML file.
        overrides: overrides of the caller, which may name functions.
        trust: whether functions that the file names may be imported.

    Raises:
        ConfigError: as in `load_config`, and when the file names a function and is not trusted.
    """
    # Read the file only once: its author could replace it between two reads.
    data = read_yaml(path)
    in_file = functions_in(data)
    overriding: JsonDict = {}
    for override in overrides:
        overriding = apply_override(overriding, override)
        data = apply_override(data, override)
    if not trust:
        in_overrides = functions_in(overriding)
        called = [
            function
            for function in functions_in(data)
            if function in in_file and function not in in_overrides
        ]
        if called:
            key, name = called[0]
            raise ConfigError(
                f"{str(path)!r} names the function {name!r:.200} under {key:.200}, which would run "
                "as your own code; read that function, and add --trust, or trust=True in Python, "
                "if you trust the author of the file",
                code="untrusted-function",
            )
    return RunConfig.from_dict(data)


_CODE = ("factory", "function")
"""The keys whose values are imported and called."""


def functions_in(data: object, at: str = "") -> list[tuple[str, object]]:
    """Returns the functions that a config names, each with its key, such as `model.factory`.

    Example:
        >>> functions_in({"loss": {"function": "losses:mine"}, "mesh": "dp=2"})
        [('loss.function', 'losses:mine')]
    """
    if isinstance(data, Sequence) and not isinstance(data, str | bytes):
        return [pair for n, part in enumerate(data) for pair in functions_in(part, f"{at}[{n}]")]
    if not isinstance(data, Mapping):
        return []
    functions: list[tuple[str, object]] = []
    for key, value in data.items():
        path = f"{at}.{key}".lstrip(".")
        functions += [(path, value)] if key in _CODE else functions_in(value, path)
    return functions
