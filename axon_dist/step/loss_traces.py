"""Traces a loss once per number of samples, and decides what its parts must compute.

Some outputs for a whole batch do not follow from the outputs for its parts, but do follow from sums
over its samples. The last operations of a loss such as `sqrt(mean)` or `sum / maximum(count, 1)`
act on scalars. The parts then return the scalars before these operations. The scalars add up, and
the operations run once, on those of the whole batch. The gradient is that of the one sum that
depends on the parameters, times the derivative of the loss by that sum.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Container, Hashable, Iterable, Sequence
from contextlib import nullcontext
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.extend.core import ClosedJaxpr
from jax.sharding import AbstractMesh, AxisType, PartitionSpec
from jax.typing import ArrayLike

from ..core.compat import outside_meshes
from ..core.errors import AxonDistError, UnsupportedError
from ..core.tree import leaves_with_paths, shape_key
from ..core.typing import Array, Batch, LossFn, PyTree
from ..core.weighted import Weighted
from ..ir.pieces import Ending
from ..ir.walk import moves_with, sources_of
from ..proof.interpret import RANKS, follow_samples
from ..proof.lattice import OutputUse, SampleUse, Use, Why, use_of
from .model_changes import has_statistics, synchronise_statistics
from .objective import (
    Forward,
    GradientResult,
    Outcome,
    PartLoss,
    Prepare,
    evaluate,
    forward_of,
    is_one,
    mean_loss,
)
from .parts import ModelSpec


@dataclasses.dataclass(frozen=True)
class Traced:
    """The traced loss of a number of samples.

    Args:
        program: (params, buffers, batch) -> total and weight of the loss, total and weight of each
            metric, buffers.
        names: of the metrics.
        is_plain: whether the loss has no weight of its own.
        ending: completes the outputs of a `PartLoss`.
    """

    program: ClosedJaxpr
    names: tuple[str, ...]
    is_plain: bool
    ending: Any = None

    def total_of(self, name: str) -> int:
        """Returns the index of the output that is the total of a metric."""
        return 2 + 2 * self.names.index(name)


class Traces:
    """Traces the programs of a loss, one per number of samples, and keeps them.

    BatchNorm is traced with statistics averaged over all parts, and experts with the tokens of all
    parts counted, as in the views that split the batch.

    Args:
        parts: the model's structure, and the shapes of its parameters and buffers.
        loss_fn: the user's loss.
        adapt: changes the merged model first.
        over_all: whether statistics are averaged over all parts, rather than each part having its
            own.

    Attributes:
        adapt: the argument `adapt`.
    """

    def __init__(
        self,
        parts: ModelSpec,
        loss_fn: LossFn,
        adapt: Prepare | None = None,
        over_all: bool = True,
    ):
        self._parts = parts
        self._loss_fn = loss_fn
        self.adapt = adapt
        self._over_all = over_all and has_statistics(parts.abstract)
        self._traced: dict[Hashable, Traced] = {}

    def of(self, batch: Batch, samples: int, others: Iterable[Traces] = ()) -> Traced:
        """Returns the loss of a number of samples, tracing it on first use.

        Args:
            batch: leaves of shape [B, ...], arrays or shapes; B does not matter.
            samples: how many.
            others: if one of these has traced the program already, it is used.
        """
        shapes = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct((samples, *x.shape[1:]), x.dtype), batch
        )
        key = shape_key(shapes)
        for traces in (*others, self):
            if key in traces._traced:
                return traces._traced[key]
        self._traced[key] = self._trace(shapes)
        return self._traced[key]

    def _over_ranks(self, model: nnx.Module) -> None:
        """Adapts a model whose statistics are averaged over all parts."""
        if self.adapt is not None:
            self.adapt(model)
        synchronise_statistics(model, (RANKS,))

    def _trace(self, batch: Batch) -> Traced:
        """Traces the loss; see `Traced`."""
        # Filled while `run` is traced.
        details: dict[str, Any] = {}
        prepare = self._over_ranks if self._over_all else self.adapt

        def run(params: PyTree, buffers: PyTree, batch: Batch) -> list[Any]:
            inputs = (params, buffers, batch)
            loss_fn = self._loss_fn
            ending = None
            if isinstance(loss_fn, PartLoss):
                forward = forward_of(self._parts, loss_fn.loss_fn, prepare)
                outcome, ending = loss_fn.outcome(forward, *inputs)
            else:
                outcome = evaluate(self._parts, loss_fn, *inputs, prepare)
            names = tuple(sorted(outcome.metrics))
            is_plain = is_one(outcome.loss.weight)
            details.update(names=names, is_plain=is_plain, ending=ending)
            numbers = scalars([outcome.loss, *(outcome.metrics[name] for name in names)])
            return [*numbers, *jax.tree.leaves(outcome.buffers)]

        if self._over_all:
            spec = PartitionSpec()
            mesh = AbstractMesh((2,), (RANKS,), axis_types=(AxisType.Auto,))
            run = jax.shard_map(run, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
        with outside_meshes() if self._over_all else nullcontext():
            program = jax.make_jaxpr(run)(*self._parts.arguments, batch)
        return Traced(program, **details)

    def use(self, batch: Batch, sizes: tuple[int, int], zeros: Container[int] = ()) -> SampleUse:
        """Analyses the traced programs for how the loss depends on the samples of its batch.

        Args:
            batch: leaves of shape [B, ...], arrays or shapes; B does not matter.
            sizes: the numbers of samples of a part and of the whole; the latter is a multiple of
                the former.
            zeros: the indices of the program inputs that are 0.

        Returns:
            How the loss, the metrics and the buffers depend on the samples.

        Raises:
            UnsupportedError: when the weight of the loss depends on a trained parameter.
        """
        parts = self._parts
        full = self.of(batch, sizes[1])
        paths = [path for path, _ in leaves_with_paths(parts.weights)]
        moving = () if full.is_plain else moves_with(full.program, 1, len(paths))
        if trained := [paths[at] for at in moving if paths[at] not in parts.frozen_paths]:
            # The weights of all parts are summed before anything is divided, so the gradient treats
            # them as constants. They may read parameters where no gradient flows.
            raise UnsupportedError(
                f"the weight of the loss depends on the parameter {trained[0]!r}; in "
                "Weighted(total, weight) the weight must follow from the batch alone, such as the "
                "number of its tokens, or be wrapped in jax.lax.stop_gradient",
                code="weight-depends-on-parameter",
            )
        try:
            part = self.of(batch, sizes[0])
        except AxonDistError:
            raise
        except Exception as error:  # The user's loss may raise anything for fewer samples.
            why = f"{ALONE} {sizes[0]} samples alone: {str(error)[:200]}"
            lost = OutputUse(Use.COUPLED, why=why)
            return SampleUse(lost, {}, {}, failure=str(error) or why)
        if (part.names, part.is_plain) != (full.names, full.is_plain):
            return SampleUse(OutputUse(Use.COUPLED, why=Why.DIFFERS), {}, {})
        programs = {sizes[0]: part.program, sizes[1]: full.program}
        values = follow_samples(programs.__getitem__, sizes, len(jax.tree.leaves(batch)), zeros)
        total, weight, *rest = values
        metrics = {name: (rest[2 * i], rest[2 * i + 1]) for i, name in enumerate(part.names)}
        buffers = [path for path, _ in leaves_with_paths(parts.arguments[1])]
        changed = dict(zip(buffers, rest[2 * len(part.names) :], strict=True))
        return use_of(total, weight, metrics, changed, part.is_plain, sizes[1] / sizes[0])


def scalars(numbers: Iterable[Any], weight: float = 1.0) -> list[Array]:
    """Returns total and weight of each number in turn; a plain number has weight `weight`."""
    pairs = [x if isinstance(x, Weighted) else Weighted(x, weight) for x in numbers]
    return [jnp.asarray(x) for pair in pairs for x in (pair.total, pair.weight)]


ALONE = "cannot be computed of"
"""Starts the reason given for a loss that raises for fewer samples."""

LOSS = ""
"""The name of the loss among the metrics."""


@dataclasses.dataclass(frozen=True, eq=False)
class FunctionOfSums(PartLoss):
    """A loss function that returns, for some outputs, the sums that these are computed from.

    Args:
        loss_fn: the user's loss, with its other outputs as the parts of a batch return them.
        names: of the metrics that are replaced; `LOSS` for the loss.
        leads: if the loss is replaced, what a part differentiates in its place: a linear
            combination of the sums that depend on the parameters, as (index, coefficient).
        factors: multiplied with the mean of each sum over the parts, they give the sum of the
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
            plain = {n for n, x in numbers.items() if not isinstance(x, Weighted)}
            pairs = {n: Weighted(numbers[n], 1.0) for n in plain & self.names}
            return numbers | pairs, outcome.buffers

        leaves = jax.tree.leaves((params, buffers, batch))
        program, shapes = jax.make_jaxpr(run, return_shape=True)(params, buffers, batch)
        structure = jax.tree.structure(shapes)
        indices, _ = jax.tree.unflatten(structure, range(structure.num_leaves))
        pairs = [indices[name] for name in sorted(self.names)]
        replaced = [x for pair in pairs for x in (pair.total, pair.weight)]
        ending, results, sums = Ending.of(program, leaves, replaced)
        numbers, changed = jax.tree.unflatten(structure, results)
        values = [jnp.asarray(x, jnp.float32) for x in sums]
        factors = self.factors or (1.0,) * len(values)
        metrics = {n: x for n, x in numbers.items() if n not in self.names}
        metrics |= {n: Weighted(x.total, 1.0) for n, x in metrics.items() if n in ones}
        pairs = zip(values, factors, strict=True)
        # Without factors the loss is only traced, to find out how the sums depend on the samples.
        for number, (value, factor) in enumerate(pairs):
            weighted = value if self.factors is None else Weighted(value, 1 / factor)
            metrics[sum_name(number)] = weighted
        lead = [values[n] * (slope * factors[n]) for n, slope in self.leads]
        loss = metrics.pop(LOSS, None) or Weighted(sum(lead, jnp.zeros(())), 1.0)
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
        """Returns the derivatives of the loss by the sums."""

        def loss(sums: Sequence[Array]) -> Array:
            return self.numbers(sums)[LOSS]

        return jax.grad(loss)([jnp.asarray(x, jnp.float32) for x in sums])

    def leads(self, moving: Callable[[int], bool]) -> tuple[tuple[int, float], ...] | None:
        """Finds what a part differentiates in place of the loss; see `FunctionOfSums.leads`.

        Args:
            moving: whether the sum of this index depends on the parameters.

        Returns:
            The one sum that depends on the parameters; or several, if the loss is a linear
            combination of them with constant coefficients. None if there are several and it is not.
        """
        ones = [np.float32(1)] * len(self.ending.sums)
        by_sum = jax.make_jaxpr(lambda *sums: self.numbers(sums)[LOSS])(*ones)
        leads = [number for number in moves_with(by_sum, 0, len(ones)) if moving(number)]
        if len(leads) < 2:
            return tuple((number, 1.0) for number in leads)
        slopes = sources_of(jax.make_jaxpr(self.slopes)(ones).jaxpr)
        if any(slopes[number] for number in leads):
            return None
        with jax.ensure_compile_time_eval():
            values = self.slopes(ones)
        return tuple((number, float(values[number])) for number in leads)

    def __call__(self, result: GradientResult) -> GradientResult:
        """Replaces the sums among the metrics by the outputs, and applies the chain rule."""
        count = len(self.ending.sums)
        metrics = dict(result.metrics)
        sums = [metrics.pop(sum_name(number)) for number in range(count)]
        numbers = self.numbers(sums)
        numbers = {"loss" if name == LOSS else name: x for name, x in numbers.items()}
        grads = result.grads
        if len(self.loss_fn.leads) == 1:
            ((lead, _),) = self.loss_fn.leads
            slope = self.slopes(sums)[lead]
            grads = jax.tree.map(lambda g: g * slope.astype(g.dtype), grads)
        return result._replace(grads=grads, metrics=metrics | numbers)


def in_parts(loss_fn: LossFn, use: SampleUse) -> LossFn:
    """Rescales a loss so that the sums of totals and weights over parts equal those of the batch.

    Results must not depend on the number of microbatches or ranks. A sum, or a `Weighted` whose
    weight is the same for any batch, then comes out as that of the whole batch.

    Args:
        loss_fn: the user's loss.
        use: how it depends on the samples.

    Returns:
        The loss function, unchanged if nothing needs rescaling.
    """
    factors = {n: m.factor for n, m in use.metrics.items() if m.kind in _SUMMED}
    if use.loss.kind is Use.MEAN:
        factors = {name: factor for name, factor in factors.items() if factor != 1}
    if use.loss.factor == 1 and not factors:
        return loss_fn

    def weighted(value: Any, factor: float) -> Weighted:
        if isinstance(value, Weighted):
            return Weighted(value.total, value.weight / factor)
        return Weighted(value, 1 / factor)

    def run(model: nnx.Module, batch: Batch, **kwargs: Any) -> Any:
        returned = loss_fn(model, batch, **kwargs)
        loss, *rest = returned if isinstance(returned, tuple) else (returned,)
        if use.loss.factor != 1:
            loss = weighted(loss, use.loss.factor)
        if not rest:
            return loss
        metrics = {n: weighted(m, factors[n]) if n in factors else m for n, m in rest[0].items()}
        return loss, metrics

    return run


_SUMMED = (Use.MEAN, Use.SUM, Use.SCALED)
