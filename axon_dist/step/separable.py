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
import math
from collections.abc import Callable
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.extend.core import ClosedJaxpr
from jax.sharding import Mesh

from ..collectives import GradSyncStrategy
from ..core.errors import AxonDistError, UnsupportedError
from ..core.tree import leaves_with_paths
from ..core.typing import Batch, LossFn
from ..core.weighted import Weighted
from ..jaxpr.rows import output_shapes
from ..jaxpr.sample_use import OF_WEIGHT, OutputUse, SampleUse, Use
from ..parallel import Reduction, Strategy
from .coupled_metrics import check_metrics
from .loss_traces import Traces
from .objective import Prepare
from .parts import ModelParts


@dataclasses.dataclass(frozen=True)
class Separation:
    """How the loss of a batch is made of those of its parts.

    Args:
        loss_fn: the user's, weighed so that `sum(totals) / sum(weights)` over all parts is right.
        is_per_rank: whether ranks compute it each from its own samples.
        why: what keeps them from it where they would have; "" otherwise.
        averaged: what makes the loss a mean of those of the microbatches, which that of the whole
            batch is not; "" where it is.
    """

    loss_fn: LossFn
    is_per_rank: bool
    why: str = ""
    averaged: str = ""

    def __str__(self) -> str:
        view = "per rank" if self.is_per_rank else "global view"
        found = view + (f", because {self.why}" if self.why else "")
        also = "" if self.averaged == self.why else f", for {self.averaged}"
        return found + (f"; averaged over microbatches{also}" if self.averaged else "")


class Separator:
    """Finds out, once for every shape of batch, how its loss is made of those of its parts.

    Args:
        parts: the model's structure, and the shapes of its parameters and buffers.
        loss_fn: the user's loss.
        strategy: the strategy, about the model's own leaves.
        mesh: names and sizes of its axes, over all devices.
        num_microbatches: how many microbatches the batch is cut into.
        separable: True where the user promises that the parts give the loss; False where the
            ranks shall not compute it on their own; None to read it from the program.
        adapt: gives what changes the merged model, such as its dtypes, before it runs; told whether
            experts may be promised to keep samples apart.
    """

    def __init__(
        self,
        parts: ModelParts,
        loss_fn: LossFn,
        strategy: Strategy,
        mesh: Mesh,
        num_microbatches: int,
        separable: bool | None = None,
        adapt: Callable[[bool], Prepare] | None = None,
    ):
        self._parts, self._loss_fn, self._strategy = parts, loss_fn, strategy
        self._microbatches, self._promise = num_microbatches, separable
        self._sizes = {axis: mesh.shape[axis] for axis in strategy.batch_axes}
        self._found: dict[Any, Separation] = {}
        self._adapt = adapt
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
        lead = 0 if self._microbatches == 1 else 1

        def cut(x):
            return jax.ShapeDtypeStruct(x.shape[lead:], x.dtype)

        shapes = jax.tree.map(cut, batch)
        leaves, structure = jax.tree.flatten(shapes)
        key = (structure, *((x.shape, x.dtype) for x in leaves))
        if key not in self._found:
            self._found[key] = self._separate(shapes, leaves[0].shape[0])
        return self._found[key]

    def coupling(self, batch: Batch) -> str:
        """What couples the samples, so that other microbatches would give another loss; "" if not.

        Statistics such as BatchNorm's are those of a microbatch, and so couple its samples.

        Args:
            batch: as for `of`, of at least two samples.
        """
        for path, leaf in leaves_with_paths(self._parts.arguments[1]):
            if jnp.issubdtype(leaf.dtype, jnp.floating):
                return f"the statistics {path} are those of a microbatch"
        lead = 0 if self._microbatches == 1 else 1
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[lead:], x.dtype), batch)
        samples = jax.tree.leaves(shapes)[0].shape[0]
        sizes = (samples // 2 if samples % 2 == 0 else 1), samples * self._microbatches
        # One sample in one microbatch has no parts.
        return "" if sizes[0] == sizes[1] else self._obstacle(self._use(shapes, sizes, 2))

    @property
    def _is_by_ranks(self) -> bool:
        """Whether ranks would compute the loss each from its own samples."""
        return wants_ranks(self._strategy, self._parts, self._microbatches)[0] and self._ranks > 1

    @property
    def _ranks(self) -> int:
        return math.prod(self._sizes.values())

    def _separate(self, batch: Batch, samples: int) -> Separation:
        """`samples` is how many a microbatch has."""
        per_rank, asked = wants_ranks(self._strategy, self._parts, self._microbatches)
        ranks = self._ranks if per_rank else 1
        if self._microbatches * ranks == 1:
            return Separation(self._loss_fn, per_rank)
        whole = samples * self._microbatches
        if not self._is_computable(batch, whole):
            # A loss of microbatches: of more samples one device could not compute it either.
            whole = samples
        if samples // ranks == whole:
            self._check_buffers(self._traces(True).of(batch, whole).program)
            return Separation(self._loss_fn, per_rank)
        use = self._use(batch, (samples // ranks, whole), ranks)
        why = self._obstacle(use) if ranks > 1 else ""
        if use.failure and self._microbatches > 1:
            # What all ranks together cannot compute either has another way out.
            self._use(batch, (samples, whole), 1)
        if why and asked:
            raise UnsupportedError(self._refusal(why, asked))
        if why:
            per_rank, ranks = False, 1
            if samples == whole:
                return Separation(self._loss_fn, per_rank, why)
            use = self._use(batch, (samples, whole), 1)
        self._check_buffers(self.program(batch, whole))
        self._check_related(use, samples, whole)
        self._check_mixed(use, ranks)
        if not self._promise:
            check_metrics(use, self._microbatches, ranks)
        is_averaged = self._promise is None and self._microbatches > 1
        averaged = use.coupled if is_averaged else ""
        return Separation(in_parts(self._loss_fn, use), per_rank, why, averaged)

    def _is_computable(self, batch: Batch, whole: int) -> bool:
        if self._microbatches == 1:
            return True
        try:
            apart = self._strategy.pipeline is not None or not self._is_by_ranks
            self._traces(apart).of(batch, whole)
        except AxonDistError:
            raise
        except Exception:  # Whatever the user's loss does with more samples.
            return False
        return True

    def program(self, batch: Batch, samples: int) -> ClosedJaxpr:
        """The program of the loss, traced once for a number of samples.

        Args:
            batch: leaves of shape [B, ...], arrays or shapes; B does not matter.
            samples: how many.

        Returns:
            (params, buffers, batch) -> what the loss function gives, with the weights whole.
        """
        for traces in self._traced.values():
            if traces.has(batch, samples):
                return traces.of(batch, samples).program
        # Asked for where ranks are known by name, which the program over all of them is not.
        return self._alone.of(batch, samples).program

    @cached_property
    def _alone(self) -> Traces:
        adapt = None if self._adapt is None else self._adapt(False)
        return Traces(self._parts, self._loss_fn, adapt, over_all=False)

    def _traces(self, apart: bool) -> Traces:
        if apart not in self._traced:
            adapt = None if self._adapt is None else self._adapt(apart)
            self._traced[apart] = Traces(self._parts, self._loss_fn, adapt)
        return self._traced[apart]

    def _use(self, batch: Batch, sizes: tuple[int, int], ranks: int) -> SampleUse:
        """What the loss is to the samples, of a part and of the whole as they run."""
        # Ranks that are no stages leave experts to the compiler, in global view.
        apart = ranks == 1 or self._strategy.pipeline is not None
        try:
            use = self._traces(apart).use(batch, sizes)
        except AxonDistError:
            raise
        except Exception as error:  # Whatever the user's loss does with fewer samples.
            if self._microbatches == 1:
                raise
            raise UnsupportedError(self._too_small(sizes[1], str(error))) from error
        if use.failure and ranks == 1:
            raise UnsupportedError(self._too_small(sizes[0], use.failure))
        return use

    def _too_small(self, samples: int, error: str) -> str:
        return (
            f"the loss cannot be computed of a microbatch, which has {samples} samples where the "
            f"batch is cut into {self._microbatches}: {_shortened(error)}. Take the number of "
            "samples from the shapes of the batch, and not from a constant; or leave the batch "
            "whole"
        )

    def _check_related(self, use: SampleUse, part: int, whole: int) -> None:
        """Raises where nothing is known of how a part's loss, or a metric, relates to the whole's.

        Other losses that couple samples are averaged over the microbatches.
        """
        if self._promise is not None:
            return
        for name, found in {"loss": use.loss, **use.metrics}.items():
            # One sample alone is coupled with none: such a loss is 0 of it, or not a number.
            is_lost = found.is_unrelated or (part == 1 and "of a total" not in found.why)
            if found.kind is Use.COUPLED and is_lost:
                what = "the loss" if found is use.loss else f"the metric {name!r}"
                raise UnsupportedError(
                    f"{what} {found.why}{_place(found)}, so that {self._microbatches} microbatches "
                    f"of {part} samples do not give that of {whole}. Make every sample count for "
                    "itself, or leave the batch whole; or, if what the microbatches find is to be "
                    "averaged, say so: build_train_step(separable=False)"
                )

    def _check_buffers(self, program: ClosedJaxpr) -> None:
        """Raises for a buffer that a microbatch cannot hand on to the next as it got it."""
        before = leaves_with_paths(self._parts.arguments[1])
        after = [x.shape for x in output_shapes(program)]
        for (path, old), shape in zip(before, after[len(after) - len(before) :], strict=True):
            if self._microbatches > 1 and shape != old.shape:
                raise UnsupportedError(
                    f"the buffer {path!r} has the shape {old.shape}, and {shape} after a "
                    f"forward pass; {self._microbatches} microbatches hand it on from one to the "
                    "next, which needs one shape: make it with the shape that it will have"
                )

    def _check_mixed(self, use: SampleUse, ranks: int) -> None:
        """A number that is no sum over the samples, and yet grows with them, has no mean."""
        cut = ranks * self._microbatches
        if use.loss.kind is Use.MIXED and cut > 1 and not self._promise:
            guard = (
                "A constant that keeps it from being 0 can be left out: what weighs nothing is a "
                "loss of 0. "
            )
            guard = guard if use.loss.why.startswith(OF_WEIGHT) else ""
            raise UnsupportedError(
                f"the loss {use.loss.why} ({use.loss.where}). Each of {cut} parts of the batch "
                f"would count that term, as one device would not. {guard}"
                "build_train_step(separable=True) takes the mean over the parts all the same"
            )

    def _obstacle(self, use: SampleUse) -> str:
        if self._promise is not None:
            return "" if self._promise else "separable=False says that the loss couples samples"
        reduction = self._strategy.reduction or Reduction()
        if not reduction.sync_buffers:
            # Each rank keeps statistics of its own then, as it was told to.
            shapes = dict(leaves_with_paths(self._parts.arguments[1]))

            def is_own(path):
                return jnp.issubdtype(shapes[path].dtype, jnp.floating)

            kept = {path: found for path, found in use.buffers.items() if not is_own(path)}
            use = dataclasses.replace(use, buffers=kept)
        return use.coupled

    def _refusal(self, why: str, asked: list[str]) -> str:
        ranks = "×".join(f"{axis}={size}" for axis, size in self._sizes.items())
        what = " and ".join(asked)
        instead = "put the pipeline on a mesh without batch axes"
        if self._strategy.pipeline is None:
            instead = f"leave {what} out, and the step computes it over the whole batch"
        return (
            f"{why}, so that {ranks} ranks cannot compute it each from its own samples, as {what} "
            f"asks for. Either {instead}; or make every sample count for itself; or, if what the "
            "ranks find on their own is to be averaged, say so: build_train_step(separable=True)"
        )


def _shortened(error: Any) -> str:
    return " ".join(str(error).split())[:200].rstrip(".")


def _place(found: OutputUse) -> str:
    return f" ({found.where})" if found.where else ""


def wants_ranks(
    strategy: Strategy, parts: ModelParts, num_microbatches: int
) -> tuple[bool, list[str]]:
    """Whether gradients are computed per rank, and what asks for it that cannot be had otherwise.

    Args:
        strategy: whose reduction and pipeline may need ranks.
        parts: the model's structure, and the shapes of its parameters and buffers.
        num_microbatches: how many microbatches a step has.

    Returns:
        Whether, and the words; without words global view would be as good.
    """
    if strategy.pipeline is not None:
        return True, [f"a pipeline beside {'×'.join(strategy.batch_axes)}"]
    compute = parts.dtype if strategy.precision is None else strategy.precision.compute
    reduction = strategy.reduction or Reduction()
    # Without batch axes no rank has gradients of its own to hold back.
    if strategy.resident or not strategy.batch_axes:
        return False, []
    if not reduction.is_local(num_microbatches, compute):
        return False, []
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


def sample_use(
    parts: ModelParts,
    loss_fn: LossFn,
    batch: Batch,
    sizes: tuple[int, int],
    adapt: Prepare | None = None,
    joins: bool = True,
) -> SampleUse:
    """What a loss function makes of the samples of its batch: `Traces.use`.

    With `joins` statistics and experts see all parts of the batch; else each part sees its own.
    """
    return Traces(parts, loss_fn, adapt, over_all=joins).use(batch, sizes)
