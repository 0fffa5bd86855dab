"""Claims about the collectives of a compiled program, checked against what it does."""

from __future__ import annotations

import io
from typing import TypeAlias

import jax
from rich.console import Console

from ..core.errors import ClaimError
from ..hlo.parse import Program
from .hlo import collectives
from .ledger import Ledger

Expected: TypeAlias = int | range | None
"""A number of executions per step, a range of allowed numbers, or None for any number."""


def expect_collectives(
    program: Program,
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

    A kind that is not named must not occur.

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
        ClaimError: a number differs; the message shows the ledger.

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
        found = sum(row.count for row in rows)
        if not is_expected(found, claim):
            wrong.append(f"{found} {kind} instead of {claim}")
    if wrong:
        place = f" over axis {axis!r}" if axis else ""
        raise ClaimError(
            f"a step executes {', '.join(wrong)}{place}; change the claim or the shardings that "
            f"lead to them:\n{_rendered(ledger)}"
        )
    return ledger


def expect_bytes(
    program: Program,
    mesh: jax.sharding.Mesh,
    *,
    bytes: float,
    kind: str | None = None,
    axis: str | tuple[str, ...] | None = None,
    tolerance: float = 0.02,
) -> Ledger:
    """Raises unless a device sends so many bytes in a step.

    Args:
        program: a `jax.stages.Compiled`, its text, or a `Module`.
        mesh: the mesh it was compiled for.
        bytes: wire bytes per device and step, ring costs and trip counts included.
        kind: count only one kind of collective, such as `"all-gather"`.
        axis: count only collectives over this mesh axis, or over these axes together.
        tolerance: the largest allowed deviation, relative to `bytes`; it stands for the small
            leaves that stay whole.

    Returns:
        The whole ledger, for further questions.

    Raises:
        ClaimError: the bytes deviate by more; the message shows the ledger.
    """
    ledger = collectives(program, mesh)
    found = ledger.total_wire_bytes(kind, axis)
    if abs(found - bytes) > tolerance * abs(bytes):
        what = " ".join(filter(None, (kind or "collectives", f"over {axis}" if axis else "")))
        raise ClaimError(
            f"a device sends {found:,} bytes per step by {what} instead of {bytes:,.0f} within "
            f"{tolerance:.0%}; change the claim or the shardings that lead to them:\n"
            f"{_rendered(ledger)}"
        )
    return ledger


def is_expected(found: int, claim: Expected) -> bool:
    """Whether a number of executions is one that is allowed."""
    return claim is None or found in (claim if isinstance(claim, range) else (claim,))


def _rendered(ledger: Ledger) -> str:
    console = Console(file=io.StringIO(), width=120)
    with console.capture() as capture:
        console.print(ledger.table())
    return capture.get()
