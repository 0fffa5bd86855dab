"""PyTorch-style wrappers `DDP`, `FSDP` and `ZeROOptimizer`, and the memory of a strategy."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Self

import jax
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from ..collectives import GradSyncStrategy, broadcast, sync_gradients
from ..core.checks import COUNT, MODEL, MODULE, OPTIMIZER, check_fields, checked
from ..core.errors import ConfigError, GroupError
from ..core.own_context import in_own_context
from ..core.tree import bytes_per_device, num_bytes, num_params
from ..core.typing import Array, ArrayTree, PyTree
from ..mesh import GROUP, ProcessGroup, from_main
from ..nn import ActivationCheckpointing
from ..ops.precision import MixedPrecision, cast_floating, clip_by_global_norm
from ..sharding import Policy, Replicate, explain_optimizer, put, shardings
from ..sharding.padding import even_places
from .data import MIN_ELEMENTS, ShardingStrategy, ZeROStage, ddp, fsdp, zero
from .plans import AutoWrapPolicy, CPUOffload
from .strategy import Reduction, Strategy, with_masters


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
        return jax.eval_shape(lambda: _params(self.module()))

    def sync_gradients(self, grads: PyTree) -> PyTree:
        """Averages gradients over the group: rank-stacked, or per rank inside `shard_map`."""
        return sync_gradients(grads, self.group)

    def _made(self, what: str) -> Any:
        if isinstance(self.module, nnx.Module):
            return self.module
        raise ConfigError(
            f"{what} needs a module, and got a function that makes one; take the module of a "
            "training state with TrainStep.merge(state)"
        )


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
            mean.

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
        >>> from axon_dist.mesh import World
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
        """Shards arrays as the strategy stores them; changes to the gathered arrays are kept."""
        kind = self.strategy.offload.params
        places = shardings(self.strategy.params, params, self.group.mesh, kind)
        # No padding: a leaf that does not divide over all axes is split over those that divide it.
        return put(params, even_places(params, places))

    def clip_grad_norm(self, grads: ArrayTree, max_norm: float) -> tuple[PyTree, Array]:
        """Scales gradients down to a global norm, as `build_train_step(clip_norm=...)` does.

        Args:
            grads: arrays in global view, split or whole.
            max_norm: the largest norm.

        Returns:
            The clipped gradients, sharded as before, and the norm before clipping.
        """
        return clip_by_global_norm(grads, max_norm)

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
            raise ConfigError("memory_stats got some of params, grads, opt_state; give all or none")
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


@dataclasses.dataclass(frozen=True)
class FSDPMemoryStats:
    """Bytes of the training state on the fullest device.

    Args:
        total_params: parameters of the whole model.
        param_memory_bytes: bytes of parameters on a device.
        grad_memory_bytes: bytes of gradients on a device; see `estimate` for when.
        optim_memory_bytes: bytes of optimizer state on a device.
        world_size: the number of devices.
        strategy: the name of the strategy.
        replicated_bytes: bytes of the three together on one device if nothing were split.

    Example:
        >>> stats = FSDPMemoryStats(5050, 5050, 5050, 10100, 4, "full_shard", 80800)
        >>> stats.total_memory_bytes, stats.memory_savings
        (20200, 0.75)
        >>> print(stats)
        full_shard total: 19.7 KiB (savings 75.0%)
    """

    total_params: int
    param_memory_bytes: int
    grad_memory_bytes: int
    optim_memory_bytes: int
    world_size: int
    strategy: str
    replicated_bytes: int

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def total_memory_bytes(self) -> int:
        """Parameters, gradients and optimizer state together."""
        return self.param_memory_bytes + self.grad_memory_bytes + self.optim_memory_bytes

    @property
    def total_memory_mib(self) -> float:
        """The total in MiB, 2**20 bytes."""
        return self.total_memory_bytes / 2**20

    @property
    def total_memory_mb(self) -> float:
        """The same as `total_memory_mib`."""
        return self.total_memory_mib

    @property
    def memory_savings(self) -> float:
        """The share of the replicated bytes that the strategy saves, 0 to 1."""
        return 1 - self.total_memory_bytes / max(self.replicated_bytes, 1)

    def __str__(self) -> str:
        return (
            f"{self.strategy} total: {format_bytes(self.total_memory_bytes)} "
            f"(savings {self.memory_savings:.1%})"
        )


def format_bytes(count: float) -> str:
    """Writes bytes in the largest binary unit that leaves at least one.

    Example:
        >>> format_bytes(20200), format_bytes(3 * 2**30)
        ('19.7 KiB', '3.0 GiB')
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


@in_own_context
def estimate(
    strategy: Strategy,
    params: ArrayTree,
    mesh: Mesh,
    optimizer: optax.GradientTransformation | None = None,
    grad_dtype: DTypeLike | None = None,
    accumulate: int = 2,
) -> FSDPMemoryStats:
    """Estimates bytes per device before any array exists, leaf by leaf, from the policies.

    A leaf that stays whole, because none of its dims divides or because it is small, counts whole.
    If a step would shard its master weights, as ZeRO-1 and 2 do when compute is in a narrower
    dtype, parameters are counted as sharded. `measure` counts arrays that exist.

    Args:
        strategy: its policies decide what is split, and how many ways.
        params: arrays or `ShapeDtypeStruct`s.
        mesh: a mesh with named axes; no device is needed.
        optimizer: the optimizer whose state is counted; Adam by default.
        grad_dtype: the dtype in which gradients are kept; the parameters' by default.
        accumulate: microbatches per step. Above 1, as papers count, the gradients are those
            accumulated between microbatches (whole on every rank if reduced once per step). With 1,
            they are those given to the optimizer, sharded like its moments.

    Returns:
        The bytes.
    """
    if strategy.precision is not None:
        stored = strategy.precision.param
        params = jax.eval_shape(lambda tree: cast_floating(tree, stored), params)
        strategy = with_masters(strategy, frozenset(), stored)
    state = jax.eval_shape((optimizer or optax.adam(1e-3)).init, params)
    grads = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, grad_dtype or x.dtype), params)
    grad_policy = Replicate() if strategy.holds_whole_gradients(accumulate) else strategy.opt_state
    trees = ((strategy.params, params), (grad_policy, grads), (strategy.opt_state, state))
    # Step counts and other scalars of the optimizer are replicated and negligible.
    sizes = [num_bytes([leaf for leaf in jax.tree.leaves(tree) if leaf.shape]) for _, tree in trees]
    of_params, of_grads, moments = (_bytes_on(policy, params, tree, mesh) for policy, tree in trees)
    total, name = num_params(params), strategy.name
    return FSDPMemoryStats(total, of_params, of_grads, moments, mesh.size, name, sum(sizes))


@in_own_context
def measure(
    strategy: Strategy, params: ArrayTree, grads: ArrayTree, opt_state: ArrayTree
) -> FSDPMemoryStats:
    """Measures bytes per device: the shards that the fullest device holds.

    Args:
        strategy: for its name.
        params: arrays on the devices.
        grads: arrays on the devices, such as from `TrainStep.gradients`.
        opt_state: arrays on the devices.

    Returns:
        The bytes, host memory not counted.
    """
    trees = (params, grads, opt_state)
    of_params, of_grads, moments = map(bytes_per_device, trees)
    total_bytes = num_bytes(trees)
    devices = jax.tree.leaves(params)[0].sharding.device_set
    total, name = num_params(params), strategy.name
    return FSDPMemoryStats(total, of_params, of_grads, moments, len(devices), name, total_bytes)


def _bytes_on(policy: Policy, params: PyTree, tree: PyTree, mesh: Mesh) -> int:
    """Returns the bytes of a tree on one device."""
    rows = explain_optimizer(policy, params, tree, mesh).rows
    return sum(row.bytes_per_device for row in rows if row.shape)
