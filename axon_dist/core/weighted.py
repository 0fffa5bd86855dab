"""What a loss and its batch may say of themselves: `Weighted`, `Shared`, `per_sample`."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Mapping
from typing import Any

import jax

from .arguments import checked
from .checks import ARRAY, FUNCTION
from .typing import Array, Function


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Weighted:
    """A sum and the weight it has to be divided by: the loss is `total / weight`.

    A mean over tokens cannot be averaged over shards when the shards hold different numbers of
    tokens: the mean of `[1, 2, 3]` and of `[4]` is not the mean of their means. A loss function
    that returns its sum and its weight lets the step compute `sum(totals) / sum(weights)` over
    every shard and microbatch, which is what one device would have computed. A microbatch that is
    all padding adds nothing; where no sample of the step weighs anything, loss and gradient are 0.

    A metric may be `Weighted` too, and is then divided by its own weight.

    Args:
        total: scalar, the sum of the losses of the samples (or tokens) that count.
        weight: scalar, how many count; it must not depend on the parameters.

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
    """A loss with a term that is a mean over the samples, whatever each of them weighs.

    As the balance term of experts. Where a batch is cut into microbatches, the term of each counts
    by its number of samples, and not by the weight of the loss.

    Args:
        total: the sum of the losses, and `term * weight`.
        weight: as of `Weighted`.
        term: the scalar that is added to the mean.
        metrics: the names of the metrics that are such means too.
    """

    term: Array | float
    metrics: tuple[str, ...] = ()

    def of_samples(self, samples: int, mean_weight: Array) -> Weighted:
        """The loss of a part of a batch, with the term weighed by samples.

        Args:
            samples: of the part.
            mean_weight: of a sample, over the whole batch.
        """
        more = mean_weight * samples - self.weight
        return Weighted(self.total + self.term * more, self.weight)


@dataclasses.dataclass(frozen=True)
class Shared:
    """Marks what all samples of a batch have in common, which is not cut with them.

    `batch = {"x": ..., "y": ..., "class_weights": Shared(weights)}`: the loss function finds the
    array itself under the name. Every device holds all of it, and microbatches and ranks see the
    same.

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
    """A batch of fewer samples than others, filled up to their size by samples that come again.

    As the last one of a validation. `TrainStep.evaluate` takes `samples` in its place, and so
    counts each once.

    Args:
        arrays: the rows of this process, filled up.
        samples: all samples of the batch over all processes, each once; the same on every process.

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


# To JAX it is a dict of its arrays.
jax.tree_util.register_pytree_with_keys(FilledBatch, _flattened, _unflattened)


PER_SAMPLE = "axon_dist_per_sample"
"""The name of a call that is promised to treat the samples, dim 0 of its arrays, one by one."""


@checked(function=FUNCTION)
def per_sample(function: Function) -> Function:
    """Promises that a function treats samples one by one, forwards and backwards.

    A step that computes a loss in parts reads from its program that samples do not mix. A kernel
    of Pallas, or a call into foreign code, is no program that it could read. Random numbers are
    drawn before the function: each rank runs it on its own samples, and would draw the same.

    Args:
        function: takes and returns arrays; dim 0 of each that has one for every sample counts
            samples.

    Returns:
        The function, marked.

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
