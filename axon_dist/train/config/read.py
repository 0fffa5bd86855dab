"""Reads plain data into typed dataclasses and writes it back, naming the key of every mistake.

A type is one of Python, or one that `Annotated` gives an `ArgumentKind`, a choice or a parser.
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

# To evaluate the types of a section takes longer than to read all of its keys.
_type_hints = functools.lru_cache(maxsize=256)(typing.get_type_hints)
HUB = "hub"
"""The key of a section whose value is a snapshot of a hub's repository."""


# Python 3.11 hashes what is in an optional annotation, and mappings cannot be hashed.
@dataclasses.dataclass(frozen=True, eq=False)
class OneOf:
    """A section that is one of several dataclasses; a tag in it says which.

    `{name: sgd, momentum: 0.9}` is read as `table["sgd"](momentum=0.9)`, and a lone `sgd` as
    `{name: sgd}`. Each variant owns its options, so one that means nothing to it is an unknown key.

    Args:
        table: the dataclasses by name; the first is meant when the tag is missing.
        tag: the key that holds the name.
        presets: for each name, sets of values by preset name; other keys override them.
        user_code: sections that name code of the user, by the key that holds its dotted path.
        hubs: for each name that has it, what reads the value of the key `hub`, a snapshot, as
            values; other keys override them.

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
        """The name that is meant when the tag is missing."""
        return next(iter(self.table))

    def name_of(self, value: object) -> str:
        """The name of the type of a value in the table."""
        return next(name for name, cls in self.table.items() if type(value) is cls)


@dataclasses.dataclass(frozen=True)
class Parsed:
    """A value that can be written in several forms, which another part of the library reads.

    Args:
        read: takes plain data; raises `ValueError` or `TypeError` for what it cannot read.
        write: the inverse, into plain data.
        form: what is read, in words.

    Example:
        >>> Parsed(complex, str, "a complex number").read("1j")
        1j
    """

    read: Callable[[Any], Any]
    write: Callable[[Any], Any]
    form: str


MOST = 2**31 - 1
"""Steps and samples are counted in 32 bits on the devices."""


def _from(least: int, most: int) -> ArgumentKind:
    return whole(f", at least {least} and at most {most}", least, most)


Count: TypeAlias = Annotated[int, _from(1, MOST)]
"""A number of things of which there must be one."""

Natural: TypeAlias = Annotated[int, _from(0, MOST)]
"""A number of things that may be missing."""

Ahead: TypeAlias = Annotated[int, _from(0, 1024)]
"""Batches that wait in memory."""

Port: TypeAlias = Annotated[int, _from(1, 65535)]
"""A TCP port of this host."""

Devices: TypeAlias = Annotated[int, _from(1, 1024)]
"""Emulated CPU devices, each with its own threads."""

Positive: TypeAlias = Annotated[
    float, number(", above 0 and at most 3e38, in float32", lambda value: 1e-37 <= value <= 3e38)
]
"""A rate or a size; a smaller one would be 0 on the devices."""

NonNegative: TypeAlias = Annotated[
    float, number(", at least 0 and at most 3e38", lambda value: 0 <= value <= 3e38)
]
"""A rate that 0 turns off."""

Fraction: TypeAlias = Annotated[float, number(" in [0, 1)", lambda value: 0 <= value < 1)]
"""A part of a whole."""

Seed: TypeAlias = Annotated[int, SEED]
"""Where random numbers start."""


_T = TypeVar("_T")
SCALARS = (int, float, str, bool)
"""The classes of values that are neither lists nor sections."""


def read(hint: object, value: object, path: str = "") -> Any:
    """Turns what a YAML file holds into a value of a type.

    Args:
        hint: a dataclass, a scalar type, `X | None`, `tuple[X, ...]`, `Mapping[str, X]`, `Literal`,
            an enum (written as its member's name in small letters), or any type `Annotated` with a
            `ArgumentKind`, a `OneOf` or a `Parsed`.
        value: dicts, lists and scalars.
        path: the dotted key of the value, with which every message begins.

    Returns:
        The value, of the type.

    Raises:
        ConfigError: for an unknown or missing key, a wrong type or a value out of bounds.

    Example:
        >>> read(tuple[int, ...], [1, 2], "sizes")
        (1, 2)
        >>> read(float, "1e-3", "rate")  # YAML 1.1 takes this spelling for a text
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
        return _pick({member.name.lower(): member for member in hint}, value, path)
    return _read_scalar(hint, value, path)


def write(value: object, hint: object = None) -> Any:
    """Turns a typed value into plain data from which `read` makes it again.

    Args:
        value: what `read` returned.
        hint: its type, where the value alone does not say it (a variant of a `OneOf`).

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
        hint: its type, with what `Annotated` adds to it.
        default: the value where the key is missing; `MISSING` where it must be given.
    """

    hint: object
    default: object


def options_of(thing: Callable[..., object]) -> dict[str, Option]:
    """Returns the options of a dataclass, or of a maker of strategies, that a config can set.

    What the library provides is left out: the path and the options of user code, and the model
    and the world of a strategy.

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

    For a class, the docstrings of its bases count, too.

    Example:
        >>> meanings_of(Option)["hint"]
        'its type, with what `Annotated` adds to it.'
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


def first_sentence(thing: Callable[..., object]) -> str:
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
    """Reads the keys that something takes.

    Args:
        options: what it takes.
        data: what is given.
        path: the dotted key of all of it.
        kind: what a key is called in messages.
        says_missing: the message about one that must be given, from the path and its name.

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
    """Replaces the old names of keys in the sections that something takes; each use warns.

    Args:
        thing: a dataclass, or a function that makes a strategy.
        data: values of its options, as plain data.
    """
    renamed = dict(data)
    for key, value in data.items():
        if isinstance(value, Mapping) and (option := options_of(thing).get(key)) is not None:
            for cls in filter(dataclasses.is_dataclass, typing.get_args(option.hint)):
                renamed[key] = with_new_names(typing.cast(type, cls), value, stacklevel=2)
    return renamed


def _section_with(key: str, options: Mapping[str, Option]) -> str:
    """The section and key meant by a key that is written one level too high; else ""."""
    for name, option in options.items():
        hints = [option.hint, *typing.get_args(option.hint)]
        tables = [table for hint in hints if (table := extra(hint, OneOf))]
        kinds = [kind for table in tables for kind in table.table.values()]
        sections = [x for x in kinds + hints if dataclasses.is_dataclass(x)]
        if key in {field.name for section in sections for field in dataclasses.fields(section)}:
            return f"{name}.{key}"
    return ""


def extra(hint: object, kind: type[_T]) -> _T | None:
    """The first thing of a kind that `Annotated` adds to a type."""
    extras = typing.get_args(hint)[1:] if typing.get_origin(hint) is Annotated else ()
    return next((one for one in extras if isinstance(one, kind)), None)


def _read_dataclass(cls: Any, data: object, path: str) -> Any:
    section, elsewhere = _section(data, path), getattr(cls, "elsewhere", {})
    for key in elsewhere.keys() & section.keys():
        raise ConfigError(f"{_join(path, key)}: there is no such key: {elsewhere[key]}")
    section = with_new_names(cls, section, stacklevel=2)
    values = read_options(options_of(cls), section, path)
    # A class may take one of its fields as positions: `Policy("Block", "Head")`.
    endless = [
        name for name, p in inspect.signature(cls).parameters.items() if p.kind is p.VAR_POSITIONAL
    ]
    positions = [item for name in endless for item in values.pop(name, ())]
    return _checked(lambda: cls(*positions, **values), path)


def _checked(make: Callable[[], _T], path: str) -> _T:
    """Makes a value that checks itself, with the path put before the message of its error."""
    try:
        made = make()
        getattr(made, "validate", lambda: None)()
        return made
    except AxonDistError as error:
        message = str(error)
        names_path = not path or message.startswith(path)
        raise ConfigError(message if names_path else f"{path}: {message}") from error


def _section(data: object, path: str) -> Mapping[str, object]:
    """A section of keys; one with nothing under it, as YAML gives it, is empty."""
    if data is None:
        return {}
    if not isinstance(data, Mapping):
        raise ConfigError(f"{path}: got {data!r:.80}, which must be a section of keys and values")
    return data


def _join(path: str, key: object) -> str:
    return f"{path}.{key}" if path else str(key)


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
            raise ConfigError(f"{path}: got preset and hub, which both give sizes; leave one out")
        hub = data.pop(HUB)
        data = {**_checked(lambda: choice.hubs[name](hub), _join(path, HUB)), **data}
    return _read_dataclass(variant, data, path)


def _read_user_code(choice: OneOf, key: str, value: Mapping[str, object], path: str) -> UserCode:
    """Reads a section of user code, whose options only the user's function reads."""
    others = [other for other in (choice.tag, *choice.user_code) if other in value and other != key]
    if others:
        raise ConfigError(
            f"{path}: got {key} and {others[0]}, which both say what it is; leave one of them out"
        )
    cls, function = choice.user_code[key], value[key]
    ours = options_of(cls)
    known = {name: item for name, item in value.items() if name in ours}
    known = read_options(ours, known, path)
    if not isinstance(function, str):
        raise ConfigError(f"{path}: got {function!r:.80}, which must be a path such as {PATH}")
    rest = {str(name): x for name, x in value.items() if name not in (key, *ours)}
    return _checked(lambda: cls(path=function, options=types.MappingProxyType(rest), **known), path)


def _pick(table: Mapping[Any, _T], name: object, path: str) -> _T:
    # Only a text can be a name; a list cannot be hashed.
    if not isinstance(name, (str, int)) or name not in table:
        raise ConfigError(f"{path}: there is no {name!r:.80}.{did_you_mean(str(name), table)}")
    return table[name]


def _read_union(hint: object, value: object, path: str) -> Any:
    """Takes the first option that fits; a section can only be one that has keys."""
    options = typing.get_args(hint)
    if value is None and types.NoneType in options:
        return None
    possible = [option for option in options if option is not types.NoneType]
    has_keys = isinstance(value, Mapping)
    fitting = [option for option in possible if _has_keys(option) == has_keys]
    # The type that has the keys of a section reports what is wrong with it.
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
    """Takes integers, and the spelling `1e-3`, which YAML 1.1 does not count as a number."""
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
