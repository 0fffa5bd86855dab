"""Strategies by name, for configs and command lines: a row each.

CONTRIBUTING.md lists the other tables that a new strategy needs a row in.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, TypeAlias

import optax
from flax import nnx

from ..core.checks import NUMBER, ArgumentKind, checked
from ..core.errors import ConfigError, MeshError, did_you_mean
from ..mesh import World
from ..nn import ParallelMode
from .context import ContextMode, context_parallel
from .data import ShardingStrategy, ZeROStage, ddp, diloco, fsdp, local_sgd, zero
from .expert import ExpertForm, expert_parallel
from .pipelining import pipelined
from .plan import PRESETS
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
    """Those of `DATA_AXES` that a mesh has, outer to inner.

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
            f"mesh {world.spec} has no axis to split the batch over; add dp or fsdp, such as "
            f"mesh=fsdp=1,{world.spec}"
        )
    return axes


def _row(
    make: Callable[..., Strategy],
    axes: Callable[[World], tuple[str, ...]] = data_axes,
    **fixed: Any,
) -> MakeStrategy:
    """A row for `make` over some axes; its signature has the options that are left to a config."""

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
        rings: with `sequence`, pieces of the positions travel around a ring while products run.
    """
    if isinstance(plan, str) and plan not in (AUTO, *PRESETS):
        raise ConfigError(
            f"no plan is called {plan!r}.{did_you_mean(plan, (AUTO, *PRESETS))} Or give patterns, "
            "such as {up$: column, down$: row}"
        )
    resolved = suggest_plan(model) if plan == AUTO else plan
    return tensor_parallel(resolved, sequence=sequence, rings=rings)


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
        model: is cut over the ranks of the world.
        world: the devices, and the mesh they form.
        num_microbatches: the parts that a batch is cut into.
        schedule: a name that `axon schedule` draws, or the path of a CSV file with a table.
        chunks: stages per rank; None takes what is usual for the schedule.
        boundaries: the first block of each stage, and the number of blocks; None cuts evenly.
        backward: `recompute` keeps a stage's input and recomputes the stage, `residuals` keeps all
            that the backward pass needs, and a policy of `remat` what that saves of each block.
        split_vocabulary: every rank computes its part of the vocabulary of embedding, head and
            loss, which else the end stages compute; for a loss of `linear_cross_entropy`.
    """
    if "pp" not in world.mesh.shape:
        raise MeshError(f"mesh {world.spec} has no axis for a pipeline: add pp, as in dp=-1,pp=2")
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
        mode: `ring` sends keys and values around; `ulysses` exchanges heads for positions, and
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
        form: how tokens are sent: `ring` gathers those of all ranks and sums the results back,
            `all_to_all` sends each expert its slots, `auto` takes the one that moves fewer bytes.
        capacity: how many times its even share of the tokens an expert takes at most. **What
            exceeds it is left out**, and the metric `dropped` counts it; null leaves none out.
    """
    return expert_parallel(form, capacity, experts=suggest_plan(model).experts)


@checked(
    "diloco",
    lr=ArgumentKind("a number from 1e-37 to 3e38", lambda x: NUMBER.holds(x) and 1e-37 <= x < 3e38),
    momentum=ArgumentKind("a number in [0, 1)", lambda x: NUMBER.holds(x) and 0 <= x < 1),
)
def _diloco(
    model: Any,
    world: World,
    every: int,
    lr: float = 0.7,
    momentum: float = 0.9,
    nesterov: bool = True,
    compress: str | None = None,
    fragments: int = 1,
    axis: str = "nodes",
) -> Strategy:
    """DiLoCo over a slow axis: replicas train independently, and an outer SGD joins them.

    Args:
        model: of which each replica has a copy.
        world: the devices, and the mesh they form.
        every: H, the steps that replicas take between two synchronizations.
        lr: the learning rate of the outer SGD.
        momentum: its momentum.
        nesterov: whether that is Nesterov's.
        compress: `int8`, `fp8` or `top_k`, with error feedback; null sends float32.
        fragments: parts of the parameters that synchronize at different steps.
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
    """Local SGD over a slow axis: replicas train independently, and average their parameters.

    Args:
        model: of which each replica has a copy.
        world: the devices, and the mesh they form.
        every: H, the steps that replicas take between two synchronizations.
        compress: `int8`, `fp8` or `top_k`, with error feedback; null sends float32.
        fragments: parts of the parameters that synchronize at different steps.
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

The signature of a row is what a config may set under the name: its annotations are the types of the
options.
"""

OTHER_NAMES: MappingProxyType[str, str] = MappingProxyType(
    {
        **dict.fromkeys(("dp", "data_parallel", "distributed_data_parallel"), "ddp"),
        **dict.fromkeys(("fsdp", "fsdp2", "fully_sharded_data_parallel"), "full_shard"),
        **dict.fromkeys(("hybrid", "hsdp"), "hybrid_shard"),
        **dict.fromkeys(("tp", "tensor_parallel"), "tensor"),
        **dict.fromkeys(("sp", "sequence", "sequence_parallel"), "tensor"),
        **dict.fromkeys(("cp", "context_parallel"), "context"),
        **dict.fromkeys(("ep", "expert_parallel", "experts", "moe"), "expert"),
        **dict.fromkeys(("pp", "pipelined", "pipeline_parallel"), "pipeline"),
    }
)
"""Names under which users of Python, of meshes and of other libraries know a strategy."""

IMPLIED_OPTIONS: MappingProxyType[str, Mapping[str, Any]] = MappingProxyType(
    dict.fromkeys(("sp", "sequence", "sequence_parallel"), MappingProxyType({"sequence": True}))
)
"""Options that one of `OTHER_NAMES` implies."""


def resolve_name(name: str) -> tuple[str, dict[str, Any]]:
    """The key of `STRATEGIES` that a name means, and the options that it implies.

    Args:
        name: a key of `STRATEGIES` or of `OTHER_NAMES`; any other name is returned as it is.

    Example:
        >>> resolve_name("fsdp"), resolve_name("sequence")
        (('full_shard', {}), ('tensor', {'sequence': True}))
    """
    if name in STRATEGIES:
        return name, {}
    known = name.lower()
    return OTHER_NAMES.get(known, name), dict(IMPLIED_OPTIONS.get(known, {}))
