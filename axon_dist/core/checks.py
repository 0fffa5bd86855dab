"""The kinds of arguments: `checked` compares what a public function is given before it runs."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ParamSpec, TypeVar

import jax.numpy as jnp
import numpy as np
from flax import nnx
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


def checked(
    who: str | None = None, /, **kinds: ArgumentKind
) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Has a function compare some of its arguments, by name, before it runs.

    Args:
        who: the name in messages; None takes that of the function.
        **kinds: what the arguments of these names can be.

    Example:
        >>> @checked(number=WHOLE)
        ... def half(number):
        ...     return number // 2
        >>> half("8")
        Traceback (most recent call last):
        axon_dist.core.errors.ConfigError: half got number='8', a str; give a whole number
    """

    def wrap(function: Callable[_P, _R]) -> Callable[_P, _R]:
        names = tuple(inspect.signature(function).parameters)
        name_of = who or function.__name__

        @functools.wraps(function)
        def run(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            for name, value in (*zip(names, args, strict=False), *kwargs.items()):
                if name in kinds:
                    kinds[name].check(name_of, name, value)
            return function(*args, **kwargs)

        return run

    return wrap


def is_whole(value: object) -> bool:
    """Whether a value is a whole number; true and false are none."""
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def is_number(value: object) -> bool:
    """Whether a value is a finite number of Python or numpy."""
    return is_whole(value) or (isinstance(value, (float, np.floating)) and math.isfinite(value))


def is_dtype(value: Any, kind: DTypeLike) -> bool:
    """Whether a value is a dtype of a kind, such as `jnp.floating`, or names one that JAX has."""
    try:
        return jnp.issubdtype(jnp.dtype(value), kind)
    except TypeError:
        return False


def is_module(value: object) -> bool:
    """Whether a value is a module, or a function that makes one; a wrapper of one is neither."""
    return isinstance(value, nnx.Module) or (callable(value) and not hasattr(value, "strategy"))


def _brief(value: object) -> str:
    """A value and its type in a few words; what prints over many lines is its type alone."""
    kind = f"the class {value.__name__}" if inspect.isclass(value) else f"a {type(value).__name__}"
    is_plain = value is None or isinstance(value, (str, int, float, tuple, list, dict))
    if value is None:
        return "None"
    return f"{value!r:.60}, {kind}" if is_plain else kind


WHOLE = ArgumentKind("a whole number", is_whole)
SEED = ArgumentKind("a whole number in [0, 2^32)", lambda x: is_whole(x) and 0 <= x < 2**32)
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
