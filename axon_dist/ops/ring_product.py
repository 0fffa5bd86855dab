"""Collective matmul: tensor-parallel products that pass positions around a ring.

Each of t ranks has 1/t of the positions and 1/t of the features. Gathering all positions before the
product exposes the gather. But the product splits into pieces,

    y[c] = x[c] A_r,   c = r, r - 1, ..., r - t + 1        r = the rank,

and the next piece is sent while one piece is multiplied. A product that contracts the split
features ends in a sum over ranks instead: the partial sum of each piece goes around the ring, and
every rank adds its share. Each of the two is the backward pass of the other. The gradient of the
kernel, a sum over all positions, stays a single product.

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
class MatmulRing:
    """The ranks of one mesh axis, each of which has one of the consecutive pieces of dim 1.

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
        length = pieces[0].shape[1]
        shape = (pieces[0].shape[0], length * self.size, *pieces[0].shape[2:])
        joined = jnp.zeros(shape, pieces[0].dtype)
        rank = jax.lax.axis_index(self.axis)
        for back, piece in enumerate(pieces):
            start = (rank - back) % self.size * length
            joined = jax.lax.dynamic_update_slice_in_dim(joined, piece, start, 1)
        return joined

    def piece(self, x: Array, number: Array) -> Array:
        """Cuts one piece from an array of all positions."""
        length = x.shape[1] // self.size
        return jax.lax.dynamic_slice_in_dim(x, number * length, length, 1)

    def moved(self, x: Array, by: int = 1) -> Array:
        """Sends every rank's value to the rank `by` positions after it."""
        pairs = [(rank, (rank + by) % self.size) for rank in range(self.size)]
        return jax.lax.ppermute(x, self.axis, pairs)


def added(arrived: Array, addend: Array) -> Array:
    """Adds to an arriving sum; the barrier keeps XLA from fusing the addition into the product.

    A fused product would have to wait for the sum to arrive.
    """
    arrived, addend = jax.lax.optimization_barrier((arrived, addend))
    return arrived + addend


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def pieces_of(ring: MatmulRing, x: Array) -> tuple[Array, ...]:
    """`MatmulRing.pieces` with a backward pass that sums gradients on their way around the ring."""
    return ring.pieces(x)


def _pieces_backward(ring: MatmulRing, _: None, cotangents: tuple[Array, ...]) -> tuple[Array]:
    total = cotangents[-1]
    for cotangent in cotangents[-2::-1]:
        total = added(ring.moved(total, -1), cotangent)
    return (total,)


pieces_of.defvjp(lambda ring, x: (ring.pieces(x), None), _pieces_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def into_columns(
    ring: MatmulRing, product: Product, pieces: tuple[Array, ...], kernel: Array
) -> Array:
    """Multiplies all positions, in the pieces of `MatmulRing.pieces`, by this rank's columns.

    Args:
        ring: the ranks.
        product: the product of a piece and the kernel.
        pieces: `[B, T/t, K]` each.
        kernel: `[K, N/t]`.

    Returns:
        `[B, T, N/t]`.
    """
    return ring.joined([_separate_product(product, piece, kernel) for piece in pieces])


def _columns_backward(
    ring: MatmulRing, product: Product, residuals: tuple[tuple[Array, ...], Array], cotangent: Array
) -> tuple[tuple[Array, ...], Array]:
    pieces, kernel = residuals
    rank = jax.lax.axis_index(ring.axis)
    cotangents = (ring.piece(cotangent, (rank - i) % ring.size) for i in range(ring.size))
    d_pieces = tuple(
        _left_gradient(product, piece, kernel, ct)
        for piece, ct in zip(pieces, cotangents, strict=True)
    )
    return d_pieces, _kernel_gradient(product, ring.joined(pieces), kernel, cotangent)


into_columns.defvjp(
    lambda ring, product, pieces, kernel: (
        into_columns(ring, product, pieces, kernel),
        (pieces, kernel),
    ),
    _columns_backward,
)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def into_rows(ring: MatmulRing, product: Product, x: Array, kernel: Array) -> Array:
    """Multiplies by this rank's rows, and reduce-scatters the result over positions.

    Args:
        ring: the ranks.
        product: the product of a piece and the kernel.
        x: `[B, T, K/t]`.
        kernel: `[K/t, N]`.

    Returns:
        `[B, T/t, N]`.
    """
    return ring.summed(lambda number: _separate_product(product, ring.piece(x, number), kernel))


def _rows_backward(
    ring: MatmulRing, product: Product, residuals: tuple[Array, Array], cotangent: Array
) -> tuple[Array, Array]:
    x, kernel = residuals
    pieces = ring.pieces(cotangent)
    like = jax.lax.slice_in_dim(x, 0, x.shape[1] // ring.size, axis=1)
    d_x = ring.joined([_left_gradient(product, like, kernel, piece) for piece in pieces])
    return d_x, _kernel_gradient(product, x, kernel, ring.joined(pieces))


into_rows.defvjp(
    lambda ring, product, x, kernel: (into_rows(ring, product, x, kernel), (x, kernel)),
    _rows_backward,
)


def _separate_product(product: Product, left: Array, right: Array) -> Array:
    """Multiplies behind a barrier.

    Without it XLA merges the products with the same kernel into one, which waits for all pieces.
    """
    return product(*jax.lax.optimization_barrier((left, right)))


def _left_gradient(product: Product, left: Array, kernel: Array, cotangent: Array) -> Array:
    cotangent, kernel = jax.lax.optimization_barrier((cotangent, kernel))
    return jax.linear_transpose(lambda x: product(x, kernel), left)(cotangent)[0]


def _kernel_gradient(product: Product, left: Array, kernel: Array, cotangent: Array) -> Array:
    return jax.linear_transpose(lambda w: product(left, w), kernel)(cotangent)[0]
