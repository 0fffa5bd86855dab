"""What is written where something else was: updates of what a loop or a branch is given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

from .partial import ADDS
from .tape import IN_PLACE, Node, Tape

Chain: TypeAlias = frozenset[int]
"""Buffers that follow each other in the same place."""

Shared: TypeAlias = Mapping[int, tuple[int, tuple[Chain, ...]]]
"""The place of a result -> that of what is given, and in each body the buffers between."""


def overwrites(tape: Tape) -> list[Mapping[int, Chain]]:
    """Which inputs each output of a tape may be written over.

    XLA gives an update the memory of what it updates where nothing else reads that, and what
    enters a loop or the branches of a conditional the memory of what comes out of it in its place.

    Args:
        tape: of a turn of a loop, or of a branch.

    Returns:
        For each output the places of such inputs, and the buffers on the way from there.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from axon_dist.program.device import tape_of
        >>> from axon_dist.program.placement import whole
        >>> x = jnp.ones((4, 4))
        >>> program = jax.make_jaxpr(lambda x, y: (x + y @ y, x @ y))(x, x)
        >>> [list(one) for one in overwrites(tape_of(program, [whole(2)] * 2, {}, "cuda"))]
        [[0], []]
    """
    made = {b: node for node in tape.nodes for b in node.writes if b >= 0}
    places = {buffer: place for place, buffer in enumerate(tape.inputs)}
    known: dict[int, dict[int, Chain]] = {}

    def back(buffer: int) -> dict[int, Chain]:
        if buffer not in known:
            node = made.get(buffer)
            if node is None:
                known[buffer] = {places[buffer]: frozenset()} if buffer in places else {}
            else:
                known[buffer] = {
                    place: chain | {buffer}
                    for one in _under(node, buffer, tape.sizes)
                    for place, chain in back(one).items()
                }
        return known[buffer]

    return [back(buffer) if buffer >= 0 else {} for buffer in tape.outputs]


def shared(node: Node) -> Shared:
    """Which results of a loop or a conditional lie where what it is given lay.

    Args:
        node: with bodies.

    Returns:
        For each place of a result that of what it is given, and in each body the buffers between.
    """
    found: dict[int, tuple[int, tuple[Chain, ...]]] = {}
    if not node.bodies:
        return found
    each = [overwrites(body) for body in node.bodies]
    taken: set[int] = set()
    for place in range(len(node.writes)):
        ways = [one[place] for one in each]
        if node.num_carry:
            wanted = [node.num_consts + place] if place < node.num_carry else []
        else:
            wanted = sorted(set(ways[0]) - taken)
        for given in wanted:
            if all(given in way for way in ways):
                taken.add(given)
                found[place] = given, tuple(way[given] for way in ways)
                break
    return found


def _under(node: Node, buffer: int, sizes: Sequence[int]) -> list[int]:
    """What the result of a node may be written over."""
    if node.kind == "barrier" or node.name in IN_PLACE:
        return [node.reads[0]]
    if node.name in ADDS:
        return [one for one in node.reads if one >= 0 and sizes[one] == sizes[buffer]]
    place = node.writes.index(buffer)
    return [node.reads[given] for at, (given, _) in shared(node).items() if at == place]
