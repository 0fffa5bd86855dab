"""The order in which a GPU runs a tape: what nothing waits for comes behind what something does.

XLA's scheduler for GPUs hides latency: it runs the chain of products that the next product needs,
and behind it those whose results go nowhere but into sums, transfers and updates. Those are the
gradients of weights, and so the activations and cotangents that they are made of are there
together when the chain ends: in a turn of a loop over layers those of a layer, and of a model that
is no loop those of all layers.
"""

from __future__ import annotations

import dataclasses

from .partial import is_added_to
from .tape import Node, Tape

CHAIN = frozenset({"product", "loop"})
"""The kinds of nodes that others wait for."""


def postponed(tape: Tape, num_consts: int = 0, num_carry: int = 0) -> Tape:
    """The same tape with the products that nothing waits for behind all others.

    Args:
        tape: of a program, or of a turn of a loop.
        num_consts: of a turn, how many inputs are the same in all turns.
        num_carry: how many of the next inputs are handed on from turn to turn; what only adds to
            one does not make the next turn wait.

    Returns:
        A tape of the same nodes.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from axon_dist.program.device import tape_of
        >>> from axon_dist.program.placement import whole
        >>> x = jnp.ones((4, 4))
        >>> program = jax.make_jaxpr(lambda x: (x @ x, jnp.tanh(x @ x.T) @ x))(x)
        >>> names = lambda tape: [node.name for node in tape.nodes]
        >>> tape = tape_of(program, [whole(2)], {}, "cpu")
        >>> names(tape), names(postponed(tape))[-2:]
        (['dot_general', 'dot_general', 'tanh', 'dot_general'], ['dot_general', 'dot_general'])
    """
    own, after = tape.inputs[num_consts:], tape.outputs[:num_carry]
    waited = {
        made
        for given, made in zip(own, after, strict=False)
        if made >= 0 and not is_added_to(given, made, tape.nodes)
    }
    ends: set[int] = set()
    for number in reversed(range(len(tape.nodes))):
        node = tape.nodes[number]
        leads = not waited.isdisjoint(node.writes)
        if node.kind == "product" and not leads:
            ends.add(number)
        if leads or node.kind in CHAIN:
            waited.update(buffer for buffer in node.reads if buffer >= 0)
    late: set[int] = set()
    first, last = [], []
    for number, node in enumerate(tape.nodes):
        if node.name == "scan":
            turns = tuple(postponed(b, node.num_consts, node.num_carry) for b in node.bodies)
            node = dataclasses.replace(node, bodies=turns, ahead=sum(map(_ahead, [node], turns)))
        is_late = number in ends or not late.isdisjoint(node.reads)
        if is_late:
            late.update(buffer for buffer in node.writes if buffer >= 0)
        (last if is_late else first).append(node)
    return dataclasses.replace(tape, nodes=_filled(first) + last)


def _filled(nodes: list[Node]) -> list[Node]:
    """The nodes with reductions that need nothing of a loop before it, whose transfers they hide.

    The positions of a max-pool are such: they are needed behind the blocks that follow it.
    """
    found: list[Node] = []
    since: set[int] = set()
    place = None
    for node in nodes:
        if node.kind == "loop" and any(body.sends() for body in node.bodies):
            place, since = len(found), set(node.writes)
        elif place is not None and node.kind == "reduction" and since.isdisjoint(node.reads):
            found.insert(place, node)
            place += 1
            continue
        else:
            since.update(buffer for buffer in node.writes if buffer >= 0)
        found.append(node)
    return found


def _ahead(loop: Node, turn: Tape) -> int:
    """Bytes that a turn gathers for the next, of what does not depend on the turn itself."""
    if loop.trips == 1:
        return 0
    held = set(turn.inputs[loop.num_consts : loop.num_consts + loop.num_carry])
    total = 0
    for node in turn.nodes:
        if node.kind == "barrier" or not held.isdisjoint(node.reads):
            held.update(buffer for buffer in node.writes if buffer >= 0)
        else:
            total += sum(sent.num_bytes for sent in node.sent if sent.kind == "all-gather")
    return total
