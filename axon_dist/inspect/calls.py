"""Counts the kernels that a compiled program calls, and the work that XLA rematerialises.

A fused kernel is a custom call; its target or its name identifies it. Requesting a fused kernel
does not guarantee one: with an unsupported dtype, or on a platform without it, the same model
compiles to products over all scores.
"""

from __future__ import annotations

import dataclasses
import re
from collections import Counter

from .computations import visits
from .flops import CostModel, target_of
from .parse import Instruction, ProgramLike, as_module

ATTENTION = re.compile(r"fmha|flash|splash|attention", re.IGNORECASE)
"""Matches the targets and names of fused attention kernels."""

PALLAS = ("tpu_custom_call", "mosaic", "triton_kernel_call", "__gpu$xla.gpu.triton")
"""Targets shared by many kernels; the instruction's name identifies the kernel."""

_NUMBER = re.compile(r"(\.\d+)+$")
PADDING = 128
"""XLA may pad a dim to a multiple, by less than this: for cuBLAS, 50 257 becomes 50 260."""

REMAT = ".remat"
"""XLA adds this to the name of an instruction that it recomputes to save memory."""


@dataclasses.dataclass(frozen=True)
class Recomputed:
    """The work that XLA rematerialises on its own, without that of the program's checkpoints.

    Args:
        count: executions of rematerialised instructions per step.
        bytes: bytes of their results, per step.
        flops: their matrix operations, per step.
    """

    count: int = 0
    bytes: int = 0
    flops: int = 0

    def __str__(self) -> str:
        return (
            f"{self.count} instructions, {self.bytes / 1e6:,.1f} MB of results, "
            f"{self.flops / 1e12:,.3f} TFLOP"
        )


def kernels(program: ProgramLike) -> dict[str, int]:
    """Counts the custom calls of a program by target, and Pallas kernels by target and name.

    Args:
        program: a `jax.stages.Compiled`, its text, or a `Module`.

    Returns:
        Executions per step and device; a loop whose length depends on the data counts once.

    Example:
        >>> import jax
        >>> kernels(jax.jit(lambda x: x + 1).lower(1.0).compile())
        {}
    """
    counts: Counter[str] = Counter()
    for visit in visits(as_module(program)):
        for instruction in visit.computation.instructions:
            if instruction.opcode == "custom-call":
                counts[_name(instruction)] += visit.count
    return dict(sorted(counts.items()))


def attention_kernels(program: ProgramLike) -> dict[str, int]:
    """Returns the `kernels` that are fused attention, forward and backward."""
    return {name: count for name, count in kernels(program).items() if ATTENTION.search(name)}


def recomputed(program: ProgramLike) -> Recomputed:
    """Counts the instructions that XLA rematerialises on its own, which it names `.remat`.

    XLA does so silently if a program would otherwise not fit, and reports these FLOPs nowhere.

    Args:
        program: a `jax.stages.Compiled`, its text, or a `Module`.

    Returns:
        The executions, bytes and FLOPs.
    """
    module = as_module(program)
    cost = CostModel(module)
    total = Recomputed()
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


def largest_logits(program: ProgramLike, classes: int) -> int:
    """Returns how many positions the largest array of logits has.

    Any floating-point array with a dim of `classes` counts. Values within a fusion do not count:
    they are never in memory as a whole.

    Args:
        program: a `jax.stages.Compiled`, its text, or a `Module`.
        classes: the number of classes on a device: its part of the vocabulary if that is split.

    Returns:
        The number of positions; 0 if no array has such a dim, even allowing for XLA's padding.
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


def _name(instruction: Instruction) -> str:
    target = target_of(instruction) or instruction.name
    if not target.startswith(PALLAS):
        return target
    return f"{target} {_NUMBER.sub('', instruction.name)}"
