"""Which values of a tape are written to memory, and what the others are computed from.

An elementwise operation costs nothing where it can run inside those that read it. Written out are
the results of products, reductions, gathers and loops; what a product or a loop reads; and a value
that several read and that is made of more bytes than its own. Everything else is computed again
from what is written out, wherever it is read, and so keeps that alive. These are the habits of
XLA:GPU; the other compilers are near enough for a ranking, and compiling says the rest.
"""

from __future__ import annotations

from collections import defaultdict

from .tape import IN_PLACE, Node, Tape

DEAR = frozenset({"tanh", "erf", "erfc", "erf_inv", "atan2", "lgamma", "digamma"})
"""Elementwise operations that are not done twice."""

INSIDE = frozenset(
    {"gather", "scatter-add", "scatter_add"}
    | {"reduce_window", "reduce_window_max", "reduce_window_sum"}
)
"""Operations that compute what they read while they read it, beside elementwise ones."""


class Written:
    """What of a tape is in memory.

    Args:
        tape: of one device.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from axon_dist.program.device import tape_of
        >>> from axon_dist.program.placement import whole
        >>> program = jax.make_jaxpr(lambda x: jnp.sin(x) * 2)(jnp.ones((4, 4)))
        >>> tape = tape_of(program, [whole(2)], {}, "cuda")
        >>> [(node.name, Written(tape).runs(node)) for node in tape.nodes]
        [('sin', False), ('mul', True)]
    """

    def __init__(self, tape: Tape):
        self.tape = tape
        self.readers: dict[int, list[Node]] = defaultdict(list)
        for node in tape.nodes:
            for buffer in set(node.reads):
                self.readers[buffer].append(node)
        self.outputs = {buffer for buffer in tape.outputs if buffer >= 0}
        self.buffers: set[int] = set()
        self._made_of = {buffer: frozenset([buffer]) for buffer in tape.inputs}
        for node in tape.nodes:
            self._place(node)

    def sources(self, buffer: int) -> frozenset[int]:
        """What is in memory of what a node reads: the value, or what it is computed from."""
        if buffer in self.buffers:
            return frozenset([buffer])
        return self._made_of.get(buffer, frozenset([buffer]))

    def runs(self, node: Node) -> bool:
        """Whether a node is more than a part of those that read it."""
        return node.kind not in ("fused", "barrier") or not self.buffers.isdisjoint(node.writes)

    def _place(self, node: Node) -> None:
        read = frozenset().union(*(self.sources(b) for b in node.reads if b >= 0))
        for buffer in node.writes:
            if buffer < 0:
                continue
            self._made_of[buffer] = read
            if node.kind == "barrier":
                continue
            if node.kind != "fused" or self._is_written(node, buffer, read):
                self.buffers.add(buffer)

    def _is_written(self, node: Node, buffer: int, sources: frozenset[int]) -> bool:
        if buffer in self.outputs:
            return True
        readers = self.readers[buffer]
        if not sources:
            # A constant is made where it is read, but for one that is overwritten.
            return any(buffer in overwritten(reader) for reader in readers)
        if node.name in DEAR and len(readers) > 1:
            return True
        if any(map(_reads_memory, readers)):
            return True
        made_of = sum(self.tape.sizes[source] for source in sources)
        is_less = made_of > 1.5 * self.tape.sizes[buffer] and len(sources) > 1
        return len(readers) > 1 and is_less


def _reads_memory(node: Node) -> bool:
    """Whether what a node reads is written to memory before."""
    is_inside = node.kind in ("fused", "reduction") or node.name in INSIDE
    return not is_inside


def overwritten(node: Node) -> tuple[int, ...]:
    """What a node writes over: what an update is made in, and what a loop hands on."""
    return node.reads[:1] if node.name in IN_PLACE else carried(node)


def carried(node: Node) -> tuple[int, ...]:
    """What a loop is given to hand on from turn to turn."""
    return node.reads[node.num_consts : node.num_consts + node.num_carry]
