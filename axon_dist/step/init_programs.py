"""The first state of a step, made by few small programs in place of a large one."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from ..core.typing import Array, PyTree
from ..ir.host_keys import Key
from ..ir.shared_programs import Constant, Part, Parts, run_part

IN_FLIGHT = 16
"""The most programs that emulated devices have not yet run."""


LARGE = 2**15
"""The fewest elements of an array of which devices draw a share each."""


@dataclasses.dataclass(eq=False)
class Program:
    """One compiled program, which makes all arrays of a kind.

    Args:
        part: the first part of the kind.
        places: the shardings of its results.
        run: (values of the operands) -> results.
        count: how often it was run.
    """

    part: Part
    places: tuple[Sharding, ...]
    run: Any
    count: int = 0


class InParts:
    """A function whose results are made where they live, by programs that equal results share.

    Equals `jax.jit(function, out_shardings=places)(*arguments)` in every bit. That is one program,
    which takes long to compile where it draws hundreds of arrays.

    Args:
        function: of trees of arrays.
        places: a tree like its results, of their shardings.
        owns: whether the arguments are used up, so that results may be the very arrays.
        in_flight: how many programs may be under way; None sets no limit.
        on_host: whether the devices are CPUs, on which the host writes constants.
        spreads: whether devices that hold the same array draw a share of it each, and gather it, as
            pays where they have the same cores.

    Attributes:
        programs: those that were compiled, once it has been called.
    """

    def __init__(
        self,
        function: Callable[..., PyTree],
        places: PyTree,
        *,
        owns: bool = False,
        in_flight: int | None = None,
        on_host: bool = False,
        spreads: bool = False,
    ):
        self._function, self._places, self._owns = function, places, owns
        self._in_flight, self._on_host, self._spreads = in_flight, on_host, spreads
        self.programs: list[Program] = []
        self._by_signature: dict[Hashable, list[Program]] = {}

    def __call__(self, *arguments: PyTree) -> PyTree:
        """The results for some arguments."""
        closed, shapes = jax.make_jaxpr(self._function, return_shape=True)(*arguments)
        parts = Parts.of(closed)
        if parts is None:
            donated = tuple(range(len(arguments))) if self._owns else ()
            whole = jax.jit(self._function, out_shardings=self._places, donate_argnums=donated)
            return whole(*arguments)
        places = jax.tree.leaves(self._places)
        given = dict(zip(parts.inputs, jax.tree.leaves(arguments), strict=True))
        known: dict[Any, Any] = {**parts.values(), **given}
        results: list[Any] = [None] * len(places)
        kept: set[int] = set()
        for number, part in enumerate(parts.parts):
            own_places = tuple(places[at] for at in part.results)
            operands = [known[v] for v in part.operands]
            if self._owns and _is_kept(part, operands, own_places, kept):
                made = operands
                kept.add(id(operands[0]))
            elif self._on_host and (constant := part.constant) is not None:
                made = [_filled(constant, own_places[0])]
            else:
                made = self._run(part, own_places, operands)
            for at, array in zip(part.results, made, strict=True):
                results[at] = array
            if self._in_flight is not None and (number + 1) % self._in_flight == 0:
                jax.block_until_ready(made)
        return jax.tree.unflatten(jax.tree.structure(shapes), results)

    def _run(
        self, part: Part, places: tuple[Sharding, ...], operands: Sequence[Any]
    ) -> list[Array]:
        """Runs a part by the program of its kind."""
        kinds = self._by_signature.setdefault((part.signature, places), [])
        program = next((one for one in kinds if one.part.is_like(part)), None)
        impls = tuple(x.impl if isinstance(x, Key) else None for x in operands)
        if program is None:
            shares = _shares(part, places) if self._spreads else None
            run = jax.jit(_named(part, impls, shares), out_shardings=list(places))
            program = Program(part, places, run)
            kinds.append(program)
            self.programs.append(program)
        program.count += 1
        return program.run(*(x.data if isinstance(x, Key) else x for x in operands))


def _named(
    part: Part, impls: Sequence[Hashable | None], shares: NamedSharding | None
) -> Callable[..., list[Array]]:
    # Profilers show a compiled program by the name of its function.
    def first_values(*values: Array) -> list[Array]:
        results = run_part(part, impls, values)
        if shares is None:
            return results
        return [jax.lax.with_sharding_constraint(x, shares) for x in results]

    return first_values


def _shares(part: Part, places: Sequence[Sharding]) -> NamedSharding | None:
    """How devices that are to hold the same large array share in drawing it; None for others."""
    place, shape = places[0], part.shape
    if len(places) > 1 or part.is_operand or not isinstance(place, NamedSharding):
        return None
    if math.prod(place.shard_shape(shape)) < LARGE:
        return None
    entries = [*place.spec, *(None,) * (len(shape) - len(place.spec))]
    axes = [(entry,) if isinstance(entry, str) else entry or () for entry in entries]
    taken = {axis for each in axes for axis in each}
    free = tuple(axis for axis, size in place.mesh.shape.items() if size > 1 and axis not in taken)
    ways = math.prod(place.mesh.shape[axis] for axis in free)
    sizes = place.shard_shape(shape)
    dim = next((dim for dim, size in enumerate(sizes) if size % ways == 0), None)
    if dim is None or ways == 1:
        return None
    axes[dim] = (*axes[dim], *free)
    return NamedSharding(place.mesh, PartitionSpec(*(each or None for each in axes)))


def _filled(constant: Constant, place: Sharding) -> Array:
    """An array of one number in the memory of CPU devices, without compiling for its shape."""
    shape = place.shard_shape(constant.shape)
    # XLA copies what is not aligned. It would share what is, between devices too, though a step
    # gives the memory of each array to its results.
    flat = np.full(math.prod(shape) + 1, constant.value, constant.dtype)
    shard = flat[1:].reshape(shape)
    devices = sorted(place.addressable_devices, key=lambda device: device.id)
    places = [SingleDeviceSharding(device, memory_kind=place.memory_kind) for device in devices]
    shards = [jax.device_put(shard, one) for one in places]
    return jax.make_array_from_single_device_arrays(constant.shape, place, shards)


def _is_kept(
    part: Part, operands: Sequence[Any], places: Sequence[Sharding], kept: set[int]
) -> bool:
    """Whether the one result of a part is its operand, an array in its place that is not taken."""
    if not part.is_operand:
        return False
    (array,) = operands
    if not isinstance(array, jax.Array) or id(array) in kept:
        return False
    return array.committed and array.sharding == places[0]
