"""Attention within the documents of a packed row, without a mask of the whole row.

A row of T positions is cut into pieces of `PIECE` positions. The queries of a piece attend to the
keys of that piece and of each piece with which it may share a document. The results are merged by
their logsumexp. Memory holds the mask of only one pair of pieces, and pairs that share no document
are skipped.

Source: Dao et al., FlashAttention, arXiv:2205.14135; Krell et al., arXiv:2107.02027.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import TypeAlias, TypeVar

import jax
import jax.numpy as jnp

from ..core.tree import wide
from ..core.typing import Array, PyTree
from ..core.weighted import per_sample
from .attention import BlockAttention, Keys, Queries, in_dtypes_of, merged

PIECE = 1024
"""Positions in a piece: a pair is enough work for a kernel, and its mask takes two megabytes."""

Tree = TypeVar("Tree", bound=PyTree)
State: TypeAlias = tuple[Array, ...]
"""The results that pairs update: arrays whose dim 0 counts pieces."""

Residuals: TypeAlias = tuple[Array, Array, Array, Array, Array, Array]


def num_pieces(length: int) -> int:
    """Returns how many pieces of even length to cut positions into; 1 if no number divides them.

    Example:
        >>> num_pieces(4096), num_pieces(1024), num_pieces(2 * 1031)
        (4, 1, 1)
    """
    counts = range(-(-length // PIECE), length // (PIECE // 8) + 1)
    return next((n for n in counts if n and length % (2 * n) == 0), 1)


def packed_attention(
    query: Array, key: Array, value: Array, segments: Array, causal: bool, form: str = "auto"
) -> Array:
    """Attends within segments.

    Args:
        query: `[B, T, H, K]`.
        key: `[B, T, N, K]`.
        value: `[B, T, N, K]`.
        segments: integers `[B, T]`; a position sees only its own segment.
        causal: position t sees positions 0 to t.
        form: the kernel for one piece of keys: `"auto"`, or one of `BLOCK_KERNELS`.

    Returns:
        `[B, T, H, K]` in the dtype of the queries.
    """
    attend = functools.partial(_attend, BlockAttention(form), causal)
    return per_sample(attend)(query, key, value, segments)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attend(
    kernel: BlockAttention, causal: bool, query: Array, key: Array, value: Array, segments: Array
) -> Array:
    return _forward(kernel, causal, query, key, value, segments)[0]


def _forward(
    kernel: BlockAttention, causal: bool, query: Array, key: Array, value: Array, segments: Array
) -> tuple[Array, Residuals]:
    queries = _pieces(Queries(query, segments))
    keys = _pieces(Keys(key, value, segments))
    states = jax.lax.map(lambda piece: kernel.forward(*piece, causal=causal), (queries, keys))

    def visit(state: State, query_piece: Array, key_piece: Array) -> State:
        more = kernel.forward(_at(queries, query_piece), _at(keys, key_piece))
        out, log_weight = _at(state, query_piece)
        new = merged(more, (out, log_weight))
        return tuple(x.at[query_piece].set(y) for x, y in zip(state, new, strict=True))

    out, log_weight = map(_uncut, _over_pairs(visit, states, _cut(segments), causal))
    out = out.astype(query.dtype)
    return out, (query, key, value, segments, out, log_weight)


def _backward(
    kernel: BlockAttention, causal: bool, residuals: Residuals, cotangent: Array
) -> tuple[Array, Array, Array, None]:
    query, key, value, segments, out, log_weight = residuals
    delta = jnp.sum(wide(cotangent) * wide(out), axis=-1)
    queries = _pieces(Queries(query, segments, cotangent, log_weight, delta, out))
    keys = _pieces(Keys(key, value, segments))
    gradients = jax.lax.map(lambda piece: kernel.backward(*piece, causal=causal), (queries, keys))

    def visit(sums: State, query_piece: Array, key_piece: Array) -> State:
        more = kernel.backward(_at(queries, query_piece), _at(keys, key_piece))
        pieces = (query_piece, key_piece, key_piece)
        return tuple(x.at[n].add(new) for x, n, new in zip(sums, pieces, more, strict=True))

    gradients = _over_pairs(visit, gradients, _cut(segments), causal)
    return *in_dtypes_of(map(_uncut, gradients), (query, key, value)), None


_attend.defvjp(_forward, _backward)


def _over_pairs(
    visit: Callable[[State, Array, Array], State], state: State, segments: Array, causal: bool
) -> State:
    """Visits the pairs of different pieces whose ranges of segments overlap, in any sample.

    Args:
        visit: (state, piece of queries, piece of keys) -> state.
        state: the initial state.
        segments: `[pieces, B, positions]`.
        causal: whether to skip keys of later pieces.
    """
    first = segments.min(-1)
    last = segments.max(-1)
    shared = ((first[:, None] <= last) & (first <= last[:, None])).any(-1)
    ordered = itertools.permutations(range(len(segments)), 2)
    pairs = [(query, key) for query, key in ordered if key < query or not causal]

    def step(state: State, pair: Array) -> tuple[State, None]:
        query, key = pair
        state = jax.lax.cond(shared[query, key], lambda x: visit(x, query, key), lambda x: x, state)
        return state, None

    return jax.lax.scan(step, state, jnp.array(pairs, jnp.int32))[0] if pairs else state


def _pieces(tree: Tree) -> Tree:
    return jax.tree.map(_cut, tree)


def _cut(x: Array) -> Array:
    """Cuts `[B, T, ...]` into `[pieces, B, T / pieces, ...]`."""
    pieces = x.reshape(x.shape[0], num_pieces(x.shape[1]), -1, *x.shape[2:])
    return jnp.moveaxis(pieces, 1, 0)


def _uncut(x: Array) -> Array:
    """Undoes `_pieces`."""
    x = jnp.moveaxis(x, 0, 1)
    return x.reshape(x.shape[0], -1, *x.shape[3:])


def _at(tree: Tree, piece: Array) -> Tree:
    return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, piece, keepdims=False), tree)
