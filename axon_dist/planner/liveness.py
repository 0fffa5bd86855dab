"""Estimates how many bytes of a program are alive at once under a compiler that fuses well.

An elementwise operation needs no memory where it is fused into its readers. These values are
written to memory: the results of products, reductions, gathers and loops; the operands of products
and loops; and a value with several readers that is smaller than the values it is computed from.
Everything else is recomputed from these by each reader, and so keeps them alive. XLA:GPU works like
this; the other compilers are close enough for a ranking, and a compiled step has the exact figure.

A value in memory is alive from the node that writes it to the last node that reads it or anything
recomputed from it. Updates are in place, also in loops and branches.

XLA's latency-hiding scheduler for GPUs first runs the chain of products that later products need.
Then it runs the products whose results only enter sums, transfers and updates: the gradients of
weights. The activations and cotangents of those gradients are therefore all alive when the chain
ends: those of one layer in an iteration of a loop over layers, and those of all layers in a model
without such a loop.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TypeAlias

from .placement import ADDS, IN_PLACE, LivenessProgram, Node, is_running_sum

DEAR = frozenset({"tanh", "erf", "erfc", "erf_inv", "atan2", "lgamma", "digamma"})
"""Expensive elementwise operations, which are not computed twice."""

INSIDE = frozenset(
    {"gather", "scatter-add", "scatter_add"}
    | {"reduce_window", "reduce_window_max", "reduce_window_sum"}
)
"""Operations, other than elementwise ones, into which the producers of their operands are fused."""


class Written:
    """Which values of a program are in memory.

    Args:
        program: the program of one device.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from axon_dist.planner.device import liveness_program
        >>> from axon_dist.planner.placement import unsplit
        >>> program = jax.make_jaxpr(lambda x: jnp.sin(x) * 2)(jnp.ones((4, 4)))
        >>> liveness = liveness_program(program, [unsplit(2)], {}, "cuda")
        >>> [(node.name, Written(liveness).runs(node)) for node in liveness.nodes]
        [('sin', False), ('mul', True)]
    """

    def __init__(self, program: LivenessProgram):
        self.program = program
        self.readers: dict[int, list[Node]] = defaultdict(list)
        for node in program.nodes:
            for buffer in set(node.reads):
                self.readers[buffer].append(node)
        self.outputs = {buffer for buffer in program.outputs if buffer >= 0}
        self.buffers: set[int] = set()
        self._made_of = {buffer: frozenset([buffer]) for buffer in program.inputs}
        for node in program.nodes:
            self._place(node)

    def sources(self, buffer: int) -> frozenset[int]:
        """Returns the values in memory behind a buffer: itself, or those it is recomputed from."""
        if buffer in self.buffers:
            return frozenset([buffer])
        return self._made_of.get(buffer, frozenset([buffer]))

    def runs(self, node: Node) -> bool:
        """Whether a node runs by itself, rather than fused into its readers."""
        return node.kind not in ("fused", "barrier") or not self.buffers.isdisjoint(node.writes)

    def _place(self, node: Node) -> None:
        read = frozenset().union(*(self.sources(b) for b in node.reads if b >= 0))
        for buffer in node.writes:
            self._made_of[buffer] = read
            is_fused = node.kind == "fused" and not self._is_written(node, buffer, read)
            if node.kind != "barrier" and not is_fused:
                self.buffers.add(buffer)

    def _is_written(self, node: Node, buffer: int, sources: frozenset[int]) -> bool:
        if buffer in self.outputs:
            return True
        readers = self.readers[buffer]
        if not sources:
            # A constant is recomputed by each reader, unless a reader overwrites it.
            return any(buffer in overwritten(reader) for reader in readers)
        # Products, loops and other unfused operations read their operands from memory.
        outside = any(
            one.kind not in ("fused", "reduction") and one.name not in INSIDE for one in readers
        )
        if outside or (node.name in DEAR and len(readers) > 1):
            return True
        made_of = sum(self.program.sizes[source] for source in sources)
        is_less = made_of > 1.5 * self.program.sizes[buffer] and len(sources) > 1
        return len(readers) > 1 and is_less


def overwritten(node: Node) -> tuple[int, ...]:
    """Returns the buffers that a node overwrites: an update's operand, or a loop's carry."""
    return node.reads[:1] if node.name in IN_PLACE else carried(node)


def carried(node: Node) -> tuple[int, ...]:
    """Returns the buffers of a loop's initial carry."""
    return node.reads[node.num_consts : node.num_consts + node.num_carry]


Chain: TypeAlias = frozenset[int]
"""Buffers that use the same memory one after another."""

ReusedOperands: TypeAlias = Mapping[int, tuple[int, tuple[Chain, ...]]]
"""The number of a result -> the number of an operand, and per body the buffers between them."""


def overwrites(program: LivenessProgram) -> list[Mapping[int, Chain]]:
    """Finds the inputs whose memory each output of a program may reuse.

    XLA updates an operand in place where nothing else reads it. A result of a loop or a conditional
    shares the memory of the operand that it replaces.

    Args:
        program: the program of a loop's iteration, or of a branch.

    Returns:
        For each output, the numbers of such inputs, each with the buffers between.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from axon_dist.planner.device import liveness_program
        >>> from axon_dist.planner.placement import unsplit
        >>> x = jnp.ones((4, 4))
        >>> program = jax.make_jaxpr(lambda x, y: (x + y @ y, x @ y))(x, x)
        >>> liveness = liveness_program(program, [unsplit(2)] * 2, {}, "cuda")
        >>> [list(one) for one in overwrites(liveness)]
        [[0], []]
    """
    made = {b: node for node in program.nodes for b in node.writes}
    places = {buffer: place for place, buffer in enumerate(program.inputs)}
    known: dict[int, dict[int, Chain]] = {}

    def back(buffer: int) -> dict[int, Chain]:
        if buffer not in known:
            node = made.get(buffer)
            if node is None:
                known[buffer] = {places[buffer]: frozenset()} if buffer in places else {}
            else:
                known[buffer] = {
                    place: chain | {buffer}
                    for one in _under(node, buffer, program.sizes)
                    for place, chain in back(one).items()
                }
        return known[buffer]

    return [back(buffer) if buffer >= 0 else {} for buffer in program.outputs]


def reused_operands(node: Node) -> ReusedOperands:
    """Finds the results of a loop or a conditional that reuse the memory of an operand.

    Args:
        node: a node with bodies.

    Returns:
        The number of each such result -> the number of its operand, and for each body the buffers
        between the two.
    """
    reused: dict[int, tuple[int, tuple[Chain, ...]]] = {}
    if not node.bodies:
        return reused
    each = [overwrites(body) for body in node.bodies]
    used: set[int] = set()
    for place in range(len(node.writes)):
        ways = [one[place] for one in each]
        if node.num_carry:
            wanted = [node.num_consts + place] if place < node.num_carry else []
        else:
            wanted = sorted(set(ways[0]) - used)
        for operand in wanted:
            if all(operand in way for way in ways):
                used.add(operand)
                reused[place] = operand, tuple(way[operand] for way in ways)
                break
    return reused


def _under(node: Node, buffer: int, sizes: Sequence[int]) -> list[int]:
    """Returns the buffers that the result of a node may overwrite."""
    if node.kind == "barrier" or node.name in IN_PLACE:
        return [node.reads[0]]
    if node.name in ADDS:
        return [one for one in node.reads if one >= 0 and sizes[one] == sizes[buffer]]
    place = node.writes.index(buffer)
    reused = reused_operands(node)
    return [node.reads[operand] for at, (operand, _) in reused.items() if at == place]


MOVES = frozenset({"transpose", "rev", "concatenate", "pad"})
"""Fused operations that move elements to other places, so that they cannot run in place."""


def peak_of(program: LivenessProgram, in_place: Collection[int] = ()) -> int:
    """Returns the most bytes that are alive at once while a program runs.

    Args:
        program: the program of one device.
        in_place: positions of outputs that overwrite inputs.

    Returns:
        The peak, without inputs and the outputs that overwrite them.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from axon_dist.planner.placement import unsplit
        >>> from axon_dist.planner.device import liveness_program
        >>> x = jnp.ones((8, 8))
        >>> program = jax.make_jaxpr(lambda x: jnp.sum(jnp.tanh(x @ x) @ x))(x)
        >>> peak_of(liveness_program(program, [unsplit(2)], {}, "cpu"))  # two of 8 x 8
        512
    """
    return _Allocation(program, (program.outputs[place] for place in in_place)).peak()


class _Allocation:
    def __init__(self, program: LivenessProgram, free: Iterable[int] = ()):
        self.program = program
        self.free = {*free}
        self.written = Written(program)

    def peak(self) -> int:
        """Returns the most bytes alive at any node, in program order."""
        last = self._last_uses()
        ends: dict[int, list[int]] = defaultdict(list)
        for buffer, number in last.items():
            ends[number].append(buffer)
        alive = 0
        most = 0
        for number, node in enumerate(self.program.nodes):
            new = sum(self._bytes(b) for b in node.writes if b in self.written.buffers)
            dying = [b for b in ends[number] if b in self.written.buffers]
            reused_inside = reused_operands(node)
            inner = max(self._inner(node, reused_inside), default=0)
            reused = self._reused(node, dying, reused_inside)
            most = max(most, alive + new + inner - reused)
            alive += new - sum(self._bytes(buffer) for buffer in dying)
        return most

    def _bytes(self, buffer: int) -> int:
        return 0 if buffer in self.free else self.program.sizes[buffer]

    def _inner(self, node: Node, reused_inside: ReusedOperands) -> Iterable[int]:
        """Yields the peak of each body, without its inputs and the outputs that overwrite them."""
        for number, body in enumerate(node.bodies):
            free = (b for _, chains in reused_inside.values() for b in chains[number])
            yield _Allocation(body, free).peak() + node.ahead

    def _reused(self, node: Node, dying: list[int], reused_inside: ReusedOperands) -> int:
        """Returns the bytes of results that overwrite buffers that are read for the last time."""
        if node.num_carry:
            carries = zip(carried(node), node.writes[: node.num_carry], strict=True)
            return sum(
                self._bytes(b) for a, b in carries if a in dying and b in self.written.buffers
            )
        if node.bodies:
            reused = reused_inside.items()
            pairs = [(node.reads[operand], node.writes[at]) for at, (operand, _) in reused]
            return sum(self._bytes(b) for a, b in pairs if a in dying)
        if node.name in IN_PLACE:
            first = node.reads[0]
            return self._bytes(first) if first in dying else 0
        if node.kind == "fused" and node.name not in MOVES and node.writes:
            sizes = [self._bytes(b) for b in dying]
            num_bytes = self._bytes(node.writes[0]) if node.writes[0] in self.written.buffers else 0
            return num_bytes if num_bytes in sizes else 0
        return 0

    def _last_uses(self) -> dict[int, int]:
        """Returns, per buffer in memory, the number of the last node that reads it."""
        last: dict[int, int] = {}
        for number, node in enumerate(self.program.nodes):
            if not self.written.runs(node):
                continue
            last.update((buffer, number) for buffer in node.writes)
            for buffer in node.reads:
                for source in self.written.sources(buffer) if buffer >= 0 else ():
                    last[source] = number
        for buffer in self.written.outputs:
            for source in self.written.sources(buffer):
                last[source] = len(self.program.nodes)
        return last


CHAIN = frozenset({"product", "loop"})
"""The kinds of nodes on the critical path."""


def postponed(program: LivenessProgram, num_consts: int = 0, num_carry: int = 0) -> LivenessProgram:
    """Moves the products that no later product or loop needs to the end of a program.

    Args:
        program: a step, or an iteration of a loop.
        num_consts: how many of an iteration's inputs are the same in every iteration.
        num_carry: how many of the next inputs are carried; a node that only adds to one does not
            delay the next iteration.

    Returns:
        A program of the same nodes.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from axon_dist.planner.device import liveness_program
        >>> from axon_dist.planner.placement import unsplit
        >>> x = jnp.ones((4, 4))
        >>> program = jax.make_jaxpr(lambda x: (x @ x, jnp.tanh(x @ x.T) @ x))(x)
        >>> names = lambda liveness: [node.name for node in liveness.nodes]
        >>> liveness = liveness_program(program, [unsplit(2)], {}, "cpu")
        >>> names(liveness), names(postponed(liveness))[-2:]
        (['dot_general', 'dot_general', 'tanh', 'dot_general'], ['dot_general', 'dot_general'])
    """
    before = program.inputs[num_consts:]
    after = program.outputs[:num_carry]
    needed = {
        made
        for start, made in zip(before, after, strict=False)
        if made >= 0 and not is_running_sum(start, made, program.nodes)
    }
    ends: set[int] = set()
    for number in reversed(range(len(program.nodes))):
        node = program.nodes[number]
        is_needed = not needed.isdisjoint(node.writes)
        if node.kind == "product" and not is_needed:
            ends.add(number)
        if is_needed or node.kind in CHAIN:
            needed.update(node.reads)
    late: set[int] = set()
    first = []
    last = []
    for number, node in enumerate(program.nodes):
        if node.name == "scan":
            bodies = tuple(postponed(b, node.num_consts, node.num_carry) for b in node.bodies)
            node = dataclasses.replace(node, bodies=bodies, ahead=_ahead(node, *bodies))
        is_late = number in ends or not late.isdisjoint(node.reads)
        if is_late:
            late.update(node.writes)
        (last if is_late else first).append(node)
    return dataclasses.replace(program, nodes=_filled(first) + last)


def _filled(nodes: list[Node]) -> list[Node]:
    """Moves reductions that follow a loop, and do not depend on it, to before the loop.

    There they hide its transfers.

    An example are the argmax positions of a max-pool, which are only needed after later blocks.
    """
    ordered: list[Node] = []
    since: set[int] = set()
    place = None
    for node in nodes:
        if node.kind == "loop" and any(body.sends() for body in node.bodies):
            place = len(ordered)
            since = set(node.writes)
        elif place is not None and node.kind == "reduction" and since.isdisjoint(node.reads):
            ordered.insert(place, node)
            place += 1
            continue
        else:
            since.update(node.writes)
        ordered.append(node)
    return ordered


def _ahead(loop: Node, body: LivenessProgram) -> int:
    """Returns the bytes that an iteration prefetches: gathers that do not depend on its carry."""
    if loop.trips == 1:
        return 0
    dependent = set(body.inputs[loop.num_consts : loop.num_consts + loop.num_carry])
    total = 0
    for node in body.nodes:
        if node.kind == "barrier" or not dependent.isdisjoint(node.reads):
            dependent.update(node.writes)
        else:
            total += sum(sent.num_bytes for sent in node.sent if sent.kind == "all-gather")
    return total
