"""The cost of a computation: matrix operations and bytes of memory traffic.

A multiplication and an addition are two operations. Elementwise work is not counted: it is
memory-bound, and vendors state no peak for it. A causal mask does not reduce the count, as in the
usual `6 * parameters * tokens + attention` accounting.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Iterator

from ..core.compat import splash_flops
from ..core.convolution import products_along
from ..mesh.chips import Hardware
from .computations import trip_count, usually_called, visits
from .parse import Computation, Instruction, Module, ProgramLike, Shape, as_module

DOTS = ("dot", "ragged-dot", "scaled-dot")
"""The opcodes of matrix products."""

_TARGET = re.compile(r'custom_call_target="([^"]*)"')
_GEMM_LHS = re.compile(r'"lhs_contracting_dimensions":\s*\[([^\]]*)\]')
_SCORES = re.compile(r'"intermediate_tensor_shape":.*?"dimensions":\s*\[([^\]]*)\]')
_COST = re.compile(r'"cost_estimate":\s*(\{[^}]*\})')
_NO_FLOPS = re.compile(
    r"Async|AllocateBuffer|AssumeGather|GatherScatter|Sharding|annotate|TopK|[Pp]refix|Sort"
    r"|MoveTo|LayoutConstraint|SliceToDynamic|PadToStatic"
)


def matmul_flops(computation: Computation, instruction: Instruction) -> int:
    """Counts the matrix operations of one instruction, without those of computations it calls.

    Args:
        computation: the computation that holds it and its operands.
        instruction: a `dot`, a `convolution`, or a custom call to cuBLAS, cuDNN or a kernel that
            states its cost; any other instruction counts 0.

    Returns:
        Twice the number of multiplications.
    """
    if instruction.opcode in DOTS:
        contracted = _dims(instruction.attribute("lhs_contracting_dims"))
        flops = _gemm(computation, instruction, contracted)
        # Each group has a result, to which only its own rows add: an expert's weight gradient.
        is_split = ragged_dim(instruction) in contracted
        return flops // max(1, num_groups(computation, instruction)) if is_split else flops
    if instruction.opcode == "convolution":
        return _convolution(instruction, _forward_shapes(computation, instruction, ""))
    if instruction.opcode == "custom-call":
        return _custom_call(computation, instruction) or 0
    return 0


def ragged_dim(instruction: Instruction) -> int | None:
    """Returns the dim of the left operand that a grouped product cuts; None for other products."""
    return next(iter(_dims(instruction.attribute("lhs_ragged_dims"))), None)


def num_groups(computation: Computation, instruction: Instruction) -> int:
    """Returns the number of groups of a grouped product; 1 for any other instruction."""
    if ragged_dim(instruction) is None:
        return 1
    # The third operand holds the sizes of the groups; each batch may have its own.
    return computation.operand_shapes(instruction)[2].dims[-1]


def target_of(instruction: Instruction) -> str:
    """Returns the target of a custom call; "" if it has none."""
    match = _TARGET.search(instruction.attributes)
    return match.group(1) if match else ""


def _gemm(computation: Computation, instruction: Instruction, contracted: tuple[int, ...]) -> int:
    lhs = computation.operand_shapes(instruction)[0]
    return 2 * instruction.shapes[0].size * math.prod(lhs.dims[dim] for dim in contracted)


def _custom_call(computation: Computation, instruction: Instruction) -> int | None:
    """Counts the matrix operations of a kernel; None if they are unknown."""
    target = target_of(instruction)
    attributes = instruction.attributes
    if "matmul" in target or "gemm" in target:
        match = _GEMM_LHS.search(attributes)
        return _gemm(computation, instruction, _dims(match.group(1))) if match else 0
    if "fmha" in target:
        return _attention(computation, instruction, backward="Backward" in target)
    if "$conv" in target:
        return _convolution(instruction, _forward_shapes(computation, instruction, target))
    shapes = computation.operand_shapes(instruction), instruction.shapes
    if count := splash_flops(instruction.name, *([s.dims for s in x] for x in shapes)):
        return count
    if match := _COST.search(attributes):
        return int(json.loads(match.group(1)).get("flops", 0))
    return 0 if _NO_FLOPS.search(target) else None


def _attention(computation: Computation, instruction: Instruction, backward: bool) -> int:
    # The backward pass of flash attention recomputes the scores, so it has five products instead of
    # four (Dao et al., arXiv:2205.14135).
    match = _SCORES.search(instruction.attributes)
    if match is None:
        return 0
    head_dim = computation.operand_shapes(instruction)[0].dims[-1]
    return (5 if backward else 2) * 2 * math.prod(_dims(match.group(1))) * head_dim


def _forward_shapes(
    computation: Computation, instruction: Instruction, target: str
) -> tuple[Shape, Shape, Shape]:
    """Returns input, kernel and output of the forward convolution that a cuDNN call belongs to.

    The window and the labels of a backward call are those of its forward convolution, and it does
    the same work.
    """
    one, two, *_ = computation.operand_shapes(instruction)
    result = instruction.shapes[0]
    if "BackwardInput" in target:
        return result, two, one
    if "BackwardFilter" in target:
        return one, result, two
    return one, two, result


def _convolution(instruction: Instruction, shapes: tuple[Shape, Shape, Shape]) -> int:
    # On TPU every matrix product is a convolution. Batch dims become spatial dims with base
    # dilation: most positions of the window fall on holes, and cost nothing.
    lhs, kernel, output = shapes
    labels = re.split(r"_|->", instruction.attribute("dim_labels") or "")
    lhs_dims, kernel_dims, output_dims = (
        dict(zip(text, shape.dims, strict=True))
        for text, shape in zip(labels, (lhs, kernel, output), strict=True)
    )
    window = _window(instruction.attribute("window") or "{}")
    positions = math.prod(
        _positions(lhs_dims[axis], kernel_dims[axis], output_dims[axis], window, index)
        for index, axis in enumerate(sorted(filter(str.isdigit, labels[0])))
    )
    return 2 * output_dims["b"] * output_dims["f"] * kernel_dims["i"] * positions


def _window(text: str) -> dict[str, list[str]]:
    fields = (field.split("=") for field in text.strip("{}").split())
    return {key: value.split("x") for key, value in fields}


def _positions(lhs: int, kernel: int, output: int, window: dict[str, list[str]], index: int) -> int:
    def field(key: str, default: str) -> str:
        return window[key][index] if key in window else default

    return products_along(
        lhs,
        kernel,
        output,
        low=int(field("pad", "0_0").split("_")[0]),
        stride=int(field("stride", "1")),
        dilation=int(field("lhs_dilate", "1")),
        kernel_dilation=int(field("rhs_dilate", "1")),
    )


def _dims(text: str | None) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", text or ""))


_FREE = (
    *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all"),
    *("partition-id", "replica-id", "opt-barrier", "add-dependency", "iota"),
)
_SLICES = ("dynamic-slice", "slice", "gather")


@dataclasses.dataclass(frozen=True)
class Cost:
    """Bounds on the matrix operations, and the bytes of memory traffic, of one execution.

    `low` assumes the cheapest branch of every conditional, `high` the most expensive one.
    """

    low: int = 0
    high: int = 0
    traffic: int = 0

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.low + other.low, self.high + other.high, self.traffic + other.traffic)

    def times(self, count: int) -> Cost:
        """Returns the cost of `count` executions."""
        return Cost(self.low * count, self.high * count, self.traffic * count)

    def seconds(self, machine: Hardware) -> float:
        """Returns the least time on a machine: at peak rates, on the cheapest branches."""
        return max(self.low / machine.flops, self.traffic / machine.memory_bandwidth)


class CostModel:
    """Adds up costs over the call graph of one program, each computation once.

    Args:
        module: the parsed HLO of a compiled program.
    """

    def __init__(self, module: Module):
        self._module = module
        self._known: dict[str, Cost] = {}

    def computation(self, computation: Computation) -> Cost:
        """Returns the cost of one execution of a computation, including all it calls."""
        if computation.name not in self._known:
            costs = (self.instruction(computation, i) for i in computation.instructions)
            self._known[computation.name] = sum(costs, Cost())
        return self._known[computation.name]

    def instruction(self, computation: Computation, instruction: Instruction) -> Cost:
        """Returns the cost of one instruction of a computation, including all it calls."""
        opcode = instruction.opcode
        called = [self.computation(callee) for callee in usually_called(self._module, instruction)]
        inner = sum(called, Cost())
        if opcode == "while":
            trips = trip_count(self._module, computation, instruction)
            return inner.times(1 if trips is None else trips)
        if opcode == "conditional":
            return Cost(
                low=min(cost.low for cost in called),
                high=max(cost.high for cost in called),
                traffic=min(cost.traffic for cost in called),
            )
        if opcode == "call":
            return inner
        flops = matmul_flops(computation, instruction)
        traffic = self._traffic(computation, instruction)
        return Cost(flops + inner.low, flops + inner.high, traffic)

    def _traffic(self, computation: Computation, instruction: Instruction) -> int:
        if instruction.opcode in _FREE or instruction.opcode.endswith(("-start", "-done")):
            return 0
        if instruction.opcode == "fusion":
            (fused,) = self._module.called(instruction)
            return _read(fused) + _written(fused, fused.root)
        if instruction.opcode == "dynamic-update-slice":
            return _written(computation, instruction)
        operands = (computation.by_name.get(name) for name in instruction.operands)
        return instruction.bytes + sum(operand.bytes for operand in operands if operand)


def _read(fused: Computation) -> int:
    """Returns the bytes a fusion reads; if it slices one layer of a stack, only that slice."""
    total = 0
    known: dict[str, int] = {}
    slices_something = any(i.opcode in _SLICES for i in fused.instructions)
    for parameter in fused.instructions:
        if parameter.opcode != "parameter":
            continue
        users = list(_users(fused, parameter))
        if users and all(user.opcode in _SLICES for user, _ in users):
            total += sum(user.bytes for user, _ in users)
        elif not any(_overwrites(user, name) for user, name in users):
            whole = max(1, sum(shape.size for shape in parameter.shapes))
            read = _elements_read(fused, parameter, known) if slices_something else whole
            total += parameter.bytes * read // whole
    return total


_ELEMENTWISE = frozenset(
    {
        *("convert", "negate", "exponential", "tanh", "log", "add", "subtract", "multiply"),
        *("divide", "maximum", "minimum", "select"),
    }
)


def _elements_read(fused: Computation, value: Instruction, known: dict[str, int]) -> int:
    """Returns how many elements of a value a fusion reads.

    A fusion computes an element only when it is read. So a gather from a value that is converted
    elementwise reads only the gathered elements.

    Args:
        fused: the computation of the fusion.
        value: one of its instructions.
        known: a cache of the results, by name.
    """
    if value.name not in known:
        known[value.name] = _elements_needed(fused, value, known)
    return known[value.name]


def _elements_needed(fused: Computation, value: Instruction, known: dict[str, int]) -> int:
    whole = sum(shape.size for shape in value.shapes)
    users = list(_users(fused, value))
    needed = 0
    for user, name in users:
        if user.opcode in _SLICES and user.operands[0] == name:
            needed += user.shapes[0].size
        elif user.opcode in _ELEMENTWISE and not user.is_root:
            needed += _elements_read(fused, user, known)
        else:
            return whole
    return min(needed, whole) if users else whole


def _users(fused: Computation, value: Instruction) -> Iterator[tuple[Instruction, str]]:
    """Yields the users of a value, with the name they use; a bitcast is another name for it."""
    for user in fused.instructions:
        if value.name in user.operands:
            if user.opcode == "bitcast":
                yield from _users(fused, user)
            else:
                yield user, value.name


def _overwrites(user: Instruction, name: str) -> bool:
    return user.opcode == "dynamic-update-slice" and user.operands[0] == name


def _written(computation: Computation, value: Instruction) -> int:
    """Returns the bytes written to store a value; an in-place update writes only its slice."""
    elements = [computation.by_name[name] for name in value.operands if value.opcode == "tuple"]
    if elements:
        return sum(_written(computation, element) for element in elements)
    if value.opcode == "dynamic-update-slice":
        return computation.by_name[value.operands[1]].bytes
    return value.bytes


@dataclasses.dataclass(frozen=True)
class Flops:
    """Matrix operations per device and step.

    Branches that are marked as rare do not count (`usually_called`).

    Args:
        low: the number with every conditional on its cheapest branch.
        high: the number with every conditional on its most expensive branch; equal to `low` if
            there is no conditional.
        unknown_trip: whether a loop with a data-dependent length was counted once; the true number
            is then higher.
        opaque: custom calls whose work the text does not state; the true number may be higher.
    """

    low: int
    high: int
    unknown_trip: bool
    opaque: tuple[str, ...]


def flops(program: ProgramLike) -> Flops:
    """Counts the matrix operations of one device in one execution of a compiled program.

    The count includes trip counts, which XLA's own `cost_analysis` ignores. It covers `dot`,
    `convolution`, cuBLAS and Triton products, cuDNN attention, and the stated cost of kernels,
    inside fusions too.

    Args:
        program: a `jax.stages.Compiled`, its text, or a `Module`.

    Returns:
        Bounds on the operations; rematerialised work is counted as often as it runs.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> x = jnp.ones((8, 4))
        >>> compiled = jax.jit(lambda x: x @ x.T).lower(x).compile()
        >>> flops(compiled).high == 2 * 8 * 8 * 4
        True
    """
    module = as_module(program)
    cost = CostModel(module).computation(module.entry)
    opaque = {
        target_of(instruction)
        for computation in module.computations.values()
        for instruction in computation.instructions
        if instruction.opcode == "custom-call" and _custom_call(computation, instruction) is None
    }
    return Flops(
        low=cost.low,
        high=cost.high,
        unknown_trip=any(visit.unknown_trip for visit in visits(module)),
        opaque=tuple(sorted(opaque)),
    )
