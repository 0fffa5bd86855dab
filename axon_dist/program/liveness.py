"""How many bytes of a tape are alive at once: what a compiler that fuses well would allocate.

`written.py` says which are written to memory. One is alive from the node that makes it to the last
that reads it, or reads what is computed from it; updates are made in place, in loops and branches
too.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Collection, Iterable

from .overwriting import Shared, shared
from .tape import IN_PLACE, Node, Tape
from .written import Written, carried

MOVES = frozenset({"transpose", "rev", "concatenate", "pad"})
"""Elementwise operations whose elements lie elsewhere than those that they are made of."""


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


class _Allocation:
    def __init__(self, tape: Tape, free: Iterable[int] = ()):
        self.tape = tape
        self.free = {*free}
        self.written = Written(tape)

    def peak(self) -> Peak:
        """Goes through the nodes in their order."""
        last = self._last_uses()
        ends: dict[int, list[int]] = defaultdict(list)
        for buffer, number in last.items():
            ends[number].append(buffer)
        alive, most, at = 0, 0, -1
        for number, node in enumerate(self.tape.nodes):
            new = sum(self._bytes(b) for b in node.writes if b in self.written.buffers)
            dying = [b for b in ends[number] if b in self.written.buffers]
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
            handed = zip(carried(node), node.writes[: node.num_carry], strict=True)
            return sum(
                self._bytes(b) for a, b in handed if a in dying and b in self.written.buffers
            )
        if node.bodies:
            pairs = [(node.reads[given], node.writes[at]) for at, (given, _) in inside.items()]
            return sum(self._bytes(b) for a, b in pairs if a in dying)
        if node.name in IN_PLACE:
            first = node.reads[0]
            return self._bytes(first) if first in dying else 0
        if node.kind == "fused" and node.name not in MOVES and node.writes:
            sizes = [self._bytes(b) for b in dying]
            own = self._bytes(node.writes[0]) if node.writes[0] in self.written.buffers else 0
            return own if own in sizes else 0
        return 0

    def _last_uses(self) -> dict[int, int]:
        """When each buffer that is written out is read for the last time."""
        last: dict[int, int] = {}
        for number, node in enumerate(self.tape.nodes):
            if not self.written.runs(node):
                continue
            last.update((buffer, number) for buffer in node.writes)
            for buffer in node.reads:
                for source in self.written.sources(buffer) if buffer >= 0 else ():
                    last[source] = number
        for buffer in self.written.outputs:
            for source in self.written.sources(buffer):
                last[source] = len(self.tape.nodes)
        return last
