"""Recognizes layers that compute every position of a sequence independently, attention aside.

A ring of attention may then reorder the positions once for all layers, and a decoder may compute
new positions without recomputing earlier ones. Only what is listed here is known. An unknown layer
costs a reordering in each attention, or a comparison before decoding, but gives no wrong results.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from .same_function import has_methods_from, is_from

_OURS = (
    "axon_dist.core.",
    "axon_dist.models.experts.",
    "axon_dist.models.layers.",
    "axon_dist.models.transformer.",
    "axon_dist.nn.",
)
_CONTAINERS = (nnx.List, nnx.Dict, nnx.Sequential)
_FLAX = (
    nnx.Linear,
    nnx.LinearGeneral,
    nnx.Einsum,
    nnx.Embed,
    nnx.LayerNorm,
    nnx.RMSNorm,
    nnx.Dropout,
    nnx.LoRA,
    nnx.LoRALinear,
)
"""Flax layers that compute every position independently, some only with certain options."""

_METHODS = ("__call__", "attend")
"""The methods of these layers that a model calls."""

_HOOKS = ("dot_general", "promote_dtype", "einsum_op")
"""Attributes of these layers that hold a function which a call runs."""

_ELEMENTWISE = (
    *(nnx.celu, nnx.elu, nnx.gelu, nnx.hard_sigmoid, nnx.hard_silu, nnx.hard_tanh, nnx.identity),
    *(nnx.leaky_relu, nnx.log_sigmoid, nnx.relu, nnx.selu, nnx.sigmoid, nnx.silu),
    *(nnx.soft_sign, nnx.softplus, nnx.tanh, jax.nn.mish, jax.nn.relu6, jax.nn.squareplus),
    *(jnp.tanh, jnp.sin, jnp.cos, jnp.exp, jnp.abs, jnp.square),
    jnp.einsum,  # The default hook of `nnx.Einsum`, whose equation is checked.
)


def is_by_position(module: nnx.Module) -> bool:
    """Whether a layer is known to compute every position independently, attention aside.

    The layers of this library's decoder do, and some of Flax. A subclass of the former counts only
    if it overrides no method, one of the latter only if it keeps the methods that a model calls.
    Layers inside of a layer are not looked at: ask for each module of a model.

    Args:
        module: a layer; its inputs are `[B, T, ...]`.

    Example:
        >>> is_by_position(nnx.Linear(2, 2, rngs=nnx.Rngs(0)))
        True
        >>> is_by_position(nnx.Conv(2, 2, (3,), rngs=nnx.Rngs(0)))
        False
    """
    kind = type(module)
    if not all(_is_known(name, value) for name, value in _functions(module)):
        return False
    if isinstance(module, _CONTAINERS):
        return has_methods_from(kind, "flax.", *_OURS)
    if isinstance(module, _FLAX):
        methods = [getattr(kind, name) for name in _METHODS if hasattr(kind, name)]
        return all(is_from(x, "flax.", *_OURS) for x in methods) and _keeps_positions(module)
    return has_methods_from(kind, *_OURS)


def _functions(module: nnx.Module) -> Iterator[tuple[str, Any]]:
    """Yields the attributes of a module that are functions, by name.

    Initializers run only when the layer is made. Dtypes are classes, which can be called, too.
    """
    others = (nnx.Module, nnx.Variable, nnx.Rngs, nnx.RngStream, type)
    for name, value in vars(module).items():
        if callable(value) and not isinstance(value, others) and not name.endswith("_init"):
            yield name, value


def _is_known(name: str, function: Any) -> bool:
    """Whether a function that a module holds computes every position independently."""
    if any(function is one for one in _ELEMENTWISE):
        return True
    # A `jax.jit` or `custom_jvp` of a user's function is an object of JAX, so only plain functions
    # are known by the package that defines them.
    if name in _HOOKS and inspect.isfunction(function):
        return is_from(function, "jax.", "flax.", "axon_dist.")
    # An object of this library, such as `Rotary`, which reads positions from an argument.
    return f"{type(function).__module__}.".startswith("axon_dist.")


def _keeps_positions(layer: Any) -> bool:
    """Whether the options of a Flax layer leave every position on its own."""
    match layer:
        case nnx.Einsum():
            return _einsum_keeps_positions(layer.einsum_str)
        case nnx.LinearGeneral():
            return tuple(layer.axis) == (-1,) and not layer.batch_axis
        case nnx.LayerNorm() | nnx.RMSNorm():
            return all(x in (-1, (-1,)) for x in (layer.reduction_axes, layer.feature_axes))
    return True


def _einsum_keeps_positions(equation: str | None) -> bool:
    """Whether an equation of `[B, T, ...]` and a kernel neither contracts nor moves B and T.

    Example:
        >>> [_einsum_keeps_positions(x) for x in ("btd,df->btf", "...d,df->...f", "btd,ts->bsd")]
        [True, True, False]
    """
    found = re.fullmatch(r"([\w.]+),(\w+)->([\w.]+)", equation or "")
    if found is None:
        return False
    inputs, kernel, outputs = found.groups()
    if inputs.startswith("..."):
        # With one letter after them, the dots are all dims but the features.
        return len(inputs) == 4 and outputs.startswith("...")
    lead = inputs[:2]
    is_plain = "." not in inputs and len(inputs) > 2 and lead[0] != lead[1]
    is_moved = not outputs.startswith(lead) or set(lead) & {*kernel, *inputs[2:], *outputs[2:]}
    return is_plain and not is_moved
