"""Changing the calls of an unmodified module, in place, while its type stays recognisable."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from flax import nnx

Around: TypeAlias = Callable[..., Any]
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

    def around(self, name: str) -> tuple[Around, ...]:
        """What runs around one method, the innermost first."""
        return tuple(function for method, function in self.layers if method == name)


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
    def __wrapped__(self) -> Callable[..., Any]:
        """The method itself, whose signature `inspect` then finds."""
        return getattr(self.module_type, self.name)

    def __call__(self, module: nnx.Module, *args: Any, **kwargs: Any) -> Any:
        """Runs it."""
        if not self.depth:
            return getattr(self.module_type, self.name)(module, *args, **kwargs)
        around = layers_of(module).around(self.name)[self.depth - 1]
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
    before = layers_of(module)
    after = Layers((*before.layers, *sorted(around.items(), key=lambda item: item[0])))
    original = type(module).__mro__[1] if before.layers else type(module)
    names = tuple(sorted({name for name, _ in after.layers}))
    object.__setattr__(module, "__class__", _open(original, names))
    setattr(module, HELD, after)


def layers_of(module: nnx.Module) -> Layers:
    """What runs around the methods of a module."""
    return getattr(module, HELD, Layers())


# Flax and JAX keep every class of modules for good, so there must not be one per wrapping: a class
# depends on nothing but the class that it stands for and the names of methods. Hence no bound.
@functools.cache
def _open(module_type: type[nnx.Module], names: tuple[str, ...]) -> type[nnx.Module]:
    """A class like another, whose methods look in the module for what runs around them."""

    def member(name: str) -> Callable[..., Any]:
        # Keeps the signature, by which attention is told from other modules.
        @functools.wraps(getattr(module_type, name))
        def call(self: nnx.Module, *args: Any, **kwargs: Any) -> Any:
            depth = len(layers_of(self).around(name))
            return Beneath(module_type, name, depth)(self, *args, **kwargs)

        return call

    members = {name: member(name) for name in names}
    return type(module_type.__name__, (module_type,), {**members, "__doc__": module_type.__doc__})
