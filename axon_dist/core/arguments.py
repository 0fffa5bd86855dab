"""Checks plain values: arguments of public functions, keys of a config, options of a command.

An annotation is checked if it names plain values, arrays, classes, or containers of these. An
`ArgumentKind` checks more, for example that a number is at least 1; `Annotated[int, COUNT]` adds it
to a type. This module does not import JAX; the kinds that need it are in `checks.py`.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import inspect
import itertools
import math
import numbers
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType, NoneType, UnionType
from typing import (
    Annotated,
    Any,
    Literal,
    ParamSpec,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from .errors import AxonDistError, ConfigError

_P = ParamSpec("_P")
_R = TypeVar("_R")


@dataclasses.dataclass(frozen=True)
class ArgumentKind:
    """The valid values of an argument.

    Args:
        advice: what to give; follows the word "give" in messages.
        holds: returns whether a value is of this kind.
        error: the error to raise if it is not.
    """

    advice: str
    holds: Callable[[Any], bool]
    error: type[AxonDistError] = ConfigError

    def check(self, who: str, name: str, value: object) -> None:
        """Raises `error` if a value is not of this kind.

        Example:
            >>> WHOLE.check("shift", "offset", 2.5)
            Traceback (most recent call last):
            axon_dist.core.errors.ConfigError: shift got offset=2.5, a float; give a whole number
        """
        if not self.holds(value):
            raise self.error(f"{who} got {name}={_brief(value)}; give {self.advice}")

    def or_none(self) -> ArgumentKind:
        """This kind, or None."""
        return ArgumentKind(
            f"{self.advice}, or None", lambda x: x is None or self.holds(x), self.error
        )

    def several(self) -> ArgumentKind:
        """A sequence of this kind; not an iterator, which can be read only once."""
        return ArgumentKind(
            f"a list or tuple of which each item is {self.advice}",
            lambda x: (
                isinstance(x, Iterable)
                and not isinstance(x, (str, bytes, Mapping, Iterator, type))
                and getattr(x, "ndim", 1) > 0
                and _has_end(x)
                and all(map(self.holds, x))
            ),
            self.error,
        )


def instance_of(cls: type, advice: str, error: type[AxonDistError] = ConfigError) -> ArgumentKind:
    """The kind of a class's instances; see `ArgumentKind` for the arguments."""
    return ArgumentKind(advice, lambda x: isinstance(x, cls), error)


def checked(
    who: str | None = None, /, **kinds: ArgumentKind
) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Decorates a function to check its arguments before it runs.

    Each argument is checked against its kind if it has one, otherwise against its annotation.

    Args:
        who: the name in messages; None for the function's name.
        **kinds: kinds by argument name, checked instead of the annotations.

    Example:
        >>> @checked(number=WHOLE)
        ... def half(number):
        ...     return number // 2
        >>> half("8")
        Traceback (most recent call last):
        axon_dist.core.errors.ConfigError: half got number='8', a str; give a whole number
    """

    def wrap(function: Callable[_P, _R]) -> Callable[_P, _R]:
        compare = _comparison(function, who or function.__name__, kinds)

        @functools.wraps(function)
        def run(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            compare(args, kwargs)
            return function(*args, **kwargs)

        return run

    return wrap


def _comparison(
    function: Callable[..., Any], who: str, kinds: Mapping[str, ArgumentKind]
) -> Callable[[tuple[Any, ...], Mapping[str, Any]], None]:
    """Returns the function that checks the arguments of one call."""
    parameters = inspect.signature(function).parameters.values()
    positional = [p.name for p in parameters if p.kind <= p.POSITIONAL_OR_KEYWORD]
    several = [p.name for p in parameters if p.kind is p.VAR_POSITIONAL]
    resolved: dict[str, ArgumentKind | None] = {}

    def compare(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if not resolved:
            # Resolved at the first call: annotations may name classes defined after the function.
            resolved.update({name: kind_of(hint) for name, hint in _hints(function).items()})
            resolved.update(kinds)
        names = itertools.chain(positional, itertools.cycle(several))
        for name, value in (*zip(names, args, strict=False), *kwargs.items()):
            kind = resolved.get(name)
            if kind is not None:
                kind.check(who, name, value)

    return compare


def check_fields(thing: Any, who: str = "", but: tuple[str, ...] = ()) -> None:
    """Checks the fields of a dataclass against their annotations.

    Args:
        thing: the dataclass.
        who: the name in messages; "" for the name of its class.
        but: fields that are not checked.

    Raises:
        ConfigError: about the first field of the wrong kind.

    Example:
        >>> @dataclasses.dataclass
        ... class Span:
        ...     length: int | None
        >>> check_fields(Span("8"))
        Traceback (most recent call last):
        axon_dist.core.errors.ConfigError: Span got length='8', a str; give a whole number, or None
    """
    for name, kind in _kinds_of_fields(type(thing)):
        if name not in but:
            kind.check(who or type(thing).__name__, name, getattr(thing, name))


@functools.cache
def _kinds_of_fields(cls: Any) -> tuple[tuple[str, ArgumentKind], ...]:
    hints = _hints(cls)
    pairs = [(field.name, kind_of(hints.get(field.name))) for field in dataclasses.fields(cls)]
    return tuple((name, kind) for name, kind in pairs if kind is not None)


def _hints(thing: Any) -> dict[str, Any]:
    """The annotations of a function or class; {} if one of them names something not imported."""
    try:
        return get_type_hints(thing)
    except NameError:
        return {}


def kind_of(hint: Any) -> ArgumentKind | None:
    """The kind of an annotation; None if it names types that are not checked.

    Args:
        hint: checked for plain values, containers, functions, arrays, and classes of this package,
            JAX and Flax. Enums are left to `NamedChoice`, which looks up members by value.

    Example:
        >>> kind_of(tuple[float, ...] | None).advice, kind_of(str | enum.Enum)
        ('a list or tuple of which each item is a number, or None', None)
    """
    origin, terms = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return next((x for x in terms if isinstance(x, ArgumentKind)), kind_of(terms[0]))
    if origin in (Union, UnionType):
        dtypes = [term for term in terms if getattr(term, "__name__", "") == "dtype"]
        if dtypes:
            holds = functools.partial(_is_dtype, dtypes[0])
            kind = ArgumentKind("a dtype, such as 'float32'", holds)
            return kind.or_none() if NoneType in terms else kind
        kinds = [kind for term in terms if (kind := kind_of(term)) is not None]
        if len(kinds) < len(terms):
            return None
        advice = ", or ".join(kind.advice for kind in kinds)
        return ArgumentKind(advice, lambda x: any(kind.holds(x) for kind in kinds))
    if origin is Literal:
        advice = " or ".join(map(repr, terms))
        return ArgumentKind(advice, lambda x: TEXT.holds(x) and x in terms)
    if origin is Callable:
        return FUNCTION
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return MAPPING
    if isinstance(origin, type) and issubclass(Iterator, origin):
        return ITERABLE
    if isinstance(origin, type) and issubclass(origin, Iterable):
        each = kind_of(terms[0]) if len(terms) == 1 or terms[1:] == (...,) else None
        return TEXTS if each is TEXT else (each or _ANYTHING).several()
    return _PLAIN.get(hint, _kind_of_class(hint)) if isinstance(hint, type) else None


def _kind_of_class(cls: type) -> ArgumentKind | None:
    if cls.__name__ in ("Array", "ndarray"):
        return ARRAY if cls.__name__ == "Array" else NUMPY
    is_closed = getattr(cls, "_is_runtime_protocol", not getattr(cls, "_is_protocol", False))
    if issubclass(cls, enum.Enum) or not is_closed or not cls.__module__.startswith(_KNOWN):
        return None
    return ArgumentKind(f"a {cls.__name__}", lambda x: isinstance(x, cls))


def whole(words: str, least: int, most: int | None = None) -> ArgumentKind:
    """The kind of whole numbers in a range.

    Args:
        words: the range in words, to follow "a whole number", such as ", at least 1".
        least: the smallest.
        most: the largest; None for no limit.

    Example:
        >>> whole(" from 1 to 65535", 1, 65535).holds(65536)
        False
    """

    def holds(value: Any) -> bool:
        return is_whole(value) and least <= value and (most is None or value <= most)

    return ArgumentKind(f"a whole number{words}", holds)


def number(words: str, holds: Callable[[float], bool]) -> ArgumentKind:
    """The kind of finite numbers that meet a condition.

    Args:
        words: the condition in words, to follow "a number".
        holds: whether a number meets it.

    Example:
        >>> number(" above 0", lambda x: x > 0).holds("1")
        False
    """
    return ArgumentKind(f"a number{words}", lambda x: is_number(x) and holds(x))


_SPELLING = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?", re.ASCII)


def spelled_number(text: str) -> float | None:
    """Reads a number that is written as in 0.5 or 1e-3; None for any other text.

    Example:
        >>> spelled_number("1e-3"), spelled_number("1_000"), spelled_number("nan")
        (0.001, None, None)
    """
    return float(text) if _SPELLING.fullmatch(text) else None


def is_whole(value: object) -> bool:
    """Whether a value is a whole number; booleans are not."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def is_number(value: object) -> bool:
    """Whether a value is a finite Python or numpy number."""
    try:
        return REAL.holds(value) and math.isfinite(value)  # pyright: ignore[reportArgumentType]
    except OverflowError:  # A whole number that no float can hold.
        return False


_MOST_ITEMS = 2**26


def _is_scalar(value: Any) -> bool:
    """Whether a value is a number other than NaN, or a scalar JAX array."""
    is_real = REAL.holds(value) and value == value
    return is_real or (hasattr(value, "aval") and value.shape == ())


def _has_end(value: Any) -> bool:
    """Whether a value has few enough items to look at each; `range(10**12)` has not."""
    try:
        return not hasattr(value, "__len__") or len(value) <= _MOST_ITEMS
    except (TypeError, OverflowError):  # `len` refuses it, or finds more than 63 bits.
        return False


def _is_array(value: Any) -> bool:
    """Whether a value is an array (or its shape) of numbers, booleans or random keys."""
    if inspect.isclass(value) or not hasattr(value, "shape"):
        return False
    return hasattr(value, "dtype") and getattr(value.dtype, "kind", "V") not in "OUSmM"


def _is_dtype(of_numpy: Any, value: Any) -> bool:
    """Whether a value is a numeric or boolean dtype, or the name of one."""
    try:
        dtype = of_numpy(value)
    except (TypeError, ValueError):
        return False
    return value is not None and dtype.itemsize > 0 and dtype.kind not in "OUSmM"


def _brief(value: object) -> str:
    """A short description of a value and its type; only the type if the value prints long."""
    name = type(value).__name__
    kind = f"a{'n' * (name[0] in 'aeiouAEIO')} {name}"
    kind = f"the class {value.__name__}" if inspect.isclass(value) else kind
    is_plain = value is None or isinstance(value, (str, int, float, tuple, list, dict))
    if value is None:
        return "None"
    return f"{value!r:.60}, {kind}" if is_plain else kind


WHOLE = ArgumentKind("a whole number", is_whole)
SEED = whole(" in [0, 2^32)", 0, 2**32 - 1)
SIZE = whole(", at least 0", 0)
COUNT = whole(", at least 1", 1)
NUMBER = ArgumentKind("a finite number", is_number)
REAL = ArgumentKind("a number", lambda x: isinstance(x, numbers.Real) and not isinstance(x, bool))
"""A number, possibly infinite or NaN; the caller checks its range."""
TEXT = ArgumentKind("a string", lambda x: isinstance(x, str))
TEXTS = dataclasses.replace(TEXT.several(), advice="a list of strings")
FUNCTION = ArgumentKind("a function", callable)
ITERABLE = ArgumentKind(
    "a list or another iterable", lambda x: isinstance(x, Iterable) and not isinstance(x, str)
)
MAPPING = ArgumentKind("a mapping, such as a dict", lambda x: isinstance(x, Mapping))
ARRAY = ArgumentKind("an array of numbers", _is_array)
NUMPY = ArgumentKind("an array of numbers", lambda x: _is_array(x) or NUMBER.several().holds(x))
_ANYTHING = ArgumentKind("as the docstring describes", lambda _: True)
_KNOWN = "axon_dist.", "flax.", "jax", "optax."
"""Modules whose classes are checked by `isinstance`."""
FLOAT = ArgumentKind("a number", _is_scalar)
"""A number other than NaN, or a scalar JAX array."""
FLAG = ArgumentKind("True or False", lambda x: type(x).__name__ in ("bool", "bool_"))
_PLAIN: MappingProxyType[type, ArgumentKind] = MappingProxyType(
    {
        int: WHOLE,
        float: FLOAT,
        bool: FLAG,
        str: TEXT,
        Path: ArgumentKind("a pathlib.Path", lambda x: isinstance(x, os.PathLike)),
        NoneType: ArgumentKind("None", lambda x: x is None),
    }
)
"""The kinds of plain classes used as annotations."""
