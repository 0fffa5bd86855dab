"""Gathers a sharded weight for use, and reduces its gradient on the way back.

`model_changes.py` attaches a gather to each weight of a unit, and `ir/units.py` calls it inside the
unit (`gather_params`, or `_running` for bridged Linen modules). The backward pass gathers again,
because each unit runs under `jax.checkpoint` (`LayerScan.protect` in `ir/layer_scan.py`). Its
policy is that of `remat`, or else one that never saves gathered weights
(`ModelChanges.with_layer_scan`). A weight outside all units is gathered once per
microbatch, before the model runs, and stays whole until its backward pass.

A weight is gathered by one of:

- `GlobalGather`, the default, whose collectives the compiler inserts.
- `LocalGather`, where ranks compute gradients in `shard_map`, such as with
  `Reduction(manual=True)`, and reduce them once per microbatch.
- `RankProgram` in `local_view.py`, which gathers all weights once per step, where ranks compute
  gradients in `shard_map` and one of these holds:
    - the ranks reduce their gradients once per step;
    - the strategy says `gathers_once`;
    - the step is elastic.
- In global view, `global_gradients` in `global_view.py`, which gathers all trained weights before
  the first unit, where the strategy says `gathers_once`. Frozen weights keep their own
  `GlobalGather`.
- `pipeline_gradients` in `pipeline_view.py`, whose `shard_map` takes weights that are whole on the
  ranks of a stage, so that the compiler gathers them once per step.
- `Int8Gather`, for frozen weights that are stored as int8, around one of the first two.
- The fp8 product that reads it (`ops/fp8.py`), with `gather: fp8`: it calls one of the first two on
  the rounded bytes.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from ..collectives import plan_buckets, reduce_buckets
from ..core.reduction import all_sum, cast_for_reduction, sum_scatter
from ..core.typing import Array, PyTree, Shape
from ..ir.factors import CHEAP_ELEMENTWISE, COMPARES, MOVES
from ..ops.fp8 import WEIGHT
from ..ops.int8 import WIDEN, Int8, Int8Form
from ..parallel import Reduction
from ..sharding import axes_of, spec_axes, spec_of, spread
from ..sharding.padding import padded, unpad

GATHERED = (
    *("sharding_constraint", "all_gather", "all_gather_invariant"),
    *("optimization_barrier", WIDEN, WEIGHT),
)
"""Primitives that produce gathered weights. The policies of this file never save their results."""


@dataclasses.dataclass(frozen=True)
class GlobalGather:
    """Gathers a weight in global view by sharding constraints, forward and backward.

    With only `with_sharding_constraint(w, whole)`, XLA may all-gather before the cast and
    all-reduce the gradient. So the forward pass constrains the sharded layout and then the gathered
    one, which is an all-gather in the compute dtype. The backward pass constrains the gradient to
    its reduced layout, which is a reduce-scatter. If a loop reads the weight, the gradient is first
    constrained to the gathered layout.

    Args:
        mesh: names and sizes of its axes, over all devices.
        stored: the spec of the weight between uses.
        grad: the spec of its gradient after the reduction; None for a weight without one.
        full: the spec of the weight in use. Dims that tensor parallelism splits stay split.
        ndim: dims of the parameter. A weight in a scan over stacked layers has one dim less.
        in_loop: whether a loop other than the scan over layers, such as that of a recurrent layer,
            reads the weight in every iteration. It is then gathered before the loop, and its
            gradient is summed over the iterations before it is scattered. Left to itself, the
            compiler would gather the weight, or what it is multiplied with, in every iteration.
    """

    mesh: Mesh
    stored: PartitionSpec
    # Variables have their gather in their metadata, and `jax.tree.map` over two `nnx.State`
    # requires equal metadata. A loss may map trained weights and their frozen twins onto each
    # other, whose gathers differ in `grad`.
    grad: PartitionSpec | None = dataclasses.field(compare=False)
    full: PartitionSpec
    ndim: int
    in_loop: bool = False

    def __call__(self, weight: Array) -> Array:
        """Returns the gathered weight."""
        if self.grad is None:
            # No custom_vjp here: a frozen weight is never differentiated, so JAX would not replace
            # the call by its rule. A remat policy would see an opaque call, and save the whole
            # weight.
            return self.forward(weight)
        # The forward rule calls `self.forward` and not `gather`, so that a remat policy sees the
        # constraint itself and not an opaque call.
        gather = jax.custom_vjp(self.forward)
        gather.defvjp(lambda w: (self.forward(w), None), lambda _, ct: (self.backward(ct),))
        return gather(weight)

    def forward(self, weight: Array) -> Array:
        """The gather alone; `__call__` adds the rule for its gradient."""
        gathered = weight
        for spec in (self.stored, self.full):
            sharding = NamedSharding(self.mesh, row_spec(spec, self.ndim, weight))
            gathered = jax.lax.with_sharding_constraint(gathered, sharding)
        return jax.lax.optimization_barrier(gathered) if self.in_loop else gathered

    def backward(self, gradient: Array) -> Array:
        """Returns the gradient of the whole weight, sharded as after the reduction."""
        if self.grad is None:
            return gradient
        for spec in (self.full, self.grad) if self.in_loop else (self.grad,):
            sharding = NamedSharding(self.mesh, row_spec(spec, self.ndim, gradient))
            gradient = jax.lax.with_sharding_constraint(gradient, sharding)
        return gradient

    def for_scale(self, shape: Shape) -> GlobalGather:
        """Returns the gather of a frozen weight's scale, which broadcasts to the weight."""
        return dataclasses.replace(
            self,
            stored=spread(self.stored, shape),
            full=spread(self.full, shape),
        )


@dataclasses.dataclass(frozen=True)
class LocalGather:
    """Gathers a weight inside `shard_map`, and reduces its gradient to its owner.

    The forward all-gathers the sharded dim. The backward reduce-scatters it, and sums over the
    ranks that hold copies.

    Args:
        spec: the sharding of the weight over batch axes only.
        axes: all the batch axes, whose ranks have different samples.
        reduce_dtype: the dtype of the reduction; None is that of the gradient.
        shape: the shape of the parameter in the model. The gathered weight is cut to it if shards
            are padded. A weight in a scan over stacked layers has one dim less.
        has_grad: whether it is trained.
    """

    spec: PartitionSpec
    axes: tuple[str, ...]
    reduce_dtype: Any
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
            lambda _, ct: (reduce_by(ct, spec, self.axes, self.reduce_dtype),),
        )
        return gather(weight)

    def for_scale(self, shape: Shape) -> LocalGather:
        """Returns the gather of a frozen weight's scale, which broadcasts to the weight."""
        return dataclasses.replace(self, spec=spread(self.spec, shape), shape=shape)


@dataclasses.dataclass(frozen=True)
class Int8Gather:
    """Gathers a weight as int8, and widens it where it is used.

    Args:
        gather: gathers a frozen weight of its shape; None if the weight is whole.
        form: how it is stored.
        dtype: the dtype it is used in; None is that which the model gave the weight.
    """

    gather: GlobalGather | LocalGather | None
    form: Int8Form
    dtype: DTypeLike

    def __call__(self, weight: Int8) -> Array:
        """Returns the gathered weight."""
        numbers = weight.numbers
        scale = weight.scale
        if self.gather is not None:
            numbers = self.gather(numbers)
            scale = self.gather.for_scale(self.form.scale)(scale)
        return self.form.widen(numbers, scale, self.dtype)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Accumulated:
    """A whole weight with the gradients accumulated on this rank by earlier microbatches.

    Args:
        weight: the weight, or its rows in a stack of layers.
        sums: the sum of those gradients, of the same shape.
        slot: zeros in the shape of the owner's shard, which exist to be differentiated:
            `ReduceAccumulated` returns the reduced gradient as the gradient with respect to them.
    """

    weight: Array
    sums: Array
    slot: Array

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the weight, which this replaces in a model."""
        return self.weight.shape


@dataclasses.dataclass(frozen=True)
class ReduceAccumulated:
    """Reduces the gradients of all microbatches in the backward pass of the last one.

    Forward, it returns the weight. Backward, it adds the gradient of the weight to the sums of the
    earlier microbatches and reduces the total to its owner, as the gradient of the slot. So the
    reduction of one unit overlaps with the backward pass of the preceding unit.

    Args:
        spec: the sharding of the total over batch axes only.
        axes: all the batch axes, whose ranks have different samples.
        reduce_dtype: the dtype of the reduction; None is that of the gradient.
        ndim: dims of the parameter. A weight in a scan over stacked layers has one dim less.
    """

    spec: PartitionSpec
    axes: tuple[str, ...]
    reduce_dtype: Any
    ndim: int

    def __call__(self, bundle: Accumulated) -> Array:
        """Returns the weight. Call it once per weight, or the sums would count more than once."""
        spec = row_spec(self.spec, self.ndim, bundle.weight)
        # Read outside the rule, so that the rule closes over no tracer.
        dtype = bundle.slot.dtype

        def backward(sums: Array, ct: Array) -> tuple[None, None, Array]:
            total = reduce_by(sums + ct.astype(sums.dtype), spec, self.axes, self.reduce_dtype)
            return None, None, total.astype(dtype)

        weight = jax.custom_vjp(lambda weight, sums, slot: weight)
        weight.defvjp(lambda weight, sums, slot: (weight, sums), backward)
        return weight(bundle.weight, bundle.sums, bundle.slot)


def all_gather_by(shard: Array, spec: PartitionSpec, shape: Shape | None = None) -> Array:
    """All-gathers an array along every dim that a spec splits, inside `shard_map`.

    Args:
        shard: this rank's shard.
        spec: the sharding of the whole array.
        shape: the shape of the whole array without the zeros that pad its shards; None if nothing
            is padded. A dim that `spec` does not split keeps its size.
    """
    for dim in range(len(spec)):
        if axes := axes_of(spec, dim):
            shard = jax.lax.all_gather(shard, axes, axis=dim, tiled=True)
            if shape is not None:
                shard = unpad(shard, (*shard.shape[:dim], shape[dim], *shard.shape[dim + 1 :]))
    return shard


def reduce_by(
    value: Array, spec: PartitionSpec, axes: tuple[str, ...], reduce_dtype: Any = None
) -> Array:
    """Sums over ranks and returns this rank's shard of the sum, inside `shard_map`.

    Args:
        value: this rank's addend, whole.
        spec: the sharding of the sum.
        axes: the axes to sum over. The sum is replicated over those that the spec does not name.
        reduce_dtype: the dtype in which addends are sent and summed; None is that of the value.

    Returns:
        This rank's shard of the sum, in the dtype of the value. If a dim does not divide, its last
        shards end in zeros.
    """
    total = cast_for_reduction(value, reduce_dtype)
    for dim in range(len(spec)):
        if split := axes_of(spec, dim):
            total = sum_scatter(even_rows(total, split, dim), split, dim)
    rest = tuple(axis for axis in axes if axis not in spec_axes(spec))
    return all_sum(total, rest).astype(value.dtype)


def even_rows(x: Array, axes: tuple[str, ...], dim: int) -> Array:
    """Pads a dim with zeros to a multiple of the ranks of some axes, inside `shard_map`."""
    ranks = math.prod(jax.lax.axis_size(axis) for axis in axes)
    rows = -(-x.shape[dim] // ranks) * ranks
    return padded(x, (*x.shape[:dim], rows, *x.shape[dim + 1 :]))


def row_spec(spec: PartitionSpec, ndim: int, weight: Array) -> PartitionSpec:
    """Returns the spec of a parameter of `ndim` dims, or of one row if it is a stack of layers."""
    return PartitionSpec(*tuple(spec)[ndim - weight.ndim :])


def only_axes(spec: PartitionSpec, axes: tuple[str, ...]) -> PartitionSpec:
    """Drops all other axes from a spec.

    Example:
        >>> only_axes(PartitionSpec("fsdp", "tp"), ("tp",))
        P(None, 'tp')
    """
    dims = (tuple(a for a in axes_of(spec, dim) if a in axes) for dim in range(len(spec)))
    return spec_of(dims)


def save_all_but_gathers_policy(primitive: Primitive, *_: object, **__: Any) -> bool:
    """A `jax.checkpoint` policy that saves all but results of `GATHERED`, such as whole weights."""
    return primitive.name not in GATHERED


def save_products_policy(primitive: Primitive, *operands: Any, **__: Any) -> bool:
    """A `jax.checkpoint` policy that saves the results that are costly to recompute.

    It saves the results of products, reductions, kernels and random draws. Weights are gathered
    again. Elementwise results are recomputed from saved ones, which costs less than writing them to
    a stack of layers and reading them back. Comparisons of floats, such as dropout's mask, are
    saved: they take a byte per element.
    """
    if primitive.name in COMPARES:
        return any(jnp.issubdtype(x.dtype, jnp.floating) for x in operands)
    return primitive.name not in GATHERED and primitive.name not in CHEAP_ELEMENTWISE | MOVES


def reduce_tree(
    grads: PyTree, specs: PyTree, axes: tuple[str, ...], reduction: Reduction
) -> PyTree:
    """Sums gradients over ranks and returns this rank's shards.

    Args:
        grads: this rank's addends, whole.
        specs: the shardings of the sums. Buckets need sums that every rank holds whole.
        axes: the axes to sum over.
        reduction: gives the dtype, and the buckets.
    """
    if reduction.capacity is None:
        return jax.tree.map(lambda g, spec: reduce_by(g, spec, axes, reduction.dtype), grads, specs)
    # Each bucket has one dtype, so gradients are cast before they are packed.
    addends = jax.tree.map(lambda g: cast_for_reduction(g, reduction.dtype), grads)
    buckets = plan_buckets(addends, reduction.capacity)
    total = functools.partial(all_sum, axes=axes)
    reduced = reduce_buckets(addends, buckets, total, strategy=reduction.sync)
    return jax.tree.map(lambda total, grad: total.astype(grad.dtype), reduced, grads)
