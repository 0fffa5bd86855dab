"""The names of PyTorch and DeepSpeed: `DDP`, `FSDP`, `ZeROOptimizer` and `Pipeline`, and enums.

Each wrapper is a model or optimizer with a `Strategy` of `axon_dist.parallel`, which
`build_train_step` takes in place of that strategy.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from .collectives import GradSyncStrategy as GradSyncStrategy
from .collectives import broadcast, sync_gradients
from .core.checks import COUNT, MODEL, MODULE, OPTIMIZER, SIZE, ArgumentKind, checked
from .core.errors import ConfigError, GroupError, warn
from .core.modules import traceable
from .core.renamed import renamed_arguments
from .core.tree import leaves_with_paths
from .core.typing import Array, ArrayTree, PyTree
from .core.words import first_few
from .mesh import GROUP, ProcessGroup, from_main
from .nn import ActivationCheckpointing, manual_axes
from .nn import ParallelMode as ParallelMode
from .ops.precision import MixedPrecision, clip_by_global_norm
from .parallel.data import MIN_ELEMENTS, ddp, fsdp, zero
from .parallel.data import ShardingStrategy as ShardingStrategy
from .parallel.data import ZeROStage as ZeROStage
from .parallel.memory import FSDPMemoryStats as FSDPMemoryStats
from .parallel.memory import estimate, measure
from .parallel.pipelining import pipelined, read_table
from .parallel.strategy import Reduction, Strategy
from .parallel.strategy_values import AutoWrapPolicy
from .parallel.strategy_values import CPUOffload as CPUOffload
from .parallel.strategy_values import SizeBasedAutoWrapPolicy as SizeBasedAutoWrapPolicy
from .parallel.strategy_values import TransformerAutoWrapPolicy as TransformerAutoWrapPolicy
from .schedule import PipelineSchedule as PipelineSchedule
from .schedule import Schedule
from .schedule.action import check_sizes
from .sharding import put, shardings, spec_axes
from .sharding.padding import even_shardings

_STAGES = ArgumentKind("an nnx.Module, of one stage", lambda x: isinstance(x, nnx.Module)).several()


class _Wrapper:
    """A module, or a function that makes one, and the process group over which it is trained."""

    def __init__(self, module: nnx.Module | Callable[[], nnx.Module], group: ProcessGroup):
        self.module: nnx.Module | Callable[[], nnx.Module] = module
        self.group: ProcessGroup = group
        self.is_training: bool = True

    def __call__(self, *args: object, **kwargs: object) -> Any:
        """Runs the module."""
        return self._made("a forward pass")(*args, **kwargs)

    forward = __call__

    def train(self) -> Self:
        """Puts the module into training mode: dropout on, BatchNorm on batch statistics."""
        self._made("train()").train()
        self.is_training = True
        return self

    def eval(self) -> Self:
        """Puts the module into evaluation mode."""
        self._made("eval()").eval()
        self.is_training = False
        return self

    def parameters(self) -> PyTree:
        """Returns the parameters as a nested dict, or their shapes if the module is a function."""
        if isinstance(self.module, nnx.Module):
            return _params(self.module)
        make = traceable(self.module)
        return jax.eval_shape(lambda: _params(make()))

    def sync_gradients(self, grads: PyTree) -> PyTree:
        """Averages gradients over the group: rank-stacked, or per rank inside `shard_map`."""
        return sync_gradients(grads, self.group)

    def _made(self, what: str) -> Any:
        if isinstance(self.module, nnx.Module):
            return self.module
        raise ConfigError(
            f"{what} needs a module, and got a function that makes one; get the module of a "
            "training state from TrainStep.merge(state)"
        )


def _shapes_by_path(tree: PyTree) -> list[tuple[str, tuple[int, ...]]]:
    return sorted((path, jnp.shape(leaf)) for path, leaf in leaves_with_paths(tree))


def _params(module: Any) -> PyTree:
    MODULE.check("FSDP", "module", module)
    return nnx.to_pure_dict(nnx.state(module, nnx.Param))


def _require_axes(group: ProcessGroup, who: str) -> None:
    """Raises `GroupError` unless the group is defined by mesh axes, rather than by a rank list."""
    GROUP.check(who, "group", group)
    if group.members is not None:
        raise GroupError(
            f"{who} got the {group}; a training step needs a group by mesh axes, such as "
            'world.group("dp")'
        )


class DistributedDataParallel(_Wrapper):
    """Wraps a module for data parallelism, with PyTorch's name and interface.

    Pass it to `build_train_step` in place of a strategy. As in DDP, for the mean loss over the
    global batch `grad = (1/N) sum_r grad_r` over the N ranks of the group.

    Args:
        module: any NNX module, or a function that makes one; a Linen module goes through
            `nnx.bridge.ToNNX`.
        group: a group by mesh axes, such as `world.group("dp")`.
        sync: when gradients are reduced; NO_SYNC makes `sync_gradients` the identity.
        bucket_capacity: elements in one reduction; None leaves the grouping to XLA.
        reduce_dtype: the dtype in which gradients are sent.
        broadcast_buffers: whether BatchNorm statistics are those of the global batch. If False,
            every rank keeps its own, stacked in dim 0 of the buffers, and evaluation uses their
            mean; see `ddp` for which samples they are of.

    Raises:
        GroupError: for a group by a list of ranks, which no mesh axis describes.

    Example:
        >>> from axon_dist import World
        >>> world = World.emulate(8)
        >>> model = DDP(nnx.Linear(2, 3, rngs=nnx.Rngs(0)), world.group("dp"))
        >>> model.strategy.name
        'ddp'

    Source: Li et al., PyTorch Distributed, VLDB 2020, arXiv:2006.15704.
    """

    @checked("DDP", module=MODEL)
    def __init__(
        self,
        module: nnx.Module | Callable[[], nnx.Module],
        group: ProcessGroup,
        *,
        sync: GradSyncStrategy = GradSyncStrategy.SYNCHRONOUS,
        bucket_capacity: int | None = None,
        reduce_dtype: DTypeLike | None = None,
        broadcast_buffers: bool = True,
    ):
        _require_axes(group, "DDP")
        super().__init__(module, group)
        self.sync: GradSyncStrategy = GradSyncStrategy(sync)
        self.bucket_capacity: int | None = bucket_capacity
        self.reduce_dtype = reduce_dtype
        self.broadcast_buffers: bool = broadcast_buffers

    @property
    def strategy(self) -> Strategy:
        """The strategy that `build_train_step` takes.

        Raises:
            StrategyConflictError: for NO_SYNC.
        """
        return ddp(
            self.group.axes,
            sync=self.sync,
            bucket_capacity=self.bucket_capacity,
            reduce_dtype=self.reduce_dtype,
            broadcast_buffers=self.broadcast_buffers,
        )

    def sync_parameters(self, stacked: PyTree | None = None) -> PyTree:
        """Makes every rank start from rank 0's parameters and buffers.

        Args:
            stacked: rank-stacked arrays, or one rank's inside `shard_map`. None replicates process
                0's copy of the module's arrays over the mesh.

        Returns:
            The synchronised arrays.
        """
        if stacked is not None:
            return broadcast(stacked, self.group)
        replicated = NamedSharding(self.group.mesh, PartitionSpec())
        module = self._made("sync_parameters()")
        values = from_main(nnx.state(module))
        state = jax.tree.map(lambda x: jax.device_put(x, replicated), values)
        nnx.update(module, state)
        return nnx.to_pure_dict(state)

    def sync_gradients(self, grads: PyTree) -> PyTree:
        """Averages gradients over the group, or leaves them alone under NO_SYNC.

        Args:
            grads: rank-stacked arrays, or one rank's inside `shard_map`.

        Returns:
            A tree of the same structure.
        """
        if self.sync is GradSyncStrategy.NO_SYNC:
            return grads
        return super().sync_gradients(grads)


DDP = DistributedDataParallel


class FullyShardedDataParallel(_Wrapper):
    """Wraps a module so that every rank holds a shard and gathers the parameters it computes with.

    Pass it to `build_train_step` in place of a strategy. Training equals one device with every
    sharding strategy. The optimizer updates only the shards; gathered parameters are temporary
    copies.

    Args:
        module: any NNX module, or a function that makes one.
        group: a group by mesh axes, such as `world.group("fsdp")`.
        sharding_strategy: which arrays are split.
        cpu_offload: which arrays live in host memory between steps.
        mixed_precision: dtypes, a preset's name, or True.
        auto_wrap_policy: which modules are gathered and freed as one unit.
        activation_checkpointing: what the backward pass recomputes.
        min_elements: leaves with fewer elements stay whole.
        reduction: how gradients are reduced.

    Raises:
        GroupError: for a group by a list of ranks.
        ConfigError: for an unknown name, or for a call that needs a module where a function was
            given.

    Example:
        >>> from axon_dist import World
        >>> world = World.emulate(8, "fsdp=8")
        >>> model = FSDP(nnx.Linear(100, 64, rngs=nnx.Rngs(0)), world.group("fsdp"))
        >>> shard = model.reshard_parameters(model.parameters())["kernel"].addressable_shards[0]
        >>> shard.data.shape
        (100, 8)
    """

    def __init__(
        self,
        module: nnx.Module | Callable[[], nnx.Module],
        group: ProcessGroup,
        sharding_strategy: ShardingStrategy | str = ShardingStrategy.FULL_SHARD,
        *,
        cpu_offload: CPUOffload | str = CPUOffload.NONE,
        mixed_precision: MixedPrecision | str | bool | None = None,
        auto_wrap_policy: AutoWrapPolicy | None = None,
        activation_checkpointing: ActivationCheckpointing | None = None,
        min_elements: int = MIN_ELEMENTS,
        reduction: Reduction | None = None,
    ):
        MODEL.check("FSDP", "module", module)
        _require_axes(group, "FSDP")
        super().__init__(module, group)
        self.sharding_strategy: ShardingStrategy = ShardingStrategy(sharding_strategy)
        self._options: dict[str, Any] = {
            "cpu_offload": cpu_offload,
            "mixed_precision": mixed_precision,
            "auto_wrap_policy": auto_wrap_policy,
            "activation_checkpointing": activation_checkpointing,
            "min_elements": min_elements,
            "reduction": reduction,
        }
        self.strategy: Strategy = fsdp(self.sharding_strategy, group.axes, **self._options)

    def gather_parameters(self, params: PyTree) -> PyTree:
        """Replicates every array over the devices; `reshard_parameters` is its exact inverse."""
        replicated = NamedSharding(self.group.mesh, PartitionSpec())
        return jax.tree.map(lambda x: jax.device_put(x, replicated), params)

    def reshard_parameters(self, params: ArrayTree) -> PyTree:
        """Shards arrays as the strategy does; changes to the gathered arrays are kept.

        They keep their shapes, so that the module can compute with them. JAX splits only dims that
        divide: a dim that does not is split over fewer axes or not at all, with a warning. A step
        stores such an array padded, and `TrainStep.init` returns it so.

        Args:
            params: arrays in the module's shapes, or in those of a state of a step.

        Returns:
            The sharded arrays.
        """
        kind = self.strategy.offload.params
        places = shardings(self.strategy.params, params, self.group.mesh, kind)
        even = even_shardings(params, places)
        self._warn_of_uneven(params, places, even)
        return put(params, even)

    def _warn_of_uneven(self, params: ArrayTree, places: PyTree, even: PyTree) -> None:
        """Warns of arrays that are split over fewer devices than the strategy would."""
        pairs = zip(jax.tree.leaves(places), jax.tree.leaves(even), strict=True)
        less = [
            f"{path} {tuple(x.shape)}"
            for (path, x), (a, b) in zip(leaves_with_paths(params), pairs, strict=True)
            if spec_axes(a.spec) != spec_axes(b.spec)
        ]
        if less:
            warn(
                f"reshard_parameters splits {first_few(less)} over fewer of the {self.group.size} "
                f"ranks than {self.strategy.name} does, or not at all, because their split dims do "
                "not divide; a training step pads them: to store the shards, take the parameters "
                "of TrainStep.init",
                code="reshard-uneven",
            )

    def clip_grad_norm(self, grads: ArrayTree, max_norm: float) -> tuple[PyTree, Array]:
        """Scales gradients down to a global norm, as `build_train_step(clip_norm=...)` does.

        Args:
            grads: arrays in global view, split or whole; or the rank-stacked gradients of all the
                module's parameters, as from `sync_gradients`, of which each rank's are clipped by
                their own norm. Other rank-stacked trees look like arrays in global view.
            max_norm: the largest norm, at least 0.

        Returns:
            The clipped gradients, sharded as before, and the norm before clipping, one per rank if
            they are rank-stacked.

        Raises:
            GroupError: inside `shard_map`, where a rank may have only a part of the gradients.
        """
        if manual := manual_axes():
            raise GroupError(
                f"clip_grad_norm was called inside a shard_map over {manual}, where a rank cannot "
                "see whether it has whole gradients or a part of them; call it outside, or for "
                "gradients that every rank has whole, precision.clip_by_global_norm",
                code="clip-inside-shard-map",
            )
        if self._are_rank_stacked(grads):
            return jax.vmap(lambda own: clip_by_global_norm(own, max_norm))(grads)
        return clip_by_global_norm(grads, max_norm)

    def _are_rank_stacked(self, grads: PyTree) -> bool:
        """Whether a tree has one row per rank of each of the module's parameters."""
        rows = self.group.world_size
        # By path, because gradients may be in an `nnx.State`, and the parameters are in a dict.
        got = _shapes_by_path(nnx.to_pure_dict(grads) if isinstance(grads, nnx.State) else grads)
        made = isinstance(self.module, nnx.Module)
        own = _shapes_by_path(self.parameters()) if made else self._traced_shapes
        return bool(got) and got == [(path, (rows, *shape)) for path, shape in own]

    @functools.cached_property
    def _traced_shapes(self) -> list[tuple[str, tuple[int, ...]]]:
        """The shapes of the parameters of a function that makes a module, which is slow to trace.

        Those of a module are not kept, because modules can change.
        """
        return _shapes_by_path(self.parameters())

    @checked("memory_estimate", optimizer=OPTIMIZER.or_none(), accumulate=COUNT)
    def memory_estimate(
        self, optimizer: optax.GradientTransformation | None = None, accumulate: int = 2
    ) -> FSDPMemoryStats:
        """Estimates bytes per device of parameters, gradients and optimizer, as `estimate` does."""
        mesh = self.group.mesh
        return estimate(self.strategy, self.parameters(), mesh, optimizer, accumulate=accumulate)

    def memory_stats(
        self, params: PyTree = None, grads: PyTree = None, opt_state: PyTree = None
    ) -> FSDPMemoryStats:
        """Measures bytes per device of existing arrays by their shards; without any, estimates."""
        trees = params, grads, opt_state
        if all(tree is None for tree in trees):
            return self.memory_estimate()
        if any(tree is None for tree in trees):
            raise ConfigError(
                "memory_stats got only some of params, grads and opt_state; give all or none"
            )
        return measure(self.strategy, *trees)

    def compare_strategies(
        self, optimizer: optax.GradientTransformation | None = None
    ) -> list[FSDPMemoryStats]:
        """Returns the estimate for every sharding strategy that the group can run."""
        rows = [
            fsdp(choice, self.group.axes, **self._options)
            for choice in ShardingStrategy
            if choice is not ShardingStrategy.HYBRID_SHARD or len(self.group.axes) > 1
        ]
        return [estimate(row, self.parameters(), self.group.mesh, optimizer) for row in rows]


FSDP = FullyShardedDataParallel


class ZeROOptimizer:
    """An optax optimizer whose state is split over a group, as in PyTorch and DeepSpeed.

    The optimizer is unchanged: ZeRO only decides the sharding of its arrays. Pass
    `optimizer.transformation` and `optimizer.strategy` to `build_train_step`.

    Args:
        transformation: any optax transformation.
        stage: 1, 2 or 3.
        group: a group by mesh axes.
        min_elements: leaves with fewer elements stay whole.

    Raises:
        GroupError: for a group by a list of ranks.

    Example:
        >>> from axon_dist import World
        >>> world = World.emulate(8)
        >>> zero1 = ZeROOptimizer(optax.adam(1e-3), stage=1, group=world.group("dp"))
        >>> zero1.strategy.name
        'zero1'
    """

    def __init__(
        self,
        transformation: optax.GradientTransformation,
        stage: int | ZeROStage,
        group: ProcessGroup,
        min_elements: int = MIN_ELEMENTS,
    ):
        _require_axes(group, "ZeROOptimizer")
        OPTIMIZER.check("ZeROOptimizer", "transformation", transformation)
        self.transformation: optax.GradientTransformation = transformation
        self.group: ProcessGroup = group
        self.strategy: Strategy = zero(stage, group.axes, min_elements=min_elements)

    def init(self, params: PyTree) -> PyTree:
        """Returns the initial state of the transformation."""
        return self.transformation.init(params)

    def update(self, grads: PyTree, state: PyTree, params: PyTree = None) -> tuple[Any, Any]:
        """Returns the updates of the transformation, and its new state."""
        return self.transformation.update(grads, state, params)


class PipelineStage(nnx.Module):
    """A module and its position in a pipeline.

    Args:
        module: the computation of the stage.
        stage_id: the stage's number within the whole model.
        device_rank: the rank that runs it; None leaves it to the schedule.

    Example:
        >>> import jax.numpy as jnp
        >>> stage = PipelineStage(nnx.Linear(2, 3, rngs=nnx.Rngs(0)), stage_id=0)
        >>> stage(jnp.ones((1, 2))).shape
        (1, 3)
    """

    @checked("PipelineStage", module=MODEL, stage_id=SIZE, device_rank=SIZE.or_none())
    def __init__(self, module: nnx.Module, stage_id: int, device_rank: int | None = None):
        self.module: nnx.Module = module
        self.stage_id: int = stage_id
        self.device_rank: int | None = device_rank

    def __call__(self, x: object) -> Any:
        """Runs the module."""
        return self.module(x)


class StageChain(nnx.Module):
    """Modules that feed each other: `x = stage(x)` for each in order.

    Args:
        stages: modules in the order in which they are called.
    """

    def __init__(self, stages: Sequence[nnx.Module]):
        self.stages = nnx.List(stages)

    def __call__(self, x: object) -> Any:
        """Runs all stages."""
        for stage in self.stages:
            x = stage(x)
        return x


class Pipeline:
    """Cuts a model into pipeline stages; named as in PyTorch, run as one jitted step.

    Pass `pipe.module` and `pipe` to `build_train_step`. The step equals gradient accumulation over
    the microbatches on one device.

    Args:
        module: an unmodified NNX module that runs its blocks one after another, or a function of
            no arguments that makes one.
        num_ranks: the ranks along the axis, each with `chunks` stages; `num_stages=` is its
            deprecated name.
        num_microbatches: microbatches per step; `num_ranks` by default.
        schedule: a name of `PipelineSchedule`, a table, or the path of a CSV file with one.
        chunks: stages per rank; None uses the schedule's usual number.
        options: those of `pipelined`.

    Raises:
        ScheduleError: for an unknown schedule, sizes that it does not support, or a table that is
            not valid.
        ConfigError: for a table whose sizes differ from those given.

    Example:
        >>> layers = [nnx.Linear(4, 4, rngs=nnx.Rngs(i)) for i in range(4)]
        >>> pipe = Pipeline(nnx.Sequential(*layers), num_ranks=2, num_microbatches=4)
        >>> pipe.num_stages(), pipe.strategy.pipeline.schedule.name
        (2, 'eager_1f1b')

    Source: Huang et al., GPipe, arXiv:1811.06965; Narayanan et al., arXiv:2104.04473.
    """

    @renamed_arguments(num_stages="num_ranks")
    @checked("Pipeline", module=MODEL)
    def __init__(
        self,
        module: nnx.Module,
        num_ranks: int,
        num_microbatches: int | None = None,
        schedule: str | Schedule = PipelineSchedule.EAGER_1F1B,
        *,
        chunks: int | None = None,
        **options: Any,
    ):
        count = num_ranks if num_microbatches is None else num_microbatches
        self.module = module
        self.strategy: Strategy = pipelined(num_ranks, count, schedule, chunks=chunks, **options)

    @classmethod
    @checked("Pipeline.from_modules", modules=_STAGES)
    def from_modules(
        cls,
        modules: Sequence[nnx.Module],
        num_microbatches: int | None = None,
        schedule: str | Schedule = PipelineSchedule.EAGER_1F1B,
        *,
        chunks: int | None = None,
        **options: Any,
    ) -> Pipeline:
        """Makes a pipeline with a separate module in each stage.

        Parameters and activations may have different shapes in each stage.

        Args:
            modules: one per stage, in order; `PipelineStage`s are put in the order of their ids.
            num_microbatches: microbatches per step; the number of ranks by default.
            schedule: a name of `PipelineSchedule`, a table, or the path of a CSV file with one.
            chunks: stages per rank; None uses the schedule's usual number.
            options: those of `pipelined`.

        Returns:
            The pipeline; its `module` runs all stages.

        Raises:
            ConfigError: when there are no stages, when their number does not divide over the ranks
                or differs from the table's, or when their ids or ranks do not fit the schedule.

        Example:
            >>> sizes = [(8, 16), (16, 2)]
            >>> stages = [nnx.Linear(*size, rngs=nnx.Rngs(0)) for size in sizes]
            >>> Pipeline.from_modules(stages, num_microbatches=4).num_stages()
            2
        """
        ordered = _in_order(modules)
        schedule = read_table(schedule)
        pipe = cls(
            StageChain(ordered),
            _num_ranks(len(ordered), schedule, chunks),
            num_microbatches,
            schedule,
            chunks=chunks,
            boundaries=tuple(range(len(ordered) + 1)),
            **options,
        )
        _check_ranks(ordered, pipe.schedule)
        return pipe

    @property
    def schedule(self) -> Schedule:
        """The schedule's table."""
        assert self.strategy.pipeline is not None
        return self.strategy.pipeline.schedule

    def num_stages(self) -> int:
        """Returns the number of stages of the whole model."""
        return self.schedule.num_stages

    def __call__(self, *args: object, **kwargs: object) -> Any:
        """Runs the whole module."""
        return self.module(*args, **kwargs)

    forward = __call__


def _in_order(modules: Sequence[nnx.Module]) -> list[nnx.Module]:
    if len(modules) == 0:
        raise ConfigError("got no modules; a pipeline needs at least one, and each is a stage")
    ids = [m.stage_id if isinstance(m, PipelineStage) else i for i, m in enumerate(modules)]
    if sorted(ids) != list(range(len(modules))):
        raise ConfigError(
            f"got the stage ids {ids}; {len(modules)} stages need each of 0..{len(modules) - 1} "
            "once"
        )
    return [modules[ids.index(stage)] for stage in range(len(modules))]


def _check_ranks(stages: Sequence[nnx.Module], schedule: Schedule) -> None:
    for number, stage in enumerate(stages):
        asked = getattr(stage, "device_rank", None)
        if asked not in (None, schedule.placement[number]):
            raise ConfigError(
                f"stage {number} asks for rank {asked}, but schedule {schedule.name!r} places it "
                f"on rank {schedule.placement[number]}; leave device_rank out, or give a table "
                "with another placement"
            )


def _num_ranks(count: int, schedule: str | Schedule, chunks: int | None) -> int:
    """Returns the number of ranks that `count` stages need."""
    if isinstance(schedule, Schedule):
        if count != schedule.num_stages:
            raise ConfigError(
                f"got {count} modules, and schedule {schedule.name!r} has {schedule.num_stages} "
                "stages; give one module per stage"
            )
        return schedule.num_devices
    named = PipelineSchedule.named(schedule)
    usual = 1 if named is None else named.builder.chunks
    per_rank = usual if chunks is None else chunks
    check_sizes(chunks=per_rank)
    if count % per_rank:
        raise ConfigError(
            f"got {count} stages and {per_rank} chunks per rank; the number of stages must be a "
            f"multiple of {per_rank}"
        )
    return count // per_rank
