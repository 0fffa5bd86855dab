"""Losses that are computed from sums over the samples of a batch.

Some outputs for a whole batch do not follow from the outputs for its parts, but do follow from sums
over its samples. The last operations of a loss such as `sqrt(mean)` or `sum / maximum(count, 1)`
act on scalars. The parts then return the scalars before these operations (`FunctionOfSums`). The
scalars add up, and the operations run once, on those of the whole batch (`Finalize`). If one
sum depends on the parameters, its gradient is multiplied by the derivative of the loss with respect
to that sum. If several do, the loss must be a linear combination of them with constant
coefficients.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import ArrayLike

from ..core.typing import Array, Batch, LossFn, PyTree
from ..core.weighted import Count, Weighted
from ..ir.pieces import Ending
from ..ir.walk import dtype_of, inputs_with_gradient, sources_of
from ..separability.abstract_values import Dependence, LossDependence
from .objective import (
    Forward,
    GradientResult,
    Outcome,
    PartLoss,
    is_one,
    mean_loss,
    wide_number,
)

LOSS = ""
"""The name of the loss among the metrics."""


@dataclasses.dataclass(frozen=True, eq=False)
class FunctionOfSums(PartLoss):
    """A loss function that returns, for some outputs, the sums that these are computed from.

    Args:
        loss_fn: the user's loss. Its outputs that are not in `names` stay as a part computes them.
        names: the names of the outputs that are replaced by sums: metrics, or `LOSS`.
        differentiated: pairs (index of a sum, coefficient). If the loss is replaced, each part
            differentiates this linear combination of its sums instead.
        factors: for each sum, the factor that turns its mean over the parts into the sum over the
            whole batch.
    """

    loss_fn: LossFn
    names: frozenset[str]
    differentiated: tuple[tuple[int, float], ...] = ()
    factors: tuple[float, ...] | None = None

    def outcome(
        self, forward: Forward, params: PyTree, buffers: PyTree, batch: Batch
    ) -> tuple[Outcome, Ending]:
        """Evaluates the loss of a part.

        Args:
            forward: evaluates the user's loss.
            params: nested dict of arrays, trained and frozen.
            buffers: nested dict of arrays.
            batch: the part.

        Returns:
            The outcome, with sums as metrics in place of the outputs that are replaced; and the
            program that computes these outputs from the sums.
        """
        ones: set[str] = set()

        def run(*inputs: Any) -> tuple[dict[str, Any], PyTree]:
            outcome = forward(*inputs)
            numbers = {**outcome.metrics, LOSS: outcome.loss}
            ones.update(
                n for n, x in numbers.items() if isinstance(x, Weighted) and is_one(x.weight)
            )
            plain = {n: x for n, x in numbers.items() if not isinstance(x, Weighted)}
            pairs = {n: Weighted(x, 1.0) for n, x in plain.items() if n in self.names}
            return numbers | pairs, outcome.buffers

        leaves = jax.tree.leaves((params, buffers, batch))
        program, shapes = jax.make_jaxpr(run, return_shape=True)(params, buffers, batch)
        structure = jax.tree.structure(shapes)
        indices, _ = jax.tree.unflatten(structure, range(structure.num_leaves))
        pairs = [indices[name] for name in sorted(self.names)]
        replaced = [x for pair in pairs for x in (pair.total, pair.weight)]
        ending, results, sums = Ending.of(program, leaves, replaced)
        numbers, changed = jax.tree.unflatten(structure, results)
        values = [wide_number(x) for x in sums]
        factors = self.factors or (1.0,) * len(values)
        metrics = {n: x for n, x in numbers.items() if n not in self.names}
        metrics |= {n: Weighted(x.total, 1.0) for n, x in metrics.items() if n in ones}
        pairs = zip(values, factors, strict=True)
        # Without factors the loss is only traced, to find out how the sums depend on the samples.
        for number, (value, factor) in enumerate(pairs):
            weighted = value if self.factors is None else Weighted(value, 1 / factor)
            metrics[sum_name(number)] = weighted
        lead = [values[n] * (slope * factors[n]) for n, slope in self.differentiated]
        loss = metrics.pop(LOSS, None) or Weighted(sum(lead, jnp.zeros((), jnp.float32)), 1.0)
        return Outcome(loss, metrics, changed), ending


def sum_name(number: int) -> str:
    """Returns the name of a sum among the metrics."""
    return f"axon_sum_{number}"


@dataclasses.dataclass(frozen=True, eq=False)
class Finalize:
    """Completes the outputs of a `FunctionOfSums` from the sums of the whole batch.

    Args:
        ending: the last operations of the program for the whole batch.
        loss_fn: the loss function of the parts.
    """

    ending: Ending
    loss_fn: FunctionOfSums

    def numbers(self, sums: Sequence[Array]) -> dict[str, Array]:
        """Computes the replaced outputs from the sums of the whole batch, by name."""
        # The ending returns total and weight of each output in turn.
        parts = iter(self.ending(sums))
        names = sorted(self.loss_fn.names)
        return {name: mean_loss(Weighted(next(parts), next(parts))) for name in names}

    def slopes(self, sums: Sequence[ArrayLike]) -> list[Array]:
        """Returns the derivatives of the loss with respect to the sums."""

        def loss(sums: Sequence[Array]) -> Array:
            return self.numbers(sums)[LOSS]

        return jax.grad(loss)([wide_number(x) for x in sums])

    def differentiated(
        self, is_trained: Callable[[int], bool]
    ) -> tuple[tuple[int, float], ...] | None:
        """Finds what a part differentiates in place of the loss, as `FunctionOfSums` needs it.

        Args:
            is_trained: whether the sum of this index depends on trained parameters.

        Returns:
            The one sum that depends on the parameters; or several, if the loss is a linear
            combination of them with constant coefficients. None if there are several and it is not.
        """
        ones = [np.ones((), jnp.promote_types(dtype_of(v), jnp.float32)) for v in self.ending.sums]
        by_sum = jax.make_jaxpr(lambda *sums: self.numbers(sums)[LOSS])(*ones)
        read = inputs_with_gradient(by_sum, 0, len(ones))
        differentiated = [number for number in read if is_trained(number)]
        if len(differentiated) < 2:
            return tuple((number, 1.0) for number in differentiated)
        slopes = sources_of(jax.make_jaxpr(self.slopes)(ones).jaxpr)
        if any(slopes[number] for number in differentiated):
            return None
        with jax.ensure_compile_time_eval():
            values = self.slopes(ones)
        return tuple((number, float(values[number])) for number in differentiated)

    def __call__(self, result: GradientResult) -> GradientResult:
        """Replaces the sums among the metrics by the outputs, and applies the chain rule."""
        count = len(self.ending.sums)
        metrics = dict(result.metrics)
        sums = [metrics.pop(sum_name(number)) for number in range(count)]
        numbers = self.numbers(sums)
        numbers = {"loss" if name == LOSS else name: x for name, x in numbers.items()}
        grads = result.grads
        if len(self.loss_fn.differentiated) == 1:
            ((lead, _),) = self.loss_fn.differentiated
            slope = self.slopes(sums)[lead]
            grads = jax.tree.map(lambda g: g * slope.astype(g.dtype), grads)
        others = {name: x for name, x in result.numbers.items() if name in metrics}
        return result._replace(grads=grads, metrics=metrics | numbers, numbers=others | numbers)


WITHOUT_LOSS_WEIGHT = (Dependence.MEAN, Dependence.SUM, Dependence.SCALED, Dependence.CONSTANT)
"""The dependences of metrics that are averaged over equal parts without the loss's weight."""


def rescale_parts(loss_fn: LossFn, dependence: LossDependence) -> LossFn:
    """Rescales a loss so that `sum(totals) / sum(weights)` over parts is that of the batch.

    Results must not depend on the number of microbatches or ranks. A sum, or a `Weighted` whose
    weight is the same for any batch, then comes out as that of the whole batch. A sum of integers
    keeps its dtype.

    Args:
        loss_fn: the user's loss.
        dependence: how it depends on the samples.

    Returns:
        The loss function, unchanged if nothing needs rescaling.
    """
    factors = {n: m.factor for n, m in dependence.metrics.items() if m.kind in WITHOUT_LOSS_WEIGHT}
    sums = {n for n, m in dependence.metrics.items() if m.kind is Dependence.SUM}
    if dependence.loss.kind is Dependence.MEAN:
        factors = {name: factor for name, factor in factors.items() if factor != 1}
    if dependence.loss.factor == 1 and not factors:
        return loss_fn

    def weighted(value: Any, factor: float, is_sum: bool = False) -> Weighted:
        if isinstance(value, Weighted):
            return Weighted(value.total, value.weight / factor)
        is_count = is_sum and jnp.issubdtype(jnp.result_type(value), jnp.integer)
        return (Count if is_count else Weighted)(value, 1 / factor)

    def run(model: nnx.Module, batch: Batch, **kwargs: Any) -> Any:
        returned = loss_fn(model, batch, **kwargs)
        loss, *rest = returned if isinstance(returned, tuple) else (returned,)
        if dependence.loss.factor != 1:
            loss = weighted(loss, dependence.loss.factor)
        if not rest:
            return loss
        metrics = {
            n: weighted(m, factors[n], n in sums) if n in factors else m for n, m in rest[0].items()
        }
        return loss, metrics

    return run
