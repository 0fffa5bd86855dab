"""ZeRO: which of parameters, gradients and optimizer state are split over the data ranks."""

from __future__ import annotations

import dataclasses
import enum
from types import MappingProxyType
from typing import Any

import optax

from ..core.choice import unknown
from ..core.errors import ConfigError
from ..core.told import OPTIMIZER
from ..mesh import ProcessGroup
from ..sharding import LargestDim, Replicate
from .strategy import Reduction, Strategy, axes_of, require_axes

MIN_ELEMENTS = 1024
"""Leaves with fewer elements stay whole by default."""


class ZeROStage(enum.IntEnum):
    """The stages of ZeRO; 0 is plain data parallelism."""

    STAGE0 = 0
    STAGE1 = 1
    STAGE2 = 2
    STAGE3 = 3

    @classmethod
    def _missing_(cls, value: object) -> Any:
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
    place = lambda is_split: split if is_split else Replicate()
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

    def init(self, params: Any) -> Any:
        """The state of the transformation."""
        return self.transformation.init(params)

    def update(self, grads: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        """The updates of the transformation."""
        return self.transformation.update(grads, state, params)
