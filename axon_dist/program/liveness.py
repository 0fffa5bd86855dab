"""How many bytes of a tape are alive at once: what a compiler that fuses well would allocate.

An elementwise operation costs nothing where it can run inside those that read it. Written out are
the results of products, reductions, gathers and loops; what a product or a loop reads; and a value
that several read and that is made of more bytes than its own. Everything else is computed again
from what is written out, wherever it is read, and so keeps that alive.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Collection, Iterable

from .fusion import FUSIONS
from .overwriting import Shared, shared
from .tape import IN_PLACE, Node, Tape


@dataclasses.dataclass(frozen=True)
class Peak:
    """The bytes of a tape at their peak, and where that is.

    Args:
        num_bytes: alive at once, inputs and donated outputs not counted.
        at: the number of the node.
    """

    num_bytes: int
    at: int


def peak_of(tape: Tape, in_place: Collection[int] = ()) -> Peak:
    """The most bytes that are alive at once while a tape runs.

    Args:
        tape: of one device.
        in_place: positions of outputs that overwrite inputs.

    Returns:
        The peak; what the tape is given is not counted.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from axon_dist.program.placement import whole
        >>> from axon_dist.program.device import tape_of
        >>> x = jnp.ones((8, 8))
        >>> program = jax.make_jaxpr(lambda x: jnp.sum(jnp.tanh(x @ x) @ x))(x)
        >>> peak_of(tape_of(program, [whole(2)], {}, "cpu")).num_bytes  # two of 8 x 8
        512
    """
    return _Allocation(tape, (tape.outputs[place] for place in in_place)).peak()


def written_out(tape: Tape) -> Collection[int]:
    """The buffers that a program writes to memory; all others are computed where they are read."""
    return _Allocation(tape).stored


class _Allocation:
    def __init__(self, tape: Tape, free: Iterable[int] = ()):
        self.tape = tape
        self.fusion = FUSIONS[tape.platform]
        self.free = {*free}
        self.readers: dict[int, list[int]] = defaultdict(list)
        self.made: dict[int, int] = {}
        for number, node in enumerate(tape.nodes):
            for buffer in set(node.reads):
                self.readers[buffer].append(number)
            for buffer in node.writes:
                self.made[buffer] = number
        self.outputs = {buffer for buffer in tape.outputs if buffer >= 0}
        self.sources: dict[int, frozenset[int]] = {}
        self.stored: set[int] = set()
        self.doubled: set[int] = set()
        self.absorbed = self._absorbed()
        for buffer in tape.inputs:
            self.sources[buffer] = frozenset([buffer])
        for node in tape.nodes:
            self._place(node)

    def _place(self, node: Node) -> None:
        """Decides whether the results of a node are written out, and what they are made from."""
        read = frozenset().union(*(self._sources(b, node) for b in node.reads if b >= 0))
        for buffer in node.writes:
            if buffer < 0:
                continue
            self.sources[buffer] = read
            if node.kind == "barrier":
                continue
            if node.kind != "fused":
                self.stored.add(buffer)
            elif self._is_stored(node, buffer, read):
                self.stored.add(buffer)
                if self._is_doubled(node):
                    self.doubled.add(buffer)

    def _sources(self, buffer: int, reader: Node | None = None) -> frozenset[int]:
        """What a reader of a value reads: the value, or what it computes it from."""
        in_memory = reader is None or self._reads_memory(reader) or buffer in _overwritten(reader)
        if buffer in self.stored and (in_memory or buffer not in self.doubled):
            return frozenset([buffer])
        return self.sources.get(buffer, frozenset([buffer]))

    def _absorbed(self) -> set[int]:
        """The results that are read by reductions alone, which compute them on the way."""
        found: set[int] = set()
        for node in reversed(self.tape.nodes):
            if node.kind != "fused" or node.name not in (self.fusion.absorbed or ()):
                continue
            for buffer in node.writes:
                readers = [self.tape.nodes[number] for number in self.readers[buffer]]
                if (
                    readers
                    and buffer not in self.outputs
                    and all(_is_reduced(one, found) for one in readers)
                ):
                    found.add(buffer)
        return found

    def _reads_memory(self, node: Node) -> bool:
        return self.fusion.reads_memory(node) or not self.absorbed.isdisjoint(node.writes)

    def _is_doubled(self, node: Node) -> bool:
        """Whether a value that is in memory is computed again where that can be."""
        is_cheap = node.name not in self.fusion.dear and node.num_large <= 1
        return self.fusion.is_doubled and is_cheap

    def _is_stored(self, node: Node, buffer: int, sources: frozenset[int]) -> bool:
        if buffer in self.outputs:
            return True
        readers = [self.tape.nodes[number] for number in self.readers[buffer]]
        if not sources:
            # A constant is made where it is read, but for one that a loop changes.
            return any(buffer in _overwritten(reader) for reader in readers)
        if node.name in self.fusion.dear and len(readers) > 1:
            return True
        if buffer in self.absorbed:
            return False
        if any(map(self._reads_memory, readers)):
            return True
        if self.fusion.is_doubled:
            return False
        size = self.tape.sizes[buffer]
        made_of = sum(self.tape.sizes[source] for source in sources)
        return len(readers) > 1 and made_of > 1.5 * size and len(sources) > 1

    def peak(self) -> Peak:
        """Goes through the nodes in their order."""
        last = self._last_uses()
        ends: dict[int, list[int]] = defaultdict(list)
        for buffer, number in last.items():
            ends[number].append(buffer)
        alive, most, at = 0, 0, -1
        for number, node in enumerate(self.tape.nodes):
            new = sum(self._bytes(b) for b in node.writes if b in self.stored)
            dying = [b for b in ends[number] if b in self.stored]
            inside = shared(node)
            inner = max(self._inner(node, inside), default=0)
            reused = self._reused(node, dying, inside)
            if alive + new + inner - reused > most:
                most, at = alive + new + inner - reused, number
            alive += new - sum(self._bytes(buffer) for buffer in dying)
        return Peak(most, at)

    def _bytes(self, buffer: int) -> int:
        return 0 if buffer in self.free else self.tape.sizes[buffer]

    def _inner(self, node: Node, inside: Shared) -> Iterable[int]:
        """The bytes of each body beside what is given to it and what it gives back in its place."""
        for number, body in enumerate(node.bodies):
            free = (b for _, chains in inside.values() for b in chains[number])
            yield _Allocation(body, free).peak().num_bytes + node.ahead

    def _reused(self, node: Node, dying: list[int], inside: Shared) -> int:
        """Bytes of results that take the place of what is read for the last time."""
        if node.num_carry:
            handed = zip(_carried(node), node.writes[: node.num_carry], strict=True)
            return sum(self._bytes(b) for a, b in handed if a in dying and b in self.stored)
        if node.bodies:
            pairs = [(node.reads[given], node.writes[at]) for at, (given, _) in inside.items()]
            return sum(self._bytes(b) for a, b in pairs if a in dying)
        if node.name in IN_PLACE:
            first = node.reads[0]
            return self._bytes(first) if first in dying else 0
        if node.kind == "fused" and node.writes:
            sizes = [self._bytes(b) for b in dying]
            own = self._bytes(node.writes[0]) if node.writes[0] in self.stored else 0
            return own if own in sizes else 0
        return 0

    def _last_uses(self) -> dict[int, int]:
        """When each buffer that is written out is read for the last time."""
        last: dict[int, int] = {}
        for number, node in enumerate(self.tape.nodes):
            is_run = node.kind not in ("fused", "barrier") or any(
                b in self.stored for b in node.writes
            )
            for buffer in node.writes:
                if buffer in self.stored:
                    last[buffer] = max(last.get(buffer, number), number)
            if is_run:
                for buffer in node.reads:
                    for source in self._sources(buffer, node) if buffer >= 0 else ():
                        last[source] = number
        end = len(self.tape.nodes)
        for buffer in self.outputs:
            for source in self._sources(buffer):
                last[source] = end
        return last


def _is_reduced(node: Node, absorbed: Collection[int]) -> bool:
    return node.kind == "reduction" or any(buffer in absorbed for buffer in node.writes)


def _overwritten(node: Node) -> tuple[int, ...]:
    return node.reads[:1] if node.name in IN_PLACE else _carried(node)


def _carried(node: Node) -> tuple[int, ...]:
    return node.reads[node.num_consts : node.num_consts + node.num_carry]
