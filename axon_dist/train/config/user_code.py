"""User code: functions by dotted path, called with the other keys of their config section."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar

from axon_dist.core.errors import AxonDistError, ConfigError, did_you_mean

PATH = "package.module:name"
"""The form of a function's path."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class UserCode:
    """A config section `{factory: package.module:name, key: value}`.

    It means `package.module.name(key=value, **provided)`, called when the run is built. As with
    `python -m`, the module is searched for in the current folder first.

    Args:
        path: the path of the function or class, `package.module:name` or `package.module.name`.
        options: the keyword arguments from the config.

    Example:
        >>> code = UserCode(path="collections:Counter", options={"axes": 3})
        >>> code.call()
        Counter({'axes': 3})
    """

    key: ClassVar[str] = "factory"
    """The key that holds the path."""
    section: ClassVar[str] = ""
    """The name of the section."""
    provided: ClassVar[tuple[str, ...]] = ()
    """Further keyword arguments, which the library always passes."""
    offered: ClassVar[tuple[str, ...]] = ()
    """Keyword arguments that the library passes if the function takes them."""
    by_position: ClassVar[tuple[str, ...]] = ()
    """Descriptions of the positional arguments of later calls."""

    path: str
    options: Mapping[str, object] = dataclasses.field(default_factory=dict)

    def validate(self) -> None:
        """Imports the function and checks its parameters, without calling it.

        Raises:
            ConfigError: when it cannot be found, or does not accept its arguments.
        """
        params = parameters_of(self.find())
        reserved = next((name for name in self.provided if name in self.options), None)
        if reserved is not None:
            raise ConfigError(
                f"{self.section}.{reserved}: the run itself passes this argument to {self.path}; "
                "leave it out",
                code="reserved-argument",
            )
        if params is None:
            return
        options = [p for p in list(params.values())[len(self.by_position) :] if p.kind in _BY_NAME]
        valid = {p.name for p in options}
        accepts_any = any(p.kind is p.VAR_KEYWORD for p in params.values())
        for name in () if accepts_any else self.options:
            if name not in valid:
                valid -= {*self.provided, *self.offered}
                hint = did_you_mean(name, valid) if valid else " It takes none."
                raise ConfigError(
                    f"{self.section}.{name}: {self.path} takes no such argument.{hint}"
                )
        offered = [name for name in self.offered if name in params]
        named = dict.fromkeys((*self.options, *self.provided, *offered))
        try:
            inspect.Signature(list(params.values())).bind(*self.by_position, **named)
        except TypeError as error:
            words = [*self.by_position, *(_GIVEN.get(name, name) for name in named)]
            raise ConfigError(
                f"{self.full_key}: {self.path} takes ({', '.join(params)}), but is called with "
                f"{' and '.join(words) or 'nothing'}: {error}; set the missing keys next to "
                f"{self.key}, and make the function accept the others",
                code="user-code-arguments",
            ) from None

    def find(self) -> Callable[..., Any]:
        """Imports the function.

        Raises:
            ConfigError: when the module or the name in it does not exist, when importing the module
                fails, or when the value is not callable.
        """
        return find(self.path, self.full_key)

    @property
    def full_key(self) -> str:
        """The config key that names the function."""
        return f"{self.section}.{self.key}".lstrip(".")

    def returned(self, made: object, what: str) -> ConfigError:
        """Makes the error for a function that returned a value of the wrong type."""
        kind = type(made).__name__
        return ConfigError(f"{self.full_key}: {self.path} returns a {kind}, which must be {what}")

    def call(self, **arguments: object) -> Any:
        """Calls the function with the options and further keyword arguments."""
        function = self.find()
        params = parameters_of(function)
        unwanted = {name for name in self.offered if params is not None and name not in params}
        arguments = {name: value for name, value in arguments.items() if name not in unwanted}
        try:
            return function(**self.options, **arguments)
        except SystemExit as error:
            raise ConfigError(
                f"{self.full_key}: {self.path} ended the program with SystemExit({error.code!r}); "
                "it must return a value or raise another error",
                code="user-code-exits",
            ) from error
        except Exception as error:
            if not isinstance(error, AxonDistError):
                error.add_note(f"raised by {self.full_key}, {self.path}")
            raise


_GIVEN = {"rngs": "rngs, an nnx.Rngs"}
_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def find(path: str, key: str) -> Callable[..., Any]:
    """Imports a function or class by its dotted path.

    Args:
        path: `package.module:name`, where the name may have dots, or `package.module.name`.
        key: the config key, for the beginning of messages.

    Raises:
        ConfigError: when the module or the name in it does not exist, when importing the module
            fails, or when the value is not callable.

    Example:
        >>> find("math:sqrt", "model.factory")(4.0)
        2.0
        >>> find("math:sqr", "model.factory")
        Traceback (most recent call last):
        axon_dist.core.errors.ConfigError: model.factory: the module math has no 'sqr'. Did you mean
        'sqrt'?
    """
    module_name, _, names = path.partition(":") if ":" in path else path.rpartition(".")
    if not module_name or not names:
        raise ConfigError(
            f"{key}: got {path!r:.80}, which must be the path of a function or class, such as "
            f"{PATH}"
        )
    target: Any = _import(module_name, key)
    for name in names.split("."):
        if not hasattr(target, name):
            what = f"the module {module_name}" if inspect.ismodule(target) else target.__name__
            raise ConfigError(f"{key}: {what} has no {name!r}.{_nearest(name, dir(target))}")
        target = getattr(target, name)
    if not callable(target):
        raise ConfigError(
            f"{key}: {path} is {target!r:.80} and must be a function or class; name one",
            code="not-callable",
        )
    return target


def _import(name: str, key: str) -> Any:
    here = os.getcwd()
    if here not in sys.path and "" not in sys.path:
        sys.path.insert(0, here)
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:  # a user's module may raise anything
        absent = error.name if isinstance(error, ModuleNotFoundError) else None
        if absent is not None and f"{name}.".startswith(f"{absent}."):
            raise ConfigError(
                f"{key}: there is no module {absent!r}, neither in {here} nor on Python's path; "
                "correct the path, or start in the folder that contains it",
                code="no-such-module",
            ) from error
        last = traceback.extract_tb(error.__traceback__)[-1]
        raise ConfigError(
            f"{key}: importing {name} fails with {type(error).__name__}: {error} "
            f"({last.filename}:{last.lineno}); python -c 'import {name}' shows the traceback",
            code="import-failed",
        ) from error


def _nearest(name: str, valid: Iterable[str]) -> str:
    """Suggests the most similar of many names, without listing all of them."""
    guess, _, _ = did_you_mean(name, (n for n in valid if not n.startswith("__"))).partition(" Val")
    return guess or " Correct the name."


def parameters_of(function: Callable[..., object]) -> Mapping[str, inspect.Parameter] | None:
    """Returns the parameters of a function or class, or None if they are unknown."""
    try:
        # The signature of an nnx class is always (*args, **kwargs), so use that of `__init__`.
        if inspect.isclass(function):
            _, *rest = inspect.signature(function.__init__).parameters.items()
            return dict(rest)
        return inspect.signature(function).parameters
    except (TypeError, ValueError):
        return None
