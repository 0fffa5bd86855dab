"""Numbers of a whole batch that its parts do not give, but sums over its samples do.

The last operations of a loss such as `sqrt(mean)` or `sum / maximum(count, 1)` act on scalars. The
parts of a batch then give the scalars in front of them, which add up, and these operations run
once, on what they are of the whole batch. The gradient is that of the one sum that moves with the
parameters, times the derivative of the loss by it.
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
from ..core.weighted import Weighted
from ..jaxpr.pieces import Ending
from ..jaxpr.sample_values import SampleUse, Use
from ..jaxpr.walk import moves_with, sources_of
from .objective import Forward, GradientResult, Outcome, PartLoss, mean_loss

LOSS = ""
"""The name of the loss among those of the metrics."""


@dataclasses.dataclass(frozen=True, eq=False)
class OfSums(PartLoss):
    """A loss function of which some numbers are replaced by the sums that they are computed of.

    Args:
        loss_fn: the user's, with its other numbers as the parts of a batch give them.
        names: of the metrics that are replaced, and `LOSS`.
        leads: where the loss is replaced, what is differentiated of a part in its place: each sum
            that moves with the parameters, by its number, times this.
        factors: what the mean of each sum over the parts is multiplied by to give that of the
            whole.
    """

    loss_fn: LossFn
    names: frozenset[str]
    leads: tuple[tuple[int, float], ...] = ()
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
            The outcome, with sums for metrics in place of the numbers that are replaced; and how
            these are computed of them.
        """
        ones: set[str] = set()

        def run(*given: Any) -> tuple[dict[str, Any], PyTree]:
            found = forward(*given)
            numbers = {**found.metrics, LOSS: found.loss}
            ones.update(n for n, x in numbers.items() if isinstance(x, Weighted) and _is_one(x))
            plain = {n for n, x in numbers.items() if not isinstance(x, Weighted)}
            pairs = {n: Weighted(numbers[n], 1.0) for n in plain & self.names}
            return numbers | pairs, found.buffers

        given = jax.tree.leaves((params, buffers, batch))
        program, shapes = jax.make_jaxpr(run, return_shape=True)(params, buffers, batch)
        structure = jax.tree.structure(shapes)
        at, _ = jax.tree.unflatten(structure, range(structure.num_leaves))
        ends = [i for name in sorted(self.names) for i in (at[name].total, at[name].weight)]
        ending, results, sums = Ending.of(program, given, ends)
        numbers, changed = jax.tree.unflatten(structure, results)
        values = [jnp.asarray(x, jnp.float32) for x in sums]
        factors = self.factors or (1.0,) * len(values)
        kept = {n: x for n, x in numbers.items() if n not in self.names}
        kept |= {n: Weighted(x.total, 1.0) for n, x in kept.items() if n in ones}
        pairs = zip(values, factors, strict=True)
        # While factors are not known, what is asked is what the sums are to the samples.
        named = [x if self.factors is None else Weighted(x, 1 / factor) for x, factor in pairs]
        kept |= {sum_name(number): value for number, value in enumerate(named)}
        lead = [values[n] * (slope * factors[n]) for n, slope in self.leads]
        loss = kept.pop(LOSS, None) or Weighted(sum(lead, jnp.zeros(())), 1.0)
        return Outcome(loss, kept, changed), ending


def sum_name(number: int) -> str:
    """The name of a sum among the metrics."""
    return f"axon_sum_{number}"


def _is_one(pair: Weighted) -> bool:
    return isinstance(pair.weight, (int, float)) and pair.weight == 1


@dataclasses.dataclass(frozen=True, eq=False)
class LossEnding:
    """Computes what a loss function of sums lacks, once these are of the whole batch.

    Args:
        ending: of the program for the whole batch.
        loss_fn: of its parts.
    """

    ending: Ending
    loss_fn: OfSums

    def numbers(self, sums: Sequence[Array]) -> dict[str, Array]:
        """What is computed of the sums of the whole batch, by name."""
        parts = iter(self.ending(sums))
        names = sorted(self.loss_fn.names)
        return {name: mean_loss(Weighted(next(parts), next(parts))) for name in names}

    def slopes(self, sums: Sequence[ArrayLike]) -> list[Array]:
        """The derivatives of the loss by the sums."""

        def loss(sums: Sequence[Array]) -> Array:
            return self.numbers(sums)[LOSS]

        return jax.grad(loss)([jnp.asarray(x, jnp.float32) for x in sums])

    def leads(self, moving: Callable[[int], bool]) -> tuple[tuple[int, float], ...] | None:
        """What is differentiated of a part in place of the loss; see `OfSums.leads`.

        Args:
            moving: whether a sum moves with the parameters, by its number.

        Returns:
            The sum that moves, or several, of which the loss is a combination whose factors are
            constants; None where there are several and it is not.
        """
        ones = [np.float32(1)] * len(self.ending.sums)
        by_sum = jax.make_jaxpr(lambda *sums: self.numbers(sums)[LOSS])(*ones)
        found = [number for number in moves_with(by_sum, 0, len(ones)) if moving(number)]
        if len(found) < 2:
            return tuple((number, 1.0) for number in found)
        slopes = sources_of(jax.make_jaxpr(self.slopes)(ones).jaxpr)
        if any(slopes[number] for number in found):
            return None
        with jax.ensure_compile_time_eval():
            values = self.slopes(ones)
        return tuple((number, float(values[number])) for number in found)

    def __call__(self, found: GradientResult) -> GradientResult:
        """Replaces the sums among the metrics by the numbers, and multiplies the gradients."""
        count = len(self.ending.sums)
        rest = dict(found.metrics)
        sums = [rest.pop(sum_name(number)) for number in range(count)]
        numbers = self.numbers(sums)
        numbers = {"loss" if name == LOSS else name: x for name, x in numbers.items()}
        grads = found.grads
        if len(self.loss_fn.leads) == 1:
            ((lead, _),) = self.loss_fn.leads
            slope = self.slopes(sums)[lead]
            grads = jax.tree.map(lambda g: g * slope.astype(g.dtype), grads)
        return found._replace(grads=grads, metrics=rest | numbers)


def in_parts(loss_fn: LossFn, use: SampleUse) -> LossFn:
    """A loss of parts whose sums of totals and weights make that of the whole.

    Neither microbatches nor ranks are to be noticed: a sum, and a `Weighted` whose weight is the
    same for any batch, become those of the whole batch.

    Args:
        loss_fn: the user's loss.
        use: what it is to the samples.

    Returns:
        The loss function; the same where nothing is to be changed.
    """
    factors = {n: m.factor for n, m in use.metrics.items() if m.kind in _SUMMED}
    if use.loss.kind is Use.MEAN:
        factors = {name: factor for name, factor in factors.items() if factor != 1}
    if use.loss.factor == 1 and not factors:
        return loss_fn

    def weighed(value: Any, factor: float) -> Weighted:
        if isinstance(value, Weighted):
            return Weighted(value.total, value.weight / factor)
        return Weighted(value, 1 / factor)

    def run(model: nnx.Module, batch: Batch, **told: Any) -> Any:
        returned = loss_fn(model, batch, **told)
        loss, *rest = returned if isinstance(returned, tuple) else (returned,)
        if use.loss.factor != 1:
            loss = weighed(loss, use.loss.factor)
        if not rest:
            return loss
        metrics = {n: weighed(m, factors[n]) if n in factors else m for n, m in rest[0].items()}
        return loss, metrics

    return run


_SUMMED = (Use.MEAN, Use.SUM, Use.SCALED)


_SUMMED = (Use.MEAN, Use.SUM, Use.SCALED)
