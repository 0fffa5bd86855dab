"""The requirements on a strategy and its mesh, one row each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

from ..collectives import GradSyncStrategy
from ..core.errors import AxonDistError, MeshError, Requirement, StrategyConflictError, did_you_mean
from ..mesh import World
from .strategy import Strategy
from .strategy_values import CPUOffload, check_offload


class PlacedStrategy(Protocol):
    """An object with a strategy, single or composed, and the devices on which it is to run."""

    @property
    def strategy(self) -> Strategy:
        """The strategy that is checked."""
        ...

    @property
    def world(self) -> World:
        """The devices, and the mesh that they form."""
        ...


def _rule(
    name: str,
    error: type[AxonDistError],
    sentence: str,
    broken: Callable[[Strategy, World], object],
) -> Requirement[PlacedStrategy]:
    """Makes a row from a requirement and the test for its violation.

    Args:
        name: the requirement, in a few words.
        error: the class of the error.
        sentence: a format string over `strategy`, `mesh` and the facts that `broken` returns.
        broken: returns a true value where the requirement does not hold; a dict adds names to the
            format string.
    """

    def when(placed: PlacedStrategy) -> Mapping[str, object] | None:
        facts = broken(placed.strategy, placed.world)
        more = facts if isinstance(facts, dict) else {}
        return {"strategy": placed.strategy, "mesh": placed.world.spec, **more} if facts else None

    return Requirement.row(name, error, sentence, when)


def _lacking(axes: Iterable[str], world: World) -> Mapping[str, str] | None:
    names = world.mesh.axis_names
    missing = next((axis for axis in axes if axis not in names), None)
    return None if missing is None else {"axis": missing, "near": did_you_mean(missing, names)}


def _split(strategy: Strategy) -> Mapping[str, tuple[str, ...]]:
    """Returns the mesh axes that split layers, and those that split arrays."""
    return {
        "layers": tuple(axis for layers in strategy.layers for axis in layers.axes),
        "arrays": (*strategy.params.split_axes, *strategy.opt_state.split_axes),
    }


def _rings(strategy: Strategy, positions: bool = True) -> Mapping[str, str] | None:
    """Describes the first ring among the layers; `positions` includes rings of positions."""
    rings = [x for x in strategy.layers if x.sends_around and (positions or not x.splits_positions)]
    if not rings:
        return None
    keys = {"what": "keys", "cure": "use context_parallel('ulysses')"}
    activations = {"what": "activations", "cure": "leave rings out of tensor_parallel"}
    return {"axis": rings[0].axes[0], **(keys if rings[0].splits_positions else activations)}


def _not_over_stages(strategy: Strategy, axis: str, world: World) -> Mapping[str, str] | None:
    """Finds an axis that splits neither stages nor the batch, and so is left to the compiler."""
    manual = {axis, *strategy.batch_axes}
    others = (name for name, size in world.mesh.shape.items() if size > 1 and name not in manual)
    return next(({"axis": name} for name in others), None)


STRATEGY_RULES: tuple[Requirement[Any], ...] = (
    _rule(
        "the axes of the batch exist",
        MeshError,
        "strategy {strategy.name!r} splits the batch over axis {axis!r}, which mesh {mesh} "
        "lacks.{near}",
        lambda strategy, world: _lacking(strategy.batch_axes, world),
    ),
    _rule(
        "the axes of the layers exist",
        MeshError,
        "strategy {strategy.name!r} splits layers over axis {axis!r}, which mesh {mesh} "
        "lacks.{near}",
        lambda strategy, world: _lacking(_split(strategy)["layers"], world),
    ),
    _rule(
        "the axes of the arrays exist",
        MeshError,
        "strategy {strategy.name!r} splits arrays over axis {axis!r}, which mesh {mesh} "
        "lacks.{near}",
        lambda strategy, world: _lacking(_split(strategy)["arrays"], world),
    ),
    _rule(
        "nothing is split over the axis between replicas",
        StrategyConflictError,
        "strategy {strategy.name!r} has replicas over axis {strategy.slow.axis!r} that send "
        "nothing to each other for many steps, and splits arrays over it; split them over "
        "another axis of the mesh",
        lambda strategy, _: (
            strategy.slow and any(strategy.slow.axis in axes for axes in _split(strategy).values())
        ),
    ),
    _rule(
        "replicas are not pipelines",
        StrategyConflictError,
        "strategy {strategy.name!r} has replicas over axis {strategy.slow.axis!r}, and cuts each "
        "into stages over {strategy.pipeline.axis!r}; stages of a pipeline train together on "
        "every step. Split the replicas by fsdp() or tensor_parallel() instead, or leave out "
        "diloco() or local_sgd() over {strategy.slow.axis!r}",
        lambda strategy, _: strategy.slow and strategy.pipeline,
    ),
    _rule(
        "replicas stay in device memory",
        StrategyConflictError,
        "replicas over axis {strategy.slow.axis!r} keep all their state in device memory, but the "
        "strategy asks for cpu_offload={strategy.offload.value!r}; leave the offload out, or "
        "split each replica over more devices with fsdp()",
        lambda strategy, _: strategy.slow and strategy.offload is not CPUOffload.NONE,
    ),
    _rule(
        "replicas have statistics of their own already",
        StrategyConflictError,
        "replicas over axis {strategy.slow.axis!r} keep their own statistics, but the "
        "strategy asks for those of each rank: broadcast_buffers=False; leave it at True, which "
        "is about the ranks within a replica",
        lambda strategy, _: (
            strategy.slow and strategy.reduction and not strategy.reduction.sync_buffers
        ),
    ),
    _rule(
        "buckets are of whole gradients",
        StrategyConflictError,
        "strategy {strategy.name!r} reduces each gradient to the ranks that own its shards, but "
        "bucket_capacity={strategy.reduction.bucket_capacity} joins gradients that all ranks "
        "need whole; leave the capacity out, or use ddp()",
        lambda strategy, _: (
            strategy.reduction
            and strategy.reduction.bucket_capacity
            and strategy.opt_state.split_axes
            and strategy.pipeline is None
        ),
    ),
    Requirement(
        "there is host memory to offload to",
        lambda placed: (
            placed.strategy.offload is not CPUOffload.NONE
            and check_offload(placed.strategy.offload, placed.world)
        ),
    ),
    _rule(
        "the axis of the stages exists",
        MeshError,
        "the pipeline is split over axis {axis!r}, which mesh {mesh} lacks.{near}",
        lambda strategy, world: strategy.pipeline and _lacking([strategy.pipeline.axis], world),
    ),
    _rule(
        "the pipeline fits its axis",
        MeshError,
        "schedule {strategy.pipeline.schedule.name!r} is for "
        "{strategy.pipeline.schedule.num_devices} devices, but mesh {mesh} has {size} along "
        "{strategy.pipeline.axis!r}; make them equal",
        lambda strategy, world: (
            strategy.pipeline
            and strategy.pipeline.schedule.num_devices != world.mesh.shape[strategy.pipeline.axis]
            and {"size": world.mesh.shape[strategy.pipeline.axis]}
        ),
    ),
    _rule(
        "stages recompute block by block",
        StrategyConflictError,
        "strategy {strategy.name!r} is a pipeline, whose stages recompute block by block, but "
        "asks for checkpoint interval {strategy.remat.interval!r}; leave the interval at 1",
        lambda strategy, _: strategy.pipeline and strategy.remat and strategy.remat.interval != 1,
    ),
    _rule(
        "stages send nothing around",
        StrategyConflictError,
        "strategy {strategy.name!r} is a pipeline, whose stages do different things at a time, "
        "but sends {what} around the ring of axis {axis!r}, which all must do together; {cure}",
        lambda strategy, _: strategy.pipeline and strategy.layers and _rings(strategy),
    ),
    _rule(
        "what is sent around a ring is multiplied as it is",
        StrategyConflictError,
        "tensor_parallel sends pieces of activations around the ranks of {axis!r}, but products "
        "in {strategy.precision.products} have one scale for all of them; leave rings out of "
        "tensor_parallel, or use precision bf16",
        lambda strategy, _: (
            strategy.precision and strategy.precision.products and _rings(strategy, positions=False)
        ),
    ),
    _rule(
        "stages see every sample",
        StrategyConflictError,
        "strategy {strategy.name!r} splits the batch over {strategy.pipeline.axis!r}, along "
        "which its pipeline places its stages, but every stage needs every sample; use another "
        "axis for the batch, such as 'dp' of a mesh pp=2,dp=2, or leave the data parallelism out",
        lambda strategy, _: strategy.pipeline and strategy.pipeline.axis in strategy.batch_axes,
    ),
    _rule(
        "replicas over slow links hold their experts whole",
        StrategyConflictError,
        "the strategy has replicas over axis {strategy.slow.axis!r}, each with its own "
        "gradients, and parameters along axis {strategy.ungathered_axes[0]!r} whose gradients the "
        "compiler reduces; leave expert_parallel out and split the parameters by fsdp(), or "
        "leave out diloco() or local_sgd()",
        lambda strategy, _: strategy.slow and strategy.ungathered_axes,
    ),
    _rule(
        "a vocabulary is split over stages alone",
        StrategyConflictError,
        "strategy {strategy.name!r} splits the vocabulary over the stages of a pipeline, each "
        "rank of which computes its part alone, and leaves axis {axis!r} to the compiler; leave "
        "split_vocabulary out, because tensor parallelism already splits the head, or compose the "
        "pipeline only with data parallelism",
        lambda strategy, world: (
            strategy.pipeline
            and strategy.pipeline.schedule.splits_vocabulary
            and _not_over_stages(strategy, strategy.pipeline.axis, world)
        ),
    ),
    _rule(
        "stages keep the statistics of all ranks",
        StrategyConflictError,
        "a pipeline got broadcast_buffers=False, but a stage keeps the statistics of the samples "
        "of all its ranks; leave broadcast_buffers at True",
        lambda strategy, _: (
            strategy.pipeline and strategy.reduction and not strategy.reduction.sync_buffers
        ),
    ),
    _rule(
        "a pipeline reduces once",
        StrategyConflictError,
        "a pipeline got bucket_capacity={strategy.reduction.bucket_capacity} and "
        "sync={strategy.reduction.sync.name}; it reduces every gradient once, after the last "
        "microbatch, and leaves the grouping to the compiler, so leave both out",
        lambda strategy, _: (
            strategy.pipeline
            and strategy.reduction
            and (
                strategy.reduction.bucket_capacity is not None
                or strategy.reduction.sync is not GradSyncStrategy.SYNCHRONOUS
            )
        ),
    ),
)
"""The rules for a `PlacedStrategy`, such as a step; the first broken one raises."""
