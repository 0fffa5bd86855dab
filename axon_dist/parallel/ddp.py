"""`DistributedDataParallel`: every rank holds the model, the batch is split, gradients averaged."""

from __future__ import annotations

from typing import Any

import jax
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from ..collectives import GradSyncStrategy, broadcast, sync_gradients
from ..core.errors import StrategyConflictError
from ..core.told import MODULE
from ..core.typing import PyTree
from ..mesh import ProcessGroup, from_main
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
        self.reduce_dtype: Any = reduce_dtype
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

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
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
