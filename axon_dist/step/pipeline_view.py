"""Gradients in a pipeline: a rank runs its stages on microbatches in the order of a schedule."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping
from itertools import zip_longest
from typing import Any, TypeAlias, cast

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from ..core.reduction import all_sum, cast_for_reduction
from ..core.typing import Array, Batch, Path, PyTree
from ..core.weighted import Weighted
from ..ir.randomness import at_part
from ..ir.walk import equations
from ..parallel import PipelinePlan
from ..pipeline import (
    Executor,
    LossTrace,
    MicrobatchData,
    StageProgram,
    StageStorage,
    SwitchStages,
    UniformStages,
    buffer_paths,
    buffers_over_time,
    buffers_together,
    check_order,
    flatten,
    lookups_in,
    mean_microbatch_weight,
    nest,
    partition_by_tokens,
    with_merged_batch_dims,
    with_partitioned_loss,
)
from ..pipeline import Totals as PipelineSums
from ..sharding import axes_of, spec_axes, specs
from ..sharding.padding import cut_like
from .gather import only_axes, reduce_by
from .microbatches import PartBuffers, part_buffers_of
from .model_changes import ModelChanges, change_layers, rewritten
from .objective import GradientArguments, GradientResult, Sums, evaluate
from .plan import StepPlan
from .spec import StepSpec
from .statistics import synchronise_statistics
from .storage import nested_metrics, traced, unit_paths

Partitioned: TypeAlias = dict[int, int]
"""The parameters outside the blocks that are split over the vocabulary: index to split dim."""


def pipeline_gradients(plan: StepPlan, arguments: GradientArguments) -> GradientResult:
    """Computes gradients in a pipeline, in stored form, sharded like their moments.

    The pipeline axis and the batch axes are manual: a rank has its stages and its samples of every
    microbatch, adds up gradients over the whole schedule, and reduces them once. The compiler
    partitions over the other axes.

    Args:
        plan: the plan of the step.
        arguments: parameters, buffers, batch and scale.
    """
    spec = plan.spec
    region = PipelineRegion.of(plan)
    params, frozen, buffers, batch, scale = arguments
    microbatches = batch
    if spec.num_microbatches == 1:
        microbatches = jax.tree.map(lambda x: x[None], batch)
    params, frozen = region.changes.cast((params, frozen))
    replicated = PartitionSpec()
    split_dims: Partitioned = {}
    if region.pipeline.schedule.splits_vocabulary:
        split_dims = region.vocabulary_dims(buffers, microbatches)
    part_buffers = None
    if jax.tree.leaves(buffers) or _parts_draw(plan, batch):
        part_buffers = part_buffers_of(spec, plan.separator, batch, spec.strategy.batch_axes)
    rest_specs = [
        region.split_spec(split_dims.get(i), replicated) for i in range(len(region.storage.rest))
    ]
    stored = [(region.storage.trained.rows_of(params), region.storage.rest_of(params)), ([], [])]
    in_specs: list[Any] = [(region.row_specs, rest_specs), replicated]
    if region.storage.untrained is not None:
        stored[1] = (region.storage.untrained.rows_of(frozen), region.storage.rest_of(frozen))
        in_specs[1] = (region.frozen_specs, rest_specs)
    mapped = jax.shard_map(
        lambda p, f, b, x, s: region.run(p, f, b, x, s, part_buffers, split_dims),
        mesh=spec.mesh,
        axis_names=frozenset(region.axes),
        in_specs=(*in_specs, replicated, PartitionSpec(None, spec.strategy.batch_axes), replicated),
        out_specs=(*region.grad_specs(split_dims), replicated, replicated, replicated),
        check_vma=False,
    )
    num_parts = spec.num_parts
    # As in `gradient_sums`: gradients are scaled like those of the mean of the whole batch.
    scale = None if scale is None else scale / num_parts
    rows, rest, grad_factor, loss, buffers = mapped(
        stored[0], stored[1], buffers, microbatches, scale
    )
    if not region.is_whole_mesh:
        rows, rest = region.reduced_outside(rows, rest)
    # `shard_map` needs equal shards: cut the padding off again.
    reduced = cut_like(region.storage.assemble(rows, rest), plan.state_plan.params)
    reduced = jax.lax.with_sharding_constraint(reduced, plan.state_plan.grad_shardings)
    total, weight, metrics = loss
    grad_factor = grad_factor if scale is None else grad_factor * num_parts
    sums = Sums(jax.tree.map(lambda g: g * grad_factor, reduced), Weighted(total, weight), metrics)
    return sums.result(buffers, num_parts)


def _parts_draw(plan: StepPlan, batch: Batch) -> bool:
    """Whether the batch is cut into parts and the loss draws random numbers for each.

    Args:
        plan: the plan of the step.
        batch: placed leaves of shape [B, ...], or [K, B/K, ...] with K microbatches.
    """
    spec = plan.spec
    if spec.num_parts == 1:
        return False
    samples, shapes = spec.microbatch(batch)
    program = plan.separator.program(shapes, samples // spec.num_ranks)
    return any(e.primitive.name.startswith("random_") for e in equations(program.jaxpr))


def _kinds_of_buffers(
    mutable: Collection[int], buffers: PyTree, part_buffers: PartBuffers | None
) -> tuple[set[int], set[int]]:
    """Returns the buffers to average, and those whose initial value every microbatch reads.

    The second set includes the first.
    """
    if part_buffers is None:
        return set(), set()
    paths = buffer_paths(buffers)
    # A buffer that is missed would change with every microbatch, and no error would say so.
    missed = (part_buffers.averaged | part_buffers.once_per_step).difference(paths)
    assert not missed, f"the pipeline has no buffer {sorted(missed)}"
    averaged = {i for i in mutable if paths[i] in part_buffers.averaged}
    return averaged, {i for i in mutable if paths[i] in part_buffers.once_per_step} | averaged


def _data_of_microbatches(
    batch: Batch,
    buffers: list[Array],
    over_time: Mapping[int, Array],
    part_buffers: PartBuffers | None,
) -> Callable[[Array], MicrobatchData]:
    """A function of a microbatch's number: its buffers and its samples."""
    leaves = jax.tree.leaves(batch)

    def data(microbatch: Array) -> MicrobatchData:
        row = functools.partial(jax.lax.dynamic_index_in_dim, index=microbatch, keepdims=False)
        buffers_now = [
            row(over_time[i]) if i in over_time else leaf for i, leaf in enumerate(buffers)
        ]
        if part_buffers is not None:
            buffers_now = [at_part(leaf, part_buffers.part(microbatch)) for leaf in buffers_now]
        return MicrobatchData(buffers_now, [row(leaf) for leaf in leaves])

    return data


@dataclasses.dataclass(frozen=True, eq=False)
class PipelineRegion:
    """The work of one rank in the manual region.

    Args:
        plan: the plan of the step.
        pipeline: the pipeline of its strategy.
        storage: the stored form of the parameters.
        axes: the manual axes.
        is_whole_mesh: whether all axes are manual, so that none is left to the compiler.
        changes: the changes made to a rank's model; they mark its blocks as units.
        rank_shapes: the shapes of the model's parameters on a rank, which has only its own experts.
        row_specs: the specs of the rows of trained parameters in the manual region: split by
            stages, and experts over the ranks that their tokens are sent to.
        frozen_specs: the same for the rows of frozen parameters.
        added_over: the batch axes over which the gradients of each row are summed. Excludes
            axes that shard the row, such as `ep`: each shard already sees the samples of all ranks
            along them.
    """

    plan: StepPlan
    pipeline: PipelinePlan
    storage: StageStorage
    axes: tuple[str, ...]
    is_whole_mesh: bool
    changes: ModelChanges
    rank_shapes: PyTree
    row_specs: list[list[PartitionSpec]]
    frozen_specs: list[list[PartitionSpec]]
    added_over: list[list[tuple[str, ...]]]

    @classmethod
    def of(cls, plan: StepPlan) -> PipelineRegion:
        """Builds the region of a step whose strategy has a pipeline."""
        spec = plan.spec
        strategy = spec.strategy
        storage = plan.state_plan.storage.stage_storage
        assert strategy.pipeline is not None
        assert storage is not None
        axis = strategy.pipeline.axis
        batch_axes = strategy.batch_axes
        axes = (axis, *batch_axes)
        called = (*storage.stages.blocks, *storage.stages.shared)
        blocks, stacked_units = unit_paths(called, plan.state_plan.storage.stacks)
        rank_shapes = dict(storage.flat_shapes)
        row_specs = []
        manual = (axis, *strategy.ungathered_axes)
        for part in filter(None, (storage.trained, storage.untrained)):
            stored = jax.eval_shape(part.from_model, part.shapes)
            layout = specs(plan.state_plan.storage.strategy.params, stored, spec.mesh)
            layout = jax.tree.map(lambda each: only_axes(each, manual), layout)
            row_specs.append(part.rows_of(layout))
            by_keys = flatten(layout)
            for keys, stored_leaf in part.stored_leaf_of.items():
                sharding = NamedSharding(spec.mesh, PartitionSpec(*by_keys[stored_leaf][1:]))
                shape = sharding.shard_shape(rank_shapes[keys].shape)
                rank_shapes[keys] = jax.ShapeDtypeStruct(shape, rank_shapes[keys].dtype)
        return cls(
            plan=plan,
            pipeline=strategy.pipeline,
            storage=storage,
            axes=axes,
            is_whole_mesh=all(a in axes or size == 1 for a, size in spec.mesh.shape.items()),
            changes=ModelChanges(strategy, spec.model_spec, blocks, stacked_units=stacked_units),
            rank_shapes=nest(rank_shapes),
            row_specs=row_specs[0],
            frozen_specs=row_specs[1] if storage.frozen else [],
            added_over=[
                [tuple(axis for axis in batch_axes if axis not in spec_axes(row)) for row in of_row]
                for of_row in row_specs[0]
            ],
        )

    @property
    def spec(self) -> StepSpec:
        """The arguments of the step."""
        return self.plan.spec

    def vocabulary_dims(self, buffers: PyTree, batch: Batch) -> Partitioned:
        """Finds the parameters to split over the vocabulary, for a schedule that splits it."""
        trace = self.trace(buffers, batch, in_region=False)
        axis = self.pipeline.axis
        embedding = self.pipeline.schedule.splits_embedding
        rest = self.storage.rest
        size = self.spec.mesh.shape[axis]
        dims = partition_by_tokens(trace, rest, axis, size, embedding)
        return {i: dims[keys] for i, keys in enumerate(rest) if keys in dims}

    def split_spec(self, dim: int | None, spec: PartitionSpec) -> PartitionSpec:
        """Returns a spec that splits `dim` over the pipeline axis, and no other dim.

        Returns the given spec if it splits `dim` over that axis already, or if `dim` is None.
        """
        axis = self.pipeline.axis
        if dim is None or (dim < len(spec) and axes_of(spec, dim)[:1] == (axis,)):
            return spec
        return PartitionSpec(*(None,) * dim, axis)

    def grad_specs(self, split_dims: Partitioned) -> tuple[PyTree, PyTree]:
        """Returns the specs of the gradients of rows and rest as they leave the manual region.

        If other axes are automatic, a `psum_scatter` would first all-gather over them. So the
        gradients of all ranks then leave the region stacked in a new dim, and the compiler reduces
        them outside.
        """
        if not self.is_whole_mesh:
            axis = self.pipeline.axis
            rows = []
            for specs_of_row, axes_of_row in zip(self.row_specs, self.added_over, strict=True):
                pairs = zip(specs_of_row, axes_of_row, strict=True)
                rows.append([PartitionSpec(axis, by or None, *row[1:]) for row, by in pairs])
            return rows, PartitionSpec(axis, self.spec.strategy.batch_axes)
        manual = jax.tree.map(
            lambda x: only_axes(x.spec, self.axes), self.plan.state_plan.grad_shardings
        )
        rest = [
            None if spec is None else self.split_spec(split_dims.get(i), spec)
            for i, spec in enumerate(self.storage.rest_of(manual))
        ]
        return self.storage.trained.rows_of(manual), rest

    def run(
        self,
        params: Any,
        frozen: Any,
        buffers: PyTree,
        batch: Batch,
        scale: Any,
        part_buffers: PartBuffers | None,
        split_dims: Partitioned,
    ) -> Any:
        """Runs on one rank: takes its stages and samples, returns reduced sums and new buffers.

        `params` and `frozen` are each a pair of rows and rest; each rest has None where the other
        has a value. This rank holds only its shard of the parameters in `split_dims`.
        """
        spec = self.spec
        first_buffers = buffers
        if part_buffers is not None:
            first_buffers = part_buffers.before(buffers, buffers, 0)
        stacks = self.plan.state_plan.storage.stacks
        first_buffers = stacks.split_buffers(first_buffers) if stacks.counts else first_buffers
        trace = self.trace(first_buffers, batch)
        lookups = (
            lookups_in(trace, {i: self.storage.rest[i] for i in split_dims}) if split_dims else []
        )
        looked_up = tuple(lookup.rows.result for lookup in lookups)
        unsplit = {keys: i for i, keys in enumerate(self.storage.rest) if i not in split_dims}
        trace = dataclasses.replace(trace, looked_up=looked_up, known_params=tuple(unsplit))
        programs = self.programs(trace)
        count = spec.num_microbatches
        # The buffers that stages keep, each with the stage that updates it. `buffers_over_time`
        # computes the others that change.
        mutable = {i: stage for one in programs for i, stage in one.buffer_stages.items()}
        once_per_step = frozenset[Path]() if part_buffers is None else part_buffers.once_per_step
        averaged, reads_initial = _kinds_of_buffers(mutable, first_buffers, part_buffers)
        in_turn = {i: stage for i, stage in mutable.items() if i not in reads_initial}
        if in_turn:
            check_order(trace, first_buffers, self.pipeline.schedule, in_turn)
        rest = [x if x is not None else y for x, y in zip_longest(params[1], frozen[1])]
        ahead = {keys: rest[i] for keys, i in unsplit.items()}
        over_time, changed = buffers_over_time(
            trace, first_buffers, count, mutable, once_per_step, ahead
        )
        first = jax.tree.leaves(first_buffers)
        data = _data_of_microbatches(batch, first, over_time, part_buffers)
        untrained = {keys for keys, i in unsplit.items() if params[1][i] is None}
        weight = mean_microbatch_weight(
            trace, data, count, spec.strategy.batch_axes, ahead, untrained
        )
        sums = Executor(
            schedule=self.pipeline.schedule,
            programs=programs,
            axis=self.pipeline.axis,
            weights=jax.tree.map(lambda leaf: leaf[0], params[0]),
            rest=params[1],
            data=data,
            scale=scale if weight is None else (1.0 if scale is None else scale) / weight,
            saves_residuals=self.pipeline.saves_residuals,
            frozen_weights=jax.tree.map(lambda leaf: leaf[0], frozen[0]),
            frozen_rest=frozen[1],
            initial_buffers={i: first[i] for i in mutable},
            reads_initial=reads_initial,
            averaged_buffers=averaged,
            partitioned=split_dims,
            lookups=lookups,
        ).run()
        leaves, structure = jax.tree.flatten(changed)
        after = structure.unflatten(sums.final_buffers.get(i, x) for i, x in enumerate(leaves))
        changed = buffers_together(after) if stacks.counts else after
        if part_buffers is not None:
            changed = part_buffers.over_ranks(changed, buffers)
        grad_factor = jnp.ones(()) if weight is None else weight
        rows, rest = self._reduce(sums, split_dims)
        loss = self._loss_of_all_ranks(sums, cast(Any, trace.metrics))
        return rows, rest, grad_factor, loss, changed

    def _loss_of_all_ranks(self, sums: PipelineSums, names: Any) -> tuple[Array, Array, Any]:
        """Returns the sum of the loss, that of its weights, and the metrics by their names."""
        total, weight, metrics = all_sum(sums.loss, self.axes)
        return total, weight, nested_metrics(dict(zip(names, metrics, strict=True)))

    def trace(self, buffers: PyTree, batch: Batch, in_region: bool = True) -> LossTrace:
        """Traces the loss of one microbatch: of this rank in the region, of all ranks outside."""
        spec = self.spec
        strategy = spec.strategy

        def first(model: nnx.Module) -> None:
            change_layers(strategy, spec.world.mesh, model)
            if in_region and strategy.batch_axes:
                synchronise_statistics(model, strategy.batch_axes)

        policy = None if strategy.remat is None else strategy.remat.remat
        change = self.changes.change_with(None, first, policy)
        shapes = self.rank_shapes if in_region else self.storage.shapes
        params = jax.eval_shape(self.changes.cast, shapes)
        one = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), batch)
        run = functools.partial(evaluate, spec.model_spec, spec.loss_fn, change=change)
        # The rewriting is for one rank: outside of the region the trace covers the whole mesh.
        rewrite = functools.partial(
            rewritten, strategy=strategy, mesh=spec.mesh, memory_bytes=spec.memory_bytes
        )
        stacks = self.plan.state_plan.storage.stacks
        rewrite = rewrite if in_region else None
        return traced(run, rewrite, stacks, params, buffers, one, spec.num_parts)

    def programs(self, trace: LossTrace) -> list[StageProgram]:
        """Cuts a traced loss into stages: one program for all if its blocks are a uniform chain."""
        uniform = UniformStages.find(trace, self.storage) if trace.is_chain else None
        programs = (uniform or SwitchStages(trace, self.storage)).programs()
        if self.pipeline.schedule.splits_vocabulary:
            programs = [with_partitioned_loss(program, self.pipeline.axis) for program in programs]
        if not self.is_whole_mesh:
            return programs
        return [
            dataclasses.replace(
                program,
                middle=with_merged_batch_dims(program.middle),
                last=with_merged_batch_dims(program.last),
            )
            for program in programs
        ]

    def _reduce(self, sums: PipelineSums, split_dims: Partitioned) -> tuple[Any, Any]:
        """Sums rows over the ranks that share a stage, and the other parameters over all ranks."""
        row_specs, rest_specs = self.grad_specs(split_dims)
        reduce_dtype = self.spec.reduction.dtype
        batch_axes = self.spec.strategy.batch_axes
        rows = jax.tree.map(lambda leaf: leaf[None], sums.rows)
        rest = [sums.rest.get(i) for i in range(len(self.storage.rest))]
        if not self.is_whole_mesh:
            rows = jax.tree.map(lambda x: jnp.expand_dims(x, 1), rows)
            return rows, jax.tree.map(lambda x: jnp.expand_dims(x, (0, 1)), rest)

        def reduced(x: Array | None, spec: PartitionSpec, axes: tuple[str, ...]) -> Array | None:
            return x if x is None else reduce_by(x, only_axes(spec, axes), axes, reduce_dtype)

        reduced_rest = []
        for i, (x, rest_spec) in enumerate(zip(rest, rest_specs, strict=True)):
            # A parameter split over the vocabulary has another shard on each stage.
            axes = batch_axes if i in split_dims else self.axes
            reduced_rest.append(reduced(x, rest_spec, axes))
        reduced_rows = [
            [reduced(*each) for each in zip(*row, strict=True)]
            for row in zip(rows, row_specs, self.added_over, strict=True)
        ]
        return reduced_rows, reduced_rest

    def reduced_outside(self, rows: Any, rest: Any) -> tuple[Any, Any]:
        """Sums the addends that left the manual region stacked; the compiler reduces them."""
        grad_specs = jax.tree.map(
            lambda sharding: sharding.spec, self.plan.state_plan.grad_shardings
        )
        row_places = self.storage.trained.rows_of(grad_specs)
        rest_places = self.storage.rest_of(grad_specs)

        stages = self.pipeline.axis
        others = tuple(axis for axis in self.spec.mesh.axis_names if axis != stages)

        def total(x: Array, dim: int, spec: PartitionSpec) -> Array:
            # `jnp.sum` would add bfloat16 in float32, and send float32.
            summed = jax.lax.reduce_sum(cast_for_reduction(x, self.spec.reduction.dtype), (dim,))
            return jax.lax.with_sharding_constraint(summed, NamedSharding(self.spec.mesh, spec))

        def over_all(x: Array, spec: PartitionSpec) -> Array:
            # Sum first over the ranks that will each own a shard, then over the stages.
            part = total(x, 1, PartitionSpec(stages, *only_axes(spec, others)))
            return total(part, 0, spec).astype(x.dtype)

        rows = jax.tree.map(lambda x, spec: total(x, 1, spec).astype(x.dtype), rows, row_places)
        return rows, jax.tree.map(over_all, rest, rest_places)
