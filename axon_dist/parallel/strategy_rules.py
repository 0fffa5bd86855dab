"""The requirements on a strategy and its mesh, one row each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

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
    code: str,
) -> Requirement[PlacedStrategy]:
    """Makes a row from a requirement and the test for its violation.

    Args:
        name: the requirement, in a few words.
        error: the class of the error.
        sentence: a format string over `strategy`, `mesh`, `replica_axis` (the axis of the
            `OuterLoop`, if there is one) and the facts that `broken` returns.
        broken: returns a true value where the requirement does not hold; a dict adds names to the
            format string.
        code: the code of the error.
    """

    def when(placed: PlacedStrategy) -> Mapping[str, object] | None:
        facts = broken(placed.strategy, placed.world)
        more = facts if isinstance(facts, dict) else {}
        if not facts:
            return None
        strategy = placed.strategy
        names: dict[str, object] = {"strategy": strategy, "mesh": placed.world.spec}
        if strategy.outer_loop is not None:
            names["replica_axis"] = strategy.outer_loop.axis
        return {**names, **more}

    return Requirement.row(name, error, sentence, when, code=code)


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
        code="batch-axis-missing",
    ),
    _rule(
        "the axes of the layers exist",
        MeshError,
        "strategy {strategy.name!r} splits layers over axis {axis!r}, which mesh {mesh} "
        "lacks.{near}",
        lambda strategy, world: _lacking(_split(strategy)["layers"], world),
        code="layer-axis-missing",
    ),
    _rule(
        "the axes of the arrays exist",
        MeshError,
        "strategy {strategy.name!r} splits arrays over axis {axis!r}, which mesh {mesh} "
        "lacks.{near}",
        lambda strategy, world: _lacking(_split(strategy)["arrays"], world),
        code="array-axis-missing",
    ),
    _rule(
        "no array is split over the axis between replicas",
        StrategyConflictError,
        "strategy {strategy.name!r} has replicas over axis {replica_axis!r} that send nothing to "
        "each other for many steps, and splits arrays over it; split them over another axis of the "
        "mesh",
        lambda strategy, _: (
            strategy.outer_loop
            and any(strategy.outer_loop.axis in axes for axes in _split(strategy).values())
        ),
        code="replica-axis-splits-arrays",
    ),
    _rule(
        "replicas are not cut into stages",
        StrategyConflictError,
        "strategy {strategy.name!r} has replicas over axis {replica_axis!r}, and cuts each "
        "into stages over {strategy.pipeline.axis!r}; stages of a pipeline train together on "
        "every step. Split the replicas by fsdp() or tensor_parallel() instead, or leave out "
        "diloco() or local_sgd() over {replica_axis!r}",
        lambda strategy, _: strategy.outer_loop and strategy.pipeline,
        code="replicas-and-pipeline",
    ),
    _rule(
        "replicas stay in device memory",
        StrategyConflictError,
        "replicas over axis {replica_axis!r} keep all their state in device memory, but the "
        "strategy asks for cpu_offload={strategy.offload.value!r}; leave the offload out, or "
        "split each replica over more devices with fsdp()",
        lambda strategy, _: strategy.outer_loop and strategy.offload is not CPUOffload.NONE,
        code="replicas-and-offload",
    ),
    _rule(
        "replicas average statistics over their own ranks",
        StrategyConflictError,
        "replicas over axis {replica_axis!r} each have one set of statistics, averaged over their "
        "ranks, but broadcast_buffers=False gives each rank its own; leave it at True",
        lambda strategy, _: (
            strategy.outer_loop and strategy.reduction and not strategy.reduction.sync_buffers
        ),
        code="replicas-and-statistics",
    ),
    _rule(
        "buckets hold whole gradients",
        StrategyConflictError,
        "strategy {strategy.name!r} reduces each gradient to the ranks that own its shards, but "
        "{what} asks for buckets, which join gradients that all ranks need whole; leave {what} "
        "out, or use ddp()",
        lambda strategy, _: (
            strategy.reduction
            and strategy.reduction.is_grouped
            and strategy.opt_state.split_axes
            and strategy.pipeline is None
            and {"what": strategy.reduction.grouped_by}
        ),
        code="buckets-and-shards",
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
        code="pipeline-axis-missing",
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
        code="schedule-and-mesh",
    ),
    _rule(
        "stages recompute block by block",
        StrategyConflictError,
        "strategy {strategy.name!r} is a pipeline, whose stages recompute block by block, but "
        "asks for checkpoint interval {strategy.remat.interval!r}; leave the interval at 1",
        lambda strategy, _: strategy.pipeline and strategy.remat and strategy.remat.interval != 1,
        code="pipeline-and-interval",
    ),
    _rule(
        "stages use no rings",
        StrategyConflictError,
        "strategy {strategy.name!r} is a pipeline, whose stages do different things at a time, "
        "but sends {what} around the ring of axis {axis!r}, which all must do together; {cure}",
        lambda strategy, _: strategy.pipeline and strategy.layers and _rings(strategy),
        code="pipeline-and-rings",
    ),
    _rule(
        "rings have no fp8 products",
        StrategyConflictError,
        "tensor_parallel sends pieces of activations around the ranks of {axis!r}, but products "
        "in {strategy.precision.products} have one scale for all of them; leave rings out of "
        "tensor_parallel, or use precision bf16",
        lambda strategy, _: (
            strategy.precision and strategy.precision.products and _rings(strategy, positions=False)
        ),
        code="rings-and-fp8",
    ),
    _rule(
        "stages see every sample",
        StrategyConflictError,
        "strategy {strategy.name!r} splits the batch over {strategy.pipeline.axis!r}, along "
        "which its pipeline places its stages, but every stage needs every sample; use another "
        "axis for the batch, such as 'dp' of a mesh pp=2,dp=2, or leave the data parallelism out",
        lambda strategy, _: strategy.pipeline and strategy.pipeline.axis in strategy.batch_axes,
        code="pipeline-axis-splits-batch",
    ),
    _rule(
        "replicas have no split experts",
        StrategyConflictError,
        "the strategy has replicas over axis {replica_axis!r} and experts split over axis "
        "{strategy.ungathered_axes[0]!r}, which do not compose; leave expert_parallel "
        "out and split the parameters by fsdp(), or leave out diloco() or local_sgd()",
        lambda strategy, _: strategy.outer_loop and strategy.ungathered_axes,
        code="replicas-and-experts",
    ),
    _rule(
        "a vocabulary is split over the stages only",
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
        code="split-vocabulary-and-axes",
    ),
    _rule(
        "stages keep the statistics of all ranks",
        StrategyConflictError,
        "a pipeline got broadcast_buffers=False, but a stage keeps the statistics of the samples "
        "of all its ranks; leave broadcast_buffers at True",
        lambda strategy, _: (
            strategy.pipeline and strategy.reduction and not strategy.reduction.sync_buffers
        ),
        code="pipeline-and-statistics",
    ),
    _rule(
        "a pipeline reduces once",
        StrategyConflictError,
        "a pipeline got {what}; it reduces every gradient once, after the last microbatch, and "
        "leaves the grouping to the compiler, so leave it out",
        lambda strategy, _: (
            strategy.pipeline
            and strategy.reduction
            and strategy.reduction.is_grouped
            and {"what": strategy.reduction.grouped_by}
        ),
        code="pipeline-and-buckets",
    ),
)
"""The rules for a `PlacedStrategy`, such as a step; the first broken one raises."""
