"""Checks claims about a compiled program: what it sends, and which kernels it calls."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

import jax

from ..core.errors import ClaimError
from .calls import ATTENTION, kernels, largest_logits, recomputed
from .ledger import Ledger, as_text
from .parse import ProgramLike, as_module
from .transfers import collectives

Expected: TypeAlias = int | range | None
"""A number of executions per step, a range of allowed numbers, or None for any number."""


def expect_collectives(
    program: ProgramLike,
    mesh: jax.sharding.Mesh,
    *,
    all_reduce: Expected = 0,
    all_gather: Expected = 0,
    reduce_scatter: Expected = 0,
    all_to_all: Expected = 0,
    collective_permute: Expected = 0,
    axis: str | tuple[str, ...] | None = None,
    min_bytes: int = 0,
) -> Ledger:
    """Raises unless a program executes exactly these collectives in a step.

    Kinds that are not given must not occur.

    Args:
        program: a `jax.stages.Compiled`, its text, or a `Module`.
        mesh: the mesh it was compiled for.
        all_reduce: executions per step; a `range` for several allowed numbers, None for any.
        all_gather: the same.
        reduce_scatter: the same.
        all_to_all: the same.
        collective_permute: the same.
        axis: count only collectives over this mesh axis, or over these axes together.
        min_bytes: leave out collectives with fewer wire bytes per execution, such as the sum of
            a scalar loss.

    Returns:
        The whole ledger, for further questions.

    Raises:
        ClaimError: if a number differs; the message shows the ledger.

    Example:
        >>> import jax.numpy as jnp
        >>> mesh = jax.make_mesh((1,), ("dp",), axis_types=(jax.sharding.AxisType.Auto,))
        >>> compiled = jax.jit(jnp.sum).lower(jnp.ones(8)).compile()
        >>> len(expect_collectives(compiled, mesh, all_reduce=0))
        0
    """
    ledger = collectives(program, mesh)
    expected = {
        "all-reduce": all_reduce,
        "all-gather": all_gather,
        "reduce-scatter": reduce_scatter,
        "all-to-all": all_to_all,
        "collective-permute": collective_permute,
        "ragged-all-to-all": 0,
        "collective-broadcast": 0,
    }
    wrong = []
    for kind, claim in expected.items():
        rows = (row for row in ledger.select(kind, axis) if row.wire_bytes >= min_bytes)
        count = sum(row.count for row in rows)
        if not is_expected(count, claim):
            wrong.append(f"{count} {kind} instead of {claim}")
    if wrong:
        place = f" over axis {axis!r}" if axis else ""
        raise ClaimError(
            f"a step executes {', '.join(wrong)}{place}; change the claim or the shardings that "
            f"lead to them:\n{as_text(ledger.table())}"
        )
    return ledger


def expect_bytes(
    program: ProgramLike,
    mesh: jax.sharding.Mesh,
    *,
    bytes: float,
    kind: str | None = None,
    axis: str | tuple[str, ...] | None = None,
    tolerance: float = 0.02,
) -> Ledger:
    """Raises unless a device sends the given number of bytes in a step.

    Args:
        program: a `jax.stages.Compiled`, its text, or a `Module`.
        mesh: the mesh it was compiled for.
        bytes: wire bytes per device and step, ring costs and trip counts included.
        kind: count only one kind of collective, such as `"all-gather"`.
        axis: count only collectives over this mesh axis, or over these axes together.
        tolerance: the largest allowed deviation, relative to `bytes`; it allows for the small
            leaves that stay replicated.

    Returns:
        The whole ledger, for further questions.

    Raises:
        ClaimError: if the bytes deviate by more; the message shows the ledger.
    """
    ledger = collectives(program, mesh)
    sent = ledger.total_wire_bytes(kind, axis)
    if abs(sent - bytes) > tolerance * abs(bytes):
        what = " ".join(filter(None, (kind or "collectives", f"over {axis}" if axis else "")))
        raise ClaimError(
            f"a device sends {sent:,} bytes per step by {what} instead of {bytes:,.0f} within "
            f"{tolerance:.0%}; change the claim or the shardings that lead to them:\n"
            f"{as_text(ledger.table())}"
        )
    return ledger


def is_expected(count: int, claim: Expected) -> bool:
    """Whether a number of executions is allowed."""
    return claim is None or count in (claim if isinstance(claim, range) else (claim,))


def expect_kernels(
    program: ProgramLike,
    *,
    attention: Expected = None,
    loss: tuple[int, int] | None = None,
    remat: Expected = None,
) -> Mapping[str, int]:
    """Raises unless a program calls the kernels that its speed depends on.

    Args:
        program: a `jax.stages.Compiled`, its text, or a `Module`.
        attention: how often a device runs a fused attention kernel in a step, counting forward,
            backward and recomputation. A `range` allows several numbers, such as `range(1, 10**6)`
            for any number above 0; None allows any.
        loss: (positions, classes) of one device; no array may hold that many logits, in float32 or
            half precision.
        remat: how many instructions XLA may rematerialise on its own.

    Returns:
        All `kernels` of the program.

    Raises:
        ClaimError: if anything differs; names what.

    Example:
        >>> import jax
        >>> expect_kernels(jax.jit(lambda x: x + 1).lower(1.0).compile(), attention=0)
        {}
    """
    module = as_module(program)
    calls = kernels(module)
    fused = {name: count for name, count in calls.items() if ATTENTION.search(name)}
    wrong = []
    if not is_expected(sum(fused.values()), attention):
        wrong.append(
            f"{sum(fused.values())} fused kernels of attention instead of {attention} "
            f"({_listed(fused) or 'among its custom calls: ' + (_listed(calls) or 'none')})"
        )
    if loss is not None and (positions := largest_logits(module, loss[1])) >= loss[0]:
        wrong.append(
            f"an array with the logits of {positions} positions and {loss[1]} classes, but none "
            f"may hold those of {loss[0]} positions"
        )
    if remat is not None and not is_expected((again := recomputed(module)).count, remat):
        wrong.append(f"instructions that XLA rematerialises by itself: {again}, instead of {remat}")
    if wrong:
        raise ClaimError(
            f"a step runs {'; and '.join(wrong)}. Compute in bfloat16 and leave the form of "
            "attention on 'auto' for fused kernels, logits='chunked' for the loss, and activation "
            "checkpointing for memory; or change the claim"
        )
    return calls


def _listed(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in counts.items())
