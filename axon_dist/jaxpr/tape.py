"""A tape: the operations of one device, their bytes, products and sends; `device.py` writes it.

An elementwise operation costs nothing where it can run inside those that read it. Written out are
the results of products, reductions, gathers and loops; what a product or a loop reads; and a value
that several read and that is made of more bytes than its own. Everything else is computed again
from what is written out, wherever it is read, and so keeps that alive. These are the habits of
XLA:GPU; the other compilers are near enough for a ranking, and compiling says the rest.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

VIEWS = frozenset(
    {"reshape", "squeeze", "expand_dims", "stop_gradient", "pvary", "name", "reshard", "copy_p"}
    | {"bitcast_convert_type", "optimization_barrier", "sharding_constraint"}
)
"""Operations that move nothing; a transpose of a matrix is one for the product that reads it."""

PRODUCTS = frozenset({"dot_general", "conv_general_dilated", "pallas_call", "ragged_dot_general"})
"""Operations whose operands and results are in memory."""

ATTENTION = "dot_product_attention"
"""How the names of the primitives of fused attention begin."""

OTHERS = frozenset(
    {"gather", "scatter-add", "scatter_add", "scatter", "sort", "top_k", "fft", "cholesky"}
    | {"reduce_window", "reduce_window_max", "reduce_window_sum", "select_and_scatter_add"}
    | {"select_and_gather_add", "dynamic_update_slice", "cumsum", "cumlogsumexp", "cumprod"}
)
"""Operations whose results are in memory."""

LINEAR = frozenset(
    {"convert_element_type", "transpose", "reshape", "squeeze", "neg", "copy", "reduce_sum"}
    | {"slice", "pad", "name", "reduce_precision"}
)
"""Operations on one operand that may as well be done before ranks add up their parts of it."""

COLLECTIVES: Mapping[str, tuple[str, str]] = {
    "psum": ("all-reduce", "axes"),
    "psum_invariant": ("all-reduce", "axes"),
    "all_gather": ("all-gather", "axis_name"),
    "all_gather_invariant": ("all-gather", "axis_name"),
    "reduce_scatter": ("reduce-scatter", "axis_name"),
    "ppermute": ("collective-permute", "axis_name"),
    "all_to_all": ("all-to-all", "axis_name"),
}
"""What is sent where every rank runs a program of its own, and which parameter names the axes."""

SUMS = frozenset({"psum", "psum_invariant"})
"""Those of `COLLECTIVES` that give every rank the whole sum."""

SPREAD = frozenset({"broadcast_in_dim", "iota"})
"""Operations that read nothing of the size of what they make."""

IN_PLACE = frozenset({"scatter-add", "scatter_add", "scatter", "dynamic_update_slice"})
"""Operations that overwrite their first operand where nothing else reads it."""


@dataclasses.dataclass(frozen=True)
class Sent:
    """One collective.

    Args:
        kind: as the compiler calls it.
        axes: the mesh axes.
        num_bytes: of the whole: what an all-gather gives, what the others take.
    """

    kind: str
    axes: tuple[str, ...]
    num_bytes: int


@dataclasses.dataclass(eq=False)
class Node:
    """One operation on one device.

    Args:
        name: of the primitive.
        kind: `"fused"`, `"reduction"`, `"product"`, `"other"`, `"barrier"` or `"loop"`.
        reads: buffers.
        writes: buffers.
        flops: of its products.
        sent: collectives.
        bodies: what a loop runs in every turn; of a conditional all branches.
        trips: turns.
        num_consts: of the buffers that it reads, the first so many are the same in every turn.
        num_carry: the next so many are handed on from turn to turn.
        ahead: bytes that are there in every turn for the one after it.
    """

    name: str
    kind: str
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    flops: float = 0.0
    sent: tuple[Sent, ...] = ()
    bodies: tuple[Tape, ...] = ()
    trips: int = 1
    num_consts: int = 0
    num_carry: int = 0
    ahead: int = 0


@dataclasses.dataclass(eq=False)
class Tape:
    """A program of one device.

    Args:
        nodes: in the order of the program.
        sizes: bytes of each buffer.
        inputs: buffers that are there before.
        outputs: buffers that are there after.
    """

    nodes: list[Node]
    sizes: list[int]
    inputs: list[int]
    outputs: list[int]

    @property
    def flops(self) -> float:
        """Operations of all products; of branches the dearest."""
        return sum(
            node.flops + node.trips * max((body.flops for body in node.bodies), default=0.0)
            for node in self.nodes
        )

    def sends(self, times: int = 1) -> list[tuple[Sent, int]]:
        """Every collective, and how often it runs; of branches all."""
        found = [(sent, times) for node in self.nodes for sent in node.sent]
        for node in self.nodes:
            for body in node.bodies:
                found += body.sends(times * node.trips)
        return found


def live(tape: Tape, wanted: Any) -> Tape:
    """The part of a tape that some of its outputs need; inputs and outputs keep their places."""
    keep = set(wanted)
    needed = {buffer for place, buffer in enumerate(tape.outputs) if place in keep}
    nodes: list[Node] = []
    for node in reversed(tape.nodes):
        used = [place for place, buffer in enumerate(node.writes) if buffer in needed]
        if not used and not (node.sent and not node.writes):
            continue
        if node.bodies:
            node = _live_loop(node, set(used))
        needed.update(buffer for buffer in node.reads if buffer >= 0)
        nodes.append(node)
    outputs = [b if place in keep else -1 for place, b in enumerate(tape.outputs)]
    return dataclasses.replace(tape, nodes=nodes[::-1], outputs=outputs)


def _live_loop(node: Node, used: set[int]) -> Node:
    consts, carry = node.num_consts, node.num_carry
    while True:
        bodies = tuple(live(body, used) for body in node.bodies)
        read = {
            place
            for body in bodies
            for place, buffer in enumerate(body.inputs)
            if any(buffer in inner.reads for inner in body.nodes) or buffer in body.outputs
        }
        carried = {place - consts for place in read if consts <= place < consts + carry}
        if carried <= used:
            break
        used = used | carried
    kept = {place for place in read | {consts + p for p in used if p < carry}}
    reads = tuple(buffer if place in kept else -1 for place, buffer in enumerate(node.reads))
    writes = tuple(buffer if place in used else -1 for place, buffer in enumerate(node.writes))
    return dataclasses.replace(node, bodies=bodies, reads=reads, writes=writes)


def kind_of(name: str) -> str:
    """The kind of the node of a primitive that runs no program of its own."""
    if name in PRODUCTS or name.startswith(ATTENTION):
        return "product"
    if name in OTHERS or name in COLLECTIVES:
        return "other"
    return (
        "reduction"
        if name.startswith(("reduce_", "arg")) and name != "reduce_precision"
        else "fused"
    )


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
        >>> from axon_dist.jaxpr.device import tape_of
        >>> from axon_dist.jaxpr.placement import whole
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
