"""Gathering a sharded weight for use, and what that does to its gradient on the way back.

`model_changes.py` attaches a gather to each weight of a unit; `gathered` of `ir/units.py` calls
it inside the unit. The backward pass gathers again because `LayerScan.protect` of
`ir/layer_scan.py` puts a `jax.checkpoint` around the unit, with `save_products_policy` below as
its policy. A weight of no unit is gathered once, before the model runs.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from ..collectives import plan_buckets, reduce_buckets
from ..core.reduction import all_sum, on_wire, sum_scatter
from ..core.typing import Array, Path, PyTree, Shape
from ..ir.factors import COMPARES, EACH, MOVES
from ..ops.fp8 import WEIGHT, Fp8Layers
from ..ops.int8 import WIDEN, Int8, Int8Form
from ..parallel import Reduction
from ..sharding import Policy, axes_of, spec_axes, spec_of, spread
from ..sharding.padding import cut, padded

if TYPE_CHECKING:
    from .spec import StepSpec

GATHERED = (
    *("sharding_constraint", "all_gather", "all_gather_invariant"),
    *("optimization_barrier", WIDEN, WEIGHT),
)
"""The primitives whose results are weights that are made again rather than kept."""


@dataclasses.dataclass(frozen=True)
class GlobalGather:
    """Gathers a weight in global view: a constraint forward, the constraint of shards backward.

    A plain `with_sharding_constraint(w, whole)` lets the compiler gather before the cast, and
    keeps the gradient whole. Pinning both layouts on both ways makes the forward an all-gather of
    the compute dtype and the backward a reduce-scatter.

    Args:
        mesh: names and sizes of its axes, over all devices.
        stored: the spec of the weight between uses.
        grad: that of its gradient after the reduction; None for a weight without one.
        full: that of the weight in use; what tensor parallelism splits stays split.
        ndim: dims of the parameter; a weight with fewer is a row of stacked layers.
        in_loop: whether a loop reads it in every turn. It is then gathered before the loop, and its
            gradient is summed over the turns before it is scattered; the compiler alone would
            gather the weight, or what is multiplied with it, in every turn.
    """

    mesh: Mesh
    stored: PartitionSpec
    grad: PartitionSpec | None = dataclasses.field(compare=False)
    full: PartitionSpec
    ndim: int
    in_loop: bool = False

    def __call__(self, weight: Array) -> Array:
        """Returns the gathered weight."""
        if self.grad is None:
            # Without a rule of its own: in one that is never differentiated, a rematerialisation
            # policy would see an opaque call, and keep the whole weight.
            return self.forward(weight)
        # The rule repeats the forward rather than calling it, so that a rematerialisation policy
        # sees the constraint itself and not an opaque call.
        gather = jax.custom_vjp(self.forward)
        gather.defvjp(lambda w: (self.forward(w), None), lambda _, ct: (self.backward(ct),))
        return gather(weight)

    def forward(self, weight: Array) -> Array:
        """Returns the gathered weight, its gradient left to the compiler."""
        gathered = weight
        for spec in (self.stored, self.full):
            place = NamedSharding(self.mesh, row_spec(spec, self.ndim, weight))
            gathered = jax.lax.with_sharding_constraint(gathered, place)
        return jax.lax.optimization_barrier(gathered) if self.in_loop else gathered

    def backward(self, gradient: Array) -> Array:
        """Returns the gradient of the whole weight, sharded as after the reduction."""
        if self.grad is None:
            return gradient
        for spec in (self.full, self.grad) if self.in_loop else (self.grad,):
            place = NamedSharding(self.mesh, row_spec(spec, self.ndim, gradient))
            gradient = jax.lax.with_sharding_constraint(gradient, place)
        return gradient

    def for_scale(self, shape: Shape) -> GlobalGather:
        """Gathers what is broadcast to the weight, and has no gradient either."""
        stored, full = spread(self.stored, shape), spread(self.full, shape)
        return dataclasses.replace(self, stored=stored, full=full)


@dataclasses.dataclass(frozen=True)
class LocalGather:
    """Gathers a weight inside `shard_map`, and reduces its gradient to its owner on the way back.

    Forward an all-gather of the dim that the ranks split, backward a reduce-scatter of it, and a
    sum over the ranks that hold copies; the gradient crosses the wire in a dtype of its own.

    Args:
        spec: the sharding of the weight, batch axes alone.
        axes: all the batch axes, whose ranks have different samples.
        wire: the dtype of the reduction.
        shape: of the parameter in the model, to which the gathered weight is cut where shards are
            padded; a weight with fewer dims is a row of stacked layers.
        has_grad: whether it is trained.
    """

    spec: PartitionSpec
    axes: tuple[str, ...]
    wire: Any
    shape: Shape
    has_grad: bool = True

    def __call__(self, weight: Array) -> Array:
        """Returns the gathered weight."""
        spec = row_spec(self.spec, len(self.shape), weight)
        shape = self.shape[len(self.shape) - weight.ndim :]
        if not self.has_grad:
            return all_gather_by(weight, spec, shape)
        gather = jax.custom_vjp(lambda w: all_gather_by(w, spec, shape))
        gather.defvjp(
            lambda w: (all_gather_by(w, spec, shape), None),
            lambda _, ct: (reduce_by(ct, spec, self.axes, self.wire),),
        )
        return gather(weight)

    def for_scale(self, shape: Shape) -> LocalGather:
        """Gathers what is broadcast to the weight, and has no gradient either."""
        return dataclasses.replace(self, spec=spread(self.spec, shape), shape=shape)


@dataclasses.dataclass(frozen=True)
class Int8Gather:
    """Gathers a weight in eight bits, and widens it where it is used.

    Args:
        gather: how a weight of its shape without a gradient is gathered; None where it is whole.
        form: how it is kept.
        dtype: in which it is used; None is its own.
    """

    gather: GlobalGather | LocalGather | None
    form: Int8Form
    dtype: DTypeLike

    def __call__(self, weight: Int8) -> Array:
        """Returns the gathered weight."""
        numbers, scale = weight.numbers, weight.scale
        if self.gather is not None:
            numbers, scale = self.gather(numbers), self.gather.for_scale(self.form.scale)(scale)
        return self.form.widen(numbers, scale, self.dtype)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Accumulated:
    """A whole weight with the gradients that microbatches before have left on this rank.

    Args:
        weight: the weight, or its rows in a stack of layers.
        sums: the sum of those gradients, of the same shape.
        slot: zeros in the shape of the owner's shard: what the reduced sum is the gradient of.
    """

    weight: Array
    sums: Array
    slot: Array

    @property
    def shape(self) -> tuple[int, ...]:
        """That of the weight, for which it stands in a model."""
        return self.weight.shape


@dataclasses.dataclass(frozen=True)
class ReduceAccumulated:
    """Reduces the gradients of all microbatches where the last one's gradient is made.

    Forward it gives the weight; on the way back the gradient of the weight is added to the sums
    of the microbatches before, and the total, reduced to its owner, becomes the gradient of the
    slot. So the reduction of one unit overlaps with the backward pass of the unit before.

    Args:
        spec: the sharding of the total, batch axes alone.
        axes: all the batch axes, whose ranks have different samples.
        wire: the dtype of the reduction.
        ndim: dims of the parameter; a weight with fewer is a row of stacked layers.
    """

    spec: PartitionSpec
    axes: tuple[str, ...]
    wire: Any
    ndim: int

    def __call__(self, bundle: Accumulated) -> Array:
        """Returns the weight; to be called once for each, or sums would count more than once."""
        spec = row_spec(self.spec, self.ndim, bundle.weight)
        # Rules that close over values of a trace are different for each weight.
        dtype = bundle.slot.dtype

        def backward(sums: Array, ct: Array) -> tuple[None, None, Array]:
            total = reduce_by(sums + ct.astype(sums.dtype), spec, self.axes, self.wire)
            return None, None, total.astype(dtype)

        weight = jax.custom_vjp(lambda weight, sums, slot: weight)
        weight.defvjp(lambda weight, sums, slot: (weight, sums), backward)
        return weight(bundle.weight, bundle.sums, bundle.slot)


def global_gather(
    spec: StepSpec, path: Path, is_whole: bool = False, looped: frozenset[Path] = frozenset()
) -> GlobalGather:
    """How a weight is gathered in global view: whole over the data axes, its gradient to owners.

    Args:
        spec: model, loss, optimizer, strategy, devices and options of the step.
        path: of the parameter.
        is_whole: whether trained weights are whole already, and only gradients move.
        looped: the weights that a loop reads in every turn.
    """
    strategy, mesh, shape = spec.strategy, spec.mesh, spec.parts.shapes[path]
    gathered_over = {*strategy.data_axes} - {*strategy.resident}
    sharded = strategy.params(path, shape, mesh)
    full = only_axes(sharded, tuple(axis for axis in mesh.axis_names if axis not in gathered_over))
    if path in spec.parts.frozen_paths:
        return GlobalGather(mesh, sharded, None, full, len(shape), path in looped)
    owner, stored = strategy.opt_state(path, shape, mesh), full if is_whole else sharded
    return GlobalGather(mesh, stored, owner, full, len(shape), path in looped)


def local_gather(spec: StepSpec, path: Path) -> LocalGather:
    """How a weight is gathered where each rank of the batch axes differentiates its samples."""
    sharded, axes = _over_batch(spec, spec.strategy.params, path), spec.strategy.batch_axes
    has_grad, shape = path not in spec.parts.frozen_paths, tuple(spec.parts.shapes[path])
    return LocalGather(sharded, axes, spec.reduction.dtype, shape, has_grad)


def reduce_accumulated(spec: StepSpec, path: Path) -> ReduceAccumulated | None:
    """How gradients that are summed per rank are reduced; None for a weight without one."""
    if path in spec.parts.frozen_paths:
        return None
    owner, ndim = _over_batch(spec, spec.strategy.opt_state, path), len(spec.parts.shapes[path])
    return ReduceAccumulated(owner, spec.strategy.batch_axes, spec.reduction.dtype, ndim)


def _over_batch(spec: StepSpec, policy: Policy, path: Path) -> PartitionSpec:
    sharded = policy(path, spec.parts.shapes[path], spec.mesh)
    return only_axes(sharded, spec.strategy.batch_axes)


def gathers_by_units(spec: StepSpec) -> bool:
    """Whether, where ranks work on their own, units gather weights and reduce their gradients.

    Else weights are whole for the whole step.
    """
    strategy = spec.strategy
    once = spec.reduction.per == "step" or strategy.gathers_once or spec.options.is_elastic
    return bool(strategy.params.split_axes) and not once


def no_fp8_gather(spec: StepSpec, fp8: Fp8Layers) -> str:
    """Why no unit gathers a weight in fp8, as was asked for; "" where one does, or none was."""
    strategy = spec.strategy
    if strategy.pipeline is not None:
        return f"a pipeline over {strategy.pipeline.axis!r} gathers its stages once a step"
    if strategy.gathers_once:
        return "the parameters are gathered once a step, all of them in the dtype of the compute"
    if not _gathers_any(spec, [f"{layer}/kernel" for layer in fp8.paths]):
        return "no kernel of a layer in fp8 is split over ranks that have other samples"
    if spec.is_local:
        per, dtype = spec.reduction.per, spec.reduction.dtype
        return f"ranks gather by hand, to reduce gradients per {per} in {dtype}"
    return ""


def _gathers_any(spec: StepSpec, paths: Iterable[Path]) -> bool:
    """Whether units gather a weight, or would on more devices."""
    strategy, mesh = spec.strategy, spec.mesh
    axes = {*strategy.data_axes} - {*strategy.resident}
    splits = axes.intersection(strategy.params.split_axes)
    if splits and all(mesh.shape[axis] == 1 for axis in splits):
        return True
    places = (strategy.params(path, spec.parts.shapes[path], mesh) for path in paths)
    return any(not axes.isdisjoint(spec_axes(place)) for place in places)


def all_gather_by(shard: Array, spec: PartitionSpec, shape: Shape | None = None) -> Array:
    """Makes one rank's shard whole, inside `shard_map`.

    Args:
        shard: this rank's.
        spec: the sharding of the whole array.
        shape: of the whole array, without the rows of zeros that pad its shards; None where there
            are none. A dim that `spec` does not split keeps its size.
    """
    for dim in range(len(spec)):
        if axes := axes_of(spec, dim):
            shard = jax.lax.all_gather(shard, axes, axis=dim, tiled=True)
            if shape is not None:
                shard = cut(shard, (*shard.shape[:dim], shape[dim], *shard.shape[dim + 1 :]))
    return shard


def reduce_by(value: Array, spec: PartitionSpec, axes: tuple[str, ...], wire: Any = None) -> Array:
    """Sums over ranks and leaves each its shard, inside `shard_map`.

    Args:
        value: this rank's addend, whole.
        spec: the sharding of the sum.
        axes: the axes to sum over; those that the spec does not name keep copies.
        wire: the dtype of the sum on the wire; None is that of the value.

    Returns:
        This rank's shard of the sum, in the dtype of the value; the last shards of a dim that does
        not divide end in zeros.
    """
    total = on_wire(value, wire)
    for dim in range(len(spec)):
        if split := axes_of(spec, dim):
            total = sum_scatter(even_rows(total, split, dim), split, dim)
    rest = tuple(axis for axis in axes if axis not in spec_axes(spec))
    return all_sum(total, rest).astype(value.dtype)


def even_rows(x: Array, axes: tuple[str, ...], dim: int) -> Array:
    """An array with zeros behind its last rows, so that they divide over axes, in `shard_map`."""
    ranks = math.prod(jax.lax.axis_size(axis) for axis in axes)
    rows = -(-x.shape[dim] // ranks) * ranks
    return padded(x, (*x.shape[:dim], rows, *x.shape[dim + 1 :]))


def row_spec(spec: PartitionSpec, ndim: int, weight: Array) -> PartitionSpec:
    """The spec of a weight: that of a parameter of `ndim` dims, or of one row of such a stack."""
    return PartitionSpec(*tuple(spec)[ndim - weight.ndim :])


def only_axes(spec: PartitionSpec, axes: tuple[str, ...]) -> PartitionSpec:
    """The spec with every other axis left out.

    Example:
        >>> only_axes(PartitionSpec("fsdp", "tp"), ("tp",))
        P(None, 'tp')
    """
    dims = (tuple(a for a in axes_of(spec, dim) if a in axes) for dim in range(len(spec)))
    return spec_of(dims)


def save_all_but_gathers_policy(primitive: Primitive, *_: object, **__: Any) -> bool:
    """A `jax.checkpoint` policy: keep every intermediate result but gathered weights."""
    return primitive.name not in GATHERED


def save_products_policy(primitive: Primitive, *operands: Any, **__: Any) -> bool:
    """A `jax.checkpoint` policy: keep what the device works for.

    That is products, reductions, kernels and draws. Weights are gathered again, and what comes of
    the results kept element by element is made again, which costs less than to write it to a stack
    of layers and to read it back; of comparisons, such as dropout's, a byte per element is kept.
    """
    if primitive.name in COMPARES:
        return any(jnp.issubdtype(x.dtype, jnp.floating) for x in operands)
    return primitive.name not in GATHERED and primitive.name not in EACH | MOVES


def reduce_tree(
    grads: PyTree, specs: PyTree, axes: tuple[str, ...], reduction: Reduction
) -> PyTree:
    """Sums gradients over ranks and leaves each rank its shards.

    Args:
        grads: this rank's addends, whole.
        specs: the shardings of the sums; buckets are for sums that every rank holds whole.
        axes: the axes to sum over.
        reduction: in what dtype, and in which groups.
    """
    if reduction.bucket_capacity is None:
        return jax.tree.map(lambda g, spec: reduce_by(g, spec, axes, reduction.dtype), grads, specs)
    # Buckets hold one dtype each, so what is sent is cast before it is packed.
    wire = jax.tree.map(lambda g: on_wire(g, reduction.dtype), grads)
    buckets = plan_buckets(wire, reduction.bucket_capacity)
    total = functools.partial(all_sum, axes=axes)
    reduced = reduce_buckets(wire, buckets, total, strategy=reduction.sync)
    return jax.tree.map(lambda r, g: r.astype(g.dtype), reduced, grads)
