"""Markers for losses and batches: `Weighted`, `Shared`, `per_sample`."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Mapping
from typing import Any

import jax

from .arguments import checked
from .checks import ARRAY, FUNCTION
from .typing import Array, Function

AUXILIARY = "auxiliary"
"""The method that returns a model's auxiliary loss after a call, and its metrics."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Weighted:
    """A sum and the weight to divide it by: the loss is `total / weight`.

    A mean over tokens cannot be averaged over shards when the shards hold different numbers of
    tokens: the mean of `[1, 2, 3]` and of `[4]` is not the mean of their means. A loss function
    that returns its sum and its weight lets the step compute `sum(totals) / sum(weights)` over
    every shard and microbatch, which is what one device would have computed. A microbatch that is
    all padding adds nothing. If no sample of the step has weight, loss and gradient are 0.

    A metric may be `Weighted` too, and is then divided by its own weight.

    Args:
        total: scalar, the sum of the losses of the samples (or tokens) that count.
        weight: scalar, the number of those; it must not depend on the parameters.

    Example:
        >>> import jax.numpy as jnp
        >>> shards = [Weighted(jnp.sum(jnp.array(x)), float(len(x))) for x in ([1., 2., 3.], [4.])]
        >>> total = sum(s.total for s in shards); weight = sum(s.weight for s in shards)
        >>> float(total / weight)
        2.5
    """

    total: Array | float
    weight: Array | float

    @property
    def mean(self) -> Array | float:
        """The loss itself, `total / weight`."""
        return self.total / self.weight


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("total", "weight", "term"),
    meta_fields=("metrics",),
)
@dataclasses.dataclass(frozen=True)
class WithTerm(Weighted):
    """A loss with an extra term that is a mean over samples, whatever their weights.

    The load-balancing loss of experts is such a term. In a batch of several microbatches, each
    term is weighted by the number of samples, not by the weight of the loss.

    Args:
        total: the sum of the losses, plus `term * weight`.
        weight: as in `Weighted`.
        term: the scalar that is added to the mean.
        metrics: the names of metrics that are such means too.
    """

    term: Array | float
    metrics: tuple[str, ...] = ()

    def of_samples(self, samples: int, mean_weight: Array) -> Weighted:
        """The loss of a part of a batch, with the term weighted by samples.

        Args:
            samples: the number of samples in the part.
            mean_weight: the mean weight of a sample over the whole batch.
        """
        more = mean_weight * samples - self.weight
        return Weighted(self.total + self.term * more, self.weight)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Count(Weighted):
    """A metric that is an integer sum over the samples, of a part of a batch or of an evaluation.

    The parts, and the batches of an evaluation, add `total` up in its own dtype, because float32
    holds integers only up to 2^24. Nothing divides the sum; the weight is not read.
    """

    @property
    def mean(self) -> Array | float:
        """The sum itself."""
        return self.total


@dataclasses.dataclass(frozen=True)
class Shared:
    """Marks an array of a batch that all samples share, so it is not split among devices.

    With `batch = {"x": ..., "y": ..., "class_weights": Shared(weights)}` the loss function gets the
    array itself under that name. Every device holds all of it, and all microbatches and ranks see
    the same.

    Args:
        value: an array of any shape, the same on every process.

    Example:
        >>> import numpy as np
        >>> Shared(np.ones(3)).value.shape
        (3,)
    """

    value: object

    def __post_init__(self) -> None:
        ARRAY.check("Shared", "value", self.value)


class FilledBatch(dict[str, Any]):
    """A short batch, such as the last of a validation, filled up with repeated samples.

    `TrainStep.evaluate` uses `samples` instead, so each sample counts once.

    Args:
        arrays: the rows of this process, filled up.
        samples: all samples of the batch over all processes, each once; equal on every process.

    Example:
        >>> batch = FilledBatch({"x": [1.0, 2.0, 3.0, 1.0]}, samples={"x": [1.0, 2.0, 3.0]})
        >>> batch["x"], batch.samples["x"]
        ([1.0, 2.0, 3.0, 1.0], [1.0, 2.0, 3.0])
    """

    def __init__(self, arrays: Mapping[str, Any], samples: Mapping[str, Any]):
        super().__init__(arrays)
        self.samples: dict[str, Any] = dict(samples)


def _flattened(batch: FilledBatch) -> tuple[list[tuple[Any, Any]], tuple[str, ...]]:
    names = tuple(sorted(batch))
    return [(jax.tree_util.DictKey(name), batch[name]) for name in names], names


def _unflattened(names: tuple[str, ...], arrays: Iterable[Any]) -> Any:
    return dict(zip(names, arrays, strict=True))


# JAX sees a dict of the arrays.
jax.tree_util.register_pytree_with_keys(FilledBatch, _flattened, _unflattened)


PER_SAMPLE = "axon_dist_per_sample"
"""The name of `jit` calls that treat samples (dim 0 of their arrays) independently."""


@checked(function=FUNCTION)
def per_sample(function: Function) -> Function:
    """Declares that a function treats samples independently, forward and backward.

    A step that splits the batch checks in the loss's program that samples do not mix. It cannot
    check Pallas kernels or calls into foreign code. Draw random numbers outside the function:
    each rank runs it on its own samples, and all ranks would draw the same numbers inside.

    Args:
        function: takes and returns arrays; dim 0 of arrays with one entry per sample counts
            samples.

    Returns:
        The marked function.

    Example:
        >>> import jax.numpy as jnp
        >>> double = per_sample(lambda x: 2 * x)
        >>> double(jnp.ones(2)).tolist()
        [2.0, 2.0]
    """

    def run(*args: object) -> Array:
        return function(*args)

    run.__name__ = run.__qualname__ = PER_SAMPLE
    return jax.jit(run)
