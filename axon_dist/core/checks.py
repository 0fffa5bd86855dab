"""Argument kinds whose checks need JAX or Flax; the others are in `arguments.py`."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import linen, nnx
from jax.typing import DTypeLike

from .arguments import ARRAY as SHAPED
from .arguments import COUNT as COUNT
from .arguments import FUNCTION as FUNCTION
from .arguments import NUMBER as NUMBER
from .arguments import REAL as REAL
from .arguments import SEED as SEED
from .arguments import SIZE as SIZE
from .arguments import TEXT as TEXT
from .arguments import TEXTS as TEXTS
from .arguments import WHOLE as WHOLE
from .arguments import ArgumentKind as ArgumentKind
from .arguments import check_fields as check_fields
from .arguments import checked as checked
from .arguments import instance_of as instance_of
from .arguments import is_number as is_number
from .arguments import is_whole as is_whole
from .modules import traceable


def is_array(value: Any) -> bool:
    """Whether a value is an array or its shape, a number, or a list of numbers."""
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return SHAPED.holds(value)
    try:
        return np.asarray(value).dtype.kind in "biufc"
    except ValueError:  # Nested lists of different lengths.
        return False


def takes(function: Callable[..., Any], *names: str) -> bool:
    """Whether a function accepts this many positional arguments; True if Python cannot tell.

    Example:
        >>> takes(lambda keys, leaf: True, "keys", "leaf"), takes(lambda: True, "keys")
        (True, False)
    """
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # A callable without a signature that Python can inspect.
        return True
    try:
        signature.bind(*names)
    except TypeError:
        return False
    return True


def is_dtype(value: Any, kind: DTypeLike) -> bool:
    """Whether a value is, or names, a JAX dtype of a kind such as `jnp.floating`."""
    try:
        return jnp.issubdtype(jnp.dtype(value), kind)
    except (TypeError, ValueError):
        return False


def is_wrapper(value: object) -> bool:
    """Whether a value is a wrapper of a model, such as `DDP`; a model may have any attributes."""
    is_model = inspect.isclass(value) or isinstance(value, nnx.Module)
    return not is_model and hasattr(value, "strategy") and hasattr(value, "module")


def is_module(value: object) -> bool:
    """Whether a value is an nnx module or a function that returns one; wrappers do not count."""
    if isinstance(value, (nnx.Module, linen.Module)):
        return isinstance(value, nnx.Module)
    is_maker = callable(value) and (inspect.isclass(value) or takes(value))
    # A function under functools.cache would return values of an earlier trace.
    return is_maker and not is_wrapper(value) and not hasattr(value, "cache_info")


NUMBERS = ArgumentKind("a dtype of numbers, such as 'float32'", lambda x: is_dtype(x, jnp.number))
FLOATS = ArgumentKind(
    "a floating-point dtype, such as 'bfloat16'", lambda x: is_dtype(x, jnp.floating)
)
MODULE = instance_of(nnx.Module, "an nnx.Module, such as nnx.Linear(2, 3, rngs=nnx.Rngs(0))")
MODEL = ArgumentKind(
    "an nnx.Module, or a function of no arguments that makes a new one; not a wrapper of one",
    is_module,
)
OPTIMIZER = ArgumentKind(
    "an optax transformation, such as optax.adamw(1e-3)",
    lambda x: (
        all(callable(getattr(x, name, None)) for name in ("init", "update"))
        and not isinstance(x, nnx.Optimizer)
    ),
)


def made_by(model: Any, who: str) -> nnx.Module:
    """Returns a module as it is, or calls a function of no arguments to make one.

    Args:
        model: a `MODEL`.
        who: the function that got it, for messages.

    Raises:
        ConfigError: if the function returns something else.
    """
    made = model if isinstance(model, nnx.Module) else traceable(model)()
    MODULE.check(who, "model()", made)
    return made


RNGS = instance_of(nnx.Rngs, "random numbers, such as nnx.Rngs(0)")
ARRAY = ArgumentKind("an array or a number", is_array)
