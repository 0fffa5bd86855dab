"""`GradientBucket`: several gradients in one flat array."""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
import numpy as np

from ..core.errors import ConfigError, DTypeError
from ..core.told import NUMBERS
from ..core.typing import Array, Shape
from .plan import check_capacity


class GradientBucket:
    """Collects gradients into one flat array, and gives them back as they were.

    Args:
        capacity: how many elements fit.
        dtype: of the flat array; gradients of a narrower float dtype are widened, and narrowed
            back on the way out, which loses nothing.

    Raises:
        ConfigError: for a capacity below 1.

    Example:
        >>> bucket = GradientBucket(5)
        >>> bucket.add(jnp.array([0.1, 0.2])), bucket.add(jnp.array([0.3, 0.4, 0.5]))
        (True, True)
        >>> bucket.add(jnp.array([0.6])), bucket.is_full, bucket.shapes
        (False, True, ((2,), (3,)))
        >>> bucket.data
        Array([0.1, 0.2, 0.3, 0.4, 0.5], dtype=float32)
    """

    def __init__(self, capacity: int, dtype: Any = jnp.float32):
        check_capacity(capacity)
        self.capacity: int = capacity
        NUMBERS.check("GradientBucket", "dtype", dtype)
        self.dtype: np.dtype[Any] = np.dtype(dtype)
        self._gradients: list[Array] = []

    def add(self, gradient: Any) -> bool:
        """Appends a gradient unless it would overflow the bucket.

        Args:
            gradient: an array of any shape.

        Returns:
            Whether it fitted; if not, the bucket is as it was.

        Raises:
            DTypeError: when the dtype of the bucket cannot hold the gradient exactly.
        """
        gradient = jnp.asarray(gradient)
        self._check_dtype(gradient.dtype)
        if self.size + gradient.size > self.capacity:
            return False
        self._gradients.append(gradient)
        return True

    @property
    def size(self) -> int:
        """The number of elements held."""
        return sum(math.prod(shape) for shape in self.shapes)

    def __len__(self) -> int:
        """The number of elements held."""
        return self.size

    @property
    def is_full(self) -> bool:
        """Whether no element fits any more."""
        return self.size >= self.capacity

    @property
    def shapes(self) -> tuple[Shape, ...]:
        """The shapes of the gradients, in the order in which they were added."""
        return tuple(gradient.shape for gradient in self._gradients)

    @property
    def data(self) -> Array:
        """All elements in one array of the bucket's dtype, shape `(size,)`."""
        flat = [gradient.ravel().astype(self.dtype) for gradient in self._gradients]
        return jnp.concatenate(flat) if flat else jnp.zeros(0, self.dtype)

    def extract(self, data: Array | None = None) -> list[Array]:
        """Gives the gradients back in their own shapes and dtypes, and keeps them.

        Args:
            data: a flat array to cut instead of the bucket's own, such as the reduced one.

        Returns:
            Arrays in the order in which they were added.

        Raises:
            ConfigError: when `data` has another shape than the bucket's own.
        """
        flat = self.data if data is None else data
        if flat.shape != (self.size,):
            raise ConfigError(
                f"got data of shape {flat.shape} for a bucket of {self.size} elements; give an "
                f"array like its `data`, of shape {(self.size,)}"
            )
        ends = np.cumsum([math.prod(shape) for shape in self.shapes])
        parts = jnp.split(flat, ends[:-1]) if self._gradients else []
        return [
            part.reshape(gradient.shape).astype(gradient.dtype)
            for part, gradient in zip(parts, self._gradients, strict=True)
        ]

    def clear(self) -> None:
        """Empties the bucket."""
        self._gradients = []

    def _check_dtype(self, dtype: Any) -> None:
        floats = jnp.issubdtype(dtype, jnp.floating) and jnp.issubdtype(self.dtype, jnp.floating)
        if dtype != self.dtype and not (
            floats and jnp.promote_types(dtype, self.dtype) == self.dtype
        ):
            raise DTypeError(
                f"a bucket of {self.dtype} cannot hold a gradient of {dtype} exactly; make it "
                f"GradientBucket({self.capacity}, dtype=jnp.{dtype}), or cast the gradient"
            )
