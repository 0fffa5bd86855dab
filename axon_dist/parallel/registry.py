"""Strategies by name, for configs and command lines, and what they must fulfil: a row each."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

import optax
from flax import nnx

from ..collectives import GradSyncStrategy
from ..core.errors import (
    AxonDistError,
    ConfigError,
    MeshError,
    Requirement,
    StrategyConflictError,
    did_you_mean,
)
from ..mesh import World
from ..nn import ParallelMode
from .context import ContextMode, context_parallel
from .data import ShardingStrategy, ZeROStage, ddp, diloco, fsdp, local_sgd, zero
from .expert import ExpertForm, expert_parallel
from .pipelining import pipelined
from .plan import PRESETS
from .plans import CPUOffload, check_offload
from .strategy import Strategy
from .suggest import suggest_plan
from .tensor import tensor_parallel

DATA_AXES = ("dp", "fsdp")
"""The axes that split samples."""

POSITION_AXIS = "cp"
"""The axis that splits positions."""

AUTO = "auto"
"""The plan that is read off the model."""

MakeStrategy: TypeAlias = Callable[..., Strategy]
"""(model, world, **options) -> a strategy over the data axes of the world's mesh."""


def data_axes(world: World) -> tuple[str, ...]:
    """The axes of a mesh that split the batch, outer to inner.

    Raises:
        MeshError: when the mesh has none.
    """
    return _axes_among(world, DATA_AXES)


def array_axes(world: World) -> tuple[str, ...]:
    """The axes of a mesh over which arrays are split: those of samples, and of positions.

    The stages of a pipeline split theirs over the axes of samples alone.

    Raises:
        MeshError: when the mesh has none.
    """
    positions = () if "pp" in world.mesh.axis_names else (POSITION_AXIS,)
    return _axes_among(world, (*DATA_AXES, *positions))


def _axes_among(world: World, names: tuple[str, ...]) -> tuple[str, ...]:
    axes = tuple(axis for axis in world.mesh.axis_names if axis in names)
    if not axes:
        raise MeshError(
            f"mesh {world.spec} has no axis to split the batch over; add dp or fsdp, of size 1 "
            "if need be"
        )
    return axes


def _row(
    make: Callable[..., Strategy],
    axes: Callable[[World], tuple[str, ...]] = data_axes,
    **fixed: Any,
) -> MakeStrategy:
    """A row for `make` over some axes; its signature shows what is left for a config to say."""

    def strategy(model: nnx.Module, world: World, **options: Any) -> Strategy:
        return make(axes=axes(world), **fixed, **options)

    left = [
        parameter
        for name, parameter in inspect.signature(make).parameters.items()
        if name not in {"axes", "name", "shard_axes", *fixed}
    ]
    strategy.__wrapped__ = make  # type: ignore[attr-defined]
    strategy.__signature__ = inspect.Signature(left)  # type: ignore[attr-defined]
    return strategy


def _tensor(
    model: nnx.Module,
    world: World,
    plan: str | Mapping[str, ParallelMode] = AUTO,
    sequence: bool = False,
    rings: bool = False,
) -> Strategy:
    """Tensor parallelism over the axis `tp`.

    Args:
        model: what a plan is read off.
        world: the devices, and the mesh they form.
        plan: `auto` reads it off the model; or the name of a preset; or a mode, `column`, `row` or
            `sequence`, for each pattern of paths, such as `{up$: column, down$: row}`.
        sequence: norms, dropout and residuals hold 1/tp of the positions.
        rings: with `sequence`, pieces of the positions go round the ranks beside the products.
    """
    if isinstance(plan, str) and plan not in (AUTO, *PRESETS):
        raise ConfigError(
            f"no plan is called {plan!r}.{did_you_mean(plan, (AUTO, *PRESETS))} Or give patterns, "
            "such as {up$: column, down$: row}"
        )
    chosen = suggest_plan(model) if plan == AUTO else plan
    return tensor_parallel(chosen, sequence=sequence, rings=rings)


def _pipeline(
    model: nnx.Module,
    world: World,
    num_microbatches: int,
    schedule: str = "eager_1f1b",
    chunks: int | None = None,
    boundaries: tuple[int, ...] | None = None,
    backward: str = "recompute",
    split_vocabulary: bool = False,
) -> Strategy:
    """Pipeline parallelism over the axis `pp`, by a schedule's name or CSV file.

    Args:
        model: is cut as the world says.
        world: the devices, and the mesh they form.
        num_microbatches: the parts that a batch is cut into.
        schedule: a name that `axon schedule` draws, or the path of a CSV file with a table.
        chunks: stages per rank; None takes what is usual for the schedule.
        boundaries: the first block of each stage, and the number of blocks; None cuts evenly.
        backward: `recompute` keeps a stage's input and recomputes the stage, `residuals` keeps all
            that the backward pass needs, and a policy of `remat` what that says of each block.
        split_vocabulary: every rank computes its part of the vocabulary of embedding, head and
            loss, which else the end stages compute; for a loss of `linear_cross_entropy`.
    """
    if "pp" not in world.mesh.shape:
        raise MeshError(f"mesh {world.spec} has no axis for a pipeline; add pp")
    size = world.mesh.shape["pp"]
    return pipelined(
        size,
        num_microbatches,
        schedule,
        chunks=chunks,
        boundaries=boundaries,
        backward=backward,
        split_vocabulary=split_vocabulary,
    )


def _context(model: nnx.Module, world: World, mode: ContextMode = ContextMode.RING) -> Strategy:
    """Context parallelism over the axis `cp`.

    Args:
        model: whose attention is replaced.
        world: the devices, and the mesh they form.
        mode: `ring` sends keys and values round; `ulysses` exchanges heads for positions, and
            needs heads that divide by the ranks.
    """
    return context_parallel(mode)


def _expert(
    model: nnx.Module,
    world: World,
    form: ExpertForm = ExpertForm.AUTO,
    capacity: float | None = None,
) -> Strategy:
    """Expert parallelism over the axis `ep`, which splits the batch, too.

    Args:
        model: whose experts are split, in arrays that stack them or in lists.
        world: the devices, and the mesh they form.
        form: how tokens travel: `ring` brings those of all ranks to each and sums the results back,
            `all_to_all` sends each expert its slots, `auto` takes the one that moves fewer bytes.
        capacity: how many times its even share of the tokens an expert takes at most. **What
            exceeds it is left out**, and the metric `dropped` counts it; null leaves none out.
    """
    return expert_parallel(form, capacity, experts=suggest_plan(model).experts)


def _diloco(
    model: nnx.Module,
    world: World,
    every: int,
    lr: float = 0.7,
    momentum: float = 0.9,
    nesterov: bool = True,
    compress: str | None = None,
    fragments: int = 1,
    axis: str = "nodes",
) -> Strategy:
    """DiLoCo over a slow axis: replicas train on their own, and an outer SGD joins them.

    Args:
        model: of which each replica has a copy.
        world: the devices, and the mesh they form.
        every: H, the steps that replicas take on their own before they synchronize.
        lr: the learning rate of the outer SGD.
        momentum: its momentum.
        nesterov: whether that is Nesterov's.
        compress: `int8`, `fp8` or `top_k`, with error feedback; null sends float32.
        fragments: parts of the parameters that synchronize at steps of their own.
        axis: the mesh axis between the replicas.
    """
    outer = optax.sgd(lr, momentum=momentum, nesterov=nesterov)
    return diloco(axis, every=every, outer=outer, compress=compress, fragments=fragments)


def _local_sgd(
    model: nnx.Module,
    world: World,
    every: int,
    compress: str | None = None,
    fragments: int = 1,
    axis: str = "nodes",
) -> Strategy:
    """Local SGD over a slow axis: replicas train on their own, and average their parameters.

    Args:
        model: of which each replica has a copy.
        world: the devices, and the mesh they form.
        every: H, the steps that replicas take on their own before they synchronize.
        compress: `int8`, `fp8` or `top_k`, with error feedback; null sends float32.
        fragments: parts of the parameters that synchronize at steps of their own.
        axis: the mesh axis between the replicas.
    """
    return local_sgd(axis, every=every, compress=compress, fragments=fragments)


_SPLIT = (ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.FULL_SHARD)

STRATEGIES: MappingProxyType[str, MakeStrategy] = MappingProxyType(
    {
        "ddp": _row(ddp),
        "zero1": _row(zero, array_axes, stage=ZeROStage.STAGE1),
        "zero2": _row(zero, array_axes, stage=ZeROStage.STAGE2),
        "zero3": _row(zero, array_axes, stage=ZeROStage.STAGE3),
        "tensor": _tensor,
        "context": _context,
        "expert": _expert,
        "pipeline": _pipeline,
        "diloco": _diloco,
        "local_sgd": _local_sgd,
        **{
            choice.value: _row(
                fsdp, array_axes if choice in _SPLIT else data_axes, sharding_strategy=choice
            )
            for choice in ShardingStrategy
        },
    }
)
"""`STRATEGIES[name](model_or_factory, world, **options)` makes the strategy of that name.

The signature of a row is what a config may say under the name: its annotations are the types of the
options.
"""


class PlacedStrategy(NamedTuple):
    """A strategy, and the devices that it shall run on.

    Args:
        strategy: one, or composed of several.
        world: the devices, and the mesh they form.
    """

    strategy: Strategy
    world: World


def _rule(
    name: str,
    error: type[AxonDistError],
    sentence: str,
    broken: Callable[[Strategy, World], object],
) -> Requirement[PlacedStrategy]:
    """A row: what must hold, and when it is broken.

    Args:
        name: what must hold, in a few words.
        error: the kind of error.
        sentence: of the fields of `strategy`, of `mesh`, and of what `broken` finds.
        broken: gives something true where it does not hold; a dict has more names of the sentence.
    """

    def when(placed: PlacedStrategy) -> Mapping[str, Any] | None:
        found = broken(*placed)
        more = found if isinstance(found, dict) else {}
        return {"strategy": placed.strategy, "mesh": placed.world.spec, **more} if found else None

    return Requirement.row(name, error, sentence, when)


def _lacking(axes: Iterable[str], world: World) -> Mapping[str, str] | None:
    names = world.mesh.axis_names
    missing = next((axis for axis in axes if axis not in names), None)
    return None if missing is None else {"axis": missing, "near": did_you_mean(missing, names)}


def _within(strategy: Strategy) -> tuple[str, ...]:
    """The axes that split layers."""
    return tuple(axis for layers in strategy.layers for axis in layers.axes)


def _arrays(strategy: Strategy) -> tuple[str, ...]:
    """The axes that split arrays."""
    return (*strategy.params.split_axes, *strategy.opt_state.split_axes)


def _rings(strategy: Strategy, positions: bool = True) -> Mapping[str, str] | None:
    """The first of the layers that send pieces around, those of positions among them or not."""
    rings = [x for x in strategy.layers if x.sends_around and positions >= x.splits_positions]
    if not rings:
        return None
    keys = {"what": "keys", "cure": "use context_parallel('ulysses')"}
    activations = {"what": "activations", "cure": "leave rings out of tensor_parallel"}
    return {"axis": rings[0].axes[0], **(keys if rings[0].splits_positions else activations)}


def _not_over_stages(strategy: Strategy, world: World) -> Mapping[str, str] | None:
    """An axis that is left to the compiler beside a vocabulary that stages split."""
    plan = strategy.pipeline
    if plan is None or not plan.schedule.splits_vocabulary:
        return None
    by_hand = {plan.axis, *strategy.batch_axes}
    left = (axis for axis, size in world.mesh.shape.items() if size > 1 and axis not in by_hand)
    return next(({"axis": axis} for axis in left), None)


STRATEGY_RULES: tuple[Requirement[PlacedStrategy], ...] = (
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
        lambda strategy, world: _lacking(_within(strategy), world),
    ),
    _rule(
        "the axes of the arrays exist",
        MeshError,
        "strategy {strategy.name!r} splits arrays over axis {axis!r}, which mesh {mesh} "
        "lacks.{near}",
        lambda strategy, world: _lacking(_arrays(strategy), world),
    ),
    _rule(
        "nothing is split over the axis between replicas",
        StrategyConflictError,
        "strategy {strategy.name!r} has replicas over axis {strategy.slow.axis!r} that send "
        "nothing to each other for many steps, and splits arrays over it; split them over "
        "another axis of the mesh",
        lambda strategy, _: (
            strategy.slow and strategy.slow.axis in _arrays(strategy) + _within(strategy)
        ),
    ),
    _rule(
        "replicas are no pipelines",
        StrategyConflictError,
        "strategy {strategy.name!r} has replicas over axis {strategy.slow.axis!r}, and cuts each "
        "into stages over {strategy.pipeline.axis!r}; stages of a pipeline train together on "
        "every step. Split the replicas by fsdp() or tensor_parallel() instead, or leave out "
        "what makes replicas over {strategy.slow.axis!r}",
        lambda strategy, _: strategy.slow and strategy.pipeline,
    ),
    _rule(
        "replicas stay in device memory",
        StrategyConflictError,
        "replicas over axis {strategy.slow.axis!r} keep all they have in device memory, and the "
        "strategy asks for cpu_offload={strategy.offload.value!r}; leave the offload out, or "
        "split each replica over more devices with fsdp()",
        lambda strategy, _: strategy.slow and strategy.offload is not CPUOffload.NONE,
    ),
    _rule(
        "replicas have statistics of their own already",
        StrategyConflictError,
        "replicas over axis {strategy.slow.axis!r} keep statistics of their own, and the "
        "strategy asks for those of each rank: broadcast_buffers=False; leave it at True, which "
        "is about the ranks within a replica",
        lambda strategy, _: (
            strategy.slow and strategy.reduction and not strategy.reduction.sync_buffers
        ),
    ),
    _rule(
        "buckets are of whole gradients",
        StrategyConflictError,
        "strategy {strategy.name!r} reduces each gradient to the ranks that own its shards, and "
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
        lambda placed: check_offload(placed.strategy.offload, placed.world),
    ),
    Requirement(
        "the pipeline fits its axis",
        lambda placed: placed.strategy.pipeline and placed.strategy.pipeline.validate(placed.world),
    ),
    _rule(
        "stages recompute block by block",
        StrategyConflictError,
        "strategy {strategy.name!r} is a pipeline, whose stages recompute block by block, and "
        "asks for checkpoint interval {strategy.remat.interval!r}; leave the interval at 1",
        lambda strategy, _: strategy.pipeline and strategy.remat and strategy.remat.interval != 1,
    ),
    _rule(
        "stages send nothing around",
        StrategyConflictError,
        "strategy {strategy.name!r} is a pipeline, whose stages do different things at a time, "
        "and sends {what} around the ring of axis {axis!r}, which all must do together; {cure}",
        lambda strategy, _: strategy.pipeline and _rings(strategy),
    ),
    _rule(
        "what goes round a ring is multiplied as it is",
        StrategyConflictError,
        "tensor_parallel has pieces of activations go round the ranks of {axis!r}, and products "
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
        "which the stages of its pipeline lie, and every stage needs every sample; use another "
        "axis for the batch, such as 'dp' of a mesh pp=2,dp=2, or leave the data parallelism out",
        lambda strategy, _: strategy.pipeline and strategy.pipeline.axis in strategy.batch_axes,
    ),
    _rule(
        "replicas over slow links hold their experts whole",
        StrategyConflictError,
        "the strategy has replicas over axis {strategy.slow.axis!r}, each with gradients of its "
        "own, and parameters along axis {strategy.resident[0]!r} whose gradients the compiler "
        "reduces; leave expert_parallel out, and split them by fsdp(), or leave out what makes "
        "replicas",
        lambda strategy, _: strategy.slow and strategy.resident,
    ),
    _rule(
        "a vocabulary is split over stages alone",
        StrategyConflictError,
        "strategy {strategy.name!r} splits the vocabulary over the stages of a pipeline, each "
        "rank of which computes its part alone, and leaves axis {axis!r} to the compiler; leave "
        "split_vocabulary out, for tensor parallelism splits the head already, or use data "
        "parallelism beside the pipeline",
        _not_over_stages,
    ),
    _rule(
        "stages keep the statistics of all ranks",
        StrategyConflictError,
        "a pipeline got broadcast_buffers=False, and a stage keeps the statistics of the samples "
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
"""The first broken rule speaks."""
