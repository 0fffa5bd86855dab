"""Microbatches: what each draws, their sums added up in a loop, and the buffers that they carry.

One device draws once for the whole batch. A part, which is what one rank has of one microbatch,
draws from the same keys at the same counts, and uses the rows of its samples. Neither the
number of ranks nor that of microbatches then changes a bit.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

from ..core.compat import eval_jaxpr
from ..core.errors import AxonDistError, UnsupportedError, warn
from ..core.tree import leaves_with_paths, map_with_path
from ..core.typing import Array, Batch, Path, PyTree
from ..ir.randomness import (
    Drawn,
    SampleRows,
    find_rows,
    results_of_no_sample,
    with_rank,
    without_rank,
)
from .objective import Sums
from .spec import StepSpec

SumsFn: TypeAlias = Callable[[PyTree, PyTree, Batch], tuple[Sums, PyTree]]
"""(params, buffers, microbatch) -> (sums, new buffers)."""

LastFn: TypeAlias = Callable[[Sums, PyTree, PyTree, Batch], tuple[Sums, PyTree]]
"""(sums of those before, params, buffers, last microbatch) -> (sums of all, new buffers)."""


@dataclasses.dataclass(frozen=True, eq=False)
class Draws:
    """What the parts of a batch draw.

    Args:
        rows: what is drawn and counts samples, and which rows of it a part uses.
        once: the paths of the buffers that change once per step, as the counts of random streams
            and all that does not follow from the samples.
        means: of those that become the mean over the microbatches.
        axes: the manual axes that split a microbatch; none in global view.
        ranks: how many ranks there are along them.
    """

    rows: Mapping[Drawn, SampleRows]
    once: frozenset[Path]
    means: frozenset[Path]
    axes: tuple[str, ...]
    ranks: int

    def part(self, microbatch: Any) -> Array:
        """The number of this rank's part: those of a microbatch follow each other."""
        rank = jax.lax.axis_index(self.axes) if self.axes else 0
        return jnp.asarray(microbatch * self.ranks + rank, jnp.uint32)

    def before(self, buffers: PyTree, first: PyTree, microbatch: Any) -> PyTree:
        """The buffers that a part begins with: keys of its rows, and counts as at the first.

        Args:
            buffers: before this microbatch.
            first: before the first microbatch of the step.
            microbatch: its number.
        """
        part = self.part(microbatch)
        streams = map_with_path(
            lambda path, now, then: then if path in self.once | self.means else now, buffers, first
        )
        return with_rank(streams, self.rows, part) if self.rows else streams

    def after(self, new: PyTree, before: PyTree, first: PyTree, count: int) -> PyTree:
        """The buffers that one of `count` microbatches leaves, of those `before` it."""

        def one(path: Path, new: Any, now: Any, then: Any) -> Any:
            return now + (new - then) / count if path in self.means else new

        return map_with_path(one, without_rank(new, first), before, first)


def draws_of(spec: StepSpec, batch: Batch, axes: tuple[str, ...] = ()) -> Draws | None:
    """What is drawn for the parts of a batch; None where all of it is one part, or draws nothing.

    Args:
        spec: model, loss, optimizer, strategy, devices and options of the step.
        batch: placed leaves of shape [B, ...], or [K, B/K, ...] with K microbatches.
        axes: those whose ranks compute from different samples; none in global view.

    Raises:
        UnsupportedError: when the draws of ranks cannot be separated. Those of microbatches alone
            are then drawn for each microbatch, with a warning.
    """
    count, ranks = spec.num_microbatches, spec.num_ranks if axes else 1
    if ranks * count == 1:
        return None
    try:
        samples, shapes = spec.microbatch(batch)
        trace = functools.partial(spec.separator.program, shapes)
        rows = find_rows(trace, samples // ranks, ranks * count)
    except UnsupportedError as error:
        if ranks > 1:
            raise
        warn(
            f"each of {count} microbatches draws separate random numbers, which are not those that "
            f"one device draws for the whole batch: {error}"
        )
        rows, counts = None, frozenset[Path]()
    else:
        # A bridged Linen module counts its calls, whether it draws or not.
        counts = spec.parts.counts
    paths = [path for path, _ in leaves_with_paths(spec.parts.arguments[1])]
    has_others = not spec.parts.counts.issuperset(paths)
    once = counts | _of_no_sample(spec, batch, ranks, paths) if has_others else counts
    means = spec.separator.of(batch).means
    is_needed = rows is not None or once or means
    return Draws(rows or {}, once, means, axes, ranks) if is_needed else None


def _of_no_sample(
    spec: StepSpec, batch: Batch, ranks: int, paths: Sequence[Path]
) -> frozenset[Path]:
    """The buffers that change, whatever the samples are: one device changes them once for all.

    Such are counters, and the estimates of a spectral norm, which follow from weights alone.
    """
    samples, shapes = spec.microbatch(batch)
    sizes = samples // ranks, samples * spec.num_microbatches
    try:
        part, full = (spec.separator.program(shapes, size) for size in sizes)
    except AxonDistError:
        raise
    except Exception:  # Whatever the user's loss does with more samples.
        return frozenset()
    num_samples = len(jax.tree.leaves(shapes))
    once = results_of_no_sample(part, full, num_samples, len(paths))
    return frozenset(paths[number] for number in once) - spec.parts.counts


def accumulate(
    gradient: SumsFn,
    params: PyTree,
    buffers: PyTree,
    batch: Batch,
    num_microbatches: int,
    constrain: Callable[[PyTree], PyTree] = lambda grads: grads,
    last: LastFn | None = None,
    drawing: Draws | None = None,
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
        constrain: pins the sharding of accumulated gradients.
        last: takes the last microbatch apart from the others, with the sums of those, to the sums
            of all; None treats it as they are.
        drawing: gives each microbatch the random numbers of its samples; None where nothing is
            drawn, or each draws separately.

    Returns:
        The sums over all microbatches, and the buffers after the last.
    """
    if num_microbatches == 1:
        return gradient(params, buffers, batch)
    turns, first = num_microbatches - (last is not None), buffers
    # Without draws no number is scanned, and the loop runs over the microbatches alone.
    numbers = None if drawing is None else jnp.arange(turns)

    def before(buffers: PyTree, number: Any) -> PyTree:
        return buffers if drawing is None else drawing.before(buffers, first, number)

    def after(new: PyTree, buffers: PyTree) -> PyTree:
        return new if drawing is None else drawing.after(new, buffers, first, num_microbatches)

    sample = jax.tree.map(lambda leaf: leaf[0], batch)
    # Traced once, and run as a program for every microbatch.
    trace = jax.make_jaxpr(gradient, return_shape=True)
    program, shapes = trace(params, before(buffers, 0), sample)
    structure, sums_like = jax.tree.structure(shapes), shapes[0]
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), sums_like)
    final = None
    if last is not None:
        batch, final = (jax.tree.map(lambda leaf, at=at: leaf[at], batch) for at in (slice(-1), -1))

    def body(carry: tuple[Sums, PyTree], inputs: tuple) -> tuple[tuple[Sums, PyTree], None]:
        (sums, buffers), (microbatch, number) = carry, inputs
        # XLA:GPU moves a gather an iteration ahead with all that it depends on, such as of the rows
        # of a table's gradient with both passes, and computes that twice: unless it depends on the
        # loop's carry. So a microbatch depends on the sums of those before.
        microbatch, sums = jax.lax.optimization_barrier((microbatch, sums))
        with jax.named_scope("microbatch"):
            leaves = jax.tree.leaves((params, before(buffers, number), microbatch))
            new, changed = structure.unflatten(eval_jaxpr(program, leaves))
        total = sums + new
        total = Sums(constrain(total.grads), total.loss, total.metrics)
        return (total, after(changed, buffers)), None

    (sums, buffers), _ = jax.lax.scan(body, (zeros, buffers), (batch, numbers))
    if last is None:
        return sums, buffers
    with jax.named_scope("last_microbatch"):
        sums, changed = last(sums, params, before(buffers, num_microbatches - 1), final)
    return sums, after(changed, buffers)
