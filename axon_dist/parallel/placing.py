"""What a strategy and the devices must fulfil, whatever the model: a table."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from ..collectives import GradSyncStrategy
from ..core.errors import MeshError, Requirement, StrategyConflictError, check_all, did_you_mean
from ..mesh import World
from .plans import CPUOffload, check_offload
from .strategy import Strategy


class PlacedStrategy(NamedTuple):
    """A strategy, and the devices that it shall run on.

    Args:
        strategy: one, or composed of several.
        world: the devices, and the mesh they form.
    """

    strategy: Strategy
    world: World


Found = Mapping[str, Any] | None


def _lacking(placed: PlacedStrategy, axes: Iterable[str]) -> Found:
    names = placed.world.mesh.axis_names
    missing = next((axis for axis in axes if axis not in names), None)
    if missing is None:
        return None
    return {
        "name": placed.strategy.name,
        "axis": missing,
        "mesh": placed.world.spec,
        "near": did_you_mean(missing, names),
    }


def _batch_axes(placed: PlacedStrategy) -> Found:
    return _lacking(placed, placed.strategy.batch_axes)


def _layer_axes(placed: PlacedStrategy) -> Found:
    return _lacking(placed, (axis for layers in placed.strategy.layers for axis in layers.axes))


def _policy_axes(placed: PlacedStrategy) -> Found:
    strategy = placed.strategy
    return _lacking(placed, (*strategy.params.split_axes, *strategy.opt_state.split_axes))


def _slow_split(placed: PlacedStrategy) -> Found:
    strategy = placed.strategy
    if strategy.slow is None:
        return None
    within = [axis for layers in strategy.layers for axis in layers.axes]
    axes = (*strategy.params.split_axes, *strategy.opt_state.split_axes, *within)
    if strategy.slow.axis not in axes:
        return None
    return {"name": strategy.name, "axis": strategy.slow.axis}


def _slow_stages(placed: PlacedStrategy) -> Found:
    strategy = placed.strategy
    if strategy.slow is None or strategy.pipeline is None:
        return None
    return {"name": strategy.name, "slow": strategy.slow.axis, "axis": strategy.pipeline.axis}


def _slow_offload(placed: PlacedStrategy) -> Found:
    strategy = placed.strategy
    if strategy.slow is None or strategy.offload is CPUOffload.NONE:
        return None
    return {"axis": strategy.slow.axis, "offload": strategy.offload.value}


def _slow_statistics(placed: PlacedStrategy) -> Found:
    strategy = placed.strategy
    said = strategy.reduction is None or strategy.reduction.sync_buffers
    return None if strategy.slow is None or said else {"axis": strategy.slow.axis}


def _buckets(placed: PlacedStrategy) -> Found:
    strategy = placed.strategy
    capacity = None if strategy.reduction is None else strategy.reduction.bucket_capacity
    if capacity is None or not strategy.opt_state.split_axes or strategy.pipeline is not None:
        return None
    return {"name": strategy.name, "capacity": capacity}


def _pipeline(placed: PlacedStrategy) -> None:
    if placed.strategy.pipeline is not None:
        placed.strategy.pipeline.validate(placed.world)


def _stage_interval(placed: PlacedStrategy) -> Found:
    strategy = placed.strategy
    if strategy.pipeline is None or strategy.remat is None or strategy.remat.interval == 1:
        return None
    return {"name": strategy.name, "interval": repr(strategy.remat.interval)}


def _stage_rings(placed: PlacedStrategy) -> Found:
    strategy = placed.strategy
    rings = [layers for layers in strategy.layers if layers.sends_around]
    if strategy.pipeline is None or not rings:
        return None
    keys = "keys", "use context_parallel('ulysses')"
    activations = "activations", "leave rings out of tensor_parallel"
    what, cure = keys if rings[0].splits_positions else activations
    return {"name": strategy.name, "axis": rings[0].axes[0], "what": what, "cure": cure}


def _ring_products(placed: PlacedStrategy) -> Found:
    strategy = placed.strategy
    products = None if strategy.precision is None else strategy.precision.products
    rings = [x for x in strategy.layers if x.sends_around and not x.splits_positions]
    return {"axis": rings[0].axes[0], "products": products} if rings and products else None


def _stage_samples(placed: PlacedStrategy) -> Found:
    strategy = placed.strategy
    if strategy.pipeline is None or strategy.pipeline.axis not in strategy.batch_axes:
        return None
    return {"name": strategy.name, "axis": strategy.pipeline.axis}


def _slow_residents(placed: PlacedStrategy) -> Found:
    strategy = placed.strategy
    if strategy.slow is None or not strategy.resident:
        return None
    return {"slow": strategy.slow.axis, "axis": strategy.resident[0]}


def _stage_vocabulary(placed: PlacedStrategy) -> Found:
    plan = placed.strategy.pipeline
    if plan is None or not plan.schedule.splits_vocabulary:
        return None
    by_hand = {plan.axis, *placed.strategy.batch_axes}
    sizes = placed.world.mesh.shape.items()
    left = next((axis for axis, size in sizes if size > 1 and axis not in by_hand), None)
    return None if left is None else {"name": placed.strategy.name, "axis": left}


def _stage_statistics(placed: PlacedStrategy) -> Found:
    reduction = placed.strategy.reduction
    if placed.strategy.pipeline is None or reduction is None or reduction.sync_buffers:
        return None
    return {}


def _stage_buckets(placed: PlacedStrategy) -> Found:
    reduction = placed.strategy.reduction
    if placed.strategy.pipeline is None or reduction is None:
        return None
    if reduction.bucket_capacity is None and reduction.sync is GradSyncStrategy.SYNCHRONOUS:
        return None
    return {"capacity": reduction.bucket_capacity, "sync": reduction.sync.name}


STRATEGY_RULES: tuple[Requirement[PlacedStrategy], ...] = (
    Requirement.row(
        "the axes of the batch exist",
        MeshError,
        "strategy {name!r} splits the batch over axis {axis!r}, which mesh {mesh} lacks.{near}",
        _batch_axes,
    ),
    Requirement.row(
        "the axes of the layers exist",
        MeshError,
        "strategy {name!r} splits layers over axis {axis!r}, which mesh {mesh} lacks.{near}",
        _layer_axes,
    ),
    Requirement.row(
        "the axes of the arrays exist",
        MeshError,
        "strategy {name!r} splits arrays over axis {axis!r}, which mesh {mesh} lacks.{near}",
        _policy_axes,
    ),
    Requirement.row(
        "nothing is split over the axis between replicas",
        StrategyConflictError,
        "strategy {name!r} has replicas over axis {axis!r} that send nothing to each other for "
        "many steps, and splits arrays over it; split them over another axis of the mesh",
        _slow_split,
    ),
    Requirement.row(
        "replicas are no pipelines",
        StrategyConflictError,
        "strategy {name!r} has replicas over axis {slow!r}, and cuts each into stages over "
        "{axis!r}; stages of a pipeline train together on every step. Split the replicas by "
        "fsdp() or tensor_parallel() instead, or leave out what makes replicas over {slow!r}",
        _slow_stages,
    ),
    Requirement.row(
        "replicas stay in device memory",
        StrategyConflictError,
        "replicas over axis {axis!r} keep all they have in device memory, and the strategy asks "
        "for cpu_offload={offload!r}; leave the offload out, or split each replica over more "
        "devices with fsdp()",
        _slow_offload,
    ),
    Requirement.row(
        "replicas have statistics of their own already",
        StrategyConflictError,
        "replicas over axis {axis!r} keep statistics of their own, and the strategy asks for "
        "those of each rank: broadcast_buffers=False; leave it at True, which is about the ranks "
        "within a replica",
        _slow_statistics,
    ),
    Requirement.row(
        "buckets are of whole gradients",
        StrategyConflictError,
        "strategy {name!r} reduces each gradient to the ranks that own its shards, and "
        "bucket_capacity={capacity} joins gradients that all ranks need whole; leave the capacity "
        "out, or use ddp()",
        _buckets,
    ),
    Requirement(
        "there is host memory to offload to",
        lambda placed: check_offload(placed.strategy.offload, placed.world),
    ),
    Requirement("the pipeline fits its axis", _pipeline),
    Requirement.row(
        "stages recompute block by block",
        StrategyConflictError,
        "strategy {name!r} is a pipeline, whose stages recompute block by block, and asks for "
        "checkpoint interval {interval}; leave the interval at 1",
        _stage_interval,
    ),
    Requirement.row(
        "stages send nothing around",
        StrategyConflictError,
        "strategy {name!r} is a pipeline, whose stages do different things at a time, and sends "
        "{what} around the ring of axis {axis!r}, which all must do together; {cure}",
        _stage_rings,
    ),
    Requirement.row(
        "what goes round a ring is multiplied as it is",
        StrategyConflictError,
        "tensor_parallel has pieces of activations go round the ranks of {axis!r}, and products in "
        "{products} have one scale for all of them; leave rings out of tensor_parallel, or use "
        "precision bf16",
        _ring_products,
    ),
    Requirement.row(
        "stages see every sample",
        StrategyConflictError,
        "strategy {name!r} splits the batch over {axis!r}, along which the stages of its pipeline "
        "lie, and every stage needs every sample; use another axis for the batch, such as 'dp' of "
        "a mesh pp=2,dp=2, or leave the data parallelism out",
        _stage_samples,
    ),
    Requirement.row(
        "replicas over slow links hold their experts whole",
        StrategyConflictError,
        "the strategy has replicas over axis {slow!r}, each with gradients of its own, and "
        "parameters along axis {axis!r} whose gradients the compiler reduces; leave "
        "expert_parallel out, and split them by fsdp(), or leave out what makes replicas",
        _slow_residents,
    ),
    Requirement.row(
        "a vocabulary is split over stages alone",
        StrategyConflictError,
        "strategy {name!r} splits the vocabulary over the stages of a pipeline, each rank of which "
        "computes its part alone, and leaves axis {axis!r} to the compiler; leave split_vocabulary "
        "out, for tensor parallelism splits the head already, or use data parallelism beside the "
        "pipeline",
        _stage_vocabulary,
    ),
    Requirement.row(
        "stages keep the statistics of all ranks",
        StrategyConflictError,
        "a pipeline got broadcast_buffers=False, and a stage keeps the statistics of the samples "
        "of all its ranks; leave broadcast_buffers at True",
        _stage_statistics,
    ),
    Requirement.row(
        "a pipeline reduces once",
        StrategyConflictError,
        "a pipeline got bucket_capacity={capacity} and sync={sync}; it reduces every gradient "
        "once, after the last microbatch, and leaves the grouping to the compiler, so leave both "
        "out",
        _stage_buckets,
    ),
)
"""The first broken rule speaks."""


def check_placed(strategy: Strategy, world: World) -> None:
    """Checks a strategy against a world.

    Raises:
        AxonDistError: what the first broken rule of `STRATEGY_RULES` says.
    """
    check_all(STRATEGY_RULES, PlacedStrategy(strategy, world))
