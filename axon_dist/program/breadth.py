"""The order in which XLA:CPU runs a tape: what is ready first runs first.

XLA:CPU lays its instructions out for threads that run side by side, breadth first (BFScheduler):
an instruction is queued when the last of what it reads is there. So all that waits for parameters
alone, such as gathers of a model that is no loop, comes at the beginning, and an update as soon as
its gradient is there; a barrier holds back what is behind it until all that goes through is there.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict, deque

from .tape import Node, Tape
from .written import Written


def in_breadth(tape: Tape) -> Tape:
    """The same tape in the order in which its nodes become ready.

    Args:
        tape: of a program, or of a turn of a loop.

    Returns:
        A tape of the same nodes.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from axon_dist.program.device import tape_of
        >>> from axon_dist.program.placement import whole
        >>> x = jnp.ones((4, 4))
        >>> program = jax.make_jaxpr(lambda x: (jnp.cumsum(x @ x), x.T @ x))(x)
        >>> tape = tape_of(program, [whole(2)], {}, "tpu")
        >>> names = lambda tape: [node.name for node in tape.nodes]
        >>> names(tape), names(in_breadth(tape))
        (['dot_general', 'cumsum', 'dot_general'], ['dot_general', 'dot_general', 'cumsum'])
    """
    bodies = lambda node: tuple(map(in_breadth, node.bodies))
    nodes = [dataclasses.replace(n, bodies=bodies(n)) if n.bodies else n for n in tape.nodes]
    tape = dataclasses.replace(tape, nodes=nodes)
    waits = _waits(nodes, Written(tape))
    return dataclasses.replace(tape, nodes=_with_fused(nodes, _queued(waits)))


def _waits(nodes: list[Node], written: Written) -> dict[int, frozenset[int]]:
    """The nodes that run on their own, and for each the others that it waits for."""
    parts: dict[int, frozenset[int]] = {}
    waits: dict[int, frozenset[int]] = {}
    wholes: dict[int, int] = {}

    def needed(buffer: int, reader: Node) -> frozenset[int]:
        if buffer in wholes and not written.is_computed(buffer, reader):
            return frozenset([wholes[buffer]])
        return parts.get(buffer, frozenset())

    for number, node in enumerate(nodes):
        before = frozenset().union(*(needed(b, node) for b in (*node.reads, *node.after)))
        if written.runs(node):
            waits[number] = before
            wholes.update((buffer, number) for buffer in node.writes)
        parts.update((buffer, before) for buffer in node.writes)
    return waits


def _queued(waits: dict[int, frozenset[int]]) -> list[int]:
    missing = {number: len(before) for number, before in waits.items()}
    readers: dict[int, list[int]] = defaultdict(list)
    for number, before in waits.items():
        for other in before:
            readers[other].append(number)
    queue = deque(number for number, count in missing.items() if not count)
    order = []
    while queue:
        number = queue.popleft()
        order.append(number)
        for reader in readers[number]:
            missing[reader] -= 1
            if not missing[reader]:
                queue.append(reader)
    return order


def _with_fused(nodes: list[Node], order: list[int]) -> list[Node]:
    """All nodes; those that do not run on their own come before the first that reads them."""
    made = {b: number for number, node in enumerate(nodes) for b in node.writes if b >= 0}
    done: set[int] = set()
    found: list[Node] = []
    for last in [*order, *range(len(nodes))]:
        waiting = [last]
        while waiting:
            number = waiting[-1]
            node = nodes[number]
            before = {made[b] for b in node.reads if b in made}
            if ahead := before - done - {number}:
                waiting += sorted(ahead, reverse=True)
                continue
            waiting.pop()
            if number not in done:
                done.add(number)
                found.append(node)
    return found
