"""Matrix products in fp8: rounding, scales, and which layers use them."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, TypeAlias, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from ..core.compat import Primitive, new_operation
from ..core.errors import UnsupportedError
from ..core.modules import stacks_of
from ..core.reduction import all_max
from ..core.typing import Array, Path
from ..core.weighted import per_sample

FORWARD, BACKWARD = jnp.float8_e4m3fn, jnp.float8_e5m2
"""The dtypes of activations and weights (e4m3, more digits) and of gradients (e5m2, more range).

Source: arXiv:2209.05433.
"""

MULTIPLE = 16
"""cuBLASLt requires the sizes of an fp8 product to be multiples of this."""

WEIGHT = "axon_fp8_weight"
"""The name of the equations that round a weight to fp8, and that reinterpret gathered bytes."""

DimensionNumbers: TypeAlias = tuple[
    tuple[Sequence[int], Sequence[int]], tuple[Sequence[int], Sequence[int]]
]
"""((contracted dims of values, of weights), (batch dims of values, of weights))."""


class DenseLayer(Protocol):
    """A layer that multiplies by its kernel, as `nnx.Linear` and `nnx.LinearGeneral` do."""

    kernel: nnx.Variable
    dot_general: Callable[..., Array] | None
    in_features: int | tuple[int, ...]
    out_features: int | tuple[int, ...]


class WeightGather(Protocol):
    """How a sharded weight is gathered, and how its gradient is reduced to the shards."""

    def forward(self, weight: Array) -> Array:
        """Returns the gathered weight, in the dtype of its shards."""
        ...

    def backward(self, gradient: Array) -> Array:
        """Reduces the gradient of the gathered weight to shards."""
        ...


@dataclasses.dataclass(frozen=True)
class Fp8Dot:
    """`jax.lax.dot_general` of values and weights in e4m3; gradients are rounded to e5m2.

        y = s_x s_w (q(x / s_x) q(w / s_w))        s = 2^n, the least with max|x| / s in range

    Each tensor has one scale ("current scaling"): a power of two, found from the largest element of
    the whole tensor. The maximum is over all ranks that hold a part of it, so the rounding does not
    depend on the mesh if all ranks have equal weight. The rounding is then the only difference from
    a product in the compute dtype.

    Args:
        axes: the mesh axes that split the samples; the maximum is taken over those that a
            surrounding `shard_map` has made manual.
        gather: how sharded weights are gathered, in global view; None for unsharded weights.
            Shards are rounded before the gather, which sends one byte per element. The scale is
            that of the whole tensor either way, so the product has the same bits.

    Example:
        >>> x, w = jnp.full((1, 16), 3.0), jnp.full((16, 16), 0.5)
        >>> float(Fp8Dot()(x, w, (((1,), (0,)), ((), ())))[0, 0])
        24.0

    Source: Micikevicius et al., FP8 Formats for Deep Learning, arXiv:2209.05433.
    """

    axes: tuple[str, ...] = ()
    gather: WeightGather | None = None

    def __call__(
        self,
        lhs: Array,
        rhs: Array,
        dimension_numbers: DimensionNumbers,
        precision: object = None,
        preferred_element_type: DTypeLike | None = None,
        **others: object,
    ) -> Array:
        """Multiplies values by weights.

        Args:
            lhs: values `[..., k dims]`.
            rhs: weights `[k dims, n dims]`.
            dimension_numbers: contracts the last dims of `lhs` with the first of `rhs`; no batch
                dims.
            precision: ignored; fp8 products have only one precision.
            preferred_element_type: the dtype of the result; None for the dtype of `lhs`.
            others: further arguments of Flax layers; all must be None.

        Returns:
            `[..., n dims]`.

        Raises:
            UnsupportedError: for other dims or further arguments.
        """
        more = {name: value for name, value in others.items() if value is not None}
        (left, right), (*batch,) = dimension_numbers
        count = len(left)
        trailing = tuple(range(lhs.ndim - count, lhs.ndim))
        if more or any(batch) or (tuple(left), tuple(right)) != (trailing, tuple(range(count))):
            raise UnsupportedError(
                f"got a product with dimension_numbers={dimension_numbers} and {more}; fp8 "
                "products must contract the last dims with the first dims, and take no further "
                "arguments; exclude the layer with MixedPrecision.fp8(skip=...)",
                code="fp8-dimensions",
            )
        dtype = jnp.dtype(preferred_element_type or lhs.dtype)
        # The scale is shared by all samples, so a sample depends on others only through rounding.
        run = per_sample(lambda x, w: _product(self, count, dtype, x, w))
        return run(lhs, rhs)


Residuals: TypeAlias = "tuple[Rounded, Rounded, Array, Array]"


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _product(dot: Fp8Dot, count: int, dtype: np.dtype, x: Array, w: Array) -> Array:
    return _forward(dot, count, dtype, x, w)[0]


def _forward(
    dot: Fp8Dot, count: int, dtype: np.dtype, x: Array, w: Array
) -> tuple[Array, Residuals]:
    x8 = rounded(x, FORWARD, dot.axes)
    w8 = _rounded_weight(w, dot.gather)
    leading = tuple(range(x.ndim - count, x.ndim))
    y = _dot(x8, w8, (leading, tuple(range(count))), dtype)
    # Empty arrays carry the dtypes: JAX does not allow a dtype as a residual.
    return y, (x8, w8, jnp.zeros((0,), x.dtype), jnp.zeros((0,), w.dtype))


def _backward(
    dot: Fp8Dot, count: int, dtype: np.dtype, residuals: Residuals, g: Array
) -> tuple[Array, Array]:
    x8, w8, like_x, like_w = residuals
    # Gradients of the mean over the samples of a rank are `parts` times those of the whole batch.
    # Rounding commutes only with powers of two, so the odd factor of `parts` is divided out first.
    parts = _num_parts(dot.axes)
    odd = parts // (parts & -parts)
    g8 = rounded(g / odd if odd > 1 else g, BACKWARD, dot.axes)
    if odd > 1:
        g8 = Rounded(g8.values, g8.scale * odd)
    num_columns = w8.values.ndim - count
    lead = g.ndim - num_columns
    columns = (tuple(range(lead, g.ndim)), tuple(range(count, count + num_columns)))
    samples = tuple(range(lead))
    dx = _dot(g8, w8, columns, like_x.dtype)
    dw = _dot(x8, g8, (samples, samples), like_w.dtype)
    return dx, dw if dot.gather is None else dot.gather.backward(dw)


_product.defvjp(_forward, _backward)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Rounded:
    """A tensor in fp8.

    Args:
        values: the elements, in an fp8 dtype.
        scale: float32 scalar, a power of two; the tensor is about `values * scale`.
    """

    values: Array
    scale: Array


def rounded(x: Array, dtype: DTypeLike, axes: Sequence[str] = ()) -> Rounded:
    """Rounds a tensor to fp8.

    Args:
        x: an array of any floating dtype.
        dtype: an fp8 dtype.
        axes: mesh axes; the maximum is taken over those that are manual.

    Returns:
        The values and their scale.

    Example:
        >>> found = rounded(jnp.array([1000.0, 1.0]), FORWARD)
        >>> found.values.tolist(), float(found.scale)
        ([256.0, 0.25], 4.0)
    """
    scale = _scale(x, dtype, axes)
    return Rounded(values_of(x, scale, dtype), scale)


def _scale(x: Array, dtype: DTypeLike, axes: Sequence[str] = ()) -> Array:
    largest = jnp.max(jnp.abs(x)).astype(jnp.float32)
    manual = _manual(axes)
    largest = all_max(largest, manual) if manual else largest
    limit = jnp.finfo(dtype).max.astype(jnp.float32)
    mantissa, exponent = jnp.frexp(largest / limit)
    # frexp gives a mantissa in [1/2, 1), so an exact power of two needs an exponent one smaller.
    exponent = jnp.where(mantissa == 0.5, exponent - 1, exponent)
    # Beyond these exponents, the scale or its inverse is no longer a normal number.
    exponent = jnp.clip(exponent, -100, 100)
    return jnp.ldexp(jnp.float32(1), exponent)


def _manual(axes: Sequence[str]) -> tuple[str, ...]:
    """The axes that are manual in the surrounding `shard_map`."""
    current = jax.sharding.get_abstract_mesh().manual_axes
    return tuple(axis for axis in axes if axis in current)


def _num_parts(axes: Sequence[str]) -> int:
    """The number of ranks over which the surrounding `shard_map` splits the samples."""
    sizes = jax.sharding.get_abstract_mesh().shape
    return math.prod(sizes[axis] for axis in _manual(axes))


def values_of(x: Array, scale: Array, dtype: DTypeLike) -> Array:
    """Rounds a tensor, or a part of one, to fp8 with the scale of the whole tensor."""
    # float16 cannot represent such scales or their inverses, so its values are scaled in float32.
    wide = jnp.promote_types(x.dtype, jnp.bfloat16)
    # The scale keeps finite values within range. Others stay nonfinite: NaN in e4m3.
    return (x.astype(wide) * (1 / scale).astype(wide)).astype(dtype)


def _rounded_weight(w: Array, gather: WeightGather | None) -> Rounded:
    # Ranks that split samples have the same weights, so no maximum over axes is needed.
    scale = _scale(w, FORWARD)
    (values,) = _round_weight_primitive().bind(w, scale)
    if gather is not None:
        # Gather plain bytes: a compiler may widen a gather to a dtype that its device supports.
        gathered = gather.forward(jax.lax.bitcast_convert_type(values, jnp.uint8))
        (values,) = _read_bytes_primitive().bind(gathered)
    return Rounded(values, scale)


# These are separate primitives, so that a remat policy can recompute the weight by name.
@functools.cache
def _round_weight_primitive() -> Primitive:
    return new_operation(WEIGHT, lambda w, scale: (values_of(w, scale, FORWARD),))


@functools.cache
def _read_bytes_primitive() -> Primitive:
    return new_operation(WEIGHT, lambda x: (jax.lax.bitcast_convert_type(x, FORWARD),))


def _dot(
    a: Rounded, b: Rounded, contracting: tuple[Sequence[int], Sequence[int]], dtype: DTypeLike
) -> Array:
    # If ranks sum partial products, they send them in this dtype. bfloat16 has enough range for
    # values that are not scaled yet, and scaling by a power of two adds no rounding.
    wide = jnp.bfloat16 if dtype == jnp.bfloat16 else jnp.float32
    y = jax.lax.dot_general(
        a.values, b.values, (contracting, ((), ())), preferred_element_type=wide
    )
    return (y * (a.scale * b.scale)).astype(dtype)


GatherOf: TypeAlias = Callable[[nnx.Variable], WeightGather | None]
"""(the Variable of a kernel) -> how the product that reads it gathers it, or None."""


@dataclasses.dataclass(frozen=True)
class Fp8Layers:
    """Makes layers of a model compute their products in fp8, in place.

    Args:
        dot: the product.
        paths: the paths of the layers.
        gathers: whether the products gather sharded weights themselves.
    """

    dot: Fp8Dot
    paths: frozenset[Path]
    gathers: bool = False

    def __call__(self, model: nnx.Module, gather_of: GatherOf = lambda _: None) -> None:
        """Changes a model that was merged inside a trace.

        Args:
            model: the model.
            gather_of: (the Variable of a kernel) -> how the product gathers it, or None.
        """
        for layer in self.layers(model):
            dot = dataclasses.replace(self.dot, gather=gather_of(layer.kernel))
            setattr(layer, "dot_general", dot)  # noqa: B010

    def layers(self, model: nnx.Module) -> Iterator[DenseLayer]:
        """Yields the layers in a model."""
        for keys, module in nnx.iter_modules(model):
            if "/".join(map(str, keys)) in self.paths and is_dense(module):
                yield module


def fp8_layers(model: nnx.Module, skip: Sequence[str] = ()) -> frozenset[Path]:
    """Returns the dense layers of a model that compute in fp8.

    They are the layers with a `dot_general` (`nnx.Linear`, `nnx.LinearGeneral`, and those that
    split over tensor ranks) in modules that the model keeps in lists or stacks by `nnx.vmap`.
    Heads, embeddings and norms are not in such modules.

    Args:
        model: any NNX module; its leaves may be shapes.
        skip: regular expressions of paths of layers to leave out.

    Returns:
        Their paths.

    Raises:
        UnsupportedError: if there are none; gives the reason for each dense layer.

    Example:
        >>> model = nnx.Sequential(nnx.Linear(16, 32, rngs=nnx.Rngs(0)))
        >>> fp8_layers(model)
        frozenset({'layers/0'})
    """
    reasons = fp8_reasons(model, skip)
    layers = frozenset(path for path, reason in reasons.items() if not reason)
    if not layers:
        listed = "; ".join(f"{path} {reason}" for path, reason in list(reasons.items())[:4])
        raise UnsupportedError(
            f"precision='fp8' finds no dense layer to compute in fp8 ({listed or 'none at all'}). "
            "It takes nnx.Linear, nnx.LinearGeneral and layers that split over tensor ranks, in "
            "modules that the model keeps in lists or stacks by nnx.vmap; use precision='bf16'"
        )
    return layers


def is_dense(module: object) -> TypeGuard[DenseLayer]:
    """Whether a module multiplies by a kernel with a product that can be replaced."""
    return hasattr(module, "dot_general") and hasattr(module, "kernel")


def fp8_reasons(model: nnx.Module, skip: Sequence[str] = ()) -> dict[Path, str]:
    """Returns why each dense layer of a model does not compute in fp8; "" for those that do."""
    stacks = tuple(stacks_of(model))
    layers = {"/".join(map(str, keys)): m for keys, m in nnx.iter_modules(model) if is_dense(m)}
    return {path: _reason(path, layer, stacks, skip) for path, layer in layers.items()}


def _reason(path: Path, layer: DenseLayer, stacks: Sequence[Path], skip: Sequence[str]) -> str:
    is_stacked = any(not stack or path.startswith(f"{stack}/") for stack in stacks)
    is_numbered = any(key.isdigit() for key in path.split("/"))
    if any(re.search(pattern, path) for pattern in skip):
        return "is skipped"
    if not (is_stacked or is_numbered):
        return "is not in a block"
    is_custom = layer.dot_general not in (None, jax.lax.dot_general)
    if is_custom or getattr(layer, "dot_general_cls", None) is not None:
        return "has its own dot_general"
    rows, columns = _sizes(layer)
    if getattr(layer, "batch_axis", None) or rows is None:
        return "contracts dims other than the last"
    if rows % MULTIPLE or columns % MULTIPLE:
        return f"is {rows}×{columns}, not multiples of {MULTIPLE}"
    return ""


def _sizes(layer: DenseLayer) -> tuple[int | None, int]:
    """Returns the kernel's rows and columns; rows are None unless it contracts the last dims."""
    rows = layer.in_features
    columns = layer.out_features
    if not isinstance(rows, Sequence):
        return rows, size_of(columns)
    axis = getattr(layer, "axis", -1)
    axes = axis if isinstance(axis, tuple) else (axis,)
    is_last = sorted(axes) == list(range(-len(axes), 0)) and list(axes) == sorted(axes)
    return size_of(rows) if is_last else None, size_of(columns)


def size_of(features: int | tuple[int, ...]) -> int:
    """Returns the number of features of a layer, over all its feature dims."""
    return math.prod(features) if isinstance(features, Sequence) else features
