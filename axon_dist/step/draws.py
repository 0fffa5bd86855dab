"""Random draws of a step: each part of a batch has the rows that one device would draw for it.

One device draws once for the whole batch. A part, which is what one rank has of one microbatch,
draws from the same keys at the same counts, and takes the rows of its own samples. Neither the
number of ranks nor that of microbatches then changes a bit.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr

from ..core.errors import AxonDistError, UnsupportedError
from ..core.tree import leaves_with_paths, map_with_path
from ..core.typing import Array, Batch, Path, PyTree
from ..jaxpr.randomness import (
    Drawn,
    SampleRows,
    find_rows,
    results_of_no_sample,
    with_rank,
    without_rank,
)
from .spec import StepSpec


@dataclasses.dataclass(frozen=True, eq=False)
class Draws:
    """What the parts of a batch draw.

    Args:
        rows: what is drawn and counts samples, and whose rows of it a part owns.
        once: the paths of the buffers that change once per step, as the counts of random streams
            and all that does not follow from the samples.
    """

    rows: Mapping[Drawn, SampleRows]
    once: frozenset[Path]

    def before(self, buffers: PyTree, first: PyTree, part: Array) -> PyTree:
        """The buffers that a part begins with: keys of its rows, and counts as at the first.

        Args:
            buffers: before this microbatch.
            first: before the first microbatch of the step.
            part: scalar, the number of the part among all; those of a microbatch follow each other.
        """
        streams = map_with_path(
            lambda path, now, then: then if path in self.once else now, buffers, first
        )
        return with_rank(streams, self.rows, part) if self.rows else streams


def draws_of(spec: StepSpec, batch: Batch, ranks: int) -> Draws | None:
    """What is drawn for the parts of a batch; None where all of it is one part, or draws nothing.

    Args:
        spec: model, loss, optimizer, strategy, devices and options of the step.
        batch: placed leaves of shape [B, ...], or [K, B/K, ...] with K microbatches.
        ranks: how many ranks compute each from samples of its own; 1 in global view.

    Raises:
        UnsupportedError: when the draws of ranks cannot be told apart. Those of microbatches alone
            are then made for each microbatch, and a warning says so.
    """
    count = spec.num_microbatches
    if ranks * count == 1:
        return None
    try:
        rows = sample_rows(spec, batch, ranks)
    except UnsupportedError as error:
        if ranks > 1:
            raise
        warnings.warn(
            f"each of {count} microbatches draws random numbers of its own, which are not those "
            f"that one device draws for the whole batch: {error}",
            stacklevel=2,
        )
        rows, counts = None, frozenset[Path]()
    else:
        # A bridged Linen module counts its calls, whether it draws or not.
        counts = spec.parts.counts
    once = counts | _of_no_sample(spec, batch, ranks)
    return Draws(rows or {}, once) if rows is not None or once else None


def _of_no_sample(spec: StepSpec, batch: Batch, ranks: int) -> frozenset[Path]:
    """The buffers that change, whatever the samples are: one device changes them once for all.

    Such are counters, and the estimates of a spectral norm, which follow from weights alone.
    """
    samples, shapes = _microbatch(spec, batch)
    paths = [path for path, _ in leaves_with_paths(spec.parts.arguments[1])]
    if not {*paths} - spec.parts.counts:
        return frozenset()
    sizes = samples // ranks, samples * spec.num_microbatches
    try:
        part, whole = (spec.separator.program(shapes, size) for size in sizes)
    except AxonDistError:
        raise
    except Exception:  # Whatever the user's loss does with more samples.
        return frozenset()
    num_samples = len(jax.tree.leaves(shapes))
    once = results_of_no_sample(part, whole, num_samples, len(paths))
    return frozenset(paths[number] for number in once) - spec.parts.counts


def _microbatch(spec: StepSpec, batch: Batch) -> tuple[int, Batch]:
    """How many samples a microbatch has, and its shapes."""
    lead = 0 if spec.num_microbatches == 1 else 1
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[lead:], x.dtype), batch)
    return jax.tree.leaves(batch)[0].shape[lead], shapes


def sample_rows(spec: StepSpec, batch: Batch, ranks: int) -> Mapping[Drawn, SampleRows] | None:
    """Which random draws count samples, and whose rows of them a part owns; None without draws.

    Args:
        spec: model, loss, optimizer, strategy, devices and options of the step.
        batch: placed leaves of shape [B, ...], or [K, B/K, ...] with K microbatches.
        ranks: how many ranks split a microbatch.
    """
    samples, shapes = _microbatch(spec, batch)

    def trace(count: int) -> ClosedJaxpr:
        return spec.separator.program(shapes, count)

    return find_rows(trace, samples // ranks, ranks * spec.num_microbatches)


@dataclasses.dataclass(frozen=True, eq=False)
class OfRank:
    """What the microbatches of one rank draw, inside `shard_map`.

    Args:
        draws: what the parts of a batch draw.
        axes: the manual axes that split the batch.
        ranks: how many ranks there are along them.
    """

    draws: Draws
    axes: tuple[str, ...] = ()
    ranks: int = 1

    def before(self, buffers: PyTree, first: PyTree, microbatch: Any) -> PyTree:
        """The buffers that a microbatch begins with, of those before it and before the first."""
        return self.draws.before(buffers, first, self.part(microbatch))

    def after(self, buffers: PyTree, first: PyTree) -> PyTree:
        """The buffers that it leaves for the next."""
        return without_rank(buffers, first)

    def part(self, microbatch: Any) -> Array:
        """The number of this rank's part: those of a microbatch follow each other."""
        rank = jax.lax.axis_index(self.axes) if self.axes else 0
        return jnp.asarray(microbatch * self.ranks + rank, jnp.uint32)
