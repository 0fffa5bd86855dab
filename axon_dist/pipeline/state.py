"""What the executor carries from tick to tick: buffers of slots, and sums."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ..core.reduction import all_sum
from ..core.typing import Array, PyTree
from .stage import Loss, Rest, Wire


class Sums(NamedTuple):
    """What microbatches add up to, in float32.

    Args:
        rows: gradients of the rows of block parameters.
        rest: gradients of the other parameters, by number.
        loss: sums of losses, of weights, and of weight x metric.
        learned: the buffers that stages have changed, by number; the last microbatch's, and empty
            before it is through.
    """

    rows: list[list[Array]]
    rest: dict[int, Array]
    loss: Loss
    learned: Mapping[int, Array] = {}


class State(NamedTuple):
    """The carry of the scan over ticks; buffers have a leading dim of slots.

    Args:
        inputs: inputs of stages.
        gradients: gradients of the outputs of stages.
        stash: what forwards keep.
        held: what input gradients leave for weight gradients.
        outputs: outputs of the last stage, where the vocabulary is an action of its own.
        lookups: what was looked up for the first stage, where that is an action of its own.
        scatters: the gradients of that.
        sums: `Sums`, what has been added up; None where an action only reads the buffers.
        learned: by number, what each buffer that stages change is before each microbatch and behind
            the last, as far as the stages of this rank have got; zeros where others change it.
    """

    inputs: Wire
    gradients: list[Array]
    stash: list[Array]
    held: list[Array]
    outputs: Wire
    lookups: list[Array]
    scatters: list[Array]
    sums: Any
    learned: dict[int, Array]


def empty(shapes: PyTree, num_slots: int) -> PyTree:
    """Buffers of zeros for values of some shapes."""
    return jax.tree.map(lambda x: jnp.zeros((num_slots, *x.shape), x.dtype), shapes)


def zeros(shapes: PyTree, wide: bool = False) -> PyTree:
    """Values of zeros of some shapes; `wide` makes sums that start there float32 at least."""
    dtype = lambda x: jnp.promote_types(x.dtype, jnp.float32) if wide else x.dtype
    return jax.tree.map(lambda x: jnp.zeros(x.shape, dtype(x)), shapes)


def get(buffers: PyTree, slot: Array) -> PyTree:
    """The values in a slot."""
    return jax.tree.map(
        lambda buffer: jax.lax.dynamic_index_in_dim(buffer, slot, keepdims=False), buffers
    )


def put(buffers: PyTree, slot: Array, values: PyTree, when: Array | None = None) -> PyTree:
    """Writes values into a slot, or leaves it as it is.

    Args:
        buffers: leaves with a leading dim of slots.
        slot: which; ignored when nothing is written.
        values: leaves of one slot.
        when: whether to write; None always does. What is written every tick is selected from
            old and new; large values are better written within the branch that makes them.

    Returns:
        The new buffers.
    """
    place = jnp.maximum(slot, 0)

    def write(buffer: Array, value: Array) -> Array:
        value = value.astype(buffer.dtype)
        if when is not None:
            old = jax.lax.dynamic_index_in_dim(buffer, place, keepdims=False)
            value = jnp.where(when, value, old)
        return jax.lax.dynamic_update_index_in_dim(buffer, value, place, 0)

    return jax.tree.map(write, buffers, values)


def from_rank(tree: PyTree, is_source: Array, axis: str) -> PyTree:
    """The values of one rank, on all."""

    def of(x: Array) -> Array:
        # Flags have no sum.
        value = x.astype(jnp.int32) if x.dtype == bool else x
        return all_sum(jnp.where(is_source, value, jnp.zeros_like(value)), axis).astype(x.dtype)

    return jax.tree.map(of, tree)


def add(totals: Sequence[Array], values: Sequence[Array]) -> list[Array]:
    """Adds values to totals, in the dtype of the totals."""
    return [t + v.astype(t.dtype) for t, v in zip(totals, values, strict=True)]


def add_trained(totals: Sequence[Any], grads: Sequence[Any]) -> list[Any]:
    """Adds the gradients of a row to its sums; None at the places of frozen leaves."""
    return jax.tree.map(lambda total, grad: add([total], [grad])[0], list(totals), list(grads))


def add_rest(sums: Sums, rest: Rest) -> Sums:
    """Adds gradients of parameters outside the blocks."""
    total = dict(sums.rest)
    for i, grad in rest.items():
        (total[i],) = add([total[i]], [grad])
    return sums._replace(rest=total)
