"""Finds out whether the loss of a batch follows from the losses of its parts.

Microbatches and ranks see parts of a batch. If the loss is a mean or a sum over samples, or
`Weighted`, the step computes the loss and the gradient of the whole batch, no matter how the batch
is cut. If the loss couples the samples, for example by comparing each sample with every other,
ranks must not compute it from their own samples. With one microbatch the step then runs in global
view; with several it is refused, unless `separable=False` asks for the mean over microbatches. It
is also refused if an option needs ranks that work on their own.

Some outputs for a whole batch do not follow from the outputs for its parts, but do follow from sums
over its samples. The last operations of a loss such as `sqrt(mean)` or `sum / maximum(count, 1)`
act on scalars. The parts then return the scalars before these operations (`FunctionOfSums`). The
scalars add up, and the operations run once, on those of the whole batch (`Finalize`). If one
sum depends on the parameters, its gradient is multiplied by the derivative of the loss with respect
to that sum. If several do, the loss must be a linear combination of them with constant
coefficients.

`Traces` traces the loss once per number of samples, and `Separator` decides.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Container, Hashable, Iterable, Sequence
from contextlib import nullcontext
from functools import cached_property
from types import MappingProxyType
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.extend.core import ClosedJaxpr
from jax.sharding import AbstractMesh, AxisType, PartitionSpec
from jax.typing import ArrayLike

from ..collectives import GradSyncStrategy
from ..core.compat import outside_meshes
from ..core.errors import AxonDistError, UnsupportedError
from ..core.tree import is_key, leaves_with_paths, shape_key, shapes_of
from ..core.typing import Array, Batch, LossFn, Path, PyTree
from ..core.weighted import Weighted
from ..ir.pieces import Ending
from ..ir.randomness import is_added_to
from ..ir.walk import moves_with, sources_of
from ..parallel import SUM_SAMPLES, mark_experts_per_sample
from ..separability.abstract_values import (
    OF_WEIGHT,
    Dependence,
    LossDependence,
    OutputDependence,
    Why,
    dependence_of,
    same_scale,
)
from ..separability.interpret import RANKS, follow_samples
from ..separability.operation import RESIZED
from .model_spec import ModelSpec
from .objective import (
    Forward,
    GradientResult,
    ModelChange,
    Outcome,
    PartLoss,
    evaluate,
    forward_of,
    is_one,
    mean_loss,
)
from .sharing import once
from .spec import StepSpec
from .statistics import has_statistics, synchronise_statistics, warn_of_parts


@dataclasses.dataclass(frozen=True)
class Traced:
    """The traced loss of a number of samples.

    Args:
        program: (params, buffers, batch) -> total and weight of the loss, total and weight of each
            metric, buffers.
        names: of the metrics.
        is_plain: whether the loss is a number without a weight.
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
        model_spec: the model's structure, and the shapes of its parameters and buffers.
        loss_fn: the user's loss.
        change: changes the merged model before the loss runs.
        over_all: whether statistics are averaged over all parts, rather than each part having its
            own.

    Attributes:
        change: the argument `change`.
    """

    def __init__(
        self,
        model_spec: ModelSpec,
        loss_fn: LossFn,
        change: ModelChange | None = None,
        over_all: bool = True,
    ):
        self._model_spec = model_spec
        self._loss_fn = loss_fn
        self.change = change
        self._over_all = over_all and has_statistics(model_spec.abstract)
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
        """Changes a model whose statistics are averaged over all parts."""
        if self.change is not None:
            self.change(model)
        synchronise_statistics(model, (RANKS,))

    def _trace(self, batch: Batch) -> Traced:
        """Traces the loss; see `Traced`."""
        # Filled while `run` is traced.
        details: dict[str, Any] = {}
        change = self._over_ranks if self._over_all else self.change

        def run(params: PyTree, buffers: PyTree, batch: Batch) -> list[Any]:
            inputs = (params, buffers, batch)
            loss_fn = self._loss_fn
            ending = None
            if isinstance(loss_fn, PartLoss):
                forward = forward_of(self._model_spec, loss_fn.loss_fn, change)
                outcome, ending = loss_fn.outcome(forward, *inputs)
            else:
                outcome = evaluate(self._model_spec, loss_fn, *inputs, change)
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
            program = jax.make_jaxpr(run)(*self._model_spec.arguments, batch)
        return Traced(program, **details)

    def dependence(
        self, batch: Batch, sizes: tuple[int, int], zeros: Container[int] = ()
    ) -> LossDependence:
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
        model_spec = self._model_spec
        full = self.of(batch, sizes[1])
        paths = [path for path, _ in leaves_with_paths(model_spec.weights)]
        moving = () if full.is_plain else moves_with(full.program, 1, len(paths))
        if trained := [paths[at] for at in moving if paths[at] not in model_spec.frozen_paths]:
            # The weights of all parts are summed before anything is divided, so the gradient treats
            # them as constants. They may read parameters where no gradient flows.
            raise UnsupportedError(
                f"the weight of the loss depends on the parameter {trained[0]!r}; in "
                "Weighted(total, weight) the weight must depend on the batch alone, such as the "
                "number of its tokens, or be wrapped in jax.lax.stop_gradient",
                code="weight-of-parameters",
            )
        try:
            part = self.of(batch, sizes[0])
        except AxonDistError:
            raise
        except Exception as error:  # The user's loss may raise anything for fewer samples.
            why = f"{ALONE} {sizes[0]} samples alone: {str(error)[:200]}"
            lost = OutputDependence(Dependence.COUPLED, why=why)
            return LossDependence(lost, {}, {}, failure=str(error) or why)
        if (part.names, part.is_plain) != (full.names, full.is_plain):
            return LossDependence(OutputDependence(Dependence.COUPLED, why=Why.DIFFERS), {}, {})
        programs = {sizes[0]: part.program, sizes[1]: full.program}
        values = follow_samples(programs.__getitem__, sizes, len(jax.tree.leaves(batch)), zeros)
        total, weight, *rest = values
        metrics = {name: (rest[2 * i], rest[2 * i + 1]) for i, name in enumerate(part.names)}
        buffers = [path for path, _ in leaves_with_paths(model_spec.arguments[1])]
        changed = dict(zip(buffers, rest[2 * len(part.names) :], strict=True))
        return dependence_of(total, weight, metrics, changed, part.is_plain, sizes[1] / sizes[0])


def scalars(numbers: Iterable[Any], weight: float = 1.0) -> list[Array]:
    """Returns total and weight of each number in turn; a plain number has weight `weight`."""
    pairs = [x if isinstance(x, Weighted) else Weighted(x, weight) for x in numbers]
    return [jnp.asarray(x) for pair in pairs for x in (pair.total, pair.weight)]


ALONE = "cannot be computed from"
"""Starts the reason given for a loss that raises for fewer samples."""

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
        lead = [values[n] * (slope * factors[n]) for n, slope in self.differentiated]
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
        """Returns the derivatives of the loss with respect to the sums."""

        def loss(sums: Sequence[Array]) -> Array:
            return self.numbers(sums)[LOSS]

        return jax.grad(loss)([jnp.asarray(x, jnp.float32) for x in sums])

    def differentiated(self, moving: Callable[[int], bool]) -> tuple[tuple[int, float], ...] | None:
        """Finds what a part differentiates in place of the loss, as `FunctionOfSums` needs it.

        Args:
            moving: whether the sum of this index depends on the parameters.

        Returns:
            The one sum that depends on the parameters; or several, if the loss is a linear
            combination of them with constant coefficients. None if there are several and it is not.
        """
        ones = [np.float32(1)] * len(self.ending.sums)
        by_sum = jax.make_jaxpr(lambda *sums: self.numbers(sums)[LOSS])(*ones)
        differentiated = [number for number in moves_with(by_sum, 0, len(ones)) if moving(number)]
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
        return result._replace(grads=grads, metrics=metrics | numbers)


def rescale_parts(loss_fn: LossFn, dependence: LossDependence) -> LossFn:
    """Rescales a loss so that the sums of totals and weights over parts equal those of the batch.

    Results must not depend on the number of microbatches or ranks. A sum, or a `Weighted` whose
    weight is the same for any batch, then comes out as that of the whole batch.

    Args:
        loss_fn: the user's loss.
        dependence: how it depends on the samples.

    Returns:
        The loss function, unchanged if nothing needs rescaling.
    """
    factors = {n: m.factor for n, m in dependence.metrics.items() if m.kind in _SUMMED}
    if dependence.loss.kind is Dependence.MEAN:
        factors = {name: factor for name, factor in factors.items() if factor != 1}
    if dependence.loss.factor == 1 and not factors:
        return loss_fn

    def weighted(value: Any, factor: float) -> Weighted:
        if isinstance(value, Weighted):
            return Weighted(value.total, value.weight / factor)
        return Weighted(value, 1 / factor)

    def run(model: nnx.Module, batch: Batch, **kwargs: Any) -> Any:
        returned = loss_fn(model, batch, **kwargs)
        loss, *rest = returned if isinstance(returned, tuple) else (returned,)
        if dependence.loss.factor != 1:
            loss = weighted(loss, dependence.loss.factor)
        if not rest:
            return loss
        metrics = {n: weighted(m, factors[n]) if n in factors else m for n, m in rest[0].items()}
        return loss, metrics

    return run


_SUMMED = (Dependence.MEAN, Dependence.SUM, Dependence.SCALED)


MakeChange: TypeAlias = Callable[..., ModelChange]
"""(gather of each weight or None, first change) -> the change to a merged model."""


@dataclasses.dataclass(frozen=True)
class Separation:
    """How the loss of a batch is computed from its parts.

    Args:
        loss_fn: the user's loss, weighted so that `sum(totals) / sum(weights)` over all parts is
            that of the batch.
        is_per_rank: whether each rank computes the loss from its own samples.
        why: why the ranks compute the loss together, in a step that would otherwise run per rank;
            "" in all other steps.
        averaged: why the loss is an average over microbatches that differs from the loss of the
            whole batch; "" if it does not differ.
        finalize: computes the numbers for which `loss_fn` returns only sums, from the sums of the
            whole batch; None if `loss_fn` returns all numbers.
        means: the buffers whose value after the whole batch is the mean of their values after its
            microbatches.
    """

    loss_fn: LossFn
    is_per_rank: bool
    why: str = ""
    averaged: str = ""
    finalize: Finalize | None = None
    means: frozenset[Path] = frozenset()

    def __str__(self) -> str:
        view = "per rank" if self.is_per_rank else "global view"
        text = view + (f", because {self.why}" if self.why else "")
        also = "" if self.averaged == self.why else f" because {self.averaged}"
        return text + (f"; averaged over microbatches{also}" if self.averaged else "")


BEFORE = (
    "Compute what depends on the batch alone, such as normalised advantages, counts of classes, "
    "masks divided by their means or a shuffled partner of each sample, before the step, and give "
    "it in the batch; let every other term depend on one sample alone"
)
_PAIRS = (
    "Put what belongs together, such as a chosen and a rejected answer, into one sample: give it "
    "as two leaves of the batch, which the loss may join by jnp.concatenate"
)
_INSTEAD: MappingProxyType[str, str] = MappingProxyType(
    {
        Why.DIFFERS: (
            "Make the program the same for every number of samples: write a loop over them as "
            "jax.vmap(function)(samples) or jax.lax.map(function, samples)"
        ),
        Why.PRODUCT: (
            "Take a product of means, such as a load-balance loss, over the tokens of each sample "
            "and then the mean over the samples (arXiv:2405.04434)"
        ),
        Why.UNEVEN: _PAIRS,
        ALONE: _PAIRS,
        Why.OFTEN: (
            "Do it for one sample, and mark the function for all of them: "
            "axon_dist.per_sample(jax.vmap(function))"
        ),
    }
)
"""Advice by what is found: a value applies if its key is part of the reason."""


def _instead_of(why: str, samples: int) -> str:
    """Advises how to rewrite a loss, given the reason `why` and the samples of a part."""
    advice = next((advice for reason, advice in _INSTEAD.items() if reason in why), BEFORE)
    if samples == 1 and any(reason in why for reason in (Why.DIFFERS, RESIZED)):
        return f"Give each part two samples or more: JAX may trace one sample differently. {advice}"
    return advice


class Separator:
    """Finds out, once per batch shape, how the loss of a batch is computed from its parts.

    Args:
        spec: the resolved arguments of the step.
        change_with: (gather of each weight or None, first change) -> the change to a merged model.
        trace_key: equal for separators whose losses have equal traces; None shares nothing.

    Attributes:
        model_spec: the model, with the `Shared` leaves of a batch.
    """

    def __init__(self, spec: StepSpec, change_with: MakeChange, trace_key: Hashable = None):
        self._spec = spec
        self._change_with = change_with
        self.model_spec: ModelSpec = spec.model_spec
        self._for_shared: dict[Hashable, Separator] = {}
        self._loss_fn = spec.loss_fn
        self._buffers = leaves_with_paths(spec.model_spec.arguments[1])
        self._num_microbatches = spec.num_microbatches
        self._promise = spec.options.separable
        self._separations: dict[Any, Separation] = {}
        self._traced: dict[bool, Traces] = (
            {} if trace_key is None else once(("traces", trace_key), dict)
        )

    def with_shared(self, shared: PyTree) -> Separator:
        """Returns the separator for batches that also have `Shared` leaves; cached by shape.

        Args:
            shared: nested dict of arrays or shapes.
        """
        key = shape_key(shared)
        if key not in self._for_shared:
            model_spec = dataclasses.replace(self._spec.model_spec, shared=shapes_of(shared))
            spec = dataclasses.replace(self._spec, model_spec=model_spec)
            self._for_shared[key] = Separator(spec, self._change_with)
        return self._for_shared[key]

    def of(self, batch: Batch) -> Separation:
        """Returns how the loss of batches of this shape is computed.

        Args:
            batch: a placed batch, leaves of shape [B, ...], or [K, B/K, ...] with K microbatches;
                arrays or shapes.

        Returns:
            How the loss is computed; cached by shape.

        Raises:
            UnsupportedError: when the step needs per-rank computation and the loss couples the
                samples; it names the operation and its place.
        """
        samples, shapes = self._spec.microbatch(batch)
        key = shape_key(shapes)
        if key not in self._separations:
            self._separations[key] = self._separate(shapes, samples)
        return self._separations[key]

    @property
    def found(self) -> tuple[Separation, ...]:
        """The results for the batch shapes seen so far."""
        return tuple(self._separations.values())

    def coupling(self, batch: Batch) -> str:
        """Returns why the loss depends on the number of microbatches; "" if it does not.

        Statistics such as BatchNorm's are taken over a microbatch, and so couple its samples.

        Args:
            batch: as for `of`, with at least two samples.
        """
        for path, leaf in self._buffers:
            if jnp.issubdtype(leaf.dtype, jnp.floating):
                return f"the statistics {path} are those of a microbatch"
        samples, shapes = self._spec.microbatch(batch)
        sizes = (samples // 2 if samples % 2 == 0 else 1), samples * self._num_microbatches
        if sizes[0] == sizes[1]:
            # A single sample in a single microbatch cannot be cut.
            return ""
        dependence = self._dependence(shapes, sizes, 2)
        return (
            self._obstacle(dependence)
            if self._from_sums(shapes, sizes, 2, dependence) is None
            else ""
        )

    def _separate(self, batch: Batch, samples: int) -> Separation:
        """Finds out how the loss is computed; `samples` is the number per microbatch."""
        per_rank, asked = wants_ranks(self._spec)
        ranks = self._spec.num_ranks if per_rank else 1
        if self._num_microbatches * ranks == 1:
            return Separation(self._loss_fn, per_rank)
        total = samples * self._num_microbatches
        if self._num_microbatches > 1:
            try:
                self._traces(ranks).of(batch, total)
            except AxonDistError:
                raise
            except Exception:  # The user's loss may raise anything for more samples.
                # The loss fails for more samples than a microbatch, on one device too. So a
                # microbatch takes the place of the whole batch in the comparison.
                total = samples
        if samples // ranks == total:
            self._check_buffers(self._traces(ranks).of(batch, total).program)
            return Separation(self._loss_fn, per_rank)
        why = ""
        is_needed = bool(asked) or self._num_microbatches > 1
        sizes = samples // ranks, total
        dependence, separation = self._dependence_or_sums(batch, sizes, ranks, is_needed)
        if dependence.failure and self._num_microbatches > 1:
            # Raises if all ranks together cannot compute the loss of a microbatch either: that
            # needs other advice than a loss that fails on the samples of one rank.
            self._dependence(batch, (samples, total), 1)
        if separation is None and ranks > 1 and (why := self._obstacle(dependence)):
            if asked:
                refusal = self._refusal(why, asked, samples // ranks)
                raise UnsupportedError(refusal, code="coupled-ranks")
            ranks = 1
            sizes = (samples, total)
            if samples == total:
                return Separation(self._loss_fn, False, why)
            dependence, separation = self._dependence_or_sums(batch, sizes, 1)
        is_given = separation is not None or dependence.loss.is_separable
        means = (
            self._means(batch, sizes, ranks, dependence, is_given) if self._buffers else frozenset()
        )
        if separation is not None:
            is_per_rank = per_rank and not why
            return dataclasses.replace(separation, is_per_rank=is_per_rank, why=why, means=means)
        if not self._promise and not dependence.is_separable:
            self._check_follows(dependence, samples, total, ranks)
        is_averaged = self._promise is False and self._num_microbatches > 1
        averaged = dependence.coupled if is_averaged else ""
        loss_fn = rescale_parts(self._loss_fn, dependence)
        return Separation(loss_fn, per_rank and not why, why, averaged, means=means)

    def _dependence_or_sums(
        self, batch: Batch, sizes: tuple[int, int], ranks: int, try_sums: bool = True
    ) -> tuple[LossDependence, Separation | None]:
        """Returns how the outputs use the samples, and how they follow from sums, if they do."""
        dependence = self._dependence(batch, sizes, ranks)
        if not try_sums or dependence.is_separable:
            return dependence, None
        separation = self._from_sums(batch, sizes, ranks, dependence)
        metrics = {
            name: output for name, output in dependence.metrics.items() if output.is_separable
        }
        if (
            separation is None
            and not dependence.loss.is_separable
            and metrics != dependence.metrics
        ):
            without_coupled = dataclasses.replace(dependence, metrics=metrics)
            if self._from_sums(batch, sizes, ranks, without_coupled) is not None:
                # The metric is at fault: without it the loss would be computed from sums. Clear the
                # loss, so that the error names the metric.
                dependence = dataclasses.replace(dependence, loss=OutputDependence(Dependence.MEAN))
        return dependence, separation

    def _from_sums(
        self, batch: Batch, sizes: tuple[int, int], ranks: int, dependence: LossDependence
    ) -> Separation | None:
        """Returns how to compute outputs that do not add up from sums that do, or None."""
        if self._promise is not None or dependence.failure:
            return None
        names = {name for name, output in dependence.metrics.items() if not output.is_separable}
        if not dependence.loss.is_separable:
            # A metric without its own weight uses the weight of the loss, which sums in place of
            # the loss do not have. So weighted metrics are replaced as well.
            names |= {
                name
                for name, output in dependence.metrics.items()
                if output.kind is Dependence.WEIGHTED
            }
            names.add(LOSS)
        if not names:
            return None
        loss_fn: Any = FunctionOfSums(rescale_parts(self._loss_fn, dependence), frozenset(names))
        traces = Traces(self.model_spec, loss_fn, self._traces(ranks).change)
        dependence_of_sums = traces.dependence(batch, sizes)
        traced = traces.of(batch, sizes[1])
        sums = [sum_name(number) for number in range(len(traced.ending.sums))]
        outputs = {
            n: x
            for n, x in dependence_of_sums.metrics.items()
            if n in dependence.metrics or n in sums
        }
        dependence_of_sums = dataclasses.replace(dependence_of_sums, metrics=outputs)
        needs_global_view = ranks > 1 and self._obstacle(dependence_of_sums) != ""
        is_separable = all(
            output.is_separable for output in (dependence_of_sums.loss, *outputs.values())
        )
        if needs_global_view or not is_separable:
            return None
        finalize = Finalize(traced.ending, loss_fn)
        if any(outputs[name].kind is Dependence.WEIGHTED for name in sums):
            return None
        is_trained = functools.partial(self._depends_on_trained, traced)
        differentiated = finalize.differentiated(is_trained) if LOSS in names else ()
        if differentiated is None:
            return None
        factors = tuple(outputs[name].factor for name in sums)
        loss_fn: Any = dataclasses.replace(loss_fn, differentiated=differentiated, factors=factors)
        return Separation(loss_fn, True, finalize=dataclasses.replace(finalize, loss_fn=loss_fn))

    def _depends_on_trained(self, traced: Traced, number: int) -> bool:
        """Whether a sum depends on a trained parameter."""
        paths = [path for path, _ in leaves_with_paths(self.model_spec.weights)]
        output = traced.total_of(sum_name(number))
        moving = moves_with(traced.program, output, len(paths))
        return any(paths[at] not in self.model_spec.frozen_paths for at in moving)

    def program(self, batch: Batch, samples: int) -> ClosedJaxpr:
        """Returns the program of the loss, traced once for a number of samples.

        Args:
            batch: leaves of shape [B, ...], arrays or shapes; B does not matter.
            samples: the number of samples to trace for.

        Returns:
            (params, buffers, batch) -> the results of the loss function, with the weights whole.
        """
        # Some callers are inside `shard_map`, where the names of mesh axes are bound. This program
        # is traced without them.
        return self._of_one_rank.of(batch, samples, self._traced.values()).program

    @cached_property
    def _of_one_rank(self) -> Traces:
        change = self._change_with(None)
        return Traces(self.model_spec, self._loss_fn, change, over_all=False)

    def _traces(self, ranks: int) -> Traces:
        """Returns the programs of the loss on one rank; with `ranks=1` that of all samples."""
        # Outside of pipelines, a model with experts runs in global view even if the step asks for
        # ranks.
        marks_experts = ranks == 1 or self._spec.strategy.pipeline is not None
        if marks_experts not in self._traced:
            # Here experts promise not to mix samples.
            modules = nnx.iter_modules(self.model_spec.abstract)
            has_experts = any(hasattr(module, SUM_SAMPLES) for _, module in modules)
            first = mark_experts_per_sample if marks_experts and has_experts else None
            change = self._change_with(None, first)
            self._traced[marks_experts] = Traces(self.model_spec, self._loss_fn, change)
        return self._traced[marks_experts]

    def _dependence(self, batch: Batch, sizes: tuple[int, int], ranks: int) -> LossDependence:
        """Returns how the loss uses the samples, by its programs at the sizes that run."""
        dependence = self._traces(ranks).dependence(batch, sizes)
        if dependence.failure and ranks == 1:
            raise UnsupportedError(self._too_small(sizes[0], dependence.failure))
        return dependence

    def _too_small(self, samples: int, error: str) -> str:
        error = " ".join(error.split())[:200].rstrip(".")
        return (
            f"the loss cannot be computed for a microbatch, which has {samples} samples when the "
            f"batch is cut into {self._num_microbatches}: {error}. Take the number of "
            "samples from the shapes of the batch, and not from a constant; or leave the batch "
            "whole"
        )

    def _check_follows(self, dependence: LossDependence, part: int, total: int, ranks: int) -> None:
        """Raises if the loss or a metric of the whole batch does not follow from its parts."""
        if dependence.loss.kind is Dependence.MIXED:
            raise UnsupportedError(self._mixed(dependence, ranks))
        if self._promise is False:
            return
        count = self._num_microbatches
        means = [
            path
            for path, output in dependence.buffers.items()
            if output.is_separable and self._is_statistic(path, output)
        ]
        if means and dependence.loss.why == Why.EACH:
            # Normalisation by batch statistics does this, such as BatchNorm: it deserves a warning,
            # while a loss that compares samples is refused.
            warn_of_parts(means[0], count, dependence.loss.place)
            return
        loss = dependence.loss
        if loss.kind is Dependence.COUPLED:
            raise UnsupportedError(
                f"the loss {loss.why}{loss.place}, so that {count} microbatches of {part} samples "
                f"do not give the loss of {total}. {_instead_of(loss.why, part)}; or leave the "
                "batch whole; or pass separable=False to build_train_step: all ranks compute each "
                "microbatch together, and the losses of the microbatches are averaged",
                code="coupled-loss",
            )
        # Functions of sums come last: they would be computed if no other metric prevented it, so
        # another metric is the one to name.
        ends = ("of a total", "totals over", "divides one sum")
        metrics = sorted(
            dependence.metrics.items(), key=lambda item: any(e in item[1].why for e in ends)
        )
        for name, output in metrics:
            if not output.is_separable:
                parts = f"{count} microbatches" + (f" on {ranks} ranks" if ranks > 1 else "")
                raise UnsupportedError(
                    f"the metric {name!r} {output.why}{output.place}, and its mean over "
                    f"{parts} is not its value for the whole batch. Return what adds up: "
                    "Weighted(total, weight) for a quotient, sums such as counts of hits and "
                    "misses, or a function of such numbers; or use one microbatch; or "
                    "build_train_step(separable=True) for the mean over the parts",
                    code="coupled-metric",
                )

    def _is_statistic(self, path: Path, dependence: OutputDependence) -> bool:
        return dependence.why != "" and jnp.issubdtype(
            dict(self._buffers)[path].dtype, jnp.floating
        )

    def _means(
        self,
        batch: Batch,
        sizes: tuple[int, int],
        ranks: int,
        dependence: LossDependence,
        is_given: bool,
    ) -> frozenset[Path]:
        """Returns the statistics that are averaged over microbatches, if parts determine the loss.

        Raises:
            UnsupportedError: for a buffer that microbatches cannot pass on to the next, or that
                each of them would change.
        """
        if self._num_microbatches > 1:
            self._check_buffers(self.program(batch, sizes[1]))
        if self._promise is not None or self._num_microbatches == 1:
            return frozenset()
        self._check_counts(batch, sizes, ranks, dependence)
        if not is_given:
            return frozenset()
        means = {
            path: output
            for path, output in dependence.buffers.items()
            if self._is_statistic(path, output)
        }
        for path, output in means.items():
            if not output.is_separable:
                raise self._changes_in_turn(path, f"{output.why}{output.place}")
        return frozenset(means)

    def _changes_in_turn(self, path: Path, what: str) -> UnsupportedError:
        return UnsupportedError(
            f"the buffer {path!r} {what}. {self._num_microbatches} microbatches would change it in "
            "turn, each starting from the value that the previous one left, whereas one device "
            "changes it once, with the whole batch. Use one microbatch; or change the buffer "
            "between steps, from metrics of the loss; or, if it is to be changed in turn, say so: "
            "build_train_step(separable=False)",
            code="buffer-changed-in-turn",
        )

    def _check_counts(
        self, batch: Batch, sizes: tuple[int, int], ranks: int, dependence: LossDependence
    ) -> None:
        """Raises if an integer buffer depends on the samples, unless it only adds a sum over them.

        Read before the end of the step, it would show the changes of other microbatches.
        """
        program = self.program(batch, sizes[1])
        shapes = self._buffers
        sources = sources_of(program.jaxpr)
        # The positions of the first buffer among the inputs, and among the results.
        before = len(leaves_with_paths(self.model_spec.weights))
        after = len(sources) - len(shapes)
        samples = range(before + len(shapes), len(program.in_avals))
        counts: dict[int, Path] = {}
        for number, (path, leaf) in enumerate(shapes):
            coupled = path in dependence.buffers and dependence.buffers[path].why != ""
            follows = coupled or not sources[after + number].isdisjoint(samples)
            if not follows or jnp.issubdtype(leaf.dtype, jnp.inexact) or is_key(leaf):
                continue
            readers = [at for at, read in enumerate(sources) if before + number in read]
            if readers != [after + number]:
                what = "depends on the samples, and is read by something else"
                if not readers:
                    what = "is overwritten by a value that depends on the samples"
                raise self._changes_in_turn(path, what)
            counts[before + number] = path
        if not counts:
            return
        added = self._traces(ranks).dependence(batch, sizes, counts).buffers
        for number, path in counts.items():
            is_sum = same_scale(added[path].factor, sizes[1] / sizes[0])
            if not (is_sum and is_added_to(program, number, after + number - before)):
                what = f" ({added[path].why}{added[path].place})" if not is_sum else ""
                raise self._changes_in_turn(
                    path, f"depends on the samples, and is not a sum over them{what}"
                )

    def _check_buffers(self, program: ClosedJaxpr) -> None:
        """Raises for a buffer that changes its shape: the next microbatch could not take it."""
        after: list[Any] = program.out_avals[len(program.out_avals) - len(self._buffers) :]
        for (path, old), shape in zip(self._buffers, (x.shape for x in after), strict=True):
            if self._num_microbatches > 1 and shape != old.shape:
                raise UnsupportedError(
                    f"the buffer {path!r} has the shape {old.shape}, but {shape} after a "
                    f"forward pass; each of {self._num_microbatches} microbatches passes it to the "
                    "next, which needs one shape: make it with the shape that it will have",
                    code="buffer-shape",
                )

    def _mixed(self, dependence: LossDependence, ranks: int) -> str:
        """Returns the error for a loss that adds a term once per part, not once per sample."""
        loss = dependence.loss
        guard = "Remove a constant that keeps the weight above 0: a loss of weight 0 is 0. "
        guard = guard if loss.why.startswith(OF_WEIGHT) else ""
        return (
            f"the loss {loss.why} ({loss.line}). Each of {ranks * self._num_microbatches} "
            f"parts of the batch would add that term; one device adds it once. {guard}"
            "build_train_step(separable=True) averages the losses of the parts without this check"
        )

    def _obstacle(self, dependence: LossDependence) -> str:
        if self._promise is not None:
            return "" if self._promise else "separable=False says that the loss couples samples"
        if not self._spec.reduction.sync_buffers:
            # The user asked that each rank keeps its own statistics, so these do not matter.
            others = {
                path: output
                for path, output in dependence.buffers.items()
                if not self._is_statistic(path, output)
            }
            dependence = dataclasses.replace(dependence, buffers=others)
        return dependence.coupled

    def _refusal(self, why: str, asked: list[str], part: int) -> str:
        strategy = self._spec.strategy
        mesh = self._spec.mesh
        ranks = "×".join(f"{axis}={mesh.shape[axis]}" for axis in strategy.batch_axes)
        what = " and ".join(asked)
        instead = "leave the pipeline out, and the step computes it over the whole batch"
        if strategy.pipeline is None:
            instead = f"leave {what} out, and the step computes it over the whole batch"
        return (
            f"{why}, so that the ranks of {ranks} cannot each compute it from their own samples, "
            f"as {what} requires. {_instead_of(why, part)}; or {instead}; or pass "
            "separable=True to build_train_step: each rank computes the loss of its own samples, "
            "and the losses of all parts are averaged"
        )


def wants_ranks(spec: StepSpec) -> tuple[bool, list[str]]:
    """Returns whether gradients are computed per rank, and the options that require it.

    Args:
        spec: the step, whose reduction or pipeline may need ranks.

    Returns:
        Whether gradients are computed per rank, and the options that require it, in words. If
        there are none, global view gives the same result.
    """
    if spec.strategy.pipeline is not None:
        return True, [f"a pipeline with {'×'.join(spec.strategy.batch_axes)}"]
    if not spec.is_local:
        return False, []
    if spec.options.is_elastic:
        return True, ['deterministic="elastic"']
    reduction = spec.reduction
    compute = spec.compute_dtype
    recast = None not in (reduction.dtype, compute) and reduction.dtype != compute
    capacity = reduction.bucket_capacity
    overlaps = reduction.sync is GradSyncStrategy.OVERLAPPED
    words = {
        # `ddp` gives overlapped reductions a size, so the user may have set `sync` alone.
        f"bucket_capacity={capacity}": capacity is not None and not overlaps,
        f"sync={reduction.sync.name}": overlaps,
        "manual=True": reduction.manual,
        "broadcast_buffers=False": not reduction.sync_buffers,
        f"a reduction in {reduction.dtype} with compute in {compute}": recast,
    }
    return True, [word for word, is_asked in words.items() if is_asked]
