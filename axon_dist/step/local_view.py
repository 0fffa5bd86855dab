"""Gradients held per rank and reduced once: what the compiler cannot be told in global view."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, PartitionSpec

from ..collectives import plan_buckets, reduce_buckets
from ..core.reduction import all_mean, all_sum, on_wire
from ..core.tree import is_key
from ..core.typing import Array, Batch, LossFn, Path, PyTree
from ..parallel import LocalGather, Reduction, Strategy, all_gather_by, only_axes, reduce_by
from ..program.randomness import Rows, find_rows, with_rank, without_rank
from ..sharding import Policy, specs
from .accumulate import GradientFn, accumulate
from .normalization import synchronise_statistics
from .objective import Forward, Sums, forward_of, gradient_sums
from .parts import ModelParts
from .view import MakeGather, View, layers_of, spelled, view_of


def local_gradients(
    parts: ModelParts, loss_fn: LossFn, strategy: Strategy, mesh: Mesh, num_microbatches: int
) -> Any:
    """Builds the gradient function that runs per rank and reduces by hand.

    Each rank of the batch axes differentiates its rows of every microbatch and adds up. Either
    weights are made whole once, and one reduction at the end gives every owner its shard of the
    sum; or each unit gathers its weights and reduces its gradients, microbatch by microbatch.
    Other mesh axes stay with the compiler. `check_vma` is off, so that gradients taken inside
    stay local until we reduce them, and user modules need no casts in their scans.

    Args:
        parts: the model.
        loss_fn: the user's loss.
        strategy: its `reduction` says how gradients become one.
        mesh: the mesh.
        num_microbatches: how many microbatches the batch is cut into.

    Returns:
        A function (params, buffers, batch, scale) -> (mean gradients where their moments lie,
        metrics, new buffers).
    """
    plan = LocalPlan(parts, loss_fn, strategy, mesh, num_microbatches)

    def gradients(params: PyTree, buffers: PyTree, batch: Batch, scale: Array | None) -> Any:
        rows = plan.rows(batch, buffers)
        buffer_specs = buffer_partition(buffers, plan.reduction, plan.axes)
        mapped = jax.shard_map(
            lambda p, b, x, s: plan.run(p, b, x, s, rows),
            mesh=mesh,
            axis_names=frozenset(plan.axes),
            in_specs=(
                plan.specs(strategy.params),
                buffer_specs,
                batch_spec(plan.axes, num_microbatches),
                PartitionSpec(),
            ),
            out_specs=(plan.specs(strategy.opt_state), PartitionSpec(), buffer_specs),
            check_vma=False,
        )
        grads, (loss, metrics), buffers = mapped(params, buffers, batch, scale)
        grads, metrics = Sums(grads, loss, metrics).means()
        return grads, metrics, buffers

    return gradients


@dataclasses.dataclass(frozen=True)
class LocalPlan:
    """What one rank does in the manual region.

    Args:
        parts: the model.
        loss_fn: the user's loss.
        strategy: the strategy.
        mesh: the mesh.
        num_microbatches: how many microbatches the batch is cut into.
    """

    parts: ModelParts
    loss_fn: LossFn
    strategy: Strategy
    mesh: Mesh
    num_microbatches: int

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes that are manual."""
        return self.strategy.batch_axes

    @property
    def reduction(self) -> Reduction:
        """How gradients become one."""
        return self.strategy.reduction or Reduction()

    @property
    def view(self) -> View:
        """How the rank sees the model."""
        return view_of(self.strategy, self.parts)

    @property
    def gathers_once(self) -> bool:
        """Whether weights are whole for the whole step; else units gather and reduce theirs."""
        return self.reduction.per == "step" or not self.strategy.params.split_axes

    def specs(self, policy: Policy) -> PyTree:
        """What the policy says about the parameters, the manual axes alone."""
        whole = specs(policy, self.parts.params, self.mesh)
        return jax.tree.map(lambda spec: only_axes(spec, self.axes), whole)

    def run(self, params: PyTree, buffers: PyTree, batch: Batch, scale: Any, rows: Any) -> Any:
        """Runs on one rank: shards in, reduced sums and new buffers out."""
        own = _own_buffers(buffers, self.reduction)
        drawing = with_rank(own, rows, jax.lax.axis_index(self.axes))
        if self.gathers_once:
            whole = jax.tree.map(
                all_gather_by, self.view.cast(params), self.specs(self.strategy.params)
            )
            sums_of = gradient_sums(self._forward(None), scale=scale)
            if self.reduction.per == "microbatch":
                sums_of = self._reduced(sums_of)
            sums, changed = accumulate(sums_of, whole, drawing, batch, self.num_microbatches)
            if self.reduction.per == "step":
                sums = dataclasses.replace(sums, grads=self._reduce(sums.grads))
        else:
            share = lambda weight: all_mean(weight, self.axes)
            sums_of = gradient_sums(self._forward(self._gather), scale=scale, common=share)
            sums, changed = accumulate(sums_of, params, drawing, batch, self.num_microbatches)
        changed = without_rank(changed, own)
        scalars: Any = all_sum((sums.loss, sums.metrics), self.axes)
        return sums.grads, scalars, stack_buffers(changed, self.reduction, 1)

    def rows(self, batch: Batch, buffers: PyTree) -> dict[tuple[int, ...], Rows]:
        """Which random draws of the model count samples."""
        lead = 0 if self.num_microbatches == 1 else 1
        ranks = math.prod(self.mesh.shape[axis] for axis in self.axes)
        samples = jax.tree.leaves(batch)[0].shape[lead]
        forward = forward_of(self.parts, self.loss_fn, self.view.prepare(None))

        def trace(count: int) -> Any:
            shapes = jax.tree.map(
                lambda x: jax.ShapeDtypeStruct((count, *x.shape[lead + 1 :]), x.dtype), batch
            )
            run = lambda p, b, x: forward(p, b, x).loss
            return jax.make_jaxpr(run)(self.parts.params, self.parts.buffers, shapes)

        return find_rows(trace, samples // ranks, ranks)

    def _forward(self, make_gather: MakeGather | None) -> Forward:
        change_layers = layers_of(self.strategy, self.mesh)

        def also(model: nnx.Module) -> None:
            change_layers(model)
            if self.reduction.sync_buffers:
                synchronise_statistics(model, self.axes)

        prepare = self.view.prepare(make_gather, also)
        forward = forward_of(self.parts, self.loss_fn, prepare)
        return self.view.rolled(spelled(forward, self.strategy, self.mesh))

    def _gather(self, path: Path) -> LocalGather:
        shape = self.parts.shape_of(path)
        spec = only_axes(self.strategy.params(path, shape, self.mesh), self.axes)
        return LocalGather(spec, self.axes, self.reduction.dtype, len(shape))

    def _reduced(self, sums_of: GradientFn) -> GradientFn:
        def reduced(params: PyTree, buffers: PyTree, batch: Batch) -> tuple[Sums, PyTree]:
            sums, buffers = sums_of(params, buffers, batch)
            return dataclasses.replace(sums, grads=self._reduce(sums.grads)), buffers

        return reduced

    def _reduce(self, grads: PyTree) -> PyTree:
        if self.reduction.bucket_capacity is None:
            return jax.tree.map(
                lambda g, spec: reduce_by(g, spec, self.axes, self.reduction.dtype),
                grads,
                self.specs(self.strategy.opt_state),
            )
        wire = jax.tree.map(lambda g: on_wire(g, self.reduction.dtype), grads)
        buckets = plan_buckets(wire, self.reduction.bucket_capacity)
        total = lambda x: all_sum(x, self.axes)
        reduced = reduce_buckets(wire, buckets, total, strategy=self.reduction.sync)
        return jax.tree.map(lambda r, g: r.astype(g.dtype), reduced, grads)


def batch_spec(axes: tuple[str, ...], num_microbatches: int) -> PartitionSpec:
    """Where a batch lies: samples over the batch axes, microbatches in front of them."""
    return PartitionSpec(axes) if num_microbatches == 1 else PartitionSpec(None, axes)


def buffer_partition(buffers: PyTree, reduction: Reduction, axes: tuple[str, ...]) -> PyTree:
    """The specs of the buffers: whole, or one copy of the statistics per rank in dim 0."""
    if reduction.sync_buffers:
        return jax.tree.map(lambda _: PartitionSpec(), buffers)
    return jax.tree.map(lambda x: PartitionSpec(axes) if _per_rank(x) else PartitionSpec(), buffers)


def stack_buffers(buffers: PyTree, reduction: Reduction, num_ranks: int) -> PyTree:
    """Gives every rank its own copy of the statistics where they are not synchronised."""
    if reduction.sync_buffers:
        return buffers
    copies = lambda x: jnp.broadcast_to(x, (num_ranks, *x.shape)) if _per_rank(x) else x
    return jax.tree.map(copies, buffers)


def mean_buffers(buffers: PyTree, reduction: Reduction) -> PyTree:
    """The statistics to evaluate with: the average over the ranks' own."""
    if reduction.sync_buffers:
        return buffers
    return jax.tree.map(lambda x: x.mean(0) if _per_rank(x) else x, buffers)


def _per_rank(leaf: Any) -> bool:
    return not is_key(leaf) and jnp.issubdtype(leaf.dtype, jnp.inexact)


def _own_buffers(buffers: PyTree, reduction: Reduction) -> PyTree:
    if reduction.sync_buffers:
        return buffers
    return jax.tree.map(lambda x: x[0] if _per_rank(x) else x, buffers)
