"""Decides whether equal blocks that are called one after another run as one loop or are unrolled.

A loop is compiled once, whatever its length. It stacks the values that blocks save for the backward
pass: each block's slice is copied into the stack and out again, and XLA:GPU zeroes the stack first.
Unrolled blocks are compiled separately, and their saved values stay where they were computed.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
from jax.extend.core import ClosedJaxpr, JaxprEqn, Var

from ..core.compat import eval_equation
from ..core.typing import Array, Function
from ..core.words import byte_size, duration
from .walk import CALLS, LOOPS, Aval, equations, interpret

UNROLLED = 4
"""Up to this many blocks are unrolled; more are unrolled only if a known cost favours it.

A `LoopRule` with `most`, and blocks that contain a loop, are exceptions. A loop makes four small
blocks about a tenth slower, and needs more memory; but each unrolled block takes time to compile.
CPUs have no cost model: compilation takes most of a test's time there.
"""

STACK_PASSES = 5
"""The passes over a stack: one to zero it, then a read and a write each to copy in and out.

At 124 million parameters and 64 samples of 1024 tokens these take an H100 17.6 ms of a 158.9 ms
step; the estimate is 18.1 ms.
"""

GATHERED_BLOCKS = 16
"""Up to this many blocks that gather their weights are unrolled.

A loop gathers one block at a time; for unrolled blocks the compiler decides when to gather each.
Compiled for h100:8 (FSDP in bfloat16, width 512, 8 samples of 512 tokens per device), unrolled
blocks take 445 MB of temporaries at 8 blocks and a loop 494; at 16 blocks, 810 and 839. Each
further block adds 2.4 MB more than in a loop. That is less than the 6.3 MB of its gathered weights,
so these are freed. Deeper models were not compiled, and stay a loop.

A loop of this many blocks does not save compile time either: the compiler peels and doubles its
iterations to gather ahead. On one core the loops took 43 and 65 s to compile, unrolled blocks 31
and 56."""

STEPS = 10_000
"""Number of steps of a run that is long enough for its speed to matter."""


@dataclasses.dataclass(frozen=True)
class LoopChoice:
    """Whether some equal blocks run as a loop, and why.

    Args:
        num_blocks: how many there are, called one after another.
        is_loop: whether they run as one loop; otherwise they are unrolled.
        why: the reason, as a clause.

    Example:
        >>> print(LoopChoice(12, False, "scan_layers=False says so"))
        12 blocks are unrolled: scan_layers=False says so
    """

    num_blocks: int
    is_loop: bool
    why: str

    def __str__(self) -> str:
        how = "run as one loop" if self.is_loop else "are unrolled"
        return f"{self.num_blocks} blocks {how}: {self.why}"


@dataclasses.dataclass(frozen=True)
class LoopCost:
    """The costs and savings of a loop on one kind of device.

    Args:
        bandwidth: bytes per second of the device's memory.
        block_seconds: seconds to compile one more block.
        platform: `"cpu"`, `"cuda"` or `"tpu"`; branches for other platforms are ignored.
        num_shares: the number of devices that share the arrays of the traced program: the ranks
            that split the samples in global view; 1 inside `shard_map`.
        most: the largest number of unrolled blocks whose memory is known; None sets no limit.
        loop_blocks: how many unrolled blocks compile in the time of one loop.
    """

    bandwidth: float
    block_seconds: float
    platform: str = "cuda"
    num_shares: int = 1
    most: int | None = None
    loop_blocks: int = 1

    def choice(self, num_blocks: int, stack_bytes: int) -> LoopChoice:
        """Compares the time that stacks take over `STEPS` steps with the compile time saved.

        Args:
            num_blocks: how many blocks there are.
            stack_bytes: the bytes of the loop's stacks, over all devices that share them.

        Example:
            >>> cost = LoopCost(bandwidth=3e12, block_seconds=1.0)
            >>> cost.choice(12, 12 * 10**9).is_loop, cost.choice(12, 12 * 10**6).is_loop
            (False, True)
        """
        stack_bytes //= self.num_shares
        a_step = STACK_PASSES * stack_bytes / self.bandwidth
        compiling = max(0, num_blocks - self.loop_blocks) * self.block_seconds
        saved = duration(compiling)
        took = f"{duration(a_step)} of every step"
        if self.most is not None and num_blocks > self.most:
            why = f"more than {self.most} unrolled blocks could keep gathered weights for longer; "
            why += f"{byte_size(stack_bytes)} of stacks take {took}"
            return LoopChoice(num_blocks, True, why)
        if STEPS * a_step > compiling:
            why = f"a loop would stack {byte_size(stack_bytes)}, {took}, and save "
            why += f"{saved} of compiling" if compiling else "no compile time"
            return LoopChoice(num_blocks, False, why)
        why = f"that saves {saved} of compiling, and {byte_size(stack_bytes)} of stacks take {took}"
        return LoopChoice(num_blocks, True, why)


ProtectBlock: TypeAlias = Callable[[Function], Function]
"""The function of a block -> the same under `jax.checkpoint`, or unchanged."""


def _ignore(choice: LoopChoice) -> None:
    """Ignores a choice."""


@dataclasses.dataclass(frozen=True)
class LoopRule:
    """Which chains of equal blocks run as a loop.

    Args:
        most: up to this many blocks are unrolled. None unrolls up to `UNROLLED`, and more if
            `cost` favours it; blocks that contain a loop themselves then run as a loop.
        why: where `most` comes from, as a clause; without `most`, why no cost is known.
        cost: the cost of a loop on the devices; None if unknown.
        tell: called with every choice.
    """

    most: int | None = None
    why: str = ""
    cost: LoopCost | None = None
    tell: Callable[[LoopChoice], None] = _ignore

    def loops(
        self, program: ClosedJaxpr, roles: Sequence[str | int], length: int, protect: ProtectBlock
    ) -> bool:
        """Whether a chain runs as a loop.

        Args:
            program: the program of one block.
            roles: the role of each operand: the index of the result that a carried operand comes
                from, `"stacked"` if each block has its own, or `"shared"`.
            length: how many blocks there are.
            protect: puts a block under the `jax.checkpoint` that it runs under.
        """
        choice = self._choice(program, roles, length, protect)
        self.tell(choice)
        return choice.is_loop

    def _choice(
        self, program: ClosedJaxpr, roles: Sequence[str | int], length: int, protect: ProtectBlock
    ) -> LoopChoice:
        if self.most is not None:
            return LoopChoice(length, length > self.most, self.why)
        if any(equation.primitive.name in LOOPS for equation in equations(program)):
            # The inner loop stacks what the block saves in any case.
            return LoopChoice(length, True, "each loops itself")
        if length > UNROLLED and self.cost is not None:
            each = stacked_bytes(program, roles, self.cost.platform, protect)
            return self.cost.choice(length, length * each)
        why = f"up to {UNROLLED} are compiled separately, more run as one loop"
        if length > UNROLLED and self.why:
            why = f"{why}, because {self.why}"
        return LoopChoice(length, length > UNROLLED, why)


def stacked_bytes(
    program: ClosedJaxpr,
    roles: Sequence[str | int],
    platform: str,
    protect: ProtectBlock = lambda block: block,
) -> int:
    """Returns the bytes that a loop stacks per iteration, found by differentiating the block.

    These are the values that the backward pass reads and that are not shared by all blocks, and
    the operands of which each block has its own.

    Args:
        program: the program of the block.
        roles: the role of each operand, as in `LoopRule.loops`.
        platform: only the branches for this platform are counted.
        protect: puts the block under the `jax.checkpoint` that it runs under.
    """

    def pullback(*values: Array) -> object:
        run = functools.partial(_run, platform=platform)

        def block(*values: Array) -> list[Array]:
            return interpret(program.jaxpr, program.consts, values, run, enters=_is_call)

        return jax.vjp(protect(block), *values)[1]

    traced = jax.make_jaxpr(pullback)(*map(_shape, program.in_avals)).jaxpr
    kept = {var for var in traced.outvars if isinstance(var, Var)}
    shared = {v for v, role in zip(traced.invars, roles, strict=True) if role == "shared"}
    stacked = {v for v, role in zip(traced.invars, roles, strict=True) if role == "stacked"}
    return sum(_num_bytes(var.aval) for var in (kept - shared) | stacked)


def _is_call(equation: JaxprEqn) -> bool:
    return equation.primitive.name in CALLS


def _run(equation: JaxprEqn, operands: Sequence[Any], platform: str) -> list[Any]:
    """Runs an equation; of a choice by platform, runs only this platform's branch."""
    name = equation.primitive.name
    params = equation.params
    names = params.get("platforms" if name == "platform_index" else "branches_platforms")
    number = operands[0] if name == "cond" else None
    if names is not None:
        number = next(n for n, one in enumerate(names) if one is None or platform in one)
    if name == "platform_index":
        return [number]
    if not isinstance(number, int):
        return eval_equation(equation, operands)
    branch = params["branches"][number]
    run = functools.partial(_run, platform=platform)
    return interpret(branch.jaxpr, branch.consts, operands[1:], run, enters=_is_call)


def _shape(aval: Aval) -> jax.ShapeDtypeStruct:
    """Returns an argument to trace with; inside `shard_map` it varies over the same axes."""
    varies = getattr(aval, "vma", None)
    more = {"vma": varies} if varies else {}
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, **more)


def _num_bytes(aval: Aval) -> int:
    return math.prod(aval.shape) * aval.dtype.itemsize
