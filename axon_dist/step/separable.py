"""Whether the parts of a batch give a loss, each on its own, and what is done where they do not.

Microbatches and ranks see parts of a batch. Where the loss is a mean over samples, or a sum, or
`Weighted`, the parts give that of the whole, and the step has the loss and the gradient of the
whole batch however it is cut. Where the loss couples the samples, as one does that compares each
with every other, the ranks must not compute it each for itself: the step then runs in global view,
where a microbatch is whole, and averages over microbatches; or is refused, where ranks were asked
for that work on their own.
"""

from __future__ import annotations

import dataclasses
import functools
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
from flax import nnx
from jax.extend.core import ClosedJaxpr

from ..collectives import GradSyncStrategy
from ..core.errors import AxonDistError, UnsupportedError
from ..core.tree import is_key, leaves_with_paths, shape_key
from ..core.typing import Batch, LossFn, Path
from ..ir.randomness import is_added_to
from ..ir.walk import moves_with, sources_of
from ..parallel import SUM_SAMPLES, keep_samples_apart
from ..proof.lattice import OF_WEIGHT, OutputUse, SampleUse, Use, Why, same_scale
from ..proof.operation import RESIZED
from .loss_traces import ALONE, LOSS, Finalize, FunctionOfSums, Traced, Traces, in_parts, sum_name
from .model_changes import warn_of_parts

if TYPE_CHECKING:
    from .spec import StepSpec


@dataclasses.dataclass(frozen=True)
class Separation:
    """How the loss of a batch is made of those of its parts.

    Args:
        loss_fn: the user's, weighed so that `sum(totals) / sum(weights)` over all parts is right.
        is_per_rank: whether ranks compute it each from its own samples.
        why: what keeps them from it where they would have; "" otherwise.
        averaged: what makes the loss a mean of those of the microbatches, which that of the whole
            batch is not; "" where it is.
        complete: computes what `loss_fn` gives sums for, of those of the whole batch; None where it
            gives all numbers.
        means: the buffers that the whole batch leaves as the mean of what its microbatches leave.
    """

    loss_fn: LossFn
    is_per_rank: bool
    why: str = ""
    averaged: str = ""
    complete: Finalize | None = None
    means: frozenset[Path] = frozenset()

    def __str__(self) -> str:
        view = "per rank" if self.is_per_rank else "global view"
        text = view + (f", because {self.why}" if self.why else "")
        also = "" if self.averaged == self.why else f", for {self.averaged}"
        return text + (f"; averaged over microbatches{also}" if self.averaged else "")


BEFORE = (
    "What follows from the batch alone, as normalised advantages, counts of classes, masks divided "
    "by their means or a shuffled partner of each sample do, can be computed before the step and "
    "given in the batch; make every sample count for itself"
)
_PAIRS = (
    "What belongs together, as a chosen and a rejected answer do, stands in one sample: give it as "
    "two leaves of the batch, which the loss may put behind each other by jnp.concatenate"
)
_INSTEAD: MappingProxyType[str, str] = MappingProxyType(
    {
        Why.DIFFERS: (
            "Let the program be one for every number of samples: a loop over them as "
            "jax.vmap(function)(samples) or jax.lax.map(function, samples)"
        ),
        Why.PRODUCT: (
            "Take a product of means, as a load-balance loss is, over the tokens of each sample "
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
"""What to write in place of something, by what is said of it."""


def _instead_of(why: str, samples: int) -> str:
    """What to do where parts of so many samples do not give a number of the whole."""
    advice = next((advice for said, advice in _INSTEAD.items() if said in why), BEFORE)
    if samples == 1 and any(said in why for said in (Why.DIFFERS, RESIZED)):
        return f"Two samples in each part help where JAX writes another program for one. {advice}"
    return advice


class Separator:
    """Finds out, once for every shape of batch, how its loss is made of those of its parts.

    Args:
        spec: model, loss, optimizer, strategy, devices and options of the step.
    """

    def __init__(self, spec: StepSpec):
        self._spec, self._parts, self._loss_fn = spec, spec.parts, spec.loss_fn
        self._buffers = leaves_with_paths(spec.parts.arguments[1])
        self._microbatches, self._promise = spec.num_microbatches, spec.options.separable
        self._separations: dict[Any, Separation] = {}
        self._traced: dict[bool, Traces] = {}

    def of(self, batch: Batch) -> Separation:
        """How the loss of such a batch is computed.

        Args:
            batch: a placed batch, leaves of shape [B, ...], or [K, B/K, ...] with K microbatches;
                arrays or shapes.

        Returns:
            How.

        Raises:
            UnsupportedError: when ranks that compute on their own were asked for, and the loss
                couples the samples; naming what does, and where.
        """
        samples, shapes = self._spec.microbatch(batch)
        key = shape_key(shapes)
        if key not in self._separations:
            self._separations[key] = self._separate(shapes, samples)
        return self._separations[key]

    @property
    def found(self) -> tuple[Separation, ...]:
        """What was found out about the batches seen so far."""
        return tuple(self._separations.values())

    def coupling(self, batch: Batch) -> str:
        """What couples the samples, so that other microbatches would give another loss; "" if not.

        Statistics such as BatchNorm's are those of a microbatch, and so couple its samples.

        Args:
            batch: as for `of`, of at least two samples.
        """
        for path, leaf in self._buffers:
            if jnp.issubdtype(leaf.dtype, jnp.floating):
                return f"the statistics {path} are those of a microbatch"
        samples, shapes = self._spec.microbatch(batch)
        sizes = (samples // 2 if samples % 2 == 0 else 1), samples * self._microbatches
        if sizes[0] == sizes[1]:
            # One sample in one microbatch has no parts.
            return ""
        use = self._use(shapes, sizes, 2)
        return self._obstacle(use) if self._in_sums(shapes, sizes, 2, use) is None else ""

    def _separate(self, batch: Batch, samples: int) -> Separation:
        """`samples` is how many a microbatch has."""
        per_rank, asked = wants_ranks(self._spec)
        ranks = self._spec.num_ranks if per_rank else 1
        if self._microbatches * ranks == 1:
            return Separation(self._loss_fn, per_rank)
        total = samples * self._microbatches
        if self._microbatches > 1:
            try:
                self._traces(ranks).of(batch, total)
            except AxonDistError:
                raise
            except Exception:  # Whatever the user's loss does with more samples.
                # A loss of microbatches: of more samples one device could not compute it either.
                total = samples
        if samples // ranks == total:
            self._check_buffers(self._traces(ranks).of(batch, total).program)
            return Separation(self._loss_fn, per_rank)
        why, is_needed = "", bool(asked) or self._microbatches > 1
        sizes = samples // ranks, total
        use, separation = self._related(batch, sizes, ranks, is_needed)
        if use.failure and self._microbatches > 1:
            # Raises here where all ranks together cannot compute it either: the advice is another.
            self._use(batch, (samples, total), 1)
        if separation is None and ranks > 1 and (why := self._obstacle(use)):
            if asked:
                raise UnsupportedError(self._refusal(why, asked, samples // ranks))
            ranks, sizes = 1, (samples, total)
            if samples == total:
                return Separation(self._loss_fn, False, why)
            use, separation = self._related(batch, sizes, 1)
        is_given = separation is not None or use.loss.is_separable
        means = self._means(batch, sizes, ranks, use, is_given) if self._buffers else frozenset()
        if separation is not None:
            is_per_rank = per_rank and not why
            return dataclasses.replace(separation, is_per_rank=is_per_rank, why=why, means=means)
        if not self._promise and not use.is_separable:
            self._check_related(use, samples, total, ranks)
        is_averaged = self._promise is False and self._microbatches > 1
        averaged = use.coupled if is_averaged else ""
        loss_fn = in_parts(self._loss_fn, use)
        return Separation(loss_fn, per_rank and not why, why, averaged, means=means)

    def _related(
        self, batch: Batch, sizes: tuple[int, int], ranks: int, in_sums: bool = True
    ) -> tuple[SampleUse, Separation | None]:
        """What the loss is to the samples; and how it is computed of sums, if it is."""
        use = self._use(batch, sizes, ranks)
        if not in_sums or use.is_separable:
            return use, None
        separation = self._in_sums(batch, sizes, ranks, use)
        metrics = {name: one for name, one in use.metrics.items() if one.is_separable}
        if separation is None and not use.loss.is_separable and metrics != use.metrics:
            alone = dataclasses.replace(use, metrics=metrics)
            if self._in_sums(batch, sizes, ranks, alone) is not None:
                # Reports the metric, which keeps the loss from being computed by sums.
                use = dataclasses.replace(use, loss=OutputUse(Use.MEAN))
        return use, separation

    def _in_sums(
        self, batch: Batch, sizes: tuple[int, int], ranks: int, use: SampleUse
    ) -> Separation | None:
        """How numbers that parts do not give are computed of sums that they do; None if not so."""
        if self._promise is not None or use.failure:
            return None
        names = {name for name, one in use.metrics.items() if not one.is_separable}
        if not use.loss.is_separable:
            # Metrics that are weighed by the loss lose its weight.
            names |= {name for name, one in use.metrics.items() if one.kind is Use.WEIGHTED}
            names.add(LOSS)
        if not names:
            return None
        loss_fn: Any = FunctionOfSums(in_parts(self._loss_fn, use), frozenset(names))
        traces = Traces(self._parts, loss_fn, self._traces(ranks).adapt)
        of_sums, traced = traces.use(batch, sizes), traces.of(batch, sizes[1])
        sums = [sum_name(number) for number in range(len(traced.ending.sums))]
        asked = {n: x for n, x in of_sums.metrics.items() if n in use.metrics or n in sums}
        of_sums = dataclasses.replace(of_sums, metrics=asked)
        numbers = (of_sums.loss, *asked.values())
        is_lost = ranks > 1 and self._obstacle(of_sums) != ""
        if is_lost or not all(one.is_separable for one in numbers):
            return None
        completion = Finalize(traced.ending, loss_fn)
        if any(asked[name].kind is Use.WEIGHTED for name in sums):
            return None
        leads = completion.leads(functools.partial(self._moves, traced)) if LOSS in names else ()
        if leads is None:
            return None
        factors = tuple(asked[name].factor for name in sums)
        loss_fn: Any = dataclasses.replace(loss_fn, leads=leads, factors=factors)
        return Separation(loss_fn, True, complete=dataclasses.replace(completion, loss_fn=loss_fn))

    def _moves(self, traced: Traced, number: int) -> bool:
        """Whether a sum moves with a trained parameter."""
        paths = [path for path, _ in leaves_with_paths(self._parts.weights)]
        output = traced.total_of(sum_name(number))
        moving = moves_with(traced.program, output, len(paths))
        return any(paths[at] not in self._parts.frozen_paths for at in moving)

    def program(self, batch: Batch, samples: int) -> ClosedJaxpr:
        """The program of the loss, traced once for a number of samples.

        Args:
            batch: leaves of shape [B, ...], arrays or shapes; B does not matter.
            samples: how many.

        Returns:
            (params, buffers, batch) -> what the loss function gives, with the weights whole.
        """
        # Asked for where ranks are known by name, which the program over all of them is not.
        return self._alone.of(batch, samples, self._traced.values()).program

    @cached_property
    def _alone(self) -> Traces:
        adapt = self._spec.changes.prepare(None)
        return Traces(self._parts, self._loss_fn, adapt, over_all=False)

    def _traces(self, ranks: int) -> Traces:
        """The programs for so many ranks, each of which computes the loss on its own."""
        # Ranks that are no stages leave experts to the compiler, in global view.
        apart = ranks == 1 or self._spec.strategy.pipeline is not None
        if apart not in self._traced:
            # Where samples are apart, experts promise to keep them so.
            modules = nnx.iter_modules(self._parts.abstract)
            promises = apart and any(hasattr(module, SUM_SAMPLES) for _, module in modules)
            adapt = self._spec.changes.prepare(None, keep_samples_apart if promises else None)
            self._traced[apart] = Traces(self._parts, self._loss_fn, adapt)
        return self._traced[apart]

    def _use(self, batch: Batch, sizes: tuple[int, int], ranks: int) -> SampleUse:
        """What the loss is to the samples, of a part and of the whole as they run."""
        use = self._traces(ranks).use(batch, sizes)
        if use.failure and ranks == 1:
            raise UnsupportedError(self._too_small(sizes[0], use.failure))
        return use

    def _too_small(self, samples: int, error: str) -> str:
        error = " ".join(error.split())[:200].rstrip(".")
        return (
            f"the loss cannot be computed of a microbatch, which has {samples} samples where the "
            f"batch is cut into {self._microbatches}: {error}. Take the number of "
            "samples from the shapes of the batch, and not from a constant; or leave the batch "
            "whole"
        )

    def _check_related(self, use: SampleUse, part: int, total: int, ranks: int) -> None:
        """Raises where the loss or a metric of the whole batch does not follow from the parts'."""
        if use.loss.kind is Use.MIXED:
            raise UnsupportedError(self._mixed(use, ranks))
        if self._promise is False:
            return
        count = self._microbatches
        separable = ((path, one) for path, one in use.buffers.items() if one.is_separable)
        means = [path for path, one in separable if self._is_statistic(path, one)]
        if means and use.loss.why == Why.EACH:
            # What a normalisation by the statistics of a batch does, and no comparison of samples.
            warn_of_parts(means[0], count, use.loss.place)
            return
        if use.loss.kind is Use.COUPLED:
            raise UnsupportedError(
                f"the loss {use.loss.why}{use.loss.place}, so that {count} microbatches of "
                f"{part} samples do not give that of {total}. {_instead_of(use.loss.why, part)}; "
                "or leave the batch whole; or, if what the microbatches find is to be averaged, "
                "say so: build_train_step(separable=False)"
            )
        # What is said first is what keeps the others, which sums would give, from being computed.
        ends = ("of a total", "totals over", "divides one sum")
        metrics = sorted(use.metrics.items(), key=lambda item: any(e in item[1].why for e in ends))
        for name, one in metrics:
            if not one.is_separable:
                parts = f"{count} microbatches" + (f" on {ranks} ranks" if ranks > 1 else "")
                raise UnsupportedError(
                    f"the metric {name!r} {one.why}{one.place}, and the mean of those of "
                    f"{parts} is not that of the whole batch. Return what adds up: Weighted(total, "
                    "weight) for a quotient, sums such as counts of hits and misses, or a function "
                    "of such numbers; or use one microbatch; or build_train_step(separable=True) "
                    "for the mean over the parts"
                )

    def _is_statistic(self, path: Path, use: OutputUse) -> bool:
        return use.why != "" and jnp.issubdtype(dict(self._buffers)[path].dtype, jnp.floating)

    def _means(
        self, batch: Batch, sizes: tuple[int, int], ranks: int, use: SampleUse, is_given: bool
    ) -> frozenset[Path]:
        """The statistics that microbatches average, where they give the loss.

        Raises:
            UnsupportedError: for a buffer that they cannot hand on, or change in turn.
        """
        if self._microbatches > 1:
            self._check_buffers(self.program(batch, sizes[1]))
        if self._promise is not None or self._microbatches == 1:
            return frozenset()
        self._check_counts(batch, sizes, ranks, use)
        if not is_given:
            return frozenset()
        means = {path: one for path, one in use.buffers.items() if self._is_statistic(path, one)}
        for path, one in means.items():
            if not one.is_separable:
                raise self._in_turn(path, f"{one.why}{one.place}")
        return frozenset(means)

    def _in_turn(self, path: Path, what: str) -> UnsupportedError:
        return UnsupportedError(
            f"the buffer {path!r} {what}. {self._microbatches} microbatches would change it in "
            "turn, and each find what those before have left, where one device changes it once, "
            "with the whole batch. Use one microbatch; or change the buffer between steps, from "
            "metrics of the loss; or, if it is to be changed in turn, say so: "
            "build_train_step(separable=False)"
        )

    def _check_counts(
        self, batch: Batch, sizes: tuple[int, int], ranks: int, use: SampleUse
    ) -> None:
        """Raises for a count that follows the samples, unless a sum over them is added to it.

        A read of such a count before the end of the step sees what other microbatches have left.
        """
        program = self.program(batch, sizes[1])
        shapes, sources = self._buffers, sources_of(program.jaxpr)
        before, after = len(leaves_with_paths(self._parts.weights)), len(sources) - len(shapes)
        samples = range(before + len(shapes), len(program.in_avals))
        counts: dict[int, Path] = {}
        for number, (path, leaf) in enumerate(shapes):
            coupled = path in use.buffers and use.buffers[path].why != ""
            follows = coupled or not sources[after + number].isdisjoint(samples)
            if not follows or jnp.issubdtype(leaf.dtype, jnp.inexact) or is_key(leaf):
                continue
            readers = [at for at, read in enumerate(sources) if before + number in read]
            if readers != [after + number]:
                what = "and is read by something else" if readers else "whatever it was before"
                raise self._in_turn(path, f"follows the samples, {what}")
            counts[before + number] = path
        if not counts:
            return
        added = self._traces(ranks).use(batch, sizes, counts).buffers
        for number, path in counts.items():
            is_sum = same_scale(added[path].factor, sizes[1] / sizes[0])
            if not (is_sum and is_added_to(program, number, after + number - before)):
                what = f" ({added[path].why}{added[path].place})" if not is_sum else ""
                raise self._in_turn(path, f"follows the samples, and is no sum over them{what}")

    def _check_buffers(self, program: ClosedJaxpr) -> None:
        """Raises for a buffer that a microbatch cannot hand on to the next as it got it."""
        after: list[Any] = program.out_avals[len(program.out_avals) - len(self._buffers) :]
        for (path, old), shape in zip(self._buffers, (x.shape for x in after), strict=True):
            if self._microbatches > 1 and shape != old.shape:
                raise UnsupportedError(
                    f"the buffer {path!r} has the shape {old.shape}, and {shape} after a "
                    f"forward pass; {self._microbatches} microbatches hand it on from one to the "
                    "next, which needs one shape: make it with the shape that it will have"
                )

    def _mixed(self, use: SampleUse, ranks: int) -> str:
        """A number that is no sum over the samples, and yet grows with them, has no mean."""
        guard = (
            "A constant that keeps it from being 0 can be left out: what weighs nothing is a "
            "loss of 0. "
        )
        guard = guard if use.loss.why.startswith(OF_WEIGHT) else ""
        return (
            f"the loss {use.loss.why} ({use.loss.line}). Each of {ranks * self._microbatches} "
            f"parts of the batch would count that term, as one device would not. {guard}"
            "build_train_step(separable=True) takes the mean over the parts all the same"
        )

    def _obstacle(self, use: SampleUse) -> str:
        if self._promise is not None:
            return "" if self._promise else "separable=False says that the loss couples samples"
        if not self._spec.reduction.sync_buffers:
            # Each rank keeps statistics of its own then, as was asked.
            buffers = use.buffers.items()
            others = {path: one for path, one in buffers if not self._is_statistic(path, one)}
            use = dataclasses.replace(use, buffers=others)
        return use.coupled

    def _refusal(self, why: str, asked: list[str], part: int) -> str:
        strategy, mesh = self._spec.strategy, self._spec.mesh
        ranks = "×".join(f"{axis}={mesh.shape[axis]}" for axis in strategy.batch_axes)
        what = " and ".join(asked)
        instead = "leave the pipeline out, and the step computes it over the whole batch"
        if strategy.pipeline is None:
            instead = f"leave {what} out, and the step computes it over the whole batch"
        return (
            f"{why}, so that {ranks} ranks cannot compute it each from its own samples, as {what} "
            f"asks for. {_instead_of(why, part)}; or {instead}; or, if what ranks find on their "
            "own is to be averaged, say so: build_train_step(separable=True)"
        )


def wants_ranks(spec: StepSpec) -> tuple[bool, list[str]]:
    """Whether gradients are computed per rank, and what asks for it that cannot be had otherwise.

    Args:
        spec: its reduction and pipeline may need ranks.

    Returns:
        Whether, and the words; without words global view would be as good.
    """
    if spec.strategy.pipeline is not None:
        return True, [f"a pipeline beside {'×'.join(spec.strategy.batch_axes)}"]
    if not spec.is_local:
        return False, []
    if spec.options.is_elastic:
        return True, ['deterministic="elastic"']
    reduction, compute = spec.reduction, spec.compute_dtype
    recast = None not in (reduction.dtype, compute) and reduction.dtype != compute
    capacity, overlaps = reduction.bucket_capacity, reduction.sync is GradSyncStrategy.OVERLAPPED
    words = {
        # Overlapped reductions have buckets of a default size.
        f"bucket_capacity={capacity}": capacity is not None and not overlaps,
        f"sync={reduction.sync.name}": overlaps,
        "by_hand=True": reduction.by_hand,
        "broadcast_buffers=False": not reduction.sync_buffers,
        f"a reduction in {reduction.dtype} beside compute in {compute}": recast,
    }
    return True, [word for word, is_asked in words.items() if is_asked]
