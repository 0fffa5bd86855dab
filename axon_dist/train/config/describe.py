"""Describes every config key: type, default and meaning, read from the code that uses it."""

from __future__ import annotations

import dataclasses
import enum
import functools
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Annotated, Any, Literal, Union

from axon_dist.core.arguments import ArgumentKind
from axon_dist.core.errors import ConfigError, did_you_mean
from axon_dist.core.plain_yaml import to_yaml
from axon_dist.parallel import STRATEGIES, resolve_name

from .read import (
    HUB,
    SCALARS,
    OneOf,
    Option,
    Parsed,
    extra,
    first_paragraph,
    meanings_of,
    options_of,
    words_of,
    write,
)
from .schema import RunConfig
from .user_code import PATH


@dataclasses.dataclass(frozen=True)
class Key:
    """One key of a config.

    Args:
        path: the path as in an override, such as `train.steps`.
        type: a description of its type.
        default: its default in YAML; empty for a section, and for a key without a default.
        meaning: a description of its effect.
    """

    path: str
    type: str
    default: str
    meaning: str


@dataclasses.dataclass(frozen=True)
class Section:
    """The keys of one section.

    Args:
        path: the path of the section, such as `optimizer`; empty for the top level.
        variant: which of several kinds it is, such as `name: sgd`; empty if there is only one.
        meaning: a one-sentence description.
        keys: its keys, in order.
        presets: the names of its presets.
    """

    path: str
    variant: str
    meaning: str
    keys: tuple[Key, ...]
    presets: tuple[str, ...] = ()


_HUB = (
    "a folder with config.json and safetensors, or hf://org/name: takes the sizes of its model, "
    "which other keys of the section override, and its weights unless weights is set."
)


_OF_TOP = "a key of the top level."


def describe(section: str | None = None, nested: bool = True) -> list[Section]:
    """Lists the keys of a config, read from the dataclasses and functions that they configure.

    Args:
        section: the dotted path of a section, of one of its kinds, such as `data.jsonl`, or of one
            key; None for all.
        nested: whether to list nested sections, too.

    Returns:
        Sections, the top level first.

    Raises:
        ConfigError: when there is no such section.

    Example:
        >>> key = describe("train")[0].keys[0]
        >>> key.path, key.type, key.default, key.meaning
        ('train.steps', 'whole number, at least 1', '1000', 'optimizer steps.')
    """
    strategies = {f"parallel.{name}": row.make for name, row in STRATEGIES.items()}
    roots = {"": RunConfig, **strategies}
    rows = (row for path, cls in roots.items() for row in _sections(cls, path))
    sections = list(dict.fromkeys(rows))
    section = _canonical(section)
    if section is None:
        return sections if nested else sections[:1]
    varied = (row for row in sections if row.variant)
    kinds = {f"{row.path}.{row.variant.partition(': ')[2]}": row for row in varied}
    exact = [row for row in sections if row.path == section or row is kinds.get(section)]
    within = [row for row in sections if row.path.startswith(f"{section}.")]
    if exact or within:
        return [*exact, *(within if nested or not exact else [])]
    keys = [
        dataclasses.replace(row, meaning=row.meaning if row.path else _OF_TOP, keys=(key,))
        for row in sections
        for key in row.keys
    ]
    if matches := [row for row in keys if row.keys[0].path == section]:
        return matches
    paths = {*kinds, *(row.path for row in sections if row.path), *(r.keys[0].path for r in keys)}
    hint = did_you_mean(section, paths).partition(" Valid")[0]
    raise ConfigError(f"there is no section or key {section!r:.80}.{hint} axon config lists them")


def _canonical(section: str | None) -> str | None:
    """Replaces an alias of a strategy in a path, as in `parallel.full_shard`, by its main name."""
    parts = section.split(".") if section else []
    if len(parts) > 1 and parts[0] == "parallel":
        parts[1] = resolve_name(parts[1])[0]
    return ".".join(parts) if parts else section


def _sections(
    cls: Any, path: str, variant: str = "", presets: Iterable[str] = ()
) -> Iterator[Section]:
    """Yields a dataclass as a section, then those of its fields that are sections."""
    yield Section(path, variant, first_paragraph(cls), _keys(cls, path), tuple(presets))
    for name, option in options_of(cls).items():
        yield from _inside(option.hint, f"{path}.{name}".lstrip("."))


@functools.cache
def _keys(thing: Callable[..., object], path: str) -> tuple[Key, ...]:
    """Returns the keys that a dataclass or a function takes."""
    meanings = meanings_of(thing)
    return tuple(
        Key(
            f"{path}.{name}".lstrip("."),
            type_in_words(option.hint),
            _default(option),
            meanings.get(name, ""),
        )
        for name, option in options_of(thing).items()
    )


def _inside(hint: object, path: str) -> Iterator[Section]:
    """Yields the sections within a type."""
    if (choice := extra(hint, OneOf)) is not None:
        for name, cls in choice.table.items():
            first, *others = _sections(
                cls, path, f"{choice.tag}: {name}", choice.presets.get(name, ())
            )
            more = (Key(f"{path}.{HUB}", "text", "", _HUB),) if name in choice.hubs else ()
            yield dataclasses.replace(first, keys=(*more, *first.keys))
            yield from others
        for key, cls in choice.user_code.items():
            location = Key(f"{path}.{key}", PATH, "", "the path of the function.")
            keys = (location, *_keys(cls, path))
            yield Section(path, f"{key}: {PATH}", first_paragraph(cls), keys)
    elif typing.get_origin(hint) in (Union, types.UnionType, tuple):
        for option in typing.get_args(hint):
            yield from _inside(option, path)
    elif dataclasses.is_dataclass(hint):
        yield from _sections(hint, path)


def type_in_words(hint: object) -> str:
    """Describes the values of a type in a config.

    Example:
        >>> type_in_words(int | None), type_in_words(tuple[str, ...])
        ('whole number, or null', 'list of string')
    """
    origin = typing.get_origin(hint)
    args = typing.get_args(hint)
    if origin is Annotated:
        return _annotated(hint, args[0])
    if origin in (Union, types.UnionType):
        options = dict.fromkeys(type_in_words(arg) for arg in args if arg is not types.NoneType)
        return f"{' or '.join(options)}{', or null' if types.NoneType in args else ''}"
    if origin is tuple:
        return f"list of {type_in_words(args[0])}"
    if origin is Literal:
        return _one_of(args)
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return _one_of([member.name.lower() for member in hint])
    if dataclasses.is_dataclass(hint) or origin in (Mapping, dict):
        return "section"
    if hint is Any:
        return "name of a dtype"
    return words_of(hint).removeprefix("a ") if hint in SCALARS else "any value"  # type: ignore


def _annotated(hint: object, inner: object) -> str:
    if kind := extra(hint, ArgumentKind):
        # Omit upper bounds, which are general limits instead of properties of the key.
        return kind.advice.partition(" and at most ")[0].removeprefix("a ")
    if parsed := extra(hint, Parsed):
        return parsed.form
    if choice := extra(hint, OneOf):
        custom = [f"{{{key}: ...}}" for key in choice.user_code]
        named = [f"section with {choice.tag}: {_one_of(choice.table)}"] if choice.table else []
        return " or ".join([*named, *custom])
    return type_in_words(inner)


def _one_of(names: Iterable[object]) -> str:
    *others, last = map(str, names)
    return f"{', '.join(others)} or {last}" if others else last


def _default(option: Option) -> str:
    """Returns the default in YAML; for a section with several kinds, the name of the kind."""
    value = option.default
    hint = option.hint
    if value is dataclasses.MISSING:
        return ""
    if value is not None and (choice := extra(hint, OneOf)):
        return choice.name_of(value)
    if dataclasses.is_dataclass(value) and dataclasses.is_dataclass(hint):
        return ""
    plain = None if value is None else write(value, hint)
    return to_yaml(plain, in_one_line=True)


def completion_words() -> list[str]:
    """Returns the words for shell completion: all sections, and all keys with `=`.

    Example:
        >>> words = completion_words()
        >>> "optimizer.schedule" in words, "train.steps=" in words
        (True, True)
    """
    rows = describe()
    sections = dict.fromkeys(row.path for row in rows if row.path)
    keys = dict.fromkeys(f"{key.path}=" for row in rows for key in row.keys)
    return [*sections, *keys]


def to_text(sections: list[Section]) -> str:
    """Formats sections for a terminal: a line for each key, with its meaning below."""
    blocks = []
    for section in sections:
        lines = [f"{_heading(section)}: {section.meaning}"]
        if section.presets:
            lines.append(f"  preset: {_one_of(section.presets)}")
        for key in section.keys:
            default = f" = {key.default}" if key.default else ""
            lines += [f"  {key.path}{default}  ({key.type})", f"      {key.meaning}"]
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks)


def to_markdown(sections: list[Section]) -> str:
    """Formats sections as Markdown, with a table for each."""
    blocks = []
    for section in sections:
        lines = [f"## {_heading(section)}", "", section.meaning, ""]
        if section.presets:
            lines += [f"`preset`: {_one_of([f'`{name}`' for name in section.presets])}", ""]
        if section.keys:
            lines += ["| key | type | default | meaning |", "|---|---|---|---|"]
        for key in section.keys:
            default = _cell(f"`{key.default}`") if key.default else ""
            cells = f"`{key.path}`", _cell(key.type), default, _cell(key.meaning)
            lines.append(f"| {' | '.join(cells)} |")
        blocks.append("\n".join(lines).rstrip())
    return "\n\n".join(blocks) + "\n"


def _heading(section: Section) -> str:
    variant = f" ({section.variant})" if section.variant else ""
    return f"{section.path or 'config'}{variant}"


def _cell(text: str) -> str:
    """Escapes a text for a Markdown table; code in backticks stays unchanged."""
    parts = text.replace("|", "\\|").split("`")
    # Markdown would read braces at the end of a cell as its attributes.
    parts[::2] = [part.replace("<", "&lt;").replace("{", "&#123;") for part in parts[::2]]
    return "`".join(parts)
