"""Minimum and maximum over ranks that propagate NaN and have a derivative."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from ..core.errors import DTypeError
from ..core.typing import Array
from ..mesh import ProcessGroup
from .place import keep_outside, members_or
from .primitive import all_max, all_min, all_sum


def minimum(x: Array, group: ProcessGroup) -> Array:
    """The elementwise minimum over the group of one array."""
    return _extremum(x, group, "min")


def maximum(x: Array, group: ProcessGroup) -> Array:
    """The elementwise maximum over the group of one array."""
    return _extremum(x, group, "max")


def _extremum(x: Array, group: ProcessGroup, kind: str) -> Array:
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        raise DTypeError(
            f"complex numbers have no {kind}imum, and got dtype {x.dtype}; reduce x.real, x.imag "
            "or abs(x)"
        )
    differentiable = jnp.issubdtype(x.dtype, jnp.floating)
    reduced = (_floating if differentiable else _plain)(x, group, kind)
    return keep_outside(reduced, x, group)


def _plain(x: Array, group: ProcessGroup, kind: str) -> Array:
    reduce = all_max if kind == "max" else all_min
    return reduce(members_or(x, _ignored(x.dtype, kind), group), group)


def _ignored(dtype: Any, kind: str) -> Any:
    """The value that can never be the only extremum: what ranks outside the group contribute."""
    if dtype == jnp.bool_:
        return kind == "min"
    if jnp.issubdtype(dtype, jnp.floating):
        return -jnp.inf if kind == "max" else jnp.inf
    return jnp.iinfo(dtype).min if kind == "max" else jnp.iinfo(dtype).max


@functools.partial(jax.custom_jvp, nondiff_argnums=(1, 2))
def _floating(x: Array, group: ProcessGroup, kind: str) -> Array:
    """`pmax` or `pmin`, and NaN wherever a rank has one, which XLA:CPU would drop."""
    spoilt = all_max(members_or(jnp.isnan(x), False, group).astype(jnp.int8), group)
    return jnp.where(spoilt > 0, jnp.asarray(jnp.nan, x.dtype), _plain(x, group, kind))


@_floating.defjvp
def _floating_jvp(
    group: ProcessGroup, kind: str, primals: tuple[Array], tangents: tuple[Array]
) -> tuple[Array, Array]:
    """Neither `pmax` nor `pmin` has a rule; the sum below is linear, so JAX transposes it itself.

    The ranks that attain the extremum get equal shares, as `jax.numpy.max` gives them.
    """
    (x,), (tangent,) = primals, tangents
    result = _floating(x, group, kind)
    attained = members_or(x == result, False, group).astype(x.dtype)
    share = attained / all_sum(attained, group)
    return result, all_sum(tangent * share, group)
