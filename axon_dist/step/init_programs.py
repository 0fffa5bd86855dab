"""Initializes the state of a step with a few small programs instead of one large one."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from ..core.tree import is_key
from ..core.typing import Array, PyTree
from ..ir.host_keys import Key
from ..ir.shared_programs import Constant, ProgramSlice, SlicedProgram, run_slice

IN_FLIGHT = 16
"""How many programs may be queued on emulated devices."""


LARGE = 2**15
"""Arrays of at least this many elements are drawn in shares, one per device."""


@dataclasses.dataclass(eq=False)
class Program:
    """One compiled program, which makes all arrays of a kind.

    Args:
        program_slice: the first slice of the kind.
        out_shardings: the shardings of its results.
        run: (values of the operands) -> results.
        count: how often it has run.
    """

    program_slice: ProgramSlice
    out_shardings: tuple[Sharding, ...]
    run: Any
    count: int = 0


class InSlices:
    """Runs a function by small programs, each shared by all results of one kind.

    The results are bitwise equal to those of `jax.jit(function, out_shardings=...)(*arguments)`,
    a single program that takes long to compile if it draws hundreds of arrays.

    Args:
        function: of trees of arrays.
        out_shardings: a tree of shardings, like the results.
        owns: whether the arguments are donated, so that results may alias them.
        in_flight: how many programs may be queued; None sets no limit.
        on_host: whether the devices are CPUs, on which the host writes constants.
        spreads: whether devices that hold the same array each draw a share of it and gather the
            rest. That is faster if the devices run on the same cores.

    Attributes:
        programs: the programs compiled so far.
    """

    def __init__(
        self,
        function: Callable[..., PyTree],
        out_shardings: PyTree,
        *,
        owns: bool = False,
        in_flight: int | None = None,
        on_host: bool = False,
        spreads: bool = False,
    ):
        self._function = function
        self._out_shardings = out_shardings
        self._owns = owns
        self._in_flight = in_flight
        self._on_host = on_host
        self._spreads = spreads
        self.programs: list[Program] = []
        self._by_signature: dict[Hashable, list[Program]] = {}

    def __call__(self, *arguments: PyTree) -> PyTree:
        """Returns the results for the arguments."""
        closed, shapes = jax.make_jaxpr(self._function, return_shape=True)(*arguments)
        sliced = SlicedProgram.of(closed)
        if sliced is None:
            donated = tuple(range(len(arguments))) if self._owns else ()
            whole = jax.jit(
                self._function, out_shardings=self._out_shardings, donate_argnums=donated
            )
            return whole(*arguments)
        out_shardings = jax.tree.leaves(self._out_shardings)
        inputs = dict(zip(sliced.inputs, jax.tree.leaves(arguments), strict=True))
        known: dict[Any, Any] = {**sliced.values(), **inputs}
        results: list[Any] = [None] * len(out_shardings)
        kept: set[int] = set()
        for number, program_slice in enumerate(sliced.slices):
            own_shardings = tuple(out_shardings[at] for at in program_slice.results)
            operands = [known[v] for v in program_slice.operands]
            if self._owns and _is_kept(program_slice, operands, own_shardings, kept):
                made = operands
                kept.add(id(operands[0]))
            elif self._on_host and (constant := program_slice.constant) is not None:
                made = [_filled(constant, own_shardings[0])]
            elif (
                self._on_host
                and program_slice.is_operand
                and _is_readable(operands[0], own_shardings[0])
            ):
                made = [_copied(operands[0], own_shardings[0])]
            else:
                made = self._run(program_slice, own_shardings, operands)
            for at, array in zip(program_slice.results, made, strict=True):
                results[at] = array
            if self._in_flight is not None and (number + 1) % self._in_flight == 0:
                jax.block_until_ready(made)
        return jax.tree.unflatten(jax.tree.structure(shapes), results)

    def _run(
        self,
        program_slice: ProgramSlice,
        out_shardings: tuple[Sharding, ...],
        operands: Sequence[Any],
    ) -> list[Array]:
        """Runs a slice with the program of its kind, compiling it on first use."""
        candidates = self._by_signature.setdefault((program_slice.signature, out_shardings), [])
        program = next(
            (one for one in candidates if one.program_slice.is_like(program_slice)), None
        )
        impls = tuple(x.impl if isinstance(x, Key) else None for x in operands)
        if program is None:
            shares = _shares(program_slice, out_shardings) if self._spreads else None
            run = jax.jit(_named(program_slice, impls, shares), out_shardings=list(out_shardings))
            program = Program(program_slice, out_shardings, run)
            candidates.append(program)
            self.programs.append(program)
        program.count += 1
        return program.run(*(x.data if isinstance(x, Key) else x for x in operands))


def _named(
    program_slice: ProgramSlice, impls: Sequence[Hashable | None], shares: NamedSharding | None
) -> Callable[..., list[Array]]:
    # Profilers show a compiled program by the name of its function.
    def first_values(*values: Array) -> list[Array]:
        results = run_slice(program_slice, impls, values)
        if shares is None:
            return results
        return [jax.lax.with_sharding_constraint(x, shares) for x in results]

    return first_values


def _shares(program_slice: ProgramSlice, out_shardings: Sequence[Sharding]) -> NamedSharding | None:
    """Returns the sharding in which devices that hold the same part of an array draw it.

    None if each device draws all that it holds.
    """
    place = out_shardings[0]
    shape = program_slice.shape
    if len(out_shardings) > 1 or program_slice.is_operand or not isinstance(place, NamedSharding):
        return None
    if math.prod(place.shard_shape(shape)) < LARGE:
        return None
    entries = [*place.spec, *(None,) * (len(shape) - len(place.spec))]
    axes = [(entry,) if isinstance(entry, str) else entry or () for entry in entries]
    used = {axis for each in axes for axis in each}
    free = tuple(axis for axis, size in place.mesh.shape.items() if size > 1 and axis not in used)
    ways = math.prod(place.mesh.shape[axis] for axis in free)
    sizes = place.shard_shape(shape)
    dim = next((dim for dim, size in enumerate(sizes) if size % ways == 0), None)
    if dim is None or ways == 1:
        return None
    axes[dim] = (*axes[dim], *free)
    return NamedSharding(place.mesh, PartitionSpec(*(each or None for each in axes)))


def _is_readable(operand: Any, place: Sharding) -> bool:
    """Whether the host can copy an operand: an array, no key, that is whole or where it belongs."""
    if not isinstance(operand, jax.Array) or is_key(operand) or operand.weak_type:
        return False
    if not operand.is_fully_addressable:
        return False
    return operand.is_fully_replicated or operand.sharding == place


def _copied(array: Array, place: Sharding) -> Array:
    """Copies an array to the memory of CPU devices, without compiling a program for its shape."""
    if array.sharding == place and not place.is_fully_replicated:
        parts = {shard.device: np.asarray(shard.data) for shard in array.addressable_shards}
    else:
        whole = np.asarray(array)
        if place.is_fully_replicated and place.is_fully_addressable:
            return jax.device_put(_unaligned(whole), place)
        indices = place.addressable_devices_indices_map(whole.shape)
        parts = {device: whole[index] for device, index in indices.items()}
    return _of_shards({d: _unaligned(x) for d, x in parts.items()}, array.shape, place)


def _filled(constant: Constant, place: Sharding) -> Array:
    """Fills an array in the memory of CPU devices, without compiling a program for its shape."""
    shard = np.broadcast_to(
        np.asarray(constant.value, constant.dtype), place.shard_shape(constant.shape)
    )
    shard = _unaligned(shard)
    if place.is_fully_replicated and place.is_fully_addressable:
        # One call for all devices takes a fifth of the time of one for each.
        return jax.device_put(shard, place)
    return _of_shards(dict.fromkeys(place.addressable_devices, shard), constant.shape, place)


def _unaligned(values: np.ndarray) -> np.ndarray:
    """Returns a copy that XLA copies once more to each device.

    It would share an aligned buffer of the host, also between devices, but a step donates the
    memory of each array.
    """
    flat = np.empty(values.size + 1, values.dtype)
    copy = flat[1:].reshape(values.shape)
    copy[...] = values
    return copy


def _of_shards(parts: dict[Any, np.ndarray], shape: tuple[int, ...], place: Sharding) -> Array:
    devices = sorted(parts, key=lambda device: device.id)
    shards = [
        jax.device_put(parts[device], SingleDeviceSharding(device, memory_kind=place.memory_kind))
        for device in devices
    ]
    return jax.make_array_from_single_device_arrays(shape, place, shards)


def _is_kept(
    program_slice: ProgramSlice,
    operands: Sequence[Any],
    out_shardings: Sequence[Sharding],
    kept: set[int],
) -> bool:
    """Whether a slice returns its operand, already placed and not yet used by another result."""
    if not program_slice.is_operand:
        return False
    (array,) = operands
    if not isinstance(array, jax.Array) or id(array) in kept:
        return False
    return array.committed and array.sharding == out_shardings[0]
