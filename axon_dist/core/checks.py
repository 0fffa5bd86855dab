"""`told`: what a public function is given, compared by kind before it is used; a row per kind.

What an argument or a field of a dataclass can be is read off its annotation where that names
numbers, texts, flags or sequences of these; a row says more, such as that it is at least 1.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import inspect
import math
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, ParamSpec, TypeVar

import jax.numpy as jnp
import numpy as np
from flax import linen, nnx
from jax.typing import DTypeLike

from .errors import AxonDistError, ConfigError

_P = ParamSpec("_P")
_R = TypeVar("_R")


@dataclasses.dataclass(frozen=True)
class ArgumentKind:
    """What an argument can be.

    Args:
        advice: what to give, to follow "give".
        holds: whether a value is of the kind.
        error: what is raised where it is not.
    """

    advice: str
    holds: Callable[[Any], bool]
    error: type[AxonDistError] = ConfigError

    def check(self, who: str, name: str, value: object) -> None:
        """Raises the error of the kind unless a value is of it.

        Example:
            >>> WHOLE.check("shift", "offset", 2.5)
            Traceback (most recent call last):
            axon_dist.core.errors.ConfigError: shift got offset=2.5, a float; give a whole number
        """
        if not self.holds(value):
            raise self.error(f"{who} got {name}={_brief(value)}; give {self.advice}")

    def or_none(self) -> ArgumentKind:
        """The kind, or None."""
        return ArgumentKind(
            f"{self.advice}, or None", lambda x: x is None or self.holds(x), self.error
        )

    def several(self) -> ArgumentKind:
        """A sequence of the kind; an iterator, which can be read but once, is not looked into."""
        return ArgumentKind(
            f"a list or tuple, each of it {self.advice}",
            lambda x: (
                isinstance(x, Iterable)
                and not isinstance(x, (str, bytes, Mapping, type))
                and not hasattr(x, "dtype")
                and (isinstance(x, Iterator) or all(map(self.holds, x)))
            ),
            self.error,
        )


def checked(
    who: str | None = None, /, **kinds: ArgumentKind
) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Has a function compare its arguments with their annotations, or kinds, before it runs.

    Args:
        who: the name in messages; None takes that of the function.
        **kinds: what the arguments of these names can be, in place of their annotations.

    Example:
        >>> @checked(number=WHOLE)
        ... def half(number):
        ...     return number // 2
        >>> half("8")
        Traceback (most recent call last):
        axon_dist.core.errors.ConfigError: half got number='8', a str; give a whole number
    """

    def wrap(function: Callable[_P, _R]) -> Callable[_P, _R]:
        parameters = inspect.signature(function).parameters
        names = tuple(parameters)
        name_of = who or function.__name__
        rows: dict[str, ArgumentKind | None] = {}

        @functools.wraps(function)
        def run(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            if not rows:
                # Not before: a module may name classes that are defined after the function.
                known = function.__globals__
                rows.update({n: kind_of(p.annotation, known) for n, p in parameters.items()})
                rows.update(kinds)
            for name, value in (*zip(names, args, strict=False), *kwargs.items()):
                kind = rows.get(name)
                if kind is not None:
                    kind.check(name_of, name, value)
            return function(*args, **kwargs)

        return run

    return wrap


def check_fields(thing: Any, who: str = "") -> None:
    """Compares the fields of a dataclass with their annotations.

    Args:
        thing: the dataclass.
        who: the name in messages; "" takes that of its class.

    Raises:
        ConfigError: about the first field that is of another kind.

    Example:
        >>> @dataclasses.dataclass
        ... class Span:
        ...     length: int | None
        >>> check_fields(Span("8"))
        Traceback (most recent call last):
        axon_dist.core.errors.ConfigError: Span got length='8', a str; give a whole number, or None
    """
    for name, kind in _kinds_of_fields(type(thing)):
        kind.check(who or type(thing).__name__, name, getattr(thing, name))


@functools.cache
def _kinds_of_fields(cls: Any) -> tuple[tuple[str, ArgumentKind], ...]:
    names = vars(sys.modules[cls.__module__])
    pairs = [(field.name, kind_of(field.type, names)) for field in dataclasses.fields(cls)]
    return tuple((name, kind) for name, kind in pairs if kind is not None)


def kind_of(
    annotation: Any, names: Mapping[str, Any] = MappingProxyType({})
) -> ArgumentKind | None:
    """What an annotation as text allows; None where it names more than is known here.

    Args:
        annotation: of plain values, of sequences of these, of functions, and of this package's
            classes; an enum's members have names of their own, and are looked up by these.
        names: the classes by name, as where it stands.

    Example:
        >>> kind_of("tuple[float, ...] | None").advice, kind_of("Mesh | str")
        ('a list or tuple, each of it a number, or None', None)
    """
    terms = annotation.split(" | ") if isinstance(annotation, str) else [""]
    kinds = [kind for term in terms if (kind := _kind_of_term(term, names)) is not None]
    if len(kinds) < len(terms):
        return None
    advice = ", or ".join(kind.advice for kind in kinds)
    return ArgumentKind(advice, lambda x: any(kind.holds(x) for kind in kinds))


def _kind_of_term(term: str, names: Mapping[str, Any]) -> ArgumentKind | None:
    if (plain := _PLAIN.get(term)) is not None:
        return plain
    if term.startswith("Callable["):
        return FUNCTION
    if literal := re.fullmatch(r"""Literal\[([\w"', ]+)\]""", term):
        words = [word.strip(" \"'") for word in literal[1].split(",")]
        return ArgumentKind(" or ".join(map(repr, words)), lambda x: TEXT.holds(x) and x in words)
    if listed := re.fullmatch(r"(?:tuple|list|Sequence|Iterable)\[([\w.]+)(?:, \.\.\.)?\]", term):
        each = _kind_of_term(listed[1], names)
        return None if each is None else each.several()
    head, _, tail = term.partition(".")
    found = names.get(head)
    found = getattr(found, tail, None) if tail else found
    if not isinstance(found, type) or not found.__module__.startswith(_KNOWN):
        return None
    if issubclass(found, enum.Enum) or getattr(found, "_is_protocol", False):
        return None
    return ArgumentKind(f"a {found.__name__}", lambda x: isinstance(x, found))


def is_whole(value: object) -> bool:
    """Whether a value is a whole number; true and false are none."""
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def is_number(value: object) -> bool:
    """Whether a value is a finite number of Python or numpy."""
    return is_whole(value) or (isinstance(value, (float, np.floating)) and math.isfinite(value))


def _is_scalar(value: Any) -> bool:
    """Whether a value is a number, or an array of no dims."""
    is_real = REAL.holds(value) and value == value
    return is_real or (hasattr(value, "aval") and value.shape == ())


def is_array(value: Any) -> bool:
    """Whether a value is an array or its shape, a number, or a list of numbers."""
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return not inspect.isclass(value)
    try:
        return np.asarray(value).dtype.kind in "biufc"
    except ValueError:  # Lists of several lengths.
        return False


def takes(function: Callable[..., Any], *names: str) -> bool:
    """Whether a function can be called with so many arguments, as far as Python knows.

    Example:
        >>> takes(lambda keys, leaf: True, "keys", "leaf"), takes(lambda: True, "keys")
        (True, False)
    """
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # A callable that Python knows no signature of.
        return True
    try:
        signature.bind(*names)
    except TypeError:
        return False
    return True


def is_dtype(value: Any, kind: DTypeLike) -> bool:
    """Whether a value is a dtype of a kind, such as `jnp.floating`, or names one that JAX has."""
    try:
        return jnp.issubdtype(jnp.dtype(value), kind)
    except TypeError:
        return False


def is_module(value: object) -> bool:
    """Whether a value is a module, or a function that makes one; a wrapper of one is neither."""
    if isinstance(value, (nnx.Module, linen.Module)):
        return isinstance(value, nnx.Module)
    is_maker = callable(value) and (inspect.isclass(value) or takes(value))
    return is_maker and not hasattr(value, "strategy")


def _brief(value: object) -> str:
    """A value and its type in a few words; what prints over many lines is its type alone."""
    name = type(value).__name__
    kind = f"a{'n' * (name[0] in 'aeiouAEIO')} {name}"
    kind = f"the class {value.__name__}" if inspect.isclass(value) else kind
    is_plain = value is None or isinstance(value, (str, int, float, tuple, list, dict))
    if value is None:
        return "None"
    return f"{value!r:.60}, {kind}" if is_plain else kind


WHOLE = ArgumentKind("a whole number", is_whole)
SEED = ArgumentKind("a whole number in [0, 2^32)", lambda x: is_whole(x) and 0 <= x < 2**32)
SIZE = ArgumentKind("a whole number, at least 0", lambda x: is_whole(x) and x >= 0)
COUNT = ArgumentKind("a whole number, at least 1", lambda x: is_whole(x) and x >= 1)
NUMBER = ArgumentKind("a finite number", is_number)
REAL = ArgumentKind(
    "a number", lambda x: isinstance(x, (int, float, np.number)) and not isinstance(x, bool)
)
"""A number, of which somebody else says what it must be."""
TEXT = ArgumentKind("a text", lambda x: isinstance(x, str))
TEXTS = ArgumentKind(
    "a list of texts",
    lambda x: (
        not isinstance(x, (str, Mapping))
        and isinstance(x, Iterable)
        and all(isinstance(one, str) for one in x)
    ),
)
NUMBERS = ArgumentKind("a dtype of numbers, such as 'float32'", lambda x: is_dtype(x, jnp.number))
FLOATS = ArgumentKind(
    "a floating-point dtype, such as 'bfloat16'", lambda x: is_dtype(x, jnp.floating)
)
MODULE = ArgumentKind(
    "an nnx.Module, such as nnx.Linear(2, 3, rngs=nnx.Rngs(0))",
    lambda x: isinstance(x, nnx.Module),
)
MODEL = ArgumentKind(
    "an nnx.Module, or a function of no arguments that makes one; not a wrapper of one", is_module
)
OPTIMIZER = ArgumentKind(
    "an optax transformation, such as optax.adamw(1e-3)",
    lambda x: (
        all(callable(getattr(x, name, None)) for name in ("init", "update"))
        and not isinstance(x, nnx.Optimizer)
    ),
)
RNGS = ArgumentKind("random numbers, such as nnx.Rngs(0)", lambda x: isinstance(x, nnx.Rngs))
FUNCTION = ArgumentKind("a function", callable)
ARRAY = ArgumentKind("an array or a number", is_array)
_KNOWN = "axon_dist.", "flax.nnx."
"""Where classes come from whose instances nothing else stands in for."""
_PLAIN: MappingProxyType[str, ArgumentKind] = MappingProxyType(
    {
        "int": WHOLE,
        "float": ArgumentKind("a number", _is_scalar),
        "bool": ArgumentKind("True or False", lambda x: isinstance(x, (bool, np.bool_))),
        "str": TEXT,
        "tuple[str, ...]": TEXTS,
        "None": ArgumentKind("None", lambda x: x is None),
    }
)
"""What an argument can be whose annotation is such a word."""
