"""Counts the kernels of a traced program: the sizes of its products, and bytes moved by the others.

Compilers fuse operations; `liveness.Written` tells which values still go to memory. Such a value is
written once and read by every kernel that needs it. Kernels that read the same values count as one.
A loop on a GPU clears the stacks of its results, and copies each iteration's slice in and out.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator

from .liveness import Written
from .placement import IN_PLACE, LivenessProgram, Node, ProductDims

_TAKEN = frozenset({"gather", "dynamic_slice", "slice"})
"""Operations that read only as much of their first operand as they return."""

_STACK_WRITES, _STACK_READS = 3, 2
"""How often a loop passes over the stacks of its results, which are cleared, read and written; and
over the stacks that it reads, of which each iteration's slice is copied out."""


@dataclasses.dataclass
class KernelWork:
    """The work of one device's kernels in a step.

    Args:
        products: how often each product runs, by its sizes.
        unsized: FLOPs of products whose sizes are not known, such as convolutions.
        moved: bytes that all other kernels read and write.
        kernels: how many kernels run, including products.
    """

    products: Counter[ProductDims] = dataclasses.field(default_factory=Counter)
    unsized: float = 0.0
    moved: float = 0.0
    kernels: int = 0

    def add(self, other: KernelWork, times: int = 1) -> None:
        """Adds other work, `times` times."""
        for dims, count in other.products.items():
            self.products[dims] += times * count
        self.unsized += times * other.unsized
        self.moved += times * other.moved
        self.kernels += times * other.kernels


def kernel_work(program: LivenessProgram) -> KernelWork:
    """Counts the kernels of a program.

    Args:
        program: the program of one device.

    Returns:
        The work; a conditional counts the branch with the most FLOPs that is not rare.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from axon_dist.planner.device import liveness_program
        >>> from axon_dist.planner.placement import unsplit
        >>> program = jax.make_jaxpr(lambda x: jnp.sin(x @ x) * 2)(jnp.ones((4, 4)))
        >>> work = kernel_work(liveness_program(program, [unsplit(2)], {}, "cuda"))
        >>> work.kernels, work.moved  # the second reads and writes 4 x 4 numbers of 4 bytes
        (2, 128.0)
    """
    written = Written(program)
    total = KernelWork()
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
    """Groups the nodes that compilers fuse into one kernel.

    A node joins the kernel that makes its operands, unless it needs the result of a reduction in
    that kernel. Otherwise it joins a kernel that reads the same values.
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
    """Returns the bytes that one kernel reads (each value once) and writes for other kernels."""
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
    """Whether a kernel of other nodes reads a value that these nodes make."""
    todo = [buffer]
    seen = set()
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
    """Returns the bytes that a node reads of each value in memory; of a lookup table, the rows."""
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


_UNCLEAR = frozenset({"pallas_call", "ragged_dot_general"})
"""Products of which the program does not show what MFU counts: kernels that recompute scores, and
grouped products, which some platforms run for all groups."""


def useful_flops(program: LivenessProgram) -> float:
    """Returns the FLOPs that MFU counts, without recomputation; 0 if the program does not tell.

    The backward pass of fused attention recomputes the scores: it has five products, of which four
    count.

    Args:
        program: a loss and its derivative, with nothing recomputed and no position masked.
    """
    if any(node.name in _UNCLEAR and node.flops for node in _all_nodes(program)):
        return 0.0
    attention = [d for d in kernel_work(program).products.elements() if d.kind != "product"]
    forward = sum(d.flops for d in attention if d.kind == "forward")
    return program.flops - sum(d.flops for d in attention) + 3 * forward


def _all_nodes(program: LivenessProgram) -> Iterator[Node]:
    """Yields the nodes of a program and of its loops and branches."""
    for node in program.nodes:
        yield node
        for body in node.bodies:
            yield from _all_nodes(body)
