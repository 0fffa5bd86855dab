"""Microbatches in a loop: their sums added up, and their buffers handed on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeAlias

import jax
import jax.numpy as jnp

from ..core.compat import eval_jaxpr
from ..core.typing import Batch, PyTree
from .objective import Sums

SumsFn: TypeAlias = Callable[[PyTree, PyTree, Batch], tuple[Sums, PyTree]]
"""(params, buffers, microbatch) -> (sums, new buffers)."""

LastFn: TypeAlias = Callable[[Sums, PyTree, PyTree, Batch], tuple[Sums, PyTree]]
"""(sums of those before, params, buffers, last microbatch) -> (sums of all, new buffers)."""


def _traced_once(gradient: SumsFn, *args: Any) -> tuple[SumsFn, tuple[Sums, PyTree]]:
    """The function as its program, which is not traced anew; and the shapes of its results."""
    program, shapes = jax.make_jaxpr(gradient, return_shape=True)(*args)
    structure = jax.tree.structure(shapes)

    def run(*given: Any) -> tuple[Sums, PyTree]:
        return jax.tree.unflatten(structure, eval_jaxpr(program, jax.tree.leaves(given)))

    return run, shapes


class Drawing(Protocol):
    """What each microbatch draws."""

    def before(self, buffers: PyTree, first: PyTree, microbatch: Any) -> PyTree:
        """The buffers that a microbatch begins with, of those before it and before the first."""
        ...

    def after(self, buffers: PyTree, first: PyTree) -> PyTree:
        """The buffers that it leaves for the next."""
        ...


def accumulate(
    gradient: SumsFn,
    params: PyTree,
    buffers: PyTree,
    batch: Batch,
    num_microbatches: int,
    constrain: Callable[[PyTree], PyTree] = lambda grads: grads,
    last: LastFn | None = None,
    drawing: Drawing | None = None,
) -> tuple[Sums, PyTree]:
    """Adds up the sums of every microbatch, threading the buffers through.

    Equals:

        for microbatch in batch:
            new, buffers = gradient(params, buffers, microbatch)
            sums = sums + new

    Args:
        gradient: differentiates one microbatch.
        params: the parameters, the same for every microbatch.
        buffers: statistics and random counts, changed by each microbatch in turn.
        batch: leaves of shape [num_microbatches, ...], or [...] when there is one.
        num_microbatches: how many.
        constrain: pins where accumulated gradients lie.
        last: takes the last microbatch apart from the others, with the sums of those, to the sums
            of all; None treats it as they are.
        drawing: gives each microbatch the random numbers of its samples; None where nothing is
            drawn, or each is to draw its own.

    Returns:
        The sums over all microbatches, and the buffers after the last.
    """
    if num_microbatches == 1:
        return gradient(params, buffers, batch)
    # Without draws there is no number to count, and the program is that of a mere loop.
    draws = drawing or _NoDraws()
    turns = num_microbatches - (last is not None)
    first, numbers = buffers, None if drawing is None else jnp.arange(turns)
    sample = jax.tree.map(lambda leaf: leaf[0], batch)
    begins = draws.before(buffers, first, 0)
    gradient, (shapes, _) = _traced_once(gradient, params, begins, sample)
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
    final = None
    if last is not None:
        batch, final = (jax.tree.map(lambda leaf, at=at: leaf[at], batch) for at in (slice(-1), -1))

    def body(carry: tuple[Sums, PyTree], given: tuple) -> tuple[tuple[Sums, PyTree], None]:
        (sums, buffers), (microbatch, number) = carry, given
        # XLA:GPU moves a gather a turn ahead with all that leads up to it, such as of the rows of a
        # table's gradient with both passes, and computes that twice: unless it comes of what the
        # loop carries. So a microbatch begins where the sums of those before are there.
        microbatch, sums = jax.lax.optimization_barrier((microbatch, sums))
        with jax.named_scope("microbatch"):
            new, buffers = gradient(params, draws.before(buffers, first, number), microbatch)
        total = sums + new
        total = Sums(constrain(total.grads), total.loss, total.metrics)
        return (total, draws.after(buffers, first)), None

    (sums, buffers), _ = jax.lax.scan(body, (zeros, buffers), (batch, numbers))
    if last is None:
        return sums, buffers
    with jax.named_scope("last_microbatch"):
        given = draws.before(buffers, first, num_microbatches - 1)
        sums, buffers = last(sums, params, given, final)
    return sums, draws.after(buffers, first)


class _NoDraws:
    """Microbatches of a loss that draws nothing."""

    def before(self, buffers: PyTree, first: PyTree, microbatch: Any) -> PyTree:
        return buffers

    def after(self, buffers: PyTree, first: PyTree) -> PyTree:
        return buffers
