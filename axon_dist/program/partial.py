"""Sums of which every rank has a part, and how far they are handed on before they are added up."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from .placement import Axes, Splits
from .tape import LINEAR, Node

ADDS = frozenset({"add", "add_any"})

SCATTERS = frozenset({"scatter-add", "scatter_add"})


@dataclasses.dataclass(eq=False)
class Value:
    """What is known of a variable.

    Args:
        buffer: where it is.
        splits: by its dims.
        partial: the sums that it is a part of, until a collective adds them up.
        known: its value, where it says which platform the program is for.
        is_carried: whether it is what a turn of a loop got from the one before.
    """

    buffer: int
    splits: Splits
    partial: tuple[Sum, ...] = ()
    known: int | None = None
    is_carried: bool = False


@dataclasses.dataclass(eq=False)
class Sum:
    """A sum of which every rank has a part.

    Args:
        node: what made it.
        axes: of the ranks.
        num_bytes: that a rank has of it.
        trips: turns of the loop that adds to it. Where it is scattered, every turn scatters its own
            part, for the compiler lays what a loop carries out as those lie who read it.
        is_whole: whether every rank has to have all of it before it is scattered.
        is_done: whether it was added up already, for another reader.
        is_base: whether a scatter of parts is added to it. XLA scatters onto it then, and of what
            it has added up and split, it gathers the whole for that.
    """

    node: Node
    axes: Axes
    num_bytes: int
    trips: int = 1
    is_whole: bool = False
    is_done: bool = False
    is_base: bool = False


def is_added_to(before: int, after: int, nodes: Sequence[Node]) -> bool:
    """Whether the turns of a loop do nothing with what they carry but add to it.

    Args:
        before: where it is when a turn begins; -1 for what is not carried.
        after: where it is when the turn ends.
        nodes: what a turn does.
    """
    if before < 0:
        return False
    if before == after:
        return not any(before in node.reads for node in nodes)
    readers = [node for node in nodes if before in node.reads]
    linear = all(node.name in LINEAR or node.name in ADDS for node in readers)
    return linear and all(is_added_to(w, after, nodes) for n in readers for w in n.writes)


def handed(name: str, operands: list[Value]) -> tuple[Sum, ...]:
    """The sums that the result of a linear operation is a part of, as its operands are."""
    # What was added up for another reader is a part no more.
    partial = [tuple(part for part in one.partial if not part.is_done) for one in operands]
    is_part = [bool(sums) for sums in partial]
    if name in SCATTERS and len(partial) > 2 and is_part[2]:
        # Into what every rank has the same of; the sum may as well be taken of the whole.
        return () if is_part[0] or is_part[1] else partial[2]
    if name in ADDS:
        # What a loop adds to what it carries is added up behind the loop; what is added to a sum,
        # before or behind it.
        return joined(tuple(sum(partial, ()))) if any(is_part) else ()
    if name == "mul" and sum(is_part) == 1:
        return partial[0] or partial[1]
    if name == "div":
        return () if is_part[1] else partial[0]
    return partial[0] if name in LINEAR else ()


def joined(sums: tuple[Sum, ...]) -> tuple[Sum, ...]:
    """Sums that are added: of products one collective adds up all, of others each its own."""
    if any(one.node.name in SCATTERS for one in sums):
        for one in sums:
            one.is_base = one.node.kind == "product"
    alike = {(one.node.kind, one.axes, one.num_bytes) for one in sums}
    if len(alike) > 1 or sums[0].node.kind != "product":
        return sums
    for one in sums[1:]:
        one.is_done = True
    return sums[:1]
