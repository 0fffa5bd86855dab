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
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AbstractMesh, AxisType, Mesh, PartitionSpec

from ..collectives import GradSyncStrategy
from ..core.errors import AxonDistError, UnsupportedError
from ..core.tree import leaves_with_paths
from ..core.typing import Batch, LossFn, Path, PyTree
from ..core.weighted import Weighted
from ..jaxpr.sample_use import OF_WEIGHT, OutputUse, SampleUse, Use, use_of
from ..jaxpr.samples import RANKS, follow_samples
from ..jaxpr.walk import moves_with
from ..parallel import Reduction, Strategy
from .buffers import has_statistics, synchronise_statistics
from .coupled_metrics import check_metrics
from .objective import Prepare, evaluate
from .parts import ModelParts


@dataclasses.dataclass(frozen=True)
class Separation:
    """How the loss of a batch is made of those of its parts.

    Args:
        loss_fn: the user's, weighed so that `sum(totals) / sum(weights)` over all parts is right.
        is_per_rank: whether ranks compute it each from its own samples.
        why: what keeps them from it where they would have; "" otherwise.
    """

    loss_fn: LossFn
    is_per_rank: bool
    why: str = ""

    def __str__(self) -> str:
        view = "per rank" if self.is_per_rank else "global view"
        return view + (f", because {self.why}" if self.why else "")


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
        samples = max(jax.tree.leaves(shapes)[0].shape[0], 2)
        return self._obstacle(self._use(shapes, (samples, 2 * samples), 2))

    @property
    def _ranks(self) -> int:
        return math.prod(self._sizes.values())

    def _separate(self, batch: Batch, samples: int) -> Separation:
        """`samples` is how many a microbatch has."""
        per_rank, asked = wants_ranks(self._strategy, self._parts, self._microbatches)
        ranks = self._ranks if per_rank else 1
        if self._microbatches * ranks == 1:
            return Separation(self._loss_fn, per_rank)
        use = self._use(batch, self._sizes_of(samples, ranks), ranks)
        why = self._obstacle(use) if ranks > 1 else ""
        if why and asked:
            raise UnsupportedError(self._refusal(why, asked))
        if why:
            per_rank, ranks = False, 1
            if self._microbatches > 1 and has_statistics(self._parts.abstract):
                use = self._use(batch, self._sizes_of(samples, 1), 1)
        self._check_mixed(use, ranks)
        if not self._promise:
            check_metrics(use, self._microbatches, ranks)
        return Separation(in_parts(self._loss_fn, use, self._microbatches, ranks), per_rank, why)

    def _sizes_of(self, samples: int, ranks: int) -> tuple[int, int]:
        """The numbers of samples of a part and of a whole to look at, `samples` in a microbatch."""
        # Programs for one sample squeeze and broadcast other dims than those for more.
        small = max(samples // ranks, 2)
        return small, small * (ranks if ranks > 1 else self._microbatches)

    def _use(self, batch: Batch, sizes: tuple[int, int], ranks: int) -> SampleUse:
        """What the loss is to the samples, which a microbatch must have enough of."""
        # Ranks that are no stages leave experts to the compiler, in global view.
        apart = ranks == 1 or self._strategy.pipeline is not None
        adapt = None if self._adapt is None else self._adapt(apart)
        try:
            use = sample_use(self._parts, self._loss_fn, batch, sizes, adapt)
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
        said = " ".join(error.split())[:200].rstrip(".")
        return (
            f"the loss cannot be computed of a microbatch, which has {samples} samples where the "
            f"batch is cut into {self._microbatches}: {said}. Take the number of samples from the "
            "shapes of the batch, and not from a constant; or leave the batch whole"
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


def in_parts(loss_fn: LossFn, use: SampleUse, microbatches: int, ranks: int) -> LossFn:
    """A loss of parts whose sums of totals and weights make that of the whole.

    Neither microbatches nor ranks are to be noticed: a sum, and a `Weighted` whose weight is the
    same for any batch, become those of the whole batch.

    Args:
        loss_fn: the user's loss.
        use: what it is to the samples.
        microbatches: into how many the batch of a step is cut.
        ranks: into how many parts each of these is cut.

    Returns:
        The loss function; the same where nothing is to be changed.
    """
    powers = {n: m.power for n, m in use.metrics.items() if m.kind in _SUMMED}
    if use.loss.kind is Use.MEAN:
        powers = {name: power for name, power in powers.items() if power}
    if not use.loss.power and not powers:
        return loss_fn

    parts = ranks * microbatches

    def weighed(value: Any, power: float) -> Weighted:
        if isinstance(value, Weighted):
            return Weighted(value.total, value.weight * parts**-power)
        return Weighted(value, float(parts**-power))

    def run(model: nnx.Module, batch: Batch, **told: Any) -> Any:
        returned = loss_fn(model, batch, **told)
        loss, *rest = returned if isinstance(returned, tuple) else (returned,)
        if use.loss.power:
            loss = weighed(loss, use.loss.power)
        if not rest:
            return loss
        metrics = {n: weighed(m, powers[n]) if n in powers else m for n, m in rest[0].items()}
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
    """What a loss function makes of the samples of its batch, read from its program.

    BatchNorm counts as one that averages its statistics over all parts, and experts as ones that
    count the tokens of all, as the views that split the batch have them do.

    Args:
        parts: the model's structure, and the shapes of its parameters and buffers.
        loss_fn: the user's loss.
        batch: leaves of shape [B, ...], arrays or shapes; B does not matter.
        sizes: the numbers of samples of a part and of a whole, the latter a multiple.
        adapt: changes the merged model first.
        joins: whether statistics and experts see all parts, as said; else they see their own.

    Returns:
        What it is.
    """
    shapes = [(leaf.shape[1:], leaf.dtype) for leaf in jax.tree.leaves(batch)]
    names: list[str] = []
    plain: list[bool] = []

    def trace(count: int) -> Any:
        leaves = [jax.ShapeDtypeStruct((count, *shape), dtype) for shape, dtype in shapes]
        given = jax.tree.unflatten(jax.tree.structure(batch), leaves)
        run, found, is_plain = _forward(parts, loss_fn, adapt, joins)
        jaxpr = jax.make_jaxpr(run)(*parts.arguments, given)
        names[:], plain[:] = found, is_plain
        return jaxpr

    whole = trace(sizes[1])
    _check_weight(whole, [path for path, _ in leaves_with_paths(parts.weights)], parts.frozen_paths)
    try:
        part = trace(sizes[0])
    except AxonDistError:
        raise
    except Exception as error:  # Whatever the user's loss does with fewer samples.
        why = f"cannot be computed of {sizes[0]} samples alone: {str(error)[:200]}"
        return SampleUse(OutputUse(Use.COUPLED, 0.0, why), {}, {}, failure=str(error) or why)
    traces = {sizes[0]: part, sizes[1]: whole}
    values = follow_samples(lambda count: traces[count], sizes, len(shapes))
    paths = [path for path, _ in leaves_with_paths(parts.arguments[1])]
    total, weight, *rest = values
    metrics = {name: (rest[2 * i], rest[2 * i + 1]) for i, name in enumerate(names)}
    buffers = rest[2 * len(names) :]
    return use_of(total, weight, metrics, dict(zip(paths, buffers, strict=True)), plain == [True])


def _check_weight(program: Any, params: list[Path], frozen: frozenset[Path]) -> None:
    """Raises `UnsupportedError` if the second output, the weight, moves with a parameter.

    Weights of parts are added up before anything is divided, so they are held when the loss is
    differentiated. What no gradient goes through, as a count or `stop_gradient`, may read them.

    Args:
        program: the traced loss; its first inputs are the parameters.
        params: their paths.
        frozen: those of them that are not trained.
    """
    moving = moves_with(program, 1, len(params))
    found = [number for number in moving if params[number] not in frozen]
    if found:
        raise UnsupportedError(
            f"the weight of the loss depends on the parameter {params[found[0]]!r}; in "
            "Weighted(total, weight) the weight must follow from the batch alone, such as the "
            "number of its tokens, or go through jax.lax.stop_gradient"
        )


def _forward(
    parts: ModelParts, loss_fn: LossFn, adapt: Prepare | None, joins: bool
) -> tuple[Any, list[str], list[bool]]:
    """(params, buffers, batch) -> total, weight, those of each metric, buffers.

    With it come, once it has run, the names of the metrics, and whether the loss has no weight.
    """
    names: list[str] = []
    plain: list[bool] = []

    def prepare(model: nnx.Module) -> None:
        if adapt is not None:
            adapt(model)
        if joins:
            synchronise_statistics(model, (RANKS,))

    def run(params: PyTree, buffers: PyTree, batch: Batch) -> list[Any]:
        outcome = evaluate(parts, loss_fn, params, buffers, batch, prepare)
        names[:] = sorted(outcome.metrics)
        plain[:] = [isinstance(outcome.loss.weight, (int, float)) and outcome.loss.weight == 1]
        numbers = [outcome.loss, *(outcome.metrics[name] for name in names)]
        pairs = [x if isinstance(x, Weighted) else Weighted(x, 1.0) for x in numbers]
        scalars = [jnp.asarray(x) for pair in pairs for x in (pair.total, pair.weight)]
        return [*scalars, *jax.tree.leaves(outcome.buffers)]

    if not joins or not has_statistics(parts.abstract):
        return run, names, plain
    whole = PartitionSpec()
    mesh = AbstractMesh((2,), (RANKS,), axis_types=(AxisType.Auto,))
    run = jax.shard_map(run, mesh=mesh, in_specs=whole, out_specs=whole, check_vma=False)
    return run, names, plain
