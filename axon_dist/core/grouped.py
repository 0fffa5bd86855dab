"""Rows times the matrices of their groups, a block of rows after another.

Rows that are sorted by group are cut into blocks of B, each of one group, the last of a group
filled up with zeros. A loop multiplies block after block,

    y[t] = x[t] W[group[t]],    dx[t] = dy[t] W[group[t]]^T,    dW[group[t]] += x[t]^T dy[t]

so that what is computed grows with the rows and not with the groups: at most B rows for each group
are filling. No matrix is copied, neither for a block nor for the backward pass.

Source: Gale et al., MegaBlocks, arXiv:2211.15841, whose blocks are tiles of one kernel.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from .typing import Array

LEAST, MOST = 16, 512
"""Rows of a block: fewer are no work for matrix units, and more hide no latency better."""


def block_rows(num_rows: int, num_groups: int) -> int:
    """The rows of a block, so that filling adds a quarter to all rows at most, if that can be.

    Example:
        >>> block_rows(65_536, 64), block_rows(64, 8)
        (256, 16)
    """
    wanted = max(1, num_rows // (4 * num_groups))
    return min(MOST, max(LEAST, 2 ** int(math.log2(wanted))))


def num_blocks(num_rows: int, num_groups: int, rows: int) -> int:
    """How many blocks hold any distribution of the rows over the groups.

    Example:
        >>> num_blocks(65_536, 64, 256)
        320
    """
    return math.ceil(num_rows / rows) + num_groups


def block_total(num_rows: int, num_groups: int) -> int:
    """The rows of all blocks, filling and empty blocks included.

    Example:
        >>> block_total(65_536, 64)
        81920
    """
    rows = block_rows(num_rows, num_groups)
    return num_blocks(num_rows, num_groups, rows) * rows


def by_block(rows: Array, matrices: Array, groups: Array) -> Array:
    """Multiplies blocks of rows, each by the matrix of its group.

    Args:
        rows: `[T, B, D]`.
        matrices: `[G, D, H]`.
        groups: int32 `[T]`, the group of each block.

    Returns:
        `[T, B, H]` in the dtype of the rows.

    Example:
        >>> rows, matrices = jnp.ones((2, 1, 3)), jnp.stack([jnp.eye(3), 2 * jnp.eye(3)])
        >>> by_block(rows, matrices, jnp.array([1, 0])).tolist()
        [[[2.0, 2.0, 2.0]], [[1.0, 1.0, 1.0]]]
    """
    return _by_block(_varying(rows, matrices), _varying(matrices, rows, groups), groups)


@jax.custom_vjp
def _by_block(rows: Array, matrices: Array, groups: Array) -> Array:
    return jax.lax.map(lambda one: one[0] @ matrices[one[1]], (rows, groups))


def _forward(rows: Array, matrices: Array, groups: Array) -> Any:
    return _by_block(rows, matrices, groups), (rows, matrices, groups)


def _backward(kept: Any, cotangents: Array) -> tuple[Array, Array, None]:
    rows, matrices, groups = kept
    # In float32, as one product over all rows of a group would be added up.
    wide = jnp.promote_types(matrices.dtype, jnp.float32)
    sums = _varying(jnp.zeros_like(matrices, wide), matrices)

    def step(sums: Array, one: Any) -> tuple[Array, Array]:
        x, ct, group = one
        own = jax.lax.dot_general(
            x, ct, (((0,), (0,)), ((), ())), preferred_element_type=sums.dtype
        )
        return sums.at[group].add(own), ct @ matrices[group].T

    sums, of_rows = jax.lax.scan(step, sums, (rows, cotangents, groups))
    return of_rows.astype(rows.dtype), sums.astype(matrices.dtype), None


_by_block.defvjp(_forward, _backward)


def _varying(x: Array, *others: Array) -> Array:
    """The same values, typed inside `shard_map` to vary as others do too; compiled to nothing.

    JAX adds a gradient up over the ranks where its array stops being one of all, which an array
    given to a rule of one's own would not. A whole number times zero is known to be zero.
    """
    zeros = [other.ravel()[0].astype(jnp.int32) * 0 for other in others]
    return jnp.where(sum(zeros) == 0, x, 0)
