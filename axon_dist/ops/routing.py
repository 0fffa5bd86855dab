"""Mixture-of-experts routing: sends tokens through their chosen experts, on one device.

All experts are one function `feed(product, rows, kernels)`. Its kernels have a leading dim of
experts, and it multiplies only with `product(rows, kernel)`. So the same feed-forward runs with any
number of rows per expert (`in_order`: sorted by expert, no token is dropped), and with a fixed
number (`in_slots`: tokens beyond the capacity are dropped and counted). Nothing here depends on
devices; `axon_dist.parallel.expert` adds the collectives.

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

from ..core.tree import wide
from ..core.typing import Array, PyTree

Product: TypeAlias = Callable[[Array, Array], Array]
"""(rows, kernel `[E, D, H]`) -> each row multiplied with the matrix of its expert."""

Feed: TypeAlias = Callable[[Product, Array, PyTree], Array]
"""(product, rows, kernels) -> the outputs of each expert for its rows."""

Exchange: TypeAlias = Callable[[Array], Array]
"""Sends slots `[E, C, D]` to other devices; returns the slots received."""


@dataclasses.dataclass(frozen=True)
class Choice:
    """The experts of every token, and the weight of each.

    Args:
        experts: int32 `[N, k]`, numbers of experts; those of one token are distinct.
        gates: float32 `[N, k]`.
    """

    experts: Array
    gates: Array

    def by_expert(self, first: Array | int, count: int) -> Assigned:
        """Sorts all assignments by expert.

        Args:
            first: the number of the first expert to consider.
            count: how many experts to consider; all others get the number `count`.
        """
        expert = self.experts.reshape(-1) - first
        expert = jnp.where((expert >= 0) & (expert < count), expert, count)
        order = jnp.argsort(expert, stable=True)
        sizes = jnp.sum(expert[:, None] == jnp.arange(count)[None], axis=0, dtype=jnp.int32)
        return Assigned(expert, order, jnp.argsort(order), sizes, jnp.cumsum(sizes) - sizes)


class Assigned(NamedTuple):
    """The assignments of tokens to E experts.

    Args:
        expert: int32 `[N k]`, the expert of each assignment; E for experts that are not here.
        order: `[N k]`, the assignments sorted by expert.
        rank: `[N k]`, the position of each assignment in that order.
        sizes: int32 `[E]`, the number of assignments of each expert.
        starts: int32 `[E]`, the position of each expert's first assignment in that order.
    """

    expert: Array
    order: Array
    rank: Array
    sizes: Array
    starts: Array


def in_order(
    feed: Feed, tokens: Array, choice: Choice, kernels: PyTree, first: Array | int = 0
) -> Array:
    """Sums `gate * expert(token)` over those chosen experts of each token that are on this rank.

    The assignments are sorted by expert, and each expert processes its consecutive rows, however
    many they are (`jax.lax.ragged_dot`).

    Args:
        feed: the experts.
        tokens: `[N, D]`.
        choice: the choice among all experts.
        kernels: arrays with a leading dim of E experts.
        first: the number of the first of these E experts.

    Returns:
        `[N, D]` in the dtype of the tokens.
    """
    per_token = choice.experts.shape[1]
    assigned = choice.by_expert(first, num_experts_of(kernels))
    is_here = (jnp.arange(assigned.expert.shape[0]) < jnp.sum(assigned.sizes))[:, None]
    # Mask before and after: a ragged product may leave any values in rows after the last group.
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
    """Computes `in_order` for the first `capacity` tokens of each expert; drops the others.

    A dropped assignment adds nothing to its token, which continues on the residual stream (Switch
    Transformers, arXiv:2101.03961, section 2.2).

    Args:
        feed: the experts.
        tokens: `[N, D]`.
        choice: the choice among all experts.
        kernels: the kernels of the experts that process the output of `there`.
        num_experts: how many experts have slots.
        capacity: C, the number of slots of each expert.
        first: the number of the first of these experts.
        there: sends the slots `[num_experts, C, D]` to their experts.
        back: sends the results back, as `[num_experts, C, D]`.

    Returns:
        `[N, D]` in the dtype of the tokens, and how many assignments were dropped, float32.
    """
    assigned = choice.by_expert(first, num_experts)
    num_dropped = jnp.sum(jnp.maximum(assigned.sizes - capacity, 0)).astype(jnp.float32)
    return in_assigned_slots(
        feed, capacity, tokens, choice.gates, kernels, assigned, there, back
    ), num_dropped


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
    """Computes `in_slots` for assignments that are already sorted, without the count of drops."""
    number = jnp.arange(capacity)
    is_filled = number < assigned.sizes[:, None]
    source = assigned.order[jnp.where(is_filled, assigned.starts[:, None] + number, 0)]
    slot = assigned.rank - jnp.append(assigned.starts, 0)[assigned.expert]
    has_slot = (assigned.expert < len(assigned.sizes)) & (slot < capacity)
    to_slots = RowSource(source.reshape(-1), is_filled.reshape(-1))
    from_slots = RowSource(jnp.where(has_slot, assigned.expert * capacity + slot, 0), has_slot)
    slots = _moved(jnp.repeat(tokens, gates.shape[1], axis=0), to_slots, from_slots)

    def product(rows, kernel):
        return jnp.einsum("ecd,edh->ech", rows, kernel)

    results = back(feed(product, there(slots.reshape(*is_filled.shape, -1)), kernels))
    rows = _moved(results.reshape(-1, results.shape[-1]), from_slots, to_slots)
    return _summed(rows, gates, tokens.dtype)


def slots_for(num_tokens: int, per_token: int, num_experts: int, factor: float) -> int:
    """Returns the slots of an expert: `factor` times its share of the assignments, rounded up.

    An expert never needs more slots than there are tokens.

    Example:
        >>> slots_for(1024, 2, 8, 1.25), slots_for(1024, 2, 8, 100.0)
        (320, 1024)
    """
    return max(1, min(num_tokens, math.ceil(factor * num_tokens * per_token / num_experts)))


def num_experts_of(kernels: PyTree) -> int:
    """Returns the number of experts whose kernels are stacked."""
    return jax.tree.leaves(kernels)[0].shape[0]


def _permuted(rows: Array, order: Array) -> Array:
    """Permutes rows; with unique indices, the gradient needs no atomics."""
    return rows.at[order].get(unique_indices=True, mode="promise_in_bounds")


class RowSource(NamedTuple):
    """A gather of rows: the source of each row, and whether it has one; other rows are zero."""

    source: Array
    is_filled: Array

    def take(self, rows: Array) -> Array:
        """Copies the rows from an array."""
        taken_rows = rows.at[self.source].get(mode="promise_in_bounds")
        return jnp.where(self.is_filled[:, None], taken_rows, 0)


@jax.custom_vjp
def _moved(rows: Array, source: RowSource, inverse: RowSource) -> Array:
    """Moves rows by `source`; gradients move back by `inverse`, a gather that needs no atomics."""
    return source.take(rows)


_moved.defvjp(
    lambda rows, source, inverse: (source.take(rows), inverse),
    lambda inverse, cotangents: (inverse.take(cotangents), None, None),
)


def _summed(rows: Array, gates: Array, dtype: DTypeLike) -> Array:
    """Multiplies the rows of each token by their gates, and sums them in float32 or wider."""
    each = wide(rows.reshape(*gates.shape, rows.shape[-1]))
    return jnp.sum(each * gates[..., None], axis=1).astype(dtype)
