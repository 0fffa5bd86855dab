"""From a YAML file and `key.path=value` arguments to a `RunConfig`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from axon_dist.core.errors import ConfigError

from .schema import RunConfig


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Reads a run from a file, some of its values replaced.

    Args:
        path: a YAML file.
        overrides: such as `"train.steps=100"`; the value is read as YAML.

    Returns:
        The config, checked.

    Raises:
        ConfigError: when the file is missing or no YAML, or a value is not one it can have.
    """
    data = read_yaml(path)
    for override in overrides:
        data = apply_override(data, override)
    return RunConfig.from_dict(data)


def read_yaml(path: str | Path) -> dict[str, Any]:
    """Reads a YAML file that holds a section of keys.

    `<<: *name` takes over the keys of the section `&name`. Sections at the top whose name begins
    with `x-` are there for that alone, and left out.

    Raises:
        ConfigError: when the file cannot be read, is no YAML, holds something else, or says
            a key twice.
    """
    try:
        text = Path(path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not a text"
        raise ConfigError(f"cannot read the config {str(path)!r}: {reason}") from error
    data = _parse(text, f"the config {str(path)!r}")
    if not isinstance(data, dict | None):
        raise ConfigError(
            f"the config {str(path)!r} holds {data!r}; it must be a section of keys and values"
        )
    return {key: value for key, value in (data or {}).items() if not _holds_anchors(key)}


def _holds_anchors(key: Any) -> bool:
    """Whether a section at the top is there to be merged into others by `<<`."""
    return isinstance(key, str) and key.startswith("x-")


def apply_override(data: Mapping[str, Any], override: str) -> dict[str, Any]:
    """Returns the data with one value replaced or added.

    Args:
        data: nested sections.
        override: `key.path=value`.

    Raises:
        ConfigError: when there is no `=`, the value is no YAML, or the path leads through a value.

    Example:
        >>> apply_override({"train": {"steps": 10}}, "train.steps=20")
        {'train': {'steps': 20}}
    """
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise ConfigError(f"cannot read {override!r}; write key.path=value, as in train.steps=100")
    return _replaced(data, key.split("."), _parse(text, repr(override)), override)


def _replaced(data: Any, keys: Sequence[str], value: Any, override: str) -> dict[str, Any]:
    if not isinstance(data, Mapping | None):
        raise ConfigError(
            f"cannot apply {override!r}: the key before {keys[0]!r} holds {data!r} and not a "
            "section; replace it as a whole"
        )
    first, *rest = keys
    section = dict(data or {})
    section[first] = _replaced(section.get(first), rest, value, override) if rest else value
    return section


_MERGE = "tag:yaml.org,2002:merge"
"""The tag of the key `<<`."""


class _StrictLoader(yaml.SafeLoader):
    """YAML in which a key may stand only once; PyYAML would take the last one silently.

    What `<<` brings along gives way to the keys of the section itself.
    """

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        """Puts what `<<` brings in front of the keys of a section; reading it begins with this."""
        # A section that others merge comes here again, its own `<<` written out already.
        if not hasattr(node, "is_checked"):
            node.is_checked = True  # type: ignore[attr-defined]
            self._check_keys([key for key, _ in node.value if key.tag != _MERGE])
        super().flatten_mapping(node)

    def _check_keys(self, nodes: list[yaml.Node]) -> None:
        seen = []
        for node in nodes:
            key = self.construct_object(node, deep=True)
            if key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key!r} stands twice", node.start_mark
                )
            seen.append(key)


def _parse(text: str, where: str) -> Any:
    try:
        return yaml.load(text, _StrictLoader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f" in line {mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or error
        raise ConfigError(f"{where} is not YAML{line}: {problem}") from error
