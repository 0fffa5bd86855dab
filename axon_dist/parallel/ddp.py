"""Data parallelism: DDP with gradient buckets, and ZeRO-1, 2 and 3 over the same axis."""

from __future__ import annotations

import dataclasses
import enum
from types import MappingProxyType
from typing import Any

import jax
import optax
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from ..collectives import GradSyncStrategy, broadcast, sync_gradients
from ..core.errors import ConfigError, StrategyConflictError, unknown
from ..core.told import MODULE, OPTIMIZER
from ..core.typing import PyTree
from ..mesh import ProcessGroup, from_main
from ..sharding import LargestDim, Replicate
from .strategy import Reduction, Strategy, axes_of, require_axes


def ddp(
    axes: str | tuple[str, ...] = ("dp",),
    *,
    sync: GradSyncStrategy = GradSyncStrategy.SYNCHRONOUS,
    bucket_capacity: int | None = None,
    reduce_dtype: Any = None,
    broadcast_buffers: bool = True,
    per: str | None = None,
) -> Strategy:
    """Data parallelism as a strategy: the batch is split over `axes`, everything else replicated.

    Args:
        axes: the mesh axes that split the batch.
        sync: SYNCHRONOUS, or OVERLAPPED to let reductions run beside each other.
        bucket_capacity: elements in one reduction; None leaves the grouping to XLA, except that
            OVERLAPPED then takes 25 million (100 MB in float32).
        reduce_dtype: the dtype of gradients on the wire; None is their own.
        broadcast_buffers: whether BatchNorm sees the global batch, as on one device.
        per: `"step"` reduces once however many microbatches, `"microbatch"` each of them; None
            is the former, unless another part of a composed strategy keeps gradients split.

    Returns:
        The strategy.

    Raises:
        StrategyConflictError: for NO_SYNC, with which the replicas would drift apart.

    Example:
        >>> ddp().batch_axes
        ('dp',)
    """
    sync = GradSyncStrategy(sync)
    if sync is GradSyncStrategy.NO_SYNC:
        raise StrategyConflictError(
            "a training step got GradSyncStrategy.NO_SYNC, with which the replicas would drift "
            "apart; to hold the synchronisation back over K microbatches, build the step with "
            "accumulate=K, or use DDP.sync_gradients on gradients of your own"
        )
    if bucket_capacity is None and sync is GradSyncStrategy.OVERLAPPED:
        bucket_capacity = 25_000_000
    reduction = Reduction(per, sync, bucket_capacity, reduce_dtype, broadcast_buffers)
    return Strategy("ddp", batch_axes=axes_of(axes), reduction=reduction)


class DistributedDataParallel:
    """Wraps a module for data parallelism; PyTorch's name and manners, one jitted step inside.

    Pass it to `build_train_step` in place of a strategy. The equation is DDP's: with the mean
    loss over the global batch, `grad = (1/N) sum_r grad_r` over the N ranks of the group.

    Args:
        module: any NNX module; a Linen one goes through `nnx.bridge.ToNNX`.
        group: a group by mesh axes, such as `world.group("dp")`.
        sync: when gradients are reduced; NO_SYNC makes `sync_gradients` the identity.
        bucket_capacity: elements in one reduction; None leaves the grouping to XLA.
        reduce_dtype: the dtype of gradients on the wire.
        broadcast_buffers: whether BatchNorm statistics are those of the global batch. Off, every
            rank keeps its own, stacked in dim 0 of the buffers, and evaluation uses their mean.

    Raises:
        GroupError: for a group by a list of ranks, which no mesh axis describes.

    Example:
        >>> from axon_dist.mesh import World
        >>> world = World.emulate(8)
        >>> model = DDP(nnx.Linear(2, 3, rngs=nnx.Rngs(0)), world.group("dp"))
        >>> model.strategy.name
        'ddp'

    Source: Li et al., PyTorch Distributed, VLDB 2020, arXiv:2006.15704.
    """

    def __init__(
        self,
        module: nnx.Module,
        group: ProcessGroup,
        *,
        sync: GradSyncStrategy = GradSyncStrategy.SYNCHRONOUS,
        bucket_capacity: int | None = None,
        reduce_dtype: Any = None,
        broadcast_buffers: bool = True,
    ):
        MODULE.check("DDP", "module", module)
        require_axes(group, "DDP")
        self.module: nnx.Module = module
        self.group: ProcessGroup = group
        self.sync: GradSyncStrategy = GradSyncStrategy(sync)
        self.bucket_capacity: int | None = bucket_capacity
        self.reduce_dtype = reduce_dtype
        self.broadcast_buffers: bool = broadcast_buffers
        self.is_training: bool = True

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

    def __call__(self, *args: object, **kwargs: object) -> Any:
        """Runs the module."""
        return self.module(*args, **kwargs)

    forward = __call__

    def parameters(self) -> PyTree:
        """The trainable arrays, as a nested dict."""
        return nnx.to_pure_dict(nnx.state(self.module, nnx.Param))

    def train(self) -> DistributedDataParallel:
        """Puts the module into training mode: dropout on, BatchNorm on batch statistics."""
        self.module.train()
        self.is_training = True
        return self

    def eval(self) -> DistributedDataParallel:
        """Puts the module into evaluation mode."""
        self.module.eval()
        self.is_training = False
        return self

    def sync_parameters(self, stacked: PyTree | None = None) -> PyTree:
        """Makes every rank start from rank 0's parameters and buffers.

        Args:
            stacked: rank-stacked arrays, or one rank's inside `shard_map`; None synchronises the
                module's own arrays: those of process 0, replicated over the mesh.

        Returns:
            The synchronised arrays.
        """
        if stacked is not None:
            return broadcast(stacked, self.group)
        whole = NamedSharding(self.group.mesh, PartitionSpec())
        values = from_main(nnx.state(self.module))
        state = jax.tree.map(lambda x: jax.device_put(x, whole), values)
        nnx.update(self.module, state)
        return nnx.to_pure_dict(state)

    def sync_gradients(self, grads: PyTree) -> PyTree:
        """Averages gradients over the group, or leaves them alone under NO_SYNC.

        Args:
            grads: rank-stacked arrays, or one rank's inside `shard_map`.

        Returns:
            A tree like it.
        """
        if self.sync is GradSyncStrategy.NO_SYNC:
            return grads
        return sync_gradients(grads, self.group)


DDP = DistributedDataParallel


MIN_ELEMENTS = 1024
"""Leaves with fewer elements stay whole by default."""


class ZeROStage(enum.IntEnum):
    """The stages of ZeRO; 0 is plain data parallelism."""

    STAGE0 = 0
    STAGE1 = 1
    STAGE2 = 2
    STAGE3 = 3

    @classmethod
    def _missing_(cls, value: object) -> object:
        raise unknown(cls, value)


@dataclasses.dataclass(frozen=True)
class Split:
    """A row of the ZeRO table: what lies split between steps or microbatches.

    Args:
        params: whether parameters are split, and gathered where they are used.
        grads: whether gradients are held split between microbatches. With one microbatch stages 1
            and 2 are the same program: gradients are reduced to the owners of their moments.
        opt_state: whether optimizer moments are split.
    """

    params: bool
    grads: bool
    opt_state: bool


ZERO: MappingProxyType[ZeROStage, Split] = MappingProxyType(
    {
        ZeROStage.STAGE0: Split(params=False, grads=False, opt_state=False),
        ZeROStage.STAGE1: Split(params=False, grads=False, opt_state=True),
        ZeROStage.STAGE2: Split(params=False, grads=True, opt_state=True),
        ZeROStage.STAGE3: Split(params=True, grads=True, opt_state=True),
    }
)
"""The stages as data: DDP, ZeRO-1, ZeRO-2 and ZeRO-3 differ in nothing else."""


def zero(
    stage: int | ZeROStage,
    axes: str | tuple[str, ...] = ("dp",),
    *,
    shard_axes: str | tuple[str, ...] | None = None,
    min_elements: int = MIN_ELEMENTS,
    reduction: Reduction | None = None,
    name: str | None = None,
) -> Strategy:
    """Data parallelism that splits what the stage says over the ranks, instead of copying it.

    Every rank owns one shard of each array it splits: gradients are reduced to their owner, which
    updates its shard of the optimizer state, and the new parameters are gathered (stages 1 and 2)
    or stay split and are gathered where they are used (stage 3). Training is the same at every
    stage; memory and traffic differ.

    Args:
        stage: 0 to 3.
        axes: the mesh axes that split the batch; one that `context_parallel` has, when composed
            with it, splits the arrays and no samples.
        shard_axes: the axes that split the arrays; all of `axes` by default. Fewer make hybrid
            sharding: split over these, replicated over the others.
        min_elements: leaves with fewer elements stay whole.
        reduction: how gradients become one; by default stage 1 reduces once per step, stages 2
            and 3 once per microbatch, so that they never hold a whole gradient. Stage 2 is nothing
            else than that; stage 3 leaves it to what it is composed with to say otherwise.
        name: what tables call it.

    Returns:
        The strategy.

    Raises:
        ConfigError: for an unknown stage, or shard axes that do not split the batch.

    Example:
        >>> zero(1).opt_state.name, zero(1).params.name
        ('zero1', 'replicate')

    Source: Rajbhandari et al., ZeRO, SC 2020, arXiv:1910.02054.
    """
    if stage not in list(ZeROStage):
        raise ConfigError(
            f"unknown ZeRO stage {stage!r}; it must be a number from 0 to 3, such as zero(1)"
        )
    row = ZERO[ZeROStage(stage)]
    axes = axes_of(axes)
    over = axes if shard_axes is None else axes_of(shard_axes)
    if not over or not set(over) <= set(axes):
        raise ConfigError(
            f"shard axes {over} must be one or more of the batch axes {axes}; the ranks that split "
            "an array must have samples of their own"
        )
    label = name or f"zero{int(stage)}"
    split = LargestDim(over, min_elements, label)

    def place(is_split):
        return split if is_split else Replicate()

    return Strategy(
        label,
        batch_axes=axes,
        params=place(row.params),
        opt_state=place(row.opt_state),
        reduction=_said(reduction or Reduction(), row),
    )


def _said(reduction: Reduction, row: Split) -> Reduction:
    """The reduction, once per microbatch where that alone makes the stage."""
    if reduction.per is not None or not row.grads or row.params:
        return reduction
    return dataclasses.replace(reduction, per="microbatch")


class ZeROOptimizer:
    """An optax optimizer whose state is split over a group; PyTorch's and DeepSpeed's manner.

    The arithmetic is the optimizer's own: ZeRO decides where its arrays lie. Pass
    `optimizer.transformation` and `optimizer.strategy` to `build_train_step`.

    Args:
        transformation: any optax transformation.
        stage: 1, 2 or 3.
        group: a group by mesh axes.
        min_elements: leaves with fewer elements stay whole.

    Raises:
        GroupError: for a group by a list of ranks.

    Example:
        >>> from axon_dist.mesh import World
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
        require_axes(group, "ZeROOptimizer")
        OPTIMIZER.check("ZeROOptimizer", "transformation", transformation)
        self.transformation: optax.GradientTransformation = transformation
        self.group: ProcessGroup = group
        self.strategy: Strategy = zero(stage, group.axes, min_elements=min_elements)

    def init(self, params: PyTree) -> PyTree:
        """The state of the transformation."""
        return self.transformation.init(params)

    def update(self, grads: PyTree, state: PyTree, params: PyTree = None) -> tuple[Any, Any]:
        """The updates of the transformation."""
        return self.transformation.update(grads, state, params)
