"""Sums, means, minima and maxima over mesh axes inside `shard_map`, safe on every platform.

All reductions of this library inside manual regions go through this module. XLA:CPU aborts the
process when it compiles a bfloat16 reduction in a partly manual region (the pass
AllReducePromotion: "Invalid binary instruction opcode copy"), even if the reduction is the
transpose of something else. There values are cast to float32 first, as XLA:CPU does with bfloat16
sums anyway. Other platforms are not affected.

XLA does not compile a reduction over an axis of one device in a partly manual region
("Cross-partition allreduce must be in (partial) manual partitioning mode"). There such axes are
left out, except under `check_vma=True`, where a value that varies over an axis must be reduced.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from .typing import Array, PyTree

NARROW = jnp.bfloat16
"""The dtype whose reductions abort XLA:CPU."""


def all_sum(tree: PyTree, axes: str | tuple[str, ...]) -> PyTree:
    """Sums over mesh axes, in the dtype of each leaf."""
    return _each(lambda x, axes: jax.lax.psum(x, axes), tree, axes)


def all_mean(tree: PyTree, axes: str | tuple[str, ...]) -> PyTree:
    """Averages over mesh axes."""
    return _each(lambda x, axes: jax.lax.pmean(x, axes), tree, axes)


def mean_of_copies(x: Array) -> Array:
    """Averages over dim 0; an element that is equal in all copies keeps its value.

    A model may keep constants such as the lowest number of float32, which masks scores. The sum of
    its copies would be infinite, and three times another number may not divide by 3.

    Args:
        x: floating-point or complex numbers, `[copies, ...]`.

    Returns:
        The mean, in the dtype of `x`.

    Example:
        >>> lowest = jnp.finfo(jnp.float32).min
        >>> bool(mean_of_copies(jnp.full(3, lowest)) == lowest)
        True
    """
    return jnp.where((x == x[0]).all(0), x[0], x.mean(0))


def all_max(tree: PyTree, axes: str | tuple[str, ...]) -> PyTree:
    """Takes the maximum over mesh axes; NaNs are lost on CPU."""
    return _each(lambda x, axes: jax.lax.pmax(x, axes), tree, axes)


def all_min(tree: PyTree, axes: str | tuple[str, ...]) -> PyTree:
    """Takes the minimum over mesh axes; NaNs are lost on CPU."""
    return _each(lambda x, axes: jax.lax.pmin(x, axes), tree, axes)


def sum_scatter(x: Array, axes: str | tuple[str, ...], dim: int) -> Array:
    """Reduce-scatters over mesh axes: sums, and keeps this rank's equal slice of `dim`."""

    def scatter(x, axes):
        # XLA refuses empty arrays, which are cut into empty ones.
        if not axes or not x.shape[dim]:
            return x
        return jax.lax.psum_scatter(x, axes, scatter_dimension=dim, tiled=True)

    return _each(scatter, x, axes)


def all_gather_dim(x: Array, axes: str | tuple[str, ...], dim: int, tiled: bool = True) -> Array:
    """All-gathers along `dim`; the transpose is a reduction, with the same safeguard."""

    def gather(x, axes):
        if not axes and not tiled:
            return jnp.expand_dims(x, dim)
        # XLA refuses empty arrays, which make an empty one.
        if not axes or (tiled and not x.shape[dim]):
            return x
        return jax.lax.all_gather(x, axes, axis=dim, tiled=tiled)

    return _each(gather, x, axes)


def varying(x: Array, axes: tuple[str, ...]) -> Array:
    """Casts a value to a type that varies over some axes, as collectives require.

    Under `check_vma=True` a replicated value has an invariant type, and JAX refuses to reduce it
    over axes along which it does not vary. Under `check_vma=False` there are no such types. An axis
    that has a name but no mesh, as while a loss is analysed, has none either.
    """
    manual = jax.sharding.get_abstract_mesh().manual_axes
    known = jax.typeof(x).mat.varying
    missing = tuple(axis for axis in axes if axis in manual and axis not in known)
    return jax.lax.pcast(x, missing, to="varying") if missing else x


def cast_for_reduction(x: Array, dtype: DTypeLike | None) -> Array:
    """Casts a value to the dtype of its reduction; complex values are not cast."""
    is_complex = jnp.issubdtype(x.dtype, jnp.complexfloating)
    return x if dtype is None or is_complex else x.astype(dtype)


def _each(
    reduction: Callable[[Array, tuple[str, ...]], Array],
    tree: PyTree,
    axes: str | tuple[str, ...],
) -> PyTree:
    names = (axes,) if isinstance(axes, str) else tuple(axes)
    # The mesh in context knows the target platform, even when its devices are not attached.
    mesh = jax.sharding.get_abstract_mesh()
    device = mesh.abstract_device
    on_cpu = jax.default_backend() == "cpu" if device is None else device.platform == "cpu"
    is_partly_manual = 0 < len(mesh.manual_axes) < len(mesh.axis_names)

    def reduced(x: Array) -> Array:
        x = jnp.asarray(x)
        if is_partly_manual and on_cpu and x.dtype == NARROW:
            # Cast before `varying`, because the transpose of `varying` is a reduction too.
            return over_ranks(varying(x.astype(jnp.float32), names)).astype(x.dtype)
        return over_ranks(varying(x, names))

    def over_ranks(x: Array) -> Array:
        # Under `check_vma=True` a value that varies over an axis must be reduced over it.
        if not is_partly_manual or jax.typeof(x).mat.varying:
            return reduction(x, names)
        return reduction(x, tuple(axis for axis in names if jax.lax.axis_size(axis) > 1))

    return jax.tree.map(reduced, tree)
