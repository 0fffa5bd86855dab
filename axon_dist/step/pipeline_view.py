"""Gradients by a pipeline: stages per rank, microbatches in the order of a schedule."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import cached_property
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ..core.reduction import all_sum, on_wire
from ..core.typing import Array, Batch, PyTree, Shape
from ..core.weighted import Weighted
from ..parallel import PipelinePlan, Reduction, Strategy, only_axes, reduce_by
from ..pipeline import (
    Data,
    Executor,
    LossTrace,
    ModelStorage,
    Stacks,
    StageProgram,
    SwitchStages,
    UniformStages,
    buffers_over_time,
    mean_weight,
    parted_by_tokens,
    with_joined_rows,
    with_parted_loss,
)
from ..pipeline import Sums as PipelineSums
from ..program.randomness import Rows, with_rank, without_rank
from ..sharding import axes_of
from .local_view import sample_rows
from .objective import GradientFn, GradientResult, Outcome, Sums, evaluate
from .spec import StepSpec
from .staged_loss import nested_metrics, traced
from .view import View, fp8_of, paths_of, spelled

Parted: TypeAlias = dict[int, int]
"""Of parameters outside the blocks that lie in parts of the vocabulary, number and dim."""


def pipeline_gradients(spec: StepSpec) -> GradientFn:
    """Builds the gradient function that runs a pipeline.

    The pipeline axis and the batch axes are manual: a rank holds its stages and its samples of
    every microbatch, adds up gradients over the whole schedule, and reduces them once. Other axes
    stay with the compiler.

    Args:
        spec: model, loss, optimizer, strategy, devices and options of the step.

    Returns:
        The function; gradients are in stored form, and lie where their moments do.
    """
    plan = StagedPlan(spec)

    def gradients(
        params: PyTree, frozen: PyTree, buffers: PyTree, batch: Batch, scale: Array | None
    ) -> GradientResult:
        if plan.pipeline.num_microbatches == 1:
            batch = jax.tree.map(lambda x: x[None], batch)
        params, frozen = plan.view.cast((params, frozen))
        whole, parted = PartitionSpec(), plan.parted(buffers, batch)
        lie = PartitionSpec(plan.pipeline.axis), plan.given_rest(parted)
        per_sample = PartitionSpec(None, spec.strategy.batch_axes)
        mapped = jax.shard_map(
            lambda p, f, b, x, s: plan.run(p, f, b, x, s, plan.samples(batch), parted),
            mesh=spec.mesh,
            axis_names=frozenset(plan.axes),
            in_specs=(lie, lie if frozen else whole, whole, per_sample, whole),
            out_specs=(*plan.grad_specs(parted), whole, whole, whole),
            check_vma=False,
        )
        parts = plan.pipeline.num_microbatches * spec.num_ranks
        # As in `gradient_sums`: scaled like the mean of the whole batch.
        scale = None if scale is None else scale / parts
        of_ranks = lambda stored: (plan.rows.rows_of(stored), plan.rows.rest_of(stored))
        given = of_ranks(params), of_ranks(frozen) if frozen else ([], [])
        rows, rest, unit, loss, buffers = mapped(*given, buffers, batch, scale)
        reduced = plan.rows.assemble(*plan.reduced_outside(rows, rest))
        reduced = jax.lax.with_sharding_constraint(reduced, spec.owners)
        total, weight, metrics = loss
        unit = unit if scale is None else unit * parts
        sums = Sums(jax.tree.map(lambda g: g * unit, reduced), Weighted(total, weight), metrics)
        return GradientResult(*sums.means(), buffers)

    return gradients


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
    def mesh(self) -> Mesh:
        """The mesh."""
        return self.spec.mesh

    @property
    def pipeline(self) -> PipelinePlan:
        """What the strategy says about the pipeline."""
        assert self.strategy.pipeline is not None
        return self.strategy.pipeline

    @property
    def rows(self) -> ModelStorage:
        """The stored form of the parameters."""
        assert self.spec.storage.rows is not None
        return self.spec.storage.rows

    @property
    def stacks(self) -> Stacks:
        """The modules of the model that hold many blocks."""
        return self.spec.storage.stacks

    @property
    def reduction(self) -> Reduction:
        """How gradients become one."""
        return self.spec.reduction

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes that are manual."""
        return (self.pipeline.axis, *self.strategy.batch_axes)

    @property
    def is_whole_mesh(self) -> bool:
        """Whether no axis is left to the compiler."""
        return all(axis in self.axes or size == 1 for axis, size in self.mesh.shape.items())

    @cached_property
    def view(self) -> View:
        """How a rank sees the model: its blocks are units."""
        modules = {self.stacks.in_model(keys) for keys in self.rows.stages.called}
        blocks = frozenset("/".join(map(str, keys)) for keys in modules)
        return View(
            self.strategy.precision,
            blocks,
            self.strategy.remat,
            frees_weights=False,
            moves_activations=True,
            weights=paths_of(self.spec.parts.weights),
            fp8=fp8_of(self.strategy, self.spec.parts),
        )

    def parted(self, buffers: PyTree, batch: Batch) -> Parted:
        """What lies in parts of the vocabulary: nothing, unless the schedule has actions for it."""
        if not self.pipeline.schedule.splits_vocabulary:
            return {}
        # Not yet spelled for its mesh, which outside the manual region would be for all of it.
        trace = self.trace(buffers, batch, lambda forward: forward)
        axis = self.pipeline.axis
        dims = parted_by_tokens(trace, axis, self.mesh.shape[axis])
        return {i: dims[keys] for i, keys in enumerate(self.rows.rest) if keys in dims}

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
            addends = PartitionSpec(self.pipeline.axis, self.strategy.batch_axes)
            return addends, addends
        kept = jax.tree.map(lambda owner: only_axes(owner.spec, self.axes), self.spec.owners)
        rest = enumerate(self.rows.rest_of(kept))
        place = lambda i, spec: None if spec is None else self._by_tokens(parted.get(i), spec)
        return self.rows.rows_of(kept), [place(i, spec) for i, spec in rest]

    def run(
        self,
        params: Any,
        frozen: Any,
        buffers: PyTree,
        batch: Batch,
        scale: Any,
        samples: Any,
        parted: Parted,
    ) -> Any:
        """Runs on one rank: its stages and its samples in, reduced sums and new buffers out.

        `params` and `frozen` are each the rows and the rest, None at the places of the other's; of
        what is `parted` this rank has its part.
        """
        drawing = buffers
        if samples:
            drawing = with_rank(buffers, samples, jax.lax.axis_index(self.strategy.batch_axes))
        trace = self.trace(drawing, batch)
        buffers_at, changed = buffers_over_time(trace, drawing, self.pipeline.num_microbatches)
        leaves = jax.tree.leaves(batch)

        def data(microbatch: Array) -> Data:
            at = lambda x: jax.lax.dynamic_index_in_dim(x, microbatch, keepdims=False)
            return Data(buffers_at(microbatch), [at(leaf) for leaf in leaves])

        weight = mean_weight(trace, data, self.pipeline.num_microbatches, self.strategy.batch_axes)
        sums = Executor(
            schedule=self.pipeline.schedule,
            stages=self.programs(trace),
            axis=self.pipeline.axis,
            weights=_own_entry(params[0]),
            rest=params[1],
            data=data,
            scale=_over(scale, weight),
            keeps=self.pipeline.keeps_residuals,
            frozen_weights=_own_entry(frozen[0]),
            frozen_rest=frozen[1],
            parted=parted,
        ).run()
        unit = jnp.ones(()) if weight is None else weight
        return (
            *self._reduce(sums, parted),
            unit,
            self._loss(trace, sums),
            without_rank(changed, buffers),
        )

    def trace(self, buffers: PyTree, batch: Batch, spelling: Any = None) -> LossTrace:
        """The loss of one microbatch of this rank; `spelling` in place of the mesh's."""
        remat = self.strategy.remat
        spec, policy = self.spec, None if remat is None else remat.remat
        prepare = self.view.prepare(None, spec.change_layers, policy)
        params = jax.eval_shape(self.view.cast, self.rows.shapes)
        one = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), batch)

        def run(params: PyTree, buffers: PyTree, batch: Batch) -> Outcome:
            return evaluate(spec.parts, spec.loss_fn, params, buffers, batch, prepare)

        of_mesh = lambda forward: spelled(forward, self.strategy, self.mesh)
        return traced(run, spelling or of_mesh, self.stacks, params, buffers, one)

    def programs(self, trace: LossTrace) -> list[StageProgram]:
        """The stages of a traced loss: one program for all where blocks are a chain of equals."""
        uniform = UniformStages.find(trace, self.rows)
        programs = (uniform or SwitchStages(trace, self.rows)).programs()
        if self.pipeline.schedule.splits_vocabulary:
            programs = [with_parted_loss(program, self.pipeline.axis) for program in programs]
        if not self.is_whole_mesh:
            return programs
        join = lambda p: dataclasses.replace(
            p, middle=with_joined_rows(p.middle), last=with_joined_rows(p.last)
        )
        return [join(program) for program in programs]

    def samples(self, batch: Batch) -> Mapping[Shape, Rows]:
        """Which random draws of the model count samples."""
        return sample_rows(self.spec, batch, 1) if self.strategy.batch_axes else {}

    def _reduce(self, sums: PipelineSums, parted: Parted) -> tuple[Any, Any]:
        """Sums over the ranks that share a stage; what is outside the blocks over all ranks."""
        row_specs, rest_specs = self.grad_specs(parted)
        wire, batch_axes = self.reduction.dtype, self.strategy.batch_axes
        rows = jax.tree.map(lambda leaf: leaf[None], sums.rows)
        rest = [sums.rest.get(i) for i in range(len(self.rows.rest))]
        if not self.is_whole_mesh:
            beside = lambda *dims: lambda x: jnp.expand_dims(x, dims)
            return jax.tree.map(beside(1), rows), jax.tree.map(beside(0, 1), rest)
        reduce_row = lambda x, spec: reduce_by(x, only_axes(spec, batch_axes), batch_axes, wire)
        reduce_rest = lambda x, spec: reduce_by(x, spec, self.axes, wire)
        of_rest = [
            jax.tree.map(reduce_row if i in parted else reduce_rest, x, spec)
            for i, (x, spec) in enumerate(zip(rest, rest_specs, strict=True))
        ]
        return jax.tree.map(reduce_row, rows, row_specs), of_rest

    def reduced_outside(self, rows: Any, rest: Any) -> tuple[Any, Any]:
        """The sums of addends that left the manual region side by side; others are sums already."""
        if self.is_whole_mesh:
            return rows, rest
        found = jax.tree.map(lambda sharding: sharding.spec, self.spec.owners)
        own = self.rows.rows_of(found), self.rows.rest_of(found)

        stages = self.pipeline.axis
        others = tuple(axis for axis in self.mesh.axis_names if axis != stages)

        def total(x: Array, dim: int, spec: PartitionSpec) -> Array:
            # `jnp.sum` would add, and send, bfloat16 as float32.
            summed = jax.lax.reduce_sum(on_wire(x, self.reduction.dtype), (dim,))
            return jax.lax.with_sharding_constraint(summed, NamedSharding(self.mesh, spec))

        def over_all(x: Array, spec: PartitionSpec) -> Array:
            # First over the ranks that will each own a part, then over the stages.
            part = total(x, 1, PartitionSpec(stages, *only_axes(spec, others)))
            return total(part, 0, spec).astype(x.dtype)

        row = lambda x, spec: total(x, 1, spec).astype(x.dtype)
        return jax.tree.map(row, rows, own[0]), jax.tree.map(over_all, rest, own[1])

    def _loss(self, trace: LossTrace, sums: PipelineSums) -> tuple[Array, Array, dict]:
        total, weight, metrics = all_sum(sums.loss, self.axes)
        names: Any = trace.metrics
        return total, weight, nested_metrics(dict(zip(names, metrics, strict=True)))


def _own_entry(rows: Any) -> Any:
    """The entry of this rank in every leaf of the rows, whose dim 0 counts the ranks."""
    return jax.tree.map(lambda leaf: leaf[0], rows)


def _over(scale: Array | None, weight: Array | None) -> Array | None:
    """`scale / weight`, None standing for 1."""
    if weight is None:
        return scale
    return (1.0 if scale is None else scale) / weight
