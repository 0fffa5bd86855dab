"""A loss that knows its weight, so that uneven shards add up to the one-device number."""

from __future__ import annotations

import dataclasses

import jax

from .typing import Array


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
