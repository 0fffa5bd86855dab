"""Tokens through the experts that were chosen for them, on the arrays of one device.

An expert is a function of rows; all of them are one function `feed(product, rows, kernels)` whose
kernels have a leading dim of experts, and which multiplies by `product(rows, kernel)` alone. So
the same feed-forward runs on rows of any number for each expert (`in_order` and `in_blocks`: sorted
by expert, no token is left out) and on as many rows for each (`in_slots`: what exceeds them is left
out and counted). Nothing here knows of devices; `axon_dist.parallel.expert` puts the collectives
around.

Source: Shazeer et al., arXiv:1701.06538; Lepikhin et al., GShard, arXiv:2006.16668; Gale et al.,
MegaBlocks, arXiv:2211.15841.

Rows that are sorted by group are cut into blocks of B, each of one group, the last of a group
filled up with zeros. A loop multiplies block after block,

    y[t] = x[t] W[group[t]],    dx[t] = dy[t] W[group[t]]^T,    dW[group[t]] += x[t]^T dy[t]

so that what is computed grows with the rows and not with the groups: at most B rows for each group
are filling. No matrix is copied, neither for a block nor for the backward pass.

Source: Gale et al., MegaBlocks, arXiv:2211.15841, whose blocks are tiles of one kernel.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from ..core.typing import Array, PyTree

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


Residuals: TypeAlias = tuple[Array, Array, Array]


@jax.custom_vjp
def _by_block(rows: Array, matrices: Array, groups: Array) -> Array:
    return jax.lax.map(lambda one: one[0] @ matrices[one[1]], (rows, groups))


def _forward(rows: Array, matrices: Array, groups: Array) -> tuple[Array, Residuals]:
    return _by_block(rows, matrices, groups), (rows, matrices, groups)


def _backward(residuals: Residuals, cotangents: Array) -> tuple[Array, Array, None]:
    rows, matrices, groups = residuals
    # In float32, as one product over all rows of a group would be added up.
    wide = jnp.promote_types(matrices.dtype, jnp.float32)
    sums = _varying(jnp.zeros_like(matrices, wide), matrices)

    def step(sums: Array, one: Residuals) -> tuple[Array, Array]:
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


Product: TypeAlias = Callable[[Array, Array], Array]
"""(rows, kernel `[E, D, H]`) -> each row multiplied with the matrix of its expert."""

Feed: TypeAlias = Callable[[Product, Array, PyTree], Array]
"""(product, rows, kernels) -> what each expert makes of its rows."""

Exchange: TypeAlias = Callable[[Array], Array]
"""Slots `[E, C, D]` -> slots, elsewhere."""


@dataclasses.dataclass(frozen=True)
class Choice:
    """Which experts every token goes to, and by how much each counts.

    Args:
        experts: int32 `[N, k]`, numbers of experts, those of a token all different.
        gates: float32 `[N, k]`.
    """

    experts: Array
    gates: Array

    def by_expert(self, first: Array | int, count: int) -> tuple[Array, Array, Array]:
        """The expert of every assignment, the order that sorts them, and how many each gets.

        Args:
            first: the expert from which they are counted.
            count: how many there are; it stands for all others.

        Returns:
            `[N k]`, `[N k]` and int32 `[count]`.
        """
        own = self.experts.reshape(-1) - first
        own = jnp.where((own >= 0) & (own < count), own, count)
        order = jnp.argsort(own, stable=True)
        return own, order, jnp.sum(own[:, None] == jnp.arange(count), axis=0, dtype=jnp.int32)


def in_order(
    feed: Feed, tokens: Array, choice: Choice, kernels: PyTree, first: Array | int = 0
) -> Array:
    """Sums `gate * expert(token)` over those chosen experts of each token that are here.

    The assignments are sorted by expert, and each expert works on its consecutive rows, however
    many they are (`jax.lax.ragged_dot`).

    Args:
        feed: the experts.
        tokens: `[N, D]`.
        choice: of all experts.
        kernels: arrays with a leading dim of E experts.
        first: the number of the first of them.

    Returns:
        `[N, D]` in the dtype of the tokens.
    """
    count, per_token = _num_experts(kernels), choice.experts.shape[1]
    own, order, sizes = choice.by_expert(first, count)
    is_here = (jnp.arange(own.shape[0]) < jnp.sum(sizes))[:, None]
    # Masked on both ways: what a product leaves in the rows behind the last group is its own.
    rows = jnp.where(is_here, _permuted(jnp.repeat(tokens, per_token, axis=0), order), 0)

    def product(rows, kernel):
        return jax.lax.ragged_dot(rows, kernel, sizes)

    made = jnp.where(is_here, feed(product, rows, kernels), 0)
    return _summed(_permuted(made, jnp.argsort(order)), choice.gates, tokens.dtype)


def in_blocks(
    feed: Feed, tokens: Array, choice: Choice, kernels: PyTree, first: Array | int = 0
) -> Array:
    """As `in_order`, block of rows by block (`by_block`).

    Args:
        feed: the experts.
        tokens: `[N, D]`.
        choice: of all experts.
        kernels: arrays with a leading dim of E experts.
        first: the number of the first of them.

    Returns:
        `[N, D]` in the dtype of the tokens.
    """
    count, per_token = _num_experts(kernels), choice.experts.shape[1]
    own, order, sizes = choice.by_expert(first, count)
    size = block_rows(own.shape[0], count)
    starts, blocks = jnp.cumsum(sizes) - sizes, -(-sizes // size)
    ends = jnp.cumsum(blocks)
    # The blocks behind the last are empty, and of any group.
    number = jnp.arange(num_blocks(own.shape[0], count, size))
    groups = jnp.minimum(jnp.searchsorted(ends, number, side="right"), count - 1)
    within = ((number - (ends - blocks)[groups]) * size)[:, None] + jnp.arange(size)
    is_filled = (number < ends[-1])[:, None] & (within < sizes[groups][:, None])
    source = order[jnp.where(is_filled, starts[groups][:, None] + within, 0)]
    # Where each assignment lies in the blocks.
    is_here = own < count
    mine = jnp.minimum(own, count - 1)
    place = (ends - blocks)[mine] * size + jnp.argsort(order) - starts[mine]
    there = _RowSource(source.reshape(-1), is_filled.reshape(-1))
    back = _RowSource(jnp.where(is_here, place, 0), is_here)
    rows = _moved(jnp.repeat(tokens, per_token, axis=0), there, back)

    def product(rows, kernel):
        return by_block(rows, kernel, groups)

    made = feed(product, rows.reshape(*is_filled.shape, -1), kernels)
    made = _moved(made.reshape(-1, made.shape[-1]), back, there)
    return _summed(made, choice.gates, tokens.dtype)


def in_slots(
    feed: Feed,
    tokens: Array,
    choice: Choice,
    kernels: PyTree,
    num_experts: int,
    capacity: int,
    first: Array | int = 0,
    there: Exchange = lambda slots: slots,
    back: Exchange = lambda slots: slots,
) -> tuple[Array, Array]:
    """As `in_order`, with at most `capacity` tokens for each expert: those that come first.

    What is left out adds nothing to its token, which goes on by the residual stream (Switch
    Transformers, arXiv:2101.03961, section 2.2).

    Args:
        feed: the experts.
        tokens: `[N, D]`.
        choice: of all experts.
        kernels: of the experts that get what `there` returns.
        num_experts: for how many experts there are slots.
        capacity: C, slots of each.
        first: the number of the first of these experts.
        there: takes the slots `[num_experts, C, D]` to their experts.
        back: takes what they made back, as `[num_experts, C, D]`.

    Returns:
        `[N, D]` in the dtype of the tokens, and how many assignments were left out, float32.
    """
    own, order, sizes = choice.by_expert(first, num_experts)
    starts = jnp.cumsum(sizes) - sizes
    number = jnp.arange(capacity)
    is_taken = number < sizes[:, None]
    source = order[jnp.where(is_taken, starts[:, None] + number, 0)] // choice.experts.shape[1]
    slots = jnp.where(is_taken[..., None], tokens[source], 0)

    def product(rows, kernel):
        return jnp.einsum("ecd,edh->ech", rows, kernel)

    made = back(feed(product, there(slots), kernels)).reshape(-1, tokens.shape[-1])
    place = jnp.argsort(order) - jnp.append(starts, 0)[own]
    is_kept = (own < num_experts) & (place < capacity)
    rows = jnp.where(is_kept[:, None], made[jnp.where(is_kept, own * capacity + place, 0)], 0)
    left_out = jnp.sum(jnp.maximum(sizes - capacity, 0)).astype(jnp.float32)
    return _summed(rows, choice.gates, tokens.dtype), left_out


def slots_for(num_tokens: int, per_token: int, num_experts: int, factor: float) -> int:
    """How many slots an expert has: `factor` times its share of the assignments, rounded up.

    More than one for each token are never needed.

    Example:
        >>> slots_for(1024, 2, 8, 1.25), slots_for(1024, 2, 8, 100.0)
        (320, 1024)
    """
    return max(1, min(num_tokens, math.ceil(factor * num_tokens * per_token / num_experts)))


def _num_experts(kernels: PyTree) -> int:
    return jax.tree.leaves(kernels)[0].shape[0]


def _permuted(rows: Array, order: Array) -> Array:
    """Rows in another order; told so, the compiler needs no atomics for the gradient."""
    return rows.at[order].get(unique_indices=True, mode="promise_in_bounds")


class _RowSource(NamedTuple):
    """Where rows come from, and whether any does; zeros where none does."""

    source: Array
    is_filled: Array

    def take(self, rows: Array) -> Array:
        """The rows that come."""
        found = rows.at[self.source].get(mode="promise_in_bounds")
        return jnp.where(self.is_filled[:, None], found, 0)


@jax.custom_vjp
def _moved(rows: Array, way: _RowSource, back: _RowSource) -> Array:
    """Rows in other places; gradients go the way back, with no sum and so no atomics."""
    return way.take(rows)


_moved.defvjp(
    lambda rows, way, back: (way.take(rows), back),
    lambda back, cotangents: (back.take(cotangents), None, None),
)


def _summed(rows: Array, gates: Array, dtype: DTypeLike) -> Array:
    """Weighs the rows of each token and adds them up in float32."""
    each = rows.reshape(*gates.shape, rows.shape[-1]).astype(jnp.float32)
    return jnp.sum(each * gates[..., None], axis=1).astype(dtype)
