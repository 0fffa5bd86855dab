"""Renamed fields, attributes, arguments and names: old names work for a while, and warn.

CONTRIBUTING.md says for how long: for one minor version, and at least for three months.
"""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, ParamSpec, TypeVar

_T = TypeVar("_T")
_P = ParamSpec("_P")
_R = TypeVar("_R")


def renamed_fields(**new_of: str) -> Callable[[type[_T]], type[_T]]:
    """Decorates a dataclass whose fields are renamed: the old names work, and each use warns.

    Args:
        **new_of: the new name of a field, by its old name.

    Example:
        >>> import dataclasses
        >>> @renamed_fields(size="length")
        ... @dataclasses.dataclass(frozen=True)
        ... class Span:
        ...     length: int
        >>> with warnings.catch_warnings(record=True) as caught:
        ...     warnings.simplefilter("always")
        ...     Span(size=3), Span(3).size
        (Span(length=3), 3)
        >>> [str(one.message) for one in caught]
        ['Span.size is deprecated; use length', 'Span.size is deprecated; use length']
    """

    def decorate(cls: type[_T]) -> type[_T]:
        init = cls.__init__

        @functools.wraps(init)
        def with_old_names(self: _T, *args: Any, **kwargs: Any) -> None:
            init(self, *args, **with_new_names(cls, kwargs, stacklevel=3))

        setattr(cls, "__init__", with_old_names)  # noqa: B010
        setattr(cls, "_new_name_of", MappingProxyType(new_of))  # noqa: B010
        for old, new in new_of.items():
            setattr(cls, old, renamed_attribute(old, new))
        setattr(cls, "__setstate__", _set_state)  # noqa: B010
        return cls

    return decorate


def renamed_attribute(old: str, new: str) -> property:
    """Returns a property that reads another attribute, and warns that it is the old name of it.

    Args:
        old: the name that the property gets in the class.
        new: the name of the attribute that it reads.

    Example:
        >>> class Span:
        ...     length = 3
        ...     size = renamed_attribute("size", "length")
        >>> with warnings.catch_warnings(record=True) as caught:
        ...     warnings.simplefilter("always")
        ...     Span().size, str(caught[0].message)
        (3, 'Span.size is deprecated; use length')
    """

    def get(self: Any) -> Any:
        _warn(type(self), old, new, stacklevel=3)
        return getattr(self, new)

    return property(get, doc=f"The deprecated name of `{new}`.")


def renamed_names(module: str, **new_of: str) -> Callable[[str], Any]:
    """Returns the `__getattr__` of a module some of whose names are renamed; each use warns.

    Args:
        module: `__name__` of the module.
        **new_of: the new name of a function or class, by its old name.
    """

    def module_getattr(name: str) -> Any:
        if name not in new_of:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        text = f"{module}.{name} is deprecated; use {new_of[name]}"
        warnings.warn(text, DeprecationWarning, stacklevel=2)
        return getattr(sys.modules[module], new_of[name])

    return module_getattr


def renamed_arguments(**new_of: str) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Decorates a function whose arguments are renamed: the old keywords work, and each use warns.

    Args:
        **new_of: the new name of an argument, by its old name. A call that gives both raises a
            `TypeError`.

    Example:
        >>> @renamed_arguments(size="length")
        ... def span(length):
        ...     return length
        >>> with warnings.catch_warnings(record=True) as caught:
        ...     warnings.simplefilter("always")
        ...     span(size=3)
        3
        >>> [str(one.message) for one in caught]
        ['span(size=...) is deprecated; use length']
    """

    def decorate(function: Callable[_P, _R]) -> Callable[_P, _R]:
        @functools.wraps(function)
        def with_old_keywords(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            # A class is called by its own name, not as `__init__`.
            name = function.__qualname__.removesuffix(".__init__").rpartition(".")[2]
            for old, new in new_of.items():
                if old in kwargs:
                    if new in kwargs:
                        text = f"{name}() got {new}= and {old}=, its old name; give only {new}="
                        raise TypeError(text)
                    text = f"{name}({old}=...) is deprecated; use {new}"
                    warnings.warn(text, DeprecationWarning, stacklevel=2)
                    kwargs[new] = kwargs.pop(old)
            return function(*args, **kwargs)

        return with_old_keywords

    return decorate


def with_new_names(cls: type[Any], values: Mapping[str, Any], stacklevel: int) -> dict[str, Any]:
    """Replaces the old names of a dataclass's fields by the new ones.

    Args:
        cls: any dataclass; without `renamed_fields`, nothing is replaced.
        values: values of its fields, by name.
        stacklevel: which caller a warning names, as in `warnings.warn`.
    """
    found = dict(values)
    for old, new in getattr(cls, "_new_name_of", {}).items():
        if old in found:
            _warn(cls, old, new, stacklevel + 1)
            # `dataclasses.replace(thing, old=...)` also passes the current value by the new name.
            found[new] = found.pop(old)
    return found


def _set_state(self: Any, state: Mapping[str, Any]) -> None:
    """Restores the fields of a pickle, which may have been written under the old names."""
    new_of = type(self)._new_name_of
    # The class is frozen, so its fields cannot be assigned.
    vars(self).update({new_of.get(name, name): value for name, value in state.items()})


def _warn(cls: type[Any], old: str, new: str, stacklevel: int) -> None:
    text = f"{cls.__name__}.{old} is deprecated; use {new}"
    warnings.warn(text, DeprecationWarning, stacklevel=stacklevel)
