"""Attention over a sequence that is split over a mesh axis, inside `shard_map`.

Ring attention passes keys and values around the ranks and merges what each block of them gives by
the logarithms of their weights; no rank ever holds the whole sequence. Under a causal mask a
contiguous split would leave the first rank idle while the last works, so the ranks first exchange
pieces: of 2c pieces rank r takes number r and number 2c-1-r, after which every rank multiplies two
pieces of queries with keys in every step. A model that distributes its positions once, in
front of its layers, spares each layer the exchange.

In the backward pass either keys and values are passed around with their gradients, four arrays as
wide as the heads of keys, or queries with what their gradients need, three as wide as their heads:
whichever are fewer bytes. Gradients are sent in the dtype of what they are gradients of.

Ulysses instead turns the split of positions into one of heads by an all-to-all, and back.

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

from ..core.typing import Array, PyTree
from .attention import BlockAttention, Keys, Queries, merged, narrowed

AROUND = "around_a_ring"
"""The name of what ring attention saves under every remat policy: to recompute it would send all
keys around once more, and it is one activation."""

Tree = TypeVar("Tree")
State = TypeVar("State")
Visitor = TypeVar("Visitor")
Returned = TypeVar("Returned")

Residuals: TypeAlias = tuple[Array, Array, Array, Array | None, Array, Array]
"""Query, key, value, segments, the result and the logarithms of its weights."""

Attend: TypeAlias = Callable[..., Array]
"""(queries `[B, T, H, K]`, keys and values `[B, T, N, K]`, maybe segments) -> `[B, T, H, K]`."""


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
    """Attends over the whole sequence, each rank with its positions.

    Equals `softmax(q k^T / sqrt(K)) v` on the gathered sequence, masked and capped as asked for.
    The backward pass goes around the ring once more and recomputes the scores, so that memory is
    linear in the positions of a rank.

    Args:
        query: `[B, T/c, H, K]`, this rank's positions.
        key: `[B, T/c, N, K]`, each head shared by `H / N` query heads.
        value: like `key`.
        axis: the mesh axis of size c that splits the positions.
        causal: position t sees positions 0 to t; `T/c` is then even.
        segments: integers `[B, T/c]`; a position sees only its own. None for one segment.
        form: which kernel attends with a block of keys; `"auto"` takes that of the platform.
        is_distributed: whether a rank has the positions of `Ring.distribute`, not consecutive ones.
        window: position t sees those after t - window alone; None for all. For causal attention.
        softcap: c of `c tanh(score / c)`; None for scores as they are. Windows and caps are
            computed by plain products, tile by tile.

    Returns:
        `[B, T/c, H, K]` in the dtype of `query`, in the order that they came in.

    Raises:
        UnsupportedError: when the form cannot run here.
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
    """The ranks along one axis, and which pieces of the sequence each works on.

    Arrays are `[B, positions, ...]`. A rank has two pieces of positions under a causal mask, the
    earlier one first, else one.

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
        """Exchanges consecutive positions for pieces that make equal work."""
        if not self.causal:
            return x
        # Under a causal mask early positions have little to do. Rank r works on pieces r and
        # 2N-1-r, whose work adds up to the same for all (zigzag; Brandon et al., Striped Attention,
        # arXiv:2311.09431).
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
        """The position at each place of the distributed sequence: int32 `[length]`.

        Example:
            >>> Ring("cp", 2, True).positions(8).tolist()
            [0, 1, 6, 7, 2, 3, 4, 5]
        """
        place = jnp.arange(length, dtype=jnp.int32)
        if not self.causal:
            return place
        rows = length // (2 * self.size)
        rank, is_later = place // (2 * rows), place // rows % 2 == 1
        return jnp.where(is_later, 2 * self.size - 1 - rank, rank) * rows + place % rows

    def own_positions(self, length: int) -> Array:
        """The positions of this rank, which has so many: int32 `[1, length]`."""
        every = self.positions(length * self.size)
        return jax.lax.dynamic_slice_in_dim(every, self.rank * length, length)[None]

    def _send(self, half: Array, parity: int, back: bool = False) -> Array:
        """Sends pieces 2r + parity to the ranks that work on them, or back."""

        def owner(piece):
            return min(piece, 2 * self.size - 1 - piece)

        pairs = [(rank, owner(2 * rank + parity)) for rank in range(self.size)]
        pairs = [(b, a) for a, b in pairs] if back else pairs
        return jax.lax.ppermute(half, self.axis, pairs)

    def _in_order(self, one: Array, other: Array) -> Array:
        """A rank of even number has its earlier piece at even places, else at odd ones."""
        is_even = self.rank % 2 == 0
        pieces = (jnp.where(is_even, one, other), jnp.where(is_even, other, one))
        return jnp.concatenate(pieces, axis=1)

    def pairs(
        self, precedes: Array | bool
    ) -> tuple[tuple[Array | int | None, Array | int | None], ...]:
        """Which pieces of queries attend to which pieces of another rank's keys.

        The first piece of an earlier rank precedes both pieces of queries, and its second none;
        both pieces of a later rank precede the second piece of queries, and neither the first. All
        of a pair is seen, and both cases cost two products of half a block: no rank waits for
        another.

        Args:
            precedes: whether the keys are those of an earlier rank than the queries.
        """
        if not self.causal:
            return ((None, None),)
        number = jnp.where(precedes, 0, 1)
        return ((1, 0), (number, number))

    def piece(self, tree: Tree, number: Array | int | None) -> Tree:
        """One of the two pieces that a rank has; None for all it has."""
        if number is None:
            return tree

        def half(x):
            rows = x.shape[1] // 2
            return jax.lax.dynamic_slice_in_dim(x, number * rows, rows, 1)

        return jax.tree.map(half, tree)

    def with_piece(
        self, tree: Tree, number: Array | int | None, change: Callable[[Tree], Tree]
    ) -> Tree:
        """The tree, one of its two pieces changed; all of it for None."""
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
        """Passes what each rank holds around the ring, and returns what the ranks add to it.

        The next block is sent while the present one is worked on, and what was added to the last
        one follows it.

        Args:
            visit: (state, what arrived, from how many ranks back) -> (state, what is added to it).
            state: what the first visit gets.
            sent: what this rank sends around.

        Returns:
            The last state, and the sum of what the ranks added to what this rank holds, sent in
            the dtypes of that.
        """
        sent = self.shift(sent)
        if self.size <= 2:
            state, returned = visit(state, sent, jnp.asarray(1))
            return state, self.shift(returned)
        ahead = self.shift(sent)
        state, returned = visit(state, sent, jnp.asarray(1))

        def step(carry: PyTree, back: Array) -> tuple[PyTree, None]:
            state, returned, sent = carry
            arriving, ahead = self.shift(returned), self.shift(sent)
            state, more = visit(state, sent, back)
            return (state, _added(more, arriving), ahead), None

        if self.size > 3:
            steps = jnp.arange(2, self.size - 1)
            (state, returned, ahead), _ = jax.lax.scan(step, (state, returned, ahead), steps)
        # The last step need not send on what it has read.
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
    """Merges the results of this rank's keys and of those of every other rank."""
    positions = _positions(ring, kernel, query)
    queries = Queries(query, segments, positions=positions)
    keys = Keys(key, value, segments, positions)
    out, log_weight = kernel.forward(queries, keys, ring.causal)

    def visit(
        state: tuple[Array, Array], keys: Keys, back: Array
    ) -> tuple[tuple[Array, Array], tuple[()]]:
        for mine, theirs in ring.pairs(back <= ring.rank):
            block = kernel.forward(ring.piece(queries, mine), ring.piece(keys, theirs))
            state = ring.with_piece(state, mine, functools.partial(merged, block))
        return state, ()

    if ring.size > 1:
        (out, log_weight), _ = ring.around(visit, (out, log_weight), keys)
    out = checkpoint_name(out.astype(query.dtype), AROUND)
    log_weight = checkpoint_name(log_weight, AROUND)
    return out, (query, key, value, segments, out, log_weight)


def _backward(
    ring: Ring, kernel: BlockAttention, residuals: Residuals, cotangent: Array
) -> tuple[Array, Array, Array, None]:
    """Passes blocks around once more, with their gradients, which return to their ranks."""
    query, key, value, segments, out, log_weight = residuals
    # sum_j p_j (dout . v_j) = dout . out: the softmax's own gradient without the probabilities (Dao
    # et al., FlashAttention, arXiv:2205.14135, appendix B.2).
    delta = jnp.sum(cotangent.astype(jnp.float32) * out.astype(jnp.float32), axis=-1)
    positions = _positions(ring, kernel, query)
    queries = Queries(query, segments, cotangent, log_weight, delta, out, positions)
    keys = Keys(key, value, segments, positions)
    of_query, of_key, of_value = kernel.backward(queries, keys, ring.causal)

    # Adds the gradients of each pair of pieces of queries and keys to those of both.
    def add(precedes, queries, keys, of_query, of_keys):
        for mine, theirs in ring.pairs(precedes):
            gradients = kernel.backward(ring.piece(queries, mine), ring.piece(keys, theirs))
            of_query = ring.with_piece(of_query, mine, functools.partial(_added, gradients[0]))
            of_keys = ring.with_piece(of_keys, theirs, functools.partial(_added, gradients[1:]))
        return of_query, of_keys

    if ring.size > 1 and _queries_are_lighter(query, key):
        # Adds to the gradients of this rank's keys, and returns those of the queries that came.
        def host_queries(of_keys, queries, back):
            of_queries, is_before = _zeros(queries.query), back > ring.rank
            of_queries, of_keys = add(is_before, queries, keys, of_queries, of_keys)
            return of_keys, of_queries.astype(query.dtype)

        sent = queries._replace(out=None)
        (of_key, of_value), returned = ring.around(host_queries, (of_key, of_value), sent)
        of_query += returned.astype(jnp.float32)
    elif ring.size > 1:
        # Adds to the gradients of this rank's queries, and returns those of the keys that came.
        def host_keys(of_query, keys, back):
            of_keys = _zeros(keys.key), _zeros(keys.value)
            of_query, of_keys = add(back <= ring.rank, queries, keys, of_query, of_keys)
            return of_query, (of_keys[0].astype(key.dtype), of_keys[1].astype(value.dtype))

        of_query, returned = ring.around(host_keys, of_query, keys)
        of_key, of_value = (
            mine + theirs.astype(jnp.float32)
            for mine, theirs in zip((of_key, of_value), returned, strict=True)
        )
    return *narrowed((of_query, of_key, of_value), (query, key, value)), None


_attend.defvjp(_forward, _backward)


def _positions(ring: Ring, kernel: BlockAttention, query: Array) -> Array | None:
    """The positions of this rank, where a window asks for them."""
    return None if kernel.window is None else ring.own_positions(query.shape[1])


def _queries_are_lighter(query: Array, key: Array) -> bool:
    """Whether fewer bytes go around with queries than with keys, in the backward pass.

    Queries take cotangents, gradients and two float32 numbers a head along; keys take values, and
    the gradients of both.
    """
    per_head = query.shape[-1] * query.dtype.itemsize
    return query.shape[2] * (3 * per_head + 8) < key.shape[2] * 4 * per_head


def _zeros(x: Array) -> Array:
    return x.astype(jnp.float32) * 0


def _added(addend: Tree, so_far: Tree) -> Tree:
    """The sums in float32, in the dtypes of the sums so far."""

    def add(x, y):
        return (x.astype(jnp.float32) + y.astype(jnp.float32)).astype(x.dtype)

    return jax.tree.map(add, so_far, addend)
