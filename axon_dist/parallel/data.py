"""Data parallelism: DDP, ZeRO and FSDP, and replicas over slow links (DiLoCo, local SGD)."""

from __future__ import annotations

import dataclasses
import enum
import functools
from collections.abc import Callable
from types import MappingProxyType
from typing import Any, ParamSpec

import optax

from ..collectives import Compression, GradSyncStrategy, compression_of
from ..core.checks import COUNT, OPTIMIZER, SIZE, ArgumentKind, checked, is_whole
from ..core.errors import ConfigError, NamedChoice, unknown
from ..nn import ActivationCheckpointing
from ..ops.precision import MixedPrecision
from ..sharding import LargestDim, Replicate
from .strategy import Reduction, Strategy, axes_or, axis_names
from .strategy_values import AutoWrapPolicy, CPUOffload, OuterLoop

_P = ParamSpec("_P")


@checked()
def ddp(
    axes: str | tuple[str, ...] | None = None,
    *,
    sync: GradSyncStrategy = GradSyncStrategy.SYNCHRONOUS,
    bucket_capacity: int | None = None,
    reduce_dtype: Any = None,
    broadcast_buffers: bool = True,
    per: str | None = None,
) -> Strategy:
    """Data parallelism as a strategy: the batch is split over `axes`, everything else replicated.

    Args:
        axes: the mesh axes that split the batch; None for `dp`, or `fsdp` on a mesh without it.
        sync: with buckets, SYNCHRONOUS starts after the whole backward pass, and OVERLAPPED reduces
            a bucket when its gradients are ready and the bucket before it is done. Without buckets
            XLA decides when.
        bucket_capacity: elements in one reduction; None leaves the grouping to XLA, except that
            OVERLAPPED then uses 25 million (100 MB in float32).
        reduce_dtype: the dtype in which gradients are sent; None keeps their own.
        broadcast_buffers: whether BatchNorm uses the statistics of the global batch, as on one
            device and like SyncBatchNorm in torch. The argument of this name in torch's DDP means
            something else: it copies the buffers of rank 0. With False the statistics are those of
            a rank's samples of each microbatch. Which samples these are depends on the number of
            microbatches, and on the number of processes if your own code picks the rows of each.
        per: `"step"` reduces once per step, whatever the number of microbatches; `"microbatch"`
            reduces after each one. None means `"step"`, unless another part of a composed strategy
            keeps gradients split.

    Returns:
        The strategy.

    Raises:
        StrategyConflictError: for NO_SYNC, under which the replicas would diverge.

    Example:
        >>> ddp().batch_axes
        ('dp',)
    """
    reduction = Reduction(per, sync, bucket_capacity, reduce_dtype, broadcast_buffers)
    # The default size of overlapped reductions is filled in, so that the strategy shows it.
    reduction = dataclasses.replace(reduction, bucket_capacity=reduction.capacity)
    over, defaults = axes_or(axes, "dp")
    return Strategy("ddp", batch_axes=over, reduction=reduction, default_axes=defaults)


MIN_ELEMENTS = 1024
"""Leaves with fewer elements stay whole by default."""


class ZeROStage(enum.IntEnum):
    """The stages of ZeRO."""

    STAGE0 = 0
    """Plain data parallelism: every rank holds everything."""
    STAGE1 = 1
    """The optimizer state is split."""
    STAGE2 = 2
    """Also, a rank keeps only its shard of the gradients from one microbatch to the next."""
    STAGE3 = 3
    """Parameters are also split, and gathered where they are used."""

    @classmethod
    def _missing_(cls, value: object) -> object:
        raise unknown(cls, value)


@dataclasses.dataclass(frozen=True)
class Split:
    """A row of the ZeRO table: which arrays are split from one step or microbatch to the next.

    Args:
        params: whether parameters are split, and gathered where they are used.
        grads: whether a rank keeps only its shard of the gradients from one microbatch to the next.
            With one microbatch stages 1 and 2 are the same program: gradients are reduced to the
            owners of their moments.
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
"""The stages as data. DDP, ZeRO-1, ZeRO-2 and ZeRO-3 differ only in these flags."""


_WRAP = ArgumentKind(
    "a policy, such as TransformerAutoWrapPolicy(Block)", lambda x: hasattr(x, "units")
).or_none()
_REMAT = ArgumentKind(
    "an ActivationCheckpointing, such as ActivationCheckpointing(interval=1)",
    lambda x: isinstance(x, ActivationCheckpointing),
).or_none()


@checked(min_elements=SIZE, auto_wrap_policy=_WRAP, activation_checkpointing=_REMAT)
def zero(
    stage: int | ZeROStage,
    axes: str | tuple[str, ...] | None = None,
    *,
    shard_axes: str | tuple[str, ...] | None = None,
    cpu_offload: CPUOffload | str = CPUOffload.NONE,
    mixed_precision: MixedPrecision | str | bool | None = None,
    auto_wrap_policy: AutoWrapPolicy | None = None,
    activation_checkpointing: ActivationCheckpointing | None = None,
    min_elements: int = MIN_ELEMENTS,
    reduction: Reduction | None = None,
    name: str | None = None,
) -> Strategy:
    """Data parallelism that shards training state over the ranks instead of replicating it.

    Every rank owns one shard of each split array. Gradients are reduced to their owner, which
    updates its shard of the optimizer state. The new parameters are then gathered (stages 1 and 2),
    or stay split and are gathered where they are used (stage 3). Training is the same at every
    stage; memory and traffic differ. If `mixed_precision` computes in a narrower dtype than that of
    the stored parameters, stages 1 and 2 also split these, as master weights, and gather them once
    per step in the narrower dtype; not in pipelines.

    Args:
        stage: 0 to 3.
        axes: the mesh axes that split the batch; None for `dp`, or `fsdp` on a mesh without it. The
            axis of a composed `context_parallel` may be among them; it splits arrays only.
        shard_axes: the mesh axes that split the arrays; by default all that split the batch. Some
            of them make hybrid sharding: split over these axes, replicated over the others.
        cpu_offload: which arrays live in host memory between steps.
        mixed_precision: dtypes, a preset's name, or True.
        auto_wrap_policy: which modules are gathered and freed as one unit, in stage 3; by default
            the modules of every class that the model repeats in a list, wherever they are.
        activation_checkpointing: what the backward pass recomputes.
        min_elements: leaves with fewer elements stay whole.
        reduction: how gradients are reduced. By default stage 1 reduces once per step, and stages 2
            and 3 once per microbatch, so that they never hold a whole gradient. A strategy
            composed with stage 2 cannot change this default, because reducing per microbatch is
            what distinguishes it from stage 1; one composed with stage 3 can.
        name: the name shown in tables.

    Returns:
        The strategy.

    Raises:
        ConfigError: for an unknown stage, or shard axes that do not split the batch.

    Example:
        >>> zero(1).opt_state.name, zero(1).params.name
        ('zero1', 'replicate')

    Source: Rajbhandari et al., ZeRO, SC 2020, arXiv:1910.02054.
    """
    if not is_whole(stage) or stage not in list(ZeROStage):
        raise ConfigError(
            f"unknown ZeRO stage {stage!r:.80}; it must be a number from 0 to 3, such as zero(1)"
        )
    row = ZERO[ZeROStage(stage)]
    axes, defaults = axes_or(axes, "dp")
    over = axes if shard_axes is None else axis_names(shard_axes)
    if not set(over) <= set(axes):
        raise ConfigError(
            f"shard axes {over!s:.200} must be one or more of the batch axes {axes}; the ranks "
            "that split an array must have different samples"
        )
    label = name or f"zero{int(stage)}"
    split = LargestDim(over, min_elements, label)
    reduction = reduction or Reduction()
    if reduction.per is None and row.grads and not row.params:
        # Stage 2 differs from stage 1 only in reducing once per microbatch.
        reduction = dataclasses.replace(reduction, per="microbatch")
    return Strategy(
        label,
        batch_axes=axes,
        params=split if row.params else Replicate(),
        opt_state=split if row.opt_state else Replicate(),
        reduction=reduction,
        wrap=auto_wrap_policy,
        precision=None if mixed_precision is None else MixedPrecision.of(mixed_precision),
        remat=activation_checkpointing,
        offload=CPUOffload(cpu_offload),
        default_axes=defaults,
    )


class ShardingStrategy(NamedChoice):
    """The arrays that FSDP splits, in PyTorch's words; FULL_SHARD is the default."""

    NO_SHARD = "no_shard"
    """Splits nothing: plain data parallelism."""
    SHARD_GRAD_OP = "shard_grad_op"
    """Gradients (also from one microbatch to the next) and optimizer state: ZeRO-2. Parameters stay
    whole between steps, whereas PyTorch splits them until the forward pass. With a narrower compute
    dtype, and without a pipeline, the stored parameters are split as master weights and gathered
    once per step."""
    FULL_SHARD = "full_shard"
    """Parameters too: ZeRO-3."""
    HYBRID_SHARD = "hybrid_shard"
    """Like FULL_SHARD within the last axis of the group, replicated over the others."""


STAGES: MappingProxyType[ShardingStrategy, ZeROStage] = MappingProxyType(
    {
        ShardingStrategy.NO_SHARD: ZeROStage.STAGE0,
        ShardingStrategy.SHARD_GRAD_OP: ZeROStage.STAGE2,
        ShardingStrategy.FULL_SHARD: ZeROStage.STAGE3,
        ShardingStrategy.HYBRID_SHARD: ZeROStage.STAGE3,
    }
)
"""The ZeRO stage of each sharding strategy; hybrid is stage 3 over fewer axes."""


_NAMES: MappingProxyType[ShardingStrategy, str] = MappingProxyType(
    {
        ShardingStrategy.NO_SHARD: "no_shard",
        ShardingStrategy.SHARD_GRAD_OP: "zero2",
        ShardingStrategy.FULL_SHARD: "fsdp",
        ShardingStrategy.HYBRID_SHARD: "hybrid",
    }
)
"""The name in configs of each sharding strategy."""


def _sharding_strategy_first(make: Callable[_P, Strategy]) -> Callable[_P, Strategy]:
    """Lets the sharding strategy come first, as in PyTorch and in version 0.1."""

    @functools.wraps(make)
    def reordered(*args: Any, **options: Any) -> Strategy:
        # A mesh axis with the name of a sharding strategy is given by keyword.
        if args and ShardingStrategy.named(args[0]) is not None:
            options["sharding_strategy"] = args[0]
            args = args[1:]
        return make(*args, **options)  # pyright: ignore[reportCallIssue]

    return reordered


@_sharding_strategy_first
@checked(min_elements=SIZE, auto_wrap_policy=_WRAP, activation_checkpointing=_REMAT)
def fsdp(
    axes: str | tuple[str, ...] | None = None,
    sharding_strategy: ShardingStrategy | str | tuple[str, ...] = ShardingStrategy.FULL_SHARD,
    *,
    cpu_offload: CPUOffload | str = CPUOffload.NONE,
    mixed_precision: MixedPrecision | str | bool | None = None,
    auto_wrap_policy: AutoWrapPolicy | None = None,
    activation_checkpointing: ActivationCheckpointing | None = None,
    min_elements: int = MIN_ELEMENTS,
    reduction: Reduction | None = None,
) -> Strategy:
    """Fully sharded data parallelism as a strategy.

    Parameters, gradients and optimizer state are sharded over the ranks, as `sharding_strategy`
    says. With full sharding, each block's parameters are gathered when it runs.

    Args:
        axes: the mesh axes that split the batch; HYBRID_SHARD splits arrays over the last. None
            stands for `fsdp`, or `dp` on a mesh without it; with HYBRID_SHARD for
            `("dp", "fsdp")`. The axis of a composed `context_parallel` may be among them; it splits
            arrays only.
        sharding_strategy: which arrays are split. The two may also come in the other order, as in
            `fsdp("hybrid_shard", ("dp", "fsdp"))`.
        cpu_offload: which arrays live in host memory between steps.
        mixed_precision: dtypes, a preset's name, or True.
        auto_wrap_policy: which modules are gathered and freed as one unit; by default the modules
            of every class that the model repeats in a list, wherever they are.
        activation_checkpointing: what the backward pass recomputes.
        min_elements: leaves with fewer elements stay whole.
        reduction: how gradients are reduced.

    Returns:
        The strategy.

    Raises:
        ConfigError: for an unknown name, or HYBRID_SHARD over a single axis.

    Example:
        >>> fsdp(("dp", "fsdp"), "hybrid_shard").params.axes
        ('fsdp',)

    Source: Zhao et al., PyTorch FSDP, VLDB 2023, arXiv:2304.11277.
    """
    kind = ShardingStrategy(sharding_strategy)
    hybrid = kind is ShardingStrategy.HYBRID_SHARD
    axes, defaults = (("dp", "fsdp"), ()) if axes is None and hybrid else axes_or(axes, "fsdp")
    if hybrid and len(axes) < 2:
        raise ConfigError(
            f"hybrid_shard got the axes {axes}; it needs one to replicate over and a last one to "
            'split over, such as ("dp", "fsdp")'
        )
    made = zero(
        STAGES[kind],
        axes,
        shard_axes=axes[-1:] if hybrid else axes,
        cpu_offload=cpu_offload,
        mixed_precision=mixed_precision,
        auto_wrap_policy=auto_wrap_policy,
        activation_checkpointing=activation_checkpointing,
        min_elements=min_elements,
        reduction=reduction,
        name=_NAMES[kind],
    )
    return dataclasses.replace(made, default_axes=defaults)


@checked(every=COUNT, fragments=COUNT, outer=OPTIMIZER.or_none())
def diloco(
    axis: str = "nodes",
    *,
    every: int,
    outer: optax.GradientTransformation | None = None,
    compress: Compression | str | None = None,
    fragments: int = 1,
) -> Strategy:
    """Replicas over a slow axis that train independently and synchronize every H steps.

    The batch is also split over the axis: each replica has consecutive samples, the same for any
    number of microbatches and processes. It takes H inner steps on its share with the step's own
    optimizer and sends nothing over the axis. Then the mean over the replicas of `before - after`,
    the parameters before and after these steps, is the gradient of the outer optimizer, and all
    replicas continue from the parameters that it computes. Each keeps its own inner moments. With
    H=1, plain SGD inside and `optax.sgd(1.0)` outside, this equals data parallelism if all
    samples have the same weight and the model draws no random numbers.

    Args:
        axis: the mesh axis between the replicas, such as `nodes` or `pods`. Composed strategies
            split each replica over the other axes.
        every: H, the steps between two outer steps.
        outer: the outer optimizer; None uses the paper's,
            `optax.sgd(0.7, momentum=0.9, nesterov=True)`.
        compress: `"int8"`, `"fp8"` or `"top_k"`, or a `Quantized` or `TopK` with other settings.
            Each replica adds its compression error to what it sends next (error feedback).
        fragments: into how many parts the parameters are cut, each synchronized at its own step
            (streaming DiLoCo).

    Returns:
        The strategy.

    Raises:
        ConfigError: when H or the number of fragments is not a positive integer, when there are
            more fragments than steps, or when the outer optimizer or compression is invalid.

    Example:
        >>> loop = diloco("nodes", every=100).outer_loop
        >>> loop.axis, loop.every
        ('nodes', 100)

    Source: Douillard et al., DiLoCo, arXiv:2311.08105; fragments: Streaming DiLoCo,
    arXiv:2501.18512.
    """
    return _outer_loop_strategy("diloco", axis, every, outer, compress, fragments)


@checked(every=COUNT, fragments=COUNT)
def local_sgd(
    axis: str = "nodes",
    *,
    every: int,
    compress: Compression | str | None = None,
    fragments: int = 1,
) -> Strategy:
    """Replicas over a slow axis whose parameters are averaged every H steps.

    This is `diloco` with the outer optimizer `optax.sgd(1.0)`: `θ_r = mean_r θ_r`.

    Args:
        axis: the mesh axis between the replicas.
        every: H, the steps between two averages.
        compress: as for `diloco`.
        fragments: as for `diloco`.

    Returns:
        The strategy.

    Raises:
        ConfigError: as for `diloco`.

    Example:
        >>> local_sgd("nodes", every=8).batch_axes
        ('nodes',)

    Source: Stich, Local SGD, arXiv:1805.09767.
    """
    return _outer_loop_strategy("local_sgd", axis, every, optax.sgd(1.0), compress, fragments)


def _outer_loop_strategy(
    name: str,
    axis: str,
    every: int,
    outer: optax.GradientTransformation | None,
    compress: Compression | str | None,
    fragments: int,
) -> Strategy:
    if fragments > every:
        raise ConfigError(
            f"{name} got fragments={fragments} and every={every}; each fragment synchronizes at a "
            f"different step, so give at most {every} fragments, or more steps"
        )
    optimizer = optax.sgd(0.7, momentum=0.9, nesterov=True) if outer is None else outer
    outer_loop = OuterLoop(
        axis,
        int(every),
        optax.with_extra_args_support(optimizer),
        compression_of(compress),
        int(fragments),
    )
    return Strategy(name, batch_axes=(axis,), outer_loop=outer_loop)
