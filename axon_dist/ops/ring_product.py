"""Collective matmul: tensor-parallel products that pass positions around a ring.

Each of t ranks has 1/t of the positions and 1/t of the features. Gathering all positions before the
product exposes the gather. But the product splits into pieces,

    y[c] = x[c] A_r,   c = r, r - 1, ..., r - t + 1        r = the rank,

and the next piece is sent while one piece is multiplied. If the features are summed instead, the
partial sum of each piece goes around the ring, and every rank adds its share. Each of the two is
the backward pass of the other. The gradient of the kernel, a sum over all positions, stays a single
product.

Source: Wang et al., Overlap Communication with Dependent Computation via Decomposition in Large
Deep Learning Models, ASPLOS 2023.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import TypeAlias

import jax
import jax.numpy as jnp

from ..core.typing import Array

Product: TypeAlias = Callable[[Array, Array], Array]
"""(`[B, T, K]`, `[K, N]`) -> `[B, T, N]`, linear in both; must be hashable."""


@dataclasses.dataclass(frozen=True)
class Circle:
    """The ranks of one mesh axis, which have consecutive pieces of dim 1.

    Args:
        axis: the mesh axis.
        size: its size.
    """

    axis: str
    size: int

    def pieces(self, x: Array) -> tuple[Array, ...]:
        """Returns all ranks' pieces as they arrive: this rank's first, then the previous ranks'."""
        pieces = [x]
        for _ in range(self.size - 1):
            pieces.append(self.moved(pieces[-1]))
        return tuple(pieces)

    def summed(self, addend: Callable[[Array], Array]) -> Array:
        """Sums each piece over the ranks; each sum travels around the ring to the piece's rank.

        Args:
            addend: (the number of a piece) -> this rank's share of its sum.
        """
        rank = jax.lax.axis_index(self.axis)
        total = addend((rank - 1) % self.size)
        for back in range(2, self.size + 1):
            total = added(self.moved(total), addend((rank - back) % self.size))
        return total

    def joined(self, pieces: Sequence[Array]) -> Array:
        """Concatenates the pieces that arrived, in the order of positions."""
        rows = pieces[0].shape[1]
        shape = (pieces[0].shape[0], rows * self.size, *pieces[0].shape[2:])
        joined = jnp.zeros(shape, pieces[0].dtype)
        rank = jax.lax.axis_index(self.axis)
        for back, piece in enumerate(pieces):
            start = (rank - back) % self.size * rows
            joined = jax.lax.dynamic_update_slice_in_dim(joined, piece, start, 1)
        return joined

    def piece(self, x: Array, number: Array) -> Array:
        """Cuts one piece from an array of all positions."""
        rows = x.shape[1] // self.size
        return jax.lax.dynamic_slice_in_dim(x, number * rows, rows, 1)

    def moved(self, x: Array, by: int = 1) -> Array:
        """Sends every rank's value to the rank `by` places after it."""
        pairs = [(rank, (rank + by) % self.size) for rank in range(self.size)]
        return jax.lax.ppermute(x, self.axis, pairs)


def added(arrived: Array, addend: Array) -> Array:
    """Adds to an arriving sum; the barrier keeps XLA from fusing the addition into the product.

    A fused product would have to wait for the sum to arrive.
    """
    arrived, addend = jax.lax.optimization_barrier((arrived, addend))
    return arrived + addend


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def pieces_of(circle: Circle, x: Array) -> tuple[Array, ...]:
    """`Circle.pieces` with a backward pass that sums gradients on their way around the ring."""
    return circle.pieces(x)


def _pieces_backward(circle: Circle, _: None, cotangents: tuple[Array, ...]) -> tuple[Array]:
    total = cotangents[-1]
    for cotangent in cotangents[-2::-1]:
        total = added(circle.moved(total, -1), cotangent)
    return (total,)


pieces_of.defvjp(lambda circle, x: (circle.pieces(x), None), _pieces_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def into_columns(
    circle: Circle, product: Product, pieces: tuple[Array, ...], kernel: Array
) -> Array:
    """Multiplies all positions, in the pieces of `Circle.pieces`, by this rank's columns.

    Args:
        circle: the ranks.
        product: the product of a piece and the kernel.
        pieces: `[B, T/t, K]` each.
        kernel: `[K, N/t]`.

    Returns:
        `[B, T, N/t]`.
    """
    return circle.joined([_separate_product(product, piece, kernel) for piece in pieces])


def _columns_backward(
    circle: Circle, product: Product, residuals: tuple[tuple[Array, ...], Array], cotangent: Array
) -> tuple[tuple[Array, ...], Array]:
    pieces, kernel = residuals
    rank = jax.lax.axis_index(circle.axis)
    cotangents = (circle.piece(cotangent, (rank - i) % circle.size) for i in range(circle.size))
    of_pieces = tuple(
        _of_left(product, piece, kernel, ct) for piece, ct in zip(pieces, cotangents, strict=True)
    )
    return of_pieces, _of_kernel(product, circle.joined(pieces), kernel, cotangent)


into_columns.defvjp(
    lambda circle, product, pieces, kernel: (
        into_columns(circle, product, pieces, kernel),
        (pieces, kernel),
    ),
    _columns_backward,
)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def into_rows(circle: Circle, product: Product, x: Array, kernel: Array) -> Array:
    """Multiplies by this rank's rows, and reduce-scatters the result over positions.

    Args:
        circle: the ranks.
        product: the product of a piece and the kernel.
        x: `[B, T, K/t]`.
        kernel: `[K/t, N]`.

    Returns:
        `[B, T/t, N]`.
    """
    return circle.summed(lambda number: _separate_product(product, circle.piece(x, number), kernel))


def _rows_backward(
    circle: Circle, product: Product, residuals: tuple[Array, Array], cotangent: Array
) -> tuple[Array, Array]:
    x, kernel = residuals
    pieces = circle.pieces(cotangent)
    like = jax.lax.slice_in_dim(x, 0, x.shape[1] // circle.size, axis=1)
    of_x = circle.joined([_of_left(product, like, kernel, piece) for piece in pieces])
    return of_x, _of_kernel(product, x, kernel, circle.joined(pieces))


into_rows.defvjp(
    lambda circle, product, x, kernel: (into_rows(circle, product, x, kernel), (x, kernel)),
    _rows_backward,
)


def _separate_product(product: Product, left: Array, right: Array) -> Array:
    """Multiplies behind a barrier; XLA would merge products with the same kernel, and wait."""
    return product(*jax.lax.optimization_barrier((left, right)))


def _of_left(product: Product, left: Array, kernel: Array, cotangent: Array) -> Array:
    cotangent, kernel = jax.lax.optimization_barrier((cotangent, kernel))
    return jax.linear_transpose(lambda x: product(x, kernel), left)(cotangent)[0]


def _of_kernel(product: Product, left: Array, kernel: Array, cotangent: Array) -> Array:
    return jax.linear_transpose(lambda w: product(left, w), kernel)(cotangent)[0]
