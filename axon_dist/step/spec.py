"""`StepSpec`: the arguments of a training step, with every option resolved."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import optax
from jax.sharding import AbstractMesh, AxisType

from ..core.own_context import AxisNames
from ..core.tree import shapes_of
from ..core.typing import Batch, LossFn
from ..mesh import World
from ..mesh.chips import machine_of
from ..nn import ActivationCheckpointing
from ..ops.precision import MixedPrecision
from ..parallel import (
    Reduction,
    Strategy,
    overlay,
    per_layer,
    resolve_setting,
    with_masters,
)
from ..sharding import FromMetadata, annotations_of
from .model_spec import ModelSpec
from .options import StepOptions


@dataclasses.dataclass(frozen=True, eq=False)
class StepSpec:
    """The arguments of `build_train_step`, with every option resolved.

    `StepPlan` has the decisions that follow from these arguments and from traces of the model.

    Args:
        model_spec: the model's structure, and the shapes of its parameters and buffers.
        loss_fn: the user's loss.
        optimizer: an optax transformation of the model's parameters.
        strategy: the strategy for the model's own leaves.
        world: the devices, and the mesh they form.
        options: the options of the step other than its strategy.
        region: the mesh as one replica sees it in the region where the axis between replicas is
            manual, if replicas train independently; None outside of such a region.
        batch: a global batch that the step is built for, as the loss sees it, arrays or shapes;
            None if no batch is known.
    """

    model_spec: ModelSpec
    loss_fn: LossFn
    optimizer: optax.GradientTransformationExtraArgs
    strategy: Strategy
    world: World
    options: StepOptions
    region: AbstractMesh | None = None
    batch: Batch | None = None

    @property
    def mesh(self) -> Any:
        """The mesh that is in context where the step is traced."""
        return self.world.mesh if self.region is None else self.region

    @property
    def num_microbatches(self) -> int:
        """The microbatches of a batch; a pipeline has its own number, an elastic step has 1."""
        if self.options.is_elastic:
            return 1
        pipeline = self.strategy.pipeline
        return self.options.accumulate if pipeline is None else pipeline.schedule.num_microbatches

    @property
    def num_ranks(self) -> int:
        """The number of ranks that split the samples of a microbatch.

        With `deterministic="elastic"` it is the number of logical shards.
        """
        if self.options.logical_shards is not None:
            return self.options.logical_shards
        # Axes that the mesh lacks count as 1 here; a rule refuses them later.
        return math.prod(self.mesh.shape.get(axis, 1) for axis in self.strategy.batch_axes)

    @property
    def num_parts(self) -> int:
        """The number of parts of a batch whose losses are computed on their own, per rank."""
        return self.num_microbatches * self.num_ranks

    @property
    def reduction(self) -> Reduction:
        """How the gradients of the ranks are reduced."""
        return self.strategy.reduction or Reduction()

    @property
    def compute_dtype(self) -> Any:
        """The dtype in which the model computes."""
        precision = self.strategy.precision
        return self.model_spec.dtype if precision is None else precision.compute

    @property
    def wants_local_view(self) -> bool:
        """Whether the reduction or `deterministic="elastic"` asks for gradients per rank.

        `local_view.py` then computes them in `shard_map`. A loss that couples samples runs in
        global view all the same, or is refused where an option needs ranks (`rank_requirements`).
        False for pipelines, whose view has ranks of its own.
        """
        strategy = self.strategy
        # Without batch axes there is nothing to sum per rank. Parameters that are never gathered,
        # such as experts, also process samples of other ranks, so their gradients are not per rank.
        if strategy.pipeline is not None or strategy.ungathered_axes or not strategy.batch_axes:
            return False
        reduces_per_rank = self.reduction.is_local(self.num_microbatches, self.compute_dtype)
        return self.options.is_elastic or reduces_per_rank

    @property
    def memory_bytes(self) -> int | None:
        """The memory of a device; None if the chip is unknown."""
        # The mesh of a region of replicas is abstract, so ask that of the world.
        chip = machine_of(self.world.mesh)
        return None if chip is None else chip.memory_bytes

    def replica(self, region: bool = True) -> StepSpec:
        """Returns the step of one replica, if the strategy has replicas that train independently.

        Args:
            region: whether it is traced where the axis between replicas is manual; otherwise it is
                a step of all devices that does not split this axis.
        """
        outer_loop = self.strategy.outer_loop
        if outer_loop is None:
            return self
        axes = tuple(axis for axis in self.strategy.batch_axes if axis != outer_loop.axis)
        strategy = dataclasses.replace(self.strategy, outer_loop=None, batch_axes=axes)
        manual = {outer_loop.axis: AxisType.Manual}
        mesh = self.world.mesh.abstract_mesh.update_axis_types(manual) if region else None
        return dataclasses.replace(self, strategy=strategy, region=mesh)

    def together(self) -> StepSpec:
        """Returns the step of all replicas as if they synchronized on every step."""
        if self.strategy.outer_loop is None:
            return self
        return dataclasses.replace(
            self, strategy=dataclasses.replace(self.strategy, outer_loop=None)
        )

    def microbatch(self, batch: Batch) -> tuple[int, Batch]:
        """Returns the number of samples of a microbatch over all ranks, and its shapes.

        Args:
            batch: placed leaves of shape [B, ...], or [K, B/K, ...] with K microbatches.
        """
        shapes = shapes_of(batch, lead=int(self.num_microbatches > 1))
        return jax.tree.leaves(shapes)[0].shape[0], shapes


def strategy_for(
    model_spec: ModelSpec,
    strategy: Strategy,
    precision: MixedPrecision | str | bool | None,
    remat: ActivationCheckpointing | None,
    names: AxisNames | None = None,
) -> Strategy:
    """Resolves every option of a strategy: precision, remat, reduction, the model's layouts.

    Without a precision, gradients are computed in the dtype of the parameters, and sent in it
    unless `Reduction.dtype` names another.

    Args:
        model_spec: the model, whose variables may carry sharding annotations, and whose layers
            may be stacked.
        strategy: the user's strategy.
        precision: the step's `precision` argument, or None.
        remat: the step's `remat` argument, or None.
        names: maps the axis names of the model's annotations to mesh axes.

    Returns:
        The strategy.

    Raises:
        StrategyConflictError: when the strategy and the step disagree.
    """
    policy = None if precision is None else MixedPrecision.of(precision)
    asked = Strategy("build_train_step", precision=policy, remat=remat)
    merged = dataclasses.replace(
        strategy,
        precision=resolve_setting([strategy, asked], "precision"),
        remat=resolve_setting([strategy, asked], "remat"),
    )
    reduction = merged.reduction or Reduction()
    default = model_spec.dtype if merged.precision is None else merged.precision.reduce_dtype
    dtype = reduction.dtype or default
    reduction = dataclasses.replace(reduction, per=merged.reduces_per, dtype=dtype)
    resolved = dataclasses.replace(merged, reduction=reduction)
    annotations = annotations_of(model_spec.abstract)
    if names is not None:
        annotations = tuple((path, names.of_annotation(spec)) for path, spec in annotations)
    if any(any(spec) for _, spec in annotations):
        resolved = overlay(resolved, FromMetadata(annotations))
    if model_spec.stacks:
        resolved = per_layer(resolved, frozenset(model_spec.stacks))
    if resolved.precision is None:
        return resolved
    return with_masters(resolved, model_spec.frozen_paths, resolved.precision.param)
