"""The table of strategies, from which configs, the command line, the planner and the docs are made.

To add a strategy, write a function that returns a `Strategy`, in a file of this folder, and a row
of `STRATEGIES` here. Its `make` is that function under `over_data_axes`, or one that takes
`(model, world, **options)`. The keys of a config and their help and the index of the docs follow
from the row. With a `DataPlan`, so do the candidates of `axon plan`. A `ModelPlan` over a new axis
also needs the name of the axis in `AXIS_ORDER` of `mesh/mesh_spec.py` and in `AXES` of
`planner/candidates.py`, and a field of `planner.Candidate`. Of several rows with a `ModelPlan` over
one axis the planner tries the first, except over `nodes` and `pods`. Also add a row to the table in
`tests/contracts` that compares strategies of this kind with one device: `test_strategies.py` for
data parallelism, `test_slow.py` for replicas over slow links.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

import optax
from flax import nnx

from ..core.checks import NUMBER, ArgumentKind, checked
from ..core.errors import ConfigError, MeshError, did_you_mean
from ..core.words import AUTO
from ..mesh import SLOW_AXES, World
from ..nn import ParallelMode
from .context import ContextMode, context_parallel
from .data import ShardingStrategy, ZeROStage, ddp, diloco, fsdp, local_sgd, zero
from .expert import ExpertForm, expert_parallel
from .pipelining import pipelined
from .strategy import DATA_AXES, Strategy
from .strategy_values import DEFAULT_SYNC_EVERY
from .suggest import suggest_plan
from .tensor import tensor_parallel
from .tensor_plan import PRESETS

POSITION_AXIS = "cp"
"""The axis that splits positions."""

MakeStrategy: TypeAlias = Callable[..., Strategy]
"""(model, world, **options) -> a strategy over axes of the world's mesh."""

Sizes: TypeAlias = Mapping[str, int]
"""Sizes of mesh axes by name."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataPlan:
    """How the planner tries a data-parallel strategy.

    Args:
        sizes: `sizes(ranks, node_size)` yields sizes of `dp` and `fsdp` for this many data-parallel
            ranks, on nodes of this many devices; nothing where the strategy does not apply.
        stage: the ZeRO stage that splits the same kinds of arrays, over all or some of the ranks.
            Inside pipelines the planner tries only strategies of stage 3.
        preference: its place among the data-parallel strategies, the preferred one first: of two
            plans that are equally fast, `axon plan` takes the one with the smaller number.
    """

    sizes: Callable[[int, int], Iterator[Sizes]]
    stage: ZeROStage
    preference: int

    @property
    def has_two_axes(self) -> bool:
        """Whether it splits over `fsdp` and replicates over `dp`."""
        # Two nodes of two devices are the smallest machine where a strategy can.
        return any(len(sizes) > 1 for sizes in self.sizes(4, 2))


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelPlan:
    """How the planner tries a strategy that splits the model, or joins replicas over slow links.

    Args:
        axes: the mesh axes that it can be over.
        options: maps a `planner.Candidate` to the options of the strategy.
    """

    axes: tuple[str, ...]
    options: Callable[[Any], Mapping[str, object]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class StrategyRow:
    """A strategy as configs, the command line, the planner and the docs know it.

    Args:
        make: `make(model, world, **options)`. The rest of its signature is what a config may set:
            names, types and defaults. Its docstring is the help text: the first paragraph describes
            the strategy, `Args` its options.
        obstacle: what it overcomes, for the table of `docs/choosing.md`: slow links, or what does
            not fit into memory.
        page: its page in `docs/strategies`.
        example: a mesh that it runs on.
        other_names: its names in Python, in meshes and in other libraries.
        implied: the options that one of the other names implies, by that name.
        needed: example values of the options that have no default.
        plan: how the planner tries it; None: it does not.
    """

    make: MakeStrategy
    obstacle: str
    page: str
    example: str
    other_names: tuple[str, ...] = ()
    implied: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)
    needed: Mapping[str, object] = dataclasses.field(default_factory=dict)
    plan: DataPlan | ModelPlan | None = None

    @property
    def is_data_parallel(self) -> bool:
        """Whether it uses the data axes of a mesh, which several such strategies share."""
        return isinstance(self.make, _OverDataAxes)

    def __call__(self, model: Any, world: World, **options: Any) -> Strategy:
        """Makes the strategy.

        Args:
            model: a module or a function that makes one.
            world: the devices, and the mesh they form.
            **options: those of the signature of `make`.
        """
        return self.make(model, world, **options)


class StrategyTable(Mapping[str, StrategyRow]):
    """Rows by the name of a strategy; a row is also found by the strategy's other names.

    Args:
        rows: the rows.

    Example:
        >>> STRATEGIES["fully_sharded_data_parallel"] is STRATEGIES["fsdp"]
        True
        >>> STRATEGIES.resolve("sequence")
        ('tensor', {'sequence': True})
    """

    def __init__(self, rows: Mapping[str, StrategyRow]):
        self.rows: dict[str, StrategyRow] = dict(rows)

    def __iter__(self) -> Iterator[str]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, name: str) -> StrategyRow:
        known, implied = self.resolve(name)
        row = self.rows[known]
        if not implied:
            return row
        return dataclasses.replace(row, make=functools.partial(row.make, **implied))

    @property
    def other_names(self) -> dict[str, str]:
        """The name of a strategy by each of its other names."""
        return {other: name for name, row in self.rows.items() for other in row.other_names}

    def resolve(self, name: str) -> tuple[str, dict[str, Any]]:
        """Returns the name of a strategy that a name means, and the options that it implies.

        Args:
            name: one of the names or other names; any other name is returned as it is.
        """
        if name in self.rows:
            return name, {}
        known = self.other_names.get(name.lower(), name)
        row = self.rows.get(known)
        return known, {} if row is None else dict(row.implied.get(name.lower(), {}))

    def of_data(self) -> dict[str, DataPlan]:
        """The data-parallel strategies that the planner tries, in the order of the table.

        Example:
            >>> list(STRATEGIES.of_data())
            ['ddp', 'zero1', 'zero2', 'fsdp', 'hybrid']
        """
        plans = {name: row.plan for name, row in self.rows.items()}
        return {name: plan for name, plan in plans.items() if isinstance(plan, DataPlan)}

    def over(self, *axes: str) -> dict[str, ModelPlan]:
        """The other strategies that the planner tries, over any of these mesh axes.

        Example:
            >>> list(STRATEGIES.over("tp")), list(STRATEGIES.over("nodes"))
            (['tensor'], ['diloco', 'local_sgd'])
        """
        plans = {name: row.plan for name, row in self.rows.items()}
        return {
            name: plan
            for name, plan in plans.items()
            if isinstance(plan, ModelPlan) and not set(axes).isdisjoint(plan.axes)
        }


def data_axes(world: World) -> tuple[str, ...]:
    """Returns those of `DATA_AXES` that a mesh has, outer to inner.

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


def over_data_axes(
    make: Callable[..., Strategy],
    axes: Callable[[World], tuple[str, ...]] = data_axes,
    **fixed: Any,
) -> MakeStrategy:
    """Returns the function of a `StrategyRow` for a strategy over the data axes of a mesh.

    Its signature lists the options that a config can set: those of `make` without `axes`, which
    come from the mesh, without `name`, and without the fixed ones.

    Args:
        make: makes a strategy; its keyword argument `axes` is a tuple of mesh axes, or None for
            its default axes: `dp` for `ddp` and `zero`, `fsdp` for `fsdp`, both for `hybrid`.
        axes: (world) -> the mesh axes to use.
        **fixed: options of `make` with the same value in every config.

    Returns:
        (model, world, **options) -> the strategy. With `shares=True`, which a config cannot set,
        the strategy uses only its default axes: in `[ddp, fsdp]`, for example, `ddp` uses
        `dp` and leaves `fsdp` to the other strategy.
    """

    return _OverDataAxes(make, axes, fixed)


class _OverDataAxes:
    """The function that `over_data_axes` returns."""

    def __init__(
        self,
        make: Callable[..., Strategy],
        axes: Callable[[World], tuple[str, ...]],
        fixed: Mapping[str, Any],
    ):
        self._axes = axes
        self._fixed = fixed
        # `inspect` reads these two: the docstring of `make`, and what a config may set.
        self.__wrapped__ = make
        parameters = inspect.signature(make).parameters
        hidden = {"axes", "name", *fixed}
        settable = [parameter for name, parameter in parameters.items() if name not in hidden]
        self.__signature__ = inspect.Signature(settable)

    def __call__(
        self, model: nnx.Module, world: World, shares: bool = False, **options: Any
    ) -> Strategy:
        axes = None if shares else self._axes(world)
        return self.__wrapped__(axes=axes, **self._fixed, **options)


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
        plan: `auto` reads it off the model; or the name of a preset; or a mode, such as `column` or
            `row`, for each pattern of paths, such as `{up$: column, down$: row}`.
        sequence: norms, dropout and residuals hold 1/tp of the positions.
        rings: with `sequence`, pieces of the positions travel around a ring while products run.
    """
    if isinstance(plan, str) and plan not in (AUTO, *PRESETS):
        raise ConfigError(
            f"no plan is called {plan!r:.80}.{did_you_mean(plan, (AUTO, *PRESETS))} Or give "
            "patterns, such as {up$: column, down$: row}"
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
        model: is not read here; the step cuts it over the ranks of `pp`.
        world: the devices, and the mesh they form.
        num_microbatches: the parts that a batch is cut into.
        schedule: a name that `axon schedule` draws, or the path of a CSV file with a table.
        chunks: stages per rank; None uses the default of the schedule.
        boundaries: the first block of each stage, and the number of blocks; None cuts evenly.
        backward: `recompute` keeps a stage's input and recomputes the stage, `residuals` keeps all
            that the backward pass needs, and the name of a `remat` policy keeps what it saves.
        split_vocabulary: every rank computes its part of the vocabulary of embedding, head and
            loss, instead of the first and last stages alone; for `linear_cross_entropy` losses.
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
    """Expert parallelism over the axis `ep`, which also splits the batch.

    Args:
        model: whose experts, in stacked arrays, are split.
        world: the devices, and the mesh they form.
        form: how tokens are sent: `ring` gathers those of all ranks and sums the results back,
            `all_to_all` sends each expert its slots, `auto` takes the one that moves fewer bytes.
        capacity: the most tokens an expert takes, as a multiple of an even share. **Tokens above it
            are left out**, and the metric `dropped` is their share; null leaves none out.
    """
    return expert_parallel(form, capacity, experts=suggest_plan(model).experts)


@checked(
    "diloco",
    lr=ArgumentKind("a number from 1e-37 to 3e38", lambda x: NUMBER.holds(x) and 1e-37 <= x < 3e38),
    momentum=ArgumentKind("a number in [0, 1)", lambda x: NUMBER.holds(x) and 0 <= x < 1),
)
def _diloco(
    model: Any,  # A module or a factory; `@checked` would enforce an annotation of one of them.
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
        nesterov: whether the outer SGD uses Nesterov momentum.
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


def _along(axis: str) -> Callable[[int, int], Iterator[Sizes]]:
    """Returns the maker of sizes that puts all data-parallel ranks on one axis."""

    def sizes(ranks: int, node_size: int) -> Iterator[Sizes]:
        yield {axis: ranks}

    return sizes


def _within_nodes(ranks: int, node_size: int) -> Iterator[Sizes]:
    """Yields a split within nodes and replicas over them, if there are several whole nodes."""
    if 1 < node_size < ranks and ranks % node_size == 0:
        yield {"dp": ranks // node_size, "fsdp": node_size}


def _no_options(candidate: Any) -> Mapping[str, object]:
    return {}


def _tensor_options(candidate: Any) -> Mapping[str, object]:
    return {"sequence": True} if candidate.sequence else {}


def _pipeline_options(candidate: Any) -> Mapping[str, object]:
    return {
        "num_microbatches": candidate.num_microbatches,
        "schedule": str(candidate.schedule),
    }


def _outer_loop_options(candidate: Any) -> Mapping[str, object]:
    outer = candidate.slow_replicas
    on_nodes = {} if outer.axis == "nodes" else {"axis": outer.axis}
    return {"every": outer.every, **on_nodes}


_SEQUENCE = ("sp", "sequence", "sequence_parallel")
_OUTER_LOOP = ModelPlan(axes=SLOW_AXES, options=_outer_loop_options)

STRATEGIES = StrategyTable(
    {
        "ddp": StrategyRow(
            make=over_data_axes(ddp),
            obstacle="nothing",
            page="ddp",
            example="dp=8",
            other_names=("dp", "data_parallel", "distributed_data_parallel"),
            plan=DataPlan(sizes=_along("dp"), stage=ZeROStage.STAGE0, preference=0),
        ),
        "zero1": StrategyRow(
            make=over_data_axes(zero, array_axes, stage=ZeROStage.STAGE1),
            obstacle="optimizer state",
            page="zero",
            example="dp=8",
            plan=DataPlan(sizes=_along("dp"), stage=ZeROStage.STAGE1, preference=2),
        ),
        # The planner prefers it to ZeRO-1: it stores less, and is slower only if a step has so many
        # microbatches that reducing the gradients of each one takes long.
        "zero2": StrategyRow(
            make=over_data_axes(zero, array_axes, stage=ZeROStage.STAGE2),
            obstacle="optimizer state and gradients",
            page="zero",
            example="dp=8",
            other_names=("shard_grad_op",),
            plan=DataPlan(sizes=_along("dp"), stage=ZeROStage.STAGE2, preference=1),
        ),
        "fsdp": StrategyRow(
            make=over_data_axes(fsdp, array_axes, sharding_strategy=ShardingStrategy.FULL_SHARD),
            obstacle="parameters",
            page="fsdp",
            example="fsdp=8",
            other_names=("full_shard", "fsdp2", "fully_sharded_data_parallel", "zero3"),
            plan=DataPlan(sizes=_along("fsdp"), stage=ZeROStage.STAGE3, preference=3),
        ),
        "hybrid": StrategyRow(
            make=over_data_axes(fsdp, sharding_strategy=ShardingStrategy.HYBRID_SHARD),
            obstacle="parameters, and links between nodes are slow",
            page="fsdp",
            example="dp=2,fsdp=4",
            other_names=("hybrid_shard", "hsdp"),
            plan=DataPlan(sizes=_within_nodes, stage=ZeROStage.STAGE3, preference=4),
        ),
        "no_shard": StrategyRow(
            make=over_data_axes(fsdp, sharding_strategy=ShardingStrategy.NO_SHARD),
            obstacle="nothing: data parallelism with the options of FSDP",
            page="ddp",
            example="dp=8",
        ),
        "tensor": StrategyRow(
            make=_tensor,
            obstacle="a block's activations or a matrix product",
            page="tensor",
            example="tp=8",
            other_names=("tp", "tensor_parallel", *_SEQUENCE),
            implied={name: {"sequence": True} for name in _SEQUENCE},
            plan=ModelPlan(axes=("tp",), options=_tensor_options),
        ),
        "context": StrategyRow(
            make=_context,
            obstacle="long sequences",
            page="context",
            example="cp=8",
            other_names=("cp", "context_parallel"),
            plan=ModelPlan(axes=("cp",), options=_no_options),
        ),
        "expert": StrategyRow(
            make=_expert,
            obstacle="the experts of a mixture",
            page="expert",
            example="ep=8",
            other_names=("ep", "expert_parallel", "experts", "moe"),
            plan=ModelPlan(axes=("ep",), options=_no_options),
        ),
        "pipeline": StrategyRow(
            make=_pipeline,
            obstacle="the memory of a node, over slow links",
            page="pipeline",
            example="pp=4,dp=2",
            other_names=("pp", "pipelined", "pipeline_parallel"),
            needed={"num_microbatches": 8},
            plan=ModelPlan(axes=("pp",), options=_pipeline_options),
        ),
        "diloco": StrategyRow(
            make=_diloco,
            obstacle="what crosses the links between nodes on every step",
            page="slow",
            example="nodes=2,dp=4",
            needed={"every": DEFAULT_SYNC_EVERY},
            plan=_OUTER_LOOP,
        ),
        "local_sgd": StrategyRow(
            make=_local_sgd,
            obstacle="what crosses the links between nodes on every step",
            page="slow",
            example="nodes=2,dp=4",
            needed={"every": DEFAULT_SYNC_EVERY},
            plan=_OUTER_LOOP,
        ),
    }
)
"""`STRATEGIES[name](model_or_factory, world, **options)` makes the strategy of that name."""


def resolve_name(name: str) -> tuple[str, dict[str, Any]]:
    """The key of `STRATEGIES` that a name means, and the options that it implies.

    Args:
        name: a name or another name of a strategy; any other text is returned as it is.

    Example:
        >>> resolve_name("full_shard"), resolve_name("sequence")
        (('fsdp', {}), ('tensor', {'sequence': True}))
    """
    return STRATEGIES.resolve(name)
