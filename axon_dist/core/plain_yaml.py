"""Reads and writes YAML 1.2 files of nested sections, with limits on their size and depth.

Importing this file is cheap, because the command `axon` reads a config before it imports JAX.
"""

from __future__ import annotations

import copy
import functools
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ruamel.yaml import YAML
from ruamel.yaml.composer import Composer, ComposerError
from ruamel.yaml.constructor import DuplicateKeyError
from ruamel.yaml.docinfo import DocInfo
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import MappingNode, Node, SequenceNode

from .errors import ConfigError
from .files import as_path, read_text

if TYPE_CHECKING:
    from .typing import JsonDict


def read_yaml(path: str | Path, *, links: bool = True) -> JsonDict:
    """Reads a YAML file whose top level is a mapping.

    `<<: *name` merges in the keys of the section `&name`. Top-level sections whose name begins with
    `x-` only define such anchors, and are dropped from the result.

    Args:
        path: the path of the file.
        links: whether a link at the path is followed.

    Raises:
        ConfigError: when the file cannot be read, is not YAML, is not a mapping, or has a key
            twice.
    """
    what = f"the config {str(path)!r}"
    file = as_path(path, "the config")
    return sections_of(read_text(file, what, most=_MOST_BYTES, links=links), what)


def sections_of(text: str, what: str) -> JsonDict:
    """Parses the text of a YAML file whose top level is a mapping.

    Args:
        text: the contents of the file.
        what: names the file in messages.

    Raises:
        ConfigError: for the same texts as in `read_yaml`.
    """
    if len(text) > _MOST_BYTES:
        raise ConfigError(
            f"{what} has {len(text)} characters, more than the limit of {_MOST_BYTES}"
        )
    data = _parse(text, what)
    if not isinstance(data, dict | None):
        raise ConfigError(f"{what} holds {data!r:.200}; it must be a section of keys and values")
    return {key: value for key, value in (data or {}).items() if not key.startswith("x-")}


def apply_override(data: Mapping[str, object], override: str) -> JsonDict:
    """Returns the data with one value replaced or added.

    Args:
        data: nested sections.
        override: `key.path=value`.

    Raises:
        ConfigError: when there is no `=`, the value is not YAML, or an outer key has a value.

    Example:
        >>> apply_override({"train": {"steps": 10}}, "train.steps=20")
        {'train': {'steps': 20}}
    """
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise ConfigError(
            f"cannot read {override!r:.80}; write key.path=value, as in train.steps=100"
        )
    keys = key.split(".")
    if len(keys) > _DEEPEST:
        raise ConfigError(f"cannot read {override!r:.80}: {len(keys)} keys, more than {_DEEPEST}")
    return _replaced(data, keys, _parse(text, f"{override!r:.80}"), override)


def _replaced(data: object, keys: Sequence[str], value: object, override: str) -> JsonDict:
    if not isinstance(data, Mapping | None):
        raise ConfigError(
            f"cannot apply {override!r:.80}: the key before {keys[0]!r:.80} holds {data!r:.80}, "
            "not a section; replace the whole value"
        )
    first, *rest = keys
    section = dict(data or {})
    section[first] = _replaced(section.get(first), rest, value, override) if rest else value
    return section


_MOST_BYTES = 2**18
"""Configs have some thousands of bytes; ruamel.yaml is too slow for much larger files."""

_DEEPEST = 100
_MOST_VALUES = 100_000
"""Configs have some hundreds of values; nested aliases can make billions from a few lines."""


class _BoundedComposer(Composer):
    """Refuses values nested deeper than `_DEEPEST`; parsing thousands of levels takes minutes."""

    _depth = 0

    def compose_node(self, parent: Node | None, index: int) -> Node | None:
        """Composes a value and everything inside it."""
        if self._depth > _DEEPEST:
            problem = f"values are nested more than {_DEEPEST} deep"
            raise ComposerError(None, None, problem, self.parser.peek_event().start_mark)
        self._depth += 1
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node


def to_yaml(data: object, *, in_one_line: bool = False) -> str:
    """Formats plain values as YAML; keys stay in the order of the dicts.

    Args:
        data: dicts, lists, strings, numbers, booleans and None.
        in_one_line: writes `{a: 1, b: [2, 3]}` without a line break at the end.

    Example:
        >>> print(to_yaml({"train": {"steps": 10}}), end="")
        train:
          steps: 10
        >>> to_yaml({"train": {"steps": 10}}, in_one_line=True)
        '{train: {steps: 10}}'
    """
    writer: Any = YAML(typ="safe", pure=True)
    writer.default_flow_style = in_one_line
    writer.sort_base_mapping_type_on_output = False  # Keeps the order of keys.
    writer.width = 10**6
    writer.allow_unicode = False
    stream = io.StringIO()
    writer.dump(data, stream)
    text = stream.getvalue()
    return text.removesuffix("...\n").rstrip("\n") if in_one_line else text


def _parse(text: str, what: str) -> Any:
    """Parses a YAML text; the caller may change the result."""
    return copy.deepcopy(_parsed(text, what))


# `axon` reads the same config twice: first to look for misspelt keys.
@functools.lru_cache(maxsize=4)
def _parsed(text: str, what: str) -> object:
    try:
        reader = YAML(typ="safe", pure=True)
        reader.doc_infos.append(DocInfo())  # ruamel writes a `%YAML` directive there.
        reader.Composer = _BoundedComposer
        constructor, _ = reader.get_constructor_parser(io.StringIO(text))
        root = constructor.composer.get_single_node()
        _check_size(root, what)
        data = None if root is None else constructor.construct_document(root)
        _check_plain(data, what)
        return data
    except DuplicateKeyError as error:
        line = error.problem_mark.line + 1
        key = str(error.problem).split('"')[1]
        raise ConfigError(
            f"{what} is not YAML in line {line}: the key {key!r:.80} occurs twice",
            code="yaml-duplicate-key",
        ) from error
    except YAMLError as error:
        mark = error.problem_mark if isinstance(error, MarkedYAMLError) else None
        line = f" in line {mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or getattr(error, "reason", None) or error
        raise ConfigError(f"{what} is not YAML{line}: {problem}", code="yaml-syntax") from error
    except RecursionError as error:
        raise ConfigError(
            f"{what} is nested too deep to be read; a config needs only a few levels"
        ) from error
    except ConfigError:
        raise
    except (ValueError, OverflowError, TypeError, LookupError, AttributeError) as error:
        # ruamel.yaml lets through Python's errors about invalid dates, infinite numbers, and a
        # tag such as !!bool on another value.
        raise ConfigError(f"{what} has a value that cannot be read: {error}") from error


def _check_size(root: Node | None, what: str) -> None:
    """Raises if a document is too large once its aliases are expanded.

    Runs before any value is constructed.

    Raises:
        ConfigError: when there are too many values, or one contains itself.
    """
    sizes: dict[int, int] = {}

    def size(node: Node) -> int:
        if id(node) not in sizes:
            # A node that is reached while it is being counted contains itself.
            sizes[id(node)] = _MOST_VALUES + 1
            sizes[id(node)] = 1 + sum(map(size, _inside(node)))
        return sizes[id(node)]

    if root is not None and size(root) > _MOST_VALUES:
        raise ConfigError(
            f"{what} has more than {_MOST_VALUES} values once its aliases (*name) are expanded, or "
            "one that contains itself; remove aliases"
        )


def _inside(node: Node) -> list[Node]:
    if isinstance(node, MappingNode):
        return [part for pair in node.value for part in pair]
    return node.value if isinstance(node, SequenceNode) else []


def _check_plain(data: object, what: str) -> None:
    """Raises `ConfigError` for data that JSON cannot express, or integers beyond 64 bits."""
    if isinstance(data, dict):
        for key, value in data.items():
            if not isinstance(key, str):
                raise ConfigError(
                    f"{what} has the key {str(key)!r:.80}, a {type(key).__name__}; keys must be "
                    "strings: put it in quotes"
                )
            _check_plain(key, what)
            _check_plain(value, what)
    elif isinstance(data, list):
        for value in data:
            _check_plain(value, what)
    elif isinstance(data, int) and not -(2**63) <= data < 2**63:
        raise ConfigError(
            f"{what} has a whole number of {data.bit_length()} bits; numbers have at most 63"
        )
    elif isinstance(data, str) and not data.isascii():
        try:
            data.encode()
        except UnicodeEncodeError as error:
            raise ConfigError(
                f"{what} contains an unpaired surrogate, {data!r:.80}; correct its encoding"
            ) from error
    elif not isinstance(data, (str, int, float, bool, type(None))):
        raise ConfigError(
            f"{what} has a {type(data).__name__}, {data!s:.80}; only strings, numbers, true, "
            "false, null, lists and sections are allowed: put a string in quotes"
        )
