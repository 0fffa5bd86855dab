"""Microbatches: their random draws, the loop that sums their gradients, and their buffers.

One device draws once for the whole batch. A part is one rank's share of one microbatch. Each part
draws with the keys and counts of the whole batch, and keeps the rows of its samples. So the numbers
that a sample draws are bitwise independent of the number of ranks and of microbatches.
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
from ..core.reduction import all_sum
from ..core.tree import is_key, leaves_with_paths, map_with_path
from ..core.typing import Array, Batch, Path, PyTree
from ..ir.randomness import (
    Drawn,
    SampleRows,
    find_rows,
    with_part,
    without_part,
)
from ..ir.results import changed_results, results_of_no_sample
from .objective import Sums
from .separation import Separator
from .spec import StepSpec

SumsFn: TypeAlias = Callable[[PyTree, PyTree, Batch], tuple[Sums, PyTree]]
"""(params, buffers, microbatch) -> (sums, new buffers)."""

LastFn: TypeAlias = Callable[[Sums, PyTree, PyTree, Batch], tuple[Sums, PyTree]]
"""(sums of the earlier ones, params, buffers, last microbatch) -> (sums of all, new buffers)."""


@dataclasses.dataclass(frozen=True, eq=False)
class PartBuffers:
    """How random streams and buffers advance from one part of a batch to the next.

    Args:
        sample_rows: the random draws whose shape depends on the number of samples, and which of
            their rows a part uses.
        once_per_step: the paths of the buffers that change once per step: the counts of random
            streams, and all buffers that do not depend on the samples.
        averaged: the paths of the buffers that become the mean over the microbatches.
        axes: the manual axes that split a microbatch; none in global view.
        ranks: how many ranks there are along them.
        advanced: the paths of the random keys that the model replaces by others.
        added: the paths of the buffers to which each rank adds a sum over its own samples.
    """

    sample_rows: Mapping[Drawn, SampleRows]
    once_per_step: frozenset[Path]
    averaged: frozenset[Path]
    axes: tuple[str, ...]
    ranks: int
    advanced: frozenset[Path] = frozenset()
    added: frozenset[Path] = frozenset()

    def part(self, microbatch: Any) -> Array:
        """Returns the index of this rank's part. The parts of a microbatch are consecutive."""
        rank = jax.lax.axis_index(self.axes) if self.axes else 0
        return jnp.asarray(microbatch * self.ranks + rank, jnp.uint32)

    def before(self, buffers: PyTree, first: PyTree, microbatch: Any) -> PyTree:
        """Returns the buffers before a part, some of them as at the start of the step.

        These are the buffers in `once_per_step` and `averaged`.

        Args:
            buffers: before this microbatch.
            first: before the first microbatch of the step.
            microbatch: its index.
        """
        part = self.part(microbatch)
        reset = self.once_per_step | self.averaged

        def one(path: Path, now: Any, then: Any) -> Any:
            return then if path in reset else now

        streams = map_with_path(one, buffers, first)
        return with_part(streams, self.sample_rows, part) if self.sample_rows else streams

    def after(self, new: PyTree, before: PyTree, first: PyTree, count: int) -> PyTree:
        """Returns the buffers after one of `count` microbatches, from those `before` it."""

        def one(path: Path, new: Any, now: Any, then: Any) -> Any:
            return now + (new - then) / count if path in self.averaged else new

        return map_with_path(one, self.without_part(new, first), before, first)

    def over_ranks(self, new: PyTree, first: PyTree) -> PyTree:
        """Returns the buffers of the whole batch, given those of this rank, inside `shard_map`.

        Args:
            new: after the last microbatch.
            first: before the first microbatch of the step.
        """

        def one(path: Path, new: Any, then: Any) -> Any:
            return then + all_sum(new - then, self.axes) if path in self.added else new

        return map_with_path(one, self.without_part(new, first), first)

    def without_part(self, new: PyTree, first: PyTree) -> PyTree:
        """Returns the buffers after a part, whose keys no longer contain the part's index."""
        return without_part(new, first, self.advanced)


def part_buffers_of(
    spec: StepSpec, separator: Separator, batch: Batch, axes: tuple[str, ...] = ()
) -> PartBuffers | None:
    """Finds the draws of the parts of a batch, and buffers that do not pass from part to part.

    These buffers change once, are averaged, or are added up over ranks. Returns None if there is
    one part, or if there are neither draws nor such buffers.

    Args:
        spec: the resolved arguments of the step.
        separator: has the programs of its loss.
        batch: placed leaves of shape [B, ...], or [K, B/K, ...] with K microbatches.
        axes: the axes whose ranks compute from different samples; none in global view.

    Raises:
        UnsupportedError: when the draws cannot be separated by rank, or a key changes depending on
            the samples. If only the microbatches cannot be separated, each microbatch draws anew,
            with a warning.
    """
    count = spec.num_microbatches
    ranks = spec.num_ranks if axes else 1
    if ranks * count == 1:
        return None
    try:
        samples, shapes = spec.microbatch(batch)
        trace = functools.partial(separator.program, shapes)
        rows = find_rows(trace, samples // ranks, ranks * count)
    except UnsupportedError as error:
        if ranks > 1:
            raise
        warn(
            f"each of {count} microbatches draws separate random numbers, which differ from those "
            f"that one device draws for the whole batch: {error}"
        )
        rows = None
        draws_anew = True
        counts = frozenset[Path]()
    else:
        draws_anew = False
        # Bridged Linen modules count their calls, even if they draw nothing.
        counts = spec.model_spec.counts
    paths = [path for path, _ in leaves_with_paths(spec.model_spec.arguments[1])]
    has_others = not spec.model_spec.counts.issuperset(paths)
    once = counts
    if has_others:
        once = counts | _independent_of_samples(spec, separator, batch, ranks, paths)
    advanced = _advanced_keys(spec, separator, batch, ranks)
    if draws_anew:
        once -= advanced
    elif changed_in_turn := advanced - once:
        raise UnsupportedError(
            f"the model replaces the random key {min(changed_in_turn)!r} by one that may depend on "
            "the samples or on their number, so that each part of a batch might get another one. "
            "Make it from the key alone, as key, use = jax.random.split(key) does, or keep "
            "nnx.Rngs in the model",
            code="key-depends-on-samples",
        )
    separation = separator.of(batch)
    means = separation.means
    added = separation.added if axes else frozenset[Path]()
    is_needed = rows is not None or once or means or advanced or added
    if not is_needed:
        return None
    return PartBuffers(rows or {}, once, means, axes, ranks, advanced, added)


def _advanced_keys(
    spec: StepSpec, separator: Separator, batch: Batch, ranks: int
) -> frozenset[Path]:
    """Returns the paths of the random keys among the buffers that a forward pass changes."""
    leaves = leaves_with_paths(spec.model_spec.arguments[1])
    if not any(is_key(leaf) for _, leaf in leaves):
        return frozenset()
    samples, shapes = spec.microbatch(batch)
    program = separator.program(shapes, samples // ranks)
    first = len(jax.tree.leaves(spec.model_spec.weights))
    changed = changed_results(program, first, len(leaves))
    return frozenset(leaves[number][0] for number in changed if is_key(leaves[number][1]))


def _independent_of_samples(
    spec: StepSpec, separator: Separator, batch: Batch, ranks: int, paths: Sequence[Path]
) -> frozenset[Path]:
    """Returns the buffers that do not depend on the samples: one device changes them once per step.

    Examples are counters, and the estimates of a spectral norm, which depend on weights only.
    """
    samples, shapes = spec.microbatch(batch)
    sizes = samples // ranks, samples * spec.num_microbatches
    try:
        part, full = (separator.program(shapes, size) for size in sizes)
    except AxonDistError:
        raise
    except Exception:  # The user's loss may raise anything for more samples.
        return frozenset()
    num_samples = len(jax.tree.leaves(shapes))
    once = results_of_no_sample(part, full, num_samples, len(paths))
    return frozenset(paths[number] for number in once) - spec.model_spec.counts


def accumulate(
    gradient: SumsFn,
    params: PyTree,
    buffers: PyTree,
    batch: Batch,
    num_microbatches: int,
    constrain: Callable[[PyTree], PyTree] = lambda grads: grads,
    last: LastFn | None = None,
    part_buffers: PartBuffers | None = None,
) -> tuple[Sums, PyTree]:
    """Adds up the sums of every microbatch, and passes the buffers from each to the next.

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
        last: runs the last microbatch, given the sums of the others, and returns the sums of all.
            None runs it like the others.
        part_buffers: gives each microbatch the random numbers of its samples, and the buffers that
            change once in a step; None if every buffer just goes from one microbatch to the next.

    Returns:
        The sums over all microbatches, and the buffers after the last.
    """
    if num_microbatches == 1:
        return gradient(params, buffers, batch)
    first = buffers
    iterations = num_microbatches - (last is not None)
    # Without `part_buffers` the loop needs no microbatch index.
    numbers = None if part_buffers is None else jnp.arange(iterations)

    def before(buffers: PyTree, number: Any) -> PyTree:
        return buffers if part_buffers is None else part_buffers.before(buffers, first, number)

    def after(new: PyTree, buffers: PyTree) -> PyTree:
        if part_buffers is None:
            return new
        return part_buffers.after(new, buffers, first, num_microbatches)

    sample = jax.tree.map(lambda leaf: leaf[0], batch)
    # Trace once, and evaluate that program for every microbatch.
    trace = jax.make_jaxpr(gradient, return_shape=True)
    program, shapes = trace(params, before(buffers, 0), sample)
    structure = jax.tree.structure(shapes)
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes[0])
    final = None
    if last is not None:
        others = jax.tree.map(lambda leaf: leaf[:-1], batch)
        final = jax.tree.map(lambda leaf: leaf[-1], batch)
        batch = others

    def body(carry: tuple[Sums, PyTree], inputs: tuple) -> tuple[tuple[Sums, PyTree], None]:
        sums, buffers = carry
        microbatch, number = inputs
        # XLA:GPU pipelines a gather one iteration ahead, together with all that it depends on. For
        # the rows of an embedding table's gradient that is both passes, computed twice. It does not
        # move a gather that depends on the loop's carry, so this barrier makes the microbatch
        # depend on the sums of the earlier ones.
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
