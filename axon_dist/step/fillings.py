"""That the samples which fill a batch up drop out of all that a loss function gives.

A number counts no filling if it is a sum over the samples to which each gives something of its own,
as `sample_use` finds it, and what a sample of weight 0 gives is 0, as `alike` finds it of the
program whose weights are all zero.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ..core.errors import ConfigError, UnsupportedError
from ..core.tree import leaves_with_paths
from ..core.typing import Batch, LossFn
from ..core.weighted import Weighted
from ..jaxpr.alike import UNKNOWN, ZERO, Alike, alike
from ..jaxpr.sample_values import OutputUse, Use
from .objective import evaluate
from .parts import ModelParts
from .separable import sample_use

HOW = (
    "Multiply what each sample gives by its weight, and return Weighted(sum of weight * loss, sum "
    "of weight), or metrics that are such sums"
)


def check_fillings(parts: ModelParts, loss_fn: LossFn, batch: Batch, weight: str) -> None:
    """Raises unless samples of weight 0 change nothing.

    Args:
        parts: the model's structure, and the shapes of its parameters and buffers.
        loss_fn: the user's loss.
        batch: a dict of shapes, those of a batch that is filled up.
        weight: the name of the leaf that weighs the samples.

    Raises:
        ConfigError: naming the number, what counts the fillings, and how to say it.
        UnsupportedError: when a buffer of the model depends on the batch.
    """
    found = _without_weights(parts, loss_fn, batch, weight)
    rows = max(jax.tree.leaves(batch)[0].shape[0], 2)
    use = sample_use(parts, loss_fn, batch, (rows, 2 * rows), joins=False)
    if use.failure:
        raise ConfigError(f"the loss, for pad={weight!r}, {use.loss.why}")
    for path, buffer in use.buffers.items():
        if buffer.kind is not Use.CONSTANT:
            raise UnsupportedError(
                f"the buffer {path!r} depends on the batch, as the statistics of BatchNorm do: it "
                f"{buffer.why}{_place(buffer)}, and would count the samples that pad={weight!r} "
                "adds. Use a normalisation without statistics, or batches that divide"
            )
    for name, of in use.outputs().items():
        if name in found:
            total, own, is_plain = found[name]
            if problem := _problem(of, total, own, is_plain):
                raise ConfigError(
                    f"the {name} of loss_fn {problem}{_place(of)}, so that the samples that "
                    f"pad={weight!r} adds would count. {HOW}, with the weights of "
                    f"batch[{weight!r}]"
                )


def _problem(use: OutputUse, total: Alike, own: Alike, is_plain: bool) -> str:
    """How a number counts samples of weight 0; "" where it does not."""
    if is_plain and use.kind is Use.CONSTANT:
        return ""
    if not use.is_separable:
        return use.why
    if not total.is_zero:
        return (
            "has a term that is not 0 for samples of weight 0"
            if total.is_finite
            else "divides by the weights, or takes a logarithm of them, sample by sample"
        )
    if not is_plain and not own.is_zero:
        return "has a weight that is not 0 for samples of weight 0"
    if use.kind is not Use.WEIGHTED and not (is_plain and use.kind is Use.SUM):
        return "grows or shrinks with the number of samples, those of weight 0 among them"
    return ""


def _place(use: OutputUse) -> str:
    return f" ({use.where})" if use.where else ""


def _without_weights(
    parts: ModelParts, loss_fn: LossFn, batch: Batch, weight: str
) -> dict[str, tuple[Alike, Alike, bool]]:
    """Total and weight of each number where no sample weighs anything, and whether it has none."""
    names: list[tuple[str, bool]] = []

    def run(params: Any, buffers: Any, batch: Any) -> Any:
        outcome = evaluate(parts, loss_fn, params, buffers, batch)
        if isinstance(outcome.loss.weight, (int, float)):
            raise ConfigError(
                f"loss_fn returned a plain mean, which counts the samples that pad={weight!r} "
                "adds; return Weighted(sum of weight * loss, sum of weight) with the weights of "
                f"batch[{weight!r}]"
            )
        pairs = {"loss": outcome.loss}
        pairs |= {f"metric {name!r}": value for name, value in outcome.metrics.items()}
        names[:] = [(name, not isinstance(value, Weighted)) for name, value in pairs.items()]
        each = [x if isinstance(x, Weighted) else Weighted(x, 0.0) for x in pairs.values()]
        return [jnp.asarray(x) for pair in each for x in (pair.total, pair.weight)]

    closed = jax.make_jaxpr(run)(*parts.arguments, batch)
    given = [UNKNOWN] * len(jax.tree.leaves(parts.arguments))
    tops = [path.split("/")[0] for path, _ in leaves_with_paths(batch)]
    given += [ZERO if top == weight else UNKNOWN for top in tops]
    values = iter(alike(closed.jaxpr, closed.consts, given))
    return {name: (next(values), next(values), is_plain) for name, is_plain in names}
