"""Values of different shapes in one form, so that every stage's fit into the same buffers."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import jax
import jax.numpy as jnp

from ..core.typing import Array
from ..program import whole


@dataclasses.dataclass(frozen=True)
class Packing:
    """Lists of arrays, one kind of list per variant, packed to one common form.

    Where all variants have equal shapes the form is the list itself. Else it is one vector per
    dtype, as long as the longest variant needs, with zeros behind the shorter ones. Random keys
    are packed as the integers they are made of.

    Args:
        variants: per variant, the shapes and dtypes of its list.

    Example:
        >>> shape = lambda *dims: jax.ShapeDtypeStruct(dims, jnp.float32)
        >>> packing = Packing(((shape(2, 2),), (shape(3), shape(2))))
        >>> packing.packed
        (ShapeDtypeStruct(shape=(5,), dtype=float32),)
        >>> [vector] = packing.pack(0, [jnp.ones((2, 2))])
        >>> packing.unpack(0, [vector])[0].shape
        (2, 2)
    """

    variants: tuple[tuple[jax.ShapeDtypeStruct, ...], ...]

    @classmethod
    def of(cls, variants: Sequence[Sequence[Any]]) -> Packing:
        """The packing of arrays, or of anything with shapes and dtypes."""
        shape = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype)
        return cls(tuple(tuple(shape(x) for x in variant) for variant in variants))

    @property
    def is_uniform(self) -> bool:
        """Whether all variants are alike, so that packing is the identity."""
        return all(variant == self.variants[0] for variant in self.variants)

    @property
    def packed(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """The common form."""
        if self.is_uniform:
            return self._plain[0]
        length = lambda dtype: max(sum(_sizes(v, dtype)) for v in self._plain)
        return tuple(jax.ShapeDtypeStruct((length(dtype),), dtype) for dtype in self._dtypes)

    def pack(self, variant: int, values: Sequence[Array]) -> list[Array]:
        """Brings the list of a variant to the common form."""
        values = [plain(value) for value in values]
        if self.is_uniform:
            return values
        vectors = []
        for form in self.packed:
            # A split piece could only be shifted into its place by a permutation, in a branch.
            own = [whole(x.reshape(-1)) for x in values if x.dtype == form.dtype]
            vector = jnp.concatenate(own) if own else jnp.zeros(0, form.dtype)
            vectors.append(jnp.pad(vector, (0, form.shape[0] - vector.shape[0])))
        return vectors

    def unpack(self, variant: int, packed: Sequence[Array]) -> list[Array]:
        """The inverse of `pack`."""
        pairs = zip(self._apart(variant, packed), self.variants[variant], strict=True)
        return [like(value, shape.dtype) for value, shape in pairs]

    def _apart(self, variant: int, packed: Sequence[Array]) -> list[Array]:
        if self.is_uniform:
            return list(packed)
        shapes = self._plain[variant]
        pieces: dict[Any, Any] = {}
        for form, vector in zip(self.packed, packed, strict=True):
            ends = [0, *accumulate(_sizes(shapes, form.dtype))]
            pieces[form.dtype] = iter([whole(vector[a:b]) for a, b in pairwise(ends)])
        return [next(pieces[shape.dtype]).reshape(shape.shape) for shape in shapes]

    @property
    def _plain(self) -> tuple[tuple[jax.ShapeDtypeStruct, ...], ...]:
        """The variants, keys as integers."""
        shape = lambda x: jax.eval_shape(plain, x) if _is_key(x.dtype) else x
        return tuple(tuple(shape(x) for x in variant) for variant in self.variants)

    @property
    def _dtypes(self) -> list[Any]:
        return sorted({shape.dtype for variant in self._plain for shape in variant}, key=str)


def plain(value: Any) -> Array:
    """The value, or the integers of random keys, which buffers of zeros can hold."""
    return jax.random.key_data(value) if _is_key(jnp.asarray(value).dtype) else jnp.asarray(value)


def like(value: Array, dtype: Any) -> Array:
    """The inverse of `plain`: keys again where `dtype` is one of keys."""
    return jax.random.wrap_key_data(value, dtype=dtype) if _is_key(dtype) else value


def _is_key(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jax.dtypes.prng_key)


def _sizes(shapes: Sequence[jax.ShapeDtypeStruct], dtype: Any) -> list[int]:
    return [math.prod(shape.shape) for shape in shapes if shape.dtype == dtype]
