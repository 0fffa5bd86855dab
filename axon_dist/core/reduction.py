"""Sums, means and extremes over mesh axes inside `shard_map`, safe on every platform.

Whatever this library reduces inside a manual region goes through here. XLA:CPU ends the process
when it compiles a bfloat16 reduction in a region where some axes are left to the compiler (the pass
AllReducePromotion: "Invalid binary instruction opcode copy"), also where the reduction is the
transpose of something else. There values are widened to float32 first, which the compiler for CPUs
does to bfloat16 sums anyway; no other platform sees a difference.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from .typing import Array, PyTree

NARROW = jnp.bfloat16
"""The dtype whose reductions abort the compiler for CPUs."""


def all_sum(tree: PyTree, axes: str | tuple[str, ...]) -> PyTree:
    """Adds up over mesh axes, in the dtype of each leaf."""
    return _each(lambda x, axes: jax.lax.psum(x, axes), tree, axes)


def all_mean(tree: PyTree, axes: str | tuple[str, ...]) -> PyTree:
    """Averages over mesh axes."""
    return _each(lambda x, axes: jax.lax.pmean(x, axes), tree, axes)


def all_max(tree: PyTree, axes: str | tuple[str, ...]) -> PyTree:
    """Takes the maximum over mesh axes; NaNs are lost on CPU."""
    return _each(lambda x, axes: jax.lax.pmax(x, axes), tree, axes)


def all_min(tree: PyTree, axes: str | tuple[str, ...]) -> PyTree:
    """Takes the minimum over mesh axes; NaNs are lost on CPU."""
    return _each(lambda x, axes: jax.lax.pmin(x, axes), tree, axes)


def sum_scatter(x: Array, axes: str | tuple[str, ...], dim: int) -> Array:
    """Adds up over mesh axes and keeps this rank's equal slice of `dim`."""

    def scatter(x, axes):
        return jax.lax.psum_scatter(x, axes, scatter_dimension=dim, tiled=True)

    return _each(scatter, x, axes)


def gathered(x: Array, axes: str | tuple[str, ...], dim: int, tiled: bool = True) -> Array:
    """Joins the values of all ranks along `dim`; its gradient is a sum, and as safe as one."""

    def gather(x, axes):
        return jax.lax.all_gather(x, axes, axis=dim, tiled=tiled)

    return _each(gather, x, axes)


def varying(x: Array, axes: tuple[str, ...]) -> Array:
    """Types a value as different on every rank of some axes, as collectives ask of their operand.

    Under `check_vma=True` a replicated value is typed invariant, and JAX refuses to reduce it over
    axes along which it does not vary. Under `check_vma=False` there are no such types.
    """
    missing = tuple(axis for axis in axes if axis not in jax.typeof(x).mat.varying)
    return jax.lax.pcast(x, missing, to="varying") if missing else x


def on_wire(x: Array, dtype: DTypeLike | None) -> Array:
    """A value in the dtype in which it is reduced; complex values stay what they are."""
    is_complex = jnp.issubdtype(x.dtype, jnp.complexfloating)
    return x if dtype is None or is_complex else x.astype(dtype)


def _each(
    reduction: Callable[[Array, tuple[str, ...]], Array],
    tree: PyTree,
    axes: str | tuple[str, ...],
) -> PyTree:
    names = (axes,) if isinstance(axes, str) else tuple(axes)
    # The mesh in context knows for which platform it is compiled, also for devices that are not
    # there.
    mesh = jax.sharding.get_abstract_mesh()
    device = mesh.abstract_device
    on_cpu = jax.default_backend() == "cpu" if device is None else device.platform == "cpu"
    aborts = on_cpu and 0 < len(mesh.manual_axes) < len(mesh.axis_names)

    def reduced(x: Array) -> Array:
        x = jnp.asarray(x)
        if aborts and x.dtype == NARROW:
            # The cast comes before the change of type, whose transpose is a reduction too.
            return reduction(varying(x.astype(jnp.float32), names), names).astype(x.dtype)
        return reduction(varying(x, names), names)

    return jax.tree.map(reduced, tree)
