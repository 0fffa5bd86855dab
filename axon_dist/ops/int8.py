"""Weights in int8, with one scale per output channel."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from ..core.compat import Primitive, new_operation
from ..core.tree import map_with_path
from ..core.typing import Array, Leaf, Path, PyTree, Shape

WIDEN = "axon_int8"
"""The name of the equation that computes a weight from integers and scales."""

NUMBERS, SCALE = "int8", "scale"
"""The keys of the integers and the scales in the dict that replaces a weight."""

SMALLEST_GROUP = 16
"""The fewest weights that share a scale; for smaller groups, scales would use up the savings."""


@dataclasses.dataclass(frozen=True)
class Int8Form:
    """How one weight is stored in int8.

    Args:
        shape: the shape of the weight.
        dtype: the dtype in which it is read.
        dim: the dim along which weights share a scale, as a negative number.
    """

    shape: Shape
    dtype: DTypeLike
    dim: int

    @property
    def scale(self) -> Shape:
        """The shape of the scales."""
        group_dim = self.dim % len(self.shape)
        return tuple(1 if dim == group_dim else size for dim, size in enumerate(self.shape))

    def narrow(self, weight: Array) -> dict[str, Array]:
        """Computes `scale = bfloat16(max |w| / 127)` and `int8 = round(w / scale)` within ±127.

        Example:
            >>> form = Int8Form((2, 1), jnp.dtype("float32"), -2)
            >>> found = jax.jit(form.narrow)(jnp.array([[1.27], [-0.5]]))
            >>> found["int8"].tolist(), found["scale"].shape
            ([[127], [-50]], (1, 1))
        """
        wide = weight.astype(jnp.float32)
        scale = (jnp.max(jnp.abs(wide), self.dim, keepdims=True) / 127).astype(jnp.bfloat16)
        scale = jnp.where(scale == 0, jnp.ones_like(scale), scale)
        numbers = jnp.clip(jnp.round(wide / scale.astype(jnp.float32)), -127, 127)
        return {NUMBERS: numbers.astype(jnp.int8), SCALE: scale}

    def widen(self, numbers: Array, scale: Array, dtype: DTypeLike | None = None) -> Array:
        """Computes `int8 * scale` in the weight's dtype, then casts it to `dtype` if given.

        The product of an int8 and a bfloat16 (8 bits of precision each) is exact in float32, in
        whatever order a compiler evaluates it.
        """
        stored = jnp.dtype(self.dtype)
        dtype = stored if dtype is None else jnp.dtype(dtype)
        return _operation().bind(numbers, scale, stored=stored, dtype=dtype)[0]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Int8:
    """A weight in int8, as the value of a Variable; whoever reads it must widen it.

    Args:
        numbers: int8, in the shape of the weight.
        scale: bfloat16, with size 1 in the dim along which weights share a scale.
        widen: computes the weight, for a read of the Variable by `kernel[...]`.
    """

    numbers: Array
    scale: Array
    widen: Callable[[Int8], Array] | None = dataclasses.field(
        default=None, metadata={"static": True}
    )

    def __getitem__(self, index: Any) -> Array:
        """Widens the weight, where a loss reads it outside the unit that gathers and widens it."""
        if self.widen is None:
            raise TypeError("a weight in int8 must be widened before it is read")
        return self.widen(self)[index]

    @property
    def shape(self) -> Shape:
        """The shape of the weight."""
        return self.numbers.shape


def int8_form(path: Path, leaf: Leaf, stacked: int = 0) -> Int8Form | None:
    """Returns how a weight is stored in int8, or None if it is not.

    Weights share a scale along the largest dim except the last. So there is one scale per column
    of a kernel `[in, out]`, per column of each expert of `[experts, in, out]`, and per output of an
    attention kernel `[in, heads, size]`. An embedding has one scale per row.

    Args:
        path: the path of the weight.
        leaf: an array or struct with its shape and dtype.
        stacked: the number of leading dims that count layers.

    Returns:
        The form; None for vectors, for dtypes other than floating-point, for biases and scales, and
        if fewer than `SMALLEST_GROUP` weights would share a scale.

    Example:
        >>> int8_form("up/kernel", jax.ShapeDtypeStruct((64, 256), "float32")).dim
        -2
        >>> int8_form("norm/scale", jax.ShapeDtypeStruct((64,), "float32"))
    """
    shape = tuple(leaf.shape)
    name = path.rpartition("/")[2]
    sizes = shape[stacked:]
    if len(sizes) < 2 or name in ("bias", "scale") or not jnp.issubdtype(leaf.dtype, jnp.floating):
        return None
    dims = [-1] if name == "embedding" else range(-len(sizes), -1)
    dim = max(dims, key=lambda d: (sizes[d], d))
    return Int8Form(shape, leaf.dtype, dim) if sizes[dim] >= SMALLEST_GROUP else None


def narrowed(weights: PyTree, forms: Mapping[Path, Int8Form]) -> PyTree:
    """Replaces the weights that have a form by `{"int8": ..., "scale": ...}`."""

    def one(path, x):
        return forms[path].narrow(x) if path in forms else x

    return map_with_path(one, weights)


def widened(weights: PyTree, forms: Mapping[Path, Int8Form]) -> PyTree:
    """Undoes `narrowed`: returns the weights, each in its dtype."""

    def one(form, x):
        return x if form is None else form.widen(x.numbers, x.scale)

    return _mapped(one, weights, forms)


def as_values(weights: PyTree, forms: Mapping[Path, Int8Form]) -> PyTree:
    """Replaces the dict of each narrowed weight by an `Int8`, which a Variable can hold."""
    return _mapped(lambda _, x: x, weights, forms)


def _mapped(
    function: Callable[[Int8Form | None, PyTree], PyTree],
    weights: PyTree,
    forms: Mapping[Path, Int8Form],
) -> PyTree:
    def walk(tree: PyTree, path: Path) -> PyTree:
        if not isinstance(tree, dict):
            return function(None, tree)
        if path in forms:
            return function(forms[path], Int8(tree[NUMBERS], tree[SCALE]))
        return {key: walk(x, f"{path}/{key}" if path else str(key)) for key, x in tree.items()}

    return walk(weights, "")


def _widen(numbers: Array, scale: Array, *, stored: DTypeLike, dtype: DTypeLike) -> tuple[Array]:
    wide = numbers.astype(jnp.float32) * scale.astype(jnp.float32)
    return (wide.astype(stored).astype(dtype),)


def _batched(
    arrays: Sequence[Array], dims: Sequence[object], **dtypes: DTypeLike
) -> tuple[list[Array], list[int]]:
    pairs = zip(arrays, dims, strict=True)
    numbers, scale = (jnp.moveaxis(x, d, 0) if isinstance(d, int) else x[None] for x, d in pairs)
    numbers = jnp.broadcast_to(numbers, (max(len(numbers), len(scale)), *numbers.shape[1:]))
    return _operation().bind(numbers, scale, **dtypes), [0]


@functools.cache
def _operation() -> Primitive:
    # A separate primitive, so that a remat policy can recompute the weight by name.
    return new_operation(WIDEN, _widen, _batched)
