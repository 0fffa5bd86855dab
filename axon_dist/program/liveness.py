"""How many bytes of a tape are alive at once: what a compiler that fuses well would allocate.

An elementwise operation costs nothing where it can run inside those that read it. Written out are
the results of products, reductions, gathers and loops; what a product or a loop reads; and a value
that several read and that is made of more bytes than its own. Everything else is computed again
from what is written out, wherever it is read, and so keeps that alive.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Collection

from .tape import IN_PLACE, Node, Tape

READS_FUSED = frozenset({"gather", "scatter-add", "scatter_add"})
"""Operations beside reductions that compute what they read while they read it."""

DEAR = frozenset({"tanh", "erf", "erfc", "erf_inv", "atan2", "lgamma", "digamma"})
"""Elementwise operations of many steps, which are not done twice."""


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
    return _Allocation(tape, in_place).peak()


class _Allocation:
    def __init__(self, tape: Tape, in_place: Collection[int]):
        self.tape = tape
        self.free = {tape.outputs[place] for place in in_place}
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
        for buffer in tape.inputs:
            self.sources[buffer] = frozenset([buffer])
        for node in tape.nodes:
            self._place(node)

    def _place(self, node: Node) -> None:
        """Decides whether the results of a node are written out, and what they are made from."""
        read = frozenset().union(*(self._sources(b) for b in node.reads if b >= 0))
        for buffer in node.writes:
            if buffer < 0:
                continue
            if node.kind == "barrier":
                self.sources[buffer] = read
            elif node.kind != "fused" or self._is_stored(node, buffer, read):
                self.stored.add(buffer)
                self.sources[buffer] = frozenset([buffer])
            else:
                self.sources[buffer] = read

    def _sources(self, buffer: int) -> frozenset[int]:
        return self.sources.get(buffer, frozenset([buffer]))

    def _is_stored(self, node: Node, buffer: int, sources: frozenset[int]) -> bool:
        if buffer in self.outputs:
            return True
        readers = [self.tape.nodes[number] for number in self.readers[buffer]]
        if not sources:
            # A constant is made where it is read, but for one that a loop changes.
            return any(buffer in _carried(reader) for reader in readers)
        if node.name in DEAR and len(readers) > 1:
            return True
        if any(_wants_stored(reader) for reader in readers):
            return True
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
            inner = max((self._inner(node, body) for body in node.bodies), default=0)
            reused = self._reused(node, dying)
            if alive + new + inner - reused > most:
                most, at = alive + new + inner - reused, number
            alive += new - sum(self._bytes(buffer) for buffer in dying)
        return Peak(most, at)

    def _bytes(self, buffer: int) -> int:
        return 0 if buffer in self.free else self.tape.sizes[buffer]

    def _inner(self, node: Node, body: Tape) -> int:
        return peak_of(body).num_bytes + node.ahead

    def _reused(self, node: Node, dying: list[int]) -> int:
        """Bytes of results that take the place of what is read for the last time."""
        if node.kind == "loop":
            handed = zip(_carried(node), node.writes[: node.num_carry], strict=True)
            return sum(self._bytes(b) for a, b in handed if a in dying and b in self.stored)
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
                    for source in self._sources(buffer) if buffer >= 0 else ():
                        last[source] = number
        end = len(self.tape.nodes)
        for buffer in self.outputs:
            for source in self._sources(buffer):
                last[source] = end
        return last


def _carried(node: Node) -> tuple[int, ...]:
    return node.reads[node.num_consts : node.num_consts + node.num_carry]


def _wants_stored(node: Node) -> bool:
    if node.kind in ("product", "loop", "barrier"):
        return True
    return node.kind == "other" and node.name not in READS_FUSED
