"""Gradients that each rank computes from its own samples, reduced by explicit collectives.

Some reductions cannot be expressed in global view: one reduction for all microbatches, or buckets.

A model that keeps its layers in a list has one array per layer, but the loop over layers wants them
stacked. If the loop over microbatches carried the list, weights and sums would be in memory both as
a list and as a stack. So it carries stacks. Its body slices them into the model's arrays, the loop
over layers stacks these again, and the compiler removes the pair.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

from ..core.errors import UnsupportedError
from ..core.modules import normed_in, paths_of, variables_in
from ..core.reduction import all_mean, all_sum, cast_for_reduction
from ..core.tree import leaves_with_paths, map_with_path
from ..core.typing import Array, Batch, Function, Path, PyTree
from ..ir.pieces import read_once, read_outside_units
from ..ir.units import is_inside, units_of
from ..sharding import Policy, spec_axes, specs
from ..sharding.padding import cut_like, for_region, stored_shape
from .batch import batch_spec
from .gather import (
    Accumulated,
    LocalGather,
    ReduceAccumulated,
    all_gather_by,
    only_axes,
    reduce_tree,
)
from .microbatches import LastFn, PartBuffers, SumsFn, accumulate, part_buffers_of
from .model_changes import (
    MakeGather,
    change_layers,
    rewritten,
)
from .objective import (
    Forward,
    GradientArguments,
    GradientResult,
    Outcome,
    Sums,
    forward_of,
    gradient_sums,
    with_frozen,
)
from .plan import StepPlan
from .spec import StepSpec
from .statistics import (
    buffer_partition,
    has_statistics,
    rank_buffers,
    stack_buffers,
    synchronise_statistics,
)


@dataclasses.dataclass(frozen=True)
class Stacking:
    """Which leaves of a tree are stacked as the rows of one array.

    Args:
        rows: for each array the paths of its rows. A single path is a leaf that is not stacked.
        like: a tree of the same structure.
    """

    rows: tuple[tuple[Path, ...], ...]
    like: PyTree

    def stack(self, tree: PyTree) -> dict[Path, Array]:
        """Returns the arrays, by the path of their first row."""
        leaves = dict(leaves_with_paths(tree))
        stacked = {}
        for paths in self.rows:
            first = leaves[paths[0]]
            stacked[paths[0]] = jnp.stack([leaves[path] for path in paths]) if paths[1:] else first
        return stacked

    def unstack(self, stacked: dict[Path, Array]) -> PyTree:
        """Returns the tree of the rows; the inverse of `stack`."""
        leaves = {}
        for paths in self.rows:
            array = stacked[paths[0]]
            for row, path in enumerate(paths):
                leaves[path] = array[row] if paths[1:] else array
        return map_with_path(lambda path, _: leaves[path], self.like)


def stacking_of(shapes: PyTree, units: Iterable[Path]) -> Stacking:
    """Stacks leaves that have the same name, shape and dtype in numbered units.

    Args:
        shapes: nested dict of `ShapeDtypeStruct`.
        units: the paths of the units.

    Returns:
        The stacking. Leaves outside units, or that only one unit has, are not stacked.

    Example:
        >>> leaf = jnp.ones(2)
        >>> shapes = {"layers": {"2": {"w": leaf}, "10": {"w": leaf}}, "head": leaf}
        >>> stacking_of(shapes, ["layers/10", "layers/2"]).rows
        (('head',), ('layers/2/w', 'layers/10/w'))
    """
    groups: dict[tuple, list[Path]] = {}
    units = sorted(units, key=_natural_order)
    for path, leaf in leaves_with_paths(shapes):
        unit = next((unit for unit in units if is_inside(path, unit)), None)
        kind = (path,)
        if unit is not None and re.search(r"\d", unit):
            name = re.sub(r"\d+", "#", unit) + path.removeprefix(unit)
            kind = (name, tuple(leaf.shape), str(leaf.dtype))
        groups.setdefault(kind, []).append(path)
    rows = tuple(tuple(sorted(paths, key=_natural_order)) for paths in groups.values())
    return Stacking(rows, shapes)


def _natural_order(path: Path) -> list[tuple[bool, int, str]]:
    """A sort key that puts `layers/2` before `layers/10`."""
    parts = re.split(r"(\d+)", path)
    return [(part.isdigit(), int(part) if part.isdigit() else 0, part) for part in parts]


def local_gradients(
    plan: StepPlan, arguments: GradientArguments, kind: type[RankProgram] | None = None
) -> GradientResult:
    """Computes gradients, sharded like their moments, per rank, and reduces them explicitly.

    Each rank of the batch axes differentiates its rows of every microbatch and sums the gradients.
    If `gathers_by_units(spec)`, each unit gathers its weights and reduces its gradients in every
    microbatch. Otherwise weights are gathered once per step, and gradients are reduced once per
    step or per microbatch, as `Reduction.per` says. The compiler partitions the other mesh axes.
    `check_vma` is off, so that gradients taken inside stay local until we reduce them, and user
    modules need no casts in their scans.

    Args:
        plan: the plan of the step; the `reduction` of its strategy says how gradients are reduced.
        arguments: parameters, buffers, batch and scale.
        kind: the class of the program of a rank; None is `RankProgram`.
    """
    spec = plan.spec
    axes = spec.strategy.batch_axes
    # Found outside `shard_map`, since a trace inside would only see the samples of one rank.
    part_buffers = part_buffers_of(spec, plan.separator, arguments.batch, axes)
    program = (kind or RankProgram)(plan, part_buffers)
    if gathers_by_units(spec):
        check_reads(plan, arguments.batch)
    replicated = PartitionSpec()
    buffer_specs = buffer_partition(arguments.buffers, spec.reduction, axes)
    batch_specs = batch_spec(axes, spec.num_microbatches)
    mapped = jax.shard_map(
        program.run,
        mesh=spec.mesh,
        axis_names=frozenset(spec.mesh.axis_names if spec.options.is_elastic else axes),
        in_specs=(program.param_specs, program.frozen_specs, buffer_specs, batch_specs, replicated),
        out_specs=(program.owner_specs, replicated, buffer_specs),
        check_vma=False,
    )
    # `shard_map` needs shards of equal sizes.
    params = for_region(arguments.params, program.param_specs, spec.mesh)
    frozen = for_region(arguments.frozen, program.frozen_specs, spec.mesh)
    grads, (loss, metrics), buffers = mapped(params, frozen, *arguments[2:])
    grads = cut_like(grads, spec.model_spec.params)
    return Sums(grads, loss, metrics).result(buffers, spec.num_parts)


@dataclasses.dataclass(frozen=True, eq=False)
class RankProgram:
    """The program of one rank inside `shard_map`.

    Args:
        plan: the plan of the step.
        part_buffers: how its buffers advance over the microbatches; None if every buffer just goes
            from one to the next.

    Attributes:
        axes: the manual axes.
        param_specs: the specs of the trained parameters, over the manual axes only.
        frozen_specs: the specs of the frozen parameters, over the manual axes only.
        owner_specs: the specs of the moments of the trained parameters, over the manual axes only.
    """

    plan: StepPlan
    part_buffers: PartBuffers | None
    axes: tuple[str, ...] = dataclasses.field(init=False)
    param_specs: PyTree = dataclasses.field(init=False)
    frozen_specs: PyTree = dataclasses.field(init=False)
    owner_specs: PyTree = dataclasses.field(init=False)

    @property
    def spec(self) -> StepSpec:
        """The arguments of the step."""
        return self.plan.spec

    def __post_init__(self) -> None:
        model_spec = self.spec.model_spec
        strategy = self.spec.strategy
        axes = strategy.batch_axes
        object.__setattr__(self, "axes", axes)
        policies = {
            "param_specs": (strategy.params, model_spec.params),
            "frozen_specs": (
                self.plan.state_plan.storage.strategy.params,
                model_spec.stored_frozen,
            ),
            "owner_specs": (strategy.opt_state, model_spec.params),
        }
        for name, (policy, shapes) in policies.items():
            by_leaf = specs(policy, shapes, self.spec.mesh)
            in_region = jax.tree.map(lambda spec: only_axes(spec, axes), by_leaf)
            object.__setattr__(self, name, in_region)

    def run(
        self, params: PyTree, frozen: PyTree, buffers: PyTree, batch: Batch, scale: Array | None
    ) -> tuple[PyTree, Any, PyTree]:
        """Runs on one rank: takes shards, returns reduced sums and new buffers."""
        reduction = self.spec.reduction
        count = self.spec.num_microbatches
        local = rank_buffers(buffers, reduction)
        initial = local
        if count == 1 and self.part_buffers is not None:
            # With several microbatches, `accumulate` does this before each.
            initial = self.part_buffers.before(local, local, 0)
        accumulated = functools.partial(
            accumulate, num_microbatches=count, part_buffers=self.part_buffers
        )
        num_parts = self.spec.num_parts
        mean_over_ranks = functools.partial(all_mean, axes=self.axes)
        if not gathers_by_units(self.spec):
            # Cast before the gather, to send half the bytes in half precision. The gradient then
            # has the compute dtype.
            gathered = self._unsharded(params, self.param_specs, self.spec.model_spec.params)
            whole_frozen = self._unsharded(
                frozen, self.frozen_specs, self.spec.model_spec.stored_frozen
            )
            # The backward pass of statistics that are averaged over ranks mixes the gradients of
            # all ranks. These must have one scale, so all ranks divide their loss by one common
            # weight, the mean of theirs.
            shares_statistics = reduction.sync_buffers and has_statistics(
                self.spec.model_spec.abstract
            )
            forward = with_frozen(self._with_scans(self._unscanned(None)), whole_frozen)
            sums_of = gradient_sums(
                forward, num_parts, scale, mean_over_ranks if shares_statistics else None
            )
            if reduction.per == "microbatch":
                sums_of = self._reduced(sums_of)
            if reduction.per == "microbatch" or count == 1:
                sums, changed = accumulated(sums_of, gathered, initial, batch)
            else:
                last = (
                    self._last(forward, whole_frozen) if self._reduces_in_backward(scale) else None
                )
                sums, changed = self._unreduced_sums(sums_of, gathered, initial, batch, last)
            if reduction.per == "step" and not self._reduces_in_backward(scale):
                sums = dataclasses.replace(sums, grads=self._reduce(sums.grads))
        else:
            # Units reduce their gradients within the backward pass, so all ranks must divide their
            # loss by one common weight, the mean of theirs, before it begins.
            gather = functools.partial(local_gather, self.spec)
            forward = with_frozen(self._with_scans(self._unscanned(gather)), frozen)
            sums_of = gradient_sums(forward, num_parts, scale, mean_over_ranks)
            sums, changed = accumulated(sums_of, params, initial, batch)
        if self.part_buffers is not None:
            changed = self.part_buffers.over_ranks(changed, local)
        # Sum totals and weights. A mean of means would overweight ranks with few real samples.
        scalars = (sums.loss, sums.metrics)
        if num_parts > 1:
            scalars = all_sum(scalars, self.axes)
        return sums.grads, scalars, stack_buffers(changed, reduction, 1)

    def _unreduced_sums(
        self,
        sums_of: SumsFn,
        gathered: PyTree,
        buffers: PyTree,
        batch: Batch,
        last_fn: LastFn | None,
    ) -> tuple[Sums, PyTree]:
        """Adds up unreduced gradients over microbatches, stacked as the scan over layers is."""
        stacking = stacking_of(gathered, self.plan.changes.units)

        def stacked(weights: PyTree, buffers: PyTree, batch: Batch) -> tuple[Sums, PyTree]:
            # Without the barrier, the compiler would replace the rows by the arrays that were
            # stacked outside the loop, and stack these again in every iteration.
            weights = jax.lax.optimization_barrier(weights)
            sums, buffers = sums_of(stacking.unstack(weights), buffers, batch)
            return dataclasses.replace(sums, grads=stacking.stack(sums.grads)), buffers

        def last(sums: Sums, weights: PyTree, buffers: PyTree, batch: Batch) -> Any:
            assert last_fn is not None
            weights = jax.lax.optimization_barrier(weights)
            unstacked = dataclasses.replace(sums, grads=stacking.unstack(sums.grads))
            return last_fn(unstacked, stacking.unstack(weights), buffers, batch)

        sums, buffers = accumulate(
            stacked,
            stacking.stack(gathered),
            buffers,
            batch,
            self.spec.num_microbatches,
            last=None if last_fn is None else last,
            part_buffers=self.part_buffers,
        )
        if last_fn is None:
            sums = dataclasses.replace(sums, grads=stacking.unstack(sums.grads))
        return sums, buffers

    def _reduces_in_backward(self, scale: Any) -> bool:
        """Whether the backward pass of the last microbatch reduces the gradients of all of them.

        Not with buckets: their reductions follow the backward pass in the program, and the compiler
        may start each when its gradients are ready. With a loss scale the reduction runs after it,
        too: inside the backward pass gradients are those of sums over the samples, which would
        overflow at a scale that fits the gradients of means.
        """
        reduction = self.spec.reduction
        accumulates = reduction.per == "step" and self.spec.num_microbatches > 1
        return accumulates and not reduction.is_grouped and scale is None

    def _last(self, scanned: Forward, frozen: PyTree) -> LastFn:
        """Returns the program of the last microbatch, whose backward pass hides the reduction.

        Each unit reduces its own gradients. Without units it runs the same `scanned` program as the
        other microbatches, on weights wrapped so that their gradients are reduced.
        """
        reduce = functools.partial(reduce_accumulated, self.spec)

        def last(sums: Sums, weights: PyTree, buffers: PyTree, batch: Batch) -> tuple[Sums, PyTree]:
            units = self.plan.changes.units
            read_once = self._read_once(buffers, batch) if units else frozenset()
            addends = dict(leaves_with_paths(sums.grads))

            def forward(slots: PyTree, buffers: PyTree, batch: Batch) -> Outcome:
                slot = dict(leaves_with_paths(slots))

                def bundle(path, weight):
                    if path not in addends:
                        return weight
                    return Accumulated(weight, addends[path], slot[path])

                def reduced(path, weight):
                    gather = reduce(path)
                    return weight if gather is None else gather(bundle(path, weight))

                if not units:
                    return scanned(map_with_path(reduced, weights), buffers, batch)
                run = self._unscanned(reduce, bundle=bundle, by_units=read_once.__contains__)
                return with_frozen(run, frozen)(weights, buffers, batch)

            # Only the shapes of the slots matter. The reduced sums are computed as their gradients.
            slots = jax.tree.map(self._slot, sums.grads, self.owner_specs)
            # The sums of the earlier microbatches are already weighted, so differentiate the total
            # here and not the mean.
            run = self._with_scans(forward) if units else forward
            totals = gradient_sums(run, self.spec.num_parts, common=lambda _: 1)
            added, buffers = totals(slots, buffers, batch)
            both = jax.tree.map(jnp.add, (sums.loss, sums.metrics), (added.loss, added.metrics))
            return Sums(added.grads, *both), buffers

        return last

    def _slot(self, grad: Any, owner: PartitionSpec) -> Any:
        mesh = self.spec.world.mesh
        sharding = jax.sharding.NamedSharding(mesh, owner)
        # A gradient sent in a narrower dtype has no more precision than that.
        dtype = cast_for_reduction(grad, self.spec.reduction.dtype).dtype
        return jnp.zeros(sharding.shard_shape(stored_shape(grad.shape, owner, mesh)), dtype)

    def _read_once(self, buffers: PyTree, batch: Batch) -> frozenset[Path]:
        """Returns the weights that exactly one call of a unit reads, except those of Linen."""
        spec = self.spec
        samples = jax.tree.leaves(batch)[0].shape[0]
        jaxpr = self.plan.separator.program(batch, samples).jaxpr
        paths = read_once(jaxpr, [path for path, _ in leaves_with_paths(spec.model_spec.weights)])
        bridges = spec.model_spec.bridges
        return frozenset(p for p in paths if not any(is_inside(p, bridge) for bridge in bridges))

    def _unsharded(self, shards: PyTree, places: PyTree, shapes: PyTree) -> PyTree:
        changes = self.plan.changes
        int8 = self.spec.model_spec.int8

        def cast(path: Path, x: Array) -> Array:
            # Numbers and scales of an int8 weight are gathered as they are.
            return x if path.rpartition("/")[0] in int8 else changes.cast(x)

        return jax.tree.map(
            lambda shard, spec, like: all_gather_by(shard, spec, like.shape),
            map_with_path(cast, shards),
            places,
            shapes,
        )

    def _with_scans(self, forward: Function) -> Any:
        spec = self.spec
        return self.plan.changes.with_layer_scan(
            rewritten(forward, spec.strategy, spec.mesh, spec.memory_bytes)
        )

    def _unscanned(self, make_gather: MakeGather | None, **gathering: Any) -> Forward:
        """Returns the forward pass with its units marked, before they become a scan."""
        spec = self.spec

        def before(model: nnx.Module) -> None:
            change_layers(spec.strategy, spec.world.mesh, model)
            if spec.reduction.sync_buffers:
                synchronise_statistics(model, self.axes)

        change = self.plan.changes.change_with(make_gather, before, **gathering)
        return forward_of(spec.model_spec, spec.loss_fn, change)

    def _reduced(self, sums_of: SumsFn) -> SumsFn:
        def reduced(params: PyTree, buffers: PyTree, batch: Batch) -> tuple[Sums, PyTree]:
            sums, buffers = sums_of(params, buffers, batch)
            return dataclasses.replace(sums, grads=self._reduce(sums.grads)), buffers

        return reduced

    def _reduce(self, grads: PyTree) -> PyTree:
        return reduce_tree(grads, self.owner_specs, self.axes, self.spec.reduction)


def check_reads(plan: StepPlan, batch: Batch) -> None:
    """Raises if a weight is read outside the unit that gathers it, where it is still a shard.

    Args:
        plan: the plan of the step; its units gather.
        batch: placed leaves of shape [B, ...], or [K, B/K, ...] with K microbatches.

    Raises:
        UnsupportedError: naming the weight and the unit.
    """
    spec = plan.spec
    samples, shapes = spec.microbatch(batch)
    jaxpr = plan.separator.program(shapes, samples // spec.num_ranks).jaxpr
    paths = [path for path, _ in leaves_with_paths(spec.model_spec.weights)]
    for path in read_outside_units(jaxpr, paths):
        sharded = spec.strategy.params(path, spec.model_spec.shapes[path], spec.mesh)
        unit = next((unit for unit in plan.changes.units if is_inside(path, unit)), None)
        if unit is not None and spec_axes(only_axes(sharded, spec.strategy.batch_axes)):
            raise UnsupportedError(
                f"the loss reads {path!r} outside {unit!r}, which gathers its own weights; "
                "outside of it, a rank has only a shard of them. Leave manual=True out, or "
                'reduce once per step: Reduction(per="step")',
                code="weight-read-outside-unit",
            )


def check_normed_reads(plan: StepPlan, batch: Batch) -> None:
    """Raises if a weight is read outside the unit in which a norm writes to it.

    `nnx.SpectralNorm` and `nnx.WeightNorm` write the normalised weight into the layer, where the
    rest of the forward pass reads it. A unit returns no weights, so outside of it, and in another
    unit, the weight is still that before normalisation. Two right programs are refused, too: a read
    before the forward pass, because the program does not say which comes first; and another unit
    that holds the weight but does not read it.

    Args:
        plan: the plan of the step, in any view.
        batch: placed leaves of shape [B, ...], or [K, B/K, ...] with K microbatches.

    Raises:
        UnsupportedError: naming the weight.
    """
    model_spec = plan.spec.model_spec
    model = model_spec.abstract
    units = [unit for _, unit in units_of(model, lambda path, _: path in plan.changes.units)]
    normed_by = [normed_in(unit) for unit in units]
    normed = frozenset[int]().union(*normed_by)
    if not normed:
        return
    samples, shapes = plan.spec.microbatch(batch)
    # A loss that couples its samples may not be traceable for a part of them.
    is_per_rank = plan.separator.of(batch).is_per_rank
    size = samples // plan.spec.num_ranks if is_per_rank else samples
    jaxpr = plan.separator.program(shapes, size).jaxpr
    paths = [path for path, _ in leaves_with_paths(model_spec.weights)]
    pairs = zip(units, normed_by, strict=True)
    elsewhere = {each for unit, own in pairs for each in variables_in([unit]) & (normed - own)}
    outside = paths_of(model, elsewhere) | frozenset(read_outside_units(jaxpr, paths))
    for path in sorted(outside & paths_of(model, normed)):
        raise UnsupportedError(
            f"{path!r} is normalised by nnx.SpectralNorm or nnx.WeightNorm in one block, but is "
            "also read outside of that block, or held by another one. One device would read the "
            "normalised weight there; here it is the weight before normalisation. Read it within "
            "the block, or let no block be gathered or recomputed: ddp() without remat, "
            "scan_layers and frozen_dtype",
            code="normed-weight-read-outside-block",
        )


def gathers_by_units(spec: StepSpec) -> bool:
    """Whether units gather weights and reduce gradients in local view.

    Otherwise weights are gathered once per step.
    """
    strategy = spec.strategy
    once = spec.reduction.per == "step" or strategy.gathers_once or spec.options.is_elastic
    return bool(strategy.params.split_axes) and not once


def local_gather(spec: StepSpec, path: Path) -> LocalGather:
    """Returns the gather of a weight in local view, inside `shard_map`."""
    return LocalGather(
        spec=_over_batch(spec, spec.strategy.params, path),
        axes=spec.strategy.batch_axes,
        reduce_dtype=spec.reduction.dtype,
        shape=tuple(spec.model_spec.shapes[path]),
        has_grad=path not in spec.model_spec.frozen_paths,
    )


def reduce_accumulated(spec: StepSpec, path: Path) -> ReduceAccumulated | None:
    """Returns the reduction of a weight's accumulated gradients; None for a frozen weight."""
    if path in spec.model_spec.frozen_paths:
        return None
    owner = _over_batch(spec, spec.strategy.opt_state, path)
    ndim = len(spec.model_spec.shapes[path])
    return ReduceAccumulated(owner, spec.strategy.batch_axes, spec.reduction.dtype, ndim)


def _over_batch(spec: StepSpec, policy: Policy, path: Path) -> PartitionSpec:
    sharded = policy(path, spec.model_spec.shapes[path], spec.mesh)
    return only_axes(sharded, spec.strategy.batch_axes)
