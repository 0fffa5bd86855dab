"""Tokens through the experts that were chosen for them, on the arrays of one device.

An expert is a function of rows; all of them are one function `feed(product, rows, kernels)` whose
kernels have a leading dim of experts, and which multiplies by `product(rows, kernel)` alone. So
the same feed-forward runs on rows of any number for each expert (`in_order`: sorted by expert, no
token is left out) and on as many rows for each (`in_slots`: what exceeds them is left out and
counted). Nothing here knows of devices; `axon_dist.parallel.expert` adds the collectives.

Source: Shazeer et al., arXiv:1701.06538; Lepikhin et al., GShard, arXiv:2006.16668.
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

Product: TypeAlias = Callable[[Array, Array], Array]
"""(rows, kernel `[E, D, H]`) -> each row multiplied with the matrix of its expert."""

Feed: TypeAlias = Callable[[Product, Array, PyTree], Array]
"""(product, rows, kernels) -> what each expert makes of its rows."""

Exchange: TypeAlias = Callable[[Array], Array]
"""Slots `[E, C, D]` -> slots, elsewhere."""


@dataclasses.dataclass(frozen=True)
class Choice:
    """The experts of every token, and the weight of each.

    Args:
        experts: int32 `[N, k]`, numbers of experts, those of a token all different.
        gates: float32 `[N, k]`.
    """

    experts: Array
    gates: Array

    def by_expert(self, first: Array | int, count: int) -> Assigned:
        """Sorts all assignments by expert.

        Args:
            first: the expert from which they are counted.
            count: how many there are; it stands for all others.
        """
        expert = self.experts.reshape(-1) - first
        expert = jnp.where((expert >= 0) & (expert < count), expert, count)
        order = jnp.argsort(expert, stable=True)
        sizes = jnp.sum(expert[:, None] == jnp.arange(count), axis=0, dtype=jnp.int32)
        return Assigned(expert, order, jnp.argsort(order), sizes, jnp.cumsum(sizes) - sizes)


class Assigned(NamedTuple):
    """The assignments of tokens to E experts.

    Args:
        expert: int32 `[N k]`, the expert of each; E for those that are not here.
        order: `[N k]`, the assignments sorted by expert.
        rank: `[N k]`, where each of them is in that order.
        sizes: int32 `[E]`, how many an expert gets.
        starts: int32 `[E]`, where its first is in that order.
    """

    expert: Array
    order: Array
    rank: Array
    sizes: Array
    starts: Array


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
    count, per_token = num_experts_of(kernels), choice.experts.shape[1]
    assigned = choice.by_expert(first, count)
    is_here = (jnp.arange(assigned.expert.shape[0]) < jnp.sum(assigned.sizes))[:, None]
    # Masked before and after: a product may leave anything in the rows behind the last group.
    rows = jnp.where(is_here, _permuted(jnp.repeat(tokens, per_token, axis=0), assigned.order), 0)

    def product(rows, kernel):
        return jax.lax.ragged_dot(rows, kernel, assigned.sizes)

    out = jnp.where(is_here, feed(product, rows, kernels), 0)
    return _summed(_permuted(out, assigned.rank), choice.gates, tokens.dtype)


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

    What is left out adds nothing to its token, which continues by the residual stream (Switch
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
    assigned = choice.by_expert(first, num_experts)
    left_out = jnp.sum(jnp.maximum(assigned.sizes - capacity, 0)).astype(jnp.float32)
    return in_assigned_slots(
        feed, capacity, tokens, choice.gates, kernels, assigned, there, back
    ), left_out


def in_assigned_slots(
    feed: Feed,
    capacity: int,
    tokens: Array,
    gates: Array,
    kernels: PyTree,
    assigned: Assigned,
    there: Exchange = lambda slots: slots,
    back: Exchange = lambda slots: slots,
) -> Array:
    """As `in_slots`, of assignments that are sorted already; only the sum for each token."""
    number = jnp.arange(capacity)
    is_taken = number < assigned.sizes[:, None]
    source = assigned.order[jnp.where(is_taken, assigned.starts[:, None] + number, 0)]
    place = assigned.rank - jnp.append(assigned.starts, 0)[assigned.expert]
    is_kept = (assigned.expert < len(assigned.sizes)) & (place < capacity)
    into = RowSource(source.reshape(-1), is_taken.reshape(-1))
    out = RowSource(jnp.where(is_kept, assigned.expert * capacity + place, 0), is_kept)
    slots = _moved(jnp.repeat(tokens, gates.shape[1], axis=0), into, out)

    def product(rows, kernel):
        return jnp.einsum("ecd,edh->ech", rows, kernel)

    results = back(feed(product, there(slots.reshape(*is_taken.shape, -1)), kernels))
    return _summed(_moved(results.reshape(-1, results.shape[-1]), out, into), gates, tokens.dtype)


def slots_for(num_tokens: int, per_token: int, num_experts: int, factor: float) -> int:
    """How many slots an expert has: `factor` times its share of the assignments, rounded up.

    More than one for each token are never needed.

    Example:
        >>> slots_for(1024, 2, 8, 1.25), slots_for(1024, 2, 8, 100.0)
        (320, 1024)
    """
    return max(1, min(num_tokens, math.ceil(factor * num_tokens * per_token / num_experts)))


def num_experts_of(kernels: PyTree) -> int:
    """How many experts stacked kernels are of."""
    return jax.tree.leaves(kernels)[0].shape[0]


def _permuted(rows: Array, order: Array) -> Array:
    """Rows in another order; indices marked unique need no atomics for the gradient."""
    return rows.at[order].get(unique_indices=True, mode="promise_in_bounds")


class RowSource(NamedTuple):
    """Where rows come from, and whether any does; zeros where none does."""

    source: Array
    is_filled: Array

    def take(self, rows: Array) -> Array:
        """The rows that come."""
        taken_rows = rows.at[self.source].get(mode="promise_in_bounds")
        return jnp.where(self.is_filled[:, None], taken_rows, 0)


@jax.custom_vjp
def _moved(rows: Array, way: RowSource, back: RowSource) -> Array:
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
