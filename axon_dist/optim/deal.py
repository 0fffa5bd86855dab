"""Whole matrices, distributed over devices: each gets some of them, and works on these alone.

Momenta lie split as the strategy splits parameters, and a product of a matrix with itself needs all
of it. Gathering every matrix on every device would cost all of the work N times. Instead matrices
of the same shape are stacked, and one all-to-all turns

    every device holds 1/N of each matrix   into   every device holds each of 1/N of the matrices

and another one turns it back. In between nothing is communicated: it is a `shard_map` in which the
stack is local. Axes over which the matrices are whole already divide the work too, where that
leaves less of it; then the results are gathered over them.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr
from jax.sharding import Mesh, PartitionSpec

from ..core.typing import Array, Shape
from ..jaxpr.rows import RowCall, input_shapes, run_with_calls
from ..sharding import axes_of, spec_axes


@dataclasses.dataclass(frozen=True)
class Distribution:
    """How the matrices of one stack are distributed.

    Args:
        function: what is done to each; equal for all.
        shape: of each.
        count: how many there are, on each rank of the axes `apart`.
        spec: how each lies before and after.
        apart: the axes that count matrices already, such as that of a pipeline.
        moved: the axes that split them, which an all-to-all moves to the dim that counts.
        extra: the axes over which they are whole, and which divide the work all the same.
        num_ranks: how many devices share the stack.

    Example:
        >>> spec = PartitionSpec(None, "fsdp")
        >>> plan = Distribution(jnp.sin, (8, 32), 6, spec, (), ("fsdp",), (), 4)
        >>> plan.padding, plan.per_device
        (2, 2)
        >>> print(plan)
        6 of 8×32 distributed over fsdp: 2 on each of 4 devices, 2 of them padding
    """

    function: Callable[..., Array]
    shape: Shape
    count: int
    spec: PartitionSpec
    apart: tuple[str, ...]
    moved: tuple[str, ...]
    extra: tuple[str, ...]
    num_ranks: int

    @property
    def per_device(self) -> int:
        """How many matrices a device works on, padding among them."""
        return -(-self.count // self.num_ranks)

    @property
    def padding(self) -> int:
        """How many matrices of zeros make the stack divide."""
        return self.per_device * self.num_ranks - self.count

    def __str__(self) -> str:
        size = "×".join(map(str, self.shape))
        over = "×".join((*self.moved, *self.extra)) or "nothing"
        return (
            f"{self.count} of {size} distributed over {over}: {self.per_device} on each of "
            f"{self.num_ranks} devices, {self.padding} of them padding"
        )


@dataclasses.dataclass(frozen=True, eq=False)
class Distributor:
    """Runs an optimizer's update with its whole matrices distributed over the devices of a mesh.

    Args:
        mesh: names and sizes of its axes, over all devices.
        specs: how each input of the update lies.
    """

    mesh: Mesh
    specs: tuple[PartitionSpec, ...]

    def run(self, program: ClosedJaxpr, values: Sequence[Array]) -> list[Array]:
        """Runs a traced update.

        Args:
            program: a closed jaxpr.
            values: its inputs, in global view.

        Returns:
            Its outputs.
        """
        return run_with_calls(program, values, self._run)

    def distributions(self, program: ClosedJaxpr) -> tuple[Distribution, ...]:
        """How the stacks of a traced update will be distributed."""
        found: list[Distribution] = []

        def note(calls: Sequence[RowCall]) -> list[Array]:
            found.extend(plan for plan, _ in self._stacks(calls))
            return [call.x for call in calls]

        jax.eval_shape(
            lambda *values: run_with_calls(program, values, note), *input_shapes(program)
        )
        return tuple(found)

    def _run(self, calls: Sequence[RowCall]) -> list[Array]:
        results: dict[int, Array] = {}
        for plan, members in self._stacks(calls):
            made = self._together(plan, [calls[number] for number in members])
            results.update(zip(members, made, strict=True))
        return [results[number] for number in range(len(calls))]

    def _stacks(self, calls: Sequence[RowCall]) -> list[tuple[Distribution, list[int]]]:
        """Which calls go together, and how their stack is distributed."""
        groups: dict[Any, list[int]] = {}
        for number, call in enumerate(calls):
            lead, spec = self._specs(call)
            more = tuple(map(id, call.more))
            own = call.x.shape[call.lead :]
            key = (call.function, own, call.x.dtype, spec, spec_axes(lead), more)
            groups.setdefault(key, []).append(number)
        return [
            (self._distribution(key, [calls[number] for number in members]), members)
            for key, members in groups.items()
        ]

    def _distribution(self, key: tuple[Any, ...], calls: Sequence[RowCall]) -> Distribution:
        function, shape, _, spec, apart, _ = key
        size = self.mesh.shape
        ranks = math.prod(size[axis] for axis in apart)
        count = sum(math.prod(call.x.shape[: call.lead]) for call in calls) // ranks
        moved = spec_axes(spec)
        num_ranks, extra = math.prod(size[axis] for axis in moved), []
        for axis in self.mesh.axis_names:
            more = num_ranks * size[axis]
            if axis not in (*apart, *moved) and -(-count // more) < -(-count // num_ranks):
                extra.append(axis)
                num_ranks = more
        return Distribution(function, shape, count, spec, apart, moved, tuple(extra), num_ranks)

    def _specs(self, call: RowCall) -> tuple[PartitionSpec, PartitionSpec]:
        """How the dims lie that count matrices, and those of a matrix."""
        if call.origin is None:
            return PartitionSpec(), PartitionSpec()
        number, dims = call.origin
        entries = [axes_of(self.specs[number], dim) for dim in dims]
        entries = [entry[0] if len(entry) == 1 else (entry or None) for entry in entries]
        return PartitionSpec(*entries[: call.lead]), PartitionSpec(*entries[call.lead :])

    def _together(self, plan: Distribution, calls: Sequence[RowCall]) -> list[Array]:
        """Runs the calls of one stack."""
        inner = (*plan.spec, *[None] * (len(plan.shape) - len(plan.spec)))
        leads = [(self._specs(call)[0], call.lead) for call in calls]
        places = [PartitionSpec(*lead, *[None] * (n - len(lead)), *inner) for lead, n in leads]
        more = calls[0].more
        run = jax.shard_map(
            functools.partial(_on_device, plan, [call.lead for call in calls]),
            mesh=self.mesh,
            in_specs=(places, PartitionSpec()),
            out_specs=places,
            check_vma=False,
        )
        return run([call.x for call in calls], more)


def _on_device(
    plan: Distribution, leads: Sequence[int], arrays: Sequence[Array], more: Sequence[Array]
) -> list[Array]:
    """What one device does: its parts of all matrices come, its matrices go."""
    flat = [x.reshape(-1, *x.shape[lead:]) for x, lead in zip(arrays, leads, strict=True)]
    stack = jnp.concatenate(flat)
    zeros = jnp.zeros((plan.padding, *stack.shape[1:]), stack.dtype)
    stack = jnp.concatenate([stack, zeros]) if plan.padding else stack
    # XLA:CPU slices the parts out again for its all-to-all, and gives them different layouts.
    stack = jax.lax.optimization_barrier(stack)
    whole = _exchanged(plan, stack, jax.vmap(lambda x: plan.function(x, *more)))
    ends, made = 0, []
    for part, x in zip(flat, arrays, strict=True):
        made.append(whole[ends : ends + part.shape[0]].reshape(x.shape))
        ends += part.shape[0]
    return made


def _exchanged(plan: Distribution, stack: Array, work: Callable[[Array], Array]) -> Array:
    """There, the work on whole matrices, and back."""
    moves = [(axes_of(plan.spec, dim), 1 + dim) for dim in range(len(plan.spec))]
    moves = [move for move in moves if move[0]]
    if plan.extra:
        share = stack.shape[0] // math.prod(jax.lax.axis_size(axis) for axis in plan.extra)
        first = jax.lax.axis_index(plan.extra) * share
        stack = jax.lax.dynamic_slice_in_dim(stack, first, share)
    for axes, dim in moves:
        stack = jax.lax.all_to_all(stack, axes, split_axis=0, concat_axis=dim, tiled=True)
    stack = work(stack)
    for axes, dim in reversed(moves):
        stack = jax.lax.all_to_all(stack, axes, split_axis=dim, concat_axis=0, tiled=True)
    if plan.extra:
        stack = jax.lax.all_gather(stack, plan.extra, tiled=True)
    return stack
