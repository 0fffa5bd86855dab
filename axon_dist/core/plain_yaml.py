"""YAML as sections of plain values, strict and bounded. Plain Python: importing it is cheap."""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from yaml.composer import ComposerError

from .errors import ConfigError
from .files import as_path, read_text

if TYPE_CHECKING:
    from .typing import JsonDict


def read_yaml(path: str | Path, *, links: bool = True) -> JsonDict:
    """Reads a YAML file that holds a section of keys.

    `<<: *name` takes over the keys of the section `&name`. Sections at the top whose name begins
    with `x-` are there for that alone, and left out.

    Args:
        path: of the file.
        links: whether a link at the path is followed.

    Raises:
        ConfigError: when the file cannot be read, is no YAML, holds something else, or has
            a key twice.
    """
    what = f"the config {str(path)!r}"
    file = as_path(path, "the config")
    return sections_of(read_text(file, what, most=_MOST_BYTES, links=links), what)


def sections_of(text: str, what: str) -> JsonDict:
    """The same of the text of a file.

    Raises:
        ConfigError: as `read_yaml` does.
    """
    if len(text) > _MOST_BYTES:
        raise ConfigError(f"{what} has {len(text)} letters, and a config at most {_MOST_BYTES}")
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
        ConfigError: when there is no `=`, the value is no YAML, or an outer key has a value.

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
            f"cannot apply {override!r:.80}: the key before {keys[0]!r:.80} holds {data!r:.80} and "
            "not a section; replace it as a whole"
        )
    first, *rest = keys
    section = dict(data or {})
    section[first] = _replaced(section.get(first), rest, value, override) if rest else value
    return section


_MOST_BYTES = 2**18
"""A config has some thousands; a large one takes a parser in Python too long to be one."""

_DEEPEST = 100
_MOST_VALUES = 100_000
"""A config has some hundreds; aliases of aliases can make billions of a few lines."""

_TAG = "tag:yaml.org,2002:"
_MERGE = f"{_TAG}merge"
"""The tag of the key `<<`."""

_OF_1_1 = re.compile(r"[-+]?0[0-7_]+|.*:.*|yes|no|on|off", re.IGNORECASE)
"""Plain numbers and truths of YAML 1.1, by which PyYAML reads, that are none, or others, in 1.2."""


class _StrictLoader(yaml.SafeLoader):
    """YAML in which a key may occur only once; PyYAML would use the last one silently.

    Keys of a section override those that `<<` merges into it.
    """

    _depth = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        """Reads a value and all within it; parsing thousands of levels would take minutes."""
        if self._depth > _DEEPEST:
            problem = f"values within values, more than {_DEEPEST} deep"
            raise ComposerError(None, None, problem, self.get_mark())
        self._depth += 1
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node

    def compose_scalar_node(self, anchor: Any) -> yaml.ScalarNode:
        """Reads a value that has none within it, and that all versions of YAML read alike."""
        is_plain = self.peek_event().implicit[0]
        node = super().compose_scalar_node(anchor)
        is_known = node.tag in (f"{_TAG}{kind}" for kind in ("bool", "int", "float"))
        if is_plain and is_known and _OF_1_1.fullmatch(node.value):
            problem = (
                f"{node.value:.40} is one thing in YAML 1.1 and another in 1.2; write true, false "
                "or the plain number, or put a text in quotes"
            )
            raise ComposerError(None, None, problem, node.start_mark)
        return node

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        """Puts what `<<` brings in front of the keys of a section; reading it begins with this."""
        # Called again for a section that others merge, with its `<<` expanded already.
        if not hasattr(node, "is_checked"):
            node.is_checked = True  # type: ignore[attr-defined]
            self._check_keys([key for key, _ in node.value if key.tag != _MERGE])
        super().flatten_mapping(node)

    def _check_keys(self, nodes: list[yaml.Node]) -> None:
        seen = set()
        for node in nodes:
            key = self.construct_object(node, deep=True)
            if not isinstance(key, Hashable):
                problem = f"the key {key!r:.80} is no text"
            elif key in seen:
                problem = f"the key {key!r:.80} occurs twice"
            else:
                seen.add(key)
                continue
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)


def _parse(text: str, what: str) -> Any:
    """What a text says; the caller may change it."""
    return copy.deepcopy(_parsed(text, what))


# A command looks for misspelt keys first, and reads the same config again.
@functools.lru_cache(maxsize=4)
def _parsed(text: str, what: str) -> object:
    try:
        loader = _StrictLoader(text)
        root = loader.get_single_node()
        _check_size(root, what)
        data = None if root is None else loader.construct_document(root)
        _check_plain(data, what)
        return data
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f" in line {mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or getattr(error, "reason", None) or error
        raise ConfigError(f"{what} is not YAML{line}: {problem}") from error
    except RecursionError as error:
        raise ConfigError(
            f"{what} has values within values, too deep to be read; a config has a handful of "
            "levels"
        ) from error
    except ConfigError:
        raise
    except (ValueError, OverflowError, TypeError, LookupError, AttributeError) as error:
        # PyYAML does not catch the errors of Python about invalid dates, infinite numbers, and a
        # tag such as !!bool on another value.
        raise ConfigError(f"{what} has a value that cannot be read: {error}") from error


def _check_size(root: yaml.Node | None, what: str) -> None:
    """Counts values as often as aliases repeat them, before any is made.

    Raises:
        ConfigError: when there are too many, or one is inside itself.
    """
    sizes: dict[int, int] = {}

    def size(node: yaml.Node) -> int:
        if id(node) not in sizes:
            # What is asked for while it is counted is inside itself.
            sizes[id(node)] = _MOST_VALUES + 1
            sizes[id(node)] = 1 + sum(map(size, _inside(node)))
        return sizes[id(node)]

    if root is not None and size(root) > _MOST_VALUES:
        raise ConfigError(
            f"{what} comes to more than {_MOST_VALUES} values, or has one inside itself, once its "
            "aliases (*name) are written out; write fewer"
        )


def _inside(node: yaml.Node) -> list[yaml.Node]:
    if isinstance(node, yaml.MappingNode):
        return [part for pair in node.value for part in pair]
    return node.value if isinstance(node, yaml.SequenceNode) else []


def _check_plain(data: object, what: str) -> None:
    """Raises `ConfigError` unless data are what JSON holds too, in numbers of 64 bits."""
    if isinstance(data, dict):
        for key, value in data.items():
            if not isinstance(key, str):
                raise ConfigError(
                    f"{what} has the key {str(key)!r:.80}, a {type(key).__name__}; keys are "
                    "texts: correct it, or put it in quotes"
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
                f"{what} has a text that is none, {data!r:.80}: half a character; correct it"
            ) from error
    elif not isinstance(data, (str, int, float, bool, type(None))):
        raise ConfigError(
            f"{what} has a {type(data).__name__}, {data!s:.80}, where only texts, numbers, true, "
            "false, null, lists and sections can be; put a text in quotes"
        )
