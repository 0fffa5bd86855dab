"""Evaluation of batches that do not divide by the ranks: every sample still counts once.

The samples that divide are evaluated as they are. The others are cut into pieces whose size divides
the number of ranks. Each piece is repeated until each rank has one sample of it, and its sums are
divided by the number of copies. All such pieces have the same shape, and so run the same program.
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
        copies: how many times the samples occur.
    """

    start: int
    stop: int
    copies: int = 1

    @property
    def samples(self) -> int:
        """The number of samples that are evaluated, copies included."""
        return (self.stop - self.start) * self.copies

    def of(self, batch: Batch, rows: slice = slice(None)) -> Batch:
        """Cuts the samples of the piece out of a batch.

        Args:
            batch: leaves of shape [B, ...], arrays, or `Shared`.
            rows: which samples of the piece to take, copies included.
        """

        def cut(leaf):
            if isinstance(leaf, Shared):
                return leaf
            numpy = jnp if isinstance(leaf, jax.Array) else np
            part = numpy.asarray(leaf)[self.start : self.stop]
            return numpy.concatenate([part] * self.copies)[rows]

        return jax.tree.map(cut, batch)

    def once(self, sums: dict[str, Weighted]) -> dict[str, Weighted]:
        """Returns the sums over the samples of the piece, with each sample counted once."""
        return jax.tree.map(lambda x: x / self.copies, sums) if self.copies > 1 else sums


def pieces(samples: int, ranks: int) -> list[Piece]:
    """Cuts a batch into pieces that divide over the ranks.

    Args:
        samples: the number of samples of the batch.
        ranks: the number of ranks that split the samples.

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
    """A loss function that returns the sums of an evaluation as metrics."""

    def __init__(self, loss_fn):
        self.loss_fn = loss_fn

    def outcome(
        self, forward: Forward, params: PyTree, buffers: PyTree, batch: Batch
    ) -> tuple[Outcome, object]:
        outcome = forward(params, buffers, batch)
        sums = {}
        for name, value in summed(outcome, batch).items():
            sums[f"{name} total"] = value.total
            sums[f"{name} weight"] = value.weight
        return Outcome(Weighted(jnp.zeros(()), 1.0), sums, outcome.buffers), None


def adds_up(spec: StepSpec, batch: Batch) -> bool:
    """Returns whether every number of an evaluation is a sum of contributions of single samples.

    Reads it from the program of the loss in eval mode, traced for as many samples as there are
    ranks, for twice as many, and for as many as the largest piece of the batch has: a loss may
    depend on the number of its samples, such as `jnp.sum(each) / min(len(each), 8)`. It is also
    traced for one sample more than there are ranks: a loss of pairs of neighbors adds up over
    parts of an even size alone. The result is False for a loss that compares samples, and for one
    that is itself a sum.

    Args:
        spec: model, loss, optimizer, strategy, devices and options of the step.
        batch: leaves of shape [B, ...], arrays or shapes.
    """
    least = max(spec.num_ranks, 2)
    largest = samples_of(batch) // least * least
    adapt = spec.changes.prepare(None, in_eval_mode(spec))
    sums: Any = _EvaluationSums(spec.loss_fn)
    traces = Traces(spec.parts, sums, adapt, over_all=False)
    sizes = [(least, whole) for whole in dict.fromkeys((2 * least, largest)) if whole > least]
    # Only groups of one sample fit into parts of both sizes, which have no common divisor. The ranks
    # divide neither number of this pair, so a constraint on the samples is the same for both.
    other = least + 1
    sizes.append((other, other * (3 if least == 2 else 2)))
    return all(_adds_up_between(traces, batch, part, whole) for part, whole in sizes)


def _adds_up_between(traces: Traces, batch: Batch, part: int, whole: int) -> bool:
    """Whether the sums over `whole` samples are those of their parts of `part` samples, added."""
    try:
        use = traces.use(shapes_of(batch), (part, whole))
    except AxonDistError:
        return False
    return not use.failure and all(
        output.is_separable and same_scale(output.factor, whole / part)
        for output in use.metrics.values()
    )


def added(parts: Sequence[dict[str, Weighted]]) -> dict[str, Weighted]:
    """Adds up the sums of several pieces on the devices."""
    return jax.tree.map(lambda *sums: sum(sums[1:], sums[0]), *parts)
