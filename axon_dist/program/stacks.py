"""Stacked modules: one module whose leaves have a leading dim, a row for each of many layers."""

from __future__ import annotations

from collections.abc import Callable
from types import MappingProxyType
from typing import Any

import jax
from flax import nnx

from ..core.typing import Path

DIMS: MappingProxyType[type[nnx.Module], Callable[[Any], dict[str, int]]] = MappingProxyType(
    {
        nnx.Linear: lambda _: {"kernel": 2, "bias": 1},
        nnx.LinearGeneral: lambda layer: {
            "kernel": len(layer.in_features) + len(layer.out_features) + len(layer.batch_axis)
        },
        nnx.Einsum: lambda layer: {"kernel": len(layer.kernel_shape)},
        nnx.Conv: lambda layer: {"kernel": len(layer.kernel_shape)},
        nnx.ConvTranspose: lambda layer: {"kernel": len(layer.kernel_shape)},
        nnx.Embed: lambda _: {"embedding": 2},
        nnx.LayerNorm: lambda _: {"scale": 1, "bias": 1},
        nnx.RMSNorm: lambda _: {"scale": 1},
        nnx.GroupNorm: lambda _: {"scale": 1, "bias": 1},
        nnx.BatchNorm: lambda _: {"scale": 1, "bias": 1},
    }
)
"""How many dims the parameters of Flax's layers have, each for itself."""


def num_stacked(module: nnx.Module) -> int | None:
    """How many layers a module holds, stacked by `nnx.vmap`; None where it is one layer.

    A stacked module has the class and the attributes of one layer, and leaves of a dim more. So a
    layer of Flax in it tells: its parameters have one dim more than such a layer needs, and all
    parameters of the module have the same leading size.

    Args:
        module: any; its leaves may be shapes.

    Returns:
        The size of the leading dim.

    Example:
        >>> make = lambda rngs: nnx.Linear(2, 3, rngs=rngs)
        >>> num_stacked(nnx.vmap(make)(nnx.Rngs(0).split(5)))
        5
        >>> num_stacked(make(nnx.Rngs(0)))
    """
    leaves = jax.tree.leaves(nnx.state(module, nnx.Param))
    sizes = {leaf.shape[0] if leaf.shape else None for leaf in leaves}
    if len(sizes) != 1 or None in sizes:
        return None
    extra = {more for _, layer in nnx.iter_modules(module) for more in _extra_dims(layer)}
    return sizes.pop() if extra == {1} else None


def stacks_of(model: nnx.Module) -> dict[Path, int]:
    """The outermost stacked modules of a model, and how many layers each holds."""
    found: dict[tuple, int] = {}
    for keys, module in sorted(nnx.iter_modules(model), key=lambda item: len(item[0])):
        inside = not keys or any(keys[: len(outer)] == outer for outer in found)
        if not inside and (count := num_stacked(module)) is not None:
            found[keys] = count
    return {"/".join(map(str, keys)): count for keys, count in found.items()}


def _extra_dims(layer: nnx.Module) -> list[int]:
    """By how many dims the parameters of a layer of Flax exceed those of one such layer."""
    dims = next((find(layer) for kind, find in DIMS.items() if isinstance(layer, kind)), {})
    held = {name: getattr(layer, name, None) for name in dims}
    return [
        len(value.get_value().shape) - dims[name]
        for name, value in held.items()
        if isinstance(value, nnx.Param)
    ]
