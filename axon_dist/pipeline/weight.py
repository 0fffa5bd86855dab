"""What the microbatches of a step weigh, known before any of them has run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Literal

from ..core.compat import eval_jaxpr
from ..core.errors import UnsupportedError
from ..core.reduction import all_mean
from ..core.typing import Array
from ..program import needed_for
from .loss_trace import LossTrace
from .stage import Data


def mean_weight(
    trace: LossTrace, data: Callable[[Array], Data], num_microbatches: int, axes: tuple[str, ...]
) -> Array | None:
    """The mean weight of a microbatch, over all of them and all ranks that share the batch.

    A pipeline adds up gradients of sums, not of means, since a stage meets a microbatch before its
    weight is known at the end. Divided by the mean weight on the way back, they have the size that
    gradients of a mean have, which half precision needs: a sum over a thousand tokens, scaled as a
    mean is, would overflow.

    Args:
        trace: the jaxpr of the loss of one microbatch on one rank, blocks as calls.
        data: (index of a microbatch) -> what is known of it.
        num_microbatches: how many.
        axes: the manual axes that split the batch.

    Returns:
        A float32 scalar that is not zero, or None where the loss is a plain mean.

    Raises:
        UnsupportedError: when the weight depends on a parameter.
    """
    if isinstance(trace.loss[1], Literal):
        return None
    part, inputs = needed_for(trace.jaxpr, [1])
    needed = [trace.jaxpr.invars[number] for number in inputs]
    if foreign := [keys for keys, v in trace.params.items() if v in needed]:
        path = "/".join(map(str, foreign[0]))
        raise UnsupportedError(
            f"the weight of the loss depends on the parameter {path!r}; in Weighted(total, weight) "
            "the weight must follow from the batch alone, such as the number of its tokens"
        )

    def weight_of(microbatch: Array) -> Array:
        known: dict[Any, Any] = trace.known({}, *data(microbatch))
        (weight,) = eval_jaxpr(ClosedJaxpr(part, trace.consts), [known[v] for v in needed])
        return weight

    weights = jax.lax.map(weight_of, jnp.arange(num_microbatches))
    mean = all_mean(jnp.mean(weights), axes) if axes else jnp.mean(weights)
    return jnp.where(mean == 0, 1.0, mean)
