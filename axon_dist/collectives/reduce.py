"""All-reduce: every rank gets the sum, mean, product, minimum or maximum over all ranks."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..core.errors import DTypeError, GroupError, NamedChoice
from ..core.reduction import all_max, all_min, all_sum
from ..core.typing import Array, PyTree
from ..mesh import ProcessGroup
from .place import check_arrays, each_leaf, keep_outside, members_or, position


def _extremum(x: Array, group: ProcessGroup, kind: str) -> Array:
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        raise DTypeError(
            f"got dtype {x.dtype}, and complex numbers have no {kind}imum; reduce x.real, x.imag "
            "or abs(x)"
        )
    differentiable = jnp.issubdtype(x.dtype, jnp.floating)
    reduced = (_floating if differentiable else _plain)(x, group, kind)
    return keep_outside(reduced, x, group)


def _plain(x: Array, group: ProcessGroup, kind: str) -> Array:
    reduce = all_max if kind == "max" else all_min
    return reduce(members_or(x, _ignored(x.dtype, kind), group), group.axes)


def _ignored(dtype: Any, kind: str) -> Any:
    """The neutral element of an extremum, which ranks outside the group contribute."""
    if dtype == jnp.bool_:
        return kind == "min"
    if jnp.issubdtype(dtype, jnp.floating):
        return -jnp.inf if kind == "max" else jnp.inf
    return jnp.iinfo(dtype).min if kind == "max" else jnp.iinfo(dtype).max


@functools.partial(jax.custom_jvp, nondiff_argnums=(1, 2))
def _floating(x: Array, group: ProcessGroup, kind: str) -> Array:
    """`pmax` or `pmin` that propagates NaNs, which XLA:CPU would drop."""
    has_nan = all_max(members_or(jnp.isnan(x), False, group).astype(jnp.int8), group.axes)
    return jnp.where(has_nan > 0, jnp.asarray(jnp.nan, x.dtype), _plain(x, group, kind))


@_floating.defjvp
def _floating_jvp(
    group: ProcessGroup, kind: str, primals: tuple[Array], tangents: tuple[Array]
) -> tuple[Array, Array]:
    """The JVP of `pmax` and `pmin`, for which JAX defines none.

    The sum below is linear, so JAX can transpose it. The ranks that attain the extremum get equal
    shares of the cotangent, as in `jax.numpy.max`.
    """
    (x,) = primals
    (tangent,) = tangents
    result = _floating(x, group, kind)
    attained = members_or(x == result, False, group).astype(x.dtype)
    share = attained / all_sum(attained, group.axes)
    return result, all_sum(tangent * share, group.axes)


class ReduceOp(NamedChoice):
    """The elementwise operation of a reduction; also found as `"mean"`, `"avg"` and `"prod"`."""

    SUM = "sum"
    """The sum."""
    PRODUCT = "product"
    """The product."""
    MIN = "min"
    """The minimum; NaN if any value is."""
    MAX = "max"
    """The maximum; NaN if any value is."""
    AVERAGE = "average"
    """The mean; not for integers and booleans."""

    @classmethod
    def named(cls, value: object) -> ReduceOp | None:
        """See `NamedChoice.named`; finds the other names too."""
        text = value.lower() if isinstance(value, str) else ""
        others = {"mean": cls.AVERAGE, "avg": cls.AVERAGE, "prod": cls.PRODUCT}
        return others.get(text) or super().named(value)


def all_reduce(x: PyTree, group: ProcessGroup, op: ReduceOp | str = ReduceOp.SUM) -> PyTree:
    """Gives every rank of the group the reduction of all their values.

    With ranks r = 0..N-1 holding `x_r`, every rank gets `op(x_0, ..., x_{N-1})`, elementwise.
    NaN on one rank gives NaN on all, also for the minimum and maximum. SUM and PRODUCT treat
    booleans as int32, as numpy does. A group by a list of ranks costs an all-reduce over the whole
    mesh; ranks outside it keep their value.

    Derivatives are those of the dense expression; the cotangent of a minimum or maximum is shared
    equally among the ranks that attain it. PRODUCT needs N times the memory of `x`.

    Args:
        x: a pytree of arrays: this rank's inside `shard_map`; outside, rank-stacked ones, with a
            leading dim of `group.world_size`, where row r is the value of rank r.
        group: the ranks that take part; a group over axes reduces within each parallel group.
        op: a `ReduceOp` or its name.

    Returns:
        A pytree like `x`; under `check_vma=True` its type is invariant over the axes of the group.

    Raises:
        DTypeError: for the mean of integers, or the minimum of complex numbers.
        GroupError: if only some axes of the group are manual, or `x` is not rank-stacked.
        ConfigError: for an unknown name of an operation.

    Example:
        >>> import jax.numpy as jnp
        >>> from axon_dist.mesh import World
        >>> world = World.emulate(4)
        >>> all_reduce(jnp.array([1.0, 2.0, 3.0, 4.0]), world.default_group, "sum")
        Array([10., 10., 10., 10.], dtype=float32)
        >>> all_reduce(jnp.array([1.0, 2.0, 3.0, 4.0]), world.new_group([0, 2]), "sum")
        Array([4., 2., 4., 4.], dtype=float32)
    """
    return each_leaf(_REDUCTIONS[ReduceOp(op)], x, group)


def all_reduce_sum(x: PyTree, group: ProcessGroup) -> PyTree:
    """Gives every rank the sum over the group; see `all_reduce`.

    Args:
        x: as in `all_reduce`.
        group: as in `all_reduce`.

    Returns:
        A pytree like `x`.

    Example:
        >>> import jax.numpy as jnp
        >>> from axon_dist.mesh import World
        >>> all_reduce_sum(jnp.array([1, 2, 3, 4]), World.emulate(4, "dp=2,tp=2").group("tp"))
        Array([3, 3, 7, 7], dtype=int32)
    """
    return all_reduce(x, group, ReduceOp.SUM)


def all_reduce_mean(x: PyTree, group: ProcessGroup) -> PyTree:
    """Gives every rank the mean over the group; see `all_reduce`.

    Args:
        x: as in `all_reduce`.
        group: as in `all_reduce`.

    Returns:
        A pytree like `x`.

    Raises:
        DTypeError: for integers and booleans, whose mean is not of their dtype.
    """
    return all_reduce(x, group, ReduceOp.AVERAGE)


def all_reduce_min(x: PyTree, group: ProcessGroup) -> PyTree:
    """Gives every rank the elementwise minimum over the group, NaN if any is; see `all_reduce`.

    Args:
        x: as in `all_reduce`.
        group: as in `all_reduce`.

    Returns:
        A pytree like `x`.
    """
    return all_reduce(x, group, ReduceOp.MIN)


def all_reduce_max(x: PyTree, group: ProcessGroup) -> PyTree:
    """Gives every rank the elementwise maximum over the group, NaN if any is; see `all_reduce`.

    Args:
        x: as in `all_reduce`.
        group: as in `all_reduce`.

    Returns:
        A pytree like `x`.
    """
    return all_reduce(x, group, ReduceOp.MAX)


def all_reduce_product(x: PyTree, group: ProcessGroup) -> PyTree:
    """Gives every rank the elementwise product over the group; see `all_reduce`.

    Args:
        x: as in `all_reduce`.
        group: as in `all_reduce`.

    Returns:
        A pytree like `x`.
    """
    return all_reduce(x, group, ReduceOp.PRODUCT)


def reduce_slices(slices: Sequence[Any], op: ReduceOp | str = ReduceOp.SUM) -> np.ndarray:
    """Reduces the values of several ranks on the host: `all_reduce` in numpy.

    Args:
        slices: one array per rank, all of the same shape.
        op: a `ReduceOp` or its name; the mean of integers is a float here.

    Returns:
        One array of that shape.

    Raises:
        GroupError: for no slices, or slices of different shapes.

    Example:
        >>> reduce_slices([[1.0, 2.0], [3.0, 4.0]], "average")
        array([2., 3.])
    """
    check_arrays(slices)
    arrays = [np.asarray(values) for values in slices]
    shapes = {array.shape for array in arrays}
    if len(shapes) != 1:
        raise GroupError(
            f"cannot reduce {len(arrays)} slices of shapes {sorted(shapes)}; give at least one, "
            "all of the same shape"
        )
    functions = {
        "sum": np.sum,
        "product": np.prod,
        "min": np.min,
        "max": np.max,
        "average": np.mean,
    }
    return functions[ReduceOp(op)](np.stack(arrays), axis=0)


def sum_leaf(x: Array, group: ProcessGroup) -> Array:
    """The sum of one array over the group; booleans are summed as int32."""
    x = counted(x)
    return keep_outside(all_sum(members_or(x, 0, group), group.axes), x, group)


def mean_leaf(x: Array, group: ProcessGroup) -> Array:
    """The mean of one array over the group."""
    check_mean(x)
    mean = all_sum(members_or(x, 0, group), group.axes) / group.size
    return keep_outside(mean, x, group)


def product_leaf(x: Array, group: ProcessGroup) -> Array:
    """The product of one array over the group.

    Every rank writes its value into its own row of an array of zeros; the sum of these arrays is
    the stack of all values. Its type is invariant, unlike that of an all-gather. Sums of logarithms
    would lose signs and zeros.
    """
    x = counted(x)
    is_own_row = jnp.arange(group.size).reshape(-1, *[1] * x.ndim) == position(group)
    stacked = all_sum(jnp.where(is_own_row, x, jnp.zeros_like(x)), group.axes)
    return keep_outside(jnp.prod(stacked, axis=0, dtype=x.dtype), x, group)


def check_mean(x: Array) -> None:
    """Raises `DTypeError` for the mean of integers and booleans."""
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        raise DTypeError(
            f"cannot average an array of dtype {x.dtype} and shape {x.shape} and keep its dtype; "
            "cast it first, x.astype(jnp.float32), or take the sum"
        )


def counted(x: Array) -> Array:
    """Casts booleans to int32, as numpy's sum does; returns other arrays as they are."""
    return x.astype(jnp.int32) if x.dtype == jnp.bool_ else x


_REDUCTIONS: dict[ReduceOp, Callable[[Array, ProcessGroup], Array]] = {
    ReduceOp.SUM: sum_leaf,
    ReduceOp.PRODUCT: product_leaf,
    ReduceOp.MIN: functools.partial(_extremum, kind="min"),
    ReduceOp.MAX: functools.partial(_extremum, kind="max"),
    ReduceOp.AVERAGE: mean_leaf,
}


def tree_sum(x: Array, axes: tuple[str, ...], split: Mapping[str, int]) -> Array:
    """Sums over mesh axes in the order of a binary tree over the ranks, inside `shard_map`.

    Args:
        x: this rank's full addend.
        axes: the axes to sum over, outer to inner; their sizes are powers of two.
        split: maps an axis to the dim of the sum that it shards; outer axes come first if several
            shard the same dim. The sum is replicated over axes that are not in it.

    Returns:
        This rank's shard of the sum.

    Example:
        >>> mesh = jax.make_mesh((4,), ("dp",), axis_types=(jax.sharding.AxisType.Auto,))
        >>> P = jax.sharding.PartitionSpec
        >>> over = jax.shard_map(
        ...     lambda x: tree_sum(x, ("dp",), {}), mesh=mesh, in_specs=P("dp"), out_specs=P(),
        ...     check_vma=False,
        ... )
        >>> jax.jit(over)(jnp.arange(8.0))
        Array([12., 16.], dtype=float32)
    """
    shape: list[int] = []
    dim_of: dict[str, int] = {}
    for dim, size in enumerate(x.shape):
        for axis in (axis for axis, split_dim in split.items() if split_dim == dim):
            dim_of[axis] = len(shape)
            shape.append(jax.lax.axis_size(axis))
            size //= shape[-1]
        shape.append(size)
    x = x.reshape(shape)
    for axis in reversed(axes):
        x = _halved(x, axis, dim_of[axis]) if axis in dim_of else _copied(x, axis)
    return x.reshape([size for dim, size in enumerate(x.shape) if dim not in dim_of.values()])


def _halved(x: Array, axis: str, dim: int) -> Array:
    """Sums over one axis by recursive halving and keeps this rank's element of `dim`.

    The size of `dim` is the size of the axis.
    """
    size = jax.lax.axis_size(axis)
    rank = jax.lax.axis_index(axis)
    stages = size.bit_length() - 1
    shape = x.shape
    x = x.reshape(*shape[:dim], *[2] * stages, *shape[dim + 1 :])
    for stage in range(stages):
        bit = (rank >> stage) & 1
        bit_dim = dim + stages - 1 - stage
        half, sent = (jax.lax.dynamic_index_in_dim(x, b, bit_dim) for b in (bit, 1 - bit))
        partners = [(source, source ^ 1 << stage) for source in range(size)]
        x = half + jax.lax.ppermute(sent, axis, partners)
    return x.reshape(*shape[:dim], 1, *shape[dim + 1 :])


def _copied(x: Array, axis: str) -> Array:
    """Sums over one axis; every rank gets the whole sum."""
    size = jax.lax.axis_size(axis)
    rows = jnp.pad(x.ravel(), (0, -x.size % size)).reshape(size, -1)
    full = jax.lax.all_gather(_halved(rows, axis, 0), axis, axis=0, tiled=True)
    return full.ravel()[: x.size].reshape(x.shape)
