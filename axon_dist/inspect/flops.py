"""Counts the matrix operations of a compiled program."""

from __future__ import annotations

import dataclasses

from ..hlo.parse import Program, as_module
from ..hlo.walk import visits
from .cost import CostModel
from .matmuls import opaque_target


@dataclasses.dataclass(frozen=True)
class Flops:
    """Matrix operations per device and step.

    Args:
        low: with every conditional on its cheapest branch.
        high: with every conditional on its dearest branch; equal to `low` where there is none.
        unknown_trip: whether a loop was counted once because only the data decide how often it
            runs; the truth is then higher.
        opaque: custom calls whose work the text does not tell; the truth may be higher.
    """

    low: int
    high: int
    unknown_trip: bool
    opaque: tuple[str, ...]


def flops(program: Program) -> Flops:
    """Counts the matrix operations of one device in one execution of a compiled program.

    The count is weighted with trip counts, which XLA's own `cost_analysis` leaves out, and covers
    `dot`, `convolution`, cuBLAS and Triton products, cuDNN attention, and the stated cost of
    kernels, inside fusions too.

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
        target
        for computation in module.computations.values()
        for instruction in computation.instructions
        if (target := opaque_target(instruction))
    }
    return Flops(
        low=cost.low,
        high=cost.high,
        unknown_trip=any(visit.unknown_trip for visit in visits(module)),
        opaque=tuple(sorted(opaque)),
    )
