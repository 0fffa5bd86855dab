"""Modules of a model, unmodified: how calls are wrapped; which stack layers, which are bridged."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, TypeAlias

import jax
from flax import nnx

from .typing import Function, Keys, Path, PyTree

Around: TypeAlias = Function
"""`around(method, module, *args, **kwargs)` runs in place of `method(module, *args, **kwargs)`."""

# Bridged Linen modules take all their attributes for variables, but those that begin like this.
HELD = "_pytree__around"
"""The attribute of a module that holds what runs around its methods."""


@dataclasses.dataclass(frozen=True)
class Layers:
    """What runs around the methods of one module, as a part of its structure.

    Args:
        layers: (method, function) pairs, the innermost first.
    """

    layers: tuple[tuple[str, Around], ...] = ()


@dataclasses.dataclass(frozen=True)
class Beneath:
    """A method with what runs around it, up to some layer; compares by value.

    Args:
        module_type: the class before any change.
        name: of the method that is called.
        depth: how many of the layers around it run; 0 is the method itself.
    """

    module_type: type[nnx.Module]
    name: str
    depth: int

    @property
    def __wrapped__(self) -> Function:
        """The method itself, whose signature `inspect` then finds."""
        return getattr(self.module_type, self.name)

    def __call__(self, module: nnx.Module, *args: object, **kwargs: object) -> PyTree:
        """Runs it."""
        if not self.depth:
            return getattr(self.module_type, self.name)(module, *args, **kwargs)
        around = around_of(module, self.name)[self.depth - 1]
        return around(dataclasses.replace(self, depth=self.depth - 1), module, *args, **kwargs)


def wrap_calls(module: nnx.Module, around: Mapping[str, Around]) -> None:
    """Replaces methods of one module, in place, leaving its class and its other instances alone.

    What runs instead belongs to the structure of the module, so that equal modules wrapped by equal
    functions stay equal for JAX's caches: give functions that compare by value. A method may be
    wrapped several times; the last is the outermost.

    Args:
        module: a model merged inside a trace, or a part of one.
        around: what runs in place of each method, by name.

    Example:
        >>> import jax.numpy as jnp
        >>> layer = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
        >>> wrap_calls(layer, {"__call__": lambda call, self, x: call(self, x) * 0})
        >>> float(layer(jnp.ones((1, 2))).sum()), isinstance(layer, nnx.Linear)
        (0.0, True)
    """
    before = getattr(module, HELD, Layers())
    after = Layers((*before.layers, *sorted(around.items(), key=lambda item: item[0])))
    original = type(module).__mro__[1] if before.layers else type(module)
    names = tuple(sorted({name for name, _ in after.layers}))
    object.__setattr__(module, "__class__", _open(original, names))
    setattr(module, HELD, after)


def around_of(module: nnx.Module, name: str) -> tuple[Around, ...]:
    """What runs around a method of a module, the innermost first."""
    layers = getattr(module, HELD, Layers()).layers
    return tuple(function for method, function in layers if method == name)


# Flax and JAX keep every class of modules for good, so there must not be one per wrapping: a class
# depends on nothing but the class that it stands for and the names of methods. Hence no bound.
@functools.cache
def _open(module_type: type[nnx.Module], names: tuple[str, ...]) -> type[nnx.Module]:
    """A class like another, whose methods look in the module for what runs around them."""

    def member(name: str) -> Function:
        # Keeps the signature, by which attention is distinguished from other modules.
        @functools.wraps(getattr(module_type, name))
        def call(self: nnx.Module, *args: object, **kwargs: object) -> PyTree:
            depth = len(around_of(self, name))
            return Beneath(module_type, name, depth)(self, *args, **kwargs)

        return call

    members = {name: member(name) for name in names}
    return type(module_type.__name__, (module_type,), {**members, "__doc__": module_type.__doc__})


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
    layer of Flax in it decides: its parameters have one dim more than such a layer needs, and all
    parameters of the module have the same leading size.

    Args:
        module: any; its leaves may be shapes.

    Returns:
        The size of the leading dim.

    Example:
        >>> make = lambda rngs: nnx.Linear(2, 3, rngs=rngs)
        >>> num_stacked(nnx.eval_shape(lambda: nnx.vmap(make)(nnx.Rngs(0).split(5))))
        5
        >>> num_stacked(nnx.eval_shape(lambda: make(nnx.Rngs(0))))
    """
    leaves = jax.tree.leaves(nnx.state(module, nnx.Param))
    sizes = {leaf.shape[0] if leaf.shape else None for leaf in leaves}
    if len(sizes) != 1 or None in sizes:
        return None
    extra: set[int] = set()
    for _, layer in nnx.iter_modules(module):
        extra |= _extra_dims(layer)
    return sizes.pop() if extra == {1} else None


def _extra_dims(layer: nnx.Module) -> set[int]:
    """By how many dims the parameters of a layer of Flax exceed those of one such layer."""
    dims = next((find(layer) for kind, find in DIMS.items() if isinstance(layer, kind)), {})
    attributes = {name: getattr(layer, name, None) for name in dims}
    params = {name: value for name, value in attributes.items() if isinstance(value, nnx.Param)}
    return {len(x.get_value().shape) - dims[name] for name, x in params.items()}


def stacks_of(model: nnx.Module) -> dict[Path, int]:
    """The outermost stacked modules of a model, and how many layers each holds."""
    counts: dict[tuple, int] = {}
    modules = sorted(nnx.iter_modules(model), key=lambda item: len(item[0]))
    if 1 not in {dims for _, module in modules for dims in _extra_dims(module)}:
        return {}
    for keys, module in modules:
        inside = not keys or any(keys[: len(outer)] == outer for outer in counts)
        if not inside and (count := num_stacked(module)) is not None:
            counts[keys] = count
    return {"/".join(map(str, keys)): count for keys, count in counts.items()}


def bridges_of(model: nnx.Module) -> Iterator[tuple[Keys, nnx.bridge.ToNNX]]:
    """The bridged Linen modules of a model, with their keys."""
    for keys, module in nnx.iter_modules(model):
        if isinstance(module, nnx.bridge.ToNNX):
            yield tuple(keys), module
