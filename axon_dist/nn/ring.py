"""Attention over a sequence that lies split over a mesh axis, inside `shard_map`.

Ring attention passes keys and values around the ranks and folds each block into a running softmax;
no rank ever holds the whole sequence. Under a causal mask a contiguous split would leave the first
rank idle while the last works, so the ranks first trade pieces: of 2c pieces rank r takes number r
and number 2c-1-r, after which every rank multiplies two pieces of queries with keys in every step.

Ulysses instead trades the split of positions for a split of heads, attends, and trades back.

Source: Liu et al., Ring Attention, arXiv:2310.01889; Brandon et al., Striped Attention,
arXiv:2311.09431; Jacobs et al., DeepSpeed Ulysses, arXiv:2309.14509.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

from ..core.typing import Array

KEY_BLOCK = 512
"""Scores are made for so many keys at a time."""

HIDDEN = -1e30
"""The score of a key of another segment. Finite, so that a block in which a query sees no key adds
something that the first key it sees wipes out, and no difference of infinities."""

Attend: TypeAlias = Callable[..., Array]
"""(queries `[B, T, H, K]`, keys and values `[B, T, N, K]`, maybe segments) -> `[B, T, H, K]`."""


def ring_attention(
    query: Array,
    key: Array,
    value: Array,
    axis: str,
    causal: bool,
    segments: Array | None = None,
) -> Array:
    """Attends over the whole sequence, each rank with its consecutive positions.

    Equals `softmax(q k^T / sqrt(K)) v` on the gathered sequence. The backward pass goes around the
    ring once more and recomputes the scores, so that memory is linear in the positions of a rank.

    Args:
        query: `[B, T/c, H, K]`, this rank's positions.
        key: `[B, T/c, N, K]`, each head shared by `H / N` query heads.
        value: like `key`.
        axis: the mesh axis of size c that splits the positions.
        causal: position t sees positions 0 to t; `T/c` is then even.
        segments: integers `[B, T/c]`; a position sees those of its own alone. None for one segment.

    Returns:
        `[B, T/c, H, K]` in the dtype of `query`.
    """
    ring = Ring(axis, jax.lax.axis_size(axis), causal)
    num_kv = key.shape[2]
    grouped = query.reshape(*query.shape[:2], num_kv, -1, query.shape[-1]).transpose(0, 2, 3, 1, 4)
    keys, values = (x.transpose(0, 2, 1, 3) for x in (key, value))
    # As an array of one feature they are dealt like the others.
    of_row = None if segments is None else ring.deal(segments[..., None])
    out: Any = _attend(ring, *(ring.deal(x) for x in (grouped, keys, values)), of_row)
    return ring.undeal(out).transpose(0, 3, 1, 2, 4).reshape(query.shape).astype(query.dtype)


def ulysses_attention(
    query: Array,
    key: Array,
    value: Array,
    axis: str,
    attend: Attend,
    segments: Array | None = None,
) -> Array:
    """Attends with whole sequences of some heads, positions being split before and after.

    Args:
        query: `[B, T/c, H, K]`, H a multiple of c.
        key: `[B, T/c, N, K]`, N a multiple of c.
        value: like `key`.
        axis: the mesh axis of size c that splits the positions.
        attend: attention over a whole sequence.
        segments: integers `[B, T/c]`, which are gathered for it; None for none.

    Returns:
        `[B, T/c, H, K]`.
    """
    to_heads = functools.partial(
        jax.lax.all_to_all, axis_name=axis, split_axis=2, concat_axis=1, tiled=True
    )
    more = () if segments is None else (jax.lax.all_gather(segments, axis, axis=1, tiled=True),)
    mixed = attend(*(to_heads(x) for x in (query, key, value)), *more)
    return jax.lax.all_to_all(mixed, axis, split_axis=1, concat_axis=2, tiled=True)


@dataclasses.dataclass(frozen=True)
class Ring:
    """The ranks along one axis, and who works on which pieces of the sequence.

    Arrays are `[..., positions, features]`. Pieces are stacked in a new leading dim: two under a
    causal mask, the earlier one first, else one.

    Args:
        axis: the mesh axis.
        size: its size.
        causal: whether a position sees only those before it.
    """

    axis: str
    size: int
    causal: bool

    @property
    def rank(self) -> Array:
        """This rank's position on the axis."""
        return jax.lax.axis_index(self.axis)

    def turn(self, tree: Any) -> Any:
        """Hands arrays to the next rank."""
        pairs = [(rank, (rank + 1) % self.size) for rank in range(self.size)]
        return jax.tree.map(lambda x: jax.lax.ppermute(x, self.axis, pairs), tree)

    def deal(self, x: Array) -> Array:
        """Trades consecutive positions for pieces that make equal work."""
        if not self.causal:
            return x[None]
        # Under a causal mask early positions have little to do. Rank r works on pieces r and
        # 2N-1-r, whose work adds up to the same for all (zigzag; Brandon et al., Striped Attention,
        # arXiv:2311.09431).
        even, odd = jnp.split(x, 2, axis=-2)
        even, odd = (self._send(half, parity) for parity, half in enumerate((even, odd)))
        return self._in_order(even, odd)

    def undeal(self, pieces: Array) -> Array:
        """Trades the pieces back for consecutive positions."""
        if not self.causal:
            return pieces[0]
        even, odd = self._in_order(*pieces)
        halves = (self._send(half, parity, True) for parity, half in enumerate((even, odd)))
        return jnp.concatenate(list(halves), axis=-2)

    def _send(self, half: Array, parity: int, back: bool = False) -> Array:
        """Sends pieces 2r + parity to the ranks that work on them, or back."""
        owner = lambda piece: min(piece, 2 * self.size - 1 - piece)
        pairs = [(rank, owner(2 * rank + parity)) for rank in range(self.size)]
        pairs = [(b, a) for a, b in pairs] if back else pairs
        return jax.lax.ppermute(half, self.axis, pairs)

    def _in_order(self, one: Array, other: Array) -> Array:
        """A rank of even number has its earlier piece at even places, else at odd ones."""
        is_even = self.rank % 2 == 0
        return jnp.stack([jnp.where(is_even, one, other), jnp.where(is_even, other, one)])

    def pairs(self, step: Array | int) -> list[tuple[Any, Any, bool]]:
        """Which queries meet which keys in a step: (piece of queries, piece of keys, masked).

        In step s the keys are those of rank r - s. Keys of an earlier rank precede both pieces of
        queries with their first piece; keys of a later rank precede only the last piece of queries.
        """
        if not self.causal:
            return [(0, 0, False)]
        if isinstance(step, int) and step == 0:
            return [(0, 0, True), (1, 0, False), (1, 1, True)]
        # Both cases cost two products of half a block: no rank waits for another.
        from_earlier = step <= self.rank
        chosen = jnp.where(from_earlier, 0, 1)
        return [(1, 0, False), (chosen, chosen, False)]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(ring: Ring, query: Array, key: Array, value: Array, segments: Array | None) -> Array:
    return _forward(ring, query, key, value, segments)[0]


def _forward(
    ring: Ring, query: Array, key: Array, value: Array, segments: Array | None
) -> tuple[Array, Any]:
    """Folds the keys of every rank into a running softmax."""
    # Made from the query, not by `zeros`: it then varies over the same axes as what the loop makes
    # of it, which `shard_map` asks of a carry.
    zero = query.astype(jnp.float32) * 0
    state = (zero, zero[..., 0] - jnp.inf, zero[..., 0])

    def fold(state: Any, held: Any, step: Any) -> Any:
        for piece, keys, masked in ring.pairs(step):
            theirs = _taken(held, keys)
            mine = _taken(state, piece)
            queries = _taken((query, segments), piece)
            folded = _fold(mine, queries, theirs, masked)
            state = tuple(x.at[piece].set(new) for x, new in zip(state, folded, strict=True))
        return state

    state, _ = _around(ring, fold, state, (key, value, segments))
    total, largest, weight = state
    out = (total / weight[..., None]).astype(query.dtype)
    return out, (query, key, value, segments, out, largest + jnp.log(weight))


def _backward(ring: Ring, saved: Any, cotangent: Array) -> tuple[Array, Array, Array, None]:
    """Goes around once more; the gradients of keys travel with their keys and come home."""
    query, key, value, segments, out, log_weight = saved
    cotangent = cotangent.astype(jnp.float32)
    # sum_j p_j (dout . v_j) = dout . out: the softmax's own gradient without the probabilities (Dao
    # et al., FlashAttention, arXiv:2205.14135, appendix B.2).
    delta = jnp.sum(cotangent * out.astype(jnp.float32), axis=-1)
    zeros = lambda x: x.astype(jnp.float32) * 0

    def add(carry: Any, held: Any, step: Any) -> Any:
        of_query, (of_key, of_value) = carry
        for piece, keys, masked in ring.pairs(step):
            mine = _taken((query, segments, cotangent, log_weight, delta), piece)
            dq, dk, dv = _gradients(mine, _taken(held, keys), masked)
            of_query = of_query.at[piece].add(dq)
            of_key, of_value = of_key.at[keys].add(dk), of_value.at[keys].add(dv)
        return of_query, (of_key, of_value)

    start = (zeros(query), (zeros(key), zeros(value)))
    travel = lambda carry: (carry[0], ring.turn(carry[1]))
    (of_query, of_kv), _ = _around(ring, add, start, (key, value, segments), travel)
    # After N - 1 turns gradients are one rank short of where their keys came from.
    of_key, of_value = ring.turn(of_kv) if ring.size > 1 else of_kv
    like = (query, key, value)
    found = zip((of_query, of_key, of_value), like, strict=True)
    of_query, of_key, of_value = (gradient.astype(x.dtype) for gradient, x in found)
    return of_query, of_key, of_value, None


def _taken(tree: Any, piece: Any) -> Any:
    """One of the pieces that are stacked in front."""
    return jax.tree.map(lambda x: jnp.take(x, piece, axis=0), tree)


_attend.defvjp(_forward, _backward)


def _around(
    ring: Ring, body: Callable[..., Any], carry: Any, held: Any, travel: Any = lambda carry: carry
) -> tuple[Any, Any]:
    """Runs `body(carry, held, step)` once with what each rank holds, beginning with one's own.

    The next block is on its way while the present one is worked on.

    Args:
        ring: the axis, its size, and whether the mask is causal.
        body: one step.
        carry: what the first step gets.
        held: what goes around.
        travel: what happens to the carry between two steps.
    """
    if ring.size == 1:
        return body(carry, held, 0), held

    def step(state: Any, number: Array) -> tuple[Any, None]:
        carry, held = state
        return (travel(body(carry, held, number)), ring.turn(held)), None

    # The first and the last round stand outside the scan: the first knows its masks, and the last
    # need not send keys on.
    state = (travel(body(carry, held, 0)), ring.turn(held))
    if ring.size > 2:
        state, _ = jax.lax.scan(step, state, jnp.arange(1, ring.size - 1))
    carry, held = state
    return body(carry, held, jnp.asarray(ring.size - 1)), held


def _blocks(x: Array) -> Array:
    """Cuts `[B, N, T, K]` into blocks of keys, stacked in front."""
    count = -(-x.shape[-2] // KEY_BLOCK)
    count = count if x.shape[-2] % count == 0 else 1
    return jnp.moveaxis(x.reshape(*x.shape[:-2], count, -1, x.shape[-1]), -3, 0)


def _scores(queries: Any, keys: Any, start: Array, masked: bool) -> Array:
    """Scaled scores `[B, N, G, T, S]` of keys that begin at `start`, float32."""
    (query, mine), (key, theirs) = queries, keys
    scores = jnp.einsum("bngtk,bnsk->bngts", query, key, preferred_element_type=jnp.float32)
    scores = scores * query.shape[-1] ** -0.5
    if mine is not None:
        is_same = mine == jnp.swapaxes(theirs, -1, -2)
        scores = jnp.where(is_same[:, None, None], scores, HIDDEN)
    if not masked:
        return scores
    place = functools.partial(jax.lax.broadcasted_iota, jnp.int32, scores.shape[-2:])
    return jnp.where(place(0) >= place(1) + start, scores, -jnp.inf)


def _fold(state: Any, queries: Any, theirs: Any, masked: bool) -> Any:
    """Folds one piece of keys into the running softmax (total, largest score, weight)."""
    keys, values, segments = jax.tree.map(_blocks, theirs)

    def block(state: Any, piece: Any) -> tuple[Any, None]:
        (total, largest, weight), (keys, values, segments, number) = state, piece
        start = number * keys.shape[-2]
        scores = _scores(queries, (keys, segments), start, masked)
        # A row without any key keeps -inf only until the first block: pieces begin with their own
        # positions, which every query sees.
        higher = jnp.maximum(largest, scores.max(-1))
        probabilities = jnp.exp(scores - higher[..., None])
        fade = jnp.exp(largest - higher)
        mixed = jnp.einsum(
            "bngts,bnsk->bngtk",
            probabilities.astype(values.dtype),
            values,
            preferred_element_type=jnp.float32,
        )
        total = total * fade[..., None] + mixed
        return (total, higher, weight * fade + probabilities.sum(-1)), None

    return jax.lax.scan(block, state, (keys, values, segments, jnp.arange(len(keys))))[0]


def _gradients(mine: Any, theirs: Any, masked: bool) -> tuple[Array, Array, Array]:
    """The gradients of one piece of queries with one piece of keys, float32.

    Args:
        mine: queries, their segments, cotangents of their results, logarithms of their weights,
            and the sums `out * cotangent` over features.
        theirs: keys, values, and their segments.
        masked: whether the pieces are the same positions under a causal mask.
    """
    (query, mine_of, cotangent, log_weight, delta), (key, _, _) = mine, theirs
    dtype, blocks = query.dtype, jax.tree.map(_blocks, theirs)
    product = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)

    def block(of_query: Array, piece: Any) -> tuple[Array, tuple[Array, Array]]:
        keys, values, segments, number = piece
        start = number * keys.shape[-2]
        scores = _scores((query, mine_of), (keys, segments), start, masked)
        weights = jnp.exp(scores - log_weight[..., None])
        of_value = product("bngts,bngtk->bnsk", weights.astype(dtype), cotangent.astype(dtype))
        of_weights = product("bngtk,bnsk->bngts", cotangent.astype(dtype), values)
        of_scores = weights * (of_weights - delta[..., None]) * query.shape[-1] ** -0.5
        of_scores = of_scores.astype(dtype)
        of_query = of_query + product("bngts,bnsk->bngtk", of_scores, keys)
        return of_query, (product("bngts,bngtk->bnsk", of_scores, query), of_value)

    zero = query.astype(jnp.float32) * 0
    of_query, of_kv = jax.lax.scan(block, zero, (*blocks, jnp.arange(len(blocks[0]))))
    join = lambda x: jnp.moveaxis(x, 0, -3).reshape(key.shape)
    return of_query, join(of_kv[0]), join(of_kv[1])
