"""Finds the collectives that a computation launches, in every form compilers give them.

A collective can be one instruction (`all-gather`), a pair (`all-gather-start`, `all-gather-done`),
a computation wrapped in an asynchronous pair (`async-start`, or `call-start` for the sparse core of
a TPU), a part of a fusion, or on TPU a chain of fusions that advance it beside their own compute.
On GPU a collective-permute can also be taken apart into `send` and `recv`.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator

from .parse import Computation, Instruction, Module, Shape

KINDS = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)
"""The collectives of HLO."""

_CHANNEL = re.compile(r"\bchannel_id=(\d+)")
_CHAIN = re.compile(r'\bchain_id="(\d+)"')
_SCATTER = "all-reduce-scatter"
_MOVES = ("bitcast", "reshape", "copy", "transpose", "convert")
_STOPS = ("while", "conditional", "call")


@dataclasses.dataclass(frozen=True)
class ScheduledCollective:
    """One collective and the part of the schedule during which it is under way.

    Args:
        instruction: the collective itself.
        owner: the computation that holds it, where its operands are found.
        start: position in the launching computation at which it starts.
        done: position at which its result is awaited; equal to `start` where it is synchronous.
    """

    instruction: Instruction
    owner: Computation
    start: int
    done: int

    @property
    def kind(self) -> str:
        """One of `KINDS`."""
        if reduced_slice(self.owner, self.instruction):
            return "reduce-scatter"
        return collective_kind(self.instruction) or self.instruction.opcode

    @property
    def is_async(self) -> bool:
        """Whether other instructions may run while it is under way."""
        return self.done > self.start


def collective_kind(instruction: Instruction) -> str | None:
    """Which of `KINDS` an instruction is or starts; None for anything else, `-done` too."""
    if _is_send(instruction):
        return "collective-permute"
    kind = instruction.opcode.removesuffix("-start")
    return kind if kind in KINDS else None


def results(transfer: ScheduledCollective) -> tuple[Shape, ...]:
    """The arrays that come out; a `-start` may carry its operands and contexts beside them."""
    instruction, owner = transfer.instruction, transfer.owner
    if transfer.kind == "collective-permute":
        return owner.operand_shapes(instruction)
    if shard := reduced_slice(owner, instruction):
        return shard.shapes
    if not instruction.opcode.endswith("-start"):
        return instruction.shapes
    for later in owner.instructions:
        if instruction.name in later.operands and later.opcode.endswith("-done"):
            return later.shapes
    return instruction.shapes


def reduced_slice(owner: Computation, instruction: Instruction) -> Instruction | None:
    """The slice that alone is left of an all-reduce in a fusion of TPUs, which send no more of it.

    Such a fusion, called `all-reduce-scatter`, reduces as a reduce-scatter does (TPU text has no
    other form of one that runs on the cores themselves).

    Args:
        owner: the computation that holds the instruction.
        instruction: any.

    Returns:
        The slice; None for anything else.
    """
    if instruction.opcode != "all-reduce" or not owner.name.startswith(_SCATTER):
        return None
    left = instruction
    while True:
        users = [user for user in owner.instructions if left.name in user.operands]
        if len(users) != 1:
            return None
        if users[0].opcode == "dynamic-slice":
            return users[0]
        if users[0].opcode not in _MOVES:
            return None
        left = users[0]


def transfers(module: Module, computation: Computation) -> list[ScheduledCollective]:
    """Lists the collectives that a computation launches itself, not in its loops or branches.

    Args:
        module: the parsed HLO of a compiled program.
        computation: one that the control flow reaches, see `visits`.

    Returns:
        The collectives in the order of the schedule, a chain of fusions as one.
    """
    collectives: list[ScheduledCollective] = []
    chains: dict[tuple[str, str], int] = {}
    for index, instruction in enumerate(computation.instructions):
        for owner, inner in _launched(module, computation, instruction):
            done = _done(computation, index) if _is_start(instruction) else index
            transfer = ScheduledCollective(inner, owner, index, done)
            chain = _chain(inner)
            if chain in chains:
                first = collectives[chains[chain]]
                collectives[chains[chain]] = dataclasses.replace(first, done=index)
                continue
            if chain:
                chains[chain] = len(collectives)
            collectives.append(transfer)
    return collectives


def _launched(
    module: Module, computation: Computation, instruction: Instruction
) -> Iterator[tuple[Computation, Instruction]]:
    if collective_kind(instruction):
        yield computation, instruction
    elif instruction.opcode not in _STOPS:
        for callee in module.called(instruction):
            for inner in callee.instructions:
                yield from _launched(module, callee, inner)


def _is_send(instruction: Instruction) -> bool:
    """Whether it sends to another device; other sends go to the host."""
    return instruction.opcode == "send" and "source_target_pairs" in instruction.attributes


def _is_start(instruction: Instruction) -> bool:
    runs_async = instruction.opcode.endswith("-start") or instruction.opcode == "send"
    return runs_async and '"is_sync":true' not in instruction.attributes.replace(" ", "")


def _done(computation: Computation, start: int) -> int:
    name = computation.instructions[start].name
    for index in range(start + 1, len(computation.instructions)):
        later = computation.instructions[index]
        if name in later.operands and later.opcode.endswith("-done"):
            return index
        if name in later.operands and later.opcode.endswith("-update"):
            name = later.name
    return len(computation.instructions) - 1


def _chain(instruction: Instruction) -> tuple[str, str] | None:
    chain = _CHAIN.search(instruction.attributes)
    channel = _CHANNEL.search(instruction.attributes)
    return (chain.group(1), channel.group(1)) if chain and channel else None
