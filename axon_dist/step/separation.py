"""Finds out whether the loss of a batch follows from the losses of its parts.

Microbatches and ranks see parts of a batch. If the loss is a mean or a sum over samples, or
`Weighted`, the step computes the loss and the gradient of the whole batch, no matter how the batch
is cut. If the loss couples the samples, for example by comparing each sample with every other,
ranks must not compute it from their own samples. With one microbatch the step then runs in global
view, or is refused if an option needs ranks that work on their own. With several microbatches it is
refused. `separable=True` lifts both refusals: each rank computes the loss of its samples of each
microbatch, and all these losses are averaged. With `separable=False` all ranks compute each
microbatch together, and the losses of the microbatches are averaged.

An output that does not follow from the outputs for the parts may still follow from sums over the
samples, such as `sqrt(mean)`: see `loss_sums.py`. `Traces` in `sample_traces.py` traces the loss
once per number of samples, and `Separator` decides.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Hashable
from functools import cached_property
from types import MappingProxyType
from typing import Any, TypeAlias

import jax.numpy as jnp
from flax import nnx
from jax.extend.core import ClosedJaxpr

from ..collectives import GradSyncStrategy
from ..core.errors import AxonDistError, UnsupportedError, warn
from ..core.renamed import renamed_fields
from ..core.tree import is_key, leaves_with_paths, shape_key, shapes_of
from ..core.typing import Batch, LossFn, Path, PyTree
from ..ir.results import is_added_to
from ..ir.walk import sources_of
from ..parallel import SUM_SAMPLES, mark_experts_per_sample
from ..separability.abstract_values import (
    OF_SUMS,
    OF_WEIGHT,
    Dependence,
    LossDependence,
    OutputDependence,
    Why,
    same_scale,
)
from ..separability.operation import REMADE, RESIZED
from .loss_sums import LOSS, Finalize, FunctionOfSums, rescale_parts, sum_name
from .model_spec import ModelSpec
from .objective import ModelChange
from .sample_traces import ALONE, Traced, Traces
from .sharing import shared_value
from .spec import StepSpec
from .statistics import warn_of_analysed_statistic

MakeChange: TypeAlias = Callable[..., ModelChange]
"""(gather of each weight or None, first change) -> the change to a merged model."""


@renamed_fields(averaged="why_averaged")
@dataclasses.dataclass(frozen=True)
class Separation:
    """How the loss of a batch is computed from its parts.

    Args:
        loss_fn: the user's loss, weighted so that `sum(totals) / sum(weights)` over all parts is
            that of the batch.
        is_per_rank: whether each rank computes the loss from its own samples.
        why: why the ranks compute the loss together, in a step that would otherwise run per rank;
            "" in all other steps.
        why_averaged: why the loss is an average over microbatches that differs from the loss of the
            whole batch; "" if it does not differ.
        finalize: computes the numbers for which `loss_fn` returns only sums, from the sums of the
            whole batch; None if `loss_fn` returns all numbers.
        means: the buffers whose value after the whole batch is the mean of their values after its
            microbatches.
        added: the buffers to which each rank adds a sum over its own samples, so that the ranks
            must add up what they have added.
    """

    loss_fn: LossFn
    is_per_rank: bool
    why: str = ""
    why_averaged: str = ""
    finalize: Finalize | None = None
    means: frozenset[Path] = frozenset()
    added: frozenset[Path] = frozenset()

    def __str__(self) -> str:
        view = "per rank" if self.is_per_rank else "global view"
        text = view + (f", because {self.why}" if self.why else "")
        also = "" if self.why_averaged == self.why else f" because {self.why_averaged}"
        return text + (f"; averaged over microbatches{also}" if self.why_averaged else "")


COMPUTE_BEFORE = (
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
        REMADE: (
            "Make that function once, outside the loss function, without numbers of the batch, or "
            "give it what it reads as an operand"
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
    advice = next((advice for reason, advice in _INSTEAD.items() if reason in why), COMPUTE_BEFORE)
    if samples == 1 and any(reason in why for reason in (Why.DIFFERS, RESIZED)):
        return f"Give each part two samples or more: JAX may trace one sample differently. {advice}"
    return advice


def _averaged(dependence: LossDependence, finalize: Finalize | None) -> str:
    """Returns what is an average over parts, and why; leaves out what sums give."""
    given = frozenset() if finalize is None else finalize.loss_fn.names
    metrics = {name: x for name, x in dependence.metrics.items() if name not in given}
    return dataclasses.replace(dependence, metrics=metrics).why_coupled


def _shortened(error: str) -> str:
    """Returns the start of a message of the user's loss, in one line."""
    return " ".join(error.split())[:200].rstrip(".")


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
        self._trace_key = trace_key
        self.model_spec: ModelSpec = spec.model_spec
        self._for_shared: dict[Hashable, Separator] = {}
        self._loss_fn = spec.loss_fn
        self._buffers = leaves_with_paths(spec.model_spec.arguments[1])
        self._dtypes = {path: leaf.dtype for path, leaf in self._buffers}
        self._num_microbatches = spec.num_microbatches
        # True or False where the user declares it; None where the trace decides.
        self._declared = spec.options.separable
        self._separations: dict[Any, Separation] = {}
        self._traced: dict[bool, Traces] = (
            {} if trace_key is None else shared_value(("traces", trace_key), dict)
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
            trace_key = None if self._trace_key is None else (self._trace_key, key)
            self._for_shared[key] = Separator(spec, self._change_with, trace_key)
        return self._for_shared[key]

    def of(self, batch: Batch) -> Separation:
        """Returns how the loss of batches of this shape is computed.

        Args:
            batch: a placed batch, leaves of shape [B, ...], or [K, B/K, ...] with K microbatches;
                arrays or shapes.

        Returns:
            How the loss is computed; cached by shape.

        Raises:
            UnsupportedError: when the loss couples the samples, and an option needs every rank to
                compute it from its own samples or there are several microbatches; it names the
                operation and its place.
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
        samples, shapes = self._spec.microbatch(batch)
        sizes = (samples // 2 if samples % 2 == 0 else 1), samples * self._num_microbatches
        if sizes[0] == sizes[1]:
            # A single sample in a single microbatch cannot be cut.
            return ""
        try:
            return self._coupling(shapes, sizes)
        except AxonDistError as error:
            if error.code != "weight-of-parameters":
                raise
            # A single part can train with such a weight, but several cannot.
            return str(error)

    def _coupling(self, shapes: Batch, sizes: tuple[int, int]) -> str:
        """Returns why the losses of parts of the first size do not give that of the second."""
        if any(self._is_float(path) for path, _ in self._buffers):
            # Ranks share the statistics of BatchNorm, but each microbatch has its own.
            own = self._with_own_statistics.dependence(shapes, sizes).buffers
            for path, output in own.items():
                if self._is_statistic(path, output):
                    return f"the statistics {path} are those of a microbatch"
        dependence = self._dependence(shapes, sizes, 2)
        if self._from_sums(shapes, sizes, 2, dependence) is not None:
            return ""
        return self._obstacle(dependence)

    def dependence_over(self, batch: Batch, count: int) -> LossDependence | None:
        """Returns how the outputs for `count` such batches relate to those for all their samples.

        Args:
            batch: as for `of`.
            count: the number of batches.

        Returns:
            The dependence; None if the weight of the loss depends on parameters, or, with a
            warning, if the loss cannot be traced for that many samples.
        """
        samples, shapes = self._spec.microbatch(batch)
        each = samples * self._num_microbatches
        try:
            return self._traces(1).dependence(shapes, (each, each * count))
        except AxonDistError as error:
            if error.code != "weight-of-parameters":
                raise
            # A replica that computes its whole loss at once can train with such a weight.
            return None
        except Exception as error:  # The user's loss may raise anything for more samples.
            warn(self._of_replica_alone(each, count, str(error)), code="loss-of-one-size")
            return None

    def _separate(self, batch: Batch, samples: int) -> Separation:
        """Finds out how the loss is computed; `samples` is the number per microbatch."""
        per_rank, asked = rank_requirements(self._spec)
        ranks = self._spec.num_ranks if per_rank else 1
        if self._num_microbatches * ranks == 1:
            return Separation(self._loss_fn, per_rank)
        total = self._samples_of_whole(batch, samples, ranks)
        # True only where `_samples_of_whole` fell back to one microbatch, which one rank computes:
        # nothing is split.
        if samples // ranks == total:
            self._check_buffers(self._traces(ranks).of(batch, total).program)
            return Separation(self._loss_fn, per_rank)
        why = ""
        sizes = samples // ranks, total
        added = self._added_over_ranks(batch, sizes, ranks, asked)
        # With one microbatch, the ranks can compute any loss together, in global view. So finding
        # the sums that it is made of is worth the traces only where the caller asks for parts.
        try_sums = bool(asked) or bool(self._declared) or self._num_microbatches > 1
        dependence, from_sums = self._dependence_or_sums(batch, sizes, ranks, try_sums, added)
        if dependence.failure and self._num_microbatches > 1:
            # Raises if the loss fails on a whole microbatch as well, so that the error does not
            # blame the split over ranks.
            self._dependence(batch, (samples, total), 1)
        if ranks > 1 and from_sums is None:
            why = self._obstacle(dependence)
        if why:
            # The ranks compute the loss together, each microbatch in global view.
            if asked:
                is_of_buffers = dependence.is_of_buffers and self._declared is None
                refusal = self._refusal(why, asked, samples // ranks, is_of_buffers)
                raise UnsupportedError(refusal, code="coupled-ranks")
            if samples == total:
                return Separation(self._loss_fn, False, why)
            ranks = 1
            added = frozenset()
            sizes = (samples, total)
            dependence, from_sums = self._dependence_or_sums(batch, sizes, ranks)
        means = frozenset[Path]()
        if self._buffers:
            is_given = from_sums is not None or dependence.loss.is_separable
            means = self._means(batch, sizes, ranks, dependence, is_given)
        result = self._result(dependence, from_sums, samples, total, ranks)
        return dataclasses.replace(
            result, is_per_rank=per_rank and not why, why=why, means=means, added=added
        )

    def _result(
        self,
        dependence: LossDependence,
        from_sums: Separation | None,
        samples: int,
        total: int,
        ranks: int,
    ) -> Separation:
        """Returns how the outputs follow from parts, except what concerns buffers and ranks.

        Raises:
            UnsupportedError: when the loss or a metric of the whole batch does not follow.
        """
        # With `separable` declared, only metrics are computed from sums, so finding sums does not
        # prove the loss. With `separable=False` a loss whose terms scale differently
        # (`Dependence.MIXED`) is still refused; `separable=True` skips this check.
        is_proven = from_sums is not None and self._declared is None
        if not self._declared and not is_proven and not dependence.is_separable:
            self._check_follows(dependence, samples, total, ranks)
        if from_sums is None:
            from_sums = Separation(rescale_parts(self._loss_fn, dependence), True)
        is_averaged = self._declared is False and self._num_microbatches > 1
        why_averaged = _averaged(dependence, from_sums.finalize) if is_averaged else ""
        return dataclasses.replace(from_sums, why_averaged=why_averaged)

    def _added_over_ranks(
        self, batch: Batch, sizes: tuple[int, int], ranks: int, asked: list[str]
    ) -> frozenset[Path]:
        """Returns the buffers to which each rank adds a sum over its own samples, and nothing else.

        An example is a count of the tokens seen. The step adds up what the ranks added, so these
        buffers do not prevent the ranks from computing the loss. `_problems_of_sums` says which
        buffers are such sums. The result is empty where no option requires ranks, because such a
        step may also run in global view.

        Raises:
            UnsupportedError: for a buffer that `separable=True` would let differ between the ranks.
        """
        if ranks == 1 or not self._buffers or not (asked or self._declared):
            return frozenset()
        dependence = self._dependence(batch, sizes, ranks)
        added = frozenset[Path]()
        if not dependence.failure and not self._spec.options.is_elastic:
            problems = self._problems_of_sums(batch, sizes, ranks, dependence)
            added = frozenset(p for p in problems if not problems[p] and not self._is_own(p))
        if self._declared:
            self._check_buffers_of_ranks(dependence, asked, added)
        return added

    def _check_buffers_of_ranks(
        self, dependence: LossDependence, asked: list[str], added: frozenset[Path]
    ) -> None:
        """Raises for a buffer that `separable=True` would let differ between the ranks.

        Args:
            dependence: how the outputs use the samples of a rank.
            asked: the options that require ranks, in words.
            added: the buffers that the ranks add up.
        """
        has_pipeline = self._spec.strategy.pipeline is not None
        for path, output in dependence.buffers.items():
            if not output.why or path in added or self._is_own(path):
                continue
            # Each of these options alone keeps the ranks from computing a buffer together, so the
            # advice names them all.
            what = " and ".join(["separable=True", *(["the pipeline"] if has_pipeline else asked)])
            own = (
                "; or let each rank keep its own, with sync_buffers=False in the reduction "
                "(broadcast_buffers=False of ddp)"
            )
            raise UnsupportedError(
                f"the buffer {path!r} {output.why}{output.place}, and separable=True says "
                "nothing about buffers: each rank would keep the value of its own samples. "
                f"Leave {what} out; or compute the buffer between steps, from metrics of the loss"
                f"{own if self._is_float(path) and not has_pipeline else ''}",
                code="buffer-of-one-rank",
            )

    def _is_own(self, path: Path) -> bool:
        """Whether each rank keeps its own value of a buffer, as the user asked."""
        return self._is_float(path) and not self._spec.reduction.sync_buffers

    def _is_float(self, path: Path) -> bool:
        return jnp.issubdtype(self._dtypes[path], jnp.inexact)

    def _samples_of_whole(self, batch: Batch, samples: int, ranks: int) -> int:
        """Returns the number of samples of the whole, to which the parts are compared.

        These are all samples of the batch. If the loss fails for more samples than a microbatch
        has, it does so on one device too. A microbatch then counts as the whole, with a warning.
        """
        total = samples * self._num_microbatches
        if self._num_microbatches == 1:
            return total
        try:
            self._traces(ranks).of(batch, total)
        except AxonDistError:
            raise
        except Exception as error:  # The user's loss may raise anything for more samples.
            self._traces(ranks).of(batch, samples)  # Raises if the loss always fails.
            warn(self._of_microbatch_alone(samples, str(error)), code="loss-of-one-size")
            return samples
        return total

    def _dependence_or_sums(
        self,
        batch: Batch,
        sizes: tuple[int, int],
        ranks: int,
        try_sums: bool = True,
        added: frozenset[Path] = frozenset(),
    ) -> tuple[LossDependence, Separation | None]:
        """Returns how the outputs use the samples, and how they follow from sums, if they do.

        The dependence leaves out the buffers in `added`.
        """
        dependence = self._dependence(batch, sizes, ranks)
        buffers = {path: x for path, x in dependence.buffers.items() if path not in added}
        dependence = dataclasses.replace(dependence, buffers=buffers)
        if not try_sums or dependence.is_separable:
            return dependence, None
        separation = self._from_sums(batch, sizes, ranks, dependence)
        metrics = {
            name: output for name, output in dependence.metrics.items() if output.is_separable
        }
        if (
            separation is None
            and self._declared is None
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
        """Returns how to compute outputs that are functions of sums from these sums, or None."""
        if dependence.failure:
            return None
        names = {name for name, output in dependence.metrics.items() if not output.is_separable}
        if self._declared is not None:
            # What the user declares is about the loss; each metric is computed from sums if it can.
            several = self._from_sums_of(names, batch, sizes, ranks, dependence)
            if several is not None or len(names) < 2:
                return several
            alone = (
                name
                for name in names
                if self._from_sums_of({name}, batch, sizes, ranks, dependence) is not None
            )
            return self._from_sums_of(set(alone), batch, sizes, ranks, dependence)
        if not dependence.loss.is_separable:
            # The sums that replace the loss have no weight. Metrics that have the weight of the
            # loss would then have none, so they are replaced as well.
            names |= {
                name
                for name, output in dependence.metrics.items()
                if output.kind is Dependence.WEIGHTED
            }
            names.add(LOSS)
        return self._from_sums_of(names, batch, sizes, ranks, dependence)

    def _from_sums_of(
        self,
        names: set[str],
        batch: Batch,
        sizes: tuple[int, int],
        ranks: int,
        dependence: LossDependence,
    ) -> Separation | None:
        """Returns how to compute the outputs of these names from sums, or None.

        `FunctionOfSums` is the loss with the sums in place of these outputs. It is traced like the
        loss, to find out how the sums and all other outputs follow from parts. If they all do,
        `Finalize` computes the outputs from the sums of the whole batch. If the loss is among the
        outputs, each part must also be able to differentiate a linear combination of its sums.

        Args:
            names: outputs that do not follow from parts: metrics, or `LOSS`.
            batch: leaves of shape [B, ...], arrays or shapes.
            sizes: the number of samples of a part and of the whole.
            ranks: the number of ranks that each compute parts.
            dependence: how the outputs of the loss itself use the samples.
        """
        if not names:
            return None
        loss_fn: Any = FunctionOfSums(rescale_parts(self._loss_fn, dependence), frozenset(names))
        traces = Traces(self.model_spec, loss_fn, self._traces(ranks).change)
        dependence_of_sums = traces.dependence(batch, sizes)
        traced = traces.of(batch, sizes[1])
        sums = [sum_name(number) for number in range(len(traced.ending.sums))]
        is_declared = self._declared is not None
        outputs = {
            n: x
            for n, x in dependence_of_sums.metrics.items()
            if (n in dependence.metrics and not is_declared) or n in sums
        }
        buffers = {
            path: x for path, x in dependence_of_sums.buffers.items() if path in dependence.buffers
        }
        dependence_of_sums = dataclasses.replace(
            dependence_of_sums, metrics=outputs, buffers=buffers
        )
        if any(name not in outputs for name in sums):
            # The sums of a part are not those of the whole, so there is nothing to add up.
            return None
        needs_global_view = ranks > 1 and self._obstacle(dependence_of_sums) != ""
        loss = () if is_declared else (dependence_of_sums.loss,)
        is_separable = all(output.is_separable for output in (*loss, *outputs.values()))
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
        with_gradient = traced.inputs_with_gradient(output, len(paths))
        return any(paths[at] not in self.model_spec.frozen_paths for at in with_gradient)

    def program(self, batch: Batch, samples: int) -> ClosedJaxpr:
        """Returns the program of the loss, traced once for a number of samples.

        Args:
            batch: leaves of shape [B, ...], arrays or shapes; B does not matter.
            samples: the number of samples to trace for.

        Returns:
            (params, buffers, batch) -> the results of the loss function. The parameters have their
            full shapes, and nothing gathers them.
        """
        # Callers do not run the program. They read which weights, buffers, keys and draws it uses,
        # and which of them it changes, so any trace will do. One that `of` has made is used again,
        # though its statistics may be over all parts. A new one sums over no mesh axis, so it may
        # also be made inside `shard_map`, where some callers are.
        return self._with_own_statistics.of(batch, samples, self._traced.values()).program

    @cached_property
    def _with_own_statistics(self) -> Traces:
        change = self._change_with(None)
        return Traces(self.model_spec, self._loss_fn, change, over_all=False)

    def _traces(self, ranks: int) -> Traces:
        """Returns the traces of the loss; experts may be marked as per-sample functions."""
        # Experts sort tokens, so their trace seems to mix samples. Outside of pipelines a step with
        # ranks therefore goes to global view, which sorts all samples together. A pipeline has no
        # global view, and each of its ranks sorts its own samples. So experts are marked as
        # functions of one sample in the traces of pipelines and of global view.
        marks_experts = ranks == 1 or self._spec.strategy.pipeline is not None
        if marks_experts not in self._traced:
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
        return (
            f"the loss cannot be computed for a microbatch, which has {samples} samples when the "
            f"batch is cut into {self._num_microbatches}: {_shortened(error)}. Take the number of "
            "samples from the shapes of the batch, and not from a constant; or leave the batch "
            "whole"
        )

    def _of_microbatch_alone(self, samples: int, error: str) -> str:
        total = samples * self._num_microbatches
        return (
            f"the loss cannot be computed for the {total} samples of a batch, only for the "
            f"{samples} of a microbatch: {_shortened(error)}. So the loss of a batch is the mean "
            "of those of its microbatches, even if it is a sum over samples; take the number of "
            "samples from the shapes of the batch, and not from a constant"
        )

    def _of_replica_alone(self, samples: int, count: int, error: str) -> str:
        return (
            f"the loss cannot be computed for the {samples * count} samples of a batch, only for "
            f"the {samples} of each of {count} replicas: {_shortened(error)}. So the metrics of a "
            "batch are means of those of the replicas, even if they are sums over samples; take "
            "the number of samples from the shapes of the batch, and not from a constant"
        )

    def _check_follows(self, dependence: LossDependence, part: int, total: int, ranks: int) -> None:
        """Raises if the loss or a metric of the whole batch does not follow from its parts."""
        if dependence.loss.kind is Dependence.MIXED:
            raise UnsupportedError(self._mixed(dependence, ranks))
        if self._declared is False:
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
            warn_of_analysed_statistic(
                self.model_spec.abstract, means[0], count, dependence.loss.place
            )
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
        # Metrics that are not functions of sums come first: one of them may be the reason why the
        # others were not computed from their sums.
        metrics = sorted(
            dependence.metrics.items(),
            key=lambda item: any(why in item[1].why for why in OF_SUMS),
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
        return dependence.why != "" and jnp.issubdtype(self._dtypes[path], jnp.floating)

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
            UnsupportedError: for a buffer that changes its shape in a forward pass, or that is
                neither a running sum nor a mean over the microbatches.
        """
        if self._num_microbatches > 1:
            self._check_buffers(self.program(batch, sizes[1]))
        if self._declared is not None or self._num_microbatches == 1:
            return frozenset()
        problems = self._problems_of_sums(batch, sizes, ranks, dependence)
        for path, problem in problems.items():
            if problem and not self._is_float(path):
                raise self._changes_in_turn(path, problem, ranks)
        if not is_given:
            return frozenset()
        means = {
            path: output
            for path, output in dependence.buffers.items()
            if self._is_statistic(path, output) and problems.get(path) != ""
        }
        for path, output in means.items():
            if not output.is_separable:
                raise self._changes_in_turn(path, f"{output.why}{output.place}", ranks)
        return frozenset(means)

    def _changes_in_turn(self, path: Path, what: str, ranks: int) -> UnsupportedError:
        # Ranks that must each keep their own statistics cannot compute a microbatch together.
        declared, of = ("True", " and ranks") if ranks > 1 else ("False", "")
        return UnsupportedError(
            f"the buffer {path!r} {what}. {self._num_microbatches} microbatches would change it in "
            "turn, each starting from the value that the previous one left, whereas one device "
            "changes it once, with the whole batch. Use one microbatch; or change the buffer "
            "between steps, from metrics of the loss; or, if it is to be changed in turn, say so: "
            f"build_train_step(separable={declared}), which also averages the losses of the "
            f"microbatches{of}",
            code="buffer-changed-in-turn",
        )

    def _problems_of_sums(
        self, batch: Batch, sizes: tuple[int, int], ranks: int, dependence: LossDependence
    ) -> dict[Path, str]:
        """Says of each buffer that depends on the samples why it is more than a running sum.

        A running sum is a buffer to which the loss only adds a sum over its samples, and whose old
        value nothing else reads. So microbatches may change it in turn, and ranks may each add
        their own part. Another reader would see the changes of earlier microbatches.

        The program shows which values read a buffer. Whether the buffer only adds a sum is decided
        by a second analysis, in which the old values of these buffers are 0.

        Returns:
            The reason by path; "" for a running sum. Floating-point buffers whose new value is the
            same for every part are left out, such as constants and statistics over all parts.
        """
        program = self.program(batch, sizes[1])
        shapes = self._buffers
        sources = sources_of(program.jaxpr)
        # The positions of the first buffer among the inputs, and among the results.
        before = len(leaves_with_paths(self.model_spec.weights))
        after = len(sources) - len(shapes)
        samples = range(before + len(shapes), len(program.in_avals))
        problems: dict[Path, str] = {}
        sums: dict[int, tuple[Path, str]] = {}
        for number, (path, leaf) in enumerate(shapes):
            coupled = path in dependence.buffers and dependence.buffers[path].why != ""
            reads = not sources[after + number].isdisjoint(samples)
            # Statistics over the samples of all parts, such as BatchNorm's, read samples too.
            if is_key(leaf) or not (coupled or (reads and not self._is_float(path))):
                continue
            on = "the samples" if reads else "the number of samples"
            readers = [at for at, read in enumerate(sources) if before + number in read]
            if readers == [after + number]:
                sums[before + number] = path, on
            elif readers:
                problems[path] = f"depends on {on}, and is read by something else"
            else:
                problems[path] = f"is overwritten by a value that depends on {on}"
        if not sums:
            return problems
        # With the sums taken as 0, these are what the microbatch adds to them.
        added = self._traces(ranks).dependence(batch, sizes, sums).buffers
        for number, (path, on) in sums.items():
            is_sum = path in added and same_scale(added[path].factor, sizes[1] / sizes[0])
            is_added = is_added_to(program, number, after + number - before)
            why = "" if is_sum or path not in added else f" ({added[path].why}{added[path].place})"
            problem = f"depends on {on}, and is not a sum over them{why}"
            problems[path] = "" if is_sum and is_added else problem
        return problems

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
        if self._declared is not None:
            return "" if self._declared else "separable=False says that the loss couples samples"
        if not self._spec.reduction.sync_buffers:
            # The user asked that each rank keeps its own statistics, so these do not matter.
            others = {
                path: output
                for path, output in dependence.buffers.items()
                if not self._is_statistic(path, output)
            }
            dependence = dataclasses.replace(dependence, buffers=others)
        return dependence.why_coupled

    def _refusal(self, why: str, asked: list[str], part: int, is_of_buffers: bool) -> str:
        strategy = self._spec.strategy
        mesh = self._spec.mesh
        ranks = "×".join(f"{axis}={mesh.shape[axis]}" for axis in strategy.batch_axes)
        what = " and ".join(asked)
        left_out, also = "the pipeline", ""
        if strategy.pipeline is None:
            # Several microbatches need a loss that follows from its parts, in global view too.
            left_out, also = what, " and use one microbatch" * (self._num_microbatches > 1)
        instead = f"leave {left_out} out{also}, and the step computes it over the whole batch"
        start = (
            f"{why}, so that the ranks of {ranks} cannot each compute it from their own samples, "
            f"as {what} requires. "
        )
        if is_of_buffers:
            # What `separable=True` says is about the loss.
            add = (
                "let it only add a sum over the samples to its old value, which nothing else reads,"
                " such as a total and a count whose quotient is wanted; or "
            )
            add = "" if self._spec.options.is_elastic else add
            return (
                f"{start}Change the buffer between steps, from metrics of the loss; or {add}"
                f"{instead}"
            )
        return (
            f"{start}{_instead_of(why, part)}; or {instead}; or pass "
            "separable=True to build_train_step: each rank computes the loss of its own samples, "
            "and the losses of all parts are averaged"
        )


def rank_requirements(spec: StepSpec) -> tuple[bool, list[str]]:
    """Returns whether gradients are to be computed per rank, and the options that require it.

    Args:
        spec: the step, whose reduction or pipeline may need ranks.

    Returns:
        Whether the step computes gradients per rank if the loss permits it, and the options that
        require it, in words. If there are none, global view gives the same result.
    """
    if spec.strategy.pipeline is not None:
        return True, [f"a pipeline with {'×'.join(spec.strategy.batch_axes)}"]
    if not spec.wants_local_view:
        return False, []
    if spec.options.is_elastic:
        return True, ['deterministic="elastic"']
    reduction = spec.reduction
    compute = spec.compute_dtype
    recast = None not in (reduction.dtype, compute) and reduction.dtype != compute
    capacity = reduction.bucket_capacity
    overlaps = reduction.sync is GradSyncStrategy.OVERLAPPED
    words = {
        # Overlapped reductions have a size by default, so the user may have set `sync` alone.
        f"bucket_capacity={capacity}": capacity is not None and not overlaps,
        f"sync={reduction.sync.name}": overlaps,
        "manual=True": reduction.manual,
        "broadcast_buffers=False": not reduction.sync_buffers,
        f"a reduction in {reduction.dtype} with compute in {compute}": recast,
    }
    return True, [word for word, is_asked in words.items() if is_asked]
