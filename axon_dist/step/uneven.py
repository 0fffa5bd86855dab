"""Batches to evaluate that do not divide over the ranks: every sample still counts once.

The samples that divide are evaluated as they are. The others follow in pieces of as many samples
as divide the number of ranks, each repeated until it divides; its sums count once. A rank never
holds more samples of such a piece than one, and they all have one shape, and so one program.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..core.errors import AxonDistError
from ..core.tree import shapes_of
from ..core.typing import Batch, PyTree
from ..core.weighted import Shared, Weighted
from ..proof.lattice import same_scale
from .batch import samples_of
from .global_view import in_eval_mode, summed
from .loss_traces import Traces
from .objective import Forward, Outcome, PartLoss
from .spec import StepSpec


@dataclasses.dataclass(frozen=True)
class Piece:
    """Some samples of a batch, repeated so that they divide over the ranks.

    Args:
        start: the first sample.
        stop: the one after the last.
        copies: how often all of them are repeated.
    """

    start: int
    stop: int
    copies: int = 1

    @property
    def samples(self) -> int:
        """How many samples are evaluated, copies included."""
        return (self.stop - self.start) * self.copies

    def of(self, batch: Batch, rows: slice = slice(None)) -> Batch:
        """The samples of the piece.

        Args:
            batch: leaves of shape [B, ...], arrays, or `Shared`.
            rows: which of the samples of the piece, copies included.
        """

        def cut(leaf):
            if isinstance(leaf, Shared):
                return leaf
            numpy = jnp if isinstance(leaf, jax.Array) else np
            part = numpy.asarray(leaf)[self.start : self.stop]
            return numpy.concatenate([part] * self.copies)[rows]

        return jax.tree.map(cut, batch)

    def once(self, sums: dict[str, Weighted]) -> dict[str, Weighted]:
        """The sums over the samples of the piece, each counted once."""
        return jax.tree.map(lambda x: x / self.copies, sums) if self.copies > 1 else sums


def pieces(samples: int, ranks: int) -> list[Piece]:
    """Cuts a batch into pieces that divide over the ranks.

    Args:
        samples: of the batch.
        ranks: how many split its samples.

    Example:
        >>> [(piece.start, piece.stop, piece.copies) for piece in pieces(13, 8)]
        [(0, 8, 1), (8, 12, 2), (12, 13, 8)]
    """
    start = samples // ranks * ranks
    found = [Piece(0, start)] if start else []
    divisors = [size for size in range(ranks - 1, 0, -1) if ranks % size == 0]
    while start < samples:
        size = next(size for size in divisors if size <= samples - start)
        found.append(Piece(start, start + size, ranks // size))
        start += size
    return found


class _EvaluationSums(PartLoss):
    """A loss function that gives the sums of an evaluation, as metrics."""

    def __init__(self, loss_fn):
        self.loss_fn = loss_fn

    def outcome(
        self, forward: Forward, params: PyTree, buffers: PyTree, batch: Batch
    ) -> tuple[Outcome, object]:
        outcome = forward(params, buffers, batch)
        sums = {}
        for name, one in summed(outcome, batch).items():
            sums[f"{name} total"] = one.total
            sums[f"{name} weight"] = one.weight
        return Outcome(Weighted(jnp.zeros(()), 1.0), sums, outcome.buffers), None


def adds_up(spec: StepSpec, batch: Batch) -> bool:
    """Whether every number of an evaluation is a sum of what its samples give, each by itself.

    Read from the program of the loss in eval mode, for as many samples as there are ranks, for
    twice as many, and for as many as the largest piece of the batch has: a loss may read the number
    of its samples, such as `jnp.sum(each) / min(len(each), 8)`. A loss that compares samples, or
    that is itself a sum, is none.

    Args:
        spec: model, loss, optimizer, strategy, devices and options of the step.
        batch: leaves of shape [B, ...], arrays or shapes.
    """
    least = max(spec.num_ranks, 2)
    largest = samples_of(batch) // least * least
    adapt = spec.changes.prepare(None, in_eval_mode(spec))
    sums: Any = _EvaluationSums(spec.loss_fn)
    traces = Traces(spec.parts, sums, adapt, over_all=False)
    return all(
        _adds_up_between(traces, batch, least, whole)
        for whole in dict.fromkeys((2 * least, largest))
        if whole > least
    )


def _adds_up_between(traces: Traces, batch: Batch, part: int, whole: int) -> bool:
    """Whether the numbers of `whole` samples are the sums of those of parts of `part` samples."""
    try:
        use = traces.use(shapes_of(batch), (part, whole))
    except AxonDistError:
        return False
    return not use.failure and all(
        one.is_separable and same_scale(one.factor, whole / part) for one in use.metrics.values()
    )


def added(parts: Sequence[dict[str, Weighted]]) -> dict[str, Weighted]:
    """Sums over several pieces, added up on the devices."""
    return jax.tree.map(lambda *sums: sum(sums[1:], sums[0]), *parts)
