"""Whether equal blocks that are called one after another run as one loop, or are unrolled.

A loop is compiled once, whatever its length. It puts what each block keeps for the backward pass on
stacks: a block's share is copied onto them and out of them again, and XLA:GPU clears them first.
Unrolled blocks are compiled each by itself, and what each keeps stays where it was made.
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
"""Up to how many blocks are unrolled, whatever they cost; more where costs are known, and say so. A
loop takes a tenth of the time of four small blocks, and more memory; unrolled blocks take time to
compile, each. CPUs have no cost: there the time to compile is most of what a test takes."""

STACK_PASSES = 5
"""How often memory passes over a stack: it is cleared; its share is read and written where it is
copied in, and where it is copied out. At 124 million parameters and 64 samples of 1024 tokens an
H100 takes 17.6 ms for it in a step of 158.9; this counts 18.1."""

GATHERED_BLOCKS = 16
"""Up to how many blocks that gather their weights are unrolled. A loop gathers one block at a time;
of unrolled ones the compiler decides when each is gathered. Compiled for h100:8 (FSDP in bfloat16,
width 512, 8 samples of 512 tokens a device) their temporaries take 445 MB at 8 blocks where a loop
takes 494, and 810 at 16 where a loop takes 839. Each further block adds 2.4 MB more than in a loop,
less than the 6.3 MB of its gathered weights, so these are freed; deeper models were not compiled,
and stay a loop.

Nor does a loop of so many save time to compile: the compiler peels and doubles its iterations to
gather ahead. On one core they took 43 and 65 s, and unrolled blocks 31 and 56."""

STEPS = 10_000
"""The steps of a run that is long enough for its speed to matter."""


@dataclasses.dataclass(frozen=True)
class LoopChoice:
    """Whether some equal blocks run as a loop, and why.

    Args:
        num_blocks: how many there are, called one after another.
        is_loop: whether they run as one loop; else they are unrolled.
        why: a clause.

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
    """What a loop costs and saves on one kind of device.

    Args:
        bandwidth: bytes per second of the device's memory.
        block_seconds: what it takes to compile one more block.
        platform: `"cpu"`, `"cuda"` or `"tpu"`, whose branches are taken.
        num_shares: over how many devices the arrays of the traced program are divided: in global
            view the ranks that split the samples, inside `shard_map` one.
        most: the most blocks whose memory is known where they are unrolled; None sets no limit.
        loop_blocks: as many unrolled blocks are compiled in the time of a loop.
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
            stack_bytes: what the loop has on stacks, on all devices that share them.

        Example:
            >>> cost = LoopCost(bandwidth=3e12, block_seconds=1.0)
            >>> cost.choice(12, 12 * 10**9).is_loop, cost.choice(12, 12 * 10**6).is_loop
            (False, True)
        """
        stack_bytes //= self.num_shares
        a_step = STACK_PASSES * stack_bytes / self.bandwidth
        compiling = max(0, num_blocks - self.loop_blocks) * self.block_seconds
        saved, took = duration(compiling), f"{duration(a_step)} of every step"
        if self.most is not None and num_blocks > self.most:
            why = f"unrolled, more than {self.most} could keep gathered weights for longer; "
            why += f"{byte_size(stack_bytes)} of stacks take {took}"
            return LoopChoice(num_blocks, True, why)
        if STEPS * a_step > compiling:
            why = f"the {byte_size(stack_bytes)} of a loop's stacks would take {took}, to save "
            why += f"{saved} of compiling" if compiling else "no time to compile"
            return LoopChoice(num_blocks, False, why)
        why = f"that saves {saved} of compiling, and {byte_size(stack_bytes)} of stacks take {took}"
        return LoopChoice(num_blocks, True, why)


Keeps: TypeAlias = Callable[[Function], Function]
"""Puts the function of a block under `jax.checkpoint`, or leaves it."""


def _ignore(choice: LoopChoice) -> None:
    """Takes a choice that nobody asks about."""


@dataclasses.dataclass(frozen=True)
class LoopRule:
    """Which chains of equal blocks run as a loop.

    Args:
        most: up to how many blocks are unrolled; None unrolls `UNROLLED`, and more where `cost`
            says so, and leaves blocks that loop themselves in a loop.
        why: says where `most` is from, in a clause; without `most`, why no cost is known.
        cost: of a loop on the devices; None where it is unknown.
        tell: takes every choice.
    """

    most: int | None = None
    why: str = ""
    cost: LoopCost | None = None
    tell: Callable[[LoopChoice], None] = _ignore

    def loops(
        self, program: ClosedJaxpr, roles: Sequence[str | int], length: int, keeps: Keeps
    ) -> bool:
        """Whether a chain runs as a loop.

        Args:
            program: of one block.
            roles: of its operands: the index of the result that a carried one comes from, or
                `"stacked"` where each block has its own, or `"shared"`.
            length: how many blocks there are.
            keeps: puts a block under the `jax.checkpoint` that it runs under.
        """
        choice = self._choice(program, roles, length, keeps)
        self.tell(choice)
        return choice.is_loop

    def _choice(
        self, program: ClosedJaxpr, roles: Sequence[str | int], length: int, keeps: Keeps
    ) -> LoopChoice:
        if self.most is not None:
            return LoopChoice(length, length > self.most, self.why)
        if any(equation.primitive.name in LOOPS for equation in equations(program)):
            # What such a block keeps is stacked in any case.
            return LoopChoice(length, True, "each loops itself")
        if length > UNROLLED and self.cost is not None:
            each = stacked_bytes(program, roles, self.cost.platform, keeps)
            return self.cost.choice(length, length * each)
        why = f"of up to {UNROLLED} each is compiled by itself, of more one for all"
        if length > UNROLLED and self.why:
            why = f"{why}, for {self.why}"
        return LoopChoice(length, length > UNROLLED, why)


def stacked_bytes(
    program: ClosedJaxpr,
    roles: Sequence[str | int],
    platform: str,
    keeps: Keeps = lambda block: block,
) -> int:
    """What a loop over a block has on stacks for each iteration, from the block's own derivative.

    That is what the backward pass reads and the block has made or was handed on, and the operands
    that each block has for itself.

    Args:
        program: of the block.
        roles: of its operands, as in `LoopRule.loops`.
        platform: whose branches are taken: what only others keep is never made.
        keeps: puts the block under the `jax.checkpoint` that it runs under.
    """

    def pullback(*values: Array) -> object:
        run = functools.partial(_run, platform=platform)

        def block(*values: Array) -> list[Array]:
            return interpret(program.jaxpr, program.consts, values, run, enters=_is_call)

        return jax.vjp(keeps(block), *values)[1]

    traced = jax.make_jaxpr(pullback)(*map(_shape, program.in_avals)).jaxpr
    kept = {var for var in traced.outvars if isinstance(var, Var)}
    shared = {v for v, role in zip(traced.invars, roles, strict=True) if role == "shared"}
    stacked = {v for v, role in zip(traced.invars, roles, strict=True) if role == "stacked"}
    return sum(_num_bytes(var.aval) for var in (kept - shared) | stacked)


def _is_call(equation: JaxprEqn) -> bool:
    return equation.primitive.name in CALLS


def _run(equation: JaxprEqn, operands: Sequence[Any], platform: str) -> list[Any]:
    """Runs an equation, and of a choice by platform its branch alone."""
    name, params = equation.primitive.name, equation.params
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
    """An argument to trace with, which varies over the same ranks inside `shard_map`."""
    varies = getattr(aval, "vma", None)
    more = {"vma": varies} if varies else {}
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, **more)


def _num_bytes(aval: Aval) -> int:
    return math.prod(aval.shape) * aval.dtype.itemsize
