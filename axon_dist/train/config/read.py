"""Reads plain data into typed dataclasses, and writes it back; errors name the config key.

A type is a Python type, or an `Annotated` type with an `ArgumentKind`, a `OneOf` or a `Parsed`.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import inspect
import re
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING
from typing import Annotated, Any, Literal, TypeAlias, TypeVar, Union

import numpy as np

from axon_dist.core.arguments import SEED, ArgumentKind, kind_of, number, spelled_number, whole
from axon_dist.core.errors import AxonDistError, ConfigError, did_you_mean
from axon_dist.core.renamed import with_new_names

from .user_code import PATH, UserCode

# Evaluating the type hints of a section takes longer than reading all of its keys.
_type_hints = functools.lru_cache(maxsize=256)(typing.get_type_hints)
HUB = "hub"
"""The key of a section whose value is a snapshot of a hub repository."""


# eq=False: Python 3.11 hashes the metadata of an optional annotation, but mappings are unhashable.
@dataclasses.dataclass(frozen=True, eq=False)
class OneOf:
    """A section that is one of several dataclasses, selected by a tag.

    `{name: sgd, momentum: 0.9}` is read as `table["sgd"](momentum=0.9)`, and a plain `sgd` as
    `{name: sgd}`. Each variant has its own options; an option of another variant is an unknown key.

    Args:
        table: the dataclasses by name; the first is used if the tag is missing.
        tag: the key that holds the name.
        presets: for each name, sets of values by preset name; other keys override them.
        user_code: sections that name user code, by the key that holds its dotted path.
        hubs: for each name that supports the key `hub`, a function that reads a snapshot and
            returns values; other keys override them.

    Example:
        >>> OneOf({"sgd": dict, "adam": dict}).default
        'sgd'
    """

    table: Mapping[str, type]
    tag: str = "name"
    presets: Mapping[str, Mapping[str, Mapping[str, object]]] = dataclasses.field(
        default_factory=dict
    )
    user_code: Mapping[str, type[UserCode]] = dataclasses.field(default_factory=dict)
    hubs: Mapping[str, Callable[[Any], Mapping[str, object]]] = dataclasses.field(
        default_factory=dict
    )

    @property
    def default(self) -> str:
        """The name that is used if the tag is missing."""
        return next(iter(self.table))

    def name_of(self, value: object) -> str:
        """Returns the name in the table of the type of a value."""
        return next(name for name, cls in self.table.items() if type(value) is cls)


@dataclasses.dataclass(frozen=True)
class Parsed:
    """A value that can be written in several forms, and has its own parser.

    Args:
        read: parses plain data; raises `ValueError` or `TypeError` for invalid data.
        write: the inverse of `read`; returns plain data.
        form: a description of the valid forms.

    Example:
        >>> Parsed(complex, str, "a complex number").read("1j")
        1j
    """

    read: Callable[[Any], Any]
    write: Callable[[Any], Any]
    form: str


MOST = 2**31 - 1
"""The largest count: steps and samples are counted in 32 bits on the devices."""


def _from(least: int, most: int) -> ArgumentKind:
    return whole(f", at least {least} and at most {most}", least, most)


Count: TypeAlias = Annotated[int, _from(1, MOST)]
"""A count of at least one."""

Natural: TypeAlias = Annotated[int, _from(0, MOST)]
"""A count that may be zero."""

Ahead: TypeAlias = Annotated[int, _from(0, 1024)]
"""A number of prefetched batches in memory."""

Port: TypeAlias = Annotated[int, _from(1, 65535)]
"""A TCP port of this host."""

Devices: TypeAlias = Annotated[int, _from(1, 1024)]
"""Emulated CPU devices, each with its own threads."""

_LEAST, _LARGEST = 1e-37, 3e38
"""The range of positive numbers that float32 holds to its full precision, in round numbers."""

_AT_MOST = f" and at most {_LARGEST:g}".replace("+", "")

Positive: TypeAlias = Annotated[
    float, number(f", at least {_LEAST:g}{_AT_MOST}", lambda x: _LEAST <= x <= _LARGEST)
]
"""A rate or a size."""

NonNegative: TypeAlias = Annotated[
    float, number(f", at least 0{_AT_MOST}", lambda x: 0 <= x <= _LARGEST)
]
"""A rate; 0 turns it off."""

Fraction: TypeAlias = Annotated[float, number(" in [0, 1)", lambda value: 0 <= value < 1)]
"""A fraction of at least 0, less than 1."""

Seed: TypeAlias = Annotated[int, SEED]
"""The seed of random numbers."""


_T = TypeVar("_T")
SCALARS = (int, float, str, bool)
"""The classes of values that are neither lists nor sections."""


def read(hint: object, value: object, path: str = "") -> Any:
    """Turns plain data from a YAML file into a value of a type.

    Args:
        hint: a dataclass, a scalar type, `X | None`, `tuple[X, ...]`, `Mapping[str, X]`, `Literal`,
            an enum (written as its member's name in lower case), or any type `Annotated` with an
            `ArgumentKind`, a `OneOf` or a `Parsed`.
        value: dicts, lists and scalars.
        path: the dotted key of the value; every error message begins with it.

    Returns:
        A value of the type.

    Raises:
        ConfigError: for an unknown or missing key, a wrong type or a value out of bounds.

    Example:
        >>> read(tuple[int, ...], [1, 2], "sizes")
        (1, 2)
        >>> read(float, "1e-3", "rate")  # YAML 1.1 reads this spelling as a string
        0.001
        >>> read(int, "many", "train.steps")
        Traceback (most recent call last):
        axon_dist.core.errors.ConfigError: train.steps: got 'many', which must be a whole number
    """
    origin = typing.get_origin(hint)
    if (reader := _READERS.get(origin)) is not None:
        return reader(hint, value, path)
    if hint is Any:
        return value
    if dataclasses.is_dataclass(hint):
        return _read_dataclass(hint, value, path)
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        name = value.lower() if isinstance(value, str) else value
        return _pick({member.name.lower(): member for member in hint}, name, path)
    return _read_scalar(hint, value, path)


def write(value: object, hint: object = None) -> Any:
    """Turns a typed value into plain data that `read` can read back.

    Args:
        value: a value returned by `read`.
        hint: its type, if the value alone does not determine it (a variant of a `OneOf`).

    Returns:
        Dicts, lists and scalars.

    Example:
        >>> write((1, 2))
        [1, 2]
    """
    if isinstance(value, UserCode):
        library_keys = {name: getattr(value, name) for name in options_of(type(value))}
        return {value.key: value.path, **library_keys, **value.options}
    if (choice := extra(hint, OneOf)) is not None:
        return {choice.tag: choice.name_of(value), **write(value)}
    if (parsed := extra(hint, Parsed)) is not None:
        return parsed.write(value)
    if dataclasses.is_dataclass(value):
        options = options_of(type(value))
        return {name: write(getattr(value, name), x.hint) for name, x in options.items()}
    if isinstance(value, tuple):
        args = typing.get_args(hint) or (None,)
        return [write(item, args[0]) for item in value]
    if isinstance(value, Mapping):
        return {key: write(item) for key, item in value.items()}
    if isinstance(value, enum.Enum):
        return value.name.lower()
    return str(value) if isinstance(value, np.dtype) else value


@dataclasses.dataclass(frozen=True)
class Option:
    """One key that a dataclass or a function takes.

    Args:
        hint: its type, including the metadata of `Annotated`.
        default: the value if the key is missing; `MISSING` if the key is required.
    """

    hint: object
    default: object


def options_of(thing: Callable[..., object]) -> dict[str, Option]:
    """Returns the options of a dataclass, or of a function that makes a strategy.

    Arguments that the library provides are omitted: the path and the options of user code, and the
    model and the world of a strategy.

    Example:
        >>> options_of(Parsed)["form"].hint
        <class 'str'>
    """
    hints = _type_hints(inspect.unwrap(thing), include_extras=True)
    if dataclasses.is_dataclass(thing):
        made = {f.name: f.default_factory for f in dataclasses.fields(thing)}
        defaults = {f.name: f.default for f in dataclasses.fields(thing)}
        defaults |= {name: make() for name, make in made.items() if make is not MISSING}
        excluded = ("path", "options") if issubclass(typing.cast(type, thing), UserCode) else ()
    else:
        parameters = inspect.signature(thing).parameters.values()
        defaults = {p.name: MISSING if p.default is p.empty else p.default for p in parameters}
        excluded = ("model", "world")
    return {n: Option(hints[n], default) for n, default in defaults.items() if n not in excluded}


def meanings_of(thing: Callable[..., object]) -> dict[str, str]:
    """Returns the documentation of each argument, from the docstrings of a function or class.

    For a class, the docstrings of its bases are included.

    Example:
        >>> meanings_of(Option)["hint"]
        'its type, including the metadata of `Annotated`.'
    """
    meanings: dict[str, str] = {}
    for one in reversed(getattr(thing, "__mro__", (thing,))):
        meanings.update(_documented(one))
    return meanings


def _documented(thing: Callable[..., object]) -> dict[str, str]:
    """Returns the entries of a docstring's `Args`, by name."""
    section = re.search(r"^Args:\n((?:[ ]+.*\n?|\n)+)", _docstring(thing), re.MULTILINE)
    entries = re.findall(
        r"^    (\w+): (.*(?:\n        .*)*)", section[1] if section else "", re.MULTILINE
    )
    # None in Python is null in YAML.
    plain = {name: " ".join(words.split()) for name, words in entries}
    return {name: re.sub(r"\bNone\b", "null", words) for name, words in plain.items()}


def first_paragraph(thing: Callable[..., object]) -> str:
    """Returns the first paragraph of a docstring, on one line."""
    return " ".join(_docstring(thing).split("\n\n")[0].split())


def _docstring(thing: Callable[..., object]) -> str:
    return inspect.cleandoc(inspect.unwrap(thing).__doc__ or "")


def _says_missing(path: str, name: str) -> str:
    return f"{_join(path, name)}: missing, and it has no default; set it"


def read_options(
    options: Mapping[str, Option],
    data: Mapping[str, object],
    path: str,
    kind: str = "key",
    says_missing: Callable[[str, str], str] = _says_missing,
) -> dict[str, Any]:
    """Reads a section with these options.

    Args:
        options: the options of the section.
        data: the keys and values of the section.
        path: the dotted key of the section.
        kind: the word for a key in messages.
        says_missing: returns the message for a missing required key, from `path` and its name.

    Raises:
        ConfigError: for an unknown or missing key, a wrong type or a value out of bounds.
    """
    for key in data:
        if key not in options:
            hint = did_you_mean(key, options)
            if below := _section_with(key, options):
                _, _, valid = hint.partition(" Valid:")
                hint = f" Did you mean {_join(path, below)!r}? Valid:{valid}"
            raise ConfigError(f"{_join(path, key)}: there is no such {kind}.{hint}")
    for name, option in options.items():
        if name not in data and option.default is MISSING:
            raise ConfigError(says_missing(path, name))
    return {key: read(options[key].hint, value, _join(path, key)) for key, value in data.items()}


def with_new_keys(thing: Callable[..., object], data: Mapping[str, object]) -> dict[str, object]:
    """Replaces old names of keys in nested sections; each use of an old name warns.

    Args:
        thing: a dataclass, or a function that makes a strategy.
        data: the values of its options, as plain data.
    """
    renamed = dict(data)
    for key, value in data.items():
        if isinstance(value, Mapping) and (option := options_of(thing).get(key)) is not None:
            for cls in filter(dataclasses.is_dataclass, typing.get_args(option.hint)):
                renamed[key] = with_new_names(typing.cast(type, cls), value, stacklevel=2)
    return renamed


def _section_with(key: str, options: Mapping[str, Option]) -> str:
    """Returns the section and key meant by a key that is one level too high; "" if unknown."""
    for name, option in options.items():
        hints = [option.hint, *typing.get_args(option.hint)]
        tables = [table for hint in hints if (table := extra(hint, OneOf))]
        kinds = [kind for table in tables for kind in table.table.values()]
        sections = [x for x in kinds + hints if dataclasses.is_dataclass(x)]
        if key in {field.name for section in sections for field in dataclasses.fields(section)}:
            return f"{name}.{key}"
    return ""


def extra(hint: object, kind: type[_T]) -> _T | None:
    """Returns the first metadata of a kind in an `Annotated` type; None if there is none."""
    extras = typing.get_args(hint)[1:] if typing.get_origin(hint) is Annotated else ()
    return next((one for one in extras if isinstance(one, kind)), None)


def _read_dataclass(cls: Any, data: object, path: str) -> Any:
    section = _section(data, path)
    elsewhere = getattr(cls, "elsewhere", {})
    for key in elsewhere.keys() & section.keys():
        raise ConfigError(f"{_join(path, key)}: there is no such key: {elsewhere[key]}")
    section = with_new_names(cls, section, stacklevel=2)
    values = read_options(options_of(cls), section, path)
    # A class may take one of its fields as `*args`: `Policy("Block", "Head")`.
    variadic = [
        name for name, p in inspect.signature(cls).parameters.items() if p.kind is p.VAR_POSITIONAL
    ]
    positional = [item for name in variadic for item in values.pop(name, ())]
    return _checked(lambda: cls(*positional, **values), path)


def _checked(make: Callable[[], _T], path: str) -> _T:
    """Makes a value and validates it; puts the path before the message of an error."""
    try:
        made = make()
        getattr(made, "validate", lambda: None)()
        return made
    except AxonDistError as error:
        message = str(error)
        names_path = not path or message.startswith(path)
        raise ConfigError(message if names_path else f"{path}: {message}") from error


def _section(data: object, path: str) -> Mapping[str, object]:
    """Returns the keys of a section; an empty section is None in YAML."""
    if data is None:
        return {}
    if not isinstance(data, Mapping):
        raise ConfigError(f"{path}: got {data!r:.80}, which must be a section of keys and values")
    return data


def _join(path: str, key: object) -> str:
    return f"{path}.{shown(key)}" if path else shown(key)


def shown(key: object) -> str:
    """Returns a key as messages show it: its first 200 characters, on one line."""
    text = f"{key!s:.200}"
    return text if text.isprintable() else repr(text)[1:-1]


def _read_annotated(hint: object, value: object, path: str) -> Any:
    if (choice := extra(hint, OneOf)) is not None:
        return _read_choice(choice, value, path)
    if (parsed := extra(hint, Parsed)) is not None:
        try:
            return parsed.read(value)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{path}: {error}") from error
    result = read(typing.get_args(hint)[0], value, path)
    kind = extra(hint, ArgumentKind)
    if kind is not None and not kind.holds(result):
        raise ConfigError(f"{path}: got {result!r:.80}, which must be {kind.advice}")
    return result


def _read_choice(choice: OneOf, value: object, path: str) -> Any:
    if choice.user_code and isinstance(value, str) and ":" in value:
        value = {next(iter(choice.user_code)): value}
    for key in choice.user_code:
        if isinstance(value, Mapping) and key in value:
            return _read_user_code(choice, key, value, path)
    if not choice.table:
        keys = " or ".join(f"{{{key}: {PATH}}}" for key in choice.user_code)
        raise ConfigError(f"{path}: got {value!r:.80}, which must be {keys}")
    section = {choice.tag: value} if isinstance(value, str) else _section(value, path)
    data = dict(section)
    name: Any = data.pop(choice.tag, choice.default)
    variant = _pick(choice.table, name, _join(path, choice.tag))
    preset = data.pop("preset", None) if name in choice.presets else None
    if preset is not None:
        data = {**_pick(choice.presets[name], preset, _join(path, "preset")), **data}
    if name in choice.hubs and HUB in data:
        if preset is not None:
            raise ConfigError(
                f"{path}: got preset and hub, which both set sizes; leave one out",
                code="preset-and-hub",
            )
        hub = data.pop(HUB)
        data = {**_checked(lambda: choice.hubs[name](hub), _join(path, HUB)), **data}
    return _read_dataclass(variant, data, path)


def _read_user_code(choice: OneOf, key: str, value: Mapping[str, object], path: str) -> UserCode:
    """Reads a section of user code, whose options only the user's function reads."""
    others = [other for other in (choice.tag, *choice.user_code) if other in value and other != key]
    if others:
        raise ConfigError(
            f"{path}: got {key} and {others[0]}, which exclude each other; leave one of them out",
            code="user-code-and-kind",
        )
    cls = choice.user_code[key]
    function = value[key]
    own_options = options_of(cls)
    known = {name: item for name, item in value.items() if name in own_options}
    known = read_options(own_options, known, path)
    if not isinstance(function, str):
        raise ConfigError(f"{path}: got {function!r:.80}, which must be a path such as {PATH}")
    rest = {str(name): x for name, x in value.items() if name not in (key, *own_options)}
    return _checked(lambda: cls(path=function, options=types.MappingProxyType(rest), **known), path)


def _pick(table: Mapping[Any, _T], name: object, path: str) -> _T:
    # Check the type first, because a list cannot be hashed.
    if not isinstance(name, (str, int)) or name not in table:
        raise ConfigError(f"{path}: there is no {name!r:.80}.{did_you_mean(str(name), table)}")
    return table[name]


def _read_union(hint: object, value: object, path: str) -> Any:
    """Reads a value as the first type of a union that fits; a section needs a type with keys."""
    options = typing.get_args(hint)
    if value is None and types.NoneType in options:
        return None
    possible = [option for option in options if option is not types.NoneType]
    has_keys = isinstance(value, Mapping)
    fitting = [option for option in possible if _has_keys(option) == has_keys]
    # Try first the types that have all keys of the section, so that their error is reported.
    fitting.sort(key=lambda option: isinstance(value, Mapping) and not _knows(option, value))
    errors = []
    for option in fitting or possible:
        try:
            return read(option, value, path)
        except ConfigError as error:
            errors.append(error)
    raise errors[0]


def _knows(hint: object, section: Mapping[str, object]) -> bool:
    return (
        isinstance(hint, type)
        and dataclasses.is_dataclass(hint)
        and set(section) <= set(options_of(hint))
    )


def _has_keys(hint: object) -> bool:
    return dataclasses.is_dataclass(hint) or typing.get_origin(hint) is Mapping


def _read_tuple(hint: object, value: object, path: str) -> tuple:
    items = [value] if isinstance(value, (str, Mapping)) else value
    if not isinstance(items, Sequence):
        raise ConfigError(f"{path}: got {value!r:.80}, which must be a list")
    inner = typing.get_args(hint)[0]
    return tuple(read(inner, item, f"{path}[{index}]") for index, item in enumerate(items))


def _read_mapping(hint: object, value: object, path: str) -> Mapping:
    inner = typing.get_args(hint)[1]
    items = _section(value, path).items()
    return types.MappingProxyType(
        {str(key): read(inner, item, _join(path, key)) for key, item in items}
    )


def _read_literal(hint: object, value: object, path: str) -> Any:
    return _pick({option: option for option in typing.get_args(hint)}, value, path)


def words_of(cls: type) -> str:
    """Describes the valid values of one of `SCALARS`, in the words of YAML.

    Example:
        >>> words_of(int), words_of(bool)
        ('a whole number', 'true or false')
    """
    kind = kind_of(cls)
    assert kind is not None
    return kind.advice.lower()


def _read_scalar(hint: Any, value: object, path: str) -> Any:
    kind = kind_of(hint) if hint in SCALARS else None
    if kind is None:
        raise ConfigError(f"{path}: got {value!r:.80}, but only Python can set this; leave it out")
    if hint is float:
        value = _as_float(value)
    if not kind.holds(value):
        raise ConfigError(f"{path}: got {value!r:.80}, which must be {words_of(hint)}")
    return value


def _as_float(value: object) -> Any:
    """Converts integers, and the spelling `1e-3`, which YAML 1.1 reads as a string."""
    if isinstance(value, bool) or not isinstance(value, (int, str)):
        return value
    if isinstance(value, str):
        read_as = spelled_number(value)
        return value if read_as is None else read_as
    try:
        return float(value)
    except OverflowError:
        return value


_READERS: dict[object, Callable[..., Any]] = {
    Annotated: _read_annotated,
    Literal: _read_literal,
    Union: _read_union,
    types.UnionType: _read_union,
    tuple: _read_tuple,
    Mapping: _read_mapping,
}
