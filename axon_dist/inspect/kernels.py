"""The kernels that a compiled program calls, and what the compiler computes a second time.

A fused kernel is a custom call, whose target or name says what it is. That a model asked for one
proves nothing: a dtype that the kernel does not take, or a platform without it, and the same model
compiles to products over all scores.
"""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Mapping

from ..core.errors import ClaimError
from ..hlo.parse import Instruction, Program, as_module
from ..hlo.walk import visits
from .cost import CostModel
from .expect import Expected, is_expected

ATTENTION = re.compile(r"fmha|flash|splash|attention", re.IGNORECASE)
"""What the targets and names of fused attention have in them."""

PALLAS = ("tpu_custom_call", "mosaic", "triton_kernel_call", "__gpu$xla.gpu.triton")
"""Targets that any kernel may have; its name says which it is."""

_TARGET = re.compile(r'custom_call_target="([^"]*)"')
_NUMBER = re.compile(r"(\.\d+)+$")
PADDING = 128
"""By how much less XLA fills up a dim that does not divide: 50 257 become 50 260 for cuBLAS."""

REMAT = ".remat"
"""What XLA adds to the name of an instruction that it computes again to save memory."""


@dataclasses.dataclass(frozen=True)
class Recomputed:
    """What XLA computes again of its own accord; what the program says itself is not among it.

    Args:
        count: executions per step.
        bytes: of their results, per step.
        flops: matrix operations among them, per step.
    """

    count: int = 0
    bytes: int = 0
    flops: int = 0

    def __str__(self) -> str:
        return (
            f"{self.count} instructions, {self.bytes / 1e6:,.1f} MB of results, "
            f"{self.flops / 1e12:,.3f} TFLOP"
        )


def kernels(program: Program) -> dict[str, int]:
    """Counts the custom calls of a program by target, kernels of Pallas by their names.

    Args:
        program: a `jax.stages.Compiled`, its text, or a `Module`.

    Returns:
        Executions per step and device; a loop whose length only the data know counts once.

    Example:
        >>> import jax
        >>> kernels(jax.jit(lambda x: x + 1).lower(1.0).compile())
        {}
    """
    found: Counter[str] = Counter()
    for visit in visits(as_module(program)):
        for instruction in visit.computation.instructions:
            if instruction.opcode == "custom-call":
                found[_name(instruction)] += visit.count
    return dict(sorted(found.items()))


def attention_kernels(program: Program) -> dict[str, int]:
    """Those of the `kernels` that are fused attention, forward and backward."""
    return {name: count for name, count in kernels(program).items() if ATTENTION.search(name)}


def recomputed(program: Program) -> Recomputed:
    """What XLA rematerialises by itself: instructions that are named `.remat`.

    It does so where a program would not fit, and says nothing: the FLOPs are in nobody's account.

    Args:
        program: a `jax.stages.Compiled`, its text, or a `Module`.

    Returns:
        How often, and how much.
    """
    module = as_module(program)
    cost, total = CostModel(module), Recomputed()
    for visit in visits(module):
        for instruction in visit.computation.instructions:
            if REMAT not in instruction.name:
                continue
            flops = cost.instruction(visit.computation, instruction).high
            total = Recomputed(
                total.count + visit.count,
                total.bytes + visit.count * instruction.bytes,
                total.flops + visit.count * flops,
            )
    return total


def largest_logits(program: Program, classes: int) -> int:
    """The positions of the largest array of floats that has one for each of them and each class.

    What is within a fusion is no array, for it is never in memory as a whole.

    Args:
        program: a `jax.stages.Compiled`, its text, or a `Module`.
        classes: how many classes a device has: of a vocabulary that is split, its part.

    Returns:
        How many; 0 where no array has such a dim, or one that XLA has filled up for alignment.
    """
    module = as_module(program)
    shapes = (
        shape
        for visit in visits(module)
        for instruction in visit.computation.instructions
        for shape in instruction.shapes
    )
    positions = (
        shape.size // dim
        for shape in shapes
        if shape.dtype in ("f32", "bf16", "f16") and len(shape.dims) > 1
        for dim in shape.dims
        if classes <= dim < classes + PADDING
    )
    return max(positions, default=0)


def expect_kernels(
    program: Program,
    *,
    attention: Expected = None,
    loss: tuple[int, int] | None = None,
    remat: Expected = None,
) -> Mapping[str, int]:
    """Raises unless a program calls the kernels that its speed was counted on.

    Args:
        program: a `jax.stages.Compiled`, its text, or a `Module`.
        attention: how often a device runs a fused kernel of attention in a step, forward,
            backward and recomputed together; a `range` for several allowed numbers, such as
            `range(1, 10**6)` for any but none, and None for any.
        loss: (positions, classes) of one device, of which no array may hold all logits, in float32
            or in half precision.
        remat: how many instructions XLA may rematerialise by itself.

    Returns:
        All `kernels` of the program.

    Raises:
        ClaimError: naming what was found.

    Example:
        >>> import jax
        >>> expect_kernels(jax.jit(lambda x: x + 1).lower(1.0).compile(), attention=0)
        {}
    """
    module = as_module(program)
    found = kernels(module)
    fused = {name: count for name, count in found.items() if ATTENTION.search(name)}
    wrong = []
    if not is_expected(sum(fused.values()), attention):
        wrong.append(
            f"{sum(fused.values())} fused kernels of attention instead of {attention} "
            f"({_listed(fused) or 'among its custom calls: ' + (_listed(found) or 'none')})"
        )
    if loss is not None and (held := largest_logits(module, loss[1])) >= loss[0]:
        wrong.append(
            f"an array of logits of {held} positions and {loss[1]} classes, where none "
            f"should hold those of {loss[0]}"
        )
    if remat is not None and not is_expected((own := recomputed(module)).count, remat):
        wrong.append(f"what XLA rematerialises by itself: {own}, instead of {remat}")
    if wrong:
        raise ClaimError(
            f"a step runs {'; and '.join(wrong)}. Compute in bfloat16 and leave the form of "
            "attention on 'auto' for fused kernels, logits='chunked' for the loss, and activation "
            "checkpointing for memory; or change the claim"
        )
    return found


def _name(instruction: Instruction) -> str:
    match = _TARGET.search(instruction.attributes)
    target = match.group(1) if match else instruction.name
    if not target.startswith(PALLAS):
        return target
    return f"{target} {_NUMBER.sub('', instruction.name)}"


def _listed(found: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in found.items())
