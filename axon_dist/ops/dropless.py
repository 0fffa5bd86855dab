"""Tokens through experts on processors that multiply no groups of rows, and no token left out.

Where grouped products are not supported, `in_fitting_slots` reads how many rows the busiest expert
got and gives every expert as many slots, of a few sizes from 17/16 to 2 times the
even share R. All experts are then one batched product: no matrix is copied, and the gradient of
each is written once. Beyond 2 R a loop takes an expert's rows in blocks of R/8, as many as it has,

    y[t] = x[t] W[e],    dx[t] = dy[t] W[e]^T,    dW[e] += x[t]^T dy[t]

with the sum for one expert in the loop's carry. What is multiplied is at most 17/16 of the rows
where tokens are spread evenly, 4/3 of the busiest expert's load up to 2, and 9/8 beyond.

Source: Gale et al., MegaBlocks, arXiv:2211.15841, on experts that drop no token.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias, TypeVar

import jax
import jax.numpy as jnp

from ..core.compat import RARE
from ..core.typing import Array, PyTree
from .routing import Assigned, Choice, Feed, RowSource, in_assigned_slots, num_experts_of

LOADS = (17 / 16, 9 / 8, 6 / 5, 3 / 2, 2)
"""How many times its even share of rows an expert may have slots for."""

TILE = 8
"""Slots are a multiple of it, which tensor cores need of a dim (two bytes a number)."""

LEAST, MOST = 16, 512
"""Rows of a block: fewer do not fill matrix units, and more hide no latency better."""


def slot_sizes(num_tokens: int, share: float) -> list[int]:
    """The numbers of slots among which the busiest expert chooses.

    Args:
        num_tokens: more than one slot for each is never needed.
        share: the rows of an expert where all get as many.

    Example:
        >>> slot_sizes(4096, 256.0), slot_sizes(64, 32.0)
        ([272, 288, 312, 384, 512], [40, 48, 64])
    """
    return sorted({min(num_tokens, math.ceil(load * share / TILE) * TILE) for load in LOADS})


def usual_size(sizes: Sequence[int], share: float) -> int:
    """Which of the sizes holds the busiest expert's rows if tokens choose at random.

    Three standard deviations above the share; the last where none does.

    Example:
        >>> usual_size([272, 288, 312, 384, 512], 256.0)
        2
    """
    most = share + 3 * math.sqrt(share)
    return next((at for at, size in enumerate(sizes) if size >= most), len(sizes) - 1)


def block_rows(share: float) -> int:
    """The rows of a block, so that filling adds an eighth to an even share, if that can be.

    Example:
        >>> block_rows(2048.0), block_rows(8.0)
        (256, 16)
    """
    return min(MOST, max(LEAST, int(share / 8) // TILE * TILE))


def _varying(x: Array, *others: Array) -> Array:
    """The same values, typed inside `shard_map` to vary as others do too; compiled to nothing.

    JAX sums a gradient over the ranks where a replicated array becomes a varying one; it would not
    for an array that a custom rule takes. A whole number times zero is known to be zero.
    """
    zeros = [other.ravel()[0].astype(jnp.int32) * 0 for other in others]
    return jnp.where(sum(zeros) == 0, x, 0)


T = TypeVar("T")

_Args: TypeAlias = tuple[Array, Array, PyTree]
"""Tokens, gates and kernels."""

_Mix: TypeAlias = Callable[[Array, Array, PyTree, Assigned], Array]


def in_fitting_slots(
    feed: Feed,
    tokens: Array,
    choice: Choice,
    kernels: PyTree,
    num_experts: int,
    first: Array | int = 0,
) -> Array:
    """As `in_order`, in as many slots for each expert as the busiest needs.

    The residuals of the backward pass are the arguments: it computes the experts again.

    Args:
        feed: the experts, which read no arrays but these.
        tokens: `[N, D]`.
        choice: of all experts.
        kernels: arrays with a leading dim of E experts.
        num_experts: how many there are to choose from, these among them.
        first: the number of the first of these.

    Returns:
        `[N, D]` in the dtype of the tokens.
    """
    share = choice.experts.size / num_experts
    capacities = slot_sizes(len(tokens), share)
    assigned = choice.by_expert(first, num_experts_of(kernels))
    if capacities == [len(tokens)]:
        return in_assigned_slots(feed, capacities[0], tokens, choice.gates, kernels, assigned)
    leaves, treedef = jax.tree.flatten((tokens, choice.gates, kernels))
    others = [*leaves, assigned.expert]
    args = treedef.unflatten([_varying(leaf, *others) for leaf in leaves])
    usual = usual_size(capacities, share)
    slotted = [functools.partial(in_assigned_slots, feed, capacity) for capacity in capacities]

    def pulled(run: _Mix, args: _Args, assigned: Assigned, cotangents: Array) -> _Args:
        def mix(tokens: Array, gates: Array, kernels: PyTree) -> Array:
            return run(tokens, gates, kernels, assigned)

        return jax.vjp(mix, *args)[1](cotangents)

    def choose(assigned: Assigned, branches: Sequence[Callable[..., T]], *arguments: object) -> T:
        # The last branch is a loop, unless the largest size is enough for all tokens.
        branches = branches[:-1] if capacities[-1] == len(tokens) else branches
        branches = [branch if at == usual else _rare(branch) for at, branch in enumerate(branches)]
        number = jnp.sum(jnp.max(assigned.sizes) > jnp.array(capacities), dtype=jnp.int32)
        return jax.lax.switch(number, branches, *arguments)

    size = block_rows(share)

    @jax.custom_vjp
    def run(args: _Args, assigned: Assigned) -> Array:
        branches = [*slotted, functools.partial(_looped, feed, size)]
        return choose(assigned, branches, *args, assigned)

    def backward(residuals: tuple[_Args, Assigned], cotangents: Array) -> tuple[_Args, None]:
        branches = [functools.partial(pulled, branch) for branch in slotted]
        branches.append(functools.partial(_pulled_loop, feed, size))
        args, assigned = residuals
        return choose(assigned, branches, args, assigned, cotangents), None

    run.defvjp(lambda args, assigned: (run(args, assigned), (args, assigned)), backward)
    return run(args, assigned)


def _rare(way: Callable[..., T]) -> Callable[..., T]:
    """The same, marked as a branch that a balanced choice of experts hardly ever takes."""

    def run(*arguments: object) -> T:
        with jax.named_scope(RARE):
            return way(*arguments)

    return run


def _looped(
    feed: Feed, size: int, tokens: Array, gates: Array, kernels: PyTree, assigned: Assigned
) -> Array:
    """Expert by expert, and block by block of its rows."""

    def step(block: _Block, total: Array, none: PyTree) -> tuple[Array, PyTree]:
        results = _weighed(feed, block.rows(tokens, gates), block.gates(gates), block.kernel)
        return block.add(total, results, gates.shape[1]), none

    zeros = _varying(jnp.zeros(tokens.shape, jnp.float32), tokens, assigned.expert)
    total, _ = _over_blocks(size, kernels, assigned, step, zeros, lambda kernel: ())
    return total.astype(tokens.dtype)


def _pulled_loop(
    feed: Feed, size: int, args: _Args, assigned: Assigned, cotangents: Array
) -> _Args:
    """The gradients of `_looped` by its arrays."""
    tokens, gates, kernels = args
    wide = functools.partial(jnp.promote_types, jnp.float32)

    def step(block: _Block, sums: PyTree, total: PyTree) -> tuple[PyTree, PyTree]:
        of_tokens, of_gates = sums
        kernel = jax.tree.map(lambda x: x.astype(wide(x.dtype)), block.kernel)
        rows, weights = block.rows(tokens, gates), block.gates(gates)
        pull = jax.vjp(functools.partial(_weighed, feed), rows, weights, kernel)[1]
        grads = pull(block.rows(cotangents, gates).astype(jnp.float32))
        of_tokens = block.add(of_tokens, grads[0].astype(jnp.float32), gates.shape[1])
        return (of_tokens, block.add(of_gates, grads[1], 1)), jax.tree.map(jnp.add, total, grads[2])

    def zeros(x: Array) -> Array:
        return _varying(jnp.zeros(x.shape, wide(x.dtype)), tokens, assigned.expert)

    sums = zeros(tokens), zeros(gates.reshape(-1))
    begin = functools.partial(jax.tree.map, zeros)
    (of_tokens, of_gates), of_kernels = _over_blocks(size, kernels, assigned, step, sums, begin)
    of_kernels = jax.tree.map(lambda x, like: x.astype(like.dtype), of_kernels, kernels)
    return of_tokens.astype(tokens.dtype), of_gates.reshape(gates.shape), of_kernels


class _Block(NamedTuple):
    """Some rows of one expert: which assignments they are, and whether there are as many."""

    which: Array
    is_filled: Array
    kernel: PyTree

    def rows(self, of_tokens: Array, gates: Array) -> Array:
        """Rows of tokens, zeros where the block is empty."""
        return RowSource(self.which // gates.shape[1], self.is_filled).take(of_tokens)

    def gates(self, gates: Array) -> Array:
        """The gates of the assignments."""
        return gates.reshape(-1)[self.which]

    def add(self, total: Array, rows: Array, per_token: int) -> Array:
        """Adds what is one row for each token, or with 1 for each assignment, of an expert."""
        # A token is at most once at an expert: indices marked unique need no atomics.
        behind = len(total) + jnp.arange(len(self.which))
        place = jnp.where(self.is_filled, self.which // per_token, behind)
        return total.at[place].add(rows, mode="drop", unique_indices=True)


def _over_blocks(
    size: int,
    kernels: PyTree,
    assigned: Assigned,
    step: Callable[[_Block, PyTree, PyTree], tuple[PyTree, PyTree]],
    shared: PyTree,
    begin: Callable[[PyTree], PyTree],
) -> tuple[PyTree, PyTree]:
    """Runs the blocks of each expert, as many as it has rows for.

    Args:
        size: the rows of a block.
        kernels: with a leading dim of experts.
        assigned: the assignments.
        step: (block, carried through all, carried through those of the expert) -> both.
        shared: the first value that is carried through all.
        begin: kernels -> the first value that is carried through an expert.

    Returns:
        The value carried through all, and those of the experts, stacked.
    """

    def expert(shared: PyTree, one: tuple[PyTree, Array, Array]) -> tuple[PyTree, PyTree]:
        kernel, start, count = one

        def block(carry: tuple[Array, PyTree, PyTree]) -> tuple[Array, PyTree, PyTree]:
            number = carry[0] + jnp.arange(size)
            which = assigned.order[jnp.where(number < count, start + number, 0)]
            return carry[0] + size, *step(_Block(which, number < count, kernel), *carry[1:])

        carry = jax.lax.while_loop(
            lambda carry: carry[0] < count, block, (count * 0, shared, begin(kernel))
        )
        return carry[1], carry[2]

    return jax.lax.scan(expert, shared, (kernels, assigned.starts, assigned.sizes))


def _weighed(feed: Feed, rows: Array, gates: Array, kernel: PyTree) -> Array:
    return feed(_product, rows, kernel).astype(jnp.float32) * gates[:, None]


@jax.custom_vjp
def _product(rows: Array, matrix: Array) -> Array:
    """Rows times a matrix cast to their dtype, whose gradient is summed in its dtype."""
    return rows @ matrix.astype(rows.dtype)


def _pulled_product(residuals: tuple[Array, Array], cotangents: Array) -> tuple[Array, Array]:
    rows, matrix = residuals
    contracted = (((0,), (0,)), ((), ()))
    of_matrix = jax.lax.dot_general(
        rows, cotangents, contracted, preferred_element_type=matrix.dtype
    )
    return cotangents @ matrix.astype(rows.dtype).T, of_matrix


_product.defvjp(lambda rows, matrix: (_product(rows, matrix), (rows, matrix)), _pulled_product)
