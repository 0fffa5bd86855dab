"""Models the time of a compiled step: each kernel at the rate that its shape reaches.

Products run in tiles. Attention runs at a rate for its length and head width. All other kernels are
bound by the bytes they read and write; an in-place update counts only the slice it replaces. There
is a gap between kernels. The rates, from `mesh.rates`, were measured on single kernels; nothing
here is fitted to the time of a step. `transfers` computes how long the step waits for transfers;
those that compute hides take processors from it.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType

import jax

from ..core.typing import JsonDict
from ..mesh.chips import Hardware, machine_of
from ..mesh.rates import AttentionShape, ProductShape, Rates, rates_of
from .computations import trip_count, usually_called
from .flops import DOTS, CostModel, matmul_flops, num_groups, ragged_dim, target_of
from .parse import Computation, Instruction, Module, ProgramLike, as_module, dtype_bits
from .transfers import WireModel, collective_kind

KINDS: Mapping[str, str] = MappingProxyType(
    {
        "products": "matrix products",
        "attention": "attention",
        "kernels": "memory-bound kernels",
        "copies": "copies and zeroing",
        "wire": "waiting for collectives, and slowed down by them",
        "gaps": "gaps between kernels",
    }
)
"""The parts of a step's time, with their labels in tables."""

MOVES = frozenset(
    {
        *("parameter", "constant", "bitcast", "tuple", "get-tuple-element", "iota"),
        *("copy", "copy-start", "copy-done", "transpose", "reshape", "broadcast", "reverse"),
        *("slice", "dynamic-slice", "dynamic-update-slice", "concatenate", "pad"),
    }
)
"""Operations that move numbers without computing any."""

_CALLS = ("while", "conditional", "call")
_LHS_BATCH = re.compile(r'"lhs_batch_dimensions":\s*\[([^\]]*)\]')
_SCORES = re.compile(r'"intermediate_tensor_shape":.*?"dimensions":\s*\[([^\]]*)\]')


@dataclasses.dataclass(frozen=True)
class ModelTime:
    """The modelled time of a step on one device.

    Args:
        seconds: the seconds of each part, by the keys of `KINDS`.
        kernels: how many kernels a step launches, by the same keys.
        machine: the machine whose rates were used.
    """

    seconds: Mapping[str, float]
    kernels: Mapping[str, int]
    machine: Hardware

    @property
    def total(self) -> float:
        """Seconds of the step."""
        return sum(self.seconds.values())

    def utilization(self, flops: float) -> float:
        """Returns the MFU for a device's useful FLOPs: their share of the bfloat16 peak."""
        return flops / (self.machine.flops * self.total) if self.total else 0.0

    def to_dict(self) -> JsonDict:
        """Returns the figures as plain values."""
        return {
            "total": self.total,
            "seconds": dict(self.seconds),
            "kernels": dict(self.kernels),
            "rates": rates_of(self.machine).source,
        }


def model_time(
    program: ProgramLike,
    mesh: jax.sharding.Mesh | None = None,
    machine: Hardware | None = None,
) -> ModelTime | None:
    """Models the time of a compiled step at the rates that its kernels reach.

    Args:
        program: a `jax.stages.Compiled`, its text, or a `Module`.
        mesh: the mesh it was compiled for.
        machine: the chip; looked up from the mesh's devices unless given.

    Returns:
        The time; None for a chip that no table describes.

    Example:
        >>> from axon_dist.mesh.chips import hardware
        >>> found = model_time(
        ...     '''HloModule double
        ... ENTRY %main (x: f32[1000000]) -> f32[1000000] {
        ...   %x = f32[1000000]{0} parameter(0)
        ...   ROOT %sum = f32[1000000]{0} add(%x, %x)
        ... }''',
        ...     machine=hardware("h100"),
        ... )
        >>> {kind: round(1e6 * x, 1) for kind, x in found.seconds.items() if x}
        {'kernels': 3.9, 'gaps': 0.9}
    """
    module = as_module(program)
    machine = machine or machine_of(mesh)
    if machine is None:
        return None
    counted = _Kernels(module, machine).computation(module.entry)
    seconds: dict[str, float] = {kind: counted.seconds[kind] for kind in KINDS}
    wires = WireModel(module, machine)
    waited = wires.waited(module.entry)
    hidden = max(0.0, wires.timed(module.entry).wire - waited)
    seconds["wire"] += waited + rates_of(machine).slowdown(hidden)
    kernels = {kind: counted.kernels[kind] for kind in KINDS}
    return ModelTime(seconds, kernels, machine)


@dataclasses.dataclass(frozen=True)
class _Counted:
    """Seconds and kernels by kind."""

    seconds: Counter[str] = dataclasses.field(default_factory=Counter)
    kernels: Counter[str] = dataclasses.field(default_factory=Counter)

    def add(self, other: _Counted, times: int = 1) -> None:
        for kind, seconds in other.seconds.items():
            self.seconds[kind] += times * seconds
        for kind, count in other.kernels.items():
            self.kernels[kind] += times * count

    @property
    def total(self) -> float:
        return sum(self.seconds.values())


class _Kernels:
    """Adds up the kernels of one program, each computation once."""

    def __init__(self, module: Module, machine: Hardware):
        self._module = module
        self._machine = machine
        self._rates: Rates = rates_of(machine)
        self._costs = CostModel(module)
        self._known: dict[str, _Counted] = {}

    def computation(self, computation: Computation) -> _Counted:
        """Returns the time of one execution of a computation, including all it calls."""
        if computation.name not in self._known:
            total = _Counted()
            for instruction in computation.instructions:
                total.add(self._instruction(computation, instruction))
            self._known[computation.name] = total
        return self._known[computation.name]

    def _instruction(self, computation: Computation, instruction: Instruction) -> _Counted:
        if instruction.opcode in _CALLS:
            return self._called(computation, instruction)
        if instruction.opcode in ("async-start", "call-start"):
            return self._sum(usually_called(self._module, instruction))
        if collective_kind(instruction) or instruction.opcode.endswith("-done"):
            return _Counted()
        kind, seconds = self._kernel(computation, instruction)
        if not seconds:
            return _Counted()
        times = Counter({kind: seconds, "gaps": self._rates.gap})
        return _Counted(times, Counter({kind: 1}))

    def _called(self, computation: Computation, instruction: Instruction) -> _Counted:
        called = usually_called(self._module, instruction)
        if instruction.opcode == "conditional":
            return max(map(self.computation, called), key=lambda one: one.total)
        trips: int | None = 1
        if instruction.opcode == "while":
            trips = trip_count(self._module, computation, instruction)
        return self._sum(called, 1 if trips is None else trips)

    def _sum(self, called: Iterable[Computation], times: int = 1) -> _Counted:
        total = _Counted()
        for one in called:
            total.add(self.computation(one), times)
        return total

    def _kernel(self, computation: Computation, instruction: Instruction) -> tuple[str, float]:
        cost = self._costs.instruction(computation, instruction)
        moved = self._rates.memory_seconds(cost.traffic)
        if attention := attention_shape(computation, instruction, cost.high):
            return "attention", max(moved, self._rates.attention_seconds(attention))
        products = list(self._products(computation, instruction))
        if products:
            return "products", max(moved, sum(products))
        inner = [i for one in self._module.called(instruction) for i in one.instructions]
        operations = {i.opcode for i in inner or [instruction]}
        return ("copies" if operations <= MOVES else "kernels"), moved

    def _products(self, computation: Computation, instruction: Instruction) -> Iterator[float]:
        """Yields the seconds of each product of a kernel, including those within a fusion."""
        if shape := product_shape(computation, instruction):
            widest = max((s.dtype for s in computation.operand_shapes(instruction)), key=dtype_bits)
            share = self._machine.rate_share(dtype_bits(widest) // 8)
            yield self._rates.product_seconds(shape, share)
        for called in self._module.called(instruction):
            for inner in called.instructions:
                yield from self._products(called, inner)


def product_shape(computation: Computation, instruction: Instruction) -> ProductShape | None:
    """Returns the sizes of a matrix product; None for any other instruction.

    Args:
        computation: the computation that holds the instruction.
        instruction: a `dot`, a convolution, or a custom call to a matmul library.
    """
    is_call = instruction.opcode == "custom-call"
    if is_call and not re.search("matmul|gemm|conv", target_of(instruction)):
        return None
    flops = matmul_flops(computation, instruction)
    if not flops:
        return None
    result = instruction.shapes[0]
    operands = computation.operand_shapes(instruction)
    batch = 1
    columns = result.dims[-1] if result.dims else 1
    if instruction.opcode in DOTS or is_call:
        batch_dims = _batch_dims(instruction)
        batch = math.prod(operands[0].dims[dim] for dim in batch_dims)
        if ragged_dim(instruction) not in batch_dims:
            # On average, each group of a grouped product has an equal share of the rows.
            batch *= num_groups(computation, instruction)
        right = math.prod(operands[1].dims)
        summed = flops // (2 * max(1, result.size))
        columns = max(1, right // max(1, batch * summed))
    summed = max(1, flops // (2 * max(1, result.size)))
    return ProductShape(
        rows=max(1, result.size // max(1, batch * columns)),
        columns=columns,
        summed=summed,
        batch=batch,
        written=max(1, dtype_bits(result.dtype) // 8),
        read=max(1, max(dtype_bits(shape.dtype) for shape in operands[:2]) // 8),
    )


def _batch_dims(instruction: Instruction) -> list[int]:
    text = instruction.attribute("lhs_batch_dims") or ""
    if match := _LHS_BATCH.search(instruction.attributes):
        text = match.group(1)
    return [int(number) for number in re.findall(r"\d+", text)]


def attention_shape(
    computation: Computation, instruction: Instruction, flops: float
) -> AttentionShape | None:
    """Returns the sizes of a fused attention kernel; None for any other instruction.

    Args:
        computation: the computation that holds the instruction.
        instruction: any instruction.
        flops: the FLOPs of its products over all pairs of positions.
    """
    target = target_of(instruction) if instruction.opcode == "custom-call" else ""
    match = _SCORES.search(instruction.attributes) if "fmha" in target else None
    if match is None:
        return None
    operands = computation.operand_shapes(instruction)
    sizes = [int(number) for number in re.findall(r"\d+", match.group(1))]
    return AttentionShape(
        flops=flops,
        length=sizes[-1],
        head_dim=operands[0].dims[-1],
        is_backward="Backward" in target,
        is_causal="CAUSAL" in instruction.attributes,
    )
