"""The kernels of a traced program: what its products multiply, and what the others move.

Compilers fuse; `liveness.Written` says which values are in memory all the same. A value that is
there is written once and read by every kernel that needs it. Kernels that read the same values are
one. A loop on a GPU clears the stacks of its results, and copies each iteration's share in and out.
"""

from __future__ import annotations

import dataclasses
from collections import Counter

from .liveness import Written
from .placement import IN_PLACE, LivenessProgram, Node, ProductDims

_TAKEN = frozenset({"gather", "dynamic_slice", "slice"})
"""Operations that read no more of their first operand than they return."""

_STACK_WRITES, _STACK_READS = 3, 2
"""How often memory passes over the stacks of a loop's results, which are cleared, read and written;
and over those that it reads, of which each iteration's share is copied out."""


@dataclasses.dataclass
class KernelWork:
    """What the kernels of a device do in a step.

    Args:
        products: how often each product runs, by its sizes.
        unsized: FLOPs of products whose sizes are not known, such as convolutions.
        moved: bytes that all other kernels read and write.
        kernels: how many kernels run, products among them.
    """

    products: Counter[ProductDims] = dataclasses.field(default_factory=Counter)
    unsized: float = 0.0
    moved: float = 0.0
    kernels: int = 0

    def add(self, other: KernelWork, times: int = 1) -> None:
        """Adds what runs so many times."""
        for dims, count in other.products.items():
            self.products[dims] += times * count
        self.unsized += times * other.unsized
        self.moved += times * other.moved
        self.kernels += times * other.kernels


def kernel_work(program: LivenessProgram) -> KernelWork:
    """Counts the kernels of a program.

    Args:
        program: of one device.

    Returns:
        Of conditionals the branch that multiplies most, the rare ones left out.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from axon_dist.planner.device import liveness_program
        >>> from axon_dist.planner.placement import unsplit
        >>> program = jax.make_jaxpr(lambda x: jnp.sin(x @ x) * 2)(jnp.ones((4, 4)))
        >>> work = kernel_work(liveness_program(program, [unsplit(2)], {}, "cuda"))
        >>> work.kernels, work.moved  # the second reads and writes 4 x 4 numbers of 4 bytes
        (2, 128.0)
    """
    written, total = Written(program), KernelWork()
    fused: list[Node] = []
    for node in program.nodes:
        if node.bodies:
            total.add(_looped(node, program.sizes))
        elif node.dims is not None or node.flops:
            _add_product(total, node)
        elif written.runs(node) and node.kind != "barrier" and not node.sent:
            if node.name in IN_PLACE:
                total.moved += 2 * program.sizes[node.reads[-1]]
                total.kernels += 1
            else:
                fused.append(node)
    for nodes in _grouped(written, fused):
        total.moved += _moved(written, nodes)
        total.kernels += 1
    return total


def _grouped(written: Written, nodes: list[Node]) -> list[list[Node]]:
    """The nodes that compilers join into one kernel.

    A node joins the kernel that makes what it reads, unless it waits for a reduction within, and
    else a kernel that reads the same values.
    """
    groups: list[list[Node]] = []
    maker: dict[int, int] = {}
    by_sources: dict[frozenset[int], int] = {}
    for node in nodes:
        sources = _sources(written, node)
        makers = [maker[source] for source in sources if source in maker]
        sums = {
            maker[b]
            for b in sources
            if b in maker
            and any(b in one.writes and one.kind == "reduction" for one in groups[maker[b]])
        }
        joins = [number for number in makers if number not in sums]
        number = max(joins, default=by_sources.get(sources, -1))
        if number < 0:
            number = len(groups)
            groups.append([])
        groups[number].append(node)
        by_sources[sources] = number
        maker.update((buffer, number) for buffer in node.writes if buffer in written.buffers)
    return groups


def _add_product(total: KernelWork, node: Node) -> None:
    total.kernels += 1
    if node.dims is None:
        total.unsized += node.flops
    else:
        total.products[node.dims] += 1


def _sources(written: Written, node: Node) -> frozenset[int]:
    return frozenset().union(*(written.sources(b) for b in node.reads if b >= 0))


def _moved(written: Written, nodes: list[Node]) -> float:
    """Bytes that one kernel reads, each value once, and writes where another reads it."""
    made = {b for node in nodes for b in node.writes if b in written.buffers}
    read: dict[int, int] = {}
    for node in nodes:
        for buffer, size in _read(written, node).items():
            if buffer not in made:
                read[buffer] = max(read.get(buffer, 0), size)
    own = set(map(id, nodes))
    kept = {b for b in made if b in written.outputs or _is_read(written, b, own)}
    return float(sum(read.values()) + sum(written.program.sizes[b] for b in kept))


def _is_read(written: Written, buffer: int, own: set[int]) -> bool:
    """Whether a kernel of other nodes needs a value that these make."""
    todo, seen = [buffer], set()
    while todo:
        now = todo.pop()
        for reader in written.readers[now]:
            if id(reader) in own or id(reader) in seen:
                continue
            seen.add(id(reader))
            if written.runs(reader):
                return True
            todo.extend(reader.writes)
    return False


def _read(written: Written, node: Node) -> dict[int, int]:
    """Bytes that a node reads of each value in memory: of a table that it looks up, the rows."""
    sizes = written.program.sizes
    found: dict[int, int] = {}
    for buffer in node.reads:
        for source in written.sources(buffer) if buffer >= 0 else ():
            found[source] = max(found.get(source, 0), sizes[source])
    if node.name in _TAKEN and node.writes:
        most = sizes[node.writes[0]]
        found = {source: min(size, most) for source, size in found.items()}
    return found


def _looped(node: Node, sizes: list[int]) -> KernelWork:
    total = KernelWork()
    each = [kernel_work(body) for body in node.bodies if not body.is_rare]
    if each:
        flops = [body.flops for body in node.bodies if not body.is_rare]
        total.add(each[flops.index(max(flops))], node.trips)
    if node.name == "scan" and node.trips > 1:
        made = sum(sizes[b] for b in node.writes[node.num_carry :])
        rows = node.reads[node.num_consts + node.num_carry :]
        given = sum(sizes[b] for b in rows if b >= 0)
        total.moved += _STACK_WRITES * made + _STACK_READS * given
        total.kernels += 2 * node.trips
    return total


def useful_flops(program: LivenessProgram) -> float:
    """The FLOPs that MFU counts: of attention the pairs that a causal mask leaves, none twice.

    The backward pass of fused attention forms the scores again: five products for the four that
    count.

    Args:
        program: of a loss and its derivative, nothing recomputed.
    """
    attention = [d for d in kernel_work(program).products.elements() if d.kind != "product"]
    forward = sum(d.flops * (0.5 if d.is_causal else 1.0) for d in attention if d.kind == "forward")
    return program.flops - sum(d.flops for d in attention) + 3 * forward
