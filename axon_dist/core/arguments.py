"""The arguments of a public function, compared with its annotations.

An annotation says what an argument can be where it names plain values, arrays, classes, or
containers of these; a kind says more, such as that a number is at least 1. Plain Python: the kinds
that need JAX are in `checks.py`.
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
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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

from .errors import AxonDistError, ConfigError, OutOfMemoryError

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
        """A sequence of the kind; no iterator, which can be read but once."""
        return ArgumentKind(
            f"a list or tuple, each of it {self.advice}",
            lambda x: (
                isinstance(x, Iterable)
                and not isinstance(x, (str, bytes, Mapping, Iterator, type))
                and getattr(x, "ndim", 1) > 0
                and all(map(self.holds, x))
            ),
            self.error,
        )


def instance_of(cls: type, advice: str, error: type[AxonDistError] = ConfigError) -> ArgumentKind:
    """An instance of a class; arguments as of `ArgumentKind`."""
    return ArgumentKind(advice, lambda x: isinstance(x, cls), error)


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
        return _explained(function, who or function.__name__, kinds)

    return wrap


def _comparison(
    function: Callable[..., Any],
    who: str,
    kinds: Mapping[str, ArgumentKind],
    has_failed: bool = False,
) -> Callable[[tuple[Any, ...], Mapping[str, Any]], None]:
    parameters = inspect.signature(function).parameters.values()
    positional = [p.name for p in parameters if p.kind <= p.POSITIONAL_OR_KEYWORD]
    several = [p.name for p in parameters if p.kind is p.VAR_POSITIONAL]
    rows: dict[str, ArgumentKind | None] = {}

    def compare(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if not rows:
            # Not before: a module may name classes that are defined after the function.
            rows.update(
                {name: kind_of(hint) for name, hint in _hints(function, has_failed).items()}
            )
            rows.update(kinds)
        names = itertools.chain(positional, itertools.cycle(several))
        for name, value in (*zip(names, args, strict=False), *kwargs.items()):
            kind = rows.get(name)
            if kind is not None:
                kind.check(who, name, value)

    return compare


def explain_calls(room: dict[str, Any]) -> None:
    """Has public functions and methods of a room that fail say which argument is of a wrong kind.

    Errors of this library pass. Where Python, numpy or JAX fails in a function, its
    arguments are compared with their annotations, and the first that does not fit is the error.

    Args:
        room: the names that its `__init__.py` imports; functions are replaced, classes changed.
    """
    for name, thing in list(room.items()):
        if name.startswith("_") or not getattr(thing, "__module__", "").startswith("axon_dist."):
            continue
        is_cached = hasattr(thing, "cache_info")
        if is_cached or (inspect.isfunction(thing) and not hasattr(thing, "__wrapped__")):
            room[name] = _explained(thing, name)
        elif inspect.isclass(thing) and not issubclass(thing, (enum.Enum, BaseException)):
            _explain_methods(thing)


def _explain_methods(cls: type) -> None:
    first = "__post_init__" if dataclasses.is_dataclass(cls) else "__init__"
    for name, method in list(vars(cls).items()):
        function = method.__func__ if isinstance(method, classmethod) else method
        is_public = not name.startswith("_") or name == first
        if is_public and inspect.isfunction(function) and not hasattr(function, "__wrapped__"):
            who = cls.__name__ if name.startswith("_") else f"{cls.__name__}.{name}"
            run = _explained(function, who, of_record=dataclasses.is_dataclass(cls))
            setattr(cls, name, classmethod(run) if function is not method else run)


def _explained(
    function: Callable[_P, _R],
    who: str,
    kinds: Mapping[str, ArgumentKind] | None = None,
    of_record: bool = False,
) -> Callable[_P, _R]:
    """Compares before the function runs where there are kinds, and else once it has failed."""
    has_failed = kinds is None
    compare = _comparison(function, who, kinds or {}, has_failed)
    # The call of a generator function runs nothing that could fail.
    is_first = any((not has_failed, inspect.isgeneratorfunction(function)))

    @functools.wraps(function)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        try:
            if is_first:
                compare(args, kwargs)
            return function(*args, **kwargs)
        except AxonDistError:
            raise
        except Exception as error:
            if of_record and args and not isinstance(args[0], type):
                check_fields(args[0])
            if not is_first:
                compare(args, kwargs)
            _explain(error, function, who, (*args, *kwargs.values()))
            raise

    return run


_TRACED = (
    "was called within a function that JAX traces, such as one of jax.jit, jax.grad or jax.vmap, "
    "or with what such a function has left behind, and needs values: call it outside, with arrays"
)
_UNLIKE = "got trees of different structures: {}; give trees with the same keys and containers"
_UNBOUND = "needs its mesh axis ({}): call it within jax.shard_map, or group.spmd(function)"
_COMPUTING = {
    *("collectives", "core", "data", "inspect", "jaxpr", "mesh", "models", "nn", "ops", "optim"),
    *("planner", "schedule", "sharding"),
}
"""Rooms in which all that can fail is what somebody has called them with."""

_OF_VALUES = (LookupError, ArithmeticError, AttributeError, TypeError, ValueError)
_LIBRARIES = {"axon_dist", "jax", "jaxlib", "numpy", "flax", "optax", "opt_einsum", "grain"}
_LAYERS = ("flax.nnx.nn", "flax.linen")


def _explain(
    error: Exception, function: Callable[..., Any], who: str, arguments: Sequence[object]
) -> None:
    """Raises `ConfigError` where a function's arguments, and no code of the user's, make it fail.

    Args:
        error: of Python or JAX.
        function: that failed.
        who: its name in messages.
        arguments: what it was called with.
    """
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    rooms = {str(frame.f_globals.get("__name__")).partition(".")[0] for frame in frames}
    # An error within a layer of Flax is about the user's model, and its message says so.
    of_layers = (str(f.f_globals.get("__name__")) for f in frames if f.f_code.co_name == "__call__")
    others = rooms - _LIBRARIES - sys.stdlib_module_names
    if others or any(name.startswith(_LAYERS) for name in of_layers):
        return
    kinds, text = {cls.__name__ for cls in type(error).__mro__}, " ".join(str(error).split())[:300]
    is_of_tracers = not kinds.isdisjoint(("ConcretizationTypeError", "UnexpectedTracerError"))
    if is_of_tracers or "is not available on traced array" in text:
        raise ConfigError(f"{who} {_TRACED}") from error
    if text.startswith("pytree structure error"):
        raise ConfigError(f"{who} {_UNLIKE.format(text)}") from error
    if isinstance(error, NameError) and "unbound axis name" in text:
        raise ConfigError(f"{who} {_UNBOUND.format(text)}") from error
    ours = [f for f in frames if str(f.f_globals.get("__name__")).startswith("axon_dist.")]
    unwrapped, named = inspect.unwrap(function), ", ".join(map(_brief, arguments))
    # Elsewhere what fails further down may be a mistake of this package.
    is_misuse = ours[-1].f_code.co_qualname.startswith(unwrapped.__qualname__)
    is_misuse = is_misuse or unwrapped.__module__.split(".")[1] in _COMPUTING
    if is_misuse and isinstance(error, _OF_VALUES) and not isinstance(error, FloatingPointError):
        raise ConfigError(
            f"{who} can make nothing of {named}: {text}; give what its docstring says"
        ) from error
    if is_misuse and (isinstance(error, MemoryError) or text.startswith("RESOURCE_EXHAUSTED")):
        raise OutOfMemoryError(
            f"{who} got {named}, and there is no memory for it ({text}); give smaller numbers"
        ) from error


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
    hints = _hints(cls)
    pairs = [(field.name, kind_of(hints.get(field.name))) for field in dataclasses.fields(cls)]
    return tuple((name, kind) for name, kind in pairs if kind is not None)


def _hints(thing: Any, has_failed: bool = False) -> dict[str, Any]:
    """The annotations of a function or a class; none where one names what is not imported.

    Args:
        thing: the function or the class.
        has_failed: whether it has; then trees are looked into, which before it costs too much.
    """
    try:
        return get_type_hints(thing, include_extras=has_failed)
    except NameError:
        return {}


def kind_of(hint: Any) -> ArgumentKind | None:
    """The kind of an annotation; None where it names other types.

    Args:
        hint: of plain values, containers, functions, arrays, and of classes of this package, JAX
            and Flax; enums are left to `NamedChoice`, which looks members up by name.

    Example:
        >>> kind_of(tuple[float, ...] | None).advice, kind_of(str | enum.Enum)
        ('a list or tuple, each of it a number, or None', None)
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


def is_whole(value: object) -> bool:
    """Whether a value is a whole number; true and false are none."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def is_number(value: object) -> bool:
    """Whether a value is a finite number of Python or numpy."""
    return REAL.holds(value) and math.isfinite(value)  # pyright: ignore[reportArgumentType]


def _is_scalar(value: Any) -> bool:
    """Whether a value is a number, or an array of no dims."""
    is_real = REAL.holds(value) and value == value
    return is_real or (hasattr(value, "aval") and value.shape == ())


def _is_array(value: Any) -> bool:
    """Whether a value is an array of numbers, truths or keys, or its shape."""
    if inspect.isclass(value) or not hasattr(value, "shape"):
        return False
    return hasattr(value, "dtype") and getattr(value.dtype, "kind", "V") not in "OUSmM"


def _is_dtype(of_numpy: Any, value: Any) -> bool:
    """Whether a value is a dtype of numbers or truths, or names one."""
    try:
        dtype = of_numpy(value)
    except (TypeError, ValueError):
        return False
    return value is not None and dtype.itemsize > 0 and dtype.kind not in "OUSmM"


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
REAL = ArgumentKind("a number", lambda x: isinstance(x, numbers.Real) and not isinstance(x, bool))
"""A number, finite or not; the caller checks its range."""
TEXT = ArgumentKind("a text", lambda x: isinstance(x, str))
TEXTS = dataclasses.replace(TEXT.several(), advice="a list of texts")
FUNCTION = ArgumentKind("a function", callable)
ITERABLE = ArgumentKind(
    "a list or another iterable", lambda x: isinstance(x, Iterable) and not isinstance(x, str)
)
MAPPING = ArgumentKind("a mapping, such as a dict", lambda x: isinstance(x, Mapping))
ARRAY = ArgumentKind("an array of numbers", _is_array)
NUMPY = ArgumentKind("an array of numbers", lambda x: _is_array(x) or NUMBER.several().holds(x))
_ANYTHING = ArgumentKind("what the docstring says", lambda _: True)
_KNOWN = "axon_dist.", "flax.", "jax", "optax."
"""Modules whose classes are checked by `isinstance`: no other class replaces them."""
_PLAIN: MappingProxyType[type, ArgumentKind] = MappingProxyType(
    {
        int: WHOLE,
        float: ArgumentKind("a number", _is_scalar),
        bool: ArgumentKind("True or False", lambda x: type(x).__name__ in ("bool", "bool_")),
        str: TEXT,
        Path: ArgumentKind("a pathlib.Path", lambda x: isinstance(x, os.PathLike)),
        NoneType: ArgumentKind("None", lambda x: x is None),
    }
)
"""What an argument can be whose annotation is such a class."""
