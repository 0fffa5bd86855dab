"""Which values of a tape are written to memory, and what the others are computed from.

An elementwise operation costs nothing where it can run inside those that read it. Written out are
the results of products, reductions, gathers and loops; what a product or a loop reads; and a value
that several read and that is made of more bytes than its own. Everything else is computed again
from what is written out, wherever it is read, and so keeps that alive. `FUSIONS` says where
compilers differ.
"""

from __future__ import annotations

from collections import defaultdict

from .fusion import FUSIONS
from .tape import IN_PLACE, Node, Tape


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
        self.fusion = FUSIONS[tape.platform]
        self.readers: dict[int, list[Node]] = defaultdict(list)
        for node in tape.nodes:
            for buffer in set(node.reads):
                self.readers[buffer].append(node)
        self.outputs = {buffer for buffer in tape.outputs if buffer >= 0}
        self.buffers: set[int] = set()
        self._made_of = {buffer: frozenset([buffer]) for buffer in tape.inputs}
        self._doubled: set[int] = set()
        self._absorbed: set[int] = set()
        for node in reversed(tape.nodes):
            self._absorb(node)
        for node in tape.nodes:
            self._place(node)

    def sources(self, buffer: int, reader: Node) -> frozenset[int]:
        """What is in memory of what a node reads: the value, or what it is computed from."""
        if buffer in self.buffers and not self.is_computed(buffer, reader):
            return frozenset([buffer])
        return self._made_of.get(buffer, frozenset([buffer]))

    def is_computed(self, buffer: int, reader: Node) -> bool:
        """Whether a node computes again what it reads, though it may be in memory for others."""
        if buffer not in self.buffers:
            return True
        is_needed = self._reads_memory(reader) or buffer in overwritten(reader)
        return buffer in self._doubled and not is_needed

    def runs(self, node: Node) -> bool:
        """Whether a node is more than a part of those that read it."""
        return node.kind not in ("fused", "barrier") or not self.buffers.isdisjoint(node.writes)

    def _absorb(self, node: Node) -> None:
        """Finds what reductions alone read, which compute it on the way."""
        if node.kind != "fused" or node.name not in (self.fusion.absorbed or ()):
            return
        for buffer in node.writes:
            readers = self.readers[buffer]
            if readers and buffer not in self.outputs and all(map(self._reduces, readers)):
                self._absorbed.add(buffer)

    def _reduces(self, node: Node) -> bool:
        return node.kind == "reduction" or not self._absorbed.isdisjoint(node.writes)

    def _reads_memory(self, node: Node) -> bool:
        return self.fusion.reads_memory(node) or not self._absorbed.isdisjoint(node.writes)

    def _place(self, node: Node) -> None:
        read = frozenset().union(*(self.sources(b, node) for b in node.reads if b >= 0))
        for buffer in node.writes:
            if buffer < 0:
                continue
            self._made_of[buffer] = read
            if node.kind == "barrier":
                continue
            if node.kind != "fused" or self._is_written(node, buffer, read):
                self.buffers.add(buffer)
            if node.kind == "fused" and self._is_cheap(node):
                self._doubled.add(buffer)

    def _is_cheap(self, node: Node) -> bool:
        """Whether a value is computed again wherever it can be, even if it is in memory too."""
        is_easy = node.name not in self.fusion.dear and node.num_large <= 1
        return self.fusion.is_doubled and is_easy

    def _is_written(self, node: Node, buffer: int, sources: frozenset[int]) -> bool:
        if buffer in self.outputs:
            return True
        readers = self.readers[buffer]
        if not sources:
            # A constant is made where it is read, but for one that is overwritten.
            return any(buffer in overwritten(reader) for reader in readers)
        if buffer in self._absorbed:
            return False
        if node.name in self.fusion.dear and len(readers) > 1:
            return True
        if any(map(self._reads_memory, readers)):
            return True
        size = self.tape.sizes[buffer]
        made_of = sum(self.tape.sizes[source] for source in sources)
        is_less = made_of > 1.5 * size and len(sources) > 1
        return len(readers) > 1 and is_less and not self.fusion.is_doubled


def overwritten(node: Node) -> tuple[int, ...]:
    """What a node writes over: what an update is made in, and what a loop hands on."""
    return node.reads[:1] if node.name in IN_PLACE else carried(node)


def carried(node: Node) -> tuple[int, ...]:
    """What a loop is given to hand on from turn to turn."""
    return node.reads[node.num_consts : node.num_consts + node.num_carry]
