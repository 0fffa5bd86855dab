"""What of a model is trained: a choice among its Variables, in the words of `flax.nnx`."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from ..core.errors import ConfigError
from ..core.typing import PyTree, Trainable
from ..ops.precision import floating_dtype

INT8 = "int8"
"""The dtype of frozen parameters that is no cast: matrices are kept as `int8_form` says."""

STATE = (nnx.BatchStat, nnx.RngState, nnx.Cache, nnx.Intermediate)
"""Variables that a forward pass changes, so that no optimizer can."""


def trainable_filter(trainable: Trainable) -> Callable[[Any, Any], bool]:
    """Reads what is to be trained.

    Args:
        trainable: a type of Variable, such as `nnx.LoRAParam`; a string, a regular expression that
            is searched for in the paths of the model's `nnx.Param`s; a predicate
            `(keys, variable)` or another filter of nnx, such as
            `nnx.All(nnx.Param, nnx.Not(nnx.PathContains("embedding")))`; or a tuple of these, of
            which any may hold.

    Returns:
        `(keys, variable)` -> whether it is trained, which is a filter of nnx: what
        `nnx.Optimizer(model, tx, wrt=...)` takes.

    Raises:
        ConfigError: when it is none of these, or a string is no regular expression.

    Example:
        >>> is_trained = trainable_filter(("head", nnx.LoRAParam))
        >>> is_trained(("head", "kernel"), nnx.Param(0.0)), is_trained(("kernel",), nnx.Param(0.0))
        (True, False)
        >>> is_trained(("kernel", "lora_a"), nnx.LoRAParam(0.0))
        True
    """
    if isinstance(trainable, (tuple, list)):
        chosen = [trainable_filter(one) for one in trainable]
        return lambda keys, variable: any(one(keys, variable) for one in chosen)
    if isinstance(trainable, str):
        try:
            pattern = re.compile(trainable)
        except re.error as error:
            raise ConfigError(
                f"trainable={trainable!r} is no regular expression: {error}; give one that is "
                "found in the paths of what is trained, such as 'blocks/.*/kernel'"
            ) from None
        named = lambda keys: pattern.search("/".join(map(str, keys))) is not None
        return lambda keys, variable: isinstance(variable, nnx.Param) and named(keys)
    is_variable = isinstance(trainable, type) and issubclass(trainable, nnx.Variable)
    if not is_variable and (isinstance(trainable, type) or not _is_filter(trainable)):
        raise ConfigError(
            f"trainable={trainable!r}; give a type of Variable such as nnx.LoRAParam, a regular "
            "expression of paths such as 'head', a predicate (keys, variable), or a tuple of these"
        )
    return nnx.filterlib.to_predicate(trainable)


def check_trainable(trainable: Trainable, model: nnx.Module) -> None:
    """Raises unless a choice finds something in a model, and nothing that no optimizer can change.

    Args:
        trainable: as for `trainable_filter`; of a tuple each part must find something.
        model: any; its leaves may be tracers.

    Raises:
        ConfigError: naming the choice and what there is, or the Variable.
    """
    if trainable is nnx.Param:
        return
    flat = nnx.to_flat_state(nnx.state(model))
    for one in trainable if isinstance(trainable, (tuple, list)) else (trainable,):
        is_trained = trainable_filter(one)
        found = [(keys, variable) for keys, variable in flat if is_trained(keys, variable)]
        if not found:
            kinds = sorted({type(variable).__name__ for _, variable in flat})
            paths = ["/".join(map(str, k)) for k, v in flat if isinstance(v, nnx.Param)]
            more = f", ... ({len(paths)} in all)" if len(paths) > 8 else ""
            raise ConfigError(
                f"trainable={_words(one)} finds nothing in the model, which has Variables of the "
                f"types {', '.join(kinds) or 'none'} and parameters at the paths "
                f"{', '.join(paths[:8]) or 'none'}{more}; name one of these"
            )
        for keys, variable in found:
            if isinstance(variable, STATE):
                raise ConfigError(
                    f"trainable={_words(one)} takes in {'/'.join(map(str, keys))!r}, an "
                    f"nnx.{type(variable).__name__} that the forward pass changes itself; leave "
                    f"such state out: nnx.All({_words(one)}, nnx.Param)"
                )


def frozen_as(dtype: Any, frozen: PyTree) -> Any:
    """Reads the dtype that frozen parameters shall be kept in.

    Args:
        dtype: a floating-point dtype or its name, or int8; None keeps each in its own.
        frozen: the frozen parameters.

    Raises:
        ConfigError: when it is no such dtype, or nothing is frozen.
    """
    if dtype is None:
        return None
    if not jax.tree.leaves(frozen):
        raise ConfigError(
            f"frozen_dtype={dtype!r}, and nothing of the model is frozen; say what is trained, "
            "such as trainable=nnx.LoRAParam, or leave the dtype out"
        )
    return INT8 if _is_int8(dtype) else floating_dtype(dtype, "frozen")


def _is_int8(dtype: Any) -> bool:
    try:
        return jnp.dtype(dtype) == jnp.int8
    except TypeError:
        return False


def _is_filter(trainable: Any) -> bool:
    return callable(trainable) or trainable is ... or isinstance(trainable, bool)


def _words(trainable: Any) -> str:
    if isinstance(trainable, type):
        inside = issubclass(trainable, nnx.Variable) and trainable.__module__.startswith("flax.nnx")
        return f"nnx.{trainable.__name__}" if inside else trainable.__name__
    name = getattr(trainable, "__name__", None)
    return name if isinstance(name, str) and not isinstance(trainable, str) else repr(trainable)
