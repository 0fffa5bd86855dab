"""Changing the calls of an unmodified module, in place, while its type stays recognisable."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from flax import nnx

Around: TypeAlias = Callable[..., Any]
"""`around(method, module, *args, **kwargs)` runs in place of `method(module, *args, **kwargs)`."""


def wrap_calls(module: nnx.Module, around: Mapping[str, Around]) -> None:
    """Replaces methods of one module, in place, leaving its class and its other instances alone.

    The new type depends on the old type and on the functions alone, so that equal modules wrapped
    by equal functions stay equal for JAX's caches: give functions that compare by value.

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
    changed = _wrapped(type(module), tuple(sorted(around.items(), key=lambda item: item[0])))
    object.__setattr__(module, "__class__", changed)


@functools.cache
def _wrapped(module_type: type, around: tuple[tuple[str, Around], ...]) -> type:
    def member(name: str, function: Around) -> Callable[..., Any]:
        method = getattr(module_type, name)
        # With the signature of the method, which others who wrap it may ask for.
        return functools.wraps(method)(
            lambda self, *args, **kwargs: function(method, self, *args, **kwargs)
        )

    members = {name: member(name, function) for name, function in around}
    return type(module_type.__name__, (module_type,), {**members, "__doc__": module_type.__doc__})
