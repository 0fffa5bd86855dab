"""Gradients by a pipeline: stages per rank, microbatches in the order of a schedule."""

from __future__ import annotations

import dataclasses
import functools
from functools import cached_property
from itertools import zip_longest
from typing import Any, TypeAlias, cast

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from ..core.reduction import all_sum, on_wire
from ..core.tree import leaves_with_paths
from ..core.typing import Array, Batch, Function, Path, PyTree
from ..core.weighted import Weighted
from ..jaxpr.randomness import at_part, without_rank
from ..parallel import PipelinePlan, Strategy
from ..pipeline import (
    Data,
    Executor,
    Keys,
    LossTrace,
    ModelStorage,
    StageProgram,
    SwitchStages,
    UniformStages,
    buffers_over_time,
    buffers_together,
    check_order,
    flatten,
    lookups_in,
    mean_weight,
    nest,
    parted_by_tokens,
    with_joined_rows,
    with_parted_loss,
)
from ..pipeline import Totals as PipelineSums
from ..sharding import axes_of, spec_axes, specs
from .gather import only_axes, reduce_by
from .microbatches import Draws, draws_of
from .objective import GradientArguments, GradientResult, Outcome, Sums, evaluate
from .spec import StepSpec
from .storage import nested_metrics, traced, unit_paths
from .view import ModelChanges, spelled, synchronise_statistics

Parted: TypeAlias = dict[int, int]
"""Of parameters outside the blocks that lie in parts of the vocabulary, number and dim."""


def pipeline_gradients(spec: StepSpec, given: GradientArguments) -> GradientResult:
    """Gradients by a pipeline, in stored form, laid where their moments lie.

    The pipeline axis and the batch axes are manual: a rank holds its stages and its samples of
    every microbatch, adds up gradients over the whole schedule, and reduces them once. Other axes
    stay with the compiler.

    Args:
        spec: model, loss, optimizer, strategy, devices and options of the step.
        given: parameters, buffers, batch and scale.
    """
    plan, (params, frozen, buffers, batch, scale) = StagedPlan(spec), given
    if plan.pipeline.num_microbatches == 1:
        batch = jax.tree.map(lambda x: x[None], batch)
    params, frozen = plan.view.cast((params, frozen))
    whole, parted = PartitionSpec(), plan.parted(buffers, batch)
    draws = draws_of(spec, batch, spec.strategy.batch_axes)
    rest_lies = plan.given_rest(parted)
    stored = [(plan.rows.trained.rows_of(params), plan.rows.rest_of(params)), ([], [])]
    lies: list[Any] = [(plan.row_specs, rest_lies), whole]
    if frozen:
        stored[1] = plan.rows.untrained.rows_of(frozen), plan.rows.rest_of(frozen)
        lies[1] = plan.specs_of(plan.rows.untrained), rest_lies
    mapped = jax.shard_map(
        lambda p, f, b, x, s: plan.run(p, f, b, x, s, draws, parted),
        mesh=spec.mesh,
        axis_names=frozenset(plan.axes),
        in_specs=(*lies, whole, PartitionSpec(None, spec.strategy.batch_axes), whole),
        out_specs=(*plan.grad_specs(parted), whole, whole, whole),
        check_vma=False,
    )
    parts = plan.pipeline.num_microbatches * spec.num_ranks
    # As in `gradient_sums`: scaled like the mean of the whole batch.
    scale = None if scale is None else scale / parts
    rows, rest, unit, loss, buffers = mapped(stored[0], stored[1], buffers, batch, scale)
    reduced = plan.rows.assemble(*plan.reduced_outside(rows, rest))
    reduced = jax.lax.with_sharding_constraint(reduced, spec.stored.owners)
    total, weight, metrics = loss
    unit = unit if scale is None else unit * parts
    sums = Sums(jax.tree.map(lambda g: g * unit, reduced), Weighted(total, weight), metrics)
    return GradientResult(*sums.means(), buffers)


@dataclasses.dataclass(frozen=True, eq=False)
class StagedPlan:
    """What one rank does in the manual region.

    Args:
        spec: model, loss, optimizer, strategy, devices and options of the step.
    """

    spec: StepSpec

    @property
    def strategy(self) -> Strategy:
        """The strategy, about the model's own leaves."""
        return self.spec.strategy

    @property
    def pipeline(self) -> PipelinePlan:
        """What the strategy says about the pipeline."""
        assert self.strategy.pipeline is not None
        return self.strategy.pipeline

    @property
    def rows(self) -> ModelStorage:
        """The stored form of the parameters."""
        assert self.spec.stored.storage.rows is not None
        return self.spec.stored.storage.rows

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes that are manual."""
        return (self.pipeline.axis, *self.strategy.batch_axes)

    @property
    def is_whole_mesh(self) -> bool:
        """Whether no axis is left to the compiler."""
        return all(axis in self.axes or size == 1 for axis, size in self.spec.mesh.shape.items())

    @cached_property
    def view(self) -> ModelChanges:
        """How a rank sees the model: its blocks are units."""
        blocks, looped = unit_paths(self.rows.stages.called, self.spec.stored.storage.stacks)
        return ModelChanges(self.strategy, self.spec.parts, blocks, looped=looped)

    @cached_property
    def row_specs(self) -> list[list[PartitionSpec]]:
        """Where the rows of trained parameters lie in the manual region."""
        return self.specs_of(self.rows.trained)

    def specs_of(self, rows: ModelStorage) -> list[list[PartitionSpec]]:
        """Where rows lie in the manual region: by stages, and experts as their tokens find them."""
        return rows.rows_of(self._stored_specs(rows))

    def _stored_specs(self, rows: ModelStorage) -> PyTree:
        stored = jax.eval_shape(rows.from_model, rows.shapes)
        found = specs(self.spec.stored.storage.strategy.params, stored, self.spec.mesh)
        axes = (self.pipeline.axis, *self.strategy.resident)
        return jax.tree.map(lambda spec: only_axes(spec, axes), found)

    @cached_property
    def _own_shapes(self) -> PyTree:
        """The shapes of the model's parameters where a rank computes: of its own experts alone."""
        parts = self.rows.trained, self.rows.untrained
        stored = [flatten(self._stored_specs(rows)) for rows in parts]

        def own(keys: Keys, leaf: Any) -> Any:
            number, kind = self.rows.block_of(keys), keys in self.rows.frozen
            slot = None if number is None else parts[kind].slot_of(number, keys)
            if slot is None:
                return leaf
            lies = PartitionSpec(*stored[kind][slot][1:])
            shape = NamedSharding(self.spec.mesh, lies).shard_shape(leaf.shape)
            return jax.ShapeDtypeStruct(shape, leaf.dtype)

        return nest({keys: own(keys, leaf) for keys, leaf in flatten(self.rows.shapes).items()})

    def _added_over(self, row: PartitionSpec) -> tuple[str, ...]:
        """The batch axes over which a row's gradients are added up: not those it lies split over.

        The samples of all ranks along these have come to it.
        """
        return tuple(axis for axis in self.strategy.batch_axes if axis not in spec_axes(row))

    def parted(self, buffers: PyTree, batch: Batch) -> Parted:
        """What lies in parts of the vocabulary: nothing, unless the schedule has actions for it."""
        if not self.pipeline.schedule.splits_vocabulary:
            return {}
        trace = self.trace(buffers, batch, in_region=False)
        axis = self.pipeline.axis
        embedding = self.pipeline.schedule.splits_embedding
        rest, size = self.rows.rest, self.spec.mesh.shape[axis]
        dims = parted_by_tokens(trace, rest, axis, size, embedding)
        return {i: dims[keys] for i, keys in enumerate(rest) if keys in dims}

    def given_rest(self, parted: Parted) -> Any:
        """Where the rest lies when it enters the manual region."""
        count = len(self.rows.rest)
        return [self._by_tokens(parted.get(i), PartitionSpec()) for i in range(count)]

    def _by_tokens(self, dim: int | None, spec: PartitionSpec) -> PartitionSpec:
        """The spec, or one that splits a dim over the pipeline where this one does not begin so."""
        axis = self.pipeline.axis
        if dim is None or (dim < len(spec) and axes_of(spec, dim)[:1] == (axis,)):
            return spec
        return PartitionSpec(*(None,) * dim, axis)

    def grad_specs(self, parted: Parted) -> tuple[PyTree, PyTree]:
        """Where rows and rest lie when they leave the manual region.

        A reduce-scatter in a region where other axes are automatic would first gather over these.
        There the addends of all ranks leave side by side, and the compiler sums them outside.
        """
        if not self.is_whole_mesh:
            axis, beside = self.pipeline.axis, self._added_over

            def of_row(row):
                return PartitionSpec(axis, beside(row) or None, *row[1:])

            addends = PartitionSpec(axis, self.strategy.batch_axes)
            return jax.tree.map(of_row, self.row_specs), addends
        kept = jax.tree.map(lambda owner: only_axes(owner.spec, self.axes), self.spec.stored.owners)
        rest = [
            None if spec is None else self._by_tokens(parted.get(i), spec)
            for i, spec in enumerate(self.rows.rest_of(kept))
        ]
        return self.rows.trained.rows_of(kept), rest

    def run(
        self,
        params: Any,
        frozen: Any,
        buffers: PyTree,
        batch: Batch,
        scale: Any,
        draws: Draws | None,
        parted: Parted,
    ) -> Any:
        """Runs on one rank: its stages and its samples in, reduced sums and new buffers out.

        `params` and `frozen` are each the rows and the rest, of which None is at the places of the
        other's; of what is `parted` this rank has its part.
        """
        spec = self.spec
        drawing = buffers if draws is None else draws.before(buffers, buffers, 0)
        drawing = spec.stored.storage.stacks.buffers_apart(drawing)
        trace = self.trace(drawing, batch)
        lookups = lookups_in(trace, {i: self.rows.rest[i] for i in parted})
        looked_up = tuple(each.rows.result for each in lookups)
        whole = {keys: i for i, keys in enumerate(self.rows.rest) if i not in parted}
        trace = dataclasses.replace(trace, looked_up=looked_up, rest=tuple(whole))
        programs, count = self.programs(trace), self.pipeline.num_microbatches
        learned = {i: stage for one in programs for i, stage in one.learns.items()}
        unchanged = frozenset[Path]() if draws is None else draws.once
        paths = [path for path, _ in leaves_with_paths(drawing)]
        means = {i for i in learned if draws is not None and paths[i] in draws.means}
        once = {i for i in learned if paths[i] in unchanged} | means
        in_turn = {i: stage for i, stage in learned.items() if i not in once}
        check_order(trace, drawing, self.pipeline.schedule, in_turn)
        rest = [x if x is not None else y for x, y in zip_longest(params[1], frozen[1])]
        ahead = {keys: rest[i] for keys, i in whole.items()}
        buffers_at, changed = buffers_over_time(trace, drawing, count, learned, unchanged, ahead)
        leaves, first = jax.tree.leaves(batch), jax.tree.leaves(drawing)

        def data(microbatch: Array) -> Data:
            now = buffers_at(microbatch)
            if draws is not None:
                now = [at_part(leaf, draws.part(microbatch)) for leaf in now]
            at = functools.partial(jax.lax.dynamic_index_in_dim, keepdims=False)
            return Data(now, [at(leaf, microbatch) for leaf in leaves])

        weight = mean_weight(trace, data, count, spec.strategy.batch_axes)
        sums = Executor(
            schedule=self.pipeline.schedule,
            stages=programs,
            axis=self.pipeline.axis,
            weights=_own_entry(params[0]),
            rest=params[1],
            data=data,
            scale=scale if weight is None else (1.0 if scale is None else scale) / weight,
            keeps=self.pipeline.keeps_residuals,
            frozen_weights=_own_entry(frozen[0]),
            frozen_rest=frozen[1],
            learned={i: first[i] for i in learned},
            once=once,
            means=means,
            parted=parted,
            lookups=lookups,
        ).run()
        leaves, structure = jax.tree.flatten(changed)
        after = structure.unflatten(sums.learned.get(i, x) for i, x in enumerate(leaves))
        changed = buffers_together(after)
        unit = jnp.ones(()) if weight is None else weight
        reduced, names = self._reduce(sums, parted), cast(Any, trace.metrics)
        total, of_loss, metrics = all_sum(sums.loss, self.axes)
        loss = total, of_loss, nested_metrics(dict(zip(names, metrics, strict=True)))
        return *reduced, unit, loss, without_rank(changed, buffers)

    def trace(self, buffers: PyTree, batch: Batch, in_region: bool = True) -> LossTrace:
        """The loss of one microbatch of this rank; outside of the manual region of all ranks."""
        remat = self.strategy.remat
        spec, policy = self.spec, None if remat is None else remat.remat

        def also(model: nnx.Module) -> None:
            spec.change_layers(model)
            if in_region and self.strategy.batch_axes:
                synchronise_statistics(model, self.strategy.batch_axes)

        prepare = self.view.prepare(None, also, policy)
        shapes = self._own_shapes if in_region else self.rows.shapes
        params = jax.eval_shape(self.view.cast, shapes)
        one = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), batch)

        def run(params: PyTree, buffers: PyTree, batch: Batch) -> Outcome:
            return evaluate(spec.parts, spec.loss_fn, params, buffers, batch, prepare)

        def spelling(forward: Function) -> Any:
            # Outside of the region it would be for all of the mesh.
            return spelled(forward, self.strategy, self.spec.mesh) if in_region else forward

        return traced(run, spelling, self.spec.stored.storage.stacks, params, buffers, one)

    def programs(self, trace: LossTrace) -> list[StageProgram]:
        """The stages of a traced loss: one program for all where blocks are a chain of equals."""
        uniform = UniformStages.find(trace, self.rows)
        programs = (uniform or SwitchStages(trace, self.rows)).programs()
        if self.pipeline.schedule.splits_vocabulary:
            programs = [with_parted_loss(program, self.pipeline.axis) for program in programs]
        if not self.is_whole_mesh:
            return programs
        return [
            dataclasses.replace(
                program,
                middle=with_joined_rows(program.middle),
                last=with_joined_rows(program.last),
            )
            for program in programs
        ]

    def _reduce(self, sums: PipelineSums, parted: Parted) -> tuple[Any, Any]:
        """Sums over the ranks that share a stage; what is outside the blocks over all ranks."""
        row_specs, rest_specs = self.grad_specs(parted)
        wire, batch_axes = self.spec.reduction.dtype, self.strategy.batch_axes
        rows = jax.tree.map(lambda leaf: leaf[None], sums.rows)
        rest = [sums.rest.get(i) for i in range(len(self.rows.rest))]
        if not self.is_whole_mesh:
            rows = jax.tree.map(lambda x: jnp.expand_dims(x, 1), rows)
            return rows, jax.tree.map(lambda x: jnp.expand_dims(x, (0, 1)), rest)

        def reduced(x: Array | None, spec: PartitionSpec, axes: tuple[str, ...]) -> Array | None:
            return x if x is None else reduce_by(x, only_axes(spec, axes), axes, wire)

        pairs = enumerate(zip(rest, rest_specs, strict=True))
        of_rest = [reduced(x, s, batch_axes if i in parted else self.axes) for i, (x, s) in pairs]
        of_rows = jax.tree.map(
            lambda x, spec, row: reduced(x, spec, self._added_over(row)),
            *(rows, row_specs, self.row_specs),
            is_leaf=lambda x: x is None,
        )
        return of_rows, of_rest

    def reduced_outside(self, rows: Any, rest: Any) -> tuple[Any, Any]:
        """The sums of addends that left the manual region side by side; others are sums already."""
        if self.is_whole_mesh:
            return rows, rest
        found = jax.tree.map(lambda sharding: sharding.spec, self.spec.stored.owners)
        own = self.rows.trained.rows_of(found), self.rows.rest_of(found)

        stages = self.pipeline.axis
        others = tuple(axis for axis in self.spec.mesh.axis_names if axis != stages)

        def total(x: Array, dim: int, spec: PartitionSpec) -> Array:
            # `jnp.sum` would add, and send, bfloat16 as float32.
            summed = jax.lax.reduce_sum(on_wire(x, self.spec.reduction.dtype), (dim,))
            return jax.lax.with_sharding_constraint(summed, NamedSharding(self.spec.mesh, spec))

        def over_all(x: Array, spec: PartitionSpec) -> Array:
            # First over the ranks that will each own a part, then over the stages.
            part = total(x, 1, PartitionSpec(stages, *only_axes(spec, others)))
            return total(part, 0, spec).astype(x.dtype)

        rows = jax.tree.map(lambda x, spec: total(x, 1, spec).astype(x.dtype), rows, own[0])
        return rows, jax.tree.map(over_all, rest, own[1])


def _own_entry(rows: Any) -> Any:
    """The entry of this rank in every leaf of the rows, whose dim 0 counts the ranks."""
    return jax.tree.map(lambda leaf: leaf[0], rows)
