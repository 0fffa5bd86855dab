"""Dropless mixture of experts on platforms without grouped matrix products.

`in_fitting_slots` reads how many rows the busiest expert got, and gives every expert that many
slots, rounded up to one of a few sizes from 17/16 to 2 times the even share R. All experts are then
one batched product: no matrix is copied, and each gradient is written once. Beyond 2 R, a loop
multiplies the rows of each expert in blocks of R/8,

    y[t] = x[t] W[e],    dx[t] = dy[t] W[e]^T,    dW[e] += x[t]^T dy[t]

with the sum for one expert in the loop's carry. Apart from rounding slots and blocks to tiles, an
expert multiplies at most 17/16 R rows if tokens are spread evenly, and at most 4/3 of the busiest
expert's rows while these are at most 2 R. Beyond, all experts multiply at most 9/8 of the actual
rows.

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
from ..core.tree import wide
from ..core.typing import Array, PyTree
from .routing import Assigned, Choice, Feed, RowSource, in_assigned_slots, num_experts_of

LOADS = (17 / 16, 9 / 8, 6 / 5, 3 / 2, 2)
"""The possible numbers of slots of an expert, as multiples of its even share of rows."""

TILE = 8
"""Slots per expert are a multiple of this, as tensor cores require for two-byte numbers."""

MIN_BLOCK_ROWS = 16
"""The fewest rows of a block; fewer do not fill the matrix units."""

MAX_BLOCK_ROWS = 512
"""The most rows of a block; more do not hide latency any better."""


def slot_sizes(num_tokens: int, share: float) -> list[int]:
    """Returns the possible numbers of slots; the busiest expert decides which is used.

    Args:
        num_tokens: the number of tokens; an expert never needs more slots.
        share: the rows of an expert if all get equally many.

    Example:
        >>> slot_sizes(4096, 256.0), slot_sizes(64, 32.0)
        ([272, 288, 312, 384, 512], [40, 48, 64])
    """
    return sorted({min(num_tokens, math.ceil(load * share / TILE) * TILE) for load in LOADS})


def usual_size(sizes: Sequence[int], share: float) -> int:
    """Returns the index of the size that fits the busiest expert if tokens choose at random.

    It is the first size at least three standard deviations above the share, or else the last.

    Example:
        >>> usual_size([272, 288, 312, 384, 512], 256.0)
        2
    """
    most = share + 3 * math.sqrt(share)
    return next((index for index, size in enumerate(sizes) if size >= most), len(sizes) - 1)


def block_rows(share: float) -> int:
    """Returns the rows of a block: an eighth of the even share, within limits.

    The limits are `MIN_BLOCK_ROWS` and `MAX_BLOCK_ROWS`.

    Example:
        >>> block_rows(2048.0), block_rows(8.0)
        (256, 16)
    """
    return min(MAX_BLOCK_ROWS, max(MIN_BLOCK_ROWS, int(share / 8) // TILE * TILE))


def _varying(x: Array, *others: Array) -> Array:
    """Makes an array vary, inside `shard_map`, over the same axes as others; compiles to nothing.

    JAX sums a gradient over ranks at the point where a replicated array becomes varying. It does
    not do so for an argument of a custom derivative. The zeros are integers because XLA may fold
    `n * 0` for integers but not for floats.
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
    """Computes `in_order` with as many slots for each expert as the busiest one needs.

    The residuals of the backward pass are the arguments: it recomputes the experts.

    Args:
        feed: the experts; they read no arrays except their arguments.
        tokens: `[N, D]`.
        choice: the choice among all experts.
        kernels: arrays with a leading dim of E experts.
        num_experts: the total number of experts, these E included.
        first: the number of the first of these E experts.

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

    def gradients_of(run: _Mix, args: _Args, assigned: Assigned, cotangents: Array) -> _Args:
        def mix(tokens: Array, gates: Array, kernels: PyTree) -> Array:
            return run(tokens, gates, kernels, assigned)

        return jax.vjp(mix, *args)[1](cotangents)

    def choose(assigned: Assigned, branches: Sequence[Callable[..., T]], *arguments: object) -> T:
        # The last branch is a loop. It is dropped if the largest size fits all tokens.
        branches = branches[:-1] if capacities[-1] == len(tokens) else branches
        branches = [branch if n == usual else _rare(branch) for n, branch in enumerate(branches)]
        index = jnp.sum(jnp.max(assigned.sizes) > jnp.array(capacities), dtype=jnp.int32)
        return jax.lax.switch(index, branches, *arguments)

    size = block_rows(share)

    @jax.custom_vjp
    def run(args: _Args, assigned: Assigned) -> Array:
        branches = [*slotted, functools.partial(_loop_over_blocks, feed, size)]
        return choose(assigned, branches, *args, assigned)

    def backward(residuals: tuple[_Args, Assigned], cotangents: Array) -> tuple[_Args, None]:
        branches = [functools.partial(gradients_of, branch) for branch in slotted]
        branches.append(functools.partial(_loop_gradients, feed, size))
        args, assigned = residuals
        return choose(assigned, branches, args, assigned, cotangents), None

    run.defvjp(lambda args, assigned: (run(args, assigned), (args, assigned)), backward)
    return run(args, assigned)


def _rare(branch: Callable[..., T]) -> Callable[..., T]:
    """Marks a branch that a balanced choice of experts hardly ever takes."""

    def run(*arguments: object) -> T:
        with jax.named_scope(RARE):
            return branch(*arguments)

    return run


def _loop_over_blocks(
    feed: Feed, size: int, tokens: Array, gates: Array, kernels: PyTree, assigned: Assigned
) -> Array:
    """Runs one expert after another, and the rows of each in blocks."""

    def step(block: _Block, total: Array, no_carry: PyTree) -> tuple[Array, PyTree]:
        results = _weighed(feed, block.rows(tokens, gates), block.gates(gates), block.kernel)
        return block.add(total, results, gates.shape[1]), no_carry

    zeros = _varying(jnp.zeros_like(wide(tokens)), tokens, assigned.expert)
    total, _ = _over_blocks(size, kernels, assigned, step, zeros, lambda kernel: ())
    return total.astype(tokens.dtype)


def _loop_gradients(
    feed: Feed, size: int, args: _Args, assigned: Assigned, cotangents: Array
) -> _Args:
    """Computes the gradients of `_loop_over_blocks` with respect to tokens, gates and kernels."""
    tokens, gates, kernels = args

    def step(block: _Block, sums: PyTree, total: PyTree) -> tuple[PyTree, PyTree]:
        d_tokens, d_gates = sums
        kernel = jax.tree.map(wide, block.kernel)
        rows = block.rows(tokens, gates)
        weights = block.gates(gates)
        pull = jax.vjp(functools.partial(_weighed, feed), rows, weights, kernel)[1]
        grads = pull(wide(block.rows(cotangents, gates)))
        d_tokens = block.add(d_tokens, wide(grads[0]), gates.shape[1])
        return (d_tokens, block.add(d_gates, grads[1], 1)), jax.tree.map(jnp.add, total, grads[2])

    def zeros(x: Array) -> Array:
        return _varying(jnp.zeros_like(wide(x)), tokens, assigned.expert)

    sums = zeros(tokens), zeros(gates.reshape(-1))
    begin = functools.partial(jax.tree.map, zeros)
    (d_tokens, d_gates), d_kernels = _over_blocks(size, kernels, assigned, step, sums, begin)
    d_kernels = jax.tree.map(lambda x, like: x.astype(like.dtype), d_kernels, kernels)
    return d_tokens.astype(tokens.dtype), d_gates.reshape(gates.shape), d_kernels


class _Block(NamedTuple):
    """A block of rows of one expert: their assignments, and which rows of the block are filled."""

    assignments: Array
    is_filled: Array
    kernel: PyTree

    def rows(self, by_token: Array, gates: Array) -> Array:
        """Selects the rows of the block's tokens; unfilled rows are zero."""
        return RowSource(self.assignments // gates.shape[1], self.is_filled).take(by_token)

    def gates(self, gates: Array) -> Array:
        """Returns the gates of the assignments."""
        return gates.reshape(-1)[self.assignments]

    def add(self, total: Array, rows: Array, per_token: int) -> Array:
        """Adds the block's rows to a total with one row per token (per assignment if 1)."""
        # A token is at most once at an expert, so indices are unique, and need no atomics. Unfilled
        # rows get distinct indices out of bounds, which are dropped.
        out_of_bounds = len(total) + jnp.arange(len(self.assignments))
        index = jnp.where(self.is_filled, self.assignments // per_token, out_of_bounds)
        return total.at[index].add(rows, mode="drop", unique_indices=True)


def _over_blocks(
    size: int,
    kernels: PyTree,
    assigned: Assigned,
    step: Callable[[_Block, PyTree, PyTree], tuple[PyTree, PyTree]],
    shared: PyTree,
    begin: Callable[[PyTree], PyTree],
) -> tuple[PyTree, PyTree]:
    """Runs a step for each block of each expert's rows.

    Args:
        size: the rows of a block.
        kernels: arrays with a leading dim of experts.
        assigned: the assignments.
        step: (block, carry over all blocks, carry over the expert's blocks) -> both carries.
        shared: the initial carry over all blocks.
        begin: (an expert's kernels) -> the initial carry over the expert's blocks.

    Returns:
        The final carry over all blocks, and the experts' final carries, stacked.
    """

    def expert(shared: PyTree, one: tuple[PyTree, Array, Array]) -> tuple[PyTree, PyTree]:
        kernel, start, count = one

        def block(carry: tuple[Array, PyTree, PyTree]) -> tuple[Array, PyTree, PyTree]:
            number = carry[0] + jnp.arange(size)
            assignments = assigned.order[jnp.where(number < count, start + number, 0)]
            filled_block = _Block(assignments, number < count, kernel)
            return carry[0] + size, *step(filled_block, *carry[1:])

        carry = jax.lax.while_loop(
            lambda carry: carry[0] < count, block, (count * 0, shared, begin(kernel))
        )
        return carry[1], carry[2]

    return jax.lax.scan(expert, shared, (kernels, assigned.starts, assigned.sizes))


def _weighed(feed: Feed, rows: Array, gates: Array, kernel: PyTree) -> Array:
    return wide(feed(_product, rows, kernel)) * gates[:, None]


@jax.custom_vjp
def _product(rows: Array, matrix: Array) -> Array:
    """Multiplies rows by a matrix cast to their dtype.

    The gradient of the matrix is summed in the dtype of the matrix.
    """
    return rows @ matrix.astype(rows.dtype)


def _product_backward(residuals: tuple[Array, Array], cotangents: Array) -> tuple[Array, Array]:
    rows, matrix = residuals
    contracted = (((0,), (0,)), ((), ()))
    d_matrix = jax.lax.dot_general(
        rows, cotangents, contracted, preferred_element_type=matrix.dtype
    )
    return cotangents @ matrix.astype(rows.dtype).T, d_matrix


_product.defvjp(lambda rows, matrix: (_product(rows, matrix), (rows, matrix)), _product_backward)
