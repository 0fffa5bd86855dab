"""`FullyShardedDataParallel`: PyTorch's wrapper over the ZeRO table, hybrid sharding included."""

from __future__ import annotations

import enum
from collections.abc import Callable
from types import MappingProxyType
from typing import Any

import jax
import optax
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from ..collectives import sync_gradients
from ..core.errors import ConfigError, NamedChoice, did_you_mean
from ..core.told import MODEL, ArgumentKind
from ..core.typing import Array, PyTree
from ..mesh import ProcessGroup
from ..nn import ActivationCheckpointing
from ..ops.precision import MixedPrecision, clip_by_global_norm
from ..sharding import shardings
from .ddp import MIN_ELEMENTS, ZeROStage, zero
from .memory import FSDPMemoryStats, estimate, measure
from .plans import AutoWrapPolicy, CPUOffload, TransformerAutoWrapPolicy
from .strategy import Reduction, Strategy, axes_of, require_axes


class ShardingStrategy(NamedChoice):
    """What FSDP splits, in PyTorch's words; FULL_SHARD is the default."""

    NO_SHARD = "no_shard"
    """Nothing: data parallelism."""
    SHARD_GRAD_OP = "shard_grad_op"
    """Gradients, between microbatches too, and optimizer state: ZeRO-2."""
    FULL_SHARD = "full_shard"
    """Parameters too: ZeRO-3."""
    HYBRID_SHARD = "hybrid_shard"
    """As FULL_SHARD within the last axis of the group, replicated over the others."""


STAGES: MappingProxyType[ShardingStrategy, ZeROStage] = MappingProxyType(
    {
        ShardingStrategy.NO_SHARD: ZeROStage.STAGE0,
        ShardingStrategy.SHARD_GRAD_OP: ZeROStage.STAGE2,
        ShardingStrategy.FULL_SHARD: ZeROStage.STAGE3,
        ShardingStrategy.HYBRID_SHARD: ZeROStage.STAGE3,
    }
)
"""Every sharding strategy is a stage of ZeRO; hybrid is stage 3 over fewer axes."""


def fsdp(
    sharding_strategy: ShardingStrategy | str = ShardingStrategy.FULL_SHARD,
    axes: str | tuple[str, ...] = ("fsdp",),
    *,
    cpu_offload: CPUOffload | str = CPUOffload.NONE,
    mixed_precision: MixedPrecision | str | bool | None = None,
    auto_wrap_policy: AutoWrapPolicy | None = None,
    activation_checkpointing: ActivationCheckpointing | None = None,
    min_elements: int = MIN_ELEMENTS,
    reduction: Reduction | None = None,
) -> Strategy:
    """Fully sharded data parallelism as a strategy.

    Args:
        sharding_strategy: what is split.
        axes: the mesh axes that split the batch; HYBRID_SHARD splits arrays over the last. One that
            `context_parallel` has, when composed with it, splits the arrays and no samples.
        cpu_offload: what lives in host memory between steps.
        mixed_precision: dtypes, a preset's name, or True.
        auto_wrap_policy: which modules are gathered and freed as one; by default the blocks
            that the model keeps in a list.
        activation_checkpointing: what the backward pass recomputes.
        min_elements: leaves with fewer elements stay whole.
        reduction: how gradients become one.

    Returns:
        The strategy.

    Raises:
        ConfigError: for an unknown name, or HYBRID_SHARD over a single axis.

    Example:
        >>> fsdp("hybrid_shard", ("dp", "fsdp")).params.axes
        ('fsdp',)

    Source: Zhao et al., PyTorch FSDP, VLDB 2023, arXiv:2304.11277.
    """
    chosen = _member(ShardingStrategy, sharding_strategy)
    hybrid = chosen is ShardingStrategy.HYBRID_SHARD
    axes = axes_of(axes)
    if hybrid and len(axes) < 2:
        raise ConfigError(
            f"hybrid_shard got the axes {axes}; it needs one to replicate over and a last one to "
            'split over, such as ("dp", "fsdp")'
        )
    _WRAP.check(chosen.value, "auto_wrap_policy", auto_wrap_policy)
    _REMAT.check(chosen.value, "activation_checkpointing", activation_checkpointing)
    made = zero(
        STAGES[chosen],
        axes,
        shard_axes=axes[-1:] if hybrid else axes,
        min_elements=min_elements,
        reduction=reduction,
        name=chosen.value,
    )
    return Strategy(
        name=made.name,
        batch_axes=made.batch_axes,
        params=made.params,
        opt_state=made.opt_state,
        reduction=made.reduction,
        wrap=auto_wrap_policy or TransformerAutoWrapPolicy(),
        precision=None if mixed_precision is None else MixedPrecision.of(mixed_precision),
        remat=activation_checkpointing,
        offload=_member(CPUOffload, cpu_offload),
    )


_WRAP = ArgumentKind(
    "a policy, such as TransformerAutoWrapPolicy(Block)", lambda x: hasattr(x, "units")
).or_none()
_REMAT = ArgumentKind(
    "an ActivationCheckpointing, such as ActivationCheckpointing(interval=1)",
    lambda x: isinstance(x, ActivationCheckpointing),
).or_none()


class FullyShardedDataParallel:
    """Wraps a module so that every rank holds a shard of it, and gathers what it computes with.

    Pass it to `build_train_step` in place of a strategy. Training equals one device at every
    sharding strategy; the optimizer only ever updates shards, so there is no whole copy that an
    update could be lost in.

    Args:
        module: any NNX module, or a function that makes one.
        group: a group by mesh axes, such as `world.group("fsdp")`.
        sharding_strategy: what is split.
        cpu_offload: what lives in host memory between steps.
        mixed_precision: dtypes, a preset's name, or True.
        auto_wrap_policy: which modules are gathered and freed as one.
        activation_checkpointing: what the backward pass recomputes.
        min_elements: leaves with fewer elements stay whole.
        reduction: how gradients become one.

    Raises:
        GroupError: for a group by a list of ranks.
        ConfigError: for an unknown name, or a call that needs the module of a function.

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
        require_axes(group, "FSDP")
        self.module: nnx.Module | Callable[[], nnx.Module] = module
        self.group: ProcessGroup = group
        self.is_training: bool = True
        self.sharding_strategy: ShardingStrategy = _member(ShardingStrategy, sharding_strategy)
        self._options: dict[str, Any] = {
            "cpu_offload": cpu_offload,
            "mixed_precision": mixed_precision,
            "auto_wrap_policy": auto_wrap_policy,
            "activation_checkpointing": activation_checkpointing,
            "min_elements": min_elements,
            "reduction": reduction,
        }
        self.strategy: Strategy = fsdp(self.sharding_strategy, group.axes, **self._options)

    def __call__(self, *args: object, **kwargs: object) -> Any:
        """Runs the module."""
        return self._made("a forward pass")(*args, **kwargs)

    forward = __call__

    def train(self) -> FullyShardedDataParallel:
        """Puts the module into training mode: dropout on, BatchNorm on batch statistics."""
        self._made("train()").train()
        self.is_training = True
        return self

    def eval(self) -> FullyShardedDataParallel:
        """Puts the module into evaluation mode."""
        self._made("eval()").eval()
        self.is_training = False
        return self

    def parameters(self) -> PyTree:
        """The trainable arrays as a nested dict; their shapes where a function makes the module."""
        if isinstance(self.module, nnx.Module):
            return _params(self.module)
        return jax.eval_shape(lambda: _params(self.module()))

    def _made(self, what: str) -> Any:
        if isinstance(self.module, nnx.Module):
            return self.module
        raise ConfigError(
            f"{what} needs a module, and FSDP got a function that makes one; take the module of a "
            "training state with TrainStep.merge(state)"
        )

    def gather_parameters(self, params: PyTree) -> PyTree:
        """Makes every array whole on every device; `reshard_parameters` is its exact inverse."""
        whole = NamedSharding(self.group.mesh, PartitionSpec())
        return jax.tree.map(lambda x: jax.device_put(x, whole), params)

    def reshard_parameters(self, params: PyTree) -> PyTree:
        """Splits arrays as the strategy keeps them; what was updated while whole stays updated."""
        kind = self.strategy.offload.params
        return jax.device_put(
            params, shardings(self.strategy.params, params, self.group.mesh, kind)
        )

    def sync_gradients(self, grads: PyTree) -> PyTree:
        """Averages rank-stacked gradients over the group, or one rank's inside `shard_map`."""
        return sync_gradients(grads, self.group)

    def clip_grad_norm(self, grads: PyTree, max_norm: float) -> tuple[PyTree, Array]:
        """Scales gradients down to a global norm, as `build_train_step(clip_norm=...)` does.

        Args:
            grads: arrays in global view, split or whole.
            max_norm: the largest norm.

        Returns:
            The clipped gradients, laid out as before, and the norm before clipping.
        """
        return clip_by_global_norm(grads, max_norm)

    def memory_estimate(
        self, optimizer: optax.GradientTransformation | None = None, accumulate: int = 2
    ) -> FSDPMemoryStats:
        """Bytes per device of parameters, gradients and optimizer state, as `estimate` has them."""
        mesh = self.group.mesh
        return estimate(self.strategy, self.parameters(), mesh, optimizer, accumulate=accumulate)

    def memory_stats(self, params: PyTree, grads: PyTree, opt_state: PyTree) -> FSDPMemoryStats:
        """Bytes per device of arrays that exist, read from their shards."""
        return measure(self.strategy, params, grads, opt_state)

    def compare_strategies(
        self, optimizer: optax.GradientTransformation | None = None
    ) -> list[FSDPMemoryStats]:
        """The estimate of every sharding strategy that the group can run."""
        rows = [
            fsdp(choice, self.group.axes, **self._options)
            for choice in ShardingStrategy
            if choice is not ShardingStrategy.HYBRID_SHARD or len(self.group.axes) > 1
        ]
        return [estimate(row, self.parameters(), self.group.mesh, optimizer) for row in rows]


FSDP = FullyShardedDataParallel


def _params(module: nnx.Module) -> PyTree:
    return nnx.to_pure_dict(nnx.state(module, nnx.Param))


def _member(kind: type[enum.StrEnum], value: object) -> Any:
    try:
        return kind(value)
    except ValueError:
        valid = [member.value for member in kind]
        raise ConfigError(
            f"unknown {kind.__name__} {value!r}.{did_you_mean(str(value), valid)}"
        ) from None
