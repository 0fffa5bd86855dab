"""Attention over a sequence that is split over a mesh axis, inside `shard_map`.

Ring attention passes keys and values around the ranks, and merges the results of the blocks by
their logsumexp; no rank ever holds the whole sequence. Under a causal mask, a contiguous split
would leave the first rank idle while the last one works. So the ranks first exchange pieces: of 2c
pieces, rank r takes pieces r and 2c-1-r. Then every rank multiplies two pieces of queries with keys
in every step. A model that distributes its positions once, before its layers, saves this exchange
in each layer.

The backward pass sends around whichever is smaller: keys and values with their gradients, four
arrays with the heads of keys; or queries with the values that their gradients need, three arrays
with the heads of queries. A gradient is sent in the dtype of its array.

Ulysses instead uses an all-to-all to turn the split of positions into a split of heads, and back.

Source: Liu et al., Ring Attention, arXiv:2310.01889; Brandon et al., Striped Attention,
arXiv:2311.09431; Jacobs et al., DeepSpeed Ulysses, arXiv:2309.14509.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import TypeAlias, TypeVar

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from ..core.tree import wide
from ..core.typing import Array, PyTree
from .attention import BlockAttention, Keys, Queries, in_dtypes_of, merged

AROUND = "around_a_ring"
"""The checkpoint name of ring attention's result, which every remat policy but one saves.

It is only one activation, and recomputing it would send all keys around the ring again, as the
policy `offload_dots` does: JAX cannot combine a policy that offloads with another.
"""

Tree = TypeVar("Tree")
State = TypeVar("State")
Visitor = TypeVar("Visitor")
Returned = TypeVar("Returned")

Residuals: TypeAlias = tuple[Array, Array, Array, Array | None, Array, Array]
"""Query, key, value, segments, the result and the logsumexp of its scores."""

Attend: TypeAlias = Callable[..., Array]
"""(queries `[B, T, H, K]`, keys, values `[B, T, N, K]`, optional segments) -> `[B, T, H, K]`."""


def ring_attention(
    query: Array,
    key: Array,
    value: Array,
    axis: str,
    causal: bool,
    segments: Array | None = None,
    *,
    form: str = "auto",
    is_distributed: bool = False,
    window: int | None = None,
    softcap: float | None = None,
) -> Array:
    """Attends over the whole sequence; each rank computes its own positions.

    Equals `softmax(q k^T / sqrt(K)) v` on the gathered sequence, with the given mask and cap. The
    backward pass goes around the ring again and recomputes the scores, so memory is linear in the
    positions of a rank.

    Args:
        query: `[B, T/c, H, K]`, this rank's positions.
        key: `[B, T/c, N, K]`, each head shared by `H / N` query heads.
        value: like `key`.
        axis: the mesh axis of size c that splits the positions.
        causal: position t sees positions 0 to t; `T/c` is then even.
        segments: integers `[B, T/c]`; a position sees only its own segment. None for one segment.
        form: the kernel for a block of keys; `"auto"` uses the platform's kernel.
        is_distributed: whether a rank has the positions of `Ring.distribute`, not consecutive ones.
        window: position t sees only positions after t - window; None for no window. For causal
            attention.
        softcap: c of `c tanh(score / c)`; None for uncapped scores. Windows and caps use plain
            products, tile by tile.

    Returns:
        `[B, T/c, H, K]` in the dtype of `query`, in the order of the input positions.

    Raises:
        UnsupportedError: if the form cannot run here.
    """
    ring = Ring(axis, jax.lax.axis_size(axis), causal)
    arrays = (query, key, value, segments)
    kernel = BlockAttention(form, window, softcap)
    if is_distributed:
        return _attend(ring, kernel, *arrays)
    return ring.restore(_attend(ring, kernel, *jax.tree.map(ring.distribute, arrays)))


def ulysses_attention(
    query: Array,
    key: Array,
    value: Array,
    axis: str,
    attend: Attend,
    segments: Array | None = None,
) -> Array:
    """Attends with whole sequences of some heads; positions are split before and after.

    Args:
        query: `[B, T/c, H, K]`, H a multiple of c.
        key: `[B, T/c, N, K]`, N a multiple of c.
        value: like `key`.
        axis: the mesh axis of size c that splits the positions.
        attend: attention over a whole sequence.
        segments: integers `[B, T/c]`, gathered for `attend`; None for no segments.

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
    """The ranks along one axis, and which pieces of the sequence each works on.

    Arrays are `[B, positions, ...]`. Under a causal mask a rank has two pieces of positions, the
    earlier one first; otherwise it has one.

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

    def shift(self, tree: Tree) -> Tree:
        """Sends arrays to the next rank."""
        pairs = [(rank, (rank + 1) % self.size) for rank in range(self.size)]
        return jax.tree.map(lambda x: jax.lax.ppermute(x, self.axis, pairs), tree)

    def distribute(self, x: Array) -> Array:
        """Exchanges consecutive positions for pieces with equal work."""
        if not self.causal:
            return x
        # Under a causal mask, early positions have little work. Rank r works on pieces r and
        # 2N-1-r, whose work has the same sum for all ranks (zigzag; Brandon et al., Striped
        # Attention, arXiv:2311.09431).
        even, odd = jnp.split(x, 2, axis=1)
        even, odd = (self._send(half, parity) for parity, half in enumerate((even, odd)))
        return self._in_order(even, odd)

    def restore(self, x: Array) -> Array:
        """Exchanges the pieces back for consecutive positions."""
        if not self.causal:
            return x
        even, odd = jnp.split(self._in_order(*jnp.split(x, 2, axis=1)), 2, axis=1)
        halves = (self._send(half, parity, True) for parity, half in enumerate((even, odd)))
        return jnp.concatenate(list(halves), axis=1)

    def positions(self, length: int) -> Array:
        """Returns the position at each index of the distributed sequence: int32 `[length]`.

        Example:
            >>> Ring("cp", 2, True).positions(8).tolist()
            [0, 1, 6, 7, 2, 3, 4, 5]
        """
        index = jnp.arange(length, dtype=jnp.int32)
        if not self.causal:
            return index
        piece_length = length // (2 * self.size)
        rank = index // (2 * piece_length)
        is_later = index // piece_length % 2 == 1
        piece = jnp.where(is_later, 2 * self.size - 1 - rank, rank)
        return piece * piece_length + index % piece_length

    def own_positions(self, length: int) -> Array:
        """Returns the `length` positions of this rank: int32 `[1, length]`."""
        every = self.positions(length * self.size)
        return jax.lax.dynamic_slice_in_dim(every, self.rank * length, length)[None]

    def _send(self, half: Array, parity: int, back: bool = False) -> Array:
        """Sends piece 2r + parity of each rank r to the rank that works on it, or back again."""

        def owner(piece):
            return min(piece, 2 * self.size - 1 - piece)

        pairs = [(rank, owner(2 * rank + parity)) for rank in range(self.size)]
        pairs = [(b, a) for a, b in pairs] if back else pairs
        return jax.lax.ppermute(half, self.axis, pairs)

    def _in_order(self, one: Array, other: Array) -> Array:
        """Puts the earlier piece first: an even piece on even ranks, an odd one on odd ranks."""
        is_even = self.rank % 2 == 0
        pieces = (jnp.where(is_even, one, other), jnp.where(is_even, other, one))
        return jnp.concatenate(pieces, axis=1)

    def pairs(
        self, precedes: Array | bool
    ) -> tuple[tuple[Array | int | None, Array | int | None], ...]:
        """Returns which pieces of queries attend to which pieces of another rank's keys.

        The first piece of an earlier rank precedes both pieces of queries; its second piece
        precedes neither. Both pieces of a later rank precede the second piece of queries, and
        neither precedes the first. Within a pair nothing is masked. Both cases cost two products of
        half a block, so no rank waits for another.

        Args:
            precedes: whether the keys are those of an earlier rank than the queries.
        """
        if not self.causal:
            return ((None, None),)
        number = jnp.where(precedes, 0, 1)
        return ((1, 0), (number, number))

    def piece(self, tree: Tree, number: Array | int | None) -> Tree:
        """Returns one of a rank's two pieces; all positions if `number` is None."""
        if number is None:
            return tree

        def half(x):
            length = x.shape[1] // 2
            return jax.lax.dynamic_slice_in_dim(x, number * length, length, 1)

        return jax.tree.map(half, tree)

    def with_piece(
        self, tree: Tree, number: Array | int | None, change: Callable[[Tree], Tree]
    ) -> Tree:
        """Changes one of a rank's two pieces; all positions if `number` is None."""
        new = change(self.piece(tree, number))
        if number is None:
            return new

        def put(x, new):
            return jax.lax.dynamic_update_slice_in_dim(x, new, number * new.shape[1], 1)

        return jax.tree.map(put, tree, new)

    def around(
        self,
        visit: Callable[[State, Visitor, Array], tuple[State, Returned]],
        state: State,
        sent: Visitor,
    ) -> tuple[State, Returned]:
        """Passes each rank's block around the ring, and returns what the ranks add for it.

        The next block is sent while the current one is processed. The sum of the values added for a
        block (such as its gradients) follows it around the ring.

        Args:
            visit: (state, arrived block, its distance in ranks) -> (state, values to add for it).
            state: the initial state.
            sent: this rank's block.

        Returns:
            The final state, and the sum of the values that the ranks added for this rank's block.
            Sums are sent in the dtypes of these values.
        """
        sent = self.shift(sent)
        if self.size <= 2:
            state, returned = visit(state, sent, jnp.asarray(1))
            return state, self.shift(returned)
        ahead = self.shift(sent)
        state, returned = visit(state, sent, jnp.asarray(1))

        def step(carry: PyTree, back: Array) -> tuple[PyTree, None]:
            state, returned, sent = carry
            arriving = self.shift(returned)
            ahead = self.shift(sent)
            state, more = visit(state, sent, back)
            return (state, _added(more, arriving), ahead), None

        if self.size > 3:
            steps = jnp.arange(2, self.size - 1)
            (state, returned, ahead), _ = jax.lax.scan(step, (state, returned, ahead), steps)
        # The last step sends no block.
        arriving = self.shift(returned)
        state, more = visit(state, ahead, jnp.asarray(self.size - 1))
        return state, self.shift(_added(more, arriving))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attend(
    ring: Ring,
    kernel: BlockAttention,
    query: Array,
    key: Array,
    value: Array,
    segments: Array | None,
) -> Array:
    return _forward(ring, kernel, query, key, value, segments)[0]


def _forward(
    ring: Ring,
    kernel: BlockAttention,
    query: Array,
    key: Array,
    value: Array,
    segments: Array | None,
) -> tuple[Array, Residuals]:
    """Merges the results for this rank's keys with those for every other rank's keys."""
    positions = _positions(ring, kernel, query)
    queries = Queries(query, segments, positions=positions)
    keys = Keys(key, value, segments, positions)
    out, log_weight = kernel.forward(queries, keys, ring.causal)

    def visit(
        state: tuple[Array, Array], keys: Keys, back: Array
    ) -> tuple[tuple[Array, Array], tuple[()]]:
        for query_piece, key_piece in ring.pairs(back <= ring.rank):
            block = kernel.forward(ring.piece(queries, query_piece), ring.piece(keys, key_piece))
            state = ring.with_piece(state, query_piece, functools.partial(merged, block))
        return state, ()

    if ring.size > 1:
        (out, log_weight), _ = ring.around(visit, (out, log_weight), keys)
    out = checkpoint_name(out.astype(query.dtype), AROUND)
    log_weight = checkpoint_name(log_weight, AROUND)
    return out, (query, key, value, segments, out, log_weight)


def _backward(
    ring: Ring, kernel: BlockAttention, residuals: Residuals, cotangent: Array
) -> tuple[Array, Array, Array, None]:
    """Passes blocks around the ring again, with their gradients, which end at the blocks' ranks."""
    query, key, value, segments, out, log_weight = residuals
    # sum_j p_j (dout . v_j) = dout . out: the softmax's own gradient without the probabilities (Dao
    # et al., FlashAttention, arXiv:2205.14135, appendix B.2).
    delta = jnp.sum(wide(cotangent) * wide(out), axis=-1)
    positions = _positions(ring, kernel, query)
    queries = Queries(query, segments, cotangent, log_weight, delta, out, positions)
    keys = Keys(key, value, segments, positions)
    d_query, d_key, d_value = kernel.backward(queries, keys, ring.causal)

    # Adds the gradients of each pair of pieces to those of the queries and of the keys.
    def add(precedes, queries, keys, d_query, d_keys):
        for query_piece, key_piece in ring.pairs(precedes):
            gradients = kernel.backward(
                ring.piece(queries, query_piece), ring.piece(keys, key_piece)
            )
            d_query = ring.with_piece(d_query, query_piece, functools.partial(_added, gradients[0]))
            d_keys = ring.with_piece(d_keys, key_piece, functools.partial(_added, gradients[1:]))
        return d_query, d_keys

    if ring.size > 1 and _queries_are_lighter(query, key):
        # Adds to the gradients of this rank's keys; returns those of the queries that arrived.
        def visit_queries(d_keys, queries, back):
            d_queries = _zeros(queries.query)
            is_before = back > ring.rank
            d_queries, d_keys = add(is_before, queries, keys, d_queries, d_keys)
            return d_keys, d_queries.astype(query.dtype)

        sent = queries._replace(out=None)
        (d_key, d_value), returned = ring.around(visit_queries, (d_key, d_value), sent)
        d_query += wide(returned)
    elif ring.size > 1:
        # Adds to the gradients of this rank's queries; returns those of the keys that arrived.
        def visit_keys(d_query, keys, back):
            d_keys = _zeros(keys.key), _zeros(keys.value)
            d_query, d_keys = add(back <= ring.rank, queries, keys, d_query, d_keys)
            return d_query, (d_keys[0].astype(key.dtype), d_keys[1].astype(value.dtype))

        d_query, returned = ring.around(visit_keys, d_query, keys)
        d_key, d_value = (
            own + wide(others) for own, others in zip((d_key, d_value), returned, strict=True)
        )
    return *in_dtypes_of((d_query, d_key, d_value), (query, key, value)), None


_attend.defvjp(_forward, _backward)


def _positions(ring: Ring, kernel: BlockAttention, query: Array) -> Array | None:
    """Returns the positions of this rank, or None if there is no window."""
    return None if kernel.window is None else ring.own_positions(query.shape[1])


def _queries_are_lighter(query: Array, key: Array) -> bool:
    """Whether the backward pass sends fewer bytes with queries than with keys.

    Queries travel with cotangents, gradients and two float32 numbers per head; keys travel with
    values and the gradients of both.
    """
    per_head = query.shape[-1] * query.dtype.itemsize
    return query.shape[2] * (3 * per_head + 8) < key.shape[2] * 4 * per_head


def _zeros(x: Array) -> Array:
    return wide(x) * 0


def _added(addend: Tree, so_far: Tree) -> Tree:
    """Adds in at least float32; the results have the dtypes of the sums so far."""

    def add(x, y):
        return (wide(x) + wide(y)).astype(x.dtype)

    return jax.tree.map(add, so_far, addend)
