"""The order in which XLA:CPU runs a tape: what is ready first runs first.

XLA:CPU lays its instructions out for threads that run side by side, breadth first (BFScheduler):
an instruction is queued when the last of what it reads is there. So all that waits for parameters
alone, such as gathers of a model that is no loop, comes at the beginning, and an update as soon as
its gradient is there; a barrier holds back what is behind it until all that goes through is there.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict, deque
from collections.abc import Collection

from .liveness import written_out
from .tape import Node, Tape


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
        >>> program = jax.make_jaxpr(lambda x: ((x @ x) @ x, x.T @ x, jnp.cumsum(x)))(x)
        >>> names = lambda platform: [
        ...     node.name for node in tape_of(program, [whole(2)], {}, platform).nodes]
        >>> names("tpu"), names("cpu")
        (['dot_general', 'dot_general', 'dot_general', 'cumsum'], [])
    """
    bodies = lambda node: tuple(map(in_breadth, node.bodies))
    nodes = [dataclasses.replace(n, bodies=bodies(n)) if n.bodies else n for n in tape.nodes]
    tape = dataclasses.replace(tape, nodes=nodes)
    waits = _waits(nodes, written_out(tape))
    return dataclasses.replace(tape, nodes=_with_fused(nodes, _queued(waits)))


def _waits(nodes: list[Node], stored: Collection[int]) -> dict[int, frozenset[int]]:
    """The nodes that run on their own, and for each the others that it waits for."""
    needs: dict[int, frozenset[int]] = {}
    waits: dict[int, frozenset[int]] = {}
    for number, node in enumerate(nodes):
        before = frozenset().union(*(needs.get(b, frozenset()) for b in (*node.reads, *node.after)))
        runs = node.kind not in ("fused", "barrier") or not stored.isdisjoint(node.writes)
        if runs:
            waits[number] = before
        for buffer in node.writes:
            needs[buffer] = frozenset([number]) if runs else before
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
            before = {made[b] for b in (*node.reads, *node.after) if b in made}
            if ahead := before - done - {number}:
                waiting += sorted(ahead, reverse=True)
                continue
            waiting.pop()
            if number not in done:
                done.add(number)
                found.append(node)
    return found
